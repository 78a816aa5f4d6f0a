"""An attack on what a FedKT party sends at L2 with noisy class counts, through its own code."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from fl_strategies import FedKTParty, Party
from fl_strategies.aggregation.votes import CLASS_COUNTS
from fl_strategies.party.role import PartyState
from fl_strategies.privacy.mechanisms import GaussianSums, Release
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import unpack_labels
from tests.audit.mechanisms import lower_bounds
from tests.toys import CentroidLearner, toy_fedkt

RUNS = 1000
NUM_QUERIES = 2
POINTS = np.array([[0.0, 0.0], [3.0, 0.0]])
ASKED = {
    "privacy_level": "L2",
    "gamma": 0.05,
    "num_teachers": 3,
    "public": POINTS,
    "vote_weights": "noisy-counts",
}


class WholeSample(CentroidLearner):
    """Centroids of all rows, so that a small party's teachers know their records."""

    def fit(self, x: np.ndarray, y: np.ndarray, *, rng: np.random.Generator) -> Any:  # noqa: ARG002
        for label in np.unique(y):
            self.centroids[label] = x[y == label].mean(axis=0)
        return self


def party(labels: list[int]) -> Party:
    """Return a party whose records lie where the public rows do."""
    y = np.array(labels)
    return Party(
        x=np.resize(POINTS, (len(y), 2)),
        y=y,
        public=POINTS,
        num_classes=3,
        learner_fn=WholeSample,
        learner_name="centroid",
    )


NEIGHBOURS = party([0] * 20 + [1] * 20), party([1] + [0] * 19 + [1] * 20)


def replies(
    own: Party, count_epsilon: float, rng: np.random.Generator
) -> tuple[np.ndarray, float]:
    """Return what the server sees of many runs: class counts, then labels; and the claim."""
    strategy = toy_fedkt(**ASKED, count_epsilon=count_epsilon)
    asked = ConfigRecord({**strategy.party_config(), keys.SEED: 0})
    seen = np.empty((RUNS, 3 + NUM_QUERIES))
    for run in range(RUNS):
        moved = replace(own, partition_id=int(rng.integers(2**31)))
        knowledge, metrics = FedKTParty().train(moved, None, asked, PartyState())
        labels = unpack_labels(knowledge.arrays["votes"], (1, NUM_QUERIES), 3)
        seen[run] = [*knowledge.arrays[CLASS_COUNTS], *labels[0]]
    return seen, metrics[keys.EPSILON_EXAMPLE]


def proved_epsilon(count_epsilon: float) -> tuple[float, float]:
    """Return what bets on counts, on labels and on both prove, and what is claimed."""
    rng = np.random.default_rng(3)
    (first, claimed), (second, _) = (replies(own, count_epsilon, rng) for own in NEIGHBOURS)
    bets = [lambda s, t=t: s[:, 0] - s[:, 1] >= t for t in range(-12, 13)]
    bets += [lambda s, c=c: s[:, 3] == c for c in range(3)]
    bets += [lambda s, t=t: (s[:, 0] - s[:, 1] >= t) & (s[:, 3] == 0) for t in (-4, 0, 4)]
    hits = np.array([[int(bet(sent).sum()) for bet in bets] for sent in (first, second)])
    return float(lower_bounds(hits, RUNS, np.array([1e-5]))[0]), claimed


@pytest.mark.slow
def test_noisy_counts_and_votes_keep_their_promise() -> None:
    """No bet proves more than votes and counts were charged together."""
    proved, claimed = proved_epsilon(6.0)

    assert 0.3 < proved <= claimed


@pytest.mark.slow
def test_exact_counts_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A party that charges for noise on its counts and draws none is found out."""

    def exact(self: GaussianSums, counts: np.ndarray, rng: Any = None) -> Release:  # noqa: ARG001
        return Release(counts.astype(np.float64), self.charges(counts.size))

    monkeypatch.setattr(GaussianSums, "release", exact)
    proved, claimed = proved_epsilon(2.0)

    assert proved > 1.2 * claimed
