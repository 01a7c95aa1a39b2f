"""`i2cl convert`."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from i2cl.interfaces.cli import console, load, options


def convert(
    source: Annotated[Path, Argument(help="Folder of a model whose weights are pickles (.bin).")],
    output: Annotated[Path, Argument(help="Folder for the same in safetensors, new or empty.")],
    json: options.Json = False,
) -> None:
    """Rewrite a model's pickled weights as safetensors.

    Nothing that a pickle can hold is run.
    """
    load.libraries()
    from i2cl.export import convert as rewrite

    files = rewrite(source, output)
    size = sum(path.stat().st_size for path in files)
    done = f"Saved {output}: {size:,} bytes in {len(files)} file(s).\nNext: i2cl eval {output} TASKS"
    console.answer({"output": str(output), "files": len(files), "bytes": size}, done, as_json=json)
