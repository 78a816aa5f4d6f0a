"""What one record, or one party, can move in FedKT: exactly what its noise is made for."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from fl_strategies import FedKTParty, Knowledge, Party
from fl_strategies.aggregation.votes import CLASS_COUNTS, class_counts, corrected_labels
from fl_strategies.party.role import PartyState
from fl_strategies.privacy.mechanisms import GaussianSums, LaplaceCounts, NoisyMax, Release
from fl_strategies.privacy.noise import VotePrivacy
from fl_strategies.strategies.fedkt.options import FedKTOptions
from fl_strategies.strategies.fedkt.party import (
    deal_records,
    teacher_counts,
    teacher_votes,
    train_teachers,
)
from fl_strategies.wire import keys
from tests.toys import NUM_CLASSES, PUBLIC, hear, toy_fedkt, toy_party

SPLITS, TEACHERS, RECORDS = 2, 6, 30
L2 = {
    "privacy_level": "L2",
    "gamma": 0.5,
    "num_queries": 20,
    "num_splits": SPLITS,
    "num_teachers": TEACHERS,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {**L2, "corrected": False},
    "corrected": L2,
    "noisy-counts": {**L2, "vote_weights": "noisy-counts"},
    "scores": {**L2, "vote_weights": "noisy-counts", "exchange": "scores"},
    "calibrated": {**L2, "vote_weights": "noisy-counts", "gamma": None, "target_epsilon": 3.0},
}


def replaced(party: Party, position: int, x: Any, label: int) -> Party:
    """Return the party with another record in one place."""
    rows, labels = party.x.copy(), party.y.copy()
    rows[position], labels[position] = x, label
    return replace(party, x=rows, y=labels)


def last_of_a_class(party: Party) -> list[int]:
    """Return positions of records that are the only one of their class in some subset."""
    return [
        int(row)
        for subsets in deal_records(party, SPLITS, TEACHERS, seed=0)
        for rows in subsets
        for row in rows
        if (party.y[rows] == party.y[row]).sum() == 1
    ]


def neighbours(party: Party) -> Iterator[Party]:
    """Yield parties one record apart: far away, of other classes, or the last of a class."""
    for position in [0, 7, 29, *last_of_a_class(party)[:6]]:
        own = int(party.y[position])
        for label in range(NUM_CLASSES):
            yield replaced(party, position, [50.0, -50.0], label)
        yield replaced(party, position, party.x[position], (own + 1) % NUM_CLASSES)


def teacher_labels(party: Party) -> np.ndarray:
    """Return every teacher's corrected votes, (num_teachers of all splits, num_public)."""
    teachers = train_teachers(party, SPLITS, TEACHERS, seed=0)
    counts = teacher_counts(party, SPLITS, TEACHERS, seed=0)
    pairs = zip(teachers, counts, strict=True)
    return np.stack([corrected_labels(one.logits(PUBLIC), own) for one, own in pairs])


def counted(party: Party) -> np.ndarray:
    teachers = train_teachers(party, SPLITS, TEACHERS, seed=0)
    counts = teacher_counts(party, SPLITS, TEACHERS, seed=0)
    return teacher_votes(party, teachers, SPLITS, counts)


def test_one_record_moves_the_vote_of_one_teacher_a_split() -> None:
    """Also where a class goes from a subset, or comes to it; nobody else's vote moves."""
    party = toy_party(0, num_records=RECORDS)
    first, votes = teacher_labels(party), counted(party)
    lost, moved_any = 0, False
    for other in neighbours(party):
        changed = (teacher_labels(other) != first).any(axis=1).reshape(SPLITS, TEACHERS)
        moved = counted(other) - votes
        before, after = (
            np.stack(teacher_counts(one, SPLITS, TEACHERS, seed=0)) > 0
            for one in (party, other)
        )
        lost += bool((before != after).any())
        moved_any |= bool(moved.any())

        assert (changed.sum(axis=1) <= 1).all()
        assert np.abs(moved).max() <= 1
        assert np.abs(moved).sum(axis=2).max() <= 2

    assert lost >= 6
    assert moved_any


def test_one_party_moves_s_votes_on_the_server() -> None:
    """At L1 the replaced party's own students decide s votes a row and nothing else."""
    asked = {"privacy_level": "L1", "gamma": 1.0, "num_splits": SPLITS, "num_teachers": 3}
    config = ConfigRecord({**toy_fedkt(**asked).party_config(), keys.SEED: 0})
    other = replace(toy_party(3, num_records=8), y=np.full(8, 2))

    tallies = []
    for parties in (
        [*map(toy_party, range(3)), toy_party(3)],
        [*map(toy_party, range(3)), other],
    ):
        strategy = toy_fedkt(**asked)
        said = [FedKTParty().train(party, None, config, PartyState())[0] for party in parties]
        hear(strategy, *said)
        tallies.append(strategy._votes.counts)
    moved = np.abs(tallies[0] - tallies[1])

    assert moved.max() == SPLITS
    assert moved.sum(axis=1).max() <= 2 * SPLITS


def test_one_record_moves_the_counts_by_what_is_charged() -> None:
    """Two counts by one each: 2 in all, and the root of 2 as a vector."""
    party = toy_party(0, num_records=RECORDS)
    first = class_counts(party.y, NUM_CLASSES, party.task)
    moved = [
        class_counts(other.y, NUM_CLASSES, other.task) - first for other in neighbours(party)
    ]
    laplace = FedKTOptions().count_noise()
    gaussian = FedKTOptions(privacy=VotePrivacy(level="L2", gamma=1.0)).count_noise()

    assert isinstance(laplace, LaplaceCounts)
    assert isinstance(gaussian, GaussianSums)
    assert max(np.abs(own).sum() for own in moved) == laplace.l1_sensitivity
    assert max(np.linalg.norm(own) for own in moved) == pytest.approx(gaussian.l2_sensitivity)


def reply(party: Party, **changes: Any) -> tuple[Knowledge, dict[str, float]]:
    asked = ConfigRecord({**toy_fedkt(**changes).party_config(), keys.SEED: 0})
    return FedKTParty().train(party, None, asked, PartyState())


def told(party: Party, **changes: Any) -> tuple[Any, ...]:
    """Return all that a reply says, as bytes and text."""
    knowledge, metrics = reply(party, **changes)
    arrays = {name: (a.dtype, a.shape, a.tobytes()) for name, a in knowledge.arrays.items()}
    return (
        knowledge.kind,
        dict(knowledge.meta),
        arrays,
        {n: repr(m) for n, m in metrics.items()},
    )


@pytest.fixture
def fixed_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all noisy releases say the same, whatever they are given."""

    def same_labels(self: NoisyMax, counts: np.ndarray, rng: Any = None) -> Release:  # noqa: ARG001
        return Release(np.arange(len(counts)) % NUM_CLASSES, self.charges(len(counts)))

    def same_counts(self: GaussianSums, counts: np.ndarray, rng: Any = None) -> Release:  # noqa: ARG001
        return Release(np.full(counts.shape, 9.0), self.charges(counts.size))

    monkeypatch.setattr(NoisyMax, "release", same_labels)
    monkeypatch.setattr(GaussianSums, "release", same_counts)


@pytest.mark.usefixtures("fixed_noise")
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_but_noisy_releases_tells_neighbours_apart(variant: str) -> None:
    """With noise that does not see the data, whole replies at L2 are equal byte by byte."""
    party = toy_party(0, num_records=RECORDS)
    first = told(party, **VARIANTS[variant])

    assert all(told(other, **VARIANTS[variant]) == first for other in neighbours(party))


@pytest.mark.usefixtures("fixed_noise")
def test_exact_counts_would_tell_neighbours_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: counts that leave without noise are seen."""

    def exact(self: GaussianSums, counts: np.ndarray, rng: Any = None) -> Release:  # noqa: ARG001
        return Release(counts.astype(np.float64), self.charges(counts.size))

    monkeypatch.setattr(GaussianSums, "release", exact)
    party = toy_party(0, num_records=RECORDS)
    own = (party.y[0] + 1) % NUM_CLASSES
    pair = party, replaced(party, 0, party.x[0], int(own))
    first, second = (reply(one, **VARIANTS["noisy-counts"])[0] for one in pair)

    assert not np.array_equal(first.arrays[CLASS_COUNTS], second.arrays[CLASS_COUNTS])
