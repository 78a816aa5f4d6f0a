"""Mechanisms: noise and accounting in one, values released together with their charges.

The charges depend only on public settings and the number of rows, never on the values, so
`charges` can be recorded before `release` accesses them.

Noise must be unpredictable, so it comes from the operating system's cryptographic generator and
never from the seed of an experiment. Every function also takes a numpy generator, for tests and
simulations; the events are then ``seeded``, and the accountant gives no guarantee.

Selections (`NoisyMax`, `ConfidentNoisyMax`) release an index or nothing. Their noise is
continuous, by inverse distribution functions of 64 random bits, and serves comparisons only:
its low bits would betray the noised value (Mironov, 2012), so no noised number leaves.

Numbers (`LaplaceScores`, `GaussianScores`, `LaplaceCounts`, `GaussianSums`) leave as whole
multiples of a public grid with discrete noise: a whole number plus a whole number has no low
bits that depend on the noise (the geometric mechanism of Ghosh, Roughgarden and Sundararajan,
2009; the discrete Gaussian of Canonne, Kamath and Steinke, 2020). Its scale is always `GRID`
units: callers that need another scale choose another unit.

Sampling is not perfect: the stated distances between ideal and real probabilities add up over
rows, and the accountant takes 1 + exp(epsilon) times their sum out of delta
(`accountant.sampling_error`).
"""

import decimal
import math
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cache
from typing import ClassVar, TypeAlias

import numpy as np
import scipy
from numpy.typing import NDArray

from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import check_count, check_positive, require, require_data
from fl_strategies.privacy.bounds.theorems import check_sample
from fl_strategies.privacy.events import (
    GaussianEvent,
    LaplaceEvent,
    Noise,
    NoisyMaxEvent,
    PrivacyEvent,
    SubsampleEvent,
    ThresholdEvent,
    Unit,
    check_votes,
)

Source: TypeAlias = np.random.Generator | None
"""Where noise comes from: None is the operating system, and the only one that protects."""
Charges: TypeAlias = tuple[tuple[PrivacyEvent, int], ...]
Words: TypeAlias = NDArray[np.uint64]

GRID = 2**24
"""Scale of discrete noise, in its own units."""
UNANSWERED = -1
"""Label of a row that `ConfidentNoisyMax` does not answer."""
MOST_SUMS = 2**20
"""Largest number of values in one release of `GaussianSums`."""

# A geometric variable of scale GRID exceeds 2 ** 30 with chance exp(-64), about 1e-28.
_GEOMETRIC_BITS = 30
_LARGEST_VOTES = 2.0**53
_LARGEST_SCORE = 1e100
# Counts, as multiples of the noise's unit, must fit into 63 bits.
_LARGEST_COUNT = 2**31
_MOST_ADDED = 2**20
SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-7, 2.0**24
_MOST_COUNTS = 2**12


# Randomness.


def random_words(size: int, rng: Source = None) -> Words:
    """Return `size` independent uniform 64-bit words, (size,)."""
    if rng is not None:
        return rng.integers(0, 2**64 - 1, size=size, dtype=np.uint64, endpoint=True)
    return np.frombuffer(os.urandom(8 * size), dtype=np.uint64)


def _split_sign(words: Words) -> tuple[FloatArray, FloatArray]:
    """Return a sign, +1 or -1, and a uniform number in (0, 1] made of the other 63 bits."""
    sign = 1.0 - 2.0 * (words & np.uint64(1)).astype(np.float64)
    # The half keeps zero out; small numbers keep all their bits, so tails are reached.
    return sign, ((words >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-63


def continuous_laplace(size: int, rng: Source = None) -> FloatArray:
    """Return Laplace noise of scale 1, (size,); for comparisons, never to be released.

    Its distribution function is exact to 2**-52.
    """
    sign, uniform = _split_sign(random_words(size, rng))
    return np.asarray(sign * -np.log(uniform))


def continuous_gaussian(size: int, rng: Source = None) -> FloatArray:
    """Return standard Gaussian noise, (size,); for comparisons, never to be released.

    Its distribution function is exact to 2**-50.
    """
    sign, uniform = _split_sign(random_words(size, rng))
    return np.asarray(sign * -scipy.special.ndtri(uniform / 2))


@cache
def _bit_thresholds() -> tuple[int, ...]:
    """Return, for each binary digit, 2**64 times the chance that it is one.

    The digits of a geometric variable are independent: digit i is one with chance
    ``1 / (1 + exp(2**i / GRID))``. Forty decimals leave an error of 2**-64 per digit.
    """
    with decimal.localcontext(prec=40):
        exponents = [decimal.Decimal(2**i) / GRID for i in range(_GEOMETRIC_BITS)]
        return tuple(int(2**64 / (1 + exponent.exp())) for exponent in exponents)


def _geometric(size: int, rng: Source) -> IntArray:
    """Return whole numbers k >= 0 with chance proportional to ``exp(-k / GRID)``."""
    total = np.zeros(size, dtype=np.int64)
    for digit, threshold in enumerate(_bit_thresholds()):
        ones = random_words(size, rng) < np.uint64(threshold)
        total |= ones.astype(np.int64) << digit
    return total


def discrete_laplace(size: int, rng: Source = None) -> IntArray:
    """Return whole numbers k with chance proportional to ``exp(-|k| / GRID)``, (size,).

    The total variation distance to the exact distribution is below 2**-57 per number.
    """
    return _geometric(size, rng) - _geometric(size, rng)


def discrete_gaussian(size: int, rng: Source = None) -> IntArray:
    """Return whole numbers k with chance proportional to ``exp(-(k / GRID)**2 / 2)``, (size,).

    Discrete Laplace noise is thinned out (Canonne et al., Alg. 3). The total variation distance
    to the exact distribution, and to Gaussian noise rounded to the grid, is below 2**-50 per
    number. Rounding is post-processing, so accounting for exact Gaussian noise is right to that
    distance.
    """
    found: list[IntArray] = []
    missing = size
    while missing > 0:
        # Three of four proposals are accepted.
        proposals = discrete_laplace(math.ceil(1.4 * missing) + 16, rng)
        excess = np.abs(proposals) / GRID - 1
        _, uniform = _split_sign(random_words(proposals.size, rng))
        accepted = proposals[uniform <= np.exp(-excess * excess / 2)]
        found.append(accepted[:missing])
        missing -= found[-1].size
    return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def random_choice(log_weights: FloatArray, rng: Source = None) -> IntArray:
    """Return one column per row, with chance proportional to exp(log_weight), (n,).

    The same as the largest of the entries plus Gumbel noise, but one 63-bit whole number is
    compared with whole thresholds: no logarithm of a uniform number, no ties. The chances
    are exact to 2**-50 per column in total variation.

    Parameters
    ----------
    log_weights : (n, num_columns)
        At most 0, and 0 at least once in every row.
    rng : Generator, optional
    """
    shares = np.cumsum(np.exp(log_weights), axis=1)
    thresholds = (shares[:, :-1] / shares[:, -1:] * 2.0**63).astype(np.uint64)
    words = random_words(len(log_weights), rng) >> np.uint64(1)
    columns: IntArray = np.sum(words[:, None] >= thresholds, axis=1, dtype=np.int64)
    return columns


def random_rows(
    records: int, samples: int, *, replacement: bool, rng: Source = None
) -> IntArray:
    """Return positions of randomly drawn records, (samples,), in random order.

    Every choice is equally likely up to a distance of ``records**2 / 2**64``.
    """
    check_sample("random_rows", records, samples, replacement)
    if replacement:
        return (random_words(samples, rng) % np.uint64(records)).astype(np.int64)
    return np.argsort(random_words(records, rng), kind="stable")[:samples]


# Mechanisms.


@dataclass(frozen=True, eq=False)
class Release:
    """Values that may leave, and all their charges."""

    values: Array
    charges: Charges


class _RowMechanism(ABC):
    """A mechanism that releases row by row, every row at the same cost."""

    def __post_init__(self) -> None:
        # Events check their values, so an impossible mechanism cannot be made.
        _ = self._events

    @property
    @abstractmethod
    def event(self) -> PrivacyEvent:
        """The event of each row if the noise is secret."""

    @property
    def _events(self) -> tuple[PrivacyEvent, ...]:
        return (self.event,)

    def charges(self, num_rows: int, *, seeded: bool = False) -> Charges:
        """Return the charges for releasing `num_rows` rows."""
        check_count(type(self).__name__, "num_rows", num_rows, least=1)
        return tuple((replace(event, seeded=seeded), num_rows) for event in self._events)


def _checked_counts(owner: str, counts: Array, num_classes: int) -> FloatArray:
    check_votes(owner, counts)
    columns = counts.shape[1] == num_classes
    require_data(columns, owner, "votes", f"{num_classes} columns, one per class", counts.shape)
    require_data(len(counts) > 0, owner, "votes", "at least one row", len(counts))
    votes = counts.astype(np.float64)
    whole = bool((votes == np.floor(votes)).all() and votes.max() < _LARGEST_VOTES)
    require_data(whole, owner, "votes", "whole numbers below 2**53", votes.dtype)
    return votes


def _noisy_choice(votes: FloatArray, noise: Noise, scale: float, rng: Source) -> IntArray:
    # Relative to the leader and the noise, all numbers that matter are small and precise.
    gaps = (votes - votes.max(axis=1, keepdims=True)) / scale
    if noise == "gumbel":
        return random_choice(gaps, rng)
    draw = continuous_laplace if noise == "laplace" else continuous_gaussian
    labels: IntArray = np.argmax(gaps + draw(gaps.size, rng).reshape(gaps.shape), axis=1)
    return labels


@dataclass(frozen=True, kw_only=True)
class NoisyMax(_RowMechanism):
    """Release the class with the largest noisy count of every row.

    Gumbel noise is the exponential mechanism and the best choice for few voters. The
    chances of the labels of a row differ from the ideal ones by at most 2**-50 per class
    (Gumbel) or 2**-45 per class (Laplace, Gaussian) in total variation.

    Parameters
    ----------
    noise : "laplace", "gumbel" or "gaussian"
    scale : float
        1 / gamma for Laplace and Gumbel noise, the standard deviation for Gaussian.
    sensitivity : float
        The most by which adding or removing one unit moves a single count.
    unit : "party" or "example"
    num_classes : int

    Examples
    --------
    >>> mechanism = NoisyMax(
    ...     noise="gumbel", scale=0.01, sensitivity=1.0, unit="party", num_classes=3
    ... )
    >>> release = mechanism.release(np.array([[0, 9, 1], [7, 2, 1]]))
    >>> release.values.tolist(), release.charges == mechanism.charges(2)
    ([1, 0], True)
    """

    noise: Noise
    scale: float
    sensitivity: float
    unit: Unit
    num_classes: int

    @property
    def event(self) -> NoisyMaxEvent:
        """The event of each row if the noise is secret."""
        return NoisyMaxEvent(
            unit=self.unit,
            relation="replace-one",
            noise=self.noise,
            scale=self.scale,
            sensitivity=self.sensitivity,
            num_classes=self.num_classes,
        )

    def release(self, counts: Array, rng: Source = None) -> Release:
        """Return a label for each row of `counts` (n, num_classes), as int64 (n,)."""
        votes = _checked_counts("NoisyMax", counts, self.num_classes)
        labels = _noisy_choice(votes, self.noise, self.scale, rng)
        return Release(labels, self.charges(len(votes), seeded=rng is not None))


@dataclass(frozen=True, kw_only=True)
class ConfidentNoisyMax(NoisyMax):
    """Release labels only where the voters agree (Confident-GNMax of PATE).

    A row is answered if its largest count plus Gaussian noise reaches the threshold; every row
    is charged in full, before the votes are read. A row's answer differs from the ideal one by
    at most 2**-45 per class in total variation.

    Parameters
    ----------
    threshold : float
        In votes.
    threshold_scale, scale : float
        Standard deviations of the noise in the test and in the answer.
    sensitivity, unit, num_classes
        See `NoisyMax`.
    """

    noise: Noise = field(default="gaussian", init=False)
    threshold: float
    threshold_scale: float

    def __post_init__(self) -> None:
        finite, owner = math.isfinite(self.threshold), "ConfidentNoisyMax"
        require(finite, owner, "threshold", "finite", self.threshold)
        super().__post_init__()

    @property
    def threshold_event(self) -> ThresholdEvent:
        """The event of the threshold test of every row."""
        return ThresholdEvent(
            unit=self.unit,
            relation="replace-one",
            scale=self.threshold_scale,
            sensitivity=self.sensitivity,
        )

    @property
    def _events(self) -> tuple[PrivacyEvent, ...]:
        return self.threshold_event, self.event

    def release(self, counts: Array, rng: Source = None) -> Release:
        """Return a label or `UNANSWERED` for each row of `counts`, as int64 (n,)."""
        votes = _checked_counts("ConfidentNoisyMax", counts, self.num_classes)
        noise = self.threshold_scale * continuous_gaussian(len(votes), rng)
        answered = np.flatnonzero(votes.max(axis=1) - self.threshold >= -noise)
        labels = np.full(len(votes), UNANSWERED, dtype=np.int64)
        labels[answered] = _noisy_choice(votes[answered], self.noise, self.scale, rng)
        return Release(labels, self.charges(len(votes), seeded=rng is not None))


@dataclass(frozen=True, kw_only=True)
class _NoisyScores(_RowMechanism):
    """Means of clipped rows on a grid; replacing a unit changes one contributor's row."""

    bound: float
    scale: float
    num_values: int
    unit: Unit
    num_contributors: int = 1

    _norm: ClassVar[int]
    # Rounding moves each of two neighbours by half a unit of the grid per entry; as much
    # again is allowed for floating-point errors.
    _units: ClassVar[int] = 2

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_positive(owner, "bound", self.bound)
        check_count(owner, "num_values", self.num_values, least=1)
        check_count(owner, "num_contributors", self.num_contributors, least=1)
        # Rounding errors of clipping and averaging must stay below half a grid unit.
        operations = self.num_contributors + self.num_values + 8
        least = self.bound * operations * 2.0**-26
        require(self.scale >= least, owner, "scale", f"at least {least:.2g}", self.scale)
        super().__post_init__()

    def _sensitivity(self) -> float:
        unit = self.scale / GRID
        rounding = self._units * unit * self.num_values ** (1 / self._norm)
        return float(2 * self.bound / self.num_contributors + rounding)

    def _checked(self, scores: Array) -> FloatArray:
        owner, ends = type(self).__name__, (self.num_contributors, self.num_values)
        stack = scores[None] if scores.ndim == 2 and self.num_contributors == 1 else scores
        shaped = stack.ndim == 3 and stack.shape[::2] == ends and stack.size > 0
        rule = f"of shape ({ends[0]}, rows >= 1, {ends[1]})"
        require_data(shaped, owner, "scores", rule, scores.shape)
        require_data(stack.dtype.kind in "iuf", owner, "scores", "numbers", stack.dtype)
        rows = stack.astype(np.float64)
        small = bool((np.abs(rows) <= _LARGEST_SCORE).all())
        require_data(small, owner, "scores", f"within {_LARGEST_SCORE:g}", "NaN or more")
        return rows

    def release(self, scores: Array, rng: Source = None) -> Release:
        """Return noisy means of clipped rows, (n, num_values).

        Parameters
        ----------
        scores : (num_contributors, n, num_values)
            Or (n, num_values) if there is one contributor.
        rng : Generator, optional
        """
        rows = self._checked(scores)
        norms = np.linalg.norm(rows, ord=self._norm, axis=-1, keepdims=True)
        mean = (rows / np.maximum(1.0, norms / self.bound)).mean(axis=0)
        grid = self.scale / GRID
        steps = np.rint(mean / grid).astype(np.int64)
        noise = discrete_laplace if self._norm == 1 else discrete_gaussian
        steps += noise(steps.size, rng).reshape(steps.shape)
        return Release(steps * grid, self.charges(len(steps), seeded=rng is not None))


@dataclass(frozen=True, kw_only=True)
class LaplaceScores(_NoisyScores):
    """Release means of rows clipped in L1 norm, with discrete Laplace noise.

    Parameters
    ----------
    bound : float
        Public. Rows of a larger norm are scaled down to it.
    scale : float
        Scale of the noise on every entry.
    num_values : int
        Entries of a row.
    unit : "party" or "example"
    num_contributors : int
        Public. Each row is the mean over this many; one unit is in one of them, and
        replacing it moves the mean by at most ``2 * bound / num_contributors``.
    """

    _norm = 1
    # One more makes continuous noise, whose loss is known, worse than what is drawn.
    _units = 3

    @property
    def event(self) -> LaplaceEvent:
        """The event of each row if the noise is secret."""
        return LaplaceEvent(
            unit=self.unit,
            relation="replace-one",
            scale=self.scale,
            l1_sensitivity=self._sensitivity(),
            num_values=self.num_values,
        )


@dataclass(frozen=True, kw_only=True)
class GaussianScores(_NoisyScores):
    """Release means of rows clipped in L2 norm, with discrete Gaussian noise.

    Parameters are those of `LaplaceScores`; ``scale`` is the standard deviation.
    """

    _norm = 2

    @property
    def event(self) -> GaussianEvent:
        """The event of each row if the noise is secret."""
        return GaussianEvent(
            unit=self.unit,
            relation="replace-one",
            scale=self.scale,
            l2_sensitivity=self._sensitivity(),
            num_values=self.num_values,
        )


def _require_whole(owner: str, name: str, values: Array, most: int, hint: str = "") -> None:
    whole = values.dtype.kind in "iu" and values.size > 0
    require_data(whole, owner, name, f"whole numbers{hint}", values.dtype)
    require_data(values.size <= most, owner, name, f"at most {most}", values.size)


@dataclass(frozen=True, kw_only=True)
class LaplaceCounts:
    """Release the number of examples per label, with discrete Laplace noise.

    Other whole numbers from 0 to 2**31 will do, at most 4096 at once; they are clipped there.
    For sums of columns, clip each to a box and count whole steps from its lower end: with s
    steps per box, an example that changes its label moves up to 2s steps per column.

    Parameters
    ----------
    epsilon : float
        Cost of the whole vector of counts if an example is replaced. Where `halved`, a ledger
        states half of it, the cost if one is blanked, and its statement says so.
    l1_sensitivity : float
        The most by which replacing one example moves the counts: 2 if an example has one
        label, the number of labels if it may have any of them.
    halved : bool
        Whether blanking an example moves the counts half as far as replacing it. It does
        not if a replacement can only add labels, or only remove them.

    Examples
    --------
    >>> counts = LaplaceCounts(epsilon=100.0, l1_sensitivity=2.0)
    >>> np.rint(counts.release(np.array([4, 0, 9])).values)
    array([4., 0., 9.])
    """

    epsilon: float
    l1_sensitivity: float
    halved: bool = True

    def __post_init__(self) -> None:
        """Check the settings."""
        check_positive("LaplaceCounts", "epsilon", self.epsilon)
        check_positive("LaplaceCounts", "l1_sensitivity", self.l1_sensitivity)
        ratio = self.l1_sensitivity / self.epsilon
        possible = SMALLEST_SCALE <= ratio <= _LARGEST_SCALE
        rule = "from sensitivity / 2**24 to sensitivity * 2**7"
        require(possible, "LaplaceCounts", "epsilon", rule, self.epsilon)

    @property
    def scale(self) -> float:
        """Scale of the noise on every count: a power of two, so that counts lie on its grid.

        It is the next one from ``l1_sensitivity / epsilon``, so up to twice that.
        """
        return float(2.0 ** np.ceil(np.log2(self.l1_sensitivity / self.epsilon)))

    def charges(self, *, seeded: bool = False) -> Charges:
        """Return the charges for one vector of counts."""
        # One unit of the grid more makes continuous noise worse than what is drawn.
        moved = self.l1_sensitivity * (1 + self.scale / GRID)
        event = LaplaceEvent(
            unit="example",
            relation="add-remove-one" if self.halved else "replace-one",
            scale=self.scale,
            l1_sensitivity=moved / 2 if self.halved else moved,
            num_values=_MOST_COUNTS,
            seeded=seeded,
        )
        return ((event, 1),)

    def release(self, counts: Array, rng: Source = None) -> Release:
        """Return noisy counts, none below 0, as float64 of the same shape."""
        hint = ", such as steps of a box in place of real ones"
        _require_whole("LaplaceCounts", "counts", counts, _MOST_COUNTS, hint)
        # Clipped, not refused: a refusal could depend on a record; clipping moves no two apart.
        inside = np.clip(counts, 0, _LARGEST_COUNT - 1).astype(np.int64)
        units_per_record = int(GRID / self.scale)
        noisy = inside * units_per_record
        noisy += discrete_laplace(counts.size, rng).reshape(counts.shape)
        values = np.maximum(noisy, 0) / units_per_record
        return Release(values, self.charges(seeded=rng is not None))


@dataclass(frozen=True, kw_only=True)
class GaussianSums:
    """Release integers, such as a histogram, with discrete Gaussian noise on each.

    Parameters
    ----------
    scale : float
        Requested standard deviation; the drawn noise is as large or slightly larger, so that
        one is a multiple of the noise's unit and nothing has to be rounded.
    l2_sensitivity : float
        The most by which replacing one unit moves the values: the square root of 2 if a record
        leaves one count and enters another.
    unit : "party" or "example"

    Examples
    --------
    >>> counts = GaussianSums(scale=0.01, l2_sensitivity=2**0.5, unit="example")
    >>> np.rint(counts.release(np.array([4, 1, -9])).values)
    array([ 4.,  1., -9.])
    """

    scale: float
    l2_sensitivity: float
    unit: Unit

    def __post_init__(self) -> None:
        """Check the settings."""
        check_positive("GaussianSums", "l2_sensitivity", self.l2_sensitivity)
        possible, rule = SMALLEST_SCALE <= self.scale <= GRID, "from 2**-7 to 2**24"
        require(possible, "GaussianSums", "scale", rule, self.scale)

    @property
    def _units_per_one(self) -> int:
        return int(GRID / self.scale)

    @property
    def drawn_scale(self) -> float:
        """Standard deviation of the noise that is drawn."""
        return GRID / self._units_per_one

    def charges(self, num_sums: int, *, seeded: bool = False) -> Charges:
        """Return the charges for one release, which do not depend on its values."""
        event = GaussianEvent(
            unit=self.unit,
            relation="replace-one",
            scale=self.drawn_scale,
            l2_sensitivity=self.l2_sensitivity,
            num_values=num_sums,
            seeded=seeded,
        )
        return ((event, 1),)

    @property
    def grain(self) -> float:
        """The unit of which the noise is an integer multiple."""
        return 1 / self._units_per_one

    def in_units(self, fractions: FloatArray) -> IntArray:
        """Return numbers from 0 to 1 as the nearest whole multiples of the noise's unit."""
        return np.asarray(np.rint(fractions * self._units_per_one), dtype=np.int64)

    def release(
        self, sums: Array, rng: Source = None, *, units: IntArray | None = None
    ) -> Release:
        """Return noisy numbers as float64 of the same shape; beyond 2**31 they are cut.

        Parameters
        ----------
        sums : whole numbers
        rng : Generator, optional
            Only for noise that protects nobody.
        units : array of the shape of `sums`, optional
            Whole units of the noise to be added, 0 to 2**20 times those of one, where
            numbers are no whole ones.
        """
        _require_whole("GaussianSums", "sums", sums, MOST_SUMS)
        # Clipped, not refused: a refusal could depend on a record; clipping moves no two apart.
        near = _LARGEST_COUNT + (0 if units is None else _MOST_ADDED)
        noisy = np.clip(sums, -near, near).astype(np.int64) * self._units_per_one
        if units is not None:
            largest = _LARGEST_COUNT * self._units_per_one
            noisy = np.clip(noisy + units, -largest, largest)
        noisy += discrete_gaussian(sums.size, rng).reshape(sums.shape)
        charges = self.charges(sums.size, seeded=rng is not None)
        return Release(noisy / self._units_per_one, charges)


@dataclass(frozen=True, kw_only=True)
class SubsampleOnce:
    """Sample the records that will be used, once and for all (noise-free privacy).

    Keep the sample: a fresh one in a second run is a second event. The guarantee also ends
    if anything else accesses the records outside the sample.

    Parameters
    ----------
    records, samples : int
    replacement : bool
        Whether a record may be drawn more than once.
    """

    records: int
    samples: int
    replacement: bool

    def __post_init__(self) -> None:
        _ = self.event  # which checks them

    @property
    def event(self) -> SubsampleEvent:
        """The event of the sample if it is secret."""
        return SubsampleEvent(
            records=self.records, samples=self.samples, replacement=self.replacement
        )

    def charges(self, *, seeded: bool = False) -> Charges:
        """Return the charges for the sample."""
        return ((replace(self.event, seeded=seeded), 1),)

    def release(self, rng: Source = None) -> Release:
        """Return the positions of the sampled records, as int64 (samples,)."""
        rows = random_rows(self.records, self.samples, replacement=self.replacement, rng=rng)
        return Release(rows, self.charges(seeded=rng is not None))
