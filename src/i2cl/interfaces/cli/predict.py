"""`i2cl predict`."""

import time
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument

from i2cl.errors import I2CLError
from i2cl.injections.confidence import require_confidence
from i2cl.interfaces.batch_prediction.outputs import Output, require_other, source_state, written
from i2cl.interfaces.batch_prediction.tables import OutputFormat, Table
from i2cl.interfaces.batch_prediction.tables import output_format as chosen_format
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions, opt
from i2cl.tasks.formats import RowFormat
from i2cl.version import __version__

if TYPE_CHECKING:
    from i2cl.core.injection import Injection
    from i2cl.interfaces.batch_prediction.prediction import ScoredStream, Scorer


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
class RunOptions:
    """Where the texts are scored, and how many at a time."""

    chunk: int = opt(512, "Rows scored at a time.", min=1, max=2**31 - 1)
    restart: bool = opt(False, "Discard what a killed run left.", "--restart")
    executor: options.Executor = "local"
    workers: int | None = opt(None, "Actors on Ray; default: one a GPU, or a core without any.", min=1)
    address: options.Address = None


@options.expanded
def predict(
    artefact: options.Artefact,
    source: Annotated[str, Argument(help="Texts one a line, or CSV, TSV, JSONL, JSON; - reads stdin.")] = "-",
    *,
    model: options.BaseName = None,
    output: Path | None = opt(None, "Write here, and not to stdout.", "--output", "-o"),
    form: FormatOptions,
    force: options.Force = False,
    run: RunOptions,
    loading: ModelOptions,
    json: options.Json = False,
) -> None:
    """Classify texts of a file or of stdin: label and probabilities, line by line.

    With -o, the same command again goes on where a killed run was.
    """
    load.libraries()
    from i2cl.core.artefact import FILES
    from i2cl.core.injection import Injection
    from i2cl.interfaces.batch_prediction.prediction import Texts, digest, predict_here, predict_on_ray

    if run.executor == "local" and (run.workers or run.address):
        raise I2CLError("--workers and --address are for a cluster: add --executor ray")
    if run.executor == "ray" and source == "-":
        raise I2CLError("--executor ray reads the texts on the cluster and not from stdin: give a file")
    require_confidence(form.min_confidence)
    kind = chosen_format(output, form.output_format, as_json=json)
    require_other(output, source, *(str(Path(artefact) / name) for name in FILES))
    started = time.perf_counter()
    injection = Injection.from_pretrained(artefact)
    loading = load.of_artefact(loading, injection, model)
    kept = tuple(dict.fromkeys(load.split(form.keep))) if form.keep else ()
    texts = Texts(source, form.input_format, form.text_column, run.chunk, kept=kept, numbered=form.row_number)
    settings: dict[str, Any] = {"i2cl": __version__, "artefact": digest(injection)}
    settings |= {"model": [model, loading.revision], "dtype": loading.dtype}
    settings |= {"quantization": loading.quantization, "source": source_state(source)}
    settings |= {"input_format": form.input_format, "output_format": kind, "text_column": form.text_column}
    settings |= {"keep": texts.names, "chunk": run.chunk, "min_confidence": form.min_confidence}
    to_file = output is not None and (output.is_file() or not output.exists())
    waits = to_file and kind in {"csv", "parquet"}
    table = Table(injection.task.labels, kind, texts.names, waits=waits, least=form.min_confidence)
    load_scorer = partial(_scorer, injection, model, loading, table, force=force)
    finish = table.finish if table.waits else None
    again = {"resumes": Path(source).is_file(), "restart": run.restart}
    with written(output, table.header, settings, chunk=run.chunk, finish=finish, **again) as out:
        if out.kept:
            console.note(f"{out.kept} rows of an earlier run are kept")
        texts = replace(texts, skip=out.kept)
        if run.executor == "ray":
            scored = predict_on_ray(load_scorer, texts, run.address, run.workers)
        else:
            scored = predict_here(load_scorer, texts)
        _write(scored, out, shown=output is not None)
    if output is not None:
        before = f", {out.kept} of them from an earlier run" if out.kept else ""
        console.note(f"Saved {output}: {out.rows} rows in {time.perf_counter() - started:.1f} s{before}.")
        if out.note:
            console.note(out.note)


def _write(scored: "ScoredStream", out: Output, *, shown: bool) -> None:
    """Write what comes, with a bar unless it goes to stdout."""
    try:
        with closing(scored), console.progress(None, "predicting, rows", shown=shown) as bar:
            bar.advance(out.rows)
            for lines, rows in scored:
                out.write(lines, rows)
                bar.advance(rows)
    except KeyboardInterrupt:
        if not (out.resumes and out.rows):
            raise
        raise typer.Abort(f"{out.rows} rows are kept: the same command goes on with them") from None


def _scorer(
    injection: "Injection", model: str | None, loading: ModelOptions, table: Table, *, force: bool
) -> "Scorer":
    from i2cl.interfaces.batch_prediction.prediction import Scorer

    return Scorer(injection, load.artefact_decoder(injection, model, loading), table, force)
