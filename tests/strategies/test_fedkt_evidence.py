"""FedKT's votes as evidence: corrected before they are cast, weighted when they are counted."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from clients.app import client_app
from fl_strategies import FedKT, FedKTParty, Knowledge, Party
from fl_strategies.aggregation.pool import EvidencePool
from fl_strategies.aggregation.votes import (
    CLASS_COUNTS,
    VOTE_STRENGTH,
    corrected_labels,
    vote_evidence,
)
from fl_strategies.errors import InvalidParameter, KnowledgeMismatch, PrivacyBudgetExceeded
from fl_strategies.party.role import PartyState
from fl_strategies.privacy.bounds.theorems import gaussian_epsilon
from fl_strategies.privacy.events import GaussianEvent, NoisyMaxEvent
from fl_strategies.privacy.mechanisms import GaussianSums
from fl_strategies.strategies.fedkt.party import teacher_counts, train_teachers
from fl_strategies.strategies.fedkt.server import PartyVotes
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import pack_labels, unpack_labels
from simulations.runtime.local import run_local
from tests.kept import with_journal
from tests.toys import (
    NUM_CLASSES,
    PUBLIC,
    PUBLIC_LABELS,
    CentroidLearner,
    PrivatelyFitted,
    blobs,
    hear,
    load_toy_party,
    toy_fedkt,
    toy_party,
    watched,
)

L1 = {"privacy_level": "L1", "gamma": 1.0}
L2 = {"privacy_level": "L2", "gamma": 1.0}
COUNTED = {**L2, "vote_weights": "noisy-counts"}
BOUGHT = {"privacy_level": "L2", "target_epsilon": 2.0, "vote_weights": "noisy-counts"}


class CountedLearner(CentroidLearner):
    """Answers with the class shares of its records, as most models do."""

    trained = 0

    def fit(self, x: np.ndarray, y: np.ndarray, *, rng: np.random.Generator) -> Any:
        type(self).trained += 1
        self.shares = np.bincount(y, minlength=NUM_CLASSES) / len(y)
        return super().fit(x, y, rng=rng)

    def logits(self, x: np.ndarray) -> np.ndarray:
        return super().logits(x) + np.log(np.maximum(self.shares, 1e-9))


def config(**changes: Any) -> ConfigRecord:
    return ConfigRecord({**toy_fedkt(**changes).party_config(), keys.SEED: 0})


def train(party: Party, **changes: Any) -> tuple[Knowledge, dict[str, float]]:
    return FedKTParty().train(party, None, config(**changes), PartyState())


def labels_of(knowledge: Knowledge, num_splits: int = 1) -> np.ndarray:
    return unpack_labels(knowledge.arrays["votes"], (num_splits, len(PUBLIC)), NUM_CLASSES)


def one_sided_party(partition_id: int) -> Party:
    """Return a party with 200 records of a class of its own and 10 of each other one."""
    x, y = blobs(900, "one-sided", partition_id)
    sizes = np.where(np.arange(NUM_CLASSES) == partition_id % NUM_CLASSES, 200, 10)
    rows = np.concatenate([np.flatnonzero(y == c)[:n] for c, n in enumerate(sizes)])
    return replace(toy_party(partition_id), x=x[rows], y=y[rows], learner_fn=CountedLearner)


def told(labels: Any, counts: Any) -> Knowledge:
    """Return what a party with one student says."""
    packed = pack_labels(np.array([labels]), NUM_CLASSES)
    return Knowledge("votes", {"votes": packed, CLASS_COUNTS: np.array(counts, dtype=float)})


def winners(strategy: FedKT, replies: list[Knowledge]) -> np.ndarray:
    """Return the labels that a strategy gives to the public rows."""
    seen: list[Any] = []
    strategy.learner_fn = watched(CentroidLearner, seen)
    hear(strategy, *replies)
    strategy.finish()
    return seen[0][1]


def random_replies(count: int) -> list[Knowledge]:
    rng = np.random.default_rng(5)
    return [
        told(rng.integers(NUM_CLASSES, size=len(PUBLIC)), rng.integers(0, 50, NUM_CLASSES) + 1)
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1, 1, "counts")),
        (L1, (1, 1, "none")),
        (L2, (1, 5, "none")),
        ({**L2, "gamma": 0.3}, (1, 14, "none")),
        ({**L2, "gamma": 0.01}, (1, 25, "none")),
        ({**L2, "num_teachers": 3, "num_splits": 2}, (2, 3, "none")),
        ({"num_teachers": 4}, (1, 4, "counts")),
    ],
)
def test_defaults_follow_the_level(changes: Any, expected: tuple[int, int, str]) -> None:
    """Whole-party models unless noise needs teachers: four times its scale, from 5 to 25."""
    options = toy_fedkt(**changes).options

    assert (options.num_splits, options.num_teachers, options.vote_weights) == expected


def test_teachers_leave_their_own_class_shares_at_home() -> None:
    """The votes are those of `corrected_labels`, by the counts of each teacher's subset."""
    party = one_sided_party(0)
    (teacher,) = train_teachers(party, 1, 1, seed=0)
    (counts,) = teacher_counts(party, 1, 1, seed=0)

    corrected, _ = train(party)
    plain, _ = train(party, corrected=False)

    assert counts.tolist() == [200, 10, 10]
    np.testing.assert_array_equal(
        labels_of(corrected)[0], corrected_labels(teacher.logits(PUBLIC), counts)
    )
    np.testing.assert_array_equal(labels_of(plain)[0], teacher.predict(PUBLIC))
    assert (labels_of(corrected) != labels_of(plain)).any()
    right = [(labels_of(votes) == PUBLIC_LABELS).mean() for votes in (corrected, plain)]
    assert right[0] > right[1]


def test_a_teacher_alone_votes_itself_and_trains_no_student() -> None:
    """One model at L0 and L1; where models travel, or noise comes in between, a student too."""
    party = one_sided_party(1)
    trained = []
    for changes in ({}, L1, {"exchange": "models"}, {**L2, "num_teachers": 1}):
        CountedLearner.trained = 0
        train(party, **changes)
        trained.append(CountedLearner.trained)

    assert trained == [1, 1, 2, 2]


def test_weights_and_correction_help_one_sided_parties() -> None:
    """Labels of public rows: plain votes, corrected ones, and with weights and shares."""
    right = []
    for changes in ({"corrected": False, "vote_weights": "none"}, {"vote_weights": "none"}, {}):
        replies = [train(one_sided_party(i), **changes)[0] for i in range(4)]
        labels = winners(toy_fedkt(**changes), replies)
        right.append((labels == PUBLIC_LABELS).mean())

    assert right[0] < min(right[1:])
    assert right[2] > 0.9


@pytest.mark.parametrize("share", ["auto", "pooled", "none", (0.2, 0.3, 0.5), "0.2,0.3,0.5"])
def test_the_server_adds_evidence_up(share: Any) -> None:
    """Labels are the argmax of the pool of `vote_evidence`, whoever answers first."""
    replies = random_replies(9)
    rule = (0.2, 0.3, 0.5) if not isinstance(share, str) or "," in share else share
    pool = EvidencePool(
        (len(PUBLIC), NUM_CLASSES), bound=VOTE_STRENGTH, task="single-label", share=rule
    )
    for reply in replies:
        counts = reply.arrays[CLASS_COUNTS]
        pool.add(vote_evidence(labels_of(reply)[0], counts), counts, "none")

    forth = winners(toy_fedkt(class_share=share), replies)
    back = winners(toy_fedkt(class_share=share), replies[::-1])

    np.testing.assert_array_equal(forth, pool.result().argmax(axis=1))
    np.testing.assert_array_equal(forth, back)


def test_equal_evidence_does_not_always_go_to_class_0() -> None:
    """Two like parties that disagree everywhere: both classes win some rows."""
    replies = [told([c] * len(PUBLIC), [5, 5, 5]) for c in (0, 1)]

    labels = winners(toy_fedkt(class_share="none"), replies)

    assert {*labels} == {0, 1}


def test_a_row_on_which_students_disagree_is_no_evidence() -> None:
    """A party without a consistent vote on a row does not move its label."""
    sure = [Knowledge("votes", {**told([0] * 60, [9, 9, 9]).arrays}) for _ in range(2)]
    for reply in sure:
        reply.arrays["votes"] = pack_labels(np.zeros((2, 60), int), NUM_CLASSES)
    torn = Knowledge(
        "votes",
        {
            "votes": pack_labels(np.stack([np.ones(60, int), np.full(60, 2)]), NUM_CLASSES),
            CLASS_COUNTS: np.array([1.0, 900.0, 900.0]),
        },
    )

    labels = winners(toy_fedkt(num_splits=2, class_share="none"), [*sure, torn])

    # The torn party's records still count in the pooled class shares.
    assert {*labels} == {0}


def kept_votes(strategy: FedKT, reply: Knowledge) -> PartyVotes | None:
    hear(strategy, reply)
    return strategy.replies[0].knowledge.votes


def test_nothing_is_kept_of_weighted_votes() -> None:
    """Sums alone; to trim, the labels and the counts."""
    (reply,) = random_replies(1)

    assert kept_votes(toy_fedkt(), reply) is None
    kept = kept_votes(toy_fedkt(trim_fraction=0.2), reply)
    assert (kept.labels.nbytes, kept.counts.nbytes) == (len(PUBLIC), 8 * NUM_CLASSES)


def test_liars_are_trimmed_before_votes_are_weighted() -> None:
    """Labels are those of a federation in which they never were."""
    honest = [told(PUBLIC_LABELS, [9, 8, 7]) for _ in range(4)]
    liar = told((PUBLIC_LABELS + 1) % NUM_CLASSES, [900, 900, 900])
    strategy = toy_fedkt(trim_fraction=0.2)

    labels = winners(strategy, [*honest, liar])

    assert strategy.trimmed_ == (4,)
    np.testing.assert_array_equal(labels, winners(toy_fedkt(), honest))


@pytest.mark.parametrize(
    "counts",
    [
        None,
        np.array([1.0, 2.0]),
        np.array([1, 2, 3]),
        np.array([1.0, -1.0, 3.0]),
        np.array([1.0, math.nan, 3.0]),
        np.array([0.0, 0.0, 0.0]),
        np.array([0.0, 0.0, 1e-300]),
        np.array([2.0**41, 0.0, 0.0]),
    ],
)
def test_impossible_counts_are_refused(counts: np.ndarray | None) -> None:
    """Untrusted counts are checked before they weigh anything; none is refused as well."""
    own = {} if counts is None else {CLASS_COUNTS: counts}
    votes = Knowledge("votes", {"votes": told([0] * 60, [1, 1, 1]).arrays["votes"], **own})

    with pytest.raises(KnowledgeMismatch, match="class-counts must"):
        toy_fedkt().check(votes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({**L1, "vote_weights": "counts"}, "vote_weights must be auto or none at L1, where"),
        ({**L1, "vote_weights": "noisy-counts"}, "vote_weights must be auto or none at L1"),
        ({**L2, "vote_weights": "counts"}, "at L2, where exact counts would be unprotected"),
        ({"vote_weights": "many"}, "vote_weights must be one of auto, none, counts, noisy"),
        ({**L1, "class_share": "pooled"}, "class_share must be auto or none unless votes are"),
        ({"class_share": "half"}, "class_share must be one of auto, pooled, none, or 3 num"),
        ({**COUNTED, "count_epsilon": -1.0}, "epsilon must be"),
        ({**BOUGHT, "count_epsilon": 2.0}, "count_epsilon must be below target_epsilon, got 2"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: Any, sentence: str) -> None:
    """Each with its rule and value."""
    with pytest.raises(InvalidParameter, match=sentence):
        toy_fedkt(**changes)


@pytest.mark.parametrize(
    ("level", "weights"), [(L1, "counts"), (L1, "noisy-counts"), (L2, "counts"), ({}, "exact")]
)
def test_a_party_refuses_weights_that_its_level_forbids(level: Any, weights: str) -> None:
    """The server may not ask for counts that its own level does not cover."""
    asked = config(**level)
    asked["vote-weights"] = weights

    with pytest.raises(KnowledgeMismatch, match=r"^Server: FedKT: vote_weights must be"):
        FedKTParty().train(toy_party(0), None, asked, PartyState())


@pytest.mark.parametrize(("level", "weights"), [({}, "counts"), (L1, "none"), (L2, "none")])
def test_a_party_left_to_itself_takes_the_weights_of_its_level(
    level: Any, weights: str
) -> None:
    """What is left open sends, and costs, just what the level allows first."""
    said, spent = [], []
    for value in ("auto", weights):
        asked = config(**level)
        asked["vote-weights"] = value
        knowledge, metrics = FedKTParty().train(toy_party(0), None, asked, PartyState())
        said.append(sorted(knowledge.arrays))
        spent.append((metrics[keys.EPSILON_EXAMPLE], metrics[keys.NUM_RELEASES]))

    assert said[0] == said[1]
    assert (CLASS_COUNTS in said[0]) == (weights == "counts")
    assert spent[0] == spent[1]


def test_noisy_counts_leave_as_counts_that_could_be_true() -> None:
    """Whole, none below 0, and none that is mere noise."""
    counts = [
        train(one_sided_party(0), **COUNTED, count_epsilon=0.5)[0].arrays[CLASS_COUNTS]
        for _ in range(20)
    ]

    assert all((own == np.rint(own)).all() and own.min() >= 0 for own in counts)
    assert len({own.tobytes() for own in counts}) > 1
    assert all(own[own > 0].min() >= 8 for own in counts)  # two scales of the noise


def test_votes_and_counts_are_charged_together() -> None:
    """Both in the party's ledger and in the server's; a whole party is not protected."""
    strategy = toy_fedkt(**COUNTED, num_queries=4)
    result = run_local(strategy, client_app(load_toy_party), 4)
    metrics = result.train_metrics_clientapp[1]

    (votes, num_votes), (counts, once) = strategy.ledger_.entries
    assert (votes.sensitivity, num_votes) == (1, 4)
    # A replaced record leaves one count and enters another.
    assert counts.relation == "replace-one"
    assert counts.l2_sensitivity == pytest.approx(math.sqrt(2))
    # Without a target, the counts alone cost 1.
    mu = math.sqrt(2) / counts.scale
    assert gaussian_epsilon(mu, 1e-5) == pytest.approx(1.0, rel=1e-3)
    assert once == 1
    assert metrics[keys.EPSILON_EXAMPLE] == strategy.ledger_.get_epsilon() < math.inf
    assert metrics[keys.NUM_RELEASES] == 4 * 5
    assert metrics[keys.EPSILON_PARTY] == math.inf


def test_a_target_covers_the_counts() -> None:
    """What the counts cost is taken off what the votes may."""
    reported_epsilon, scales = [], []
    for weights in ("none", "noisy-counts"):
        strategy = toy_fedkt(**{**BOUGHT, "vote_weights": weights}, num_queries=20)
        result = run_local(strategy, client_app(load_toy_party), 4)
        reported_epsilon.append(result.train_metrics_clientapp[1][keys.EPSILON_EXAMPLE])
        scales.append(strategy.ledger_.entries[0][0].scale)

    assert all(1.95 < epsilon <= 2.0 for epsilon in reported_epsilon)
    assert scales[0] < scales[1] < 1.12 * scales[0]


def test_bought_counts_take_a_tenth_of_the_target() -> None:
    """As the mu of Gaussian noise, by its closed form; what is asked for by name instead."""
    mus = []
    for asked in ({}, {"count_epsilon": 0.5}):
        noise = toy_fedkt(**BOUGHT, **asked).options.count_noise()
        assert isinstance(noise, GaussianSums)
        mus.append(noise.l2_sensitivity / noise.scale)

    assert gaussian_epsilon(10 * mus[0], 1e-5) == pytest.approx(2.0)
    assert gaussian_epsilon(mus[1], 1e-5) == pytest.approx(0.5)


def test_bought_counts_are_in_the_partys_journal(tmp_path: Path) -> None:
    """Beside the votes, before anything leaves, and within its budget or not at all."""
    party, asked = toy_party(0), {**BOUGHT, "num_queries": 4}
    able, unable = (
        replace(with_journal(party, tmp_path / str(budget), max_epsilon=budget), run="1")
        for budget in (2.0, 1.9)
    )
    train(able, **asked)
    ((votes, num_votes), (counts, once)) = able.journal.releases_of("1")[0]

    assert (type(votes), num_votes) == (NoisyMaxEvent, 4)
    assert (type(counts), once) == (GaussianEvent, 1)
    with pytest.raises(PrivacyBudgetExceeded):
        train(unable, **asked)


def test_seeded_counts_repeat_and_protect_nobody() -> None:
    """A simulation may repeat its noise; epsilon is infinite then, target or not."""
    (first, metrics), (again, _) = (
        train(toy_party(0), **BOUGHT, seeded_noise=True) for _ in range(2)
    )

    assert {n: a.tobytes() for n, a in first.arrays.items()} == {
        n: a.tobytes() for n, a in again.arrays.items()
    }
    assert metrics[keys.EPSILON_EXAMPLE] == math.inf


class PrivatelyTrained(PrivatelyFitted, CountedLearner):
    """Says what its training cost, as a DP-SGD learner does."""


def test_privately_trained_teachers_vote_plainly_where_no_noise_follows() -> None:
    """The exact counts of their records would undo what DP-SGD promises."""
    pytest.importorskip("dp_accounting")
    party = replace(one_sided_party(0), learner_fn=PrivatelyTrained)
    (teacher,) = train_teachers(party, 1, 1, seed=0)

    for level in ({"vote_weights": "none"}, L1):
        votes, metrics = train(party, **level)
        np.testing.assert_array_equal(labels_of(votes)[0], teacher.predict(PUBLIC))
        assert 0 < metrics[keys.EPSILON_EXAMPLE] < math.inf
    _, noisy = train(party, vote_weights="noisy-counts", count_epsilon=0.5)
    _, exact = train(party)

    assert metrics[keys.EPSILON_EXAMPLE] < noisy[keys.EPSILON_EXAMPLE] < math.inf
    assert exact[keys.EPSILON_EXAMPLE] == math.inf
