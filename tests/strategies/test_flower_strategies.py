"""Flower's own strategies: on our parties by their own servers, and under our base."""

import inspect
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod, arrays_size_mod, fixedclipping_mod
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Result, Strategy

from clients.app import client_app
from fl_strategies import (
    FLOWER_STRATEGIES,
    FedAvg,
    FedMD,
    FlowerStrategy,
    Party,
    WeightsOptions,
    find_algorithm,
)
from fl_strategies._util import Array
from fl_strategies.errors import InvalidData, InvalidParameter, NotEnoughParties, RunFailed
from fl_strategies.options import key_of
from fl_strategies.party.party import PartyPolicy
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import decode_arrays, encode_arrays
from simulations.runtime.local import InMemoryGrid, run_local
from tests.kept import Killed, MortalGrid
from tests.toys import (
    TEST,
    CentroidLearner,
    Change,
    WatchedGrid,
    accuracy,
    arrays_in,
    common_options,
    load_toy_party,
    loading,
    toy_fedkt,
    toy_party,
    weights_of,
    with_arrays,
)

torch = pytest.importorskip("torch")

NUM_PARTIES = 4
FOUR = {"min_train_nodes": 4, "min_available_nodes": 4, "min_evaluate_nodes": 4}
OWN: dict[str, Callable[[], Strategy]] = {
    "FedAvg": lambda: flower.FedAvg(**FOUR),
    "FedProx": lambda: flower.FedProx(proximal_mu=0.1, **FOUR),
    "FedAvgM": lambda: flower.FedAvgM(server_momentum=0.5, **FOUR),
    "FedAdagrad": lambda: flower.FedAdagrad(**FOUR),
    "FedAdam": lambda: flower.FedAdam(**FOUR),
    "FedYogi": lambda: flower.FedYogi(eta=0.1, **FOUR),
    "FedMedian": lambda: flower.FedMedian(**FOUR),
    "FedTrimmedAvg": lambda: flower.FedTrimmedAvg(beta=0.25, **FOUR),
    "Krum": lambda: flower.Krum(num_malicious_nodes=0, **FOUR),
    "MultiKrum": lambda: flower.MultiKrum(num_malicious_nodes=0, **FOUR),
    "server-side DP": lambda: flower.DifferentialPrivacyServerSideFixedClipping(
        flower.FedAvg(**FOUR), 0.01, 10.0, 4
    ),
    "client-side DP": lambda: flower.DifferentialPrivacyClientSideFixedClipping(
        flower.FedAvg(**FOUR), 0.01, 10.0, 4
    ),
}


def factory() -> Any:
    """Return a network with a normalisation, whose counter of batches is a whole number."""
    from clients.networks.learner import TorchLearner

    def module() -> Any:
        hidden = torch.nn.Linear(2, 8, bias=False)  # its normalisation has one
        return torch.nn.Sequential(hidden, torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))

    return TorchLearner(module, num_classes=3, batch_size=20, learning_rate=0.05)


load = loading(lambda n: replace(toy_party(n, 60), learner_fn=factory))


def first_arrays() -> dict[str, Array]:
    drawn: dict[str, Array] = factory().initialised(rng=np.random.default_rng(0)).to_arrays()
    return drawn


def first_weights() -> ArrayRecord:
    return encode_arrays(first_arrays())


def quality(arrays: ArrayRecord | None) -> float:
    found = decode_arrays(arrays or ArrayRecord(), 2**20)
    typed = {name: found[name].astype(like.dtype) for name, like in first_arrays().items()}
    return accuracy(factory().from_arrays(typed).predict(TEST[0]))


def start(strategy: Strategy, app: Any, **options: Any) -> Result:
    grid = InMemoryGrid(app, NUM_PARTIES)
    return strategy.start(grid, first_weights(), **{"num_rounds": 3, **options})


def options(**changes: Any) -> dict[str, Any]:
    return {**common_options(NUM_PARTIES), "learner_fn": factory, **changes}


def adapted(inner: Strategy | None = None, **changes: Any) -> FlowerStrategy:
    return FlowerStrategy(**options(flower=inner, **changes))


# Flower's own servers, which know nothing of this package.


@pytest.mark.parametrize("name", OWN)
def test_parties_answer_flowers_own_strategies(name: str) -> None:
    """Weights in and out, the number of examples, figures; and the model learns."""
    mods = [fixedclipping_mod] if name == "client-side DP" else []

    result = start(OWN[name](), client_app(load, mods=mods))

    assert quality(result.arrays) > 0.6
    assert set(result.train_metrics_clientapp) == {1, 2, 3}
    assert result.evaluate_metrics_clientapp[3][keys.ACCURACY] > 0.6  # type: ignore[operator]


def test_a_plain_answer_holds_weights_and_a_count_alone() -> None:
    """Names in the order in which they came; no epsilon, which Flower would average."""
    sent = first_weights()

    (reply,) = ask(request(sent), client_app(load))

    assert set(reply.content) == {"arrays", "metrics"}
    assert list(reply.content.array_records["arrays"]) == list(sent)
    assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 60}


def request(arrays: ArrayRecord, **settings: Any) -> RecordDict:
    config = ConfigRecord({"server-round": 1, **settings})
    return RecordDict({"arrays": arrays, "config": config})


def ask(content: RecordDict, app: Any) -> list[Message]:
    grid = InMemoryGrid(app, 1)
    (node,) = grid.get_node_ids()
    return grid.send_and_receive([Message(content, dst_node_id=node, message_type="train")])


def test_the_proximal_term_holds_weights_back() -> None:
    """FedProx's mu reaches the learner: the larger, the nearer the weights stay."""
    away = []
    for mu in (0.0, 10.0, 1000.0):
        (reply,) = ask(request(first_weights(), **{"proximal-mu": mu}), client_app(load))
        after = arrays_in(reply)["0.weight"]
        away.append(np.abs(after - first_arrays()["0.weight"]).max())

    assert away[0] > 1.2 * away[1] > 1.4 * away[2]


@pytest.mark.parametrize("mu", [-1.0, float("nan"), float("inf"), 1e9, "much"])
def test_an_absurd_proximal_term_is_refused(mu: Any) -> None:
    """A server cannot make a party compute nonsense."""
    (reply,) = ask(request(first_weights(), **{"proximal-mu": mu}), client_app(load))

    assert "Server: proximal-mu must be a number from 0.0 to" in reply.error.reason


def test_a_party_refuses_weights_of_another_model_and_what_its_policy_does_not_allow() -> None:
    """Before any record is touched; Flower's strategies are called flower there."""
    policy = PartyPolicy(strategies=("fedkt L2",))
    careful = loading(lambda n: replace(toy_party(n), policy=policy))
    other = encode_arrays({"0.weight": np.zeros((8, 2), np.float32)})
    for arrays, app, sentence in (
        (other, load, "Weights: arrays must be those of the model"),
        (first_weights(), careful, "one that its policy allows (fedkt L2), got flower"),
    ):
        (reply,) = ask(request(arrays), client_app(app))
        assert sentence in reply.error.reason


def test_a_party_that_measures_at_home_spoils_no_mean() -> None:
    """Flower cannot average a figure that is not there, so the party says that it has none."""

    def some(number: int) -> Party:
        party = replace(toy_party(number, 60), learner_fn=factory)
        return replace(party, x_test=None, y_test=None) if number == 0 else party

    result = start(OWN["FedAvg"](), client_app(loading(some)))

    assert result.evaluate_metrics_clientapp[3][keys.ACCURACY] > 0.8  # type: ignore[operator]


# Mods.


def test_mods_see_messages() -> None:
    """One of Flower's that counts bytes runs around every answer of ours."""
    seen: list[str] = []

    def note(message: Message, context: Context, call_next: Any) -> Message:
        seen.append(message.metadata.message_type)
        reply: Message = call_next(message, context)
        return reply

    run_local(
        toy_fedkt(), client_app(load_toy_party, mods=[note, arrays_size_mod]), NUM_PARTIES
    )

    assert seen == ["train"] * NUM_PARTIES + ["evaluate"] * NUM_PARTIES


@pytest.mark.parametrize("mod", [LocalDpMod(1.0, 1.0, 1.0, 1e-5), fixedclipping_mod])
def test_a_mod_for_weights_is_refused_where_none_travel(mod: Any) -> None:
    """It would blur packed labels, or nothing at all, and promise privacy."""
    with pytest.raises(RunFailed, match="mods must be none that work on weights for fedkt"):
        run_local(toy_fedkt(), client_app(load_toy_party, mods=[mod]), NUM_PARTIES)


def test_local_noise_by_a_mod_changes_the_weights() -> None:
    """Where weights travel, the mod does its work, also under our base."""
    noisy = LocalDpMod(1e-6, 1e-9, 1.0, 1e-5)
    held, free = adapted(), adapted()
    start(held, client_app(load, mods=[noisy]))
    start(free, client_app(load))

    first = first_arrays()["0.weight"]
    moved = [np.abs(weights_of(s)["0.weight"] - first).max() for s in (held, free)]
    assert moved[0] < 1e-3 < moved[1]


class IndirectWrapper(flower.FedAvg):
    """A wrapper that is not the one to call what it wraps."""

    def __init__(self, inner: Strategy) -> None:
        super().__init__(min_available_nodes=NUM_PARTIES)
        self.inner = inner

    def configure_train(self, *request: Any) -> Any:
        return self.inner.configure_train(*request)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: flower.DifferentialPrivacyClientSideFixedClipping(s, 1.0, 1.0, 4),
        lambda s: flower.DifferentialPrivacyServerSideFixedClipping(s, 1.0, 1.0, 4),
        lambda s: flower.DifferentialPrivacyClientSideAdaptiveClipping(s, 0.1, 4),
        IndirectWrapper,
    ],
)
@pytest.mark.parametrize("runs_before", [0, 1])
def test_a_wrapper_around_our_strategies_is_refused(wrap: Any, runs_before: int) -> None:
    """It would run and protect nothing, also around a strategy that has run by itself."""
    strategy, grid = toy_fedkt(), InMemoryGrid(client_app(load_toy_party), NUM_PARTIES)
    for _ in range(runs_before):
        strategy.start(grid, ArrayRecord(), num_rounds=1)

    with pytest.raises(InvalidParameter, match="FedKT: it must be run by its own start"):
        wrap(strategy).start(grid, ArrayRecord(), num_rounds=1)


# Under our base.


@pytest.mark.parametrize("name", [name for name in OWN if "DP" not in name])
def test_the_adapter_changes_no_arithmetic(name: str) -> None:
    """The same parties, seeds and first weights: Flower's server and ours make one model."""
    alone = start(OWN[name](), client_app(load), num_rounds=2)
    ours = adapted(OWN[name](), options=WeightsOptions(local_epochs=1, restrain=False))
    start(ours, client_app(load), num_rounds=2)

    found = decode_arrays(alone.arrays or ArrayRecord(), 2**20)
    for key, array in weights_of(ours).items():
        np.testing.assert_allclose(
            found[key], array, atol=1.0 if "num_batches" in key else 1e-4
        )


def test_a_wrapper_that_clips_at_the_server_runs_inside() -> None:
    """Its noise is added; the ledger claims nothing for it, and says why."""
    strategy = adapted(OWN["server-side DP"]())
    start(strategy, client_app(load))

    assert accuracy(strategy.model_.predict(TEST[0])) > 0.8
    assert "none, because weights left the party" in strategy.ledger_.statement()


def attacked(strategy: FlowerStrategy, change: Change, num_rounds: int = 1) -> Result:
    """Run with a party whose answers are changed."""
    grid = WatchedGrid(client_app(load), NUM_PARTIES, change)
    return strategy.start(grid, first_weights(), num_rounds=num_rounds)


def no_count(content: RecordDict) -> None:
    content["metrics"] = MetricRecord({"something": 1})
    del content.config_records[keys.META][keys.NUM_EXAMPLES]


def spoiled(name: str, array: Array) -> Change:
    return with_arrays(lambda arrays: {**arrays, name: array})


COUNTER = "1.num_batches_tracked"
BAD: dict[str, tuple[Change, str]] = {
    "renamed": (
        with_arrays(lambda arrays: {f"my.{name}": a for name, a in arrays.items()}),
        "array '0.weight' must be given, got none",
    ),
    "not finite": (
        spoiled("0.weight", np.full((8, 2), np.nan, np.float32)),
        "'0.weight' must be finite",
    ),
    "other shape": (spoiled("0.weight", np.zeros((8, 3), np.float32)), "of shape (8, 2)"),
    # The mean of the largest whole numbers is none.
    "overflow": (
        spoiled(COUNTER, np.array(np.iinfo(np.int64).max)),
        f"array '{COUNTER}' must be finite and at most 9.0072e+15",
    ),
    "no count": (no_count, "num-examples must be"),
}


@pytest.mark.parametrize("change", BAD)
@pytest.mark.parametrize("name", ["FedAvg", "FedMedian", "FedTrimmedAvg", "Krum", "FedAvgM"])
def test_one_bad_reply_never_reaches_flowers_class(name: str, change: str) -> None:
    """Flower's own would raise, or average NaN; here three of four make the model."""
    strategy, (changed, sentence) = adapted(OWN[name]()), BAD[change]

    attacked(strategy, changed)

    (reason,) = strategy.rejected_.values()
    assert sentence in reason
    assert all(np.isfinite(array).all() for array in weights_of(strategy).values())


def test_names_in_another_order_are_put_right() -> None:
    """Some of Flower's classes pair arrays by their positions, which a party could exchange."""
    plain, turned = adapted(OWN["FedAvgM"]()), adapted(OWN["FedAvgM"]())
    start(plain, client_app(load), num_rounds=2)
    attacked(turned, with_arrays(lambda arrays: dict(reversed(arrays.items()))), num_rounds=2)

    for key, array in weights_of(plain).items():
        np.testing.assert_array_equal(weights_of(turned)[key], array)


@pytest.mark.parametrize("name", ["FedAvgM", "FedAdam", "FedYogi", "FedAdagrad"])
def test_a_resumed_run_has_its_momenta_back(name: str, tmp_path: Path) -> None:
    """A kill in round 3 ends in the same bits as no kill."""
    kind = getattr(flower, name)
    settings = {"server_momentum": 0.5} if name == "FedAvgM" else {}
    whole, killed, resumed = (
        adapted(kind(**settings), num_parties=3, checkpoint_dir=folder, resume=again)
        for folder, again in ((None, False), (tmp_path, False), (tmp_path, True))
    )
    app = client_app(load)
    whole.start(MortalGrid(app), first_weights(), num_rounds=4)
    with pytest.raises(Killed):
        killed.start(MortalGrid(app, dies_after=14), first_weights(), num_rounds=4)
    resumed.start(MortalGrid(app), first_weights(), num_rounds=4)

    for key, array in weights_of(whole).items():
        np.testing.assert_array_equal(weights_of(resumed)[key], array)


class Odd(flower.FedAvg):
    """Has a state that no checkpoint can hold, as Flower's privacy accountant does."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = {1: object()}


@pytest.mark.parametrize(
    ("inner", "sentence"),
    [
        (Odd, r"a checkpoint cannot hold 0\.memory of Odd"),
        # Nobody would notice that a party has no mod.
        (OWN["client-side DP"], "flower must be one that clips at the server"),
        # Flower's sampling draws from a generator that a resumed run cannot repeat.
        (lambda: flower.FedAvg(fraction_train=0.5), "fraction_train must be given to this"),
    ],
)
def test_what_cannot_keep_its_promise_is_refused(
    inner: Callable[[], Strategy], sentence: str, tmp_path: Path
) -> None:
    """When the strategy is built."""
    with pytest.raises(InvalidParameter, match=sentence):
        adapted(inner(), checkpoint_dir=tmp_path)


def test_flowers_class_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wants five nodes, and four are there."""
    monkeypatch.setattr("flwr.serverapp.strategy.strategy_utils.sleep", lambda _: None)
    inner = flower.FedAvg(min_available_nodes=5)

    with pytest.raises(NotEnoughParties, match="must be at most the parties that are there, 4"):
        start(adapted(inner), client_app(load))


class Broken(flower.FedAvg):
    """Raises."""

    def aggregate_train(self, *_: Any) -> Any:
        raise ZeroDivisionError("deliberate")


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        # It needs seven replies for one liar; four came.
        (lambda: flower.Bulyan(num_malicious_nodes=1), "Bulyan made no model .*it needs more"),
        (Broken, "Broken made no model of the weights: deliberate"),
    ],
)
def test_a_class_that_makes_no_model_fails_the_run(
    inner: Callable[[], Strategy], reason: str
) -> None:
    """Its error becomes the reason, and what has left the parties is charged."""
    strategy = adapted(inner())

    with pytest.raises(RunFailed, match=reason):
        start(strategy, client_app(load))

    assert "release without protection" in strategy.ledger_.statement()


def test_a_resumed_run_must_have_the_same_flower_class(tmp_path: Path) -> None:
    """Its settings are part of what a checkpoint compares."""
    for mu, again in ((0.1, False), (0.2, True)):
        strategy = adapted(
            flower.FedProx(proximal_mu=mu), num_parties=3, checkpoint_dir=tmp_path, resume=again
        )
        grid = MortalGrid(client_app(load), dies_after=2 if not again else 99)
        with pytest.raises((Killed, InvalidData)) as caught:
            strategy.start(grid, first_weights(), num_rounds=2)

    assert "the settings must be those that the run" in str(caught.value)


# Warm starts.


def test_a_warm_start_is_where_training_begins() -> None:
    """With hardly a step the model is what was given; another is refused at once."""

    def still() -> Any:
        return replace(factory(), learning_rate=1e-12)

    given = FedAvg(**options(learner_fn=still))
    load_still = loading(lambda n: replace(toy_party(n, 60), learner_fn=still))
    start(given, client_app(load_still), num_rounds=1)

    first = first_arrays()["0.weight"]
    np.testing.assert_allclose(weights_of(given)["0.weight"], first, atol=1e-6)
    other, grid = encode_arrays({"w": np.zeros(2)}), InMemoryGrid(client_app(load), NUM_PARTIES)
    with pytest.raises(ValueError, match="must be"):
        adapted().start(grid, other)


def test_a_warm_start_of_fedmd_is_its_first_model() -> None:
    """`initial_arrays` and `pretrained` mean the same, and only one may be given."""
    given = {**common_options(NUM_PARTIES), "learner_fn": factory}
    by_start, by_name = (FedMD(**given, pretrained=p) for p in (None, first_arrays()))  # type: ignore[arg-type]
    start(by_start, client_app(load), num_rounds=2)
    run_local(by_name, client_app(load), NUM_PARTIES, num_rounds=2)

    assert by_start.model_.logits(TEST[0]).tobytes() == by_name.model_.logits(TEST[0]).tobytes()
    with pytest.raises(InvalidParameter, match="initial_arrays must be empty with pretrained"):
        start(by_name, client_app(load))


@pytest.mark.parametrize("name", ["fedkt", "fedkd", "avgkd", "akd", "pkd", "ekd"])
def test_a_warm_start_is_refused_where_it_means_nothing(name: str) -> None:
    """Never ignored."""
    strategy = find_algorithm(name).strategy(**common_options(NUM_PARTIES))  # type: ignore[arg-type]
    grid = InMemoryGrid(client_app(load), NUM_PARTIES)

    with pytest.raises(InvalidParameter, match="initial_arrays must be empty, got some"):
        strategy.start(grid, first_weights(), num_rounds=1)


# Sampling with Flower's names.


def asked(**sampling: Any) -> list[list[int]]:
    """Return whom four rounds ask."""
    grid = WatchedGrid(client_app(load), NUM_PARTIES)
    strategy = adapted(min_parties=1, **sampling)
    strategy.start(grid, first_weights(), num_rounds=4)
    return grid.asked


def test_a_round_asks_a_share_of_the_parties() -> None:
    """Half of four, others in each round, the same ones for the same seed; never too few."""
    half = asked(fraction_train=0.5)

    assert half == asked(fraction_train=0.5)
    assert {len(numbers) for numbers in half} == {2}
    assert len({tuple(numbers) for numbers in half}) > 1
    few = asked(fraction_train=0.1, min_train_nodes=3)
    assert {len(numbers) for numbers in few} == {3}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"fraction_train": 0.0}, "fraction_train must be above 0 and at most 1, got 0.0"),
        ({"min_train_nodes": 9}, "min_train_nodes must be from 1 to num_parties=4, got 9"),
        ({"min_available_nodes": 3}, "min_available_nodes must be omitted, or num_parties=4"),
    ],
)
def test_sampling_that_makes_no_sense_is_refused(given: Any, sentence: str) -> None:
    """With the sentence that says what to do; `min_available_nodes` alone is enough."""
    with pytest.raises(InvalidParameter, match=sentence):
        adapted(**given)
    alone = options(min_available_nodes=3)
    del alone["num_parties"]
    assert FlowerStrategy(**alone).num_parties == 3


# By name.


@pytest.mark.parametrize("name", FLOWER_STRATEGIES)
def test_settings_are_those_of_flowers_class(name: str) -> None:
    """Each is an option, with Flower's default unless that makes it FedAvg."""
    kind = find_algorithm(name).strategy
    assert issubclass(kind, FlowerStrategy)
    assert kind.flower_type.__name__ == name.partition(":")[2]
    common = inspect.signature(flower.FedAvg.__init__).parameters
    given = inspect.signature(kind.flower_type.__init__).parameters
    own = {key_of(name) for name in given.keys() - common.keys()}
    renamed = {"trim-fraction" if key == "beta" else key for key in own}
    assert kind.options_type.settings().keys() == {"local-epochs", "restrain"} | renamed


def test_a_setting_reaches_flowers_class() -> None:
    """FedProx's strength travels to the parties; the trimmed share has a name of its own.

    Options reach other processes, though their classes are made, not written.
    """

    def made(name: str, **settings: Any) -> Any:
        return find_algorithm(name).strategy.from_settings(**options(**settings))

    prox = made("flower:FedProx", proximal_mu=0.7)
    trimmed = made("flower:FedTrimmedAvg", trim_fraction=0.3)

    assert prox._flower.proximal_mu == prox.party_config()["proximal-mu"] == 0.7
    assert trimmed._flower.beta == 0.3
    kind = find_algorithm("flower:FedProx").strategy.options_type
    chosen = kind.from_config({"proximal-mu": 0.3, "local-epochs": 2})
    assert pickle.loads(pickle.dumps(chosen)) == chosen  # noqa: S301 - our own bytes


class Late(CentroidLearner):
    """A learner that cannot draw its first weights."""

    initialised = None  # type: ignore[assignment]


def test_without_first_weights_parties_draw_them() -> None:
    """FedAvg needs no last model; Adam does, and says so."""
    load_late = loading(lambda n: replace(toy_party(n), learner_fn=Late))
    given: Any = {**common_options(NUM_PARTIES), "learner_fn": Late}
    run_local(FedAvg(**given), client_app(load_late), NUM_PARTIES)
    adam: Any = find_algorithm("flower:FedAdam").strategy
    with pytest.raises(RunFailed, match="FedAdam made no model of the weights"):
        run_local(adam(**given), client_app(load_late), NUM_PARTIES)
