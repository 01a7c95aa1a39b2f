from contextlib import ExitStack
from functools import partial
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fitting import PATHS, close, decoder_of, linear_edit, random_edit, raw_modules, replacing
from i2cl.core.ablations import NoisyEdit
from i2cl.models.batching import make_batch
from i2cl.models.edits import AffineEdit
from tiny import VOCABULARY

FAMILIES = list(PATHS)
LENGTHS = (9, 4, 14, 1)
GENERATOR = torch.Generator().manual_seed(0)
ROWS = [tuple(torch.randint(1, VOCABULARY, (length,), generator=GENERATOR).tolist()) for length in LENGTHS]
BATCH = make_batch(ROWS, torch.device("cpu"))
EVERYWHERE = torch.arange(max(LENGTHS)).expand(len(LENGTHS), -1)


def drawn(decoder, hook_point="sublayers"):
    """Return a vector and coefficients that change every sublayer."""
    return random_edit(decoder, 1, 0.3, (0.5, 1.0), sublayers=1 if hook_point == "hidden" else 2)


def by_hand(decoder, case, values, coefficients, *, hook_point="sublayers", mask=None):
    """Compute the logits of every position with plain torch hooks."""

    def mixed(vector, pair, old):
        rows = old.reshape(*BATCH.input_ids.shape, -1)
        new = pair[0] * vector + pair[1] * rows
        new = new if mask is None else torch.where(mask[..., None], new, rows)
        return new.reshape(old.shape)

    changes = [
        (module, partial(mixed, values[layer, index], coefficients[layer, index]))
        for layer, modules in enumerate(raw_modules(decoder.model, case, hook_point))
        for index, module in enumerate(modules)
    ]
    with replacing(changes), torch.no_grad():
        return decoder.model(BATCH.input_ids, use_cache=False).logits


def edited(decoder, edit, batch=BATCH, at=EVERYWHERE):
    with torch.no_grad():
        return decoder.forward(batch, at=at, edit=edit)


def plain(decoder):
    with torch.no_grad():
        return decoder.model(BATCH.input_ids, use_cache=False).logits


# The linear combination


@pytest.mark.parametrize(
    ("positions", "dtype"),
    [
        *product(("first", "last", "random"), ["float32"]),
        *product(["all"], ("float32", "bfloat16", "float16")),
    ],
)
@pytest.mark.parametrize("case", FAMILIES)
def test_coefficients_zero_and_one_do_not_change_the_model(case, positions, dtype):
    decoder = decoder_of(case, getattr(torch, dtype))
    values, coefficients = drawn(decoder)
    edit = linear_edit(values, torch.tensor([0.0, 1.0]).expand_as(coefficients), positions=positions)
    assert torch.equal(edited(decoder, edit), plain(decoder))


def masked(places):
    mask = torch.zeros(BATCH.input_ids.shape, dtype=torch.bool)
    mask[range(len(LENGTHS)), places] = True
    return mask


MASKS = {"all": None, "first": masked([0] * len(LENGTHS)), "last": masked([n - 1 for n in LENGTHS])}


@pytest.mark.parametrize("positions", MASKS)
@pytest.mark.parametrize("hook_point", ["sublayers", "hidden"])
@pytest.mark.parametrize("case", FAMILIES)
def test_edit_matches_the_linear_combination_at_chosen_tokens(case, hook_point, positions):
    decoder = decoder_of(case)
    values, coefficients = drawn(decoder, hook_point)
    result = edited(decoder, linear_edit(values, coefficients, hook_point=hook_point, positions=positions))
    assert close(
        result, by_hand(decoder, case, values, coefficients, hook_point=hook_point, mask=MASKS[positions])
    )
    assert not close(result, plain(decoder))


@pytest.mark.parametrize(("dtype", "more"), [(torch.bfloat16, 3e-3), (torch.float16, 4e-4)])
def test_coefficients_are_not_rounded_to_the_precision_of_the_model(dtype, more):
    generator = torch.Generator().manual_seed(2)
    output = torch.randn(4, 50, 32, generator=generator).to(dtype)
    values = torch.randn(1, 2, 32, generator=generator)
    assert torch.tensor(1 + more).to(dtype) == 1
    result = linear_edit(values, torch.tensor([1.0, 1 + more]).expand(1, 2, 2)).output(0, 0, output, BATCH)
    assert result.dtype == dtype
    output, rest = output.double(), result.double() - values[0, 0]
    slope = (rest * output).sum() / output.square().sum()
    assert slope - 1 == pytest.approx(more, rel=0.3)


def random_places(seed, rows=ROWS):
    """Return the token that "random" chooses, using a sublayer that outputs zeros."""
    batch, ones = make_batch(rows, torch.device("cpu")), torch.ones(1, 2, 2)
    edit = linear_edit(torch.ones(1, 2, 3), ones, positions="random", seed=seed)
    seen = [edit.output(0, index, torch.zeros(*batch.input_ids.shape, 3), batch) for index in (0, 1)]
    assert torch.equal(*seen)
    assert (seen[0].sum((1, 2)) == 3).all()
    return seen[0].sum(-1).argmax(-1).tolist()


def test_random_position_is_independent_of_batching():
    result = [random_places(seed) for seed in range(40)]
    assert result[0] == random_places(0)
    for row, length in enumerate(LENGTHS):
        taken = {places[row] for places in result}
        assert taken <= set(range(length))
        assert len(taken) > length / 2
    for seed, together in enumerate(result[:5]):
        assert together == [random_places(seed, [row])[0] for row in ROWS]
        assert together[::-1] == random_places(seed, ROWS[::-1])
    decoder = decoder_of("gpt2")
    values, coefficients = drawn(decoder)
    result = edited(decoder, linear_edit(values, coefficients, positions="random", seed=3))
    mask = masked(random_places(3))
    assert close(result, by_hand(decoder, "gpt2", values, coefficients, mask=mask))


# Noise


def noisy(
    decoder, *, hook_point="sublayers", positions="all", active=None, seed=0, coefficients=None, **more
):
    values, drawn_coefficients = drawn(decoder, hook_point)
    coefficients = drawn_coefficients if coefficients is None else coefficients
    active = torch.ones(coefficients.shape[:2], dtype=torch.bool) if active is None else active
    edit = linear_edit(values, coefficients, hook_point=hook_point, positions=positions, seed=0)
    options = {"scale": 1e-2, "place": "residual", "sublayer_scale": decoder.sublayer_scale} | more
    return NoisyEdit(edit, active=active, generator=torch.Generator().manual_seed(seed), **options)


@pytest.mark.parametrize("place", ["residual", "sublayer"])
@pytest.mark.parametrize(("hook_point", "positions"), [("sublayers", "all"), ("hidden", "last")])
@pytest.mark.parametrize("case", FAMILIES)
def test_zero_noise_equals_the_linear_edit(case, place, hook_point, positions):
    decoder = decoder_of(case)
    values, coefficients = drawn(decoder, hook_point)
    result = edited(
        decoder, noisy(decoder, hook_point=hook_point, scale=0.0, place=place, positions=positions)
    )
    linear = linear_edit(values, coefficients, hook_point=hook_point, positions=positions)
    assert torch.equal(result, edited(decoder, linear))


def watched(decoder, case, edit):
    """Capture each block's input, raw sublayer outputs and output under an edit."""
    seen = {}

    def keep(layer, place, output):
        seen[layer, place] = output.reshape(*BATCH.input_ids.shape, -1).clone()

    def keep_input(layer, _module, args, kwargs):
        keep(layer, 0, args[0] if args else kwargs["hidden_states"])

    with ExitStack() as stack:
        pairs = raw_modules(decoder.model, case, "sublayers")
        for layer, (block, pair) in enumerate(zip(decoder.blocks, pairs, strict=True)):
            hook = block.register_forward_pre_hook(partial(keep_input, layer), with_kwargs=True)
            stack.callback(hook.remove)
            places = enumerate([*pair, block], start=1)
            stack.enter_context(replacing((module, partial(keep, layer, place)) for place, module in places))
        edited(decoder, edit)
    return [tuple(seen[layer, place] for place in range(4)) for layer in range(decoder.layers)]


def rms(values):
    return values.double().square().mean().sqrt().item()


def norms(values):
    return values.double().norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("place", ["residual", "sublayer"])
@pytest.mark.parametrize("case", FAMILIES)
def test_noise_norm_matches_the_paper(case, place):
    decoder, scale, steps = decoder_of(case), 1e-2, decoder_of(case).sublayer_scale
    values, coefficients = drawn(decoder)
    seen = watched(decoder, case, noisy(decoder, place=place))
    for layer, (before, attention, mlp, after) in enumerate(seen):
        amount, keep = coefficients[layer].unbind(-1)
        first_write = steps * (amount[0] * values[layer, 0] + keep[0] * attention)
        second_write = steps * (amount[1] * values[layer, 1] + keep[1] * mlp)
        noise = after.double() - before - first_write - second_write
        if place == "residual":
            sizes = norms(before + first_write), norms(before + first_write + second_write)
        else:
            sizes = norms(first_write), norms(second_write)
        size = (sizes[0].square() + sizes[1].square()).sqrt()
        assert rms(noise / (scale * size)) == pytest.approx(1, rel=0.1)
        assert abs((noise / (scale * size)).mean()) < 0.1


def test_noise_can_be_added_to_block_outputs():
    decoder = decoder_of("llama")
    values, coefficients = drawn(decoder, "hidden")
    edit = noisy(decoder, hook_point="hidden")
    block_output = torch.randn(*BATCH.input_ids.shape, decoder.d_model)
    exact = linear_edit(values, coefficients, hook_point="hidden").output(1, 0, block_output, BATCH)
    noise = edit.output(1, 0, block_output, BATCH) - exact
    assert rms(noise / (1e-2 * norms(exact))) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("place", ["residual", "sublayer"])
@pytest.mark.parametrize("case", ["llama", "gptj", "gemma2", "granite"])
def test_inactive_sites_get_neither_injection_nor_noise(case, place):
    decoder = decoder_of(case)
    active = torch.zeros(decoder.layers, 2, dtype=torch.bool)
    assert torch.equal(edited(decoder, noisy(decoder, place=place, active=active)), plain(decoder))
    active[1, 0] = True
    seen = watched(decoder, case, noisy(decoder, place=place, active=active))
    untouched = watched(decoder, case, None)
    assert all(torch.equal(*pair) for pair in zip(seen[0], untouched[0], strict=True))
    assert torch.equal(seen[1][1], untouched[1][1])
    assert not torch.equal(seen[1][3], untouched[1][3])


@pytest.mark.parametrize("place", ["residual", "sublayer"])
def test_noise_is_drawn_from_its_own_generator(place):
    decoder = decoder_of("llama")
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    result = [edited(decoder, noisy(decoder, place=place, seed=seed)) for seed in (0, 0, 1)]
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(result[0], result[1])
    assert not torch.equal(result[0], result[2])


def test_noise_has_no_gradient():
    decoder = decoder_of("llama")
    values, coefficients = drawn(decoder)
    output = torch.randn(2, 3, decoder.d_model)
    batch = make_batch([(1, 2, 3), (4, 5, 6)], torch.device("cpu"))
    gradients = []
    for noise in (False, True):
        free = coefficients.clone().requires_grad_()
        edit = linear_edit(values, free)
        edit = noisy(decoder, place="sublayer", scale=0.5, coefficients=free) if noise else edit
        edit.output(0, 1, output, batch).sum().backward()
        gradients.append(free.grad)
    assert torch.allclose(*gradients)


def test_noise_stays_finite_if_the_norm_overflows_in_half_precision():
    decoder = decoder_of("llama", torch.float16)
    output = torch.full((1, 1, decoder.d_model), 3e4, dtype=torch.float16)
    assert output.norm(dim=-1).isinf().all()
    unchanged = torch.tensor([0.0, 1.0]).expand(decoder.layers, 2, 2)
    edit = noisy(decoder, place="sublayer", scale=1e-3, coefficients=unchanged)
    assert edit.output(0, 0, output, make_batch([(1,)], torch.device("cpu"))).isfinite().all()


# Cost and caches


class FullSizeTensors(TorchDispatchMode):
    """Counts operations that produce a tensor of a given size."""

    def __init__(self, size):
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count += isinstance(result, torch.Tensor) and result.numel() == self.size
        return result


@pytest.mark.parametrize("layers", [4, 16])
def test_the_backward_pass_makes_no_full_size_gradient_for_each_hook_point(layers):
    vectors = torch.zeros(2, layers, 2, 3, requires_grad=True)
    edit = AffineEdit(vectors, torch.ones(2, layers, 2), tasks=torch.tensor([0, 1]))
    batch = make_batch([(1, 2), (3, 4)], torch.device("cpu"))
    outputs = torch.ones(2, 2, 3)
    total = sum(
        edit.output(layer, index, outputs, batch).sum() for layer, index in product(range(layers), (0, 1))
    )
    with FullSizeTensors(vectors.numel()) as counter:
        (gradient,) = torch.autograd.grad(total, [vectors])
    assert torch.equal(gradient, torch.full_like(gradient, 2.0))  # two tokens
    assert counter.count <= 2


def test_an_edit_can_be_used_on_a_model_that_moved_to_another_precision(monkeypatch):
    """The cache of vectors depends on the precision."""
    monkeypatch.setattr("i2cl.models.edits._keeps_alpha", lambda *_: True)
    values, pairs = torch.rand(1, 1, 8), torch.full((1, 1, 2), 0.7)
    outputs = torch.zeros(1, 2, 8)
    moved, fresh = (AffineEdit.linear(values, pairs) for _ in range(2))
    moved.output(0, 0, outputs.bfloat16())
    assert torch.equal(moved.output(0, 0, outputs), fresh.output(0, 0, outputs))


def test_trained_vectors_can_be_differentiated_in_several_passes():
    values = torch.ones(1, 1, 8, requires_grad=True)
    edit = AffineEdit(values, torch.ones(1, 1))
    for _ in range(2):
        edit.output(0, 0, torch.zeros(1, 1, 8)).sum().backward()
    assert torch.equal(values.grad, torch.full_like(values, 2.0))
