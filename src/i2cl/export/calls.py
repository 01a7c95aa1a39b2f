"""How an export is asked: the exact calls, for people and for its README.md.

Sources: https://docs.vllm.ai/en/latest/features/structured_outputs/ (``structured_outputs`` with ``choice``),
https://platform.openai.com/docs/api-reference/completions (``echo``),
https://llama-cpp-python.readthedocs.io/en/latest/api-reference/, and
https://huggingface.co/docs/transformers/main_classes/text_generation.
"""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from i2cl.export.golden import Golden
from i2cl.export.greedy import TEXTS, forced_tokens
from i2cl.storage.card import CARD, code_block, export_card
from i2cl.tasks.template import TEXT_FIELD

Kind = Literal["hf", "peft", "gguf"]  # what an export is: a checkpoint, an adapter or a GGUF file
LIBRARIES = {"hf": "transformers", "peft": "peft", "gguf": "gguf"}  # what the hub calls that which loads it


@dataclass(frozen=True)
class Call:
    """How one program is asked."""

    program: str  # its name
    language: str  # of the code
    code: str  # the call as it is typed


def calls_of(golden: Golden, name: str, kind: Kind) -> list[Call]:
    """How the programs that run an export are asked for one label; ``name``: of its folder or file."""
    prompt = golden.prompt.replace(TEXT_FIELD, TEXTS[0])
    if kind == "gguf":
        code = (_llama_cpp_whole if golden.sequences else _llama_cpp)(golden, name, prompt)
        return [Call("llama.cpp", "python", code)]
    calls = [Call("transformers", "python", _transformers(golden, name, prompt, kind))]
    if kind == "hf" and golden.sequences:
        calls.append(Call("vLLM", "python", _vllm_whole(golden, name, prompt)))
    elif kind == "hf":
        calls.append(Call("vLLM", "console", _vllm(golden, name, prompt)))
    return calls


def _transformers(golden: Golden, name: str, prompt: str, kind: Kind) -> str:
    base, head, adapter, settings = name, "", "", ""
    if kind == "peft":
        base, head = golden.artefact["base_model"]["name"], "from peft import PeftModel\n"
        adapter = f"\nmodel = PeftModel.from_pretrained(model, {name!r})"
        if golden.forced:
            settings = ", GenerationConfig"
            adapter += f"\nmodel.generation_config = GenerationConfig.from_pretrained({name!r})"
    return f"""{head}from transformers import AutoModelForCausalLM, AutoTokenizer{settings}

tokenizer = AutoTokenizer.from_pretrained({base!r})
model = AutoModelForCausalLM.from_pretrained({base!r}){adapter}
asked = tokenizer({prompt!r}, return_tensors='pt')
answer = model.generate(**asked, do_sample=False, max_new_tokens={golden.longest})
print(tokenizer.decode(answer[0, asked['input_ids'].shape[1] :]))"""


def _vllm(golden: Golden, name: str, prompt: str) -> str:
    body: dict[str, Any] = {"model": name, "prompt": prompt, "max_tokens": golden.longest, "temperature": 0}
    if golden.forced:
        bias = {str(token): value for token, value in lifted(golden).items()}
        body |= {"structured_outputs": {"choice": golden.words}, "logit_bias": bias}
    sent = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl http://localhost:8000/v1/completions -H 'Content-Type: application/json' \\\n  -d {sent}"


def _vllm_whole(golden: Golden, name: str, prompt: str) -> str:
    """Log-probabilities of whole labels, each behind the prompt: vLLM tells a prompt's own by ``echo``."""
    lengths = map(len, golden.sequences)
    labels = dict(zip(golden.sequence_texts, zip(golden.labels, lengths, strict=True), strict=True))
    return f"""from openai import OpenAI

labels = {labels!r}  # label, tokens
prompt = {prompt!r}
server = OpenAI(base_url='http://localhost:8000/v1', api_key='none')
answer = server.completions.create(
    model={name!r},
    prompt=[prompt + text for text in labels],
    max_tokens=0,
    echo=True,
    logprobs=1,
)
scores = {{
    label: sum(choice.logprobs.token_logprobs[-tokens:])
    for choice, (label, tokens) in zip(answer.choices, labels.values())
}}
print(max(scores, key=scores.get))"""


def _llama_cpp_whole(golden: Golden, name: str, prompt: str) -> str:
    """The same in llama.cpp: the prompt runs once, and every label behind its keys and values."""
    return f"""from llama_cpp import Llama

labels = {dict(zip(golden.labels, golden.sequences, strict=True))!r}  # tokens
model = Llama({name!r}, logits_all=True, verbose=False)
prompt = model.tokenize({prompt!r}.encode(), special=True)
model.reset()  # forgets the text before
model.eval(prompt)
scores = {{}}
for label, tokens in labels.items():
    model.n_tokens = len(prompt)  # back to the end of the prompt
    model.eval(tokens)
    told = model.logits_to_logprobs(model.scores[len(prompt) - 1 : model.n_tokens - 1])
    scores[label] = float(sum(row[token] for row, token in zip(told, tokens)))
print(max(scores, key=scores.get))"""


def _llama_cpp(golden: Golden, name: str, prompt: str) -> str:
    head, arguments = ["from llama_cpp import Llama"], [repr(prompt)]
    arguments += [f"max_tokens={golden.longest}", "temperature=0"]
    if golden.forced:
        head = ["from llama_cpp import Llama, LlamaGrammar", "", f"labels = {golden.grammar!r}"]
        arguments += ["grammar=LlamaGrammar.from_string(labels)", f"logit_bias={lifted(golden)!r}"]
    lines = [*head, "", f"model = Llama({name!r}, verbose=False)", "answer = model("]
    lines += [*(f"    {one}," for one in arguments), ")", "print(answer['choices'][0]['text'])"]
    return "\n".join(lines)


def lifted(golden: Golden) -> dict[int, float]:
    """Every token of a label, beside a grammar, which alone leaves a program to cut labels as it likes."""
    return forced_tokens(golden.spoken, () if golden.sequences else golden.label_bias)


def sent_to_servers(golden: Golden) -> dict[str, Any]:
    """What a request has besides, so that any server says a label; empty where the model does so by itself.
    Whole sequences take a grammar too, for servers such as llama.cpp's, which tell no log-probabilities of
    a prompt's own tokens: where a server does, whole labels are compared.
    """
    bias = golden.logit_bias(golden.label_bias)
    grammar = {"grammar": golden.grammar} if golden.forced and golden.sequences else {}
    return ({"logit_bias": bias} if bias else {}) | grammar


def usage(golden: Golden, name: str, kind: Kind) -> str:
    """How an export is asked, in Markdown."""
    right, calls = golden.greedy, calls_of(golden, name, kind)
    cure = ": make it say one of the labels, as these calls do" if golden.forced else ""
    share = f"answers {sum(right)} of {len(right)} golden prompts with {golden.said_as}"
    parts = [f"Plain greedy decoding {share}{cure}."]
    if golden.compared and kind != "gguf":
        parts.append(
            "transformers compares whole labels: generation_config.json holds a beam for each, no length "
            "penalty, and labels' last tokens as ends of an answer. vLLM reads these ends too, so text that "
            "it writes itself stops there, and its `structured_outputs` cannot say such labels."
        )
    parts += [
        "Only these prompts, letter by letter, are what the task was fitted for (`{text}` is the text):",
        code_block(golden.prompt, "text"),
        *(f"{call.program}:\n\n{code_block(call.code, call.language)}" for call in calls),
    ]
    if golden.shortened:
        names = dict(zip(golden.labels, golden.label_texts, strict=True))
        what = "An answer is one token, which stands for a label. Each label, and what is said for it:"
        parts.append(f"{what}\n\n{code_block(json.dumps(names, indent=1, ensure_ascii=False), 'json')}")
    if kind == "gguf":
        parts.append(
            "The injection lies in biases of llama.cpp's class `granite`, which transformers refuses to load "
            "(`gguf_file=`). For transformers, vLLM and SGLang export a checkpoint (`i2cl export --to hf`)."
        )
    parts.append(f"`i2cl verify {name}` checks that what runs it answers as it should.")
    return "\n\n".join(parts)


def write_golden(folder: Path, name: str, golden: Golden, kind: Kind) -> None:
    """Store golden values beside an export, and a card with the calls."""
    golden.write(folder)
    text = export_card(golden.artefact, usage(golden, name, kind), LIBRARIES[kind])
    (folder / CARD).write_text(text, encoding="utf-8")
