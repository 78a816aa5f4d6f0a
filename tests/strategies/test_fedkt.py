import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context

from clients.app import client_app
from fl_strategies import FedKT, FedKTOptions, FedKTParty, Knowledge, Learner, Party
from fl_strategies._util import derive_rng
from fl_strategies.errors import (
    InvalidParameter,
    KnowledgeMismatch,
    NotFitted,
    UnsupportedLearner,
)
from fl_strategies.learners import fit_ensemble
from fl_strategies.party.role import PartyState
from fl_strategies.strategies.fedkt.party import teacher_votes, train_teachers
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import pack_labels
from simulations.runtime.local import run_local
from tests.toys import (
    NUM_CLASSES,
    PAPER,
    PUBLIC,
    PUBLIC_LABELS,
    TEST,
    CentroidLearner,
    EditedGrid,
    accuracy,
    hear,
    load_toy_party,
    loading,
    paper_fedkt,
    toy_fedkt,
    toy_party,
    watched,
    without_records,
)

UNEVEN = {**PAPER, "consistent": False}


class Recorder:
    """A learner that remembers what it was trained on and answers a constant."""

    num_classes = NUM_CLASSES
    fitted: list[tuple[np.ndarray, np.ndarray]]

    def __init__(self, log: list[tuple[np.ndarray, np.ndarray]], answer: int = 0) -> None:
        self.log, self.answer = log, answer

    def fit(self, x: np.ndarray, y: np.ndarray, *, rng: np.random.Generator) -> "Recorder":  # noqa: ARG002
        self.log.append((x, y))
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.full(len(x), self.answer)

    def logits(self, x: np.ndarray) -> np.ndarray:
        return np.eye(NUM_CLASSES)[self.predict(x)]


def config(**changes: Any) -> ConfigRecord:
    return ConfigRecord({**paper_fedkt().party_config(), keys.SEED: 0, **changes})


def train(party: Party, **changes: Any) -> tuple[Knowledge, dict[str, float]]:
    return FedKTParty().train(party, None, config(**changes), PartyState())


def votes_of(party: Party, num_splits: int, num_teachers: int) -> np.ndarray:
    teachers = train_teachers(party, num_splits, num_teachers, seed=0)
    return teacher_votes(party, teachers, num_splits)


def aggregate(strategy: FedKT, *labels: Any) -> tuple[Any, dict[str, float]]:
    """Let a strategy read and count the labels of each party's students."""
    packed = [pack_labels(np.array(rows), strategy.num_classes) for rows in labels]
    hear(strategy, *(Knowledge("votes", {"votes": votes}) for votes in packed))
    return strategy.finish()


def small_fedkt(num_rows: int, log: list[Any]) -> FedKT:
    return paper_fedkt(public=PUBLIC[:num_rows], learner_fn=lambda: Recorder(log))


def test_partitions_are_disjoint_and_complete() -> None:
    """Each of the s partitions deals every record to exactly one of t teachers."""
    seen: list[Any] = []
    party = toy_party(0, num_records=43)
    recording = replace(party, teacher_fn=lambda: Recorder(seen))

    votes_of(recording, 3, 5)

    assert len(seen) == 15
    for split in range(3):
        sizes = [len(x) for x, _ in seen[5 * split : 5 * split + 5]]
        rows = np.concatenate([x for x, _ in seen[5 * split : 5 * split + 5]])
        assert max(sizes) - min(sizes) <= 1
        np.testing.assert_array_equal(
            np.unique(rows, axis=0), np.unique(party.x, axis=0), err_msg="records are missing"
        )
        assert len(rows) == 43
    assert not np.array_equal(seen[0][0], seen[5][0]), "partitions are independent"


def test_a_record_reaches_the_same_subset_whatever_its_value() -> None:
    """Replacing one record changes one teacher of each partition and no other.

    The privacy analysis of L2 rests on this, so it holds at every level.
    """
    party = toy_party(0)
    changed_x, changed_y = party.x.copy(), party.y.copy()
    changed_x[7], changed_y[7] = 99.0, (changed_y[7] + 1) % NUM_CLASSES
    logs: list[list[tuple[np.ndarray, np.ndarray]]] = [[], []]
    for log, (x, y) in zip(logs, [(party.x, party.y), (changed_x, changed_y)], strict=True):
        votes_of(replace(party, x=x, y=y, teacher_fn=lambda log=log: Recorder(log)), 2, 5)

    differing = [
        not (np.array_equal(a[0], b[0]) and np.array_equal(a[1], b[1]))
        for a, b in zip(*logs, strict=True)
    ]

    assert [sum(differing[:5]), sum(differing[5:])] == [1, 1]


def test_students_learn_the_majority_of_their_teachers() -> None:
    """Every teacher has a vote, and where all agree the student was trained on their answer."""
    log: list[Any] = []
    party = replace(toy_party(0), teacher_fn=CentroidLearner)

    train(replace(party, learner_fn=lambda: Recorder(log)))

    counts = votes_of(party, 2, 5)
    assert counts.shape == (2, len(PUBLIC), NUM_CLASSES)
    np.testing.assert_array_equal(counts.sum(axis=2), 5)
    for split, (x, y) in enumerate(log):
        unanimous = counts[split].max(axis=1) == 5
        np.testing.assert_array_equal(x, PUBLIC)
        np.testing.assert_array_equal(y[unanimous], counts[split].argmax(axis=1)[unanimous])
    assert len(log) == 2


@pytest.mark.parametrize(
    ("consistent", "fourth", "label"), [(True, [], 2), (False, [[[1], [1]]], 1)]
)
def test_server_counts_consistent_parties_only_unless_students_vote_by_themselves(
    consistent: bool, fourth: list[Any], label: int
) -> None:
    """Of (0,1), (0,1), (2,2) the answer is 2, though 0 and 1 have as many votes.

    By themselves all three classes have two votes each, and one more party decides.
    """
    log: list[Any] = []
    strategy = paper_fedkt(
        public=PUBLIC[:1], learner_fn=lambda: Recorder(log), consistent=consistent
    )

    aggregate(strategy, [[0], [1]], [[0], [1]], [[2], [2]], *fourth)

    np.testing.assert_array_equal(log[0][1], [label])


def test_one_party_has_as_many_votes_with_and_without_consistency() -> None:
    """So noise for one party's votes covers both; counts are those of numpy."""
    labels = np.array([[0, 1, 2], [0, 2, 2]])
    for consistent, expected in (
        (True, [[2, 0, 0], [0, 0, 0], [0, 0, 2]]),
        (False, [[2, 0, 0], [0, 1, 1], [0, 0, 2]]),
    ):
        strategy = paper_fedkt(public=PUBLIC[:3], consistent=consistent)
        hear(strategy, Knowledge("votes", {"votes": pack_labels(labels, NUM_CLASSES)}))
        np.testing.assert_array_equal(strategy._votes.counts, expected)


def test_rows_without_a_consistent_party_are_left_out_and_counted() -> None:
    """Row 1 has no consistent party, so it takes no part and is reported."""
    log: list[Any] = []

    _, metrics = aggregate(small_fedkt(2, log), [[1, 0], [1, 2]])

    np.testing.assert_array_equal(log[0][0], PUBLIC[:1])
    assert metrics[keys.NUM_UNLABELLED] == 1


def test_without_any_consistent_row_there_is_no_model_but_a_reason() -> None:
    """The strategy ends without a model and says why."""
    strategy = small_fedkt(1, [])

    arrays, metrics = aggregate(strategy, [[0], [1]], [[1], [2]])

    assert arrays is None
    assert metrics[keys.NUM_UNLABELLED] == 1
    with pytest.raises(NotFitted, match="got none: no public row got a label"):
        strategy.model_  # noqa: B018


def test_ties_on_the_server_are_not_always_class_0() -> None:
    """Two parties disagree on every row: both classes win some rows, and a seed decides."""
    num_rows = len(PUBLIC)
    log: list[Any] = []
    tied = [[0] * num_rows] * 2, [[1] * num_rows] * 2

    for _ in range(2):
        aggregate(small_fedkt(num_rows, log), *tied)

    assert 10 < log[0][1].sum() < 50
    np.testing.assert_array_equal(log[0][1], log[1][1])


@pytest.mark.parametrize("changes", [PAPER, {"num_teachers": 3}])
def test_votes_and_models_give_the_identical_final_model(changes: dict[str, Any]) -> None:
    """Sending labels or sending students leads to the same bits, also of weighted votes."""
    strategies = [toy_fedkt(exchange=exchange, **changes) for exchange in ("votes", "models")]
    for strategy in strategies:
        run_local(strategy, client_app(load_toy_party), 4)

    votes, models = (strategy.model_.to_arrays()["centroids"] for strategy in strategies)
    assert votes.tobytes() == models.tobytes()
    assert accuracy(strategies[0].model_.predict(TEST[0])) > 0.9


def test_metrics_tell_agreement_and_no_guarantee() -> None:
    """At L0 epsilon is infinite, and the votes' agreement is reported."""
    _, metrics = train(toy_party(0))

    assert metrics[keys.EPSILON_PARTY] == metrics[keys.EPSILON_EXAMPLE] == math.inf
    assert 1 / 3 <= metrics[keys.VOTE_AGREEMENT] <= 1
    assert 0 <= metrics[keys.CONSISTENT_FRACTION] <= 1
    assert metrics[keys.NUM_TEACHERS_MISSING] == 0


def test_fewer_records_than_teachers_means_fewer_teachers() -> None:
    """A party with 3 records trains 3 teachers per partition and says that 2 are missing.

    Its votes take what all do: 2 students x 60 rows x 2 bits are 30 bytes.
    """
    knowledge, metrics = train(toy_party(0, num_records=3))

    assert metrics[keys.NUM_TEACHERS_MISSING] == 4
    assert knowledge.arrays["votes"].nbytes == 30


def test_a_one_class_party_takes_part() -> None:
    """Records of one class are a fact, not an error."""
    party = toy_party(0)
    rows = party.y == 1

    knowledge, _ = train(replace(party, x=party.x[rows], y=party.y[rows]))

    np.testing.assert_array_equal(
        knowledge.arrays["votes"], pack_labels(np.ones((2, 60), int), NUM_CLASSES)
    )


@pytest.mark.parametrize(
    "change",
    [
        {"num-splits": 0},
        {"num-splits": 10**9},
        {"num-teachers": -1},
        {"privacy-level": "L9"},
        {"exchange": "pickle"},
        {"num-classes": 4},
        {"seed": -1},
        {"seed": "0"},
    ],
)
def test_a_party_refuses_unreasonable_requests(change: dict[str, Any]) -> None:
    """The server is untrusted too: bounds hold at the party."""
    name = next(iter(change)).replace("-", "[-_]")
    with pytest.raises(KnowledgeMismatch, match=f"^Server: (FedKT: )?{name} must be"):
        train(toy_party(0), **change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_splits": 0}, "num_splits must be from 1 to 1000, got 0"),
        ({"num_teachers": -1}, "num_teachers must be from 1 to 100000, got -1"),
        ({"privacy_level": "L7"}, "privacy-level must be one of L0, L1, L2, got 'L7'"),
        ({"exchange": "smoke"}, "exchange must be one of votes, models, scores, got 'smoke'"),
        ({"num_classes": 1}, "num_classes must be at least 2, got 1"),
        ({"public": PUBLIC[:0]}, "public must be at least one row, got 0"),
        ({"num_parties": 0}, "num_parties must be at least 1, got 0"),
        ({"min_parties": 9}, "min_parties must be from 1 to num_parties=4, got 9"),
        ({"max_wait": -1.0}, "max_wait must be at least 0 seconds, got -1.0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"trim_fraction": 0.5}, "trim_fraction must be at least 0 and below 0.5, got 0.5"),
        ({"trim_fraction": -0.1}, "trim_fraction must be at least 0 and below 0.5, got -0.1"),
        ({"trim_fraction": math.nan}, "trim-fraction must be finite, got nan"),
        ({**UNEVEN, "trim_fraction": 0.2}, "consistent must be true for votes that are"),
        ({"consistent": False}, "consistent must be true .* weighted or trimmed, got False"),
        ({"max_reply_bytes": 0}, "max_reply_bytes must be positive, got 0"),
        ({"fraction_trian": 1.0}, "the argument must be a known one, got 'fraction_trian'"),
        ({"num_spilts": 2}, r".* got 'num_spilts'\. Did you mean 'num_splits'\?"),
    ],
)
def test_bad_parameters_are_named(change: dict[str, Any], sentence: str) -> None:
    """Each wrong parameter gives one sentence with its name and value.

    In options None leaves a setting out, and 0 is a number like any other.
    """
    with pytest.raises(InvalidParameter, match=f"FedKT: {sentence}"):
        toy_fedkt(**change)
    for name in ("num_splits", "num_teachers", "num_queries"):
        with pytest.raises(InvalidParameter, match=f"FedKT: {name} must be from 1 to .* got 0"):
            FedKTOptions(**{name: 0})  # type: ignore[arg-type]


def test_students_of_an_unknown_learner_are_refused() -> None:
    """The server rebuilds only models it has a factory for."""
    strategy = paper_fedkt(exchange="models")

    with pytest.raises(KnowledgeMismatch, match="must be one of centroid, got 'mystery'"):
        strategy.check(Knowledge("models", {}, {keys.LEARNER: "mystery"}))


def test_a_learner_that_cannot_travel_is_refused_with_advice() -> None:
    """A party asked for models says which method its learner lacks."""
    recorder = {"teacher_fn": CentroidLearner, "learner_fn": lambda: Recorder([])}
    party = replace(toy_party(0), **recorder)

    with pytest.raises(UnsupportedLearner, match=r"got Recorder\. Let it vote"):
        train(party, exchange="models")


def test_the_federation_beats_its_smallest_parties() -> None:
    """Parties with 5 records each learn more together than alone."""
    load = loading(lambda number: toy_party(number, num_records=5))
    strategy = toy_fedkt(num_parties=8, num_teachers=2)
    run_local(strategy, client_app(load), 8)

    parties = [toy_party(i, num_records=5) for i in range(8)]
    alone = [
        accuracy(CentroidLearner().fit(p.x, p.y, rng=derive_rng(0, i)).predict(TEST[0]))
        for i, p in enumerate(parties)
    ]
    assert accuracy(strategy.model_.predict(TEST[0])) > np.mean(alone) + 0.02


def test_public_labels_are_recovered() -> None:
    """The winning labels are those the public rows were drawn with, nearly everywhere."""
    log: list[Any] = []
    strategy = toy_fedkt(learner_fn=lambda: Recorder(log))

    run_local(strategy, client_app(load_toy_party), 4)

    assert (log[0][1] == PUBLIC_LABELS).mean() > 0.85


def test_ensembles_of_plain_learners_are_fitted_one_by_one() -> None:
    """Without fit_many every set gets its own learner and its own generator."""
    x, y = toy_party(0).x, toy_party(0).y
    rngs = [np.random.default_rng(i) for i in range(3)]

    fitted: list[Learner] = fit_ensemble(CentroidLearner, [(x, y)] * 3, rngs=rngs)

    alone = CentroidLearner().fit(x, y, rng=np.random.default_rng(1))
    np.testing.assert_array_equal(fitted[1].logits(x), alone.logits(x))
    assert not np.array_equal(fitted[0].logits(x), fitted[1].logits(x))


LIARS = (3, 8)


def with_exchanged_labels(party: Party) -> Party:
    return replace(party, y=(party.y + 1) % NUM_CLASSES)


def run_ten(
    change: Callable[[Party], Party], **changes: Any
) -> tuple[FedKT, np.ndarray, dict[str, Any]]:
    """Run ten parties, of which two are changed; return strategy, winning labels, metrics."""
    load = loading(lambda n: change(toy_party(n)) if n in LIARS else toy_party(n))
    log: list[Any] = []
    learners = {
        "learner_fn": watched(CentroidLearner, log),
        "student_fns": {"centroid": CentroidLearner},
    }
    strategy = paper_fedkt(num_parties=10, **learners, **changes)
    result = run_local(strategy, client_app(load), 10)
    return strategy, log[-1][1], dict(result.train_metrics_clientapp[1])


def test_trimming_leaves_out_the_party_that_disagrees_most() -> None:
    """On row 0 two liars outvote the one honest party that is sure; trimmed, they do not.

    On rows 1 and 2 honest parties always agree with the plurality of the others, liars
    never. So at most 0.4 of five parties are the liars, and 0.2 is one of them.
    """
    honest, unsure = [[0, 1, 2], [0, 1, 2]], [[0, 1, 2], [1, 1, 2]]
    liar = [[1, 2, 0], [1, 2, 0]]
    told = honest, unsure, unsure, liar, liar
    labels, trimmed = [], []
    for share in (0.0, 0.2, 0.4):
        log: list[Any] = []
        strategy = paper_fedkt(
            public=PUBLIC[:3], learner_fn=lambda log=log: Recorder(log), trim_fraction=share
        )
        _, metrics = aggregate(strategy, *told)
        labels.append(log[0][1].tolist())
        trimmed.append(strategy.trimmed_)
        assert metrics["num-trimmed"] == len(strategy.trimmed_)

    assert trimmed == [(), (4,), (3, 4)]
    assert labels[0] == [1, 1, 2]
    assert labels[2] == [0, 1, 2]


@pytest.mark.parametrize("exchange", ["votes", "models"])
def test_trimming_gives_the_labels_of_a_federation_without_the_liars(exchange: str) -> None:
    """Two of ten parties with exchanged labels: found, and gone without a trace."""
    strategy, labels, metrics = run_ten(
        with_exchanged_labels, trim_fraction=0.2, exchange=exchange
    )
    _, clean, _ = run_ten(without_records)

    assert strategy.trimmed_ == LIARS
    assert (metrics["num-trimmed"], metrics[keys.NUM_PARTIES]) == (2, 10)
    np.testing.assert_array_equal(labels, clean)


def test_trimming_does_not_depend_on_the_order_of_replies() -> None:
    """Of two parties that lie one may go, and it is the same one, whoever answers first."""

    def load(context: Context) -> Party:
        party = load_toy_party(context)
        twin = replace(toy_party(1), partition_id=party.partition_id)
        return with_exchanged_labels(twin) if party.partition_id in (1, 4) else party

    app = client_app(load)
    strategies = [toy_fedkt(num_parties=6, trim_fraction=0.2) for _ in range(2)]
    for strategy, step in zip(strategies, (1, -1), strict=True):
        grid = EditedGrid(app, 6, lambda _, replies, step=step: replies[::step])
        strategy.start(grid, ArrayRecord(), num_rounds=1)

    forth, back = (strategy.model_.to_arrays()["centroids"] for strategy in strategies)
    assert strategies[0].trimmed_ == strategies[1].trimmed_
    assert len(strategies[0].trimmed_) == 1
    assert forth.tobytes() == back.tobytes()


def test_votes_are_kept_only_to_trim_them() -> None:
    """Without trimming nothing is kept of a reply; with it, one byte a row."""
    votes = Knowledge("votes", {"votes": pack_labels(np.ones((2, 60), int), NUM_CLASSES)})

    plain, trimmed = paper_fedkt(), paper_fedkt(trim_fraction=0.2)
    for strategy in (plain, trimmed):
        hear(strategy, votes)
    assert plain.replies[0].knowledge.votes is None
    assert trimmed.replies[0].knowledge.votes.labels.nbytes == len(PUBLIC)


def test_votes_of_a_failed_round_are_forgotten() -> None:
    """Replies that were read in a round without a result do not count in the next one."""
    strategy = paper_fedkt(learner_fn=CentroidLearner)
    for _ in range(100):
        hear(strategy, Knowledge("votes", {"votes": pack_labels(np.ones((2, 60), int), 3)}))
    strategy.state.members.clear()
    fresh = paper_fedkt(learner_fn=CentroidLearner)
    for each in (strategy, fresh):
        run_local(each, client_app(load_toy_party), 4)

    one, other = (each.model_.to_arrays()["centroids"] for each in (strategy, fresh))
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("answer", [-1, NUM_CLASSES])
def test_a_model_that_names_no_class_is_refused(answer: int) -> None:
    """A received student may answer anything; the party is excluded, not the round."""

    class Odd(CentroidLearner):
        def from_arrays(self, arrays: Any) -> Any:  # noqa: ARG002
            return self

        def predict(self, x: np.ndarray) -> np.ndarray:
            return np.full(len(x), answer)

    strategy = paper_fedkt(exchange="models", student_fns={"odd": Odd})
    models = Knowledge("models", {}, {keys.LEARNER: "odd"})

    with pytest.raises(KnowledgeMismatch, match="labels of students must be classes below 3"):
        strategy.check(models)
