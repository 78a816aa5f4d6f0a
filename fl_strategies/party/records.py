"""Read records and labels, each independently of the others, from public facts alone.

The type of a list, a data frame or an array of objects is inferred from all of its cells, so
one record would affect how all others are read. Here every record is read by itself, in the
number type of the public rows, and then clipped to a public bound. A value that is not a
number becomes the public median of its column: a failing party would be a release as well.
"""

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from fl_strategies._util import Array, FloatArray, IntArray, plain
from fl_strategies.errors import InvalidData, require, require_data

logger = logging.getLogger("flwr.fl_strategies")

LARGEST_VALUE: Final = 1e30
"""Within float32, with room for sums."""
_TIMES_PUBLIC: Final = 10.0
_NUMBERS: Final = "biuf"
_ROWS_PER_CHUNK: Final = 1024
_MOST_NAMED: Final = 10


def public_bound(public: Array) -> float:
    """Return the largest value that a private record may have, known from public rows.

    Generous, because it exists for accidents and attacks: a value that overflows in training
    would make a party fail, and the failure would reveal something about its records.
    Without public rows the scale is unknown, so only float32 sets the bound.
    """
    if not len(public):
        return LARGEST_VALUE
    largest = float(np.abs(public).max(initial=1.0))
    return min(_TIMES_PUBLIC * largest, LARGEST_VALUE)


@dataclass(frozen=True, eq=False)
class RecordForm:
    """The form of every record: number type, bound and defaults, fixed by public rows.

    Parameters
    ----------
    public : (num_public, ...), optional
        Finite numbers. Without any, a missing value is 0, and records are float64 unless an
        array declares another floating-point type.
    bound : float
        Largest magnitude of a number.
    others : str
        Name of the rows that fix the shape, for errors.

    Examples
    --------
    >>> form = RecordForm(np.array([[1.0, 5.0], [3.0, 5.0]]), bound=50.0)
    >>> form.read("Party 0", "x", [[7, 1e300], [None, "about 4"], [1.0]])
    array([[ 7., 50.],
           [ 2.,  5.],
           [ 2.,  5.]])
    """

    public: Array | None = None
    bound: float = LARGEST_VALUE
    others: str = "the public data"

    def read(self, owner: str, name: str, value: Any) -> Array:
        """Return records as finite numbers; an array that already qualifies is returned as is.

        Raises
        ------
        InvalidData
            If the whole has another shape, or no record of a list has the public one.
        """
        shape = None if self.public is None else self.public.shape[1:]
        given = plain(owner, name, value)
        numbers = _numbers(owner, name, given, shape)
        require_data(
            numbers.ndim >= 2,
            owner,
            name,
            "an array of rows (n, ...)",
            f"shape {numbers.shape}",
        )
        same = shape is None or numbers.shape[1:] == shape
        rule = f"rows of shape {shape} like {self.others}"
        require_data(same, owner, name, rule, numbers.shape[1:])
        dtype = self._dtype(given)
        if numbers.dtype == dtype and self._holds(numbers):
            return numbers
        if self._has_gaps(owner, name, value, numbers):
            return self._converted(numbers, dtype, self._defaults(numbers.shape[1:]))
        return self._converted(numbers, dtype, None)

    def _dtype(self, given: Any) -> np.dtype[Any]:
        """Return the type of records: the public one if it has fractions, or one that has."""
        if self.public is None:
            declared = isinstance(given, np.ndarray) and given.dtype.kind == "f"
            kind = given.dtype if declared else np.dtype(np.float64)
        else:
            kind = self.public.dtype
        if kind.kind != "f":
            return np.dtype(np.float32 if kind.itemsize <= 2 else np.float64)
        return np.dtype(np.float64) if kind.itemsize > 8 else kind.newbyteorder("=")

    def _holds(self, x: Array) -> bool:
        """Return whether all values are within the bound; NaN is not."""
        return not x.size or (float(x.min()) >= -self.bound and float(x.max()) <= self.bound)

    def _defaults(self, shape: tuple[int, ...]) -> FloatArray:
        if self.public is None or not len(self.public):
            return np.zeros(shape)
        return np.asarray(np.median(self.public, axis=0), dtype=np.float64)

    def _converted(self, x: Array, dtype: np.dtype[Any], defaults: FloatArray | None) -> Array:
        # By float64, whatever type a record came in, so that it is rounded in one way.
        bound = min(self.bound, float(np.finfo(dtype).max))
        converted = np.empty(x.shape, dtype=dtype)
        for start in range(0, len(x), _ROWS_PER_CHUNK):
            chunk = slice(start, start + _ROWS_PER_CHUNK)
            wide = cells_as_numbers(x[chunk])
            if defaults is not None:
                wide = np.where(np.isnan(wide), defaults, wide)
            converted[chunk] = np.clip(wide, -bound, bound)
        return converted

    def _has_gaps(self, owner: str, name: str, value: Any, x: Array) -> bool:
        """Log, at the party, replaced and clipped values; return whether any are missing."""
        gaps = np.isnan(x)
        if gaps.any():
            columns = [*getattr(value, "columns", ())]
            named = [repr(str(c)) for n, c in enumerate(columns) if gaps[:, n].any()]
            place = f" in the columns {', '.join(named[:_MOST_NAMED])}" if named else ""
            logger.warning(
                "%s: %d values of %s%s are no numbers; %s stands in for each.",
                owner,
                gaps.sum(),
                name,
                place,
                "the public median" if self.public is not None and len(self.public) else "0",
            )
        with np.errstate(all="ignore"):
            if (x > self.bound).any() or (x < -self.bound).any():
                logger.warning("%s: values beyond %g are cut to it.", owner, self.bound)
        return bool(gaps.any())


def _numbers(owner: str, name: str, given: Any, shape: tuple[int, ...] | None) -> Array:
    """Return records as an array of numbers of any type; NaN for anything else."""
    if isinstance(given, np.ndarray):
        if given.dtype.kind in _NUMBERS:
            return given
        if given.ndim == 1:
            return _listed(owner, name, list(given), shape)
        return cells_as_numbers(given)
    if hasattr(given, "columns"):
        return _columns(given)
    return _listed(owner, name, given, shape)


def _columns(frame: Any) -> Array:
    """Return a data frame as numbers, each column read by itself."""
    whole = _try_array(frame)
    if whole is not None and whole.dtype.kind in _NUMBERS:
        return whole
    at = getattr(frame, "iloc", None)
    columns = [
        np.asarray(frame[name] if at is None else at[:, place])
        for place, name in enumerate(frame.columns)
    ]
    return np.stack([cells_as_numbers(column) for column in columns], axis=1)


def _listed(owner: str, name: str, rows: Sequence[Any], shape: tuple[int, ...] | None) -> Array:
    """Return a list of records as numbers; a record of another shape is missing entirely."""
    if not rows and shape is not None:
        return np.empty((0, *shape))
    # numpy would ask a tensor for one number after the other.
    rows = [_try_array(row) if hasattr(row, "detach") else row for row in rows]
    whole = _try_array(rows)
    if whole is not None and whole.ndim >= 2 and shape in (None, whole.shape[1:]):
        shape = whole.shape[1:]
        if whole.dtype.kind in _NUMBERS:
            return whole
    if shape is None:
        raise InvalidData(
            f"{owner}: {name} must be an array, or a list, frame or tensor of rows of one "
            f"shape, got {type(rows).__name__}."
        )
    found = [_record(row, shape) for row in rows]
    fitting = sum(one is not None for one in found)
    rule = f"rows of shape {shape}"
    require_data(fitting > 0, owner, name, rule, "a list without any")
    if fitting < len(rows):
        count = len(rows) - fitting
        logger.warning("%s: %d records of %s are not %s.", owner, count, name, rule)
    gap = np.full(shape, np.nan)
    return np.stack([gap if one is None else one for one in found])


def _record(row: Any, shape: tuple[int, ...]) -> FloatArray | None:
    """Return one record as numbers, or None if it has another shape."""
    array = _try_array(row, dtype=object)
    return None if array is None or array.shape != shape else cells_as_numbers(array)


def _try_array(value: Any, dtype: Any = None) -> Array | None:
    try:
        return np.asarray(plain("", "", value), dtype=dtype)
    except Exception:  # one record may be anything
        return None


def cells_as_numbers(cells: Array) -> FloatArray:
    """Return cells of any type as float64, each by itself; NaN for anything but a number."""
    if cells.dtype.kind in _NUMBERS:
        with np.errstate(over="ignore", invalid="ignore"):
            return cells.astype(np.float64)
    if cells.dtype.kind in "mM":
        return np.full(cells.shape, np.nan)
    read = np.array([number_of_cell(cell) for cell in cells.ravel().tolist()], np.float64)
    return read.reshape(cells.shape)


def number_of_cell(cell: Any) -> float:
    """Return a value or a text as a number; infinity beyond float64, NaN if it is none.

    Examples
    --------
    >>> [number_of_cell(cell) for cell in ("True", "1.5", 10**400, None, "about 4")]
    [1.0, 1.5, inf, nan, nan]
    """
    try:
        if cell in ("True", "False"):  # as numpy writes truth values beside texts
            return float(cell == "True")
        if isinstance(cell, complex):
            return cell.real if cell.imag == 0 else math.nan
        return float(cell)
    except OverflowError:
        return math.inf if cell > 0 else -math.inf
    except Exception:  # a cell may be anything
        return math.nan


NO_CLASS: Final = -1
"""Index of a label that is missing or unknown."""

_NOTHING = frozenset({"", "nan", "None", "NaT", "<NA>"})


def is_missing(y: Any, classes: Sequence[object] = ()) -> Array:
    """Return which labels are missing, (n,) of truth values.

    NaN, None and empty texts are missing, also as pandas and numpy represent them, unless
    the class list has such a name. A record of several labels is missing if all are NaN.

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
    """Return labels as class indices, and `NO_CLASS` for unknown ones.

    Every label is read by itself. The class list alone decides the meaning of a number: a
    name if all names are integers, otherwise an index.

    Parameters
    ----------
    owner, name : str
        Owner and name of the labels, for errors.
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
    """Return labels; raise `InvalidData`, without quoting any, if some are unknown."""
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
    """Index of a class, by its name or number."""

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
