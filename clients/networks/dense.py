"""PyTorch modules as perceptrons: their layers, and twins with other numbers of units."""

import copy
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import numpy as np

from clients.networks.training import blank_module, blank_state
from fl_strategies._util import Array
from fl_strategies.errors import MissingExtra, UnsupportedLearner
from fl_strategies.learners import DenseLayer

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise MissingExtra("TorchLearner", "torch", "torch") from error


class DenseModules(ABC):
    """What learners of modules can do if theirs has dense layers and nothing else that learns.

    The layers must be used in the order in which the module names them, with the same
    activation for all units between them.
    """

    module_fn: Callable[[], nn.Module]

    @abstractmethod
    def to_arrays(self) -> dict[str, Array]:
        """Return what was learned."""

    @abstractmethod
    def from_arrays(self, arrays: Mapping[str, Array]) -> Self:
        """Return a fitted twin."""

    @abstractmethod
    def _fitted(self) -> nn.Module:
        """Return the module."""

    def head(self) -> DenseLayer:
        """Return weights (num_classes, num_features) and biases of the last dense layer."""
        layer = head_of(self._fitted())
        return layer.weight.detach().cpu().numpy(), layer.bias.detach().cpu().numpy()

    def to_layers(self) -> list[DenseLayer]:
        """Return weights (outputs, inputs) and biases of every layer, from inputs to logits."""
        layers = as_layers(self.to_arrays())
        if layers is None:
            raise UnsupportedLearner(
                "TorchLearner: the module must have dense layers with biases and nothing else "
                "that learns, got others. Use an nn.Sequential of nn.Linear and activations."
            )
        return layers

    def from_layers(self, layers: Sequence[DenseLayer]) -> Self:
        """Return a fitted twin of these layers, with as many hidden units as they have."""
        names = list(blank_state(self.module_fn))
        flat = [np.asarray(array, dtype=np.float32) for layer in layers for array in layer]
        arrays = dict(zip(names, flat, strict=True))
        return self.sized_for(arrays).from_arrays(arrays)

    def sized_for(self, arrays: Mapping[str, Array]) -> Self:
        """Return an unfitted twin with as many hidden units as arrays of its kind have.

        Arrays with other inputs or outputs give it the usual size: memory must follow what
        arrived, and a bias alone would decide how many weights there are.
        """
        usual = blank_state(self.module_fn)
        layers = as_layers({name: arrays[name] for name in usual if name in arrays})
        twin = copy.copy(self)
        if layers is not None and len(arrays) == len(usual) and _same_ends(layers, usual):
            widths = [len(bias) for _, bias in layers[:-1]]
            twin.module_fn = functools.partial(with_hidden_units, self.module_fn, widths)
        return twin


def head_of(module: nn.Module) -> nn.Linear:
    """Return the last dense layer of a module, which must be what gives its logits."""
    dense = [part for part in module.modules() if isinstance(part, nn.Linear)]
    if not dense or dense[-1].bias is None:
        raise UnsupportedLearner(
            "TorchLearner: the module must end in an nn.Linear with biases, got another."
        )
    return dense[-1]


class SeenFeatures:
    """What the last dense layer of a module takes, in its latest pass, while entered."""

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


def _same_ends(layers: Sequence[DenseLayer], usual: Mapping[str, Array]) -> bool:
    """Tell whether layers take the inputs of a module's arrays, and give its outputs."""
    own = as_layers(usual)
    return (
        own is not None
        and len(own) == len(layers)
        and layers[0][0].shape[1] == own[0][0].shape[1]
        and len(layers[-1][1]) == len(own[-1][1])
    )


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
