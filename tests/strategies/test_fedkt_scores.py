"""Students of FedKT-L2 that say how sure they are, beside class counts that were bought."""

from typing import Any

import numpy as np
import pytest

from clients.app import client_app
from fl_strategies import FedKT, Knowledge
from fl_strategies.aggregation.votes import CLASS_COUNTS
from fl_strategies.errors import InvalidParameter, KnowledgeMismatch
from fl_strategies.strategies.fedkt.options import (
    SCORE_STRENGTH,
    SCORES,
    one_scale,
    score_evidence,
)
from simulations.runtime.local import run_local
from tests.toys import NUM_CLASSES, PUBLIC, TEST, accuracy, load_toy_party, toy_fedkt

BOUGHT = {
    "privacy_level": "L2",
    "gamma": 1.0,
    "vote_weights": "noisy-counts",
    "count_epsilon": 20.0,
}
SCORED = {**BOUGHT, "exchange": "scores"}


def scores() -> np.ndarray:
    return np.random.default_rng(2).normal(size=(50, NUM_CLASSES))


def test_scores_count_alike_however_bold_a_student_is() -> None:
    """Neither its temperature, nor what it says of all rows, nor of a row's classes matters."""
    usual, rows = scores(), np.arange(50.0)[:, None]
    bold = 7 * usual + np.arange(NUM_CLASSES) + rows

    np.testing.assert_allclose(one_scale(bold), one_scale(usual))
    assert np.sqrt(np.mean(one_scale(usual) ** 2)) == pytest.approx(SCORE_STRENGTH)


@pytest.mark.parametrize("said", [np.zeros((9, 3)), np.tile([1e6, -1e6, 0.1], (9, 1))])
def test_a_student_that_says_the_same_of_all_rows_has_no_opinion(said: np.ndarray) -> None:
    """Rounding errors of a constant are not blown up to evidence."""
    assert not one_scale(said).any()


def test_evidence_is_about_classes_with_records_only() -> None:
    """And no sender is louder than another, whatever levels it names."""
    counts = np.array([5.0, 0.0, 9.0])[:NUM_CLASSES]
    codes = np.random.default_rng(3).integers(0, 2, (50, NUM_CLASSES)) * 255
    evidence = score_evidence(codes.astype(np.uint8), counts)

    assert not evidence[:, counts == 0].any()
    assert np.abs(evidence).max() <= SCORES.bound
    inner = evidence[:, counts > 0]
    assert np.sqrt(np.mean(inner**2)) == pytest.approx(SCORE_STRENGTH)


def test_scores_cost_what_votes_do_and_take_a_byte_each() -> None:
    """The same releases in the ledger, and a final model that has learned."""
    ledgers, models = [], []
    for asked in (BOUGHT, SCORED):
        strategy = toy_fedkt(**asked)
        result = run_local(strategy, client_app(load_toy_party), 4)
        ledgers.append(strategy.ledger_.entries)
        models.append(strategy.model_)
    received = result.train_metrics_clientapp[1]["num-bytes-received"]

    assert ledgers[0] == ledgers[1]
    assert accuracy(models[1].predict(TEST[0])) > 0.8
    assert (
        PUBLIC.shape[0] * NUM_CLASSES * 4 <= received < 4 * (len(PUBLIC) * NUM_CLASSES + 2000)
    )  # type: ignore[operator]


def said(codes: np.ndarray) -> Knowledge:
    packed = SCORES.to_wire(SCORES.decode(codes), np.random.default_rng(0))
    counts = np.full(NUM_CLASSES, 9.0)
    return Knowledge("scores", {"scores": packed, CLASS_COUNTS: counts})


def test_received_scores_are_read_as_they_were_sent() -> None:
    """Level by level; the likeliest class is the vote."""
    codes = np.random.default_rng(4).integers(0, 256, (len(PUBLIC), NUM_CLASSES))
    votes = toy_fedkt(**SCORED).check(said(codes)).votes
    assert votes is not None

    np.testing.assert_array_equal(votes.scores, codes)
    np.testing.assert_array_equal(votes.labels, codes.argmax(axis=1))


def test_scores_of_another_size_are_refused() -> None:
    """A row too few, or none at all."""
    strategy: FedKT = toy_fedkt(**SCORED)
    codes = np.zeros((len(PUBLIC) - 1, NUM_CLASSES), dtype=np.int64)
    empty = Knowledge("scores", {CLASS_COUNTS: np.full(NUM_CLASSES, 9.0)})

    for knowledge in (said(codes), empty):
        with pytest.raises(KnowledgeMismatch, match="scores"):
            strategy.check(knowledge)


@pytest.mark.parametrize(
    "asked", [{}, {"privacy_level": "L1", "gamma": 1.0}, {"privacy_level": "L2", "gamma": 1.0}]
)
def test_scores_leave_only_where_they_are_protected_and_weighed(asked: Any) -> None:
    """At L0 and L1 they would say more than votes do, without noise."""
    with pytest.raises(InvalidParameter, match="exchange must be votes or models unless"):
        toy_fedkt(**asked, exchange="scores")
