"""Combining predictions: exact sums, robust rules, votes."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fl_strategies.aggregation import consensus as rules
from fl_strategies.aggregation.consensus import (
    MAX_WEIGHT,
    ClassWeightedConsensus,
    ConsensusRule,
    MeanConsensus,
    RobustConsensus,
    VoteCounts,
    make_consensus,
    to_probabilities,
)
from fl_strategies.errors import InvalidParameter

RULES: list[ConsensusRule] = ["mean", "class-weighted", "median", "trimmed-mean", "robust-mean"]
SCORES = arrays(
    np.float32, (7, 4, 3), elements=st.floats(-100, 100, width=32, allow_subnormal=False)
)


def combined(rule: ConsensusRule, replies: np.ndarray, weights: np.ndarray | None = None):  # noqa: ANN201
    consensus = make_consensus(rule, replies.shape[1:], bound=100.0)
    for number, reply in enumerate(replies):
        consensus.add(reply, None if weights is None else weights[number])
    return consensus.result()


@pytest.mark.parametrize("rule", RULES)
@given(replies=SCORES, order=st.permutations(range(7)))
@settings(max_examples=30, deadline=None)
def test_the_order_of_replies_changes_no_bit(
    rule: ConsensusRule, replies: np.ndarray, order: list[int]
) -> None:
    weights = np.arange(21).reshape(7, 3) * 1000

    straight = combined(rule, replies, weights)
    shuffled = combined(rule, replies[order], weights[order])

    assert straight.tobytes() == shuffled.tobytes()


@given(replies=SCORES)
@settings(max_examples=30, deadline=None)
def test_the_mean_is_the_mean(replies: np.ndarray) -> None:
    columns = replies.reshape(7, -1).T.tolist()
    exact = [float(sum(map(Fraction, column)) / 7) for column in columns]

    error = np.abs(combined("mean", replies).ravel() - exact)

    assert error.max() <= 128 * 2.0**-40


def test_order_would_matter_to_floating_point() -> None:
    """The case that the exact sum is for: adding floats in two orders differs."""
    replies = np.array([1e2, 1e-6, -1e2, 1e-6], dtype=np.float32).reshape(4, 1, 1)

    assert replies.sum(axis=0) != replies[[1, 3, 0, 2]].sum(axis=0)
    assert combined("mean", replies) == combined("mean", replies[[1, 3, 0, 2]])


def test_class_weights_are_per_class() -> None:
    """A party without records of a class has no say about it; nobody's class is the mean."""
    replies = np.array([[[1.0, 2.0, 3.0]], [[5.0, 6.0, 7.0]]], dtype=np.float32)

    result = combined("class-weighted", replies, np.array([[3, 0, 0], [1, 2, 0]]))

    np.testing.assert_allclose(result, [[2.0, 6.0, 5.0]])


def test_the_largest_sums_do_not_overflow() -> None:
    """The heaviest weights on the largest values keep their sign and size."""
    consensus = ClassWeightedConsensus((1, 1), bound=1.0)
    heavy = np.array([MAX_WEIGHT])
    for _ in range(50):
        consensus.add(np.array([[-1.0]], dtype=np.float32), heavy)
    # As many as the documented number of parties would add.
    ((_, weighted),) = consensus._sums.items()
    weighted._high *= 2**20 // 50

    assert weighted.total()[0, 0] < -(2.0**40)


@pytest.mark.parametrize("weights", [[-1], [MAX_WEIGHT + 1]])
def test_impossible_weights_are_refused(weights: list[int]) -> None:
    with pytest.raises(InvalidParameter, match="weights must be from 0 to"):
        ClassWeightedConsensus((1, 1), bound=1.0).add(np.zeros((1, 1)), np.array(weights))


@pytest.mark.parametrize("num_replies", [1, 2, 5, 6])
def test_median_and_trimmed_mean_match_their_definitions(num_replies: int) -> None:
    replies = np.random.default_rng(0).normal(size=(num_replies, 8, 3)).astype(np.float32)
    cut = min(math.ceil(0.2 * num_replies), (num_replies - 1) // 2)
    rest = np.sort(replies.astype(float), axis=0)[cut : num_replies - cut]

    np.testing.assert_allclose(combined("median", replies), np.median(replies, axis=0))
    np.testing.assert_allclose(combined("trimmed-mean", replies), rest.mean(axis=0))


@pytest.mark.parametrize("rule", ["median", "trimmed-mean"])
@given(honest=SCORES, hostile=st.floats(-100, 100, width=32))
@settings(max_examples=30, deadline=None)
def test_one_party_cannot_steer_a_robust_rule(
    rule: ConsensusRule, honest: np.ndarray, hostile: float
) -> None:
    """Whatever one of eight sends, the consensus stays within what the others say."""
    replies = np.concatenate([honest, np.full((1, 4, 3), hostile, dtype=np.float32)])

    result = combined(rule, replies)

    assert (result >= honest.min(axis=0) - 1e-5).all()
    assert (result <= honest.max(axis=0) + 1e-5).all()


def test_one_party_does_steer_the_mean() -> None:
    replies = np.zeros((8, 1, 1), dtype=np.float32)
    replies[3] = 80

    assert combined("mean", replies) == 10
    assert combined("median", replies) == combined("trimmed-mean", replies) == 0


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = np.random.default_rng(0).normal(size=(9, 50, 4)).astype(np.float32)
    whole = combined("trimmed-mean", replies)
    monkeypatch.setattr("fl_strategies.aggregation.consensus._CHUNK_CELLS", 1)
    monkeypatch.setattr("fl_strategies.aggregation.consensus._MOST_CHUNKS", 50)

    assert combined("trimmed-mean", replies).tobytes() == whole.tobytes()


def test_a_robust_rule_keeps_copies() -> None:
    consensus, buffer = RobustConsensus("median"), np.ones((2, 2), dtype=np.float32)
    consensus.add(buffer)
    buffer[:] = 9

    assert consensus.result().max() == 1


def test_probabilities_stay_as_they_are() -> None:
    rows = np.array([[1.0, 0.0, 0.0], [0.2, 0.3, 0.5]])

    np.testing.assert_allclose(to_probabilities(rows), rows, atol=1e-15)


def test_votes_are_counted_with_weights() -> None:
    votes = VoteCounts((3, 2))
    votes.add(np.array([0, 1, 1]))
    votes.add(np.array([1, 1, 0]), np.array([5, 7]))

    np.testing.assert_array_equal(votes.counts, [[1, 7], [0, 8], [5, 1]])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: make_consensus("mode", (1, 1), bound=1.0), "rule must be one of mean"),  # type: ignore[arg-type]
        (lambda: RobustConsensus("mean"), "rule must be a robust one, got 'mean'"),
        (
            lambda: RobustConsensus("trimmed-mean", trim_fraction=0.5),
            "trim_fraction must be at least 0 and below 0.5, got 0.5",
        ),
        (lambda: MeanConsensus((1, 1), bound=1.0).result(), "replies must be at least one"),
        (lambda: RobustConsensus("median").result(), "replies must be at least one"),
    ],
)
def test_wrong_use_is_refused_in_one_sentence(make, sentence: str) -> None:  # noqa: ANN001
    with pytest.raises(InvalidParameter, match=sentence):
        make()


def test_blocks_of_a_sum_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=(3, 50, 4)).clip(-2, 2)
    totals = []
    for cells in (1, 1 << 15):
        monkeypatch.setattr(rules, "_BLOCK_CELLS", cells)
        total = rules.ExactSum((50, 4), 2.0)
        for own in values:
            total.add(own, np.array([0, 1, 5, 7]))
            total.add(own.astype(np.float32))
        totals.append(total.total().tobytes())

    assert totals[0] == totals[1]


@pytest.mark.parametrize("rule", ["median", "trimmed-mean"])
def test_levels_are_decoded_when_they_are_combined(rule: str) -> None:
    """They are kept as they came, in a quarter of the memory, and give the same bits."""
    codes = np.random.default_rng(0).integers(0, 200, (9, 40, 3)).astype(np.uint8)
    late = RobustConsensus(rule, decode=lambda values: values * 0.1 - 10)  # type: ignore[arg-type]
    early = RobustConsensus(rule)  # type: ignore[arg-type]
    for own in codes:
        late.add(own)
        early.add(own * 0.1 - 10)

    assert {reply.dtype for reply in late._replies} == {np.dtype(np.uint8)}
    assert late.result().tobytes() == early.result().tobytes()


@given(values=arrays(np.uint8, (6, 20, 1), elements=st.integers(0, 1), fill=st.just(0)))
def test_replies_are_ordered_as_their_bytes(values: np.ndarray) -> None:
    replies = [*values, values[0].copy()]

    found = [reply.tobytes() for reply in rules._by_bytes(replies)]
    assert found == sorted(reply.tobytes() for reply in replies)
