"""Consensus rules that combine the parties' predictions on public rows.

The result of every rule is independent of the order of arrival, to the bit. Means and votes
add predictions one by one and keep only sums, so memory is O(rows x classes) for any number
of parties. Medians, trimmed and robust means need all predictions at once,
O(parties x rows x classes); in return no party, whatever it sends, can pull them far from the
honest majority.

The robust mean is the filter of robust statistics.

Diakonikolas, Kamath, Kane, Li, Moitra, Stewart: Being Robust (in High Dimensions) Can Be
Practical (ICML 2017), with the weights of Hopkins, Li, Zhang: Robust and Heavy-Tailed Mean
Estimation Made Simple (NeurIPS 2020).

Liars who move a mean far must be far from it in one direction, and so make the variance along
it large. As long as it is large, points lose weight in proportion to their squared distance
along that direction, the farthest all of it. While liars cause most of the variance they lose
more weight than honest points, so at most twice their share is removed before the variance is
small. The remaining error is then O(sqrt(share)) standard deviations of the honest points.
Since at most half of all weight is removed, this holds for up to a quarter of liars: 40 of 100
at one distant place keep some weight, and can move the mean arbitrarily far.
"""

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final, Literal, Protocol, TypeAlias, get_args

import numpy as np

from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.aggregation.evidence import (
    Claims,
    believed_sizes,
    capped_scales,
    root_mean_square,
)
from fl_strategies.aggregation.votes import VoteSum
from fl_strategies.errors import require

MOST_TIMES_USUAL: Final = 1.5
"""A deviation is large beyond this multiple of the usual one, by the median distance."""
MOST_LOST: Final = 0.5
"""Largest share of all weight that is removed, however many liars are expected."""
_DEVIATION_OF_MEDIAN: Final = 1.4826
_LEAST_VARIANCE: Final = 1e-12


def filtered_mean(points: FloatArray, share: float) -> FloatArray:
    """Return the mean of points after filtering, for many sets of points at once.

    Parameters
    ----------
    points : (num_sets, num_points, num_dimensions)
    share : float
        Largest share of liars; their number is rounded up.

    Returns
    -------
    array of (num_sets, num_dimensions)

    Examples
    --------
    >>> filtered_mean(np.array([[[0.0], [1.0], [2.0], [1.0], [900.0]]]), 0.2).round(2)
    array([[1.]])
    """
    num_points = points.shape[1]
    weights = np.full(points.shape[:2], 1 / num_points)
    most_liars = math.ceil(share * num_points) / num_points
    least = 1 - min(2 * most_liars, MOST_LOST)
    open_ = np.arange(len(points))
    while len(open_):
        squares, suspicious = _suspicion(points[open_], weights[open_])
        open_, squares = open_[suspicious], squares[suspicious]
        shares = squares / squares.max(axis=1, keepdims=True)
        room, lost = weights[open_].sum(axis=1) - least, (weights[open_] * shares).sum(axis=1)
        # Honest points are what is lost beyond twice the share of liars.
        part = np.clip(room / lost, 0.0, 1.0)
        weights[open_] *= 1 - part[:, None] * shares
        open_ = open_[room > lost]
    return _means(points, weights)


def _suspicion(points: FloatArray, weights: FloatArray) -> tuple[FloatArray, Array]:
    """Return squared distances along the direction of most variance, and whether that is large.

    Points without weight have distance 0.
    """
    away = points - _means(points, weights)[:, None, :]
    along = np.einsum("snd,sd->sn", away, _directions(away, weights))
    squares = np.where(weights > 0, along**2, 0.0)
    variance = (weights * squares).sum(axis=1) / weights.sum(axis=1)
    # The median distance of all points to their median, which few points can move.
    middle = np.median(along, axis=1, keepdims=True)
    usual = _DEVIATION_OF_MEDIAN * np.median(np.abs(along - middle), axis=1)
    large = variance > np.maximum((MOST_TIMES_USUAL * usual) ** 2, _LEAST_VARIANCE)
    return squares, large


def _directions(away: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the direction of largest variance of each set, from the smaller Gram matrix."""
    scaled = np.sqrt(weights)[:, :, None] * away
    if scaled.shape[1] >= scaled.shape[2]:
        return np.asarray(np.linalg.eigh(np.einsum("snd,sne->sde", scaled, scaled))[1][..., -1])
    left = np.linalg.eigh(np.einsum("snd,smd->snm", scaled, scaled))[1][..., -1]
    found = np.einsum("sn,snd->sd", left, scaled)
    lengths = np.linalg.norm(found, axis=1, keepdims=True)
    return np.asarray(found / np.where(lengths > 0, lengths, 1.0))


def _means(points: FloatArray, weights: FloatArray) -> FloatArray:
    total = weights.sum(axis=1, keepdims=True)
    return np.asarray(np.einsum("sn,snd->sd", weights, points) / total)


ConsensusRule: TypeAlias = Literal[
    "mean", "class-weighted", "median", "trimmed-mean", "robust-mean"
]

CONSENSUS_RULES: Final[tuple[str, ...]] = get_args(ConsensusRule)
ROBUST_RULES: Final = ("median", "trimmed-mean", "robust-mean")

MAX_WEIGHT: Final = 2**22
"""Largest weight that a party may have for a class."""
MAX_REPLIES: Final = 2**20
"""Largest number of predictions that a sum can hold without overflow."""

# Values become whole numbers of 40 bits, in two halves: 20 bits of value, 22 of weight and
# 20 of parties fit into 62.
_VALUE_BITS, _HALF_BITS = 40, 20
_CHUNK_CELLS = 1 << 20
_BLOCK_CELLS = 1 << 15
_FIRST_ROWS = 16
_MOST_CHUNKS = 16


class Consensus(Protocol):
    """Accumulates the predictions of many parties on the same rows."""

    @property
    def num_capped(self) -> int:
        """Number of parties whose weight or scale is capped."""

    def add(self, values: Array, weights: IntArray | None = None) -> None:
        """Take one party's predictions (rows, classes), checked before."""

    def result(self) -> FloatArray:
        """Return the consensus, float64 (rows, classes)."""


class ExactSum:
    """A sum of bounded numbers that does not depend on their order."""

    def __init__(self, shape: tuple[int, int], bound: float) -> None:
        self._per_unit = 2.0 ** (_VALUE_BITS - math.ceil(math.log2(bound)))
        self._high = np.zeros(shape, dtype=np.int64)
        self._low = np.zeros(shape, dtype=np.int64)

    def add(self, values: Array, weights: IntArray | None = None) -> None:
        """Add numbers, each times the whole weight of its column."""
        # Some rows at a time, so that temporaries stay in the cache.
        size = max(1, _BLOCK_CELLS // max(self._high.shape[1], 1))
        for start in range(0, len(self._high), size):
            rows = slice(start, start + size)
            scaled = np.multiply(values[rows], np.float64(self._per_unit))
            low = np.rint(scaled, out=scaled).astype(np.int64)
            high = low >> _HALF_BITS
            low &= (1 << _HALF_BITS) - 1
            if weights is not None:
                high *= weights
                low *= weights
            self._high[rows] += high
            self._low[rows] += low

    def total(self) -> FloatArray:
        """Return the sum."""
        total: FloatArray = self._high * 2.0**_HALF_BITS + self._low
        return total / self._per_unit


class MeanConsensus:
    """The mean over parties, exact to ``bound * 2**-40`` and kept as sums.

    Parameters
    ----------
    shape : (rows, classes)
    bound : float
        No value may be larger in magnitude.
    capped : bool
        Whether to scale down a party whose scores are much larger than the median party's.
        Probabilities are bounded and need no cap; logits do.
    """

    def __init__(self, shape: tuple[int, int], *, bound: float, capped: bool = False) -> None:
        self._shape, self._bound, self._capped = shape, bound, capped
        self._sums: dict[int, ExactSum] = {}
        self._scales = Claims(capped_scales)
        self._num_replies = 0

    def add(self, values: Array, weights: IntArray | None = None) -> None:  # noqa: ARG002
        """Take one party's predictions; every party counts the same."""
        self._num_replies = _one_more(self._num_replies)
        group = self._scales.add(root_mean_square(values)) if self._capped else 0
        self._sums.setdefault(group, ExactSum(self._shape, self._bound)).add(values)

    def result(self) -> FloatArray:
        """Return the mean."""
        _check_any(self._num_replies)
        parts, total = self._scales.parts(), np.zeros(self._shape)
        for group in sorted(self._sums):
            total += parts.get(group, 1.0) * self._sums[group].total()
        return total / self._num_replies

    @property
    def num_capped(self) -> int:
        """Number of parties whose scores are scaled down."""
        return self._scales.num_cut


class ClassWeightedConsensus:
    """The mean over parties, weighted class by class.

    A party's weight for a class is meant to be its number of records of that class, so
    that a party that has never seen a class does not affect it. Parties state their weights
    themselves; values far above those of the others are capped (`believed_sizes`). A class
    without any weight takes the plain mean. Parameters are those of `MeanConsensus`.
    """

    def __init__(self, shape: tuple[int, int], *, bound: float, capped: bool = False) -> None:
        self._shape, self._bound, self._capped = shape, bound, capped
        self._plain = MeanConsensus(shape, bound=bound, capped=capped)
        self._scales, self._sizes = Claims(capped_scales), Claims(believed_sizes)
        self._sums: dict[tuple[int, int], ExactSum] = {}
        self._weights: dict[int, IntArray] = {}

    def add(self, values: Array, weights: IntArray | None = None) -> None:
        """Take one party's predictions and its weight for each class, (classes,)."""
        weights = np.ones(self._shape[1], dtype=np.int64) if weights is None else weights
        fits = bool(((weights >= 0) & (weights <= MAX_WEIGHT)).all())
        require(fits, "Consensus", "weights", f"from 0 to {MAX_WEIGHT}", weights)
        self._plain.add(values)
        loud = self._scales.add(root_mean_square(values)) if self._capped else 0
        size = self._sizes.add(float(weights.sum()))
        self._sums.setdefault((loud, size), ExactSum(self._shape, self._bound)).add(
            values, weights
        )
        self._weights[size] = self._weights.get(size, 0) + weights

    def result(self) -> FloatArray:
        """Return the weighted mean of each class."""
        plain, loud, large = self._plain.result(), self._scales.parts(), self._sizes.parts()
        total, weight = np.zeros(self._shape), np.zeros(self._shape[1])
        for group in sorted(self._sums):
            part = loud.get(group[0], 1.0) * large.get(group[1], 1.0)
            total += part * self._sums[group].total()
        for size in sorted(self._weights):
            weight += large.get(size, 1.0) * self._weights[size]
        heavy = weight > 0
        return np.where(heavy, total / np.where(heavy, weight, 1.0), plain)

    @property
    def num_capped(self) -> int:
        """Number of parties whose claimed records or scale is capped."""
        return self._scales.num_cut + self._sizes.num_cut


class RobustConsensus:
    """Coordinate-wise median or trimmed mean over parties, or the robust mean of each row.

    All predictions are kept, as float32; they are combined a few rows at a time.

    Parameters
    ----------
    rule : "median", "trimmed-mean" or "robust-mean"
    trim_fraction : float
        Share of parties that a trimmed mean drops at either end, rounded up: with three or
        more parties at least one. Something always remains. For a robust mean, the largest
        share of liars; see `aggregation.consensus`.
    decode : callable, optional
        Decodes what is added to float32, a few rows at a time; until then it is kept as
        received.
    """

    def __init__(
        self,
        rule: ConsensusRule,
        *,
        trim_fraction: float = 0.2,
        decode: Callable[[Array], FloatArray] | None = None,
    ) -> None:
        require(rule in ROBUST_RULES, "Consensus", "rule", "a robust one", rule)
        fits, limits = 0 <= trim_fraction < 0.5, "at least 0 and below 0.5"
        require(fits, "Consensus", "trim_fraction", limits, trim_fraction)
        self._rule, self._trim_fraction = rule, trim_fraction
        self._decode = decode
        self._replies: list[Array] = []
        self.num_capped = 0

    def add(self, values: Array, weights: IntArray | None = None) -> None:  # noqa: ARG002
        """Take one party's predictions; every party counts the same."""
        _one_more(len(self._replies))
        # A copy, so that the message it came in can go.
        self._replies.append(np.array(values, dtype=None if self._decode else np.float32))

    def result(self) -> FloatArray:
        """Return the median, trimmed mean or robust mean."""
        _check_any(len(self._replies))
        num_rows, num_classes = self._replies[0].shape
        consensus = np.empty((num_rows, num_classes))
        # Of many parties no smaller part of the rows: their number times that of parts
        # would grow with the square of the parties.
        least = math.ceil(num_rows / _MOST_CHUNKS)
        size = max(least, _CHUNK_CELLS // (len(self._replies) * num_classes), 1)
        combine = self._combination()
        # Sums of floats depend on their order, and replies come in any.
        replies = _by_bytes(self._replies)
        decode = self._decode or (lambda values: values)
        for start in range(0, num_rows, size):
            rows = slice(start, start + size)
            values = np.empty((len(replies), *replies[0][rows].shape), dtype=np.float32)
            for place, reply in enumerate(replies):
                values[place] = decode(reply[rows])
            consensus[rows] = combine(values)
        return consensus

    def _combination(self) -> Callable[[FloatArray], FloatArray]:
        """Return the function that reduces (parties, rows, classes) to (rows, classes)."""
        if self._rule == "robust-mean":
            share = self._trim_fraction
            return lambda values: filtered_mean(values.astype(np.float64).swapaxes(0, 1), share)
        count = len(self._replies)
        most = (count - 1) // 2
        trimmed = most if self._rule == "median" else math.ceil(self._trim_fraction * count)
        cut = min(trimmed, most)

        def middle(values: FloatArray) -> FloatArray:
            # Sorted as they came: half as many bytes give the same order.
            kept = np.sort(values, axis=0)[cut : count - cut]
            return np.asarray(kept.astype(np.float64).mean(axis=0))

        return middle


class VoteCounts:
    """Votes for classes, one label per row and party, kept as counts.

    Parameters
    ----------
    shape : (rows, classes)
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape = shape
        self._sizes = Claims(believed_sizes)
        self._plain: VoteSum | None = None
        self._groups: dict[int, IntArray] = {}

    def add(self, labels: IntArray, weights: IntArray | None = None) -> None:
        """Count one party's labels (rows,), each with the party's weight for its class."""
        if weights is None:
            self._plain = self._plain or VoteSum(self._shape)
            self._plain.add(labels)
            return
        group = self._sizes.add(float(weights.sum()))
        if group not in self._groups:
            self._groups[group] = np.zeros(self._shape, dtype=np.int64)
        cells = np.arange(len(labels)) * self._shape[1] + labels
        self._groups[group].reshape(-1)[cells] += weights[labels]

    @property
    def counts(self) -> FloatArray:
        """Votes for each class, with capped weights."""
        parts, total = self._sizes.parts(), np.zeros(self._shape)
        if self._plain is not None:
            total += self._plain.counts
        for group in sorted(self._groups):
            total += parts.get(group, 1.0) * self._groups[group]
        return total

    @property
    def num_capped(self) -> int:
        """Number of parties whose claimed records are capped."""
        return self._sizes.num_cut


def make_consensus(
    rule: ConsensusRule,
    shape: tuple[int, int],
    *,
    bound: float,
    capped: bool = False,
    trim_fraction: float = 0.2,
) -> Consensus:
    """Return an empty consensus of one of the rules; `capped` is for the means.

    Examples
    --------
    >>> consensus = make_consensus("median", (1, 2), bound=1.0)
    >>> for row in ([0.2, 0.8], [0.4, 0.6], [1.0, 0.0]):
    ...     consensus.add(np.array([row]))
    >>> consensus.result().round(6)
    array([[0.4, 0.6]])
    """
    known = f"one of {', '.join(CONSENSUS_RULES)}"
    require(rule in CONSENSUS_RULES, "Consensus", "rule", known, rule)
    if rule == "mean":
        return MeanConsensus(shape, bound=bound, capped=capped)
    if rule == "class-weighted":
        return ClassWeightedConsensus(shape, bound=bound, capped=capped)
    return RobustConsensus(rule, trim_fraction=trim_fraction)


def to_probabilities(rows: FloatArray) -> FloatArray:
    """Return the nearest probabilities to each row, in Euclidean distance.

    Noise, weights and medians produce rows that do not sum to one; rows that do are
    unchanged, up to rounding.

    Examples
    --------
    >>> to_probabilities(np.array([[0.9, 0.5, -3.0], [0.25, 0.25, 0.5]])).round(6)
    array([[0.7 , 0.3 , 0.  ],
           [0.25, 0.25, 0.5 ]])
    """
    ordered = -np.sort(-rows, axis=1)
    counts = np.arange(1, rows.shape[1] + 1)
    excess = (np.cumsum(ordered, axis=1) - 1) / counts
    last = (ordered > excess).sum(axis=1) - 1
    shift = excess[np.arange(len(rows)), last]
    probabilities: FloatArray = np.maximum(rows - shift[:, None], 0.0)
    return probabilities


def _by_bytes(replies: Sequence[Array]) -> list[Array]:
    """Return replies sorted by their bytes, without copies of all of them at once."""
    ordered: list[Array] = []
    for _, alike in groupby(sorted(replies, key=_first_bytes), key=_first_bytes):
        ordered += sorted(alike, key=lambda reply: reply.tobytes())
    return ordered


def _first_bytes(reply: Array) -> bytes:
    return reply[:_FIRST_ROWS].tobytes()


def _one_more(count: int) -> int:
    require(count < MAX_REPLIES, "Consensus", "replies", f"at most {MAX_REPLIES}", count + 1)
    return count + 1


def _check_any(count: int) -> None:
    require(count > 0, "Consensus", "replies", "at least one", count)
