"""Parts of a network for strategies beyond averaging: last layer, features and loss terms.

The terms of an `Objective` are gradients of weights, or losses that see the batch. Twins of a
network with other numbers of hidden units are made here too.
"""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from clients.networks.training import (
    OWNER,
    BatchLoss,
    blank_module,
    blank_state,
    check_state,
    squared_difference,
    state_of,
)
from fl_strategies._util import Array
from fl_strategies.errors import UnsupportedLearner, require_known
from fl_strategies.learners import (
    Correction,
    DenseLayer,
    Generated,
    Objective,
    Prototypes,
    Proximal,
    Task,
)


def head_of(module: nn.Module) -> nn.Linear:
    """Return the last dense layer of a module, which must be what gives its logits."""
    dense = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if not dense or dense[-1].bias is None:
        raise UnsupportedLearner(
            "TorchLearner: the module must end in an nn.Linear with biases, got another."
        )
    return dense[-1]


class SeenFeatures:
    """Inputs of a module's last dense layer in its latest pass, while entered."""

    def __init__(self, module: nn.Module) -> None:
        self._head = head_of(module)
        self._taken: Tensor | None = None

    def __enter__(self) -> Self:
        """Watch the layer, which then is no longer trained by kernels that skip it."""
        self._handle = self._head.register_forward_pre_hook(self._keep)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the module as it was."""
        self._handle.remove()

    def of(self, num_rows: int) -> Tensor:
        """Return the features (num_rows, num_features) of the rows of the latest pass."""
        taken, shape = self._taken, (num_rows, self._head.in_features)
        if taken is None or taken.shape != shape:
            got = "no call of it" if taken is None else f"shape {tuple(taken.shape)}"
            raise UnsupportedLearner(
                "TorchLearner: the last nn.Linear must take one row of features per record, of "
                f"shape {shape}, got {got}."
            )
        return taken

    def _keep(self, _layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._taken = inputs[0]


def as_layers(arrays: Mapping[str, Array]) -> list[DenseLayer] | None:
    """Return a module's arrays as layers of which each takes what the last one gives."""
    values = list(arrays.values())
    layers = list(zip(values[::2], values[1::2], strict=False))
    dense = all(w.ndim == 2 and b.shape == w.shape[:1] for w, b in layers)
    chained = dense and all(
        weight.shape[1] == len(bias) for (_, bias), (weight, _) in itertools.pairwise(layers)
    )
    return layers if chained and layers and len(values) % 2 == 0 else None


def resized(
    module_fn: Callable[[], nn.Module], arrays: Mapping[str, Array]
) -> Callable[[], nn.Module]:
    """Return a factory of modules with as many hidden units as the arrays of one have.

    If the inputs or outputs are others, it is the factory given: memory must follow what
    arrived, and a bias alone would decide how many weights there are.
    """
    usual = blank_state(module_fn)
    layers = as_layers({name: arrays[name] for name in usual if name in arrays})
    own = as_layers(usual)
    if layers is None or own is None or not len(arrays) == len(usual) == 2 * len(layers):
        return module_fn
    inputs = layers[0][0].shape[1] == own[0][0].shape[1]
    if not (inputs and len(layers[-1][1]) == len(own[-1][1])):
        return module_fn
    return functools.partial(with_hidden_units, module_fn, [len(b) for _, b in layers[:-1]])


def with_hidden_units(module_fn: Callable[[], nn.Module], widths: Sequence[int]) -> nn.Module:
    """Return a module whose hidden dense layers have so many units, with new weights.

    The layers that are replaced take no memory, unless the module needs their values.
    """
    module = blank_module(module_fn)
    is_complete = _resize(module, widths) and not any(
        tensor.is_meta for tensor in itertools.chain(module.parameters(), module.buffers())
    )
    if is_complete or torch.get_default_device().type == "meta":
        return module
    module = module_fn()
    _resize(module, widths)
    return module


def _resize(module: nn.Module, widths: Sequence[int]) -> bool:
    """Replace all dense layers, unless there are none hidden or another number of them."""
    dense = [(n, part) for n, part in module.named_modules() if isinstance(part, nn.Linear)]
    if not widths or len(dense) != len(widths) + 1:
        return False
    inputs = [dense[0][1].in_features, *widths]
    outputs = [*widths, dense[-1][1].out_features]
    for (name, _), num_inputs, num_outputs in zip(dense, inputs, outputs, strict=True):
        parent, _, own = name.rpartition(".")
        setattr(module.get_submodule(parent), own, nn.Linear(num_inputs, num_outputs))
    return True


L = TypeVar("L", bound=Any)
Slopes: TypeAlias = Callable[[], Sequence[tuple[Tensor, Tensor]]]
"""The gradient of a term now, as pairs of a weight and its gradient."""


def stepping(learner: L, objective: Objective | None) -> L:
    """Return the learner, or if the objective has a step size a twin that takes such steps."""
    if objective is None or objective.step_size is None:
        return learner
    twin = copy.copy(learner)
    twin.optimizer, twin.momentum, twin.schedule = "sgd", 0.0, "constant"
    twin.learning_rate = objective.step_size
    return twin


class AppliedObjective:
    """Contribution of an objective's terms to the training of one module.

    Parameters
    ----------
    slopes : sequence of callables
        Of the terms that see the weights alone.
    loss : callable
        The learner's own loss, with the terms that see the batch.
    """

    def __init__(self, slopes: Sequence[Slopes], loss: BatchLoss) -> None:
        self._slopes = slopes
        self.loss = loss

    @torch.no_grad()
    def add(self) -> None:
        """Add the gradients of terms of the weights to those that the loss has left there."""
        for slopes in self._slopes:
            for weight, slope in slopes():
                weight.grad = slope if weight.grad is None else weight.grad + slope


@contextmanager
def applied(
    objective: Objective | None, module: nn.Module, loss: BatchLoss, task: Task
) -> Iterator[AppliedObjective | None]:
    """Apply an objective to a module, from the weights that it has now; None if it adds 0.

    Named arrays are checked against the weights that learn; others of the module's state, such
    as the buffers in `to_arrays`, may be among them and have no effect.
    """
    slopes: list[Slopes] = []
    losses: list[BatchLoss] = []
    with ExitStack() as stack:
        for term in () if objective is None else objective.terms:
            match term:
                case Proximal(mu=0) | Generated(strength=0) | Prototypes(strength=0):
                    continue
                case Proximal():
                    slopes.append(_pull(term, module))
                case Correction():
                    slopes.append(_correction(term, module))
                case Generated():
                    slopes.append(_recognition(term, module))
                case Prototypes():
                    seen = stack.enter_context(SeenFeatures(module))
                    losses.append(_distance_to(term, module, seen, task))
                case _:
                    raise UnsupportedLearner(
                        f"{OWNER}: the terms of an objective must be Proximal, Correction, "
                        f"Generated or Prototypes, got {type(term).__name__}."
                    )
        if not slopes and not losses:
            yield None
        else:
            yield AppliedObjective(slopes, _sum_of([loss, *losses]))


def sees_features(objective: Objective | None) -> bool:
    """Tell whether an objective has a term of the features of records."""
    terms = () if objective is None else objective.terms
    return any(isinstance(term, Prototypes) for term in terms)


def _sum_of(losses: Sequence[BatchLoss]) -> BatchLoss:
    first, *others = losses

    def total(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        result = first(logits, targets, weights)
        for other in others:
            result = result + other(logits, targets, weights)
        return result

    return total


def _learning(module: nn.Module) -> dict[str, nn.Parameter]:
    return {n: weight for n, weight in module.named_parameters() if weight.requires_grad}


def _like_weights(kind: str, arrays: Mapping[str, Array], module: nn.Module) -> list[Tensor]:
    """Return checked arrays as tensors, in the order of the weights that learn."""
    learning = _learning(module)
    state = state_of(module)
    idle = state.keys() - learning.keys()
    given = {name: arrays[name] for name in arrays if name not in idle}
    check_state(given, {name: state[name] for name in learning}, kind)
    return [torch.tensor(given[n]).to(weight.device) for n, weight in learning.items()]


def _pull(term: Proximal, module: nn.Module) -> Slopes:
    weights = list(_learning(module).values())
    if term.anchor is None:
        anchors = [weight.detach().clone() for weight in weights]
    else:
        anchors = _like_weights("anchor", term.anchor, module)
    pairs = list(zip(weights, anchors, strict=True))
    return lambda: [(weight, term.mu * (weight - anchor)) for weight, anchor in pairs]


def _correction(term: Correction, module: nn.Module) -> Slopes:
    corrections = _like_weights("correction", term.arrays, module)
    pairs = list(zip(_learning(module).values(), corrections, strict=True))
    return lambda: pairs


def _recognition(term: Generated, module: nn.Module) -> Slopes:
    head = head_of(module)
    own = [weight for weight in (head.weight, head.bias) if weight.requires_grad]
    given = np.asarray(term.features, dtype=np.float32)
    rule = f"of shape (n, {head.in_features})"
    fits = given.ndim == 2 and given.shape[1] == head.in_features
    require_known(fits, OWNER, "features", rule, given.shape)
    features = torch.from_numpy(given).to(head.weight.device)
    labels = torch.from_numpy(np.asarray(term.labels, np.int64)).to(head.weight.device)

    @torch.enable_grad()
    def slopes() -> list[tuple[Tensor, Tensor]]:
        # Not by the layer itself: hooks of others, such as Opacus', would count these rows.
        loss = term.strength * cross_entropy(linear(features, head.weight, head.bias), labels)
        return list(zip(own, torch.autograd.grad(loss, own), strict=True))

    return slopes


def _distance_to(
    term: Prototypes, module: nn.Module, seen: SeenFeatures, task: Task
) -> BatchLoss:
    head = head_of(module)
    if task != "single-label":
        raise UnsupportedLearner(
            f"{OWNER}: the task must be single-label for prototypes of classes, got {task}."
        )
    given = np.asarray(term.prototypes, dtype=np.float32)
    shape = head.out_features, head.in_features
    require_known(given.shape == shape, OWNER, "prototypes", f"of shape {shape}", given.shape)
    known = np.ones(len(given)) if term.known is None else np.asarray(term.known)
    prototypes = torch.from_numpy(given).to(head.weight.device)
    strengths = torch.from_numpy((term.strength * known).astype(np.float32)).to(prototypes)

    def loss(_logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        distances = squared_difference(seen.of(len(targets)), prototypes[targets])
        return (distances * strengths[targets] * weights).sum()

    return loss
