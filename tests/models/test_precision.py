"""Lower precision, quantized weights and offloaded ones: same checkpoint, same injections."""

import json
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from i2cl import Decoder, I2CLError, calibrate, extract
from i2cl.core.edits import LinearEdit
from i2cl.core.injection import PrecisionWarning
from i2cl.core.recipe import RECIPES, CalibrationConfig
from i2cl.export import export_hf, fold, make_golden
from i2cl.interfaces.cli import main
from i2cl.methods import make_methods
from i2cl.models import precision
from i2cl.models.batching import make_batch
from i2cl.models.loading import load_model_and_tokenizer
from i2cl.models.precision import quantization_of
from i2cl.models.training import LOSS_SCALE, Backward
from tiny import PATHS, tiny_model, tiny_tokenizer

WIDE = {"hidden_size": 64, "intermediate_size": 128}
"""Sizes whose rows are whole blocks of 4-bit codes."""

FAST = make_methods(["i2cl"], {}, RECIPES["fast"])[0].calibration.model_copy(update={"passes": 20})
TEXTS = ["this film is good", "a bad and dull film indeed", "fine"]

needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None or find_spec("accelerate") is None,
    reason="needs bitsandbytes and accelerate: pip install 'i2cl[quant]'",
)
needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="needs accelerate: pip install 'i2cl[hub]'"
)


def saved(folder, model_type="llama", **overrides):
    tiny_model(model_type, **overrides).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("wide"), **WIDE)


@pytest.fixture(scope="module")
def plain(checkpoint):
    return Decoder.from_pretrained(checkpoint)


def edit_of(decoder):
    torch.manual_seed(0)
    coefficients = torch.tensor([0.3, 1.1]).repeat(decoder.layers, 2, 1).requires_grad_()
    return LinearEdit(torch.randn(decoder.layers, 2, decoder.d_model), coefficients)


def gradients(decoder, scale=1.0, through=None):
    """Of a label's log-probability, with respect to every lambda and beta."""
    edit = edit_of(decoder)
    batch = make_batch([(5, 9, 2, 7, 30), (11, 40, 3)], decoder.device)
    with decoder.frozen(), torch.enable_grad():
        value = decoder.forward(batch, edit=edit)[:, 0].float().log_softmax(-1)[:, 7].mean()
        leaf = [edit.coefficients]
        (through or Backward(leaf))(value * scale)
    return edit.coefficients.grad / scale


def off(found, expected):
    return float((found - expected).norm() / expected.norm())


def flags(model):
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


# bfloat16 and float16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", PATHS)
def test_model_types_calibrate_in_half_precision(model_type, dtype, task):
    model = tiny_model(model_type, dtype=dtype)
    decoder = Decoder(model, tiny_tokenizer(), name=model_type)
    demonstrations = task.sample(2, 0)
    before = flags(model)
    context = extract(decoder, task, demonstrations)
    injection = calibrate(decoder, task, demonstrations, context, CalibrationConfig(epochs=2))
    assert injection.coefficients.dtype == context.values.dtype == torch.float32
    assert injection.coefficients.isfinite().all()
    assert (injection.coefficients != injection.coefficients[:1, :1]).any()
    scores = injection.scores(decoder, TEXTS)
    assert scores.isfinite().all()
    assert flags(model) == before
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


def test_small_gradients_survive_float16_when_the_loss_is_scaled(checkpoint, plain):
    half = Decoder.from_pretrained(checkpoint, dtype="float16")
    expected, small = gradients(plain), 2.0**-20
    assert off(gradients(half), expected) < 0.01
    assert off(gradients(half, small), expected) > 0.1  # what is lost without
    edit = edit_of(half)
    scaled = Backward([edit.coefficients], torch.float16)

    def through(value):
        scaled.parameters = [leaf for leaf in leaves(value) if leaf.shape == edit.coefficients.shape]
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


def test_a_loss_scale_that_float16_does_not_hold_is_halved():
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    backward = Backward([weight], torch.float16)
    for expected in (3.0, 6.0):  # the second adds to the first
        backward((weight.half() * 3.0).sum().float())
        assert weight.grad.item() == expected
    assert 1 < backward.scale < LOSS_SCALE


def test_gradients_that_no_scale_makes_finite_end():
    weight = torch.nn.Parameter(torch.tensor([0.0]))
    backward = Backward([weight], torch.float16)
    backward((weight.half() * 60000.0 * 2).sum().float())
    assert not weight.grad.isfinite()
    assert backward.scale == 1


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gpt_neox", "opt", "qwen2", "gemma2", "falcon"])
def test_float16_of_a_checkpoint_has_its_fingerprint(model_type, tmp_path):
    folder = saved(tmp_path, model_type)
    half = Decoder.from_pretrained(folder, dtype="float16")
    assert half.base.weights == Decoder.from_pretrained(folder).base.weights
    assert (half.base.dtype, half.base.quantization) == ("float16", None)


def test_float16_of_files_that_name_weights_differently_is_told_by_memory(tmp_path):
    folder = saved(tmp_path, "mixtral")  # one tensor an expert on disk, one for all in memory
    half = Decoder.from_pretrained(folder, dtype="float16")
    assert half.base.weights != Decoder.from_pretrained(folder).base.weights


def test_weights_changed_in_memory_are_not_told_by_the_files(checkpoint, plain):
    half = Decoder.from_pretrained(checkpoint, dtype="float16")
    with torch.no_grad():
        half.blocks[0].mlp.up_proj.weight.mul_(1.01)
    assert half.base.weights != plain.base.weights


def test_files_changed_since_loading_do_not_count(tmp_path):
    folder = saved(tmp_path)
    half, alone = (Decoder.from_pretrained(folder, dtype="float16") for _ in range(2))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    memory = alone.base.weights  # nothing but what is in memory
    save_file({name: tensor * 2 for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    assert half.base.weights == memory


def test_an_injection_goes_from_one_dtype_to_another(checkpoint, plain, task, recwarn):
    demonstrations = task.sample(2, 0)
    injection = calibrate(plain, task, demonstrations, extract(plain, task, demonstrations), FAST)
    expected = injection.scores(plain, TEXTS)
    for dtype, tolerance in (("float16", 0.02), ("bfloat16", 0.15)):
        decoder = Decoder.from_pretrained(checkpoint, dtype=dtype)
        injection.require_base(decoder)
        assert off(injection.scores(decoder, TEXTS), expected) < tolerance
    assert not [warning for warning in recwarn if warning.category is PrecisionWarning]


# 8 and 4 bits


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
            numbers = precision.dequantized(module, parameter)
            if numbers is not None:
                copy.model.get_parameter(name).copy_(numbers)
    return copy


def test_quantized_weights_have_their_checkpoints_fingerprint(quantized, plain):
    assert quantized.base.weights == plain.base.weights
    assert quantized.base.quantization in {"bitsandbytes 8bit", "bitsandbytes 4bit"}
    assert plain.base.quantization is None


def test_quantized_weights_of_another_checkpoint_have_not(quantized, plain, tmp_path):
    bits = quantized.base.quantization.split()[-1]
    other = Decoder.from_pretrained(saved(tmp_path, seed=1, **WIDE), quantization=bits)
    assert other.base.weights != plain.base.weights
    foreign = Decoder.from_pretrained(saved(tmp_path / "b", seed=1, **WIDE), quantization=bits)
    foreign.model.name_or_path = plain.model.name_or_path
    assert foreign.base.weights != plain.base.weights


def test_one_changed_code_is_seen(checkpoint, plain, quantized):
    bits = quantized.base.quantization.split()[-1]
    other = Decoder.from_pretrained(checkpoint, quantization=bits)
    codes = other.blocks[1].mlp.up_proj.weight.data.view(-1)
    codes[37] = codes[37] ^ 1
    assert other.base.weights != plain.base.weights


@needs_bitsandbytes
@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_an_adapter_merged_into_codes_is_seen(checkpoint, plain, bits):
    """Its change is far below the error of the codes themselves."""
    peft = pytest.importorskip("peft", reason="needs peft: pip install 'i2cl[peft]'")
    model, tokenizer = load_model_and_tokenizer(checkpoint, quantization=bits, device="cpu")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, lora_alpha=1)
    merged = peft.get_peft_model(model, settings).merge_and_unload()
    assert "weights" in plain.base.difference(Decoder(merged, tokenizer).base)


def test_gradients_flow_through_codes(quantized, checkpoint):
    expected = gradients(decoded(quantized, checkpoint))
    exact = quantized.base.quantization.endswith("4bit")
    for _ in range(2):
        assert off(gradients(quantized), expected) < (
            1e-4 if exact else 0.1
        )  # 8 bits round what goes in, too
        quantized.capture(
            make_batch([(5, 9, 2)], quantized.device)
        )  # a run without gradients changes nothing


def test_a_quantized_model_calibrates_and_is_left_as_found(quantized, task):
    before = flags(quantized.model), hooks(quantized.model)
    codes = {name: value.clone() for name, value in quantized.model.state_dict().items()}
    demonstrations = task.sample(3, 0)
    context = extract(quantized, task, demonstrations)
    injection = calibrate(quantized, task, demonstrations, context, FAST)
    assert min(injection.history) < 0.95 * injection.history[0]
    assert injection.scores(quantized, TEXTS).isfinite().all()
    assert (flags(quantized.model), hooks(quantized.model)) == before
    assert all(torch.equal(value, codes[name]) for name, value in quantized.model.state_dict().items())


def test_an_injection_from_quantized_weights_warns_on_others(quantized, plain, task):
    demonstrations = task.sample(1, 0)
    context = extract(quantized, task, demonstrations)
    injection = calibrate(quantized, task, demonstrations, context, CalibrationConfig(epochs=0))
    injection.require_base(quantized)
    with pytest.warns(
        PrecisionWarning, match="made with bitsandbytes .bit and the model is .* no quantization"
    ):
        injection.require_base(plain)


def test_export_refuses_quantized_weights(quantized, task, tmp_path):
    demonstrations = task.sample(1, 0)
    context = extract(quantized, task, demonstrations)
    injection = calibrate(quantized, task, demonstrations, context, CalibrationConfig(epochs=0))
    quantized.model.save_pretrained(tmp_path / "codes")
    tiny_tokenizer().save_pretrained(tmp_path / "codes")
    for act in (
        lambda: export_hf(quantized, injection, tmp_path / "out"),
        lambda: export_hf(tmp_path / "codes", injection, tmp_path / "out"),
        lambda: fold(quantized, injection),
        lambda: make_golden(quantized, injection),
    ):
        with pytest.raises(I2CLError, match="export from its unquantized checkpoint"):
            act()
    assert not (tmp_path / "out").exists()
    with pytest.warns(PrecisionWarning):
        export_hf(quantized.name, injection, tmp_path / "out")
    assert quantization_of(AutoConfig.from_pretrained(tmp_path / "out")) is None


def test_a_checkpoint_of_codes(quantized, tmp_path):
    quantized.model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    again = Decoder.from_pretrained(str(tmp_path))
    assert again.base.quantization == quantized.base.quantization
    assert again.base.weights != quantized.base.weights  # nobody knows what it was made from
    assert torch.equal(gradients(again), gradients(quantized))


@needs_bitsandbytes
def test_a_model_that_its_user_has_quantized(checkpoint):
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=settings, device_map="cpu")
    decoder = Decoder(model, tiny_tokenizer())
    decoder.capture(make_batch([(5, 9, 2)], decoder.device))
    assert off(gradients(decoder), gradients(decoded(decoder, checkpoint))) < 1e-4


@needs_bitsandbytes
def test_repacked_codes_and_broken_blocks_are_refused(checkpoint, tmp_path):
    model = Decoder.from_pretrained(checkpoint, quantization="4bit").model
    model.model.layers[0].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(I2CLError, match=r"has run before.*load it anew"):
        Decoder(model, tiny_tokenizer())
    with pytest.raises(I2CLError, match=r"takes 32 inputs.*multiples of 64: load it in 8bit"):
        Decoder.from_pretrained(saved(tmp_path), quantization="4bit", device="cpu")


def test_a_config_of_torchao(checkpoint, plain):
    settings = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install torchao")
    pytest.importorskip("accelerate", reason="needs accelerate: pip install 'i2cl[quant]'")
    from transformers import TorchAoConfig

    config = TorchAoConfig(settings.Int8WeightOnlyConfig())
    decoder = Decoder.from_pretrained(checkpoint, quantization=config)
    assert decoder.base.quantization == "torchao"
    assert decoder.base.weights == plain.base.weights
    assert off(gradients(decoder), gradients(decoded(decoder, checkpoint))) < 1e-4


def test_what_is_wrong_with_a_quantization_is_told(checkpoint, monkeypatch):
    with pytest.raises(I2CLError, match="unknown quantization '3bit': choose 8bit or 4bit"):
        load_model_and_tokenizer(checkpoint, quantization="3bit")
    monkeypatch.setattr("i2cl.errors.find_spec", lambda _name: None)
    with pytest.raises(I2CLError, match=r"pip install 'i2cl\[quant\]'"):
        load_model_and_tokenizer(checkpoint, quantization="8bit")


@needs_bitsandbytes
def test_tensor_parallel_and_quantization_exclude_each_other(checkpoint, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(I2CLError, match="cannot be split by tensor_parallel"):
        load_model_and_tokenizer(checkpoint, quantization="8bit", device_map="tensor_parallel")


# Weights that are elsewhere

MAPS = {
    "all": {"": "disk"},
    "embeddings": {"model.embed_tokens": "disk", "lm_head": "disk"}
    | {"model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"},
    "a layer": {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.layers.0": "cpu"}
    | {"model.layers.1": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"},
}


@pytest.fixture(params=MAPS)
def offloaded(request, checkpoint, tmp_path):
    pytest.importorskip("accelerate", reason="needs accelerate: pip install 'i2cl[hub]'")
    decoder = Decoder.from_pretrained(checkpoint, device_map=MAPS[request.param], offload_folder=tmp_path)
    assert any(parameter.is_meta for parameter in decoder.model.parameters())
    return decoder


def test_offloaded_weights_are_the_same_model(offloaded, plain, task):
    assert offloaded.device == torch.device("cpu")
    assert offloaded.base == plain.base
    batch = make_batch([(5, 9, 2, 7), (3, 1)], offloaded.device)
    assert torch.equal(offloaded.capture(batch), plain.capture(batch))
    assert torch.equal(gradients(offloaded), gradients(plain))
    demonstrations = task.sample(2, 0)
    config = CalibrationConfig(epochs=2)
    made = [
        calibrate(one, task, demonstrations, extract(one, task, demonstrations), config)
        for one in (offloaded, plain)
    ]
    assert torch.equal(made[0].coefficients, made[1].coefficients)
    assert torch.equal(made[0].scores(offloaded, TEXTS), made[1].scores(plain, TEXTS))


def test_an_offloaded_model_is_left_as_found(offloaded):
    model = offloaded.model
    model.train()
    frozen = next(name for name, parameter in model.named_parameters() if parameter.is_meta)
    model.get_parameter(frozen).requires_grad_(False)
    meta = [parameter.is_meta for parameter in model.parameters()]
    before = flags(model), hooks(model), meta
    gradients(offloaded)
    offloaded.capture(make_batch([(5, 9, 2)], offloaded.device))
    assert (flags(model), hooks(model), [parameter.is_meta for parameter in model.parameters()]) == before
    assert all(module.training for module in model.modules())


@needs_accelerate
@pytest.mark.parametrize("model_type", ["gpt2", "opt", "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tied_offloaded_weights_count_once(model_type, dtype, tmp_path):
    folder = saved(tmp_path / "model", model_type)
    expected = Decoder.from_pretrained(folder)
    assert expected.model.config.tie_word_embeddings
    found = Decoder.from_pretrained(folder, dtype=dtype, device_map={"": "disk"}, offload_folder=tmp_path)
    assert found.base.weights == expected.base.weights


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(tiny_model("llama").config)
    with pytest.raises(I2CLError, match="on the device meta and has no values"):
        Decoder(empty, tiny_tokenizer())


@needs_accelerate
@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ('{"": ', "is no JSON"),
        ('["cpu"]', "is no map"),
        ('{"": "abacus"}', "cannot use device 'abacus'"),
        ('{"model.layers.0": "disk"}', "does not give any device"),
    ],
)
def test_a_wrong_device_map_is_one_line(checkpoint, typed, message, capsys, tmp_path):
    arguments = ["fit", checkpoint, "mood-colour-1", "-o", str(tmp_path / "out"), "--device-map", typed]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in error
    assert error.count("\n") == 1
    assert len(error) < 700
    assert not (tmp_path / "out").exists()


def run(arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(one) for one in arguments])
    return ended.value.code


@needs_bitsandbytes
def test_the_command_line_quantizes_and_offloads(checkpoint, tmp_path, capsys):
    rows = "text,label\n" + "".join(
        f"film {number},{'good' if number % 2 else 'bad'}\n" for number in range(8)
    )
    (tmp_path / "films.csv").write_text(rows)
    out = tmp_path / "films"
    fit = [
        "fit",
        checkpoint,
        tmp_path / "films.csv",
        "--template",
        "{text}: {label}",
        "-o",
        out,
        "--shots",
        "2",
    ]
    assert run([*fit, "--recipe", "fast", "--quantization", "8bit"]) == 0
    assert (
        json.loads((out / "injection.json").read_text())["base_model"]["quantization"] == "bitsandbytes 8bit"
    )
    (tmp_path / "texts").write_text("film 1\n")
    predict = ["predict", out, tmp_path / "texts"]
    capsys.readouterr()
    answers = []
    for more in (
        ["--quantization", "8bit"],
        [],
        ["--device-map", '{"": "disk"}', "--offload-folder", tmp_path],
    ):
        assert run([*predict, *more]) == 0
        printed = capsys.readouterr()
        assert ("was made with bitsandbytes 8bit" in printed.err) == (more != ["--quantization", "8bit"])
        answers.append(printed.out)
    assert answers[1] == answers[2] != answers[0]
