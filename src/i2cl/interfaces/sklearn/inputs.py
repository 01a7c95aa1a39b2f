"""Validation of X, y, sample_weight and label words, in the containers that scikit-learn's users pass."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Shaped
from sklearn.utils import assert_all_finite, column_or_1d
from sklearn.utils.multiclass import check_classification_targets

from i2cl.errors import I2CLError, first_line
from i2cl.models.scoring import require_texts
from i2cl.tasks import Example
from i2cl.tasks.labels import is_blank

Classes = Shaped[np.ndarray, " classes"]


def as_texts(rows: Any, argument: str = "X") -> list[str]:
    """Convert a list, an array or a pandas Series to a list of strings.

    Args:
        rows: one text per row.
        argument: name of the argument, for error messages.

    Raises:
        I2CLError: if there are no rows, or a row is not a string with content.
    """
    if isinstance(rows, str):
        raise I2CLError(f"{argument} is one string: pass a list of texts")
    if hasattr(rows, "toarray"):
        raise I2CLError(f"{argument} is a sparse matrix: pass the texts themselves, without a vectorizer")
    column = rows if isinstance(rows, list | tuple) else np.asarray(rows)
    if isinstance(column, np.ndarray) and column.ndim == 0:
        raise I2CLError(f"{argument} is a {type(rows).__name__}: pass a list of texts")
    if isinstance(column, np.ndarray) and column.ndim != 1:
        hint = "pass one column, such as frame['text'], or join the columns of each row into one text"
        raise I2CLError(f"{argument} has {column.ndim} dimensions, but one text per row is needed: {hint}")
    texts = list(column)
    if not texts:
        raise I2CLError(f"{argument} has no texts (0 samples), but a minimum of 1 is required: pass some")
    for row, text in enumerate(texts):
        if _is_missing(text):
            raise I2CLError(f"text {row + 1} of {argument} is missing ({text}): fill it in or leave it out")
        if not isinstance(text, str):
            kind = type(text).__name__
            raise I2CLError(
                f"text {row + 1} of {argument} is of type {kind}, not a string: pass one text per row"
            )
    require_texts(texts)
    return [str(text) for text in texts]  # numpy.str_ is a subclass of str


def as_examples(texts: Sequence[str], y: Any, sample_weight: Any) -> tuple[Classes, tuple[Example, ...]]:
    """Pair texts with class indices and weights.

    Rows of weight 0 are left out, and so are classes that only such rows have.

    Args:
        texts: n texts.
        y: n classes.
        sample_weight: n weights of at least 0, or None for 1 each.

    Returns:
        The sorted classes, and the examples, whose labels are indices into the classes.

    Raises:
        I2CLError: if lengths differ, y has missing or continuous values or one class only, or weights are
            negative, not finite or all zero.
    """
    classes, ids = as_classes(y, len(texts))
    weights = _as_weights(sample_weight, len(texts))
    if not weights.all():
        used, ids = np.unique(np.where(weights > 0, ids, -1), return_inverse=True)
        ids, classes = ids - 1, classes[used[1:]]
        if len(classes) < 2:
            raise I2CLError(f"all rows with a weight above 0 are {classes.tolist()[0]!r}: give two classes")
    rows = zip(texts, ids.tolist(), weights.tolist(), strict=True)
    return classes, tuple(Example(text, label, weight) for text, label, weight in rows if weight)


def as_indicators(y: Any, rows: int) -> Bool[np.ndarray, "rows labels"] | None:
    """Return a multi-label target as an indicator matrix, or None if y has one class per row.

    Args:
        y: a two-dimensional array, data frame or sparse matrix of zeros and ones, as of scikit-learn's
            ``MultiLabelBinarizer``; or anything else.
        rows: number of texts.

    Raises:
        I2CLError: if y has two dimensions but other values, or another number of rows.
    """
    table = y.toarray() if hasattr(y, "toarray") else y
    if isinstance(table, list | tuple) and any(
        isinstance(row, set | frozenset | tuple | list | np.ndarray) for row in table
    ):
        try:
            table = np.array(table)
        except ValueError:
            table = None
        if table is None or table.ndim != 2:
            raise I2CLError(
                "y has a list of labels per text: convert it to an indicator matrix with scikit-learn's "
                "MultiLabelBinarizer"
            )
    if getattr(table, "ndim", 1) != 2 or table.shape[1] < 2:
        return None
    values = np.asarray(table)
    if values.dtype == object:  # such as a data frame with columns of booleans and of integers
        with suppress(TypeError, ValueError):
            values = values.astype(float)
    if values.dtype.kind not in "biuf" or not np.isin(values, (0, 1)).all():
        raise I2CLError("y has two dimensions but not only zeros and ones: pass an indicator matrix")
    if len(values) != rows:
        raise I2CLError(f"X has {rows} texts and y has {len(values)} rows: give each text one row")
    return values.astype(bool)


def label_names(y: Any, count: int, labels: Mapping[Any, str] | Sequence[str] | None) -> tuple[str, ...]:
    """Return the label word of each column of an indicator matrix.

    Args:
        y: the matrix; the columns of a data frame have names.
        count: number of its columns.
        labels: the words in the order of the columns, such as ``MultiLabelBinarizer.classes_``, or a dict
            from each column to its word.

    Raises:
        I2CLError: if there is not one word per column.
    """
    columns = list(getattr(y, "columns", range(count)))
    if isinstance(labels, Mapping):
        words = [labels.get(column) for column in columns]
    elif labels is not None:
        words = [] if isinstance(labels, str) else list(labels)
    else:
        words = columns
    if len(words) != len(columns) or not all(isinstance(word, str) for word in words):
        raise I2CLError(
            f"y has {len(columns)} columns and no word for each: pass labels, a word per column, such as "
            "MultiLabelBinarizer.classes_"
        )
    return tuple(map(str, words))


def as_multi_label_examples(
    texts: Sequence[str], indicators: Bool[np.ndarray, "rows labels"], sample_weight: Any
) -> tuple[Example, ...]:
    """Pair texts with their labels and weights. Rows of weight 0 are left out. Raises as `as_examples`."""
    weights = _as_weights(sample_weight, len(texts)).tolist()
    rows = zip(texts, indicators, weights, strict=True)
    return tuple(
        Example.multi_label(text, np.flatnonzero(row).tolist(), weight)
        for text, row, weight in rows
        if weight
    )


def as_classes(y: Any, rows: int) -> tuple[Classes, Shaped[np.ndarray, " rows"]]:
    """Return the sorted classes, and the index of each row's class.

    Nullable, Arrow and categorical columns of pandas become the NumPy dtype of their values.

    Raises:
        I2CLError: unless there is one class per row, without missing or continuous values, and at least two
            different ones.
    """
    if y is None:
        raise I2CLError("fit requires y to be passed, but the target y is None: pass the class of each text")
    y = _as_numpy(y)
    try:
        column = column_or_1d(y, warn=True)
        assert_all_finite(column, input_name="y")
        check_classification_targets(column)
    except (TypeError, ValueError) as error:
        raise I2CLError(f"{first_line(error).rstrip('.')}: give each text one class") from None
    if len(column) != rows:
        raise I2CLError(f"X has {rows} texts and y has {len(column)} classes: give each text one class")
    try:
        classes, ids = np.unique(column, return_inverse=True)
    except TypeError:
        raise _mixed_types(column.tolist()) from None
    if len(classes) < 2:
        raise I2CLError(f"y has only one class, {classes.tolist()[0]!r}: pass texts of at least two")
    return classes, ids


def _as_numpy(y: Any) -> Any:
    """Convert pandas' extension dtypes and objects, which scikit-learn would refuse or convert to floats."""
    if hasattr(y, "iloc") and getattr(y, "ndim", 1) == 2 and y.shape[1] == 1:
        column_or_1d(np.empty(y.shape), warn=True)  # warns that a column vector was passed
        y = y.iloc[:, 0]
    if hasattr(getattr(y, "dtype", None), "na_value") and hasattr(y, "isna"):
        _require_complete(y.isna().tolist())
        y = y.to_numpy(dtype=getattr(y.dtype, "numpy_dtype", None))
    elif hasattr(y, "to_numpy") and getattr(y, "ndim", 1) == 1:
        y = y.to_numpy()
    if isinstance(y, np.ndarray) and y.dtype.kind == "T":  # numpy.dtypes.StringDType
        y = y.astype(object)
    if isinstance(y, list | tuple) or (isinstance(y, np.ndarray) and y.dtype == object and y.ndim == 1):
        _require_complete([_is_missing(value) for value in y])
        if len({isinstance(value, str) for value in y}) > 1:  # NumPy would convert all to strings
            raise _mixed_types(list(y))
    if isinstance(y, np.ndarray) and y.dtype == object:
        for kinds in ((bool, np.bool_), (int, np.integer)):
            if all(isinstance(value, kinds) for value in y):
                return np.array(y.tolist())
    return y


def _is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, or NA or NaT of pandas."""
    nan = isinstance(value, float | np.floating) and bool(np.isnan(value))
    return value is None or nan or type(value).__name__ in {"NAType", "NaTType"}


def _mixed_types(classes: Sequence[Any]) -> I2CLError:
    kinds = ", ".join(sorted({type(value).__name__ for value in classes}))
    return I2CLError(f"y mixes classes of several types ({kinds}): convert them to one type")


def _require_complete(missing: Sequence[bool]) -> None:
    if True in missing:
        row = missing.index(True) + 1
        raise I2CLError(f"y has no class in row {row} (missing value): give each text one class")


def _as_weights(sample_weight: Any, rows: int) -> Float[np.ndarray, " rows"]:
    """Convert sample weights to float64; None or a scalar means equal weights."""
    try:
        weights = np.asarray(1.0 if sample_weight is None else sample_weight, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise I2CLError(f"sample_weight is not numeric ({first_line(error)}): pass numbers") from None
    if weights.ndim == 0:
        weights = np.full(rows, weights)
    if weights.shape != (rows,):
        raise I2CLError(f"sample_weight has shape {weights.shape}: pass one weight for each of {rows} texts")
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise I2CLError("sample_weight has a negative or infinite weight or NaN: pass numbers from 0")
    if not weights.any():
        raise I2CLError("every sample weight is zero: pass at least one above 0")
    return weights


def label_words(classes: Classes, labels: Mapping[Any, str] | Sequence[str] | None) -> tuple[str, ...]:
    """Return the word that the model says for each class.

    scikit-learn's meta-estimators encode string classes as integers before they fit, so words for strings
    also apply to these integers: i is the i-th class in sorted order. Some of the classes may be absent.

    Args:
        classes: the sorted classes of y.
        labels: a dict from each class to its word; a list, of the words for numbered classes or of the
            classes themselves; or None if the classes are the words.

    Raises:
        I2CLError: if a class has no word, or a word is not a string.
    """
    values = classes.tolist()
    if labels is None:
        _require_words(values)
        if padded := [value for value in values if value != value.strip() or is_blank(value)]:
            hint = "strip the classes (y.str.strip() in pandas), or pass labels with a word for each"
            raise I2CLError(f"class {padded[0]!r} is empty or has spaces around it: {hint}")
        return tuple(values)
    if isinstance(labels, Mapping):
        words = _words_by_class(values, labels)
    elif isinstance(labels, Sequence | np.ndarray) and not isinstance(labels, str):
        words = _words_in_order(values, list(labels))
    else:
        hint = "pass a list of words, or a dict from each class to its word"
        raise I2CLError(f"labels is a {type(labels).__name__}: {hint}")
    if invalid := [value for value in values if not isinstance(value, str | int | float)]:
        raise I2CLError(f"class {invalid[0]!r} is not a string or a number: convert it, to save the task")
    return tuple(map(str, words))


def _require_words(values: Sequence[Any]) -> None:
    first = next((value for value in values if not isinstance(value, str)), None)
    if first is None:
        return
    if _are_ids(values, 2 * len(values)):
        raise I2CLError(
            f"y has class ids such as {first!r} and no label words: pass labels, a word for each id in "
            "order, such as labels=['negative', 'positive']; if your classes are strings, which "
            "cross_val_predict, VotingClassifier and StackingClassifier number before fit, pass "
            "labels=sorted(set(y))"
        )
    hint = f"pass labels, such as labels={{{first!r}: 'word', ...}}"
    raise I2CLError(f"class {first!r} is not a word that the model can say: {hint}")


def _require_strings(words: Sequence[Any]) -> None:
    if invalid := [word for word in words if not isinstance(word, str)]:
        raise I2CLError(f"labels has {invalid[0]!r}, which is not a string: pass words")


def _are_ids(values: Sequence[Any], count: int) -> bool:
    """Whether all values are whole numbers from 0 to ``count - 1``."""
    return all(isinstance(value, int | float) and value in range(count) for value in values)


def _words_by_class(values: Sequence[Any], labels: Mapping[Any, str]) -> list[str]:
    _require_strings(list(labels.values()))
    missing = [value for value in values if value not in labels]
    if not missing:
        return [labels[value] for value in values]
    if len(missing) == len(values) and set(values) <= set(labels.values()):
        return list(values)  # the dict maps ids to words, and these classes are the words
    if 0 not in labels and _are_ids(values, len(labels)):
        try:
            order = sorted(labels)
        except TypeError:
            order = []
        if order:
            return [labels[order[int(value)]] for value in values]
    raise I2CLError(f"labels has no word for class {missing[0]!r}: add it")


def _words_in_order(values: Sequence[Any], words: Sequence[str]) -> list[str]:
    _require_strings(words)
    if not all(isinstance(value, str) for value in values):
        if _are_ids(values, len(words)):
            return [words[int(value)] for value in values]
        first = next(value for value in values if not _are_ids([value], len(words)))
        hint = f"pass a dict, such as labels={{{first!r}: 'word', ...}}"
        raise I2CLError(f"labels lists words for ids 0 to {len(words) - 1}, not for class {first!r}: {hint}")
    unknown = [value for value in values if value not in words]
    if not unknown:
        if list(words) != sorted(words):  # integers from a meta-estimator would get the wrong words
            order = "the order in which scikit-learn numbers string classes"
            raise I2CLError(f"labels is not sorted, which is {order}: pass labels={sorted(words)}")
        return list(values)
    hint = "add it, or pass a dict from each class to its word"
    raise I2CLError(f"labels has no word for class {unknown[0]!r}: {hint}")
