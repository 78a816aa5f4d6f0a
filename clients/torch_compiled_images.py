"""Small convolutional networks trained by compiled kernels, each for an epoch a call."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from clients.torch_compiled import (
    VECTOR,
    CompiledModels,
    aligned,
    distinct,
    goal_of,
    kind_of,
    lay_out,
    layer_pairs,
    longest_batch,
    new_scratch,
    new_state,
    size_of,
)
from clients.torch_images import ImageStack
from clients.torch_training import BatchLoss, as_float32
from fl_strategies.arrays import Array, FloatArray, IntArray
from fl_strategies.core.protocols import TrainingSet
from fl_strategies.exceptions import MissingExtra

if TYPE_CHECKING:
    from clients.dense_kernels import Learned, Steps
    from clients.dense_losses import Goal
    from clients.image_training import Blocks, Space

try:
    from torch import nn
except ImportError as error:
    raise MissingExtra("TorchLearner", "torch", "torch") from error


class _Model(NamedTuple):
    rows: Array
    goal: "Goal"
    filters: "Learned"
    learned: "Learned"


class _Network(NamedTuple):
    """The names of convolutions and dense layers, and what they are."""

    convolutions: dict[str, Any]
    dense: dict[str, Any]
    has_relu: list[bool]


class CompiledImages(CompiledModels):
    """The convolutional networks of a stack, each with its own training set, trained by Adam.

    They are blocks of a convolution, ReLU and pooling, and then dense layers.

    Parameters
    ----------
    stack : ImageStack
        Gets the trained values.
    sets : sequence of (x, targets)
    loss : callable
        One that kernels know.
    batch_size : int
    weight_decay : float
    """

    def __init__(
        self,
        stack: ImageStack,
        sets: Sequence[TrainingSet],
        loss: BatchLoss,
        *,
        batch_size: int,
        weight_decay: float,
    ) -> None:
        super().__init__(stack, batch_size, weight_decay)
        self._images, self._network = stack, _network(stack)
        longest, (_, height, width) = longest_batch(sets, batch_size), sets[0][0].shape[1:]
        self._blocks = _blocks([*self._network.convolutions.values()], height, width)
        dense = [*self._network.dense.values()]
        features = dense[0].in_features
        shapes = [(features, 0), *((each.out_features, each.in_features) for each in dense)]
        has_relu = [False, *self._network.has_relu]
        self._layers = lay_out(shapes, has_relu, longest, _in_vectors(features))
        rows = {key: _flat(x) for key, x in distinct(sets).items()}
        size = _size_of(self._blocks)
        self._models = [
            _Model(
                rows[id(x)],
                goal_of(loss, targets),
                new_state(size),
                new_state(size_of(self._layers)),
            )
            for x, targets in sets
        ]
        self._scratch = new_scratch(self._layers, longest, 0, 0)
        self._space = _space(self._blocks, longest)
        self._read(len(sets))

    @classmethod
    def of(
        cls,
        stack: object,
        sets: Sequence[TrainingSet],
        loss: BatchLoss,
        *,
        batch_size: int,
        weight_decay: float,
    ) -> Self | None:
        """Return what trains these, or nothing unless the kernels can."""
        if not isinstance(stack, ImageStack) or kind_of(loss) is None or not _is_known(stack):
            return None
        if not all(_takes(_network(stack), x) for x, _ in sets):
            return None
        return cls(stack, sets, loss, batch_size=batch_size, weight_decay=weight_decay)

    def _train_epoch(self, model: int, steps: "Steps", rng: np.random.Generator) -> None:
        from clients.image_training import train_images

        rows, goal, filters, learned = self._models[model]
        train_images(
            rows,
            goal,
            self._blocks,
            filters,
            self._layers,
            learned,
            *self._batches(len(rows), rng),
            steps,
            self._scratch,
            self._space,
        )

    def _pairs(self, model: int) -> Iterable[tuple[Array, Array]]:
        theirs, (_, _, filters, learned) = self._images.values_of(model), self._models[model]
        for i, name in enumerate(self._network.convolutions):
            for start, part in (
                (self._blocks.weights[i], theirs[f"{name}.weight"]),
                (self._blocks.biases[i], theirs[f"{name}.bias"]),
            ):
                yield filters.values[start:][: part.size].reshape(part.shape), part
        for i, name in enumerate(self._network.dense, start=1):
            parts = theirs[f"{name}.weight"], theirs[f"{name}.bias"]
            yield from layer_pairs(self._layers, learned.values, i, *parts)


def _is_known(stack: ImageStack) -> bool:
    """Tell whether all parameters learn, and blocks come first and dense layers after them."""
    if not all(each.requires_grad for each in stack.parameters()):
        return False
    kinds = [type(layer) for _, layer in stack.layers()]
    cut = kinds.index(nn.Flatten)
    block: list[type[nn.Module]] = [nn.Conv2d, nn.ReLU, nn.MaxPool2d]
    dense = kinds[cut + 1 :]
    twice = (nn.ReLU, nn.ReLU) in itertools.pairwise(dense)
    return kinds[:cut] == block * (cut // 3) and dense[0] is nn.Linear and not twice


def _takes(network: _Network, x: Array) -> bool:
    """Tell whether a network takes such images; the kernels themselves check nothing."""
    if x.ndim != 4:
        return False
    channels, *sides = x.shape[1:]
    first, *_ = network.dense.values()
    for layer in network.convolutions.values():
        if layer.in_channels != channels:
            return False
        channels = layer.out_channels
        sides = [
            (side + 2 * layer.padding[0] - layer.kernel_size[0] + 1) // 2 for side in sides
        ]
    fits: bool = channels * math.prod(sides) == first.in_features
    return fits and min(sides) > 0


def _network(stack: ImageStack) -> _Network:
    layers = stack.layers()
    after = [type(layer) for _, layer in layers[1:]] + [None]
    return _Network(
        {name: layer for name, layer in layers if isinstance(layer, nn.Conv2d)},
        {name: layer for name, layer in layers if isinstance(layer, nn.Linear)},
        [
            following is nn.ReLU
            for (_, layer), following in zip(layers, after, strict=True)
            if isinstance(layer, nn.Linear)
        ],
    )


def _blocks(convolutions: Sequence[Any], height: int, width: int) -> "Blocks":
    """Return the sizes of blocks, the first of which takes images of this size."""
    from clients.image_kernels import TAPS
    from clients.image_training import Blocks

    sizes, room = [], []
    for layer in convolutions:
        padding, cut = layer.padding[0], TAPS - 1 - 2 * layer.padding[0]
        count = layer.out_channels
        sizes.append((layer.in_channels, height, width, padding, count))
        seen = layer.in_channels * height * (width + 2 * padding)
        height, width = height - cut, width - cut
        filtered, pooled = count * height * width, count * (height // 2) * (width // 2)
        bordered = count * height * (width + 2 * (TAPS - 1 - padding))
        room += [seen, filtered, pooled, filtered, bordered, pooled]
        height, width = height // 2, width // 2
    channels, heights, widths, paddings, filters = np.array(sizes, dtype=np.int64).T.copy()
    weights = channels * filters * TAPS * TAPS
    ends = np.cumsum(np.stack([weights, filters], axis=1)).reshape(-1, 2)
    return Blocks(
        channels=channels,
        height=heights,
        width=widths,
        padding=paddings,
        filters=filters,
        weights=ends[:, 0] - weights,
        biases=ends[:, 0].copy(),
        room=(np.cumsum(room) - room).reshape(len(sizes), -1),
    )


def _size_of(blocks: "Blocks") -> int:
    """Return how many weights and biases convolutions have, in whole vectors."""
    return _in_vectors(int(blocks.biases[-1] + blocks.filters[-1]))


def _in_vectors(number: int) -> int:
    return VECTOR * math.ceil(number / VECTOR)


def _space(blocks: "Blocks", batch: int) -> "Space":
    from clients.image_training import POOLED_SLOPES, Space

    last = blocks.filters[-1] * blocks.height[-1] * blocks.width[-1]  # and no more when pooled
    weights: IntArray = blocks.biases - blocks.weights
    return Space(
        images=aligned(int(blocks.room[-1, POOLED_SLOPES] + last) * batch),
        turned=aligned(int(weights.max())),
        none=aligned(int(blocks.channels.max()))[np.newaxis],
        gradients=aligned(_size_of(blocks)),
    )


def _flat(x: Array) -> FloatArray:
    """Return images as rows of float32."""
    rows: FloatArray = as_float32("x", [x]).reshape(len(x), -1)
    return rows
