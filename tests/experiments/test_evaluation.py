"""Scores, costs and summaries of runs."""

import json
import math
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from sklearn import metrics

from fitting import raises
from i2cl import Example
from i2cl.experiments.confidence import NAMES, confidence
from i2cl.experiments.evaluation import evaluate, macro_f1, summarize, sweep
from i2cl.methods import Cost, Method, make_methods
from i2cl.version import __version__


@dataclass(frozen=True)
class Told:
    """A predictor with fixed scores that records its queries."""

    best: tuple[int, ...] = (0,) * 40
    asked: list = field(default_factory=list)
    labels: int = 2
    cost: ClassVar[Cost] = Cost(trained=7, cached_values=11, cached_bytes=44)

    def log_probs(self, texts, progress=None):
        self.asked.append(tuple(texts))
        return torch.nn.functional.one_hot(torch.tensor(self.best[: len(texts)]), self.labels).float()


class Fake(Method):
    name: ClassVar[str] = "fake"
    summary: ClassVar[str] = "what it is told"

    def __init__(self, predictor=None):
        self.predictor, self.fitted = predictor or Told(), []

    def fit(self, decoder, task, demonstrations, seed):
        self.fitted.append((demonstrations, seed))
        return self.predictor


@pytest.mark.parametrize("classes", [2, 14])
def test_macro_f1_equals_scikit_learn(classes):
    gold, best = np.random.default_rng(0).integers(classes, size=(2, 60))
    gold[gold == 1] = 0  # a class without queries that may be predicted
    expected = metrics.f1_score(gold, best, average="macro", labels=range(classes), zero_division=0)
    assert macro_f1(gold, best, classes) == pytest.approx(expected)


def test_run_has_inputs_results_and_costs(decoder, task):
    method = Fake()
    record = evaluate(decoder, task, method, shots=2, seed=4, limit=6).record()
    assert method.fitted == [(task.sample(2, 4), 4)]
    assert (record["model"], record["task"], record["method"]) == ("tiny-llama", "films", "fake")
    assert (record["seed"], record["shots"], record["n"], record["accuracy"]) == (4, 2, 6, 0.5)
    assert (record["cached_values"], record["trainable_parameters"]) == (11, 7)
    assert min(record["fit_seconds"], record["predict_seconds"]) >= 0
    assert "predictions" not in record
    assert record["versions"]["i2cl"] == __version__
    assert (record["versions"]["device"], record["versions"]["dtype"]) == ("cpu", "float32")


def test_run_has_scores_and_calibration_metrics(decoder, task):
    (method,) = make_methods(["zero_shot"])
    run = evaluate(decoder, task, method, limit=6)
    texts = [query.text for query in task.queries(6)]
    expected = method.fit(decoder, task, (), 0).log_probs(texts).log_softmax(1).numpy()
    assert run.scores.shape == (6, 2)
    np.testing.assert_allclose(run.scores.array, expected, rtol=1e-3)
    value, record = run.confidence, run.record()
    assert value == confidence(run.scores.array, np.array(run.gold), np.array(run.predictions))
    assert value.log_loss == pytest.approx(-expected[np.arange(6), run.gold].mean(), rel=1e-2)
    assert {name: record[name] for name in NAMES} == asdict(value)
    assert "scores" not in record
    assert summarize([run, run])[0].confidence == value
    older = run.model_copy(update={"scores": None})
    assert older.confidence is None
    assert {older.record()[name] for name in NAMES} == {None}
    assert summarize([run, older])[0].confidence is None


def test_scores_of_a_wrong_shape_are_refused(decoder, task):
    wrong = Fake(Told(labels=3))
    raises(r"fake: log_probs returned scores of shape \(6, 3\)", evaluate, decoder, task, wrong, limit=6)


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_scores_that_are_not_log_probabilities_are_refused(decoder, task, value):
    wrong = SimpleNamespace(cost=Cost(), log_probs=lambda texts, _: torch.full((len(texts), 2), value))
    raises("^fake: log_probs returned NaN", evaluate, decoder, task, Fake(wrong), limit=6)


def test_scores_may_require_gradients(decoder, task):
    scores = torch.eye(2, requires_grad=True)[[1] * 6]
    predictor = SimpleNamespace(cost=Cost(), log_probs=lambda texts, _: scores)
    assert set(evaluate(decoder, task, Fake(predictor), limit=6).predictions) == {1}


def test_seeds_and_methods_get_the_same_queries(decoder, task):
    asked = []
    for seed in range(3):
        evaluate(decoder, task, Fake(Told(asked=asked)), shots=2, seed=seed, limit=7)
    assert (len(set(asked)), len(asked[0])) == (1, 7)
    (method,) = make_methods(["i2cl"], {"epochs": 2})
    runs = [evaluate(decoder, replace(task, shots=2), method, seed=1) for _ in range(2)]
    assert runs[0].predictions == runs[1].predictions
    assert runs[0].shots == 2


COUNTS = {"trainable_parameters", "cached_values", "cached_bytes", "held_out"}


def test_run_json_round_trip(decoder, task):
    run = evaluate(decoder, task, Fake(), shots=2)
    written = run.model_dump_json()
    assert set(json.loads(written)) >= COUNTS
    assert type(run).model_validate_json(written) == run
    others = evaluate(decoder, task, Fake(), demonstrations=[Example("new", 0), task.train[3]])
    assert others.demonstrations == (None, 3)
    raises("no test", evaluate, decoder, replace(task, test=()), Fake(), shots=2)


def test_summarize_means_and_sample_standard_deviation(decoder, task):
    measured = evaluate(decoder, task, Fake(), shots=2)

    def run(accuracy, *, method="i2cl", task="films", seed=0, seconds=1.0):
        names = {"method": method, "task": task, "seed": seed}
        scores = {"accuracy": accuracy, "macro_f1": accuracy / 2, "gold": (0,) * 10, "scores": None}
        seconds = {"fit_seconds": 2 * seconds, "predict_seconds": seconds}
        cost = {"cost": Cost(cached_values=128)}
        return measured.model_copy(update={**names, **scores, **seconds, **cost})

    runs = [run(0.5), run(0.9, method="noise"), run(0.7, seed=1, seconds=3.0), run(0.9, seed=2)]
    first, noise, other = summarize([*runs, run(1.0, task="x")])
    assert (first.task, first.method) == ("films", "i2cl")
    assert (first.seeds, first.n, first.cached_values) == (3, 10, 128)
    assert (first.accuracy, first.accuracy_sd, first.macro_f1) == pytest.approx((0.7, 0.2, 0.35))
    assert first.fit_seconds == pytest.approx(10 / 3)
    assert first.milliseconds_per_query == pytest.approx(1000 * (0.1 + 0.3 + 0.1) / 3)
    assert (noise.method, noise.seeds, noise.accuracy, noise.accuracy_sd) == ("noise", 1, 0.9, 0.0)
    assert (other.task, other.accuracy) == ("x", 1.0)
    assert summarize([]) == []


def test_sweep_fits_a_shared_method_once(decoder, task, monkeypatch):
    names = ["contextual_calibration", "zero_shot", "few_shot", "zero_shot+contextual_calibration"]
    methods = make_methods(names)
    fits = []
    fit = type(methods[2]).fit

    def counted(self, decoder, task, demonstrations, seed):
        fits.append(seed)
        return fit(self, decoder, task, demonstrations, seed)

    monkeypatch.setattr(type(methods[2]), "fit", counted)
    runs = sweep(lambda: decoder, [task], methods, [0, 1], shots=2, limit=6, workers=1)
    assert [(run.method, run.seed) for run in runs] == [(name, seed) for name in names for seed in (0, 1)]
    assert fits == [0, 1]
    for run, method in zip(runs, [one for one in methods for _ in (0, 1)], strict=True):
        assert run.predictions == evaluate(decoder, task, method, shots=2, seed=run.seed, limit=6).predictions


def test_sweep_raises_the_first_failure_unless_failures_are_received(decoder, task):
    methods = make_methods(["cepe", "zero_shot"])
    asked = {"shots": 2, "limit": 6, "workers": 1}
    raises("no cepe compressor", sweep, lambda: decoder, [task], methods, [0], **asked)
    failed = []
    runs = sweep(lambda: decoder, [task], methods, [0], on_failure=failed.append, **asked)
    assert ([run.method for run in runs], [run.method for run in failed]) == (["zero_shot"], ["cepe"])
