"""Training of PyTorch modules: losses, batches, optimizers, early stopping and devices."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from fl_strategies._util import Array, FloatArray, IntArray, counted
from fl_strategies.errors import KnowledgeMismatch, require, require_data, require_known
from fl_strategies.learners import UNKNOWN, Recipe, Task, check_targets
from fl_strategies.party.party import check_rows

DeviceName: TypeAlias = Literal["auto", "cpu", "cuda", "mps"]
OptimizerName: TypeAlias = Literal["adam", "sgd"]
Schedule: TypeAlias = Literal["constant", "cosine"]
RowLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From logits (n, c) and targets (n, ...) to the loss of every row, (n,)."""
BatchLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From logits, targets and weights of rows (n,) to the loss of a step."""
Batch: TypeAlias = tuple[Tensor, Tensor, Tensor]
Rows: TypeAlias = tuple[Array, Array]
Scores: TypeAlias = Callable[[nn.Module, Array], FloatArray]
"""From a module and rows (n, ...) to logits (n, num_classes)."""

OWNER: Final = "TorchLearner"
CPU: Final = torch.device("cpu")
# Batch normalisation divides by the root of the one and by the other.
NEVER_NEGATIVE: Final = ("running_var", "num_batches_tracked")
# Averages of probabilities may leave [0, 1] by this much.
ROUNDING: Final = 1e-6
LOOKS: Final = 5
"""Number of evaluations on the watched rows within the patience, since they take time."""


class Stack(Protocol):
    """K modules of one architecture as one: rows (K * n, ...), the first n for the first."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the outputs of every module for its own rows."""

    def parameters(self) -> Iterator[Tensor]:
        """Yield what learns."""

    def write_back(self) -> None:
        """Give every module its trained parameters."""


def logits_of(output: Any) -> Tensor:
    """Return a module's output, or the `logits` in it, as models of transformers have."""
    logits: Tensor = getattr(output, "logits", output)
    return logits


def weighted(loss: RowLoss) -> BatchLoss:
    """Return the sum of the losses of rows, each times its weight."""
    return lambda logits, targets, weights: (loss(logits, targets) * weights).sum()


def squared_difference(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared difference of every row, (n,)."""
    return (outputs - targets).square().mean(dim=1)


def _distance(outputs: Tensor, targets: Tensor) -> Tensor:
    # Unlike the root of a sum, this norm has a gradient at 0, which is 0.
    distance: Tensor = torch.linalg.vector_norm(outputs - targets, dim=1)
    return distance


def _label_losses(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy of every label, 0 where unknown, and which are known."""
    known = labels != UNKNOWN
    losses = binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none")
    return losses.where(known, 0.0), known


def _mean_of_known(logits: Tensor, labels: Tensor) -> Tensor:
    losses, known = _label_losses(logits, labels)
    return losses.sum(dim=1) / known.sum(dim=1).clamp(min=1)


def _mean_of_all_known(logits: Tensor, labels: Tensor, _weights: Tensor) -> Tensor:
    losses, known = _label_losses(logits, labels)
    return losses.sum() / known.sum().clamp(min=1)


RECORD_LOSSES: Final[Mapping[Task, RowLoss]] = {
    "single-label": partial(cross_entropy, reduction="none"),
    "multi-label": _mean_of_known,
    "regression": squared_difference,
}
"""The loss of one record, independent of all others."""
TASK_LOSSES: Final[Mapping[Task, BatchLoss]] = {
    "single-label": weighted(RECORD_LOSSES["single-label"]),
    "multi-label": _mean_of_all_known,
    "regression": weighted(RECORD_LOSSES["regression"]),
}
"""The objective of a step: all records, and all known labels, have equal weight."""
_NORMS: Final[Mapping[str, RowLoss]] = {
    "l1": lambda outputs, targets: (outputs - targets).abs().mean(dim=1),
    "l2": _distance,
    "mse": squared_difference,
}
_LINKS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "identity": lambda scores: scores,
    "softmax": partial(torch.softmax, dim=1),
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class RecipeLoss:
    """The mean over rows of the loss that a recipe names."""

    recipe: Recipe

    def __call__(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the losses of rows, each times its weight."""
        return (self._of_rows(logits / self.recipe.temperature, targets) * weights).sum()

    def _of_rows(self, scores: Tensor, targets: Tensor) -> Tensor:
        if self.recipe.loss in _NORMS:
            return _NORMS[self.recipe.loss](_LINKS[self.recipe.link](scores), targets)
        if self.recipe.link == "softmax":
            return cross_entropy(scores, targets, reduction="none")
        losses = binary_cross_entropy_with_logits(scores, targets, reduction="none")
        return losses.mean(dim=1)


def learning_rates(
    schedule: Schedule, first: float, last: float, num_steps: int
) -> list[float]:
    """Return the learning rate of every step.

    Along a cosine step i of n is taken at i / n of the way to the last rate, as PyTorch's
    `CosineAnnealingLR` does; so that is where a step after the last would be.
    """
    if schedule == "constant":
        return [first] * num_steps
    shares = ((1 + math.cos(math.pi * i / num_steps)) / 2 for i in range(num_steps))
    return [last + (first - last) * share for share in shares]


def at_rates(optimizer: torch.optim.Optimizer, rates: Iterable[float]) -> Iterator[None]:
    """Set the learning rate of every step, one after the other."""
    for rate in rates:
        for group in optimizer.param_groups:
            group["lr"] = rate
        yield


class TrainingData:
    """Training sets of K models, where rows that several models share are stored once."""

    def __init__(self, sets: Sequence[tuple[Array, Array]]) -> None:
        distinct = {id(x): x for x, _ in sets}
        end = dict(zip(distinct, np.cumsum([len(x) for x in distinct.values()]), strict=True))
        self._rows = torch.from_numpy(as_float32("x", list(distinct.values())))
        self._targets = torch.from_numpy(np.concatenate([targets for _, targets in sets]))
        self._sizes = np.array([[len(x)] for x, _ in sets])
        self._first_rows = np.array([[end[id(x)]] for x, _ in sets]) - self._sizes
        self._first_targets = np.cumsum(self._sizes, axis=0) - self._sizes

    def batches(
        self, epochs: int, batch_size: int, rngs: Sequence[np.random.Generator]
    ) -> Iterator[Batch]:
        """Yield rows, targets and weights of every step, b for each model, (K * b, ...).

        A last batch is as long as the longest of all models, with weight 0 for what is
        beyond a model's own rows; the weights of a model sum to 1.
        """
        longest = int(self._sizes.max())
        stops = batch_stops(longest, batch_size)
        weights = self._weights(batch_size, (len(stops) - 1) * batch_size)
        order = np.zeros((len(rngs), longest), dtype=np.int64)
        for _ in counted(range(epochs), "epochs"):
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


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    """Return the steps of an epoch; a single last row joins the batch before it."""
    steps = math.ceil(num_rows / batch_size)
    return steps - 1 if steps > 1 and num_rows % batch_size == 1 else steps


def batch_stops(num_rows: int, batch_size: int) -> IntArray:
    """Return where every batch of an epoch ends."""
    ends = np.arange(1, steps_per_epoch(num_rows, batch_size)) * batch_size
    return np.append(ends, num_rows)


def checked_set(x: Array, y: Array, num_classes: int, task: Task) -> tuple[Array, Array]:
    """Return rows and what a task says about them; refuse what cannot be learned."""
    x, y = np.asarray(x), np.asarray(y)
    check_rows(OWNER, "x", x)
    require_data(len(x) > 0, OWNER, "x", "at least one row", len(x))
    check_targets(OWNER, "y", y, len(x), num_classes, task)
    if task == "regression":
        return x, as_float32("y", [y])
    return x, y.astype(np.int64)


def as_float32(name: str, parts: Sequence[Array]) -> Array:
    """Return a new float32 array of all parts in C order; refuse numbers beyond its range."""
    with np.errstate(over="ignore"):
        joined = np.concatenate(parts, dtype=np.float32, casting="same_kind")
    joined = np.ascontiguousarray(joined)
    if any(part.dtype.itemsize > joined.dtype.itemsize for part in parts):
        check_rows(OWNER, f"{name} as float32", joined)
    return joined


def soft_targets(targets: Array, shape: tuple[int, int], recipe: Recipe) -> Array:
    """Return targets of a recipe as float32; refuse what its link cannot give."""
    check_rows(OWNER, "targets", targets)
    require_data(targets.shape == shape, OWNER, "targets", f"of shape {shape}", targets.shape)
    targets = as_float32("targets", [targets])
    if recipe.link == "identity":
        return targets
    low, high = float(targets.min()), float(targets.max())
    inside = low >= -ROUNDING and high <= 1 + ROUNDING
    rule = f"probabilities between 0 and 1 for a {recipe.link} link"
    require_data(inside, OWNER, "targets", rule, f"{low:g} to {high:g}")
    return targets.clip(0, 1)


def check_count(name: str, value: object, least: int = 1) -> None:
    """Raise `InvalidParameter` unless the value is a whole number and not too small."""
    counts = isinstance(value, int | np.integer) and value >= least
    require(bool(counts), OWNER, name, f"a whole number, at least {least}", value)


def state_of(module: nn.Module) -> dict[str, Array]:
    """Return the parameters and buffers of a module by name, without copies."""
    return {name: value.cpu().numpy() for name, value in module.state_dict().items()}


def blank_module(module_fn: Callable[[], nn.Module]) -> nn.Module:
    """Return a module whose tensors have shapes and types, but neither values nor memory.

    One that cannot be made without values, because it computes with them, is made with them.
    """
    with isolated():
        try:
            with torch.device("meta"):
                return module_fn()
        except (RuntimeError, TypeError) as error:
            if "meta" not in str(error):
                raise
            return module_fn()


def blank_state(module_fn: Callable[[], nn.Module]) -> dict[str, Array]:
    """Return arrays like the state of a new module; all numbers of one are the same."""
    state = blank_module(module_fn).state_dict()
    blanks = {name: torch.zeros((), dtype=value.dtype).numpy() for name, value in state.items()}
    return {name: np.broadcast_to(blanks[name], value.shape) for name, value in state.items()}


def check_state(
    arrays: Mapping[str, Array], expected: Mapping[str, Array], kind: str = "array"
) -> None:
    """Raise `KnowledgeMismatch` unless the arrays can be the state of a module."""
    for name in sorted(arrays.keys() ^ expected.keys(), key=str):
        rule = "given, got none" if name in expected else "omitted, got one"
        raise KnowledgeMismatch(f"{OWNER}: {kind} {str(name)[:80]!r} must be {rule}.")
    for name, value in expected.items():
        given, rule = np.asarray(arrays[name]), f"{value.dtype} of shape {value.shape}"
        got = f"{given.dtype} of shape {given.shape}"
        if got == rule and not np.isfinite(given).all():
            got += " with NaN or infinity"
        elif got == rule and name.endswith(NEVER_NEGATIVE) and (given < 0).any():
            got += " with negative numbers"
        require_known(got == rule, OWNER, f"{kind} {name!r}", rule, got)


@contextmanager
def isolated(rng: np.random.Generator | None = None) -> Iterator[None]:
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


@contextmanager
def tiny_as_zero() -> Iterator[None]:
    """Let numbers below the normal range of float32 count as 0.

    Decay takes the weights of pixels that are always black down there, a twentieth of all
    after a hundred epochs on MNIST, where processors are slow, some of them many times.
    """
    tiny = torch.full((1,), torch.finfo(torch.float32).tiny)
    before = float(tiny / 2) == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def find_device(name: str) -> torch.device:
    """Return a device by its name, "auto" for the fastest; raise unless it is available."""
    names = get_args(DeviceName)
    require(name in names, OWNER, "device", f"one of {', '.join(names)}", name)
    if name == "cpu":  # without a look at others: CUDA that was asked for anything cannot fork
        return CPU
    accelerators = {"cuda": torch.cuda, "mps": torch.backends.mps}
    available = [*(kind for kind, own in accelerators.items() if own.is_available()), "cpu"]
    rule = f"available on this machine ({', '.join(available)})"
    require(name in ("auto", *available), OWNER, "device", rule, name)
    return torch.device(available[0] if name == "auto" else name)


def _mistakes_by_class(logits: Tensor, labels: Tensor, _weights: Tensor) -> Tensor:
    """Return the share of rows whose likeliest class is another, as a mean over classes.

    NaN where logits are. Equal shares must be equal numbers, whichever rows are wrong.
    """
    wrong, num_classes = logits.argmax(dim=1) != labels, logits.shape[1]
    mistakes = torch.bincount(labels[wrong], minlength=num_classes)
    rows = torch.bincount(labels, minlength=num_classes)
    share = (mistakes.double() / rows)[rows > 0].mean()
    return torch.round(share, decimals=9) + 0 * logits.sum()


# A network gets too sure of itself long before it makes more mistakes: cross-entropy would stop
# it too early. So would the share of all rows: a network learns a class of which its party has
# few records long after the others, and that class is the one the other parties' votes miss.
STOPPING_LOSSES: Final[Mapping[Task, BatchLoss]] = {
    **TASK_LOSSES,
    "single-label": _mistakes_by_class,
}
"""The criterion for stopping."""


def hold_out(x: Array, y: Array, share: float, rng: np.random.Generator) -> tuple[Rows, Rows]:
    """Return rows to learn and rows to stop by: the same if the share is less than a row.

    Nothing is drawn unless a row is held out, so that training without early stopping is
    what it always was.
    """
    num_held = int(share * len(x))
    if num_held == 0:
        return (x, y), (x, y)
    order = rng.permutation(len(x))
    held, kept = np.sort(order[:num_held]), np.sort(order[num_held:])
    return (x[kept], y[kept]), (x[held], y[held])


@dataclass
class _Best:
    """Best state of one module so far."""

    loss: float = math.inf
    epoch: int = 0
    """When the loss last fell."""
    weights: dict[str, Tensor] | None = None
    stopped_at: int | None = None


class EarlyStopping:
    """Watches modules after every epoch and keeps the best weights of each.

    A module has stopped once `patience` epochs in a row have not lowered the loss of its own
    watched rows, or made it NaN. It gets back the weights of its best epoch, the last of
    several. With a patience of 10 or more not every epoch is looked at, but the last one is.
    In a stack all go on until the last one has stopped, which changes none of the others.

    Parameters
    ----------
    modules : sequence of Module
        Those that are trained, by themselves or as a stack.
    watched : sequence of pairs
        Rows and targets to stop by, of every module.
    scores : callable
        Asks a module.
    loss : callable
        What must fall, such as one of `STOPPING_LOSSES`.
    patience : int
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        watched: Sequence[Rows],
        *,
        scores: Scores,
        loss: BatchLoss,
        patience: int,
    ) -> None:
        self._modules, self._watched = modules, watched
        self._scores, self._loss, self._patience = scores, loss, patience
        self._interval = max(1, patience // LOOKS)
        self._best = [_Best() for _ in modules]
        self._epoch = 0

    def ends(self, model: nn.Module | Stack) -> bool:
        """Look at the modules after an epoch; tell whether all of them have stopped."""
        self._epoch += 1
        if self._epoch % self._interval:
            return False
        if not isinstance(model, nn.Module):
            model.write_back()
        self._look_at_all()
        return all(best.stopped_at is not None for best in self._best)

    def has_stopped(self, module: int) -> bool:
        """Tell whether a module needs no more epochs."""
        return self._best[module].stopped_at is not None

    def restore(self) -> list[int]:
        """Give every module its best weights; return the epochs each was trained for."""
        if self._epoch % self._interval:
            self._look_at_all()  # the last epoch may be the best
        for module, best in zip(self._modules, self._best, strict=True):
            if best.weights is not None:
                module.load_state_dict(best.weights)
        return [best.stopped_at or self._epoch for best in self._best]

    def _look_at_all(self) -> None:
        for module, (x, targets), best in zip(
            self._modules, self._watched, self._best, strict=True
        ):
            if best.stopped_at is not None:
                continue
            logits = torch.from_numpy(self._scores(module, x))
            module.train()
            weights = torch.full((len(x),), 1 / len(x))
            loss = float(self._loss(logits, torch.from_numpy(targets), weights))
            if loss < best.loss:
                best.loss, best.epoch = loss, self._epoch
            if loss <= best.loss:
                best.weights = copy.deepcopy(module.state_dict())
            if self._epoch - best.epoch >= self._patience:
                best.stopped_at = self._epoch
