"""Load rows from the Hugging Face hub. The only module that imports `datasets`."""

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from i2cl.errors import I2CLError, first_line, require_packages
from i2cl.tasks.labels import LabelLookup
from i2cl.tasks.schema import HubSource
from i2cl.tasks.task import Example, group_by_label, sample_per_class
from i2cl.tasks.text import is_blank

if TYPE_CHECKING:
    from datasets import Dataset

_DATA_DIR_HINT = (
    "give a folder with <task>/train.jsonl and test.jsonl as data_dir (--data-dir) or in I2CL_DATA_DIR"
)


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
    else:
        train, test = _split_by_text(train, source.test_fraction or 0.0, source.split_seed)
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
                f"{source.dataset} {split}: label {label!r} is not one of {lookup.allowed()}: correct the "
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


def _split_by_text(rows: list[Example], fraction: float, seed: int) -> tuple[list[Example], list[Example]]:
    # split distinct texts, so that a repeated text cannot be in both splits
    texts = sorted({row.text for row in rows})
    Random(seed).shuffle(texts)
    test_texts = set(texts[: round(len(texts) * fraction)])
    return [row for row in rows if row.text not in test_texts], [
        row for row in rows if row.text in test_texts
    ]


def _limit_per_class(rows: list[Example], labels: Sequence[str], source: HubSource) -> tuple[Example, ...]:
    if source.max_per_class is None:
        return tuple(rows)
    groups = group_by_label(rows, len(labels))
    quotas = [min(len(group), source.max_per_class) for group in groups]
    return sample_per_class(groups, quotas, Random(source.split_seed))
