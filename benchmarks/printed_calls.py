"""Measure how often the call that `export` prints predicts the same label as the library.

    python benchmarks/printed_calls.py ARTEFACT EXPORT transformers|vLLM|llama.cpp --queries 60

EXPORT is a checkpoint or a GGUF file (llama-cpp-python). For vLLM, a server at http://localhost:8000 must
serve the checkpoint under that path; the calls need curl or the package openai.
"""

import argparse
import json
import subprocess
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from i2cl import Decoder, Injection, load_task
from i2cl.export import Golden
from i2cl.export.calls import Call, calls_of
from i2cl.export.greedy import TEXTS
from i2cl.tasks.template import TEXT_FIELD


def said(call: Call, prompt: str, texts: list[str]) -> list[str]:
    """Run a printed call for each text, and return the outputs; the model is loaded once.

    Args:
        call: the call for the first of `TEXTS`.
        prompt: the prompt of the export, with `TEXT_FIELD` in place of the text.
        texts: texts to substitute.
    """
    first = prompt.replace(TEXT_FIELD, TEXTS[0])
    prompts = [prompt.replace(TEXT_FIELD, text) for text in texts]
    if call.language == "console":
        # the prompt is JSON within single quotes
        codes = [call.code.replace(quoted(first), quoted(own)) for own in prompts]
        answers = [subprocess.run(["bash", "-c", code], capture_output=True, check=True) for code in codes]  # noqa: S607
        return [json.loads(answer.stdout)["choices"][0]["text"].strip() for answer in answers]
    lines = call.code.splitlines()
    start = 1 + max((at for at, line in enumerate(lines) if line.startswith("model = ")), default=-1)
    names: dict[str, Any] = {}
    exec("\n".join(lines[:start]), names)  # noqa: S102 - the printed code is what is tested
    answers = []
    for own in prompts:
        with redirect_stdout(StringIO()) as printed:
            exec("\n".join(lines[start:]).replace(repr(first), repr(own)), names)  # noqa: S102
        answers.append(printed.getvalue().strip())
    return answers


def quoted(prompt: str) -> str:
    """Quote a prompt as in the printed shell command."""
    return json.dumps(prompt, ensure_ascii=False).replace("'", "'\"'\"'")


def main() -> None:
    """Run the calls, and count equal labels."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("artefact")
    parser.add_argument("export")
    parser.add_argument("program", choices=("transformers", "vLLM", "llama.cpp"))
    parser.add_argument("--queries", type=int, default=60)
    given = parser.parse_args()
    injection = Injection.from_pretrained(given.artefact)
    rows = load_task(injection.task.name).queries(given.queries)
    texts = [row.text for row in rows]
    wanted = injection.predict(Decoder.from_pretrained(injection.base.name), texts)
    golden = Golden.from_export(given.export)
    calls = calls_of(golden, given.export, "hf" if Path(given.export).is_dir() else "gguf")
    answers = said(next(call for call in calls if call.program == given.program), golden.prompt, texts)
    spoken = dict(zip(golden.labels, map(str.strip, golden.label_texts), strict=True))  # first tokens
    right = sum(one in (label, spoken[label]) for one, label in zip(answers, wanted, strict=True))
    print(f"{given.program}: same label as the library for {right} of {len(rows)} queries")


if __name__ == "__main__":
    main()
