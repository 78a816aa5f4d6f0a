"""PyTorch modules as learners, with ensembles trained as one stacked model.

Knowledge transfer trains many small models of one architecture: the teachers and students
of a party. One after the other they keep a processor waiting for Python, so twins whose
epochs take the same number of steps are stacked, and every step serves them all.

Training and evaluation use one thread: results are then the same bits whatever the number
of cores, a process forked from a threaded one cannot hang, and parties that run side by
side do not fight for cores.
"""

import copy
import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Final, Self, TypeAlias

import numpy as np

from fl_strategies.exceptions import (
    InvalidData,
    KnowledgeMismatch,
    MissingExtra,
    NotFitted,
    require,
    require_data,
)
from fl_strategies.party import check_labels, check_rows
from fl_strategies.protocols import Array, FloatArray, IntArray, TrainingSet

try:
    import torch
    from torch import Tensor, nn
    from torch.func import functional_call, stack_module_state, vmap
    from torch.nn.functional import cross_entropy
except ImportError as error:
    raise MissingExtra("TorchLearner", "torch", "torch") from error

RowLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]

OWNER: Final = "TorchLearner"
ROWS_PER_CHUNK: Final = 4096

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class TorchLearner:
    """A classifier made of any PyTorch module, trained by Adam on the processor.

    Parameters
    ----------
    module_fn : factory
        Builds a new module from float32 rows (n, ...) to logits (n, num_classes).
    num_classes : int
        Length of the federation's class list.
    epochs, batch_size : int
        Passes over the training rows, and rows per step. Every pass uses every row; a last
        batch of a single row joins the one before it, because batch normalisation cannot
        learn from one row.
    learning_rate, weight_decay : float
        Settings of Adam; the decay is an L2 penalty.

    Examples
    --------
    >>> x, y = np.repeat(np.eye(3), 20, axis=0), np.repeat(np.arange(3), 20)
    >>> learner = TorchLearner(lambda: nn.Linear(3, 3), num_classes=3, learning_rate=0.1)
    >>> learner.fit(x, y, rng=np.random.default_rng(0)).predict(np.eye(3))
    array([0, 1, 2])
    """

    module_fn: Callable[[], nn.Module]
    _: KW_ONLY
    num_classes: int
    epochs: int = 20
    batch_size: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    _module: nn.Module | None = field(default=None, init=False, repr=False)
    _row_shape: tuple[int, ...] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the settings."""
        require(callable(self.module_fn), OWNER, "module_fn", "callable", self.module_fn)
        for name, least in (("num_classes", 2), ("epochs", 1), ("batch_size", 1)):
            value = getattr(self, name)
            counts = isinstance(value, int | np.integer) and value >= least
            require(bool(counts), OWNER, name, f"a whole number, at least {least}", value)
        rate, decay = self.learning_rate, self.weight_decay
        require(0 < rate < math.inf, OWNER, "learning_rate", "finite and above 0", rate)
        require(0 <= decay < math.inf, OWNER, "weight_decay", "finite and at least 0", decay)

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:
        """Learn labels `y` (n,) of rows `x` (n, ...) with a newly initialised module."""
        x, y = self._checked_set(x, y)
        with _isolated(rng):
            module = self._new_module()
            self._evaluate(module, x[:1])  # names a misfit before training starts
            self._train(module.train(), [(x, y)], _label_loss, [rng])
        return self._keep(module, x.shape[1:])

    def fit_many(
        self, sets: Sequence[TrainingSet], *, rngs: Sequence[np.random.Generator]
    ) -> list[Self]:
        """Return one new fitted twin per training set; twin i uses `rngs[i]` only.

        A twin follows the path it would follow alone, up to the rounding of sums. Modules
        that cannot be stacked (with buffers, dropout, or operations that `vmap` lacks) are
        fitted one after the other. Sets that share one array `x` share it here as well.
        """
        rule = f"{len(sets)} generators, one a training set"
        require(len(rngs) == len(sets), OWNER, "rngs", rule, len(rngs))
        twins = [copy.copy(self) for _ in sets]
        groups = defaultdict(list)
        for twin, training_set, rng in zip(twins, sets, rngs, strict=True):
            x, y = self._checked_set(*training_set)
            pace = _num_steps(len(x), self.batch_size), x.shape[1:]
            groups[pace].append((twin, x, y, rng))
        for members in groups.values():
            self._fit_group(members)
        return twins

    def distill(self, x: Array, scores: FloatArray, *, rng: np.random.Generator) -> Self:
        """Learn to give `scores` (n, num_classes) as the logits of rows `x` (n, ...).

        The mean squared error is minimised, from what was learned before if anything was.
        """
        x, scores = self._checked_rows(x), np.asarray(scores)
        require_data(len(x) > 0, OWNER, "x", "at least one row", len(x))
        check_rows(OWNER, "scores", scores)
        shape = (len(x), self.num_classes)
        require_data(scores.shape == shape, OWNER, "scores", f"of shape {shape}", scores.shape)
        with _isolated(rng):
            module = self._new_module() if self._module is None else self._module
            self._evaluate(module, x[:1])
            sets = [(x, _as_float32("scores", [scores]))]
            self._train(module.train(), sets, _score_loss, [rng])
        return self._keep(module, x.shape[1:])

    def predict(self, x: Array) -> IntArray:
        """Return the most likely class of every row, (n,)."""
        return np.asarray(self.logits(x).argmax(axis=1))

    def logits(self, x: Array) -> FloatArray:
        """Return the module's output for rows `x` (n, ...), float32 (n, num_classes)."""
        module, x = self._fitted(), self._checked_rows(x)
        scores = np.empty((len(x), self.num_classes), dtype=np.float32)
        with _isolated():
            for start in range(0, len(x), ROWS_PER_CHUNK):
                chunk = slice(start, start + ROWS_PER_CHUNK)
                scores[chunk] = self._evaluate(module, x[chunk])
        return scores

    def to_arrays(self) -> dict[str, Array]:
        """Return copies of the module's parameters and buffers by name."""
        return {name: value.copy() for name, value in _state(self._fitted()).items()}

    def from_arrays(self, arrays: Mapping[str, Array]) -> Self:
        """Return a fitted twin; raise `KnowledgeMismatch` for arrays that do not fit."""
        with _isolated():
            module = self._new_module()
        _check_state(arrays, _state(module))
        module.load_state_dict({name: torch.tensor(arrays[name]) for name in arrays})
        return copy.copy(self)._keep(module, None)

    def _keep(self, module: nn.Module, row_shape: tuple[int, ...] | None) -> Self:
        self._module, self._row_shape = module.eval(), row_shape
        return self

    def _fitted(self) -> nn.Module:
        if self._module is None:
            raise NotFitted(f"{OWNER}: the learner must be fitted first, got no parameters.")
        return self._module

    def _new_module(self) -> nn.Module:
        module = self.module_fn()
        rule = "a factory of modules with trainable parameters"
        learns = isinstance(module, nn.Module) and any(
            p.requires_grad for p in module.parameters()
        )
        require(learns, OWNER, "module_fn", rule, module)
        return module

    def _checked_set(self, x: Array, y: Array) -> TrainingSet:
        x, y = np.asarray(x), np.asarray(y)
        check_rows(OWNER, "x", x)
        require_data(len(x) > 0, OWNER, "x", "at least one row", len(x))
        check_labels(OWNER, "y", y, len(x), self.num_classes)
        return x, y.astype(np.int64)

    def _checked_rows(self, x: Array) -> Array:
        x = np.asarray(x)
        check_rows(OWNER, "x", x)
        known = self._row_shape in (None, x.shape[1:])
        rule = f"rows of shape {self._row_shape}, like the training rows"
        require_data(known, OWNER, "x", rule, x.shape[1:])
        return x

    def _evaluate(self, module: nn.Module, x: Array) -> Array:
        rows = torch.from_numpy(_as_float32("x", [x]))
        try:
            with torch.no_grad():
                scores = module.eval()(rows)
        except (RuntimeError, ValueError, IndexError) as error:
            raise InvalidData(
                f"{OWNER}: x must be rows that the module takes, got shape {x.shape[1:]}. "
                f"PyTorch says: {str(error).partition(chr(10))[0]}"
            ) from error
        shape, expected = tuple(getattr(scores, "shape", ())), (len(x), self.num_classes)
        rule = f"a factory of modules with outputs of shape {expected}"
        require(shape == expected, OWNER, "module_fn", rule, shape)
        return np.asarray(scores)

    def _fit_group(
        self, members: Sequence[tuple[Self, Array, IntArray, np.random.Generator]]
    ) -> None:
        if len(members) == 1 or not self._stackable(members[0][1][:2]):
            for twin, x, y, rng in members:
                twin.fit(x, y, rng=rng)
            return
        modules = []
        for *_, rng in members:
            with _isolated(rng):
                modules.append(self._new_module())
        with _isolated():
            stack = _ModuleStack(modules)
            sets = [(x, y) for _, x, y, _ in members]
            self._train(stack, sets, _label_loss, [rng for *_, rng in members])
        stack.write_back()
        for (twin, x, *_), module in zip(members, modules, strict=True):
            twin._keep(module, x.shape[1:])

    def _stackable(self, x: Array) -> bool:
        """Try two stacked modules on rows `x`; buffers would mix what the twins saw."""
        rows = torch.from_numpy(_as_float32("x", [x, x]))
        with _isolated(), warnings.catch_warnings():
            warnings.simplefilter("error")  # vmap warns where it falls back to a loop
            try:
                modules = [self._new_module(), self._new_module()]
                scores = _ModuleStack(modules)(rows)
                torch.autograd.backward(scores.sum())
            except Exception as error:
                logger.debug("Twins are fitted one after the other: %s", error)
                return False
        fits = scores.shape == (len(rows), self.num_classes)
        return fits and not any(True for _ in modules[0].buffers())

    def _train(
        self,
        model: "nn.Module | _ModuleStack",
        sets: Sequence[tuple[Array, Array]],
        loss: RowLoss,
        rngs: Sequence[np.random.Generator],
    ) -> None:
        optimizer = torch.optim.Adam(
            model.parameters(), self.learning_rate, weight_decay=self.weight_decay, fused=True
        )
        batches = _TrainingData(sets).batches(self.epochs, self.batch_size, rngs)
        for rows, targets, weights in batches:
            optimizer.zero_grad()
            losses = loss(model(rows), targets)
            torch.autograd.backward((losses * weights).sum())
            optimizer.step()


class _ModuleStack:
    """K modules of one architecture as one: rows (K * n, ...), the first n for the first."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        # Batched products run faster, and fused Adam need not copy, when weights (out, in)
        # lie in memory as (in, out).
        self._parameters = {
            name: _swap_axes(value.detach()).contiguous().requires_grad_(value.requires_grad)
            for name, value in stack_module_state(modules)[0].items()
        }
        self._forward = vmap(lambda named, rows: functional_call(modules[0], named, (rows,)))

    def __call__(self, rows: Tensor) -> Tensor:
        named = {name: _swap_axes(value) for name, value in self._parameters.items()}
        stacked = rows.view(len(self._modules), -1, *rows.shape[1:])
        scores: Tensor = self._forward(named, stacked)
        return scores.flatten(0, 1)

    def parameters(self) -> Iterator[Tensor]:
        yield from self._parameters.values()

    @torch.no_grad()
    def write_back(self) -> None:
        """Give every module its trained parameters."""
        for i, module in enumerate(self._modules):
            for name, parameter in module.named_parameters():
                parameter.copy_(_swap_axes(self._parameters[name])[i])


class _TrainingData:
    """Training sets of K models, where rows that several models share are stored once."""

    def __init__(self, sets: Sequence[tuple[Array, Array]]) -> None:
        distinct = {id(x): x for x, _ in sets}
        end = dict(zip(distinct, np.cumsum([len(x) for x in distinct.values()]), strict=True))
        self._rows = torch.from_numpy(_as_float32("x", list(distinct.values())))
        self._targets = torch.from_numpy(np.concatenate([targets for _, targets in sets]))
        self._sizes = np.array([[len(x)] for x, _ in sets])
        self._first_rows = np.array([[end[id(x)]] for x, _ in sets]) - self._sizes
        self._first_targets = np.cumsum(self._sizes, axis=0) - self._sizes

    def batches(
        self, epochs: int, batch_size: int, rngs: Sequence[np.random.Generator]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield rows, targets and weights of every step, b for each model, (K * b, ...).

        A last batch is as long as the longest of all models, with weight 0 for what is
        beyond a model's own rows; the weights of a model sum to 1.
        """
        longest = int(self._sizes.max())
        last_start = (_num_steps(longest, batch_size) - 1) * batch_size
        stops = [*range(batch_size, last_start + 1, batch_size), longest]
        weights = self._weights(batch_size, last_start)
        order = np.zeros((len(rngs), longest), dtype=np.int64)
        for _ in range(epochs):
            for mine, size, rng in zip(order, self._sizes[:, 0], rngs, strict=True):
                mine[:size] = rng.permutation(size)
            at_row = torch.from_numpy(order + self._first_rows)
            at_target = torch.from_numpy(order + self._first_targets)
            for step, stop in enumerate(stops):
                now = np.s_[:, step * batch_size : stop]
                rows = self._rows.index_select(0, at_row[now].flatten())
                yield rows, self._targets[at_target[now].flatten()], weights[now].flatten()

    def _weights(self, batch_size: int, last_start: int) -> Tensor:
        position = np.arange(self._sizes.max())
        last = np.where(position < self._sizes, 1 / (self._sizes - last_start), 0)
        weights = np.where(position < last_start, 1 / batch_size, last)
        return torch.from_numpy(weights.astype(np.float32))


_label_loss: RowLoss = partial(cross_entropy, reduction="none")


def _score_loss(logits: Tensor, scores: Tensor) -> Tensor:
    return (logits - scores).square().mean(dim=1)


def _num_steps(num_rows: int, batch_size: int) -> int:
    """Return the steps of an epoch; a single last row joins the batch before it."""
    steps = math.ceil(num_rows / batch_size)
    return steps - 1 if steps > 1 and num_rows % batch_size == 1 else steps


def _swap_axes(stacked: Tensor) -> Tensor:
    """Transpose the matrices of a stack (K, rows, columns); leave other shapes alone."""
    return stacked.mT if stacked.ndim == 3 else stacked


def _as_float32(name: str, parts: Sequence[Array]) -> Array:
    """Return a new float32 array of all parts; refuse numbers beyond its range."""
    with np.errstate(over="ignore"):
        joined = np.concatenate(parts, dtype=np.float32, casting="same_kind")
    if any(part.dtype.itemsize > joined.dtype.itemsize for part in parts):
        check_rows(OWNER, f"{name} as float32", joined)
    return joined


def _state(module: nn.Module) -> dict[str, Array]:
    return {name: value.numpy() for name, value in module.state_dict().items()}


def _check_state(arrays: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    for name in sorted(arrays.keys() ^ expected.keys(), key=str):
        rule = "given, got none" if name in expected else "left out, got one"
        raise KnowledgeMismatch(f"{OWNER}: array {str(name)[:80]!r} must be {rule}.")
    for name, value in expected.items():
        given, rule = np.asarray(arrays[name]), f"{value.dtype} of shape {value.shape}"
        got = f"{given.dtype} of shape {given.shape}"
        if got == rule and not np.isfinite(given).all():
            got += " with NaN or infinity"
        if rule != got:
            raise KnowledgeMismatch(f"{OWNER}: array {name!r} must be {rule}, got {got}.")


@contextmanager
def _isolated(rng: np.random.Generator | None = None) -> Iterator[None]:
    """Use one thread, draw from `rng` if given, and leave no trace in PyTorch's settings."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.set_num_threads(1)
        if rng is not None:
            torch.default_generator.manual_seed(int(rng.integers(2**63)))
        try:
            yield
        finally:
            torch.set_num_threads(threads)
