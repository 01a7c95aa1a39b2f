"""`i2cl predict`."""

import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument

from i2cl.errors import I2CLError
from i2cl.injections.confidence import require_confidence
from i2cl.interfaces.batch_prediction.outputs import require_other, source_state, written
from i2cl.interfaces.batch_prediction.tables import OutputFormat, Table, output_format as chosen_format
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions, opt
from i2cl.tasks.formats import RowFormat
from i2cl.tasks.rows import read_queries
from i2cl.version import __version__


@dataclass(frozen=True)
class FormatOptions:
    """How texts are read and answers are written."""

    input_format: RowFormat | None = opt(None, "Of FILE; default: by its ending, else lines.")
    output_format: OutputFormat | None = opt(None, "Default: by OUT's ending, else tsv; with --json jsonl.")
    text_column: options.TextColumn = "text"
    keep: str | None = opt(
        None, "Columns of FILE to repeat before the answer, commas between; of lines: text."
    )
    row_number: bool = opt(False, "Begin with the number of the row, from 1.", "--row-number")
    min_confidence: float | None = opt(None, "Leave the label empty where its probability is below this.")


@dataclass(frozen=True)
class PlaceOptions:
    """Where the models are, if they are not where they were at the fit."""

    model: options.BaseName = None
    encoder: str | None = opt(None, "Where the fit's sentence encoder is, if not where it was.")


@options.expanded
def predict(
    artefact: options.Artefact,
    source: Annotated[str, Argument(help="Texts one a line, or CSV, TSV, JSONL, JSON; - reads stdin.")] = "-",
    *,
    places: PlaceOptions,
    output: Path | None = opt(None, "Write here, and not to stdout.", "--output", "-o"),
    form: FormatOptions,
    force: options.Force = False,
    chunk: int = opt(512, "Rows scored at a time.", min=1, max=2**31 - 1),
    restart: bool = opt(False, "Discard what a killed run left.", "--restart"),
    loading: ModelOptions,
    json: options.Json = False,
) -> None:
    """Classify texts of a file or of stdin: label and probabilities, line by line.

    With -o, the same command again goes on where a killed run was.
    """
    load.libraries()
    from i2cl.core.artefact import FILES
    from i2cl.core.injection import Injection
    from i2cl.interfaces.batch_prediction.prediction import chunks, digest

    require_confidence(form.min_confidence)
    if restart and output is None:
        raise I2CLError("without -o FILE nothing is left of a killed run: leave --restart out")
    kind = chosen_format(output, form.output_format, as_json=json)
    require_other(output, source, *(str(Path(artefact) / name) for name in FILES))
    started = time.perf_counter()
    injection = Injection.from_pretrained(artefact, encoder=places.encoder)
    loading = load.of_artefact(loading, injection, places.model)
    kept = tuple(dict.fromkeys(load.split(form.keep))) if form.keep else ()
    settings: dict[str, Any] = {"i2cl": __version__, "artefact": digest(injection)}
    settings |= {"model": [places.model, loading.revision], "dtype": loading.dtype}
    settings |= {"quantization": loading.quantization, "source": source_state(source), "chunk": chunk}
    settings |= vars(form) | {"output_format": kind, "keep": kept}
    to_file = output is not None and (output.is_file() or not output.exists())
    waits = to_file and kind in {"csv", "parquet"}
    table = Table(injection.task.labels, kind, kept, form.row_number, waits, form.min_confidence)
    finish = table.finish if table.waits else None
    cut: Any = {"size": chunk, "numbered": form.row_number}
    again = {"resumes": Path(source).is_file(), "restart": restart}
    with written(output, table.header, settings, chunk=chunk, finish=finish, **again) as out:
        if out.kept:
            console.note(f"{out.kept} rows of an earlier run are kept")
        try:
            with console.progress(None, "predicting, rows", shown=output is not None) as bar:
                bar.advance(out.kept)
                if Path(source).is_file():  # a bad row is told before the model is read
                    deque(read_queries(source, form.input_format, form.text_column, kept), maxlen=0)
                decoder = load.artefact_decoder(injection, places.model, loading)
                read = chunks(source, form.input_format, form.text_column, kept, **cut, skip=out.kept)
                with _cuts_added():
                    for queries in read:
                        scores = injection.scores(decoder, [query.text for query in queries], force=force)
                        lines = table.lines(scores.softmax(-1).tolist(), [query.kept for query in queries])
                        out.write(lines, len(queries))
                        bar.advance(len(queries))
        except KeyboardInterrupt:
            if not (out.resumes and out.rows):
                raise
            raise typer.Abort(f"{out.rows} rows are kept: the same command goes on with them") from None
    if output is not None:
        before = f", {out.kept} of them from an earlier run" if out.kept else ""
        console.note(f"Saved {output}: {out.rows} rows in {time.perf_counter() - started:.1f} s{before}.")
        if out.note:
            console.note(out.note)


@contextmanager
def _cuts_added() -> Iterator[None]:
    """Say at the end how many texts were cut in all: a warning is of a chunk, and equal ones show once."""
    from i2cl.models.encoding import TruncationWarning

    show = warnings.showwarning
    cut: list[int] = []

    def added(message: Warning | str, *rest: Any, **more: Any) -> None:
        if isinstance(message, TruncationWarning):
            cut.extend(message.args[1:])  # how many, where it says so
        show(message, *rest, **more)

    warnings.showwarning = added
    try:
        yield
    finally:
        warnings.showwarning = show
        if len(cut) > 1:
            console.note(f"{sum(cut)} texts were cut in all")
