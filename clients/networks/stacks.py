"""Networks of one architecture as one model: every step of training serves them all."""

import itertools
import logging
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from clients.networks.images import ImageStack
from clients.networks.training import Stack, isolated, logits_of

logger = logging.getLogger(__name__)

HOOKS: Final = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


class PerceptronStack:
    """K perceptrons of one architecture: dense layers, with ReLU after any of them.

    Every layer of all modules is one batched product, forwards and backwards, with weights
    (K, outputs, inputs) as PyTorch keeps them: in that order the costliest product, which
    gives the gradient of the first weights, is the fastest. Rows get no gradient. All
    weights and biases are parts of one tensor, and so are their gradients, so that an
    optimizer has one long row of numbers to go through.

    Gradients of a call replace those of the call before: nothing is accumulated.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._layers = [_parts(module) for module in modules]
        first = self._layers[0]
        self._flattens = isinstance(first[0], nn.Flatten)
        self.has_relu = [
            isinstance(after, nn.ReLU)
            for layer, after in itertools.pairwise([*first, None])
            if isinstance(layer, nn.Linear)
        ]
        values = [torch.stack([p.detach() for p in twins]) for twins in self._twins()]
        shapes = [value.shape for value in values]
        self._flat = torch.cat([value.flatten() for value in values]).requires_grad_()
        self._slopes = torch.empty_like(self._flat, requires_grad=False)
        self._values_of = _parts_of(self._flat.detach(), shapes)
        self._slopes_of = _parts_of(self._slopes, shapes)

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> Self | None:
        """Return a stack, or nothing unless the modules are perceptrons of one architecture."""
        kinds = {_architecture(_parts(module)) for module in modules}
        return cls(modules) if len(kinds) == 1 and None not in kinds else None

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the outputs of every module for its own rows, the first n for the first."""
        if rows.ndim > 2 and not self._flattens:
            raise ValueError(f"Dense layers take rows of numbers, got {tuple(rows.shape)}.")
        stacked = rows.reshape(len(self._layers), -1, math.prod(rows.shape[1:]))
        scores: Tensor = _Pass.apply(self._flat, stacked, self)  # type: ignore[no-untyped-call]
        return scores.flatten(0, 1)

    def layers_of(self, module: int) -> list[tuple[Tensor, Tensor]]:
        """Return the weights (outputs, inputs) and biases of a module's layers, not copied."""
        own = [value[module] for value in self._values_of]
        return list(zip(own[::2], own[1::2], strict=True))

    def parameters(self) -> Iterator[Tensor]:
        """Yield the tensor of all weights and biases."""
        yield self._flat

    @torch.no_grad()
    def write_back(self) -> None:
        """Give every module its trained parameters."""
        for twins, trained in zip(self._twins(), self._values_of, strict=True):
            for parameter, value in zip(twins, trained, strict=True):
                parameter.copy_(value)

    def forward(self, rows: Tensor) -> list[Tensor]:
        """Return the rows (K, n, inputs) and what every layer makes of them."""
        results = [rows]
        weights, biases = self._values_of[::2], self._values_of[1::2]
        for weight, bias, has_relu in zip(weights, biases, self.has_relu, strict=True):
            outputs = torch.baddbmm(bias[:, None], results[-1], weight.mT)
            results.append(outputs.relu_() if has_relu else outputs)
        return results

    def backward(self, results: list[Tensor], slope: Tensor) -> None:
        """Set the gradient of all that learns, from that of the outputs (K, n, classes)."""
        weights, into = self._values_of[::2], self._slopes_of
        for i in reversed(range(len(weights))):
            if self.has_relu[i]:
                slope = torch.ops.aten.threshold_backward(slope, results[i + 1], 0)
            torch.bmm(slope.mT, results[i], out=into[2 * i])
            torch.sum(slope, 1, out=into[2 * i + 1])
            if i > 0:
                slope = torch.bmm(slope, weights[i])
        # Not returned to PyTorch, which would copy it.
        self._flat.grad = self._slopes

    def _twins(self) -> list[tuple[nn.Parameter, ...]]:
        """Return every parameter of the architecture, as all modules have it."""
        of_modules = ([p for part in own for p in part.parameters()] for own in self._layers)
        return list(zip(*of_modules, strict=True))


class _Pass(torch.autograd.Function):
    """A stack as one operation of PyTorch's."""

    @staticmethod
    def forward(ctx: Any, _flat: Tensor, rows: Tensor, stack: PerceptronStack) -> Tensor:
        ctx.stack, ctx.results = stack, stack.forward(rows)
        outputs: Tensor = ctx.results[-1]
        return outputs.detach()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[None, None, None]:
        ctx.stack.backward(ctx.results, slope)
        return None, None, None


def _parts_of(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _parts(module: nn.Module) -> list[nn.Module]:
    """Return the layers of nested sequences in order, and other modules as they are."""
    if type(module) is not nn.Sequential or _is_watched(module):
        return [module]
    return list(itertools.chain.from_iterable(_parts(part) for part in module))


def _architecture(layers: Sequence[nn.Module]) -> Hashable | None:
    """Return what makes a perceptron what it is; nothing if the layers are not one."""
    flattens = bool(layers) and _is_flatten(layers[0])
    rest = layers[1:] if flattens else layers
    if not rest or not isinstance(rest[0], nn.Linear) or any(map(_is_watched, layers)):
        return None
    if not all(type(layer) is nn.ReLU or _is_usual(layer) for layer in rest):
        return None
    parameters = [p for layer in rest for p in layer.parameters()]
    if len({id(p) for p in parameters}) < len(parameters):  # one layer used twice
        return None
    sizes = tuple((type(layer), *(p.shape for p in layer.parameters())) for layer in rest)
    return flattens, sizes


def _is_watched(module: nn.Module) -> bool:
    """Tell whether others take part in what a module does."""
    return any(getattr(module, hooks) for hooks in HOOKS)


def _is_flatten(module: nn.Module) -> bool:
    return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)


def _is_usual(module: nn.Module) -> bool:
    """Tell whether a module is a dense layer with biases that learns as a whole."""
    return (
        type(module) is nn.Linear
        and module.bias is not None
        and all(p.requires_grad and p.dtype == torch.float32 for p in module.parameters())
    )


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
