"""The loop over batches that trains a module or a stack of them."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from clients.networks.compiled import CompiledPerceptrons
from clients.networks.objective import AppliedObjective
from clients.networks.stacks import Stack
from clients.networks.stopping import EarlyStopping
from clients.networks.training import (
    CPU,
    BatchLoss,
    OptimizerName,
    Schedule,
    TrainingData,
    at_rates,
    learning_rates,
    logits_of,
    make_optimizer,
    steps_per_epoch,
    tiny_as_zero,
)
from fl_strategies.errors import MissingExtra
from fl_strategies.learners import TrainingSet

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise MissingExtra("TorchLearner", "torch", "torch") from error

Augment: TypeAlias = Callable[[Tensor], Tensor]


class TrainingLoop:
    """How a learner trains, by its settings."""

    batch_size: int
    learning_rate: float
    weight_decay: float
    optimizer: OptimizerName
    momentum: float
    schedule: Schedule
    final_learning_rate: float | None
    augment: Augment | None
    channels_last: bool
    _device: torch.device

    def _train(
        self,
        model: nn.Module | Stack,
        sets: Sequence[TrainingSet],
        loss: BatchLoss,
        epochs: int,
        rngs: Sequence[np.random.Generator],
        own: AppliedObjective | None = None,
        watch: EarlyStopping | None = None,
    ) -> list[int]:
        """Train a model or a stack; return the number of epochs of every set."""
        pace = steps_per_epoch(max(len(x) for x, _ in sets), self.batch_size)
        rates = self._rates(epochs * pace)
        compiled = None if own is not None else self._compiled(model, sets, loss)
        with tiny_as_zero():
            if compiled is not None:
                compiled.train(np.reshape(rates, (epochs, pace)), rngs, watch)
            else:
                self._step_by_step(model, sets, loss, rates, rngs, own, watch)
        if not isinstance(model, nn.Module):
            model.write_back()
        return [epochs] * len(sets) if watch is None else watch.restore()

    def _compiled(
        self, model: nn.Module | Stack, sets: Sequence[TrainingSet], loss: BatchLoss
    ) -> CompiledPerceptrons | None:
        if self.optimizer != "adam" or self.augment is not None or self._device != CPU:
            return None
        size, decay = self.batch_size, self.weight_decay
        return CompiledPerceptrons.of(model, sets, loss, batch_size=size, weight_decay=decay)

    def _step_by_step(
        self,
        model: nn.Module | Stack,
        sets: Sequence[TrainingSet],
        loss: BatchLoss,
        rates: Sequence[float],
        rngs: Sequence[np.random.Generator],
        own: AppliedObjective | None,
        watch: EarlyStopping | None,
    ) -> None:
        optimizer = self._new_optimizer(model)
        data = TrainingData(sets)
        pace = data.num_steps(1, self.batch_size)
        batches = data.batches(len(rates) // pace, self.batch_size, rngs)
        steps = zip(batches, at_rates(optimizer, rates), strict=True)
        for step, (batch, _) in enumerate(steps, 1):
            optimizer.zero_grad()
            torch.autograd.backward(self._batch_loss(model, loss, *batch))
            if own is not None:
                own.add()
            optimizer.step()
            if watch is not None and step % pace == 0 and watch.ends(model):
                break

    def _new_optimizer(self, model: nn.Module | Stack) -> torch.optim.Optimizer:
        return make_optimizer(
            self.optimizer,
            model.parameters(),
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            fused=self._device == CPU,
        )

    def _batch_loss(
        self,
        model: nn.Module | Stack,
        loss: BatchLoss,
        rows: Tensor,
        targets: Tensor,
        weights: Tensor,
    ) -> Tensor:
        seen = rows if self.augment is None else self.augment(rows)
        if isinstance(model, nn.Module):
            seen = self._laid_out(seen)
        scores = logits_of(model(seen.to(self._device)))
        return loss(scores, targets.to(self._device), weights.to(self._device))

    def _rates(self, num_steps: int) -> list[float]:
        last = self.final_learning_rate
        end = self.learning_rate / 100 if last is None else last
        return learning_rates(self.schedule, self.learning_rate, end, num_steps)

    def _laid_out(self, rows: Tensor) -> Tensor:
        images = self.channels_last and rows.ndim == 4
        return rows.contiguous(memory_format=torch.channels_last) if images else rows
