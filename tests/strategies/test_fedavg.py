"""FedAvg: the mean of weights, equal first weights, untrusted weights, and what it costs."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import RecordDict

from clients.app import client_app
from fl_strategies import FedAvg, Party
from fl_strategies._util import Array, derive_rng
from fl_strategies.errors import (
    InvalidParameter,
    KnowledgeMismatch,
    RunFailed,
    UnsupportedLearner,
)
from fl_strategies.learners import LearnerFactory, StartingLearner
from fl_strategies.privacy.events import DPSGDEvent
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.server.replies import MAX_DISTINCT_EVENTS, reported_epsilon
from fl_strategies.strategies.weights.restraint import as_layout
from fl_strategies.wire import keys
from simulations.runtime.local import run_local
from tests.kept import journal_of, with_journal
from tests.toys import (
    DESCENT,
    PUBLIC,
    CentroidLearner,
    Change,
    WatchedGrid,
    arrays_in,
    common_options,
    load_toy_party,
    load_with,
    loading,
    torch_factory,
    toy_party,
    weights_of,
    with_arrays,
    with_meta,
)

torch = pytest.importorskip("torch")
SIZES = (12, 30, 45)


def toy_fedavg(**changes: object) -> FedAvg:
    return FedAvg.from_settings(**{**common_options(len(SIZES)), "local_epochs": 1, **changes})


def run(
    strategy: FedAvg,
    load: Callable[[Any], Party] = load_toy_party,
    num_rounds: int = 1,
    change: Change | None = None,
    only_in_round: int = 1,
) -> WatchedGrid:
    grid = WatchedGrid(client_app(load), len(SIZES), change, only_in_round)
    return grid.serve(strategy, num_rounds)


def network(**changes: Any) -> LearnerFactory:
    """Return a factory of small networks that take one step of plain descent an epoch."""
    settings = {**DESCENT, "learning_rate": 0.1, **changes}
    return torch_factory(5, activation="Tanh", **settings)


def load_network_party(factory: LearnerFactory) -> Callable[[Any], Party]:
    """Return parties of unequal size with this model."""
    return loading(lambda n: replace(toy_party(n, SIZES[n]), learner_fn=factory))


# The mean.


def test_a_mean_has_the_types_of_the_model() -> None:
    """Flower's means of counters are fractions; arrays come in the model's own order."""
    model = {"w": np.zeros((2, 2), np.float32), "n": np.array(0)}

    typed = as_layout({"n": np.array(41.7), "w": np.full((2, 2), 0.5)}, model)

    assert list(typed) == ["w", "n"]
    assert typed["n"] == 42
    assert [array.dtype for array in typed.values()] == [np.float32, np.int64]


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"v": np.zeros(2)}, r"arrays must be those of the model \(\['w'\]\)"),
        ({"w": np.zeros(3)}, r"array 'w' must be finite, of shape \(2,\), got \(3,\)"),
        ({"w": np.array([1.0, np.nan])}, "array 'w' must be finite"),
    ],
)
def test_a_mean_that_is_no_model_is_refused(arrays: dict[str, Array], sentence: str) -> None:
    """Whatever class of Flower, or of a user, has made it."""
    with pytest.raises(KnowledgeMismatch, match=sentence):
        as_layout(arrays, {"w": np.zeros(2)})


@pytest.mark.parametrize("seed", [0, 1])
def test_one_whole_batch_a_round_is_descent_on_the_pooled_records(seed: int) -> None:
    """The paper's FedSGD: means of gradients are the gradient of all records together.

    The seed decides the weights that all parties start from.
    """
    factory = network()
    strategy = toy_fedavg(learner_fn=factory, seed=seed)
    run(strategy, load_network_party(factory), num_rounds=4)
    parties = [toy_party(number, size) for number, size in enumerate(SIZES)]
    x, y = (np.concatenate([getattr(party, part) for party in parties]) for part in "xy")

    first = factory()
    assert isinstance(first, StartingLearner)
    pooled = first.initialised(rng=derive_rng(seed, "weights", "initial"))
    for rng in map(np.random.default_rng, range(4)):
        pooled.partial_fit(x, y, rng=rng, epochs=1)

    for name, expected in pooled.to_arrays().items():
        np.testing.assert_allclose(weights_of(strategy)[name], expected, atol=1e-6)


def test_buffers_are_averaged_too() -> None:
    """Those of a normalisation; its counter of batches stays a whole number."""
    from clients.networks.learner import TorchLearner

    def factory() -> TorchLearner:
        module = torch.nn.Sequential
        return TorchLearner(
            lambda: module(
                torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)
            ),
            num_classes=3,
            batch_size=10,
        )

    strategy = toy_fedavg(learner_fn=factory, local_epochs=2)
    grid = run(strategy, load_network_party(factory))

    ((_, replies),) = grid.wire
    variances = [arrays_in(reply)["1.running_var"] for reply in replies]
    mean = np.average(variances, axis=0, weights=SIZES)
    weights = weights_of(strategy)
    np.testing.assert_allclose(weights["1.running_var"], mean, rtol=1e-5)
    counted = np.average([2 * math.ceil(size / 10) for size in SIZES], weights=SIZES)
    assert weights["1.num_batches_tracked"] == round(counted)
    assert weights["1.num_batches_tracked"].dtype == np.int64


# Who takes part.


def test_without_a_first_mean_all_start_again() -> None:
    """A first round that fails costs a round and nothing else."""
    factory = network(learning_rate=1e-12)
    plain, late = (toy_fedavg(learner_fn=factory, min_parties=n) for n in (2, 3))
    load = load_network_party(factory)
    run(plain, load)

    grid = run(late, load, num_rounds=2, change=with_meta(keys.KIND, "nothing"))

    assert list(grid.result.train_metrics_clientapp) == [2]
    for name, first in weights_of(plain).items():
        np.testing.assert_allclose(weights_of(late)[name], first, atol=1e-8)


def test_a_party_that_comes_late_gets_the_mean() -> None:
    """Two parties make the first model, the third continues from it."""
    strategy, grid = toy_fedavg(num_parties=2), WatchedGrid(client_app(load_toy_party), 3)
    everybody = grid.get_node_ids()
    grid.get_node_ids = lambda: everybody[:2]  # type: ignore[method-assign]
    grid.serve(strategy)
    first = weights_of(strategy)["centroids"]
    grid.get_node_ids = lambda: everybody  # type: ignore[method-assign]
    grid.serve(strategy)

    requests, _ = grid.wire[1]
    assert len(requests) == 3
    np.testing.assert_array_equal(arrays_in(requests[2])["centroids"], first)
    assert not strategy.rejected_


def test_a_party_with_another_model_says_so() -> None:
    """Weights of different models cannot be averaged."""
    strategy = toy_fedavg(evaluate=False)

    run(strategy, load_with(lambda p: replace(p, learner_name="forest"), only=1))

    (reason,) = strategy.rejected_.values()
    assert reason.startswith(
        "Party 1: the averaged model must be this party's own ('forest'), got 'centroid'."
    )


class Still:
    """A learner that can neither continue nor travel."""

    num_classes = 3
    fit = CentroidLearner.fit
    predict = CentroidLearner.predict
    logits = CentroidLearner.logits


def test_a_model_that_cannot_go_on_is_refused() -> None:
    """On the server when the strategy is built, at a party in its answer."""
    rule = r"the learner must keep learning \(distill, partial_fit\) and travel .*got Still"
    with pytest.raises(UnsupportedLearner, match=f"FedAvg: {rule}"):
        toy_fedavg(learner_fn=Still)

    strategy = toy_fedavg(evaluate=False)
    run(strategy, load_with(lambda p: replace(p, learner_fn=Still), only=2))

    (reason,) = strategy.rejected_.values()
    assert reason.startswith("Party 2: the learner must keep learning")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"local_epochs": 0}, "FedAvg: local_epochs must be from 1 to 10000, got 0"),
        ({"num_classes": 4}, "FedAvg: learner_fn must make learners of 4 classes"),
        ({"task": "ranking"}, "FedAvg: task must be one of single-label, "),
    ],
)
def test_bad_settings_name_themselves(options: dict[str, object], sentence: str) -> None:
    """One sentence with owner, parameter, rule and value."""
    with pytest.raises(InvalidParameter, match=sentence):
        toy_fedavg(**options)


def test_another_task_is_refused() -> None:
    """A party that learns something else is excluded."""
    strategy = toy_fedavg(task="multi-label")

    with pytest.raises(RunFailed, match=r"0 of 3 parties .* all the same: none\."):
        run_local(strategy, client_app(load_toy_party), len(SIZES))

    assert all("task must be one of single-label" in r for r in strategy.rejected_.values())


# Untrusted weights.


def sending(**arrays: Array) -> Change:
    return with_arrays(lambda _: arrays)


LARGE = np.full((3, 2), 1e300)


def many_events(content: RecordDict) -> None:
    """Claim more events than a ledger can add up."""
    meta = content.config_records[keys.META]
    text = str(meta["privacy-events"])
    meta["privacy-events"] = text.replace('"count": 1', f'"count": {2**53}')
    assert meta["privacy-events"] != text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (sending(centroids=np.full((3, 2), np.nan)), "'centroids' must be finite"),
        (sending(centroids=np.full((3, 2), -np.inf)), "'centroids' must be finite"),
        (sending(centroids=np.ones((2, 2))), "centroids must be (3, 2)"),
        (sending(centroids=LARGE, more=LARGE), "must be finite and at most 1e+30"),
        (sending(centroids=np.ones((3, 2), np.float32)), "must have the model's layout"),
        (sending(centroids=np.ones((3, 2), np.int64)), "must have the model's layout"),
        (with_meta(keys.NUM_EXAMPLES, 0), "num-examples must be a whole number from 1"),
        (with_meta(keys.NUM_EXAMPLES, -5), "num-examples must be a whole number from 1"),
        (with_meta(keys.NUM_EXAMPLES, 40.0), "num-examples must be a whole number from 1"),
        (with_meta(keys.NUM_EXAMPLES, True), "num-examples must be a whole number from 1"),
        (with_meta(keys.NUM_EXAMPLES, 2**60), "num-examples must be a whole number from 1"),
        (with_meta("privacy-events", "["), "privacy events must be as written here"),
        (many_events, "privacy events must be as written here"),
    ],
)
@pytest.mark.parametrize("server_round", [1, 2])
def test_bad_weights_are_left_out(change: Change, reason: str, server_round: int) -> None:
    """Whatever one party sends, before or after there is a model, the others make the mean."""
    strategy = toy_fedavg()

    grid = run(strategy, num_rounds=server_round, change=change, only_in_round=server_round)

    (found,) = strategy.rejected_.values()
    assert reason in found
    _, replies = grid.wire[-1]
    honest = [arrays_in(reply)["centroids"] for reply in replies[1:]]
    np.testing.assert_allclose(weights_of(strategy)["centroids"], np.mean(honest, axis=0))
    assert grid.result.train_metrics_clientapp[server_round][keys.NUM_PARTIES] == 2


def test_strangers_events_do_not_keep_the_accountant_busy() -> None:
    """Many kinds of training, in one round or over rounds, count as unprotected at once."""
    strategy, rounds = toy_fedavg(), iter(range(1, 100))

    def claim_many(content: RecordDict) -> None:
        ledger, first = PrivacyLedger("example"), 10 * next(rounds)
        for steps in range(first, first + 3):
            ledger.compose(
                DPSGDEvent(noise_multiplier=4.0, records=40, batch_size=8, steps=steps)
            )
        content.config_records[keys.META]["privacy-events"] = json.dumps(ledger.state_dict())

    grid = WatchedGrid(client_app(load_toy_party), len(SIZES), claim_many)
    for _ in range(6):
        grid.serve(strategy)

    assert not strategy.rejected_
    _, ledger = strategy.state.ledgers[0]
    assert len(ledger.entries) <= MAX_DISTINCT_EVENTS + 1
    assert ledger.num_releases == 3 * 6
    assert "reported more events" in ledger.statement()
    assert reported_epsilon({keys.EPSILON_EXAMPLE: 0.1}, ledger) == math.inf


# Privacy.


def private_network() -> Any:
    pytest.importorskip("opacus")
    from clients.networks.private import DPTorchLearner

    return DPTorchLearner(
        lambda: torch.nn.Linear(2, 3), num_classes=3, batch_size=10, noise_multiplier=3.0
    )


def test_private_training_adds_up_over_rounds() -> None:
    """Epsilon is that of all rounds of the smallest party, at the party and on the server."""
    strategy = toy_fedavg(learner_fn=private_network)

    grid = run(strategy, load_network_party(private_network), num_rounds=2)

    trained = private_network()
    expected = PrivacyLedger("example")
    party = toy_party(0, SIZES[0])
    for _ in range(2):
        trained = private_network().partial_fit(
            party.x, party.y, rng=np.random.default_rng(0), epochs=1
        )
        expected.charge_all(trained.privacy_events)
    first, second = (
        grid.result.train_metrics_clientapp[r][keys.EPSILON_EXAMPLE] for r in (1, 2)
    )
    assert first < second < math.inf
    assert second == pytest.approx(expected.get_epsilon())
    assert strategy.ledger_.get_epsilon() == pytest.approx(second)
    assert grid.result.train_metrics_clientapp[2][keys.EPSILON_PARTY] == math.inf


def test_one_party_without_noise_leaves_no_guarantee() -> None:
    """The party that is protected least counts."""
    strategy, plain = toy_fedavg(learner_fn=private_network), torch_factory()
    kinds = [private_network, plain, private_network]

    run(strategy, loading(lambda n: replace(toy_party(n, SIZES[n]), learner_fn=kinds[n])))

    assert not strategy.rejected_
    assert strategy.ledger_.get_epsilon() == math.inf
    assert "trained without noise" in strategy.ledger_.statement()


def test_a_journal_keeps_every_round_and_its_budget(tmp_path: Path) -> None:
    """A party with a budget sends nothing that was trained without noise."""

    def load_kept(folder: Path, **limits: float) -> Callable[[Any], Party]:
        def load(number: int) -> Party:
            party = replace(toy_party(number), run="r")
            return with_journal(party, folder / str(number), **(limits if number == 2 else {}))

        return loading(load)

    free, bound = toy_fedavg(), toy_fedavg()
    run(free, load_kept(tmp_path / "free"), num_rounds=2)
    run(bound, load_kept(tmp_path / "bound", max_epsilon=1.0))

    kept = journal_of(toy_party(0), tmp_path / "free" / "0")
    assert [entry.purpose for entry in kept.entries()] == ["fedavg, round 1", "fedavg, round 2"]
    assert not free.rejected_
    (reason,) = bound.rejected_.values()
    assert "what leaves must be protected, by its budget" in reason


def test_public_rows_are_not_learned_from() -> None:
    """Only what they are is compared: other rows on all sides give the same model."""
    plain, moved = toy_fedavg(), toy_fedavg(public=PUBLIC + 1)
    run(plain)
    run(moved, loading(lambda n: replace(toy_party(n), public=PUBLIC + 1)))

    np.testing.assert_array_equal(
        weights_of(plain)["centroids"], weights_of(moved)["centroids"]
    )
