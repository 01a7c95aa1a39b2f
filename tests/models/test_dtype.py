"""Choice of a dtype by the device and the checkpoint, on simulated CPUs."""

import pytest
import torch

from i2cl.models import loading
from i2cl.models.loading import EmulatedDtypeWarning, load_model_and_tokenizer
from i2cl.models.precision import automatic_dtype, cpu_has_bfloat16
from tiny import tiny_folder

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PLAIN, EPYC_GENOA, XEON_SAPPHIRE_RAPIDS = (
    ("AVX2", False, False),
    ("AVX512", True, False),
    ("AVX512", True, True),
)
SKYLAKE, LIMITED = ("AVX512", False, False), ("AVX2", True, True)  # limited by ATEN_CPU_CAPABILITY


@pytest.fixture
def native(monkeypatch):
    """A CPU with bfloat16 instructions."""
    monkeypatch.setattr("i2cl.models.precision.cpu_has_bfloat16", lambda: True)
    monkeypatch.setattr("i2cl.models.loading.cpu_has_bfloat16", lambda: True)


def simulate(monkeypatch, capability, avx512_bf16, amx):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16, raising=False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [(PLAIN, False), (SKYLAKE, False), (LIMITED, False), (EPYC_GENOA, True), (XEON_SAPPHIRE_RAPIDS, True)],
)
def test_bfloat16_is_native_with_avx512_bf16_or_amx(monkeypatch, cpu, expected):
    simulate(monkeypatch, *cpu)
    assert cpu_has_bfloat16() is expected


def test_bfloat16_is_not_native_without_onednn_or_in_an_older_pytorch(monkeypatch):
    simulate(monkeypatch, *EPYC_GENOA)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not cpu_has_bfloat16()
    simulate(monkeypatch, *EPYC_GENOA)
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, name)
    assert not cpu_has_bfloat16()


@pytest.mark.parametrize(
    ("stored", "device", "has_bfloat16", "expected"),
    [
        (torch.bfloat16, CPU, True, torch.bfloat16),
        (torch.float16, CPU, True, torch.bfloat16),
        (torch.float32, CPU, True, torch.float32),
        (torch.float64, CPU, True, torch.float32),
        (torch.bfloat16, CPU, False, torch.float32),
        (torch.float16, CPU, False, torch.float32),
        (torch.float16, CUDA, False, torch.float16),
        (torch.float32, CUDA, True, torch.float32),
    ],
)
def test_automatic_dtype(monkeypatch, stored, device, has_bfloat16, expected):
    monkeypatch.setattr("i2cl.models.precision.cpu_has_bfloat16", lambda: has_bfloat16)
    assert automatic_dtype(stored, device) == expected


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_auto_loads_a_16_bit_checkpoint_in_bfloat16_on_such_a_cpu(native, tmp_path, stored):
    folder = tiny_folder(tmp_path / "model", dtype=stored)
    model, _ = load_model_and_tokenizer(folder, dtype="auto", device="cpu")
    expected = torch.float32 if stored == torch.float32 else torch.bfloat16
    assert {parameter.dtype for parameter in model.parameters()} == {expected}


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_auto_loads_in_float32_on_other_cpus(tmp_path, stored):
    folder = tiny_folder(tmp_path / "model", dtype=stored)
    assert load_model_and_tokenizer(folder, dtype="auto", device="cpu")[0].dtype == torch.float32


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_python_default_is_float32_on_every_cpu(tmp_path, dtype):
    folder = tiny_folder(tmp_path / "model", dtype=torch.bfloat16)
    assert load_model_and_tokenizer(folder, dtype=dtype, device="cpu")[0].dtype == torch.float32


def test_checkpoint_keeps_the_dtype(tmp_path):
    folder = tiny_folder(tmp_path / "model", dtype=torch.float16)
    assert load_model_and_tokenizer(folder, dtype="checkpoint", device="cpu")[0].dtype == torch.float16


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_emulated_bfloat16_warns(tmp_path, dtype):
    folder = tiny_folder(tmp_path / "model")
    with pytest.warns(EmulatedDtypeWarning, match="many times slower than --dtype float32"):
        load_model_and_tokenizer(folder, dtype=dtype, device="cpu")


@pytest.mark.parametrize(("automatic", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_gguf_file_is_converted_to_bfloat16_on_such_a_cpu(native, automatic, expected):
    assert loading._gguf_dtype("auto", automatic, CPU) == expected
    assert loading._gguf_dtype("auto", automatic, CUDA) == torch.float32


def test_commands_that_predict_and_fit_choose_the_dtype(stdout, tmp_path, monkeypatch):
    dtypes = []
    load = loading.load_model_and_tokenizer
    monkeypatch.setattr(
        "i2cl.models.decoder.load_model_and_tokenizer",
        lambda name, **options: dtypes.append(options["dtype"]) or load(name, **options),
    )
    (tmp_path / "texts.txt").write_text("the gloomy baker rested\n", encoding="utf-8")
    fit = ("fit", "reference", "mood-colour-1", "-o", tmp_path / "mood", "--shots", "1", "--evaluate", "0")
    stdout(*fit)
    stdout("predict", tmp_path / "mood", tmp_path / "texts.txt")
    stdout("predict", tmp_path / "mood", tmp_path / "texts.txt", "--dtype", "float32")
    stdout("check", "reference")
    assert dtypes == ["auto", "auto", "float32", None]
