"""Export a task as a language model: the plain architecture with the injection folded into its biases.

Also the usage text of every export that is a language model: a checkpoint, a PEFT adapter or a GGUF file.
"""

import copy
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from i2cl.core.injection import Injection
from i2cl.export.folding import MAX_SHARD_SIZE, Folding
from i2cl.export.golden import TEXTS, make_golden
from i2cl.models.decoder import Decoder
from i2cl.models.label_tokens import LabelTokens
from i2cl.models.loading import REFERENCE, is_gguf, resolve_name
from i2cl.storage.atomic import new_folder, public_name, require_writable
from i2cl.storage.card import code_block, export_card
from i2cl.storage.layout import CARD
from i2cl.tasks.template import TEXT_FIELD

Form = Literal["causal-lm", "peft", "gguf"]
LIBRARIES = {"causal-lm": "transformers", "peft": "peft", "gguf": "gguf"}  # the hub's names

USAGE = """\
The task was fitted with exactly these prompts (`{{text}}` is the text):

{prompt}

The next token decides: compare the log-probabilities of the labels' tokens.

{code}

`i2cl verify {name}` compares its answers with i2cl's."""

TRANSFORMERS = """\
{imports}import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

labels = {labels!r}  # token ids
bias = torch.tensor({bias!r})  # label prior
temperature = {temperature:g}

tokenizer = AutoTokenizer.from_pretrained({name!r})
model = AutoModelForCausalLM.from_pretrained({base}){adapter}
inputs = tokenizer({prompt!r}, return_tensors="pt")
with torch.no_grad():
    logits = model(**inputs).logits[0, -1, list(labels.values())].float()
probability, best = ((logits + bias) / temperature).softmax(-1).max(-1)
print(list(labels)[best], float(probability))"""

ADAPTER = """
model.load_adapter({name!r})  # needs the package peft"""

FILES = "from importlib.resources import files\n\n"

LLAMA_CPP = """\
import numpy as np
from llama_cpp import Llama

labels = {labels!r}  # token ids
bias = np.array({bias!r})  # label prior
temperature = {temperature:g}

model = Llama({name!r}, logits_all=True, verbose=False)
model.eval(model.tokenize({prompt!r}.encode(), special=True))
logits = model.scores[model.n_tokens - 1, list(labels.values())]
odds = np.exp((logits - logits.max() + bias) / temperature)
print(list(labels)[odds.argmax()], odds.max() / odds.sum())"""


def export_causal_lm(
    decoder: Decoder,
    injection: Injection,
    output: str | Path,
    *,
    golden: bool = True,
    force: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a transformers language model with the next-token probabilities of the injected model.

    Prompt it with the task's template and compare the probabilities of the labels' tokens: its README.md
    shows how. Arguments and errors are the same as for `export_classifier`.
    """
    path = Path(output)
    require_writable(path, frozenset())
    folding = Folding(decoder, injection, dtype=dtype, force=force)
    model = folding.build(AutoModelForCausalLM)
    model.generation_config = decoder.model.generation_config
    with new_folder(path, frozenset()) as fresh:
        model.save_pretrained(fresh, max_shard_size=MAX_SHARD_SIZE)
        left_padded(decoder.tokenizer).save_pretrained(fresh)
        write_card(fresh, path.resolve().name, injection, folding.labels, "causal-lm")
        if golden:
            make_golden(decoder, injection).of_export("causal-lm", folding.dtype).write(fresh)


def left_padded(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy of a tokenizer that pads on the left, so that the last position ends every prompt."""
    padded = copy.deepcopy(tokenizer)
    padded.padding_side = padded.init_kwargs["padding_side"] = "left"  # init_kwargs are what is saved
    if padded.pad_token is None:
        padded.pad_token = padded.eos_token or padded.unk_token or padded.bos_token
    return padded


def write_card(folder: Path, name: str, injection: Injection, labels: LabelTokens, form: Form) -> None:
    """Write the README.md of an export that will be loaded as ``name``."""
    description = injection.description()
    base = description["base_model"]
    description["base_model"] = base | {"name": public_name(base["name"])}
    text = export_card(description, usage(injection, labels, name, form), LIBRARIES[form])
    (folder / CARD).write_text(text, encoding="utf-8")


def _base_model(name: str) -> str:
    """Return the arguments with which transformers loads a base model, without local folders."""
    if name == REFERENCE:
        return f"files('i2cl.models') / {name!r}"
    path = Path(resolve_name(name))
    if not is_gguf(path):
        return repr(public_name(name))
    return f"'FOLDER', gguf_file={path.name!r}"


def usage(injection: Injection, labels: LabelTokens, name: str, form: Form) -> str:
    """Describe in Markdown how to run an exported language model."""
    task = injection.task
    prompt = task.template.query(TEXT_FIELD) + labels.query_suffix
    code = (LLAMA_CPP if form == "gguf" else TRANSFORMERS).format(
        imports=FILES if form == "peft" and injection.base.name == REFERENCE else "",
        labels=dict(zip(task.labels, labels.representatives, strict=True)),
        bias=list(injection.label_bias or ()) or 0.0,
        temperature=injection.temperature,
        name=name,
        base=_base_model(injection.base.name) if form == "peft" else repr(name),
        adapter=ADAPTER.format(name=name) if form == "peft" else "",
        prompt=prompt.replace(TEXT_FIELD, TEXTS[0]),
    )
    return USAGE.format(prompt=code_block(prompt, "text"), code=code_block(code, "python"), name=name)
