"""Training of a small convolutional network, compiled for the processor it runs on.

One call trains one model for an epoch. Blocks of a 5 x 5 convolution, ReLU and 2 x 2 pooling
are computed with the images of a batch side by side (`clients/image_kernels.py`), the dense
layers behind them row by row (`clients/dense_kernels.py`, where the blocks count as the first
layer). Between steps nothing goes back to Python, which takes longer for a batch of small
images than all their products.
"""

from typing import Final, NamedTuple

import numpy as np

from clients.compiling import fast_compiled, fast_part
from clients.dense_kernels import ONE, Layers, Learned, Scratch, Steps, adam, step_later
from clients.dense_losses import Goal
from clients.image_kernels import TAPS, convolve, filter_gradients, pool, pool_gradients
from clients.lanes import WIDTH, load
from fl_strategies.arrays import Array

SEEN, FILTERED, POOLED, FILTERED_SLOPES, BORDERED_SLOPES, POOLED_SLOPES = range(6)
"""What a block has room for."""

_ZERO: Final = np.float32(0)


class Blocks(NamedTuple):
    """Sizes of every block, int64 (B,), and where its parts are in flat arrays."""

    channels: Array
    height: Array
    width: Array
    padding: Array
    filters: Array
    """How many."""
    weights: Array
    biases: Array
    room: Array
    """int64 (B, 6): where its images of every kind are, for one image a batch."""


class Space(NamedTuple):
    """Space for one step, of any model of an architecture."""

    images: Array
    turned: Array
    none: Array
    """Biases of 0."""
    gradients: Array


@fast_compiled
def train_images(
    rows: Array,
    goal: Goal,
    blocks: Blocks,
    filters: Learned,
    layers: Layers,
    learned: Learned,
    order: Array,
    stops: Array,
    steps: Steps,
    scratch: Scratch,
    space: Space,
) -> None:
    """Take the steps of an epoch: batches of rows in this order, up to these stops."""
    start, last = 0, len(blocks.filters) - 1
    for step in range(len(stops)):
        batch = order[start : stops[step]]
        start = stops[step]
        pace = steps.rates[step], steps.roots[step], steps.decay
        _gather(rows, batch, blocks, space)
        for block in range(last + 1):
            _see(block, len(batch), blocks, filters.values, space)
        _turn(_images(POOLED, last, len(batch), blocks, space), layers, scratch.results)
        step_later(goal, batch, layers, learned, pace, scratch)
        given = _images(POOLED_SLOPES, last, len(batch), blocks, space)
        _turn_back(scratch.slopes, layers, given)
        for block in range(last, -1, -1):
            _correct(block, len(batch), blocks, filters.values, space)
        for at in range(0, len(filters.values), WIDTH):
            adam(filters, at, load(ONE, space.gradients, at), pace)


@fast_part
def _images(kind: int, block: int, batch: int, blocks: Blocks, space: Space) -> Array:
    """Return the images of a kind, (1, channels, height, width * batch)."""
    padding, channels = blocks.padding[block], blocks.filters[block]
    cut = TAPS - 1 - 2 * padding
    height, width = blocks.height[block] - cut, blocks.width[block] - cut
    if kind == SEEN:
        channels, height = blocks.channels[block], blocks.height[block]
        width = blocks.width[block] + 2 * padding
    elif kind in (POOLED, POOLED_SLOPES):
        height, width = height // 2, width // 2
    elif kind == BORDERED_SLOPES:
        width += 2 * (TAPS - 1 - padding)
    start, length = blocks.room[block, kind] * batch, width * batch
    flat = space.images[start : start + channels * height * length]
    return flat.reshape((1, channels, height, length))


@fast_part
def _gather(rows: Array, batch: Array, blocks: Blocks, space: Space) -> None:
    """Lay the rows of a batch side by side, pixel by pixel, between borders of zeros."""
    seen = _images(SEEN, 0, len(batch), blocks, space)
    count, height, width = len(batch), blocks.height[0], blocks.width[0]
    border = blocks.padding[0] * count
    for line in range(seen.shape[1] * height):
        out = seen[0, line // height, line % height]
        out[:border] = _ZERO
        out[len(out) - border :] = _ZERO
        for r in range(count):
            row = rows[batch[r], line * width : (line + 1) * width]
            for j in range(width):
                out[border + j * count + r] = row[j]


@fast_part
def _see(block: int, batch: int, blocks: Blocks, values: Array, space: Space) -> None:
    """Write what a block makes of its images, and give it to the next."""
    filtered = _images(FILTERED, block, batch, blocks, space)
    pooled = _images(POOLED, block, batch, blocks, space)
    filters, biases = _filters(block, blocks, values)
    seen = _images(SEEN, block, batch, blocks, space)
    convolve(seen, filters, biases, blocks.padding[block], filtered, batch)
    pool(filtered, _ZERO, pooled, batch)
    if block + 1 < len(blocks.filters):
        following = _images(SEEN, block + 1, batch, blocks, space)
        _put(pooled, following, blocks.padding[block + 1] * batch)


@fast_part
def _correct(block: int, batch: int, blocks: Blocks, values: Array, space: Space) -> None:
    """Write the gradients of a block, and the slopes of what the block before it gave."""
    filtered = _images(FILTERED, block, batch, blocks, space)
    slopes = _images(FILTERED_SLOPES, block, batch, blocks, space)
    pooled = _images(POOLED, block, batch, blocks, space)
    given = _images(POOLED_SLOPES, block, batch, blocks, space)
    if slopes.shape[2] % 2 or slopes.shape[3] // batch % 2:
        slopes[:] = _ZERO  # pixels of an odd last row or column are in no pool
    pool_gradients(filtered, pooled, _ZERO, given, slopes, batch)
    seen, padding = _images(SEEN, block, batch, blocks, space), blocks.padding[block]
    found, sums = _filters(block, blocks, space.gradients)
    filter_gradients(seen, slopes, padding, found, sums, batch)
    if block == 0:
        return
    border = TAPS - 1 - padding
    bordered = _images(BORDERED_SLOPES, block, batch, blocks, space)
    _put(slopes, bordered, border * batch)
    filters, _ = _filters(block, blocks, values)
    turned = _turned(filters, space.turned)
    before = _images(POOLED_SLOPES, block - 1, batch, blocks, space)
    convolve(bordered, turned, space.none, border, before, batch)


@fast_part
def _filters(block: int, blocks: Blocks, flat: Array) -> tuple[Array, Array]:
    """Return the filters (1, outputs, channels, 5, 5) and the biases of a block."""
    outputs, channels = blocks.filters[block], blocks.channels[block]
    start = blocks.weights[block]
    filters = flat[start : start + outputs * channels * TAPS * TAPS]
    start = blocks.biases[block]
    shape = (1, outputs, channels, TAPS, TAPS)
    return filters.reshape(shape), flat[start : start + outputs].reshape((1, outputs))


@fast_part
def _turned(filters: Array, space: Array) -> Array:
    """Return filters upside down, with outputs and channels exchanged."""
    outputs, channels = filters.shape[1], filters.shape[2]
    flat = space[: outputs * channels * TAPS * TAPS]
    turned = flat.reshape((1, channels, outputs, TAPS, TAPS))
    for o in range(outputs):
        for c in range(channels):
            for i in range(TAPS):
                for j in range(TAPS):
                    turned[0, c, o, i, j] = filters[0, o, c, TAPS - 1 - i, TAPS - 1 - j]
    return turned


@fast_part
def _put(images: Array, bordered: Array, border: int) -> None:
    """Copy images between borders of zeros."""
    length = images.shape[3]
    for c in range(images.shape[1]):
        for i in range(images.shape[2]):
            source, target = images[0, c, i], bordered[0, c, i]
            target[:border] = _ZERO
            for t in range(length):
                target[border + t] = source[t]
            target[border + length :] = _ZERO


@fast_part
def _turn(images: Array, layers: Layers, results: Array) -> None:
    """Write images side by side as rows, the results of the first layer."""
    size, width = layers.units[0], layers.widths[0]
    flat = images.reshape(images.size)
    batch = len(flat) // size
    for k in range(size):
        for r in range(batch):
            results[layers.results[0] + r * width + k] = flat[k * batch + r]


@fast_part
def _turn_back(slopes: Array, layers: Layers, images: Array) -> None:
    """Write the slopes of rows as images side by side."""
    size, width = layers.units[0], layers.widths[0]
    flat = images.reshape(images.size)
    batch = len(flat) // size
    for k in range(size):
        for r in range(batch):
            flat[k * batch + r] = slopes[layers.results[0] + r * width + k]
