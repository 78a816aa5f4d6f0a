"""Numeric targets: whether a label column holds some, and what its cells are.

Public labels alone decide both. A private cell that is no number becomes the public median,
and one far beyond public targets is cut, so that no record ends a run or changes how others
are read.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Self, TypeAlias

import numpy as np

from fl_strategies._util import Array, FloatArray
from fl_strategies.errors import require_data
from fl_strategies.party.party import public_bound
from simulations.data.tables import (
    FEW_TEXTS,
    MISSING,
    MOST_NUMBERS,
    decimal_comma,
    number_of,
)

logger = logging.getLogger("flwr.fl_strategies")

LabelKind: TypeAlias = Literal["auto", "classes", "numbers"]

_NUMERIC: Final = "biuf"


@dataclass(frozen=True, kw_only=True)
class Targets:
    """What numeric targets are, as public ones say.

    Parameters
    ----------
    label : str
        Name of the target.
    comma : bool
        Whether a comma comes before decimals.
    median, low, high : float
        Of public targets.
    num_public, num_distinct : int
        Public targets, and different ones among them. Without any, `low` and `high` are
        declared, or not known if they are the same.
    """

    label: str
    comma: bool = False
    median: float = 0.0
    low: float = 0.0
    high: float = 0.0
    num_public: int = 0
    num_distinct: int = 0

    @classmethod
    def learn(cls, owner: str, label: str, cells: Array) -> Self:
        """Return what targets are by public ones; raise `InvalidData` if none is a number."""
        words = _words(cells[~is_empty(cells)])
        readable = [word for word in words if decimal_comma([word]) is not None]
        comma = bool(decimal_comma(sorted({*readable})))
        values = np.array([number_of(word, comma=comma, lenient=True) for word in readable])
        values = values[np.isfinite(values)]
        got = f"{label!r} without a single number"
        require_data(len(values) > 0, owner, "label", "numbers in public rows", got)
        return cls(
            label=label,
            comma=comma,
            median=float(np.median(values)),
            low=float(values.min()),
            high=float(values.max()),
            num_public=len(values),
            num_distinct=len(np.unique(values)),
        )

    @classmethod
    def declared(cls, label: str, least: float, most: float) -> Self:
        """Return targets that were declared to lie between two bounds."""
        return cls(label=label, median=(least + most) / 2, low=least, high=most)

    def read(self, owner: str, cells: Array) -> FloatArray:
        """Return targets (n, 1); NaN where there is none, the median for what is no number."""
        empty, found = is_empty(cells), self.numbers(cells)
        strange = np.isnan(found) & ~empty
        if strange.any():
            logger.warning(
                "%s: %d labels are no numbers; %s stands in for each.",
                owner,
                strange.sum(),
                f"{'the public median ' if self.num_public else ''}{self.median:g}",
            )
        read = np.where(strange, self.median, found)
        if self.num_public or self.low < self.high:
            bound = public_bound(np.array([self.low, self.high]))
            read = np.clip(read, -bound, bound)
        return read[:, np.newaxis]

    def numbers(self, cells: Array) -> FloatArray:
        """Return the number in every cell, each by itself; NaN for none."""
        if cells.dtype.kind in _NUMERIC:
            found = cells.astype(np.float64)
        else:
            read = [number_of(w, comma=self.comma, lenient=True) for w in _words(cells)]
            found = np.array(read, dtype=np.float64)
        return np.where(np.isfinite(found), found, np.nan)

    def describe(self) -> str:
        """Say what was decided and how to change it; public facts only."""
        return (
            f"label {self.label!r} is a number to predict: {self.num_distinct} different ones "
            f"in {self.num_public} public rows, from {self.low:.6g} to {self.high:.6g} (if "
            "they are classes: --set task=classes)"
        )


def are_numbers(cells: Array) -> bool:
    """Return whether public labels are numbers to predict, and not names of classes.

    They are if all of them are numbers, and some have decimals, or too many differ for a
    list of classes.

    Examples
    --------
    >>> are_numbers(np.array(["1.5", "2", "0.25"])), are_numbers(np.array(["0", "1", "1"]))
    (True, False)
    """
    words = _words(cells[~is_empty(cells)])
    comma = decimal_comma(sorted({*words}))
    if not words or comma is None:
        return False
    values = np.array([number_of(word, comma=comma) for word in words])
    distinct = len(np.unique(values))
    whole = bool((np.isfinite(values) & (values == np.round(values))).all())
    return not whole or distinct > min(MOST_NUMBERS, max(FEW_TEXTS, len(values) / 2))


def is_empty(cells: Array) -> Array:
    """Return which labels are missing: NaN, empty, or a word that stands for nothing."""
    if cells.dtype.kind in _NUMERIC:
        return np.isnan(cells.astype(np.float64))
    nothing = frozenset(MISSING)
    return np.array([word in nothing for word in _words(cells)], dtype=bool)


def _words(cells: Array) -> Sequence[str]:
    plain = cells.astype(np.str_) if cells.dtype.kind == "S" else cells
    return [str(cell).strip() for cell in plain.tolist()]
