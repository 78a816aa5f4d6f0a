"""Noise on scores and votes, given by its scale or calibrated to a target epsilon.

One description of votes serves both sides: the server of FedKT-L1, where a unit is a party and
moves a count by s, and a party of FedKT-L2, where a unit is an example and moves a count by
one. The chances that labels survive noise, at the end, decide when noise is refused.

Scores of all public rows and classes are released, so their cost is high. With 20 parties of
equal weight, 1000 rows of 10 classes, scores clipped at 10 and Laplace noise of scale 1, every
entry costs epsilon 1 and there are ten thousand entries.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final, Literal, TypeAlias, get_args

import numpy as np
import scipy

from fl_strategies._util import Array, FloatArray, IntArray, derive_rng
from fl_strategies.errors import InvalidParameter, check_delta, check_positive, require
from fl_strategies.options import Options, option
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.bounds.moments import (
    data_dependent_epsilon,
    gnmax_rdp,
    threshold_rdp,
)
from fl_strategies.privacy.bounds.theorems import default_orders, rdp_to_epsilon
from fl_strategies.privacy.events import GaussianEvent, Noise, Unit
from fl_strategies.privacy.ledger import DEFAULT_DELTA, cost_of
from fl_strategies.privacy.mechanisms import (
    MOST_SUMS,
    SMALLEST_SCALE,
    Charges,
    ConfidentNoisyMax,
    GaussianScores,
    GaussianSums,
    LaplaceScores,
    NoisyMax,
)

logger = logging.getLogger("flwr.fl_strategies")

_LEAST_SCALE, _LARGEST_SCALE = 1e-9, 1e12
_TOLERANCE = 1e-6


def calibrate_scale(
    make_entries: Callable[[float], Sequence[Entry]],
    target_epsilon: float,
    delta: float,
    *,
    num_batches: int = 1,
    least: float = _LEAST_SCALE,
) -> float:
    """Return the smallest scale of noise that meets the target, to six digits.

    Parameters
    ----------
    make_entries : callable
        Maps a scale to the (event, count) pairs of one batch. More scale must cost less.
    target_epsilon, delta : float
    num_batches : int
        Number of such batches, each released after the answers of those before it.
    least : float
        Smallest scale that the mechanism supports.

    Returns
    -------
    scale : float
        One for which a ledger's epsilon is at most `target_epsilon`, never slightly more.

    Raises
    ------
    InvalidParameter
        If no noise is enough, because other events already cost more.

    Examples
    --------
    >>> from fl_strategies.privacy.events import NoisyMaxEvent
    >>> def votes(scale):
    ...     return [(NoisyMaxEvent(unit="party", relation="replace-one", noise="gumbel",
    ...         scale=scale, sensitivity=1.0, num_classes=10), 40)]
    >>> round(calibrate_scale(votes, 0.934913, 1e-5), 3)
    25.0
    """
    owner = "calibrate_scale"
    check_positive(owner, "target_epsilon", target_epsilon)
    check_delta(owner, delta)

    def cost(scale: float) -> float:
        return cost_of([make_entries(scale)] * num_batches, delta)

    def enough(scale: float) -> bool:
        return cost(scale) <= target_epsilon

    if not enough(_LARGEST_SCALE):
        raise InvalidParameter(
            f"{owner}: target_epsilon must be at least {cost(_LARGEST_SCALE):.6g}, the least "
            f"that these events cost at delta {delta:g}, got {target_epsilon:g}."
        )
    high = max(1.0, least)
    while not enough(high):
        high *= 2
    low = max(high / 2, least)
    while low > least and enough(low):
        low, high = max(low / 2, least), low
    if low == least and enough(least):
        return least
    while high / low > 1 + _TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


@lru_cache(maxsize=256)
def calibrated_sums(
    target_epsilon: float,
    delta: float,
    *,
    l2_sensitivity: float,
    unit: Unit,
    num_sums: int = MOST_SUMS,
) -> GaussianSums:
    """Return the smallest noise on this many sums that meets a target.

    The cost of a release does not depend on their number, except for imperfect sampling.

    Examples
    --------
    >>> counts = calibrated_sums(1.0, 1e-5, l2_sensitivity=2**0.5, unit="example")
    >>> round(counts.scale, 2)
    5.28
    """

    def entries(scale: float) -> Charges:
        event = GaussianEvent(
            unit=unit,
            relation="replace-one",
            scale=scale,
            l2_sensitivity=l2_sensitivity,
            num_values=num_sums,
        )
        return ((event, 1),)

    scale = calibrate_scale(entries, target_epsilon, delta, least=SMALLEST_SCALE)
    return GaussianSums(scale=scale, l2_sensitivity=l2_sensitivity, unit=unit)


def require_useful_signal(
    owner: str, words: str, *, accepted: bool, advice_of: Callable[[], str] = str
) -> None:
    """Raise if noise outweighs the signal, so that epsilon would be spent for nothing.

    `words` describe such noise, and are empty if there is none; `advice_of` then returns
    settings that would work. If the noise is accepted, the same is logged as a warning.
    """
    if not words:
        return
    usual = "Ask for fewer answers, have more voters, or allow a larger epsilon"
    advice = advice_of() or usual
    if not accepted:
        raise InvalidParameter(
            f"{owner}: noise must be weaker than what it protects, or accepted "
            f"(accept_noise), got noise of {words}. {advice}."
        )
    logger.warning("%s: noise of %s outweighs the answers. %s.", owner, words, advice)


@dataclass(frozen=True, kw_only=True)
class NoiseSpec(Options):
    """Noise given by its scale (gamma or sigma) or by a target epsilon.

    Parameters
    ----------
    noise : str
        Subclasses define the kinds of noise.
    gamma : float, optional
        Inverse scale of Gumbel or Laplace noise: larger means less noise.
    sigma : float, optional
        Standard deviation of Gaussian noise.
    target_epsilon : float, optional
        Instead of gamma or sigma: the smallest noise that meets it is used.
    """

    noise: str
    gamma: float | None = option(
        None, "inverse scale of gumbel or laplace noise; 0: not given", above=0
    )
    sigma: float | None = option(None, "deviation of gaussian noise; 0: not given", above=0)
    target_epsilon: float | None = option(
        None, "calibrate the noise to it; 0: not given", above=0
    )

    def __post_init__(self) -> None:
        """Check that the scale is given exactly once, by the parameter of its kind of noise."""
        super().__post_init__()
        right, wrong = ("sigma", "gamma") if self.is_gaussian else ("gamma", "sigma")
        self.require(wrong, getattr(self, wrong) is None, f"omitted for {self.noise} noise")
        given, name = [getattr(self, right), self.target_epsilon], f"{right} or target_epsilon"
        once = sum(value is not None for value in given) == 1
        require(once, self._owner(), name, "given, one of the two", given)

    @property
    def is_gaussian(self) -> bool:
        """Whether the strength is a standard deviation."""
        return self.noise.endswith("gaussian")

    @property
    def given_scale(self) -> float | None:
        """The scale of the noise, unless it follows from a target."""
        if self.target_epsilon is not None:
            return None
        return self.sigma if self.is_gaussian else 1 / float(self.gamma or 1)


@dataclass(frozen=True, kw_only=True)
class ReleaseSpec(NoiseSpec):
    """Noise together with the delta of its guarantee.

    Parameters
    ----------
    delta : float
    seeded_noise : bool
        Draw noise from the experiment's seed, for reproducible simulations. There is no
        guarantee then: epsilon is infinite.
    """

    delta: float = option(DEFAULT_DELTA, "delta of every epsilon", above=0, below=1)
    seeded_noise: bool = option(False, "repeatable noise, which protects nobody")

    def rng(self, seed: int, *path: str | int) -> np.random.Generator | None:
        """Return the source of noise: the operating system unless noise is seeded."""
        return derive_rng(seed, "noise", *path) if self.seeded_noise else None


ScoreNoise: TypeAlias = Literal["laplace", "gaussian"]
ScoreMechanism: TypeAlias = LaplaceScores | GaussianScores


@dataclass(frozen=True, kw_only=True)
class ScorePrivacy(ReleaseSpec):
    """The noise on scores; see `NoiseSpec`.

    Parameters
    ----------
    noise : "laplace" or "gaussian"
        Laplace noise is FedKD's; Gaussian noise costs far less for many entries.
    """

    noise: ScoreNoise = option("laplace", "kind of noise on scores")

    def mechanism(
        self,
        *,
        unit: Unit,
        bound: float,
        num_values: int,
        num_contributors: int,
        num_rows: int,
        besides: Sequence[Entry] = (),
    ) -> ScoreMechanism:
        """Return the mechanism for a number of rows, calibrated if a target was given.

        Laplace noise is accounted entry by entry, Gaussian noise row by row. Entries are
        clipped at the public `bound`, and for Gaussian noise the norms of rows too. `num_rows`,
        the total that will be released, and `besides`, any other releases within the target,
        only determine the scale of a calibrated mechanism.
        """

        def with_scale(scale: float) -> ScoreMechanism:
            kind = GaussianScores if self.noise == "gaussian" else LaplaceScores
            width = num_values if self.noise == "gaussian" else 1
            return kind(
                bound=bound,
                scale=scale,
                num_values=width,
                unit=unit,
                num_contributors=num_contributors,
            )

        if self.target_epsilon is None:
            return with_scale(float(self.given_scale or 0))

        def entries(scale: float) -> Sequence[Entry]:
            mechanism = with_scale(scale)
            rows = num_rows * num_values // mechanism.num_values
            return [*mechanism.charges(rows), *besides]

        return with_scale(calibrate_scale(entries, self.target_epsilon, self.delta))

    def charges(self, mechanism: ScoreMechanism, num_entries: int) -> Sequence[Entry]:
        """Return the charges for releasing this many entries."""
        rows = num_entries // mechanism.num_values
        return mechanism.charges(rows, seeded=self.seeded_noise)


_GRID: Final = (np.arange(4096) + 0.5) / 4096
_ROWS_AT_ONCE: Final = 2**22


def chance_kept(
    noise: Noise, gaps: Array, scale: float, times: Array | None = None
) -> FloatArray:
    """Return the probability that the leading class is still the largest after noise.

    Parameters
    ----------
    noise : "gumbel", "laplace" or "gaussian"
        Gumbel noise by its closed form, a softmax; the others by quadrature.
    gaps : (n, num_gaps)
        Lead of the first class over each other class.
    scale : float
    times : (num_gaps,), optional
        Number of classes that each gap stands for; one by default.

    Examples
    --------
    >>> lead = np.array([[0.0], [1.0], [3.0]])
    >>> [chance_kept(noise, lead, 1.0).round(3).tolist() for noise in ("gumbel", "gaussian")]
    [[0.5, 0.731, 0.953], [0.5, 0.76, 0.983]]
    """
    ahead = np.asarray(gaps, dtype=np.float64) / scale
    power = np.ones(ahead.shape[1]) if times is None else np.asarray(times, dtype=np.float64)
    if noise == "gumbel":
        return np.asarray(1 / (1 + np.exp(-ahead) @ power))
    step = max(1, _ROWS_AT_ONCE // (_GRID.size * ahead.shape[1]))
    parts = [ahead[start : start + step] for start in range(0, len(ahead), step)]
    return np.concatenate([_by_quadrature(noise, part, power) for part in parts])


def _by_quadrature(noise: Noise, ahead: FloatArray, power: FloatArray) -> FloatArray:
    # Noise of the leading class at the middle of equally likely intervals.
    if noise == "gaussian":
        others_below = scipy.special.ndtr(scipy.special.ndtri(_GRID) + ahead[:, :, None])
    else:
        quantiles = np.where(_GRID < 0.5, np.log(2 * _GRID), -np.log(2 * (1 - _GRID)))
        values = quantiles + ahead[:, :, None]
        tail = np.exp(-np.abs(values)) / 2
        others_below = np.where(values < 0, tail, 1 - tail)
    return np.asarray((others_below ** power[:, None]).prod(axis=1).mean(axis=1))


def chance_of_plurality(votes: Sequence[int], kept: float, num_classes: int) -> float:
    """Return the probability that randomised voters still elect the leading class.

    Every voter names its own class with probability `kept` and the others with equal
    probability; ties are broken at random. Exact for two classes. For more, each voter is
    modelled as either truthful or uniformly random, with independent (Poisson) numbers of
    random answers per class, which preserves the means and variances of all leads.

    Parameters
    ----------
    votes : sequence of int
        Voters for the leading class, the second and so on; the remaining classes have none.
    kept : float
    num_classes : int

    Examples
    --------
    >>> [round(chance_of_plurality([7, 3], kept, 2), 3) for kept in (0.5, 0.7, 1.0)]
    [0.5, 0.704, 1.0]
    """
    first, total, moved = votes[0], sum(votes), (1 - kept) / (num_classes - 1)
    if num_classes == 2:
        law = np.convolve(_binomial(first, kept), _binomial(total - first, moved))
        counts = np.arange(total + 1)
        return float(law[2 * counts > total].sum() + law[2 * counts == total].sum() / 2)
    sizes, times = np.unique([*votes[1:], 0], return_counts=True)
    times[0] += num_classes - len(votes) - 1
    loyal = max(kept - moved, 0.0)
    blind = scipy.stats.poisson.pmf(np.arange(total + 1), (1 - loyal) * total / num_classes)
    laws = [np.convolve(_binomial(own, loyal), blind)[: total + 1] for own in sizes.tolist()]
    leading = np.convolve(_binomial(first, loyal), blind)[: total + 1]
    # Sharing a tie with k others is the integral of s**k; so many nodes have it exactly.
    nodes, weights = np.polynomial.legendre.leggauss(min(num_classes, 64) // 2 + 1)
    won = 0.0
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        behind = np.ones(total + 1)
        for law, power in zip(laws, times, strict=True):
            behind *= (np.cumsum(law) - (1 - node) * law) ** power
        won += weight * float((leading * behind).sum())
    return won


def _binomial(number: int, chance: float) -> FloatArray:
    return np.asarray(scipy.stats.binom.pmf(np.arange(number + 1), number, chance))


VoteNoise: TypeAlias = Literal["gumbel", "laplace", "gaussian", "confident-gaussian"]
VoteMechanism: TypeAlias = NoisyMax | ConfidentNoisyMax

VOTE_NOISES: tuple[str, ...] = get_args(VoteNoise)


@dataclass(frozen=True, kw_only=True)
class VotePrivacy(ReleaseSpec):
    """Noise on votes and the unit that it protects; see `NoiseSpec`.

    Parameters
    ----------
    level : "L1" or "L2"
        Noise at the server, which protects parties, or at each party, for examples.
    noise : "gumbel", "laplace", "gaussian" or "confident-gaussian"
        Gumbel noise is the exponential mechanism and has the lowest cost at equal accuracy;
        the papers use Laplace noise. Confident Gaussian noise answers only where, after
        noise of its own, the leading class reaches `threshold`.
    threshold, threshold_sigma : float, optional
        For confident Gaussian noise.
    """

    variant_field: ClassVar[str] = "level"

    level: Literal["L1", "L2"]
    noise: VoteNoise = option("gumbel", "kind of noise on votes")
    threshold: float | None = option(
        None, "votes a confident answer needs; 0: not given", above=0
    )
    threshold_sigma: float | None = option(None, "noise on these votes; 0: not given", above=0)

    def __post_init__(self) -> None:
        """Check the level, and that a threshold is given exactly where it is needed."""
        super().__post_init__()
        self.require("level", self.level in ("L1", "L2"), "L1 or L2")
        confident = self.noise == "confident-gaussian"
        rule = "given" if confident else f"omitted for {self.noise} noise"
        for name in ("threshold", "threshold_sigma"):
            self.require(name, (getattr(self, name) is not None) == confident, rule)

    def mechanism(
        self,
        *,
        unit: Unit,
        sensitivity: float,
        num_classes: int,
        num_queries: int,
        besides: Sequence[Entry] = (),
    ) -> VoteMechanism:
        """Return the mechanism for a number of queries, calibrated if a target was given.

        `num_queries` is the total number of labels that will be released, and `besides` any
        other releases within the target; they only determine the scale of a calibrated
        mechanism.
        """
        kind = unit, sensitivity, num_classes
        if self.target_epsilon is None:
            return self._with_scale(float(self.given_scale or 0), *kind)
        return _calibrated(self, kind, num_queries, tuple(besides))

    def _with_scale(
        self, scale: float, unit: Unit, sensitivity: float, num_classes: int
    ) -> VoteMechanism:
        if self.noise == "confident-gaussian":
            return ConfidentNoisyMax(
                scale=scale,
                threshold=float(self.threshold or 0),
                threshold_scale=float(self.threshold_sigma or 0),
                sensitivity=sensitivity,
                unit=unit,
                num_classes=num_classes,
            )
        return NoisyMax(
            noise=self.noise,
            scale=scale,
            sensitivity=sensitivity,
            unit=unit,
            num_classes=num_classes,
        )


@lru_cache(maxsize=64)  # a search of seconds, asked for again by every party of a simulation
def _calibrated(
    privacy: VotePrivacy,
    kind: tuple[Unit, float, int],
    num_queries: int,
    besides: tuple[Entry, ...],
) -> VoteMechanism:
    """Return the mechanism that meets the target, from public settings alone."""

    def entries(scale: float) -> Sequence[Entry]:
        return [*privacy._with_scale(scale, *kind).charges(num_queries), *besides]

    target = float(privacy.target_epsilon or 0)
    scale = calibrate_scale(entries, target, privacy.delta)
    return privacy._with_scale(scale, *kind)


LEAST_DECIDED: Final = 0.5
"""Least share of labels that votes must decide; with less, noise is refused as too strong."""


def decided_by_votes(mechanism: VoteMechanism, num_votes: int) -> float:
    """Return the share of labels that unanimous votes decide.

    The other labels are as if drawn uniformly from all classes, so that the share is 0 for
    infinite noise and 1 for none. It depends on settings only, never on votes.

    Examples
    --------
    >>> def gumbel(num_classes: int) -> NoisyMax:
    ...     return NoisyMax(
    ...         noise="gumbel", scale=10.0, sensitivity=1, unit="example",
    ...         num_classes=num_classes,
    ...     )
    >>> [round(decided_by_votes(gumbel(number), 25), 2) for number in (2, 10)]
    [0.85, 0.53]
    """
    event = mechanism.event
    blind = 1 / event.num_classes
    unanimous, others = np.array([[num_votes]]), np.array([event.num_classes - 1])
    (kept,) = chance_kept(event.noise, unanimous, event.scale, others)
    return float((kept - blind) / (1 - blind))


def outweighed_votes(mechanism: VoteMechanism, num_votes: int) -> str:
    """Describe noise that outweighs this many unanimous votes, or return "" if it does not."""
    share, event = decided_by_votes(mechanism, num_votes), mechanism.event
    if share >= LEAST_DECIDED:
        return ""
    return (
        f"scale {event.scale:.3g} against {num_votes} votes for one of {event.num_classes} "
        f"classes, which decide {share:.0%} of the labels"
    )


def choose_queries(num_public: int, num_queries: int, seed: int) -> IntArray:
    """Return the public rows that are labelled by noisy votes, the same on every side."""
    if num_queries == num_public:
        return np.arange(num_public)
    return np.sort(derive_rng(seed, "queries").permutation(num_public)[:num_queries])


def epsilon_of_votes(mechanism: VoteMechanism, votes: IntArray, delta: float) -> float:
    """Return the data-dependent epsilon of these votes.

    It is smaller where voters agree, but is itself computed from private votes: a diagnostic
    for a side that may see the votes, not a guarantee, and not to be published.
    """
    # What is proved for more votes that move holds for fewer.
    splits, scale = math.ceil(mechanism.sensitivity), mechanism.scale
    noise = mechanism.event.noise
    if noise != "gaussian":
        return data_dependent_epsilon(votes, 1 / scale, splits, delta=delta, noise=noise)
    orders = default_orders()
    rdp = gnmax_rdp(votes, scale, orders, splits)
    if isinstance(mechanism, ConfidentNoisyMax):
        # A row that is not answered is one whose label was drawn and thrown away.
        test = mechanism.threshold_scale, mechanism.threshold
        rdp = rdp + threshold_rdp(votes, *test, orders, splits)
    return rdp_to_epsilon(orders, rdp, delta)
