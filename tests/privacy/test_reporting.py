"""The data-dependent figure of every mechanism that votes can be noised with."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from fl_strategies._util.arrays import FloatArray
from fl_strategies.privacy.bounds.renyi import default_orders, rdp_to_epsilon
from fl_strategies.privacy.mechanisms import ConfidentNoisyMax, NoisyMax
from fl_strategies.privacy.votes import VOTE_NOISES, VoteMechanism, data_dependent_figure

DELTA = 1e-5


def mechanism(noise: str, scale: float = 2.0, **other: Any) -> VoteMechanism:
    given: dict[str, Any] = {"sensitivity": 1, "unit": "party", "num_classes": 2, **other}
    if noise != "confident-gaussian":
        return NoisyMax(noise=noise, scale=scale, **given)  # type: ignore[arg-type]
    return ConfidentNoisyMax(scale=scale, threshold=60.0, threshold_scale=2 * scale, **given)


@pytest.mark.parametrize("noise", VOTE_NOISES)
def test_agreement_makes_every_figure_small(noise: str) -> None:
    """Unanimous votes cost almost nothing, ties cost, and wider steps cost no less."""
    agreed, tied = np.tile([200, 0], (40, 1)), np.tile([60, 60], (40, 1))

    assert 0 <= data_dependent_figure(mechanism(noise), agreed, DELTA) < 0.05
    cost = data_dependent_figure(mechanism(noise), tied, DELTA)
    assert 5 < cost < np.inf
    wider = (mechanism(noise, sensitivity=s) for s in (1.5, 2))
    costs = [data_dependent_figure(one, tied, DELTA) for one in wider]
    assert cost < costs[0] == costs[1]


def log_chances(lead: float, first: int, confident: ConfidentNoisyMax) -> FloatArray:
    """Return the exact log-chances of silence and of either class, of 100 voters."""
    test = (lead - confident.threshold) / confident.threshold_scale
    gap = (2 * first - 100) / (confident.scale * np.sqrt(2))
    answers = norm.logcdf(test) + norm.logcdf([gap, -gap])
    return np.array([norm.logsf(test), *answers])


@pytest.mark.parametrize("first", [50, 60, 70, 90])
def test_the_confident_figure_covers_the_exact_divergence(first: int) -> None:
    """It is at least what the exact chances of silence and labels give."""
    confident = ConfidentNoisyMax(
        scale=6.0,
        threshold=65.0,
        threshold_scale=10.0,
        sensitivity=1,
        unit="party",
        num_classes=2,
    )
    orders = default_orders()[:1200]
    own = log_chances(first, first, confident)
    curves = []
    for moved in (first - 1, first + 1):
        other = log_chances(max(moved, 100 - moved), moved, confident)
        powers = orders[:, None] * own + (1 - orders[:, None]) * other
        curves.append(np.logaddexp.reduce(powers, axis=1) / (orders - 1))
    exact = rdp_to_epsilon(orders, 50 * np.maximum(*curves), DELTA)
    votes = np.tile([first, 100 - first], (50, 1))

    assert 0 < exact <= data_dependent_figure(confident, votes, DELTA)
