"""Anchored calibration by AdamW, against the Gauss-Newton solver's result and objective."""

import string

import pytest
import torch
from torch.nn.functional import cross_entropy

from fitting import left_as_found, new_decoder, raises
from i2cl import Example, Task, Template
from i2cl.core import adamw, plan
from i2cl.core.adamw import fit_adamw
from i2cl.core.anchored import AnchoredConfig, anchor
from i2cl.core.gauss_newton import fit_gauss_newton
from i2cl.core.objective import Objective
from i2cl.core.word_weights import WordWeights, token_scores
from i2cl.models.memory import MemoryWarning
from i2cl.models.scoring import LabelScorer
from i2cl.models.training import TrainConfig, train

FILMS = Task("films", ("good", "bad", "unsure"), Template("Review: {text}\nSentiment:\n{label}"))
WORDS = ("a warm film", "dull, dull, dull", "who knows", "funny and kind all the way", "no", "perhaps")
SHOWN = tuple(Example(text, place % 3) for place, text in enumerate(WORDS))


def problem(decoder):
    return Objective(LabelScorer(decoder, FILMS), SHOWN, "both")


def many(count):
    """A task of ``count`` labels that share their first token, with a text for each."""
    words = [f"~{character}" for character in string.ascii_letters + string.digits][:count]
    made_of = Task("many", tuple(words), Template("Review: {text}\nSentiment:\n{label}"))
    return made_of, tuple(Example(f"text {word}", at) for at, word in enumerate(words))


def test_the_set_unit_by_gold_labels_is_near_that_of_all():
    every, gold = problem(new_decoder("llama")), problem(new_decoder("llama"))
    _, _, variance = every.linearize_start()
    assert gold.set_unit_by_gold(len(SHOWN)) == pytest.approx(variance, rel=0.5)
    assert torch.corrcoef(torch.stack([every.unit.flatten(), gold.unit.flatten()]))[0, 1] > 0.8
    some = problem(new_decoder("llama"))
    some.set_unit_by_gold(5)
    assert torch.corrcoef(torch.stack([every.unit.flatten(), some.unit.flatten()]))[0, 1] > 0.7


def test_it_ends_where_gauss_newton_ends_and_reports_the_loss(few_steps, monkeypatch):
    """Under a narrow prior, which has one optimum, and with passes enough."""
    decoder = new_decoder("llama")
    longer = plan.ADAMW.model_copy(update={"epochs": 100, "batch_size": 6, "lr": 0.03})
    monkeypatch.setattr(plan, "ADAMW", longer)
    fit = problem(decoder)
    u, tau, history = fit_adamw(fit, 1.0, seed=0)
    plain = torch.zeros_like(u)
    assert history[0] == pytest.approx(cross_entropy(fit.scores(plain).double(), fit.gold).item())
    assert history[-1] == pytest.approx(cross_entropy(fit.scores(u).double(), fit.gold).item())
    kernel = problem(decoder)
    ends, _, _ = fit_gauss_newton(kernel, 1.0, 100, tolerance=1e-8, settled=0)

    def objective(vectors):
        at = (vectors / fit.unit).flatten()
        loss = cross_entropy(fit.scores(at).double(), fit.gold, reduction="sum").item()
        return loss + tau / 2 * at.square().sum().item()

    best = objective(fit.vectors(u))
    assert best < objective(plain.view_as(fit.unit)) - 0.1
    assert best == pytest.approx(objective(kernel.vectors(ends)), rel=0.05)


def test_any_number_of_labels_can_be_fitted():
    decoder = new_decoder("llama")
    asked, shown = many(60)
    with left_as_found(decoder.model):
        injection = anchor(decoder, asked, shown)
    assert (injection.scoring, injection.settings["solved_by"]) == ("words", "adamw")
    assert len(injection.history) == 60 + 2  # epochs that make 240 steps
    assert injection.history[-1] < injection.history[0] - 0.5
    scores = injection.log_probs(decoder, [one.text for one in shown])
    loss = cross_entropy(scores.log_softmax(-1), torch.arange(60)).item()
    assert injection.history[-1] == pytest.approx(loss, abs=0.2)  # the last vector shrinks logits a little
    weights, idf = injection.word_weights, LabelScorer(decoder, asked, "words").labels.word_weights
    torch.testing.assert_close(weights.sum(0), torch.ones(60))
    assert 0.01 < (weights - idf).std() < 1


def test_word_weights_take_one_step_of_the_same_optimizer(monkeypatch):
    """Check the step of the word weights against the derivative of the loss, in the unit of the vectors."""
    decoder = new_decoder("llama")
    asked, shown = many(5)
    fit = Objective(LabelScorer(decoder, asked, "words"), shown, "both")
    one = plan.ADAMW.model_copy(update={"warmup": 0.0, "epochs": 1, "batch_size": 5})
    monkeypatch.setattr(plan, "ADAMW_WORDS", one)
    monkeypatch.setattr(plan, "MIN_ADAMW_STEPS", 1)
    end = fit.word_weights(fit_adamw(fit, 30.0, seed=0).parameters)
    labels, tokens = fit.scorer.labels, token_scores(decoder, fit.queries, fit.scorer.labels)
    weights = labels.word_weights.clone().requires_grad_()
    cross_entropy(tokens @ weights, fit.gold).backward()
    slope = weights.grad - weights.grad.mean(0)
    moved = end - labels.word_weights
    assert (moved * slope).sum() < 0  # downhill
    step = one.lr * WordWeights(labels, tokens).unit  # of AdamW's first step, whatever the slope's size
    assert moved.abs().max() == pytest.approx(step, rel=0.8)
    torch.testing.assert_close(moved.sum(0), torch.zeros(5), atol=1e-6, rtol=0)


def test_the_schedule_depends_on_the_number_of_demonstrations():
    taken = [plan.adamw_schedule(count) for count in (1, 16, 77, 150, 385, 2000)]
    assert [one.batch_size for one in taken] == [4, 4, 4, 7, 8, 8]
    assert [one.epochs for one in taken] == [240, 60, 12, 11, 5, 5]
    assert [plan.adamw_schedule(count, word_level=True).epochs for count in (16, 77, 385)] == [240, 48, 10]
    assert [plan.adamw_schedule(count).epochs for count in (2560, 4096, 6400, 15000)] == [5, 4, 2, 1]


def test_progress_is_reported_within_a_long_epoch(monkeypatch):
    monkeypatch.setattr("i2cl.models.training.PROGRESS_STEPS", 2)
    monkeypatch.setattr(adamw, "adamw_schedule", lambda *_, **__: TrainConfig(epochs=1, batch_size=1))
    seen = []
    fit = problem(new_decoder("llama"))
    history = fit_adamw(fit, 30.0, 0, lambda *told: seen.append(told)).history
    count = len(fit.queries)
    assert [step for step, _, _ in seen] == [*range(2, count, 2), count]
    assert {steps for _, steps, _ in seen} == {count}
    assert seen[-1][2] == pytest.approx(history[1], rel=1e-5), "at its end, the mean of the whole pass"


def test_a_loss_that_is_not_finite_ends_a_long_epoch_early(monkeypatch):
    monkeypatch.setattr("i2cl.models.training.PROGRESS_STEPS", 2)
    steps = TrainConfig(epochs=1, batch_size=1)
    number, seen = torch.nn.Parameter(torch.ones(1)), []

    def loss(_):
        seen.append(number * float("nan"))
        return seen[-1]

    raises("by step 2", train, [number], loss, steps.batches(6, 0), steps, lambda *_: pytest.fail("told"))
    assert len(seen) == 2


def test_of_many_demonstrations_a_sample_is_monitored(few_steps, monkeypatch):
    looked_at, scored = [], adamw.token_scores
    monkeypatch.setattr(adamw, "MAX_MONITORED", 4)
    monkeypatch.setattr(
        adamw, "token_scores", lambda *given, **more: looked_at.append(given[1]) or scored(*given, **more)
    )
    fit = problem(new_decoder("llama"))
    u, _, history = fit_adamw(fit, 30.0, seed=0)
    assert u.any()
    assert len(fit.queries) > 4
    assert [len(queries) for queries in looked_at] == [4, 4]
    assert looked_at[0] == looked_at[1]
    assert history[-1] < history[0]


def test_a_seed_repeats_its_vectors(few_steps, monkeypatch):
    monkeypatch.setattr(plan, "ADAMW", plan.ADAMW.model_copy(update={"batch_size": 2}))
    fits = [fit_adamw(problem(new_decoder("llama")), 30.0, seed)[0] for seed in (0, 0, 1)]
    assert torch.equal(fits[0], fits[1])
    assert not torch.equal(fits[0], fits[2])


@pytest.mark.parametrize("config", [AnchoredConfig(prior_std=0.0), AnchoredConfig(steps=0)])
def test_without_reach_or_steps_a_fit_yields_the_plain_model(config):
    with pytest.warns(MemoryWarning):
        injection = anchor(new_decoder("llama"), FILMS, SHOWN, config.model_copy(update={"memory": 1e-5}))
    assert not injection.context.any()
    assert injection.settings["tau"] is None


@pytest.mark.parametrize("factor", [float("nan"), 3e38])
def test_a_model_that_is_not_finite_is_refused(factor):
    decoder = new_decoder("llama")
    with torch.no_grad():
        decoder.model.lm_head.weight *= factor
    with pytest.warns(MemoryWarning):
        raises("not finite", anchor, decoder, FILMS, SHOWN, AnchoredConfig(memory=1e-5))


def test_batches_are_halved_when_memory_runs_out(few_steps, monkeypatch):
    """To rounding: sums of a batch are of its halves."""
    whole = fit_adamw(problem(new_decoder("llama")), 30.0, 0)[0]
    decoder = new_decoder("llama")
    forward = decoder.forward

    def narrow(batch, **more):
        if torch.is_grad_enabled() and len(batch.rows) > 2:
            raise torch.OutOfMemoryError
        return forward(batch, **more)

    monkeypatch.setattr(decoder, "forward", narrow)
    with pytest.warns(MemoryWarning, match="smaller batches"):
        halved = fit_adamw(problem(decoder), 30.0, 0)[0]
    torch.testing.assert_close(halved, whole, atol=2e-2, rtol=0)
    assert torch.corrcoef(torch.stack([halved, whole]))[0, 1] > 0.99


@pytest.mark.parametrize("end", [1.1, float("nan")])
def test_a_fit_that_does_not_lower_the_objective_yields_the_plain_model(few_steps, monkeypatch, end):
    losses = iter([1.0, end])
    monkeypatch.setattr(Objective, "mean_loss", lambda *_: next(losses))
    with pytest.warns(UserWarning, match="lower prior_std"):
        injection = anchor(new_decoder("llama"), FILMS, SHOWN, AnchoredConfig(memory=1e-5))
    assert not injection.context.any()


def test_the_history_holds_the_loss_without_the_prior(few_steps, monkeypatch):
    fit, taken = problem(new_decoder("llama")), []

    def recording(parameters, loss, *more):
        def recorded(chosen):
            taken.append((parameters[0].detach().clone(), list(chosen)))
            return loss(chosen)

        return train(parameters, recorded, *more)

    schedule = TrainConfig(epochs=3, batch_size=len(SHOWN), lr=0.05, lr_final=0.05, weight_decay=0.0)
    monkeypatch.setattr(adamw, "adamw_schedule", lambda *_, **__: schedule)
    monkeypatch.setattr(adamw, "train", recording)
    end = fit_adamw(fit, 0.1, seed=0)  # a prior that weighs as much as the loss

    def loss(u):
        return cross_entropy(fit.scores(u).double(), fit.gold).item()

    points = [torch.zeros_like(taken[0][0]), *(u for u, _ in taken), end.parameters]
    assert len(end.history) == 5
    assert end.history[:-1] == pytest.approx([*map(loss, points[:-1])], abs=1e-5)
