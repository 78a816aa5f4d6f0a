"""Networks trained by DP-SGD, with Opacus, so that whatever they say later costs nothing.

A model that was trained privately may answer any number of questions: answers are
post-processing. All there is to account for is the training itself, which a learner reports
as `privacy_events`. Clipping is done by Opacus; noise and batches are drawn here, because
PyTorch's generator starts from 32 bits, few enough to be tried out one by one.
"""

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from typing import Any, Final, Self, TypeAlias

import numpy as np

from clients.networks.learner import SQUARED_SCORES, TorchLearner
from clients.networks.objective import SeenFeatures, applied, sees_features, stepping
from clients.networks.training import (
    RECORD_LOSSES,
    BatchLoss,
    OptimizerName,
    Rows,
    as_float32,
    at_rates,
    isolated,
    logits_of,
    weighted,
)
from fl_strategies._util import Array, FloatArray, counted
from fl_strategies.errors import InvalidParameter, MissingExtra, require
from fl_strategies.learners import Objective, Recipe, TrainingSet
from fl_strategies.privacy.bounds.distributions import dpsgd_epsilon
from fl_strategies.privacy.bounds.theorems import gaussian_mu
from fl_strategies.privacy.events import DPSGDEvent
from fl_strategies.privacy.mechanisms import GRID, continuous_gaussian, random_words

try:
    import torch
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer
    from opacus.validators import ModuleValidator
    from torch import Tensor, nn
except ImportError as error:
    raise MissingExtra("DPTorchLearner", "opacus", "opacus") from error

OWNER: Final = "DPTorchLearner"


def record_gradients(loss: Tensor) -> None:
    """Let Opacus find the gradient of every record, `grad_sample` of each parameter."""
    with warnings.catch_warnings():
        # Opacus' hooks do not use the gradient of the rows, which PyTorch would miss.
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
        torch.autograd.backward(loss)


def check_module(
    module: nn.Module, row_shape: tuple[int, ...], *, features: bool = False
) -> None:
    """Raise `InvalidParameter` for what makes a module leak though Opacus accepts it.

    Opacus knows layers by their type; a layer without weights, or a module that moves rows
    around by itself, is only found out by trying. No private row is used for that. `features`
    are tried too if the loss sees them.
    """
    trial, rows = copy.deepcopy(module).cpu(), torch.ones(2, *row_shape)
    for parameter in trial.parameters():  # layers that start at 0 would hide the others
        parameter.data += 0.1 * torch.randn_like(parameter)
    dropout = torch.default_generator.get_state()
    try:
        with torch.no_grad():
            among_equals = _first_answer(trial, rows, features)
            torch.default_generator.set_state(dropout)
            rows[1] = 0.0
            among_others = _first_answer(trial, rows, features)
        model = GradSampleModule(trial, loss_reduction="sum")
        record_gradients(logits_of(model(rows)).sum())
    except Exception as error:
        reason = f"Opacus says: {str(error).partition(chr(10))[0][:200]}"
        raise _unsupported("that Opacus can make private", "an error", reason) from error
    if not torch.allclose(among_equals, among_others, equal_nan=True):
        raise _unsupported("that treat every row by itself", "rows that influence each other")
    for (name, before), after in zip(module.named_buffers(), trial.buffers(), strict=True):
        if not torch.equal(before.cpu(), after):
            raise _unsupported("that record nothing in buffers", f"a change of {name!r}")
    _check_gradients(trial, len(rows))


def _first_answer(module: nn.Module, rows: Tensor, features: bool) -> Tensor:
    """Return the logits of the first row, followed by its features if these are tried."""
    if not features:
        return logits_of(module(rows))[0]
    with SeenFeatures(module) as seen:
        return torch.cat([logits_of(module(rows))[0], seen.of(len(rows))[0]])


def check_layers(module: nn.Module) -> None:
    """Raise `InvalidParameter` naming a layer that Opacus cannot make private."""
    # Children come after their parents, so that from the end the culprit itself is found.
    for name, layer in reversed(list(module.named_modules())):
        got = f"{type(layer).__name__} at {name!r}"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training:
            raise _unsupported("without batch normalisation", got, "Use GroupNorm instead.")
        for fault in ModuleValidator.validate(layer) if layer.training else ():
            raise _unsupported("that Opacus can make private", got, f"Opacus says: {fault}")


def _check_gradients(module: nn.Module, num_rows: int) -> None:
    """Check that every parameter has one gradient a row: that is what gets clipped."""
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        gradients = getattr(parameter, "grad_sample", None)
        if gradients is None:
            hint = "Freeze it, or use it by calling the layer it belongs to."
            raise _unsupported("whose parameters all learn", f"no gradient of {name!r}", hint)
        if len(gradients) != num_rows:
            got = f"{len(gradients)} gradients of {name!r} for {num_rows} rows"
            raise _unsupported("that keep rows apart in every layer", got)


def _unsupported(rule: str, got: str, hint: str = "") -> InvalidParameter:
    sentence = f"{OWNER}: module_fn must be a factory of modules {rule}, got {got}."
    return InvalidParameter(f"{sentence} {hint}".strip())


Source: TypeAlias = np.random.Generator | None  # None: the operating system

# Gradients of single records held at once, in numbers: 64 MB.
GRADIENTS_PER_PASS: Final = 1 << 24
# Below this, noise protects nobody and its accounting takes minutes.
LEAST_NOISE: Final = 0.3
MOST_NOISE: Final = 1e6
# Where in PyTorch's saved generator the 624 words of the Mersenne twister are.
_TWISTER: Final = slice(24, 24 + 624 * 8)


def hide_generators(device: torch.device) -> None:
    """Let nobody know what PyTorch's generators will draw; an accelerator's takes 64 bits."""
    if device.type != "cpu":
        torch.manual_seed(int(random_words(1)[0] >> np.uint64(1)))
    torch.default_generator.set_state(unpredictable_state())


def drawn_rows(event: DPSGDEvent, source: Source) -> Tensor:
    """Return which records a step takes, each by a draw of its own, (records,) of bool."""
    uniform = (random_words(event.records, source) >> np.uint64(11)) * 2.0**-53
    return torch.from_numpy(uniform < event.batch_size / event.records)


def unpredictable_state() -> Tensor:
    """Return a state for PyTorch's generator that no seed of 32 bits leads to."""
    state = torch.Generator().get_state()
    words = random_words(312).view(np.uint32).astype(np.uint64)
    state[_TWISTER] = torch.from_numpy(words.view(np.uint8))
    return state


class NoisyOptimizer(DPOptimizer):  # type: ignore[misc] # Opacus has no types
    """Opacus' clipping, with noise from a chosen source."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, source: Source, event: DPSGDEvent, norm: float
    ) -> None:
        super().__init__(
            optimizer,
            noise_multiplier=event.noise_multiplier,
            max_grad_norm=norm,
            expected_batch_size=event.batch_size,
        )
        self.source = source

    def clip_and_accumulate(self) -> None:
        """Add the clipped gradients of a batch to the sum."""
        for parameter in self.params:
            # A record that overflows would turn the sum, and so every parameter, into NaN.
            parameter.grad_sample.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        super().clip_and_accumulate()

    def add_noise(self) -> None:
        """Add noise to the sum, both in whole units, so that no low bits tell them apart."""
        deviation = self.noise_multiplier * self.max_grad_norm
        unit = min(deviation, self.max_grad_norm) / GRID
        for parameter in self.params:
            noise = continuous_gaussian(parameter.numel(), self.source) * (deviation / unit)
            # On the processor, because not every device has float64.
            total = (parameter.summed_grad.cpu().double() / unit).round()
            total += torch.from_numpy(noise).round().view_as(parameter)
            parameter.grad = (total * unit).to(parameter.dtype).to(parameter.device)


def noisy_step(
    model: Any, optimizer: NoisyOptimizer, loss: BatchLoss, rows: Tensor, targets: Tensor
) -> None:
    """Take one noisy step on a batch (b, ...), in as many passes as memory asks for."""
    size = max(1, GRADIENTS_PER_PASS // sum(p.numel() for p in optimizer.params))
    for start in range(0, max(1, len(rows)), size):
        some = slice(start, start + size)
        optimizer.zero_grad()
        optimizer.signal_skip_step(do_skip=start + size < len(rows))
        if len(rows):
            scores = logits_of(model(rows[some]))
            record_gradients(loss(scores, targets[some], scores.new_ones(len(scores))))
        else:  # not every layer takes no rows, and the noise is due all the same
            for parameter in optimizer.params:
                parameter.grad_sample = parameter.new_zeros(0, *parameter.shape)
        optimizer.step()


@lru_cache(maxsize=1024)
def calibrated_noise(
    records: int, batch_size: int, steps: int, *, target_epsilon: float, delta: float
) -> float:
    """Return a noise multiplier with which DP-SGD spends at most `target_epsilon`.

    Spends more than 0.95 of the target, unless even the least noise, 0.3, spends less.

    Examples
    --------
    >>> noise = calibrated_noise(300, 32, 400, target_epsilon=4.572, delta=1e-4)
    >>> 2.0 <= noise < 2.1
    True
    """
    # What the central limit theorem says about many steps, as a place to start.
    growth = (gaussian_mu(target_epsilon, delta) * records / batch_size) ** 2 / steps
    noise = min(max(1 / math.sqrt(math.log1p(growth)), LEAST_NOISE), MOST_NOISE)
    low, high, rule = 0.0, math.inf, f"in reach of a noise_multiplier of {MOST_NOISE:g}"
    while high - low > 1e-3 * low:
        share = dpsgd_epsilon(records, batch_size, steps, noise, delta) / target_epsilon
        low, high = (noise, high) if share > 1 else (low, noise)
        if 0.96 < share <= 1 or high == LEAST_NOISE:
            break
        require(low < MOST_NOISE, OWNER, "target_epsilon", rule, target_epsilon)
        # Epsilon falls somewhat faster than the noise grows.
        noise *= (max(share, 1e-9) / 0.98) ** (1 / 1.5)
        noise = noise if low < noise < high else (low + high) / 2
        noise = min(max(noise, LEAST_NOISE), MOST_NOISE)
    return high


Spent: TypeAlias = tuple[tuple[DPSGDEvent, int], ...]


@dataclass(eq=False)
class DPTorchLearner(TorchLearner):
    """A model made of a PyTorch module, trained by DP-SGD.

    Every record is in a batch with chance ``batch_size / n``, independently; its gradient is
    clipped to `max_grad_norm`, and Gaussian noise is added to the sum of each step. Every
    call of `fit` and `partial_fit` adds an event to `privacy_events`: for records of earlier
    calls the events compose. Terms of an objective that see the weights alone are added to
    noised gradients and cost nothing; prototypes are part of the loss that is clipped.

    Parameters
    ----------
    module_fn : factory
        Builds a new module from float32 rows (n, ...) to logits (n, num_classes). Rows must
        not influence each other: no batch normalisation.
    num_classes, task
        As in `TorchLearner`. A record with several labels loses the mean over its own known
        ones.
    epochs, batch_size : int
        ``epochs * ceil(n / batch_size)`` steps, with batches of `batch_size` rows on average
        (all rows if there are fewer).
    learning_rate, weight_decay : float
        Settings of plain stochastic gradient descent. One record moves the parameters of a
        step by at most ``learning_rate * max_grad_norm / batch_size``.
    optimizer, momentum, schedule, final_learning_rate
        As in `TorchLearner`, but for the defaults: "sgd" without momentum. They see noised
        gradients only, so they cost nothing.
    device
        As in `TorchLearner`. Noise and batches are drawn on the processor in any case.
    max_grad_norm : float
        Clipping norm of one record's gradient.
    noise_multiplier : float, optional
        Standard deviation of the noise divided by `max_grad_norm`.
    target_epsilon : float, optional
        Instead of `noise_multiplier`: each call that trains privately spends at most this, at
        `delta`, with as little noise as that allows but a multiplier of at least 0.3.
    delta : float
        Used with `target_epsilon` only.
    secure : bool
        Draw noise and batches from the operating system, so that two fits differ even if
        their `rng` is equal. False draws them from `rng`, for tests and simulations: who
        knows the seed can take the noise off again, and the event says so.
    private_distill : bool
        What rows `distill` is given. False: public ones, learned without noise and without
        an event. True: private ones, such as those of an agent in co-distillation, learned
        by DP-SGD like the rows of `fit`, and charged.
    distill_learning_rate : float
        Step size of Adam in a `distill` that is not private, with the learner's schedule.

    Notes
    -----
    The guarantee is for single records (examples). The number of records counts as public,
    and a removed record leaves a gap: the other records keep their places.

    In FedKT use it as `teacher_fn`, with a `TorchLearner` as `learner_fn`: students see
    public rows only, and noise on them would be wasted. A record is in one teacher of each
    of the s partitions, so the events of s teachers compose for it.

    Examples
    --------
    >>> x, y = np.repeat(np.eye(3), 20, axis=0), np.repeat(np.arange(3), 20)
    >>> learner = DPTorchLearner(lambda: nn.Linear(3, 3), num_classes=3, noise_multiplier=1.0)
    >>> learner.fit(x, y, rng=np.random.default_rng(0)).predict(np.eye(3)).shape
    (3,)
    >>> [(event.batch_size, event.steps, count) for event, count in learner.privacy_events]
    [(32, 40, 1)]
    """

    _: KW_ONLY
    learning_rate: float = 0.5
    optimizer: OptimizerName = "sgd"
    momentum: float = 0.0
    max_grad_norm: float = 1.0
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    delta: float = 1e-5
    secure: bool = True
    private_distill: bool = False
    distill_learning_rate: float = 1e-3
    _events: Spent = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        noise, target = self.noise_multiplier, self.target_epsilon
        if (noise is None) == (target is None):
            raise InvalidParameter(
                f"{OWNER}: exactly one of noise_multiplier and target_epsilon must be given, "
                f"got {noise} and {target}."
            )
        strength = "target_epsilon" if noise is None else "noise_multiplier"
        for name in (strength, "max_grad_norm", "distill_learning_rate"):
            value = getattr(self, name)
            require(0 < value < math.inf, OWNER, name, "finite and above 0", value)
        require(0 < self.delta < 1, OWNER, "delta", "between 0 and 1", self.delta)
        for name in ("secure", "private_distill"):
            value = getattr(self, name)
            require(isinstance(value, bool), OWNER, name, "True or False", value)
        # When to stop would be another release about the records, without noise.
        for name in ("augment", "channels_last", "patience", "validation_share"):
            value = getattr(self, name)
            require(not value, OWNER, name, "omitted in private training", value)

    @property
    def privacy_events(self) -> Spent:
        """Events that training of this learner has spent so far, each with its count.

        Predictions, `to_arrays` and a `distill` of public rows add nothing. A twin from
        `from_arrays` has touched no private data here and so has no events; its sender's
        learner has them.
        """
        return self._events

    def planned_events(
        self, num_records: int, *, epochs: int | None = None, distill: bool = False
    ) -> Spent:
        """Return what learning from so many records will spend; nothing if it is not private.

        A party charges it before it looks at a record.
        """
        if distill and not self.private_distill:
            return ()
        return ((self._plan(num_records, epochs), 1),)

    def fit_many(
        self, sets: Sequence[TrainingSet], *, rngs: Sequence[np.random.Generator]
    ) -> list[Self]:
        """Return one new fitted twin per training set, each with its own `privacy_events`."""
        rule = f"{len(sets)} generators, one a training set"
        require(len(rngs) == len(sets), OWNER, "rngs", rule, len(rngs))
        twins = [copy.copy(self)._forget() for _ in sets]
        members = counted(list(zip(twins, sets, rngs, strict=True)), "models")
        return [twin.fit(x, y, rng=rng) for twin, (x, y), rng in members]

    def distill(
        self,
        x: Array,
        targets: FloatArray,
        *,
        rng: np.random.Generator,
        recipe: Recipe = SQUARED_SCORES,
    ) -> Self:
        """Learn targets (n, num_classes) of rows `x` (n, ...), as `TorchLearner` does.

        Unless `private_distill` is set, the rows must be PUBLIC: nothing is clipped, noised
        or accounted, so neither rows nor targets may hold anything private that has not
        been paid for. If it is set, every call adds an event to `privacy_events`, and what
        is protected is a row together with its own target: the target of a row must not
        depend on other private rows, unless through what they have paid for.
        """
        if self.private_distill:
            return super().distill(x, targets, rng=rng, recipe=recipe)
        plain = TorchLearner(
            self.module_fn,
            num_classes=self.num_classes,
            task=self.task,
            epochs=self.epochs,
            batch_size=self.batch_size,
            learning_rate=self.distill_learning_rate,
            weight_decay=self.weight_decay,
            schedule=self.schedule,
            device=self.device,
        )
        if self._module is not None:
            plain._keep(self._module, self._row_shape)
        plain.distill(x, targets, rng=rng, recipe=recipe)
        steps, epochs = plain.steps_taken, plain.epochs_trained
        return self._keep(plain._fitted(), np.shape(x)[1:], steps, epochs)

    def initialised(self, *, rng: np.random.Generator | None = None) -> Self:
        """Return a twin with new parameters, which have seen nothing; see `TorchLearner`."""
        return super().initialised(rng=rng)._forget()

    def _forget(self) -> Self:
        self._events = ()
        return self

    def _plan(self, records: int, epochs: int | None = None) -> DPSGDEvent:
        """Return what training on so many records will do."""
        batch_size = min(self.batch_size, records)
        steps = (epochs or self.epochs) * math.ceil(records / batch_size)
        target = {"target_epsilon": self.target_epsilon or 0.0, "delta": self.delta}
        noise = self.noise_multiplier or calibrated_noise(records, batch_size, steps, **target)
        return DPSGDEvent(
            noise_multiplier=noise,
            records=records,
            batch_size=batch_size,
            steps=steps,
            seeded=not self.secure,
        )

    @property
    def _loss(self) -> BatchLoss:
        return weighted(RECORD_LOSSES[self.task])

    def _learn(
        self,
        module: nn.Module | None,
        x: Array,
        targets: Array,
        loss: BatchLoss,
        epochs: int,
        rng: np.random.Generator,
        *,
        objective: Objective | None = None,
        watched: Rows | None = None,  # noqa: ARG002 - without patience, see __post_init__
    ) -> Self:
        event = self._plan(len(x), epochs)
        with isolated(rng):
            # What is known stays as it is until the event is written down.
            module = self._new_module() if module is None else copy.deepcopy(module)
            check_layers(module.train())
            self._evaluate(module, x[:1])
            check_module(module.train(), x.shape[1:], features=sees_features(objective))
            source = None if self.secure else rng
            trainer = stepping(self, objective)
            trainer._train_privately(module, x, targets, loss, event, source, objective)
        self._events = _with_event(self._events, event)
        return self._keep(module, x.shape[1:], event.steps, epochs)

    def _train_privately(
        self,
        module: nn.Module,
        x: Array,
        targets: Array,
        loss: BatchLoss,
        event: DPSGDEvent,
        source: Source,
        objective: Objective | None,
    ) -> None:
        """Train a copy: Opacus leaves gradients of single records on what it touches."""
        if source is None:
            # Dropout also decides what a batch's gradient is, so it must be secret as well.
            hide_generators(self._device)
        trained = copy.deepcopy(module)
        with applied(objective, trained, loss, self.task) as own:
            loss = loss if own is None else own.loss
            model = GradSampleModule(trained, loss_reduction="sum")
            descent = self._new_optimizer(model.parameters(), fused=False)
            optimizer = NoisyOptimizer(descent, source, event, self.max_grad_norm)
            if own is not None:  # after the noise, so that no record has a part in it
                optimizer.attach_step_hook(lambda _: own.add())
            rows, wanted = torch.from_numpy(as_float32("x", [x])), torch.from_numpy(targets)
            steps = counted(range(event.steps), "private steps")
            rates = at_rates(descent, self._rates(event.steps))
            for _ in zip(steps, rates, strict=True):
                drawn = drawn_rows(event, source)
                batch = rows[drawn].to(self._device), wanted[drawn].to(self._device)
                noisy_step(model, optimizer, loss, *batch)
        module.load_state_dict(model.to_standard_module().state_dict())


def _with_event(entries: Spent, event: DPSGDEvent) -> Spent:
    """Return the entries with one more event, equal neighbours counted together."""
    if entries and entries[-1][0] == event:
        return (*entries[:-1], (event, entries[-1][1] + 1))
    return (*entries, (event, 1))
