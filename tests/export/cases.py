"""Models, injections and comparisons that tests of exports share."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fitting import random_injection
from i2cl import Decoder, ExtractConfig, Task, Template
from i2cl.models.batching import make_batch
from tiny import CASES, tiny_model, tiny_tokenizer

TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
SHARED = Task("films", ("best film", "best ever", "bad film"), Template("Review: {text}\nVerdict:{label}"))
IDS = tuple((torch.arange(1, 25) * 7 % 300).tolist())
FIGURES = json.loads((Path(__file__).parents[2] / "docs" / "architectures.json").read_text(encoding="utf-8"))
HOW = {case: FIGURES["types"][kind]["fold"] for case, (kind, _) in CASES.items()}
SLIDING = {"ministral-sliding", "mistral-sliding", "phi3-sliding", "qwen2-sliding"}
FOLDED = [case for case, how in HOW.items() if not how.startswith("no") and case not in SLIDING]
ONE_OF_EACH = ["cohere", "falcon", "gemma", "gpt2", "gptj", "llama", "opt", "phi3", "qwen2", "qwen3"]
llama_cpp = pytest.mark.skipif(
    find_spec("xllamacpp") is None or find_spec("gguf") is None,
    reason="xllamacpp is not installed (pip install 'i2cl[llama-cpp]')",
)
TEXTS = (
    "Review: a warm and funny film\nSentiment:",
    "It's 1234567 o'clock, they'LL say  I'VE\tgone\r\n\r\n  twice ",
    "naïve façade, 東京 is большой; 🙂 x² = ½ — “quoted” ...",
    "    four spaces, and a tail   \n\n",
    "snake_case(camelCase) != HTTPServer/2 <|endoftext|>",
    "<|user|>  a film\n</s>  another <|endoftext|>  end",
)
ROUNDED = 0.02  # largest relative difference in bfloat16, where every folded weight is rounded once more


def decoder_of(case, dtype=torch.float32, **overrides):
    model_type, fields = CASES[case]
    model = tiny_model(model_type, dtype=dtype, **fields | overrides)
    return Decoder(model, tiny_tokenizer(), name=f"tiny-{case}")


def injection_for(decoder, **fields):
    extraction = ExtractConfig(separator=False)
    return random_injection(decoder, TASK, extraction=extraction, shown=4, fields=fields, around=(0.5, 1.0))


def drawn(case, task=TASK, **overrides):
    """A decoder and an injection into it."""
    decoder = decoder_of(case, **overrides)
    return decoder, replace(injection_for(decoder), task=task)


def hooked(decoder, injection):
    """Return the logits after every token, in float32."""
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
    """A Phi-3 whose rotary embedding changes after ``original`` tokens, and an injection."""
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0} | factors
    sizes = {"original_max_position_embeddings": original, "max_position_embeddings": 64}
    return drawn("phi3", rope_parameters=rope, **sizes)


def weights(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def stored(decoder, folder):
    """A model and its tokenizer, as a folder."""
    decoder.model.save_pretrained(folder)
    decoder.tokenizer.save_pretrained(folder)
    return folder


def saved(decoder, folder):
    """The base model and an injection, as folders."""
    base = stored(decoder, folder / "base")
    injection_for(Decoder.from_pretrained(str(base), device="cpu")).save_pretrained(folder / "artefact")
    return base, folder / "artefact"


def field(path, name):
    """The value of a metadata field of a GGUF file, or None."""
    from gguf import GGUFReader

    result = GGUFReader(path).get_field(name)
    return None if result is None else result.contents()


def change(path, tensor=None, fields=()):
    """Set a tensor of a GGUF file to zero, or change metadata fields, in place."""
    from gguf import GGUFReader

    file = GGUFReader(path, "r+")
    for result in file.tensors:
        if result.name == tensor:
            result.data[:] = 0
    for name, value in fields:
        file.get_field(name).parts[-1][0] = value
    file.data.flush()
