"""What every strategy of the registry must keep, checked before its author writes a test."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result

from clients.app import FAILED, client_app
from fl_strategies import (
    FLOWER_STRATEGIES,
    REGISTRY,
    FlowerStrategy,
    KnowledgeStrategy,
    Party,
    find_algorithm,
)
from fl_strategies.errors import InvalidParameter, NotEnoughParties, NotFitted, RunFailed
from fl_strategies.server.strategy import FederationOptions
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import ENCODING
from simulations.runtime.local import InMemoryGrid, run_local
from tests.toys import (
    PUBLIC,
    SHORT,
    TEST,
    WatchedGrid,
    accuracy,
    common_options,
    load_toy_party,
    load_with,
    loading,
    toy_party,
    without_records,
)

NUM_PARTIES = 4
APP = client_app(load_toy_party)
OPTIMIZERS = ("flower:FedAdagrad", "flower:FedAdam", "flower:FedYogi")
TOY_SETTINGS: dict[str, dict[str, object]] = {
    **{name: {"eta": 0.5} for name in OPTIMIZERS},
    **SHORT,
}
"""Centroids are three apart, weights of networks much less."""

pytestmark = pytest.mark.parametrize("name", sorted({**REGISTRY, **FLOWER_STRATEGIES}))


def build(name: str, **changes: object) -> KnowledgeStrategy[Any]:
    options = {**common_options(NUM_PARTIES), **TOY_SETTINGS.get(name, {}), **changes}
    return find_algorithm(name).strategy.from_settings(**options)


def whole(strategy: KnowledgeStrategy[Any]) -> int:
    """Return how many rounds make a whole run, one where more only improve it."""
    return strategy.last_round or 1


def run(strategy: KnowledgeStrategy[Any], app: ClientApp = APP, **options: Any) -> Result:
    return run_local(strategy, app, NUM_PARTIES, **{"num_rounds": whole(strategy), **options})


def run_on(grid: InMemoryGrid, strategy: KnowledgeStrategy[Any]) -> Result:
    return strategy.start(grid, ArrayRecord(), num_rounds=whole(strategy))


def bits(strategy: KnowledgeStrategy[Any]) -> bytes:
    """Return what the final model says about the test rows, to the bit."""
    return strategy.model_.logits(TEST[0]).tobytes()


def grid_of(
    alter: Callable[[list[Message]], list[Message]] = lambda replies: replies,
    app: ClientApp = APP,
) -> WatchedGrid:
    return WatchedGrid(app, NUM_PARTIES, alter=alter)


def test_defaults_and_summary(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A strategy can be built from the common options, knows its name and describes itself."""
    strategy = build(name)

    with caplog.at_level("INFO", logger="flwr.fl_strategies"):
        strategy.summary()

    assert strategy.name == name
    assert type(strategy).__name__ in caplog.text


def test_parties_with_another_encoder_refuse_it(name: str) -> None:
    """Every message names the server's; with the same one the result is the same to the bit."""
    ours = "a" * 64
    encoded = client_app(loading(lambda number: replace(toy_party(number), encoding=ours)))
    plain, same = build(name), build(name, encoding=ours)
    run(plain)
    run(same, encoded)
    assert bits(plain) == bits(same)
    for strategy, app in ((build(name, encoding=ours), APP), (build(name), encoded)):
        with pytest.raises((RunFailed, NotEnoughParties)):
            run(strategy, app)
        assert len(strategy.rejected_) == NUM_PARTIES
        assert all(
            "encoding must be the server's" in why for why in strategy.rejected_.values()
        )


def test_it_declares_what_its_constructor_takes(name: str) -> None:
    """A simulation gives what is declared, and an error names it."""
    kind = find_algorithm(name).strategy

    own = inspect.signature(kind.__init__).parameters.values()

    assert list(kind.takes) == [each.name for each in own if each.kind is each.KEYWORD_ONLY]


def test_it_declares_every_setting_that_a_resumed_run_must_have(name: str) -> None:
    """A setting that is not declared could change, and nobody would notice."""
    strategy = build(name)
    common = {*FederationOptions.__annotations__, "state", "run", "run_settings"}

    public = {each for each in vars(strategy) if not each.startswith("_")}

    assert {each for each in public - common if not each.endswith("_")} == {
        *strategy.identified_by
    }


def test_a_run_learns_and_reports_its_privacy(name: str) -> None:
    """It ends well above chance, with metrics of both units and a ledger that is never empty.

    Flower's own strategies write into the caller's record of settings; ours do not.
    """
    strategy, config = build(name), ConfigRecord({"mine": 1})
    num_rounds = 10 if isinstance(strategy, FlowerStrategy) else whole(strategy)

    result = strategy.start(
        grid_of(),
        ArrayRecord(),
        num_rounds=num_rounds,
        train_config=config,
        evaluate_config=config,
    )

    assert accuracy(strategy.model_.predict(TEST[0])) > 0.85
    assert strategy.ledger_.entries
    assert strategy.ledger_.get_epsilon() == math.inf
    assert "none, because" in strategy.ledger_.statement()
    metrics = result.train_metrics_clientapp[1]
    for unit in ("party", "example"):
        assert metrics[f"epsilon-{unit}"] == math.inf
        assert f"delta-{unit}" in metrics
    assert dict(config) == {"mine": 1}


def test_same_seed_same_bits_whatever_the_order(name: str) -> None:
    """Reply order and the number of workers do not change one bit; another seed does."""
    plain, shuffled, parallel, other = (build(name, seed=seed) for seed in (0, 0, 0, 1))
    run(plain)
    run_on(grid_of(lambda replies: replies[::-1]), shuffled)
    run(parallel, num_workers=2)
    run(other)

    assert bits(plain) == bits(shuffled) == bits(parallel)
    assert bits(plain) != bits(other)


def test_one_failing_party_does_not_end_the_run(name: str) -> None:
    """An exception in one party costs that party the round, and its text stays there."""

    def fail(_: Party) -> Party:
        raise ValueError("patient 4711 has no blood pressure")

    strategy = build(name)

    result = run(strategy, client_app(load_with(fail, only=1)))

    assert strategy.model_ is not None
    assert result.train_metrics_clientapp[1][keys.NUM_REJECTED] == 1
    (reason,) = strategy.rejected_.values()
    assert FAILED in reason
    assert "4711" not in reason


def test_replies_that_never_come_do_not_end_the_run(name: str) -> None:
    """A party that does not answer is excluded and named."""
    strategy = build(name)
    run_on(grid_of(lambda replies: replies[1:]), strategy)

    assert "it did not answer in time" in strategy.rejected_.values()
    assert strategy.model_ is not None


def test_no_replies_means_no_result(name: str) -> None:
    """Without a single reply there is neither a model nor a metric, but a reason."""
    strategy = build(name)
    grid = InMemoryGrid(APP, NUM_PARTIES)
    strategy.ask_parties(1, ArrayRecord(), ConfigRecord(), grid)

    assert strategy.aggregate_train(1, []) == (None, None)
    with pytest.raises(NotFitted, match="0 of 4 parties sent a valid reply and 2 are needed"):
        strategy.model_  # noqa: B018


def test_all_parties_failing_is_one_clear_sentence(name: str) -> None:
    """When every party fails, the run ends and the reason names one of them."""
    load = loading(lambda n: without_records(toy_party(n)))
    strategy = build(name)
    sentence = (
        r"got none: 0 of 4 .*for example node 1000: Party 0: x must be records to .* none"
    )
    with pytest.raises(RunFailed, match=sentence):
        run(strategy, client_app(load))

    with pytest.raises(NotFitted, match=sentence):
        strategy.model_  # noqa: B018


def test_too_few_parties_is_one_clear_sentence(name: str) -> None:
    """The strategy does not wait for ever."""
    strategy = build(name, num_parties=9, min_parties=6, max_wait=0.3)

    with pytest.raises(NotEnoughParties, match=r"6 of 9 parties must connect within .* got 4"):
        run(strategy)


def test_it_goes_on_with_enough_parties(name: str) -> None:
    """After waiting, the parties that came suffice if there are `min_parties` of them."""
    strategy = build(name, num_parties=9, min_parties=3)

    result = run(strategy)

    assert result.train_metrics_clientapp[1][keys.NUM_PARTIES] == 4


def test_a_reply_has_one_record_of_each_kind_and_its_bytes_are_counted(name: str) -> None:
    """With the same metrics from every party; the reported bytes are those really sent."""
    grid = grid_of()

    result = run_on(grid, build(name, evaluate=False))

    metric_keys, sent = set(), 0
    for reply in grid.replies:
        assert len(reply.content.array_records) == 1
        assert len(reply.content.metric_records) == 1
        metrics = reply.content.metric_records[keys.METRICS]
        metric_keys.add(tuple(sorted(metrics)))
        size = sum(record.count_bytes() for record in reply.content.values())
        assert metrics[keys.NUM_BYTES_SENT] == size
        sent += size
    assert len(metric_keys) == 1
    rounds = result.train_metrics_clientapp.values()
    assert sum(float(metrics[keys.NUM_BYTES_SENT]) for metrics in rounds) == sent


def test_no_private_row_crosses_the_boundary(name: str) -> None:
    """A canary among the private values is found in no array that leaves a party."""
    canary = 3.141592653589793

    def plant(number: int) -> Party:
        party = toy_party(number)
        x = party.x.copy()
        x[:5] = canary
        return replace(party, x=x)

    grid = grid_of(app=client_app(loading(plant)))
    run_on(grid, build(name))

    needle = np.float64(canary).tobytes()
    (itself,) = ArrayRecord([np.full(2, canary)]).values()
    assert needle in itself.data, "the search itself must be able to find it"
    for reply in grid.replies:
        for record in reply.content.array_records.values():
            assert all(needle not in array.data for array in record.values())
        assert ENCODING not in reply.content.config_records.get(keys.META, {}), "search inside"


def test_a_bad_parameter_names_itself(name: str) -> None:
    """The sentence has owner, parameter, rule and value."""
    owner = find_algorithm(name).strategy.__name__

    with pytest.raises(InvalidParameter, match=f"{owner}: num_parties must be at least 1, got"):
        build(name, num_parties=-3)


def test_a_party_that_lacks_classes_takes_part(name: str) -> None:
    """One party holds a single class, and the federation still learns all three."""

    def one_class(party: Party) -> Party:
        rows = party.y == 2
        return replace(party, x=party.x[rows], y=party.y[rows])

    strategy = build(name)
    run(strategy, client_app(load_with(one_class, only=3)))

    assert not strategy.rejected_
    assert set(strategy.model_.predict(TEST[0])) == {0, 1, 2}


def test_a_rebuilt_client_app_goes_on(name: str) -> None:
    """Each message meets a new ClientApp, as in a deployment, with the same result."""
    fresh, kept = build(name), build(name)
    grid = grid_of()

    def forget(replies: list[Message]) -> list[Message]:
        grid.client_app = client_app(load_toy_party)
        return replies

    grid.alter = forget
    run_on(grid, fresh)
    run(kept)

    assert bits(fresh) == bits(kept)


def test_other_public_data_is_left_out(name: str) -> None:
    """A party with other public rows is named instead of spoiling the model."""
    strategy = build(name)

    run(strategy, client_app(load_with(lambda p: replace(p, public=PUBLIC + 1), only=3)))

    (reason,) = strategy.rejected_.values()
    assert reason.startswith("Party 3: public data must be the server's")


def hostile_contents(content: RecordDict) -> list[RecordDict]:
    """Return replies that a broken or hostile party might send."""
    arrays, meta = content[keys.ARRAYS], content[keys.META]
    assert isinstance(arrays, ArrayRecord)
    assert isinstance(meta, ConfigRecord)
    metrics = content[keys.METRICS]
    doubled = ArrayRecord({name: type(a)(np.tile(a.numpy(), 2)) for name, a in arrays.items()})
    garbage = ArrayRecord(
        {n: type(a)(a.dtype, a.shape, a.stype, b"\x93NUMPY") for n, a in arrays.items()}
    )
    whole = {keys.ARRAYS: arrays, keys.META: meta, keys.METRICS: metrics}
    claims = [(keys.KIND, "other"), (keys.PARTITION_ID, -1), (keys.PARTITION_ID, "me")]
    return [
        RecordDict(),
        *(RecordDict({**whole, keys.ARRAYS: a}) for a in (ArrayRecord(), doubled, garbage)),
        *(RecordDict({**whole, keys.META: ConfigRecord({**meta, k: v})}) for k, v in claims),
        RecordDict({keys.ARRAYS: arrays, keys.META: meta}),
        RecordDict({**whole, keys.METRICS: ConfigRecord()}),
    ]


@pytest.mark.parametrize("number", range(9))
def test_a_corrupt_reply_costs_its_party_the_round(name: str, number: int) -> None:
    """Whatever one party sends, the other three make a model."""

    def attack(replies: list[Message]) -> list[Message]:
        for reply in replies[:1]:
            if reply.content[keys.META][keys.KIND] != "evaluation":
                reply.content = hostile_contents(reply.content)[number]
        return replies

    strategy = build(name)
    result = run_on(grid_of(attack), strategy)

    for metrics in result.train_metrics_clientapp.values():
        assert metrics[keys.NUM_REJECTED] == 1
        assert metrics[keys.NUM_PARTIES] == 3
    assert strategy.model_ is not None


def test_errors_of_dead_nodes_are_mapped_by_message(name: str) -> None:
    """Flower answers for a dead node as node 1; the strategy still knows who it was."""
    strategy = build(name)
    grid = InMemoryGrid(APP, NUM_PARTIES)
    sent = strategy.ask_parties(1, ArrayRecord(), ConfigRecord(), grid)
    replies = grid.send_and_receive(sent)
    dead = Message(Error(5, "Node Unavailable"), reply_to=sent[2])

    strategy.aggregate_train(1, [*replies[:2], dead, *replies[3:]])

    assert strategy.rejected_ == {sent[2].metadata.dst_node_id: "Node Unavailable"}


def test_a_second_reply_to_one_question_is_ignored(name: str) -> None:
    """A party cannot vote twice."""
    strategy, honest = build(name), build(name)
    result = run_on(grid_of(lambda replies: [*replies, *replies]), strategy)
    run(honest)

    for metrics in result.train_metrics_clientapp.values():
        assert metrics[keys.NUM_PARTIES] == NUM_PARTIES
    assert bits(strategy) == bits(honest)


def test_the_result_is_delivered(name: str) -> None:
    """Every party ends with the server's model, or with one of its own."""
    received: list[bytes] = []
    app = client_app(
        load_toy_party,
        on_model=lambda model, *_: received.append(model.logits(TEST[0]).tobytes()),
    )
    strategy = build(name)

    run(strategy, app)

    if strategy.central:
        assert received[-NUM_PARTIES:] == [bits(strategy)] * NUM_PARTIES
        assert len(received) <= NUM_PARTIES * whole(strategy)
    else:
        assert len(set(received)) == len(received) == NUM_PARTIES


def test_more_rounds_than_needed_change_nothing(name: str) -> None:
    """A strategy that is done sends nothing more and keeps its result."""
    once, longer = build(name), build(name)
    if once.last_round is None:
        pytest.skip("this strategy uses every round")

    run(once)
    result = run(longer, num_rounds=whole(longer) + 2)

    assert bits(once) == bits(longer)
    assert [*result.train_metrics_clientapp] == [*range(1, whole(longer) + 1)]


def test_party_without_test_rows_still_receives(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Held-out rows are optional; there is then no accuracy, and the log says why."""
    app = client_app(loading(lambda n: replace(toy_party(n), x_test=None, y_test=None)))

    strategy = build(name)
    result = run(strategy, app, verbose=True)

    told = result.evaluate_metrics_clientapp[whole(strategy)]
    assert not {keys.ACCURACY, f"{keys.ACCURACY}-by-party"} & {*told}
    assert "No party reports how good the model is" in caplog.text
    assert "'accuracy': nan" not in caplog.text


def flat(record: MetricRecord) -> list[float]:
    """Return all figures of a record that are known."""
    lists = (value if isinstance(value, list) else [value] for value in record.values())
    return [float(one) for values in lists for one in values if not math.isnan(one)]


def test_callbacks_are_called_once_a_round(name: str) -> None:
    """With the metrics that the round has anyway, its time, and nothing else."""
    told: list[tuple[int, dict[str, float]]] = []
    strategy = build(name, on_round=lambda *round_: told.append(round_))

    result = run(strategy, num_rounds=max(2, whole(strategy)))

    train, evaluate = result.train_metrics_clientapp, result.evaluate_metrics_clientapp
    rounds = [number for number, _ in told]
    assert rounds == list(train)
    assert len(told) == (strategy.last_round or 2)
    # Only rounds before a whole run ends may leave no model to deliver.
    assert {*rounds[whole(strategy) - 1 :]} <= {*evaluate} <= {*rounds}
    for number, metrics in told:
        judged = evaluate.get(number, MetricRecord())
        known = {*flat(train[number]), *flat(judged), 0, metrics["seconds"]}
        assert {*metrics.values()} <= known
        assert metrics["train/epsilon-example"] == math.inf
        assert metrics["train/num-bytes-sent"] == train[number][keys.NUM_BYTES_SENT]
        assert number not in evaluate or 0 < metrics["evaluate/accuracy"] <= 1
        assert metrics["num-rejected"] == 0 < metrics["seconds"]
