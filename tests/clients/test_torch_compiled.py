"""Perceptrons by compiled kernels and in stacks, against PyTorch's own layers and gradients."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients.networks.compiled import (
    CompiledPerceptrons,
    find_trainer,
    share_of_others,
    sparse_rows,
)
from clients.networks.learner import TorchLearner
from clients.networks.stacks import ModuleStack, PerceptronStack, Stack, make_stack
from clients.networks.training import TASK_LOSSES, BatchLoss, RecipeLoss, tiny_as_zero
from fl_strategies._util import Array
from fl_strategies.errors import InvalidData
from fl_strategies.learners import Objective, Proximal, Recipe

INPUTS, CLASSES, EPOCHS = 40, 4, 3
RNG = np.random.default_rng(7)
NUMBERS = RNG.normal(size=(75, INPUTS)).astype(np.float32)
FEW = np.where(RNG.random(NUMBERS.shape) < 0.2, NUMBERS, 0).astype(np.float32)
LABELS = RNG.integers(CLASSES, size=len(NUMBERS))
SHARES = RNG.dirichlet(np.ones(CLASSES), size=len(NUMBERS)).astype(np.float32)

ROWS = {
    "dense": NUMBERS,
    "sparse": FEW,
    "background": np.where(FEW == 0, np.float32(-0.42), FEW),
    "background by column": np.where(
        FEW == 0, np.linspace(0.1, 2, INPUTS, dtype=np.float32), FEW
    ),
    "nothing": np.zeros_like(FEW),
    "images": FEW.reshape(-1, 2, 4, 5),
    "float64": FEW.astype(np.float64),
    "bytes": (10 * np.abs(FEW)).astype(np.uint8),
}


def perceptron(*hidden: int) -> nn.Module:
    sizes = [INPUTS, *hidden, CLASSES]
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, units in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, units), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def relu_elsewhere() -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, 17), nn.Linear(17, 16), nn.ReLU(), nn.Linear(16, CLASSES), nn.ReLU()
    )


def generator(seed: int = 3) -> np.random.Generator:
    return np.random.default_rng(seed)


def by_kernels(
    module: nn.Module,
    x: Array,
    targets: Array,
    loss: BatchLoss,
    *,
    batch_size: int = 16,
    decay: float = 0.0,
    cosine: bool = False,
) -> nn.Module:
    """Train a copy by the kernels, which must be able to."""
    trained = copy.deepcopy(module)
    stack = PerceptronStack.of([trained])
    assert stack is not None
    compiled = find_trainer(
        stack, [(x, targets)], loss, batch_size=batch_size, weight_decay=decay
    )
    assert compiled is not None
    pace = len(list(batches(len(x), batch_size, generator())))
    angles = np.linspace(0, math.pi, EPOCHS * pace, endpoint=False)
    rates = 0.001 + 0.009 * (1 + np.cos(angles)) / 2 if cosine else np.full(len(angles), 0.01)
    compiled.train(rates.reshape(EPOCHS, pace), [generator()])
    stack.write_back()
    return trained


def batches(size: int, batch_size: int, rng: np.random.Generator) -> Iterator[Array]:
    """Yield the rows of every batch of an epoch; a single last row joins the others."""
    order = rng.permutation(size)
    starts = list(range(0, size, batch_size))
    if len(starts) > 1 and size % batch_size == 1:
        starts.pop()
    yield from np.split(order, starts[1:])


def by_pytorch(
    module: nn.Module,
    x: Array,
    targets: Array,
    criterion: Callable[[Tensor, Tensor], Tensor],
    *,
    batch_size: int = 16,
    decay: float = 0.0,
    cosine: bool = False,
) -> nn.Module:
    """Train a copy as a plain script does."""
    trained, rng = copy.deepcopy(module), generator()
    rows, wanted = torch.tensor(x, dtype=torch.float32), torch.from_numpy(targets)
    descent = torch.optim.Adam(trained.parameters(), lr=0.01, weight_decay=decay)
    pace = len(list(batches(len(x), batch_size, generator())))
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(descent, EPOCHS * pace, 0.001)
    for _ in range(EPOCHS):
        for batch in batches(len(x), batch_size, rng):
            descent.zero_grad()
            criterion(trained(rows[batch]), wanted[batch]).backward()
            descent.step()
            if cosine:
                falling.step()
    return trained


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=2e-5)


def both(module: nn.Module, x: Array, **settings: Any) -> tuple[nn.Module, nn.Module]:
    ours = by_kernels(module, x, LABELS[: len(x)], TASK_LOSSES["single-label"], **settings)
    return ours, by_pytorch(module, x, LABELS[: len(x)], nn.CrossEntropyLoss(), **settings)


@pytest.mark.parametrize("hidden", [(), (20,), (20, 33), (5, 16, 20), (150,)])
def test_every_depth_and_width(hidden: tuple[int, ...]) -> None:
    """Also widths of several vectors, and of more than registers hold."""
    torch.manual_seed(0)
    assert_same(*both(perceptron(*hidden), FEW, decay=0.01))


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_every_kind(name: str) -> None:
    torch.manual_seed(1)
    assert_same(*both(perceptron(20, 20), ROWS[name]))


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 18, 33, 49])
@pytest.mark.parametrize("batch_size", [1, 5, 16, 100])
def test_every_last_batch(size: int, batch_size: int) -> None:
    torch.manual_seed(2)
    assert_same(*both(perceptron(20), FEW[:size], batch_size=batch_size))


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_decay_and_schedule(decay: float, cosine: bool) -> None:
    torch.manual_seed(3)
    assert_same(*both(perceptron(20), FEW, decay=decay, cosine=cosine))


def test_relu_in_other_places() -> None:
    """Missing between layers, and after the last."""
    torch.manual_seed(4)
    assert_same(*both(relu_elsewhere(), FEW))


def soft_loss(recipe: Recipe, scores: Tensor, targets: Tensor) -> Tensor:
    """Write a recipe's loss in other words than the learner does."""
    if recipe.loss == "cross-entropy":
        return -(targets * (scores / recipe.temperature).log_softmax(1)).sum(1).mean()
    given = (scores / recipe.temperature).softmax(1) if recipe.link == "softmax" else scores
    away = given - targets
    each = {"mse": away**2, "l1": away.abs()}
    if recipe.loss == "l2":
        return (away**2).sum(1).sqrt().mean()
    return each[recipe.loss].mean()


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(loss="l1"),
        Recipe(loss="l2"),
        Recipe(loss="mse", link="softmax"),
        Recipe(loss="l1", link="softmax", temperature=2.0),
        Recipe(loss="cross-entropy", link="softmax"),
        Recipe(loss="cross-entropy", link="softmax", temperature=3.0),
    ],
    ids=str,
)
def test_soft_targets(recipe: Recipe) -> None:
    """Also shares that do not sum to one, which pull the scores of a row together less."""
    torch.manual_seed(5)
    module = perceptron(20, 20)
    several = recipe.loss == "cross-entropy"
    for shares in (SHARES, SHARES / 2) if several else (SHARES,):
        ours = by_kernels(module, FEW, shares, RecipeLoss(recipe))
        theirs = by_pytorch(module, FEW, shares, lambda *given: soft_loss(recipe, *given))
        assert_same(ours, theirs)


def test_numbers_to_regress_on() -> None:
    torch.manual_seed(6)
    module = perceptron(20)
    ours = by_kernels(module, FEW, SHARES, TASK_LOSSES["regression"])
    assert_same(ours, by_pytorch(module, FEW, SHARES, nn.MSELoss()))


def test_what_is_no_number_stays_none() -> None:
    """So that early stopping sees it."""
    module = perceptron(20)
    with torch.no_grad():
        module.get_parameter("1.bias")[0] = math.nan
    ours = by_kernels(module, FEW, LABELS, TASK_LOSSES["single-label"])
    assert ours(torch.from_numpy(FEW)).isnan().all()


def of(x: Array = FEW, *, module: nn.Module | None = None, **settings: Any) -> Any:
    stack = PerceptronStack.of([module or perceptron(20)])
    assert stack is not None
    loss = settings.pop("loss", TASK_LOSSES["single-label"])
    given = {"batch_size": 16, "weight_decay": 0.0, **settings}
    return find_trainer(stack, [(x, LABELS)], loss, **given)


def test_what_kernels_cannot_do_is_left_to_pytorch() -> None:
    """Other losses, layers and widths, and perceptrons of different architectures."""
    module = nn.Sequential(nn.Linear(INPUTS, 20), nn.Tanh(), nn.Linear(20, CLASSES))
    sigmoid = RecipeLoss(Recipe(loss="mse", link="sigmoid"))

    assert of() is not None
    assert of(loss=TASK_LOSSES["multi-label"]) is None
    assert of(loss=sigmoid) is None
    assert of(FEW[:, :12]) is None
    assert PerceptronStack.of([module]) is None
    assert PerceptronStack.of([small_perceptron(), without_relu()]) is None


def test_where_kernels_are_slower_pytorch_trains() -> None:
    """Many inputs without zeros, large batches of them, and large layers."""
    wide = nn.Sequential(nn.Linear(4 * INPUTS, CLASSES))

    assert of(np.tile(FEW, 4), module=wide) is not None
    assert of(np.tile(NUMBERS, 4), module=wide) is None
    assert of(FEW, batch_size=200) is not None
    assert of(NUMBERS, batch_size=200) is None
    assert of(FEW, module=perceptron(1024, 1025)) is None


def test_without_numba_pytorch_trains(request: pytest.FixtureRequest) -> None:
    learner = TorchLearner(lambda: perceptron(20), num_classes=CLASSES, epochs=4)
    ours = learner.fit(FEW, LABELS, rng=generator()).logits(FEW)
    request.getfixturevalue("without_numba")
    theirs = learner.fit(FEW, LABELS, rng=generator()).logits(FEW)
    np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)
    assert not np.array_equal(ours, theirs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of models of every training by kernels."""
    heard: list[int] = []
    train = CompiledPerceptrons.train

    def listening(self: CompiledPerceptrons, *given: Any) -> None:
        heard.append(len(self._models))
        train(self, *given)

    monkeypatch.setattr(CompiledPerceptrons, "train", listening)
    return heard


def test_a_learner_uses_them_where_they_apply(calls: list[int]) -> None:
    learner = TorchLearner(lambda: perceptron(20), num_classes=CLASSES, epochs=1)
    learner.fit_many([(FEW, LABELS)] * 3, rngs=[generator(i) for i in range(3)])
    learner.fit(FEW, LABELS, rng=generator())
    learner.partial_fit(FEW, LABELS, rng=generator(), epochs=1)
    learner.distill(FEW, SHARES, rng=generator())
    assert calls == [3, 1, 1, 1]


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd"},
        {"augment": lambda rows: rows},
        {"task": "multi-label"},
        {"mu": 0.1},
    ],
)
def test_a_learner_leaves_other_settings_to_pytorch(
    settings: dict[str, Any], calls: list[int]
) -> None:
    """So it does objectives."""
    settings = dict(settings)
    own = Objective(terms=(Proximal(mu=settings.pop("mu", 0.0)),))
    learner = TorchLearner(lambda: perceptron(20), num_classes=CLASSES, epochs=1, **settings)
    y = np.eye(CLASSES, dtype=np.int64)[LABELS] if "task" in settings else LABELS
    learner.partial_fit(FEW, y, rng=generator(), epochs=1, objective=own)
    assert calls == []


def test_twins_are_what_they_are_alone_to_the_bit() -> None:
    """With rows of their own or shared, and fewer in the last batch."""
    sets = [(FEW, LABELS), (FEW, LABELS[::-1].copy()), (FEW[2:].copy(), LABELS[2:])]
    learner = TorchLearner(
        lambda: perceptron(20), num_classes=CLASSES, epochs=3, weight_decay=0.01
    )
    twins = learner.fit_many(sets, rngs=[generator(i) for i in range(3)])
    for i, (twin, one) in enumerate(zip(twins, sets, strict=True)):
        alone = copy.copy(learner).fit(*one, rng=generator(i))
        for name, value in twin.to_arrays().items():
            np.testing.assert_array_equal(value, alone.to_arrays()[name])


def test_who_has_stopped_draws_no_more() -> None:
    """A twin's generator ends where it would alone, though others go on."""
    learner = TorchLearner(
        lambda: perceptron(20),
        num_classes=CLASSES,
        epochs=40,
        validation_share=0.2,
        patience=2,
        learning_rate=0.02,
    )
    many, single = [generator(i) for i in range(3)], [generator(i) for i in range(3)]
    sets = [(FEW, LABELS), (FEW, np.zeros_like(LABELS)), (NUMBERS, LABELS)]
    twins = learner.fit_many(sets, rngs=many)
    alone = [copy.copy(learner).fit(*s, rng=r) for s, r in zip(sets, single, strict=True)]

    assert len({twin.epochs_trained for twin in twins}) > 1
    assert [twin.epochs_trained for twin in twins] == [one.epochs_trained for one in alone]
    assert [rng.random() for rng in many] == [rng.random() for rng in single]
    for twin, one in zip(twins, alone, strict=True):
        np.testing.assert_array_equal(twin.logits(FEW), one.logits(FEW))


def unpacked(x: Array) -> Array:
    """Return what sparse rows stand for."""
    rows = sparse_rows(x)
    result = np.tile(rows.background, (len(x), 1))
    for i, (start, stop) in enumerate(itertools.pairwise(rows.starts)):
        result[i, rows.places[start:stop]] += rows.values[start:stop]
    return result


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("size", [1, 2, 64, 75])
def test_sparse_rows_are_the_rows(name: str, size: int) -> None:
    x = ROWS[name][:size]
    np.testing.assert_allclose(unpacked(x), x.reshape(size, -1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("x", [np.tile(FEW, (14, 1)), np.where(FEW == 0, np.float32(1e9), FEW)])
def test_neither_many_rows_nor_a_large_common_number_cost_digits(x: Array) -> None:
    """A mark for what is missing is no background: 1e9 - 1 + 1 would be 0 in float32."""
    np.testing.assert_array_equal(unpacked(x), x)


def test_only_what_differs_is_kept() -> None:
    """From 0, or from what most rows have in a column."""
    assert share_of_others(ROWS["background by column"]) < 0.3
    for name in ("sparse", "background", "background by column"):
        assert len(sparse_rows(ROWS[name]).values) == np.count_nonzero(FEW)
    assert share_of_others(NUMBERS) == 1.0


def test_numbers_beyond_float32_are_refused() -> None:
    x = FEW.astype(np.float64)
    x[70, 3] = 1e300
    learner = TorchLearner(lambda: perceptron(20), num_classes=CLASSES, epochs=1)
    with pytest.raises(InvalidData, match="x as float32"):
        learner.fit(x, LABELS, rng=generator())


# --- stacks -------------------------------------------------------------------------------


def small_perceptron() -> nn.Module:
    hidden = nn.Sequential(nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 6))
    return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(6, 3))


def without_relu() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 5), nn.Linear(5, 3), nn.ReLU())


def modules_of(make: Callable[[], nn.Module], number: int = 3) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make() for _ in range(number)]


def rows_of(modules: list[nn.Module], shape: tuple[int, ...] = (12,)) -> Tensor:
    return torch.randn(4 * len(modules), *shape, generator=torch.Generator().manual_seed(1))


def gradients(stack: Stack, modules: list[nn.Module], rows: Tensor) -> list[list[Tensor]]:
    """Take a step of size 1 and return how far it moved every parameter of every module."""
    before = [[p.detach().clone() for p in module.parameters()] for module in modules]
    descent = torch.optim.SGD(stack.parameters(), lr=1.0)
    labels = torch.arange(len(rows)) % 3
    cross_entropy(stack(rows), labels, reduction="sum").backward()
    descent.step()
    stack.write_back()
    return [
        [old - new.detach() for old, new in zip(olds, module.parameters(), strict=True)]
        for olds, module in zip(before, modules, strict=True)
    ]


@pytest.mark.parametrize("make", [small_perceptron, without_relu, lambda: nn.Linear(12, 3)])
@pytest.mark.parametrize("number", [1, 3])
def test_gradients_are_those_of_each_module_alone(
    make: Callable[[], nn.Module], number: int
) -> None:
    """By PyTorch's differentiation of one module after the other."""
    modules = modules_of(make, number)
    rows, labels = rows_of(modules), torch.arange(4 * number) % 3
    expected = []
    for i, module in enumerate(modules):
        own = slice(4 * i, 4 * i + 4)
        loss = cross_entropy(module(rows[own]), labels[own], reduction="sum")
        expected.append(torch.autograd.grad(loss, list(module.parameters())))
    stack = make_stack(modules)

    assert isinstance(stack, PerceptronStack)
    for own, theirs in zip(gradients(stack, modules, rows), expected, strict=True):
        for one, other in zip(own, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_outputs_and_images() -> None:
    """Rows may be images where the module flattens them, and only there."""
    modules = modules_of(small_perceptron)
    images = rows_of(modules, (3, 2, 2))
    alone = [module(images[4 * i : 4 * i + 4]) for i, module in enumerate(modules)]

    torch.testing.assert_close(make_stack(modules)(images), torch.cat(alone))
    with pytest.raises(ValueError, match="rows of numbers"):
        make_stack(modules_of(without_relu))(images)


def test_gradients_of_a_step_replace_those_of_the_last() -> None:
    """So a step without a gradient in between is the same step again."""
    modules = modules_of(small_perceptron)
    stack, rows = make_stack(modules), rows_of(modules)
    (flat,) = stack.parameters()
    stack(rows).sum().backward()
    assert flat.grad is not None
    first = flat.grad.clone()
    stack(rows).sum().backward()

    torch.testing.assert_close(flat.grad, first, rtol=0, atol=0)


def frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(12, 3), nn.ReLU(), nn.Linear(3, 3))
    module[0].weight.requires_grad_(False)
    return module


def watched() -> nn.Module:
    module = nn.Sequential(nn.Linear(12, 3))
    module[0].register_forward_hook(lambda *_: None)
    return module


def tied() -> nn.Module:
    layer = nn.Linear(12, 12)
    return nn.Sequential(layer, nn.ReLU(), layer)


class Own(nn.Sequential):
    """A sequence that does something else."""

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = super().forward(rows)
        return -result


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: nn.Sequential(nn.Linear(12, 3), nn.Tanh()),
    "no bias": lambda: nn.Sequential(nn.Linear(12, 3, bias=False)),
    "double": lambda: nn.Sequential(nn.Linear(12, 3)).double(),
    "relu first": lambda: nn.Sequential(nn.ReLU(), nn.Linear(12, 3)),
    "flatten later": lambda: nn.Sequential(nn.Linear(12, 3), nn.Flatten()),
    "other axes": lambda: nn.Sequential(nn.Flatten(0), nn.Linear(12, 3)),
    "nothing": lambda: nn.Sequential(),
    "own forward": lambda: Own(nn.Linear(12, 3)),
    "frozen": frozen,
    "watched": watched,
    "tied": tied,
    "normalised": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(12, 3))
    ),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_other_modules_are_left_to_pytorch(make: Callable[[], nn.Module]) -> None:
    """By hand only what is surely a perceptron."""
    assert PerceptronStack.of([make(), make()]) is None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": "sgd", "schedule": "cosine"},
        {"task": "regression"},
        {"batch_size": 7, "weight_decay": 0.01},
    ],
)
def test_twins_follow_the_path_of_any_stack(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the one that they would follow alone, up to rounding."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 12))
    y = rng.normal(size=(40, 3)) if settings.get("task") else rng.integers(3, size=40)
    learner = TorchLearner(small_perceptron, num_classes=3, epochs=3, **settings)

    def fitted() -> list[TorchLearner]:
        rngs = [np.random.default_rng(seed) for seed in range(2)]
        return learner.fit_many([(x, y), (x[::-1], y)], rngs=rngs)

    by_us = [twin.logits(x) for twin in fitted()]
    alone = TorchLearner(small_perceptron, num_classes=3, epochs=3, **settings)
    alone.fit(x, y, rng=np.random.default_rng(0))
    monkeypatch.setattr("clients.networks.learner.make_stack", ModuleStack)
    by_vmap = [twin.logits(x) for twin in fitted()]

    np.testing.assert_allclose(by_us, by_vmap, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(by_us[0], alone.logits(x), rtol=1e-3, atol=1e-4)


def test_tiny_numbers_count_as_zero_for_a_while() -> None:
    """And only there; blocks in one another do not end it early."""
    tiny = torch.full((4,), 1e-38)

    def halves_vanish() -> bool:
        return bool((tiny / 2 == 0).all())

    assert not halves_vanish()
    with tiny_as_zero():
        with tiny_as_zero():
            assert halves_vanish()
        assert halves_vanish()
    assert not halves_vanish()
