"""`i2cl update`: fit a task again with further rows, or with labels renamed or removed."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument

from i2cl.errors import I2CLError
from i2cl.interfaces.cli import console, fit, load, options
from i2cl.interfaces.cli.fit import EvaluationOptions
from i2cl.interfaces.cli.options import ModelOptions, TaskOptions, opt
from i2cl.interfaces.cli.predict import PlaceOptions
from i2cl.storage.atomic import require_writable
from i2cl.storage.layout import own_files

if TYPE_CHECKING:
    from i2cl.core.injection import Injection
    from i2cl.tasks import Task

COLUMNS = ("text_column", "label_column", "label_separator", "label_columns", "skip_bad_rows")


@dataclass(frozen=True)
class LabelOptions:
    """Changes of the labels."""

    rename: list[str] | None = opt(None, "Rename a label, or merge it with the label NEW, as OLD=NEW.")
    remove: list[str] | None = opt(
        None, "Remove a label; repeatable. Its rows are dropped, or lose it in a multi-label task."
    )


@options.expanded
def update(
    context: typer.Context,
    artefact: options.Artefact,
    source: Annotated[
        Path | None, Argument(help="CSV, TSV, JSONL, JSON, Parquet or Excel file with further rows.")
    ] = None,
    *,
    output: Path | None = opt(None, "Folder for the new artefact; default: replace it.", "--output", "-o"),
    labels: LabelOptions,
    rows: Annotated[TaskOptions, COLUMNS],
    evaluation: Annotated[EvaluationOptions, ("evaluate", "threshold")],
    places: PlaceOptions,
    loading: ModelOptions,
    json: options.Json = False,
) -> None:
    """Fit a task again with further rows and labels, or with labels renamed or removed.

    Needs a task that was fitted with --keep-examples. Its rows and the new ones are fitted together, with the
    settings of the first fit. A new row replaces one with the same text.
    """
    load.require_options(loading)
    load.require_artefact(artefact)
    output = output or Path(artefact)
    require_writable(output, own_files(output))
    new_names = load.parse_pairs(labels.rename, "--rename", "OLD=NEW", "blue=navy")
    if source is None and not (new_names or labels.remove):
        raise I2CLError("nothing to change: give a file of rows, --rename OLD=NEW or --remove LABEL")
    load.libraries()
    from i2cl.core.injection import LABEL_PRIOR, Injection
    from i2cl.experiments.draw import Draw
    from i2cl.experiments.evidence.fit_evaluation import FitRequest, plan_evaluation
    from i2cl.experiments.fitting import require_supported
    from i2cl.injections.ensemble import EnsembleConfig

    injection = Injection.from_pretrained(artefact, encoder=places.encoder)
    removed = [new_names.get(word, word) for word in labels.remove or []]
    method = fit.method_of(_rename_class_weights(injection, new_names, removed))
    task = _changed_task(injection, new_names, removed, source, rows)
    stored_threshold = injection.evaluation.get("threshold") if task.multi_label else None
    ensemble = EnsembleConfig.of(injection)
    ensemble.members()  # raises if the encoder is missing
    request = FitRequest(
        method,
        ensemble,
        injection.seed,
        injection.scoring,
        threshold=evaluation.threshold or stored_threshold,
        command=fit.command_line(context),
        keep_examples=True,
    )
    require_supported(task, request)
    if LABEL_PRIOR in injection.settings:
        hint = "fit again with --unlabelled to estimate one"
        console.note(f"the label prior is left out, because its unlabelled texts are not stored: {hint}")
    selection = injection.evaluation.get("selection", {})
    if selection.get("threshold") is not None:
        hint = f"fit again from all rows with --target-accuracy {selection['target']:g} to find one"
        console.note(f"the confidence threshold is left out, because an update holds out no rows: {hint}")
    decoder = load.artefact_decoder(injection, places.model, load.with_default_dtype(loading))
    injection.require_base(decoder)
    all_rows = Draw(task.train, len(task.train), len(task.train))
    if injection.head.uses_llm:
        all_rows = all_rows.timed(decoder, task, method, ensemble)
    plan = plan_evaluation(task, task.train, evaluation.evaluate, seed=injection.seed)
    survey, summary = fit.describe_rows(task, decoder, all_rows, plan, updates=True)
    if not json:
        console.say(summary, wrapped=True)
    fit.fit_and_show(decoder, task, all_rows, request, plan, output, survey, json=json)


def _rename_class_weights(
    injection: "Injection", new_names: dict[str, str], removed: list[str]
) -> "Injection":
    """Return the injection with its class weights, if any, by the new names of the labels."""
    weights = injection.settings.get("class_weight")
    if not isinstance(weights, dict):
        return injection
    renamed = {new_names.get(word, word): weight for word, weight in weights.items()}
    kept = {word: weight for word, weight in renamed.items() if word not in removed}
    return injection.with_report(settings=injection.settings | {"class_weight": kept or None})


def _changed_task(
    injection: "Injection",
    new_names: dict[str, str],
    removed: list[str],
    source: Path | None,
    rows: TaskOptions,
) -> "Task":
    """Return the injection's task with its stored rows: labels are renamed, then removed, then rows added.

    ``removed`` has the new names.
    """
    from i2cl.tasks.changes import add_rows, remove_labels, rename_labels

    if not injection.examples:
        raise I2CLError(
            f"task {injection.task.name!r} was fitted without --keep-examples, so its rows are unknown: fit "
            "it again from all rows, with --keep-examples"
        )
    task = replace(injection.task, train=injection.examples)
    task = remove_labels(rename_labels(task, new_names), removed)
    if source is None:
        return task
    return add_rows(
        task,
        source,
        text_column=rows.text_column,
        label_column=rows.label_column,
        label_separator=rows.label_separator,
        label_columns=load.split(rows.label_columns) if rows.label_columns else (),
        skip=rows.skip_bad_rows,
    )
