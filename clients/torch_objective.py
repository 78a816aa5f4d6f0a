"""The gradient of an `Objective`, for modules whose loss alone is not all that counts."""

import copy
from typing import Any, TypeVar

from clients.torch_training import check_state, state_of
from fl_strategies.core.protocols import Objective
from fl_strategies.exceptions import MissingExtra

try:
    import torch
    from torch import Tensor, nn
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


class ObjectiveGradient:
    """What an objective adds to the gradients of a module's weights in every step.

    Parameters
    ----------
    objective : Objective
        Its arrays are checked against the weights that learn; others of the module's state,
        such as the buffers in `to_arrays`, may be among them and have no effect.
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

    @torch.no_grad()
    def add(self) -> None:
        """Add it to the gradients that the loss has left on the weights."""
        terms = zip(self._weights, self._anchors, self._corrections, strict=True)
        for weight, anchor, correction in terms:
            own: Tensor = self._mu * (weight - anchor) + correction
            weight.grad = own if weight.grad is None else weight.grad + own
