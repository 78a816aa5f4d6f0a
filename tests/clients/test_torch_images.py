"""Compiled kernels against PyTorch's own layers, in values and gradients."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients.networks.images import ImageStack, image_layers
from clients.networks.learner import TorchLearner
from clients.networks.stacks import ModuleStack, accelerated, make_stack
from simulations.networks import convolutional, mnist_net

CLASSES = 10


def _odd(row_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Pooling without ReLU, of odd sizes, and ReLU without pooling."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(row_shape[0], 4, 5, padding=1), nn.MaxPool2d(2), nn.ReLU()),
        nn.Conv2d(4, 2, 5, padding=4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * 17 * 17, num_classes),
    )


NETWORKS = {
    "lenet": (convolutional, (1, 28, 28)),
    "colour": (convolutional, (3, 32, 32)),
    "padded": (mnist_net, (1, 28, 28)),
    "odd": (_odd, (3, 29, 29)),
}


def _rows(name: str, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, *NETWORKS[name][1], generator=generator)


def _modules(name: str, count: int) -> list[nn.Module]:
    torch.manual_seed(3)
    network, shape = NETWORKS[name]
    return [network(shape, CLASSES) for _ in range(count)]


def _gradients(scores: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    labels = torch.arange(len(scores)) % CLASSES
    loss = cross_entropy(scores, labels)
    return list(torch.autograd.grad(loss, parameters, retain_graph=True))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_stack_computes_what_its_modules_compute(name: str, count: int) -> None:
    modules, rows = _modules(name, count), _rows(name, 6 * count)
    stack = ImageStack.of(modules)
    assert stack is not None
    alone = torch.cat([m(some) for m, some in zip(modules, rows.chunk(count), strict=True)])
    torch.testing.assert_close(stack(rows), alone, rtol=1e-4, atol=1e-5)
    expected = [
        torch.stack(_gradients(alone, [m.get_parameter(key) for m in modules]))
        for key, _ in modules[0].named_parameters()
    ]
    found = _gradients(stack(rows), list(stack.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.view_as(other), other, rtol=1e-4, atol=1e-5)


def test_where_pixels_are_equal_the_gradient_is_pytorchs() -> None:
    modules = _modules("lenet", 1)
    rows, stack = torch.zeros(2, 1, 28, 28), ImageStack.of(modules)
    assert stack is not None
    weights = list(modules[0].parameters())
    expected = _gradients(modules[0](rows), weights)
    for one, other in zip(_gradients(stack(rows), weights), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_trained_parameters_come_back() -> None:
    modules = _modules("lenet", 2)
    stack = make_stack(modules)
    assert isinstance(stack, ImageStack)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(1.0)
    before = [p.clone() for p in modules[1].parameters()]
    stack.write_back()
    for old, new in zip(before, modules[1].parameters(), strict=True):
        torch.testing.assert_close(new, old + 1.0)


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(784, 10)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 26 * 26, 10)),
        nn.Sequential(nn.Conv2d(1, 3, 5), nn.Flatten(), nn.Linear(3 * 24 * 24, 10)),
        nn.Sequential(nn.Conv2d(1, 2, 5, stride=2), nn.Flatten(), nn.Linear(2 * 12 * 12, 10)),
        nn.Sequential(nn.Conv2d(1, 2, 5, padding="same"), nn.Flatten(), nn.Linear(1568, 10)),
        nn.Sequential(nn.Conv2d(1, 2, 5), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(1152, 10)),
        nn.Sequential(nn.Conv2d(1, 2, 5), nn.MaxPool2d(3), nn.Flatten(), nn.Linear(128, 10)),
        nn.Sequential(nn.Conv2d(1, 2, 5), nn.Flatten(), nn.Tanh(), nn.Linear(1152, 10)),
        nn.Sequential(nn.Conv2d(1, 2, 5), nn.Linear(24, 10), nn.Flatten()),
        nn.Sequential(nn.Conv2d(1, 2, 5, bias=False), nn.Flatten(), nn.Linear(1152, 10)),
        nn.Sequential(nn.Conv2d(1, 2, 5), nn.Flatten(), nn.Linear(1152, 10)).double(),
    ],
)
def test_other_networks_are_left_to_pytorch(module: nn.Module) -> None:
    assert image_layers(module) is None
    assert accelerated(module) is module


def test_a_watched_network_is_left_to_pytorch() -> None:
    module = _modules("lenet", 1)[0]
    module.get_submodule("1").register_forward_hook(lambda *_: None)
    assert image_layers(module) is None


@pytest.mark.usefixtures("without_numba")
def test_without_numba_pytorch_computes() -> None:
    assert isinstance(make_stack(_modules("lenet", 2)), ModuleStack)


@pytest.mark.parametrize("shape", [(2, 28, 28), (1, 4, 28), (1, 28, 4)])
def test_images_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    stack = ImageStack.of(_modules("lenet", 1))
    assert stack is not None
    with pytest.raises((ValueError, RuntimeError)):
        stack(torch.zeros(3, *shape))


def test_a_stacked_learner_is_the_one_that_learns_alone() -> None:
    rng = np.random.default_rng(0)
    x = rng.random((70, 1, 28, 28), dtype=np.float32)
    y = rng.integers(0, CLASSES, 70)
    learner = TorchLearner(
        lambda: convolutional((1, 28, 28), CLASSES),
        num_classes=CLASSES,
        epochs=2,
        channels_last=True,
    )
    twins = learner.fit_many(
        [(x, y), (x, y[::-1].copy())], rngs=[np.random.default_rng(i) for i in (1, 2)]
    )
    alone = learner.fit(x, y, rng=np.random.default_rng(1))
    np.testing.assert_allclose(twins[0].logits(x), alone.logits(x), rtol=1e-3, atol=1e-5)
    assert not np.allclose(twins[1].logits(x), alone.logits(x), atol=1e-3)
