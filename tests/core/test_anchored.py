"""Anchored calibration by Gauss-Newton against independent minimizers and finite differences."""

import pytest
import torch
from scipy import optimize

from fitting import new_decoder, raises
from i2cl import Example, Injection, Task, Template, make_methods
from i2cl.core import gauss_newton
from i2cl.core.anchored import AnchoredConfig, anchor
from i2cl.core.gauss_newton import Step, gauss_newton_step, solve_kernel_regression, summed_loss
from i2cl.core.objective import Objective, score_differences, score_directions, score_variance
from i2cl.models.edits import AffineEdit
from i2cl.models.scoring import LabelScorer, score

from .derivatives import linearize

WORDS = ("a warm film", "dull, dull, dull", "funny and kind all the way", "no")
SHOWN = tuple(Example(text, label) for text, label in zip(WORDS, (0, 1, 0, 2), strict=True))


def task(words=False):
    words = ("good film", "good grief", "bad") if words else ("good", "bad", "unsure")
    return Task("films", words, Template("Review: {text}\nSentiment:\n{label}"))


def problem(decoder, asked, shown=SHOWN, sublayers="both"):
    return Objective(LabelScorer.for_fit(decoder, asked), shown, sublayers)


def started(decoder, asked, config, shown=SHOWN):
    """A problem with its scale and first point, and the strength of the prior."""
    fit = problem(decoder, asked, shown)
    point, _, variance = fit.linearize_start()
    return fit, point, variance / config.prior_std**2


def objective(fit, u, tau):
    loss = torch.nn.functional.cross_entropy(fit.scores(u).double(), fit.gold, reduction="sum")
    return (loss + tau / 2 * u.double().square().sum()).item()


def stationary(fit, u, tau):
    point, _ = linearize(fit, u)
    chances = torch.nn.functional.pad(point.differences, (1, 0)).softmax(-1)[:, 1:].flatten().float()
    return (point.jacobian.T @ chances + tau * u).norm().item()


SCORINGS = pytest.mark.parametrize("words", [False, True], ids=["first tokens", "words"])
TO_THE_END = AnchoredConfig(prior_std=3.0, steps=100, tolerance=1e-7, settled=0, say_label=False)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@SCORINGS
def test_derivatives_match_finite_differences(model_type, words):
    fit = problem(new_decoder(model_type), task(words))
    _, start, _ = fit.linearize_start()
    expected = fit.scores(torch.zeros(fit.size.parameters))
    torch.testing.assert_close(start.log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=1e-4)
    generator = torch.Generator().manual_seed(0)
    u = 0.02 * torch.randn(fit.size.parameters, generator=generator)
    along = torch.randn(fit.size.parameters, generator=generator)
    u[: fit.vector_size] /= fit.unit.flatten().clamp_min(1e-9)
    along[: fit.vector_size] /= fit.unit.flatten().clamp_min(1e-9)
    point, _ = linearize(fit, u)
    step = 2e-3

    def values(at):
        scores = fit.scores(at).double()
        others = torch.nn.functional.one_hot(fit.gold, 3) == 0
        return scores[others].view(-1, 2) - scores.gather(1, fit.gold[:, None])

    torch.testing.assert_close(point.differences, values(u), atol=1e-4, rtol=1e-4)
    differences = (values(u + step * along) - values(u - step * along)) / (2 * step)
    result = (point.jacobian @ along).view_as(differences).double()
    torch.testing.assert_close(result, differences, atol=3e-2 * differences.abs().max().item(), rtol=0)


@pytest.mark.parametrize("labels", [2, 5])
def test_columns_hold_the_whole_loss(labels):
    generator = torch.Generator().manual_seed(labels)
    scores = 3 * torch.randn(7, labels, generator=generator)
    gold = torch.randint(labels, (7,), generator=generator)
    result = score_differences(scores, gold)
    assert result.shape == (7, labels - 1)
    expected = torch.nn.functional.cross_entropy(scores.double(), gold, reduction="sum")
    assert summed_loss(result) == pytest.approx(expected.item())
    slopes = score_directions(gold, labels)
    torch.testing.assert_close((slopes.double() @ scores.double()[..., None])[..., 0], result)
    chances = torch.nn.functional.pad(result, (1, 0)).softmax(-1)[:, 1:]
    gradient = scores.double().softmax(-1) - torch.nn.functional.one_hot(gold, labels)
    torch.testing.assert_close((chances[:, None] @ slopes.double())[:, 0], gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(4, 1), (3, 4)])
def test_kernel_regression_finds_the_optimum_of_scipy(shape):
    generator = torch.Generator().manual_seed(0)
    jacobian = torch.randn(shape[0] * shape[1], 30, generator=generator, dtype=torch.float64)
    start, tau = torch.randn(*shape, generator=generator, dtype=torch.float64), 0.3
    kernel = jacobian @ jacobian.T

    def value(u):
        u = torch.as_tensor(u, dtype=torch.float64)
        return summed_loss(start + (jacobian @ u).view(shape)) + (tau / 2 * u @ u).item()

    expected = optimize.minimize(value, torch.zeros(30).double().numpy(), options={"gtol": 1e-6})
    result = jacobian.T @ solve_kernel_regression(start, kernel, tau)
    assert value(result.numpy()) <= expected.fun + 1e-6


def test_a_fit_ends_at_the_minimum_of_the_objective():
    decoder = new_decoder("llama")
    fit, _, tau = started(decoder, task(), TO_THE_END)
    injection = anchor(decoder, task(), SHOWN, TO_THE_END)
    assert injection.settings["tau"] == pytest.approx(tau)
    u = (injection.context / fit.unit).flatten()
    end = objective(fit, u, tau)
    assert end < 0.9 * objective(fit, torch.zeros_like(u), tau)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):  # no direction leads lower
        step = torch.randn(u.numel(), generator=generator)
        for size in (0.03, -0.03):
            assert objective(fit, u + size * step / step.norm(), tau) > end * (1 - 1e-4)
    assert stationary(fit, u, tau) < 0.1 * stationary(fit, torch.zeros_like(u), tau)


def moving(words):
    """A problem linearized around 0, other parameters, and the linearization and scores there."""
    fit = problem(new_decoder("llama"), task(words))
    point, _ = linearize(fit, torch.zeros(fit.unit.numel()))
    u = 0.05 * torch.randn(fit.unit.numel(), generator=torch.Generator().manual_seed(0))
    return fit, point, u, *linearize(fit, u)


@SCORINGS
def test_only_unsettled_demonstrations_are_differentiated_again(words):
    fit, point, u, fresh, scores = moving(words)
    losses = torch.nn.functional.cross_entropy(scores, fit.gold, reduction="none")
    settled = losses < losses.median()
    assert 0 < settled.sum() < len(SHOWN)
    before = point.jacobian.clone().view(*point.differences.shape, -1)
    after = fit.relinearize(point, u, scores, (~settled).nonzero()[:, 0].tolist())
    now = after.jacobian.view(*after.differences.shape, -1)
    assert torch.equal(now[settled], before[settled])
    torch.testing.assert_close(now[~settled], fresh.jacobian.view_as(now)[~settled], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(after.differences[~settled], fresh.differences[~settled], atol=1e-4, rtol=1e-4)
    wanted = torch.nn.functional.cross_entropy(scores.double(), fit.gold, reduction="sum")
    assert summed_loss(after.differences) == pytest.approx(wanted.item(), rel=1e-5)


def test_a_step_that_gains_less_than_predicted_is_damped():
    fit, point, tau = started(new_decoder("llama"), task(), AnchoredConfig(prior_std=30.0))
    u = torch.zeros(fit.unit.numel())
    at = Step(u, fit.scores(u), float(objective(fit, u, tau)), 1.0, 0.0)

    def share(step):
        straight = point.differences + (point.jacobian @ step.parameters).double().view_as(point.differences)
        prior = tau / 2 * step.parameters.double().square().sum().item()
        return (at.objective - step.objective) / (at.objective - summed_loss(straight) - prior)

    any_gain = gauss_newton_step(fit, point, at, tau, 0.0)
    assert any_gain.objective == pytest.approx(objective(fit, any_gain.parameters, tau))
    assert any_gain.objective < at.objective
    assert 0 < share(any_gain) < 1
    trust = (1 + share(any_gain)) / 2
    damped = gauss_newton_step(fit, point, at, tau, trust)
    assert damped.damping > any_gain.damping
    assert share(damped) > trust


def test_history_falls_and_is_the_loss_among_labels():
    decoder, seen = new_decoder("llama"), []
    config = AnchoredConfig(prior_std=3.0, steps=4, say_label=False)
    injection = anchor(decoder, task(), SHOWN, config, progress=lambda *at: seen.append(at))
    texts, gold = [one.text for one in SHOWN], torch.tensor([one.label for one in SHOWN])

    def loss(scores):
        return torch.nn.functional.cross_entropy(scores, gold).item()

    plain = LabelScorer(decoder, task()).scores(texts)
    assert injection.history[0] == pytest.approx(loss(plain), abs=1e-5)
    assert injection.history[-1] == pytest.approx(loss(injection.log_probs(decoder, texts)), abs=1e-5)
    assert list(injection.history) == sorted(injection.history, reverse=True)
    assert [at[0] for at in seen] == list(range(1, len(injection.history)))
    assert seen[-1][2] == injection.history[-1]


@pytest.mark.parametrize("config", [AnchoredConfig(prior_std=0.0), AnchoredConfig(steps=0)])
def test_under_an_infinite_prior_it_is_the_plain_model(config):
    decoder = new_decoder("gpt2")
    injection = anchor(decoder, task(), SHOWN, config)
    texts = ["fine", "so so"]
    plain = LabelScorer(decoder, task()).scores(texts).log_softmax(-1)
    torch.testing.assert_close(injection.log_probs(decoder, texts), plain, atol=0, rtol=0)


@SCORINGS
def test_on_the_balanced_unit_all_sites_move_the_scores_equally(words):
    """A sublayer has one scale, and sublayers without a vector stay at 0."""
    fit = problem(new_decoder("llama"), task(words), sublayers="mlp")
    point, _, variance = fit.linearize_start()
    assert (fit.unit == fit.unit[..., :1]).all()
    assert ((fit.unit > 0) == torch.tensor([False, True])[:, None]).all()
    slopes = point.jacobian.view(*point.differences.shape, -1)[..., : fit.vector_size]
    slopes = torch.nn.functional.pad(slopes, (0, 0, 1, 0))
    spread = (slopes - slopes.mean(1, keepdim=True)).square().mean((0, 1)).view(*fit.unit.shape)
    layers = fit.scorer.decoder.layers
    torch.testing.assert_close(spread[:, 1].mean(-1), torch.ones(layers), atol=1e-3, rtol=0)
    assert variance == pytest.approx(spread.sum().item(), rel=1e-4)


@pytest.mark.parametrize("size", [0.01, 1.0, 7.0])
def test_reach_is_the_standard_deviation_of_label_scores_under_the_prior(size):
    generator = torch.Generator().manual_seed(0)
    jacobian = size * torch.randn(4 * 2, 50, generator=generator)
    tau = score_variance(jacobian.view(4, 2, -1), None).sum().item() / 2.0**2
    drawn = torch.randn(50, 20_000, generator=generator) / tau**0.5
    moved = torch.nn.functional.pad((jacobian @ drawn).view(4, 2, -1), (0, 0, 1, 0))
    spread = (moved - moved.mean(1, keepdim=True)).square().mean().sqrt()
    assert spread.item() == pytest.approx(2.0, rel=0.02)


def test_a_step_that_overflows_is_damped(monkeypatch):
    decoder = new_decoder("llama")
    scores, calls = Objective.scores, []

    def overflowing(fit, u):
        calls.append(u)
        result = scores(fit, u)
        return result * float("nan") if len(calls) == 1 else result

    monkeypatch.setattr(Objective, "scores", overflowing)
    injection = anchor(decoder, task(), SHOWN, AnchoredConfig(prior_std=3.0, steps=1))
    assert len(calls) > 1
    assert injection.history[1] < injection.history[0]


def test_a_model_that_overflows_is_refused():
    decoder = new_decoder("llama")
    with torch.no_grad():
        decoder.model.model.norm.weight.fill_(float("nan"))
    raises("not finite: load the model in float32", anchor, decoder, task(), SHOWN)


def test_a_fit_that_does_not_lower_the_loss_warns_and_yields_the_plain_model(monkeypatch):
    monkeypatch.setattr(gauss_newton, "gauss_newton_step", lambda *_, **__: None)
    with pytest.warns(UserWarning, match="yields the plain model: lower prior_std"):
        injection = anchor(new_decoder("llama"), task(), SHOWN)
    assert not injection.context.any()


@pytest.mark.parametrize("prior_std", [300.0, 10_000.0])
def test_a_wide_prior_takes_damped_steps(prior_std):
    injection = anchor(new_decoder("llama"), task(), SHOWN, AnchoredConfig(prior_std=prior_std))
    assert injection.history[-1] < 0.5 * injection.history[0]


@pytest.mark.parametrize("prior_std", [-1.0, 1e5, float("inf"), float("nan")])
def test_an_invalid_prior_std_is_refused(prior_std):
    with pytest.raises(ValueError, match="prior_std"):
        AnchoredConfig(prior_std=prior_std)


def test_demonstrations_of_one_class_are_refused():
    message = "^anchored calibration needs demonstrations of at least two classes: add some$"
    raises(message, anchor, new_decoder("llama"), task(), [Example("a warm film", 0)] * 3)


def test_scores_are_those_of_an_edit_and_the_seed_is_stored():
    (method,) = make_methods(["anchored"], {"steps": 1})
    assert method.fit_injection(new_decoder("llama"), task(), SHOWN, 7).seed == 7
    fit = problem(new_decoder("llama"), task())
    u = torch.full((fit.unit.numel(),), 0.05)
    vectors = fit.vectors(u)
    edit = AffineEdit(vectors, torch.ones(vectors.shape[:2]))
    wanted = score(fit.scorer.decoder, fit.queries, fit.scorer.labels, edit=edit)
    torch.testing.assert_close(fit.scores(u), wanted, atol=0, rtol=0)


def test_a_fitted_vector_claims_no_extraction(tmp_path):
    injection = anchor(new_decoder("llama"), task(), SHOWN, AnchoredConfig(steps=1, sublayers="mlp"))
    assert injection.description()["extraction"] == {"sublayers": "mlp"}
    injection.save_pretrained(tmp_path / "task")
    assert Injection.from_pretrained(tmp_path / "task").extraction.sublayers == "mlp"
    card = (tmp_path / "task" / "README.md").read_text()
    assert "separator" not in card.partition('"extraction"')[2].partition("}")[0]


@pytest.mark.parametrize(
    "labels",
    [
        ("card lost", "lost card", "card found"),
        ("spam", "not spam", "not not spam"),
        ("grade 1", "grade 11", "grade 12", "grade 21"),
    ],
    ids=["same words", "negations", "numbers"],
)
def test_labels_that_differ_in_order_or_repetition_of_words_can_be_fitted(labels):
    decoder = new_decoder("llama")
    asked = Task("similar", labels, Template("{text}\nLabel: {label}"))
    shown = [Example(text, at) for at, text in enumerate(WORDS[: len(labels)])]
    injection = anchor(decoder, asked, shown)
    assert injection.scoring == "words"
    assert injection.predict(decoder, [one.text for one in shown]) == list(labels)


def test_gauss_newton_fits_word_weights():
    decoder = new_decoder("llama")
    weights = anchor(decoder, task(words=True), SHOWN).word_weights
    start = LabelScorer(decoder, task(words=True), "words").labels.word_weights
    torch.testing.assert_close(weights.sum(0), torch.ones(3))
    assert (weights - start).abs().max() > 1e-3
