"""The same picture, slightly changed: for repeated predictions on public images.

Server and parties change the public rows in the same way, from a named stream of the
experiment's seed, so only predictions travel.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

import numpy as np

from fl_strategies.arrays import Array
from fl_strategies.exceptions import require, require_data
from fl_strategies.randomness import derive_rng

Augmentation: TypeAlias = Literal["none", "crop", "crop-flip"]

PADDING: Final = 4


def crop_and_flip(rows: Array, rng: np.random.Generator) -> Array:
    """Shift images (n, C, H, W) by up to four pixels and mirror half of them.

    What is shifted in is zero.
    """
    return crop(np.where(rng.random((len(rows), 1, 1, 1)) < 0.5, rows[..., ::-1], rows), rng)


def crop(rows: Array, rng: np.random.Generator) -> Array:
    """Shift images (n, C, H, W) by up to four pixels; what is shifted in is zero."""
    padded = np.pad(rows, [(0, 0), (0, 0), (PADDING, PADDING), (PADDING, PADDING)])
    height, width = rows.shape[2:]
    top, left = rng.integers(2 * PADDING + 1, size=(2, len(rows), 1, 1, 1))
    which = np.arange(len(rows))[:, None, None, None]
    channels = np.arange(rows.shape[1])[:, None, None]
    lines = top + np.arange(height)[:, None]
    columns = left + np.arange(width)
    shifted: Array = padded[which, channels, lines, columns]
    return shifted


Change: TypeAlias = Callable[[Array, np.random.Generator], Array]
AUGMENTATIONS: Final[Mapping[str, Change]] = MappingProxyType(
    {"crop": crop, "crop-flip": crop_and_flip}
)


def check_augmentation(owner: str, name: str, rows: Array, num_predictions: int) -> None:
    """Raise unless rows can be predicted so many times, each time slightly changed."""
    require(
        num_predictions == 1 or name != "none",
        owner,
        "augmentation",
        "given for more than one prediction",
        name,
    )
    if name != "none":
        rule = "images (n, channels, height, width) for an augmentation"
        require_data(rows.ndim == 4, owner, "public", rule, f"shape {rows.shape}")


def augmented(rows: Array, name: str, seed: int, number: int) -> Array:
    """Return the rows of one prediction; the first prediction sees them as they are."""
    if number == 0 or name == "none":
        return rows
    return AUGMENTATIONS[name](rows, derive_rng(seed, "augmentation", number))
