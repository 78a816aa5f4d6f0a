"""Privacy-loss distributions of many releases added up, rounded so that epsilon can only grow.

Each release is described by the law of its privacy loss under its worst neighbours. Two kinds
of law are enough for everything that is not Gaussian:

- Three values: the loss is the strength, its negative, or nothing at all. Without the third
  this is the worst of all pure mechanisms; with it, a label of one voter.
- Laplace noise. For two entries that move by d1 and d2, the likelihood ratio has a less
  spread law than for one entry that moves by d1 + d2 (their distribution functions cross
  once, and the means agree), so one entry that moves by all of the L1 sensitivity is the
  worst vector.

Both laws are the same whichever neighbour comes first. Sums hold for queries that depend on
earlier answers, as long as the strengths do not.

DP-SGD and two-class votes are composed by Google's dp-accounting, where that is installed. Only
its distribution objects are used: the accountant class that comes with them ignores how often
randomised response was repeated (0.080 instead of 1.932 for forty times 0.08);
`pure_optimal` composes it exactly.

References
----------
Zhu, Dong, Wang (2022), Optimal accounting of differential privacy via characteristic function.
Doroshenko et al. (2022), Connect the dots: tighter discrete approximations.
"""

import importlib
import math
from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import scipy

from fl_strategies._util import FloatArray, IntArray
from fl_strategies.errors import MissingExtra, check_count, check_delta, check_positive, require

# Points of a composed law: two million take 16 MB and a quarter of a second.
_MOST_POINTS = 1 << 21
_FEWEST_STEPS, _MOST_STEPS, _POINTS_WANTED = 64, 256, 1 << 18
_FINENESS = 0.03
# What is cut off on either side, and what rounding of the transform may hide per release.
_TAIL = 1e-15
_ROUNDING = 4e-15
# A bound that spends more than this share of delta on both is not worth having.
_MOST_LOST = 0.1


class LossLaw(NamedTuple):
    """The law of one release's privacy loss, of Laplace noise if it is `smooth`.

    `strength` is the largest loss, `silent` the chance that there is none.
    """

    strength: float
    silent: float = 0.0
    smooth: bool = False


# Positions on a grid of losses and their chances, both (num_atoms,).
_Atoms: TypeAlias = tuple[IntArray, FloatArray]


class ComposedLoss(NamedTuple):
    """The law of a sum of losses on a grid, and the chance of a loss beyond it."""

    interval: float
    first: int
    masses: FloatArray
    beyond: float

    def delta_at(self, epsilon: float) -> float:
        """Return delta at `epsilon`, at most 1."""
        start = max(0, math.ceil(epsilon / self.interval) - self.first)
        losses = (self.first + np.arange(start, self.masses.size)) * self.interval
        shares = -np.expm1(np.minimum(epsilon - losses, 0.0))
        return min(1.0, float(self.masses[start:] @ shares) + self.beyond)

    def epsilon_at(self, delta: float) -> float:
        """Return epsilon at `delta`; infinite where the tails that were cut off matter."""
        if self.beyond > _MOST_LOST * delta:
            return math.inf
        # For each point of the grid: the chance of a larger loss, and the mean of
        # exp(point - loss) over these. Between points delta is linear in exp(epsilon).
        backwards = self.masses[::-1]
        fading = math.exp(-self.interval)
        above = np.concatenate([[0.0], np.cumsum(backwards)[:-1]])[::-1]
        shared = scipy.signal.lfilter([0.0, fading], [1.0, -fading], backwards)[::-1]
        allowed = delta - self.beyond
        point = int(np.searchsorted(-(above - shared), -allowed))
        if point == 0:
            return max(0.0, self.first * self.interval)
        before = point - 1
        if shared[before] == 0:
            return max(0.0, (self.first + point) * self.interval)
        with np.errstate(over="ignore"):
            beyond = float(np.log((above[before] - allowed) / shared[before]))
        return max(0.0, (self.first + before) * self.interval + min(beyond, self.interval))


def _steps(count: int) -> int:
    """Return into how many steps the range of a Laplace loss is cut, an even number."""
    wanted = int(_POINTS_WANTED / (10 * math.sqrt(count)))
    return 2 * (min(max(wanted, _FEWEST_STEPS), _MOST_STEPS) // 2)


def _law(law: LossLaw, count: int) -> tuple[FloatArray, FloatArray]:
    """Return losses and chances; of Laplace noise those of its discrete counterpart.

    The delta of discrete Laplace noise equals that of continuous noise at every loss that it
    can have and lies above it in between, so it is an upper bound.
    """
    if not law.smooth:
        losses = law.strength * np.array([-1.0, 0.0, 1.0])
        spoken = 1 - law.silent
        wrong, right = spoken * scipy.special.expit([-law.strength, law.strength])
        return losses, np.array([wrong, law.silent, right])
    steps = _steps(count)
    numbers = np.arange(steps + 1)
    decay = law.strength / steps
    masses = np.tanh(decay / 2) * np.exp(-decay * numbers)
    ahead = scipy.special.expit(decay)
    masses[[0, -1]] = ahead, ahead * math.exp(-law.strength)
    return law.strength * (1 - 2 * numbers / steps), masses


def _on_grid(losses: FloatArray, masses: FloatArray, interval: float) -> _Atoms:
    """Split every loss between its neighbours on the grid: an upper bound on delta.

    Delta is an average of a convex function of exp(-loss), whose mean stays the same.
    """
    places = losses / interval
    nearest = np.rint(places)
    below = np.where(np.abs(places - nearest) < 1e-9, nearest, np.floor(places))
    beyond = np.clip(losses - below * interval, 0.0, interval)
    upper = masses * (np.expm1(-beyond) / np.expm1(-interval))
    positions: IntArray = np.concatenate([below, below + 1]).astype(np.int64)
    points, groups = np.unique(positions, return_inverse=True)
    merged = np.zeros(points.size)
    np.add.at(merged, groups, np.concatenate([masses - upper, upper]))
    return points, merged


def _interval(laws: Sequence[tuple[LossLaw, int]]) -> float:
    """Return a grid that holds a single kind of loss exactly, and others finely.

    Splitting adds less than a quarter of its squared width to the variance of each loss, which
    must be little beside that of the sum.
    """
    (law, count), *others = laws
    if not others:
        return 2 * law.strength / _steps(count) if law.smooth else law.strength
    deviation = math.sqrt(math.fsum(n * law.strength**2 for law, n in laws))
    return min(_FINENESS / math.sqrt(max(n for _, n in laws)), 1e-3) * deviation


def _reach(laws: Sequence[tuple[FloatArray, FloatArray, int]], sign: int) -> float:
    """Return what a sum of losses exceeds with a chance below the tail (Chernoff's bound)."""
    most = math.fsum(n * float((sign * losses).max()) for losses, _, n in laws)
    largest = max(float(np.abs(losses).max()) for losses, _, _ in laws)
    slopes = np.geomspace(1e-6, 1e3, 120) / largest
    total = np.zeros(slopes.size)
    for losses, masses, count in laws:
        there = masses > 0
        exponents = sign * slopes[:, None] * losses[there] + np.log(masses[there])
        total += count * scipy.special.logsumexp(exponents, axis=1)
    return min(most, float(((total - math.log(_TAIL)) / slopes).min()))


@lru_cache(maxsize=4)
def compose_losses(
    laws: tuple[tuple[LossLaw, int], ...], interval: float | None = None
) -> ComposedLoss | None:
    """Return the law of all losses together, None if it would take too much memory.

    `interval` is the width of the grid, which suits the laws by default.
    """
    width = _interval(laws) if interval is None else interval
    grids, first, last = _laid_out(laws, width)
    while interval is None and last - first >= _MOST_POINTS:
        width *= 2
        grids, first, last = _laid_out(laws, width)
    if last - first >= _MOST_POINTS:
        return None
    size = scipy.fft.next_fast_len(last - first + 1, real=True)
    with np.errstate(all="ignore"):
        spectrum = _spectrum(grids, size)
    masses = np.maximum(scipy.fft.irfft(spectrum, size), 0.0)
    kept = masses[np.arange(first, last + 1) % size]
    lost = 2 * _TAIL + _ROUNDING * (100 + sum(n for _, n in laws))
    return ComposedLoss(width, first, kept, lost)


def _laid_out(
    laws: Sequence[tuple[LossLaw, int]], width: float
) -> tuple[list[tuple[IntArray, FloatArray, int]], int, int]:
    """Return all laws on a grid, and the first and last point of their sum."""
    grids = [(*_on_grid(*_law(law, n), width), n) for law, n in laws]
    parts = [(places * width, masses, n) for places, masses, n in grids]
    first = math.floor(-_reach(parts, -1) / width)
    return grids, first, math.ceil(_reach(parts, 1) / width)


def _spectrum(grids: Sequence[tuple[IntArray, FloatArray, int]], size: int) -> FloatArray:
    total = np.ones(size // 2 + 1, dtype=np.complex128)
    for positions, masses, count in grids:
        wrapped = np.bincount(positions % size, weights=masses, minlength=size)
        total *= scipy.fft.rfft(wrapped) ** count
    return np.where(np.isfinite(total), total, 0.0)


# Width of the grid of losses. The rounding is always upwards, to second order in it.
INTERVAL = 1e-4
_POINTS_PER_EVENT = 200

Runs: TypeAlias = tuple[tuple[float, float, int], ...]
"""Noise multiplier, chance of a record, and steps, of each kind."""
Laws: TypeAlias = tuple[tuple[LossLaw, int], ...]


def _distributions(owner: str) -> Any:
    try:
        return importlib.import_module("dp_accounting.pld.privacy_loss_distribution")
    except ImportError as error:
        raise MissingExtra(owner, "dp-accounting", "accounting") from error


@lru_cache(maxsize=16)
def sgd_distribution(runs: Runs) -> Any:
    """Compose runs of DP-SGD, each a noise multiplier, the chance of a record, and steps."""
    distributions = _distributions("DPSGDEvent")
    composed = [
        distributions.from_gaussian_mechanism(
            noise, sampling_prob=chance, value_discretization_interval=INTERVAL
        ).self_compose(steps)
        for noise, chance, steps in runs
    ]
    return reduce(lambda total, run: total.compose(run), composed)


@lru_cache(maxsize=16)
def joined_distribution(runs: Runs, laws: Laws) -> Any:
    """Return the law of DP-SGD and of other losses, on the same grid, together.

    The other losses have the same law whichever neighbour comes first. None if theirs would
    take too much memory.
    """
    noise = compose_losses(laws, INTERVAL)
    if noise is None:
        return None
    distributions = _distributions("DPSGDEvent")
    pmf = distributions.pld_pmf.DensePLDPmf(
        INTERVAL, noise.first, noise.masses, noise.beyond, pessimistic_estimate=True
    )
    return sgd_distribution(runs).compose(distributions.PrivacyLossDistribution(pmf))


@lru_cache(maxsize=1024)  # a search in Python, and every reply of a run asks again
def sgd_epsilon(runs: Runs, delta: float, laws: Laws = ()) -> float:
    """Return epsilon of DP-SGD, and of the other losses where there are any."""
    both = joined_distribution(runs, laws) if laws else sgd_distribution(runs)
    return float(both.get_epsilon_for_delta(delta))


def dpsgd_epsilon(
    records: int, batch: int, steps: int, noise_multiplier: float, delta: float
) -> float:
    """Return epsilon of DP-SGD with Poisson-sampled batches, one record blanked.

    Every record is in a batch with chance ``batch / records``, independently. `steps` are over
    the whole life of the data; the noise is a multiple of the clipping norm.
    """
    owner = "dpsgd_epsilon"
    check_count(owner, "records", records, least=1)
    check_count(owner, "batch", batch, least=1)
    require(batch <= records, owner, "batch", f"at most {records}, the records", batch)
    check_count(owner, "steps", steps)
    check_positive(owner, "noise_multiplier", noise_multiplier)
    check_delta(owner, delta)
    # Asked for here, so that the error of a missing package names this function.
    _distributions(owner)
    if steps == 0:
        return 0.0
    return sgd_epsilon(((noise_multiplier, batch / records, steps),), delta)


def _chance_of_first(gap: FloatArray) -> FloatArray:
    """Return how likely noisy max answers the first of two classes at a scaled lead."""
    wrong = (2 + np.abs(gap)) / 4 * np.exp(-np.abs(gap))
    return np.where(gap >= 0, 1 - wrong, wrong)


def _worst_deltas(epsilons: FloatArray, step: float, num_voters: int) -> FloatArray:
    """Return the largest delta of one two-class query over all votes of the voters."""
    leads = np.arange(-num_voters, num_voters - 1, dtype=float)
    # Exchanging the classes turns a step back into a step forward: these cover both.
    first, second = _chance_of_first(leads * step), _chance_of_first((leads + 2) * step)
    factors = np.exp(epsilons)[:, None]
    one = np.maximum(first - factors * second, 0.0)
    other = np.maximum((1 - first) - factors * (1 - second), 0.0)
    deltas: FloatArray = (one + other).max(axis=1)
    return deltas


def two_class_laplace_epsilon(
    gamma: float, num_voters: int, queries: int, delta: float, *, splits: int = 1
) -> float:
    """Return epsilon of two-class noisy max with Laplace noise, for queries chosen freely.

    Holds for adaptive queries, where `bounded_range_optimal` does not, and uses that the
    lead is a whole number between -num_voters and num_voters. `gamma` is the inverse scale of
    the noise on each count; a voter has `splits` votes or none, and one of them is replaced.
    """
    owner = "two_class_laplace_epsilon"
    check_positive(owner, "gamma", gamma)
    check_count(owner, "num_voters", num_voters, least=1)
    check_count(owner, "queries", queries)
    check_count(owner, "splits", splits, least=1)
    check_delta(owner, delta)
    distributions = _distributions(owner)
    if queries == 0:
        return 0.0
    step = gamma * splits
    interval = min(INTERVAL, 2 * step / _POINTS_PER_EVENT)
    reach = math.ceil(2 * step / interval)
    losses = np.arange(-reach, reach + 1)
    pmf = distributions.pld_pmf.create_pmf_pessimistic_connect_dots(
        interval, losses, _worst_deltas(losses * interval, step, num_voters)
    )
    composed = distributions.PrivacyLossDistribution(pmf).self_compose(queries)
    return float(composed.get_epsilon_for_delta(delta))
