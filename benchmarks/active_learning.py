"""Simulate labelling with gold labels: what `i2cl suggest` and `i2cl review` are worth.

    python benchmarks/active_learning.py choice minilm trec,sst2 -o choice.jsonl
    python benchmarks/active_learning.py choice smollm2 trec,sst2 --seeds 2 --dtype bfloat16 -o decoder.jsonl
    python benchmarks/active_learning.py noise minilm trec,sst2 -o noise.jsonl
    python benchmarks/active_learning.py choice smollm2 trec,sst2 --labels 10,20,80 -o more.jsonl
    python benchmarks/active_learning.py choice smollm2 trec --labels 40 --strategies uncertain -o more.jsonl
    python benchmarks/active_learning.py table choice.jsonl more.jsonl

`choice` labels texts of a pool in batches of ten: at random, typical ones (as `suggest` does), or typical
ones first, and after 20 labels those that a fit to the labels so far is uncertain about. It measures the
accuracy on test rows. `noise` flips 10 % of the labels of random rows, and measures how many of them `review`
finds, and the accuracy before and after these are corrected.

The model is ``minilm`` (logistic regression on sentence embeddings) or a decoder with anchored calibration,
which is slower and is therefore measured less often (`Scale`). The typical texts are those of MiniLM for
both. Appends a line of JSON per task and seed; existing lines are not run again. The tasks need I2CL_DATA_DIR
or the hub.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import mean, stdev
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.stats import t
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold

from i2cl import Decoder, Example, Task, anchor, load_task
from i2cl.encoders import MINILM, EmbeddingsConfig, embed, frozen_encoder
from i2cl.injections.temperature import likely_temperature, log_softmax
from i2cl.labelling.label_issues import FOLDS, find_label_issues, label_margins, out_of_fold_log_probs
from i2cl.labelling.suggestion import Vectors, choose_typical
from i2cl.models.label_tokens import ScoringWarning
from tables import measure_missing

STRATEGIES = ("random", "typical", "uncertain")
VECTORS = Path("vectors")  # folder of embeddings, to resume without embedding again
BATCH = 10  # texts that are chosen at a time
FIRST = 20  # labels that are chosen without a fit
OVERSAMPLING = 3  # uncertain texts that are clustered, for each text to choose
NOISE = 0.1  # share of labels that are flipped
Probabilities = Float[np.ndarray, "texts labels"]
Predict = Callable[[Sequence[int], bool], Probabilities]  # of pool texts, or of test texts


@dataclass(frozen=True)
class Scale:
    """Size of a simulation.

    Attributes:
        labels: for each strategy, the numbers of labels with which the accuracy is measured.
        pool: number of unlabelled texts.
        test: number of test rows.
        noisy: numbers of labelled rows with noise.
    """

    labels: Mapping[str, Sequence[int]]
    pool: int
    test: int
    noisy: tuple[int, ...]


CHEAP = Scale(dict.fromkeys(STRATEGIES, range(10, 90, 10)), pool=2000, test=600, noisy=(80, 200))
DEAR = Scale({"random": (40, 60), "typical": (40,)}, pool=2000, test=200, noisy=(80,))


@dataclass(frozen=True)
class Simulation:
    """A task with its texts in the random order of a seed."""

    task: Task
    rows: tuple[Example, ...]
    test: tuple[Example, ...]
    vectors: Float[np.ndarray, "rows d"]
    test_vectors: Float[np.ndarray, "test d"]
    scale: Scale
    seed: int
    decoder: Decoder | None

    @classmethod
    def of(cls, name: str, scale: Scale, seed: int, decoder: Decoder | None) -> "Simulation":
        """Load a task, and shuffle its training rows."""
        task, vectors, test_vectors = embedded(name)
        order = np.random.default_rng(seed).permutation(len(task.train))[: scale.pool]
        rows = tuple(task.train[at] for at in order)
        kept, test = task.test[: scale.test], test_vectors[: scale.test]
        return cls(task, rows, kept, vectors[order], test, scale, seed, decoder)

    def fit(self, chosen: Sequence[int], rows: Sequence[Example]) -> Predict:
        """Fit to rows of the pool, given by their indices and with their labels."""
        labels = [row.label for row in rows]
        known = sorted(set(labels))  # labels without a text are left out, as `i2cl fit` does
        if len(known) == 1:
            return lambda some, _: np.tile(np.eye(len(self.task.labels))[labels[0]], (len(some), 1))
        if self.decoder is not None:
            decoder, words = self.decoder, tuple(self.task.labels[label] for label in known)
            task = replace(self.task, labels=words, train=(), test=())
            rows = [replace(row, label=known.index(row.label)) for row in rows]
            injection = anchor(decoder, task, rows, seed=self.seed)

            def score(some: Sequence[int], test: bool) -> Probabilities:
                texts = [(self.test if test else self.rows)[at].text for at in some]
                probabilities = np.zeros((len(some), len(self.task.labels)))
                probabilities[:, known] = injection.log_probs(decoder, texts).exp().numpy()
                return probabilities

            return score
        model = LogisticRegression(C=EmbeddingsConfig().embeddings_c, max_iter=10_000)
        model.fit(self.vectors[chosen], labels)

        def predict(some: Sequence[int], test: bool) -> Probabilities:
            probabilities = np.zeros((len(some), len(self.task.labels)))
            vectors = self.test_vectors if test else self.vectors
            probabilities[:, model.classes_] = model.predict_proba(vectors[some])
            return probabilities

        return predict

    def accuracy(self, predict: Predict) -> float:
        """Return the accuracy on the test rows."""
        gold = np.array([row.label for row in self.test])
        return float((predict(range(len(gold)), True).argmax(1) == gold).mean())


@cache
def embedded(name: str) -> tuple[Task, Float[np.ndarray, "rows d"], Float[np.ndarray, "test d"]]:
    """Load a task, and embed 2,000 training rows and 600 test rows. The embeddings are kept in `VECTORS`."""
    task = load_task(name)
    test = [task.test[at] for at in np.random.default_rng(12345).permutation(len(task.test))[: CHEAP.test]]
    task = replace(task, train=task.train[: CHEAP.pool], test=tuple(test))
    path = VECTORS / f"{name}.npz"
    if not path.is_file():
        VECTORS.mkdir(parents=True, exist_ok=True)
        encoder = frozen_encoder(MINILM, "cpu")
        train, held_out = (embed(encoder, [row.text for row in rows]) for rows in (task.train, task.test))
        np.savez(path, train=train, test=held_out)
    stored = np.load(path)
    return task, stored["train"], stored["test"]


def choice(name: str, seed: int, scale: Scale, decoder: Decoder | None) -> dict[str, Any]:
    """Return the accuracy of each strategy after each batch."""
    simulation = Simulation.of(name, scale, seed, decoder)
    started = time.process_time()
    accuracies = {one: _label(simulation, one, sizes) for one, sizes in scale.labels.items()}
    return {"accuracy": accuracies, "cpu_seconds": round(time.process_time() - started)}


def _label(simulation: Simulation, strategy: str, sizes: Sequence[int]) -> dict[int, float]:
    """Return the accuracy by number of labels."""
    chosen: list[int] = []
    accuracies: dict[int, float] = {}
    for size in range(BATCH, max(sizes) + 1, BATCH):
        taken = set(chosen)
        rest = [at for at in range(len(simulation.rows)) if at not in taken]
        vectors = simulation.vectors
        if strategy == "random":
            new = list(range(BATCH))
        elif strategy == "typical" or size <= FIRST:
            new = choose_typical(vectors[rest], BATCH, vectors[chosen], simulation.seed)
        else:
            new = choose_uncertain(vectors[rest], predict(rest, False), BATCH, simulation.seed)
        chosen += [rest[at] for at in new]
        if strategy == "uncertain" or size in sizes:
            predict = simulation.fit(chosen, [simulation.rows[at] for at in chosen])
        if size in sizes:
            accuracies[size] = round(simulation.accuracy(predict), 4)
    return accuracies


def choose_uncertain(vectors: Vectors, probabilities: Probabilities, n: int, seed: int) -> list[int]:
    """Choose uncertain candidates that differ from each other (Zhdanov 2019, https://arxiv.org/abs/1901.05954).

    Those with the smallest margins between the two most probable labels are clustered by k-means, and the one
    next to each centre is chosen.
    """
    top = np.sort(probabilities, axis=1)[:, -2:]
    uncertain = np.argsort(top[:, 1] - top[:, 0], kind="stable")[: n * OVERSAMPLING]
    distances = KMeans(n, n_init=1, random_state=seed).fit_transform(vectors[uncertain])
    order = [*dict.fromkeys([*distances.argmin(0).tolist(), *range(len(uncertain))])]
    return [int(at) for at in uncertain[order[:n]]]


def noise(name: str, seed: int, scale: Scale, decoder: Decoder | None) -> dict[str, Any]:
    """Return how well flipped labels are found, for each number of rows."""
    simulation = Simulation.of(name, scale, seed, decoder)
    return {str(count): _flip(simulation, count) for count in scale.noisy}


def _flip(simulation: Simulation, count: int) -> dict[str, float]:
    started, rng, chosen = time.process_time(), Random(simulation.seed), range(count)
    clean = simulation.rows[:count]
    flipped = set(rng.sample(chosen, round(NOISE * count)))
    others = range(1, len(simulation.task.labels))
    rows = [
        replace(row, label=(row.label + rng.choice(others)) % (len(others) + 1)) if at in flipped else row
        for at, row in enumerate(clean)
    ]
    labels = np.array([row.label for row in rows])
    if simulation.decoder is None:
        probabilities = _out_of_fold(simulation.vectors[:count], labels, simulation)
    else:
        task = replace(simulation.task, train=(), test=())
        log_probs = out_of_fold_log_probs(simulation.decoder, task, rows, seed=simulation.seed)
        probabilities = log_probs.double().softmax(-1).numpy()
    listed = set(np.flatnonzero(find_label_issues(probabilities, labels)).tolist())
    top = set(np.argsort(label_margins(probabilities, labels), kind="stable")[: len(flipped)].tolist())
    corrected = [clean[at] if at in listed else row for at, row in enumerate(rows)]
    accuracies = {
        name: simulation.accuracy(simulation.fit(chosen, some))
        for name, some in (("clean", clean), ("noisy", rows), ("corrected", corrected))
    }
    return accuracies | {
        "listed": len(listed) / count,
        "precision": len(listed & flipped) / max(1, len(listed)),
        "recall": len(listed & flipped) / len(flipped),
        "top": len(top & flipped) / len(flipped),
        "cpu_seconds": time.process_time() - started,
    }


def _out_of_fold(
    vectors: Float[np.ndarray, "rows d"], labels: np.ndarray, simulation: Simulation
) -> Probabilities:
    """Return calibrated probabilities of each row by logistic regression without its fold."""
    probabilities = np.full((len(labels), len(simulation.task.labels)), 1e-6)
    folds = KFold(FOLDS, shuffle=True, random_state=simulation.seed)
    for rest, held_out in folds.split(vectors):
        model = LogisticRegression(C=EmbeddingsConfig().embeddings_c, max_iter=10_000)
        model.fit(vectors[rest], labels[rest])
        probabilities[np.ix_(held_out, model.classes_)] += model.predict_proba(vectors[held_out])
    scores = np.log(probabilities)
    return np.exp(log_softmax(scores, likely_temperature(scores, labels, 1.0, 1.0)))


def show_choice(records: Sequence[dict[str, Any]], tasks: Sequence[str]) -> None:
    """Print the accuracy by strategy and number of labels, in percent, and how it differs from random texts.

    The 95 % intervals of the differences are t-intervals over the tasks.
    """

    def mean_of(task: str, strategy: str, size: str) -> float:
        curves = [one["accuracy"][strategy] for one in records if one["task"] == task]
        return 100 * mean(curve[size] for curve in curves if size in curve)

    every = [one["accuracy"] for one in records]
    curves = {  # sizes that every task has
        strategy: [
            size
            for size in every[0][strategy]
            if {one["task"] for one in records if size in one["accuracy"][strategy]} == {*tasks}
        ]
        for strategy in every[0]
    }
    print("strategy", "labels", "mean", *tasks, sep="\t")
    for strategy, curve in curves.items():
        for size in curve:
            means = [mean_of(task, strategy, size) for task in tasks]
            print(strategy, size, *(f"{value:.1f}" for value in (mean(means), *means)), sep="\t")
    for strategy, sizes in curves.items():
        for size, other in product(sizes, curves["random"]):
            if strategy != "random" and int(size) <= int(other) <= int(size) + 2 * BATCH:
                gaps = [mean_of(task, strategy, size) - mean_of(task, "random", other) for task in tasks]
                margin = t.ppf(0.975, len(gaps) - 1) * stdev(gaps) / len(gaps) ** 0.5 if gaps[1:] else np.nan
                print(f"{strategy} {size} - random {other}: {mean(gaps):+.1f} +- {margin:.1f} points")
    if len(curves["typical"]) > 2 and all(len(one["typical"]) == len(curves["typical"]) for one in every):
        show_forecast(
            np.array([[*one["accuracy"]["typical"].values()] for one in records]), [*curves["typical"]]
        )


def show_forecast(curves: Float[np.ndarray, "runs sizes"], sizes: Sequence[str]) -> None:
    """Print how much ten more labels change the accuracy, and how well that is forecast."""
    logs = np.log([int(size) for size in sizes])
    changes, steps = np.diff(curves), np.diff(logs)
    slopes = changes / steps
    print(f"typical: change / change of log(labels): {slopes.mean():.3f}, std {slopes.std():.3f}")
    later = range(2, len(sizes))  # steps from there on have a curve to extrapolate
    own = [[np.polyfit(logs[:at], curve[:at], 1)[0] * steps[at - 1] for at in later] for curve in curves]
    for name, forecast in (("mean slope", slopes.mean() * steps[1:]), ("own curve", np.array(own))):
        error = 100 * np.abs(changes[:, 1:] - forecast).mean()
        print(f"mean absolute error of the next step, forecast from the {name}: {error:.1f} points")


def read(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Read the records of some files; accuracies of one task and seed are joined."""
    records: dict[tuple[str, int], dict[str, Any]] = {}
    for path in paths:
        for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            known = records.setdefault((record["task"], record["seed"]), record)
            for strategy, curve in record.get("accuracy", {}).items():
                joined = known["accuracy"].get(strategy, {}) | curve
                known["accuracy"][strategy] = dict(sorted(joined.items(), key=lambda pair: int(pair[0])))
    return list(records.values())


def show(paths: Sequence[Path]) -> None:
    """Print the means over tasks and seeds, and over the seeds of each task, in percent."""
    records = read(paths)
    tasks = list(dict.fromkeys(record["task"] for record in records))
    print(f"{len(tasks)} tasks, {len(records)} runs")
    if "accuracy" in records[0]:
        show_choice(records, tasks)
        return
    sizes = [name for name in records[0] if name.isdigit()]
    names = list(records[0][sizes[0]])
    print("rows", "task", *names, sep="\t")
    for size in sizes:
        for task in (*tasks, "mean"):
            some = [record[size] for record in records if task in {record["task"], "mean"}]
            print(size, task, *(f"{100 * mean(one[name] for one in some):.1f}" for name in names), sep="\t")


def main() -> None:
    """Run what is missing in the file, or print its means."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("choice", "noise"):
        command = commands.add_parser(name)
        command.add_argument("model", help="minilm, or a decoder")
        command.add_argument("tasks", help="separated by commas")
        command.add_argument("--seeds", type=int, default=4)
        command.add_argument("--dtype", help="of a decoder, such as bfloat16")
        command.add_argument("-o", "--output", type=Path, required=True)
        if name == "choice":
            command.add_argument("--labels", help="numbers of labels")
            command.add_argument("--strategies", default="random,typical", help="with --labels")
    commands.add_parser("table").add_argument("output", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "table":
        show(given.output)
        return
    warnings.simplefilter("ignore", ScoringWarning)
    cheap = given.model == MINILM
    decoder = None if cheap else Decoder.from_pretrained(given.model, dtype=given.dtype)
    scale = CHEAP if cheap else DEAR
    if given.command == "choice" and given.labels:
        sizes = tuple(map(int, given.labels.split(",")))
        scale = replace(scale, labels=dict.fromkeys(given.strategies.split(","), sizes))
    measure = {"choice": choice, "noise": noise}[given.command]
    run = partial(measure, scale=scale, decoder=decoder)
    measure_missing(given.output, given.tasks.split(","), given.seeds, run)


if __name__ == "__main__":
    main()
