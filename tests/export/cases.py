"""Models, injections and comparisons that tests of exports share."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file

from fitting import random_injection
from i2cl import Decoder, ExtractConfig, Task, Template
from i2cl.export import Golden, make_golden
from i2cl.export.families import FAMILIES
from i2cl.models.batching import make_batch
from processes import finished
from tiny import CASES, tiny_model, tiny_tokenizer

TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
SHARED = Task("films", ("best film", "best ever", "bad film"), Template("Review: {text}\nVerdict:{label}"))
BEGUN = replace(SHARED, labels=("best", "best film", "bad"))
"""A label begins another one: both go with what ends them."""
IDS = tuple((torch.arange(1, 25) * 7 % 300).tolist())
SLIDING = {"ministral-sliding", "mistral-sliding", "phi3-sliding", "qwen2-sliding"}
FOLDED = [case for case, (kind, _) in CASES.items() if kind in FAMILIES and case not in SLIDING]
# A model type for each way to fold.
ONE_A_ROW = sorted({row: kind for kind, row in FAMILIES.items()}.values())
llama_cpp = pytest.mark.skipif(
    find_spec("llama_cpp") is None or find_spec("gguf") is None,
    reason="llama-cpp-python is not installed (pip install 'i2cl[llama-cpp]')",
)
TEXTS = (
    "Review: a warm and funny film\nSentiment:",
    "It's 1234567 o'clock, they'LL say  I'VE\tgone\r\n\r\n  twice ",
    "naïve façade, 東京 is большой; 🙂 x² = ½ — “quoted” ...",
    "    four spaces, and a tail   \n\n",
    "snake_case(camelCase) != HTTPServer/2 <|endoftext|>",
    "<|user|>  a film\n</s>  another <|endoftext|>  end",
)
MEASURED = """
import sys, torch
from i2cl import export
from i2cl.core.injection import Injection
from i2cl.models.memory import peak_memory
write, (base, artefact, out) = getattr(export, sys.argv[1]), sys.argv[2:]
injection = Injection.from_pretrained(artefact)
write("reference", Injection.from_pretrained(artefact + "-small"), out + "-warm")
with peak_memory(torch.device("cpu")) as peak:
    write(base, injection, out, **OPTIONS)
print(peak.added)
"""
CLOSE = 1e-4  # largest difference of a log-probability between the hooked model and llama.cpp, in float32
ROUNDED = 0.02  # largest relative difference in bfloat16, where every folded weight is rounded once more


def decoder_of(case, dtype=torch.float32, **overrides):
    model_type, fields = CASES[case]
    model = tiny_model(model_type, dtype=dtype, **fields | overrides)
    return Decoder(model, tiny_tokenizer(), name=f"tiny-{case}")


def injection_for(decoder, **fields):
    extraction = ExtractConfig(separator=False)
    return random_injection(decoder, TASK, extraction=extraction, shown=4, fields=fields, around=(0.5, 1.0))


def hooked(decoder, injection):
    """Logits after every token, in float32."""
    whole = Decoder(decoder.model.float(), decoder.tokenizer, architecture=decoder.architecture)
    at = torch.arange(len(IDS))[None]
    with torch.no_grad():
        return whole.forward(make_batch([IDS], torch.device("cpu")), at=at, edit=injection.edit())[0]


def plain(model):
    with torch.no_grad():
        return model.float()(torch.tensor([IDS])).logits[0]


def relative(one, two):
    return float((one - two).abs().max() / two.abs().max())


def longrope(original):
    """A Phi-3 whose rotary embedding is another one behind so many tokens, and an injection."""
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0} | factors
    sizes = {"original_max_position_embeddings": original, "max_position_embeddings": 64}
    return drawn("phi3", rope_parameters=rope, **sizes)


def drawn(case, task=TASK, **overrides):
    """A decoder and an injection into it."""
    decoder = decoder_of(case, **overrides)
    return decoder, replace(injection_for(decoder), task=task)


def with_golden(write, pair, path, **options):
    """Export a decoder and an injection with their golden values, which come back."""
    write(*pair, path, golden=lambda: make_golden(*pair), **options)
    return Golden.from_export(path)


def weights(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def saved(decoder, folder):
    """The base model and an injection, as folders."""
    base = stored(decoder, folder / "base")
    injection_for(Decoder.from_pretrained(str(base), device="cpu")).save_pretrained(folder / "artefact")
    return base, folder / "artefact"


def memory_of(write, base, artefact, out, **options):
    """Bytes that an export adds to a program that has made one."""
    injection_for(Decoder.from_pretrained("reference", device="cpu")).save_pretrained(f"{artefact}-small")
    code, message, errors = finished(MEASURED.replace("OPTIONS", repr(options)), write, base, artefact, out)
    assert code == 0, errors
    return int(message)


def stored(decoder, folder, **options):
    """A model and its tokenizer, as a folder."""
    decoder.model.save_pretrained(folder, **options)
    decoder.tokenizer.save_pretrained(folder)
    return folder


def field(path, name):
    """What a GGUF file says under a name."""
    from gguf import GGUFReader

    result = GGUFReader(path).get_field(name)
    return None if result is None else result.contents()


def scaled(injection, factor):
    """The same injection with its context vector times a number."""
    context = replace(injection.context, values=factor * injection.context.values)
    return replace(injection, context=context)


def change(path, tensor=None, fields=()):
    """Write into a GGUF file itself."""
    from gguf import GGUFReader

    inside = GGUFReader(path, "r+")
    for result in inside.tensors:
        if result.name == tensor:
            result.data[:] = 0
    for name, value in fields:
        inside.get_field(name).parts[-1][0] = value
    inside.data.flush()
