"""Statistics of columns that follow from whole-number sums over records.

Counts, sums of columns and of their products, histograms and counts by time add up over
parties, whoever holds which records. What is here is made of such sums alone: it says nothing
more about a record than they do, with noise or without.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from fl_strategies._util import Array, FloatArray, IntArray

Kind: TypeAlias = Literal["number", "category", "gap"]

ALL: Final = "all"
QUARTILES: Final = (0.25, 0.5, 0.75)
_LEAST_SPREAD: Final = 0.02
"""Least deviation of a column in a class, as a share of its range."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """What one value of a row is; public, and declared before anybody looks at records.

    Parameters
    ----------
    name : str
    low, high : float
        Bounds of a number; values outside are clipped.
    kind : "number", "category" or "gap"
        A category is 1 where a record has it, and at most one of those `of` the same column
        counts. A gap is 1 where the numbers `of` the same column are missing.
    of : str, optional
        Column of the table that it is made of; the name if omitted.

    Examples
    --------
    >>> Column(name="age", low=0, high=100).source
    'age'
    """

    name: str
    low: float = 0.0
    high: float = 1.0
    kind: Kind = "number"
    of: str = ""

    @property
    def source(self) -> str:
        """Column of the table that it is made of."""
        return self.of or self.name


@dataclass(frozen=True, eq=False, kw_only=True)
class Sums:
    """Sums over the records of each group; values are whole multiples of 1 / `levels`.

    Parameters
    ----------
    levels : int
    counts : (num_groups,)
    linear : (num_groups, num_values)
        Of values; a number is between -1 and 1, and 0 where it is missing.
    products : (num_groups, num_values, num_values)
        Of two values; all but squares are NaN if they are not known.
    histograms : (num_groups, num_numbers, num_bins)
        Records by number and bin.
    survival : (num_groups, num_times, 2)
        Records by time bin, without and with an event; of no times if none are known.
    """

    levels: int
    counts: FloatArray
    linear: FloatArray
    products: FloatArray
    histograms: FloatArray
    survival: FloatArray


@dataclass(frozen=True, eq=False, kw_only=True)
class Statistics:
    """Statistics of columns, of all records first and then by group.

    What no record has is NaN. With noise, everything is moved to where statistics can be.

    Parameters
    ----------
    columns : tuple of str
        Numbers and categories; of a category, the mean is its share.
    sources : tuple of str
        Columns of the table that they are made of.
    groups : tuple of str
    counts : (num_groups,)
    present : (num_groups, num_columns)
        Records where a column is not missing.
    means, variances : (num_groups, num_columns)
        Variances are those of a sample, with one degree of freedom less than records.
    correlations : (num_groups, num_columns, num_columns), optional
        Of records where neither column is missing, with the deviations of all that have each.
    numbers : tuple of str
        The columns with histograms.
    edges : (num_numbers, num_bins + 1)
    histograms : (num_groups, num_numbers, num_bins)
    times : (num_times + 1,), optional
    survival : (num_groups, num_times + 1), optional
        Kaplan-Meier estimate of the share without an event after each time.
    at_risk : (num_groups, num_times), optional
        Records without an event or an end of observation before each bin of time.
    level, epsilon, delta : str, float, float
        Who added noise, and what it promises to a record.
    noise : float
        Deviation of the noise on the number of records in a group.
    """

    columns: tuple[str, ...]
    sources: tuple[str, ...]
    groups: tuple[str, ...]
    counts: FloatArray
    present: FloatArray
    means: FloatArray
    variances: FloatArray
    correlations: FloatArray | None
    numbers: tuple[str, ...]
    edges: FloatArray
    histograms: FloatArray
    times: FloatArray | None = None
    survival: FloatArray | None = None
    at_risk: FloatArray | None = None
    level: str = "L0"
    epsilon: float = math.inf
    delta: float = 0.0
    noise: float = 0.0

    @property
    def missing(self) -> FloatArray:
        """Share of the records where a column is missing, (num_groups, num_columns)."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(1 - self.present / self.counts[:, None])

    @property
    def deviations(self) -> FloatArray:
        """Standard deviations, (num_groups, num_columns)."""
        return np.sqrt(self.variances)

    def quantiles(self, shares: Sequence[float] = QUARTILES) -> FloatArray:
        """Return quantiles, (num_groups, num_numbers, num_shares), from the histograms.

        Within a bin, values are taken to be spread evenly.
        """
        found = np.full((*self.histograms.shape[:2], len(shares)), np.nan)
        for group, of_group in enumerate(self.histograms):
            for number, (edges, counts) in enumerate(zip(self.edges, of_group, strict=True)):
                found[group, number] = _quantiles(edges, counts, shares)
        return found

    def class_shares(self, rows: Array) -> FloatArray:
        """Return the shares of the groups at rows (n, num_columns), as naive Bayes does.

        Columns are taken to be normal and independent within a group.
        """
        spread = np.where(np.isfinite(self.variances), self.variances, self.variances[0])
        means = np.nan_to_num(np.where(np.isfinite(self.means), self.means, self.means[0])[1:])
        least = np.ones(len(self.columns))
        numbers = [self.columns.index(name) for name in self.numbers]
        least[numbers] = self.edges[:, -1] - self.edges[:, 0]
        variances = np.maximum(np.nan_to_num(spread[1:]), np.square(_LEAST_SPREAD * least))
        away = np.square(rows[:, None, :] - means) / variances + np.log(variances)
        logs = np.log(np.maximum(self.counts[1:], 1e-9)) - away.sum(axis=2) / 2
        shares = np.exp(logs - logs.max(axis=1, keepdims=True))
        return np.asarray(shares / shares.sum(axis=1, keepdims=True))

    def to_json(self) -> dict[str, Any]:
        """Return plain lists and numbers; null for what is not known.

        An epsilon without end is null as well, and ``"epsilon-unbounded"`` says so.
        """
        given: dict[str, Any] = {**vars(self), "quartiles": self.quantiles()}
        given["epsilon-unbounded"] = self.epsilon == math.inf
        return {name.replace("_", "-"): _plain(value) for name, value in given.items()}

    def rows(self) -> list[list[str]]:
        """Return the cells of a table of columns by group, under `HEADER`."""
        quartiles = self.quantiles()
        places = {name: place for place, name in enumerate(self.numbers)}
        found = []
        for at, name in enumerate(self.columns):
            for group, words in enumerate(self.groups):
                figures = [self.means[group, at], self.deviations[group, at]]
                own = quartiles[group, places[name]] if name in places else [math.nan] * 3
                found.append(
                    [
                        name if group == 0 else "",
                        words,
                        _figure(self.present[group, at], ".0f"),
                        _figure(100 * self.missing[group, at], ".1f"),
                        *(_figure(figure, ".5g") for figure in (*figures, *own)),
                    ]
                )
        return found

    def describe(self) -> str:
        """Return the table as text."""
        cells = [[*HEADER], *self.rows()]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            [cell.ljust(width) if at < 2 else cell.rjust(width) for at, (cell, width) in pairs]
            for pairs in (enumerate(zip(row, widths, strict=True)) for row in cells)
        ]
        return "\n".join("  ".join(line).rstrip() for line in lines)


HEADER: Final = (
    *("column", "group", "count", "missing %", "mean", "deviation"),
    *("25 %", "median", "75 %"),
)


def _figure(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "-"


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _quantiles(edges: FloatArray, counts: FloatArray, shares: Sequence[float]) -> FloatArray:
    above = np.cumsum(counts)
    if not above[-1] > 0:
        return np.full(len(shares), np.nan)
    wanted = np.asarray(shares) * above[-1]
    places = np.minimum(np.searchsorted(above, wanted), len(counts) - 1)
    inside = (wanted - (above[places] - counts[places])) / np.maximum(counts[places], 1e-300)
    return np.asarray(edges[places] + np.diff(edges)[places] * np.clip(inside, 0, 1))


def bin_edges(low: float, high: float, number: int) -> FloatArray:
    """Return the edges of equal bins; the last one includes its end."""
    return np.linspace(low, high, number + 1)


def kaplan_meier(survival: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the share without an event after each bin, from 1 on, and who is at risk in it.

    `survival` (..., num_times, 2) are records by bin, without and with an event. Who leaves
    in a bin without one is at risk in the whole of it.

    Examples
    --------
    >>> kaplan_meier(np.array([[1.0, 1], [0, 2]]))
    (array([1.  , 0.75, 0.  ]), array([4., 2.]))
    """
    leaving = survival.sum(axis=-1)
    at_risk = np.maximum(np.flip(np.cumsum(np.flip(leaving, -1), axis=-1), -1), 0.0)
    events = np.clip(survival[..., 1], 0.0, at_risk)
    staying = 1 - events / np.where(at_risk > 0, at_risk, 1.0)
    curve = np.cumprod(staying, axis=-1)
    return np.concatenate([np.ones((*curve.shape[:-1], 1)), curve], axis=-1), at_risk


def statistics_of(
    sums: Sums,
    columns: Sequence[Column],
    groups: Sequence[str],
    *,
    times: FloatArray | None = None,
    **privacy: Any,
) -> Statistics:
    """Return the statistics that follow from sums over each of some groups.

    `columns` describe the values of a row; `privacy` are the last fields of `Statistics`.
    """
    levels = float(sums.levels)
    counts = np.maximum(_with_all(sums.counts), 0.0)
    linear = _with_all(sums.linear) / levels
    products = _with_all(sums.products) / levels**2
    shown = np.array([at for at, one in enumerate(columns) if one.kind != "gap"], dtype=int)
    marks = {one.source: at for at, one in enumerate(columns) if one.kind == "gap"}
    gaps = {
        place: marks[columns[at].source]
        for place, at in enumerate(shown.tolist())
        if columns[at].kind == "number" and columns[at].source in marks
    }
    own = [columns[at] for at in shown]
    missing = np.zeros((len(counts), len(own)))
    for place, gap in gaps.items():
        missing[:, place] = np.clip(linear[:, gap], 0.0, counts)
    present = counts[:, None] - missing
    is_number = np.array([one.kind == "number" for one in own], dtype=bool)
    low = np.array([one.low if one.kind == "number" else 0.0 for one in own])
    width = np.array([one.high - one.low if one.kind == "number" else 1.0 for one in own])
    # From -1 and 1 for numbers, from 0 and 1 for categories.
    start, factor = np.where(is_number, -1.0, 0.0), np.where(is_number, width / 2, 1.0)
    squares = products[:, shown, shown]
    with np.errstate(invalid="ignore", divide="ignore"):
        centre = np.clip(linear[:, shown] / np.where(present > 0, present, np.nan), start, 1.0)
        spread = squares - present * np.square(centre)
        variances = np.maximum(spread / np.where(present > 1, present - 1, np.nan), 0.0)
    correlations = None
    if len(own) < 2 or not np.isnan(products[0, shown[0], shown[1]]):
        correlations = _correlations(counts, linear, products, shown, gaps, variances)
    binned = [one for one in own if one.kind == "number"]
    histograms = np.maximum(_with_all(sums.histograms), 0.0)
    num_bins = histograms.shape[2]
    edges = np.array([bin_edges(one.low, one.high, num_bins) for one in binned])
    curves: dict[str, Any] = {}
    if times is not None:
        curve, at_risk = kaplan_meier(_with_all(sums.survival))
        curves = {"times": times, "survival": curve, "at_risk": at_risk}
    return Statistics(
        columns=tuple(one.name for one in own),
        sources=tuple(one.source for one in own),
        groups=(ALL, *groups) if len(groups) > 1 else (ALL,),
        counts=counts,
        present=present,
        means=low + (centre - start) * factor,
        variances=variances * np.square(factor),
        correlations=correlations,
        numbers=tuple(one.name for one in binned),
        edges=edges.reshape(len(binned), num_bins + 1),
        histograms=histograms,
        **curves,
        **privacy,
    )


def _with_all(sums: FloatArray) -> FloatArray:
    """Return sums of all groups together before those of each, if there are several."""
    return np.concatenate([sums.sum(axis=0, keepdims=True), sums]) if len(sums) > 1 else sums


def _correlations(
    counts: FloatArray,
    linear: FloatArray,
    products: FloatArray,
    shown: IntArray,
    gaps: Mapping[int, int],
    variances: FloatArray,
) -> FloatArray:
    """Return correlations; products with marks of gaps tell what both columns have."""
    number = len(shown)
    both = np.repeat(counts[:, None, None], number, axis=1).repeat(number, axis=2)
    own = np.repeat(linear[:, shown, None], number, axis=2)
    for place, gap in gaps.items():
        both[:, :, place] -= linear[:, gap, None]
        both[:, place, :] -= linear[:, gap, None]
        own[:, :, place] -= products[:, shown, gap]
        for other, beside in gaps.items():
            both[:, place, other] += products[:, gap, beside]
    with np.errstate(invalid="ignore", divide="ignore"):
        common = np.where(both > 1, both, np.nan)
        pairs = products[:, shown[:, None], shown]
        covariances = (pairs - own * own.swapaxes(1, 2) / common) / (common - 1)
        scale = np.sqrt(variances[:, :, None] * variances[:, None, :])
        found = np.clip(covariances / np.where(scale > 0, scale, np.nan), -1.0, 1.0)
    diagonal = np.arange(number)
    found[:, diagonal, diagonal] = np.where(variances > 0, 1.0, np.nan)
    return np.asarray(found)
