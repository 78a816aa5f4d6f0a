"""The price of noisy scores, against closed forms."""

import math

import pytest

from fl_strategies.errors import InvalidParameter
from fl_strategies.privacy.accountant import bounds, claim
from fl_strategies.privacy.bounds.gaussian import gaussian_epsilon
from fl_strategies.privacy.bounds.pure import pure_optimal
from fl_strategies.privacy.noise import ScorePrivacy


def cost(privacy: ScorePrivacy, rows: int, classes: int, parties: int, bound: float) -> float:
    mechanism = privacy.mechanism(
        unit="party", bound=bound, num_values=classes, num_contributors=parties, num_rows=rows
    )
    return claim(privacy.charges(mechanism, rows * classes), privacy.delta).epsilon


def test_gaussian_noise_costs_what_the_analytic_formula_says() -> None:
    """Mu = 2 B sqrt(Q) / (K sigma); sigma / B = 1.90 for 1000 rows and 20 parties is eps 8."""
    privacy = ScorePrivacy(noise="gaussian", sigma=19.0)
    mu = 2 * 10.0 * math.sqrt(1000) / (20 * 19.0)

    epsilon = cost(privacy, rows=1000, classes=10, parties=20, bound=10.0)

    assert epsilon == pytest.approx(gaussian_epsilon(mu, 1e-5), rel=1e-3)
    assert epsilon == pytest.approx(8.0, abs=0.05)


def test_laplace_noise_is_accounted_entry_by_entry() -> None:
    """Each entry costs 2 B gamma / K; composition is at most optimal for pure privacy."""
    privacy = ScorePrivacy(gamma=0.01)

    epsilon = cost(privacy, rows=100, classes=3, parties=5, bound=10.0)

    assert epsilon <= pure_optimal(2 * 10.0 * 0.01 / 5 * (1 + 1e-5), 300, 1e-5)
    assert epsilon > pure_optimal(2 * 10.0 * 0.01 / 5, 150, 1e-5)


def test_the_paper_s_noise_promises_nothing() -> None:
    """Gamma 1, 50000 rows of 10 classes, 20 parties, clip 10: basic composition says 5e5."""
    privacy = ScorePrivacy(gamma=1.0)
    mechanism = privacy.mechanism(
        unit="party", bound=10.0, num_values=10, num_contributors=20, num_rows=50_000
    )
    charges = privacy.charges(mechanism, 500_000)

    ideal = [value for value in bounds(charges, 1e-5).values() if value is not None]
    assert 1e5 < min(ideal) < 5e5
    assert claim(charges, 1e-5).epsilon == math.inf


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_calibration_meets_its_target(noise: str) -> None:
    """The noise is just strong enough, for either kind."""
    privacy = ScorePrivacy(noise=noise, target_epsilon=4.0)  # type: ignore[arg-type]

    assert 3.9 < cost(privacy, rows=200, classes=4, parties=10, bound=5.0) <= 4.0


def test_seeded_noise_protects_nobody() -> None:
    """Whoever knows the seed can subtract the noise."""
    privacy = ScorePrivacy(gamma=0.1, seeded_noise=True)

    assert cost(privacy, rows=2, classes=2, parties=2, bound=1.0) == math.inf
    assert privacy.rng(3, "server") is not None
    assert ScorePrivacy(gamma=0.1).rng(3, "server") is None


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({}, "gamma or target_epsilon must be given, one of the two"),
        ({"gamma": 1.0, "target_epsilon": 1.0}, "gamma or target_epsilon must be given"),
        ({"gamma": 0.0}, "gamma must be greater than 0"),
        ({"sigma": 1.0}, "sigma must be omitted for laplace noise"),
        ({"noise": "gaussian", "gamma": 1.0}, "gamma must be omitted for gaussian noise"),
        ({"noise": "gumbel", "gamma": 1.0}, "noise must be one of laplace, gaussian"),
        ({"gamma": 1.0, "delta": 1.0}, "delta must be greater than 0 and below 1"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], rule: str) -> None:
    """The strength is said once, in the words of the noise."""
    with pytest.raises(InvalidParameter, match=rule):
        ScorePrivacy(**settings)  # type: ignore[arg-type]
