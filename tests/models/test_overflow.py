"""Activations and logits that overflow raise an error; they never decide for the first label."""

import pytest
import torch

from fitting import films_in, injected, log_probability, new_decoder, raises
from i2cl import CalibrationConfig, Decoder
from i2cl.models.scoring import LabelScorer
from tiny import tiny_folder, tiny_model, tiny_tokenizer

TEXTS = ["a film", "dull, dull, dull, all of it"]


def overflowing(dtype):
    """A Llama whose activations exceed the range of float16."""
    model = tiny_model("llama")
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.down_proj.weight.mul_(1e4)
            block.mlp.up_proj.weight.mul_(1e2)
    return Decoder(model.to(dtype), tiny_tokenizer(), name="tiny")


def test_predicting_in_float16_what_was_fitted_in_bfloat16_raises_on_overflow(tmp_path):
    folder = tiny_folder(tmp_path / "model")
    overflowing(torch.bfloat16).model.save_pretrained(folder)
    fitted_on, other = (Decoder.from_pretrained(folder, dtype=name) for name in ("bfloat16", "float16"))
    task = films_in(("good", "bad"))
    injection = injected(fitted_on, task, task.train[:4], CalibrationConfig(epochs=2))
    raises("overflows in float16", injection.predict, other, TEXTS)


def test_fitting_in_float16_names_the_precision_that_overflows():
    task = films_in(("good", "bad"))
    decoder = overflowing(torch.float16)
    raises("overflow in float16: reload it with --dtype float32", decoder.require_identity)
    raises("overflow in float16", injected, decoder, task, task.train[:4])


@pytest.mark.parametrize("scoring", ["first_token", "sequence", "words"])
def test_infinite_logit_of_any_token_raises(scoring):
    task = films_in(("good film", "bad film"))
    decoder = new_decoder("llama", tie_word_embeddings=False)

    def overflow(_module, _inputs, logits):
        return logits.index_fill(-1, torch.tensor([299]), torch.inf)  # a token of no label

    decoder.model.lm_head.register_forward_hook(overflow)
    raises("overflows in float32", LabelScorer(decoder, task, scoring).scores, TEXTS)


def test_impossible_label_is_never_predicted_and_raises_nothing():
    task = films_in(("good", "bad"))
    decoder = new_decoder("llama", tie_word_embeddings=False)
    asked = LabelScorer(decoder, task)

    def forbid(_module, _inputs, logits):
        return logits.index_fill(-1, torch.tensor([asked.labels.representatives[0]]), -torch.inf)

    decoder.model.lm_head.register_forward_hook(forbid)
    scores = asked.scores(TEXTS)
    assert (scores[:, 0] == -torch.inf).all()
    assert scores.argmax(-1).tolist() == [1, 1]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_labels_of_unequal_length_match_separate_scores_in_half_precision(attention, dtype):
    decoder = new_decoder("llama", dtype=dtype, attn_implementation=attention)
    asked = LabelScorer(decoder, films_in(("x", "a film of all the ages")), "sequence")
    texts = ["a", "a film that is so long " * 5, "hm hm"]
    assert decoder.can_fork
    with torch.no_grad():
        rows = [
            [log_probability(decoder, query, ids) for ids in asked.labels.sequences]
            for query in asked.queries(texts)
        ]
    alone = torch.tensor(rows, dtype=torch.float32)
    torch.testing.assert_close(asked.scores(texts), alone, rtol=0.02, atol=0.05)
