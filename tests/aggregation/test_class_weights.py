"""Who is heard about which class."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fl_strategies.aggregation.claims import (
    CLASS_COUNTS,
    class_counts,
    class_weights,
    noisy_weighted_mean,
    read_counts,
    weighted_mean,
)
from fl_strategies.errors import KnowledgeMismatch
from fl_strategies.privacy.noise import ScorePrivacy
from fl_strategies.wire.formats import PlainScores, Quantizer


def test_counts_of_single_labels() -> None:
    """Every class of the list is counted, also those the party lacks."""
    assert class_counts(np.array([2, 0, 2]), 4, "single-label").tolist() == [1, 0, 2, 0]


def test_counts_of_several_labels_are_known_positives() -> None:
    """Unknown and negative labels count nothing."""
    y = np.array([[1, -1, 0], [1, 1, 0]])

    assert class_counts(y, 3, "multi-label").tolist() == [2, 1, 0]


@given(hnp.arrays(np.float64, (4, 6), elements=st.floats(0, 1e9)))
def test_weights_are_shares(counts: np.ndarray) -> None:
    """Weights are finite, not negative, and sum to 1 for every class."""
    weights = class_weights(list(counts), 6)

    assert (weights >= 0).all()
    assert weights.sum(axis=0) == pytest.approx(np.ones(6))


def test_a_class_that_nobody_holds_is_weighted_uniformly() -> None:
    """0 / 0 is not a weight."""
    weights = class_weights([np.array([4.0, 0.0]), np.array([0.0, 0.0])], 2)

    assert weights.tolist() == [[1.0, 0.5], [0.0, 0.5]]


def test_without_counts_all_weigh_the_same() -> None:
    """Uniform weights are 1 / K."""
    assert (class_weights([None, None, None, None], 2) == 0.25).all()


@pytest.mark.parametrize(
    "counts",
    [
        np.ones(2),
        np.ones(3, np.float32),
        np.ones((3, 1)),
        np.array([1.0, np.nan, 1.0]),
        np.array([1.0, -1.0, 1.0]),
        np.array([1.0, np.inf, 1.0]),
        np.array([1.0, 1e20, 1.0]),
    ],
)
def test_impossible_counts_are_refused(counts: np.ndarray) -> None:
    """Wrong length, type, shape, sign or size."""
    with pytest.raises(KnowledgeMismatch, match="class-counts must be"):
        read_counts({CLASS_COUNTS: counts}, 3)
    with pytest.raises(KnowledgeMismatch, match="class-counts must be"):
        read_counts({}, 3)


def test_the_mean_weighs_each_class_by_itself() -> None:
    """The first party decides the first class, the second party the second."""
    weights = np.array([[1.0, 0.0], [0.0, 1.0]])
    parties = [np.full((3, 2), 2.0), np.full((3, 2), -4.0)]

    mean = weighted_mean(parties, weights, PlainScores(bound=9.0))

    assert mean.tolist() == [[2.0, -4.0]] * 3


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_little_noise_leaves_the_mean(noise: str) -> None:
    """The noisy mean of quantized scores is the plain one, up to the noise."""
    rng = np.random.default_rng(0)
    form = Quantizer(num_levels=200, bound=3.0)
    parties = [form.encode(rng.uniform(-1, 1, (50, 4))) for _ in range(5)]
    weights = class_weights([rng.uniform(0, 9, 4) for _ in parties], 4)
    strength = {"gamma": 1e4} if noise == "laplace" else {"sigma": 1e-4}
    privacy = ScorePrivacy(noise=noise, **strength)  # type: ignore[arg-type]
    mechanism = privacy.mechanism(
        unit="party", bound=15.0, num_values=4, num_contributors=5, num_rows=50
    )

    noisy = noisy_weighted_mean(parties, weights, form, mechanism, None)

    plain = weighted_mean(parties, weights, form)
    assert 1e-6 < np.abs(noisy - plain).max() < 5e-3


def test_noise_has_the_scale_it_says() -> None:
    """The mean distance of Laplace noise from 0 is its scale, whatever the weights."""
    form = PlainScores(bound=1.0)
    parties, weights = [np.zeros((2000, 3))] * 4, np.full((4, 3), 0.25)
    privacy = ScorePrivacy(gamma=0.5)
    mechanism = privacy.mechanism(
        unit="party", bound=1.0, num_values=3, num_contributors=4, num_rows=2000
    )

    noise = noisy_weighted_mean(parties, weights, form, mechanism, None)

    # 6000 draws: the mean has a deviation of 2 / sqrt(6000) = 0.026.
    assert abs(np.abs(noise).mean() - 2.0) < 0.13
    assert len(np.unique(noise)) > 5900
