"""Anchored calibration against its objective, minimised and differentiated in other ways."""

from dataclasses import replace

import pytest
import torch

from i2cl import Example, I2CLError, Task, Template, extract
from i2cl.core import anchored
from i2cl.core.anchored import AnchoredConfig, anchor
from i2cl.core.edits import LinearEdit
from i2cl.core.tangent import Tangent
from i2cl.methods import make_methods
from i2cl.models.decoder import Decoder
from i2cl.models.scoring import Questions, score
from tiny import tiny_model, tiny_tokenizer

SHOWN = tuple(
    Example(text, label)
    for text, label in [
        ("a warm film", 0),
        ("dull, dull, dull", 1),
        ("funny and kind all the way", 0),
        ("no", 2),
    ]
)
FULL = pytest.mark.filterwarnings("ignore::i2cl.models.encoding.ScoringWarning")


def task(full=False):
    words = ("good film", "good grief", "bad") if full else ("good", "bad", "unsure")
    return Task("films", words, Template("Review: {text}\nSentiment: {label}"))


def made(model_type="llama"):
    return Decoder(tiny_model(model_type), tiny_tokenizer(), name=model_type)


def problem(decoder, asked, config, shown=SHOWN):
    context = extract(decoder, asked, shown)
    fit = anchored._Fit(Questions(decoder, asked), shown, context, config)
    fit.tau = fit.first().tau(config.reach)
    return fit


def objective(fit, u):
    scores = fit.scores(u).double()
    loss = torch.nn.functional.cross_entropy(scores, fit.target, reduction="sum")
    return (loss + fit.tau / 2 * u.double().square().sum()).item()


@FULL
@pytest.mark.parametrize("full", [False, True], ids=["first tokens", "whole labels"])
@pytest.mark.parametrize("free", ["vectors", "scalars"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_derivatives_are_those_of_finite_differences(model_type, free, full):
    fit = problem(made(model_type), task(full), AnchoredConfig(free=free, reach=3.0))
    generator = torch.Generator().manual_seed(0)
    u = 0.1 * torch.randn(fit.start.numel(), generator=generator)
    along = torch.randn(fit.start.numel(), generator=generator)
    point = fit.point(u)
    torch.testing.assert_close(
        point.scores.log_softmax(-1), fit.scores(u).log_softmax(-1), atol=1e-4, rtol=1e-4
    )
    step = 1e-2

    def apart(scores):  # a constant a row is free
        return scores - scores.mean(-1, keepdim=True)

    differences = (apart(fit.scores(u + step * along)) - apart(fit.scores(u - step * along))) / (2 * step)
    found = apart((point.jacobian @ along).view_as(differences))
    torch.testing.assert_close(found, differences, atol=2e-2 * differences.abs().max().item(), rtol=0)


@pytest.mark.parametrize("scale", ["balanced", "fisher", "context"])
@pytest.mark.parametrize("free", ["vectors", "scalars"])
def test_it_ends_where_the_objective_is_smallest(free, scale):
    decoder = made()
    config = AnchoredConfig(free=free, prior_scale=scale, reach=3.0, steps=100, tolerance=1e-7)
    fit = problem(decoder, task(), config)
    injection = anchor(decoder, task(), SHOWN, fit.context, config)
    end = objective_of(fit, injection)
    assert end < 0.9 * objective(fit, torch.zeros(fit.start.numel()))
    generator = torch.Generator().manual_seed(1)
    u = end_of(fit, injection)
    for _ in range(20):  # no direction leads lower
        step = torch.randn(u.numel(), generator=generator)
        for size in (0.03, -0.03):
            assert objective(fit, u + size * step / step.norm()) > end * (1 - 1e-4)
    gradient = stationary(fit, u)
    assert gradient < 0.1 * stationary(fit, torch.zeros_like(u))


@pytest.mark.parametrize("scale", ["balanced", "fisher", "context"])
def test_a_step_that_brings_less_than_its_share_is_damped(scale):
    decoder = made()
    config = AnchoredConfig(reach=30.0, prior_scale=scale, trust=0.0)
    fit = problem(decoder, task(), config)
    u = torch.zeros(fit.start.numel())
    point = fit.first()
    start = fit.objective(point.scores, u)
    moved, scores, value, factor = fit.stepped(point, u, start, 1.0)
    assert value == fit.objective(scores, moved) < start
    straight = point.scores + (point.jacobian @ (moved - u)).view_as(point.scores)
    brought = (start - value) / (start - fit.objective(straight, moved))
    assert 0 < brought < 1
    fit.config = config.model_copy(update={"trust": brought + (1 - brought) / 2})
    moved, scores, value, damped = fit.stepped(point, u, start, 1.0)
    straight = point.scores + (point.jacobian @ (moved - u)).view_as(point.scores)
    assert damped > factor
    assert start - value > fit.config.trust * (start - fit.objective(straight, moved))


def end_of(fit, injection):
    theta = injection.context.values if fit.config.free == "vectors" else injection.coefficients
    return torch.where(fit.scale > 0, (theta - fit.start) / fit.scale, 0).flatten()


def objective_of(fit, injection):
    return objective(fit, end_of(fit, injection))


def stationary(fit, u):
    point = fit.point(u)
    slope = (point.scores.double().softmax(-1) - fit.target).flatten().float()
    return (point.jacobian.T @ slope + fit.tau * u).norm().item()


def test_history_falls_and_is_the_loss_among_labels():
    decoder = made()
    context = extract(decoder, task(), SHOWN)
    told = []
    injection = anchor(
        decoder,
        task(),
        SHOWN,
        context,
        AnchoredConfig(reach=3.0, steps=4),
        progress=lambda *at: told.append(at),
    )
    texts, gold = [one.text for one in SHOWN], torch.tensor([one.label for one in SHOWN])

    def loss(scores):
        return torch.nn.functional.cross_entropy(scores, gold).item()

    plain = Questions(decoder, task()).scores(texts)
    assert injection.history[0] == pytest.approx(loss(plain), abs=1e-5)
    assert injection.history[-1] == pytest.approx(loss(injection.scores(decoder, texts)), abs=1e-5)
    assert list(injection.history) == sorted(injection.history, reverse=True)
    assert [at[0] for at in told] == list(range(1, len(injection.history)))
    assert told[-1][2] == injection.history[-1]


@pytest.mark.parametrize("config", [AnchoredConfig(reach=0.0), AnchoredConfig(steps=0)])
def test_under_an_infinite_prior_it_is_the_plain_model(config):
    decoder = made("gpt2")
    injection = anchor(decoder, task(), SHOWN, extract(decoder, task(), SHOWN), config)
    texts = ["fine", "so so"]
    plain = Questions(decoder, task()).scores(texts)
    torch.testing.assert_close(injection.scores(decoder, texts), plain, atol=0, rtol=0)


def test_the_scale_may_be_that_of_the_context_vector_and_layers_can_be_left_out():
    decoder = made()
    context = extract(decoder, task(), SHOWN)
    quiet = replace(context, values=context.values * torch.tensor([1.0, 0.0])[None, :, None])
    injection = anchor(decoder, task(), SHOWN, quiet, AnchoredConfig(reach=3.0, prior_scale="context"))
    assert injection.context.values[:, 0].norm() > 0
    assert injection.context.values[:, 1].norm() == 0
    late = anchor(decoder, task(), SHOWN, context, AnchoredConfig(reach=3.0, anchored_layers="late"))
    kept = late.context.values.flatten(1).norm(dim=1) > 0
    assert kept.tolist() == [layer >= 2 * decoder.layers // 3 for layer in range(decoder.layers)]


def test_under_an_infinite_prior_it_is_the_priors_mean():
    decoder = made()
    context = extract(decoder, task(), SHOWN)
    for free, kept in (("vectors", context.values * 0.1), ("scalars", context.values)):
        config = AnchoredConfig(reach=0.0, prior_lambda=0.1, free=free)
        injection = anchor(decoder, task(), SHOWN, context, config)
        torch.testing.assert_close(injection.context.values, kept, atol=0, rtol=0)
        amount = 0.1 if free == "scalars" else 1.0
        assert injection.coefficients.flatten(0, 1).unique(dim=0).tolist() == [[pytest.approx(amount), 1.0]]


@pytest.mark.parametrize("scale", ["balanced", "equal", "fisher"])
def test_these_scales_forget_where_the_context_vector_is_large(scale):
    decoder = made()
    context = extract(decoder, task(), SHOWN)
    quiet = replace(context, values=context.values * torch.tensor([1.0, 0.0])[None, :, None])
    found = anchor(decoder, task(), SHOWN, quiet, AnchoredConfig(reach=3.0, prior_scale=scale))
    turned = replace(context, values=quiet.values.flip(0, 1))
    same = anchor(decoder, task(), SHOWN, turned, AnchoredConfig(reach=3.0, prior_scale=scale))
    assert found.context.values[:, 1].norm() > 0
    torch.testing.assert_close(found.context.values, same.context.values)


@FULL
@pytest.mark.parametrize("free", ["vectors", "scalars"])
@pytest.mark.parametrize("full", [False, True], ids=["first tokens", "whole labels"])
def test_on_fishers_scale_all_numbers_move_the_scores_alike(full, free):
    fit = problem(made(), task(full), AnchoredConfig(free=free, reach=3.0, prior_scale="fisher"))
    point = fit.first()
    slopes = point.jacobian.view(*point.scores.shape, -1)
    apart = (slopes - slopes.mean(1, keepdim=True)).square().mean((0, 1)).sqrt()
    assert (apart < 1.001).all()
    assert (apart > 0.999).float().mean() > 0.9
    again = fit.point(torch.zeros(fit.start.numel()))
    torch.testing.assert_close(point.jacobian, again.jacobian, atol=1e-4, rtol=1e-4)


@FULL
@pytest.mark.parametrize("full", [False, True], ids=["first tokens", "whole labels"])
def test_on_the_balanced_scale_all_sites_move_the_scores_alike(full):
    """Whatever the context vector is; a site has one number, and what is left out stays so."""
    config = AnchoredConfig(reach=3.0, anchored_layers="late")
    assert config.prior_scale == "balanced"
    fit = problem(made(), task(full), config)
    point = fit.first()
    late = torch.arange(fit.questions.decoder.layers) >= 2 * fit.questions.decoder.layers // 3
    assert (fit.scale == fit.scale[..., :1]).all()
    assert ((fit.scale > 0).all(-1).all(-1) == late).all()
    slopes = point.jacobian.view(*point.scores.shape, *fit.start.shape)
    apart = (slopes - slopes.mean(1, keepdim=True)).square().mean((0, 1, 4)).sqrt()
    torch.testing.assert_close(apart[late], torch.ones_like(apart[late]), atol=1e-3, rtol=0)
    assert (apart[~late] == 0).all()


@pytest.mark.parametrize("size", [0.01, 1.0, 7.0])
def test_reach_is_the_spread_of_label_scores_under_the_prior_whatever_the_model(size):
    generator = torch.Generator().manual_seed(0)
    jacobian = size * torch.randn(4 * 3, 50, generator=generator)
    point = Tangent(torch.zeros(4, 3), jacobian)
    drawn = torch.randn(50, 20_000, generator=generator) / point.tau(2.0) ** 0.5
    moved = (jacobian @ drawn).view(4, 3, -1)
    spread = (moved - moved.mean(1, keepdim=True)).square().mean().sqrt()
    assert spread.item() == pytest.approx(2.0, rel=0.02)


def test_the_model_is_left_as_found():
    decoder = made()
    before = {name: value.clone() for name, value in decoder.model.state_dict().items()}
    decoder.model.train()
    asked = [parameter.requires_grad for parameter in decoder.model.parameters()]
    anchor(decoder, task(), SHOWN, extract(decoder, task(), SHOWN), AnchoredConfig(reach=3.0, steps=1))
    assert decoder.model.training
    assert asked == [parameter.requires_grad for parameter in decoder.model.parameters()]
    assert all(torch.equal(value, before[name]) for name, value in decoder.model.state_dict().items())
    assert all(parameter.grad is None for parameter in decoder.model.parameters())
    assert not any(module._forward_hooks for module in decoder.model.modules())


@pytest.mark.parametrize("free", ["vectors", "scalars"])
def test_what_is_injected_lies_where_theta_does(free):
    fit = problem(made(), task(), AnchoredConfig(free=free, reach=1.0))
    for found in fit.linear(fit.start[None].to("meta")):
        assert found.device.type == "meta"


def test_a_step_that_overflows_is_damped(monkeypatch):
    decoder = made()
    context = extract(decoder, task(), SHOWN)
    scores, calls = anchored._Fit.scores, []

    def overflowing(fit, u):
        calls.append(u)
        found = scores(fit, u)
        return found * float("nan") if len(calls) == 1 else found

    monkeypatch.setattr(anchored._Fit, "scores", overflowing)
    injection = anchor(decoder, task(), SHOWN, context, AnchoredConfig(reach=3.0, steps=1))
    assert len(calls) > 1
    assert injection.history[1] < injection.history[0]


def test_a_model_that_overflows_by_itself_is_told():
    decoder = made()
    context = extract(decoder, task(), SHOWN)
    with torch.no_grad():
        decoder.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(I2CLError, match="not finite: load the model in float32"):
        anchor(decoder, task(), SHOWN, replace(context, base=None))


def test_more_scores_than_a_kernel_holds_are_refused():
    decoder = made()
    shown = SHOWN * 400
    context = extract(decoder, task(), SHOWN)
    with pytest.raises(I2CLError, match=r"1600 demonstrations times 3 labels are 4800 scores.*fewer"):
        anchor(decoder, task(), shown, context)


@pytest.mark.parametrize("reach", [-1.0, 1e5, float("inf"), float("nan")])
def test_a_reach_that_is_none_is_refused(reach):
    with pytest.raises(ValueError, match="reach"):
        AnchoredConfig(reach=reach)


def test_the_seed_is_told():
    decoder = made()
    (method,) = make_methods(["anchored"], {"steps": 1})
    assert method.injection(decoder, task(), SHOWN, 7).seed == 7


def test_scores_are_those_of_an_edit():
    fit = problem(made(), task(), AnchoredConfig(reach=3.0))
    u = torch.full((fit.start.numel(),), 0.05)
    vectors, pairs = fit.linear(fit.theta(u)[None])
    edit = LinearEdit(vectors[0], pairs[0])
    wanted = score(fit.questions.decoder, fit.queries, fit.questions.labels, edit=edit)
    torch.testing.assert_close(fit.scores(u), wanted, atol=0, rtol=0)
