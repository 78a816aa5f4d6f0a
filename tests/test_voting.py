import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fl_strategies.voting import (
    agreement,
    consistent_mask,
    consistent_votes,
    count_votes,
    plurality,
)

LABELS = arrays(
    np.int64, st.tuples(st.integers(1, 6), st.integers(1, 12)), elements=st.integers(0, 3)
)


def slow_consistent_votes(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Algorithm 1, lines 15 to 19, written out row by row."""
    counts = np.zeros((labels.shape[1], num_classes), dtype=int)
    for row in range(labels.shape[1]):
        for m in range(num_classes):
            if sum(label == m for label in labels[:, row]) == len(labels):
                counts[row, m] = len(labels)
    return counts


@settings(deadline=None, max_examples=60)
@given(labels=LABELS)
def test_counts_equal_one_hot_sums(labels: np.ndarray) -> None:
    """Counting voter by voter equals summing one-hot votes."""
    np.testing.assert_array_equal(
        count_votes(labels, 4), np.eye(4, dtype=int)[labels].sum(axis=0)
    )


@settings(deadline=None, max_examples=60)
@given(labels=LABELS)
def test_consistent_votes_equal_the_algorithm(labels: np.ndarray) -> None:
    """The vectorised rule equals the loops of the paper."""
    np.testing.assert_array_equal(consistent_votes(labels, 4), slow_consistent_votes(labels, 4))


@settings(deadline=None, max_examples=40)
@given(labels=LABELS, seed=st.integers(0, 99))
def test_votes_do_not_depend_on_the_order_of_voters(labels: np.ndarray, seed: int) -> None:
    """Shuffling voters changes neither counts nor consistency."""
    shuffled = np.random.default_rng(seed).permutation(labels)

    np.testing.assert_array_equal(count_votes(labels, 4), count_votes(shuffled, 4))
    np.testing.assert_array_equal(consistent_mask(labels), consistent_mask(shuffled))


def test_consistent_voting_differs_from_majority() -> None:
    """Three parties vote (0,1), (0,1), (2,2): only the third is consistent, so 2 wins.

    A plain majority of all six votes would be a tie without the third party's weight.
    """
    parties = [np.array([[0], [1]]), np.array([[0], [1]]), np.array([[2], [2]])]

    counts = sum(consistent_votes(labels, 3) for labels in parties)

    np.testing.assert_array_equal(counts, [[0, 0, 2]])


def test_one_student_is_always_consistent() -> None:
    """With s = 1 consistent voting is plain voting."""
    labels = np.array([[2, 0, 1]])

    np.testing.assert_array_equal(consistent_votes(labels, 3), count_votes(labels, 3))


def test_plurality_takes_the_leader() -> None:
    """Without a tie the generator has no say."""
    counts = np.array([[1, 5, 2], [4, 0, 3]])
    for seed in range(5):
        np.testing.assert_array_equal(plurality(counts, np.random.default_rng(seed)), [1, 0])


def test_ties_are_fair_and_repeatable() -> None:
    """Tied classes win equally often, others never, and a seed decides which."""
    counts = np.tile([3, 1, 3, 3], (30_000, 1))

    winners = plurality(counts, np.random.default_rng(1))

    np.testing.assert_array_equal(winners, plurality(counts, np.random.default_rng(1)))
    shares = np.bincount(winners, minlength=4) / len(winners)
    # Three standard deviations of a binomial share at 30,000 draws are 0.0082.
    np.testing.assert_allclose(shares, [1 / 3, 0, 1 / 3, 1 / 3], atol=0.0082)


def test_a_tie_elsewhere_does_not_change_a_row() -> None:
    """Row 1 keeps its winner whether or not row 0 is tied."""
    tied = np.array([[2, 2], [1, 1]])
    clear = np.array([[3, 1], [1, 1]])

    for seed in range(20):
        a = plurality(tied, np.random.default_rng(seed))
        b = plurality(clear, np.random.default_rng(seed))
        assert a[1] == b[1]


def test_agreement_is_the_leaders_share() -> None:
    """Rows with 4 of 5 and 5 of 5 votes agree to 0.9 on average."""
    assert agreement(np.array([[4, 1], [0, 5]])) == pytest.approx(0.9)


def test_agreement_of_nothing_is_not_a_number() -> None:
    """Without rows there is nothing to agree on."""
    assert np.isnan(agreement(np.empty((0, 3))))
