"""Simulate labelling with gold labels: what `i2cl suggest` and `i2cl review` are worth.

    python benchmarks/active_learning.py choice minilm trec,sst2 -o choice.jsonl
    python benchmarks/active_learning.py noise minilm trec,sst2 -o noise.jsonl
    python benchmarks/active_learning.py table choice.jsonl

`choice` labels texts of a pool in batches: at random, typical ones (as `suggest` does), or
typical ones first, and after 20 labels those that a fit to the labels so far is uncertain about. It measures
the accuracy on test rows after each batch. `noise` flips 10 % of the labels of random rows, and measures how
many of them `review` finds, and the accuracy before and after these are corrected.

The model is ``minilm`` (logistic regression on sentence embeddings) or a decoder with anchored calibration,
which is slower and therefore gets fewer batches and texts (`Scale`). Appends a line of JSON per task and
seed; existing lines are not run again. The tasks need I2CL_DATA_DIR or the hub.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import numpy as np
from jaxtyping import Float
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold

from i2cl import Decoder, Example, Task, anchor, load_task
from i2cl.encoders import MINILM, EmbeddingsConfig, embed, frozen_encoder
from i2cl.injections.temperature import likely_temperature, normalised
from i2cl.labelling.label_issues import FOLDS, find_label_issues, label_margins, out_of_fold_log_probs
from i2cl.labelling.suggestion import Vectors, choose_typical
from i2cl.models.encoding import ScoringWarning
from tables import measure_missing

STRATEGIES = ("random", "typical", "uncertain")
VECTORS = Path("vectors")  # folder of embeddings, to resume without embedding again
FIRST = 20  # labels that are chosen without a fit
OVERSAMPLING = 3  # uncertain texts that are clustered, for each text to choose
NOISE = 0.1  # share of labels that are flipped
Probabilities = Float[np.ndarray, "texts labels"]
Predict = Callable[[Sequence[int], bool], Probabilities]  # of pool texts, or of test texts


@dataclass(frozen=True)
class Scale:
    """Size of a simulation.

    Attributes:
        labels: numbers of labels after which the accuracy is measured; the batches end there.
        pool: number of unlabelled texts.
        scored: number of them that a fit scores for each choice.
        test: number of test rows.
        noisy: numbers of labelled rows with noise.
    """

    labels: tuple[int, ...]
    pool: int
    scored: int
    test: int
    noisy: tuple[int, ...]


CHEAP = Scale((10, 20, 30, 40, 50, 60, 70, 80), pool=2000, scored=2000, test=600, noisy=(80, 200))
DEAR = Scale((10, 20, 40, 80), pool=2000, scored=400, test=150, noisy=(80,))


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
        if self.decoder is not None:
            decoder, task = self.decoder, replace(self.task, train=(), test=())
            injection = anchor(decoder, task, rows, seed=self.seed)

            def score(some: Sequence[int], test: bool) -> Probabilities:
                texts = [(self.test if test else self.rows)[at].text for at in some]
                return injection.log_probs(decoder, texts).exp().numpy()

            return score
        labels = [row.label for row in rows]
        if len(set(labels)) == 1:
            return lambda some, _: np.tile(np.eye(len(self.task.labels))[labels[0]], (len(some), 1))
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
    accuracies = {one: _label(simulation, one) for one in STRATEGIES}
    return {"labels": scale.labels, "accuracy": accuracies, "cpu_seconds": time.process_time() - started}


def _label(simulation: Simulation, strategy: str) -> list[float]:
    chosen: list[int] = []
    accuracies: list[float] = []
    for size in simulation.scale.labels:
        taken = set(chosen)
        rest = [at for at in range(len(simulation.rows)) if at not in taken]
        vectors, n = simulation.vectors, size - len(chosen)
        if strategy == "random":
            new = range(n)
        elif strategy == "typical" or size <= FIRST:
            new = choose_typical(vectors[rest], n, vectors[chosen], simulation.seed)
        else:
            rest = rest[: simulation.scale.scored]
            new = choose_uncertain(vectors[rest], predict(rest, False), n, simulation.seed)
        chosen += [rest[at] for at in new]
        predict = simulation.fit(chosen, [simulation.rows[at] for at in chosen])
        accuracies.append(round(simulation.accuracy(predict), 4))
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
    return np.exp(normalised(scores, likely_temperature(scores, labels, 1.0, 1.0)))


def show(path: Path) -> None:
    """Print the means over tasks and seeds, and over the seeds of each task, in percent."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    tasks = list(dict.fromkeys(record["task"] for record in records))
    print(f"{len(tasks)} tasks, {len(records)} runs")
    if "accuracy" in records[0]:
        sizes = records[0]["labels"]
        print("strategy", *sizes, *(f"{task}@40" for task in tasks), sep="\t")
        for strategy in STRATEGIES:
            curves = {
                task: np.mean([one["accuracy"][strategy] for one in records if one["task"] == task], 0)
                for task in tasks
            }
            means = np.mean(list(curves.values()), 0)
            at_40 = [curve[sizes.index(40)] for curve in curves.values()]
            print(strategy, *(f"{100 * value:.1f}" for value in (*means, *at_40)), sep="\t")
        slopes = np.array([np.diff(one["accuracy"]["typical"]) for one in records]) / np.diff(np.log(sizes))
        print(
            f"typical: gain over that of the logarithm of labels: {slopes.mean():.3f}, std {slopes.std():.3f}"
        )
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
        command.add_argument("-o", "--output", type=Path, required=True)
    commands.add_parser("table").add_argument("output", type=Path)
    given = parser.parse_args()
    if given.command == "table":
        show(given.output)
        return
    warnings.simplefilter("ignore", ScoringWarning)
    cheap = given.model == MINILM
    decoder, scale = (None, CHEAP) if cheap else (Decoder.from_pretrained(given.model), DEAR)
    measure = {"choice": choice, "noise": noise}[given.command]
    run = partial(measure, scale=scale, decoder=decoder)
    measure_missing(given.output, given.tasks.split(","), given.seeds, run)


if __name__ == "__main__":
    main()
