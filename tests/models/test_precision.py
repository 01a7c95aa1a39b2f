"""Lower precision and quantized weights: same checkpoint, same injections."""

from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from fitting import injected, left_as_found, raises
from i2cl import Decoder
from i2cl.core.injection import PrecisionWarning
from i2cl.core.recipe import CalibrationConfig
from i2cl.export import export_causal_lm, fold, make_golden
from i2cl.models import precision
from i2cl.models.loading import load_model_and_tokenizer
from i2cl.models.precision import quantization_of
from i2cl.models.training import LOSS_SCALE, Backward
from tiny import PATHS, tiny_model, tiny_tokenizer

from .conftest import TEXTS, WIDE, edit_of, gradients, look, needs_bitsandbytes, saved

FAST = CalibrationConfig.recipe("fast", passes=20)


def off(result, expected):
    return float((result - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [*product(PATHS, [torch.bfloat16]), *product(["llama", "gpt2", "gemma2", "mixtral"], [torch.float16])],
)
def test_model_types_calibrate_in_half_precision(model_type, dtype, task):
    model = tiny_model(model_type, dtype=dtype)
    decoder = Decoder(model, tiny_tokenizer(), name=model_type)
    with left_as_found(model):
        injection = injected(decoder, task, task.sample(2, 0), CalibrationConfig(epochs=2))
        assert injection.log_probs(decoder, TEXTS).isfinite().all()
    assert injection.coefficients.dtype == injection.context.dtype == torch.float32
    assert injection.coefficients.isfinite().all()
    assert (injection.coefficients != injection.coefficients[:1, :1]).any()


def test_small_gradients_survive_float16_when_the_loss_is_scaled(checkpoint, plain):
    half = Decoder.from_pretrained(checkpoint, dtype="float16")
    expected, small = gradients(plain), 2.0**-20
    assert off(gradients(half), expected) < 0.01
    assert off(gradients(half, small), expected) > 0.1  # what is lost without
    _, coefficients = edit_of(half)
    scaled = Backward([coefficients], torch.float16)

    def through(value):
        scaled.parameters = [leaf for leaf in leaves(value) if leaf.shape == coefficients.shape]
        scaled(value)

    assert off(gradients(half, small, through), expected) < 0.01
    assert scaled.scale == LOSS_SCALE


def leaves(value):
    """Tensors that a value's gradients end in."""
    seen, nodes = [], [value.grad_fn]
    while nodes:
        node = nodes.pop()
        seen += [node.variable] if hasattr(node, "variable") else []
        nodes += [one for one, _ in node.next_functions if one is not None]
    return list({id(leaf): leaf for leaf in seen}.values())


def test_loss_scale_is_halved_until_gradients_are_finite():
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    backward = Backward([weight], torch.float16)
    for expected in (3.0, 6.0):  # the second adds to the first
        backward((weight.half() * 3.0).sum().float())
        assert weight.grad.item() == expected
    assert 1 < backward.scale < LOSS_SCALE
    weight = torch.nn.Parameter(torch.tensor([0.0]))
    backward = Backward([weight], torch.float16)
    backward((weight.half() * 60000.0 * 2).sum().float())  # which no scale makes finite
    assert (weight.grad.isfinite().item(), backward.scale) == (False, 1)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox", "opt", "qwen2", "gemma2", "falcon"])
def test_float16_has_the_fingerprint_of_its_checkpoint(model_type, tmp_path):
    folder = saved(tmp_path, model_type)
    half = Decoder.from_pretrained(folder, dtype="float16")
    assert half.base.weights == Decoder.from_pretrained(folder).base.weights
    assert (half.base.dtype, half.base.quantization) == ("float16", None)


def test_renamed_or_changed_weights_are_fingerprinted_from_memory(checkpoint, plain, tmp_path):
    folder = saved(tmp_path, "mixtral")  # one tensor an expert on disk, one for all in memory
    half = Decoder.from_pretrained(folder, dtype="float16")
    assert half.base.weights != Decoder.from_pretrained(folder).base.weights
    half = Decoder.from_pretrained(checkpoint, dtype="float16")
    with torch.no_grad():
        half.blocks[0].mlp.up_proj.weight.mul_(1.01)
    assert half.base.weights != plain.base.weights


def test_files_changed_since_loading_are_ignored(tmp_path):
    folder = saved(tmp_path)
    half, alone = (Decoder.from_pretrained(folder, dtype="float16") for _ in range(2))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    memory = alone.base.weights  # nothing but what is in memory
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    assert half.base.weights == memory


def test_injection_fitted_in_float32_runs_in_half_precision(checkpoint, plain, task, recwarn):
    injection = injected(plain, task, task.sample(2, 0), FAST)
    expected = injection.log_probs(plain, TEXTS)
    for dtype, tolerance in (("float16", 0.02), ("bfloat16", 0.15)):
        decoder = Decoder.from_pretrained(checkpoint, dtype=dtype)
        injection.require_base(decoder)
        assert off(injection.log_probs(decoder, TEXTS), expected) < tolerance
    assert not [warning for warning in recwarn if warning.category is PrecisionWarning]


@pytest.fixture(scope="module", params=["8bit", "4bit"])
def quantized(request, checkpoint):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'i2cl[quant]'")
    pytest.importorskip("accelerate", reason="needs accelerate: pip install 'i2cl[quant]'")
    return Decoder.from_pretrained(checkpoint, quantization=request.param)


def decoded(decoder, checkpoint):
    """The same checkpoint, its matrices replaced by the numbers that the codes stand for."""
    copy = Decoder.from_pretrained(checkpoint)
    with torch.no_grad():
        for name, parameter in decoder.model.named_parameters():
            module = decoder.model.get_submodule(name.rpartition(".")[0])
            numbers = precision.dequantize(module, parameter)
            if numbers is not None:
                copy.model.get_parameter(name).copy_(numbers)
    return copy


def test_quantized_model_has_the_fingerprint_of_its_checkpoint(checkpoint, quantized, plain, tmp_path):
    assert quantized.base.weights == plain.base.weights
    assert quantized.base.quantization in {"bitsandbytes 8bit", "bitsandbytes 4bit"}
    assert plain.base.quantization is None
    bits = quantized.base.quantization.split()[-1]
    folders = [saved(tmp_path / name, seed=1, **WIDE) for name in "ab"]
    other, foreign = (Decoder.from_pretrained(folder, quantization=bits) for folder in folders)
    assert other.base.weights != plain.base.weights
    foreign.model.name_or_path = plain.model.name_or_path
    assert foreign.base.weights != plain.base.weights


def test_gradients_flow_through_quantized_weights(quantized, checkpoint):
    expected = gradients(decoded(quantized, checkpoint))
    bound = 1e-4 if quantized.base.quantization.endswith("4bit") else 0.1  # 8 bits round what goes in, too
    for _ in range(2):
        assert off(gradients(quantized), expected) < bound
        look(quantized)


def test_quantized_model_calibrates_and_is_restored(quantized, task):
    with left_as_found(quantized.model):
        injection = injected(quantized, task, task.sample(3, 0), FAST)
        assert injection.log_probs(quantized, TEXTS).isfinite().all()
    assert min(injection.history) < 0.95 * injection.history[0]


@pytest.fixture
def injection(quantized, task):
    """One of the quantized model, without a step."""
    return injected(quantized, task, task.sample(1, 0), CalibrationConfig(epochs=0))


def test_injection_from_quantized_weights_warns_on_others(quantized, plain, injection):
    injection.require_base(quantized)
    message = "made with bitsandbytes .bit and the model is .* no quantization"
    with pytest.warns(PrecisionWarning, match=message):
        injection.require_base(plain)


def test_export_refuses_quantized_weights(quantized, injection, tmp_path):
    injection = injection.with_head(scoring="words")
    for act in (
        lambda: export_causal_lm(quantized, injection, tmp_path / "out"),
        lambda: fold(quantized, injection),
        lambda: make_golden(quantized, injection),
    ):
        raises("export from its unquantized checkpoint", act)
    assert not (tmp_path / "out").exists()
    with pytest.warns(PrecisionWarning):
        export_causal_lm(Decoder.from_pretrained(quantized.name), injection, tmp_path / "out")
    assert quantization_of(AutoConfig.from_pretrained(tmp_path / "out")) is None


def test_checkpoint_saved_quantized_has_its_own_identity(quantized, tmp_path):
    quantized.model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    again = Decoder.from_pretrained(str(tmp_path))
    assert again.base.quantization == quantized.base.quantization
    assert again.base.weights != quantized.base.weights  # nobody knows what it was made from
    assert torch.equal(gradients(again), gradients(quantized))


@needs_bitsandbytes
def test_repacked_weights_and_unsupported_widths_are_refused(checkpoint, tmp_path):
    model = Decoder.from_pretrained(checkpoint, quantization="4bit").model
    model.model.layers[0].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    raises(r"has run before.*load it again", Decoder, model, tiny_tokenizer())
    message, options = r"has 32 inputs.*multiples of 64: load it in 8bit", {"quantization": "4bit"}
    raises(message, Decoder.from_pretrained, saved(tmp_path), **options, device="cpu")


def test_torchao_config(checkpoint, plain):
    settings = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install torchao")
    pytest.importorskip("accelerate", reason="needs accelerate: pip install 'i2cl[quant]'")
    from transformers import TorchAoConfig

    config = TorchAoConfig(settings.Int8WeightOnlyConfig())
    decoder = Decoder.from_pretrained(checkpoint, quantization=config)
    assert decoder.base.quantization == "torchao"
    assert decoder.base.weights == plain.base.weights
    assert off(gradients(decoder), gradients(decoded(decoder, checkpoint))) < 1e-4


def test_missing_package_is_named(checkpoint, monkeypatch):
    monkeypatch.setattr("i2cl.errors.find_spec", lambda _name: None)
    raises(r"pip install 'i2cl\[quant\]'", load_model_and_tokenizer, checkpoint, quantization="8bit")
