"""Calibration with the loss among the task's labels, as prediction compares them."""

from itertools import product

import pytest
import torch
from torch.nn.functional import cross_entropy

from fitting import encode, injecting, log_probability, new_decoder, raises
from i2cl import CalibrationConfig, Decoder, Example, Task, Template, calibrate, extract
from i2cl.core.calibration import CalibrationLoss, Coefficients
from i2cl.models.scoring import LabelScorer

TEMPLATE = Template("Review: {text}\nSentiment:{label}")
FIRST = Task("films", ("positive", "negative"), TEMPLATE)
WORDS = Task("moods", ("positive", "poor", "negative"), TEMPLATE)
"""Two of its labels share their first token, so labels are scored by their words."""
TEXTS = ["a warm film", "dull", "a funny, warm and funny film", "a lifeless film", "funny"]
SHOTS = tuple(Example(text, row % 2) for row, text in enumerate(TEXTS))
GOLD = torch.tensor([shot.label for shot in SHOTS])
QUIET = CalibrationConfig(loss="labels", noise=0.0, epochs=1, passes=1, batch_size=len(SHOTS))

tasks = pytest.mark.parametrize("task", [FIRST, WORDS], ids=["first", "words"])
cases = pytest.mark.parametrize("case", ["llama", "gpt2", "gemma2"])


@tasks
@cases
@pytest.mark.parametrize("change", [{}, {"optimizer": "lbfgs"}, {"positions": "last"}])
def test_the_loss_is_the_cross_entropy_of_the_predictions(case, task, change):
    decoder, config = new_decoder(case), QUIET.model_copy(update=change)
    context = extract(decoder, task, SHOTS)
    start = calibrate(decoder, task, SHOTS, context, config.model_copy(update={"epochs": 0, "passes": 0}))
    result = calibrate(decoder, task, SHOTS, context, config)
    wanted = cross_entropy(start.log_probs(decoder, TEXTS), GOLD).item()
    assert result.history == (pytest.approx(wanted, rel=1e-5),)
    paper = calibrate(decoder, task, SHOTS, context, config.model_copy(update={"loss": "vocabulary"}))
    assert paper.history[0] > wanted + 0.1  # all tokens compete there
    assert (result.settings["loss"], paper.settings["loss"]) == ("labels", "vocabulary")


def test_word_level_scoring_needs_the_loss_among_labels():
    decoder, config = new_decoder("llama"), QUIET.model_copy(update={"epochs": 1})
    context = extract(decoder, WORDS, SHOTS)
    start = calibrate(decoder, WORDS, SHOTS, context, QUIET.model_copy(update={"epochs": 0}), scoring="words")
    result = calibrate(decoder, WORDS, SHOTS, context, config, scoring="words")
    scores = start.log_probs(decoder, TEXTS)
    assert result.history == (pytest.approx(cross_entropy(scores, GOLD).item(), rel=1e-5),)
    assert not torch.allclose(scores, start.log_probs(decoder, TEXTS, scoring="sequence"))
    paper = config.model_copy(update={"loss": "vocabulary"})
    raises("compares labels", calibrate, decoder, WORDS, SHOTS, context, paper, scoring="words")


def test_full_sequences_need_the_loss_over_the_vocabulary():
    decoder = new_decoder("llama")
    context = extract(decoder, WORDS, SHOTS)
    raises("scoring='words'", calibrate, decoder, WORDS, SHOTS, context, QUIET, scoring="sequence")
    paper = QUIET.model_copy(update={"loss": "vocabulary"})
    assert calibrate(decoder, WORDS, SHOTS, context, paper, scoring="sequence").scoring == "sequence"


def test_one_class_is_refused_only_by_the_loss_among_labels():
    decoder, shots = new_decoder("llama"), SHOTS[:1]
    context = extract(decoder, FIRST, shots)
    message = "^a loss among the labels needs demonstrations of at least two classes: add some$"
    raises(message, calibrate, decoder, FIRST, shots, context, QUIET)
    paper = QUIET.model_copy(update={"loss": "vocabulary", "epochs": 8})
    result = calibrate(decoder, FIRST, shots, context, paper)
    assert result.history[-1] < result.history[0]


def by_hand(decoder, task, values, coefficients):
    """Mean loss among the labels: a plain row for each token of each text, under separate hooks."""
    labels = LabelScorer.for_fit(decoder, task).labels
    with injecting(decoder, values, coefficients):
        asked = product((encode(TEMPLATE.query(text)) for text in TEXTS), labels.tokens)
        tokens = [log_probability(decoder, query, (token,)) for query, token in asked]
    return cross_entropy(labels.scores_from_tokens(torch.stack(tokens).view(len(TEXTS), -1)), GOLD)


@tasks
@cases
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_match_a_computation_by_hand(monkeypatch, case, task, packed):
    monkeypatch.setattr("i2cl.core.calibration.packing_pays", lambda *_: packed)
    decoder, config = new_decoder(case), QUIET
    context = extract(decoder, task, SHOTS)
    scorer = LabelScorer.for_fit(decoder, task)
    active = config.active(decoder.layers, "both")
    coefficients = Coefficients(config, active, None, decoder.device)
    with decoder.frozen():
        loss = CalibrationLoss(scorer, SHOTS, context, coefficients, config)(range(len(SHOTS)))
        loss.backward()
    first = torch.tensor([0.1, 1.0]).repeat(decoder.layers, 2, 1).requires_grad_()
    wanted = by_hand(decoder, task, context.context, first)
    (gradient,) = torch.autograd.grad(wanted, first)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert gradient.abs().min() > 1e-5
    torch.testing.assert_close(coefficients.parameter.grad.view_as(gradient), gradient, rtol=1e-3, atol=1e-5)


@tasks
@pytest.mark.parametrize("change", [{"epochs": 10}, {"optimizer": "lbfgs", "passes": 10}, {"dtype": "half"}])
def test_calibration_reduces_the_loss_over_labels(task, change):
    change = {"epochs": 10, "noise": 1e-3} | change
    decoder = new_decoder("llama", dtype=torch.float16 if change.pop("dtype", "") else torch.float32)
    config = QUIET.model_copy(update=change)
    context = extract(decoder, task, SHOTS)
    result, again = (calibrate(decoder, task, SHOTS, context, config, seed=1) for _ in range(2))
    assert min(result.history) < result.history[0] - 0.02
    assert torch.equal(result.coefficients, again.coefficients)


@tasks
@pytest.mark.parametrize("loss", ["labels", "vocabulary"])
def test_lbfgs_accumulates_gradients_over_small_batches(monkeypatch, task, loss):
    decoder = new_decoder("llama")
    context = extract(decoder, task, SHOTS)
    config = QUIET.model_copy(update={"optimizer": "lbfgs", "passes": 5, "loss": loss})
    wanted = calibrate(decoder, task, SHOTS, context, config).history
    forward, tokens = Decoder.forward, []

    def counted(self, batch, **more):
        tokens.append(batch.input_ids.numel())
        return forward(self, batch, **more)

    monkeypatch.setattr(Decoder, "forward", counted)
    decoder.token_budget = 3 * max(len(encode(TEMPLATE.query(text))) for text in TEXTS)
    assert calibrate(decoder, task, SHOTS, context, config).history == pytest.approx(wanted, rel=1e-3)
    assert max(tokens) <= 1.5 * decoder.token_budget  # the budget counts queries without labels
    assert len(tokens) > config.passes  # several parts per pass
