"""Privacy loss of single releases by every measure, and the composition of pure ones.

Of all epsilon0-differentially private mechanisms, randomised response is the worst, so
the composition of ``count`` of them is exactly that of ``count`` coin flips (`pure_optimal`,
adaptive or not): with j "flips" the privacy loss is ``(count - 2 j) epsilon0``, and j is
binomial.

References
----------
Kairouz, Oh, Viswanath (2015), The composition theorem for differential privacy, Thm 3.3.
Murtagh, Vadhan (2016), The complexity of computing the optimal composition.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import scipy

from fl_strategies._util import FloatArray, IntArray
from fl_strategies.errors import require
from fl_strategies.privacy._numeric import (
    check_count,
    check_delta,
    check_loss,
    smallest_epsilon,
)
from fl_strategies.privacy.bounds.composition import LossLaw
from fl_strategies.privacy.bounds.gaussian import (
    rdp_of_pure,
    rdp_to_epsilon,
)
from fl_strategies.privacy.events import (
    GaussianEvent,
    LaplaceEvent,
    NoisyMaxEvent,
    OneVoteEvent,
    PrivacyEvent,
    ThresholdEvent,
)

# A loss like this protects nobody, and its square still fits into a float.
_HOPELESS = 1e6
# Beyond so many scales noise is drawn with a chance below 1e-300.
_FAR = 700.0
# What numerical integrals may be off, with room to spare.
_SAFETY = 1e-9


@dataclass(frozen=True)
class Loss:
    """Privacy loss of one release, by every measure that applies to it.

    Parameters
    ----------
    pure : float, optional
        The largest log-ratio between the chances of an outcome under two neighbours.
    spread : float, optional
        The largest difference between two such log-ratios, the bounded range.
    mu : float, optional
        The distance of two unit Gaussians that are as hard to tell apart.
    published : bool
        Whether it is noisy max with Laplace noise, for which papers print moments.
    law : LossLaw, optional
        The law of the loss, where more is known than `pure`.
    """

    pure: float | None = None
    spread: float | None = None
    mu: float | None = None
    published: bool = False
    law: LossLaw | None = None

    @property
    def rho(self) -> float:
        """Return the smallest rho for which the release is known to be rho-zCDP."""
        if self.mu is not None:
            return self.mu * self.mu / 2
        if self.spread is not None:
            return self.spread * self.spread / 8
        return math.inf if self.pure is None else self.pure * self.pure / 2


def loss_of(event: PrivacyEvent) -> Loss:
    """Return what one release with noise can tell; infinite for any other event."""
    if isinstance(event, NoisyMaxEvent):
        return _loss_of_noisy_max(event)
    if isinstance(event, OneVoteEvent):
        return _loss_of_one_vote(event)
    if isinstance(event, ThresholdEvent):
        return Loss(mu=_ratio(event.sensitivity, event.scale))
    if isinstance(event, GaussianEvent):
        return Loss(mu=_ratio(event.l2_sensitivity, event.scale))
    if isinstance(event, LaplaceEvent):
        pure = _ratio(event.l1_sensitivity, event.scale)
        return Loss(pure, law=LossLaw(pure, smooth=True))
    return Loss(pure=math.inf)


def _loss_of_noisy_max(event: NoisyMaxEvent) -> Loss:
    step = _ratio(event.sensitivity, event.scale)
    moved = 2 if event.relation == "replace-one" else 1
    if event.noise == "gaussian":
        return Loss(mu=step * math.sqrt(moved))
    pure, laplace = moved * step, event.noise == "laplace"
    # For three classes and more, Laplace noise exceeds this range by up to a sixth.
    ranged = not laplace or event.num_classes == 2
    return Loss(pure=pure, spread=pure if ranged else None, published=laplace)


def _loss_of_one_vote(event: OneVoteEvent) -> Loss:
    """Noise that is the same for all classes makes one vote randomised response."""
    wrong = _chance_of_each_other(event.noise, event.scale, event.num_classes)
    right = 1 - (event.num_classes - 1) * wrong
    pure = math.log(right / wrong) if wrong > 0 else math.inf
    if event.noise == "gumbel":
        pure = _ratio(1.0, event.scale)
    law = LossLaw(pure, silent=(event.num_classes - 2) * wrong)
    mu = _ratio(math.sqrt(2), event.scale) if event.noise == "gaussian" else None
    return Loss(pure, mu=mu, law=law)


@lru_cache(maxsize=256)
def _chance_of_each_other(noise: str, scale: float, num_classes: int) -> float:
    """Return how likely each class that was not voted for is answered, at most."""
    step, others = 1 / scale, num_classes - 1
    if step > _FAR:
        return 0.0
    if noise == "gumbel":
        return 1 / (math.exp(step) + others)
    laplace = noise == "laplace"
    log_density, log_share = (
        (_laplace_log_density, _laplace_log_share)
        if laplace
        else (_gaussian_log_density, lambda x: float(scipy.special.log_ndtr(x)))
    )

    def beaten(x: float) -> float:
        return math.exp(log_density(x - step)) * -math.expm1(others * log_share(x))

    reach = 80.0 if laplace else 20.0
    edges = [-reach, 0.0, step / 2, step, step + 4, step + reach]
    pieces = [
        scipy.integrate.quad(beaten, a, b, epsabs=0, epsrel=1e-11, limit=200, full_output=1)[:2]
        for a, b in pairwise(edges)
    ]
    # Less than the truth: the vote then counts as clearer than it is.
    least = math.fsum(value - error for value, error in pieces) * (1 - _SAFETY)
    return max(0.0, least) / others


def _laplace_log_density(x: float) -> float:
    return -abs(x) - math.log(2)


def _laplace_log_share(x: float) -> float:
    return math.log1p(-math.exp(-x) / 2) if x >= 0 else x - math.log(2)


def _gaussian_log_density(x: float) -> float:
    return -x * x / 2 - math.log(2 * math.pi) / 2


def _ratio(distance: float, scale: float) -> float:
    ratio = distance / scale
    return ratio if ratio < _HOPELESS else math.inf


def sampling_error(event: PrivacyEvent) -> float:
    """Return how far the chances of a drawn release lie from the ideal ones.

    It is a distance in total variation; see `fl_strategies.privacy.secure`. Two neighbours that
    are both off by so much are (epsilon, delta + (1 + exp(epsilon)) error)-private. The
    noise of DP-SGD is drawn by torch and is taken as it is.
    """
    if isinstance(event, NoisyMaxEvent | OneVoteEvent):
        return float(event.num_classes * 2.0 ** (-50 if event.noise == "gumbel" else -45))
    if isinstance(event, ThresholdEvent):
        return 2.0**-45
    if isinstance(event, LaplaceEvent):
        return float(event.num_values * 2.0**-57)
    if isinstance(event, GaussianEvent):
        return float(event.num_values * 2.0**-50)
    return 0.0


# 40 standard deviations hold all but 1e-300 of a binomial.
_WINDOW_DEVIATIONS = 40
_WINDOW_LEAST = 400
# Atoms of a convolved loss distribution: a million take 16 MB and some 20 ms.
_MOST_ATOMS = 1 << 20
_MOST_DISTINCT = 16
# Share of delta that may be spent on cutting off the tails of a loss distribution.
_TAIL_SHARE = 1e-9

# Privacy losses and their probabilities, both (num_atoms,).
_Distribution: TypeAlias = tuple[FloatArray, FloatArray]


def _loss_distribution(epsilon0: float, count: int) -> _Distribution:
    """Return privacy losses, decreasing, and their probabilities, both (num_atoms,)."""
    flip = float(scipy.special.expit(-epsilon0))
    mode = min(count, int((count + 1) * flip))
    reach = math.ceil(_WINDOW_DEVIATIONS * math.sqrt(count * flip * (1 - flip))) + _WINDOW_LEAST
    first, last = max(0, mode - reach), min(count, mode + reach)
    flips = np.arange(first, last + 1)
    # Ratios of neighbours, summed outwards from the mode: accurate to 1e-13 also for a
    # million events, where log-factorials have lost nine digits.
    steps = np.log((count - flips[:-1]) / (flips[:-1] + 1.0)) - epsilon0
    above = np.cumsum(steps[mode - first :])
    below = -np.cumsum(steps[: mode - first][::-1])[::-1]
    masses = np.exp(np.concatenate([below, [0.0], above]))
    return (count - 2.0 * flips) * epsilon0, masses / masses.sum()


def _delta_of(losses: FloatArray, masses: FloatArray, epsilon: float) -> float:
    return float(masses @ -np.expm1(np.minimum(epsilon - losses, 0.0)))


def _check(owner: str, epsilon0: float, count: int) -> None:
    check_loss(owner, "epsilon0", epsilon0)
    check_count(owner, "count", count)


def pure_optimal_delta(epsilon0: float, count: int, epsilon: float) -> float:
    """Return the exact delta at `epsilon` of `count` epsilon0-DP mechanisms together."""
    _check("pure_optimal_delta", epsilon0, count)
    check_loss("pure_optimal_delta", "epsilon", epsilon)
    if epsilon >= count * epsilon0 or count == 0:
        return 0.0
    if math.isinf(epsilon0):
        return 1.0
    return _delta_of(*_loss_distribution(epsilon0, count), epsilon)


def pure_optimal(epsilon0: float, count: int, delta: float) -> float:
    """Return the exact epsilon at `delta` of `count` epsilon0-DP mechanisms together.

    No valid bound that knows only epsilon0 and count is smaller.

    Examples
    --------
    >>> round(pure_optimal(0.08, 40, 1e-5), 6)
    1.932272
    """
    _check("pure_optimal", epsilon0, count)
    check_delta("pure_optimal", delta)
    if count == 0 or epsilon0 == 0 or math.isinf(epsilon0):
        return epsilon0 if count else 0.0
    losses, masses = _loss_distribution(epsilon0, count)
    return smallest_epsilon(
        lambda epsilon: _delta_of(losses, masses, epsilon), delta, count * epsilon0
    )


def _coarsened(losses: FloatArray, masses: FloatArray, most: int) -> _Distribution:
    """Split every loss between two of `most` evenly spaced ones: an upper bound on delta.

    Delta is an average of a convex function of exp(-loss). Splitting an atom so that the
    mean of exp(-loss) stays can therefore only raise delta, and only to second order.
    """
    if losses.size <= most:
        return losses, masses
    grid = np.linspace(losses.min(), losses.max(), most)
    width = grid[1] - grid[0]
    cells = np.minimum(((losses - grid[0]) / width).astype(np.int64), most - 2)
    beyond = np.clip(losses - grid[cells], 0.0, width)
    upper = masses * (np.expm1(-beyond) / np.expm1(-width))
    split = np.zeros(most)
    split += np.bincount(cells, weights=masses - upper, minlength=most)
    split += np.bincount(cells + 1, weights=upper, minlength=most)
    return grid, split


def _without_tails(losses: FloatArray, masses: FloatArray, tail: float) -> _Distribution:
    """Cut both tails of at most `tail` each; the caller adds the upper one to delta."""
    first = int(np.searchsorted(np.cumsum(masses), tail))
    rest = np.cumsum(masses[::-1])
    last = masses.size - int(np.searchsorted(rest, tail))
    kept = masses[first:last].copy()
    # The lower tail may not vanish: it moves up to the least loss that is kept.
    kept[-1] += rest[masses.size - last - 1] if last < masses.size else 0.0
    return losses[first:last], kept


def _convolved(
    groups: Sequence[tuple[float, int]], delta: float
) -> tuple[FloatArray, FloatArray, float]:
    tail = delta * _TAIL_SHARE / len(groups)
    losses: FloatArray = np.zeros(1)
    masses: FloatArray = np.ones(1)
    for epsilon0, count in groups:
        more = _without_tails(*_loss_distribution(epsilon0, count), tail)
        more_losses, more_masses = _coarsened(*more, 2048)
        losses, masses = _coarsened(losses, masses, _MOST_ATOMS // more_losses.size)
        losses = np.add.outer(losses, more_losses).ravel()
        masses = np.multiply.outer(masses, more_masses).ravel()
    return losses, masses, tail * len(groups)


def _renyi_bound(epsilons: FloatArray, counts: FloatArray, delta: float) -> float:
    def epsilon_at(log_order: float) -> float:
        order = np.array([1 + math.exp(log_order)])
        total = counts @ rdp_of_pure(epsilons, order)
        return rdp_to_epsilon(order, np.array([total]), delta)

    # Every order is valid, so a search that stops at a local minimum is still a bound.
    best = scipy.optimize.minimize_scalar(
        epsilon_at, bounds=(-7.0, 14.0), method="bounded", options={"xatol": 1e-6}
    )
    return float(best.fun)


def _distinct(
    epsilons: Sequence[float] | FloatArray, counts: Sequence[int] | IntArray
) -> tuple[FloatArray, FloatArray]:
    """Return the distinct strengths above 0, and how many events have each."""
    owner = "pure_heterogeneous"
    require(len(epsilons) == len(counts), owner, "counts", "one per epsilon", len(counts))
    strengths, numbers = np.asarray(epsilons, dtype=float), np.asarray(counts, dtype=float)
    require(bool((strengths >= 0).all()), owner, "epsilons", "all at least 0", epsilons)
    whole = (numbers >= 0) & (numbers == np.floor(numbers))
    require(bool(whole.all()), owner, "counts", "whole numbers, at least 0", counts)
    values, kinds = np.unique(strengths, return_inverse=True)
    totals: FloatArray = np.bincount(kinds.ravel(), weights=numbers).astype(float)
    spent = (values > 0) & (totals > 0)
    return values[spent], totals[spent]


def pure_heterogeneous(
    epsilons: Sequence[float] | FloatArray, counts: Sequence[int] | IntArray, delta: float
) -> float:
    """Return an epsilon that holds for pure mechanisms of different strengths together.

    Up to sixteen distinct strengths are convolved: exact while there are few events, and
    otherwise on a grid that overstates delta. More are bounded by their tight Renyi curves. The
    plain sum is never exceeded. All three hold for adaptive composition.

    Parameters
    ----------
    epsilons, counts : (num_kinds,)
        Strength and number of each kind of event.
    delta : float

    Examples
    --------
    >>> round(pure_heterogeneous([0.08, 0.2], [40, 10], 1e-5), 3)
    3.203
    """
    check_delta("pure_heterogeneous", delta)
    values, totals = _distinct(epsilons, counts)
    total = float(values @ totals)
    if not values.size or math.isinf(total):
        return total
    if values.size > _MOST_DISTINCT:
        return min(total, _renyi_bound(values, totals, delta))
    groups = [(float(e), int(n)) for e, n in zip(values, totals, strict=True)]
    losses, masses, tail = _convolved(groups, delta)
    bound = smallest_epsilon(
        lambda epsilon: _delta_of(losses, masses, epsilon), delta - tail, total, tolerance=1e-10
    )
    return min(total, bound, _renyi_bound(values, totals, delta))


_LEAST_DELTA, _ALMOST_ONE = 1e-18, 1 - 1e-9
