"""Noise and numbers of answers that just keep a promise."""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_strategies.errors import InvalidParameter, MissingExtra
from fl_strategies.privacy.accountant import Entry, Loss, claim
from fl_strategies.privacy.bounds import distributions
from fl_strategies.privacy.bounds.theorems import (
    bounded_range_optimal,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    pure_optimal,
    zcdp_to_epsilon,
)
from fl_strategies.privacy.events import (
    GaussianEvent,
    NoisyMaxEvent,
    NonPrivateEvent,
    SubsampleEvent,
    ThresholdEvent,
)
from fl_strategies.privacy.noise import calibrate_scale
from tests.privacy.oracles import gaussian_pld_epsilon, laplace_pld_epsilon

DELTA = 1e-5
PARTY: Any = {"unit": "party", "relation": "replace-one"}


def votes(noise: Any, count: int, num_classes: int = 10) -> Callable[[float], Sequence[Entry]]:
    def entries(scale: float) -> Sequence[Entry]:
        event = NoisyMaxEvent(
            **PARTY, noise=noise, scale=scale, sensitivity=1.0, num_classes=num_classes
        )
        return [(event, count)]

    return entries


@pytest.mark.parametrize(
    ("noise", "num_classes", "target", "scale"),
    [
        ("gumbel", 10, 0.9349135, 25.0),
        ("laplace", 2, 0.9349135, 25.0),
        ("laplace", 10, 1.9322720, 25.0),
        ("gaussian", 10, 4.3771780, math.sqrt(80)),
    ],
)
def test_known_epsilons_give_back_their_scales(
    noise: str, num_classes: int, target: float, scale: float
) -> None:
    """Reference values, read backwards."""
    found = calibrate_scale(votes(noise, 40, num_classes), target, DELTA)

    assert found == pytest.approx(scale, rel=1e-5)


@settings(deadline=None, max_examples=12)
@given(
    noise=st.sampled_from(["laplace", "gumbel", "gaussian"]),
    count=st.integers(1, 200),
    target=st.floats(0.01, 30.0),
)
def test_the_promise_is_kept_and_not_overdone(noise: str, count: int, target: float) -> None:
    """The claim is at most the target; a hair less noise would exceed it."""
    make = votes(noise, count)
    scale = calibrate_scale(make, target, DELTA)

    assert claim(make(scale), DELTA).epsilon <= target
    assert claim(make(scale * (1 - 1e-5)), DELTA).epsilon > target


def test_several_events_may_share_the_scale() -> None:
    """Both steps of Confident-GNMax are calibrated together."""

    def entries(scale: float) -> Sequence[Entry]:
        test = ThresholdEvent(**PARTY, scale=3 * scale, sensitivity=1.0)
        return [(test, 100), *votes("gaussian", 20)(scale)]

    scale = calibrate_scale(entries, 4.377178, DELTA)

    assert scale == pytest.approx(math.sqrt(100 / 9 + 40), rel=1e-5)


def test_an_earlier_release_leaves_less() -> None:
    """What is already spent asks for more noise in what follows."""
    earlier: list[Entry] = [(votes("gaussian", 1)(10.0)[0][0], 5)]
    alone = calibrate_scale(votes("gaussian", 40), 2.0, DELTA)
    after = calibrate_scale(lambda scale: [*earlier, *votes("gaussian", 40)(scale)], 2.0, DELTA)

    assert after > 1.01 * alone


@pytest.mark.parametrize(
    "earlier",
    [
        NonPrivateEvent(unit="party", reason="models left"),
        NoisyMaxEvent(**PARTY, noise="gumbel", scale=1.0, sensitivity=1.0, num_classes=2),
    ],
)
def test_a_promise_that_is_broken_already_cannot_be_kept(earlier: Any) -> None:
    """No noise helps; the sentence says what is the least possible."""
    with pytest.raises(InvalidParameter, match=r"target_epsilon must be at least .*, got 0\.5"):
        calibrate_scale(lambda scale: [(earlier, 9), *votes("gumbel", 4)(scale)], 0.5, DELTA)


def test_a_sample_that_needs_more_delta_cannot_be_calibrated() -> None:
    """Noise does not bring back the delta of a secret sample."""
    sample = SubsampleEvent(records=100, samples=5, replacement=False)

    def entries(scale: float) -> Sequence[Entry]:
        event = GaussianEvent(
            unit="example", relation="replace-one", scale=scale, l2_sensitivity=1.0
        )
        return [(sample, 1), (event, 1)]

    with pytest.raises(InvalidParameter, match="must be at least inf"):
        calibrate_scale(entries, 1.0, 0.04)
    assert calibrate_scale(entries, 1.0, 0.06) > 0


def test_a_generous_target_needs_almost_no_noise() -> None:
    """The search goes down as well as up, to where drawing noise is not precise enough."""
    assert calibrate_scale(votes("gumbel", 1), 19.0, DELTA) == pytest.approx(2 / 19, rel=0.01)
    scale = calibrate_scale(votes("gumbel", 1), 1e5, DELTA)
    assert claim(votes("gumbel", 1)(scale), DELTA).epsilon < 25


@pytest.mark.parametrize(
    ("target", "delta"),
    [(0.0, DELTA), (-1.0, DELTA), (math.inf, DELTA), (1.0, 0.0), (1.0, 1.0)],
)
def test_impossible_targets_are_refused(target: float, delta: float) -> None:
    """Epsilon is positive and finite, delta inside (0, 1)."""
    with pytest.raises(InvalidParameter, match=r"^calibrate_scale: "):
        calibrate_scale(votes("gumbel", 40), target, delta)


def delta_by_mpmath(mu: float, epsilon: float) -> float:
    """Evaluate the two normal tails in sixty digits."""
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return float(mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m))


def delta_by_quadrature(mu: float, epsilon: float) -> float:
    """Integrate the hockey stick of two normal densities."""
    edge = epsilon / mu + mu / 2
    return float(
        mpmath.quad(
            lambda x: mpmath.npdf(x, mu, 1) - mpmath.exp(epsilon) * mpmath.npdf(x, 0, 1),
            [edge, edge + 2, edge + 6, edge + 20, edge + 60],
        )
    )


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 2.0, 20.0])
def test_delta_equals_high_precision_tails(mu: float, epsilon: float) -> None:
    """Delta keeps ten digits where both tails are tiny or almost cancel."""
    expected = delta_by_mpmath(mu, epsilon)

    assert float(gaussian_delta(mu, epsilon)) == pytest.approx(expected, rel=1e-9, abs=1e-290)


def test_delta_equals_quadrature() -> None:
    """The closed form is the integral of the hockey stick."""
    for mu, epsilon in [(0.5, 0.2), (1.5, 3.0)]:
        assert float(gaussian_delta(mu, epsilon)) == pytest.approx(
            delta_by_quadrature(mu, epsilon), rel=1e-8
        )


def test_ends() -> None:
    """No release is free, no noise has no privacy, infinite epsilon needs no delta."""
    assert gaussian_delta(0.0, 0.0) == 0
    assert gaussian_delta(math.inf, 1.0) == 1
    assert gaussian_delta(1.0, math.inf) == 0
    assert gaussian_epsilon(0.0, 1e-5) == 0
    assert gaussian_epsilon(math.inf, 1e-5) == math.inf
    assert gaussian_epsilon(1e-4, 0.1) == 0
    assert gaussian_mu(math.inf, 1e-5) == math.inf
    table = gaussian_delta(np.array([[0.5], [1.0]]), np.array([0.0, 1.0, 2.0]))
    assert table.shape == (2, 3)
    assert table[1, 1] == gaussian_delta(1.0, 1.0)


@pytest.mark.parametrize("noise_multiplier", [0.5, 2.0, 30.0])
def test_epsilon_equals_dp_accounting(noise_multiplier: float) -> None:
    """An independent library finds the same epsilon and the same noise."""
    theirs = pytest.importorskip("dp_accounting.gaussian_mechanism")
    epsilon = gaussian_epsilon(1 / noise_multiplier, 1e-6)

    assert epsilon == pytest.approx(
        theirs.get_epsilon_gaussian(noise_multiplier, 1e-6), abs=1e-7
    )
    assert 1 / gaussian_mu(epsilon, 1e-6) == pytest.approx(noise_multiplier, rel=1e-9)


@pytest.mark.parametrize(
    ("epsilon", "sigma", "one_round"),
    [(1, 1668, 373), (2, 892, 199), (4, 484, 108), (8, 268, 60)],
)
def test_noise_of_distillation_with_local_privacy(
    epsilon: float, sigma: float, one_round: float
) -> None:
    """Noise for 100 000 softmax vectors, and for one round of 5000, is as tabulated."""
    mu = gaussian_mu(epsilon, 1e-5)

    assert round(math.sqrt(2 * 100_000) / mu) == sigma
    assert round(math.sqrt(2 * 5000) / mu) == one_round


@pytest.mark.parametrize(
    ("sigma", "epsilon"), [(1e4, 0.141685), (1e5, 0.011030), (1e6, 0.000723), (1e7, 0.000019)]
)
def test_tiny_losses_keep_their_digits(sigma: float, epsilon: float) -> None:
    """Very much noise still gives all six digits of epsilon."""
    assert gaussian_epsilon(math.sqrt(2e5) / sigma, 1e-5) == pytest.approx(epsilon, abs=6e-7)


@settings(deadline=None, max_examples=60)
@given(mu=st.floats(1e-3, 20.0), delta=st.floats(1e-12, 0.4))
def test_epsilon_is_monotone_and_inverted_by_calibration(mu: float, delta: float) -> None:
    """More mu or less delta cost more, and calibration finds the noise again."""
    epsilon = gaussian_epsilon(mu, delta)

    assert gaussian_epsilon(1.1 * mu, delta) >= epsilon
    assert gaussian_epsilon(mu, delta / 2) >= epsilon
    if epsilon > 1e-6:
        assert float(gaussian_delta(mu, epsilon)) == pytest.approx(delta, rel=1e-6)
        assert gaussian_mu(epsilon, delta) == pytest.approx(mu, rel=1e-6)
    else:
        assert gaussian_mu(epsilon, delta) >= mu * (1 - 1e-6)


CALLS = {
    "dpsgd_epsilon": (100, 10, 3, 1.0, DELTA),
    "two_class_laplace_epsilon": (0.1, 5, 3, DELTA),
}


def test_optimal_composition_equals_randomised_response() -> None:
    """The distribution of randomised response, composed, is our optimal composition."""
    distributions = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    flip = 2 / (1 + math.exp(0.08))
    coin = distributions.from_randomized_response(flip, 2, value_discretization_interval=1e-5)
    rounded_up = coin.self_compose(40).get_epsilon_for_delta(DELTA)
    exact = pure_optimal(0.08, 40, DELTA)

    assert exact <= rounded_up <= exact + 1e-4


def test_gaussian_equals_closed_form() -> None:
    """The grid of losses reproduces the exact Gaussian epsilon from above."""
    pytest.importorskip("dp_accounting")
    grid = gaussian_pld_epsilon(4.0, 9, DELTA)
    exact = gaussian_epsilon(0.75, DELTA)

    assert exact - 1e-9 <= grid <= exact + 1e-4


def test_laplace_is_between_one_event_and_the_pure_optimum() -> None:
    """Laplace noise is no worse than the worst pure mechanism, and not free."""
    pytest.importorskip("dp_accounting")
    epsilon = laplace_pld_epsilon(0.05, 60, DELTA)

    assert 0.5 < epsilon < pure_optimal(0.05, 60, DELTA)
    assert laplace_pld_epsilon(0.05, 1, 1e-12) == pytest.approx(0.05, abs=1e-4)


def test_two_classes_lie_between_non_adaptive_and_zcdp() -> None:
    """Freely chosen queries cost more than fixed ones, and less than the zCDP bound."""
    pytest.importorskip("dp_accounting")
    adaptive = distributions.two_class_laplace_epsilon(0.04, 50, 40, DELTA)

    assert bounded_range_optimal(0.08, 40, DELTA) < adaptive
    assert adaptive < zcdp_to_epsilon(40 * Loss(spread=0.08).rho, DELTA)


def test_two_classes_with_one_query_equal_enumeration() -> None:
    """One query's epsilon is where the worst pair of neighbouring votes meets delta."""
    pytest.importorskip("dp_accounting")
    gamma, num_voters, delta = 0.5, 3, 0.02

    def chance(lead: int) -> float:
        wrong = (2 + gamma * abs(lead)) / 4 * math.exp(-gamma * abs(lead))
        return 1 - wrong if lead >= 0 else wrong

    def worst(epsilon: float) -> float:
        sticks = []
        for lead in range(-num_voters, num_voters + 1):
            for other in range(max(-num_voters, lead - 2), min(num_voters, lead + 2) + 1):
                p, q = chance(lead), chance(other)
                stick = max(0.0, p - math.exp(epsilon) * q)
                sticks.append(stick + max(0.0, (1 - p) - math.exp(epsilon) * (1 - q)))
        return max(sticks)

    grid = np.linspace(0, 2 * gamma, 5001)
    exact = next(epsilon for epsilon in grid if worst(epsilon) <= delta)

    assert distributions.two_class_laplace_epsilon(
        gamma, num_voters, 1, delta
    ) == pytest.approx(exact, abs=3e-4)


def test_only_the_product_of_splits_and_gamma_matters() -> None:
    """Twice the votes at half the gamma is the same mechanism."""
    pytest.importorskip("dp_accounting")

    assert distributions.two_class_laplace_epsilon(
        0.02, 20, 10, DELTA, splits=2
    ) == pytest.approx(distributions.two_class_laplace_epsilon(0.04, 20, 10, DELTA))


def test_dpsgd_grows_with_steps_and_falls_with_noise() -> None:
    """Training longer costs more, noisier training less, no release nothing."""
    pytest.importorskip("dp_accounting")
    base = distributions.dpsgd_epsilon(500, 10, 20, 1.5, DELTA)

    assert distributions.dpsgd_epsilon(500, 10, 40, 1.5, DELTA) > base
    assert distributions.dpsgd_epsilon(500, 10, 20, 3.0, DELTA) < base
    assert distributions.dpsgd_epsilon(500, 50, 0, 1.5, DELTA) == 0
    assert distributions.two_class_laplace_epsilon(1.0, 5, 0, DELTA) == 0


@pytest.mark.parametrize("name", CALLS)
def test_missing_package_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dp-accounting the error says what to install."""
    monkeypatch.setitem(sys.modules, "dp_accounting.pld.privacy_loss_distribution", None)

    with pytest.raises(MissingExtra, match=rf"{name}: .*dp-accounting.*\[accounting\]"):
        getattr(distributions, name)(*CALLS[name])


def test_accountant_that_ignores_counts_is_not_used() -> None:
    """The accountant class of dp-accounting 0.6 forgets repetitions, so it is avoided."""
    assert "PLDAccountant" not in Path(distributions.__file__).read_text(encoding="utf-8")
