"""What users of scikit-learn pass as X and y, as texts and class ids."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Shaped
from sklearn.utils import assert_all_finite, column_or_1d
from sklearn.utils.multiclass import check_classification_targets

from i2cl.errors import I2CLError, first_line
from i2cl.models.scoring import require_texts


def as_texts(rows: Any, what: str = "X") -> list[str]:
    """The texts of a list, an array or a pandas Series, and ``what`` it is. Raises I2CLError on anything but
    one text a row, or a text that is empty.
    """
    if isinstance(rows, str):
        raise I2CLError(f"{what} is one string: give a list of texts")
    if hasattr(rows, "toarray"):
        cure = "give the texts themselves, as no vectorizer has seen them"
        raise I2CLError(f"{what} is a sparse matrix: {cure}")
    column = rows if isinstance(rows, list | tuple) else np.asarray(rows)
    if isinstance(column, np.ndarray) and column.ndim != 1:
        cure = "give one column, such as frame['text'], or join the columns of each row into one text"
        raise I2CLError(f"{what} has {column.ndim} dimensions, one text a row is needed: {cure}")
    texts = list(column)
    if not texts:
        raise I2CLError(f"{what} holds no texts (0 samples), a minimum of 1 is required: give some")
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            cure = "give one text a row"
            raise I2CLError(f"text {row + 1} of {what} is a {type(text).__name__} and no string: {cure}")
    require_texts(texts)
    return [str(text) for text in texts]  # numpy's strings are a class of their own


def as_classes(y: Any, rows: int) -> tuple[Shaped[np.ndarray, " classes"], list[int]]:
    """The sorted classes, and each row's index into them. Raises I2CLError on anything but one class a row,
    missing or continuous values, or a single class.
    """
    if y is None:
        raise I2CLError("fit requires y to be passed, but the target y is None: give each text's class")
    try:
        column = column_or_1d(y, warn=True)
        assert_all_finite(column, input_name="y")
        check_classification_targets(column)
    except (TypeError, ValueError) as error:
        raise I2CLError(f"{first_line(error)}: give each text one class") from None
    if len(column) != rows:
        raise I2CLError(f"X has {rows} texts and y has {len(column)} classes: give each text one class")
    try:
        classes, ids = np.unique(column, return_inverse=True)
    except TypeError:
        kinds = ", ".join(sorted({type(value).__name__ for value in column.tolist()}))
        raise I2CLError(f"y mixes classes of several types ({kinds}): give all of them one type") from None
    if len(classes) < 2:
        raise I2CLError(f"y holds one class alone, {classes.tolist()[0]!r}: give texts of at least two")
    return classes, ids.tolist()


def label_words(classes: Shaped[np.ndarray, " classes"], labels: Mapping[Any, str] | None) -> tuple[str, ...]:
    """The word that the model is to say for each class. Raises I2CLError on a class without a word."""
    values = classes.tolist()
    if labels is None:
        if not all(isinstance(value, str) for value in values):
            cure = f"pass labels, such as labels={{{values[0]!r}: 'word', ...}}"
            raise I2CLError(f"classes such as {values[0]!r} are no words that a model can say: {cure}")
        return tuple(values)
    if not isinstance(labels, Mapping):
        raise I2CLError(f"labels is a {type(labels).__name__}: give a dict from each class to its word")
    if missing := [value for value in values if value not in labels]:
        raise I2CLError(f"labels has no word for class {missing[0]!r}: add it")
    if odd := [labels[value] for value in values if not isinstance(labels[value], str)]:
        raise I2CLError(f"labels has {odd[0]!r}, which is no word: give strings")
    if odd := [value for value in values if not isinstance(value, str | int | float)]:
        raise I2CLError(f"class {odd[0]!r} is no string or number, which a saved task holds: give such")
    return tuple(labels[value] for value in values)
