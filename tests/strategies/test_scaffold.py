"""SCAFFOLD: its updates by plain numpy, FedAvg as a limit case, control variates of liars."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from scipy.special import softmax

from clients.app import client_app
from fl_strategies import FedAvg, FlowerStrategy, Party, Scaffold
from fl_strategies._util import Array, FloatArray, derive_rng
from fl_strategies.errors import KnowledgeMismatch, UnsupportedLearner
from fl_strategies.learners import LearnerFactory, StartingLearner
from fl_strategies.strategies.scaffold import (
    LARGEST_CONTROL,
    ControlledWeights,
    ScaffoldParty,
    ScaffoldPartyState,
)
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, join_arrays
from tests.toys import (
    DESCENT,
    NUM_CLASSES,
    CentroidLearner,
    Change,
    WatchedGrid,
    common_options,
    lacking,
    load_with,
    loading,
    torch_factory,
    toy_party,
    weights_of,
    with_arrays,
)

torch = pytest.importorskip("torch")

EPOCHS, RATE, NUM_PARTIES = 4, 0.3, 3


def logistic(**changes: Any) -> LearnerFactory:
    """Return a factory of logistic regressions that learn all records at once."""
    return torch_factory(**{"batch_size": 10_000, "weight_decay": 0.0, **changes})


def load(
    factory: LearnerFactory, sizes: tuple[int, ...] = (40, 40, 40)
) -> Callable[..., Party]:
    return loading(lambda n: replace(lacking(n, sizes[n]), learner_fn=factory))


def scaffold(factory: LearnerFactory, **changes: Any) -> Scaffold:
    settings = {"local_epochs": EPOCHS, "local_rate": RATE, "restrain": False, **changes}
    options = {**common_options(NUM_PARTIES), "learner_fn": factory, **settings}
    return Scaffold.from_settings(**options)


def run(
    strategy: FlowerStrategy,
    load_party: Callable[..., Party],
    num_rounds: int = 1,
    change: Change | None = None,
) -> WatchedGrid:
    return WatchedGrid(client_app(load_party), NUM_PARTIES, change).serve(strategy, num_rounds)


def gradient(w: FloatArray, party: Party) -> FloatArray:
    """Return the gradient of the mean cross-entropy by (classes, features + 1) weights."""
    rows = np.hstack([party.x, np.ones((len(party.x), 1))])
    missed = softmax(rows @ w.T, axis=1) - np.eye(NUM_CLASSES)[party.y]
    return np.asarray(missed.T @ rows / len(rows))


def paper(
    w: FloatArray, parties: list[Party], asked: list[list[int]], server_rate: float
) -> tuple[FloatArray, FloatArray]:
    """Return model and control variate by Algorithm 1 with option II, written as formulas."""
    c, own = np.zeros_like(w), [np.zeros_like(w) for _ in parties]
    for sampled in asked:
        steps, changes = [], []
        for i in sampled:
            y = w.copy()
            for _ in range(EPOCHS):
                y -= RATE * (gradient(y, parties[i]) - own[i] + c)
            new = own[i] - c + (w - y) / (EPOCHS * RATE)
            steps.append(y - w)
            changes.append(new - own[i])
            own[i] = new
        w = w + server_rate * np.mean(steps, axis=0)
        c = c + len(sampled) / len(parties) * np.mean(changes, axis=0)
    return w, c


def joined(arrays: dict[str, Array]) -> FloatArray:
    return np.hstack([arrays["weight"], arrays["bias"][:, None]]).astype(np.float64)


@pytest.mark.parametrize(("server_rate", "fraction"), [(1.0, 1.0), (0.5, 1.0), (1.0, 0.67)])
def test_rounds_are_the_papers_formulas(server_rate: float, fraction: float) -> None:
    """Model and control variates, for all parties and for some, as numpy has them."""
    factory = logistic()
    strategy = scaffold(factory, server_rate=server_rate, fraction_train=fraction)
    drawn = factory()
    assert isinstance(drawn, StartingLearner)
    first = joined(drawn.initialised(rng=derive_rng(0, "weights", "initial")).to_arrays())
    grid = run(strategy, load(factory), num_rounds=5)

    parties = [lacking(number) for number in range(NUM_PARTIES)]
    model, control = paper(first, parties, grid.asked, server_rate)
    assert {len(sampled) for sampled in grid.asked} == {math.ceil(fraction * NUM_PARTIES - 0.5)}
    np.testing.assert_allclose(joined(weights_of(strategy)), model, atol=1e-5)
    np.testing.assert_allclose(joined(strategy.state.control), control, atol=1e-5)
    assert np.abs(control).max() > 0.01


def test_without_control_variates_it_is_fedavg_to_the_bit() -> None:
    """In a first round all are zero: parties of any size, several batches, both restrained."""
    sizes, small = (21, 40, 33), {"batch_size": 8, "weight_decay": 1e-3}
    plain = logistic(**{**DESCENT, **small}, learning_rate=RATE)
    ours = scaffold(logistic(**small), restrain=True)
    options = {**common_options(NUM_PARTIES), "learner_fn": plain, "local_epochs": EPOCHS}
    theirs = FedAvg.from_settings(**options)
    run(ours, load(logistic(**small), sizes))
    run(theirs, load(plain, sizes))

    for name, array in weights_of(theirs).items():
        np.testing.assert_array_equal(weights_of(ours)[name], array)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: {n: v for n, v in a.items() if n[0] == "0"}, "must have the model's layout"),
        (lambda a: {**a, "1/bias": a["1/bias"] * np.nan}, "'bias' must be finite"),
        (lambda a: {**a, "1/bias": a["1/bias"][:2]}, "must have the model's layout"),
        (lambda a: {**a, "2/bias": a["1/bias"]}, "arrays must belong to models 0 to 1"),
        (lambda a: {**a, "0/bias": a["0/bias"][:2]}, "'bias' must be float32 of shape (3,)"),
    ],
)
def test_a_bad_control_variate_excludes_its_party(
    change: Callable[[dict[str, Array]], dict[str, Array]], reason: str
) -> None:
    """The others make the model and the control variate."""
    factory = logistic()
    strategy = scaffold(factory)
    run(strategy, load(factory), change=with_arrays(change))

    (found,) = strategy.rejected_.values()
    assert reason in found
    assert all(np.isfinite(array).all() for array in strategy.state.control.values())


@pytest.mark.parametrize("restrain", [True, False])
def test_one_party_cannot_send_the_control_variate_anywhere(restrain: bool) -> None:
    """It moves it by some multiple of what others do; without the limit, where it likes."""
    factory = logistic()
    honest, attacked = (scaffold(factory, restrain=restrain) for _ in range(2))
    run(honest, load(factory))
    huge = with_arrays(lambda a: {n: v + 1e6 * (n[0] == "1") for n, v in a.items()})
    run(attacked, load(factory), change=huge)

    away = np.abs(joined(attacked.state.control) - joined(honest.state.control)).max()
    assert away < 1 if restrain else away > 1e5


def test_a_control_variate_never_overflows() -> None:
    """One party that adds what it may in every round, without a limit on its pull."""
    factory = logistic()
    strategy = scaffold(factory, restrain=False)
    run(strategy, load(factory))
    model = strategy._present_model()
    most = {name: np.full_like(array, 1e30) for name, array in model.items()}
    liar = ControlledWeights(model, 40, (), most)

    for _ in range(3):
        strategy.state.control = strategy._next_control([liar] * NUM_PARTIES, model)

    assert {float(array.max()) for array in strategy.state.control.values()} == {
        float(np.float32(LARGEST_CONTROL))
    }


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
def test_a_party_refuses_a_control_variate_beyond_all_reason(value: float) -> None:
    """It would keep what follows from it, and every later round would be lost."""
    factory = logistic()
    party = replace(toy_party(0), learner_fn=factory)
    model = factory().initialised(rng=np.random.default_rng(0)).to_arrays()
    control = {name: np.full_like(array, value) for name, array in model.items()}
    named = {keys.SEED: 0, keys.SERVER_ROUND: 1, keys.STRATEGY: "scaffold"}
    config = ConfigRecord({**scaffold(factory).party_config(), **named})
    state, sent = ScaffoldPartyState(RecordDict()), join_arrays([model, control])

    with pytest.raises(KnowledgeMismatch, match="must be finite and at most"):
        ScaffoldParty().train(party, Knowledge("model", sent), config, state)
    assert state.control is None


class Stepless:
    """A learner that keeps learning but does not count its steps."""

    num_classes = NUM_CLASSES
    fit, predict, logits = CentroidLearner.fit, CentroidLearner.predict, CentroidLearner.logits
    distill, partial_fit = CentroidLearner.distill, CentroidLearner.partial_fit
    to_arrays, from_arrays = CentroidLearner.to_arrays, CentroidLearner.from_arrays


class Undrawn(Stepless):
    """A learner that takes an objective, but whose first weights nobody can draw."""

    steps_taken = 1


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Stepless, "Scaffold: the learner must take an objective .* got Stepless"),
        (Undrawn, "Scaffold: the learner must have initialised, .* got Undrawn"),
    ],
)
def test_learners_that_cannot_do_it_say_so(kind: Any, sentence: str) -> None:
    """On the server when the strategy is built, at a party in its answer."""
    with pytest.raises(UnsupportedLearner, match=sentence):
        scaffold(kind)

    strategy = scaffold(CentroidLearner, evaluate=False)
    run(strategy, load_with(lambda party: replace(party, learner_fn=Stepless), only=1))

    (reason,) = strategy.rejected_.values()
    assert reason.startswith("Party 1: the learner must take an objective")
