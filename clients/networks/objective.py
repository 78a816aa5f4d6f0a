"""The gradient of an `Objective`, for modules whose loss alone is not all that counts."""

import copy
from typing import Any, TypeVar

import numpy as np

from clients.networks.dense import head_of
from clients.networks.training import OWNER, check_state, state_of
from fl_strategies.errors import MissingExtra, require_known
from fl_strategies.learners import Objective

try:
    import torch
    from torch import Tensor, nn
    from torch.nn.functional import cross_entropy, linear
except ImportError as error:
    raise MissingExtra("TorchLearner", "torch", "torch") from error


L = TypeVar("L", bound=Any)


def stepping(learner: L, objective: Objective | None) -> L:
    """Return the learner, or if the objective has a step size a twin that takes such steps."""
    if objective is None or objective.step_size is None:
        return learner
    twin = copy.copy(learner)
    twin.optimizer, twin.momentum, twin.schedule = "sgd", 0.0, "constant"
    twin.learning_rate = objective.step_size
    return twin


def gradient_of(objective: Objective | None, module: nn.Module) -> "ObjectiveGradient | None":
    """Return what an objective adds to the gradients of a module; nothing if it adds 0."""
    if objective is None:
        return None
    own = ObjectiveGradient(objective, module)
    adds = objective.mu, objective.correction is not None, objective.features is not None
    return own if any(adds) else None


class ObjectiveGradient:
    """What an objective adds to the gradients of a module's weights in every step.

    Parameters
    ----------
    objective : Objective
        Its arrays are checked against the weights that learn; others of the module's state,
        such as the buffers in `to_arrays`, may be among them and have no effect. Features
        are what the last dense layer takes.
    module : Module
        With the weights that the call starts from.
    """

    def __init__(self, objective: Objective, module: nn.Module) -> None:
        learning = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._mu = objective.mu
        self._weights = list(learning.values())
        self._anchors = [weight.detach().clone() for weight in self._weights]
        self._corrections = [torch.zeros_like(weight) for weight in self._weights]
        for kind, arrays, tensors in (
            ("anchor", objective.anchor, self._anchors),
            ("correction", objective.correction, self._corrections),
        ):
            if arrays is not None:
                state = state_of(module)
                idle = state.keys() - learning.keys()
                given = {name: arrays[name] for name in arrays if name not in idle}
                check_state(given, {name: state[name] for name in learning}, kind)
                for tensor, name in zip(tensors, learning, strict=True):
                    tensor.copy_(torch.tensor(given[name]))
        self._features = None if objective.features is None else _Features(objective, module)

    @torch.no_grad()
    def add(self) -> None:
        """Add it to the gradients that the loss has left on the weights."""
        terms = zip(self._weights, self._anchors, self._corrections, strict=True)
        for weight, anchor, correction in terms:
            own: Tensor = self._mu * (weight - anchor) + correction
            weight.grad = own if weight.grad is None else weight.grad + own
        if self._features is not None:
            self._features.add()


class _Features:
    """The cross-entropy of what the last layer makes of given features."""

    def __init__(self, objective: Objective, module: nn.Module) -> None:
        head = head_of(module)
        self._head = [p for p in (head.weight, head.bias) if p.requires_grad]
        self._layer, self._strength = head, objective.strength
        features = np.asarray(objective.features, dtype=np.float32)
        rule = f"of shape (n, {head.in_features})"
        fits = features.ndim == 2 and features.shape[1] == head.in_features
        require_known(fits, OWNER, "features", rule, features.shape)
        device = head.weight.device
        self._features = torch.from_numpy(features).to(device)
        self._labels = torch.from_numpy(np.asarray(objective.labels, np.int64)).to(device)

    @torch.enable_grad()
    def add(self) -> None:
        # Not by the layer itself: hooks of others, such as Opacus', would count these rows.
        scores = linear(self._features, self._layer.weight, self._layer.bias)
        loss = self._strength * cross_entropy(scores, self._labels)
        for weight, slope in zip(
            self._head, torch.autograd.grad(loss, self._head), strict=True
        ):
            weight.grad = slope if weight.grad is None else weight.grad + slope
