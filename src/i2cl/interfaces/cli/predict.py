"""`i2cl predict`."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument

from i2cl.errors import I2CLError
from i2cl.interfaces.batch_prediction import (
    Output,
    OutputFormat,
    Table,
    digest,
    open_output,
    output_format as chosen_format,
    read_chunks,
    require_not_input,
    require_writable_file,
    source_state,
)
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions, opt
from i2cl.storage.layout import FILES
from i2cl.tasks.formats import STDIN, RowFormat
from i2cl.tasks.labels import require_confidence
from i2cl.tasks.rows import BadRows, Query, check_queries, read_queries
from i2cl.version import __version__

if TYPE_CHECKING:
    from i2cl.core.injection import Injection


@dataclass(frozen=True)
class FormatOptions:
    """Input and output formats."""

    input_format: RowFormat | None = opt(None, "Format of FILE; default: by its extension, else lines.")
    output_format: OutputFormat | None = opt(
        None, "Output format; default: by the extension of --output, else tsv, or jsonl with --json."
    )
    text_column: options.TextColumn = "text"
    keep: str | None = opt(
        None, "Columns of FILE to copy to the output, separated by commas; plain lines have the column text."
    )
    row_number: bool = opt(False, "Add the row number, from 1, as the first column.", "--row-number")
    min_confidence: float | None = opt(
        None,
        "Leave the label empty if its probability is below this; in a multi-label task, give all labels with "
        "at least this probability.",
    )
    skip_bad_rows: bool = opt(
        False, "Leave the output empty for rows without a usable text, instead of failing.", "--skip-bad-rows"
    )


@dataclass(frozen=True)
class PlaceOptions:
    """New locations of the models of the fit."""

    model: options.BaseName = None
    encoder: str | None = opt(None, "Path of the fit's sentence encoder; default: where it was at the fit.")


@options.expanded
def predict(
    artefact: options.Artefact,
    source: Annotated[
        str, Argument(help="File with a text per line, CSV, TSV, JSONL, JSON, Parquet or Excel; - is stdin.")
    ] = "-",
    *,
    places: PlaceOptions,
    output: Path | None = opt(None, "Write to this file instead of stdout.", "--output", "-o"),
    form: FormatOptions,
    force: options.Force = False,
    chunk: int = opt(512, "Number of rows scored at a time.", min=1, max=2**31 - 1),
    restart: bool = opt(False, "Discard the rows of an interrupted run.", "--restart"),
    loading: ModelOptions,
    json: options.Json = False,
) -> None:
    """Classify the texts of a file or of stdin: a label and probabilities for each.

    With -o, the same command resumes an interrupted run.
    """
    started = time.perf_counter()
    table = _check_options(artefact, source, output, form, loading, restart=restart, json=json)
    rereadable = source != STDIN and (Path(source).is_file() or not Path(source).exists())
    reading = (source, form.input_format, form.text_column, table.kept)
    bad = check_queries(*reading, skip=form.skip_bad_rows) if rereadable else BadRows(source)

    load.libraries()
    from i2cl.core.injection import Injection

    load.quiet()
    injection = Injection.from_pretrained(artefact, encoder=places.encoder)
    table = replace(table, labels=injection.task.labels, thresholds=injection.head.thresholds)
    for name, column in table.renamed.items():
        console.note(f"the kept column {name!r} is renamed to {column!r}: the output has its own {name!r}")

    def classify(texts: list[str]) -> list[list[float]]:
        log_probs = injection.log_probs(decoder, texts, force=force, device=loading.device)
        return injection.head.probabilities(log_probs).tolist()

    with open_output(
        output,
        table.header,
        _run_settings(injection, source, places, form, loading, table, chunk),
        chunk=chunk,
        resumes=rereadable,
        restart=restart,
        finish=table.finish if table.deferred else None,
    ) as out:
        if out.kept:
            console.note(f"resuming after {out.kept} rows of an earlier run")
        with (
            _saved_if_interrupted(out),
            console.progress(None, "predicting, rows", shown=output is not None) as bar,
        ):
            bar.advance(out.kept)
            decoder = None
            if injection.head.uses_llm:
                decoder = load.artefact_decoder(injection, places.model, load.with_default_dtype(loading))
            rows = read_queries(*reading, skip=form.skip_bad_rows)
            with _count_truncated():
                for queries in read_chunks(rows, chunk, out.kept, numbered=form.row_number):
                    out.write(_classified_lines(table, queries, classify), len(queries))
                    bar.advance(len(queries))
                    if not rereadable:  # otherwise they were counted before
                        bad.add(*(query.error for query in queries if query.error is not None))
    _report(out, output, table, bad, time.perf_counter() - started)


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
    """Check everything that does not need PyTorch, and return the output format, still without labels."""
    require_confidence(form.min_confidence)
    if restart and output is None:
        raise I2CLError("--restart needs -o FILE, whose rows it discards: add -o FILE, or omit --restart")
    load.require_options(loading)
    load.require_artefact(artefact)
    require_not_input(output, source, *(str(Path(artefact) / name) for name in FILES))
    kind = chosen_format(output, form.output_format, as_json=json)
    to_file = output is not None and (output.is_file() or not output.exists())
    if output is not None:
        require_writable_file(output)
    kept = tuple(dict.fromkeys(load.split(form.keep))) if form.keep else ()
    deferred = to_file and kind in {"csv", "parquet"}
    return Table((), kind, kept, form.row_number, deferred, form.min_confidence)


def _run_settings(
    injection: "Injection",
    source: str,
    places: PlaceOptions,
    form: FormatOptions,
    loading: ModelOptions,
    table: Table,
    chunk: int,
) -> dict[str, Any]:
    """Return everything that the predictions depend on: only a run with the same settings is resumed."""
    return {
        "i2cl": __version__,
        "artefact": digest(injection),
        "model": [places.model, loading.revision],
        "dtype": loading.dtype,
        "quantization": loading.quantization,
        "source": source_state(source),
        "chunk": chunk,
        **vars(form),
        "output_format": table.kind,
        "keep": table.kept,
    }


def _classified_lines(
    table: Table, queries: Sequence[Query], classify: Callable[[list[str]], list[list[float]]]
) -> str:
    """Classify the usable rows of one chunk, and format all of its rows."""
    texts = [query.text for query in queries if query.error is None]
    probabilities = iter(classify(texts) if texts else [])
    rows = [next(probabilities) if query.error is None else None for query in queries]
    errors = [query.error.why if query.error else "" for query in queries]
    return table.lines(rows, [query.kept for query in queries], errors)


def _report(out: Output, output: Path | None, table: Table, bad: BadRows, seconds: float) -> None:
    """Print what was written, which rows have no label, and a note on the finished file."""
    note = out.note
    if output is not None:
        resumed = f", {out.kept} of them from an earlier run" if out.kept else ""
        console.note(f"Saved {output}: {out.rows} rows in {seconds:.1f} s{resumed}.")
        note = note or table.formula_note(output)
    if bad.count:
        console.note(f"{bad.count} of {out.rows} rows have no label: {bad.summary()}")
    if note:
        console.note(note)


@contextmanager
def _saved_if_interrupted(out: Output) -> Iterator[None]:
    """Say after Ctrl-C how to resume, if rows are saved."""
    try:
        yield
    except KeyboardInterrupt:
        if not (out.resumes and out.rows):
            raise
        raise typer.Abort(f"{out.rows} rows are saved; run the same command to resume") from None


@contextmanager
def _count_truncated() -> Iterator[None]:
    """Print the total number of truncated texts, because every chunk emits its own warning."""
    from i2cl.models.encoding import TruncationWarning

    show = warnings.showwarning
    counts: list[int] = []

    def count(message: Warning | str, *rest: Any, **more: Any) -> None:
        if isinstance(message, TruncationWarning):
            counts.extend(message.args[1:])  # the number of texts, if the warning has one
        show(message, *rest, **more)

    warnings.showwarning = count
    try:
        yield
    finally:
        warnings.showwarning = show
        if len(counts) > 1:
            console.note(f"{sum(counts)} texts were truncated in total")
