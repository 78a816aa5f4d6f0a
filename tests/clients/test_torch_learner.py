"""TorchLearner on digits: training alone and in stacks, arrays, and what is refused."""

import copy
import math
import multiprocessing
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clients.networks.learner import TorchLearner
from fl_strategies._util import Array, IntArray, listening
from fl_strategies.errors import (
    InvalidData,
    InvalidParameter,
    KnowledgeMismatch,
    NotFitted,
)
from fl_strategies.learners import TrainingSet, fit_ensemble
from tests.clients.digits import DIGITS, X, Y, generator
from tests.clients.networks import (
    assert_twins_match,
    generators,
    learner,
    perceptron,
    textbook,
)

ModuleFactory = Callable[[], nn.Module]


def convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 4, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(144, 10),
    )


def batch_normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.3), nn.ReLU(), nn.Linear(32, 10))


def half_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))
    module[0].requires_grad_(False)
    return module


class Tied(nn.Module):
    """Uses one square matrix twice, so that two names mean one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.last = nn.Linear(64, 10)

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.last(self.second(self.first(rows).tanh()).tanh())
        return scores


class RandomFeatures(nn.Module):
    """Has a random matrix that is not trained and that every twin draws for itself."""

    matrix: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.randn(64, 16))
        self.last = nn.Linear(16, 10)

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.last(rows @ self.matrix)
        return scores


class Branching(nn.Module):
    """Looks at its values to choose a path, which cannot be done for many twins at once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.linear(rows)
        return scores if scores.sum() > 0 else 2 * scores


class Counting(nn.Module):
    """Counts the passes of all its instances."""

    passes: ClassVar[int] = 0

    def __init__(self, *extra: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*extra, nn.Linear(64, 10))

    def forward(self, rows: Tensor) -> Tensor:
        Counting.passes += 1
        scores: Tensor = self.layers(rows)
        return scores


def consecutive_sets(sizes: list[int]) -> list[TrainingSet]:
    stops = np.cumsum(sizes)
    return [(X[b - n : b], Y[b - n : b]) for n, b in zip(sizes, stops, strict=True)]


@pytest.fixture
def restored_torch() -> Iterator[None]:
    """Undo what a test itself does to PyTorch's settings."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        yield
    torch.set_num_threads(threads)


def test_learns_digits() -> None:
    """A small perceptron learns most of the digits it has not seen."""
    model = learner(epochs=15, learning_rate=5e-3).fit(X[:1200], Y[:1200], rng=generator())
    assert (model.predict(X[1200:]) == Y[1200:]).mean() > 0.9


@pytest.mark.parametrize("verb", ["fit", "distill", "partial_fit", "distill-on"])
def test_learning_is_plain_adam(verb: str) -> None:
    """It equals the textbook loop: start, shuffled batches, mean loss and L2.

    Both start and order are the generator's. Going on starts at the old parameters, with a new
    optimizer.
    """
    scores = generator(9).normal(scale=3, size=(40, 10)).astype(np.float32)
    distils, goes_on = verb.startswith("distill"), verb in ("partial_fit", "distill-on")
    targets, loss = (
        (scores, nn.functional.mse_loss) if distils else (Y[:40], nn.functional.cross_entropy)
    )
    model, start = learner(batch_size=16, weight_decay=0.01), None
    if goes_on:
        start = model.fit(X[:40], Y[:40], rng=generator(1)).to_arrays()
    options = {"epochs": 3} if verb == "partial_fit" else {}
    call = getattr(model, verb.removesuffix("-on"))
    call(X[:40], targets, rng=generator(), **options)
    np.testing.assert_allclose(model.logits(X), textbook(targets, loss, start=start), atol=1e-5)


def test_fit_forgets_what_was_learned_before() -> None:
    """A second fit gives the bits of a first fit."""
    again = (
        learner().fit(X[:60], Y[:60], rng=generator(5)).fit(X[:200], Y[:200], rng=generator())
    )
    once = learner().fit(X[:200], Y[:200], rng=generator())
    np.testing.assert_array_equal(again.logits(X), once.logits(X))


@pytest.mark.parametrize("module_fn", [perceptron, convolution, with_dropout, batch_normalised])
@pytest.mark.usefixtures("restored_torch")
def test_same_seed_same_bits(module_fn: ModuleFactory) -> None:
    """PyTorch's own seed and number of threads cannot change a single bit."""
    logits = []
    for seed, threads in ((1, 1), (2, 2)):
        torch.manual_seed(seed)
        torch.set_num_threads(threads)
        sets = consecutive_sets([70, 80])
        twins = learner(module_fn).fit_many(sets, rngs=generators(2))
        alone = learner(module_fn).fit(X[:150], Y[:150], rng=generator())
        logits.append([model.logits(X) for model in (*twins, alone)])
    np.testing.assert_array_equal(logits[0], logits[1])


@pytest.mark.usefixtures("restored_torch")
def test_leaves_no_trace_in_torch() -> None:
    """No verb, nor an error, moves PyTorch's generator or changes its number of threads."""
    torch.set_num_threads(2)
    state = torch.get_rng_state()
    model = learner(with_dropout).fit(X[:50], Y[:50], rng=generator())
    np.testing.assert_array_equal(model.logits(X), model.logits(X), "dropout is off")
    model.distill(X[:50], model.logits(X[:50]), rng=generator())
    learner().fit_many(consecutive_sets([40, 50]), rngs=generators(2))
    model.from_arrays(model.to_arrays()).predict(X)
    with pytest.raises(InvalidData):
        learner().fit(X[:, :5], Y, rng=generator())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    "module_fn",
    [
        perceptron,
        convolution,
        Tied,
        half_frozen,
        batch_normalised,
        with_dropout,
        RandomFeatures,
    ],
)
def test_fit_many_equals_fit(module_fn: ModuleFactory) -> None:
    """Each twin is the model it would be alone, for equal and for unequal step counts."""
    assert_twins_match(learner(module_fn), consecutive_sets([64, 64, 50, 40, 100, 7, 33]))


@settings(deadline=None, max_examples=8, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    batch_size=st.sampled_from([1, 2, 7, 16, 64]),
)
def test_fit_many_equals_fit_for_any_sizes(sizes: list[int], batch_size: int) -> None:
    """Padding to a common batch never leaks into a twin, whatever the sizes."""
    assert_twins_match(learner(batch_size=batch_size, epochs=2), consecutive_sets(sizes))


def test_fit_many_with_shared_rows() -> None:
    """Students that label the same rows differently, next to one with rows of its own."""
    public = X[:100]
    shared = [(public, Y[:100]), (public, (Y[:100] + 3) % 10), (public, Y[100:200])]
    assert_twins_match(learner(epochs=5), [*shared, (X[200:297], Y[200:297])])


def test_shared_rows_are_not_copied_for_every_twin() -> None:
    """Twenty students of one public set need the memory of one copy, not of twenty."""
    public = np.tile(X, (2, 1)).astype(np.float64)
    sets = [(public, np.roll(np.tile(Y, 2), i)) for i in range(20)]
    tracemalloc.start()
    learner(lambda: nn.Linear(64, 10), epochs=1, batch_size=512).fit_many(
        sets, rngs=generators(20)
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * public.nbytes


@pytest.mark.parametrize(
    ("extra", "passes"),
    [
        ((), 1 + 2 * 3),  # a trial, then 2 epochs of 3 steps for all
        ((nn.Dropout(0.2),), 1 + 4 * (1 + 2 * 3)),  # a trial, then each twin alone
        ((nn.BatchNorm1d(64),), 1 + 4 * (1 + 2 * 3)),
    ],
)
def test_twins_take_their_steps_together(extra: tuple[nn.Module, ...], passes: int) -> None:
    """Four twins need the passes of one, unless the module cannot be stacked."""
    model = learner(lambda: Counting(*copy.deepcopy(extra)), epochs=2)
    Counting.passes = 0
    model.fit_many(consecutive_sets([96, 95, 90, 70]), rngs=generators(4))
    assert Counting.passes == passes


def test_modules_that_vmap_refuses_are_fitted_one_by_one() -> None:
    """A module with a path that depends on its values still gives the twins of fit."""
    assert_twins_match(learner(Branching), consecutive_sets([40, 40]))


def test_fit_many_returns_new_learners_in_order() -> None:
    """The learner itself stays unfitted, and twin i has learned set i."""
    model = learner(epochs=10)
    members = [np.flatnonzero(np.equal(Y, label)) for label in range(10)]
    sets = [(X[rows], Y[rows]) for rows in members]
    twins = model.fit_many(sets, rngs=generators(10))
    assert [twin.predict(X[:1]).item() for twin in twins] == list(range(10))
    with pytest.raises(NotFitted):
        model.predict(X)
    assert model.fit_many([], rngs=[]) == []
    with pytest.raises(InvalidParameter, match=r"rngs must be 10 generators, .* got 2"):
        model.fit_many(sets, rngs=generators(2))


def test_fit_ensemble_uses_fit_many() -> None:
    """The package's helper trains the twins together."""
    Counting.passes = 0
    fit_ensemble(
        lambda: learner(Counting, epochs=1), consecutive_sets([32] * 3), rngs=generators(3)
    )
    assert Counting.passes == 2


def test_rows_of_images_are_stacked_too() -> None:
    """Rows may have any shape that the module takes."""
    images = X[:60].reshape(60, 1, 8, 8)

    def module_fn() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 10))

    model = learner(module_fn)
    twins = model.fit_many([(images, Y[:60])] * 2, rngs=generators(2))
    alone = model.fit(images, Y[:60], rng=generators(2)[1])
    np.testing.assert_allclose(twins[1].logits(images), alone.logits(images), atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 32, 33, 65])
def test_batch_normalisation_never_sees_a_single_last_row(num_rows: int) -> None:
    """A last batch of one row joins its neighbour; only a set of one row is refused."""
    model = learner(batch_normalised)
    if num_rows == 1:
        with pytest.raises(ValueError, match="more than 1 value"):
            model.fit(X[:1], Y[:1], rng=generator())
    else:
        assert np.isfinite(
            model.fit(X[:num_rows], Y[:num_rows], rng=generator()).logits(X)
        ).all()


def test_one_class_is_enough() -> None:
    """A set with a single class gives a model that always says this class."""
    ones = Y == 1
    model = learner(epochs=10).fit(X[ones], Y[ones], rng=generator())
    assert (model.predict(X[ones]) == 1).all()
    assert model.logits(X[ones]).shape == (ones.sum(), 10)


def test_frozen_parameters_stay() -> None:
    """Parameters that need no gradient are those of the start, alone and stacked."""
    start = learner(half_frozen, learning_rate=1e-30).fit(X[:40], Y[:40], rng=generator(100))
    twins = learner(half_frozen).fit_many(consecutive_sets([40, 40]), rngs=generators(2))
    for name, moved in (("0.weight", False), ("2.weight", True)):
        same = np.array_equal(twins[0].to_arrays()[name], start.to_arrays()[name])
        assert same != moved


def test_epochs_are_counted_for_whoever_listens() -> None:
    """Also those of stacked twins, which are trained at once."""
    heard: list[tuple[str, int, int]] = []
    made, sets = learner(epochs=2), [(X[:64], Y[:64]), (X[64:128], Y[64:128])]
    with listening(lambda *told: heard.append(told)):
        made.fit(*sets[0], rng=generator())
        made.fit_many(sets, rngs=generators(2))

    assert heard == 2 * [("epochs", count, 2) for count in (0, 1, 2)]


def test_logits_are_float32_of_every_class() -> None:
    """Scores have all columns, chunks leave no seam, and predict is their maximum."""
    model = learner().fit(X[:50], Y[:50], rng=generator())
    many = np.tile(X, (3, 1))
    logits = model.logits(many)
    assert logits.dtype == np.float32
    assert logits.shape == (len(many), 10)
    np.testing.assert_allclose(logits[-len(X) :], model.logits(X), atol=1e-5)
    np.testing.assert_array_equal(model.predict(many), logits.argmax(axis=1))


def test_callers_rows_are_never_written() -> None:
    """A module that works in place changes neither training nor public rows."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 10)

        def forward(self, rows: Tensor) -> Tensor:
            scores: Tensor = self.linear(rows.mul_(2))
            return scores

    x = X[:80].copy()
    x.setflags(write=False)
    learner(InPlace).fit(x, Y[:80], rng=generator()).logits(x)
    np.testing.assert_array_equal(x, X[:80])


@pytest.mark.parametrize("convert", [np.float16, np.float64, np.asfortranarray])
def test_other_number_types_are_converted(convert: Callable[[Array], Array]) -> None:
    """Rows of any number type or memory order mean the same rows."""
    halves = np.round(X[:60] * 16) / 16
    plain = learner().fit(halves, Y[:60], rng=generator())
    other = learner().fit(convert(halves), Y[:60].astype(np.uint8), rng=generator())
    np.testing.assert_array_equal(plain.logits(halves), other.logits(convert(halves)))


@pytest.mark.parametrize("module_fn", [perceptron, batch_normalised, Tied])
def test_arrays_carry_everything(module_fn: ModuleFactory) -> None:
    """A twin gives the same bits and shares no memory with them; its maker stays unfitted."""
    model = learner(module_fn).fit(X[:90], Y[:90], rng=generator())
    arrays = model.to_arrays()
    origin, before = learner(module_fn), model.logits(X)
    twin = origin.from_arrays(arrays)
    for array in arrays.values():
        array[...] = 0
    np.testing.assert_array_equal(twin.logits(X), before)
    np.testing.assert_array_equal(model.logits(X), before)
    assert set(arrays) == set(module_fn().state_dict())
    with pytest.raises(NotFitted):
        origin.predict(X)


def test_received_models_can_learn_on() -> None:
    """A twin made of arrays is distilled without touching its origin."""
    model = learner().fit(X[:90], Y[:90], rng=generator())
    before = model.logits(X)
    twin = learner().from_arrays(model.to_arrays())
    twin.distill(X[:90], np.zeros((90, 10)), rng=generator())
    assert np.abs(twin.logits(X[:90])).mean() < np.abs(before[:90]).mean()
    np.testing.assert_array_equal(model.logits(X), before)


HUGE = np.broadcast_to(np.float32(0), (2**40, 2**20))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"0.bias": None}, "array '0.bias' must be given, got none"),
        ({"9.bias": np.zeros(3)}, "array '9.bias' must be omitted, got one"),
        ({"0.bias": np.zeros(25, np.float32)}, r"'0.bias' must be .*\(24,\), got .*\(25,\)"),
        ({"0.bias": np.zeros((24, 1), np.float32)}, r"'0.bias' must be .*got .*\(24, 1\)"),
        ({"0.bias": np.zeros(24)}, "'0.bias' must be float32 .*, got float64"),
        ({"0.bias": np.zeros(24, ">f4")}, "'0.bias' must be float32 .*, got >f4"),
        ({"0.bias": np.full(24, None)}, "'0.bias' must be float32 .*, got object"),
        ({"0.bias": np.full(24, "x")}, "'0.bias' must be float32 .*, got <U1"),
        ({"0.bias": [0.0] * 24}, "'0.bias' must be float32 .*, got float64"),
        ({"0.bias": np.full(24, np.nan, np.float32)}, "'0.bias' must be .* with NaN"),
        ({"2.weight": np.full((10, 24), -np.inf, np.float32)}, "'2.weight' must .* infinity"),
        ({"0.bias": HUGE}, "'0.bias' must be float32 .*, got float32 of shape"),
    ],
)
def test_hostile_arrays_are_refused(change: dict[str, Any], sentence: str) -> None:
    """Arrays that cannot be this module's state are refused by name, before they are read."""
    arrays = learner().fit(X[:40], Y[:40], rng=generator()).to_arrays() | change
    kept = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(KnowledgeMismatch, match=sentence):
        learner().from_arrays(kept)


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("1.running_var", np.inf, "NaN or infinity"),
        ("1.running_var", -0.1, "negative numbers"),  # its root would be NaN
        ("1.num_batches_tracked", -1, "negative numbers"),  # one more is a division by 0
    ],
)
def test_received_buffers_are_checked(name: str, value: float, fault: str) -> None:
    """Counters and running statistics are part of the state and of its checks."""
    arrays = learner(batch_normalised).fit(X[:40], Y[:40], rng=generator()).to_arrays()
    arrays[name].flat[-1] = value
    with pytest.raises(KnowledgeMismatch, match=rf"'{name}' must be .* with {fault}"):
        learner(batch_normalised).from_arrays(arrays)


def test_means_may_be_negative_and_variances_zero() -> None:
    """What batch normalisation can have learned by itself is accepted, and it continues."""
    arrays = learner(batch_normalised).fit(X[:40], Y[:40], rng=generator()).to_arrays()
    arrays["1.running_mean"][:], arrays["1.running_var"][:] = -1.0, 0.0
    twin = learner(batch_normalised).from_arrays(arrays)
    assert np.isfinite(twin.logits(X)).all()
    twin.partial_fit(X[:40], Y[:40], rng=generator(), epochs=1)
    counted = twin.to_arrays()["1.num_batches_tracked"]
    assert counted.dtype == np.int64
    assert counted == arrays["1.num_batches_tracked"] + 2


VERBS: dict[str, Callable[[TorchLearner, Array, IntArray], object]] = {
    "fit": lambda model, x, y: model.fit(x, y, rng=generator()),
    "fit_many": lambda model, x, y: model.fit_many([(x, y), (x, y)], rngs=generators(2)),
}


def changed(array: Array, position: Any, value: float) -> Array:
    other = array.copy()
    other[position] = value
    return other


BITS: IntArray = (Y[:9, np.newaxis] >> np.arange(4)) & 1


@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        (X[:0], Y[:0], "x must be at least one row, got 0"),
        (X[:9], Y[:8], "y must be 9 labels, one per row, got 8"),
        (X[:9], changed(Y[:9], 2, 10), r"y must be between 0 and 9, .* got \[10\]"),
        (X[:9], changed(Y[:9], 2, -1), "y must be between 0 and 9"),
        (X[:9], Y[:9] / 1, "y must be a flat array of class indices"),
        (changed(X[:9], (4, 0), np.nan), Y[:9], "x must be finite, .* the first is row 4"),
        (X[:9].astype(str), Y[:9], "x must be an array of numbers"),
        (X[:9, 0], Y[:9], "x must be an array of rows"),
        (X[:9, :63], Y[:9], r"x must be rows that the module takes, got shape \(63,\). PyT"),
        (changed(DIGITS[:9], (4, 0), 1e300), Y[:9], "x as float32 must be finite"),
    ],
)
@pytest.mark.parametrize("verb", VERBS)
def test_bad_training_data_is_named(x: Array, y: IntArray, sentence: str, verb: str) -> None:
    """Each fault of the training data is one sentence, alone and in an ensemble."""
    with pytest.raises(InvalidData, match=f"^TorchLearner: {sentence}"):
        VERBS[verb](learner(), x, y)


@pytest.mark.parametrize(
    ("task", "y", "sentence"),
    [
        ("multi-label", BITS[:, :3], r"y must be of shape \(9, 4\), got shape \(9, 3\)"),
        ("multi-label", BITS + 1, "y must be an array of -1, 0 and 1"),
        ("multi-label", BITS / 1, "y must be an array of -1, 0 and 1, got float64"),
        ("regression", BITS, "y must be floating-point numbers, got int64"),
        ("regression", BITS * np.nan, "y must be finite"),
        ("regression", BITS * 1e300, "y as float32 must be finite"),
        ("regression", BITS[:, 0] / 1, r"y must be of shape \(9, 4\)"),
    ],
)
@pytest.mark.parametrize("verb", VERBS)
def test_bad_targets_of_a_task_are_named(task: Any, y: Array, sentence: str, verb: str) -> None:
    """Each fault is one sentence, alone and in an ensemble."""
    model = learner(lambda: perceptron(4), num_classes=4, task=task)
    with pytest.raises(InvalidData, match=f"^TorchLearner: {sentence}"):
        VERBS[verb](model, X[:9], y)


@pytest.mark.parametrize(
    ("verb", "change", "sentence"),
    [
        ("distill", {"x": X[:0], "targets": np.zeros((0, 10))}, "x must be at least one row"),
        (
            "distill",
            {"targets": np.zeros((4, 9))},
            r"targets must be of shape .*, got \(4, 9\)",
        ),
        ("distill", {"targets": np.zeros((5, 10))}, r"targets must .*, got \(5, 10\)"),
        ("distill", {"targets": np.full((4, 10), np.nan)}, "targets must be finite"),
        ("distill", {"targets": np.full((4, 10), 1e300)}, "targets as float32 must be finite"),
        ("distill", {"targets": np.full((4, 10), "a")}, "targets must be an array of numbers"),
        ("distill", {"x": X[:4, :9]}, r"x must be rows of shape \(64,\), like the training"),
        ("partial_fit", {"epochs": 0}, "epochs must be a whole number, at least 1, got 0"),
        ("partial_fit", {"epochs": 1.5}, "epochs must be a whole number"),
        (
            "partial_fit",
            {"x": X[:4, :8]},
            r"x must be rows of shape \(64,\), like the training",
        ),
        ("partial_fit", {"y": Y[:3]}, "y must be 4 labels"),
        ("partial_fit", {"x": X[:0], "y": Y[:0]}, "x must be at least one row"),
    ],
)
def test_what_is_refused_changes_nothing(
    verb: str, change: dict[str, Any], sentence: str
) -> None:
    """Each fault of going on is one sentence, and the model stays what it was."""
    model = learner().fit(X[:40], Y[:40], rng=generator())
    before = model.logits(X)
    taught = {"targets": np.zeros((4, 10))} if verb == "distill" else {"y": Y[:4], "epochs": 1}
    error = InvalidParameter if "epochs" in change else InvalidData
    with pytest.raises(error, match=f"^TorchLearner: {sentence}"):
        getattr(model, verb)(**{"x": X[:4], **taught, **change}, rng=generator())
    np.testing.assert_array_equal(model.logits(X), before)


def test_bad_rows_to_predict_are_named() -> None:
    """Rows of another shape than the training rows are refused, also when empty, as all are
    before a fit.
    """
    for call in (learner().predict, learner().logits, lambda _: learner().to_arrays()):
        with pytest.raises(NotFitted, match="TorchLearner: the learner must be fitted first"):
            call(X)
    model = learner().fit(X[:40], Y[:40], rng=generator())
    for rows in (X[:3, :63], X[:0, :63], X[:3].reshape(3, 8, 8)):
        with pytest.raises(InvalidData, match=r"x must be rows of shape \(64,\)"):
            model.predict(rows)
    with pytest.raises(InvalidData, match="x must be finite"):
        model.predict(changed(X[:3], 0, np.inf))


def test_received_models_name_rows_they_cannot_take() -> None:
    """Arrays do not tell the shape of the rows, so PyTorch's complaint is passed on."""
    model = learner().fit(X[:40], Y[:40], rng=generator())
    twin = learner().from_arrays(model.to_arrays())
    with pytest.raises(InvalidData, match=r"got shape \(63,\). PyTorch says: mat1 and mat2"):
        twin.predict(X[:, :63])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"module_fn": nn.Linear(64, 10).weight}, "module_fn must be callable"),
        ({"num_classes": 1}, "num_classes must be a whole number, at least 2, got 1"),
        ({"epochs": 0}, "epochs must be a whole number, at least 1, got 0"),
        ({"epochs": 1.5}, "epochs must be a whole number, at least 1, got 1.5"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"learning_rate": 0.0}, "learning_rate must be finite and above 0, got 0.0"),
        ({"learning_rate": math.nan}, "learning_rate must be finite and above 0, got nan"),
        ({"weight_decay": -0.1}, "weight_decay must be finite and at least 0, got -0.1"),
        ({"weight_decay": math.inf}, "weight_decay must be finite"),
        ({"task": "ranking"}, "task must be one of single-label, multi-label, regression, got"),
        ({"task": "regression", "num_classes": 0}, "num_classes must be .* at least 1, got 0"),
        ({"optimizer": "lion"}, "optimizer must be one of adam, sgd, got 'lion'"),
        ({"schedule": "linear"}, "schedule must be one of constant, cosine, got 'linear'"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1.0"),
        ({"momentum": -0.1}, "momentum must be at least 0 and below 1, got -0.1"),
        ({"final_learning_rate": 0.1}, "final_learning_rate must be between 0 and learning"),
        ({"final_learning_rate": math.nan}, "final_learning_rate must be between 0 and"),
        ({"augment": 3}, "augment must be callable, got 3"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], sentence: str) -> None:
    """Each setting that breaks its rule is one sentence, at construction."""
    with pytest.raises(InvalidParameter, match=f"^TorchLearner: {sentence}"):
        learner(**settings)


@pytest.mark.parametrize(
    ("module_fn", "sentence"),
    [
        (lambda: nn.Linear(64, 9), r"outputs of shape \(1, 10\), got \(1, 9\)"),
        (lambda: nn.Sequential(nn.Linear(64, 10), nn.Flatten(0)), "outputs of shape"),
        (lambda: nn.LSTM(64, 10), r"outputs of shape \(1, 10\), got \(\)"),
        (lambda: nn.Flatten(), "modules with trainable parameters, got Flatten"),
        (lambda: 3, "modules with trainable parameters, got 3"),
    ],
)
@pytest.mark.parametrize("verb", VERBS)
def test_bad_modules_are_named(module_fn: ModuleFactory, sentence: str, verb: str) -> None:
    """A factory of the wrong modules is named before any training."""
    with pytest.raises(InvalidParameter, match=f"module_fn must be a factory of .*{sentence}"):
        VERBS[verb](learner(module_fn), X[:9], Y[:9])


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.usefixtures("restored_torch")
def test_forked_processes_train_the_same_model() -> None:
    """After threaded work in the parent, a forked child trains to the same bits."""
    torch.set_num_threads(2)
    (torch.ones(600, 600) @ torch.ones(600, 600)).sum()

    def train() -> list[Array]:
        twins = learner().fit_many(consecutive_sets([60, 60, 90]), rngs=generators(3))
        return [twin.logits(X) for twin in twins]

    expected = train()
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=lambda: sender.send(train()), daemon=True)
    child.start()
    arrived = receiver.poll(timeout=60)
    answer = receiver.recv() if arrived else []
    child.kill()
    child.join()
    assert arrived
    np.testing.assert_array_equal(answer, expected)
