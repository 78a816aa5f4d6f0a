"""The label column of a table: its classes and gaps, or why it has none."""

from typing import Any, Final

import numpy as np

from fl_strategies.arrays import Array, IntArray
from fl_strategies.exceptions import InvalidData, require_data
from simulations.files import class_indices
from simulations.table_cells import MISSING

UNLABELLED: Final = -1
"""Stands for a class where a row has no label."""
MOST_NUMBERS: Final = 100
"""Different numbers that can still be classes."""
FEW_TEXTS: Final = 20


def label_classes(owner: str, label: str, column: Any) -> tuple[tuple[str, ...], IntArray]:
    """Return sorted class names and class indices; question what looks like no classes.

    A row without a label has `UNLABELLED` instead of an index. Empty labels are missing and,
    among numbers, words such as NA; among texts, NA may be a class.
    """
    every = label_texts(column)
    labelled = ~_missing(every)
    words = every[labelled]
    rule = f"a column of classes, got {label!r} without a single value"
    if not len(words):
        raise InvalidData(f"{owner}: label must be {rule}.")
    numbers = _numbers(words)
    if numbers is not None:
        _require_classes(owner, label, numbers)
    else:
        distinct, few = len(np.unique(words)), max(FEW_TEXTS, len(words) / 2)
        rule = "a column of classes, each in several rows"
        found = f"{label!r} with {distinct} different texts in {len(words)} rows"
        require_data(distinct <= few, owner, "label", rule, found)
    found_labels = words.astype(np.str_) if numbers is None else numbers
    classes, (found_classes,) = class_indices(owner, (f"column {label!r}", found_labels))
    y = np.full(len(every), UNLABELLED, dtype=np.int64)
    y[labelled] = found_classes
    return classes, y


def label_texts(column: Any) -> Array:
    """Return labels as texts without spaces around them; empty where there is none."""
    plain = column.astype(object).where(column.notna(), "").astype(str).str.strip()
    return np.array(plain.tolist(), dtype=object)


def _missing(words: Array) -> Array:
    absent = np.array([word in MISSING for word in words], dtype=bool)
    among_numbers = _numbers(words[~absent]) is not None
    return absent if among_numbers else np.asarray(words == "")


def _numbers(words: Array) -> Array | None:
    try:
        return words.astype(np.float64)
    except ValueError:
        return None


def _require_classes(owner: str, label: str, numbers: Array) -> None:
    distinct = len(np.unique(numbers))
    whole = bool((np.isfinite(numbers) & (numbers == np.round(numbers))).all())
    if whole and distinct <= MOST_NUMBERS:
        return
    kind = "" if whole else ", not all of them whole"
    raise InvalidData(
        f"{owner}: label must be a column of classes, got {label!r} with {distinct} different "
        f"numbers{kind}. Regression on tables is not supported. Make classes of it first, "
        f"such as quarters: table[{label!r}] = pandas.qcut(table[{label!r}], 4, "
        "labels=['lowest', 'low', 'high', 'highest'])."
    )
