"""Perceptrons trained by compiled kernels, one after the other, each for an epoch a call.

The kernels take sparse rows: without what most rows have in a column, most often zeros. This
module needs Numba; `find_trainer` is its only door.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from clients.compiled.dense import (
    L1,
    L2,
    LABELS,
    ROWS_AT_ONCE,
    SHARES,
    SQUARES,
    Goal,
    Layers,
    Learned,
    Rows,
    Scratch,
    Steps,
    count_others,
    list_others,
    train,
)
from clients.networks.stacks import PerceptronStack
from clients.networks.training import (
    TASK_LOSSES,
    BatchLoss,
    EarlyStopping,
    RecipeLoss,
    as_float32,
    batch_stops,
)
from fl_strategies._util import Array, FloatArray, IntArray, counted
from fl_strategies.learners import TrainingSet

ROWS_PER_CHUNK: Final = 512
MOST_ASKED: Final = 63
FEW_ASKED: Final = 15
TOO_LARGE: Final = 4


def share_of_others(x: Array) -> float:
    """Return the share of numbers that differ from the background, by some of the rows."""
    asked = _some(x)
    return float((asked != _background(asked)).mean())


def sparse_rows(x: Array) -> Rows:
    """Return rows (n, ...) as float32 and flat; refuse numbers beyond its range."""
    background = _background(_some(x))
    counts = np.empty(len(x), dtype=np.int64)
    places, values = [], []
    for start in range(0, len(x), ROWS_PER_CHUNK):
        rows = _flat(x[start : start + ROWS_PER_CHUNK])
        own = counts[start : start + ROWS_PER_CHUNK]
        count_others(rows, background, own)
        found = int(own.sum())
        places.append(np.empty(found + 1, dtype=np.uint32))
        values.append(np.empty(found + 1, dtype=np.float32))
        list_others(rows, background, places[-1], values[-1])
    starts = np.append(0, np.cumsum(counts)).astype(np.uint64)
    # The last number of each part is one that `list_others` may waste.
    at, others = (np.concatenate([part[:-1] for part in parts]) for parts in (places, values))
    return Rows(starts, at, others, background)


def _flat(x: Array) -> FloatArray:
    return as_float32("x", [x]).reshape(len(x), -1)


def _some(x: Array) -> FloatArray:
    """Return an odd number of rows from all over a set."""
    count = min(MOST_ASKED, (len(x) - 1) // 2 * 2 + 1)
    return _flat(x[np.linspace(0, len(x) - 1, count).astype(np.int64)])


def _background(rows: FloatArray) -> FloatArray:
    """Return the number that most rows have in a column, 0 where there is none.

    If more than half of an odd number are equal, their median is what they are. Numbers far
    above all others are skipped: a difference to them would have no digits of the others.
    Few rows have none: what they have in common would be rounding to Adam, which takes the
    smallest slopes for large if it has seen no others.
    """
    background = np.zeros(rows.shape[1], dtype=np.float32)
    if len(rows) < FEW_ASKED:
        return background
    rest = 2 * (rows == 0).sum(axis=0) <= len(rows)
    middle = np.median(rows[:, rest], axis=0)
    common = 2 * (rows[:, rest] == middle).sum(axis=0) > len(rows)
    background[rest] = np.where(common, middle, 0)
    largest = np.abs(rows, where=rows != background, out=np.zeros_like(rows)).max(initial=0)
    background[np.abs(background) > TOO_LARGE * largest] = 0
    return background


VECTOR: Final = 16
MOST_VECTORS: Final = 8  # sums that registers hold beside what they are made of
LARGEST_LAYER: Final = 2**20  # weights of a later layer; PyTorch is better at larger ones
LARGE_BATCH: Final = 128
FEW_INPUTS: Final = 128
BETAS: Final = 0.9, 0.999  # of Adam, as the kernels have them


def find_trainer(
    stack: PerceptronStack,
    sets: Sequence[TrainingSet],
    loss: BatchLoss,
    *,
    batch_size: int,
    weight_decay: float,
) -> "CompiledPerceptrons | None":
    """Return what trains the stack, None unless the kernels can and are faster."""
    first, *later = (weights.shape for weights, _ in stack.layers_of(0))
    small = all(math.prod(shape) <= LARGEST_LAYER for shape in later)
    fits = small and all(math.prod(x.shape[1:]) == first[1] for x, _ in sets)
    if not fits or _kind(loss) is None:
        return None
    # Where few numbers differ from the others; below, Python takes longer than the products.
    most, narrow = (0.25, 0) if batch_size > LARGE_BATCH else (0.5, FEW_INPUTS)
    for x in {id(x): x for x, _ in sets}.values():
        if math.prod(x.shape[1:]) > narrow and share_of_others(x) > most:
            return None
    return CompiledPerceptrons(
        stack, sets, loss, batch_size=batch_size, weight_decay=weight_decay
    )


class _Model(NamedTuple):
    rows: Rows
    goal: Goal
    learned: Learned


class CompiledPerceptrons:
    """The perceptrons of a stack, each with its own training set, trained by Adam.

    What a model learns does not depend on the others to the bit.

    Parameters
    ----------
    stack : PerceptronStack
        Gets the trained values.
    sets : sequence of (x, targets)
    loss : callable
        One that kernels know.
    batch_size : int
    weight_decay : float
    """

    def __init__(
        self,
        stack: PerceptronStack,
        sets: Sequence[TrainingSet],
        loss: BatchLoss,
        *,
        batch_size: int,
        weight_decay: float,
    ) -> None:
        self._stack, self._batch_size = stack, batch_size
        self._decay = np.float32(weight_decay)
        longest = min(batch_size + 1, max(len(x) for x, _ in sets))
        self._layers, self._strip = _layers(stack, longest)
        rows = {key: sparse_rows(x) for key, x in {id(x): x for x, _ in sets}.items()}
        size = self._layers.biases[-1] + self._layers.widths[-1]
        self._models = [
            _Model(
                rows[id(x)], _goal(loss, targets), Learned(*(_aligned(size) for _ in range(3)))
            )
            for x, targets in sets
        ]
        self._scratch = _scratch(self._layers, rows.values(), longest)
        for i in range(len(sets)):
            for own, theirs in self._pairs(i):
                own[...] = theirs

    def train(
        self,
        rates: FloatArray,
        rngs: Sequence[np.random.Generator],
        watch: EarlyStopping | None = None,
    ) -> None:
        """Train at the learning rates (epochs, steps), each model until it has stopped."""
        active = list(range(len(rngs)))
        for epoch in counted(range(len(rates)), "epochs"):
            # Adam's corrections are part of the step sizes.
            count = np.arange(1, len(rates[epoch]) + 1) + epoch * len(rates[epoch])
            of_mean, of_square = (1 - beta**count for beta in BETAS)
            sizes, roots = rates[epoch] / of_mean, 1 / np.sqrt(of_square)
            steps = Steps(sizes.astype(np.float32), roots.astype(np.float32), self._decay)
            for i in active:
                model, size = self._models[i], len(self._models[i].rows.starts) - 1
                stops, order = batch_stops(size, self._batch_size), rngs[i].permutation(size)
                train(self._strip, *model, order, stops, self._layers, steps, self._scratch)
            if watch is not None:
                self._write_back(active)
                if watch.ends(self._stack):
                    break
                active = [i for i in active if not watch.has_stopped(i)]
        self._write_back(active)

    def _write_back(self, models: Iterable[int]) -> None:
        for i in models:
            for own, theirs in self._pairs(i):
                theirs[...] = own

    def _pairs(self, model: int) -> Iterable[tuple[Array, Array]]:
        """Yield every part of a model as the kernels and as the stack have it."""
        layers, values = self._layers, self._models[model].learned.values
        for i, (weights, biases) in enumerate(self._stack.layers_of(model)):
            units, inputs = weights.shape
            matrix = values[layers.weights[i] :][: inputs * layers.widths[i]]
            yield matrix.reshape(inputs, -1)[:, :units].T, weights.numpy()
            yield values[layers.biases[i] :][:units], biases.numpy()


def _kind(loss: BatchLoss) -> tuple[int, bool, float] | None:
    """Return the kind of a loss, whether of shares, and its temperature, if it is known."""
    if loss is TASK_LOSSES["single-label"]:
        return LABELS, False, 1.0
    if loss is TASK_LOSSES["regression"]:
        return SQUARES, False, 1.0
    if not isinstance(loss, RecipeLoss) or loss.recipe.link == "sigmoid":
        return None
    recipe = loss.recipe
    kinds = {"cross-entropy": SHARES, "l1": L1, "l2": L2, "mse": SQUARES}
    return kinds[recipe.loss], recipe.link == "softmax", recipe.temperature


def _goal(loss: BatchLoss, targets: Array) -> Goal:
    kind, of_shares, temperature = _kind(loss) or (LABELS, False, 1.0)
    labels, soft = np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.float32)
    if kind == LABELS:
        labels = np.ascontiguousarray(targets)
    else:
        soft = np.ascontiguousarray(targets)
    return Goal(kind, of_shares, np.float32(temperature), labels, soft)


def _layers(stack: PerceptronStack, num_rows: int) -> tuple[Layers, tuple[int, ...]]:
    """Return where everything lies for so many rows, and the strip of the first layer."""
    shapes = [weights.shape for weights, _ in stack.layers_of(0)]
    units, inputs = np.array(shapes, dtype=np.int64).T.copy()
    widths = _rounded(units, VECTOR)
    blocks = math.ceil(widths[0] / (VECTOR * MOST_VECTORS))
    strip = (0,) * math.ceil(widths[0] / (VECTOR * blocks))
    widths[0] = VECTOR * blocks * len(strip)
    before = np.append(inputs[:1], widths[:-1])
    ends = np.cumsum(np.stack([before * widths, widths], axis=1)).reshape(-1, 2)
    layers = Layers(
        inputs=inputs,
        units=units,
        widths=widths,
        floors=np.where(stack.has_relu, 0, -np.inf).astype(np.float32),
        weights=ends[:, 0] - before * widths,
        biases=ends[:, 0].copy(),
        results=_starts(_rounded(num_rows, ROWS_AT_ONCE) * widths),
        turned=_starts(np.append(0, widths[1:] * widths[:-1])),
    )
    return layers, strip


def _scratch(layers: Layers, sets: Iterable[Rows], num_rows: int) -> Scratch:
    results = layers.results[-1] + _rounded(num_rows, ROWS_AT_ONCE) * layers.widths[-1]
    # As many numbers of a batch can differ from the background.
    found = max(
        min(int(rows.starts[-1]), num_rows * int(np.diff(rows.starts).max())) for rows in sets
    )
    return Scratch(
        results=_aligned(results),
        slopes=_aligned(results),
        turned=_aligned((layers.widths[1:] * layers.widths[:-1]).sum()),
        sums=_aligned(2 * layers.widths.max()),
        ends=np.zeros(layers.inputs[0], dtype=np.uint32),
        holders=np.zeros(found, dtype=np.uint32),
        found=np.zeros(found, dtype=np.float32),
    )


def _aligned(size: int) -> FloatArray:
    """Return zeros that begin where a line of the cache does, so that no vector is in two."""
    raw = np.zeros(size + VECTOR, dtype=np.float32)
    start = -(raw.ctypes.data // raw.itemsize) % VECTOR
    return raw[start : start + size]


def _rounded(number: IntArray | int, multiple: int) -> IntArray:
    return -(-np.asarray(number) // multiple) * multiple


def _starts(sizes: IntArray) -> IntArray:
    return np.cumsum(sizes) - sizes
