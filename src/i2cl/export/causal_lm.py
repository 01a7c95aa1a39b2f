"""Export a task as a language model: the plain architecture with the injection folded into its biases.

Also the usage text of every export that is a language model: as a checkpoint, a PEFT adapter or a GGUF file.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from i2cl.core.injection import Injection
from i2cl.export.checkpoint import open_base, write_shards
from i2cl.export.folding import Folding, label_tokens_of, skeleton
from i2cl.export.golden import TEXTS, Golden, scored_tokens
from i2cl.models.decoder import Decoder
from i2cl.storage.atomic import new_folder, public_name, require_writable
from i2cl.storage.card import CARD, code_block, export_card
from i2cl.tasks.template import TEXT_FIELD

Form = Literal["causal-lm", "peft", "gguf"]
LIBRARIES = {"causal-lm": "transformers", "peft": "peft", "gguf": "gguf"}  # the hub's names


def export_causal_lm(
    source: Decoder | str | Path,
    injection: Injection,
    output: str | Path,
    *,
    golden: Callable[[], Golden] | None = None,
    revision: str | None = None,
    force: bool = False,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a transformers language model whose next-token probabilities are those of the injected model.

    Prompt it with the task's template and compare the probabilities of the labels' tokens: its README.md
    shows how. Weights of a checkpoint on disk are read tensor by tensor, so memory holds about one shard.

    Args:
        source: the base model: a decoder, or the name of one.
        injection: fitted task, injected at all positions into the residual writers.
        output: a folder that is new or empty; it appears when it is complete.
        golden: returns golden answers (`make_golden`); called once it is known that the model can be folded.
        revision: of a hub id.
        force: accept other weights of the same shape than those the injection was fitted on.
        max_shard_size: maximum size of a file, such as ``"5GB"``.

    Raises:
        I2CLError: if the model type or the injection cannot be folded, the folder cannot be used, or the
            injection was fitted on another model.
    """
    path = Path(output)
    require_writable(path, frozenset())
    base = open_base(source, revision)
    folding = Folding(base.config, base.weights, injection, base.tokenizer)
    base.require_base_of(injection, folding, force=force)
    answers = golden() if golden is not None else None
    config: Any = folding.config
    with new_folder(path, frozenset()) as fresh:
        names = {folding.stored_name(name): name for name in folding.shapes}
        shapes = {stored: folding.shapes[name] for stored, name in names.items()}
        write_shards(
            fresh, shapes, lambda stored: folding.tensor(names[stored]), folding.dtype, max_shard_size
        )
        config.architectures = [type(skeleton(config)).__name__]
        config.dtype = folding.dtype
        config.save_pretrained(fresh)
        left_padded(base.tokenizer).save_pretrained(fresh)
        if base.generation is not None:
            base.generation.save_pretrained(fresh)
        if answers is not None:
            answers.of_export("causal-lm", folding.dtype, folding.nonzero_biases()).write(fresh)
        write_card(fresh, path.resolve().name, injection, base.tokenizer, "causal-lm")


def left_padded(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy of a tokenizer that pads on the left, so that the last position ends every prompt."""
    made = copy.deepcopy(tokenizer)
    made.padding_side = made.init_kwargs["padding_side"] = "left"  # init_kwargs are what is saved
    if made.pad_token is None:
        made.pad_token = made.eos_token or made.unk_token or made.bos_token
    return made


def write_card(
    folder: Path, name: str, injection: Injection, tokenizer: PreTrainedTokenizerBase, form: Form
) -> None:
    """Write the README.md of an export that will be loaded as ``name``."""
    description = injection.description()
    base = description["base_model"]
    description["base_model"] = base | {"name": public_name(base["name"])}
    text = export_card(description, usage(injection, tokenizer, name, form), LIBRARIES[form])
    (folder / CARD).write_text(text, encoding="utf-8")


def usage(injection: Injection, tokenizer: PreTrainedTokenizerBase, name: str, form: Form) -> str:
    """Describe in Markdown how to run an exported language model."""
    labels = label_tokens_of(injection, tokenizer)
    template = injection.task.template
    tokens = dict(zip(injection.task.labels, scored_tokens(labels), strict=True))
    prompt = template.query(TEXT_FIELD) + labels.line
    write = {"causal-lm": _transformers_code, "peft": _transformers_code, "gguf": _llama_cpp_code}[form]
    base = public_name(injection.base.name) if form == "peft" else name
    code = write(name, base, prompt.replace(TEXT_FIELD, TEXTS[0]), tokens, injection)
    parts = [
        "The task was fitted with exactly these prompts (`{text}` is the text):",
        code_block(prompt, "text"),
    ]
    if labels.full:
        parts.append("Labels share their first token: compare the log-probabilities of all their tokens.")
    else:
        parts.append("The next token decides: compare the log-probabilities of the labels' tokens.")
    parts.append(code_block(code, "python"))
    if form != "gguf" and not labels.full:
        parts.append("Pad batches on the left, as the saved tokenizer does.")
    parts.append(f"`i2cl verify {name}` compares its answers with i2cl's.")
    return "\n\n".join(parts)


def _transformers_code(
    name: str, base: str, prompt: str, tokens: dict[str, list[int]], injection: Injection
) -> str:
    adapter = name != base
    lines = ["import torch", *(["from peft import PeftModel"] if adapter else [])]
    lines += ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    lines += [f"tokenizer = AutoTokenizer.from_pretrained({name!r})"]
    lines += [f"model = AutoModelForCausalLM.from_pretrained({base!r})"]
    lines += [f"model = PeftModel.from_pretrained(model, {name!r})"] if adapter else []
    if all(len(ids) == 1 for ids in tokens.values()):
        lines += [f"labels = { ({label: ids[0] for label, ids in tokens.items()})!r}  # token ids"]
        lines += [f"prompts = [{prompt!r}]"]
        lines += ["inputs = tokenizer(prompts, padding=True, return_tensors='pt')"]
        lines += ["with torch.no_grad():", "    logits = model(**inputs).logits[:, -1].float()"]
        lines += ["scores = logits[:, list(labels.values())]"]
    else:
        lines += [f"labels = {tokens!r}  # token ids", f"prompt = tokenizer({prompt!r})['input_ids']"]
        lines += ["scores = torch.empty(1, len(labels))", "for column, ids in enumerate(labels.values()):"]
        lines += ["    with torch.no_grad():"]
        lines += ["        logits = model(torch.tensor([prompt + ids[:-1]])).logits[0, len(prompt) - 1 :]"]
        lines += ["    log_probs = logits.float().log_softmax(-1)"]
        lines += ["    scores[0, column] = log_probs[range(len(ids)), ids].sum()"]
    if injection.label_bias is not None:
        lines += [f"scores = scores + torch.tensor({list(injection.label_bias)})  # label prior"]
    if injection.temperature != 1:
        lines += [f"scores = scores / {injection.temperature:g}  # temperature"]
    lines += ["probability, best = scores.softmax(-1)[0].max(-1)"]
    lines += ["print(list(labels)[best], float(probability))"]
    return "\n".join(lines)


def _llama_cpp_code(
    name: str, _base: str, prompt: str, tokens: dict[str, list[int]], injection: Injection
) -> str:
    bias = injection.label_bias
    lines = ["import math", "", "from llama_cpp import Llama", "", f"labels = {tokens!r}  # token ids"]
    if bias is not None:
        lines += [f"prior = {dict(zip(tokens, bias, strict=True))!r}"]
    value = "sum(float(row[token]) for row, token in zip(rows, ids))"
    value = value if bias is None else f"{value} + prior[label]"
    value = value if injection.temperature == 1 else f"({value}) / {injection.temperature:g}"
    lines += [
        f"model = Llama({name!r}, logits_all=True, verbose=False)",
        f"prompt = model.tokenize({prompt!r}.encode(), special=True)",
        "model.reset()",
        "model.eval(prompt)",
        "scores = {}",
        "for label, ids in labels.items():",
        "    model.n_tokens = len(prompt)  # back to the end of the prompt",
        "    model.eval(ids)",
        "    rows = model.logits_to_logprobs(model.scores[len(prompt) - 1 : model.n_tokens - 1])",
        f"    scores[label] = {value}",
        "best = max(scores, key=scores.get)",
        "print(best, 1 / sum(math.exp(score - scores[best]) for score in scores.values()))",
    ]
    return "\n".join(lines)
