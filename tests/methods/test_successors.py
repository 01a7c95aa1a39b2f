"""Successors of I2CL against a short direct computation: the linear task vector."""

from dataclasses import replace

import pytest
import torch

from fitting import FAMILIES, SHOWN, TEXTS, WORDS, films_in, first_tokens, fit, ids, made
from i2cl import Decoder, I2CLError, load_task

WHOLE = ("positive", "poor", "negative")


def last_state(decoder, text):
    """What the LM head reads at the last token."""
    row = torch.tensor([ids(decoder, text)])
    with torch.no_grad():
        return decoder.model(row, output_hidden_states=True).hidden_states[-1][0, -1].double()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_linear_task_vector_is_ridge_regression(model_type, films, demonstrations):
    decoder = made(model_type)
    predictor = fit("linear_task_vector", decoder, films, demonstrations, seed=3, unlabelled=12, ridge=0.7)
    texts = films.unlabelled(12, demonstrations, 3)
    front = "".join(films.template.demonstration(text, WORDS[label]) for text, label in SHOWN)
    alone = torch.stack([last_state(decoder, films.template.query(text)) for text in texts])
    shown = torch.stack([last_state(decoder, front + films.template.query(text)) for text in texts])
    gram = alone.T @ alone + 0.7 * torch.eye(decoder.d_model)
    linear = torch.linalg.solve(gram, alone.T @ (shown - alone))
    head = decoder.model.get_output_embeddings()
    new = torch.stack([last_state(decoder, films.template.query(text)) for text in TEXTS])
    with torch.no_grad():
        expected = head((new + new @ linear).float()).log_softmax(-1)[:, first_tokens(decoder, films)]
    torch.testing.assert_close(predictor.scores(TEXTS), expected, atol=1e-3, rtol=1e-3)
    assert (predictor.cost.cached_values, predictor.cost.unlabelled) == (decoder.d_model**2, 12)
    assert (predictor.cost.trained, predictor.cost.held_out) == (0, 0)


@pytest.mark.parametrize("words", [WORDS, WHOLE], ids=["first", "whole"])
def test_without_a_penalty_a_linear_task_vector_is_few_shot_on_its_texts(words, demonstrations):
    decoder, task = made("qwen2"), films_in(words)
    predictor = fit("linear_task_vector", decoder, task, demonstrations, unlabelled=5, ridge=1e-9)
    texts = task.unlabelled(5, demonstrations, 0)
    few = fit("few_shot", decoder, task, demonstrations).scores(texts)
    zero = fit("zero_shot", decoder, task, demonstrations).scores(texts)
    if words == WORDS:  # of whole labels the map has seen the first token alone
        torch.testing.assert_close(predictor.scores(texts), few, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(predictor.scores(texts), zero, atol=0.1)


def test_the_bundled_model_learns_its_task():
    """From 0.33 at zero-shot, where few-shot has 1.0."""
    decoder, task = Decoder.from_pretrained("reference"), load_task("mood-colour-1")
    queries = task.queries(60)
    gold = torch.tensor([query.label for query in queries])
    predictor = fit("linear_task_vector", decoder, task, task.sample(5, 0), unlabelled=64)
    found = predictor.scores([query.text for query in queries])
    assert (found.argmax(-1) == gold).float().mean() > 0.8


def test_without_further_texts_there_is_nothing_to_learn_from(films, demonstrations):
    few = replace(films, train=tuple(demonstrations))
    with pytest.raises(I2CLError, match="linear_task_vector needs training texts beside the demonstrations"):
        fit("linear_task_vector", made("llama"), few, demonstrations)
