"""Fit a task to your own CSV file, save it, load it, and classify with it.

python examples/own_csv.py [MODEL]      # the bundled model does not know English; try smollm2
"""

import csv
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from i2cl import Decoder, Injection, anchor, load_task

ROWS = (
    ("I was charged twice this month", "billing"),
    ("Please refund my last order", "billing"),
    ("The invoice shows the wrong amount", "billing"),
    ("My parcel never came", "delivery"),
    ("The courier left it at the wrong house", "delivery"),
    ("When will my order arrive", "delivery"),
)


def main(model: str = "reference") -> None:
    """Fit on six rows, and classify two other texts."""
    with TemporaryDirectory() as folder:
        rows = Path(folder) / "tickets.csv"
        with rows.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "label"])
            writer.writerows(ROWS)

        decoder = Decoder.from_pretrained(model)
        task = load_task(rows, template="Ticket: {text}\nTopic: {label}")
        demonstrations = task.train
        injection = anchor(decoder, task, demonstrations)
        injection.save_pretrained(Path(folder) / "tickets")

        loaded = Injection.from_pretrained(Path(folder) / "tickets")
        loaded.require_base(decoder)  # raises for another model than the one it was fitted on
        texts = ["There is a payment that I do not know", "The package is two days late"]
        for text, label in zip(texts, loaded.predict(decoder, texts), strict=True):
            print(f"{label:10} {text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
