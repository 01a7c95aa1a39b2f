"""`i2cl suggest` chooses texts to label, and `i2cl review` lists labels that are probably wrong."""

import csv
import shlex
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from i2cl.errors import I2CLError
from i2cl.interfaces.batch_prediction import formula_note, is_formula
from i2cl.interfaces.cli import console, load, options
from i2cl.interfaces.cli.options import ModelOptions, TaskOptions, opt
from i2cl.interfaces.cli.predict import PlaceOptions
from i2cl.storage.atomic import new_file, require_new_file
from i2cl.storage.layout import DESCRIPTION
from i2cl.tasks import Example
from i2cl.tasks.formats import Columns, Row, rows_or_errors
from i2cl.tasks.labels import LabelLookup, name_labels
from i2cl.tasks.rows import read_labelled
from i2cl.tasks.sample import sample_texts
from i2cl.tasks.template import DEFAULT_TEMPLATE

if TYPE_CHECKING:
    from i2cl.core.injection import Injection
    from i2cl.labelling import Suggestion
    from i2cl.models.decoder import Decoder
    from i2cl.tasks import Task

COLUMNS = ("text", "label", "suggested", "probability")
MAX_SNIPPET = 60  # characters of a text in a table
Seed = Annotated[int, Option(min=0, max=2**32 - 1, help="Random seed.")]


@dataclass(frozen=True)
class ChoiceOptions:
    """How many texts are chosen, and from which."""

    number: int = opt(20, "Number of texts to choose.", "--number", "-n", min=1)
    labelled: Path | None = opt(
        None,
        "File of labelled rows, with the columns text and label. They are not suggested again, and are "
        "copied to the output.",
    )
    pool: int = opt(2000, "Choose among up to this many texts, drawn at random from a longer file.", min=1)
    seed: Seed = 0


@options.expanded
def suggest(
    source: Annotated[str, Argument(help="A model, with --labels; or a folder made by `i2cl fit`.")],
    texts: Annotated[
        str, Argument(help="File with a text per line, CSV, TSV, JSONL, JSON, Parquet or Excel; - is stdin.")
    ],
    output: Annotated[Path, Option("--output", "-o", help="New CSV file, whose column label you fill in.")],
    *,
    labels: str | None = opt(None, "Label words separated by commas, for a model."),
    choice: ChoiceOptions,
    places: PlaceOptions,
    rows: Annotated[TaskOptions, ("template", "chat", "instruction", "text_column", "skip_bad_rows")],
    loading: ModelOptions,
    json: options.Json = False,
) -> None:
    """Choose which texts to label, and propose a label for each.

    The choice covers all kinds of texts without a label. A fitted task proposes better labels than a model.
    """
    if output.is_file():
        raise I2CLError(f"{str(output)!r} exists and may hold your labels: delete it, or choose another name")
    require_new_file(output)
    load.require_options(loading)
    injection = None if labels is not None else _fitted_task(source, rows, places)
    task = injection.task if injection else _new_task(source, labels or "", rows)
    known: Sequence[Example] = ()
    if choice.labelled is not None:
        known, _ = read_labelled(choice.labelled, task.labels, multi_label=False, skip=rows.skip_bad_rows)
    candidates = sample_texts(
        load.texts(texts, rows),
        max(choice.pool, choice.number),
        seed=choice.seed,
        exclude=[row.text for row in known],
    )
    if not candidates:
        raise I2CLError(f"every text of {texts} is labelled in {choice.labelled}: add texts")
    if choice.number > (count := len(candidates)):
        problem = f"{texts} has {count} distinct texts without a label, fewer than {choice.number}"
        raise I2CLError(f"{problem}: add texts, or ask for fewer (-n)")
    load.libraries()
    from i2cl.labelling import suggest as choose
    from i2cl.labelling.suggestion import needs_decoder

    decoder = None
    if injection is None:
        decoder = load.decoder(source, load.with_default_dtype(loading))
        task = task.with_prompt_options(decoder.tokenizer, chat=rows.chat, instruction=rows.instruction)
    elif needs_decoder(injection):
        decoder = _decoder_of(injection, places, loading)
    with console.progress(count + len(known), "comparing texts") as bar:
        suggestions = choose(
            decoder,
            injection or task,
            candidates,
            choice.number,
            labelled=[row.text for row in known],
            seed=choice.seed,
            progress=bar.advance,
            device=loading.device,
        )
    _write_suggestions(output, task, known, suggestions)
    used = {row.label for row in known}
    unused = [word for label, word in enumerate(task.labels) if label not in used] if known else []
    if json:
        records = [asdict(suggestion) for suggestion in suggestions]
        console.print_json({"output": str(output), "labels_without_text": unused, "suggestions": records})
        return
    number = "1 text" if choice.number == 1 else f"{choice.number} texts"
    after = f" after {len(known)} labelled rows" if known else ""
    console.say(f"Saved {output}: {number} to label{after}, chosen from {count:,}.")
    if unused:
        console.say(f"No text has the label {name_labels(unused)} yet: label one, or fit without it.")
    if injection is None:
        prompt = {"template": _on_one_line(rows.template or ""), "chat": rows.chat}
        prompt |= {"instruction": rows.instruction}
        words = [source, str(output), "--labels", ",".join(task.labels), *_given(prompt)]
    else:
        words = [places.model or injection.base.name, str(output), *_prompt_of(task, injection.command)]
    command = shlex.join(["i2cl", "fit", *words, *_given(vars(loading))])
    console.say(f"Next: fill in the column label, then {command} -o TASK")


def _prompt_of(task: "Task", command: str) -> list[str]:
    """Return the options with which `fit` uses the prompt of a task that a command has fitted.

    A chat template does not show where the instruction is, but the command does.
    """
    template, words = task.template, shlex.split(command)
    if template.separator == "\n":
        words = [] if template.format == DEFAULT_TEMPLATE else ["--template", _on_one_line(template.format)]
        return [*words, "--instruction", template.opening.removesuffix("\n")] if template.opening else words
    start = words.index("--instruction") if "--instruction" in words else len(words)
    return ["--chat", *words[start : start + 2]]


def _given(options: Mapping[str, object]) -> list[str]:
    """Return options, by name, as words of a command; those without a value are left out."""
    words = []
    for name, value in options.items():
        if value:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


def _on_one_line(template: str) -> str:
    return template.replace("\n", "\\n")  # as `fit` reads it


def _write_suggestions(
    output: Path, task: "Task", known: Sequence[Example], suggestions: "Sequence[Suggestion]"
) -> None:
    """Write the labelled rows, then the suggested texts, as CSV."""
    lines = [(row.text, task.labels[row.label], "", "") for row in known]
    lines += [(row.text, "", row.label, f"{max(row.probabilities):.3f}") for row in suggestions]
    with new_file(output) as path, path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *lines])
    if note := formula_note(sum(map(is_formula, chain.from_iterable(lines)))):
        console.note(note)


@options.expanded
def review(
    artefact: options.Artefact,
    labelled: Annotated[
        Path, Argument(help="File of labelled rows: CSV, TSV, JSONL, JSON, Parquet or Excel.")
    ],
    *,
    places: PlaceOptions,
    folds: int = opt(5, "Number of cross-validation folds.", min=2),
    seed: Seed = 0,
    rows: Annotated[TaskOptions, ("text_column", "label_column", "skip_bad_rows")],
    loading: ModelOptions,
    json: options.Json = False,
) -> None:
    """List labelled rows whose label is probably wrong, worst first.

    Each row is scored by a fit to other rows, and near-duplicates with different labels are compared. The
    file is not changed.
    """
    load.require_options(loading)
    injection = _injection(artefact, places)
    task = injection.task
    columns = rows.text_column, rows.label_column
    examples, lookup = read_labelled(
        labelled, task.labels, *columns, multi_label=False, skip=rows.skip_bad_rows
    )
    names_by_row: dict[tuple[str, int | None], deque[str]] = defaultdict(deque)
    for row in rows_or_errors(str(labelled), Columns(*columns)):
        if isinstance(row, Row) and isinstance(row.values[0], str):
            name = row.place.removeprefix(f"{labelled} ")
            names_by_row[row.values[0], lookup.find(row.values[1])].append(name)
    try:
        row_names = [names_by_row[example.text, example.label].popleft() for example in examples]
    except IndexError:
        raise I2CLError(f"{labelled} changed while it was read: run the command again") from None
    from i2cl.experiments.draw import review_seconds
    from i2cl.labelling import review as find_issues

    decoder, steps, what = None, len({row.text for row in examples}), "embedding texts"
    if injection.head.uses_llm:
        decoder, steps, what = _decoder_of(injection, places, loading), folds, "refitting"
    if decoder is not None and not json:
        with console.waiting("timing the model"):
            seconds = review_seconds(decoder, task, examples, folds)
        if seconds > console.SHORT_S:
            console.note(f"expected time: about {console.duration(seconds)}")
    with console.progress(steps, what) as bar:
        issues = find_issues(
            decoder,
            injection,
            examples,
            folds=folds,
            seed=seed,
            progress=bar.advance,
            scored=partial(bar.advance_stage, "scoring rows", len(examples)),
            device=loading.device,
        )
    if json:
        records = [asdict(issue) | {"where": row_names[issue.row]} for issue in issues]
        console.print_json({"rows": len(examples), "issues": records})
        return
    console.say(f"{len(issues)} of {len(examples)} labels may be wrong{', worst first:' if issues else '.'}")
    if issues:
        table = [
            {
                "where": row_names[issue.row],
                "label": issue.label,
                "suggested": issue.suggested,
                "probability": f"{issue.probability:.3f}",
                "text": _snippet(issue.text),
                "near-duplicates": ", ".join(row_names[row] for row in issue.near_duplicates),
            }
            for issue in issues
        ]
        console.print_table("", table)


def _snippet(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_SNIPPET else f"{line[:MAX_SNIPPET]}..."


def _injection(name: str, places: PlaceOptions) -> "Injection":
    load.require_artefact(name)
    load.libraries()
    from i2cl.core.injection import Injection

    load.quiet()
    injection = Injection.from_pretrained(name, encoder=places.encoder)
    injection.task.require_single_label("this command")
    return injection


def _decoder_of(injection: "Injection", places: PlaceOptions, loading: ModelOptions) -> "Decoder":
    return load.artefact_decoder(injection, places.model, load.with_default_dtype(loading))


def _fitted_task(name: str, rows: TaskOptions, places: PlaceOptions) -> "Injection":
    """Load a fitted task. Raises I2CLError for a model, which needs --labels, and for a prompt."""
    from i2cl.storage.card import BUNDLED

    if name in BUNDLED or (Path(name).exists() and not (Path(name) / DESCRIPTION).is_file()):
        problem = f"{name!r} is a model, not a fitted task"
        raise I2CLError(f"{problem}: name the labels (--labels 'billing,delivery')")
    if rows.template is not None or rows.chat or rows.instruction is not None:
        raise I2CLError(f"{name!r} has its own prompt: leave out --template, --chat and --instruction")
    return _injection(name, places)


def _new_task(model: str, labels: str, rows: TaskOptions) -> "Task":
    """Return a task without rows from label words. Raises I2CLError for a fitted task, which has labels."""
    from i2cl.tasks import Task, Template

    if (Path(model) / DESCRIPTION).is_file():
        raise I2CLError(f"{model!r} is a fitted task, with labels: leave out --labels")
    load.require_model(model)
    words = LabelLookup(load.label_words(labels)).labels
    return Task("texts", words, Template(load.template(rows, None) or DEFAULT_TEMPLATE))
