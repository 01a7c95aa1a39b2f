"""`i2cl predict`."""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument

from i2cl.errors import I2CLError
from i2cl.injections.confidence import require_confidence
from i2cl.interfaces.batch_prediction.outputs import (
    require_other,
    require_writable_file,
    source_state,
    written,
)
from i2cl.interfaces.batch_prediction.tables import OutputFormat, Table, output_format as chosen_format
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions, opt
from i2cl.storage.layout import FILES
from i2cl.tasks.formats import STDIN, RowFormat
from i2cl.tasks.rows import BadRows, Query, check_queries
from i2cl.version import __version__


@dataclass(frozen=True)
class FormatOptions:
    """How texts are read and answers are written."""

    input_format: RowFormat | None = opt(None, "Format of FILE; default: by its ending, else lines.")
    output_format: OutputFormat | None = opt(None, "Default: by OUT's ending, else tsv; with --json jsonl.")
    text_column: options.TextColumn = "text"
    keep: str | None = opt(
        None, "Columns of FILE to repeat before the answer, commas between; of lines: text."
    )
    row_number: bool = opt(False, "Begin with the number of the row, from 1.", "--row-number")
    min_confidence: float | None = opt(None, "Leave the label empty where its probability is below this.")
    skip_bad_rows: bool = opt(
        False, "Leave the answer empty for rows without a usable text, instead of failing.", "--skip-bad-rows"
    )


@dataclass(frozen=True)
class PlaceOptions:
    """Where the models are, if they are not where they were at the fit."""

    model: options.BaseName = None
    encoder: str | None = opt(None, "Where the fit's sentence encoder is, if not where it was.")


@options.expanded
def predict(
    artefact: options.Artefact,
    source: Annotated[
        str, Argument(help="One text per line, or CSV, TSV, JSONL, JSON, Parquet, Excel; - reads stdin.")
    ] = "-",
    *,
    places: PlaceOptions,
    output: Path | None = opt(None, "Write to this file instead of stdout.", "--output", "-o"),
    form: FormatOptions,
    force: options.Force = False,
    chunk: int = opt(512, "Rows scored at a time.", min=1, max=2**31 - 1),
    restart: bool = opt(False, "Discard what a killed run left.", "--restart"),
    loading: ModelOptions,
    json: options.Json = False,
) -> None:
    """Classify texts of a file or of stdin: label and probabilities, line by line.

    With -o, the same command resumes a run that was killed.
    """
    started = time.perf_counter()
    table = _check_options(artefact, source, output, form, loading, restart=restart, json=json)
    texts: Any = {"kind": form.input_format, "column": form.text_column, "kept": table.kept}
    rereadable = source != STDIN and (Path(source).is_file() or not Path(source).exists())
    bad = check_queries(source, **texts, skip=form.skip_bad_rows) if rereadable else BadRows(source)

    load.libraries()
    from i2cl.core.injection import Injection
    from i2cl.interfaces.batch_prediction.prediction import chunks, digest

    injection = Injection.from_pretrained(artefact, encoder=places.encoder)
    loading = load.of_artefact(loading, injection, places.model)
    table = replace(table, labels=injection.task.labels)
    settings: dict[str, Any] = {"i2cl": __version__, "artefact": digest(injection)}
    settings |= {"model": [places.model, loading.revision], "dtype": loading.dtype}
    settings |= {"quantization": loading.quantization, "source": source_state(source), "chunk": chunk}
    settings |= vars(form) | {"output_format": table.kind, "keep": table.kept}
    for name, column in table.renamed.items():
        console.note(f"the kept column {name!r} is called {column!r}: the answer has a column {name!r}")

    def scored(texts: list[str]) -> list[list[float]]:
        return injection.scores(decoder, texts, force=force).softmax(-1).tolist() if texts else []

    given: Any = {"chunk": chunk, "resumes": rereadable, "restart": restart}
    given["finish"] = table.finish if table.waits else None
    with written(output, table.header, settings, **given) as out:
        if out.kept:
            console.note(f"{out.kept} rows of an earlier run are kept")
        try:
            with console.progress(None, "predicting, rows", shown=output is not None) as bar:
                bar.advance(out.kept)
                decoder = load.artefact_decoder(injection, places.model, load.automatic(loading))
                cut: Any = {"size": chunk, "start": out.kept, "numbered": form.row_number}
                with _cuts_added():
                    for queries in chunks(source, **texts, **cut, skip_bad=form.skip_bad_rows):
                        usable = [query.text for query in queries if query.error is None]
                        out.write(_lines(table, queries, scored(usable)), len(queries))
                        bar.advance(len(queries))
                        if not rereadable:  # they were counted beforehand
                            bad.add(*(query.error for query in queries if query.error is not None))
        except KeyboardInterrupt:
            if not (out.resumes and out.rows):
                raise
            raise typer.Abort(f"{out.rows} rows are kept: the same command goes on with them") from None
    if output is not None:
        before = f", {out.kept} of them from an earlier run" if out.kept else ""
        console.note(f"Saved {output}: {out.rows} rows in {time.perf_counter() - started:.1f} s{before}.")
        out.note = out.note or table.formula_note(output)
    note = f"{bad.count} of {out.rows} rows have no answer: {bad.summary()}" if bad.count else ""
    for line in filter(None, (note, out.note)):
        console.note(line)


def _check_options(
    artefact: str,
    source: str,
    output: Path | None,
    form: FormatOptions,
    loading: ModelOptions,
    *,
    restart: bool,
    json: bool,
) -> Table:
    """Check everything that does not need PyTorch, and return the output format, without labels as yet."""
    require_confidence(form.min_confidence)
    if restart and output is None:
        raise I2CLError("--restart discards the rows of a killed run with -o FILE: leave --restart out")
    kind = chosen_format(output, form.output_format, as_json=json)
    load.require_options(loading)
    load.require_artefact(artefact)
    require_other(output, source, *(str(Path(artefact) / name) for name in FILES))
    to_file = output is not None and (output.is_file() or not output.exists())
    if output is not None:
        require_writable_file(output)
    kept = tuple(dict.fromkeys(load.split(form.keep))) if form.keep else ()
    waits = to_file and kind in {"csv", "parquet"}
    return Table((), kind, kept, form.row_number, waits, form.min_confidence)


def _lines(table: Table, queries: Sequence[Query], scores: Sequence[Sequence[float]]) -> str:
    """Format one chunk; ``scores`` are of the usable rows only."""
    usable = iter(scores)
    rows = [next(usable) if query.error is None else None for query in queries]
    errors = [query.error.why if query.error else "" for query in queries]
    return table.lines(rows, [query.kept for query in queries], errors)


@contextmanager
def _cuts_added() -> Iterator[None]:
    """Print at the end how many texts were truncated: each chunk warns, and equal warnings are shown once."""
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
