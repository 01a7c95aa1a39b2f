"""Cross-validation: assignment of rows to folds, and scores of held-out rows."""

from collections import Counter
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
import torch

from fitting import decoder_of, fit, raises
from i2cl import Example, Task, Template, make_methods
from i2cl.injections.temperature import likely_temperature
from i2cl.methods.cross_validation import (
    FOLDS,
    cross_validate,
    cross_validation_error,
    fold_rows,
    require_folds,
    single_text_labels,
)
from i2cl.methods.injecting import injection_predictor
from i2cl.methods.prompting import PromptPredictor


def rows(*labels):
    return tuple(Example(f"text {at}", label) for at, label in enumerate(labels))


def of(count):
    return Task("letters", tuple("abcdefg"[:count]), Template("{text} {label}"))


@pytest.mark.parametrize("folds", [2, 3, 5])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("counts", [(2, 2), (5, 5, 5), (2, 9, 3), (20, 2)])
def test_every_refit_has_all_labels_and_every_row_is_held_out_once(counts, folds, seed):
    shown = rows(*(label for label, count in enumerate(counts) for _ in range(count)))
    result = fold_rows(of(len(counts)), shown, folds, seed)
    assert sorted(row for fold in result for row in fold) == list(range(len(shown)))
    assert len(result) == min(folds, int(median(counts)))
    for fold in result:
        rest = Counter(shown[row].label for row in range(len(shown)) if row not in fold)
        assert len(rest) == len(counts)
        for label, count in enumerate(counts):
            assert count - rest[label] <= -(-count // len(result))  # spread as evenly as possible


@pytest.mark.parametrize("seed", range(3))
def test_only_text_of_a_label_is_in_no_fold(seed):
    shown = (*rows(0, 0, 0, 1, 1, 1, 2), Example("text 6", 2), Example("text 7", 0), Example("text 7", 3))
    result = fold_rows(of(4), shown, 3, seed)
    assert sorted(row for fold in result for row in fold) == list(range(6)), "'text 7' is all that 'd' has"
    assert len(result) == 3, "the median of the labels in folds, not of all"
    assert single_text_labels(shown) == {2, 3}


def test_row_with_the_only_text_of_one_of_its_labels_is_in_no_fold():
    labels = [(0,), (0, 1), (0,), (2,), (2,), ()]
    shown = [Example.multi_label(f"text {at}", one) for at, one in enumerate(labels)]
    result = fold_rows(replace(of(3), multi_label=True), shown)
    assert sorted(row for fold in result for row in fold) == [0, 2, 3, 4, 5]


def test_cross_validation_scores_only_texts_that_a_refit_has_not_seen(decoder, task):
    shown = (*rows(0, 0, 1, 1), Example("alone", 2))
    task, refits = replace(task, labels=(*task.labels, "rare"), train=(), test=()), []

    def refit(rest):
        refits.append(rest)
        return fit("zero_shot", decoder, task, rest)

    predictor = cross_validate(task, shown, refit, 2, rows=(*shown, Example("new", 2)))
    assert all(shown[-1] in rest and len(rest) == 3 for rest in refits)
    assert set(predictor.fold_of) == {"text 0", "text 1", "text 2", "text 3", "new"}
    with pytest.raises(KeyError):
        predictor.log_probs(["alone"])


@pytest.mark.parametrize("name", ["temperature", "ensemble"])
def test_wrappers_are_fitted_on_labels_with_two_texts(decoder, task, name):
    draws = [(*task.sample(shots), Example("alone", 2)) for shots in (1, 3)]
    task = replace(task, labels=(*task.labels, "rare"), test=())
    options = {"experts": "llm,tfidf"} if name == "ensemble" else {}
    typical, fitted = (fit(f"zero_shot+{name}", decoder, task, shown, **options) for shown in draws)
    if name == "ensemble":
        assert typical.weights != fitted.weights
    else:
        assert isinstance(typical, PromptPredictor)
        assert fitted.temperature != 1
    assert fitted.log_probs(["a text"]).shape == (1, 3)


def test_duplicates_share_a_fold_and_the_seed_shuffles_texts():
    shown = (*rows(0, 0, 1, 1), *rows(0, 0, 1, 1), Example("text 0", 1))
    for seed in range(5):
        result = fold_rows(of(2), shown, FOLDS, seed)
        where = [{shown[row].text for row in fold} for fold in result]
        assert sum(map(len, where)) == 4
    shown = rows(*[0, 1] * 6)
    assert fold_rows(of(2), shown, 3, 0) == fold_rows(of(2), shown, 3, 0) != fold_rows(of(2), shown, 3, 1)


@pytest.mark.parametrize(
    ("shown", "named"),
    [(rows(0, 1), "'a' or 'b'"), (rows(0, 0, 0, 1), "'b'"), ((*rows(0, 0, 1), *rows(0, 0, 1)), "'b'")],
)
def test_labels_with_a_single_text_are_refused(shown, named):
    why = cross_validation_error(of(2), shown)
    assert why == f"a refit would not know the label {named}: give two texts per label"
    raises("give two texts per label", fold_rows, of(2), shown)
    assert cross_validation_error(of(2), rows(0, 0, 1, 1)) == ""


@pytest.mark.parametrize("folds", [-1, 0, 1])
def test_fewer_than_two_folds_are_refused(folds):
    raises(f"folds={folds}: give 2 or more", require_folds, folds)


def test_scores_come_from_the_refit_without_the_text(decoder, task):
    (method,) = make_methods(["anchored"], {"steps": 1, "say_label": False})
    shown = task.sample(3, 0)
    shown = (*shown, shown[1])

    def refit(rest):
        return injection_predictor(method.fit_injection(decoder, task, rest, 0), decoder, task)

    result = cross_validate(task, shown, refit, 3, 4).log_probs([one.text for one in shown])
    for fold in fold_rows(task, shown, 3, 4):
        rest = tuple(one for row, one in enumerate(shown) if row not in fold)
        expected = refit(rest).log_probs([shown[row].text for row in fold])
        torch.testing.assert_close(result[fold], expected)


def test_temperature_uses_refits_and_keeps_predictions(decoder, task):
    shown = task.sample(3)
    (plain,), (warm,) = make_methods(["zero_shot"]), make_methods(["zero_shot+temperature"])
    texts = [row.text for row in task.test]
    before = plain.fit(decoder, task, shown, 0).log_probs(texts)
    predictor = warm.fit(decoder, task, shown, 0)
    after = predictor.log_probs(texts)
    assert torch.equal(before.argmax(-1), after.argmax(-1))
    gold = np.array([one.label for one in shown])
    own = plain.fit(decoder, task, shown, 0).log_probs([one.text for one in shown]).numpy()
    wanted = likely_temperature(own, gold, *plain.temperature_prior)  # zero-shot uses no rows
    assert predictor.temperature == pytest.approx(wanted, rel=1e-4)
    assert predictor.cost.cached_values == 1
    torch.testing.assert_close(after, (before / predictor.temperature).log_softmax(-1))


def test_temperature_is_not_fitted_with_one_example_per_class(decoder, task):
    shown = task.sample(1)
    texts = [row.text for row in task.test]
    names = ("few_shot+temperature", "few_shot")
    assert torch.equal(*(fit(name, decoder, task, shown).log_probs(texts) for name in names))


def test_empty_list_gives_no_scores():
    task, shown = of(2), rows(0, 1, 0, 1)
    predictor = cross_validate(task, shown, lambda rest: fit("zero_shot", decoder_of("llama"), task, rest))
    assert predictor.log_probs([]).shape == (0, 2)
