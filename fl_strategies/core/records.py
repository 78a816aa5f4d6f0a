"""Records as numbers: what becomes of one depends on it and on public facts alone.

The type of a list, a frame or an array of objects is inferred from all of its cells, so one
record would decide how all others are read. Here every record is read by itself, in the
number type that the public rows fix, and only then cut to a public bound. A value that is no
number becomes the public median of its place: that a party fails would be a release as well.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from fl_strategies.arrays import Array, FloatArray, plain
from fl_strategies.exceptions import InvalidData, require_data

logger = logging.getLogger("flwr.fl_strategies")

LARGEST_VALUE: Final = 1e30
"""Within float32, with room for sums."""
_TIMES_PUBLIC: Final = 10.0
_NUMBERS: Final = "biuf"
_ROWS_PER_CHUNK: Final = 1024
_MOST_NAMED: Final = 10


def public_bound(public: Array) -> float:
    """Return the largest value that a private record may have, known from public rows.

    Generous, because it is there for accidents and attacks: a value that overflows in
    training would make a party fail, and that it fails would tell who its records are.
    Without public rows nothing is known of the scale, so float32 alone sets the bound.
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
        """Return records as finite numbers; an array that is such already stays itself.

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
        """Log, at home, which values are replaced or cut; return whether any are missing."""
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
    """Return records as an array of numbers of any type; NaN stands for what is none."""
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
    """Return a frame as numbers, each column read by itself."""
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
    """Return a list of records as numbers; one of another shape is missing as a whole."""
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
    """Return cells of any type as float64, each by itself; NaN for what is no number."""
    if cells.dtype.kind in _NUMBERS:
        with np.errstate(over="ignore", invalid="ignore"):
            return cells.astype(np.float64)
    if cells.dtype.kind in "mM":
        return np.full(cells.shape, np.nan)
    read = np.array([number_of_cell(cell) for cell in cells.ravel().tolist()], np.float64)
    return read.reshape(cells.shape)


def number_of_cell(cell: Any) -> float:
    """Return the number that a value or a text is; infinity beyond float64, NaN if none.

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
