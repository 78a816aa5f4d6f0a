"""Cronus: the filtered mean against its bound and an exhaustive search; then the strategy."""

from itertools import combinations

import numpy as np
import pytest
from scipy.special import softmax

from fl_strategies import Cronus, CronusOptions, FedMD, Knowledge
from fl_strategies._util import Array, FloatArray
from fl_strategies.aggregation.consensus import MOST_LOST, filtered_mean
from fl_strategies.errors import InvalidParameter
from fl_strategies.strategies.fedmd.options import SCORES
from fl_strategies.strategies.fedmd.party import ANSWERS
from tests.toys import PUBLIC, PUBLIC_LABELS, common_options, hear

NUM_SETS, NUM_POINTS, WIDTH = 20, 60, 8
DISTANCES = (2.0, 5.0, 10.0, 100.0, 1e6)


def honest(num_points: int = NUM_POINTS, width: int = WIDTH) -> FloatArray:
    """Return points of mean zero and deviation one in every direction."""
    return np.random.default_rng(1).normal(size=(NUM_SETS, num_points, width))


def with_liars(share: float, distance: float) -> tuple[FloatArray, FloatArray]:
    """Return points of which some stand together at a distance, and the honest mean."""
    points, liars = honest(), round(share * NUM_POINTS)
    points[:, :liars] = 0.01 * points[:, :liars]
    points[:, :liars, 0] += distance
    return points, points[:, liars:].mean(axis=1)


def error(found: FloatArray, truth: FloatArray) -> float:
    return float(np.linalg.norm(found - truth, axis=1).max())


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
def test_liars_move_the_filtered_mean_by_the_root_of_their_share(
    share: float, distance: float
) -> None:
    """The error stays within a few roots of the share; the mean's is share times distance."""
    points, truth = with_liars(share, distance)

    assert error(filtered_mean(points, 0.2), truth) < 4 * np.sqrt(share)
    assert error(points.mean(axis=1), truth) == pytest.approx(share * distance, rel=0.3)


def test_without_liars_it_is_nearly_the_mean() -> None:
    """Of honest points next to nothing is filtered, whatever share of liars is expected."""
    points = honest()

    moved = error(filtered_mean(points, 0.2), points.mean(axis=1))

    assert moved < 0.1 * np.sqrt(WIDTH / NUM_POINTS)
    same = filtered_mean(points, 0.0)
    np.testing.assert_allclose(same, points.mean(axis=1), atol=1e-14)


def test_it_is_as_good_as_a_search_through_all_subsets() -> None:
    """The least spread subset, found by trying all of them, has about the same mean.

    Two of nine points lie. Of all sets of seven the one whose covariance has the smallest
    norm is within O(sqrt(share)) of the honest mean, and so are both of each other.
    """
    rng = np.random.default_rng(3)
    for distance in (6.0, 20.0, 1e4):
        points = rng.normal(size=(9, 3))
        points[:2] = distance
        subsets = [points[list(chosen)] for chosen in combinations(range(9), 7)]
        best = min(subsets, key=lambda part: np.linalg.norm(np.cov(part.T, bias=True), 2))

        (found,) = filtered_mean(points[None], 2 / 9)

        assert np.linalg.norm(found - best.mean(axis=0)) < np.sqrt(2 / 9)


def test_liars_in_many_directions_are_found_one_after_the_other() -> None:
    """Every liar may stand somewhere else, and none of them stays."""
    points = honest()
    for liar in range(6):
        points[:, liar] = 0.0
        points[:, liar, liar] = 10.0 ** (liar + 2)

    assert error(filtered_mean(points, 0.1), points[:, 6:].mean(axis=1)) < 0.1


@pytest.mark.parametrize(("num_liars", "bounded"), [(25, True), (40, False)])
def test_a_quarter_of_liars_is_borne_at_any_distance(num_liars: int, bounded: bool) -> None:
    """Beyond it the promise ends, as its text says: half of the weight is too little."""
    points = np.random.default_rng(0).normal(size=(1, 100, 1))
    points[0, :num_liars] = 1e6

    found = filtered_mean(points, num_liars / 100)

    assert bool(np.abs(found).max() < 1) == bounded


def test_at_most_half_of_the_weight_is_lost() -> None:
    """Expecting many liars leaves no single point in charge."""
    points = np.concatenate([np.zeros((1, 6, 1)), np.full((1, 5, 1), 9.0)], axis=1)

    (found,) = filtered_mean(points, 0.49)

    assert 0 <= found[0] <= 9 * (1 - MOST_LOST)


@pytest.mark.parametrize(("num_points", "width"), [(1, 4), (2, 4), (5, 40), (40, 1)])
def test_any_shape_and_equal_points_are_fine(num_points: int, width: int) -> None:
    """Few points, many dimensions and no variance at all give what all points say."""
    points = np.full((2, num_points, width), 0.25)

    np.testing.assert_allclose(filtered_mean(points, 0.3), points[:, 0], rtol=1e-14)


def consensus_of(strategy: FedMD, *, liars: int, num_parties: int) -> Array:
    """Return the consensus when some parties name the next class, and all are quite sure."""
    rng, said = np.random.default_rng(0), []
    for number in range(num_parties):
        named = (PUBLIC_LABELS + (number < liars)) % 3
        sure = 4 * np.eye(3)[named] + rng.normal(scale=0.5, size=(len(PUBLIC), 3))
        scores = softmax(sure, axis=1).astype(np.float32)
        said.append(Knowledge(ANSWERS, {SCORES: scores}))
    hear(strategy, *said)
    strategy.finish()
    return strategy.consensus_


def test_the_servers_consensus_bears_liars() -> None:
    """Two of ten that lie alike shift FedMD's mean, and Cronus's robust mean much less."""
    options = common_options(num_parties=10)
    plain = {"payload": "softmax", "consensus": "mean"}
    mean = FedMD.from_settings(**options, **plain)
    robust, honest_ = (Cronus.from_settings(**options) for _ in range(2))

    truth = consensus_of(honest_, liars=0, num_parties=10)
    shifts = [
        np.abs(consensus_of(strategy, liars=2, num_parties=10) - truth).max(axis=1).mean()
        for strategy in (mean, robust)
    ]

    assert shifts[0] == pytest.approx(0.2, abs=0.03)
    assert shifts[1] < 0.03


def test_it_is_fedmd_with_other_defaults() -> None:
    """Scores and their robust mean by default; labels have none, as in FedMD."""
    strategy = Cronus.from_settings(**common_options())

    assert (strategy.options.payload, strategy.options.consensus) == ("softmax", "robust-mean")
    with pytest.raises(InvalidParameter, match="consensus must be mean or class-weighted"):
        CronusOptions(payload="argmax")
