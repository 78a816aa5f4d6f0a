"""Rows that many models learn from in turn, such as the public rows of a federation.

What a library makes of them before it learns, such as bins, is made once in a process.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import numpy as np

from clients.tabular import to_float32
from fl_strategies.arrays import Array
from fl_strategies.core.protocols import TrainingSet

MOST_BYTES: Final = 2**26
"""Larger rows are not kept: a model on them takes far longer than its bins."""

Made = TypeVar("Made")


class SharedRows(Generic[Made]):
    """The last rows, by their content, and what was made of them.

    A copy of the rows is compared, never their address: whoever writes into an array gets
    what belongs to its new content.

    Examples
    --------
    >>> shared, rows = SharedRows(), np.ones((2, 2))
    >>> shared.get(rows, np.sum), shared.get(rows.copy(), np.size), shared.get(rows * 2, np.sum)
    (np.float64(4.0), np.float64(4.0), np.float64(8.0))
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[Array, Made] | None = None

    def get(self, rows: Array, make: Callable[[Array], Made]) -> Made:
        """Return what `make` makes of rows, or made of equal rows the last time."""
        with self._lock:
            kept = self._kept
        if kept is not None and _same(kept[0], rows):
            return kept[1]
        own = rows.copy()
        made = make(own)
        if own.nbytes <= MOST_BYTES:
            with self._lock:
                self._kept = own, made
        return made


def _same(kept: Array, rows: Array) -> bool:
    return kept.dtype == rows.dtype and np.array_equal(kept, rows)


class CommonRows:
    """The rows of the training sets of one call, checked once for each array.

    Several sets on one array are students on public rows, which may be kept in a
    `SharedRows`; the records of a party never are.
    """

    def __init__(self, owner: str, sets: Sequence[TrainingSet]) -> None:
        addresses = [id(x) for x, _ in sets]
        self._owner = owner
        self._common = {each for each in addresses if addresses.count(each) > 1}
        self._checked: dict[int, tuple[Array, Array]] = {}

    def are_common(self, x: Array) -> bool:
        """Tell whether several sets have this very array."""
        return id(x) in self._common

    def get(self, x: Array, check: Callable[[Array], Array]) -> Array:
        """Return checked rows as float32."""
        if id(x) not in self._checked:
            # The array is kept beside its address, which another could get otherwise.
            self._checked[id(x)] = x, to_float32(self._owner, check(x))
        return self._checked[id(x)][1]
