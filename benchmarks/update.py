"""Accuracy and seconds of `i2cl update` with a new label, beside a fit of all rows from scratch.

    python benchmarks/update.py results.jsonl DIR/trec --words Abbreviation,Entity,Description,Person,Location

The folder has train.jsonl and test.jsonl, whose labels are ids. The first labels but one are fitted, and
`i2cl update` adds the rows of the last one. One line of JSON per seed; seeds that the file has are skipped.
Seconds are CPU seconds of the whole command, including loading the model.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from random import Random
from resource import RUSAGE_CHILDREN, getrusage
from tempfile import TemporaryDirectory

Row = dict[str, object]


def run(*arguments: str | Path) -> float:
    """Run an i2cl command; return its CPU seconds."""
    before = getrusage(RUSAGE_CHILDREN)
    subprocess.run(
        [Path(sys.executable).with_name("i2cl"), *arguments], check=True, stdout=subprocess.DEVNULL
    )
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write(path: Path, rows: list[Row]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers(folder: Path, test: Path) -> list[str]:
    """Return the predicted label of each row."""
    output = folder / "answers.jsonl"
    run("predict", folder, test, "-o", output)
    return [json.loads(line)["label"] for line in output.read_text().splitlines()]


def measure(folder: Path, train: list[list[Row]], test: list[Row], model: list[str]) -> dict[str, object]:
    """Fit, update and fit from scratch."""
    *first, last = train
    old = [row for rows in first for row in rows]
    questions = write(folder / "test.jsonl", [{"text": row["text"]} for row in test])
    options = ["--shots", "all", "--evaluate", "0", "--experts", "llm", *model[1:]]

    def fit(name: str, rows: list[Row]) -> float:
        file = write(folder / f"{name}.jsonl", rows)
        return run("fit", model[0], file, "-o", folder / name, "--keep-examples", *options)

    seconds = {"first": fit("first", old), "scratch": fit("scratch", [*old, *last])}
    added = write(folder / "added.jsonl", last)
    seconds["update"] = run("update", folder / "first", added, "-o", folder / "updated", "--evaluate", "0")
    predicted = {name: answers(folder / name, questions) for name in ("scratch", "updated")}
    gold = [row["label"] for row in test]
    accuracy = {name: sum(map(str.__eq__, labels, gold)) / len(gold) for name, labels in predicted.items()}
    same = sum(map(str.__eq__, *predicted.values())) / len(gold)
    return {"seconds": seconds, "accuracy": accuracy, "same_answers": same}


def main() -> None:
    """Run the missing seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON lines, one per seed")
    parser.add_argument("data", type=Path, help="folder with train.jsonl and test.jsonl")
    parser.add_argument("--words", required=True, help="label words by id, separated by commas")
    parser.add_argument("--model", default="smollm2", help="model of i2cl")
    parser.add_argument("--dtype", default="auto", help="of the model")
    parser.add_argument("--labels", type=int, default=5, help="number of labels; the last one is added later")
    parser.add_argument("--shots", type=int, default=5, help="examples per label")
    parser.add_argument("--rows", type=int, default=200, help="test rows")
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds")
    given = parser.parse_args()
    words = given.words.split(",")[: given.labels]
    train, test = (
        [json.loads(line) for line in (given.data / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "test")
    )
    train, test = (
        [{"text": row["text"], "label": words[row["label"]]} for row in rows if row["label"] < given.labels]
        for rows in (train, test)
    )
    test = Random(0).sample(test, given.rows)
    lines = given.results.read_text().splitlines() if given.results.exists() else []
    done = {json.loads(line)["seed"] for line in lines}
    for seed in sorted(set(range(given.seeds)) - done):
        draw = Random(seed)
        drawn = [draw.sample([row for row in train if row["label"] == word], given.shots) for word in words]
        with TemporaryDirectory() as folder:
            result = measure(Path(folder), drawn, test, [given.model, "--dtype", given.dtype])
        record = {"data": given.data.name, "labels": given.labels, "shots": given.shots, "seed": seed}
        with given.results.open("a") as file:
            file.write(json.dumps(record | {"rows": given.rows} | result) + "\n")


if __name__ == "__main__":
    main()
