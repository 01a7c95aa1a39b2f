"""Two methods' probabilities, multiplied."""

from dataclasses import replace

import pytest
import torch

from fitting import SHOWN, TEXTS, fit, made
from i2cl import Example, make_methods
from i2cl.methods.base import Product

pytest.importorskip("sklearn")


BELOW = {"zero_shot": 1.5, "anchored": 2.4, "zero_shot+label_prior": 1.5, "zero_shot+batch_calibration": 1.5}
BELOW |= {"zero_shot+temperature": 1.0, "zero_shot+zero_shot": 1.0}  # a product is as sure as right


@pytest.mark.parametrize(("below", "typical"), BELOW.items())
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


def test_where_no_temperature_can_be_chosen_it_is_the_typical_one(films):
    given = made("llama"), films, [Example("a warm film", 0), Example("no", 1)]
    plain, chosen = (fit(f"anchored{name}+tfidf", *given) for name in ("", "+temperature"))
    assert plain.first.temperature == chosen.first.temperature == 2.4
    assert torch.equal(plain.scores(TEXTS), chosen.scores(TEXTS))


def test_seeds_that_are_fitted_together_have_their_own_partner(films):
    decoder, (method,) = made("llama"), make_methods(["i2cl+tfidf"], {"epochs": 1})
    assert method.joint
    draws = [films.sample(2, seed) for seed in (0, 1)]
    together = method.fit_many(decoder, films, draws, (0, 1))
    for shown, seed, result in zip(draws, (0, 1), together, strict=True):
        alone = method.fit(decoder, films, shown, seed)
        torch.testing.assert_close(result.scores(TEXTS), alone.scores(TEXTS), atol=1e-5, rtol=1e-5)
    assert not torch.equal(together[0].second.scores(TEXTS), together[1].second.scores(TEXTS))


def test_names_stack_and_each_method_takes_its_own_options():
    (result,) = make_methods(["i2cl+label_prior+tfidf+temperature"], {"epochs": 3, "refits": 2})
    assert result.called == "i2cl+label_prior+tfidf+temperature"
    assert isinstance(result.below, Product)
    assert (result.below.below.below.calibration.epochs, result.config.refits) == (3, 2)
    assert make_methods(["zero_shot+noise"], {}, {"epochs": 7})[0].other.calibration.epochs == 7


@pytest.mark.parametrize("name", ["zero_shot+tfidf", "tfidf+zero_shot"])
def test_a_label_that_one_of_them_has_not_seen_is_no_answer(name, films, demonstrations):
    three = replace(films, labels=("positive", "neutral", "negative"), train=(), test=())
    shown = [Example(text, 2 * label) for text, label in SHOWN]
    scores = fit(name, made("llama"), three, shown).scores(TEXTS)
    assert (scores[:, 1] == -torch.inf).all()
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(len(TEXTS), dtype=scores.dtype))
