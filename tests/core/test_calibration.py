import math
from dataclasses import replace
from functools import cache
from itertools import chain
from unittest.mock import Mock

import pytest
import torch

from fitting import FAMILIES as BASIC, decoder_of, encode, injecting, log_probability, raises
from i2cl import CalibrationConfig, Decoder, ExtractConfig, calibrate, extract
from i2cl.core.ablations import NoisyEdit
from i2cl.models.label_tokens import ScoringWarning
from i2cl.models.scoring import labelled_batch
from i2cl.tasks import Example, Task, Template
from tiny import tiny_model, tiny_tokenizer

FAMILIES = [*BASIC, "opt", "gemma2", "falcon", "bloom", "granite", "mpt", "phi"]
TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
TEXTS = ("a warm film", "dull", "a funny, warm and funny film", "a lifeless film", "funny")
SHOTS = tuple(Example(text, row % 2) for row, text in enumerate(TEXTS))
UNTOUCHED = torch.tensor([0.0, 1.0])


@cache
def context_of(case, sublayers="both", dtype=torch.float32):
    return extract(decoder_of(case, dtype), TASK, SHOTS, ExtractConfig(sublayers=sublayers))


def fit(case="llama", *, sublayers="both", seed=0, task=TASK, shots=SHOTS, context=None, **config):
    names = ("scoring", "start", "batches", "progress")
    arguments = {name: config.pop(name) for name in names if name in config}
    config = CalibrationConfig(**({"epochs": 2} | config))
    extracted = context_of(case, sublayers)
    if context is not None:
        coefficients = torch.ones(*context.shape[:2], 2)
        extracted = replace(extracted, context=context, coefficients=coefficients)
    return calibrate(decoder_of(case), task, shots, extracted, config, seed=seed, **arguments)


def loss_by_hand(case, coefficients, chosen, *, full=False):
    """Compute the paper's loss row by row with plain hooks."""
    decoder, losses = decoder_of(case), []
    with injecting(decoder, context_of(case).context, coefficients):
        for row in chosen:
            query = encode(TASK.template.query(SHOTS[row].text))
            label = encode(TASK.labels[SHOTS[row].label])[: None if full else 1]
            losses.append(-log_probability(decoder, query, label))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("full", [False, True], ids=["first_token", "sequence"])
@pytest.mark.parametrize("case", ["llama", "gpt2", "gptj", "gemma2", "opt"])
def test_one_step_matches_a_direct_computation(case, full):
    first = torch.tensor([0.1, 1.0]).repeat(decoder_of(case).layers, 2, 1).requires_grad_()
    wanted = loss_by_hand(case, first, [0, 1, 2], full=full)
    (gradient,) = torch.autograd.grad(wanted, first)
    scoring = "sequence" if full else "auto"
    result = fit(case, batches=[[0, 1, 2]], noise=0.0, lr=0.03, weight_decay=0.1, scoring=scoring)
    assert result.history == (pytest.approx(wanted.item(), rel=1e-5),)
    # The first step of AdamW moves by the learning rate against the sign of the gradient.
    assert (gradient.abs() > 1e-6).all()
    stepped = first * (1 - 0.03 * 0.1) - 0.03 * gradient.sign()
    assert torch.allclose(result.coefficients, stepped, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "place"), [*((case, "sublayer") for case in FAMILIES), ("llama", "residual")]
)
def test_calibration_reduces_the_loss(case, place):
    result = fit(case, epochs=12, batch_size=len(SHOTS), noise_place=place)
    assert len(result.history) == 12
    assert result.history[-1] < result.history[0] - 1e-3
    assert result.coefficients.dtype == torch.float32
    assert not result.coefficients.requires_grad
    assert ((result.coefficients - torch.tensor([0.1, 1.0])).abs() > 1e-4).all()


def test_labels_of_several_tokens_are_learned_as_sequences():
    labels = Task("films", ("positive", "poor"), TASK.template)
    with pytest.warns(ScoringWarning) as caught:
        result = fit(task=labels, noise=0.0, batches=[[1]])
    assert len(caught) == 1
    before = fit(task=labels, noise=0.0, epochs=0, scoring="sequence")
    probability = before.scorer(decoder_of("llama")).scores(["dull"], edit=before.edit())[0, 1].item()
    assert result.history[0] == pytest.approx(-probability, rel=1e-5)


@pytest.mark.parametrize(
    "change", [{}, {"noise_place": "sublayer"}, {"positions": "random"}, {"draw": "step"}]
)
def test_calibration_is_deterministic(change):
    torch.manual_seed(0)
    first = fit(seed=3, **change)
    torch.manual_seed(1)
    again, other = fit(seed=3, **change), fit(seed=4, **change)
    assert torch.equal(first.coefficients, again.coefficients)
    assert first.history == again.history
    assert not torch.equal(first.coefficients, other.coefficients)


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_seed_affects_only_the_noise(noise):
    result = [fit(seed=seed, batches=[[0, 1], [2, 3]], noise=noise).coefficients for seed in (0, 1)]
    assert torch.equal(*result) == (noise == 0)


THIRDS = [("all", range(6)), ("early", [0, 1]), ("middle", [2, 3]), ("late", [4, 5])]


@pytest.mark.parametrize(("layers", "trained"), [*THIRDS, ((0, 5), [0, 5]), ("1, 3", [1, 3])])
@pytest.mark.parametrize(
    ("sublayers", "hook_point"), [("both", [0, 1]), ("mha", [0]), ("mlp", [1]), ("hidden", [0])]
)
def test_only_the_chosen_sublayers_are_trained(layers, trained, sublayers, hook_point):
    decoder = decoder_of("llama", num_hidden_layers=6)
    shape = (6, 1 if sublayers == "hidden" else 2)
    mask = torch.zeros(shape, dtype=torch.bool)
    for layer in trained:
        mask[layer, hook_point] = True
    config = CalibrationConfig(layers=layers, epochs=1)
    assert torch.equal(config.active(6, sublayers), mask)
    assert config.parameters(6, sublayers) == 2 * int(mask.sum())
    if layers not in ("early", (0, 5)):
        return
    context = extract(decoder, TASK, SHOTS, ExtractConfig(sublayers=sublayers))
    result = calibrate(decoder, TASK, SHOTS, context, config).coefficients
    assert result.shape == (*shape, 2)
    assert torch.equal(result[~mask], UNTOUCHED.expand_as(result[~mask]))
    assert (result[mask] != torch.tensor([0.1, 1.0])).all()


@pytest.mark.parametrize("place", ["residual", "sublayer"])
def test_noise_is_added_at_the_injection_positions(monkeypatch, place):
    edits = []

    def watched(*args, **kwargs):
        edits.append(NoisyEdit(*args, **kwargs))
        return edits[-1]

    monkeypatch.setattr("i2cl.core.calibration.NoisyEdit", watched)
    fit("granite", layers=(1,), noise=0.02, noise_place=place, positions="first", batches=[[0], [1]])
    assert len(edits) == 2
    for edit in edits:
        assert edit.active == [[False, False], [True, True]]
        assert (edit.sublayer_scale, edit.scale, edit.injection.positions) == (0.4, 0.02, "first")
        assert edit.sees_input == (place == "residual")


@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma2"])
def test_add_formula_matches_a_direct_computation(case):
    first = fit(case, formula="add", epochs=0, init_lambda=0.3)
    assert torch.equal(first.coefficients, torch.tensor([0.3, 1.0]).expand(first.coefficients.shape))
    result = fit(case, formula="add", lr=0.5, epochs=4).coefficients
    assert (result[..., 1] == 1).all()
    assert (result[..., 0] >= 0).all()
    assert (result[..., 0] == 0).any()  # at this rate some lambda would have become negative
    assert CalibrationConfig(formula="add").parameters(2, "both") == 4


@pytest.mark.parametrize("case", ["llama", "gpt2", "gemma2"])
def test_balance_formula_matches_a_direct_computation(case):
    first = fit(case, formula="balance", epochs=0, init_lambda=0.3, init_beta=0.5).coefficients
    # (lambda v + (1 - lambda) a) * beta
    assert torch.allclose(first, torch.tensor([0.3 * 0.5, (1 - 0.3) * 0.5]).expand(first.shape))
    result = fit(case, formula="balance", lr=0.05, batches=[[0, 1]], noise=0.0)
    amount, keep = result.coefficients.unbind(-1)
    scale = amount + keep  # = beta
    assert (scale > 0).all()
    # One step of AdamW: each trained scalar moved by the rate, apart from decay.
    assert torch.allclose((scale - 1).abs(), torch.tensor(0.05), atol=2e-4)
    assert torch.allclose((amount / scale - 0.1).abs(), torch.tensor(0.05), atol=2e-4)
    assert (fit(case, formula="balance", lr=1.0, epochs=4).coefficients.sum(-1) >= 0).all()


@pytest.mark.parametrize("formula", ["linear", "add", "balance"])
def test_untrained_sites_keep_zero_and_one_under_every_formula(formula):
    result = fit(formula=formula, layers=(1,)).coefficients
    assert torch.equal(result[0], UNTOUCHED.expand(2, 2))
    none = fit(epochs=0, init_lambda=0.25, init_beta=0.75)
    assert torch.equal(none.coefficients, torch.tensor([0.25, 0.75]).expand(2, 2, 2))
    assert none.history == ()


def test_start_coefficients():
    start = torch.randn(2, 2, 2)
    assert torch.equal(fit(epochs=0, start=start).coefficients, start)
    partly = fit(epochs=0, start=start, layers=(0,)).coefficients
    assert torch.equal(partly[0], start[0])
    assert torch.equal(partly[1], UNTOUCHED.expand(2, 2))
    assert torch.equal(fit(start=start).coefficients, fit(start=start.clone()).coefficients)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"formula": "add", "start": torch.zeros(2, 2, 2)}, "use formula='linear'"),
        ({"formula": "balance", "start": torch.zeros(2, 2, 2)}, "use formula='linear'"),
        *(
            ({"start": torch.zeros(shape)}, r"start coefficients have shape .* but \(2, 2, 2\) is needed")
            for shape in [(1, 1, 2), (3, 2, 2), (2, 1, 2)]
        ),
        *(
            ({"context": torch.zeros(shape)}, r"the model needs \(2, 2, 32\)")
            for shape in [(2, 2, 16), (3, 2, 32), (2, 1, 32)]
        ),
        *(({"batches": batches}, "0 to 4") for batches in [[[0], []], [[0, 5]], [[-1]]]),
        *(
            ({"layers": layers}, "does not fit this model: choose from 0 to 1")
            for layers in [(2,), (-1,), (), "early", "7"]
        ),
    ],
)
def test_mismatched_inputs_are_refused(changes, message):
    raises(message, fit, **changes)


def test_batches_can_be_given_explicitly():
    result = fit(batches=[[0, 1], [4], [2, 3, 1]], epochs=1, noise=0.0)
    assert len(result.history) == 1
    assert len(fit(batches=[[0, 1], [4], [2, 3, 1]], epochs=100).history) == 3
    other = fit(batches=[[4], [0, 1], [2, 3, 1]], epochs=1, noise=0.0)
    assert not torch.equal(result.coefficients, other.coefficients)


@pytest.mark.parametrize(
    ("draw", "batch_size", "steps", "each_once"),
    [("epoch", 2, 3, True), ("epoch", 9, 1, True), ("step", 2, 2, False), ("step", 9, 1, True)],
)
def test_random_batches(monkeypatch, draw, batch_size, steps, each_once):
    watched, done = Mock(wraps=labelled_batch), []
    monkeypatch.setattr("i2cl.models.training.labelled_batch", watched)
    fit(draw=draw, batch_size=batch_size, epochs=3, progress=lambda *state: done.append(state))
    seen = [list(call.args[0]) for call in watched.call_args_list]
    assert len(seen) == 3 * steps
    assert [state[:2] for state in done] == [(steps * epoch, 3 * steps) for epoch in (1, 2, 3)]
    queries = sorted(encode(TASK.template.query(shot.text)) for shot in SHOTS)
    for epoch in range(3):
        rows = seen[steps * epoch : steps * (epoch + 1)]
        assert all(len(set(batch)) == len(batch) <= batch_size for batch in rows)
        assert (sorted(chain(*rows)) == queries) == each_once
    assert len({str(seen[steps * epoch : steps * (epoch + 1)]) for epoch in range(3)}) > 1


def test_injection_records_its_settings():
    config = {"positions": "last", "noise": 0.0}
    result = fit(seed=5, **config)
    assert (result.task, result.base) == (TASK, decoder_of("llama").base)
    assert (result.positions, result.seed) == ("last", 5)
    assert torch.equal(result.context, context_of("llama").context)
    assert CalibrationConfig.model_validate(result.settings) == CalibrationConfig(epochs=2, **config)
    assert fit(task=Task("films", TASK.labels, TASK.template, train=SHOTS), epochs=0).task == TASK


@pytest.mark.parametrize("change", [{"noise": 1e38}, {"lr": 1e30, "batches": [[0], [1]]}])
def test_loss_that_is_not_finite_is_refused(change):
    raises(r"loss became (nan|inf) by step \d.*lower the noise", fit, **change)


def test_context_vector_of_another_model_is_refused():
    other = Decoder(tiny_model("llama", seed=1), tiny_tokenizer(), name="other")
    message = r"was made on 'llama', not 'other' \(weights .*fit it again on"
    raises(message, calibrate, other, TASK, SHOTS, context_of("llama"))


def test_weights_and_gradients_that_are_not_finite_are_refused():
    model = tiny_model("llama")

    def spoil(_module, gradients, _):
        return tuple(gradient * math.nan for gradient in gradients)

    handle = model.get_output_embeddings().register_full_backward_hook(spoil)
    decoder = Decoder(model, tiny_tokenizer())
    raises("not finite after 1 steps", calibrate, decoder, TASK, SHOTS, context_of("llama"), batches=[[0]])
    handle.remove()
    with torch.no_grad():
        model.get_output_embeddings().weight[3] = math.inf
    raises("loss became", calibrate, decoder, TASK, SHOTS, context_of("llama"))
