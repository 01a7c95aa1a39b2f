"""Load a task by name, from a task TOML or from a file of rows, and list the known tasks."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

from i2cl.errors import I2CLError, did_you_mean
from i2cl.tasks import corpus
from i2cl.tasks.formats import ROW_SUFFIXES, is_row_file, name_of
from i2cl.tasks.hub import load_hub
from i2cl.tasks.rows import read_labelled
from i2cl.tasks.schema import HubSource, TaskSpec, read_spec
from i2cl.tasks.synthetic import NAME as SYNTHETIC, synthetic_task
from i2cl.tasks.task import Example, Task, Template
from i2cl.tasks.template import DEFAULT_TEMPLATE

BUILTIN = Path(__file__).parent / "builtin"

DATA_DIR_VARIABLE = "I2CL_DATA_DIR"
StrPath = str | os.PathLike[str]

PAPER_TASKS = ("sst2", "sst5", "mr", "subj", "trec", "agnews", "dbpedia", "hate_speech18", "emoc")

BENCHMARK_TASKS = ("banking77", "clinc150")  # tasks with many labels, which the paper does not evaluate

BUNDLED_TASKS = tuple(
    sorted({file.stem for file in BUILTIN.glob("*.toml")} - {*PAPER_TASKS, *BENCHMARK_TASKS})
)
"""Tasks whose rows ship with the package: a TOML with a `[files]` table in `builtin`, and its row files."""

GROUPS = {"paper": PAPER_TASKS, "benchmark": BENCHMARK_TASKS, "bundled": BUNDLED_TASKS}
"""Names of the tasks with a TOML in `builtin`, by group."""


def builtin_spec(name: str) -> TaskSpec:
    """Return the specification of a task with a TOML in `builtin`."""
    return read_spec(BUILTIN / f"{name}.toml")


def list_tasks() -> list[Task]:
    """Return every known task without rows: paper, benchmark and bundled tasks, then generated ones."""
    specified = [builtin_spec(name).to_task(group=group) for group, names in GROUPS.items() for name in names]
    return [*specified, synthetic_task().without_data(), *corpus.describe()]


def load_task(
    name_or_path: StrPath,
    *,
    data_dir: StrPath | None = None,
    template: Template | str | None = None,
    labels: Sequence[str] | Mapping[str, str] | None = None,
    text_column: str = "text",
    label_column: str = "label",
    test_path: StrPath | None = None,
    skip_bad_rows: bool = False,
) -> Task:
    """Load a task with its rows.

    The paper's tasks are read from ``data_dir`` or the folder in the environment variable I2CL_DATA_DIR
    (<folder>/<task>/train.jsonl and test.jsonl); without either, from the Hugging Face hub.

    Args:
        name_or_path: a known name (`list_tasks`), the path of a task TOML, or the path of a file of rows
            (.csv, .tsv, .jsonl, .json, .parquet, .xlsx, or compressed), which needs a template.
        data_dir: folder with the rows of known tasks.
        template: prompt format, instead of the task's own.
        labels: label words, instead of the task's own. For a file of rows, whose labels may be ids or codes:
            words in the order of the ids, or a dict from each code to its word, such as
            ``{"True": "good", "False": "bad"}``.
        text_column: name of the text column in a file of rows.
        label_column: name of the label column in a file of rows.
        test_path: file with the test rows, for a file of rows or a TOML that names none.
        skip_bad_rows: skip unusable rows of the user's own files, with a warning.

    Raises:
        I2CLError: if the task is unknown, or a file is missing or malformed.
    """
    if isinstance(labels, str):
        raise I2CLError(f"labels is the string {labels!r}: give a list of words")
    template = Template(template) if isinstance(template, str) else template
    path = Path(name_or_path)
    if is_row_file(path):
        read = partial(read_labelled, text_column=text_column, label_column=label_column, skip=skip_bad_rows)
        train, lookup = read(path, labels)
        if template is None:
            example = "'Review: {text}\\nSentiment: {label}'"
            raise I2CLError(f"{path} needs a template: pass one such as {example}")
        test = () if test_path is None else read(Path(test_path), lookup)[0]
        return Task(name_of(path), lookup.labels, template, train, test, title=name_of(path))
    if isinstance(labels, Mapping):
        raise I2CLError(
            f"labels by code (NAME=CODE) are for a file of rows, not for {name_or_path}: give a list of "
            "words, one per class"
        )
    if (text_column, label_column) != ("text", "label"):
        raise I2CLError(
            "column names (--text-column, --label-column) apply only to a file of rows: leave them out; a "
            "task TOML names its columns in [files]"
        )
    if path.suffix.lower() != ".toml":
        if test_path is not None:
            raise I2CLError(f"{str(name_or_path)!r} has its own test split: leave test_path (--test) out")
        return _override(_load_named(str(name_or_path), data_dir), template, labels)
    spec = read_spec(path)
    if test_path is not None:
        if spec.files is None or spec.files.test:
            raise I2CLError(f"{path} names its own test split: leave test_path (--test) out")
        files = spec.files.model_copy(update={"test": str(Path(test_path).absolute())})
        spec = spec.model_copy(update={"files": files})
    return _override(_load_spec(spec, path.parent, data_dir, "user", skip=skip_bad_rows), template, labels)


def default_template(name: StrPath) -> str | None:
    """Return the default template for a file of rows, or None if the task defines one."""
    return DEFAULT_TEMPLATE if is_row_file(Path(name)) else None


def _load_named(name: str, data_dir: StrPath | None) -> Task:
    for group, names in GROUPS.items():
        if name in names:
            return _load_spec(builtin_spec(name), BUILTIN, data_dir, group)
    if name == SYNTHETIC:
        return synthetic_task()
    if (task := corpus.load(name)) is not None:
        return task
    if Path(name).is_file():
        known = ", ".join((".toml", *ROW_SUFFIXES))
        raise I2CLError(f"{name}: cannot read files ending in {Path(name).suffix!r}: use one of {known}")
    hint = did_you_mean(name, (task.name for task in list_tasks()))
    raise I2CLError(f"unknown task {name!r}: {hint}'i2cl ls tasks' lists them all")


def _load_spec(
    spec: TaskSpec, folder: Path, data_dir: StrPath | None, group: str, *, skip: bool = False
) -> Task:
    if spec.files is not None:
        files, columns = spec.files, (spec.files.text, spec.files.label)
        train, lookup = read_labelled(folder / files.train, spec.labels, *columns, skip=skip)
        test = read_labelled(folder / files.test, lookup, *columns, skip=skip)[0] if files.test else ()
    elif root := data_dir or os.environ.get(DATA_DIR_VARIABLE):
        train, test = _from_folder(Path(root), spec)
    else:
        train, test = load_hub(cast("HubSource", spec.hub), spec.labels)  # a spec has either files or hub
    return spec.to_task(train, test, group)


def _from_folder(root: Path, spec: TaskSpec) -> list[tuple[Example, ...]]:
    if not root.is_dir():
        raise I2CLError(
            f"data folder {root} does not exist: correct data_dir (--data-dir) or {DATA_DIR_VARIABLE}"
        )
    files = [root / spec.name / f"{split}.jsonl" for split in ("train", "test")]
    for file in files:
        if not file.is_file():
            raise I2CLError(
                f"task {spec.name!r}: {file} does not exist: add it, or give no data folder to use the hub"
            )
    train, lookup = read_labelled(files[0], spec.labels)  # determines whether ids start at 0 or 1
    return [train, read_labelled(files[1], lookup)[0]]


def _override(task: Task, template: Template | None, labels: Sequence[str] | None) -> Task:
    if labels is not None and len(labels) != len(task.labels):
        classes = f"{len(task.labels)} classes ({', '.join(task.labels)})"
        raise I2CLError(f"task {task.name!r} has {classes}, not {len(labels)}: give one label word per class")
    words = task.labels if labels is None else tuple(labels)
    return replace(task, template=template or task.template, labels=words)
