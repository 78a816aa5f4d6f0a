"""AKD, AvgKD, PKD and EKD over real messages, with the paper's closed forms as the oracle."""

import gc
import json
import logging
import math
import tracemalloc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType
from sklearn.ensemble import RandomForestRegressor

from clients.app import NO_BUDGET, client_app
from clients.tabular.kernel import KernelRidgeLearner, RidgeLearner
from clients.tabular.sklearn import ForestScores
from fl_strategies import Knowledge, Party
from fl_strategies._util import derive_rng
from fl_strategies.aggregation.ensembles import SignedEnsemble
from fl_strategies.errors import InvalidParameter, KnowledgeMismatch
from fl_strategies.learners import LearnerFactory, Recipe
from fl_strategies.party.role import PartyState
from fl_strategies.privacy.events import MOST, GaussianEvent
from fl_strategies.strategies.codistill import (
    AKD,
    EKD,
    PKD,
    AvgKD,
    Codistillation,
    CodistillParty,
)
from fl_strategies.strategies.codistill.options import join_models
from fl_strategies.strategies.codistill.party import FIRST_TERM, KEPT, SIGN, TASK
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import encode_arrays
from simulations.runtime.local import InMemoryGrid, run_local
from tests.closed_forms import (
    KernelAgent,
    KernelFederation,
    laplace_kernel,
    linear_kernel,
    rbf_kernel,
)
from tests.kept import forget, journal_of, with_journal
from tests.toys import (
    PUBLIC,
    TEST,
    CentroidLearner,
    Planned,
    load_toy_party,
    loading,
    toy_party,
    watched,
    without_records,
)

SCHEMES: Mapping[str, type[Codistillation]] = {
    "akd": AKD,
    "avgkd": AvgKD,
    "pkd": PKD,
    "ekd": EKD,
}
ROLES = dict.fromkeys(SCHEMES, CodistillParty())
GRID = derive_rng(0, "grid").normal(size=(9, 2))
Load = Callable[[Context], Party]


class Recorder(InMemoryGrid):
    """Keeps the last messages of each type; nodes can leave, and replies can be changed."""

    def __init__(self, load: Load, num_nodes: int) -> None:
        super().__init__(client_app(load, roles=ROLES), num_nodes)
        self.sent: dict[str, list[Message]] = {}
        self.away: set[int] = set()
        self.change: Callable[[Message], None] = lambda _: None

    def get_node_ids(self) -> list[int]:
        return [node for node in super().get_node_ids() if node - 1000 not in self.away]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        sent = list(messages)
        for message in sent[:1]:
            self.sent[message.metadata.message_type] = sent
        replies = super().send_and_receive(sent, timeout=timeout)
        for reply in replies:
            self.change(reply)
        return replies

    @property
    def requests(self) -> list[Message]:
        """What agents were asked to train on."""
        return self.sent.get(MessageType.TRAIN, [])

    def asked(self) -> list[int]:
        """Return which agents were asked to train."""
        return [message.metadata.dst_node_id - 1000 for message in self.requests]


def step(strategy: Codistillation, grid: InMemoryGrid) -> Any:
    """Play one round; a second call of `start` continues where the first stopped."""
    return strategy.start(grid, ArrayRecord(), num_rounds=1)


# Kernel regression: an agent's model depends on nothing but its targets.


KERNELS: dict[str, list[Any]] = {
    "same": [rbf_kernel(0.5)] * 3,
    "different": [rbf_kernel(0.5), laplace_kernel(0.7), rbf_kernel(1.2)],
}


def kernel_world(num_agents: int, kind: str, ridge: float) -> KernelFederation:
    rng = derive_rng(0, "world", num_agents)
    agents = [
        KernelAgent(rng.normal(size=(n, 2)), rng.normal(size=(n, 2)), kernel)
        for n, kernel in zip((8, 6, 7)[:num_agents], KERNELS[kind], strict=False)
    ]
    return KernelFederation(agents, ridge)


def open_kernel_ridge(**settings: Any) -> KernelRidgeLearner:
    return KernelRidgeLearner(reveal_rows=True, **settings)


def kernel_factories(world: KernelFederation, kind: str) -> dict[str, LearnerFactory]:
    settings: list[dict[str, Any]] = {
        "same": [{"kernel": "rbf", "gamma": 0.5}] * 3,
        "different": [
            {"kernel": "rbf", "gamma": 0.5},
            {"kernel": "laplace", "gamma": 0.7},
            {"kernel": "rbf", "gamma": 1.2},
        ],
        "linear": [{"intercept": False}] * 3,
    }[kind]
    learner = RidgeLearner if kind == "linear" else open_kernel_ridge

    def factory(i: int) -> LearnerFactory:
        chosen = {"num_classes": 2, "task": "regression", "ridge": world.local_ridge(i)}
        return lambda: learner(**chosen, **settings[i])

    return {f"agent-{i}": factory(i) for i in range(len(world.agents))}


def regression_loader(world: KernelFederation, factories: Mapping[str, LearnerFactory]) -> Load:
    def make(number: int) -> Party:
        agent, name = world.agents[number], f"agent-{number}"
        return Party(
            x=agent.x,
            y=agent.y,
            public=agent.x[:1],
            num_classes=2,
            task="regression",
            learner_fn=factories[name],
            learner_name=name,
            partition_id=number,
            catalogue=factories,
            x_test=agent.x,
            y_test=agent.y,
        )

    return loading(make)


def regression(scheme: str, world: KernelFederation, kind: str) -> tuple[Any, Recorder]:
    factories = kernel_factories(world, kind)
    strategy = SCHEMES[scheme](
        num_classes=2,
        task="regression",
        model_fns=factories,
        num_parties=len(world.agents),
        max_wait=0.0,
        row_shape=world.agents[0].x.shape[1:],
    )
    return strategy, Recorder(regression_loader(world, factories), len(world.agents))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ridge", [0.0, 0.05])
@pytest.mark.parametrize(
    ("num_agents", "kind"), [(2, "same"), (2, "different"), (3, "different")]
)
def test_every_round_equals_the_closed_form(
    scheme: str, kind: str, ridge: float, num_agents: int
) -> None:
    """Real messages and real learners give the paper's formulas to 1e-8 in each round."""
    world = kernel_world(num_agents, kind, ridge)
    strategy, grid = regression(scheme, world, kind)

    for t in range(5):
        result = step(strategy, grid)

        assert not strategy.rejected_
        if scheme == "akd":
            whole = world.akd(t, GRID)
            expected = {t % num_agents: whole}
        elif scheme == "ekd":
            expected = {
                (start + t) % num_agents: world.akd(t, GRID, start)
                for start in range(num_agents)
            }
            whole = world.ekd(t, GRID)
        else:
            closed = world.avgkd if scheme == "avgkd" else world.pkd
            expected = {i: closed(t, GRID, i) for i in range(num_agents)}
            whole = np.mean(list(expected.values()), axis=0)
        np.testing.assert_allclose(strategy.model_.logits(GRID), whole, atol=1e-8)
        for agent, values in expected.items():
            np.testing.assert_allclose(strategy.models_[agent].logits(GRID), values, atol=1e-8)
        assert keys.MEAN_SQUARED_ERROR in result.evaluate_metrics_clientapp[1]


def test_the_measured_errors_are_those_of_the_closed_forms() -> None:
    """Each agent measures its own model, and in EKD the whole sum, on its held-out rows."""
    world = kernel_world(2, "different", 0.05)
    averaging, averaging_grid = regression("avgkd", world, "different")
    summing, summing_grid = regression("ekd", world, "different")

    for t in range(4):
        own = step(averaging, averaging_grid).evaluate_metrics_clientapp[1]
        step(summing, summing_grid)

        expected = [
            np.square(world.avgkd(t, a.x, i) - a.y).mean() for i, a in enumerate(world.agents)
        ]
        by_party = own[f"{keys.MEAN_SQUARED_ERROR}-by-party"]
        np.testing.assert_allclose(by_party, expected, rtol=1e-7)
        assert own[keys.PARTITION_IDS] == [0.0, 1.0]
        for i, agent in enumerate(world.agents):
            error = np.square(world.ekd(t, agent.x) - agent.y).mean()
            measured = summing.parties_[i].evaluate[keys.MEAN_SQUARED_ERROR]
            assert measured == pytest.approx(error, rel=1e-7)


def linear_world(ridge: float, order: str) -> KernelFederation:
    """Return the paper's toy problem: A x = b, 1.5 rows a column, split 0.6 and 0.4."""
    rng = derive_rng(0, "toy")
    x, weights = rng.normal(size=(30, 20)), rng.normal(size=(20, 2))
    y = x @ weights
    rows = np.argsort(y[:, 0]) if order == "sorted" else np.arange(30)
    parts = rows[:18], rows[18:]
    return KernelFederation([KernelAgent(x[p], y[p], linear_kernel) for p in parts], ridge)


@pytest.mark.parametrize("order", ["random", "sorted"])
def test_linear_regression_as_in_figure_three(order: str) -> None:
    """AKD loses everything, AvgKD stays at its limit, EKD reaches the pooled model."""
    world = linear_world(0.5, order)
    final = {}
    for scheme, rounds in (("akd", 40), ("avgkd", 16), ("ekd", 40)):
        strategy, grid = regression(scheme, world, "linear")
        strategy.evaluate = False
        strategy.start(grid, ArrayRecord(), num_rounds=rounds)
        final[scheme] = strategy
    rows = np.concatenate([agent.x for agent in world.agents])
    scale = np.abs(world.labels).max()

    assert np.abs(final["akd"].model_.logits(rows)).max() < 1e-3 * scale
    for number, model in final["avgkd"].models_.items():
        np.testing.assert_allclose(
            model.logits(rows), world.avgkd_limit(rows, number), atol=1e-5 * scale
        )
    pooled = world.centralised(rows)
    np.testing.assert_allclose(final["ekd"].model_.logits(rows), pooled, atol=1e-3 * scale)
    errors = {
        name: np.square(strategy.model_.logits(rows) - world.labels).mean()
        for name, strategy in final.items()
    }
    assert errors["ekd"] < errors["avgkd"] < errors["akd"]


# Classification: who is asked, what travels, and what happens when somebody is missing.


def ridge() -> RidgeLearner:
    return RidgeLearner(num_classes=3, ridge=0.01)


def ridge_party(number: int = 0, **changes: Any) -> Party:
    party = toy_party(number, num_records=12)
    return replace(party, learner_fn=ridge, learner_name="ridge", **changes)


load_ridge = loading(ridge_party)


def load_changed(change: Callable[[Party], Party], *numbers: int) -> Load:
    """Load parties of which some are changed, or raise."""
    return loading(lambda n: change(ridge_party(n)) if n in numbers else ridge_party(n))


def with_ridge(kind: Callable[..., Any]) -> Callable[[Party], Party]:
    """Return a change of a party's learner to one of this kind."""
    return lambda party: replace(party, learner_fn=lambda: kind(num_classes=3, ridge=0.01))


def classification(scheme: str, num_agents: int = 3, **options: Any) -> Any:
    given = {
        "num_classes": 3,
        "learner_fn": ridge,
        "learner_name": "ridge",
        "num_parties": num_agents,
        "max_wait": 0.0,
        "row_shape": (2,),
    }
    return SCHEMES[scheme].from_settings(**{**given, **options})


def coefficients(message: Message) -> list[bytes]:
    """Return the models in a message, by their weights."""
    arrays = message.content.get(keys.ARRAYS, {})
    return [a.numpy().tobytes() for name, a in arrays.items() if name.endswith("coefficients")]


def weights(model: Any) -> bytes:
    return model.to_arrays()["coefficients"].tobytes()


def test_alternating_asks_one_agent_a_round_and_sends_it_one_model() -> None:
    """1 -> 2 -> 3 -> 1, each with the model of the agent before and nothing else."""
    strategy, grid = classification("akd"), Recorder(load_ridge, 3)
    step(strategy, grid)
    assert grid.asked() == [0, 1, 2]
    assert [coefficients(message) for message in grid.requests] == [[], [], []]

    for agent in (1, 2, 0, 1):
        before = weights(strategy.model_)
        result = step(strategy, grid)

        assert grid.asked() == [agent]
        assert coefficients(grid.requests[0]) == [before]
        assert result.evaluate_metrics_clientapp[1][keys.PARTITION_IDS] == [float(agent)]
        assert weights(strategy.model_) == weights(strategy.models_[agent]) != before


@pytest.mark.parametrize("scheme", ["avgkd", "pkd"])
def test_averaging_sends_every_agent_the_others_models(scheme: str) -> None:
    """M - 1 models in the order of the agents, never the agent's own."""
    strategy, grid = classification(scheme), Recorder(load_ridge, 3)
    step(strategy, grid)
    first = [weights(model) for model in strategy.models_.values()]

    result = step(strategy, grid)

    assert grid.asked() == [0, 1, 2]
    for agent, message in enumerate(grid.requests):
        assert coefficients(message) == [w for i, w in enumerate(first) if i != agent]
    assert [coefficients(m) for m in grid.sent[MessageType.EVALUATE]] == [[], [], []]
    figures = result.evaluate_metrics_clientapp[1][f"{keys.ACCURACY}-by-party"]
    known = [(m.predict(TEST[0]) == TEST[1]).mean() for m in strategy.models_.values()]
    assert figures == pytest.approx(known), "own models are measured where they are"


def test_ensembling_hands_every_agent_the_model_before_it() -> None:
    """M chains go round at once: agent i continues what agent i - 1 held."""
    strategy, grid = classification("ekd"), Recorder(load_ridge, 3)
    step(strategy, grid)

    for _ in range(3):
        held = [weights(model) for model in strategy.models_.values()]
        step(strategy, grid)

        assert [coefficients(m) for m in grid.requests] == [[held[2]], [held[0]], [held[1]]]


def test_every_party_ends_with_the_ensemble() -> None:
    """New terms are delivered once, and kept: all parties hold the server's sum."""
    received: list[Any] = []
    app = client_app(load_ridge, roles=ROLES, on_model=lambda m, *_: received.append(m))
    strategy = classification("ekd")
    grid = InMemoryGrid(app, 3)
    sizes = []
    for _ in range(4):
        step(strategy, grid)
        sizes.append(strategy.parties_[0].evaluate[keys.NUM_BYTES_RECEIVED])

    assert len(strategy.model_.members) == 12
    assert strategy.model_.signs == (1,) * 3 + (-1,) * 3 + (1,) * 3 + (-1,) * 3
    for model in received[-3:]:
        np.testing.assert_array_equal(model.logits(TEST[0]), strategy.model_.logits(TEST[0]))
    assert max(sizes) < 1.2 * min(sizes), "a round delivers its own terms only"


def test_terms_that_were_not_confirmed_are_delivered_again() -> None:
    """A lost reply costs a party nothing: its sum is complete a round later."""
    strategy, grid = classification("ekd"), Recorder(load_ridge, 3)
    replies_lost = iter([True])

    def lose(reply: Message) -> None:
        if reply.content[keys.META][keys.KIND] == "evaluation" and next(replies_lost, False):
            del reply.content[keys.META]

    grid.change = lose
    for _ in range(3):
        step(strategy, grid)

    accuracy = (strategy.model_.predict(TEST[0]) == TEST[1]).mean()
    for report in strategy.parties_.values():
        assert report.evaluate[keys.ACCURACY] == pytest.approx(accuracy)


def test_models_start_anew_in_every_round() -> None:
    """Each round takes a learner fresh from the factory and teaches it once."""
    taught: list[int] = []

    class Counting(RidgeLearner):
        lessons = 0

        def distill(self, *arguments: Any, **options: Any) -> Any:
            self.lessons += 1
            taught.append(self.lessons)
            return super().distill(*arguments, **options)

    strategy = classification("pkd", 2)
    app = client_app(load_changed(with_ridge(Counting), 0, 1), roles=ROLES)
    run_local(strategy, app, 2, num_rounds=3)

    assert taught == [1] * 6


@pytest.mark.parametrize("loss", ["mse", "cross-entropy"])
def test_agents_learn_probabilities_by_the_chosen_loss(loss: str) -> None:
    """One-hot labels first, then distributions; the loss comes from the server."""
    seen: list[Any] = []
    load = load_changed(with_ridge(watched(RidgeLearner, seen, "distill")), 0, 1)
    strategy = classification("avgkd", 2, target_loss=loss)
    run_local(strategy, client_app(load, roles=ROLES), 2, num_rounds=2)

    assert all(recipe == Recipe(loss=loss, link="softmax") for *_, recipe in seen)
    assert set(np.unique(seen[0][1])) == {0.0, 1.0}
    for _, targets, *_ in seen:
        np.testing.assert_allclose(targets.sum(axis=1), 1.0)
    assert ((seen[2][1] * (seen[0][1] == 1)).sum(axis=1) >= 0.5).all(), "labels keep 1 / M"


def test_a_network_and_a_forest_teach_each_other() -> None:
    """Figures 13 and 14: models that have nothing in common but their predictions."""
    pytest.importorskip("torch")
    from clients.networks.learner import TorchLearner
    from simulations.models import multilayer_perceptron

    factories: dict[str, LearnerFactory] = {
        "mlp": lambda: TorchLearner(
            lambda: multilayer_perceptron(2, 3), num_classes=3, epochs=30, learning_rate=0.01
        ),
        "forest": lambda: ForestScores(RandomForestRegressor(10), num_classes=3),
    }

    def load(context: Context) -> Party:
        party = toy_party(int(context.node_config[keys.PARTITION_ID]))
        name = ["mlp", "forest"][party.partition_id]
        rows = {"x": party.x, "public": PUBLIC, "x_test": TEST[0]}
        narrow = {place: array.astype(np.float32) for place, array in rows.items()}
        own = {"learner_fn": factories[name], "learner_name": name, "catalogue": factories}
        return replace(party, **narrow, **own)

    strategy = classification("avgkd", 2, learner_fn=None, model_fns=factories)
    result = run_local(strategy, client_app(load, roles=ROLES), 2, num_rounds=2)

    assert not strategy.rejected_
    kinds = [type(model).__name__ for model in strategy.models_.values()]
    assert kinds == ["TorchLearner", "ForestScores"]
    assert min(result.evaluate_metrics_clientapp[2][f"{keys.ACCURACY}-by-party"]) > 0.8


# Agents that leave, fail, or send what nobody can use.


def test_a_chain_skips_agents_that_have_left() -> None:
    """The model goes to the next agent that is there, and to nobody when none is."""
    strategy = classification("akd", 4, min_parties=1)
    grid = Recorder(load_ridge, 4)
    step(strategy, grid)
    grid.away = {1}
    step(strategy, grid)
    assert grid.asked() == [2]
    grid.away = {0, 1, 3}
    before, grid.sent = weights(strategy.model_), {}

    result = step(strategy, grid)

    assert grid.sent == {}
    assert not result.train_metrics_clientapp
    assert weights(strategy.model_) == before
    grid.away = set()
    step(strategy, grid)
    assert grid.asked() == [3], "the chain continues when an agent comes back"


def test_a_chain_skips_an_agent_that_fails_and_ends_only_with_the_rounds() -> None:
    """Agent 1 raises: the model of agent 0 goes to agent 2, then to 0, then 1 is tried."""

    def fail(_: Party) -> Party:
        raise ValueError("broken disk")

    strategy, grid = classification("akd"), Recorder(load_ridge, 3)
    step(strategy, grid)
    grid.client_app = client_app(load_changed(fail, 1), roles=ROLES)

    asked, rejected = [], []
    for _ in range(5):
        result = step(strategy, grid)
        asked += grid.asked()
        rejected.append(result.train_metrics_clientapp[1][keys.NUM_REJECTED])

    assert asked == [1, 2, 0, 1, 2]
    assert rejected == [1, 0, 0, 1, 0]


def test_two_chains_that_need_one_agent_take_turns() -> None:
    """EKD without agent 1: no model is lost or counted twice, signs follow the chains."""
    strategy, grid = classification("ekd"), Recorder(load_ridge, 3)
    step(strategy, grid)
    grid.away = {1}

    for expected in ([0, 2], [0, 2], [0, 2]):
        step(strategy, grid)
        assert grid.asked() == expected

    ensemble = strategy.model_
    assert len({weights(member) for member in ensemble.members}) == 3 + 6
    assert ensemble.signs == (1, 1, 1, -1, -1, 1, -1, 1, 1)


def test_averaging_goes_on_without_agents_that_have_left() -> None:
    """The targets of the next round are made by those who answered the last one."""
    strategy, grid = classification("avgkd", 3, min_parties=2), Recorder(load_ridge, 3)
    step(strategy, grid)
    grid.away = {0}
    step(strategy, grid)
    assert [len(coefficients(m)) for m in grid.requests] == [2, 2], "models of the round before"

    step(strategy, grid)

    assert [len(coefficients(m)) for m in grid.requests] == [1, 1]
    assert len(strategy.model_.members) == 2
    grid.away = {0, 1}
    assert not step(strategy, grid).train_metrics_clientapp, "one is too few, and that is all"
    assert len(strategy.model_.members) == 2


def of_another_kind(party: Party) -> Party:
    """Send a model that the server knows and the other agents do not."""
    return replace(party, learner_fn=CentroidLearner, learner_name="centroid")


def test_relayed_models_of_another_kind_are_skipped_by_their_readers() -> None:
    """Agents continue with those that they have a factory for."""
    strategy = classification("avgkd", model_fns={"centroid": CentroidLearner})
    app = client_app(load_changed(of_another_kind, 2), roles=ROLES)

    result = run_local(strategy, app, 3, num_rounds=2)

    assert result.train_metrics_clientapp[2][keys.NUM_MODELS_REFUSED] == 2
    assert result.train_metrics_clientapp[2][keys.NUM_REJECTED] == 1, "it reads no ridge model"


def test_a_chain_says_which_agent_could_not_read_the_model() -> None:
    """The error names the agent and the reason, and the chain offers it to the next."""
    strategy = classification("akd", model_fns={"centroid": CentroidLearner})
    grid = Recorder(load_changed(of_another_kind, 0), 3)
    step(strategy, grid)

    for agent in (1, 2, 1):
        step(strategy, grid)
        assert grid.asked() == [agent]
        (reason,) = strategy.rejected_.values()
        assert reason.startswith(f"Party {agent}: a model to learn from must be one that this")
        assert f"got none of 1: Party {agent}: the model's learner must be one of" in reason


class Refusing(RidgeLearner):
    """Rebuilds any model and predicts nothing."""

    def logits(self, x: Any) -> Any:
        raise ValueError(f"patient 4711 in {x}")


def test_the_text_of_a_foreign_error_stays_at_home() -> None:
    """What a learner raises about private rows is named by its type only."""

    def talkative(party: Party) -> Party:
        return replace(party, catalogue={"ridge": lambda: Refusing(num_classes=3)})

    strategy = classification("akd")
    grid = Recorder(load_changed(talkative, 1), 3)
    strategy.evaluate = False
    step(strategy, grid)
    step(strategy, grid)

    (reason,) = strategy.rejected_.values()
    assert "ValueError while it was read" in reason
    assert "4711" not in reason


def four_classes(party: Party) -> Party:
    return replace(party, num_classes=4, learner_fn=lambda: RidgeLearner(num_classes=4))


def nan_target(party: Party) -> Party:
    return replace(party, task="regression", y=np.full((len(party.x), 3), np.nan))


def as_regression(party: Party) -> Party:
    targets = {"y": np.eye(3)[party.y], "y_test": np.eye(3)[TEST[1]]}
    return replace(party, task="regression", **targets)


def not_soft(party: Party) -> Party:
    class Hard(CentroidLearner):
        distill = None  # type: ignore[assignment]

    return replace(party, learner_fn=Hard)


def not_portable(party: Party) -> Party:
    class Rooted(RidgeLearner):
        to_arrays = None  # type: ignore[assignment]

    return replace(party, learner_fn=lambda: Rooted(num_classes=3))


def other_public(party: Party) -> Party:
    return replace(party, public=PUBLIC + 1)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (four_classes, "Server: num-classes must be 4, as this party has"),
        (nan_target, "The party could not answer; its own log says why"),
        (as_regression, "Server: task must be one of regression, got 'single-label'"),
        (not_soft, "the learner must have distill"),
        (not_portable, "Party 1: the learner must have to_arrays and from_arrays"),
        (other_public, "Party 1: public data must be the server's"),
        (without_records, "Party 1: x must be records to learn from, got none"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_bad_input_of_one_party_is_its_own_clear_error(
    scheme: str, change: Callable[[Party], Party], reason: str
) -> None:
    """The party is named with the reason, and the other two continue."""
    strategy = classification(scheme, public=PUBLIC)
    app = client_app(load_changed(change, 1), roles=ROLES)
    reasons = []
    grid = InMemoryGrid(app, 3)
    for _ in range(2):
        step(strategy, grid)
        reasons += strategy.rejected_.values()

    assert reason in reasons[0]
    assert set(strategy.models_) == {0, 2}


def test_without_public_data_nothing_is_compared() -> None:
    """The schemes need none, so parties may hold what they like."""
    strategy = classification("avgkd")

    run_local(strategy, client_app(load_changed(other_public, 1), roles=ROLES), 3)

    assert not strategy.rejected_


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({keys.PRIVACY_EVENTS: "[]"}, "privacy events must be"),
        ({keys.PRIVACY_EVENTS: "not json"}, "privacy events must be"),
        ({keys.LEARNER: "x" * 300}, "learner must be a name of 1 to 200 letters"),
    ],
)
def test_hostile_words_beside_a_model_are_refused(meta: dict[str, str], reason: str) -> None:
    """Untrusted names and events are read within limits."""
    strategy, grid = classification("avgkd"), Recorder(load_ridge, 3)

    def lie(reply: Message) -> None:
        record = reply.content[keys.META]
        if record[keys.PARTITION_ID] == 1 and keys.PRIVACY_EVENTS in record:
            record.update(meta)

    grid.change = lie
    step(strategy, grid)

    (rejection,) = strategy.rejected_.values()
    assert reason in rejection


# One agent alone, asked by a server that makes mistakes.


def asked(scheme: str, server_round: int = 2) -> ConfigRecord:
    return ConfigRecord(
        {
            keys.STRATEGY: scheme,
            keys.SERVER_ROUND: server_round,
            keys.SEED: 0,
            keys.NUM_CLASSES: 3,
            TASK: "single-label",
            "target-loss": "mse",
        }
    )


def fitted_model(num_classes: int = 3, name: str = "ridge", **meta: Any) -> Knowledge:
    party = ridge_party()
    targets = np.eye(num_classes)[party.y]
    learner = RidgeLearner(num_classes=num_classes, ridge=0.01)
    learner.distill(party.x, targets, rng=derive_rng(0, "x"), recipe=Recipe(link="softmax"))
    return Knowledge("model", learner.to_arrays(), {keys.LEARNER: name, **meta})


def test_a_model_of_other_classes_is_left_out_though_its_learner_is_known() -> None:
    """The catalogue's factory reads four classes; this agent's problem has three."""
    party = ridge_party(catalogue={"four": lambda: RidgeLearner(num_classes=4, ridge=0.01)})
    received = join_models([fitted_model(4, "four"), fitted_model()])

    _, metrics = CodistillParty().train(party, received, asked("avgkd"), PartyState())

    assert metrics[keys.NUM_MODELS_REFUSED] == 1


class Unreliable(RidgeLearner):
    """Predicts what it is told for some records of the agent, all others as it should."""

    told: ClassVar[dict[int, float]] = {3: math.nan, 5: math.inf, 7: 1e300}

    def logits(self, x: Any) -> Any:
        scores = super().logits(x)
        for row, value in self.told.items() if len(x) == 12 else ():
            scores[row] = value
        return scores


@pytest.mark.parametrize("task", ["single-label", "regression"])
def test_a_record_without_a_prediction_changes_no_other_target(task: Any) -> None:
    """Leaving the model out would let one record decide about the targets of all."""
    seen: list[Any] = []
    student = watched(RidgeLearner, seen, "distill")
    party = ridge_party()
    if task == "regression":
        party = as_regression(party)
    config = ConfigRecord({**asked("akd"), TASK: task})
    teacher = RidgeLearner(num_classes=3, ridge=0.01, task=task)
    teacher.distill(
        party.x,
        np.eye(3)[toy_party(0, 12).y],
        rng=derive_rng(0, "x"),
        recipe=Recipe(link="softmax" if task == "single-label" else "identity"),
    )
    model = Knowledge("model", teacher.to_arrays(), {keys.LEARNER: "teacher"})
    for kind in (RidgeLearner, Unreliable):
        factory = {"teacher": lambda kind=kind: kind(num_classes=3, ridge=0.01, task=task)}
        able = replace(
            party,
            catalogue=factory,
            learner_fn=lambda: student(num_classes=3, ridge=0.01, task=task),
        )
        _, metrics = CodistillParty().train(able, join_models([model]), config, PartyState())
        assert metrics[keys.NUM_MODELS_REFUSED] == 0

    others = np.setdiff1d(np.arange(12), list(Unreliable.told))
    plain, broken = (targets for _, targets, *_ in seen)
    np.testing.assert_array_equal(broken[others], plain[others])
    nothing, largest = (1 / 3, 1 / 3) if task == "single-label" else (0.0, 1e30)
    np.testing.assert_allclose(broken[[3, 5]], nothing)
    np.testing.assert_allclose(broken[7], largest)


def test_kernel_models_do_not_carry_rows_out_by_default() -> None:
    """Whoever did not allow it is named, and nothing of the model leaves."""

    def closed(party: Party) -> Party:
        return replace(
            party, learner_fn=lambda: KernelRidgeLearner(num_classes=3), learner_name="kernel"
        )

    strategy = classification("avgkd")
    step(strategy, Recorder(load_changed(closed, 1), 3))

    (reason,) = strategy.rejected_.values()
    assert "reveal_rows must be True for a model to travel" in reason
    assert set(strategy.models_) == {0, 2}


def test_parallel_distillation_learns_from_its_own_model_too() -> None:
    """With the same models all around, nothing but regularisation changes the targets."""
    role, party, state = CodistillParty(), ridge_party(), PartyState()
    own, _ = role.train(party, None, asked("pkd", 1), state)
    alone, _ = role.train(party, join_models([fitted_model()]), asked("pkd"), state)

    other, _ = role.train(party, join_models([fitted_model()]), asked("akd"), PartyState())

    assert (
        own.arrays["coefficients"].tobytes() == fitted_model().arrays["coefficients"].tobytes()
    )
    np.testing.assert_allclose(alone.arrays["coefficients"], other.arrays["coefficients"])


def test_nothing_is_measured_that_was_not_kept() -> None:
    """An evaluate message without training before it is an error of the server."""
    kept = Knowledge(KEPT, {})
    with pytest.raises(KnowledgeMismatch, match="a model must be kept from training"):
        CodistillParty().evaluate(ridge_party(), kept, asked("akd"), PartyState())


def delivered(*terms: Knowledge, first: Any = 0) -> Knowledge:
    """Return terms of EKD's sum, from this number on."""
    return join_models(terms, **({} if first is None else {FIRST_TERM: first}))


def evaluate(party: Party, received: Knowledge, state: PartyState | None = None) -> Any:
    return CodistillParty().evaluate(party, received, asked("ekd"), state or PartyState())


GAP = "first-term must be 0, the terms known so far"
NO_SIGN = "the sign of a term must be 1 or -1"


@pytest.mark.parametrize(
    ("first", "meta", "rule"),
    [
        *((first, {SIGN: 1}, GAP) for first in (1, -1, None, "0", True)),
        *((0, {SIGN: sign}, NO_SIGN) for sign in (0, 2, 1.0, "1")),
        (0, {}, NO_SIGN),
    ],
)
def test_terms_that_leave_a_gap_or_have_no_sign_are_refused(
    first: Any, meta: dict[str, Any], rule: str
) -> None:
    """A sum with missing terms is another predictor, and nothing else is a term of it."""
    with pytest.raises(KnowledgeMismatch, match=rule):
        evaluate(ridge_party(), delivered(fitted_model(**meta), first=first))


def test_each_term_is_evaluated_once_unless_the_rows_change() -> None:
    """The kept sum is used again for the same rows, and made anew for others."""
    calls: list[int] = []

    class Counting(RidgeLearner):
        def logits(self, x: Any) -> Any:
            calls.append(len(x))
            return super().logits(x)

    party = ridge_party(catalogue={"ridge": lambda: Counting(num_classes=3, ridge=0.01)})
    state = PartyState()
    for number in range(3):
        term = fitted_model(sign=(-1) ** number)
        evaluate(party, delivered(term, first=number), state)
    assert calls == [200, 200, 200]

    fewer = replace(party, x_test=TEST[0][:50], y_test=TEST[1][:50])
    model, metrics = evaluate(fewer, delivered(fitted_model(sign=-1), first=3), state)

    assert calls[3:] == [50] * 4
    assert metrics[keys.ACCURACY] == (model.predict(TEST[0][:50]) == TEST[1][:50]).mean()


class Linear(CentroidLearner):
    """Multiplies by its centroids, and does not care how large that gets."""

    def logits(self, x: Any) -> Any:
        return np.asarray(x) @ self.to_arrays()["centroids"].T * 10

    def from_arrays(self, arrays: Any) -> Any:
        vars(self).update(vars(super().from_arrays(arrays)))
        return self


def load_linear(context: Context) -> Party:
    return replace(load_toy_party(context), learner_fn=Linear)


def test_a_term_that_overflows_ends_no_ensemble() -> None:
    """It passes the server's check; the sum and its delivery continue without it."""
    strategy = classification("ekd", learner_fn=Linear, learner_name="centroid")
    grid = Recorder(load_linear, 3)

    def overflow(reply: Message) -> None:
        meta = {} if reply.has_error() else reply.content[keys.META]
        if meta.get(keys.KIND) == "model" and meta[keys.PARTITION_ID] == 1:
            reply.content[keys.ARRAYS] = encode_arrays({"centroids": np.full((3, 2), 1e308)})

    grid.change = overflow
    step(strategy, grid)
    grid.change = lambda _: None
    for _ in range(2):
        result = step(strategy, grid)

    assert not strategy.rejected_
    assert set(strategy.state.delivered.values()) == {9}
    with np.errstate(over="ignore", invalid="ignore"):
        broken = strategy.model_.members[1].logits(TEST[0])
    assert not np.isfinite(broken).all()
    assert np.isfinite(strategy.model_.logits(TEST[0])).all()
    assert keys.ACCURACY in result.evaluate_metrics_clientapp[1]


@pytest.mark.parametrize("name", ["unknown", "refusing"])
def test_a_term_that_a_party_cannot_read_is_left_out_and_counted(name: str) -> None:
    """All others are summed and kept, also in the rounds after."""
    state = PartyState()
    party = ridge_party(catalogue={"refusing": lambda: Refusing(num_classes=3)})
    terms = [fitted_model(sign=1), fitted_model(name=name, sign=1)]

    _, metrics = evaluate(party, delivered(*terms), state)
    again = delivered(fitted_model(name=name, sign=-1), first=2)
    model, later = evaluate(party, again, state)

    good = ridge().from_arrays(fitted_model().arrays)
    expected = (good.predict(TEST[0]) == TEST[1]).mean()
    assert metrics[keys.ACCURACY] == later[keys.ACCURACY] == pytest.approx(expected)
    assert (metrics[keys.NUM_MODELS_REFUSED], later[keys.NUM_MODELS_REFUSED]) == (1, 2)
    np.testing.assert_array_equal(model.predict(TEST[0]), good.predict(TEST[0]))


@pytest.mark.parametrize("name", ["unknown", "refusing"])
def test_an_ensemble_of_which_nothing_can_be_read_is_an_error(name: str) -> None:
    """The party says so instead of measuring zeros, and quotes no row."""
    party = ridge_party(catalogue={"refusing": lambda: Refusing(num_classes=3)})
    received = delivered(fitted_model(name=name, sign=1))

    with pytest.raises(KnowledgeMismatch, match="Party 0: a member must be able") as caught:
        evaluate(party, received)
    assert "4711" not in str(caught.value)


def test_a_party_without_held_out_rows_still_gets_the_ensemble() -> None:
    """Its figure is not a number, and nothing is evaluated."""
    party = ridge_party(x_test=None, y_test=None)
    model, metrics = evaluate(party, delivered(fitted_model(sign=1)))

    assert isinstance(model, SignedEnsemble)
    assert math.isnan(metrics[keys.ACCURACY])


# What the server has, and what it costs.


class Rooted:
    """A learner whose models cannot travel."""

    num_classes = 3
    fit = predict = logits = print


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "multi-label"}, "task must be single-label or regression"),
        ({"target_loss": "l1"}, "target_loss must be one of mse, cross-entropy, got 'l1'"),
        ({"task": "regression", "target_loss": "cross-entropy"}, "must be 'mse' in regression"),
        ({"num_classes": 4}, "learner_fn must make learners of 4 classes"),
        ({"model_fns": {"x": Rooted}}, "model_fns must be learners with to_arrays"),
    ],
)
def test_bad_settings_name_themselves(options: dict[str, Any], message: str) -> None:
    """One sentence at construction."""
    with pytest.raises(InvalidParameter, match=message):
        classification("avgkd", **options)


class Private(Planned, RidgeLearner):
    """A learner that says what its training costs."""

    privacy_events: tuple[Any, ...] = ()
    event = GaussianEvent(unit="example", relation="replace-one", l2_sensitivity=1, scale=5)
    planned = ((event, 1),)

    def distill(self, x: Any, targets: Any, *, rng: Any, recipe: Any) -> Any:
        self.privacy_events = self.planned
        return super().distill(x, targets, rng=rng, recipe=recipe)


private = with_ridge(Private)


def test_private_training_is_composed_over_rounds() -> None:
    """Every round adds the events of its training, at the agents and in the ledger."""
    strategy = classification("avgkd", 2)
    app = client_app(load_changed(private, 0, 1), roles=ROLES)

    result = run_local(strategy, app, 2, num_rounds=3)

    told = [result.train_metrics_clientapp[r][keys.EPSILON_EXAMPLE] for r in (1, 2, 3)]
    assert 0 < told[0] < told[1] < told[2] < math.inf
    ((_, count),) = strategy.ledger_.entries
    assert count == 3
    assert strategy.ledger_.get_epsilon() == pytest.approx(told[2])
    assert "without looking at the data" in strategy.ledger_.statement()


def test_one_agent_without_noise_leaves_no_guarantee() -> None:
    """The ledger is that of the least protected agent."""
    strategy = classification("avgkd", 2)
    app = client_app(load_changed(private, 0), roles=ROLES)

    result = run_local(strategy, app, 2, num_rounds=2)

    assert strategy.parties_[0].train[keys.EPSILON_EXAMPLE] < math.inf
    assert result.train_metrics_clientapp[2][keys.EPSILON_EXAMPLE] == math.inf
    assert strategy.ledger_.get_epsilon() == math.inf
    assert "none, because models left the agents" in strategy.ledger_.statement()


def train_with_noise(private_distill: bool, journal_folder: Any = None) -> tuple[Any, Any]:
    """Run two rounds of two agents, with 40 and 24 records, in batches of 16."""
    pytest.importorskip("opacus")
    pytest.importorskip("dp_accounting")
    from torch import nn

    from clients.networks.private import DPTorchLearner

    def learner_fn() -> DPTorchLearner:
        return DPTorchLearner(
            lambda: nn.Linear(2, 3),
            num_classes=3,
            epochs=2,
            batch_size=16,
            noise_multiplier=2.0,
            private_distill=private_distill,
        )

    def make(number: int) -> Party:
        party = toy_party(number, num_records=(40, 24)[number])
        own = {"learner_fn": learner_fn, "learner_name": "linear"}
        journal = journal_folder and journal_of(party, journal_folder / str(number))
        return replace(party, **own, journal=journal)

    strategy = classification("avgkd", 2, learner_fn=learner_fn, learner_name="linear")
    app = client_app(loading(make), roles=ROLES)
    return strategy, run_local(strategy, app, 2, num_rounds=2)


def dp_accounting_epsilon(records: int, steps: int) -> float:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    step = dp_accounting.PoissonSampledDpEvent(
        16 / records, dp_accounting.GaussianDpEvent(noise_multiplier=2.0)
    )
    accountant = PLDAccountant().compose(dp_accounting.SelfComposedDpEvent(step, steps))
    return float(accountant.get_epsilon(1e-5))


@pytest.mark.parametrize("with_journal", [False, True])
def test_agents_that_train_with_noise_pay_for_the_steps_of_all_rounds(
    with_journal: bool, tmp_path: Any
) -> None:
    """Real DP-SGD over real messages costs what dp-accounting says of the summed steps."""
    strategy, result = train_with_noise(True, tmp_path if with_journal else None)

    # An epoch of 40 records takes 3 steps, one of 24 takes 2; both rounds have 2 epochs.
    expected = {
        0: dp_accounting_epsilon(40, 2 * 2 * 3),
        1: dp_accounting_epsilon(24, 2 * 2 * 2),
    }
    for agent, epsilon in expected.items():
        report = strategy.parties_[agent].train
        assert report[keys.EPSILON_EXAMPLE] == pytest.approx(epsilon, rel=1e-3)
        assert report[keys.NUM_RELEASES] == 2
    highest = max(expected.values())
    told = result.train_metrics_clientapp[2][keys.EPSILON_EXAMPLE]
    assert told == pytest.approx(highest, rel=1e-3)
    assert strategy.ledger_.get_epsilon() == pytest.approx(highest, rel=1e-3)
    ((event, count),) = strategy.ledger_.entries
    assert (event.records, event.steps, count) == (24, 4, 2)


def test_learning_private_rows_without_noise_is_no_guarantee() -> None:
    """The same learner that takes its rows for public ones leaves epsilon infinite."""
    strategy, result = train_with_noise(False)

    assert result.train_metrics_clientapp[2][keys.EPSILON_EXAMPLE] == math.inf
    assert strategy.ledger_.get_epsilon() == math.inf


@pytest.mark.parametrize("scheme", SCHEMES)
def test_models_that_got_lost_have_been_paid_for(scheme: str) -> None:
    """A reply that the server never read left its agent all the same."""
    strategy = classification(scheme, 2, min_parties=1)
    grid = Recorder(load_changed(private, 0, 1), 2)
    step(strategy, grid)
    spent = {0: 1, 1: 1}

    def count(reply: Message, *, loses: bool) -> None:
        if reply.content[keys.META][keys.KIND] == "model":
            spent[int(reply.content[keys.META][keys.PARTITION_ID])] += 1
            if loses:
                del reply.content[keys.META]

    for number in range(4):
        grid.change = partial(count, loses=number == 0)
        step(strategy, grid)

    ((_, charged),) = strategy.ledger_.entries
    assert charged == max(spent.values())
    largest = max(r.train[keys.EPSILON_EXAMPLE] for r in strategy.parties_.values())
    assert strategy.ledger_.get_epsilon() == pytest.approx(largest)


def test_an_agent_that_returns_as_another_node_pays_for_both() -> None:
    """The new node has forgotten what the old one spent; the server has not."""

    def make(number: int) -> Party:
        return replace(private(ridge_party(number)), partition_id=min(1, number))

    strategy, grid = classification("avgkd", 2), Recorder(loading(make), 3)
    grid.away = {2}
    step(strategy, grid)
    step(strategy, grid)
    grid.away = {1}
    step(strategy, grid)

    assert not strategy.rejected_
    assert strategy.state.ledgers[1][1].entries[0][1] == 3
    assert strategy.parties_[1].train[keys.NUM_RELEASES] == 1


def test_an_agent_that_lost_its_state_pays_for_both() -> None:
    """The same node after a restart tells less than before; epsilon does not shrink."""
    strategy, grid = classification("avgkd", 2), Recorder(load_changed(private, 0, 1), 2)
    step(strategy, grid)
    step(strategy, grid)
    before = strategy.ledger_.get_epsilon()

    for _ in range(2):
        forget(grid)
        step(strategy, grid)

    assert not strategy.rejected_
    assert [known.entries[0][1] for _, known in strategy.state.ledgers.values()] == [4, 4]
    assert strategy.ledger_.get_epsilon() > before


def test_claims_beyond_all_counts_end_no_run() -> None:
    """An agent that says it has spent as much as a ledger can hold harms itself only."""
    strategy, grid = classification("avgkd", 2), Recorder(load_changed(private, 0, 1), 2)

    def exaggerate(reply: Message) -> None:
        record = reply.content[keys.META]
        if keys.PRIVACY_EVENTS in record and record[keys.PARTITION_ID] == 1:
            ledger = json.loads(str(record[keys.PRIVACY_EVENTS]))
            ledger["entries"][0]["count"] = MOST
            record[keys.PRIVACY_EVENTS] = json.dumps(ledger)

    grid.change = exaggerate
    for _ in range(3):
        result = step(strategy, grid)

    assert result.train_metrics_clientapp[1][keys.NUM_PARTIES] == 2
    assert strategy.state.ledgers[1][1].entries[0][1] == MOST


def test_events_from_elsewhere_do_not_make_a_model_private() -> None:
    """A learner that has paid for something else and learns targets without noise: none."""

    class Stale(RidgeLearner):
        privacy_events = Private.planned

    party = with_ridge(Stale)(ridge_party())
    _, metrics = CodistillParty().train(party, None, asked("avgkd", 1), PartyState())

    assert metrics[keys.EPSILON_EXAMPLE] == math.inf


def test_a_journal_counts_every_round_and_can_refuse_one(tmp_path: Any) -> None:
    """A party with a budget stops taking part when it is used up, and measures in silence."""

    def journaled(party: Party) -> Party:
        return with_journal(private(party), tmp_path, max_epsilon=1.5)

    strategy = classification("avgkd", 2)
    grid = InMemoryGrid(client_app(load_changed(journaled, 1), roles=ROLES), 2)
    reasons = []
    for _ in range(4):
        step(strategy, grid)
        reasons.append("".join(strategy.rejected_.values()))

    assert reasons[0] == ""
    assert reasons[-1] == NO_BUDGET
    assert math.isnan(strategy.parties_[1].evaluate[keys.ACCURACY])


def test_the_server_keeps_no_model_but_the_newest(caplog: pytest.LogCaptureFixture) -> None:
    """More rounds of averaging hold no model more; EKD holds its terms, one a model."""
    caplog.set_level(logging.CRITICAL, logger="flwr")  # what is captured takes memory too
    wide = derive_rng(0, "wide").normal(size=(4, 20_000))

    problem: dict[str, Any] = {
        "num_classes": 1,
        "task": "regression",
        "learner_fn": lambda: RidgeLearner(num_classes=1, task="regression"),
        "learner_name": "ridge",
    }

    def load(context: Context) -> Party:
        number = int(context.node_config[keys.PARTITION_ID])
        rows = {"x": wide + number, "y": wide[:, :1], "public": wide[:1]}
        return Party(**rows, **problem, partition_id=number)

    def held(scheme: str, rounds: int) -> int:
        strategy = classification(scheme, 2, **problem, evaluate=False, row_shape=(20_000,))
        grid = InMemoryGrid(client_app(load, roles=ROLES), 2)
        tracemalloc.start()
        for _ in range(rounds):
            step(strategy, grid)
        del grid
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return size

    model = 20_000 * 8
    assert held("avgkd", 8) - held("avgkd", 2) < model
    growth = held("ekd", 8) - held("ekd", 2)
    assert 0.8 * 12 * model < growth < 1.5 * 12 * model
