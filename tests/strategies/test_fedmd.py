"""FedMD: rounds, memory, consensus, and parties that differ or misbehave."""

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result

from clients.app import client_app
from fl_strategies import FedMDOptions, Knowledge, LocalNoise, Party, SampleOnce
from fl_strategies.errors import (
    InvalidData,
    InvalidParameter,
    KnowledgeMismatch,
    NotFitted,
    RunFailed,
)
from fl_strategies.learners import Recipe
from fl_strategies.party.role import PartyState
from fl_strategies.strategies.fedmd import FedMD, FedMDParty
from fl_strategies.strategies.fedmd.options import LOGIT_SPREAD, public_rows
from fl_strategies.strategies.fedmd.party import answer
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import pack_labels, packed_size
from simulations.runtime.local import InMemoryGrid
from tests.toys import (
    NUM_CLASSES,
    PUBLIC,
    PUBLIC_LABELS,
    TEST,
    CentroidLearner,
    EditedGrid,
    WatchedGrid,
    accuracy,
    common_options,
    hear,
    toy_party,
    watched,
    with_arrays,
)

PAYLOADS = ["logits", "softmax", "argmax"]
SEEDED_SAMPLE = {
    "payload": "softmax",
    "release": "nfdp",
    "num_samples": 9,
    "seeded_noise": True,
}
ROLES = {"fedmd": FedMDParty()}


class SoftmaxRegression:
    """A linear model that continues where it stopped, by gradient steps with momentum.

    The momentum is on purpose no part of its arrays, as that of an optimizer is not.
    """

    num_classes = NUM_CLASSES
    digests: ClassVar[list[bytes]] = []

    def __init__(self) -> None:
        self.weights = np.zeros((3, NUM_CLASSES))
        self.velocity = np.zeros((3, NUM_CLASSES))

    def _descend(
        self, x: np.ndarray, gradient: Callable[..., np.ndarray], rng: Any, epochs: int
    ) -> Self:
        rows = np.column_stack([x, np.ones(len(x))])
        for _ in range(epochs):
            for batch in np.array_split(rng.permutation(len(x)), max(1, len(x) // 8)):
                error = gradient(rows[batch] @ self.weights, batch)
                self.velocity = 0.5 * self.velocity - 0.1 * rows[batch].T @ error / len(batch)
                self.weights = self.weights + self.velocity
        return self

    def fit(self, x: np.ndarray, y: np.ndarray, *, rng: Any) -> Self:
        self.weights = np.zeros_like(self.weights)
        return self.partial_fit(x, y, rng=rng, epochs=20)

    def partial_fit(self, x: np.ndarray, y: np.ndarray, *, rng: Any, epochs: int) -> Self:
        wanted = np.eye(NUM_CLASSES)[y]
        return self._descend(x, lambda z, b: _softmax(z) - wanted[b], rng, epochs)

    def distill(self, x: np.ndarray, targets: np.ndarray, *, rng: Any, recipe: Recipe) -> Self:
        type(self).digests.append(np.asarray(x).tobytes())
        assert targets.shape == (len(x), NUM_CLASSES)
        if recipe.link == "softmax":
            np.testing.assert_allclose(targets.sum(axis=1), 1, atol=1e-5)
            return self._descend(
                x, lambda z, b: _softmax(z) - targets[b], rng, recipe.epochs or 20
            )
        return self._descend(
            x, lambda z, b: np.sign(z - targets[b]) / 3, rng, recipe.epochs or 20
        )

    def logits(self, x: np.ndarray) -> np.ndarray:
        return np.column_stack([x, np.ones(len(x))]) @ self.weights

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.logits(x).argmax(axis=1)

    def to_arrays(self) -> dict[str, np.ndarray]:
        return {"weights": self.weights}

    def from_arrays(self, arrays: Mapping[str, np.ndarray]) -> Self:
        if set(arrays) != {"weights"} or arrays["weights"].shape != (3, NUM_CLASSES):
            raise KnowledgeMismatch("SoftmaxRegression: weights must be (3, 3), got others.")
        twin = type(self)()
        twin.weights = arrays["weights"].astype(float)
        return twin


class Refitted:
    """Nearest centroids that can neither continue nor travel."""

    num_classes = NUM_CLASSES

    def __init__(self) -> None:
        self.centroids = CentroidLearner()

    def fit(self, x: np.ndarray, y: np.ndarray, *, rng: Any) -> Self:
        self.centroids.fit(x, y, rng=rng)
        return self

    def logits(self, x: np.ndarray) -> np.ndarray:
        return self.centroids.logits(x)

    def predict(self, x: np.ndarray) -> np.ndarray:
        return self.centroids.predict(x)


def _softmax(z: np.ndarray) -> np.ndarray:
    powers = np.exp(z - z.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def linear_party(partition_id: int, num_records: int = 40, **changes: Any) -> Party:
    own = {"learner_fn": SoftmaxRegression, "learner_name": "softmax-regression"}
    return replace(toy_party(partition_id, num_records), **{**own, **changes})


def refitted_party(partition_id: int, **changes: Any) -> Party:
    return replace(toy_party(partition_id), **{"learner_fn": Refitted, **changes})


def linear_fedmd(**changes: Any) -> FedMD:
    options = {
        **common_options(),
        "learner_fn": SoftmaxRegression,
        "learner_name": "softmax-regression",
        "num_public": 30,
        "min_parties": 2,
    }
    if changes.get("release") == "ldp":
        options["accept_noise"] = True
    return FedMD.from_settings(**{**options, **changes})


def watching(starts: list[tuple[int, np.ndarray, int]]) -> Callable[..., Party]:
    """Make parties that note themselves, their weights and their rows before each training."""

    def make_party(partition_id: int, **changes: Any) -> Party:
        class Watching(SoftmaxRegression):
            def partial_fit(self, x: Any, y: Any, *, rng: Any, epochs: int) -> Any:
                starts.append((partition_id, self.weights, len(x)))
                return super().partial_fit(x, y, rng=rng, epochs=epochs)

        return linear_party(partition_id, learner_fn=Watching, **changes)

    return make_party


class Federation:
    """A grid, and the models that its parties were last seen with."""

    def __init__(
        self,
        make_party: Callable[[int], Party] = linear_party,
        num_nodes: int = 4,
        grid: Callable[[ClientApp, int], InMemoryGrid] = InMemoryGrid,
    ) -> None:
        self.models: dict[int, Any] = {}
        self.grid = grid(self.app(make_party), num_nodes)

    def app(self, make_party: Callable[[int], Party]) -> ClientApp:
        def load(context: Context) -> Party:
            return make_party(int(context.node_config["partition-id"]))

        def keep(model: Any, party: Party, _: Context) -> None:
            self.models[party.partition_id] = model

        return client_app(load, on_model=keep, roles=ROLES)

    def run(self, strategy: FedMD, num_rounds: int = 1) -> Result:
        return strategy.start(self.grid, ArrayRecord(), num_rounds=num_rounds)

    def bits(self) -> dict[int, bytes]:
        return {i: model.logits(TEST[0]).tobytes() for i, model in self.models.items()}


def request(strategy: FedMD, server_round: int = 1, **changes: Any) -> ConfigRecord:
    """Return what a party is told in a round."""
    config = {**strategy.party_config(), keys.SEED: strategy.seed}
    return ConfigRecord({**config, keys.SERVER_ROUND: server_round, **changes})


def train(
    party: Party, strategy: FedMD, state: PartyState | None = None, server_round: int = 1
) -> tuple[Knowledge, dict[str, float]]:
    kept = PartyState() if state is None else state
    return FedMDParty().train(party, None, request(strategy, server_round), kept)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_parties_gain_from_each_other(payload: str) -> None:
    """Parties with few records end above what they reach alone, whatever travels."""

    def poor(partition_id: int) -> Party:
        party = linear_party(partition_id, 30)
        rows = np.flatnonzero(party.y != partition_id % 3)[:8]
        return replace(party, x=party.x[rows], y=party.y[rows])

    alone = []
    for i in range(4):
        model = SoftmaxRegression().partial_fit(
            poor(i).x, poor(i).y, rng=poor(i).rng(0, "initial"), epochs=20
        )
        alone.append(accuracy(model.predict(TEST[0])))
    strategy, federation = linear_fedmd(payload=payload, epochs_digest=5), Federation(poor)
    result = federation.run(strategy, 5)

    ends = result.evaluate_metrics_clientapp[5]["accuracy-by-party"]
    assert np.mean(ends) > np.mean(alone) + 0.1
    assert accuracy(strategy.model_.predict(TEST[0])) > np.mean(alone) + 0.1


@pytest.mark.parametrize("payload", PAYLOADS)
def test_learners_of_two_kinds_share_a_federation(payload: str) -> None:
    """A model that is fitted anew and one that continues both end well."""

    def mixed(partition_id: int) -> Party:
        return (refitted_party if partition_id % 2 else linear_party)(partition_id)

    result = Federation(mixed).run(linear_fedmd(payload=payload), 3)

    assert min(result.evaluate_metrics_clientapp[3]["accuracy-by-party"]) > 0.85


@pytest.mark.parametrize("make_party", [linear_party, refitted_party])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_evaluating_changes_nothing(payload: str, make_party: Callable[[int], Party]) -> None:
    """Whether the consensus comes in the evaluate or the next train message, to the bit."""
    watched, blind = Federation(make_party), Federation(make_party)
    one, other = linear_fedmd(payload=payload), linear_fedmd(payload=payload, evaluate=False)

    watched.run(one, 3)
    blind.run(other, 2)
    assert not blind.models
    other.evaluate = True
    blind.run(other, 1)

    assert one.consensus_.tobytes() == other.consensus_.tobytes()
    assert watched.bits() == blind.bits()
    assert len(watched.bits()) == 4


@pytest.mark.parametrize("make_party", [linear_party, refitted_party])
@pytest.mark.parametrize("changes", [{}, SEEDED_SAMPLE])
def test_a_run_can_be_continued(make_party: Callable[[int], Party], changes: Any) -> None:
    """Two rounds and then one more equal three, to the bit."""
    parts, whole = Federation(make_party), Federation(make_party)
    first, second = linear_fedmd(**changes), linear_fedmd(**changes)

    parts.run(first, 2)
    parts.run(first, 1)
    whole.run(second, 3)

    assert first.round_ == second.round_ == 3
    assert first.model_.logits(TEST[0]).tobytes() == second.model_.logits(TEST[0]).tobytes()
    assert parts.bits() == whole.bits()


@pytest.mark.parametrize(("evaluate", "digested"), [(True, [1, 2, 3]), (False, [1, 2])])
def test_every_consensus_is_digested_once(evaluate: bool, digested: list[int]) -> None:
    """Once in the evaluate message or once in the next train message, never in both."""
    SoftmaxRegression.digests.clear()
    strategy = linear_fedmd(payload="softmax", evaluate=evaluate)
    Federation().run(strategy, 3)

    rows = [PUBLIC[public_rows(0, r, 60, 30)].tobytes() for r in digested]
    assert SoftmaxRegression.digests == [row for row in rows for _ in range(4)]


class Absences(InMemoryGrid):
    """Party 0 is away in the rounds listed."""

    away: tuple[int, ...] = ()
    asked = 0

    def get_node_ids(self) -> list[int]:
        self.asked += 1
        return super().get_node_ids()[int(self.asked in self.away) :]


@pytest.mark.parametrize(
    ("away", "expected"), [((2,), [2, 3]), ((1,), [1, 2, 3]), ((2, 3), [3])]
)
def test_a_party_that_was_away_digests_the_newest_consensus(
    away: tuple[int, ...], expected: list[int]
) -> None:
    """It takes up what it finds, and the consensus of its absence is that of the others."""
    seen: dict[int, list[Any]] = defaultdict(list)

    def make_party(partition_id: int) -> Party:
        learner_fn = watched(SoftmaxRegression, seen[partition_id], "distill")
        return linear_party(partition_id, learner_fn=learner_fn)

    federation = Federation(make_party, grid=Absences)
    federation.grid.away = away  # type: ignore[attr-defined]
    strategy = linear_fedmd(payload="softmax", evaluate=False)
    result = federation.run(strategy, 4)

    rows = {PUBLIC[public_rows(0, r, 60, 30)].tobytes(): r for r in range(1, 5)}
    assert [rows[x.tobytes()] for x, *_ in seen[0]] == expected
    assert [rows[x.tobytes()] for x, *_ in seen[1]] == [1, 2, 3]
    numbers = [result.train_metrics_clientapp[r][keys.NUM_PARTIES] for r in range(1, 5)]
    assert numbers == [3 if r in away else 4 for r in range(1, 5)]


def second_loses(number: int) -> Callable[..., InMemoryGrid]:
    """Make grids on which so many of four answers to the second round are lost."""
    return functools.partial(
        EditedGrid, edit=lambda n, replies: replies[: 4 - number] if n == 3 else replies
    )


def test_a_round_without_enough_answers_keeps_the_last_consensus() -> None:
    """It is sent again with its own round, nobody digests it twice, and answers are forgotten.

    One answer that came in vain leaves the next consensus as if it had not come.
    """
    found = []
    for lost in (4, 3):
        SoftmaxRegression.digests.clear()
        strategy = linear_fedmd(payload="softmax", evaluate=False)
        result = Federation(grid=second_loses(lost)).run(strategy, 3)
        found.append(strategy.consensus_.tobytes())

    assert list(result.train_metrics_clientapp) == [1, 3]
    first = PUBLIC[public_rows(0, 1, 60, 30)].tobytes()
    assert SoftmaxRegression.digests == [first] * 4
    np.testing.assert_array_equal(strategy.indices_, public_rows(0, 3, 60, 30))
    assert found[0] == found[1]


def test_round_one_starts_anew() -> None:
    """Another strategy on the same nodes does not inherit models."""
    used, fresh = Federation(), Federation()
    used.run(linear_fedmd(seed=5), 2)
    used.run(linear_fedmd(), 2)
    fresh.run(linear_fedmd(), 2)

    assert used.bits() == fresh.bits()


def test_messages_hold_a_consensus_and_no_positions() -> None:
    """Round 1 carries settings only, round 2 one array: the packed labels of round 1."""
    federation, strategy = Federation(), linear_fedmd(evaluate=False)
    federation.run(strategy, 1)
    labels = strategy.consensus_
    fresh = linear_fedmd().ask_parties(1, ArrayRecord(), ConfigRecord(), federation.grid)
    later = strategy.ask_parties(2, ArrayRecord(), ConfigRecord(), federation.grid)

    assert keys.ARRAYS not in fresh[0].content
    (packed,) = later[0].content.array_records[keys.ARRAYS].values()
    np.testing.assert_array_equal(packed.numpy(), pack_labels(labels, NUM_CLASSES))
    assert later[0].content.config_records[keys.META]["consensus-round"] == 1


def test_public_rows_follow_from_seed_and_round() -> None:
    """Distinct, in order, others in another round or of another seed, all if all are asked."""
    rows = public_rows(3, 2, 100, 40)

    assert len(set(rows)) == 40
    assert (np.diff(rows) > 0).all()
    np.testing.assert_array_equal(rows, public_rows(3, 2, 100, 40))
    assert set(rows) != set(public_rows(3, 3, 100, 40))
    assert set(rows) != set(public_rows(4, 2, 100, 40))


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_reply_is_the_models_answer_in_few_bytes(payload: str) -> None:
    """Labels take ceil(log2 C) bits, scores four bytes, about the rows of the round."""
    strategy = linear_fedmd(payload=payload, consensus="mean")
    party, state = linear_party(0), PartyState()
    reply, metrics = train(party, strategy, state)

    model = SoftmaxRegression().partial_fit(
        party.x, party.y, rng=party.rng(0, "initial"), epochs=20
    )
    rows = PUBLIC[public_rows(0, 1, 60, 30)]
    (array,) = reply.arrays.values()
    expected = {"argmax": packed_size(30, 3), "softmax": 30 * 3 * 4, "logits": 30 * 3 * 4}
    assert array.nbytes == expected[payload]
    if payload == "softmax":
        np.testing.assert_allclose(array, _softmax(model.logits(rows)), atol=1e-6)
    if payload == "argmax":
        np.testing.assert_array_equal(array, pack_labels(model.predict(rows), 3))
    assert metrics[keys.NUM_EXAMPLES] == 40


def test_logits_are_centred_and_cut_without_losing_their_order() -> None:
    """One class that a model excludes does not hide the difference of the others."""

    class Fixed(SoftmaxRegression):
        def logits(self, x: np.ndarray) -> np.ndarray:  # noqa: ARG002
            return np.array([[-1.0, -2.0, -1e6], [1e6, 1e6 - 3, 1e6 - 3]])

    scores = answer(Fixed(), np.zeros((2, 2)), "logits")

    np.testing.assert_allclose(scores.sum(axis=1), 0, atol=1e-9)
    np.testing.assert_allclose(scores[:, 0] - scores[:, 1], [1, 3], atol=1e-6)
    assert np.abs(scores).max() <= LOGIT_SPREAD


def test_a_model_that_says_nan_stays_at_home() -> None:
    """The party names its own model instead of sending rubbish."""

    class Broken(SoftmaxRegression):
        def logits(self, x: np.ndarray) -> np.ndarray:
            return np.full((len(x), 3), np.nan)

    party = linear_party(0, learner_fn=Broken)
    with pytest.raises(InvalidData, match="FedMD: logits must be finite"):
        train(party, linear_fedmd(payload="softmax"))


WEIGHTED = {"payload": "softmax", "consensus": "class-weighted"}


def good_scores(**changes: Any) -> dict[str, np.ndarray]:
    return {"scores": np.full((30, 3), 1 / 3, dtype=np.float32), **changes}


def with_value(value: float) -> dict[str, np.ndarray]:
    scores = good_scores()
    scores["scores"][7, 1] = value
    return scores


@pytest.mark.parametrize(
    ("changes", "arrays", "sentence"),
    [
        ({"payload": "softmax"}, with_value(np.nan), "scores must be from 0 to 1, got nan"),
        ({"payload": "softmax"}, with_value(1.5), "scores must be from 0 to 1, got .* to 1.5"),
        ({"payload": "softmax"}, with_value(-0.1), "scores must be from 0 to 1, got -0.1"),
        ({"payload": "logits"}, with_value(np.inf), "scores must be from -100 to 100"),
        ({"payload": "logits"}, with_value(-101), "scores must be from -100 to 100, got -101"),
        ({"payload": "logits"}, {"scores": np.zeros((30, 3))}, "float32, got .* of float64"),
        ({"payload": "logits"}, {"scores": np.zeros((3, 30), "f4")}, "of shape .30, 3."),
        ({"payload": "logits"}, {}, "arrays must be named .'scores'., got .."),
        ({"payload": "logits"}, {"labels": np.zeros(8, "u1")}, "must be named .'scores'."),
        ({"payload": "logits"}, good_scores(more=np.zeros(3)), "must be named .'scores'."),
        ({}, {"labels": np.zeros(9, np.uint8)}, "must be 8 bytes"),
        ({}, {"labels": np.full(8, 255, np.uint8)}, "must be below 3, got 3"),
        ({}, good_scores(), "arrays must be named .'labels'."),
        (WEIGHTED, good_scores(**{"class-counts": np.array([1, -1, 0])}), "3 whole numbers"),
    ],
)
def test_a_bad_answer_is_refused_and_leaves_no_trace(
    changes: dict[str, Any], arrays: dict[str, np.ndarray], sentence: str
) -> None:
    """What one party sends wrongly costs it the round; the others' consensus is theirs."""
    changes = {"consensus": "mean", **changes}
    strategy, honest = linear_fedmd(**changes), linear_fedmd(**changes, num_parties=3)
    grid = Federation().grid
    replies = grid.send_and_receive(
        strategy.ask_parties(1, ArrayRecord(), ConfigRecord(), grid)
    )
    meta = replies[3].content.config_records[keys.META]
    hostile = RecordDict()
    Knowledge("answers", arrays, {keys.PARTITION_ID: meta[keys.PARTITION_ID]}).write(hostile)
    hostile[keys.METRICS] = replies[3].content[keys.METRICS]
    replies[3].content = hostile
    strategy.aggregate_train(1, replies[::-1])
    Federation(num_nodes=3).run(honest)

    ((_, reason),) = strategy.rejected_.items()
    assert re.search(sentence, reason), reason
    assert strategy.consensus_.tobytes() == honest.consensus_.tobytes()


def test_a_robust_consensus_withstands_a_hostile_party() -> None:
    """A party that gives every row to one class, as loudly as it can, steers no rule.

    The mean does not hear it as loudly; it lost more than a third of the rows when it did.
    """
    scores = np.tile(np.array([100.0, -50.0, -50.0], dtype=np.float32), (30, 1))
    liar = functools.partial(WatchedGrid, change=with_arrays(lambda _: {"scores": scores}))
    shares = {}
    for rule in ("mean", "trimmed-mean", "median"):
        strategy = linear_fedmd(payload="logits", consensus=rule, evaluate=False)
        Federation(grid=liar).run(strategy)
        found = strategy.consensus_.argmax(axis=1) == PUBLIC_LABELS[strategy.indices_]
        shares[rule] = found.mean()

    assert shares["mean"] > 0.75
    assert min(shares["trimmed-mean"], shares["median"]) > 0.85


def test_votes_with_class_weights() -> None:
    """Where only parties vote that have no record of a class, all count the same."""
    strategy, said = linear_fedmd(consensus="class-weighted", num_public=2), []
    for labels, counts in (([0, 2], [8, 0, 0]), ([1, 2], [0, 5, 0]), ([1, 2], [0, 2, 0])):
        arrays = {"labels": pack_labels(np.array(labels), 3), "class-counts": np.array(counts)}
        said.append(Knowledge("answers", arrays))
    hear(strategy, *said)
    strategy.finish()

    np.testing.assert_array_equal(strategy.consensus_, [0, 2])


def consensus_message(server_round: int = 1, **arrays: np.ndarray) -> Knowledge:
    given = arrays or {"labels": pack_labels(np.zeros(30, int), 3)}
    return Knowledge("consensus", given, {"consensus-round": server_round})


@pytest.mark.parametrize(
    ("received", "changes", "sentence"),
    [
        (consensus_message(2), {}, "consensus-round must be 1, got 2"),
        (consensus_message(0), {}, "consensus-round must be 1, got 0"),
        (consensus_message(1), {"server-round": 1}, "consensus must be omitted before the"),
        (consensus_message(labels=np.zeros(3, np.uint8)), {}, "must be 8 bytes"),
        (None, {"num-public": 61}, "num-public must be a whole number from 1 to 60, got 61"),
        (None, {"epochs-initial": 10**9}, "epochs_initial must be from 1 to 10000"),
        (None, {"epochs-initial": 10_001}, "must be from 1 to 10000, got 10001"),
        (None, {"epochs-digest": 0}, "Server: FedMD: epochs_digest must be from 1"),
        (None, {"payload": "weights"}, "payload must be one of logits"),
        (None, {"release": "all"}, "release must be one of none"),
        (None, {"server-round": 0}, "server-round must be"),
        (None, {"num-public": 0}, "num-public must be a whole number from 1 to 60, got None"),
        (None, {"consensus": "auto"}, "consensus and the scale of noise must be decided"),
        (None, {"release": "nfdp"}, "Server: FedMD: num_samples must be from 1 to"),
        (None, {"release": "ldp"}, "Server: FedMD: sigma or target_epsilon must be given"),
        (None, {"public-hash": "other"}, "public data must be the server's"),
    ],
)
def test_a_party_checks_what_the_server_says(
    received: Knowledge | None, changes: dict[str, Any], sentence: str
) -> None:
    """A server's numbers are untrusted."""
    config = request(linear_fedmd(), 2, **changes)

    with pytest.raises(KnowledgeMismatch, match=sentence):
        FedMDParty().train(linear_party(0), received, config, PartyState())


def test_evaluating_needs_a_model_and_a_consensus_and_training_the_servers_task() -> None:
    """A party that never trained, a message without a consensus, another task: all named."""
    config, party, state = request(linear_fedmd()), linear_party(3), PartyState()
    numbers = replace(party, task="regression", y=np.zeros((40, 3)), x_test=None, y_test=None)

    with pytest.raises(NotFitted, match="Party 3: a consensus must find a model"):
        FedMDParty().evaluate(party, consensus_message(), config, state)
    with pytest.raises(KnowledgeMismatch, match="must carry a consensus, got 'model'"):
        FedMDParty().evaluate(party, Knowledge("model", {}), config, state)
    with pytest.raises(KnowledgeMismatch, match="Party 3: task must be single-label for FedMD"):
        FedMDParty().train(numbers, None, config, PartyState())


def test_a_learner_that_cannot_go_on_is_fitted_to_records_and_consensus() -> None:
    """Its own records with their labels, then the rows of the consensus with its labels."""
    fitted: list[Any] = []
    party, state = refitted_party(0, learner_fn=watched(Refitted, fitted)), PartyState()
    strategy = linear_fedmd(consensus="mean")
    labels = np.arange(30) % 3
    message = consensus_message(labels=pack_labels(labels, 3))
    train(party, strategy, state)
    FedMDParty().evaluate(party, message, request(strategy), state)
    FedMDParty().train(party, message, request(strategy, 2), state)

    np.testing.assert_array_equal(fitted[0][0], party.x)
    for x, y, _ in fitted[1:]:
        rows = public_rows(0, 1, 60, 30)
        np.testing.assert_array_equal(x, np.concatenate([party.x, PUBLIC[rows]]))
        np.testing.assert_array_equal(y, np.concatenate([party.y, labels]))
    assert len(fitted) == 3


def test_pretraining_on_labelled_public_rows() -> None:
    """The labels help once, before the records; a party without them is named."""
    few = {"epochs_initial": 1, "pretrain_epochs": 30}

    def labelled(partition_id: int) -> Party:
        labels = PUBLIC_LABELS if partition_id else None
        return linear_party(partition_id, num_records=3, public_y=labels)

    strategy = linear_fedmd(**few)
    result = Federation(labelled).run(strategy)

    assert min(result.evaluate_metrics_clientapp[1]["accuracy-by-party"]) > 0.85
    without = Federation(lambda i: linear_party(i, 3)).run(linear_fedmd(epochs_initial=1))
    assert min(without.evaluate_metrics_clientapp[1]["accuracy-by-party"]) < 0.8
    party = labelled(0)
    with pytest.raises(KnowledgeMismatch, match="Party 0: public_y must be given"):
        train(party, strategy)


def test_a_given_model_is_where_parties_of_its_kind_start() -> None:
    """Its arrays are what the first training continues from; other kinds start anew.

    Of one that does not fit, the learner's own check of hostile arrays says so.
    """
    starts: list[tuple[int, np.ndarray, int]] = []

    def make_party(partition_id: int) -> Party:
        name = "other" if partition_id == 2 else "softmax-regression"
        return watching(starts)(partition_id, learner_name=name)

    given = np.arange(9.0).reshape(3, 3)
    strategy = linear_fedmd(pretrained={"weights": given})
    Federation(make_party).run(strategy, 2)
    first = {number: weights for number, weights, _ in reversed(starts)}

    np.testing.assert_array_equal(first[0], given)
    np.testing.assert_array_equal(first[2], np.zeros((3, 3)))
    assert not strategy.rejected_
    unfit = linear_fedmd(pretrained={"weights": np.zeros((4, 4))})
    with pytest.raises(RunFailed):
        Federation().run(unfit)
    assert all("weights must be (3, 3)" in reason for reason in unfit.rejected_.values())


def test_the_servers_model_is_made_when_it_is_asked_for() -> None:
    """Once per consensus, and not at all before there is one."""
    made: list[SoftmaxRegression] = []

    def make() -> SoftmaxRegression:
        made.append(SoftmaxRegression())
        return made[-1]

    strategy, federation = linear_fedmd(learner_fn=make, payload="softmax"), Federation()
    made.clear()  # one was made at construction, to see that it is a learner
    with pytest.raises(NotFitted, match="the strategy has not run"):
        strategy.model_  # noqa: B018
    federation.run(strategy)
    assert not made
    first = strategy.model_
    assert strategy.model_ is first
    federation.run(strategy)

    assert strategy.model_ is not first
    assert len(made) == 2
    assert accuracy(strategy.model_.predict(TEST[0])) > 0.85


def test_the_result_of_flower_is_the_consensus() -> None:
    """Flower's result holds it, and the metrics say how far the parties agree."""
    strategy = linear_fedmd(payload="softmax")
    result = Federation().run(strategy, 2)

    np.testing.assert_array_equal(result.arrays["scores"].numpy(), strategy.consensus_)
    assert 0.8 < result.train_metrics_clientapp[2][keys.VOTE_AGREEMENT] <= 1
    np.testing.assert_allclose(strategy.consensus_.sum(axis=1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        (
            linear_fedmd,
            {"num_public": 61},
            "num_public must be from 1 to 60, the public rows, got 61",
        ),
        (linear_fedmd, {"num_public": -1}, "num_public must be from 1 to"),
        (linear_fedmd, {"num_classes": 1}, "num_classes must be at least 2"),
        (
            linear_fedmd,
            {"release": "some"},
            "release must be one of none, nfdp, ldp, got 'some'",
        ),
        (
            linear_fedmd,
            {"payload": "probabilities"},
            "payload must be one of logits, softmax, argmax",
        ),
        (linear_fedmd, {"epochs_initial": 0}, "epochs_initial must be from 1 to"),
        (linear_fedmd, {"epochs_revisit": 0}, "epochs_revisit must be from 1 to"),
        (linear_fedmd, {"pretrain_epochs": -1}, "pretrain_epochs must be from 0 to"),
        (
            linear_fedmd,
            {"consensus": "mode", "payload": "logits"},
            "consensus must be one of auto, mean",
        ),
        (
            linear_fedmd,
            {"consensus": "median"},
            "consensus must be mean or class-weighted for labels",
        ),
        (
            linear_fedmd,
            {"trim_fraction": 0.5},
            "trim_fraction must be at least 0 and below 0.5",
        ),
        (
            linear_fedmd,
            {"pretrain_epochs": 2, "pretrained": {}},
            "pretrain_epochs must be 0 if pretrained",
        ),
        (linear_fedmd, {"max_epsilon": 1.0}, "max-epsilon must be omitted with these settings"),
        (linear_fedmd, {"delta": 0.0}, "delta must be greater than 0 and below 1, got 0.0"),
        (FedMDOptions, {"num_public": 0}, "num_public must be from 1 to"),
        (SampleOnce, {"num_samples": 0}, "num_samples must be from 1 to"),
        (LocalNoise, {"sigma": 0.0}, "sigma must be greater than 0, got 0.0"),
        (LocalNoise, {"target_epsilon": 0.0}, "target_epsilon must be greater than 0"),
    ],
)
def test_wrong_use_is_refused_in_one_sentence(
    kind: Callable[..., Any], changes: dict[str, Any], sentence: str
) -> None:
    """Each mistake names its parameter, rule and value; None leaves out, 0 is a number."""
    with pytest.raises(InvalidParameter, match=f"FedMD: {sentence}"):
        kind(**changes)
