"""Labels as people have them: names, truth values or numbers, as class indices."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from fl_strategies.arrays import Array, IntArray, plain
from fl_strategies.core.records import number_of_cell
from fl_strategies.exceptions import InvalidData, require, require_data

NO_CLASS: Final = -1
"""Stands for a class where a label is missing or unknown."""

_NOTHING = frozenset({"", "nan", "None", "NaT", "<NA>"})


def is_missing(y: Any, classes: Sequence[object] = ()) -> Array:
    """Return which labels are missing, (n,) of truth values.

    Missing are NaN, None and empty texts, also as pandas and numpy write them, unless the
    class list has such a name. A record of several labels is missing if all of them are NaN.

    Examples
    --------
    >>> is_missing(["ill", None, " ", 1.0])
    array([False,  True,  True, False])
    """
    given = plain("labels", "y", y)
    if isinstance(given, np.ndarray) and given.dtype.kind in "biuf":
        return np.asarray(np.isnan(given.reshape(len(given), -1)).all(axis=1))
    cells = given if isinstance(given, list | tuple) else np.asarray(given).tolist()
    nothing = _NOTHING - {str(name) for name in classes}
    return np.array([_is_nothing(cell, nothing) for cell in cells], dtype=bool)


def _is_nothing(cell: Any, nothing: Collection[str]) -> bool:
    if isinstance(cell, list | tuple | np.ndarray):
        return len(cell) > 0 and all(_is_nothing(one, nothing) for one in cell)
    text = cell.decode(errors="replace") if isinstance(cell, bytes) else str(cell)
    return text.strip() in nothing


def class_numbers(
    owner: str, name: str, y: Any, classes: Sequence[object] | None, num_classes: int
) -> IntArray:
    """Return labels as class indices, and `NO_CLASS` for what is no class.

    Every label is read by itself. What a number means is decided by the class list alone:
    where all its names are whole numbers it is a name, otherwise an index.

    Parameters
    ----------
    owner, name : str
        Whose labels they are, and what they are called, for errors.
    y : list, array, series or tensor
    classes : sequence, optional
        Names of all classes in the federation's order. Without it, labels are indices.
    num_classes : int
        Length of the class list.

    Examples
    --------
    >>> labels = ["ill", "healthy", None]
    >>> class_numbers("Party 0", "y", labels, ["healthy", "ill"], 2)
    array([ 1,  0, -1])
    """
    cells = _flat(owner, name, plain(owner, name, y))
    words = [str(one) for one in classes or ()]
    different = len({*words}) == len(words)
    require(different, owner, "classes", "different names", words)
    index = _Index({word: place for place, word in enumerate(words)}, num_classes)
    if isinstance(cells, np.ndarray) and cells.dtype.kind in "iuf":
        values, places = np.unique(cells, return_inverse=True)
        found = np.array([index.of(value) for value in values.tolist()], dtype=np.int64)
        return found[places]
    return np.array([index.of(cell) for cell in cells], dtype=np.int64)


def known_classes(
    owner: str, name: str, y: IntArray, classes: Sequence[object] | None, num_classes: int
) -> IntArray:
    """Return labels; raise `InvalidData`, quoting none, if some are no class."""
    others = int((y == NO_CLASS).sum())
    if others == len(y) > 0 and classes is None:
        raise InvalidData(
            f"{owner}: {name} must be class indices below {num_classes}, or names with the "
            f"class list beside them, got none of these. Write classes=[...] with all classes "
            f'of the federation in one order, such as classes=["healthy", "ill"].'
        )
    listed = ", ".join(map(str, [*(classes or ())][:20]))
    indices = f"between 0 and {num_classes - 1}, the federation's class list"
    rule = f"among the classes {listed}" if classes is not None else indices
    require_data(not others, owner, name, rule, f"{others} others")
    return y


@dataclass(frozen=True)
class _Index:
    """The place of a class, by its name or number."""

    places: Mapping[str, int]
    num_classes: int

    @cached_property
    def _numbered(self) -> bool:
        """Whether all names are whole numbers."""
        return bool(self.places) and all(
            word.removeprefix("-").isdecimal() for word in self.places
        )

    def of(self, label: Any) -> int:
        """Return the index of a label, or `NO_CLASS`."""
        text = label.decode(errors="replace") if isinstance(label, bytes) else label
        if isinstance(text, bool | np.bool_):
            text = text if str(text) not in self.places else str(text)
        if isinstance(text, str) and self.places:
            return self.places.get(text, self.places.get(text.strip(), NO_CLASS))
        number = number_of_cell(text)
        if not number.is_integer():
            return self.places.get(str(text), NO_CLASS)
        whole = int(text) if isinstance(text, int) else int(number)
        if self._numbered:
            return self.places.get(str(whole), NO_CLASS)
        return whole if 0 <= whole < self.num_classes else NO_CLASS


def _flat(owner: str, name: str, given: Any) -> Any:
    """Return labels as a flat array, or as a list of cells of any type."""
    if hasattr(given, "columns"):
        given = np.asarray(given)
    if not isinstance(given, np.ndarray):
        return [_alone(cell) for cell in given]
    flat = given.reshape(-1) if given.ndim == 2 and given.shape[1] == 1 else given
    rule = "a flat array of class indices"
    require_data(flat.ndim == 1, owner, name, rule, f"shape {given.shape} of {given.dtype}")
    if flat.dtype.kind in "iuf":
        return flat
    return (flat.astype(np.str_) if flat.dtype.kind in "mM" else flat).tolist()


def _alone(cell: Any) -> Any:
    """Return the only element of a list or an array, as a column of labels has them."""
    while isinstance(cell, list | tuple) or getattr(cell, "ndim", 0) > 0:
        if len(cell) != 1:
            return None
        (cell,) = cell
    return cell
