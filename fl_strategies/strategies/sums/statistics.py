"""FedStatistics: counts, means, variances, correlations, histograms and curves of survival.

    server   sends what the values of a row are: bounds, categories, gaps, bins
    party    clips and rounds its records, and sums values, products and bins by class
    server   adds the sums, and computes statistics from them

What a consortium looks at first, for one price. Sums are whole numbers, so that statistics
are those of pooled records to the bit, whoever holds which. With public rows and classes,
there is a final model too, which learns what naive Bayes makes of the statistics: whatever is
worth more than they are must be better than it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final, Self, Unpack

import numpy as np
from flwr.app import ArrayRecord

from fl_strategies._util import Array, FloatArray, IntArray, one_blas_thread
from fl_strategies.aggregation import moments
from fl_strategies.aggregation.statistics import (
    Column,
    Statistics,
    Sums,
    bin_edges,
    statistics_of,
)
from fl_strategies.errors import KnowledgeMismatch, require, require_known
from fl_strategies.learners import Learner, LearnerFactory, Task
from fl_strategies.options import option
from fl_strategies.privacy.mechanisms import MOST_SUMS
from fl_strategies.privacy.planning import Draft, Facts, outweighed_cells
from fl_strategies.release import forms_at
from fl_strategies.server.strategy import FederationOptions
from fl_strategies.strategies.sums.options import SumOptions, SumPlanner
from fl_strategies.strategies.sums.party import SumParty
from fl_strategies.strategies.sums.server import Counted, SumStrategy
from fl_strategies.strategies.sums.summary import (
    MOST_EXACT,
    VALUES_AT_ONCE,
    PartySums,
    Summary,
)
from fl_strategies.wire.knowledge import Metrics

NUM_COLUMNS: Final = "num-columns"
NUMBER: Final = -1
GAP: Final = -2
"""Kinds of values; a number instead names the column that a category belongs to."""
MOST_LEVELS: Final = 2**15
"""Steps on either side of the middle of a number's bounds."""
_FINEST: Final = 2**8
"""The same under noise, which hides smaller ones, if sums then fit into 31 bits."""
_COARSEST: Final = 4
_DIGIT: Final = 24
"""Exact sums travel as two numbers, the second of which has so many bits."""
_LARGEST: Final = 2**31
_MOST_NOISE: Final = 2**21
"""Noise of this deviation is drawn with a scale that is right to an eighth."""
_MOST_BINS: Final = 2**12
_FEWEST: Final = 10
"""A party is not compared by classes of which it has fewer records."""
# See `moments`: off-diagonal products may weigh the root of 2 more than those on the diagonal.
_DIAGONAL: Final = 5
_BESIDE: Final = 7


@dataclass(frozen=True, kw_only=True)
class FedStatisticsOptions(SumOptions):
    """Options of `FedStatistics`; see `SumOptions`.

    Parameters
    ----------
    by_class : bool
        Statistics of each class as well. Under noise those of all have more of it then.
    correlations : bool
        Products of all columns. Under noise, variances of many columns have less without them.
    num_bins : int
        Equal bins of every number's histogram, between its bounds.
    time, event : str
        A number, and a column that is 1 where an event ended it and 0 where the observation
        did, for curves of survival.
    num_times : int
        Equal bins of the time.
    exclude_outliers : bool
        As in `SumOptions`, which needs public rows and classes here; parties differ, and are
        described as they are, by default.
    """

    owner: ClassVar[str] = "FedStatistics"

    exclude_outliers: bool = option(False, "no sums of parties that contradict most")
    by_class: bool = option(True, "statistics of each class as well")
    correlations: bool = option(True, "correlations of all columns")
    num_bins: int = option(20, "bins of a number's histogram", least=2, most=_MOST_BINS)
    time: str = option("", "column of times, for curves of survival; empty: none")
    event: str = option("", "column that is 1 where an event came, 0 where nobody knows")
    num_times: int = option(40, "bins of the time", least=2, most=_MOST_BINS)

    def __post_init__(self) -> None:
        """Check what goes together."""
        super().__post_init__()
        fits = self.privacy is None or self.privacy.privacy_level != "L1"
        require(fits, self.owner, "privacy_level", "L2 or central", "L1")
        both = bool(self.time) == bool(self.event)
        require(both, self.owner, "event", "given with time, and only then", self.event)


_BOUNDS: Final = ("low", "high")
_PLACES: Final = ("kinds", "gaps")
_SIZES: Final = (
    *("levels", "digits", "num_bins", "num_times"),
    *("time", "event", "correlations", "by_class"),
)


@dataclass(frozen=True, eq=False, kw_only=True)
class Tally(Summary):
    """What the values of a row are, and what is summed of them.

    Numbers become whole numbers between minus and plus `levels` at their bounds, categories
    and gaps 0 or `levels`.

    Parameters
    ----------
    num_values : int
        Values of a row; numeric targets are values after these.
    low, high : (num_values,)
    kinds : (num_values,)
        `NUMBER`, `GAP`, or the column that it is a category of; of each such column, the first
        category counts that a record has.
    gaps : (num_values,)
        Where the gaps of a number are marked; -1 where they are not, and for others. A number
        that is missing is 0.
    levels, digits, num_bins, num_times : int
    time, event : int
        Positions of the values that curves of survival are made of; -1 for none.
    correlations, by_class : bool
    """

    kind: ClassVar[str] = "columns"
    signed: ClassVar[bool] = True

    num_values: int
    low: FloatArray
    high: FloatArray
    kinds: IntArray
    gaps: IntArray
    levels: int
    digits: int
    num_bins: int
    num_times: int
    time: int = -1
    event: int = -1
    correlations: bool = True
    by_class: bool = True

    def to_arrays(self) -> dict[str, Array]:
        """Return what parties need."""
        sizes = np.array([int(getattr(self, name)) for name in _SIZES], dtype=np.int32)
        bounds = {name: getattr(self, name).astype(np.float64) for name in _BOUNDS}
        places = {name: getattr(self, name).astype(np.int32) for name in _PLACES}
        return {**bounds, **places, "sizes": sizes}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], num_values: int) -> Self:
        """Read what a server sent; raise `KnowledgeMismatch` for anything else."""
        if not _is_layout(arrays, num_values):
            raise KnowledgeMismatch(
                f"Server: columns must be bounds, kinds, gaps and sizes for rows of "
                f"{num_values} values, in order and finite, got others."
            )
        fields: dict[str, Any] = dict(zip(_SIZES, arrays["sizes"].tolist(), strict=True))
        fields |= {name: bool(fields[name]) for name in _SIZES[-2:]}
        fields |= {name: arrays[name].astype(np.int64) for name in _PLACES}
        fields |= {name: arrays[name] for name in _BOUNDS}
        return cls(num_values=num_values, **fields)

    @classmethod
    def _fits(cls, arrays: Mapping[str, Array]) -> bool:  # noqa: ARG003
        return True

    def check_task(self, num_classes: int, task: Task) -> None:
        """Raise `KnowledgeMismatch` unless columns are those of rows and numeric targets."""
        expected = self.num_values + (num_classes if task == "regression" else 0)
        rule, got = f"{expected}, of rows and numeric targets", len(self.kinds)
        require_known(got == expected, "Server", "columns", rule, got)

    @cached_property
    def numbers(self) -> IntArray:
        """Positions of the numbers."""
        return np.flatnonzero(self.kinds == NUMBER)

    @cached_property
    def num_columns(self) -> int:
        """Numbers, and columns that have categories: what one record has at most."""
        return len(self.numbers) + len({*self.kinds[self.kinds >= 0].tolist()})

    def num_groups(self, num_classes: int, task: Task) -> int:
        """Return how many groups have sums of their own."""
        return num_classes if self.by_class and task == "single-label" else 1

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        """Sizes of the parts of a sum: records, values, products, histograms, times."""
        width = len(self.kinds)
        products = moments.packed_size(width) if self.correlations else width
        times = self.num_times if self.time >= 0 else 0
        return 1, width, products, len(self.numbers) * self.num_bins, 2 * times

    def split(self, sums: Array) -> list[Array]:
        """Return the parts of sums (..., size)."""
        return np.split(sums, np.cumsum(self._sizes)[:-1], axis=-1)

    def shape(self, num_classes: int, task: Task) -> tuple[int, ...]:
        """Return digits by groups by what is summed."""
        return self.digits, self.num_groups(num_classes, task), sum(self._sizes)

    # What records add to it

    def values(self, rows: Array) -> tuple[FloatArray, FloatArray, Array]:
        """Return rows, clipped; values that are summed; and where values are missing."""
        flat = np.clip(rows.reshape(len(rows), -1).astype(np.float64), self.low, self.high)
        is_number = self.kinds == NUMBER
        share = (flat - self.low) / (self.high - self.low)
        placed = np.rint((2 * share - 1) * self.levels)
        marked = (flat >= 0.5) & ~is_number
        for column in {*self.kinds[self.kinds >= 0].tolist()}:
            own = self.kinds == column
            marked[:, own] &= np.cumsum(marked[:, own], axis=1) == 1
        missing = np.zeros(flat.shape, dtype=bool)
        known = self.gaps >= 0
        missing[:, known] = marked[:, self.gaps[known]]
        numbers = np.where(missing, 0.0, np.clip(placed, -self.levels, self.levels))
        return flat, np.where(is_number, numbers, marked * float(self.levels)), missing

    @one_blas_thread()
    def of_records(self, x: Array, y: Array, num_classes: int, task: Task) -> IntArray:
        """Return the sums of some records, as integers."""
        found = np.zeros(self.shape(num_classes, task)[1:], dtype=np.int64)
        step = max(1, VALUES_AT_ONCE // (4 * len(self.kinds)))
        for start in range(0, len(x), step):
            part = slice(start, start + step)
            rows = x[part].reshape(len(x[part]), -1)
            if task == "regression":
                rows = np.hstack([rows, y[part]])
            groups = y[part] if len(found) > 1 else np.zeros(len(rows), dtype=np.int64)
            flat, values, missing = self.values(rows)
            for group in range(len(found)):
                own = groups == group
                found[group] += self._sum(flat[own], values[own], missing[own])
        if self.digits == 1:
            return found[None]
        high = found >> _DIGIT
        return np.stack([high, found - (high << _DIGIT)])

    def _sum(self, flat: FloatArray, values: FloatArray, missing: Array) -> IntArray:
        """Return the sums of one group; products of floats are exact below 2**53."""
        if self.correlations:
            products = moments.pack(values.T @ values)
        else:
            products = np.square(values).sum(axis=0)
        bins = []
        for at in self.numbers.tolist():
            found = self._bins(flat, at, self.num_bins)
            bins.append(np.bincount(found[~missing[:, at]], None, self.num_bins))
        if self.time >= 0:
            known = ~(missing[:, self.time] | missing[:, self.event])
            ended = (flat[:, self.event] >= 0.5).astype(np.int64)
            cells = 2 * self._bins(flat, self.time, self.num_times) + ended
            bins.append(np.bincount(cells[known], None, 2 * self.num_times))
        parts = [np.array([len(flat)]), values.sum(axis=0), products, *bins]
        return np.concatenate(parts).astype(np.int64)

    def _bins(self, flat: FloatArray, at: int, number: int) -> IntArray:
        """Return the bin of every record."""
        inner = bin_edges(self.low[at], self.high[at], number)[1:-1]
        return np.searchsorted(inner, flat[:, at], side="right")

    # What one record can change

    @cached_property
    def _weights(self) -> tuple[int, int, int, int]:
        """Multiples of counts, values, squares and other products; see `moved`."""
        columns = max(1, self.num_columns)
        if self.correlations:
            constant = math.ceil(self.levels * math.sqrt(columns))
            return _DIAGONAL * constant**2, _BESIDE * constant, _DIAGONAL, _BESIDE
        return math.ceil(self.levels**2 * math.sqrt(2 * columns)), self.levels, 1, 0

    @cached_property
    def _moved_values(self) -> float:
        """The most by which one record moves counts, values and products, squared."""
        columns = max(1, self.num_columns)
        if self.correlations:
            constant = math.ceil(self.levels * math.sqrt(columns))
            return 2.0 * _DIAGONAL**2 * (constant**2 + columns * self.levels**2) ** 2
        return 2.0 * self._weights[0] ** 2 + 4.0 * columns * self.levels**4

    @cached_property
    def _weights_of_bins(self) -> tuple[int, int]:
        """Multiples of histograms and times: each part moves as far as values do at most."""
        of_bins = math.isqrt(int(self._moved_values / (2 * max(1, len(self.numbers)))))
        return of_bins, math.isqrt(int(self._moved_values / 2))

    def multiples(self, num_classes: int, task: Task) -> IntArray:  # noqa: ARG002
        """Return by what sums are multiplied where noise is as strong on each."""
        count, value, square, beside = self._weights
        width = len(self.kinds)
        products = np.full(width, square)
        if self.correlations:
            matrix = np.full((width, width), beside)
            np.fill_diagonal(matrix, square)
            products = moments.pack(matrix)
        of_bins, of_times = self._weights_of_bins
        parts = [np.array([count]), np.full(width, value), products]
        parts += [np.full(self._sizes[3], of_bins), np.full(self._sizes[4], of_times)]
        return np.concatenate(parts)[None, None].astype(np.int64)

    def moved(self, num_classes: int, task: Task) -> float:  # noqa: ARG002
        """Return the most, in L2 norm, by which replacing one record moves multiplied sums.

        A record has d columns. A number is at most L = `levels` from 0, and 0 where its gap is
        marked; of the categories of a column one is L. So the values f of a record have a
        squared length of at most d L^2, whatever layout a server sends. Sums are by group.

        With correlations, let c be the constant and a = (c, f), so that |a|^2 <= R^2 = c^2 +
        d L^2. Count, values and products are the triangle of aa', times 5 on the diagonal and 7
        beside it; as 7^2 < 2 * 5^2 a difference in it has at most 25 times the squared length
        of one in the matrix. A record in place of one in the same group moves this by

            |aa' - bb'|^2 = |a|^4 + |b|^4 - 2 (a'b)^2 <= 2 R^4,

        and of one in another group, where both are whole, by |a|^4 + |b|^4 <= 2 R^4 as well.

        Without them, the count weighs w, a value L, a square 1. In the same group, a number
        moves from f to g by (f - g)^2 (L^2 + (f + g)^2), which is 4 L^4 at most, from one bound
        to the other: for f + g = s L and |f - g| = t L, s <= 2 - t, and t^2 (1 + (2 - t)^2)
        grows with t. To a gap or another category it moves by 2 (L^4 + L^4) at most. Two groups
        change by 2 w^2 + 2 d (L^4 + L^4). All are at most 2 w^2 + 4 d L^4.

        A record is in one bin of each number and in one of time, or in none, so that these
        move by 2 for each. Parts add up, squared. In two digits sums would move farther.
        """
        if self.digits > 1:
            raise KnowledgeMismatch("Server: sums under noise must have one digit, got two.")
        of_bins, of_times = self._weights_of_bins
        bins = 2.0 * len(self.numbers) * of_bins**2
        times = 2.0 * of_times**2 if self.time >= 0 else 0.0
        return math.sqrt(self._moved_values + bins + times)

    # What a server makes of it

    def whole(self, sums: Array) -> Array:
        """Return sums of one digit."""
        return np.asarray(sums[0] if self.digits == 1 else sums[0] * 2**_DIGIT + sums[1])

    def possible(self, sums: IntArray, num_records: int, task: Task) -> bool:  # noqa: ARG002
        """Return whether so many records can have these sums."""
        counts, linear, products, bins, times = self.split(self.whole(sums))
        if (counts < 0).any() or int(counts.sum()) != num_records:
            return False
        has_sign = self.kinds == NUMBER
        lowest = np.where(has_sign, -self.levels, 0) * counts
        if (linear < lowest).any() or (linear > self.levels * counts).any():
            return False
        squares, grams = products, []
        if self.correlations:
            grams = [moments.unpack(each, len(self.kinds)) for each in products]
            squares = np.stack([np.diagonal(each) for each in grams])
        if (squares < 0).any() or (squares > self.levels**2 * counts).any():
            return False
        marks = linear // self.levels
        gaps = np.where(self.gaps >= 0, marks[:, self.gaps], 0)
        by_bin = bins.reshape(len(bins), len(self.numbers), self.num_bins)
        held = counts - gaps[:, self.numbers]
        if (by_bin < 0).any() or (by_bin.sum(axis=2) != held).any():
            return False
        if (times < 0).any() or (times.sum(axis=1) > counts[:, 0]).any():
            return False
        for number, values, gram in zip(counts[:, 0], linear, grams, strict=False):
            beside = np.append(values, 0.0)[:, None]
            whole = np.block([[gram, beside[:-1]], [beside[:-1].T, np.array([[number]])]])
            least = np.linalg.eigvalsh(whole.astype(np.float64))[0]
            if least < -1e-9 * max(float(np.trace(whole)), 1.0) * len(whole):
                return False
        return True

    def read(self, sums: FloatArray) -> Sums:
        """Return the parts of sums over parties."""
        counts, linear, packed, bins, times = self.split(self.whole(sums))
        width = len(self.kinds)
        products = np.full((len(counts), width, width), np.nan)
        for group, own in zip(products, packed, strict=True):
            if self.correlations:
                group[:] = moments.unpack(own, width)
            else:
                np.fill_diagonal(group, own)
        return Sums(
            levels=self.levels,
            counts=counts[:, 0],
            linear=linear,
            products=products,
            histograms=bins.reshape(len(bins), len(self.numbers), self.num_bins),
            survival=times.reshape(len(times), -1, 2),
        )


def _is_layout(arrays: Mapping[str, Array], num_values: int) -> bool:
    """Return whether arrays are a layout by which a record moves sums as `Tally.moved` says."""
    if set(arrays) != {*_BOUNDS, *_PLACES, "sizes"}:
        return False
    low, high, kinds, gaps, sizes = (arrays[name] for name in (*_BOUNDS, *_PLACES, "sizes"))
    types = low.dtype == high.dtype == np.float64 and kinds.dtype == gaps.dtype == np.int32
    one_shape = low.shape == high.shape == kinds.shape == gaps.shape
    if not (types and one_shape and low.ndim == 1 and num_values <= len(low)):
        return False
    if sizes.dtype != np.int32 or sizes.shape != (len(_SIZES),):
        return False
    width = len(low)
    levels, digits, num_bins, num_times, time, event, *switches = sizes.tolist()
    limits = 1 <= levels <= MOST_LEVELS and digits in (1, 2) and {*switches} <= {0, 1}
    several = 2 <= num_bins <= _MOST_BINS and 2 <= num_times <= _MOST_BINS
    timed = (time, event) == (-1, -1) or (0 <= time < width and 0 <= event < width)
    if not (limits and several and timed and (time < 0 or kinds[time] == NUMBER)):
        return False
    with np.errstate(over="ignore"):
        bounded = np.isfinite(low).all() and np.isfinite(high).all()
        bounded = bounded and np.isfinite(high - low).all() and (low < high).all()
    placed = (gaps >= -1) & (gaps < width) & (kinds >= GAP) & (kinds < width)
    if not (bounded and placed.all()):
        return False
    marked = gaps >= 0
    own = (kinds[marked] == NUMBER).all() and (kinds[gaps[marked]] == GAP).all()
    return bool(own and {*np.flatnonzero(kinds == GAP).tolist()} <= {*gaps[marked].tolist()})


@dataclass(frozen=True, kw_only=True)
class StatisticsPlanner(SumPlanner):
    """Plans `FedStatistics`: whether the number of records in a group stands out from noise.

    One of three parts, with a share of the noise, is a matrix one entry of which is the count.
    """

    strategy: ClassVar[str] = "fedstatistics"
    moved_squared: ClassVar[int] = 24
    moved_by_party: ClassVar[float] = 2.0

    def problem(self, facts: Facts) -> str:
        """Describe noise that exceeds what a group has, or return ""."""
        _, noise = self.noise(facts)
        return outweighed_cells(facts.all_records / facts.num_classes, noise, self.whose)

    def draft(self, facts: Facts) -> Draft:
        """Return the release that the strategy makes by default."""
        sums, noise = self.noise(facts)
        share = facts.all_records / facts.num_classes
        return Draft(
            noise="gaussian",
            scale=sums.drawn_scale,
            asked="groups",
            num_asked=facts.num_classes,
            voters=f"{share:.0f} {self.whose} of a group",
            right=facts.right_labels("gaussian", noise, share),
            batches=[sums.charges(facts.num_classes)],
            settings=self.settings,
        )


class FedStatistics(SumStrategy[Tally]):
    """One round: parties sum their columns, products of columns and bins, by class.

    Leaves the party
        For each class: its records; a number for each column and pair of columns; how many
        records are in each bin of a number; and for curves of survival, how many leave in each
        bin of time, with an event and without.
    Guarantee
        L2: each record is protected against the server and everybody else, by noise that
        the party itself adds; central: against everybody but the server, which adds the
        noise once. One release, so one price. Not covered: the number of records, held-out
        rows, and bounds if they were taken from records.

    Parameters
    ----------
    columns : sequence of Column, optional
        What the values of a row are, and then numeric targets, declared and not taken from
        records. By default numbers between the least and the largest public value.
    **settings
        See `SumStrategy`; `options` are `FedStatisticsOptions`. Public rows may be omitted.

    Attributes
    ----------
    statistics_ : Statistics
        The result. Without public rows or classes there is no model beside it.

    Notes
    -----
    Values are clipped to bounds and rounded: without noise to 2^-16 of their range. Gaps in
    rows are filled before anybody sums, so that a gap must have a column that marks it.
    """

    name: ClassVar[str] = "fedstatistics"
    options_type = FedStatisticsOptions
    planner_type = StatisticsPlanner
    takes = (*SumStrategy.takes, "columns", "groups")
    identified_by = (*SumStrategy.identified_by, "columns", "groups")
    tasks: ClassVar[tuple[Task, ...]] = ("single-label", "regression")
    forms = forms_at(("L0", "L2", "central"), {"target-epsilon": 1.0})
    options: FedStatisticsOptions
    open_setting = "num_records"
    statistics_: Statistics

    def __init__(
        self,
        *,
        public: Array | None = None,
        num_classes: int,
        learner_fn: LearnerFactory,
        learner_name: str = "learner",
        task: Task = "single-label",
        options: FedStatisticsOptions | None = None,
        columns: Sequence[Column] | None = None,
        groups: Sequence[str] | None = None,
        **federation: Unpack[FederationOptions],
    ) -> None:
        owner = "FedStatistics"
        known = public is not None or columns is not None
        require(known, owner, "columns", "given where there are no public rows", None)
        rule = f"{num_classes} names of classes"
        fits = groups is None or len(groups) == num_classes
        require(fits, owner, "groups", rule, groups)
        self.columns = None if columns is None else tuple(columns)
        self.groups = None if groups is None else tuple(groups)
        if public is None and columns is not None:
            own = len(columns) - (num_classes if task == "regression" else 0)
            require(own > 0, owner, "columns", "those of rows, and then of targets", own)
            public = np.empty((0, own))
        super().__init__(
            public=public,
            num_classes=num_classes,
            learner_fn=learner_fn,
            learner_name=learner_name,
            task=task,
            options=options,
            **federation,
        )
        comparable = not self.options.exclude_outliers or self._has_model
        rule = "False without public rows and classes"
        require(comparable, owner, "exclude_outliers", rule, self.options.exclude_outliers)

    @property
    def has_result(self) -> bool:
        """Whether there are statistics."""
        return hasattr(self, "statistics_")

    @property
    def delivered_learner(self) -> str:
        """Name of the final model's learner, where there is a model."""
        return super().delivered_learner if self._has_model else ""

    @property
    def _has_model(self) -> bool:
        several = self.options.by_class and self.task == "single-label"
        return several and len(self.public) > 0

    @property
    def _num_groups(self) -> int:
        return self._shape[1]

    # Columns

    @cached_property
    def _columns(self) -> tuple[Column, ...]:
        """What was declared, or what public rows show."""
        if self.columns is not None:
            return self.columns
        flat = self.public.reshape(len(self.public), -1).astype(np.float64)
        low, high = flat.min(axis=0), flat.max(axis=0)
        high = np.where(high > low, high, low + np.maximum(1.0, np.abs(low) * 1e-6))
        bounds = enumerate(zip(low.tolist(), high.tolist(), strict=True), start=1)
        return tuple(Column(name=f"column {n}", low=a, high=b) for n, (a, b) in bounds)

    def _summarise(self) -> Tally:
        options, columns, owner = self.options, self._columns, "FedStatistics"
        expected = self.width + (self.num_classes if self.task == "regression" else 0)
        rule = f"{expected}, one for each value of a row and each numeric target"
        require(len(columns) == expected, owner, "columns", rule, len(columns))
        names = [one.name for one in columns]
        require(len({*names}) == len(names), owner, "columns", "different names", names)
        sources = list(dict.fromkeys(one.source for one in columns))
        kinds = {"number": NUMBER, "gap": GAP, "category": 0}
        marks = {one.source: at for at, one in enumerate(columns) if one.kind == "gap"}
        numbers = {one.source for one in columns if one.kind == "number"}
        for one in columns:
            finite = math.isfinite(one.low) and math.isfinite(one.high)
            ordered = finite and one.low < one.high and one.kind in kinds
            require(ordered, owner, "columns", "of a known kind, with bounds in order", one)
            marks_some = one.kind != "gap" or one.source in numbers
            require(marks_some, owner, "columns", "gaps of numbers", one)
        for name in (options.time, options.event):
            rule = f"one of the columns {', '.join(names[:20])}"
            require(not name or name in names, owner, "time and event", rule, name)
        numeric = not options.time or columns[names.index(options.time)].kind == "number"
        require(numeric, owner, "time", "a number", options.time)
        made = Tally(
            num_values=self.width,
            low=np.array([one.low if one.kind == "number" else 0.0 for one in columns]),
            high=np.array([one.high if one.kind == "number" else 1.0 for one in columns]),
            kinds=np.array([kinds[one.kind] or sources.index(one.source) for one in columns]),
            gaps=np.array(
                [marks.get(one.source, -1) if one.kind == "number" else -1 for one in columns]
            ),
            levels=self._num_levels(columns),
            digits=1 if options.privacy else 2,
            num_bins=options.num_bins,
            num_times=options.num_times,
            time=names.index(options.time) if options.time else -1,
            event=names.index(options.event) if options.event else -1,
            correlations=options.correlations,
            by_class=options.by_class,
        )
        size = math.prod(made.shape(self.num_classes, self.task))
        most = MOST_SUMS if options.privacy else MOST_EXACT
        rule = f"False for so many columns and groups, whose sums must be at most {most}"
        require(size <= most, owner, "correlations", rule, options.correlations)
        return made

    def _num_levels(self, columns: Sequence[Column]) -> int:
        """Return the steps by which numbers are rounded, such that sums fit under noise."""
        privacy = self.options.privacy
        if privacy is None:
            return MOST_LEVELS
        rule = "given with noise where there are no public rows"
        require(self._num_records > 0, "FedStatistics", "num_records", rule, 0)
        of_columns = {one.name if one.kind == "number" else one.source for one in columns}
        number = len(of_columns)
        # Multiples are at most so many squared levels, and sums move by 2.5 times that.
        weight = 10.0 * number if self.options.correlations else 2 * math.sqrt(number)
        by_sums = _LARGEST / (weight * self._num_records)
        by_noise = _MOST_NOISE / (2.5 * weight * privacy.mechanism(1.0).scale)
        return int(np.clip(math.isqrt(int(min(by_sums, by_noise))), _COARSEST, _FINEST))

    def _no_signal(self) -> str:
        """Describe noise that exceeds what a group has on average, or return ""."""
        share = self._num_records / self._num_groups
        return outweighed_cells(share, self._noise_on_counts(self._summed(self._mechanism)))

    def _noise_on_counts(self, noise: float) -> float:
        return noise / int(self._summary.multiples(self.num_classes, self.task)[0, 0, 0])

    # Liars

    def _believed(self, said: Sequence[PartySums]) -> FloatArray:
        """Return what parties claim, unless it is more than was announced."""
        claimed = np.array([one.num_records for one in said], dtype=np.float64)
        announced = self.options.num_records
        if announced is None or claimed.sum() <= announced:
            return claimed
        return super()._believed(said)

    def _plausible(self, one: PartySums, noise: float) -> FloatArray | IntArray:  # noqa: ARG002
        """Return sums as they are: without noise they are possible, or have been refused."""
        return one.sums

    def _evidence(
        self,
        sums: FloatArray | IntArray,
        num_records: float,  # noqa: ARG002
        noise: float,
    ) -> tuple[FloatArray, FloatArray]:
        """Return the classes of public rows by a party's own statistics."""
        own = self._read(np.asarray(sums, dtype=np.float64), noise)
        known = own.counts[1:] >= max(_FEWEST, 2 * self._noise_on_counts(noise))
        return own.class_shares(self._public_columns), known.astype(np.float64)

    # The result

    def _read(self, total: FloatArray, noise: float) -> Statistics:
        options, times = self.options, None
        if options.time:
            at = self._summary.time
            ends = self._summary.low[at], self._summary.high[at]
            times = bin_edges(*ends, options.num_times)
        named = self.groups or tuple(f"class {n}" for n in range(self.num_classes))
        return statistics_of(
            self._summary.read(total),
            self._columns,
            named if self._num_groups > 1 else (),
            times=times,
            level=options.level,
            epsilon=self.ledger_.get_epsilon(self.ledger_.delta),
            delta=self.ledger_.delta,
            noise=self._noise_on_counts(noise),
        )

    @property
    def _public_columns(self) -> FloatArray:
        """Public rows as statistics have columns."""
        flat = self.public.reshape(len(self.public), -1).astype(np.float64)
        shown = [at for at, one in enumerate(self._columns) if one.kind != "gap"]
        return np.clip(flat, self._summary.low, self._summary.high)[:, shown]

    def _model_of(
        self,
        total: FloatArray,
        noise: float,
        counted: Counted,  # noqa: ARG002
    ) -> Learner:
        """Keep the statistics; return what learns naive Bayes' shares at the public rows."""
        self.statistics_ = self._read(total, noise)
        if not self._has_model:
            return self.learner_fn()  # which nobody is given
        return self._labelled(self.statistics_.class_shares(self._public_columns))

    def keep_model(self, model: Learner) -> ArrayRecord | None:
        """Keep the final model, if public rows have made one."""
        return super().keep_model(model) if self._has_model else None

    def without(self, partition_id: int) -> Learner:
        """Return the model of the others; `statistics_` are theirs from then on."""
        return super().without(partition_id)

    def _details(self) -> Metrics:
        return {NUM_COLUMNS: len(self.statistics_.columns)}


STATISTICS_PARTY: Final = SumParty(
    FedStatisticsOptions, Tally, StatisticsPlanner, FedStatistics.tasks
)
