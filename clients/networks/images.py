"""Small convolutional networks, one or a stack of twins, trained with compiled kernels.

What can be trained so is an `nn.Sequential`, nested or not, that begins with a convolution and
has nothing but 5 x 5 convolutions of stride 1 with an even number of filters, ReLU, 2 x 2
maximum pooling, `nn.Flatten` and `nn.Linear`. PyTorch itself trains others, and all of them
without Numba (the extra `fast`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Final, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import stack_module_state
from torch.nn.functional import pad

from fl_strategies._util import Array
from fl_strategies.errors import InvalidData, MissingExtra, require


def crop_and_flip(padding: int = 4, flip: bool = True) -> Callable[[Tensor], Tensor]:
    """Return an `augment` for images (n, channels, height, width).

    Every image is moved by its own whole number of pixels, at most `padding` up or down and
    as many left or right, with zeros where nothing was; and mirrored with chance 1/2 if
    `flip`. Draws from PyTorch's default generator, which a `TorchLearner` seeds.

    Examples
    --------
    >>> image = torch.tensor([[[[1.0, 2.0, 3.0]]]])
    >>> crop_and_flip(padding=0, flip=False)(image).tolist()
    [[[[1.0, 2.0, 3.0]]]]
    """
    counts = isinstance(padding, int) and padding >= 0
    require(counts, "crop_and_flip", "padding", "a whole number, at least 0", padding)
    # A partial object, unlike a closure, can be sent to another process.
    return partial(_crop_and_flip, padding=padding, flip=flip)


def _crop_and_flip(images: Tensor, *, padding: int, flip: bool) -> Tensor:
    if images.ndim != 4:
        raise InvalidData(
            "crop_and_flip: rows must be images (channels, height, width), got rows of shape "
            f"{tuple(images.shape[1:])}."
        )
    num_images, _, height, width = images.shape
    offsets = torch.randint(2 * padding + 1, (2, num_images, 1))
    at_row, at_column = offsets[0] + torch.arange(height), offsets[1] + torch.arange(width)
    if flip:
        mirrored = torch.rand(num_images, 1) < 0.5
        at_column = torch.where(mirrored, at_column.flip(1), at_column)
    # One gather with positions in the flat padded image: four times as fast as indexing.
    at_pixel = at_row[:, :, None] * (width + 2 * padding) + at_column[:, None, :]
    padded = pad(images, (padding,) * 4).flatten(2)
    pixels = at_pixel.flatten(1)[:, None, :].expand(-1, padded.shape[1], -1)
    return padded.gather(2, pixels).view(images.shape)


TAPS: Final = 5


class ImageStack:
    """K convolutional networks as one: rows (K * n, ...), the first n for the first.

    Parameters
    ----------
    modules : sequence of Module
        Networks of one architecture.
    layers : sequence of (name, layer)
        What `image_layers` says about it.
    """

    def __init__(
        self, modules: Sequence[nn.Module], layers: Sequence[tuple[str, nn.Module]]
    ) -> None:
        self._modules, self._layers = list(modules), layers
        # A single module trains its own parameters, which others may hold as well.
        self._stacked = None if len(modules) == 1 else stack_module_state(self._modules)[0]

    @classmethod
    def of(cls, modules: Sequence[nn.Module]) -> Self | None:
        """Return a stack, or None if these cannot be trained so."""
        layers = image_layers(modules[0])
        return None if layers is None else cls(modules, layers)

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the outputs of every module for its own rows."""
        named = self._stacked
        if named is None:
            named = {name: p.unsqueeze(0) for name, p in self._modules[0].named_parameters()}
        own = rows.reshape(len(self._modules), -1, *rows.shape[1:])
        images = own.movedim(1, -1).contiguous()
        kinds = [type(layer) for _, layer in self._layers]
        for (name, layer), before, after in zip(
            self._layers, [None, *kinds], [*kinds[1:], None], strict=False
        ):
            weights, biases = named.get(f"{name}.weight"), named.get(f"{name}.bias")
            if isinstance(layer, nn.Conv2d):
                images = _convolve(images, weights, biases, int(layer.padding[0]))
            elif isinstance(layer, nn.MaxPool2d):  # takes a ReLU before it along
                images = _pool(images, np.float32(0 if before is nn.ReLU else -math.inf))
            elif isinstance(layer, nn.Flatten):
                images = images.flatten(1, -2)
            elif weights is not None and biases is not None:
                images = torch.baddbmm(biases.unsqueeze(-1), weights, images)
            elif after is not nn.MaxPool2d:
                images = torch.relu(images)
        return images.mT.flatten(0, 1)

    def parameters(self) -> Iterator[Tensor]:
        """Yield the parameters to train."""
        own = self._stacked
        yield from self._modules[0].parameters() if own is None else own.values()

    @torch.no_grad()
    def write_back(self) -> None:
        """Give every module its trained parameters."""
        for name, values in (self._stacked or {}).items():
            for module, value in zip(self._modules, values, strict=True):
                module.get_parameter(name).copy_(value)


def image_layers(module: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """Return the layers of a network with their names, or None if the kernels cannot."""
    layers = _layers(module, "")
    if layers is None or _kernels() is None:
        return None
    first, *others = [layer for _, layer in layers]
    usable = isinstance(first, nn.Conv2d) and _is_known(first)
    # A gradient of images takes pairs of their channels.
    even = all(one.in_channels % 2 == 0 for one in others if isinstance(one, nn.Conv2d))
    if not (usable and even and all(map(_is_known, others)) and _fits_together(others)):
        return None
    return layers


def _kernels() -> Any:
    """Return the module of kernels; None without Numba."""
    try:
        return import_module("clients.compiled.images")
    except MissingExtra:
        return None


def _layers(module: nn.Module, name: str) -> list[tuple[str, nn.Module]] | None:
    """Return the layers of nested sequences with their names; None for what is watched."""
    watched = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    kinds = {(p.dtype, p.device.type) for p in module.parameters()}
    if watched or not kinds <= {(torch.float32, "cpu")}:
        return None
    if type(module) is not nn.Sequential:
        return [(name, module)]
    found = list[tuple[str, nn.Module]]()
    for key, child in module.named_children():
        inside = _layers(child, f"{name}.{key}" if name else key)
        if inside is None:
            return None
        found += inside
    return found


def _is_known(layer: Any) -> bool:
    kind = type(layer)
    if kind is nn.Conv2d:
        padding = layer.padding
        return (
            layer.kernel_size == (TAPS, TAPS)
            and layer.stride == layer.dilation == (1, 1)
            and (layer.groups, layer.padding_mode) == (1, "zeros")
            and not isinstance(padding, str)
            and padding[0] == padding[1] < TAPS
            and layer.bias is not None
            and layer.out_channels % 2 == 0
        )
    if kind is nn.MaxPool2d:
        sizes = layer.kernel_size, layer.stride, layer.padding, layer.dilation
        return sizes == (2, 2, 0, 1) and not (layer.ceil_mode or layer.return_indices)
    if kind is nn.Flatten:
        return (layer.start_dim, layer.end_dim) == (1, -1)
    return kind is nn.ReLU or (kind is nn.Linear and layer.bias is not None)


def _fits_together(layers: Sequence[nn.Module]) -> bool:
    """Return whether images come first, then one `Flatten`, then vectors to the end."""
    flat = [isinstance(layer, nn.Flatten) for layer in layers]
    if sum(flat) != 1:
        return False
    cut = flat.index(True)
    images, vectors = layers[:cut], layers[cut + 1 :]
    return (
        not any(isinstance(layer, nn.Linear) for layer in images)
        and bool(vectors)
        and all(isinstance(layer, nn.Linear | nn.ReLU) for layer in vectors)
    )


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, images: Tensor, filters: Tensor, biases: Tensor, padding: int
    ) -> Tensor:
        padded = _bordered(images, padding)
        ctx.padding = padding
        ctx.save_for_backward(padded, filters)
        return _convolved(padded, filters, biases, padding)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        images, filters = ctx.saved_tensors
        slopes = slopes.contiguous()
        by_filter, by_bias = torch.empty_like(filters), slopes.new_empty(slopes.shape[:2])
        found = by_filter.numpy(), by_bias.numpy()
        given = _rows(images), _rows(slopes), ctx.padding
        _kernels().filter_gradients(*given, *found, slopes.shape[-1])
        if not ctx.needs_input_grad[0]:
            return None, by_filter, by_bias, None
        turned = filters.transpose(1, 2).flip(-1, -2).contiguous()
        none = slopes.new_zeros(turned.shape[:2])
        border = TAPS - 1 - ctx.padding
        by_image = _convolved(_bordered(slopes, border), turned, none, border)
        return by_image, by_filter, by_bias, None


class _Pooling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, floor: np.float32) -> Tensor:
        images, (models, channels, height, width, batch) = images.contiguous(), images.shape
        pooled = images.new_empty(models, channels, height // 2, width // 2, batch)
        _kernels().pool(_rows(images), floor, _rows(pooled), batch)
        ctx.floor = floor
        ctx.save_for_backward(images, pooled)
        return pooled

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None]:
        images, pooled = ctx.saved_tensors
        by_image = torch.empty_like(images)
        # Pixels of an odd last row or column are in no pool.
        by_image[:, :, 2 * pooled.shape[2] :] = 0
        by_image[:, :, :, 2 * pooled.shape[3] :] = 0
        seen, given = (_rows(images), _rows(pooled)), _rows(slopes.contiguous())
        _kernels().pool_gradients(*seen, ctx.floor, given, _rows(by_image), slopes.shape[-1])
        return by_image, None


_convolve: Callable[..., Tensor] = _Convolution.apply
_pool: Callable[..., Tensor] = _Pooling.apply


def _convolved(images: Tensor, filters: Tensor, biases: Tensor, border: int) -> Tensor:
    models, channels, inside, width, batch = images.shape
    cut, height = TAPS - 1, inside + 2 * border
    # The kernels themselves check nothing.
    if filters.shape != (models, filters.shape[1], channels, TAPS, TAPS) or (
        min(height, width) <= cut
    ):
        raise ValueError(f"images {tuple(images.shape)} do not fit {tuple(filters.shape)}")
    out = images.new_empty(models, filters.shape[1], height - cut, width - cut, batch)
    flat = filters.detach().contiguous().numpy(), biases.detach().contiguous().numpy()
    _kernels().convolve(_rows(images), *flat, border, _rows(out), batch)
    return out


def _bordered(images: Tensor, width: int) -> Tensor:
    """Return images with zeros on the left and right."""
    return pad(images, (0, 0, width, width)) if width else images.contiguous()


def _rows(images: Tensor) -> Array:
    """Return images (K, channels, height, width, b) as the rows that kernels take."""
    rows: Array = images.detach().flatten(-2).numpy()
    return rows
