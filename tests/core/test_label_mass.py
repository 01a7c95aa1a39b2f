"""The vector that makes a model generate a label, on every model type."""

import pytest
import torch

from fitting import new_decoder, random_edit
from i2cl import AnchoredConfig, Example, Task, Template, anchor
from i2cl.core import label_mass
from i2cl.core.label_mass import raise_label_mass
from i2cl.models.batching import make_batch
from i2cl.models.edits import AffineEdit, edit_outputs
from i2cl.models.label_tokens import LabelTokens
from i2cl.models.scoring import LabelScorer, next_token_log_probabilities
from tiny import CASES, PATHS

QUERIES = [(5, 17, 90, 31), (8, 41, 7), (77, 12, 63, 250, 19, 4)]
OTHERS = [tuple((7 * row + 31 * place) % 299 + 1 for place in range(5)) for row in range(40)]
LABELS = (40, 90, 200)
RMS = ("llama", "mixtral", "granite", "glm4", "gpt_oss", "afmoe")
"""Types with an RMSNorm and no head bias, where the predicted label does not change at all."""

GIVEN = (("a warm film", 0), ("dull, dull, dull", 1), ("kind and funny", 0), ("no", 2))
SHOWN = tuple(Example(text, label) for text, label in GIVEN)
WORDS = LabelTokens(
    ((40, 7), (90,), (40, 200, 11)),
    full_sequences=False,
    word_tokens=((40, 7), (90,), (40, 200, 11)),
    keywords=(40, 90, 200),
)


def tokens(first):
    return LabelTokens(tuple((token,) for token in first), full_sequences=False)


TASK = Task("films", ("good", "bad", "unsure"), Template("Review: {text}\nSentiment:{label}"))


def edit_of(decoder, size=0.3):
    values, _ = random_edit(decoder)
    return AffineEdit(size * values, torch.ones(decoder.layers, 2))


def logits(decoder, ids, edit):
    with decoder.frozen(), torch.no_grad():
        return decoder.forward(make_batch([ids], decoder.device), edit=edit)[0, 0].float()


@pytest.mark.parametrize("case", CASES)
def test_last_hidden_states_give_the_models_logits(case):
    decoder = new_decoder(case)
    edit = edit_of(decoder)
    states = label_mass._final_states(decoder, QUERIES, edit)
    with decoder.frozen(), torch.no_grad():
        result = label_mass._OutputLayers(decoder, tokens(LABELS)).logits(states)
    expected = torch.stack([logits(decoder, ids, edit) for ids in QUERIES])
    torch.testing.assert_close(result, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("case", PATHS)
def test_vector_makes_a_label_the_most_probable_token(case):
    decoder = new_decoder(case)
    edit = edit_of(decoder)
    result = raise_label_mass(decoder, QUERIES, tokens(LABELS), edit)
    assert result.after > result.before or case == "modernbert-decoder"  # its head is a network
    shift = edit.shift.clone()
    shift[-1, -1] += result.vector / decoder.sublayer_scale
    pushed = AffineEdit(shift, edit.scale)
    after = next_token_log_probabilities(decoder, QUERIES, edit=pushed)[:, list(LABELS)]
    assert after.logsumexp(-1).exp().mean().item() == pytest.approx(result.after, abs=1e-4)
    before = next_token_log_probabilities(decoder, OTHERS, edit=edit)[:, list(LABELS)]
    moved = next_token_log_probabilities(decoder, OTHERS, edit=pushed)[:, list(LABELS)]
    same = (before.argmax(-1) == moved.argmax(-1)).float().mean().item()
    assert same == 1 if case in RMS else same > 0.5  # random biases as large as the residual stream


def test_words_become_probable_with_an_exported_head():
    decoder = new_decoder("llama")
    edit = edit_of(decoder)
    result = raise_label_mass(decoder, QUERIES, WORDS, edit)
    shift = edit.shift.clone()
    shift[-1, -1] += result.vector / decoder.sublayer_scale
    pushed = AffineEdit(shift, edit.scale)
    tables = [next_token_log_probabilities(decoder, OTHERS, edit=one) for one in (edit, pushed)]
    assert torch.equal(*(WORDS.scores(table).argmax(-1) for table in tables))
    with edit_outputs([(decoder.model.lm_head, WORDS.at_representatives)]):
        spoken = next_token_log_probabilities(decoder, QUERIES, edit=pushed)[:, list(WORDS.representatives)]
    assert spoken.logsumexp(-1).exp().mean().item() == pytest.approx(result.after, abs=1e-4)
    assert result.after > 2 * result.before


def test_default_fit_generates_labels_and_keeps_predictions():
    decoder = new_decoder("llama")
    says = anchor(decoder, TASK, SHOWN)
    silent = anchor(decoder, TASK, SHOWN, AnchoredConfig(say_label=False))
    begins, ends = ("a film", "dull", "kind", "so"), ("of old", "!", "and", "")
    texts = [f"{word} {other}" for word in begins for other in ends]
    scorer = LabelScorer(decoder, TASK)
    queries = scorer.queries(texts)
    firsts = torch.tensor(scorer.labels.representatives)
    greedy = next_token_log_probabilities(decoder, queries, edit=says.edit()).argmax(-1)
    says_one = torch.isin(greedy, firsts)
    assert says_one.float().mean() > 0.9  # of a random model
    without = next_token_log_probabilities(decoder, queries, edit=silent.edit()).argmax(-1)
    assert torch.isin(without, firsts).float().mean() < 0.5
    kept = silent.log_probs(decoder, texts).argmax(-1)
    assert torch.equal(says.log_probs(decoder, texts).argmax(-1), kept)
    assert torch.equal(firsts[kept][says_one], greedy[says_one])
    before, after = says.settings["label_mass"]
    assert before < after
    apart = (says.context - silent.context).flatten(0, 1).norm(dim=1)
    assert (apart[:-1] == 0).all()
    assert apart[-1] > 0


def test_vector_that_changes_answers_is_halved_however_many_queries_there_are(monkeypatch):
    decoder, queries = new_decoder("llama"), 100 * QUERIES
    edit = edit_of(decoder)
    plain = label_mass._final_states(decoder, queries, edit)
    limit = 0.2 * plain.norm(dim=-1).mean()
    monkeypatch.setattr(label_mass, "MIN_NORM", 0.1)
    real = label_mass._OutputLayers.answers_and_mass

    def answers_and_mass(self, states):
        return (states - plain).norm(dim=-1) > limit, real(self, states)[1]

    monkeypatch.setattr(label_mass._OutputLayers, "answers_and_mass", answers_and_mass)
    assert limit / 2 < raise_label_mass(decoder, queries, tokens(LABELS), edit).vector.norm() <= limit


def test_search_ends_once_a_label_is_almost_certain(monkeypatch):
    decoder, evaluations = new_decoder("llama"), []
    edit = edit_of(decoder)
    real = label_mass._OutputLayers.losses

    def losses(self, logits):
        evaluations.append(len(logits))
        return real(self, logits)

    monkeypatch.setattr(label_mass._OutputLayers, "losses", losses)
    early = raise_label_mass(decoder, QUERIES, tokens(LABELS), edit)
    count = len(evaluations)
    monkeypatch.setattr(label_mass, "TARGET_LOSS", 0.0)
    monkeypatch.setattr(label_mass, "MIN_GAIN", 1e-9)
    late = raise_label_mass(decoder, QUERIES, tokens(LABELS), edit)
    assert count < len(evaluations) - count
    assert early.after == pytest.approx(late.after, abs=2e-3)


def test_directions_of_many_labels_are_those_of_each_label(monkeypatch):
    decoder, labels = new_decoder("llama"), tuple(range(40, 47))
    monkeypatch.setattr(label_mass, "BATCH_ROWS", 4)
    with decoder.frozen():
        together = label_mass._OutputLayers(decoder, tokens(labels)).label_directions()
        pairs = [tokens((labels[0], label)) for label in labels[1:]]
        alone = torch.cat([label_mass._OutputLayers(decoder, pair).label_directions() for pair in pairs], 1)
    assert together.shape[1] == len(labels) - 1
    torch.testing.assert_close(together @ (together.T @ alone), alone, atol=1e-5, rtol=1e-5)


def test_fit_is_unchanged_if_no_vector_helps():
    decoder = new_decoder("llama")
    for config in ({"steps": 0}, {"sublayers": "mha"}, {"sublayers": "hidden"}):
        assert "label_mass" not in anchor(decoder, TASK, SHOWN, AnchoredConfig(**config)).settings
    edit = edit_of(decoder)
    result = raise_label_mass(decoder, QUERIES, tokens(range(40, 40 + decoder.d_model + 1)), edit)
    assert not result.vector.any()
    assert result.after == result.before
    with torch.no_grad():
        decoder.model.model.norm.weight.fill_(float("inf"))
    assert not raise_label_mass(decoder, QUERIES, tokens(LABELS), edit).vector.any()
