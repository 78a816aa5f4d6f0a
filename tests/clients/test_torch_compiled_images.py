"""Convolutional networks by compiled kernels, against PyTorch's own layers and Adam."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients import torch_compiled_images
from clients.torch_compiled_images import CompiledImages
from clients.torch_images import ImageStack
from clients.torch_learner import TorchLearner
from clients.torch_training import TASK_LOSSES, BatchLoss, RecipeLoss
from fl_strategies.arrays import Array
from fl_strategies.core.protocols import Objective, Recipe
from simulations.networks import convolutional, mnist_net

CLASSES, EPOCHS, RATE = 4, 3, 0.003
SIZES = {
    "lenet": (convolutional, (1, 28, 28)),
    "colour": (convolutional, (3, 32, 32)),
    "padded": (mnist_net, (1, 28, 28)),
    "odd": (mnist_net, (2, 13, 15)),
}
RNG = np.random.default_rng(7)
LABELS = RNG.integers(CLASSES, size=50)
SHARES = RNG.dirichlet(np.ones(CLASSES), size=50).astype(np.float32)
LABEL_LOSS = TASK_LOSSES["single-label"]


def network(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    make, shape = SIZES[name]
    return make(shape, CLASSES)


def images(name: str, count: int = 50) -> Array:
    shape = (count, *SIZES[name][1])
    return np.random.default_rng(count).normal(size=shape).astype(np.float32)


def generator(seed: int = 3) -> np.random.Generator:
    return np.random.default_rng(seed)


def ends(size: int, batch_size: int) -> list[int]:
    """Return where batches end; a single last row joins the others."""
    found = [*range(batch_size, size, batch_size), size]
    if len(found) > 1 and size % batch_size == 1:
        found.pop(-2)
    return found


def by_kernels(
    modules: list[nn.Module],
    sets: list[tuple[Array, Array]],
    loss: BatchLoss = LABEL_LOSS,
    batch_size: int = 16,
    decay: float = 0.01,
) -> list[nn.Module]:
    """Train copies by the kernels, which must be able to."""
    trained = copy.deepcopy(modules)
    stack = ImageStack.of(trained)
    assert stack is not None
    compiled = CompiledImages.of(stack, sets, loss, batch_size=batch_size, weight_decay=decay)
    assert compiled is not None
    pace = len(ends(len(sets[0][0]), batch_size))
    compiled.train(np.full((EPOCHS, pace), RATE), [generator(i) for i in range(len(sets))])
    stack.write_back()
    return trained


def by_pytorch(
    module: nn.Module,
    x: Array,
    targets: Array,
    seed: int = 0,
    batch_size: int = 16,
    decay: float = 0.01,
) -> nn.Module:
    """Train a copy as a plain script does."""
    trained, rng = copy.deepcopy(module), generator(seed)
    rows, wanted = torch.from_numpy(x), torch.from_numpy(targets)
    descent = torch.optim.Adam(trained.parameters(), lr=RATE, weight_decay=decay)
    for _ in range(EPOCHS):
        order = rng.permutation(len(x))
        for start, stop in itertools.pairwise([0, *ends(len(x), batch_size)]):
            batch = order[start:stop]
            descent.zero_grad()
            cross_entropy(trained(rows[batch]), wanted[batch]).backward()
            descent.step()
    return trained


def assert_same(one: nn.Module, other: nn.Module) -> None:
    """Adam's first steps are as large for a gradient of nothing but rounding."""
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        apart = (left - right).abs()
        assert (apart > 1e-4).float().mean() < 1e-3
        assert apart.max() < 2 * EPOCHS * RATE


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("targets", [LABELS, SHARES], ids=["labels", "shares"])
def test_networks_of_every_kind(name: str, targets: Array) -> None:
    """Also with padding, and where pooling leaves a row or column over."""
    module, x = network(name), images(name)
    soft = RecipeLoss(Recipe(loss="cross-entropy", link="softmax"))
    loss = LABEL_LOSS if targets is LABELS else soft

    (ours,) = by_kernels([module], [(x, targets)], loss)

    assert_same(ours, by_pytorch(module, x, targets))


@pytest.mark.parametrize("size", [1, 2, 16, 17, 18, 33])
@pytest.mark.parametrize("batch_size", [1, 5, 16, 100])
def test_every_last_batch(size: int, batch_size: int) -> None:
    module, x, y = network("odd"), images("odd", size), LABELS[:size]

    (ours,) = by_kernels([module], [(x, y)], batch_size=batch_size)

    assert_same(ours, by_pytorch(module, x, y, batch_size=batch_size))


def test_twins_are_what_they_are_alone() -> None:
    """What one learns does not depend on the others to the bit."""
    modules = [network("lenet", seed) for seed in (1, 2)]
    sets = [(images("lenet"), LABELS), (images("lenet")[::-1].copy(), LABELS)]

    both = by_kernels(modules, sets)

    (alone,) = by_kernels(modules[:1], sets[:1])
    for left, right in zip(both[0].parameters(), alone.parameters(), strict=True):
        assert torch.equal(left, right)
    assert_same(both[1], by_pytorch(modules[1], *sets[1], seed=1))


def _frozen() -> nn.Module:
    module = network("lenet")
    next(module.parameters()).requires_grad_(False)
    return module


def _pooled_first() -> nn.Module:
    """Return a network whose ReLU follows pooling."""
    layers = nn.Conv2d(1, 2, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(2 * 12 * 12, CLASSES))


@pytest.mark.parametrize("module", [_frozen(), _pooled_first()], ids=["frozen", "pooled"])
def test_other_networks_are_left_to_pytorch(module: nn.Module) -> None:
    stack, x = ImageStack.of([module]), images("lenet")
    assert stack is not None

    found = CompiledImages.of(stack, [(x, LABELS)], LABEL_LOSS, batch_size=8, weight_decay=0)

    assert found is None


@pytest.mark.parametrize("shape", [(784,), (3, 28, 28), (1, 32, 32), (1, 9, 9)])
def test_images_that_do_not_fit_never_reach_the_kernels(shape: tuple[int, ...]) -> None:
    """The kernels read and write without looking."""
    stack, x = ImageStack.of([network("lenet")]), np.zeros((4, *shape), dtype=np.float32)

    found = CompiledImages.of(
        stack, [(x, LABELS[:4])], LABEL_LOSS, batch_size=2, weight_decay=0
    )

    assert found is None


def learner(**settings: object) -> TorchLearner:
    changed = {"epochs": 2, "batch_size": 16, "num_classes": CLASSES, **settings}
    return TorchLearner(lambda: network("lenet"), **changed)  # type: ignore[arg-type]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of what the kernels train, an epoch each."""
    found: list[int] = []
    train = CompiledImages._train_epoch

    def watched(self: CompiledImages, model: int, *rest: object) -> None:
        found.append(model)
        train(self, model, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(CompiledImages, "_train_epoch", watched)
    return found


def test_a_learner_uses_them(calls: list[int]) -> None:
    """Alone and for twins, from labels and from scores, with early stopping and on the go."""
    x, sets = images("lenet"), [(images("lenet"), LABELS)] * 2
    model = learner().fit(x, LABELS, rng=generator())
    model.partial_fit(x, LABELS, rng=generator(), epochs=1)
    model.distill(x, SHARES, rng=generator(), recipe=Recipe(loss="l1", epochs=1))
    learner(patience=5).fit_many(sets, rngs=[generator(), generator(4)])

    assert calls == [0, 0, 0, 0, 0, 1, 0, 1]


@pytest.mark.parametrize("settings", [{"optimizer": "sgd"}, {"augment": Tensor.clone}])
def test_other_settings_are_left_to_pytorch(
    settings: dict[str, object], calls: list[int]
) -> None:
    learner(**settings).fit(images("lenet"), LABELS, rng=generator())

    assert not calls


def test_objectives_are_left_to_pytorch(calls: list[int]) -> None:
    """A proximal term, for example, is known to PyTorch alone."""
    model = learner().fit(images("lenet"), LABELS, rng=generator())
    calls.clear()
    pull = Objective(mu=0.1)

    model.partial_fit(images("lenet"), LABELS, rng=generator(), epochs=1, objective=pull)

    assert not calls


def test_pytorch_takes_the_same_path(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    """Up to rounding."""
    x, seen = images("lenet"), images("lenet", 20)
    fast = learner().fit(x, LABELS, rng=generator()).logits(seen)
    assert calls
    calls.clear()
    monkeypatch.setattr(torch_compiled_images, "kind_of", lambda _: None)

    slow = learner().fit(x, LABELS, rng=generator()).logits(seen)

    assert not calls
    np.testing.assert_allclose(fast, slow, rtol=1e-3, atol=1e-3)
