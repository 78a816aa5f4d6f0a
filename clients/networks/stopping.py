"""Early stopping: rows that are watched say when a module has learned enough."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from clients.networks.stacks import Stack
from clients.networks.training import TASK_LOSSES, BatchLoss
from fl_strategies._util import Array, FloatArray
from fl_strategies.errors import MissingExtra
from fl_strategies.learners import Task

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise MissingExtra("TorchLearner", "torch", "torch") from error

Scores: TypeAlias = Callable[[nn.Module, Array], FloatArray]
"""From a module and rows (n, ...) to logits (n, num_classes)."""
Rows: TypeAlias = tuple[Array, Array]

NEVER: Final = math.inf
LOOKS: Final = 5
"""Number of evaluations on the watched rows within the patience, since they take time."""


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
    """How far one module has got."""

    loss: float = NEVER
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
        for module, rows, best in zip(self._modules, self._watched, self._best, strict=True):
            if best.stopped_at is None:
                self._look(module, rows, best)

    def _look(self, module: nn.Module, rows: Rows, best: _Best) -> None:
        loss = self._loss_of(module, rows)
        if loss < best.loss:
            best.loss, best.epoch = loss, self._epoch
        if loss <= best.loss:
            best.weights = copy.deepcopy(module.state_dict())
        if self._epoch - best.epoch >= self._patience:
            best.stopped_at = self._epoch

    def _loss_of(self, module: nn.Module, rows: Rows) -> float:
        x, targets = rows
        logits = torch.from_numpy(self._scores(module, x))
        module.train()
        weights = torch.full((len(x),), 1 / len(x))
        return float(self._loss(logits, torch.from_numpy(targets), weights))
