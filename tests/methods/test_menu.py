"""Options by letter: the prompt, and the order of the options."""

from dataclasses import replace

import pytest
import torch

from fitting import fit, new_decoder, raises
from i2cl import I2CLError
from i2cl.methods import make_methods
from i2cl.methods.menu import label_order

TEXTS = ["a lifeless film", "the best of the year, by far"]


def test_the_prompt_lists_each_label_behind_a_letter(films, demonstrations):
    predictor = fit("menu", new_decoder("llama"), films, demonstrations)
    prompt = predictor.inner.scorer.prompt("a dull film")
    assert prompt.startswith("a dull film\n\nQuestion:")
    assert prompt.index(f"A: {films.labels[0]}\n") < prompt.index(f"B: {films.labels[1]}\n")
    assert prompt.count("a dull film") == 1


def test_demonstrations_are_answered_by_the_letter_of_their_label(films, demonstrations):
    predictor = fit("menu_few_shot", new_decoder("llama"), films, demonstrations, order=1)
    order = label_order(len(films.labels), 1)
    expected = tuple("AB"[order.index(example.label)] for example in demonstrations)
    assert tuple(letter for _, letter in predictor.inner.shown) == expected


@pytest.mark.parametrize("name", ["menu", "menu_few_shot"])
def test_scores_come_in_the_order_of_the_labels(name, films, demonstrations):
    decoder = new_decoder("llama")
    shuffled = next(seed for seed in range(1, 9) if label_order(len(films.labels), seed) == [1, 0])
    predictor = fit(name, decoder, films, demonstrations, order=shuffled)
    scores = predictor.log_probs(TEXTS)
    assert torch.equal(scores, predictor.inner.log_probs(TEXTS)[:, [1, 0]])
    assert not torch.equal(scores, fit(name, decoder, films, demonstrations).log_probs(TEXTS))


def test_more_than_26_labels_are_refused(films):
    (menu,) = make_methods(["menu"])
    many = replace(films, labels=tuple(f"label {number}" for number in range(27)), train=(), test=())
    raises("at most 26 options .* 27 labels: use another method", menu.fit, new_decoder("llama"), many, (), 0)


@pytest.mark.parametrize("name", ["few_shot", "anchored"])
def test_the_order_of_labels_changes_no_answer_of_methods_without_a_menu(name, films, demonstrations):
    decoder = new_decoder("llama")
    scores = fit(name, decoder, films, demonstrations).log_probs(TEXTS)
    other = replace(films, labels=films.labels[::-1], train=(), test=())
    moved = [replace(example, label=1 - example.label) for example in demonstrations]
    reordered = fit(name, decoder, other, moved).log_probs(TEXTS)
    torch.testing.assert_close(reordered.flip(1), scores, atol=1e-4, rtol=1e-4)


def test_an_invalid_order_is_refused():
    with pytest.raises(I2CLError, match="order"):
        make_methods(["menu"], {"order": -1})
