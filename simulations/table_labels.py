"""The label column of a table: its classes, or why it has none."""

from typing import Any, Final

import numpy as np

from fl_strategies.arrays import Array, IntArray
from fl_strategies.exceptions import InvalidData, require_data
from simulations.files import class_indices

MOST_NUMBERS: Final = 100
"""Different numbers that can still be classes."""
FEW_TEXTS: Final = 20


def label_classes(owner: str, label: str, column: Any) -> tuple[tuple[str, ...], IntArray]:
    """Return sorted class names and class indices; question what looks like no classes."""
    words = label_texts(column)
    num_missing = int((words == "").sum())
    if num_missing:
        raise InvalidData(
            f"{owner}: label column {label!r} must be complete, got {num_missing} missing "
            "values. Fill or delete these rows first."
        )
    numbers = _numbers(words)
    if numbers is not None:
        _require_classes(owner, label, numbers)
    else:
        distinct, few = len(np.unique(words)), max(FEW_TEXTS, len(words) / 2)
        rule = "a column of classes, each in several rows"
        found = f"{label!r} with {distinct} different texts in {len(words)} rows"
        require_data(distinct <= few, owner, "label", rule, found)
    found_labels = words.astype(np.str_) if numbers is None else numbers
    classes, (y,) = class_indices(owner, (f"column {label!r}", found_labels))
    return classes, y


def label_texts(column: Any) -> Array:
    """Return labels as texts without spaces around them; empty where there is none."""
    plain = column.astype(object).where(column.notna(), "").astype(str).str.strip()
    return np.array(plain.tolist(), dtype=object)


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
