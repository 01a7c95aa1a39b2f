"""Compare experts on labelled files: accuracy, macro-F1, and the difference to the best expert.

    python benchmarks/real_files.py score smollm2 FOLDER -o scores
    python benchmarks/real_files.py table scores

``score`` reads every FOLDER/*.jsonl (keys text and label). For each seed it draws training and test rows,
fits every expert to the same training rows, and writes one .npz per file, seed and expert; existing ones are
not computed again. ``table`` pools the experts as `i2cl fit` does and prints all figures as Markdown, losses
first (docs/experiments/real_files.md).
"""

import argparse
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from i2cl import Decoder, Example, Predictor, Task, load_task
from i2cl.encoders import MINILM
from i2cl.experiments.draw import up_to
from i2cl.experiments.evaluation import fit_method, macro_f1
from i2cl.experiments.evidence.fit_evaluation import sample_rows
from i2cl.injections.ensemble import EXPERT_PRIORS, likely_weights
from i2cl.injections.temperature import MIN_LOG_PROB, log_softmax
from i2cl.methods import METHODS, Method
from i2cl.methods.anchored import Anchored
from i2cl.methods.cross_validation import cross_validate
from i2cl.methods.ensemble import llm_prior
from i2cl.models.label_tokens import ScoringWarning
from i2cl.storage.atomic import new_file
from i2cl.tasks import Examples
from i2cl.tasks.template import DEFAULT_TEMPLATE

MIN_PER_CLASS = 3  # training rows, so that every refit of a cross-validation knows each class
ROWS_PER_CLASS = 5  # training rows per class on average, within the following bounds
MIN_ROWS, MAX_ROWS = 12, 100
TEST_ROWS = 100


LogProbs = Float[np.ndarray, "rows labels"]

EXPERTS: Mapping[str, Method] = {
    "majority_class": METHODS["majority_class"](),
    "char_tfidf": METHODS["char_tfidf"](),
    "sentence_embeddings": METHODS["sentence_embeddings"].from_options({"encoder": MINILM}),
    "anchored": METHODS["anchored"](),
}
PRIORS = {
    "char_tfidf": EXPERT_PRIORS["tfidf"],
    "sentence_embeddings": EXPERT_PRIORS["embeddings"],
    "anchored": llm_prior(EXPERTS["anchored"]),
}
"""Of the weights of the ensemble's members: all experts but the majority class."""


@dataclass(frozen=True)
class Scored:
    """Log-probabilities of one expert on one draw.

    Attributes:
        train: positions of the training rows in the file.
        train_gold: their label indices.
        out_of_fold: their log-probabilities by refits without them.
        test: positions of the test rows in the file.
        test_gold: their label indices.
        log_probs: their log-probabilities.
        seconds: duration of the fit.
    """

    train: Int[np.ndarray, " train"]
    train_gold: Int[np.ndarray, " train"]
    out_of_fold: LogProbs
    test: Int[np.ndarray, " test"]
    test_gold: Int[np.ndarray, " test"]
    log_probs: LogProbs
    seconds: Float[np.ndarray, ""]

    @classmethod
    def load(cls, path: Path) -> "Scored":
        """Read a file that `save` wrote."""
        with np.load(path) as arrays:
            return cls(**arrays)

    def save(self, path: Path) -> None:
        """Write the arrays to a new .npz file, or nothing."""
        with new_file(path) as fresh:
            np.savez_compressed(fresh, **vars(self))


def read(path: Path) -> Task:
    """Read a file of labelled rows. Rows with the text of an earlier row are dropped."""
    task = load_task(path, template=DEFAULT_TEMPLATE)
    rows = {row.text: row for row in reversed(task.train)}
    return replace(task, train=tuple(reversed(rows.values())))


def draw(task: Task, seed: int) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Draw training and test rows without a common text.

    Training rows are `MIN_PER_CLASS` of every class, and others with the label frequencies of the file.
    Test rows have these frequencies too.
    """
    count = min(max(MIN_ROWS, ROWS_PER_CLASS * len(task.labels)), MAX_ROWS)
    train = up_to(task, MIN_PER_CLASS, seed)
    others = [row for row in task.train if row not in train]
    train += sample_rows(others, count - len(train), seed)
    return train, sample_rows([row for row in others if row not in train], TEST_ROWS, seed)


def score(decoder: Decoder, task: Task, method: Method, train: Examples, test: Examples, seed: int) -> Scored:
    """Fit an expert to the training rows, and score both kinds of rows."""
    task, rows = task.without_data(), {row: position for position, row in enumerate(task.train)}
    fitted = fit_method(decoder, task, method, train, seed)
    if isinstance(method, Anchored) and fitted.injection is not None:
        method = method.with_solver_of(fitted.injection)
    refits = cross_validate(task, train, partial(method.fit, decoder, task, seed=seed), seed=seed)
    return Scored(
        train=np.array([rows[row] for row in train]),
        train_gold=np.array([row.label for row in train]),
        out_of_fold=log_probs(refits, train),
        test=np.array([rows[row] for row in test]),
        test_gold=np.array([row.label for row in test]),
        log_probs=log_probs(fitted.predictor, test),
        seconds=np.array(fitted.seconds),
    )


def log_probs(predictor: Predictor, rows: Examples) -> LogProbs:
    """Return normalized log-probabilities of the labels."""
    return log_softmax(predictor.log_probs([row.text for row in rows]).double().numpy())


def score_missing(
    decoder: Decoder, files: Iterable[Path], experts: Iterable[str], seeds: int, output: Path
) -> None:
    """Score each file, expert and seed that has no .npz file yet."""
    output.mkdir(parents=True, exist_ok=True)
    for seed, path, expert in product(range(seeds), files, experts):
        target = output / f"{path.stem}-{seed}-{expert}.npz"
        if not target.exists():
            task = read(path)
            train, test = draw(task, seed)
            scored = score(decoder, task, EXPERTS[expert], train, test, seed)
            scored.save(target)
            accuracy, _ = accuracy_and_f1(scored.test_gold, scored.log_probs)
            print(f"{target.stem}: fit {scored.seconds:.1f} s, accuracy {accuracy:.1f} %", flush=True)


Scores = dict[str, list[dict[str, Scored]]]  # by file, the experts of each draw


def load_scores(folder: Path, names: Sequence[str] = tuple(EXPERTS)) -> Scores:
    """Read the draws that `score_missing` finished for all of the named experts."""
    draws: dict[tuple[str, str], dict[str, Scored]] = defaultdict(dict)
    for path in sorted(folder.glob("*.npz")):
        file, seed, expert = path.stem.rsplit("-", 2)
        draws[file, seed][expert] = Scored.load(path)
    scores: Scores = defaultdict(list)
    for (file, _), experts in draws.items():
        if experts.keys() >= set(names):
            scores[file].append({name: experts[name] for name in names})
    return scores


def ensemble(experts: Mapping[str, Scored]) -> tuple[LogProbs, tuple[float, ...]]:
    """Pool the experts of one draw. Return the log-probabilities of the test rows, and the weights."""
    members = [expert for name, expert in experts.items() if name in PRIORS]
    held_out = np.stack([member.out_of_fold for member in members])
    priors = [PRIORS[name] for name in experts if name in PRIORS]
    weights = likely_weights(held_out, members[0].train_gold, priors)
    each = np.maximum([member.log_probs for member in members], MIN_LOG_PROB)
    return log_softmax(np.tensordot(weights, each, 1)), weights


def accuracy_and_f1(gold: Int[np.ndarray, " rows"], log_probs: LogProbs) -> tuple[float, float]:
    """Return accuracy and macro-F1, in percent."""
    best = log_probs.argmax(1)
    return 100 * float((best == gold).mean()), 100 * macro_f1(gold, best, log_probs.shape[1])


def figures(experts: Mapping[str, Scored]) -> Float[np.ndarray, "methods 2"]:
    """Return accuracy and macro-F1 of every expert and of the ensemble on one draw, in percent."""
    gold = next(iter(experts.values())).test_gold
    each = [*(expert.log_probs for expert in experts.values()), ensemble(experts)[0]]
    return np.array([accuracy_and_f1(gold, log_probs) for log_probs in each])


def table(scores: Scores) -> str:
    """Return a Markdown table with a row per file, and one for the mean of the files.

    Cells are means over draws: accuracy, and macro-F1 in parentheses. ``difference`` is the ensemble minus
    the best expert other than the majority class, ``weights`` are those of the experts in the order of their
    columns. Files come in the order of the difference in accuracy, losses first.
    """
    names = list(next(iter(next(iter(scores.values())))))
    members = [column for column, name in enumerate(names) if name in PRIORS]
    means = {file: np.mean([figures(experts) for experts in draws], axis=0) for file, draws in scores.items()}
    rows = {file: np.vstack([mean, mean[-1] - mean[members].max(0)]) for file, mean in means.items()}
    lines = [["file", "classes", "rows", "draws", *names, "ensemble", "difference", "weights"]]
    lines += [["---", *["---:"] * (len(lines[0]) - 1)]]
    for file in sorted(rows, key=lambda file: rows[file][-1, 0]):
        first = scores[file][0][names[0]]
        sizes = [first.log_probs.shape[1], len(first.train), len(scores[file])]
        weights = np.mean([ensemble(experts)[1] for experts in scores[file]], axis=0)
        lines.append([file, *map(str, sizes), *_cells(rows[file]), ", ".join(f"{w:.1f}" for w in weights)])
    lines.append(["mean", "", "", "", *_cells(np.mean(list(rows.values()), axis=0)), ""])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Float[np.ndarray, "methods 2"]) -> list[str]:
    *values, (accuracy, f1) = row
    return [f"{a:.1f} ({b:.1f})" for a, b in values] + [f"{accuracy:+.1f} ({f1:+.1f})"]


def main() -> None:
    """Score files, or print the table of their scores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    scores = commands.add_parser("score", help="fit and score the experts on every file of a folder")
    scores.add_argument("model")
    scores.add_argument("folder", type=Path, help="with labelled rows in *.jsonl")
    scores.add_argument("-o", "--output", type=Path, required=True, help="folder for the scores")
    scores.add_argument("--dtype", help="such as bfloat16 (default: float32 on a CPU)")
    scores.add_argument("--files", help="names without suffix, separated by commas (default: all)")
    scores.add_argument("--seeds", type=int, default=2, help="draws per file (default: 2)")
    tables = commands.add_parser("table", help="print the accuracy and macro-F1 of scored files")
    tables.add_argument("scores", type=Path, help="folder that `score` wrote")
    for command in (scores, tables):
        command.add_argument(
            "--experts", default=",".join(EXPERTS), help="separated by commas (default: all)"
        )
    given = parser.parse_args()
    if given.command == "table":
        print(table(load_scores(given.scores, given.experts.split(","))))
        return
    names = given.files and given.files.split(",")
    files = [path for path in sorted(given.folder.glob("*.jsonl")) if not names or path.stem in names]
    warnings.simplefilter("ignore", ScoringWarning)
    decoder = Decoder.from_pretrained(given.model, dtype=given.dtype)
    score_missing(decoder, files, given.experts.split(","), given.seeds, given.output)


if __name__ == "__main__":
    main()
