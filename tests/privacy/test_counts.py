"""Noisy counts: their distribution, their price, and what is refused."""

import numpy as np
import pytest
from scipy import stats

from fl_strategies.errors import InvalidData, InvalidParameter
from fl_strategies.privacy import secure
from fl_strategies.privacy.accountant import claim
from fl_strategies.privacy.counts import LaplaceCounts


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 3.0])
def test_the_price_is_at_most_what_was_asked(epsilon: float) -> None:
    """The scale is rounded up to a power of two, so epsilon is met and at least half used."""
    mechanism = LaplaceCounts(epsilon=epsilon, l1_sensitivity=2.0)

    cost = claim(mechanism.charges(), 1e-5, replaced=True).epsilon

    assert epsilon / 2 - 1e-4 < cost <= epsilon


def test_noise_has_the_distribution_of_its_event() -> None:
    """A Kolmogorov-Smirnov test against the Laplace distribution of the event's scale."""
    mechanism = LaplaceCounts(epsilon=1.0, l1_sensitivity=2.0)
    high = np.full(4_000, 10**6)

    noise = np.concatenate([mechanism.release(high).values - 10**6 for _ in range(5)])

    event = mechanism.charges()[0][0]
    assert event.scale == 2.0  # type: ignore[attr-defined]
    assert stats.kstest(noise, stats.laplace(scale=2.0).cdf).pvalue > 1e-4
    assert stats.kstest(noise, stats.laplace(scale=1.8).cdf).pvalue < 1e-4


def test_noisy_counts_are_whole_steps_and_never_negative() -> None:
    """Released numbers lie on the grid of the noise, so their low bits tell nothing."""
    mechanism = LaplaceCounts(epsilon=0.5, l1_sensitivity=2.0)

    values = mechanism.release(np.zeros(1000, np.int64)).values

    steps = values * secure.GRID / mechanism.scale
    assert (steps == np.rint(steps)).all()
    assert values.min() == 0.0
    assert 0.4 < (values > 0).mean() < 0.6


def test_seeded_noise_says_so() -> None:
    """A generator makes noise repeatable and the event worthless."""
    mechanism = LaplaceCounts(epsilon=1.0, l1_sensitivity=2.0)
    first, second = (
        mechanism.release(np.array([5, 5]), np.random.default_rng(0)) for _ in range(2)
    )

    assert (first.values == second.values).all()
    assert first.charges[0][0].seeded
    assert not mechanism.release(np.array([5])).charges[0][0].seeded
    assert claim(first.charges, 1e-5).epsilon == np.inf


@pytest.mark.parametrize("epsilon", [0.0, -1.0, 1e-9, 1e9, float("nan")])
def test_impossible_prices_are_refused(epsilon: float) -> None:
    """Too small, too large or no number."""
    with pytest.raises(InvalidParameter, match="epsilon must be"):
        LaplaceCounts(epsilon=epsilon, l1_sensitivity=2.0)


def test_a_blanked_record_moves_half_as_much() -> None:
    """It leaves one count and enters none; a replaced one enters another."""
    charges = LaplaceCounts(epsilon=1.0, l1_sensitivity=2.0).charges()

    assert claim(charges, 1e-9).epsilon == pytest.approx(0.5, rel=1e-6)
    assert claim(charges, 1e-9, replaced=True).epsilon == pytest.approx(1.0, rel=1e-6)
    several = LaplaceCounts(epsilon=1.0, l1_sensitivity=8.0, halved=False).charges()
    assert claim(several, 1e-9).epsilon == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    "counts", [np.array([1.5]), np.array([-1]), np.array([2**40]), np.zeros(5000, int)]
)
def test_other_counts_are_refused(counts: np.ndarray) -> None:
    """Counts are whole numbers from 0 to 2**31, and not too many."""
    with pytest.raises(InvalidData, match="counts must be"):
        LaplaceCounts(epsilon=1.0, l1_sensitivity=2.0).release(counts)
