"""Labels as people have them: names, truth values or numbers, as class indices."""

from collections.abc import Sequence

import numpy as np

from fl_strategies.arrays import Array
from fl_strategies.exceptions import InvalidData, require, require_data

_TEXT = "OUST"
_NOTHING = frozenset({"", "nan", "None", "NaT", "<NA>"})


def is_missing(y: Array, classes: Sequence[object] = ()) -> Array:
    """Return which labels are missing, (n,) of truth values.

    Missing are NaN, None and empty texts, also as pandas and numpy write them, unless the
    class list has such a name.

    Examples
    --------
    >>> is_missing(np.array(["ill", None, " "], dtype=object))
    array([False,  True,  True])
    """
    if y.dtype.kind == "f":
        return np.asarray(np.isnan(y.reshape(len(y), -1)).all(axis=1))
    if y.dtype.kind not in _TEXT or y.ndim != 1:
        return np.zeros(len(y), dtype=bool)
    words = y.astype(np.str_) if y.dtype.kind == "S" else y
    nothing = _NOTHING - {str(name) for name in classes}
    return np.array([str(label).strip() in nothing for label in words.tolist()], dtype=bool)


def class_numbers(owner: str, name: str, y: Array, classes: Sequence[object] | None) -> Array:
    """Return labels as class indices.

    What a number means is decided by the class list alone: where all its names are whole
    numbers it is a name, otherwise an index.

    Parameters
    ----------
    owner, name : str
        Whose labels they are, and what they are called, for errors.
    y : array
    classes : sequence, optional
        Names of all classes in the federation's order. Without it, labels are indices.

    Examples
    --------
    >>> class_numbers("Party 0", "y", np.array(["ill", "healthy"]), ["healthy", "ill"])
    array([1, 0])
    """
    flat = y.reshape(-1) if y.ndim == 2 and y.shape[1] == 1 else y
    gaps = int(is_missing(flat, classes or ()).sum()) if flat.ndim == 1 else 0
    require_data(not gaps, owner, name, "complete", f"{gaps} rows without a label")
    if flat.dtype.kind == "f" and (np.isfinite(flat) & (flat == np.round(flat))).all():
        flat = flat.astype(np.int64)
    if classes is not None:
        return _positions(owner, name, flat, [str(one) for one in classes])
    if flat.dtype.kind in _TEXT:
        raise InvalidData(
            f"{owner}: {name} must be class indices, or names with the class list beside them, "
            f"got text without a list. Write classes=[...] with all classes of the federation "
            f'in one order, such as classes=["healthy", "ill"].'
        )
    return flat.astype(np.int64) if flat.dtype.kind == "b" else flat


def _positions(owner: str, name: str, y: Array, classes: Sequence[str]) -> Array:
    different = len({*classes}) == len(classes)
    require(different, owner, "classes", "different names", list(classes))
    positions = {label: position for position, label in enumerate(classes)}
    if y.dtype.kind == "b" and not {"True", "False"} & {*classes}:
        return y.astype(np.int64)
    numbered = all(label.removeprefix("-").isdecimal() for label in classes)
    if y.dtype.kind in "iu" and not numbered:
        return y
    words = y.astype(np.str_) if y.dtype.kind == "S" else y
    found = np.array([positions.get(str(label), -1) for label in words.tolist()], np.int64)
    others = int((found < 0).sum())
    rule = f"among the classes {', '.join(classes[:20])}"
    require_data(not others, owner, name, rule, f"{others} others")
    return found
