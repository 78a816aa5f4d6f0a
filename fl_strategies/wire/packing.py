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
    if width > 8:
        flat = np.asarray(labels, dtype=np.uint32).reshape(-1, 1)
        shifts = np.arange(width - 1, -1, -1, dtype=np.uint32)
        return np.packbits(((flat >> shifts) & 1).astype(np.uint8))
    few = np.asarray(labels, dtype=np.uint8).reshape(-1)
    if width in (1, 8):
        return np.packbits(few) if width == 1 else few
    if width == 4:
        return _pairs(few)
    return _words(few, width)[: packed_size(few.size, num_classes)]


def _pairs(labels: Array) -> Array:
    """Return two labels a byte, the first in the upper half."""
    packed = labels[::2] << 4
    packed[: labels.size // 2] |= labels[1::2] & 15
    return packed


def _words(labels: Array, width: int) -> Array:
    """Return eight labels of so many bits in as many bytes, by words of 64 bits."""
    padded = np.zeros((math.ceil(labels.size / 8), 8), dtype=np.uint8)
    padded.reshape(-1)[: labels.size] = labels
    words = np.zeros(len(padded), dtype=np.uint64)
    for place in range(8):
        words <<= np.uint64(width)
        words |= padded[:, place]
    return words.astype(">u8").view(np.uint8).reshape(-1, 8)[:, 8 - width :].reshape(-1)


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
    labels = _unpacked(packed, count, width)
    if count and labels.max() >= num_classes:
        raise KnowledgeMismatch(
            f"{name}: values must be below {num_classes}, got {labels.max()}."
        )
    return labels.reshape(shape)


def _unpacked(packed: Array, count: int, width: int) -> IntArray:
    if width == 8:
        return packed.astype(np.int64)
    if width == 1:
        return np.unpackbits(packed, count=count).astype(np.int64)
    if width > 8:
        bits = np.unpackbits(packed, count=count * width).reshape(count, width)
        weights = 1 << np.arange(width - 1, -1, -1, dtype=np.int64)
        return np.asarray(bits @ weights)
    num_words = math.ceil(count / 8)
    bytes_of_words = np.zeros((num_words, 8), dtype=np.uint8)
    padded = np.zeros(num_words * width, dtype=np.uint8)
    padded[: packed.size] = packed
    bytes_of_words[:, 8 - width :] = padded.reshape(num_words, width)
    words = bytes_of_words.view(">u8").reshape(-1).astype(np.uint64)
    labels = np.empty((num_words, 8), dtype=np.int64)
    for place in range(8):
        labels[:, place] = (words >> np.uint64(width * (7 - place))) & np.uint64(2**width - 1)
    return labels.reshape(-1)[:count]
