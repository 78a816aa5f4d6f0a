"""FedDF: its distillation by plain numpy, kinds of models, plain parties, liars."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from scipy.special import softmax

from clients.app import client_app
from fl_strategies import FedAvg, FedDF, FlowerStrategy, Party
from fl_strategies._util import Array, FloatArray, derive_rng
from fl_strategies.errors import InvalidParameter, UnsupportedLearner
from fl_strategies.learners import LearnerFactory
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import encode_arrays
from simulations.runtime.local import InMemoryGrid
from tests.toys import (
    DESCENT,
    NUM_CLASSES,
    PUBLIC,
    TEST,
    CentroidLearner,
    Change,
    WatchedGrid,
    accuracy,
    arrays_in,
    common_options,
    loading,
    torch_factory,
    toy_party,
    weights_of,
    with_arrays,
    with_meta,
)

torch = pytest.importorskip("torch")

RATE, NUM_PARTIES = 0.5, 4


def linear(**changes: Any) -> Any:
    return torch_factory(**{**DESCENT, "learning_rate": RATE, **changes})()


def layered(**changes: Any) -> Any:
    settings = {**DESCENT, "learning_rate": RATE, **changes}
    return torch_factory(7, activation="Tanh", **settings)()


FACTORIES: Mapping[str, LearnerFactory] = {"linear": linear, "layered": layered}


def load(*names: str, change: Callable[[Party], Party] = lambda p: p) -> Callable[..., Party]:
    """Load parties of unequal size with these kinds of models in turn, and no public rows."""

    def make(number: int) -> Party:
        name = names[number % len(names)]
        party = toy_party(number, 20 + 10 * number)
        named = replace(party, learner_fn=FACTORIES[name], learner_name=name)
        return change(replace(named, public=PUBLIC[:0]))

    return loading(make)


def feddf(**changes: Any) -> FedDF:
    options = {"learner_fn": linear, "learner_name": "linear", "local_epochs": 3, **changes}
    return FedDF.from_settings(**{**common_options(NUM_PARTIES), **options})


def run(
    strategy: FlowerStrategy, app: ClientApp, num_rounds: int = 1, change: Change | None = None
) -> WatchedGrid:
    return WatchedGrid(app, NUM_PARTIES, change).serve(strategy, num_rounds)


def scores(arrays: Mapping[str, Array]) -> FloatArray:
    return np.asarray(PUBLIC @ arrays["weight"].T.astype(np.float64) + arrays["bias"])


# The distillation.


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("ensemble", ["logits", "probabilities"])
def test_a_round_is_a_mean_and_a_step_towards_the_ensemble(
    ensemble: str, temperature: float
) -> None:
    """Of two passes over public rows, as numpy has their gradients."""
    settings = {"ensemble": ensemble, "temperature": temperature, "distill_epochs": 2}
    strategy = feddf(restrain=False, **settings)
    ((_, replies),) = run(strategy, client_app(load("linear"))).wire

    sent = [arrays_in(reply) for reply in replies]
    said = [scores(arrays) / temperature for arrays in sent]
    targets = {
        "logits": softmax(np.mean(said, axis=0), axis=1),
        "probabilities": np.mean([softmax(each, axis=1) for each in said], axis=0),
    }[ensemble]
    sizes = [20, 30, 40, 50]
    w, b = (np.average([a[n] for a in sent], axis=0, weights=sizes) for n in ("weight", "bias"))
    for _ in range(2):
        missed = softmax((PUBLIC @ w.T + b) / temperature, axis=1) - targets
        w = w - RATE / temperature * missed.T @ PUBLIC / len(PUBLIC)
        b = b - RATE / temperature * missed.mean(axis=0)
    np.testing.assert_allclose(weights_of(strategy)["weight"], w, atol=1e-5)
    np.testing.assert_allclose(weights_of(strategy)["bias"], b, atol=1e-5)


def test_parties_that_agree_leave_nothing_to_distil() -> None:
    """Their ensemble says what their average says: the model is FedAvg's."""
    app = client_app(load("linear", change=lambda p: replace(p, x=PUBLIC, y=PUBLIC_LABELS)))
    options = {"learner_fn": linear, "learner_name": "linear", "local_epochs": 3}
    plain = FedAvg.from_settings(**{**common_options(NUM_PARTIES), **options, "public": None})
    strategy = feddf(distill_epochs=5)
    run(strategy, app)
    run(plain, app)

    for name, array in weights_of(plain).items():
        np.testing.assert_allclose(weights_of(strategy)[name], array, atol=1e-6)


PUBLIC_LABELS = np.arange(len(PUBLIC)) % NUM_CLASSES


def test_parties_that_lack_classes_are_fused_better_than_averaged() -> None:
    """After one round of much local training, where averages suffer most."""

    def skew(party: Party) -> Party:
        rows = (party.y == party.partition_id % 3) | (party.y == (party.partition_id + 1) % 3)
        return replace(party, x=party.x[rows], y=party.y[rows])

    app = client_app(load("layered", change=skew))
    options: dict[str, Any] = {
        **common_options(NUM_PARTIES),
        "learner_fn": layered,
        "learner_name": "layered",
        "local_epochs": 60,
    }
    plain = FedAvg.from_settings(**{**options, "public": None})
    strategy = FedDF.from_settings(**options, distill_epochs=60)
    run(strategy, app)
    run(plain, app)

    fused, averaged = (accuracy(s.model_.predict(TEST[0])) for s in (strategy, plain))
    assert fused > averaged + 0.05


# Kinds of models.


def test_each_kind_has_its_average_and_learns_from_all() -> None:
    """Hardly any distillation leaves averages; later rounds send each party its own kind."""
    idle = {name: lambda f=f: f(learning_rate=1e-12) for name, f in FACTORIES.items()}
    strategy = feddf(
        restrain=False, learner_fn=idle["linear"], model_fns=idle, distill_epochs=1
    )
    grid = run(strategy, client_app(load("linear", "layered")), num_rounds=2)

    (first, replies), (second, _) = grid.wire
    assert {str(m.content[keys.META][keys.KIND]) for m in first} == {"models"}
    for kind, numbers in (("linear", [0, 2]), ("layered", [1, 3])):
        sent = [arrays_in(replies[number]) for number in numbers]
        for name, array in arrays_in(second[numbers[0]]).items():
            sizes = [20 + 10 * number for number in numbers]
            mean = np.average([arrays[name] for arrays in sent], axis=0, weights=sizes)
            np.testing.assert_allclose(array, mean, atol=1e-6)
            np.testing.assert_array_equal(arrays_in(second[numbers[1]])[name], array)
        assert second[numbers[0]].content[keys.META][keys.LEARNER] == kind


def test_kinds_teach_each_other() -> None:
    """One kind has never seen a class, and names it all the same."""

    def skew(party: Party) -> Party:
        rows = party.y < 2 if party.learner_name == "linear" else party.y > 0
        return replace(party, x=party.x[rows], y=party.y[rows])

    app = client_app(load("linear", "layered", change=skew))
    strategy = feddf(model_fns=FACTORIES, local_epochs=30, distill_epochs=60)
    run(strategy, app, num_rounds=2)

    assert accuracy(strategy.model_.predict(TEST[0])) > 0.8
    assert set(strategy.state.models) == {"layered"}
    other = layered().from_arrays(strategy.state.models["layered"].arrays)
    assert accuracy(other.predict(TEST[0])) > 0.8


def test_the_servers_kind_may_be_nobodys() -> None:
    """It learns from the ensemble alone, and parties are given the models of their kinds."""
    received = []
    app = client_app(load("layered"), on_model=lambda m, *_: received.append(m.to_arrays()))  # type: ignore[attr-defined]
    strategy = feddf(model_fns=FACTORIES, local_epochs=20, distill_epochs=50)
    run(strategy, app, num_rounds=2)

    assert accuracy(strategy.model_.predict(TEST[0])) > 0.8
    assert set(weights_of(strategy)) == {"weight", "bias"}
    assert {"0.weight", "2.bias"} < set(received[-1])


def test_a_kind_the_server_does_not_know_excludes_its_party() -> None:
    """By one sentence of the party, with and without other kinds."""
    strange = lambda p: replace(p, learner_name="tree") if p.partition_id == 1 else p  # noqa: E731
    for kinds in (None, FACTORIES):
        strategy = feddf(model_fns=kinds, evaluate=False)
        run(strategy, client_app(load("linear", change=strange)))

        (reason,) = strategy.rejected_.values()
        assert reason.startswith("Party 1: ")
        assert "'tree'" in reason


def test_weights_of_another_kind_exclude_their_party() -> None:
    """A party cannot say that it has one kind and send another."""
    strategy, pretend = feddf(model_fns=FACTORIES), with_meta(keys.LEARNER, "layered")
    run(strategy, client_app(load("linear", "layered")), change=pretend)

    (reason,) = strategy.rejected_.values()
    assert "must be" in reason
    assert 0 not in strategy.parties_


# Parties that know nothing of this package.


def plain_app(
    change: Callable[[int, dict[str, Any]], dict[str, Any]] | None = None,
) -> ClientApp:
    """Return client code as Flower's quickstart for PyTorch has it."""
    app = ClientApp()

    def module_of(message: Message) -> Any:
        module = torch.nn.Linear(2, NUM_CLASSES)
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        return module

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        party, module = toy_party(number), module_of(message)
        x, y = torch.tensor(party.x, dtype=torch.float32), torch.tensor(party.y)
        optimizer = torch.optim.SGD(module.parameters(), lr=message.content["config"]["lr"])
        for _ in range(20):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(module(x), y)
            loss.backward()
            optimizer.step()
        told: dict[str, Any] = {"train_loss": loss.item(), "num-examples": len(y)}
        weights = {n: np.asarray(a) for n, a in module.state_dict().items()}
        if change is not None:
            weights = change(number, weights)
            told.pop(weights.pop("without", ""), None)
        content = {"arrays": encode_arrays(weights), "metrics": MetricRecord(told)}
        return Message(RecordDict(content), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, _: Context) -> Message:
        module = module_of(message)
        found = module(torch.tensor(TEST[0], dtype=torch.float32)).argmax(dim=1).numpy()
        told = {"eval_acc": accuracy(found), "num-examples": len(TEST[1])}
        return Message(RecordDict({"metrics": MetricRecord(told)}), reply_to=message)

    return app


def start_plain(strategy: FedDF, app: ClientApp, num_rounds: int = 2) -> Any:
    grid = InMemoryGrid(app, NUM_PARTIES)
    config = ConfigRecord({"lr": 0.5})
    return strategy.start(grid, ArrayRecord(), num_rounds=num_rounds, train_config=config)


def test_it_takes_the_place_of_fedavg_for_plain_parties(tmp_path: Path) -> None:
    """Flower's client code as it is: a model, figures of training and test, a ledger."""
    strategy = feddf(checkpoint_dir=tmp_path)
    result = start_plain(strategy, plain_app())

    assert accuracy(strategy.model_.predict(TEST[0])) > 0.85
    assert sorted(strategy.parties_) == [0, 1, 2, 3]
    assert not strategy.rejected_
    told = result.evaluate_metrics_clientapp[2]
    assert told["eval_acc"] == pytest.approx(accuracy(strategy.model_.predict(TEST[0])))
    assert result.train_metrics_clientapp[2]["train_loss"] < 0.6
    assert result.train_metrics_clientapp[2][keys.EPSILON_EXAMPLE] == np.inf
    assert "none, because weights left the party" in strategy.ledger_.statement()
    resumed = feddf(checkpoint_dir=tmp_path, resume=True)
    start_plain(resumed, plain_app(), num_rounds=3)
    assert sorted(resumed.parties_) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"without": "num-examples"}, "num-examples must be a whole number"),
        ({"bias": np.full(3, np.nan, np.float32)}, "'bias' must be finite"),
        ({"bias": np.zeros(4, np.float32)}, "'bias' must be float32 of shape (3,)"),
        ({"more": np.zeros(4, np.float32)}, "'more' must be omitted"),
    ],
)
def test_a_bad_answer_of_a_plain_party_excludes_it(change: Any, reason: str) -> None:
    """It never ends the run, as it would by Flower's own server."""
    strategy = feddf()
    start_plain(strategy, plain_app(lambda n, w: {**w, **change} if n == 2 else w), 1)

    (found,) = strategy.rejected_.values()
    assert reason in found
    assert accuracy(strategy.model_.predict(TEST[0])) > 0.8


# Liars, and what does not fit.


def louder(times: float) -> Change:
    return with_arrays(lambda a: {n: np.float32(times) * array for n, array in a.items()})


@pytest.mark.parametrize("restrain", [True, False])
def test_one_loud_model_does_not_speak_for_all(restrain: bool) -> None:
    """Weights of any size are moved towards the others'; without the limit they decide."""
    honest, attacked = (feddf(restrain=restrain, local_epochs=20) for _ in range(2))
    app = client_app(load("linear"))
    run(honest, app)
    run(attacked, app, change=louder(-1e4))

    lost = [accuracy(s.model_.predict(TEST[0])) for s in (honest, attacked)]
    assert lost[1] > lost[0] - 0.1 if restrain else lost[1] < lost[0] - 0.3


def test_a_single_loud_model_of_its_kind_is_heard_as_others_are() -> None:
    """Where a kind has too few parties for a middle, the ensemble has one."""
    strategy = feddf(model_fns=FACTORIES)
    run(strategy, client_app(load("linear", "layered")), change=louder(1e4))

    assert strategy.state.history["train"][1][keys.NUM_CAPPED] == 1


class Raising(CentroidLearner):
    """A model that a hostile party's weights break."""

    def logits(self, x: Array) -> FloatArray:  # noqa: ARG002
        raise ZeroDivisionError("not these rows")


def overflowing() -> Any:
    arrays = linear().initialised().to_arrays()
    return linear().from_arrays({**arrays, "weight": np.full((3, 2), 1e10, np.float32)})


@pytest.mark.parametrize("make", [overflowing, Raising])
def test_a_model_that_fails_on_a_later_row_is_omitted(make: Callable[[], Any]) -> None:
    """Whatever it raises there: the rows that all models are tried on do not show it."""
    public = np.concatenate([PUBLIC, np.full((1, 2), 1e30)])

    said, quieter = feddf(public=public, restrain=False)._targets(
        [make(), linear().initialised()]
    )

    assert np.isfinite(said).all()
    assert quieter == 1


def test_learners_and_rows_that_do_not_fit_are_sentences() -> None:
    """When the strategy is built."""

    class Undrawn:
        num_classes = NUM_CLASSES
        fit, predict = CentroidLearner.fit, CentroidLearner.predict
        logits = CentroidLearner.logits

    with pytest.raises(UnsupportedLearner, match="FedDF: the learner must have initialised"):
        feddf(model_fns={"other": Undrawn})
    with pytest.raises(InvalidParameter, match="FedDF: public must be at least one row, got 0"):
        feddf(public=PUBLIC[:0])


def test_first_weights_of_all_kinds_come_from_the_seed() -> None:
    """Two servers with one seed send the same."""
    strategy = feddf(model_fns=FACTORIES)
    strategy.begin_round()
    drawn = layered().initialised(rng=derive_rng(0, "weights", "initial")).to_arrays()

    for name, array in strategy.state.models["layered"].arrays.items():
        np.testing.assert_array_equal(array, drawn[name])
