"""Anchored calibration of what a kernel is too large for, against the kernel's own end and objective."""

import string

import pytest
import torch
from torch.nn.functional import cross_entropy

from fitting import left_as_found, made, one_line
from i2cl import Example, Task, Template
from i2cl.core import descent
from i2cl.core.anchored import AnchoredConfig, anchor, solved
from i2cl.core.descent import descended
from i2cl.core.problem import Problem
from i2cl.core.word_weights import WordWeights, token_scores
from i2cl.models.encoding import ScoringWarning
from i2cl.models.memory import MemoryWarning
from i2cl.models.scoring import Questions
from i2cl.models.training import TrainConfig, train

FILMS = Task("films", ("good", "bad", "unsure"), Template("Review: {text}\nSentiment:\n{label}"))
WORDS = ("a warm film", "dull, dull, dull", "who knows", "funny and kind all the way", "no", "perhaps")
SHOWN = tuple(Example(text, place % 3) for place, text in enumerate(WORDS))


def problem(decoder):
    return Problem(Questions(decoder, FILMS), SHOWN, "both")


def many(count):
    """A task of so many labels that share their first token, with a text each."""
    words = [f"~{character}" for character in string.ascii_letters + string.digits][:count]
    made_of = Task("many", tuple(words), Template("Review: {text}\nSentiment:\n{label}"))
    return made_of, tuple(Example(f"text {word}", at) for at, word in enumerate(words))


@pytest.fixture
def few_steps(monkeypatch):
    """A tenth of what a fit takes, where it need not come to an end."""
    monkeypatch.setattr(descent, "FEWEST_STEPS", 24)


def test_the_scale_by_gold_labels_is_near_that_of_all():
    every, gold = problem(made("llama")), problem(made("llama"))
    _, _, variance = every.first()
    assert gold.scaled_by_gold(len(SHOWN)) == pytest.approx(variance, rel=0.5)
    assert torch.corrcoef(torch.stack([every.scale.flatten(), gold.scale.flatten()]))[0, 1] > 0.8
    some = problem(made("llama"))
    some.scaled_by_gold(5)
    assert torch.corrcoef(torch.stack([every.scale.flatten(), some.scale.flatten()]))[0, 1] > 0.7


def test_it_comes_to_the_kernels_end_and_tells_the_loss(few_steps, monkeypatch):
    """Under a narrow prior, which has one optimum, and with passes enough."""
    decoder = made("llama")
    longer = descent.SCHEDULE.model_copy(update={"epochs": 100, "batch_size": 6, "lr": 0.03})
    monkeypatch.setattr(descent, "SCHEDULE", longer)
    fit = problem(decoder)
    u, _, tau, history = descended(fit, 1.0, seed=0)
    plain = torch.zeros_like(u)
    assert history[0] == pytest.approx(cross_entropy(fit.scores(plain).double(), fit.gold).item())
    assert history[-1] == pytest.approx(cross_entropy(fit.scores(u).double(), fit.gold).item())
    kernel = problem(decoder)
    ends, _, _ = solved(kernel, AnchoredConfig(reach=1.0, steps=100, tolerance=1e-8, settled=0))

    def objective(vectors):
        at = (vectors / fit.scale).flatten()
        loss = cross_entropy(fit.scores(at).double(), fit.gold, reduction="sum").item()
        return loss + tau / 2 * at.square().sum().item()

    best = objective(fit.theta(u))
    assert best < objective(plain.view_as(fit.scale)) - 0.1
    assert best == pytest.approx(objective(kernel.theta(ends)), rel=0.05)


def test_any_number_of_labels_can_be_fitted():
    decoder = made("llama")
    asked, shown = many(60)
    message = "60 labels share first tokens.*sentence_embeddings"
    with left_as_found(decoder.model), pytest.warns(ScoringWarning, match=message):
        injection = anchor(decoder, asked, shown)
    assert injection.scoring == "words"
    assert len(injection.history) == 60 + 2  # passes that make 240 steps
    assert injection.history[-1] < injection.history[0] - 0.5
    scores = injection.scores(decoder, [one.text for one in shown])
    loss = cross_entropy(scores.log_softmax(-1), torch.arange(60)).item()
    assert injection.history[-1] == pytest.approx(loss, abs=0.2)  # the last vector shrinks logits a little
    weights, idf = injection.word_weights, Questions(decoder, asked, "words").labels.weights
    torch.testing.assert_close(weights.sum(0), torch.ones(60))
    assert 0.01 < (weights - idf).std() < 1
    few, some = many(12)
    assert anchor(decoder, few, some, AnchoredConfig(steps=1)).scoring == "auto"


def test_words_that_count_anew_are_one_step_of_the_same_descent(monkeypatch):
    """The derivative of the loss in a word's weight, in the unit that makes it as large as a site's."""
    decoder = made("llama")
    asked, shown = many(5)
    fit = Problem(Questions(decoder, asked, "words"), shown, "both")
    one = descent.SCHEDULE.model_copy(update={"warmup": 0.0})
    monkeypatch.setattr(descent, "SCHEDULE", one)
    monkeypatch.setattr(descent, "OF_WORDS", {"epochs": 1, "batch_size": 5})
    monkeypatch.setattr(descent, "FEWEST_STEPS", 1)
    end = descended(fit, 30.0, seed=0)
    labels, tokens = fit.questions.labels, token_scores(decoder, fit.queries, fit.questions.labels)
    weights = labels.weights.clone().requires_grad_()
    cross_entropy(tokens @ weights, fit.gold).backward()
    slope = weights.grad - weights.grad.mean(0)
    moved = end.weights - labels.weights
    assert (moved * slope).sum() < 0  # downhill
    step = one.lr * WordWeights(labels, tokens).unit  # of AdamW's first one, whatever the slope's size
    assert moved.abs().max() == pytest.approx(step, rel=0.8)
    torch.testing.assert_close(moved.sum(0), torch.zeros(5), atol=1e-6, rtol=0)


def test_many_demonstrations_take_five_passes_few_240_steps_of_small_batches_and_thousands_one_pass():
    taken = [descent.schedule(count) for count in (1, 16, 77, 150, 385, 2000)]
    assert [one.batch_size for one in taken] == [4, 4, 4, 7, 8, 8]
    assert [one.epochs for one in taken] == [240, 60, 12, 11, 5, 5]
    assert [descent.schedule(count, words=True).epochs for count in (16, 77, 385)] == [240, 48, 10]
    assert [descent.schedule(count).epochs for count in (2560, 4096, 6400, 15000)] == [5, 4, 2, 1]


def test_a_pass_of_many_steps_tells_how_it_goes(monkeypatch):
    monkeypatch.setattr("i2cl.models.training.OFTEN", 2)
    monkeypatch.setattr(descent, "schedule", lambda *_, **__: TrainConfig(epochs=1, batch_size=1))
    seen = []
    fit = problem(made("llama"))
    history = descended(fit, 30.0, 0, lambda *told: seen.append(told)).history
    count = len(fit.queries)
    assert [step for step, _, _ in seen] == [*range(2, count, 2), count]
    assert {steps for _, steps, _ in seen} == {count}
    assert seen[-1][2] == pytest.approx(history[1], rel=1e-5), "at its end, the mean of the whole pass"


def test_a_loss_that_is_not_finite_ends_a_long_pass_early(monkeypatch):
    monkeypatch.setattr("i2cl.models.training.OFTEN", 2)
    steps = TrainConfig(epochs=1, batch_size=1)
    number, seen = torch.nn.Parameter(torch.ones(1)), []

    def loss(_):
        seen.append(number * float("nan"))
        return seen[-1]

    one_line("by step 2", train, [number], loss, steps.batches(6, 0), steps, lambda *_: pytest.fail("told"))
    assert len(seen) == 2


def test_of_many_demonstrations_some_tell_whether_the_fit_pays(few_steps, monkeypatch):
    looked_at, scored = [], descent.token_scores
    monkeypatch.setattr(descent, "LOOKED_AT", 4)
    monkeypatch.setattr(
        descent, "token_scores", lambda *given, **more: looked_at.append(given[1]) or scored(*given, **more)
    )
    fit = problem(made("llama"))
    u, _, _, history = descended(fit, 30.0, seed=0)
    assert u.any()
    assert len(fit.queries) > 4
    assert [len(queries) for queries in looked_at] == [4, 4]
    assert looked_at[0] == looked_at[1]
    assert history[-1] < history[0]


def test_a_seed_gives_the_same_vectors_and_another_other_ones(few_steps, monkeypatch):
    monkeypatch.setattr(descent, "SCHEDULE", descent.SCHEDULE.model_copy(update={"batch_size": 2}))
    fits = [descended(problem(made("llama")), 30.0, seed)[0] for seed in (0, 0, 1)]
    assert torch.equal(fits[0], fits[1])
    assert not torch.equal(fits[0], fits[2])


@pytest.mark.parametrize("config", [AnchoredConfig(reach=0.0), AnchoredConfig(steps=0)])
def test_without_reach_or_steps_it_is_the_plain_model(config):
    with pytest.warns(MemoryWarning):
        injection = anchor(made("llama"), FILMS, SHOWN, config.model_copy(update={"memory": 1e-5}))
    assert not injection.context.values.any()
    assert injection.settings["tau"] is None


@pytest.mark.parametrize("factor", [float("nan"), 3e38])
def test_what_is_not_finite_is_refused(factor):
    decoder = made("llama")
    with torch.no_grad():
        decoder.model.lm_head.weight *= factor
    with pytest.warns(MemoryWarning):
        one_line("not finite", anchor, decoder, FILMS, SHOWN, AnchoredConfig(memory=1e-5))


def test_whole_labels_that_the_memory_does_not_hold_are_told_by_their_words(few_steps):
    asked, shown = many(12)
    message = "12 labels are scored by their words.*--memory"
    with pytest.warns(MemoryWarning, match="on by descent"), pytest.warns(ScoringWarning, match=message):
        injection = anchor(made("llama"), asked, shown, AnchoredConfig(memory=1e-5))
    assert injection.scoring == "words"
    assert injection.history[-1] < injection.history[0]


def test_batches_are_halved_where_memory_ends_and_the_vectors_stay(few_steps, monkeypatch):
    """To rounding: sums of a batch are of its halves."""
    whole = descended(problem(made("llama")), 30.0, 0)[0]
    decoder = made("llama")
    forward = decoder.forward

    def narrow(batch, **more):
        if torch.is_grad_enabled() and len(batch.rows) > 2:
            raise torch.OutOfMemoryError
        return forward(batch, **more)

    monkeypatch.setattr(decoder, "forward", narrow)
    with pytest.warns(MemoryWarning, match="smaller batches"):
        halved = descended(problem(decoder), 30.0, 0)[0]
    torch.testing.assert_close(halved, whole, atol=2e-2, rtol=0)
    assert torch.corrcoef(torch.stack([halved, whole]))[0, 1] > 0.99


@pytest.mark.parametrize("end", [1.1, float("nan")])
def test_a_fit_that_does_not_pay_is_the_plain_model(few_steps, monkeypatch, end):
    losses = iter([1.0, end])
    monkeypatch.setattr(descent, "mean_cross_entropy", lambda *_: next(losses))
    with pytest.warns(UserWarning, match="lower the reach"):
        injection = anchor(made("llama"), FILMS, SHOWN, AnchoredConfig(memory=1e-5))
    assert not injection.context.values.any()


def test_every_entry_of_the_history_is_the_loss_without_the_prior(few_steps, monkeypatch):
    fit, taken = problem(made("llama")), []

    def recording(parameters, loss, *more):
        def recorded(chosen):
            taken.append((parameters[0].detach().clone(), list(chosen)))
            return loss(chosen)

        return train(parameters, recorded, *more)

    schedule = TrainConfig(epochs=3, batch_size=len(SHOWN), lr=0.05, lr_final=0.05, weight_decay=0.0)
    monkeypatch.setattr(descent, "schedule", lambda *_, **__: schedule)
    monkeypatch.setattr(descent, "train", recording)
    end = descended(fit, 0.1, seed=0)  # a prior that weighs as much as the loss

    def loss(u):
        return cross_entropy(fit.scores(u).double(), fit.gold).item()

    points = [torch.zeros_like(taken[0][0]), *(u for u, _ in taken), end.u]
    assert len(end.history) == 5
    assert end.history[:-1] == pytest.approx([*map(loss, points[:-1])], abs=1e-5)
