"""Load a task by name, from a task TOML or from a file of rows, and list the known tasks."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

from i2cl.errors import I2CLError, did_you_mean, first_line, require_packages
from i2cl.tasks import generated
from i2cl.tasks.formats import ROW_SUFFIXES, is_row_file, name_of
from i2cl.tasks.labels import LabelLookup, is_blank
from i2cl.tasks.rows import read_labelled, require_learnable
from i2cl.tasks.schema import HubSource, TaskSpec, read_spec
from i2cl.tasks.task import LABEL_SEPARATOR, Example, Task, group_by_label, sample_per_class
from i2cl.tasks.template import DEFAULT_TEMPLATE, Template

if TYPE_CHECKING:
    from datasets import Dataset

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

_DATA_DIR_HINT = (
    f"give a folder with <task>/train.jsonl and test.jsonl as data_dir (--data-dir) or in {DATA_DIR_VARIABLE}"
)


def builtin_spec(name: str) -> TaskSpec:
    """Return the specification of a task with a TOML in `builtin`."""
    group = next(group for group, names in GROUPS.items() if name in names)
    return read_spec(BUILTIN / f"{name}.toml", group)


def list_tasks() -> list[Task]:
    """Return every known task without rows: paper, benchmark and bundled tasks, then generated ones."""
    specified = [builtin_spec(name).to_task() for names in GROUPS.values() for name in names]
    return [*specified, generated.synthetic_task().without_data(), *generated.list_reference_tasks()]


def load_task(
    name_or_path: StrPath,
    *,
    data_dir: StrPath | None = None,
    template: Template | str | None = None,
    labels: Sequence[str] | Mapping[Any, str] | None = None,
    text_column: str = "text",
    label_column: str = "label",
    label_separator: str | None = None,
    label_columns: Sequence[str] = (),
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
            ``{1: "bad", 5: "good"}``.
        text_column: name of the text column in a file of rows.
        label_column: name of the label column in a file of rows. If its cells are JSON lists, the task is a
            multi-label task.
        label_separator: what separates the labels in a cell, for a file of a multi-label task.
        label_columns: columns of zeros and ones whose names are the labels, for such a file.
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
        read = partial(
            read_labelled,
            text_column=text_column,
            label_column=label_column,
            label_separator=label_separator,
            label_columns=label_columns,
            skip=skip_bad_rows,
        )
        _check_label_format(labels, label_separator, label_columns)
        return _load_rows(path, template, labels, test_path, read)
    names_columns = (text_column, label_column) != ("text", "label") or label_columns or label_separator
    if isinstance(labels, Mapping) or names_columns:
        _refuse_unknown_suffix(path)
        raise I2CLError(
            "column names (--text-column, --label-column, --label-columns), --label-separator and labels by "
            f"code (NAME=CODE) apply only to a file of rows, not to {name_or_path}: leave them out"
        )
    if path.suffix.lower() == ".toml":
        task = _load_spec(read_spec(path), path.parent, data_dir, test_path, skip=skip_bad_rows)
    else:
        task = _load_named(str(name_or_path), data_dir, test_path)
    if labels is not None and len(labels) != len(task.labels):
        classes = f"{len(task.labels)} classes ({', '.join(task.labels)})"
        raise I2CLError(f"task {task.name!r} has {classes}, not {len(labels)}: give one label word per class")
    words = task.labels if labels is None else tuple(labels)
    return replace(task, template=template or task.template, labels=words)


def _load_rows(
    path: Path,
    template: Template | None,
    labels: Sequence[str] | Mapping[Any, str] | None,
    test_path: StrPath | None,
    read: Callable[..., tuple[tuple[Example, ...], LabelLookup]],
) -> Task:
    """Make a task of a file of rows and a file of test rows, which ``read`` reads."""
    train, lookup = read(path, labels)
    multi_label = train[0].labels is not None
    if template is None:
        example = "'Review: {text}\\nSentiment: {label}'"
        raise I2CLError(f"{path} needs a template: pass one such as {example}")
    test = () if test_path is None else read(Path(test_path), lookup, multi_label=multi_label)[0]
    name = name_of(path)
    task = Task(name, lookup.labels, template, train, test, title=name, multi_label=multi_label)
    if multi_label:
        require_learnable(path, train, lookup.labels)
    return task


def _check_label_format(labels: object, separator: str | None, columns: Sequence[str]) -> None:
    """Raise I2CLError if the options of a multi-label file contradict each other."""
    if separator is not None and is_blank(separator) and separator != "\t":
        raise I2CLError(f"the label separator {separator!r} is blank: give a character such as ';'")
    if columns and separator is not None:
        raise I2CLError("--label-columns and --label-separator exclude each other: give one of them")
    if columns and labels is not None:
        raise I2CLError("--label-columns names the labels: rename the columns, and leave out --labels")


def default_template(name: StrPath) -> str | None:
    """Return the default template for a file of rows, or None if the task defines one."""
    return DEFAULT_TEMPLATE if is_row_file(Path(name)) else None


def _load_named(name: str, data_dir: StrPath | None, test_path: StrPath | None) -> Task:
    for names in GROUPS.values():
        if name in names:
            return _load_spec(builtin_spec(name), BUILTIN, data_dir, test_path)
    if (task := generated.load(name)) is None:
        _refuse_unknown_suffix(Path(name))
        hint = did_you_mean(name, (task.name for task in list_tasks()))
        problem = f"unknown task {name!r}" + (" and no such file" if Path(name).suffix else "")
        raise I2CLError(f"{problem}: {hint}'i2cl ls tasks' lists them all")
    _refuse_test_path(name, test_path)
    return task


def _load_spec(
    spec: TaskSpec,
    folder: Path,
    data_dir: StrPath | None,
    test_path: StrPath | None,
    *,
    skip: bool = False,
) -> Task:
    if (files := spec.files) is None:
        _refuse_test_path(spec.name, test_path)
        if root := data_dir or os.environ.get(DATA_DIR_VARIABLE):
            return spec.to_task(*_read_data_folder(Path(root), spec))
        source = cast("HubSource", spec.hub)  # a spec has either files or hub
        return spec.to_task(*load_hub(source, spec.labels))
    test_file = folder / files.test if files.test else None
    if test_file is not None:
        _refuse_test_path(spec.name, test_path)
    elif test_path is not None:
        test_file = Path(test_path)
    multi_label = spec.multi_label
    read = partial(
        read_labelled,
        text_column=files.text,
        label_column=files.label,
        label_separator=LABEL_SEPARATOR if multi_label else None,
        multi_label=multi_label,
        skip=skip,
    )
    train, lookup = read(folder / files.train, spec.labels)
    if multi_label:
        require_learnable(folder / files.train, train, lookup.labels)
    return spec.to_task(train, read(test_file, lookup)[0] if test_file else ())


def _refuse_unknown_suffix(path: Path) -> None:
    """Raise I2CLError for a file that is neither a task TOML nor a file of rows."""
    if path.is_file() and path.suffix.lower() != ".toml":
        known = ", ".join((".toml", *ROW_SUFFIXES))
        raise I2CLError(f"{path}: cannot read files ending in {path.suffix!r}: use one of {known}")


def _refuse_test_path(name: str, test_path: StrPath | None) -> None:
    if test_path is not None:
        raise I2CLError(f"task {name!r} has its own test split: leave test_path (--test) out")


def _read_data_folder(root: Path, spec: TaskSpec) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
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
    return train, read_labelled(files[1], lookup)[0]


def load_hub(source: HubSource, labels: Sequence[str]) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Load the training and test rows of a data set on the hub.

    Rows without text and rows whose label is not in ``keep_labels`` are dropped silently: they belong to the
    published data, which the user cannot correct.

    Args:
        source: the data set; ``source.dataset`` may also be a local folder.
        labels: label words in the order of their ids.

    Raises:
        I2CLError: if `datasets` is not installed, the data cannot be downloaded, or a column or label is not
            as expected.
    """
    train = _read_split(source, source.train, labels)
    if source.test is not None:
        test = _read_split(source, source.test, labels)
    else:  # split distinct texts, so that a repeated text cannot be in both splits
        texts = sorted({row.text for row in train})
        Random(0).shuffle(texts)
        test_texts = set(texts[: round(len(texts) * (source.test_fraction or 0.0))])
        test = [row for row in train if row.text in test_texts]
        train = [row for row in train if row.text not in test_texts]
    return _limit_per_class(train, labels, source), _limit_per_class(test, labels, source)


def _read_split(source: HubSource, split: str, labels: Sequence[str]) -> list[Example]:
    dataset = _download(source, split)
    for column in (source.text, source.label):
        if column not in dataset.column_names:
            raise I2CLError(
                f"{source.dataset} {split}: no column {column!r}, the columns are "
                f"{', '.join(dataset.column_names)}: correct the [hub] table"
            )
    lookup, kept = LabelLookup(labels), source.keep_labels
    rows = []
    for text, label in zip(dataset[source.text], dataset[source.label], strict=True):
        if kept is not None and label not in kept:
            continue
        index = lookup.find(label) if kept is None else kept.index(label)
        if index is None:
            raise I2CLError(
                f"{source.dataset} {split}: label {label!r} is not one of {lookup.allowed}: correct the "
                "[hub] table"
            )
        if text and not is_blank(text):
            rows.append(Example(text, index))
    return rows


def _download(source: HubSource, split: str) -> "Dataset":
    require_packages(f"loading {source.dataset}", "hub", "datasets", instead=_DATA_DIR_HINT)
    from datasets import load_dataset

    try:
        return load_dataset(source.dataset, source.config, split=split, revision=source.revision)
    except Exception as error:  # errors of its HTTP and file libraries have no common base class
        reason = f"{type(error).__name__}: {first_line(error)[:200]}"
        raise I2CLError(
            f"cannot load {source.dataset} ({split}) from the hub ({reason}): check the connection, or "
            f"{_DATA_DIR_HINT}"
        ) from error


def _limit_per_class(rows: list[Example], labels: Sequence[str], source: HubSource) -> tuple[Example, ...]:
    if source.max_per_class is None:
        return tuple(rows)
    groups = group_by_label(rows, len(labels))
    quotas = [min(len(group), source.max_per_class) for group in groups]
    return sample_per_class(groups, quotas, Random(0))
