"""Random changes of training images that leave their labels true."""

from collections.abc import Callable
from functools import partial

from fl_strategies.exceptions import InvalidData, MissingExtra, require

try:
    import torch
    from torch import Tensor
    from torch.nn.functional import pad
except ImportError as error:
    raise MissingExtra("crop_and_flip", "torch", "torch") from error


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
