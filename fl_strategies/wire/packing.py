"""Labels on the wire: ceil(log2 C) bits each, and not one byte more."""

import math

import numpy as np

from fl_strategies.arrays import Array, IntArray
from fl_strategies.exceptions import KnowledgeMismatch


def bits_per_label(num_classes: int) -> int:
    """Return the bits one label needs; a single class still takes one."""
    return max(1, (num_classes - 1).bit_length())


def packed_size(num_labels: int, num_classes: int) -> int:
    """Return the bytes that `num_labels` packed labels take."""
    return math.ceil(num_labels * bits_per_label(num_classes) / 8)


def pack_labels(labels: Array, num_classes: int) -> Array:
    """Pack labels of any shape into a flat uint8 array.

    Examples
    --------
    >>> pack_labels(np.array([[0, 1, 1], [1, 0, 1]]), num_classes=2)
    array([116], dtype=uint8)
    """
    width = bits_per_label(num_classes)
    if width == 8:
        return np.asarray(labels, dtype=np.uint8).reshape(-1)
    flat = np.asarray(labels, dtype=np.uint32).reshape(-1, 1)
    shifts = np.arange(width - 1, -1, -1, dtype=np.uint32)
    return np.packbits(((flat >> shifts) & 1).astype(np.uint8))


def unpack_labels(
    packed: Array, shape: tuple[int, ...], num_classes: int, *, name: str = "votes"
) -> IntArray:
    """Undo `pack_labels`; refuse bytes that cannot have come from it.

    The size is checked before anything is allocated, so a hostile sender cannot make
    the receiver allocate more than the answer it asked for.
    """
    count, width = math.prod(shape), bits_per_label(num_classes)
    expected = packed_size(count, num_classes)
    if packed.dtype != np.uint8 or packed.ndim != 1 or packed.size != expected:
        raise KnowledgeMismatch(
            f"{name}: what was packed must be {expected} bytes (uint8) for {shape} values, "
            f"got shape {packed.shape} of {packed.dtype}."
        )
    if width == 8:
        labels = packed.astype(np.int64)
    else:
        bits = np.unpackbits(packed, count=count * width).reshape(count, width)
        weights = 1 << np.arange(width - 1, -1, -1, dtype=np.int64)
        labels = bits @ weights
    if count and labels.max() >= num_classes:
        raise KnowledgeMismatch(
            f"{name}: values must be below {num_classes}, got {labels.max()}."
        )
    return labels.reshape(shape)
