"""Early stopping of networks, alone and in stacks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score
from torch import nn

from clients.networks.learner import TorchLearner
from clients.networks.private import DPTorchLearner
from clients.networks.training import STOPPING_LOSSES, EarlyStopping, hold_out
from fl_strategies._util import Array, FloatArray
from fl_strategies.errors import InvalidParameter
from tests.clients.digits import generator

RNG = np.random.default_rng(5)
X = RNG.normal(size=(120, 6)).astype(np.float32)
# Labels with so much noise that a network with many units soon learns it by heart.
Y = np.where(RNG.random(120) < 0.6, (X[:, 0] > 0).astype(np.int64), RNG.integers(2, size=120))
EPOCHS = 60


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 2))


def by_vmap() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 2))


def with_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))


def learner(module_fn: Callable[[], nn.Module] = perceptron, **settings: Any) -> TorchLearner:
    usual = {"epochs": EPOCHS, "validation_share": 0.25, "patience": 4, "learning_rate": 0.01}
    return TorchLearner(module_fn, num_classes=2, **{**usual, **settings})


def mistakes(model: TorchLearner, x: Array, y: Array) -> float:
    return float(round(1 - balanced_accuracy_score(y, model.predict(x)), 6))


@pytest.mark.parametrize("module_fn", [perceptron, by_vmap, with_buffers])
def test_it_is_the_best_of_all_numbers_of_epochs(module_fn: Callable[[], nn.Module]) -> None:
    """Against training anew for each number of epochs; of equally good ones the last."""
    stopped = learner(module_fn).fit(X, Y, rng=generator())
    wrong, models = [], []
    for epochs in range(1, stopped.epochs_trained + 1):
        rng = generator()
        (x, y), held_out = hold_out(X, Y, 0.25, rng)
        alone = learner(module_fn, epochs=epochs, patience=0, validation_share=0.0)
        models.append(alone.fit(x, y, rng=rng))
        wrong.append(mistakes(alone, *held_out))
    best = np.flatnonzero(np.array(wrong) == min(wrong))

    assert stopped.epochs_trained == best[0] + 1 + 4 < EPOCHS
    assert stopped.steps_taken == stopped.epochs_trained * 3
    np.testing.assert_allclose(stopped.logits(X), models[best[-1]].logits(X), atol=1e-5)


@pytest.mark.parametrize("module_fn", [perceptron, by_vmap, with_buffers])
def test_members_of_a_stack_stop_by_themselves(module_fn: Callable[[], nn.Module]) -> None:
    """Each as it would alone, and the last does not change the first."""
    sets = [(X, Y), (X[:118], Y[:118]), (X, (X[:, 0] > 0).astype(np.int64))]
    twins = learner(module_fn).fit_many(sets, rngs=[generator(i) for i in range(3)])
    alone = [learner(module_fn).fit(*one, rng=generator(i)) for i, one in enumerate(sets)]

    assert len({twin.epochs_trained for twin in twins}) > 1
    for twin, other in zip(twins, alone, strict=True):
        assert twin.epochs_trained == other.epochs_trained
        assert twin.steps_taken == other.steps_taken
        np.testing.assert_allclose(twin.logits(X), other.logits(X), rtol=1e-3, atol=1e-4)


def test_without_patience_all_epochs_are_trained() -> None:
    """Nothing is drawn for early stopping, either."""
    plain = learner(patience=0, validation_share=0.0, epochs=2).fit(X, Y, rng=generator())
    patient = learner(patience=10, validation_share=0.0, epochs=2).fit(X, Y, rng=generator())

    assert plain.epochs_trained == patient.epochs_trained == 2
    weights = plain.to_arrays()
    for name, value in patient.to_arrays().items():
        np.testing.assert_array_equal(value, weights[name])


@pytest.mark.parametrize("share", [0.0, 0.008])
@pytest.mark.parametrize("module_fn", [perceptron, by_vmap, with_buffers])
def test_rows_that_are_learned_can_be_stopped_by(
    module_fn: Callable[[], nn.Module], share: float
) -> None:
    """Where no row is held out, all are learned until they are known, and a while longer."""
    x = X[np.abs(X[:, 0]) > 0.5]
    y = (x[:, 0] > 0).astype(np.int64)
    model = learner(module_fn, validation_share=share).fit(x, y, rng=generator())
    unstopped = learner(module_fn, patience=0, validation_share=0.0)
    wrong = [
        mistakes(replace(unstopped, epochs=epochs).fit(x, y, rng=generator()), x, y)
        for epochs in range(1, model.epochs_trained + 1)
    ]

    assert model.epochs_trained == wrong.index(0) + 1 + 4 < EPOCHS
    assert mistakes(model, x, y) == 0


def test_rows_are_split_without_loss() -> None:
    """Every row is either learned or held out, with its own label."""
    x, y = np.arange(10)[:, None], np.arange(10)
    (kept, labels), (held, others) = hold_out(x, y, 0.35, generator())

    assert len(held) == 3
    np.testing.assert_array_equal(np.sort(np.concatenate([kept[:, 0], held[:, 0]])), y)
    np.testing.assert_array_equal([*kept[:, 0], *held[:, 0]], [*labels, *others])


def test_partial_fit_and_distill_take_all_epochs() -> None:
    """They are told how many."""
    model = learner().fit(X, Y, rng=generator())
    assert model.partial_fit(X, Y, rng=generator(), epochs=7).epochs_trained == 7
    targets = np.zeros((len(X), 2))
    assert model.distill(X, targets, rng=generator()).epochs_trained == EPOCHS
    assert learner().initialised().epochs_trained == 0


def test_every_class_counts_alike() -> None:
    """A mistake in a rare class weighs more, and classes without rows nothing."""
    labels = torch.tensor([0, 0, 0, 0, 2])
    common, rare = torch.eye(3)[[1, 0, 0, 0, 2]], torch.eye(3)[[0, 0, 0, 0, 1]]
    loss, weights = STOPPING_LOSSES["single-label"], torch.full((5,), 0.2)

    assert float(loss(common, labels, weights)) == 0.125
    assert float(loss(rare, labels, weights)) == 0.5


def test_losses_that_are_no_numbers_do_not_count() -> None:
    """A module that diverges is stopped, with the weights from before."""
    module = nn.Linear(1, 2)
    scores = iter([0.5, float("nan"), float("nan")])

    def asked(_module: nn.Module, x: Array) -> FloatArray:
        return np.full((len(x), 2), next(scores), dtype=np.float32)

    rows = np.zeros((2, 1), np.float32), np.zeros(2, np.int64)
    loss = STOPPING_LOSSES["single-label"]
    watch = EarlyStopping([module], [rows], scores=asked, loss=loss, patience=2)
    first = module.weight.detach().clone()

    assert not watch.ends(module)
    with torch.no_grad():
        module.weight.fill_(float("nan"))
    assert not watch.ends(module)
    assert watch.ends(module)
    assert watch.restore() == [3]
    torch.testing.assert_close(module.weight.detach(), first)


def test_long_patience_asks_five_times_while_it_lasts() -> None:
    """Asking takes time, too; the last of the equally good weights are kept."""
    module, asked = nn.Linear(1, 2), []

    def scores(_module: nn.Module, x: Array) -> FloatArray:
        asked.append(len(x))
        return np.tile(np.float32([1, 0]), (len(x), 1))

    rows = np.zeros((3, 1), np.float32), np.zeros(3, np.int64)
    loss = STOPPING_LOSSES["single-label"]
    watch = EarlyStopping([module], [rows], scores=scores, loss=loss, patience=20)

    ended = [watch.ends(module) for _ in range(24)]
    assert ended == [False] * 23 + [True]
    assert asked == [3] * 6  # once to find all rows known, five times to no avail
    assert watch.restore() == [24]


def test_the_last_epoch_is_looked_at() -> None:
    """Patience that outlasts the epochs changes nothing where the last epoch is the best."""
    settings = {"validation_share": 0.0, "epochs": 3, "learning_rate": 0.001}
    plain = learner(patience=0, **settings).fit(X, Y, rng=generator())
    patient = learner(patience=10, **settings).fit(X, Y, rng=generator())
    early = learner(patience=0, **{**settings, "epochs": 2}).fit(X, Y, rng=generator())

    assert mistakes(plain, X, Y) < mistakes(early, X, Y)
    np.testing.assert_array_equal(patient.logits(X), plain.logits(X))


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        *(
            ({"validation_share": share}, "validation_share must be at least 0 and below")
            for share in (-0.1, 1.0, float("nan"))
        ),
        ({"patience": -1}, "patience must be a whole number, at least 0"),
        ({"patience": 0}, "patience must be at least 1 with a validation"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], rule: str) -> None:
    """Rows that are held out and never asked would be lost.

    When to stop private training would be a release without noise.
    """
    with pytest.raises(InvalidParameter, match=rule):
        learner(**settings)
    with pytest.raises(InvalidParameter, match="patience must be omitted in private"):
        DPTorchLearner(perceptron, num_classes=2, noise_multiplier=1.0, patience=5)
