"""Modules of one architecture as one model: every step of training serves them all."""

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Protocol

from clients.torch_images import ImageStack
from clients.torch_perceptrons import PerceptronStack
from clients.torch_training import isolated, logits_of
from fl_strategies.exceptions import MissingExtra

try:
    import torch
    from torch import Tensor, nn
    from torch.func import functional_call, stack_module_state, vmap
except ImportError as error:
    raise MissingExtra("TorchLearner", "torch", "torch") from error

logger = logging.getLogger(__name__)


class Stack(Protocol):
    """K modules of one architecture as one: rows (K * n, ...), the first n for the first."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the outputs of every module for its own rows."""

    def parameters(self) -> Iterator[Tensor]:
        """Yield what learns."""

    def write_back(self) -> None:
        """Give every module its trained parameters."""


def make_stack(modules: list[nn.Module]) -> Stack:
    """Return the fastest kind of stack that these modules allow."""
    return ImageStack.of(modules) or PerceptronStack.of(modules) or ModuleStack(modules)


def accelerated(module: nn.Module) -> nn.Module | Stack:
    """Return a module, or what computes the same with its parameters in less time."""
    return ImageStack.of([module]) or module


def trainable(module: nn.Module, *, as_it_is: bool) -> nn.Module | Stack:
    """Return what trains a module in the least time, a stack of one if there is one for it.

    `as_it_is` means that it must train the module's own parameters.
    """
    model = accelerated(module)
    if as_it_is or not isinstance(model, nn.Module):
        return model
    return PerceptronStack.of([module]) or module


class ModuleStack:
    """Modules of any kind, by `vmap`."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        # Batched products run faster, and fused Adam need not copy, when weights (out, in)
        # lie in memory as (in, out).
        self._parameters = {
            name: _swap_axes(value.detach()).contiguous().requires_grad_(value.requires_grad)
            for name, value in stack_module_state(modules)[0].items()
        }
        self._forward = vmap(
            lambda named, rows: logits_of(functional_call(modules[0], named, (rows,)))
        )

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the outputs of every module for its own rows."""
        named = {name: _swap_axes(value) for name, value in self._parameters.items()}
        stacked = rows.view(len(self._modules), -1, *rows.shape[1:])
        scores: Tensor = self._forward(named, stacked)
        return scores.flatten(0, 1)

    def parameters(self) -> Iterator[Tensor]:
        """Yield the stacked parameters, (K, ...)."""
        yield from self._parameters.values()

    @torch.no_grad()
    def write_back(self) -> None:
        """Give every module its trained parameters."""
        for i, module in enumerate(self._modules):
            for name, parameter in module.named_parameters():
                parameter.copy_(_swap_axes(self._parameters[name])[i])


def can_stack(make_module: Callable[[], nn.Module], rows: Tensor, num_classes: int) -> bool:
    """Try two stacked modules on rows (2 * n, ...); buffers would mix what they see."""
    with isolated(), warnings.catch_warnings():
        warnings.simplefilter("error")  # vmap warns where it falls back to a loop
        try:
            modules = [make_module(), make_module()]
            scores = make_stack(modules)(rows)
            torch.autograd.backward(scores.sum())
        except Exception as error:
            logger.debug("Twins are fitted one after the other: %s", error)
            return False
    fits = scores.shape == (len(rows), num_classes)
    return fits and not any(True for _ in modules[0].buffers())


def _swap_axes(stacked: Tensor) -> Tensor:
    """Transpose the matrices of a stack (K, rows, columns); leave other shapes alone."""
    return stacked.mT if stacked.ndim == 3 else stacked
