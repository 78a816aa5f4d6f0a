from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fl_strategies.aggregation import votes as voting
from fl_strategies.aggregation.votes import (
    VoteSum,
    add_votes,
    agreement,
    agreements,
    consistent_labels,
    consistent_mask,
    count_votes,
    least_agreeing,
    num_trimmed,
    plurality,
)

LABELS = arrays(
    np.int64, st.tuples(st.integers(1, 6), st.integers(1, 12)), elements=st.integers(0, 3)
)

VOTES = arrays(
    np.int8, st.tuples(st.integers(1, 7), st.integers(1, 12)), elements=st.integers(-1, 3)
)
"""Votes of parties for four classes; -1 is none."""


def consistent_votes(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Count one party's students by consistent voting."""
    counts = np.zeros((labels.shape[1], num_classes), dtype=int)
    add_votes(counts, consistent_labels(labels, num_classes), len(labels))
    return counts


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
    np.testing.assert_array_equal(
        count_votes(labels, 4), np.eye(4, dtype=int)[labels].sum(axis=0)
    )


@settings(deadline=None, max_examples=60)
@given(labels=LABELS)
def test_consistent_votes_equal_the_algorithm(labels: np.ndarray) -> None:
    np.testing.assert_array_equal(consistent_votes(labels, 4), slow_consistent_votes(labels, 4))


@settings(deadline=None, max_examples=40)
@given(labels=LABELS, seed=st.integers(0, 99))
def test_votes_do_not_depend_on_the_order_of_voters(labels: np.ndarray, seed: int) -> None:
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


def test_plurality_takes_the_leader() -> None:
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
    tied = np.array([[2, 2], [1, 1]])
    clear = np.array([[3, 1], [1, 1]])

    for seed in range(20):
        a = plurality(tied, np.random.default_rng(seed))
        b = plurality(clear, np.random.default_rng(seed))
        assert a[1] == b[1]


def test_agreement_is_the_leaders_share() -> None:
    assert agreement(np.array([[4, 1], [0, 5]])) == pytest.approx(0.9)
    assert np.isnan(agreement(np.empty((0, 3))))


def counted_without(votes: np.ndarray, *parties: int) -> np.ndarray:
    """Count the votes of all parties but some, row by row."""
    rest = np.delete(votes, parties, axis=0)
    return np.array([[int((column == c).sum()) for c in range(4)] for column in rest.T])


def slow_agreement(votes: np.ndarray, party: int) -> tuple[float, float]:
    """Compare a party with the others row by row, and pair classes as long as there are any."""
    said, leading = [], []
    for own, others in zip(votes[party], counted_without(votes, party), strict=True):
        leaders = [c for c in range(4) if others[c] == max(others)]
        if own >= 0 and len(leaders) == 1:
            said.append(int(own))
            leading.append(leaders[0])
    agreed = sum(a == b for a, b in zip(said, leading, strict=True))
    possible = (Counter(said) & Counter(leading)).total()
    return agreed / len(said) if said else 1.0, agreed / possible if possible else 1.0


@settings(deadline=None, max_examples=200)
@given(votes=VOTES)
def test_agreements_are_with_the_plurality_of_all_others(votes: np.ndarray) -> None:
    """They equal counting anew without each party."""
    expected = [slow_agreement(votes, party) for party in range(len(votes))]

    np.testing.assert_array_equal(agreements(votes, 4), expected)


@settings(deadline=None, max_examples=200)
@given(votes=VOTES.filter(lambda votes: len(votes) >= 2), data=st.data())
def test_one_party_changes_others_only_on_close_rows(votes: np.ndarray, data: Any) -> None:
    """Whatever party 0 says, another is judged the same on rows not decided by one vote.

    So a hostile party can have an honest one excluded only by rows that are close.
    """
    other = data.draw(st.integers(1, len(votes) - 1))
    changed = votes.copy()
    changed[0] = data.draw(arrays(np.int8, votes.shape[1], elements=st.integers(-1, 3)))

    ordered = np.sort(counted_without(votes, 0, other), axis=1)
    clear = ordered[:, -1] - ordered[:, -2] >= 2
    before, after = (agreements(v[:, clear], 4)[other] for v in (votes, changed))
    np.testing.assert_array_equal(before, after)


@settings(deadline=None, max_examples=50)
@given(rest=arrays(np.int8, 8, elements=st.integers(0, 3)), data=st.data())
def test_liars_in_the_minority_are_those_left_out(rest: np.ndarray, data: Any) -> None:
    """Two of ten parties say anything but what the others say: they are found, always."""
    truth = np.concatenate([np.arange(4, dtype=np.int8), rest])
    votes = np.tile(truth, (10, 1))
    liars = data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=2, unique=True))
    for liar in liars:
        shift = data.draw(arrays(np.int8, 12, elements=st.integers(1, 3)))
        votes[liar] = (truth + shift) % 4

    assert least_agreeing(votes, 4, 0.2) == sorted(liars)


@settings(deadline=None, max_examples=50)
@given(votes=VOTES)
def test_no_more_than_the_share_is_left_out(votes: np.ndarray) -> None:
    assert len(least_agreeing(votes, 4, 0.4)) <= num_trimmed(len(votes), 0.4)
    assert least_agreeing(votes, 4, 0.0) == []


def test_a_party_that_knows_few_classes_is_no_liar() -> None:
    """It is right on its classes and wrong on eight of twelve rows; a liar is wrong on all.

    The others lead with each class three times. The specialist says 0, 1 and for the rest 0:
    4 of its 12 votes agree, of 6 that could. The liar says the next class.
    """
    truth = np.repeat(np.arange(4), 3)
    specialist = np.where(truth < 2, truth, 0)
    specialist[0], specialist[3] = 1, 0
    votes = np.array([truth, truth, truth, specialist, (truth + 1) % 4])

    np.testing.assert_allclose(agreements(votes, 4)[3:], [[4 / 12, 4 / 6], [0, 0]], rtol=1e-12)
    assert least_agreeing(votes, 4, 0.4) == [4]


def test_a_party_that_names_one_class_is_left_out_where_others_know_all() -> None:
    """All it could agree in, it does, but that is a fifth of what the median party does."""
    truth = np.tile(np.arange(5), 4)
    votes = np.array([truth, truth, truth, np.zeros(20, int), truth])

    np.testing.assert_allclose(agreements(votes, 5)[3], [0.2, 1.0])
    assert least_agreeing(votes, 5, 0.2) == [3]


def test_a_liar_is_left_out_also_where_most_parties_agree_little() -> None:
    """Six of ten parties name one class each, so a third is typical; the liar has a ninth.

    That is enough beside the others, but it is one of eight votes in which it could agree.
    """
    truth = np.repeat(np.arange(3), 3)
    constant = [np.full(9, label) for label in (0, 0, 1, 1, 2, 2)]
    liar = (truth + 1) % 3
    liar[0] = 0
    votes = np.array([truth, truth, truth, *constant, liar])

    agreed, of_possible = agreements(votes, 3).T
    np.testing.assert_allclose(agreed, [1, 1, 1, *[1 / 3] * 6, 1 / 9])
    np.testing.assert_allclose(of_possible, [*[1] * 9, 1 / 8])
    assert least_agreeing(votes, 3, 0.2) == [9]


def test_nobody_is_left_out_for_differing_a_little() -> None:
    """Ten parties, each with another error on two of ten rows: the share is a limit only."""
    votes = np.tile(np.arange(10) % 4, (10, 1))
    for party in range(10):
        votes[party, [party, (party + 1) % 10]] = 0

    assert least_agreeing(votes, 4, 0.4) == []


def test_of_equals_the_last_are_left_out() -> None:
    """Three parties tell the same lie, three the truth with one more; one leaves, then two."""
    truth = np.array([0, 1, 2, 3])
    votes = np.array([truth, 3 - truth, truth, 3 - truth, truth, truth])

    assert [least_agreeing(votes, 4, share) for share in (0.1, 0.2, 0.4)] == [[], [3], [1, 3]]


def test_who_says_nothing_disagrees_with_nobody() -> None:
    """A party without a consistent row adds no vote, so there is nothing to exclude."""
    votes = np.array([[-1, -1], [0, 1], [0, 1], [1, 0]])

    assert least_agreeing(votes, 2, 0.49) == [3]


@pytest.mark.parametrize(
    ("parties", "share", "expected"),
    [(10, 0.2, 2), (9, 0.2, 1), (4, 0.2, 0), (100, 0.29, 29), (10, 0.0, 0), (3, 0.49, 1)],
)
def test_the_share_is_rounded_down(parties: int, share: float, expected: int) -> None:
    """Also where the product is a hair below a whole number, as 100 * 0.29 is."""
    assert num_trimmed(parties, share) == expected


@pytest.mark.parametrize(("num_classes", "size"), [(2, 1), (128, 1), (129, 2), (70_000, 4)])
def test_consistent_labels_are_as_small_as_they_can_be(num_classes: int, size: int) -> None:
    """The largest label and -1, for none, survive in the fewest bytes."""
    labels = np.array([[num_classes - 1, 0], [num_classes - 1, 1]])

    kept = consistent_labels(labels, num_classes)

    assert kept.itemsize == size
    assert kept.tolist() == [num_classes - 1, -1]


@given(
    labels=arrays(
        np.int16, st.tuples(st.integers(0, 9), st.integers(1, 7)), elements=st.integers(-1, 4)
    ),
    worth=st.integers(1, 3),
)
def test_votes_that_come_one_by_one_are_those_of_all(labels: np.ndarray, worth: int) -> None:
    """However many wait to be counted, and where a voter has no vote."""
    expected = np.zeros((labels.shape[1], 5), dtype=np.int64)
    votes = VoteSum((labels.shape[1], 5), worth)
    for own in labels:
        add_votes(expected, own, worth)
        votes.add(own)
        if own[0] == 0:
            np.testing.assert_array_equal(votes.counts, expected)

    np.testing.assert_array_equal(votes.counts, expected)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.int64])
@pytest.mark.parametrize("num_classes", [2, 127, 128, 255, 256, 257])
def test_the_last_class_is_counted_in_every_type(kind: type, num_classes: int) -> None:
    """No label is lost where one more does not fit into its type."""
    last = min(num_classes, np.iinfo(kind).max + 1) - 1
    votes = VoteSum((1, num_classes))
    for _ in range(voting._MOST_WAITING + 1):
        votes.add(np.array([last], kind))

    assert votes.counts[0, last] == votes.counts.sum() == voting._MOST_WAITING + 1


def test_blocks_change_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = np.random.default_rng(0).integers(0, 6, (40, 33))
    whole = count_votes(labels, 6)
    monkeypatch.setattr(voting, "_BLOCK_VOTES", 1)

    np.testing.assert_array_equal(count_votes(labels, 6), whole)
    assert count_votes(labels[:0], 6).sum() == 0
