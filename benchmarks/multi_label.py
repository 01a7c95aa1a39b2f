"""Multi-label accuracy of `i2cl fit`, its baselines, SetFit and LoRA, one line of JSON per method and seed.

    python benchmarks/multi_label.py results.jsonl --data DIR/goemotions --dtype bfloat16
    python benchmarks/multi_label.py results.jsonl --data topics.csv --rows 150 --characters 500
    python benchmarks/multi_label.py results.jsonl --table

The data is the folder of GoEmotions, or a file with the columns ``text`` and ``labels``, joined by ``;``.
Every method gets the same training rows. Its answers for one half of the test rows use the thresholds with
the highest F1 on the other half, as `i2cl fit` chooses them; the mean average precision needs
no thresholds. Runs that the file already has are skipped, so a killed run continues. Seconds are CPU seconds,
which other work on the machine changes little: set ``OMP_NUM_THREADS=1``.

The method ``ensemble`` is what `i2cl fit` does by default. Its seconds include the evaluation, whose refits
choose the weights. It also writes the line of ``anchored``, which is its LLM alone. Two other designs can be
run, one_vs_rest and yes_no: see their functions.
"""

import argparse
import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch.nn.functional import binary_cross_entropy_with_logits

from i2cl import Decoder, Example, Injection, Task, Template, load_task
from i2cl.core.multi_label import frequency_bias, indicators
from i2cl.encoders import MINILM, embed, load_sentence_transformer
from i2cl.experiments.draw import up_to
from i2cl.experiments.evidence.fit_evaluation import FitObserver, FitRequest, plan_evaluation
from i2cl.experiments.evidence.multi_label import (
    FREQUENCY,
    ZERO_SHOT,
    Run,
    baselines,
    compare,
    decide,
    label_counts,
    score_answers,
)
from i2cl.experiments.fitting import fit_task
from i2cl.injections.ensemble import EnsembleConfig
from i2cl.methods.adapters import AdapterPredictor, adapted
from i2cl.methods.anchored import Anchored
from i2cl.methods.base import Cost
from i2cl.methods.classifiers import CharTfidf, SentenceEmbeddings, train_setfit
from i2cl.methods.cross_validation import FOLDS
from i2cl.methods.injecting import injection_predictor
from i2cl.methods.peft import LoRA, LoRASettings
from i2cl.models.batching import make_batch
from i2cl.models.scoring import LabelScorer, score
from i2cl.models.training import train
from i2cl.tasks import Examples
from i2cl.tasks.template import DEFAULT_TEMPLATE

METRICS = ("micro_f1", "macro_f1", "mean_average_precision", "exact_match")
COSTS = ("fit_seconds", "milliseconds_per_query")
LORA_EPOCHS = 20  # as in the comparison of single-label tasks; AdamW takes 35 for 107 examples
TIMED_QUERIES = 50  # of the comparison with a single-label query

Probabilities = Float[np.ndarray, "rows labels"]
Scorer = Callable[[Sequence[str]], Probabilities]  # computes the probability of each label of each text


class Setting(NamedTuple):
    """What a method is fitted to."""

    decoder: Decoder
    task: Task
    shown: Examples  # the training rows
    seed: int
    folds: int = FOLDS  # refits that choose the weights of an ensemble; 0 for typical weights

    @property
    def texts(self) -> list[str]:
        """Texts of the training rows."""
        return [row.text for row in self.shown]

    @property
    def gold(self) -> Float[np.ndarray, "rows labels"]:
        """Labels of the training rows, as zeros and ones."""
        return indicators(self.shown, len(self.task.labels)).astype(int)


class FittedEnsemble(NamedTuple):
    """A fitted ensemble, as a `Scorer`."""

    injection: Injection
    decoder: Decoder
    llm_seconds: float  # CPU seconds of the fit without the evaluation

    def __call__(self, texts: Sequence[str]) -> Probabilities:
        """Compute the probability of each label of each text."""
        return self.injection.log_probs(self.decoder, texts).double().exp().numpy()

    @property
    def alone(self) -> "FittedEnsemble":
        """The LLM alone."""
        return self._replace(injection=self.injection.llm_alone())


def ensemble(setting: Setting) -> FittedEnsemble:
    """Fit one injection and the text experts, with weights from a cross-validation: what `i2cl fit` does."""

    class Observer(FitObserver):
        seconds = 0.0

        def fitted(self, injection: Injection, seconds: float) -> None:  # noqa: ARG002
            self.seconds = seconds

    task, observer = replace(setting.task, train=setting.shown, test=()), Observer()
    plan = plan_evaluation(task, setting.shown, len(setting.shown) * bool(setting.folds), setting.folds)
    request = FitRequest(Anchored(), seed=setting.seed)
    clock = time.process_time
    injection = fit_task(setting.decoder, task, setting.shown, request, plan, observer, clock)
    return FittedEnsemble(injection, setting.decoder, observer.seconds)


def anchored(setting: Setting) -> Scorer:
    """Fit one injection with the logistic loss of each label: the LLM alone."""
    decoder, task = setting.decoder, setting.task
    injection = Anchored().fit_injection(decoder, task, setting.shown, setting.seed)
    predictor = injection_predictor(injection, decoder, task)
    return lambda texts: predictor.log_probs(texts).double().exp().numpy()


def one_vs_rest(setting: Setting) -> Scorer:
    """Fit one injection per label, each with its own vectors; a query takes one pass per label."""

    def fit(label: int) -> Scorer:
        labels = ("none", setting.task.labels[label])
        task = replace(setting.task.without_data(), labels=labels, multi_label=False)
        shown = [Example(row.text, int(label in row.ids)) for row in setting.shown]
        predictor = Anchored().fit(setting.decoder, task, shown, setting.seed)
        return lambda texts: predictor.log_probs(texts).double().softmax(-1)[:, 1:].numpy()

    scorers = [fit(label) for label in range(len(setting.task.labels))]
    return lambda texts: np.concatenate([scorer(texts) for scorer in scorers], 1)


def yes_no(setting: Setting) -> Scorer:
    """Fit one injection to pairs of a text and a label, answered by yes or no: one pass per label."""
    words = setting.task.labels
    task = Task("pairs", ("no", "yes"), Template("Text: {text}: {label}"))

    def queries(text: str) -> list[str]:
        return [f"{text}\n{word}, yes or no" for word in words]

    shown = [
        Example(query, int(label in row.ids))
        for row in setting.shown
        for label, query in enumerate(queries(row.text))
    ]
    predictor = Anchored().fit(setting.decoder, task, shown, setting.seed)

    def probabilities(texts: Sequence[str]) -> Probabilities:
        scores = predictor.log_probs([query for text in texts for query in queries(text)])
        return scores.double().softmax(-1)[:, 1].reshape(len(texts), len(words)).numpy()

    return probabilities


def setfit(setting: Setting) -> Scorer:
    """Fine-tune MiniLM with the defaults of setfit, and fit one logistic regression per label."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.multiclass import OneVsRestClassifier

    encoder = load_sentence_transformer(MINILM, str(setting.decoder.device))
    head = OneVsRestClassifier(LogisticRegression())
    gold = setting.gold.tolist()
    head = train_setfit(encoder, head, setting.texts, gold, setting.seed, "one-vs-rest")
    encoder.eval()
    return lambda texts: np.asarray(head.predict_proba(embed(encoder, texts)))


def lora(setting: Setting) -> Scorer:
    """Train LoRA with the loss, label scores and bias of `anchored`."""
    from peft import get_peft_model_state_dict

    decoder, task = setting.decoder, setting.task
    method = LoRA(LoRASettings(epochs=LORA_EPOCHS))
    config, training, gold = method.config(decoder), method.training, torch.from_numpy(setting.gold).float()
    with adapted(decoder, config, seed=setting.seed) as model:
        scorer = LabelScorer.for_fit(model, task)
        queries, labels = scorer.queries(setting.texts), scorer.labels
        bias = frequency_bias(score(model, queries, labels), gold)

        def loss(chosen: Sequence[int]) -> torch.Tensor:
            batch = make_batch([queries[row] for row in chosen], decoder.device)
            scores = labels.scores(model.forward(batch)[:, 0].float()) + bias
            return binary_cross_entropy_with_logits(scores, gold[chosen], reduction="sum") / len(chosen)

        parameters = [parameter for parameter in model.model.parameters() if parameter.requires_grad]
        batches = training.batches(len(queries), setting.seed)
        train(parameters, loss, batches, training, dtype=decoder.model.dtype)
        state = {name: one.detach().clone() for name, one in get_peft_model_state_dict(model.model).items()}
    predictor = AdapterPredictor(replace(scorer, decoder=decoder), config, state, Cost())
    return lambda texts: (predictor.log_probs(texts) + bias).double().sigmoid().numpy()


def baseline(name: str, setting: Setting) -> Scorer:
    """Fit a baseline of `i2cl fit`."""
    plan = plan_evaluation(setting.task, setting.shown, len(setting.task.test), 0, setting.seed)
    fits = baselines(setting.decoder, setting.task, plan, EnsembleConfig())
    predictor = fits[name](setting.shown)
    return lambda texts: predictor.log_probs(texts).double().exp().numpy()


METHODS: dict[str, Callable[[Setting], Scorer]] = {
    **{
        name: partial(baseline, name)
        for name in (FREQUENCY, ZERO_SHOT, SentenceEmbeddings.name, CharTfidf.name)
    },
    **{each.__name__: each for each in (ensemble, anchored, setfit, lora, one_vs_rest, yes_no)},
}
DEFAULT_METHODS = list(METHODS)[:-2]


def timed(work: Callable, *arguments: object) -> tuple[Any, float]:
    """Call a function; return its result and CPU seconds."""
    started = time.process_time()
    return work(*arguments), time.process_time() - started


def run(name: str, setting: Setting) -> dict[str, dict[str, object]]:
    """Fit a method and score it on the test rows; of an ensemble, also the LLM alone. Return both by name."""
    scorer, fit_seconds = timed(METHODS[name], setting)
    records = {name: evaluate(name, setting, scorer, fit_seconds)}
    if isinstance(scorer, FittedEnsemble):
        weights = scorer.injection.ensemble["weights"]
        records[name] |= {"weights": weights, "temperature": scorer.injection.temperature}
        alone = anchored.__name__
        records[alone] = evaluate(alone, setting, scorer.alone, scorer.llm_seconds)
    return records


def evaluate(name: str, setting: Setting, scorer: Scorer, fit_seconds: float) -> dict[str, object]:
    """Score a fitted method on the test rows."""
    rows = setting.task.test
    texts, gold = [row.text for row in rows], indicators(rows, len(setting.task.labels))
    probabilities, seconds = timed(scorer, texts)
    result = Run(probabilities, fit_seconds, 1000 * seconds / len(texts), 0)
    answers = decide(probabilities, gold, "f1")
    scores = score_answers(answers, gold, result)._asdict()
    record = {one: scores[one] for one in (*METRICS, *COSTS)}
    bounded = np.clip(np.where(gold, probabilities, 1 - probabilities), 1e-12, 1)
    record["log_loss"] = float(-np.log(bounded).mean())
    record["micro_f1_at_0.5"] = score_answers(probabilities >= 0.5, gold, result).micro_f1
    if name == "anchored":
        record["single_label_ratio"] = single_label_ratio(setting, scorer)
    return record | {"counts": label_counts(answers, gold).tolist()}


def single_label_ratio(setting: Setting, scorer: Scorer) -> float:
    """Return the time of a query, relative to that of the plain model in a single-label task."""
    texts = [row.text for row in setting.task.test][:TIMED_QUERIES]
    task = replace(setting.task.without_data(), multi_label=False)
    single = LabelScorer(setting.decoder, task, "words")
    rounds = [(timed(scorer, texts)[1], timed(single.scores, texts)[1]) for _ in range(2)]
    ours, plain = np.min(rounds, 0)
    return float(ours / plain)


def load(path: Path, count: int, rows: int, characters: int | None) -> Task:
    """Read a task with its most frequent labels, and draw its test rows.

    Other labels are dropped, and texts are cut to some characters, if given.
    """
    if path.is_dir():
        words = json.loads((path / "labels.json").read_text())
        train, test = (
            [Example.multi_label(row["text"], row["labels"]) for row in map(json.loads, lines)]
            for lines in ((path / f"{split}.jsonl").read_text().splitlines() for split in ("train", "test"))
        )
    else:
        task = load_task(path, template=DEFAULT_TEMPLATE, label_column="labels", label_separator=";")
        unique = list({row.text: row for row in task.train}.values())
        words, train, test = task.labels, unique, unique
    test = Random(0).sample(test, rows)
    texts = {row.text for row in test}
    train = [row for row in train if row.text not in texts]
    frequency = Counter(label for row in train for label in row.ids)
    place = {label: number for number, (label, _) in enumerate(frequency.most_common(count))}
    train, test = (
        tuple(
            Example.multi_label(row.text[:characters], [place[one] for one in row.ids if one in place])
            for row in part
        )
        for part in (train, test)
    )
    labels = tuple(words[label] for label in place)
    return Task(path.stem, labels, Template(DEFAULT_TEMPLATE), train, test, multi_label=True)


def main() -> None:
    """Run the missing methods and seeds, or print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON lines, one per method and seed")
    parser.add_argument("--data", type=Path, help="folder of GoEmotions, or a file")
    parser.add_argument("--model", default="smollm2", help="model of i2cl")
    parser.add_argument("--dtype", help="such as bfloat16 (default: float32 on a CPU)")
    parser.add_argument("--labels", type=int, default=28, help="most frequent labels to keep")
    parser.add_argument("--shots", type=int, default=5, help="examples per label")
    parser.add_argument("--characters", type=int, help="length to cut texts to (default: uncut)")
    parser.add_argument("--rows", type=int, default=500, help="test rows")
    parser.add_argument("--seeds", type=int, default=4, help="number of seeds")
    parser.add_argument("--folds", type=int, default=FOLDS, help="refits that choose an ensemble's weights")
    parser.add_argument("--methods", nargs="+", default=DEFAULT_METHODS, choices=METHODS, help="to run")
    parser.add_argument("--table", action="store_true", help="print the results and run nothing")
    given = parser.parse_args()
    lines = given.results.read_text().splitlines() if given.results.exists() else []
    records = [json.loads(line) for line in lines]
    if given.table:
        show(records)
        return
    if given.data is None:
        parser.error("--data is missing: give the folder of GoEmotions or a file")
    task, decoder = load(given.data, given.labels, given.rows, given.characters), None
    same = {"data": task.name, "model": given.model, "dtype": given.dtype or "float32"}
    same |= {"labels": len(task.labels), "shots": given.shots, "rows": given.rows}
    same |= {"characters": given.characters} if given.characters else {}

    def is_missing(key: dict) -> bool:
        return not any(key.items() <= record.items() for record in records)

    for name, seed in product(given.methods, range(given.seeds)):
        if not is_missing(same | {"method": name, "seed": seed}):
            continue
        decoder = decoder or Decoder.from_pretrained(given.model, dtype=given.dtype)
        shown = up_to(task, given.shots, seed)
        for method, result in run(name, Setting(decoder, task, shown, seed, given.folds)).items():
            key = same | {"method": method, "seed": seed}
            if is_missing(key):
                records.append(key | {"examples": len(shown)} | result)
                with given.results.open("a") as file:
                    file.write(json.dumps(records[-1]) + "\n")


def show(records: list[dict]) -> None:
    """Print the mean and the standard deviation over seeds of each metric in percent, and each cost."""
    groups = defaultdict(lambda: defaultdict(dict))
    for record in records:
        groups[record["data"], record["labels"]][record["method"]][record["seed"]] = record
    for (data, labels), methods in groups.items():
        print(f"\n{data}, {labels} labels\n\n| method | seeds |", " | ".join((*METRICS, *COSTS)), "|")
        for name, seeds in methods.items():
            values = {one: [record[one] for record in seeds.values()] for one in (*METRICS, *COSTS)}
            cells = [spread(100 * np.array(values[one])) for one in METRICS]
            cells += [f"{np.mean(values[one]):.0f}" for one in COSTS]
            print(f"| {name} | {len(seeds)} |", " | ".join(cells), "|")
        print()
        ours = "ensemble" if "ensemble" in methods else "anchored"
        for name in methods.keys() - {ours}:
            print(f"{ours} - {name}: {difference(methods[ours], methods[name])}")


def spread(values: Float[np.ndarray, " seeds"]) -> str:
    """Return the mean and the standard deviation."""
    return f"{values.mean():.1f}" + (f" ± {values.std(ddof=1):.1f}" if len(values) > 1 else "")


def difference(ours: dict[int, dict], theirs: dict[int, dict]) -> str:
    """Compare two methods on the seeds of both: micro-F1 with interval and p, and average precision."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return "no common seed"
    counts = [np.sum([one[seed]["counts"] for seed in seeds], 0) for one in (ours, theirs)]
    micro = compare(*counts)
    precisions = [[one[seed]["mean_average_precision"] for seed in seeds] for one in (ours, theirs)]
    low, gain, high = (100 * one for one in (micro.low, micro.difference, micro.high))
    return (
        f"{len(seeds)} seeds, micro-F1 {gain:+.1f} ({low:+.1f} to {high:+.1f}), p = {micro.p:.4f}; "
        f"mAP {spread(100 * np.subtract(*precisions))}"
    )


if __name__ == "__main__":
    main()
