"""FENS: the aggregator against numeric slopes and plain means; then models that travel once."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message
from scipy.special import log_softmax

from clients import client_app
from fl_strategies import FENS, FENSOptions, FENSParty, Party
from fl_strategies._util import FloatArray, IntArray
from fl_strategies.aggregation.ensembles import (
    HIDDEN,
    StackedEnsemble,
    Unreadable,
    combine,
    first_weights,
    gradients,
    learned,
    read_weights,
)
from fl_strategies.errors import InvalidParameter, KnowledgeMismatch
from fl_strategies.learners import PrivateLearner
from fl_strategies.party.party import SIMULATED
from fl_strategies.privacy.events import DPSGDEvent
from fl_strategies.strategies.fens import held_back
from fl_strategies.wire import keys
from simulations.runtime.local import InMemoryGrid, run_local
from tests.kept import forget
from tests.toys import (
    TEST,
    CentroidLearner,
    Planned,
    WatchedGrid,
    accuracy,
    common_options,
    load_toy_party,
    load_with,
    loading,
    toy_party,
    with_arrays,
)

APP = client_app(load_toy_party)
NUM_PARTIES = 4


def build(**changes: Any) -> FENS:
    return FENS.from_settings(**{**common_options(NUM_PARTIES), **changes})


def rows(num_models: int = 3, num_classes: int = 4) -> tuple[FloatArray, IntArray]:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(20, num_models, num_classes))
    return z - z.mean(axis=2, keepdims=True), rng.integers(num_classes, size=20)


def some_weights(num_hidden: int) -> dict[str, FloatArray]:
    rng = np.random.default_rng(1)
    return {
        n: rng.normal(size=a.shape) for n, a in first_weights(3, 4, num_hidden, rng).items()
    }


def cross_entropy(weights: dict[str, FloatArray], z: FloatArray, y: IntArray) -> float:
    return float(-log_softmax(combine(weights, z), axis=1)[np.arange(len(y)), y].mean())


@pytest.mark.parametrize("num_hidden", [0, 5])
def test_slopes_are_those_of_the_cross_entropy(num_hidden: int) -> None:
    """Each slope equals the difference of the loss at two points, divided by their distance."""
    (z, y), weights, step = rows(), some_weights(num_hidden), 1e-6

    found = gradients(weights, z, y)

    assert found.keys() == weights.keys()
    for name, array in weights.items():
        for place in np.ndindex(array.shape):
            ends = []
            for sign in (1, -1):
                moved = array.copy()
                moved[place] += sign * step
                ends.append(cross_entropy({**weights, name: moved}, z, y))
            numeric = (ends[0] - ends[1]) / (2 * step)
            assert found[name][place] == pytest.approx(numeric, abs=1e-7)


@pytest.mark.parametrize("num_hidden", [0, 5])
def test_it_begins_as_the_mean_of_log_probabilities(num_hidden: int) -> None:
    """Scores of the first aggregator are the members' mean log-probabilities, but a shift."""
    members = [CentroidLearner().fit(*TEST, rng=np.random.default_rng(s)) for s in range(3)]
    weights = first_weights(3, 3, num_hidden, np.random.default_rng(0))

    found = StackedEnsemble(members, weights, num_classes=3).logits(TEST[0][:50])

    logs = [
        np.maximum(log_softmax(m.logits(TEST[0][:50]), axis=1), np.log(1e-4)) for m in members
    ]
    plain = np.mean(logs, axis=0)
    np.testing.assert_allclose(
        found - found.mean(axis=1, keepdims=True), plain - plain.mean(axis=1, keepdims=True)
    )


@pytest.mark.parametrize("num_hidden", [0, 8])
def test_it_learns_whom_to_trust(num_hidden: int) -> None:
    """Of a model that is right and one as sure of the opposite, it follows the first."""
    y = np.arange(40) % 2
    right = np.where(y[:, None] == np.arange(2), 2.0, -2.0)
    z = np.stack([right, -right], axis=1)
    start = first_weights(2, 2, num_hidden, np.random.default_rng(0))

    new = learned(start, z, y, rng=np.random.default_rng(0), epochs=20, rate=0.1)

    assert cross_entropy(start, z, y) == pytest.approx(np.log(2))
    assert cross_entropy(new, z, y) < 0.05
    assert (new["weights"][0] > new["weights"][1]).all()


def test_a_round_averages_what_parties_have_learned() -> None:
    """The next aggregator is the mean of theirs by records, each learned by itself."""
    strategy = build(restrain=False, evaluate=False)
    grid = InMemoryGrid(APP, NUM_PARTIES)
    strategy.start(grid, ArrayRecord(), num_rounds=1)
    before, ensemble = dict(strategy.state.aggregator), strategy.model_
    assert isinstance(ensemble, StackedEnsemble)

    strategy.start(grid, ArrayRecord(), num_rounds=1)

    total, count = {name: 0.0 * array for name, array in before.items()}, 0
    config = {**strategy.party_config(), keys.SEED: 0}
    for number in range(NUM_PARTIES):
        party = toy_party(number)
        chosen = held_back(party, config)  # type: ignore[arg-type]
        own = learned(
            before,
            ensemble.evidence(party.x[chosen]),
            party.y[chosen],
            rng=party.rng(0, "aggregator", 2),
            epochs=5,
            rate=0.05,
        )
        count += len(chosen)
        total = {name: total[name] + len(chosen) * own[name] for name in own}
    for name, array in strategy.state.aggregator.items():
        np.testing.assert_allclose(array, total[name] / count, atol=1e-12)


def test_a_partys_own_model_does_not_see_what_is_held_back() -> None:
    """Held-back records are a share of all, drawn anew for no round, and at least one."""
    config: Any = {**FENSOptions(holdback=0.25).to_config(), keys.SEED: 3}
    seen: list[int] = []

    class Spy(CentroidLearner):
        def fit(self, x: Any, y: Any, *, rng: np.random.Generator) -> Any:
            seen.append(len(y))
            return super().fit(x, y, rng=rng)

    app = client_app(loading(lambda n: replace(toy_party(n), learner_fn=Spy)))
    run_local(build(holdback=0.25), app, NUM_PARTIES, num_rounds=3)

    assert seen == [30] * NUM_PARTIES
    np.testing.assert_array_equal(
        held_back(toy_party(0), config), held_back(toy_party(0), config)
    )
    assert len(held_back(toy_party(0, num_records=1), config)) == 1


class CountingGrid(InMemoryGrid):
    """Counts the arrays of each phase, and may let a node forget everything."""

    def __init__(self, forgets: int = -1) -> None:
        super().__init__(APP, NUM_PARTIES)
        self.forgets, self.sent = forgets, list[int]()

    def send_and_receive(self, messages: Any, **rest: Any) -> list[Message]:
        whole = list(messages)
        if not whole:
            return []
        arrays = [m.content.array_records.get(keys.ARRAYS, {}) for m in whole]
        self.sent.append(max(len(record) for record in arrays))
        if len(self.sent) == self.forgets:
            forget(self, 1002)
        return super().send_and_receive(whole, **rest)


@pytest.mark.parametrize("evaluate", [True, False])
def test_models_travel_once(evaluate: bool) -> None:
    """After the first delivery only the aggregator does, two arrays."""
    grid = CountingGrid()

    build(evaluate=evaluate).start(grid, ArrayRecord(), num_rounds=3)

    expected = [0, 6, 2, 2, 2, 2] if evaluate else [0, 6, 2]
    assert grid.sent == expected


def test_a_party_that_lost_the_models_gets_them_again() -> None:
    """It misses one round, and says why."""
    grid, strategy = CountingGrid(forgets=3), build(evaluate=False)

    result = strategy.start(grid, ArrayRecord(), num_rounds=4)

    rejected = [result.train_metrics_clientapp[r][keys.NUM_REJECTED] for r in range(1, 5)]
    assert rejected == [0, 0, 1, 0]
    assert grid.sent == [0, 6, 2, 6]


def test_a_model_that_a_party_cannot_rebuild_says_nothing_there() -> None:
    """The party takes part with the others' models, and the refused ones are counted."""

    class Other(CentroidLearner):
        pass

    def poor(party: Party) -> Party:
        return replace(party, learner_fn=Other, learner_name="other")

    strategy = build(model_fns={"other": Other})
    result = run_local(strategy, client_app(load_with(poor, only=3)), NUM_PARTIES, num_rounds=2)

    told = result.train_metrics_clientapp[2]
    assert told[keys.NUM_REJECTED] == 0
    assert told[keys.NUM_MODELS_REFUSED] == 3 + 3  # one at three parties, three at the other
    assert accuracy(strategy.model_.predict(TEST[0])) > 0.85


@pytest.mark.parametrize("change", [np.nan, 1e9])
def test_weights_that_are_none_cost_their_party_the_round(change: float) -> None:
    """An aggregator that is not finite, or far too large, is not averaged."""
    strategy, spoiled = build(evaluate=False), np.full((4, 3), change)
    liar = with_arrays(lambda _: {"weights": spoiled, "bias": np.zeros(3)})
    WatchedGrid(APP, NUM_PARTIES, liar, only_in_round=2).serve(strategy, num_rounds=2)

    (reason,) = strategy.rejected_.values()
    assert reason.startswith("Aggregator: weights must be finite and at most")
    assert accuracy(strategy.model_.predict(TEST[0])) > 0.85


def test_weights_of_another_shape_are_refused() -> None:
    """One sentence, before anything is made whose size a server names."""
    fine = first_weights(2, 3, 4, np.random.default_rng(0))
    wrong: list[tuple[dict[str, Any], tuple[int, int, int]]] = [
        ({name: fine[name] for name in fine if name != HIDDEN}, (2, 3, 4)),
        ({**fine, "bias": np.zeros(4)}, (2, 3, 4)),
        ({**fine, "bias": np.zeros(3, dtype=np.float32)}, (2, 3, 4)),
        ({"bias": np.zeros(3)}, (10**9, 3, 4096)),
    ]

    for arrays, sizes in wrong:
        with pytest.raises(KnowledgeMismatch, match="Aggregator: it must have weights"):
            read_weights(arrays, *sizes)


def test_a_party_lets_only_so_many_models_look_at_its_rows() -> None:
    """The limit on predictions of its policy counts rows of all models."""
    careful = replace(SIMULATED, max_predictions=NUM_PARTIES - 1)
    app = client_app(loading(lambda n: replace(toy_party(n), policy=careful)))
    strategy = build(evaluate=False)

    run_local(strategy, app, NUM_PARTIES, num_rounds=2)

    assert len(strategy.models_) == NUM_PARTIES
    reasons = [*strategy.rejected_.values()]
    assert len(reasons) == NUM_PARTIES
    assert all(f"at most {NUM_PARTIES - 1}, got those of 4 models" in r for r in reasons)


class Private(Planned, CentroidLearner):
    """A learner that says it trains privately."""

    planned = ((DPSGDEvent(noise_multiplier=4.0, records=40, batch_size=8, steps=10), 1),)
    privacy_events: Any = ()

    def fit(self, x: Any, y: Any, *, rng: np.random.Generator) -> Any:
        self.privacy_events = self.planned
        return super().fit(x, y, rng=rng)


@pytest.mark.parametrize(("aggregator", "finite"), [("mean", True), ("linear", False)])
def test_only_the_mean_keeps_what_learners_promise(aggregator: str, finite: bool) -> None:
    """An aggregator is trained without noise, whatever the models were."""
    app = client_app(loading(lambda n: replace(toy_party(n), learner_fn=Private)))
    strategy = build(aggregator=aggregator, learner_fn=Private)

    run_local(strategy, app, NUM_PARTIES, num_rounds=2)

    assert math.isfinite(strategy.ledger_.get_epsilon()) == finite


def test_a_policy_does_not_take_the_learners_privacy_for_the_aggregators() -> None:
    """What would leave in round 2 counts as unprotected, before anything is trained."""
    party, config = replace(toy_party(0), learner_fn=Private), build().party_config()

    first = FENSParty().plan(party, config)  # type: ignore[arg-type]
    second = FENSParty().plan(party, {**config, "stage": "aggregator"})  # type: ignore[arg-type]

    assert isinstance(first.trainer(), PrivateLearner)
    assert not isinstance(second.trainer(), PrivateLearner)


def test_late_parties_train_the_aggregator() -> None:
    """Who failed in round 1 has no model in the ensemble, and takes part from then on."""
    calls: list[int] = []

    def fail_once(party: Party) -> Party:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("not yet")
        return party

    strategy = build(evaluate=False)
    result = run_local(
        strategy, client_app(load_with(fail_once, only=1)), NUM_PARTIES, num_rounds=2
    )

    assert sorted(strategy.models_) == [0, 2, 3]
    assert result.train_metrics_clientapp[2][keys.NUM_PARTIES] == 4


def test_other_tasks_are_refused_and_unreadable_members_are_even() -> None:
    """It aggregates probabilities of classes; a stand-in has no opinion."""
    with pytest.raises(InvalidParameter, match="FENS: task must be single-label"):
        build(task="regression")
    assert not Unreadable(3).logits(TEST[0]).any()
