"""FedMD with evidence: parties whose classes differ, and what they send."""

from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord

from fl_strategies import Party
from fl_strategies.errors import InvalidParameter, KnowledgeMismatch
from fl_strategies.party.role import PartyState
from fl_strategies.strategies.fedmd import FedMD, FedMDParty
from fl_strategies.strategies.fedmd.options import EVIDENCE_LIMIT
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import unpack_labels
from tests.strategies.test_fedmd import (
    Federation,
    Refitted,
    linear_fedmd,
    linear_party,
    refitted_party,
    request,
    train,
)
from tests.toys import NUM_CLASSES, PUBLIC, PUBLIC_LABELS, blobs

PAYLOADS = ["logits", "softmax", "argmax"]
COUNTS = [(1500, 3, 3), (1500, 3, 3), (1500, 3, 3), (3, 1450, 1450), (3, 1450, 1450)]
"""Three of five parties hardly know two of the classes, which the others know well."""
VARIANCE = 0.8**2


class Gaussians:
    """The exact posterior of round blobs, with the class shares of its training rows."""

    num_classes = NUM_CLASSES
    fits: ClassVar[list[int]] = []

    def fit(self, x: np.ndarray, y: np.ndarray, *, rng: Any) -> Self:  # noqa: ARG002
        type(self).fits.append(len(y))
        known = [
            x[y == c].mean(axis=0) if (y == c).any() else np.full(2, 1e3) for c in range(3)
        ]
        self.centres = np.array(known)
        self.prior = (np.bincount(y, minlength=3) + 0.5) / (len(y) + 1.5)
        return self

    def logits(self, x: np.ndarray) -> np.ndarray:
        distance = ((x[:, None] - self.centres) ** 2).sum(axis=2)
        return np.maximum(np.log(self.prior) - distance / (2 * VARIANCE), -1e3)

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.logits(x).argmax(axis=1)


def one_sided(partition_id: int) -> Party:
    """Return a party with so many records of each class."""
    x, y = blobs(9000, "one-sided", partition_id)
    rows = [np.flatnonzero(y == c)[:n] for c, n in enumerate(COUNTS[partition_id])]
    kept = np.concatenate(rows)
    return refitted_party(partition_id, x=x[kept], y=y[kept], learner_fn=Gaussians)


def right(strategy: FedMD) -> float:
    """Return how much of the consensus is right."""
    answers = strategy.consensus_
    labels = answers if answers.ndim == 1 else answers.argmax(axis=1)
    return float(np.mean(labels == PUBLIC_LABELS[strategy.indices_]))


def one_sided_run(
    rule: str, payload: str = "argmax", num_rounds: int = 2, **more: Any
) -> FedMD:
    options = {"num_parties": 5, "num_public": 60, "class_share": "none", **more}
    strategy = linear_fedmd(consensus=rule, payload=payload, **options)
    Federation(one_sided, num_nodes=5).run(strategy, num_rounds)
    return strategy


def answered(strategy: FedMD, federation: Federation) -> list[Any]:
    grid = federation.grid
    return list(
        grid.send_and_receive(strategy.ask_parties(1, ArrayRecord(), ConfigRecord(), grid))
    )


@pytest.mark.parametrize("payload", PAYLOADS)
def test_parties_of_opposite_classes_end_right(payload: str) -> None:
    """What they know is added up, not how many records of each class they have."""
    assert right(one_sided_run("evidence", payload)) > 0.94
    assert right(one_sided_run("mean", payload)) < 0.94


def test_votes_are_those_of_equal_class_shares() -> None:
    """In closed form: the nearest centre, whatever classes a party has most of."""
    strategy = linear_fedmd(num_public=60)
    for number in range(5):
        party = one_sided(number)
        reply, _ = train(party, strategy)
        model = Gaussians().fit(party.x, party.y, rng=None)
        nearest = ((PUBLIC[:, None] - model.centres) ** 2).sum(axis=2).argmin(axis=1)
        labels = unpack_labels(reply.arrays["labels"], (60,), 3)
        np.testing.assert_array_equal(labels, nearest)
        assert (model.predict(PUBLIC) != nearest).any()


def test_it_is_the_default_where_nothing_is_promised() -> None:
    """Noise, samples and pre-training keep the mean."""
    assert linear_fedmd().options.consensus == "evidence"
    assert linear_fedmd(release="nfdp", num_samples=9).options.consensus == "mean"
    assert linear_fedmd(release="ldp", payload="softmax", sigma=9.0).options.consensus == "mean"
    assert linear_fedmd(pretrain_epochs=1).options.consensus == "mean"
    with pytest.raises(
        InvalidParameter, match="consensus must be another one with pre-training"
    ):
        linear_fedmd(pretrain_epochs=1, consensus="evidence")
    with pytest.raises(InvalidParameter, match="class_share must be one of auto"):
        linear_fedmd(class_share="half")


@pytest.mark.parametrize("payload", PAYLOADS)
def test_the_order_of_replies_changes_no_bit(payload: str) -> None:
    """Sums are whole numbers, whoever comes first."""
    bits = set()
    for order in (slice(None), slice(None, None, -1)):
        strategy = linear_fedmd(payload=payload)
        strategy.aggregate_train(1, answered(strategy, Federation())[order])
        bits.add(strategy.consensus_.tobytes())
    assert len(bits) == 1


def test_two_calls_are_one_run_to_the_bit() -> None:
    """What a party has found out about public rows is kept with everything else."""
    at_once, in_parts = Federation(one_sided, num_nodes=5), Federation(one_sided, num_nodes=5)
    strategies = [linear_fedmd(payload="softmax", num_parties=5) for _ in "ab"]
    at_once.run(strategies[0], 3)
    in_parts.run(strategies[1], 1)
    in_parts.run(strategies[1], 2)

    assert strategies[0].consensus_.tobytes() == strategies[1].consensus_.tobytes()
    assert at_once.bits() == in_parts.bits()


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        (np.array([2**23, 1, 1]), "class-counts must be 3 whole numbers"),
        (np.array([-1, 1, 1]), "class-counts must be 3 whole numbers"),
        (np.array([1.0, 1.0, 1.0]), "class-counts must be 3 whole numbers"),
        (np.array([1, 1]), "class-counts must be 3 whole numbers"),
        (np.array([0, 0, 0]), "class-counts must be above 0 for a class"),
    ],
)
def test_impossible_counts_are_refused(counts: np.ndarray, sentence: str) -> None:
    """Before they weigh anything."""
    strategy = linear_fedmd()
    reply, _ = train(linear_party(0), strategy)
    with pytest.raises(KnowledgeMismatch, match=sentence):
        strategy.check(replace(reply, arrays={**reply.arrays, "class-counts": counts}))
    with pytest.raises(KnowledgeMismatch, match="contrast must be one of none, public"):
        strategy.check(replace(reply, meta={**reply.meta, "contrast": "all"}))
    scores = np.full((30, 3), 2 * EVIDENCE_LIMIT, np.float32)
    arrays = {"scores": scores, "class-counts": np.ones(3, np.int64)}
    with pytest.raises(KnowledgeMismatch, match="scores must be from -16 to 16"):
        linear_fedmd(payload="softmax").check(replace(reply, arrays=arrays))


def test_counts_that_left_are_in_the_ledger() -> None:
    """Exact counts are named, on both sides."""
    strategy = linear_fedmd()
    Federation().run(strategy)
    reply, metrics = train(linear_party(0), strategy)
    np.testing.assert_array_equal(reply.arrays["class-counts"], np.bincount(linear_party(0).y))
    assert metrics[keys.EPSILON_EXAMPLE] == np.inf
    assert "exact class counts left the party" in strategy.ledger_.statement()


def test_a_model_fitted_to_a_consensus_is_corrected_by_both_its_parts() -> None:
    """Its class shares are those of records and consensus together."""
    strategy, state = linear_fedmd(payload="softmax"), PartyState()
    party = one_sided(0)
    train(party, strategy, state)
    Federation(one_sided, num_nodes=5).run(strategy)
    reply, _ = FedMDParty().train(party, strategy.state.delivery, request(strategy, 2), state)

    # With the exact shares taken out, the evidence is that of equal shares, up to a constant.
    scores = reply.arrays["scores"]
    np.testing.assert_allclose(scores.mean(axis=1), 0, atol=1e-5)
    np.testing.assert_array_equal(reply.arrays["class-counts"], np.bincount(party.y))
    assert reply.meta["contrast"] in ("none", "uncovered")


def test_records_are_compared_with_public_rows_once() -> None:
    """Two small fits in the first round, none in the second."""
    strategy, state = linear_fedmd(), PartyState()
    Gaussians.fits.clear()
    party = one_sided(0)
    train(party, strategy, state)
    first = len(Gaussians.fits)
    train(party, strategy, state, 2)

    assert (first, len(Gaussians.fits)) == (3, 4)


def test_public_rows_of_another_kind_are_noticed() -> None:
    """Parties say so in every round, and shares are then not forced upon the rows."""
    party = refitted_party(0, public=PUBLIC + 30.0, learner_fn=Refitted)
    strategy, state = linear_fedmd(public=PUBLIC + 30.0), PartyState()
    for server_round in (1, 2):
        reply, _ = train(party, strategy, state, server_round)
        assert reply.meta["contrast"] == "uncovered"
    known, _ = train(refitted_party(0), linear_fedmd())
    assert known.meta["contrast"] == "none"
