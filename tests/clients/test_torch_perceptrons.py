"""Stacks of perceptrons by hand, against PyTorch's own gradients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from clients.networks.learner import TorchLearner
from clients.networks.stacks import ModuleStack, PerceptronStack, Stack, make_stack
from clients.networks.training import tiny_as_zero


def perceptron() -> nn.Module:
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


@pytest.mark.parametrize("make", [perceptron, without_relu, lambda: nn.Linear(12, 3)])
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
    modules = modules_of(perceptron)
    images = rows_of(modules, (3, 2, 2))
    alone = [module(images[4 * i : 4 * i + 4]) for i, module in enumerate(modules)]

    torch.testing.assert_close(make_stack(modules)(images), torch.cat(alone))
    with pytest.raises(ValueError, match="rows of numbers"):
        make_stack(modules_of(without_relu))(images)


def test_gradients_of_a_step_replace_those_of_the_last() -> None:
    """So a step without a gradient in between is the same step again."""
    modules = modules_of(perceptron)
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


def test_other_architectures_are_left_to_pytorch() -> None:
    """Even if each is a perceptron."""
    assert PerceptronStack.of([perceptron(), without_relu()]) is None


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
    learner = TorchLearner(perceptron, num_classes=3, epochs=3, **settings)

    def fitted() -> list[TorchLearner]:
        rngs = [np.random.default_rng(seed) for seed in range(2)]
        return learner.fit_many([(x, y), (x[::-1], y)], rngs=rngs)

    by_us = [twin.logits(x) for twin in fitted()]
    alone = TorchLearner(perceptron, num_classes=3, epochs=3, **settings)
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
