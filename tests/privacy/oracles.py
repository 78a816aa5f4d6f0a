"""Second routes to epsilon, which the package itself does not take."""

import math
from typing import Any

import pytest

_INTERVAL = 1e-4


def _distributions() -> Any:
    return pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")


def laplace_pld_epsilon(epsilon0: float, count: int, delta: float) -> float:
    """Return epsilon of `count` Laplace releases by dp-accounting's grid of losses."""
    single = _distributions().from_laplace_mechanism(
        1 / epsilon0, value_discretization_interval=min(_INTERVAL, epsilon0 / 200)
    )
    return float(single.self_compose(count).get_epsilon_for_delta(delta))


def gaussian_pld_epsilon(noise_multiplier: float, count: int, delta: float) -> float:
    """Return epsilon of `count` Gaussian releases by dp-accounting's grid of losses."""
    # Gaussian releases compose to one; a grid would lose digits with every step.
    single = _distributions().from_gaussian_mechanism(
        noise_multiplier / math.sqrt(count), value_discretization_interval=_INTERVAL
    )
    return float(single.get_epsilon_for_delta(delta))


def textbook_zcdp_epsilon(rho: float, delta: float) -> float:
    """Return epsilon of rho-zCDP by Bun and Steinke's own conversion."""
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def gnmax_mu(sigma: float, queries: int, splits: int = 1) -> float:
    """Return how many deviations apart the votes of `queries` are when a voter is replaced."""
    return splits * math.sqrt(2 * queries) / sigma
