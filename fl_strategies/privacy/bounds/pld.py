"""Privacy loss distributions, by Google's dp-accounting where that is installed.

Only the distribution objects are used. The accountant class that comes with them ignores
how often randomised response was repeated (0.080 instead of 1.932 for forty times 0.08);
`pure_optimal` composes it exactly.
"""

import importlib
import math
from functools import lru_cache, reduce
from typing import Any, TypeAlias

import numpy as np

from fl_strategies._util.arrays import FloatArray
from fl_strategies.errors import MissingExtra, require
from fl_strategies.privacy._numeric import check_count, check_delta, check_positive
from fl_strategies.privacy.bounds.composition import LossLaw, compose_losses

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

    Parameters
    ----------
    records, batch : int
        Every record is in a batch with chance ``batch / records``, independently.
    steps : int
        Noisy gradient steps over the whole life of the data.
    noise_multiplier : float
        Deviation of the noise divided by the clipping norm.
    delta : float
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
    lead is a whole number between -num_voters and num_voters.

    Parameters
    ----------
    gamma : float
        Inverse scale of the noise on each count.
    num_voters : int
        Voters, each with `splits` votes or none; one of them is replaced.
    queries : int
    delta : float
    splits : int
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
