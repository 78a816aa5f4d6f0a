"""Mechanisms: noise and accounting in one, values released together with their charges.

The charges depend only on public settings and the number of rows, never on the values, so
`charges` can be recorded before `release` accesses them. Noise comes from the operating
system unless a generator is given; then the events are ``seeded``, and the accountant gives
no guarantee.

Selections (`NoisyMax`, `ConfidentNoisyMax`) release an index or nothing, so their noise may
be floating point: no noised number leaves. Scores (`LaplaceScores`, `GaussianScores`) leave
as whole multiples of a public grid with discrete noise. Sampling is not perfect: the stated
distances between ideal and real probabilities add up over rows, and the accountant takes
1 + exp(epsilon) times their sum out of delta (`losses.sampling_error`).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import numpy as np

from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import require, require_data
from fl_strategies.privacy import secure
from fl_strategies.privacy._numeric import check_count, check_positive, check_votes
from fl_strategies.privacy.events import (
    GaussianEvent,
    LaplaceEvent,
    Noise,
    NoisyMaxEvent,
    PrivacyEvent,
    SubsampleEvent,
    ThresholdEvent,
    Unit,
)

Charges: TypeAlias = tuple[tuple[PrivacyEvent, int], ...]

UNANSWERED = -1
"""Label of a row that `ConfidentNoisyMax` does not answer."""

_LARGEST_COUNT = 2.0**53
_LARGEST_SCORE = 1e100


@dataclass(frozen=True, eq=False)
class Release:
    """Values that may leave, and all their charges.

    Parameters
    ----------
    values : array
    charges : tuple of (event, count)
    """

    values: Array
    charges: Charges


def _charge(event: PrivacyEvent, count: int, seeded: bool) -> tuple[PrivacyEvent, int]:
    return (replace(event, seeded=True) if seeded else event), count


def _checked_counts(owner: str, counts: Array, num_classes: int) -> FloatArray:
    check_votes(owner, counts)
    columns = counts.shape[1] == num_classes
    require_data(columns, owner, "votes", f"{num_classes} columns, one per class", counts.shape)
    require_data(len(counts) > 0, owner, "votes", "at least one row", len(counts))
    votes = counts.astype(np.float64)
    whole = bool((votes == np.floor(votes)).all() and votes.max() < _LARGEST_COUNT)
    require_data(whole, owner, "votes", "whole numbers below 2**53", votes.dtype)
    return votes


def _noisy_choice(
    votes: FloatArray, noise: Noise, scale: float, rng: np.random.Generator | None
) -> IntArray:
    # Relative to the leader and the noise, all numbers that matter are small and precise.
    gaps = (votes - votes.max(axis=1, keepdims=True)) / scale
    if noise == "gumbel":
        return secure.random_choice(gaps, rng)
    draw = secure.continuous_laplace if noise == "laplace" else secure.continuous_gaussian
    labels: IntArray = np.argmax(gaps + draw(gaps.size, rng).reshape(gaps.shape), axis=1)
    return labels


@dataclass(frozen=True, kw_only=True)
class NoisyMax:
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

    def __post_init__(self) -> None:
        # An event checks its values, so an impossible mechanism cannot be made.
        _ = self.event

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

    def charges(self, num_rows: int, *, seeded: bool = False) -> Charges:
        """Return the charges for releasing `num_rows` labels."""
        check_count("NoisyMax", "num_rows", num_rows, least=1)
        return (_charge(self.event, num_rows, seeded),)

    def release(self, counts: Array, rng: np.random.Generator | None = None) -> Release:
        """Return a label for each row of `counts` (n, num_classes), as int64 (n,)."""
        votes = _checked_counts("NoisyMax", counts, self.num_classes)
        labels = _noisy_choice(votes, self.noise, self.scale, rng)
        return Release(labels, self.charges(len(votes), seeded=rng is not None))


@dataclass(frozen=True, kw_only=True)
class ConfidentNoisyMax:
    """Release labels only where the voters agree (Confident-GNMax of PATE).

    A row is answered if its largest count plus Gaussian noise reaches the threshold; the
    charge is fixed before the votes are read and does not depend on them. A row's answer
    differs from the ideal one by at most 2**-45 per class in total variation.

    Parameters
    ----------
    threshold : float
        In votes.
    threshold_scale, scale : float
        Standard deviations of the noise in the test and in the answer.
    sensitivity : float
        The most by which adding or removing one unit moves a single count.
    unit : "party" or "example"
    num_classes : int
    """

    threshold: float
    threshold_scale: float
    scale: float
    sensitivity: float
    unit: Unit
    num_classes: int

    def __post_init__(self) -> None:
        owner = "ConfidentNoisyMax"
        require(math.isfinite(self.threshold), owner, "threshold", "finite", self.threshold)
        _ = self.threshold_event, self.event

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
    def event(self) -> NoisyMaxEvent:
        """The event of an answer."""
        return NoisyMaxEvent(
            unit=self.unit,
            relation="replace-one",
            noise="gaussian",
            scale=self.scale,
            sensitivity=self.sensitivity,
            num_classes=self.num_classes,
        )

    def charges(self, num_rows: int, *, seeded: bool = False) -> Charges:
        """Return the largest possible charges for `num_rows` rows, which are always charged."""
        check_count("ConfidentNoisyMax", "num_rows", num_rows, least=1)
        return (
            _charge(self.threshold_event, num_rows, seeded),
            _charge(self.event, num_rows, seeded),
        )

    def release(self, counts: Array, rng: np.random.Generator | None = None) -> Release:
        """Return a label or `UNANSWERED` for each row of `counts`, as int64 (n,)."""
        votes = _checked_counts("ConfidentNoisyMax", counts, self.num_classes)
        noise = self.threshold_scale * secure.continuous_gaussian(len(votes), rng)
        answered = np.flatnonzero(votes.max(axis=1) - self.threshold >= -noise)
        labels = np.full(len(votes), UNANSWERED, dtype=np.int64)
        labels[answered] = _noisy_choice(votes[answered], "gaussian", self.scale, rng)
        return Release(labels, self.charges(len(votes), seeded=rng is not None))


@dataclass(frozen=True, kw_only=True)
class _NoisyScores(ABC):
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
        _ = self.event

    @property
    @abstractmethod
    def event(self) -> PrivacyEvent:
        """The event of each row if the noise is secret."""

    @abstractmethod
    def _noise(self, size: int, rng: np.random.Generator | None) -> IntArray: ...

    def _sensitivity(self) -> float:
        unit = self.scale / secure.GRID
        rounding = self._units * unit * self.num_values ** (1 / self._norm)
        return float(2 * self.bound / self.num_contributors + rounding)

    def charges(self, num_rows: int, *, seeded: bool = False) -> Charges:
        """Return the charges for releasing `num_rows` rows."""
        check_count(type(self).__name__, "num_rows", num_rows, least=1)
        return (_charge(self.event, num_rows, seeded),)

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

    def release(self, scores: Array, rng: np.random.Generator | None = None) -> Release:
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
        grid = self.scale / secure.GRID
        steps = np.rint(mean / grid).astype(np.int64)
        steps += self._noise(steps.size, rng).reshape(steps.shape)
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

    def _noise(self, size: int, rng: np.random.Generator | None) -> IntArray:
        return secure.discrete_laplace(size, rng)


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

    def _noise(self, size: int, rng: np.random.Generator | None) -> IntArray:
        return secure.discrete_gaussian(size, rng)


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
        _ = self.event

    @property
    def event(self) -> SubsampleEvent:
        """The event of the sample if it is secret."""
        return SubsampleEvent(
            records=self.records, samples=self.samples, replacement=self.replacement
        )

    def charges(self, *, seeded: bool = False) -> Charges:
        """Return the charges for the sample."""
        return (_charge(self.event, 1, seeded),)

    def release(self, rng: np.random.Generator | None = None) -> Release:
        """Return the positions of the sampled records, as int64 (samples,)."""
        rows = secure.random_rows(
            self.records, self.samples, replacement=self.replacement, rng=rng
        )
        return Release(rows, self.charges(seeded=rng is not None))
