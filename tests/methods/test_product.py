"""Two methods' probabilities, multiplied."""

from dataclasses import replace

import pytest
import torch

from fitting import SHOWN, TEXTS, fit, made
from i2cl import Example, make_methods
from i2cl.methods.product import Product

pytest.importorskip("sklearn")


@pytest.mark.parametrize(
    ("below", "typical"),
    [("zero_shot", 1.5), ("anchored", 2.4), ("zero_shot+label_prior", 1.5), ("zero_shot+temperature", 1.0)],
)
def test_it_adds_log_probabilities_and_costs(below, typical, films, demonstrations):
    task = replace(films, train=tuple(Example(text, 0) for text in TEXTS))
    options = {"unlabelled": 2} if "prior" in below else {}
    given, seen = (made("llama"), task, demonstrations), []
    first, second = fit(below, *given, **options), fit("tfidf", *given)
    both = fit(f"{below}+tfidf", *given, **options)
    tempered = (first.scores(TEXTS).double() / typical).log_softmax(-1)
    expected = (tempered.exp() * second.scores(TEXTS).exp()).log()
    result = both.scores(TEXTS, seen.append)
    torch.testing.assert_close(result, expected.log_softmax(-1), atol=1e-5, rtol=1e-5)
    assert sum(seen) == len(TEXTS)
    assert both.cost == first.cost + second.cost


def test_what_is_as_sure_as_right_counts_as_it_is():
    for name in ("anchored+tfidf", "anchored+temperature", "anchored+temperature+tfidf"):
        assert make_methods([name])[0].temperatures == (1.0, 0.5)


def test_names_stack_and_each_method_takes_its_own_options():
    (result,) = make_methods(["i2cl+label_prior+tfidf+temperature"], {"epochs": 3, "refits": 2})
    assert result.called == "i2cl+label_prior+tfidf+temperature"
    assert isinstance(result.below, Product)
    assert result.below.below.below.calibration.epochs == 3
    assert result.config.refits == 2
    (result,) = make_methods(["zero_shot+noise"], {}, {"epochs": 7})
    assert result.other.calibration.epochs == 7


def test_a_label_that_one_of_them_has_not_seen_is_no_answer(films, demonstrations):
    three = replace(films, labels=("positive", "neutral", "negative"), train=(), test=())
    shown = [Example(text, 2 * label) for text, label in SHOWN]
    scores = fit("zero_shot+tfidf", made("llama"), three, shown).scores(TEXTS)
    assert (scores[:, 1] == -torch.inf).all()
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(len(TEXTS), dtype=scores.dtype))
