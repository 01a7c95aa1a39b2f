"""Ensembles of multi-label tasks: pooled log-odds, storage, batches of several tasks, and the evaluation."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression

from fitting import ASKED, TASKS, decoder_of, raises, random_injection
from i2cl import Example, I2CLClassifier, Injection, InjectionPool, Task, Template, make_methods
from i2cl.core.experts import EmbeddingsExpert, TfidfExpert, fit_regression
from i2cl.encoders import EmbeddingsConfig
from i2cl.experiments.evidence.fit_evaluation import FitRequest, plan_evaluation
from i2cl.experiments.evidence.multi_label import cross_fitted_probabilities, pair_log_probs
from i2cl.experiments.fitting import fit_task, require_supported
from i2cl.injections.ensemble import EnsembleConfig, WeightPrior, fit_ensemble
from i2cl.injections.temperature import with_temperature
from i2cl.storage.card import describe_llm_alone
from i2cl.storage.layout import CARD, DESCRIPTION, TENSORS
from plugin import WordsEncoder

TASK = Task("topics", ("world", "sport", "money"), Template("News: {text} ->{label}"), multi_label=True)
WORDS = ("foreign minister", "won the match", "shares fell")
SETS = [(), (0,), (1,), (2,), (0, 2), (0, 1), (1, 2), (0, 1, 2)] * 3
ROWS = tuple(
    Example.multi_label(f"{number} {' '.join(WORDS[one] for one in ids) or 'rain'}", ids)
    for number, ids in enumerate(SETS)
)
TEXTS = list(ASKED)
LLM_PRIOR = WeightPrior(0.25, 0.5)
ENCODER = EnsembleConfig(encoder="words")


def fitted(config=ENCODER, rows=ROWS, **fields):
    fields = {"scoring": "words", "thresholds": (0.5, 0.3, 0.7), "bias": (-1.0, 0.5, 0.0)} | fields
    injection = random_injection(decoder_of("llama"), TASK, 3, fields=fields)
    return fit_ensemble(injection, config, LLM_PRIOR, rows, "cpu")


@pytest.fixture
def injection(words_encoder):
    return fitted()


def test_pooled_log_odds_are_the_weighted_sum_of_the_members(injection):
    decoder = decoder_of("llama")
    alone = injection.llm_alone().log_probs(decoder, TEXTS).double().exp()
    encode = WordsEncoder().encode
    shown, asked = (encode(texts) for texts in ([row.text for row in ROWS], TEXTS))
    embeddings = np.stack(
        [
            LogisticRegression(C=10, class_weight="balanced", max_iter=10_000)
            .fit(shown, [label in row.ids for row in ROWS])
            .decision_function(asked)
            for label in range(3)
        ],
        1,
    )
    tfidf = TfidfExpert.fit(TASK, ROWS).scores(TEXTS)
    members = [alone.logit(), torch.from_numpy(embeddings), tfidf.double()]
    weights = (0.25, 0.8, 0.5)
    assert injection.head.members == ("llm", "embeddings", "tfidf")
    assert injection.head.expert_weights == pytest.approx(weights)
    odds = sum(weight * one for weight, one in zip(weights, members, strict=True))
    found = injection.log_probs(decoder, TEXTS)
    torch.testing.assert_close(found.double(), odds.sigmoid().log(), rtol=1e-3, atol=1e-4)
    rows = zip(odds.sigmoid().tolist(), injection.predict(decoder, TEXTS), strict=True)
    for probabilities, words in rows:
        expected = [
            word
            for word, one, least in zip(TASK.labels, probabilities, (0.5, 0.3, 0.7), strict=True)
            if one >= least
        ]
        assert list(words) == expected
    assert injection.log_probs(decoder, []).shape == (0, 3)


def test_tfidf_expert_has_one_regression_per_label_with_balanced_weights():
    expert = TfidfExpert.fit(TASK, ROWS[:13])
    for label in range(3):
        gold = [int(label in row.ids) for row in ROWS[:13]]
        share = {answer: 13 / 2 / gold.count(answer) for answer in (0, 1)}
        assert share[0] != share[1]
        rows = [Example(row.text, one, share[one]) for row, one in zip(ROWS, gold, strict=False)]
        no, yes = TfidfExpert.fit(TASKS[0], rows).scores(TEXTS).T
        torch.testing.assert_close(expert.scores(TEXTS)[:, label], yes - no, rtol=1e-4, atol=1e-4)


def test_sample_weights_count_like_repeated_rows(words_encoder):
    weighted = [*ROWS[:-1], Example.multi_label(ROWS[-1].text, ROWS[-1].ids, 2.0)]

    def weights_of(rows):
        return EmbeddingsExpert.fit(EmbeddingsConfig(encoder="words"), TASK, rows, "cpu").weights

    one, two = weights_of(weighted), weights_of([*ROWS, ROWS[-1]])
    torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(one, weights_of(ROWS), atol=1e-3)


@pytest.mark.parametrize("ids", [(1,), (0, 1)], ids=["none", "all"])
def test_label_on_no_or_every_demonstration_gets_no_weight(ids):
    rows = [Example.multi_label(text, ids) for text in "abc"]
    rows[1] = Example.multi_label("b", (*ids[:-1], 2))
    weights = fit_regression(np.eye(3), TASK, rows, 10.0)
    assert weights[0].tolist() == [0, 0, 0, 0]
    assert weights[1:].abs().min() > 0.01


def test_label_without_a_demonstration_leaves_the_llm_alone(words_encoder):
    assert fitted(rows=ROWS[:3]).ensemble is None


def test_temperature_divides_the_pooled_log_odds(injection):
    decoder = decoder_of("llama")
    plain = injection.log_probs(decoder, TEXTS).double().exp().logit()
    warm = with_temperature(injection, 3.0)
    found = warm.log_probs(decoder, TEXTS).double().exp().logit()
    torch.testing.assert_close(found, plain / 3, rtol=1e-3, atol=1e-4)
    assert warm.head.thresholds[0] == 0.5
    for one in (injection, injection.llm_alone()):
        assert with_temperature(one, 3.0).predict(decoder, TEXTS) == one.predict(decoder, TEXTS)
    assert with_temperature(injection, 0.001).head.thresholds == pytest.approx((0.5, 0, 1), abs=1e-9)
    cold = with_temperature(warm, 1.0)
    assert cold.head.thresholds == pytest.approx(injection.head.thresholds)


def test_saved_ensemble_gives_the_same_answers_in_mixed_batches(injection, tmp_path):
    decoder = decoder_of("llama")
    assert injection.llm_alone().head.thresholds == (0.5, 0.5, 0.5)
    injection.with_head(llm_thresholds=(0.2, 0.3, 0.4)).save_pretrained(tmp_path / "new")
    loaded = Injection.from_pretrained(tmp_path / "new")
    assert loaded.llm_alone().head.thresholds == (0.2, 0.3, 0.4)
    assert torch.equal(loaded.log_probs(decoder, TEXTS), injection.log_probs(decoder, TEXTS))
    card = " ".join((tmp_path / "new" / CARD).read_text(encoding="utf-8").split())
    assert (
        "log-odds of each label are multiplied by the weights llm 0.25, embeddings 0.80, tfidf 0.50" in card
    )
    assert "reaches its value in `thresholds`" in card
    tasks = {"topics": loaded, "plain": random_injection(decoder, TASKS[0], 3), "alone": loaded.llm_alone()}
    names = [*tasks] * 2
    for name, text, row in zip(
        names, TEXTS, InjectionPool(decoder, tasks).log_probs(TEXTS, names), strict=True
    ):
        torch.testing.assert_close(row, tasks[name].log_probs(decoder, [text])[0], atol=1e-5, rtol=1e-5)
    estimator = I2CLClassifier.from_pretrained(tmp_path / "new", model=decoder)
    assert estimator.experts == ["llm", "embeddings", "tfidf"]
    expected = injection.log_probs(decoder, TEXTS).double().exp().numpy()
    assert estimator.predict_proba(TEXTS) == pytest.approx(expected, abs=1e-6)
    assert np.array_equal(estimator.predict(TEXTS), expected >= [0.5, 0.3, 0.7])


def test_damaged_ensembles_are_refused(injection, tmp_path):
    injection.save_pretrained(tmp_path / "new")
    description = json.loads((tmp_path / "new" / DESCRIPTION).read_text(encoding="utf-8"))

    def load_with(**weights):
        changed = description["ensemble"] | {"weights": description["ensemble"]["weights"] | weights}
        text = json.dumps(description | {"ensemble": changed})
        (tmp_path / "new" / DESCRIPTION).write_text(text, encoding="utf-8")
        return Injection.from_pretrained(tmp_path / "new")

    raises("are not one per member, at least 0: fit it again", load_with, tfidf=-1.0)
    raises("unknown expert 'bert' in an ensemble: upgrade i2cl, or fit it again", load_with, bert=1.0)
    assert load_with().head.expert_weights == injection.head.expert_weights
    tensors = load_file(tmp_path / "new" / TENSORS)
    tensors["tfidf_weights"] = tensors["tfidf_weights"][:2].contiguous()
    save_file(tensors, tmp_path / "new" / TENSORS)
    raises("tfidf weights .* do not fit 3 labels: fit it again", load_with)


def test_artefact_without_an_ensemble_keeps_its_temperature(tmp_path):
    decoder = decoder_of("llama")
    alone = fitted(EnsembleConfig(experts="llm"), temperature=1.7)
    assert alone.ensemble is None
    alone.save_pretrained(tmp_path / "new")
    assert "ensemble" not in json.loads((tmp_path / "new" / DESCRIPTION).read_text(encoding="utf-8"))
    loaded = Injection.from_pretrained(tmp_path / "new")
    scores = loaded.scorer(decoder).scores(TEXTS, edit=loaded.edit()) + torch.tensor(loaded.label_bias)
    found = loaded.log_probs(decoder, TEXTS).exp()
    torch.testing.assert_close(found, (scores / 1.7).sigmoid(), rtol=1e-5, atol=1e-6)


def test_pairs_of_one_row_do_not_choose_its_weights():
    rng = np.random.default_rng(0)
    gold = rng.random((20, 3)) < 0.4
    members = [1 / (1 + np.exp(-rng.normal(size=(20, 3)))) for _ in range(2)]
    changed = gold.copy()
    changed[4] = ~gold[4]
    before, after = (
        cross_fitted_probabilities(pair_log_probs(members), one, [LLM_PRIOR] * 2) for one in (gold, changed)
    )
    assert np.array_equal(before[4], after[4])
    assert (before != after).any(1).sum() > 10


@pytest.mark.parametrize("folds", [0, 2], ids=["held-out rows", "cross-validation"])
def test_fit_chooses_the_weights_and_evaluates_the_ensemble(words_encoder, folds):
    (method,) = make_methods(["anchored"], {"steps": 2})
    decoder, shown = decoder_of("llama"), ROWS[:16] if not folds else ROWS
    task = replace(TASK, train=ROWS)
    plan = plan_evaluation(task, shown, folds=folds)
    assert (plan.folds, bool(plan.rows)) == (folds, True)
    request = FitRequest(method, ENCODER)
    result = fit_task(decoder, task, shown, request, plan)
    evaluation, scores = result.evaluation, result.evaluation["methods"]
    names = ["label_frequency", "zero_shot", "char_tfidf", "sentence_embeddings", "anchored", "ensemble"]
    assert list(scores) == names
    assert scores["ensemble"]["cached_bytes"] == sum(
        scores[name]["cached_bytes"] for name in ("anchored", "sentence_embeddings", "char_tfidf")
    )
    assert all(weight >= 0 for weight in result.head.expert_weights)
    assert result.head.expert_weights != pytest.approx((1 / 2.4, 0.8, 0.5))
    # the words tell the label, and the tiny model knows none
    assert scores["ensemble"]["micro_f1"] > scores["anchored"]["micro_f1"]
    assert result.head.expert_weights[1] > result.head.expert_weights[0]
    assert {"difference", "low", "high"} == evaluation["llm_gain"].keys()
    assert result.head.thresholds != (0.5,) * 3
    assert result.llm_alone().head.thresholds == result.head.llm_thresholds != result.head.thresholds
    alone = describe_llm_alone(result.description())
    micro_f1 = (
        f"micro-F1 {scores['anchored']['micro_f1']:.3f} instead of {scores['ensemble']['micro_f1']:.3f}"
    )
    assert alone == f"the LLM alone, without embeddings and tfidf: {micro_f1} on {len(plan.rows)} rows"


def test_fit_of_the_llm_alone_has_no_ensemble():
    (method,) = make_methods(["anchored"], {"steps": 1})
    task = replace(TASK, train=ROWS)
    request = FitRequest(method, EnsembleConfig(experts="llm"), threshold="0.5")
    result = fit_task(decoder_of("llama"), task, ROWS[:16], request, plan_evaluation(task, ROWS[:16]))
    assert result.ensemble is None
    assert list(result.evaluation["methods"]) == ["label_frequency", "zero_shot", "char_tfidf", "anchored"]
    assert result.evaluation["llm_gain"] == {}
    assert result.temperature != 1
    assert result.head.thresholds == (0.5,) * 3


@pytest.mark.parametrize("threshold", ["0.5", "f1"])
def test_threshold_of_a_single_label_task_is_refused(threshold):
    (method,) = make_methods(["anchored"])
    message = "--threshold is for multi-label tasks, and this one has one label per text: omit it"
    raises(message, require_supported, TASKS[0], FitRequest(method, threshold=threshold))


def test_missing_scores_of_text_experts_are_an_error(injection):
    with pytest.raises(ValueError, match="needs the scores of its text experts"):
        injection.head.log_probs(torch.zeros(1, 3))
