"""Models, injections and comparisons that tests of exports share."""

from dataclasses import replace

import torch
from safetensors.torch import load_file

from commands import run
from i2cl.core.context import ContextVector, ExtractConfig
from i2cl.core.injection import Injection
from i2cl.export.families import FAMILIES
from i2cl.models.batching import make_batch
from i2cl.models.decoder import Decoder
from i2cl.tasks import Task, Template
from tiny import CASES, tiny_model, tiny_tokenizer

TASK = Task("films", ("positive", "negative"), Template("Review: {text}\nSentiment:{label}"))
IDS = tuple((torch.arange(1, 25) * 7 % 300).tolist())
SLIDING = {"ministral-sliding", "mistral-sliding", "phi3-sliding", "qwen2-sliding"}
FOLDED = [case for case, (kind, _) in CASES.items() if kind in FAMILIES and case not in SLIDING]
# A model type for each way to fold.
ONE_A_ROW = sorted({replace(FAMILIES[kind], model_type=""): kind for kind in FAMILIES}.values())
ROUNDED = 0.02  # largest relative difference in bfloat16, where every folded weight is rounded once more


def decoder_of(case, dtype=torch.float32, **overrides):
    model_type, fields = CASES[case]
    model = tiny_model(model_type, dtype=dtype, **fields | overrides)
    return Decoder(model, tiny_tokenizer(), name=f"tiny-{case}")


def injection_for(decoder, **fields):
    generator = torch.Generator().manual_seed(0)
    shape = (decoder.layers, 2, decoder.d_model)
    values = torch.randn(shape, generator=generator)
    coefficients = torch.randn(*shape[:2], 2, generator=generator) * 0.2 + torch.tensor([0.5, 1.0])
    context = ContextVector(values, ExtractConfig(separator=False), demonstrations=4)
    return Injection(context, coefficients, TASK, decoder.base, **fields)


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


def weights(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def saved(decoder, folder):
    """The base model and an injection, as folders."""
    decoder.model.save_pretrained(folder / "base")
    decoder.tokenizer.save_pretrained(folder / "base")
    base = Decoder.from_pretrained(str(folder / "base"), device="cpu")
    injection_for(base).save_pretrained(folder / "artefact")
    return folder / "base", folder / "artefact"


def refused(capsys, *arguments, lines=1):
    capsys.readouterr()  # what came before
    assert run(*arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == lines
    return told.err
