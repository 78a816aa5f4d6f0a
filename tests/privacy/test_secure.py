"""Randomness that protects: its distributions, its source and its speed."""

import math
import random
import time
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats

from fl_strategies.errors import InvalidParameter
from fl_strategies.privacy import mechanisms
from fl_strategies.privacy.mechanisms import (
    GRID,
    continuous_gaussian,
    continuous_laplace,
    discrete_gaussian,
    discrete_laplace,
    random_choice,
    random_rows,
    random_words,
)

NUMBER = 100_000
DRAWS = [continuous_laplace, continuous_gaussian, discrete_laplace, discrete_gaussian]
# Chance that a correct sampler fails one of these tests, for these seeds settled for good.
LEAST_P_VALUE = 1e-3


def goodness(observed: np.ndarray, chances: np.ndarray) -> float:
    """Return the p-value of counts against exact chances."""
    return float(stats.chisquare(observed, chances * observed.sum()).pvalue)


@pytest.mark.parametrize("draw", DRAWS, ids=lambda draw: draw.__name__)
def test_only_a_generator_repeats_noise(draw: Callable[..., np.ndarray]) -> None:
    """Seeding numpy's and Python's global state neither repeats nor moves anything."""
    seeded, drawn = [draw(50, np.random.default_rng(3)) for _ in range(2)], []
    for _ in range(2):
        np.random.seed(7)  # noqa: NPY002 - the global state is what this test is about
        random.seed(7)
        drawn.append(draw(50))
    state = random.getstate()
    draw(50)

    assert (seeded[0] == seeded[1]).all()
    assert (drawn[0] != drawn[1]).any()
    assert draw(0).shape == (0,)
    assert random.getstate() == state
    position = np.random.get_state(legacy=False)["state"]["pos"]  # noqa: NPY002 - as above
    assert position == 624, "numpy draws move the position away from its start"


def test_words_use_all_bits() -> None:
    """Each of the 64 bits is one half of the time, from both sources."""
    for source in (np.random.default_rng(0), None):
        words = random_words(20_000, source)
        ones = [(words >> np.uint64(bit) & np.uint64(1)).mean() for bit in range(64)]
        assert words.dtype == np.uint64
        # Six standard deviations, 64 times: less than once in a million runs.
        assert np.abs(np.array(ones) - 0.5).max() < 6 * 0.5 / math.sqrt(20_000)


@pytest.mark.parametrize(
    ("draw", "exact"), [(continuous_laplace, stats.laplace), (continuous_gaussian, stats.norm)]
)
def test_continuous_noise_has_its_distribution(
    draw: Callable[..., np.ndarray], exact: stats.rv_continuous
) -> None:
    """Forty equally likely intervals are hit equally often."""
    edges = exact.ppf(np.linspace(0, 1, 41))
    sample = draw(NUMBER, np.random.default_rng(1))
    observed = np.histogram(sample, np.clip(edges, -1e9, 1e9))[0]

    assert goodness(observed, np.full(40, 1 / 40)) > LEAST_P_VALUE


class Words:
    """Stands in for a generator and returns chosen words."""

    def __init__(self, *words: int) -> None:
        self.words = np.array(words, dtype=np.uint64)

    def integers(self, *_: object, **__: object) -> np.ndarray:
        return self.words


@pytest.mark.parametrize("draw", [continuous_laplace, continuous_gaussian])
def test_extreme_words_give_finite_noise(draw: Callable[..., np.ndarray]) -> None:
    """No word leads to infinity, and the far tail can be reached."""
    noise = draw(4, Words(0, 1, 2**64 - 2, 2**64 - 1))

    assert np.isfinite(noise).all()
    assert noise[0] == -noise[1]
    assert noise[0] > 9
    assert np.abs(noise[2:]).max() < 1e-15


def laplace_below(edges: np.ndarray) -> np.ndarray:
    """Return the chance that a discrete Laplace number is below whole edges."""
    tail = np.exp(-np.where(edges > 0, edges, 1 - edges) / GRID) / (1 + math.exp(-1 / GRID))
    return np.where(edges > 0, 1 - tail, tail)


def gaussian_below(edges: np.ndarray) -> np.ndarray:
    """Return the chance that a discrete Gaussian number is below whole edges.

    At this scale the trapezoidal rule is exact to the last digit of a float.
    """
    return np.asarray(stats.norm.cdf((edges - 0.5) / GRID))


@pytest.mark.parametrize(
    ("draw", "below"),
    [(discrete_laplace, laplace_below), (discrete_gaussian, gaussian_below)],
)
def test_discrete_noise_has_its_distribution(
    draw: Callable[..., np.ndarray], below: Callable[[np.ndarray], np.ndarray]
) -> None:
    """Counts between whole edges follow the exact law, and no residue is preferred."""
    sample = draw(NUMBER, np.random.default_rng(2))
    edges = (np.linspace(-3, 3, 31) * GRID).round()
    observed = np.histogram(sample, [-1e12, *edges, 1e12])[0]
    chances = np.diff([0.0, *below(edges), 1.0])

    assert sample.dtype == np.int64
    assert goodness(observed, chances) > LEAST_P_VALUE
    assert goodness(np.bincount(sample % 16, minlength=16), np.full(16, 1 / 16)) > LEAST_P_VALUE


def test_digits_of_geometric_noise_are_exact() -> None:
    """The product of the digits' chances is the geometric law, to 2**-60."""
    chances = [threshold / 2**64 for threshold in mechanisms._bit_thresholds()]
    for number in (0, 1, 5, 2**24, 2**24 + 3):
        digits = [number >> place & 1 for place in range(len(chances))]
        chance = math.prod(p if one else 1 - p for p, one in zip(chances, digits, strict=True))
        exact = -math.expm1(-1 / GRID) * math.exp(-number / GRID)
        assert chance == pytest.approx(exact, rel=1e-12)


def test_choices_have_the_chances_of_their_weights() -> None:
    """Softmax, with a column that is almost impossible and one that is."""
    weights = np.log(np.array([0.5, 1.0, 0.25, 1e-9]))
    rows = np.tile([*weights, -math.inf], (NUMBER, 1))
    observed = np.bincount(random_choice(rows, np.random.default_rng(4)), minlength=5)

    assert (
        goodness(observed[:3], np.exp(weights[:3]) / np.exp(weights[:3]).sum()) > LEAST_P_VALUE
    )
    assert observed[3:].tolist() == [0, 0]


def test_the_ends_of_the_words_choose_the_ends_of_the_row() -> None:
    """The smallest word takes the first column, the largest the last, none falls outside."""
    rows = np.zeros((2, 3))

    assert random_choice(rows, Words(0, 2**64 - 1)).tolist() == [0, 2]  # type: ignore[arg-type]


def test_a_word_at_the_threshold_belongs_to_the_next_column() -> None:
    """Of two equal columns each gets exactly half of all words."""
    rows = np.zeros((2, 2))
    words = Words(2**63 - 1, 2**63)

    assert random_choice(rows, words).tolist() == [0, 1]  # type: ignore[arg-type]


def test_rows_without_replacement_are_a_uniform_subset() -> None:
    """Every pair of five rows comes equally often, in either order, never twice the same."""
    rng = np.random.default_rng(5)
    pairs = [random_rows(5, 2, replacement=False, rng=rng) for _ in range(10_000)]
    observed = np.bincount([5 * a + b for a, b in pairs], minlength=25).reshape(5, 5)
    off_diagonal = observed[~np.eye(5, dtype=bool)]

    assert np.diag(observed).sum() == 0
    assert goodness(off_diagonal, np.full(20, 1 / 20)) > LEAST_P_VALUE
    assert sorted(random_rows(7, 7, replacement=False).tolist()) == list(range(7))


def test_rows_with_replacement_are_independent() -> None:
    """Each of three rows comes equally often and may come twice."""
    rows = random_rows(3, NUMBER, replacement=True, rng=np.random.default_rng(6))

    assert goodness(np.bincount(rows, minlength=3), np.full(3, 1 / 3)) > LEAST_P_VALUE
    assert rows.dtype == np.int64


def test_more_rows_than_records_are_refused() -> None:
    """Only drawing with replacement can give more."""
    with pytest.raises(InvalidParameter, match="samples must be at most 3, the records, got 4"):
        random_rows(3, 4, replacement=False)
    assert random_rows(3, 4, replacement=True).shape == (4,)
    assert random_rows(3, 0, replacement=False).shape == (0,)


def test_secret_noise_is_fast_enough() -> None:
    """A million selections among five classes take seconds, not minutes."""
    start = time.process_time()
    continuous_laplace(1_000_000)
    random_choice(np.zeros((200_000, 5)))

    assert time.process_time() - start < 5
