"""Rows from the Hugging Face hub, or a local folder of that format: the only module to import datasets."""

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from i2cl.errors import I2CLError, first_line, needs
from i2cl.tasks.labels import LabelLookup
from i2cl.tasks.schema import HubSource
from i2cl.tasks.task import Example, group_by_label, sample_per_class
from i2cl.tasks.text import is_blank

if TYPE_CHECKING:
    from datasets import Dataset

_INSTEAD = "give a folder with <task>/train.jsonl and test.jsonl as data_dir (--data-dir) or in I2CL_DATA_DIR"


def load_hub(source: HubSource, labels: Sequence[str]) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """The training and test rows of a hub data set; `source.dataset` may also be a local folder.
    Rows without text and rows whose label is not kept are dropped without notice: they are the publisher's,
    and the user cannot correct them. Raises I2CLError when the `datasets` package or the data cannot be
    reached, or when a column or label is not as expected.
    """
    train = _read_split(source, source.train, labels)
    if source.test is not None:
        test = _read_split(source, source.test, labels)
    else:
        train, test = _split_by_text(train, source.test_fraction or 0.0, source.split_seed)
    return _cap(train, labels, source), _cap(test, labels, source)


def _read_split(source: HubSource, split: str, labels: Sequence[str]) -> list[Example]:
    dataset = _download(source, split)
    for column in (source.text, source.label):
        if column not in dataset.column_names:
            problem = f"no column {column!r}, the columns are {', '.join(dataset.column_names)}"
            raise I2CLError(f"{source.dataset} {split}: {problem}: correct the [hub] table")
    lookup, kept = LabelLookup(labels), source.keep_labels
    rows = []
    for text, label in zip(dataset[source.text], dataset[source.label], strict=True):
        if kept is not None and label not in kept:
            continue
        index = lookup.find(label) if kept is None else kept.index(label)
        if index is None:
            problem = f"label {label!r} is not one of {lookup.allowed()}"
            raise I2CLError(f"{source.dataset} {split}: {problem}: correct the [hub] table")
        if text and not is_blank(text):
            rows.append(Example(text, index))
    return rows


def _download(source: HubSource, split: str) -> "Dataset":
    needs(f"loading {source.dataset}", "hub", "datasets", instead=_INSTEAD)
    from datasets import load_dataset

    try:
        return load_dataset(source.dataset, source.config, split=split, revision=source.revision)
    except Exception as error:  # errors of its HTTP and file libraries come through, with no common class
        reason = f"{type(error).__name__}: {first_line(error)[:200]}"
        cure = f"check the connection, or {_INSTEAD}"
        raise I2CLError(f"cannot load {source.dataset} ({split}) from the hub ({reason}): {cure}") from error


def _split_by_text(rows: list[Example], fraction: float, seed: int) -> tuple[list[Example], list[Example]]:
    # By distinct text, so that a text which occurs twice cannot be in both splits.
    texts = sorted({row.text for row in rows})
    Random(seed).shuffle(texts)
    reserved = set(texts[: round(len(texts) * fraction)])
    return [row for row in rows if row.text not in reserved], [row for row in rows if row.text in reserved]


def _cap(rows: list[Example], labels: Sequence[str], source: HubSource) -> tuple[Example, ...]:
    if source.max_per_class is None:
        return tuple(rows)
    groups = group_by_label(rows, len(labels))
    quotas = [min(len(group), source.max_per_class) for group in groups]
    return sample_per_class(groups, quotas, Random(source.split_seed))
