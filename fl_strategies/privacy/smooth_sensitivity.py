"""Releasing a data-dependent GNMax cost with noise that its smooth sensitivity asks for.

The cost of labelling depends on private votes. PATE (2018) publishes it with Gaussian
noise scaled to its smooth sensitivity: a bound on how much one voter can change it that is
itself hard to change.

Assumptions
-----------
* One voter changes one vote a query (``splits`` votes together at level L1), or abstains.
* The order, the smoothness and the noise multiplier are chosen without looking at the
  votes. The authors' script derives the multiplier from the private sensitivity.
* The bound on the local sensitivity needs two monotonicity conditions (C5 and C6 in the
  paper); they are checked and orders that fail them are refused.
* What is released is an estimate, too small half of the time. It describes one data set
  and one direction of the divergence. The claim of a run stays the data-independent
  epsilon.

It pays where many voters mostly agree: 100 queries with 240 of 250 votes for the leader and
sigma 40 are released as 0.83 with a deviation of 0.16 (order 12, multiplier 20, delta
1e-5), against 1.36 without the votes. It does not pay where the noise is strong for the
number of voters: with 50 voters and sigma 15 even unanimous votes do not lower the cost.

The price of the release is computed here exactly. The closed form in the authors' code,
attributed there to Theorem 23, is smaller than the true divergence when the smoothness is
near ``1 / (2 * order)``: 0.339 instead of 2.239 at order 20, smoothness 0.0245 (their
choice for that order) and multiplier 10.

References
----------
Papernot et al. (2018), Scalable private learning with PATE, Appendix B.
Nissim, Raskhodnikova, Smith (2007), Smooth sensitivity and sampling.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri_exp

from fl_strategies.arrays import Array, FloatArray
from fl_strategies.exceptions import require, require_data
from fl_strategies.privacy.bounds._numeric import (
    check_count,
    check_delta,
    check_positive,
    check_votes,
)
from fl_strategies.privacy.bounds.gnmax import log_error_probability_gaussian, theorem_6
from fl_strategies.privacy.bounds.renyi import rdp_to_epsilon

# Grid on which the two conditions are checked, and the least log-chance worth a look.
_GRID_POINTS = 4000
_LEAST_LOG_Q = -690.0


@dataclass(frozen=True)
class CostCurve:
    """Cost of one GNMax query at one order as a function of its log-chance of an error.

    Parameters
    ----------
    sigma : float
        Deviation of the noise relative to one vote.
    order : float
    num_classes : int
    """

    sigma: float
    order: float
    num_classes: int

    @property
    def independent(self) -> float:
        """Cost of a query whatever the votes."""
        return self.order / self.sigma**2

    @cached_property
    def log_q0(self) -> float:
        """Log-chance above which the votes no longer lower the cost."""
        slack = self.order - 0.99
        highest = -max((1 + 1 / self.sigma) ** 2, (slack / self.sigma) ** 2)
        if self._gain(highest) < 0:
            return highest
        lowest = 2 * highest
        while self._gain(lowest) > 0:
            lowest *= 1.5
        return float(brentq(self._gain, lowest, highest, xtol=1e-12, rtol=1e-14))

    @cached_property
    def log_q1(self) -> float:
        """Log-chance below which no neighbour reaches `log_q0`."""
        return float(self.moved(np.array([self.log_q0]), -1)[0])

    def _gain(self, log_q: float) -> float:
        bound = theorem_6(np.array([log_q]), self.sigma, np.array([self.order]))
        return float(bound[0]) - self.independent

    def cost(self, log_q: FloatArray) -> FloatArray:
        """Return the cost at log-chances (n,); constant above `log_q0`."""
        inside = np.minimum(log_q, self.log_q0)
        bound = theorem_6(inside, self.sigma, np.array(self.order))
        return np.where(log_q < self.log_q0, bound, self.independent)

    def moved(self, log_q: FloatArray, voters: int) -> FloatArray:
        """Return the extreme log-chances once voters desert (> 0) or join (< 0) the leader."""
        scale = math.log(self.num_classes - 1)
        quantile = ndtri_exp(np.minimum(log_q - scale, math.log(0.5)))
        shifted = log_ndtr(quantile + voters * math.sqrt(2) / self.sigma)
        return np.asarray(np.minimum(scale + shifted, 0.0))

    def _largest_change(self, log_q: FloatArray) -> FloatArray:
        here = self.cost(log_q)
        rise = self.cost(self.moved(log_q, 1)) - here
        return np.maximum(rise, here - self.cost(self.moved(log_q, -1)))

    @cached_property
    def plateau(self) -> float:
        """The largest local sensitivity of any votes, taken between the two thresholds."""
        lower = np.array([self.log_q1])
        # The cost may jump at the upper threshold: rounding must not land just below it.
        jump = self.independent - float(self.cost(lower)[0])
        return max(jump, float(self._largest_change(lower)[0]))

    def local_sensitivity(self, log_q: FloatArray) -> FloatArray:
        """Bound the change of the cost between votes at `log_q` and their neighbours."""
        between = (log_q >= self.log_q1) & (log_q <= self.log_q0)
        return np.where(between, self.plateau, self._largest_change(log_q))

    def holds(self) -> bool:
        """Return whether cost and sensitivity grow with the chance of an error (C5, C6)."""
        least = -math.sqrt(-min(_LEAST_LOG_Q, 2 * self.log_q1))
        below = np.linspace(least, -math.sqrt(-self.log_q0), _GRID_POINTS)[:-1]
        cost = self.cost(-(below**2))
        below = np.linspace(least, -math.sqrt(-self.log_q1), _GRID_POINTS)[:-1]
        raised = np.minimum(self.moved(-(below**2), 1), self.log_q0 * (1 + 1e-12))
        rise = self.cost(raised) - self.cost(-(below**2))
        slack = 1e-12 * self.independent
        return bool((np.diff(cost) >= -slack).all() and (np.diff(rise) >= -slack).all())


def _step(ranked: FloatArray, toward_leader: Array) -> None:
    """Move one vote in every row, between leader and runner-up, and rank again."""
    direction = np.where(toward_leader, 1.0, -1.0)
    ranked[:, 0] += direction
    ranked[:, 1] -= direction
    ranked[:, 1:] = np.sort(ranked[:, 1:], axis=1)[:, ::-1]


def _sensitivity_by_distance(
    curve: CostCurve, ranked: FloatArray, num_voters: int
) -> FloatArray:
    """Bound the local sensitivity of all votes within a distance of each row.

    Parameters
    ----------
    curve : CostCurve
    ranked : (num_rows, num_classes)
        Votes in decreasing order; overwritten.
    num_voters : int

    Returns
    -------
    bounds : (num_rows, num_voters + 1)
        Column d holds for everything that d voters can reach.
    """
    bounds = np.full((len(ranked), num_voters + 1), curve.plateau)
    log_q = log_error_probability_gaussian(ranked, curve.sigma)
    unsure = log_q > curve.log_q0
    active = unsure | (log_q < curve.log_q1)
    for distance in range(num_voters + 1):  # pragma: no branch - votes run out before
        rows = np.flatnonzero(active)
        bounds[rows, distance] = curve.local_sensitivity(log_q[rows])
        # The worst neighbours move votes between leader and runner-up, towards the
        # plateau. Once that is reached, or no rival has a vote left, it is the bound.
        rows = rows[~unsure[rows] | (ranked[rows, 1] >= 1)]
        if not rows.size:
            break
        moved = ranked[rows]
        _step(moved, unsure[rows])
        ranked[rows] = moved
        log_q[rows] = log_error_probability_gaussian(moved, curve.sigma)
        away = np.where(unsure, log_q > curve.log_q0, log_q < curve.log_q1)
        active[:] = False
        active[rows] = away[rows]
    return bounds


def _ranked_voters(owner: str, votes: Array, splits: int, num_voters: int) -> FloatArray:
    check_votes(owner, votes)
    check_count(owner, "splits", splits, least=1)
    check_count(owner, "num_voters", num_voters, least=1)
    whole = votes % splits == 0
    require_data(bool(whole.all()), owner, "votes", f"multiples of {splits}", "others")
    most = votes.sum(axis=1).max(initial=0) / splits
    require_data(bool(most <= num_voters), owner, "votes", f"of {num_voters} voters", most)
    return np.sort(votes / splits, axis=1)[:, ::-1]


def local_sensitivity(
    votes: Array, sigma: float, order: float, *, num_voters: int, splits: int = 1
) -> FloatArray:
    """Bound how much one voter changes the cost of all queries, by distance: private.

    Parameters
    ----------
    votes : (num_queries, num_classes)
        Counts, multiples of `splits`.
    sigma : float
        Deviation of the noise on every count.
    order : float
    num_voters : int
        Voters in the federation, including those who abstain.
    splits : int
        Votes of one voter.

    Returns
    -------
    bounds : (num_voters + 1,)
        Entry d holds for all votes that differ in at most d voters.
    """
    owner = "local_sensitivity"
    check_positive(owner, "sigma", sigma)
    require(1 < order < math.inf, owner, "order", "greater than 1", order)
    voters = _ranked_voters(owner, votes, splits, num_voters)
    rows, counts = np.unique(voters, axis=0, return_counts=True)
    curve = CostCurve(sigma / splits, order, votes.shape[1])
    require(curve.holds(), owner, "order", "one that meets conditions C5 and C6", order)
    return np.asarray(counts @ _sensitivity_by_distance(curve, rows, num_voters))


def smooth_sensitivity(bounds: Array, smoothness: float) -> float:
    """Return ``max exp(-smoothness * d) * bounds[d]``.

    One voter changes it by a factor of at most ``exp(smoothness)``.

    Parameters
    ----------
    bounds : (num_voters + 1,)
        Those of `local_sensitivity`.
    smoothness : float
    """
    check_positive("smooth_sensitivity", "smoothness", smoothness)
    return float((np.exp(-smoothness * np.arange(len(bounds))) * bounds).max())


def smooth_release_rdp(order: float, smoothness: float, noise_multiplier: float) -> float:
    """Return the exact price of a value released with smooth Gaussian noise.

    The deviation is `noise_multiplier` times the smooth sensitivity. The worst neighbours
    differ in value by the smaller of their sensitivities, and the second input's is
    ``exp(-smoothness)`` times the first's; the divergence of those two Gaussians is
    returned, infinity where it does not exist.
    """
    owner = "smooth_release_rdp"
    require(1 < order < math.inf, owner, "order", "greater than 1", order)
    check_positive(owner, "smoothness", smoothness)
    check_positive(owner, "noise_multiplier", noise_multiplier)
    spread = order - (order - 1) * math.exp(2 * smoothness)
    if spread <= 0:
        return math.inf
    shift = order / (2 * noise_multiplier**2 * spread)
    return shift - smoothness - math.log(spread) / (2 * (order - 1))


@dataclass(frozen=True)
class ReleasedEpsilon:
    """A noisy data-dependent epsilon; every field may be published.

    Parameters
    ----------
    epsilon : float
        Estimate at `delta` of what labelling and this release cost together.
    labelling_rdp : float
        The noisy cost of labelling, never above the data-independent one.
    release_rdp : float
        The exact cost of releasing it, part of `epsilon`.
    order, delta : float
    """

    epsilon: float
    labelling_rdp: float
    release_rdp: float
    order: float
    delta: float


def release_epsilon(
    votes: Array,
    sigma: float,
    *,
    delta: float,
    order: float,
    noise_multiplier: float,
    num_voters: int,
    rng: np.random.Generator,
    smoothness: float | None = None,
    splits: int = 1,
) -> ReleasedEpsilon:
    """Release the data-dependent epsilon of GNMax so that it may be published.

    Parameters
    ----------
    votes, sigma, num_voters, splits
        As in `local_sensitivity`.
    delta, order : float
        Target, and the one order at which the cost is released.
    noise_multiplier : float
        Deviation of the release's noise relative to the smooth sensitivity.
    rng : Generator
        Must be unpredictable outside experiments.
    smoothness : float, optional
        ``0.4 / order`` if left out; the price is infinite from about ``0.5 / order`` on.
    """
    check_delta("release_epsilon", delta)
    bounds = local_sensitivity(votes, sigma, order, num_voters=num_voters, splits=splits)
    smoothness = 0.4 / order if smoothness is None else smoothness
    price = smooth_release_rdp(order, smoothness, noise_multiplier)
    curve = CostCurve(sigma / splits, order, votes.shape[1])
    cost = float(curve.cost(log_error_probability_gaussian(votes, sigma)).sum())
    scale = noise_multiplier * smooth_sensitivity(bounds, smoothness)
    # Limits that do not depend on the votes cost nothing.
    noisy = min(max(0.0, cost + scale * rng.standard_normal()), len(votes) * curve.independent)
    epsilon = rdp_to_epsilon(np.array([order]), np.array([noisy + price]), delta)
    return ReleasedEpsilon(epsilon, noisy, price, order, delta)
