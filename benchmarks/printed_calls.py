"""How often the call that `export` prints gives the library's answer, text after text.

    python benchmarks/printed_calls.py ARTEFACT EXPORT --queries 60

EXPORT is a checkpoint that a server of vLLM at http://localhost:8000 runs under that path (the call takes the
package openai), or a GGUF file (llama-cpp-python).
"""

import argparse
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from i2cl import Decoder, Injection, load_task
from i2cl.export import Golden
from i2cl.export.greedy.calls import calls_of
from i2cl.export.greedy.texts import TEXTS
from i2cl.tasks.template import TEXT_FIELD


def said(code: str, prompt: str, texts: list[str]) -> list[str]:
    """What a printed call says of each text; what stands above its prompt runs once.

    Args:
        code: a call in Python, of the first of `TEXTS`.
        prompt: of the export, with `TEXT_FIELD` in the text's place.
        texts: to be asked in that one's place.
    """
    start, names, found = code.index("prompt = "), {}, []
    first = repr(prompt.replace(TEXT_FIELD, TEXTS[0]))
    exec(compile(code[:start], "<call>", "exec"), names)  # noqa: S102 - as a reader would
    for text in texts:
        asked = code[start:].replace(first, repr(prompt.replace(TEXT_FIELD, text)))
        with redirect_stdout(StringIO()) as told:
            exec(compile(asked, "<call>", "exec"), names)  # noqa: S102
        found.append(told.getvalue().strip())
    return found


def main() -> None:
    """Ask, and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("artefact")
    parser.add_argument("export")
    parser.add_argument("--queries", type=int, default=60)
    given = parser.parse_args()
    injection = Injection.from_pretrained(given.artefact)
    rows = load_task(injection.task.name).queries(given.queries)
    wanted = injection.predict(Decoder.from_pretrained(injection.base.name), [row.text for row in rows])
    program, kind = ("vLLM", "hf") if Path(given.export).is_dir() else ("llama.cpp", "gguf")
    golden = Golden.from_export(given.export)
    calls = {call.program: call.code for call in calls_of(golden, given.export, kind)}
    found = said(calls[program], golden.prompt, [row.text for row in rows])
    right = sum(one == other for one, other in zip(found, wanted, strict=True))
    print(f"{program}: the library's answer to {right} of {len(rows)} queries")


if __name__ == "__main__":
    main()
