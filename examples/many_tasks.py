"""Serve many tasks with one model, and predict a batch in which every row has a different task.

python examples/many_tasks.py [MODEL]
"""

import sys

from i2cl import Decoder, InjectionPool, anchor, load_task

TASKS = ("mood-colour-1", "place-colour-2", "weather-letter-1", "job-letter-2")


def main(model: str = "reference") -> None:
    """Fit four tasks, classify the same text with each, and print the memory per task."""
    decoder = Decoder.from_pretrained(model)
    pool = InjectionPool(decoder, {})
    for name in TASKS:
        task = load_task(name)
        demonstrations = task.sample(shots=5, seed=0)
        injection = anchor(decoder, task, demonstrations)
        pool.load(name, injection)  # safe while other threads predict
    text = "outside the lagoon that lonely baker stood despite the glare"
    for name, label in zip(TASKS, pool.predict([text] * len(TASKS), list(TASKS)), strict=True):
        print(f"{name:18} {label}")
    numbers = injection.context.numel()
    print(f"each task stores {numbers:,} numbers, {4 * numbers:,} bytes in float32")


if __name__ == "__main__":
    main(*sys.argv[1:])
