"""Models trained by compiled kernels, one after the other, each for an epoch a call."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np

from clients.torch_perceptrons import PerceptronStack
from clients.torch_stacks import Stack
from clients.torch_stopping import EarlyStopping
from clients.torch_training import TASK_LOSSES, BatchLoss, RecipeLoss, batch_stops
from fl_strategies.arrays import Array, FloatArray, IntArray
from fl_strategies.core.protocols import TrainingSet
from fl_strategies.exceptions import MissingExtra
from fl_strategies.progress import counted

if TYPE_CHECKING:
    from clients.dense_kernels import Layers, Learned, Rows, Scratch, Steps
    from clients.dense_losses import Goal

VECTOR: Final = 16
MOST_VECTORS: Final = 8  # sums that registers hold beside what they are made of
LARGEST_LAYER: Final = 2**20  # weights of a later layer; PyTorch is better at larger ones
LARGE_BATCH: Final = 128
FEW_INPUTS: Final = 128
BETAS: Final = 0.9, 0.999  # of Adam, as the kernels have them


class CompiledModels(ABC):
    """Models that kernels train, one after the other, each with its own training set.

    What a model learns does not depend on the others to the bit.
    """

    def __init__(self, stack: Stack, batch_size: int, weight_decay: float) -> None:
        self._stack, self._batch_size = stack, batch_size
        self._decay = np.float32(weight_decay)

    def train(
        self,
        rates: FloatArray,
        rngs: Sequence[np.random.Generator],
        watch: EarlyStopping | None = None,
    ) -> None:
        """Train at the learning rates (epochs, steps), each model until it has stopped."""
        active = list(range(len(rngs)))
        for epoch in counted(range(len(rates)), "epochs"):
            steps = self._steps(rates[epoch], epoch)
            for i in active:
                self._train_epoch(i, steps, rngs[i])
            if watch is not None:
                self._write_back(active)
                if watch.ends(self._stack):
                    break
                active = [i for i in active if not watch.has_stopped(i)]
        self._write_back(active)

    def _steps(self, rates: FloatArray, epoch: int) -> "Steps":
        """Return the step sizes of an epoch with Adam's corrections."""
        from clients.dense_kernels import Steps

        count = np.arange(1, len(rates) + 1) + epoch * len(rates)
        of_mean, of_square = (1 - beta**count for beta in BETAS)
        sizes, roots = rates / of_mean, 1 / np.sqrt(of_square)
        return Steps(sizes.astype(np.float32), roots.astype(np.float32), self._decay)

    def _batches(self, size: int, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Return the rows of an epoch in their order, and where every batch ends."""
        return rng.permutation(size), batch_stops(size, self._batch_size)

    def _read(self, num_models: int) -> None:
        """Begin with the stack's values."""
        for i in range(num_models):
            for own, theirs in self._pairs(i):
                own[...] = theirs

    def _write_back(self, models: Iterable[int]) -> None:
        for i in models:
            for own, theirs in self._pairs(i):
                theirs[...] = own

    @abstractmethod
    def _train_epoch(self, model: int, steps: "Steps", rng: np.random.Generator) -> None:
        """Train a model for an epoch."""

    @abstractmethod
    def _pairs(self, model: int) -> Iterable[tuple[Array, Array]]:
        """Yield every part of a model as the kernels and as the stack have it."""


class _Model(NamedTuple):
    rows: "Rows"
    goal: "Goal"
    learned: "Learned"


class CompiledPerceptrons(CompiledModels):
    """The perceptrons of a stack, each with its own training set, trained by Adam.

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
        from clients.sparse_rows import sparse_rows

        super().__init__(stack, batch_size, weight_decay)
        self._perceptrons, longest = stack, longest_batch(sets, batch_size)
        shapes = [(len(biases), weights.shape[1]) for weights, biases in stack.layers_of(0)]
        self._strip, width = _strip_and_width(shapes[0][0])
        self._layers = lay_out(shapes, stack.has_relu, longest, width)
        rows = {key: sparse_rows(x) for key, x in distinct(sets).items()}
        self._models = [
            _Model(rows[id(x)], goal_of(loss, targets), new_state(size_of(self._layers)))
            for x, targets in sets
        ]
        found = max(_most_found(each.starts, longest) for each in rows.values())
        self._scratch = new_scratch(self._layers, longest, shapes[0][1], found)
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
        """Return what trains these, or nothing unless the kernels can and are faster."""
        if not isinstance(stack, PerceptronStack) or not have_kernels():
            return None
        known = kind_of(loss) is not None and _fits(stack, sets)
        if not known or not all(_pays(x, batch_size) for x in distinct(sets).values()):
            return None
        return cls(stack, sets, loss, batch_size=batch_size, weight_decay=weight_decay)

    def _train_epoch(self, model: int, steps: "Steps", rng: np.random.Generator) -> None:
        from clients.dense_kernels import train

        rows, goal, learned = self._models[model]
        batches = self._batches(len(rows.starts) - 1, rng)
        layers, scratch = self._layers, self._scratch
        train(self._strip, rows, goal, learned, *batches, layers, steps, scratch)

    def _pairs(self, model: int) -> Iterable[tuple[Array, Array]]:
        """Yield every part of a model as the kernels and as the stack have it."""
        layers, values = self._layers, self._models[model].learned.values
        for i, (weights, biases) in enumerate(self._perceptrons.layers_of(model)):
            yield from layer_pairs(layers, values, i, weights.numpy(), biases.numpy())


def have_kernels() -> bool:
    """Tell whether Numba is there."""
    try:
        from clients import dense_kernels  # noqa: F401
    except MissingExtra:
        return False
    return True


def longest_batch(sets: Sequence[TrainingSet], batch_size: int) -> int:
    """Return the most rows of a step: a last one joins the batch before it."""
    return min(batch_size + 1, max(len(x) for x, _ in sets))


def distinct(sets: Sequence[TrainingSet]) -> Mapping[int, Array]:
    """Return every array of rows once."""
    return {id(x): x for x, _ in sets}


def _fits(stack: PerceptronStack, sets: Sequence[TrainingSet]) -> bool:
    """Tell whether rows have the stack's inputs, and layers are small enough."""
    first, *later = (weights.shape for weights, _ in stack.layers_of(0))
    small = all(math.prod(shape) <= LARGEST_LAYER for shape in later)
    return small and all(math.prod(x.shape[1:]) == first[1] for x, _ in sets)


def _pays(x: Array, batch_size: int) -> bool:
    """Tell whether so few numbers differ from the others that PyTorch is slower."""
    from clients.sparse_rows import share_of_others

    if batch_size > LARGE_BATCH:
        return share_of_others(x) <= 0.25
    return math.prod(x.shape[1:]) <= FEW_INPUTS or share_of_others(x) <= 0.5


def kind_of(loss: BatchLoss) -> tuple[int, bool, float] | None:
    """Return the kind of a loss, whether of shares, and its temperature, if it is known."""
    from clients.dense_losses import L1, L2, LABELS, SHARES, SQUARES

    if loss is TASK_LOSSES["single-label"]:
        return LABELS, False, 1.0
    if loss is TASK_LOSSES["regression"]:
        return SQUARES, False, 1.0
    if not isinstance(loss, RecipeLoss) or loss.recipe.link == "sigmoid":
        return None
    recipe = loss.recipe
    kinds = {"cross-entropy": SHARES, "l1": L1, "l2": L2, "mse": SQUARES}
    return kinds[recipe.loss], recipe.link == "softmax", recipe.temperature


def goal_of(loss: BatchLoss, targets: Array) -> "Goal":
    """Return what is to be learned as kernels take it."""
    from clients.dense_losses import LABELS, Goal

    kind, of_shares, temperature = kind_of(loss) or (LABELS, False, 1.0)
    labels, soft = np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.float32)
    if kind == LABELS:
        labels = np.ascontiguousarray(targets)
    else:
        soft = np.ascontiguousarray(targets)
    return Goal(kind, of_shares, np.float32(temperature), labels, soft)


def _strip_and_width(units: int) -> tuple[tuple[int, ...], int]:
    """Return the strip of a first layer, and its units in whole strips."""
    vectors = math.ceil(units / VECTOR)
    blocks = math.ceil(vectors / MOST_VECTORS)
    strip = (0,) * math.ceil(vectors / blocks)
    return strip, VECTOR * blocks * len(strip)


def lay_out(
    shapes: Sequence[tuple[int, int]],
    has_relu: Sequence[bool],
    num_rows: int,
    first_width: int,
) -> "Layers":
    """Return where everything lies for so many rows, of layers of (units, inputs) each."""
    from clients.dense_kernels import ROWS_AT_ONCE, Layers

    units, inputs = np.array(shapes, dtype=np.int64).T.copy()
    widths = _rounded(units, VECTOR)
    widths[0] = first_width
    before = np.append(inputs[:1], widths[:-1])
    ends = np.cumsum(np.stack([before * widths, widths], axis=1)).reshape(-1, 2)
    return Layers(
        inputs=inputs,
        units=units,
        widths=widths,
        floors=np.where(has_relu, 0, -np.inf).astype(np.float32),
        weights=ends[:, 0] - before * widths,
        biases=ends[:, 0].copy(),
        results=_starts(_rounded(num_rows, ROWS_AT_ONCE) * widths),
        turned=_starts(np.append(0, widths[1:] * widths[:-1])),
    )


def new_state(size: int) -> "Learned":
    """Return zeros for so many weights and their moments."""
    from clients.dense_kernels import Learned

    return Learned(*(aligned(size) for _ in range(3)))


def size_of(layers: "Layers") -> int:
    """Return how many weights and biases layers have, rounded up."""
    return int(layers.biases[-1] + layers.widths[-1])


def new_scratch(layers: "Layers", num_rows: int, num_inputs: int, most_found: int) -> "Scratch":
    """Return space for a step of so many rows."""
    from clients.dense_kernels import ROWS_AT_ONCE, Scratch

    results = layers.results[-1] + _rounded(num_rows, ROWS_AT_ONCE) * layers.widths[-1]
    return Scratch(
        results=aligned(results),
        slopes=aligned(results),
        turned=aligned((layers.widths[1:] * layers.widths[:-1]).sum()),
        sums=aligned(2 * layers.widths.max()),
        ends=np.zeros(num_inputs, dtype=np.uint32),
        holders=np.zeros(most_found, dtype=np.uint32),
        found=np.zeros(most_found, dtype=np.float32),
    )


def layer_pairs(
    layers: "Layers", values: FloatArray, number: int, weights: Array, biases: Array
) -> Iterator[tuple[Array, Array]]:
    """Yield weights (units, inputs) and biases as kernels and as PyTorch have them."""
    units, inputs = weights.shape
    matrix = values[layers.weights[number] :][: inputs * layers.widths[number]]
    yield matrix.reshape(inputs, -1)[:, :units].T, weights
    yield values[layers.biases[number] :][:units], biases


def _most_found(starts: Array, num_rows: int) -> int:
    """Return how many numbers of so many rows can differ from the background."""
    return min(int(starts[-1]), num_rows * int(np.diff(starts).max()))


def aligned(size: int) -> FloatArray:
    """Return zeros that begin where a line of the cache does, so that no vector is in two."""
    raw = np.zeros(size + VECTOR, dtype=np.float32)
    start = -(raw.ctypes.data // raw.itemsize) % VECTOR
    return raw[start : start + size]


def _rounded(number: IntArray | int, multiple: int) -> IntArray:
    return -(-np.asarray(number) // multiple) * multiple


def _starts(sizes: IntArray) -> IntArray:
    return np.cumsum(sizes) - sizes
