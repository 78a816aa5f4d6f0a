"""Dense layers of PyTorch modules: what they take, and twins with other numbers of units."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from clients.networks.training import blank_module, blank_state
from fl_strategies._util import Array
from fl_strategies.errors import UnsupportedLearner
from fl_strategies.learners import DenseLayer


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
