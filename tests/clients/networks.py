"""A network that learns digits, and the textbook loop of training."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clients.networks.learner import TorchLearner
from fl_strategies._util import Array
from fl_strategies.learners import TrainingSet
from tests.clients.digits import X, generator


def generators(count: int) -> list[np.random.Generator]:
    return [generator(100 + i) for i in range(count)]


def perceptron(outputs: int = 10) -> nn.Module:
    return nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, outputs))


def learner(module_fn: Callable[[], nn.Module] = perceptron, **settings: Any) -> TorchLearner:
    return TorchLearner(module_fn, **{"num_classes": 10, "epochs": 3, **settings})


def flat(model: TorchLearner) -> Array:
    """Return all parameters in a row."""
    return np.concatenate([value.ravel() for value in model.to_arrays().values()])


def assert_twins_match(model: TorchLearner, sets: Sequence[TrainingSet]) -> None:
    """Check that each twin is the model that it would be alone."""
    twins = model.fit_many(sets, rngs=generators(len(sets)))
    for twin, (x, y), rng in zip(twins, sets, generators(len(sets)), strict=True):
        alone = copy.copy(model).fit(x, y, rng=rng)
        np.testing.assert_allclose(twin.logits(X), alone.logits(X), atol=2e-4)


def adam(module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
    return torch.optim.Adam(module.parameters(), lr=1e-3, weight_decay=0.01), None


def textbook(
    targets: Array,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    *,
    start: Mapping[str, Array] | None = None,
    optimizer_of: Callable[[nn.Module], tuple[torch.optim.Optimizer, Any]] = adam,
) -> Array:
    """Return the logits after three epochs of a perceptron on 40 rows in batches of 16."""
    rng = generator()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(rng.integers(2**63)))
        module = perceptron()
    if start is not None:
        module.load_state_dict({name: torch.tensor(value) for name, value in start.items()})
    optimizer, scheduler = optimizer_of(module)
    rows, goals = torch.from_numpy(X[:40]), torch.from_numpy(targets)
    for _ in range(3):
        order = torch.from_numpy(rng.permutation(40))
        for batch in (order[:16], order[16:32], order[32:]):
            optimizer.zero_grad()
            torch.autograd.backward(loss(module(rows[batch]), goals[batch]))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    return np.asarray(module(torch.from_numpy(X)).detach())
