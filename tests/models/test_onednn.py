"""Matrix products by oneDNN match the model's own, and the model is restored."""

import copy

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from i2cl import CalibrationConfig, Decoder, Example, Task, Template, calibrate, extract
from i2cl.models import onednn
from tiny import tiny_model, tiny_tokenizer

FAMILIES = ["llama", "gpt2", "gptj", "gpt_neox", "gemma2", "phi3", "falcon", "opt", "qwen2_moe", "bloom"]
TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
SHOTS = [Example("a warm film " + "indeed " * row, row % 2) for row in range(4)]
TEXTS = ["warm", "a cold and lifeless film " * 3, "one of the best"]
CONFIG = CalibrationConfig(epochs=3, lr=0.05)


@pytest.fixture
def forced(monkeypatch):
    """Use oneDNN for all matrices, as on a processor where it is faster."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch does not reach oneDNN")
    monkeypatch.setattr(onednn, "onednn_pays", lambda: True)
    monkeypatch.setattr(onednn, "MIN_SIZE", 1)


def swapped(model):
    return [module for module in model.modules() if "forward" in module.__dict__]


def fitted(decoder):
    context = extract(decoder, TASK, SHOTS)
    injection = calibrate(decoder, TASK, SHOTS, context, CONFIG, seed=3)
    return context.values, injection.coefficients, injection.log_probs(decoder, TEXTS)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_fit_and_scores_match_without_onednn(model_type, monkeypatch, request):
    decoder = Decoder(tiny_model(model_type), tiny_tokenizer(), name=model_type)
    monkeypatch.setattr(onednn, "onednn_pays", lambda: False)
    plain = fitted(decoder)
    request.getfixturevalue("forced")
    calls = []
    product = onednn._product
    monkeypatch.setattr(onednn, "_product", lambda *args: calls.append(args) or product(*args))
    for result, wanted in zip(fitted(decoder), plain, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-3, atol=1e-3)
    assert len(calls) > 10  # Falcon's own linear class leaves but the head


@pytest.mark.parametrize("kind", [torch.nn.Linear, Conv1D])
@pytest.mark.parametrize("shape", [(3, 8), (2, 5, 8), (2, 0, 8), (8,)])
@pytest.mark.parametrize("bias", ["strided", "plain", "none"])
def test_value_and_gradient_match_the_models_own(forced, kind, shape, bias):
    if kind is Conv1D and bias == "none":
        pytest.skip("Conv1D always has a bias")
    module = torch.nn.Linear(8, 6, bias=bias != "none") if kind is torch.nn.Linear else Conv1D(6, 8)
    if bias != "none":
        drawn = torch.randn(12)
        module.bias = torch.nn.Parameter(drawn[::2] if bias == "strided" else drawn[:6])
    module.requires_grad_(False)
    x = torch.randn(shape, requires_grad=True)
    weights = torch.randn(*shape[:-1], 6)
    plain = module(x)
    (wanted,) = torch.autograd.grad((plain * weights).sum(), x)
    with onednn.fast_products(module):
        assert swapped(module)
        result = module(x)
        (gradient,) = torch.autograd.grad((result * weights).sum(), x)
        torch.testing.assert_close(module(x.detach()), plain.detach())
    torch.testing.assert_close(result, plain)
    torch.testing.assert_close(gradient, wanted)


def test_trained_and_lower_precision_layers_are_not_replaced(forced):
    trained, half, own = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).bfloat16(), torch.nn.Linear(4, 4)
    own.forward = lambda x: x + 1
    model = torch.nn.ModuleList([trained, half, own]).requires_grad_(False)
    trained.requires_grad_(True)
    with onednn.fast_products(model):
        assert swapped(model) == [own]
        assert own(torch.ones(4)).tolist() == [2.0] * 4
    assert swapped(model) == [own]
    module = torch.nn.Linear(4, 4).requires_grad_(False)
    with onednn.fast_products(module):
        module.requires_grad_(True)
        module(torch.ones(2, 4)).sum().backward()
    assert module.weight.grad.tolist() == [[2.0] * 4] * 4


def test_model_is_restored_after_autocast_and_errors(forced):
    module = torch.nn.Linear(4, 4).requires_grad_(False)
    with onednn.fast_products(module), torch.autocast("cpu", torch.bfloat16):
        for given in (torch.ones(4), torch.ones(4).bfloat16()):
            assert module(given).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False), onednn.fast_products(module):
        assert not swapped(module)
    module = torch.nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(RuntimeError), onednn.fast_products(module), onednn.fast_products(module):
        module(torch.ones(3))
    assert not swapped(module)


def test_copy_of_the_model_does_not_use_onednn(forced, monkeypatch):
    module = torch.nn.Sequential(torch.nn.Linear(4, 4)).requires_grad_(False)
    with onednn.fast_products(module):
        twin = copy.deepcopy(module)
    monkeypatch.setattr(onednn, "_product", None)
    with torch.no_grad():
        twin[0].weight.zero_()
    assert torch.equal(twin(torch.ones(4)), module[0].bias)


def test_small_matrices_do_not_use_onednn(monkeypatch):
    monkeypatch.setattr(onednn, "onednn_pays", lambda: True)
    small = torch.nn.Linear(onednn.MIN_SIZE, onednn.MIN_SIZE - 1).requires_grad_(False)
    large = torch.nn.Linear(onednn.MIN_SIZE, onednn.MIN_SIZE).requires_grad_(False)
    with onednn.fast_products(torch.nn.ModuleList([small, large])) as _:
        assert ("forward" in small.__dict__, "forward" in large.__dict__) == (False, True)


@pytest.mark.parametrize(
    ("capability", "vendor", "pays"),
    [("AVX512", "AuthenticAMD", True), ("AVX512", "GenuineIntel", False), ("AVX2", "AuthenticAMD", False)],
)
def test_onednn_is_used_where_mkl_does_not_use_avx512(monkeypatch, capability, vendor, pays):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(onednn, "_is_intel", lambda: vendor == "GenuineIntel")
    assert onednn.onednn_pays.__wrapped__() is (pays and torch.backends.mkldnn.is_available())
