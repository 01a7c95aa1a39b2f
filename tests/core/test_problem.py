"""Columns of anchored calibration: what the memory holds, and a shortlist where labels are many."""

import math
import string
import warnings

import pytest
import torch

from fitting import made
from i2cl import Example, I2CLError, Task, Template
from i2cl.core import anchored
from i2cl.core import problem as module
from i2cl.core.anchored import AnchoredConfig, anchor
from i2cl.core.problem import FEWEST, Problem, memory_taken
from i2cl.models.batching import MemoryWarning
from i2cl.models.scoring import Questions

LETTERS = Task("letters", tuple("abcdef"), Template("{text}\n{label}"))
FULL = pytest.mark.filterwarnings("ignore::i2cl.models.encoding.ScoringWarning")
SHOWN = tuple(Example(f"text {at}", at) for at in range(6))


def asked(decoder, memory):
    return Problem(Questions(decoder, LETTERS), SHOWN, "both", memory)


def test_as_many_columns_are_kept_as_the_memory_holds():
    decoder = made("llama")
    whole = asked(decoder, None)
    parameters = whole.scale.numel()
    assert whole.columns == 5
    for kept in range(FEWEST, 5):
        with pytest.warns(MemoryWarning, match=f"^{kept} derivatives of an example are kept in place of 5"):
            assert asked(decoder, memory_taken(6, kept + 1, parameters) - 1).columns == kept
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asked(decoder, memory_taken(6, 5, parameters)).columns == 5
    with pytest.raises(I2CLError, match=r"give fewer of each class \(--shots\) or more memory"):
        asked(decoder, memory_taken(6, FEWEST, parameters) - 1).columns  # noqa: B018


@pytest.mark.parametrize("free", [0, 4 * 10**9])
def test_without_a_limit_it_is_a_quarter_of_what_is_free(free, monkeypatch):
    monkeypatch.setattr(module, "free_memory", lambda: free)
    assert asked(made("llama"), None).columns == 5
    monkeypatch.setattr(module, "free_memory", lambda: 4000)
    with pytest.raises(I2CLError, match="more than the 1e-06 GB that they may"):
        asked(made("llama"), None).columns  # noqa: B018


def test_the_limit_is_no_setting_of_the_artefact():
    fitted = anchor(made("llama"), LETTERS, SHOWN, AnchoredConfig(steps=1, memory=1.0))
    assert (
        fitted.settings.keys()
        == anchor(made("llama"), LETTERS, SHOWN, AnchoredConfig(steps=1)).settings.keys()
    )
    assert "memory" not in fitted.settings


def many(count):
    """A task of so many labels that share their first token, with a text each."""
    words = [f"~{character}" for character in string.ascii_letters + string.digits][:count]
    made_of = Task("many", tuple(words), Template("Review: {text}\nSentiment:\n{label}"))
    return made_of, tuple(Example(f"text {word}", at) for at, word in enumerate(words))


@FULL
def test_any_number_of_labels_can_be_fitted(monkeypatch):
    decoder = made("llama")
    asked, shown = many(60)
    injection = anchor(decoder, asked, shown, AnchoredConfig(steps=2))
    texts = [one.text for one in shown]
    plain = Questions(decoder, asked).scores(texts).log_softmax(-1)
    assert torch.tensor(injection.label_bias) == pytest.approx(
        -plain.exp().mean(0).log() - math.log(60), abs=1e-4
    )
    scores = injection.scores(decoder, texts)
    loss = torch.nn.functional.cross_entropy(scores.log_softmax(-1), torch.arange(60))
    assert injection.history[-1] <= loss.item(), "of a shortlist, and not of all labels"
    before = torch.nn.functional.cross_entropy(plain, torch.arange(60))
    assert loss < before - 0.5
    monkeypatch.setattr(anchored, "MOST_SEQUENCES", 3599)
    assert anchor(decoder, asked, shown, AnchoredConfig(steps=1)).scoring == "keyword"
    few, some = many(12)
    assert anchor(decoder, few, some, AnchoredConfig(steps=1)).label_bias is None


@FULL
def test_a_shortlist_has_the_labels_that_compete_most_once_all_are_as_frequent():
    decoder = made("llama")
    asked, shown = many(60)
    fit = Problem(Questions(decoder, asked), shown, "both")
    queries = [one.text for one in shown]
    plain = Questions(decoder, asked).scores(queries).log_softmax(-1)
    bias = fit.shortlist()
    even = (plain + bias).softmax(-1).mean(0)
    assert even.max() / even.min() < (plain.exp().mean(0).max() / plain.exp().mean(0).min())
    ids = Questions(decoder, asked).labels.ids
    for row, labels in enumerate(fit.labels):
        first, *rivals = map(ids.index, labels.ids)
        assert first == row
        others = (plain + bias)[row].clone()
        others[row] = -torch.inf
        assert sorted(rivals) == sorted(others.topk(module.SHORTLIST).indices.tolist())
    at = fit.scores(torch.zeros(fit.scale.numel()))
    torch.testing.assert_close(at[:, 0], Questions(decoder, asked).scores(queries).diagonal() + bias)
    assert fit.columns == module.SHORTLIST
    assert Problem(Questions(decoder, asked), shown[:10], "both").columns == 59, "few enough to have them all"
