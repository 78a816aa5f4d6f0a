"""PyTorch modules as learners, with ensembles trained as one stacked model.

Knowledge transfer trains many small models of one architecture: the teachers and students
of a party. One after the other they keep a processor waiting for Python, so twins whose
epochs take the same number of steps are stacked, and every step serves them all. Perceptrons
on sparse rows have no need of that: compiled kernels take their steps without Python.

Training and evaluation use one thread: results are then the same bits whatever the number
of cores, a process forked from a threaded one cannot hang, and parties that run side by
side do not fight for cores.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor, nn

from clients.networks.images import image_layers
from clients.networks.objective import (
    AppliedObjective,
    SeenFeatures,
    applied,
    as_layers,
    head_of,
    resized,
    stepping,
)
from clients.networks.stacks import (
    PerceptronStack,
    accelerated,
    can_stack,
    make_stack,
    trainable,
)
from clients.networks.training import (
    CPU,
    OWNER,
    STOPPING_LOSSES,
    TASK_LOSSES,
    BatchLoss,
    DeviceName,
    EarlyStopping,
    OptimizerName,
    RecipeLoss,
    Rows,
    Schedule,
    Stack,
    TrainingData,
    as_float32,
    at_rates,
    blank_state,
    check_count,
    check_state,
    checked_set,
    find_device,
    hold_out,
    isolated,
    learning_rates,
    logits_of,
    soft_targets,
    state_of,
    steps_per_epoch,
    tiny_as_zero,
)
from fl_strategies._util import Array, FloatArray, counted
from fl_strategies.errors import (
    InvalidData,
    MissingExtra,
    NotFitted,
    UnsupportedLearner,
    require,
    require_data,
)
from fl_strategies.learners import DenseLayer, Objective, Recipe, Task, TrainingSet
from fl_strategies.party.party import check_rows

if TYPE_CHECKING:
    from clients.networks.compiled import CompiledPerceptrons

Augment: TypeAlias = Callable[[Tensor], Tensor]

ROWS_PER_CHUNK: Final = 4096
ROWS_IN_CACHE: Final = 64
SQUARED_SCORES: Final = Recipe()


class _Member(NamedTuple):
    """One twin of many, with what it learns and what it stops by."""

    twin: Any
    x: Array
    y: Array
    rng: np.random.Generator
    watched: Rows


@dataclass(eq=False)
class TorchLearner:
    """A model made of any PyTorch module.

    Parameters
    ----------
    module_fn : factory
        Builds a new module from float32 rows (n, ...) to logits (n, num_classes), or to an
        object that has them as `logits`.
    num_classes : int
        Length of the federation's class list; number of labels or outputs in other tasks.
    task : "single-label", "multi-label" or "regression"
        What `fit` learns: class indices (n,) by their cross-entropy; labels
        (n, num_classes) of -1 (unknown), 0 and 1 by the mean binary cross-entropy of the
        known ones in a batch; or numbers (n, num_classes) by their mean squared error.
    epochs, batch_size : int
        Passes over the training rows, and rows per step. Every pass uses every row; a last
        batch of a single row joins the one before it, because batch normalisation cannot
        learn from one row.
    learning_rate, weight_decay : float
        Settings of the optimizer; the decay is an L2 penalty.
    optimizer : "adam" or "sgd"
        Every call of `fit`, `partial_fit` and `distill` starts a new one.
    momentum : float
        Of "sgd" only.
    schedule : "constant" or "cosine"
        A cosine takes the rate of every step of a call from `learning_rate` down to
        `final_learning_rate`.
    final_learning_rate : float, optional
        `learning_rate` / 100 if omitted.
    augment : callable, optional
        Changes the rows (b, ...) of every training batch, in place if it likes, but never
        rows to predict. PyTorch's default generator is seeded from `rng` meanwhile, so draws
        by `torch.rand` and its kin are repeatable. See `clients.networks.images`.
    channels_last : bool
        Lay images (n, channels, height, width) out in memory as convolutions like them:
        around 1.4 times as fast with several channels. The module must then use `flatten`
        or `reshape` instead of `view` after a convolution.
    patience : int (default: 0)
        Early stopping of `fit` and `fit_many`, off if 0: so many epochs in a row without
        fewer mistakes (a lower loss where rows have no single label) end the training, and
        the module has the weights of its best epoch, the last of several. Every class counts
        alike, however few its rows. `partial_fit` and `distill` take all epochs that they
        are given.
    validation_share : float (default: 0)
        Share of the rows that are not learned but stopped by, with patience. If 0, or less
        than a row, training stops by the rows that it learns, once it knows them.
    device : "cpu", "cuda", "mps" or "auto" (default: "cpu")
        Where the module is trained and asked; "auto" takes the first of CUDA, MPS and the
        processor that is available. Equal bits for equal seeds are promised on the
        processor only.

    Attributes
    ----------
    steps_taken, epochs_trained : int
        Of the last call that learned, until it was stopped; 0 before the first. With early
        stopping they depend on the records, and so are as private as these.

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
    task: Task = "single-label"
    epochs: int = 20
    batch_size: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    optimizer: OptimizerName = "adam"
    momentum: float = 0.9
    schedule: Schedule = "constant"
    final_learning_rate: float | None = None
    augment: Augment | None = None
    channels_last: bool = False
    patience: int = 0
    validation_share: float = 0.0
    device: DeviceName = "cpu"
    _device: torch.device = field(default=CPU, init=False, repr=False)
    steps_taken: int = field(default=0, init=False, repr=False)
    epochs_trained: int = field(default=0, init=False, repr=False)
    _module: nn.Module | None = field(default=None, init=False, repr=False)
    _row_shape: tuple[int, ...] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the settings."""
        _check_settings(self)
        self._device = find_device(self.device)

    def fit(self, x: Array, y: Array, *, rng: np.random.Generator) -> Self:
        """Learn what the task says about rows `x` (n, ...) with a newly initialised module."""
        x, y = checked_set(x, y, self.num_classes, self.task)
        (x, y), watched = hold_out(x, y, self.validation_share, rng)
        return self._learn(None, x, y, self._loss, self.epochs, rng, watched=watched)

    def partial_fit(
        self,
        x: Array,
        y: Array,
        *,
        rng: np.random.Generator,
        epochs: int,
        objective: Objective | None = None,
    ) -> Self:
        """Continue learning for so many epochs, from the parameters that were learned before.

        A learner without any starts with a new module. The optimizer is new in every call:
        Adam's moments, SGD's momentum and the schedule start again. The terms of an objective
        are added to the loss in every step.
        """
        check_count("epochs", epochs)
        x, y = checked_set(self._checked_rows(x), y, self.num_classes, self.task)
        return self._learn(self._module, x, y, self._loss, epochs, rng, objective=objective)

    def fit_many(
        self, sets: Sequence[TrainingSet], *, rngs: Sequence[np.random.Generator]
    ) -> list[Self]:
        """Return one new fitted twin per training set; twin i uses `rngs[i]` only.

        A twin follows the path it would follow alone, up to the rounding of sums. Modules
        that cannot be stacked (with buffers, dropout, or operations that `vmap` lacks),
        labels that may be unknown, `augment` and `channels_last` make them be fitted one
        after the other. Sets that share one array `x` share it here as well, unless some of
        its rows are to stop by. Every twin stops by itself.
        """
        rule = f"{len(sets)} generators, one a training set"
        require(len(rngs) == len(sets), OWNER, "rngs", rule, len(rngs))
        twins = [copy.copy(self) for _ in sets]
        groups = defaultdict(list)
        for twin, training_set, rng in zip(twins, sets, rngs, strict=True):
            x, y = checked_set(*training_set, self.num_classes, self.task)
            (x, y), watched = hold_out(x, y, self.validation_share, rng)
            pace = steps_per_epoch(len(x), self.batch_size), x.shape[1:]
            groups[pace].append(_Member(twin, x, y, rng, watched))
        for members in groups.values():
            self._fit_group(members)
        return twins

    def distill(
        self,
        x: Array,
        targets: FloatArray,
        *,
        rng: np.random.Generator,
        recipe: Recipe = SQUARED_SCORES,
    ) -> Self:
        """Learn ``link(logits(x) / temperature) = targets`` (n, num_classes), nearly.

        Starts from what was learned before, if anything was, with a new optimizer. Without
        a recipe targets are logits, and their mean squared error is minimised.
        """
        x, targets = self._checked_rows(x), np.asarray(targets)
        require_data(len(x) > 0, OWNER, "x", "at least one row", len(x))
        targets = soft_targets(targets, (len(x), self.num_classes), recipe)
        epochs = recipe.epochs or self.epochs
        return self._learn(self._module, x, targets, RecipeLoss(recipe), epochs, rng)

    def predict(self, x: Array) -> Array:
        """Return the likeliest class of every row, (n,); or labels, or outputs.

        With multi-label 1 for every label with a logit above 0, int64 (n, num_classes);
        with regression the outputs themselves.
        """
        logits = self.logits(x)
        if self.task == "single-label":
            return np.asarray(logits.argmax(axis=1))
        return logits if self.task == "regression" else (logits > 0).astype(np.int64)

    def logits(self, x: Array) -> FloatArray:
        """Return the module's output for rows `x` (n, ...), float32 (n, num_classes)."""
        module, x = self._fitted(), self._checked_rows(x)
        with isolated():
            return self._scores(module, x)

    def features(self, x: Array) -> FloatArray:
        """Return what the last dense layer takes for rows `x`, float32 (n, num_features)."""
        module, x = self._fitted(), self._checked_rows(x)
        features = np.empty((len(x), head_of(module).in_features), dtype=np.float32)
        with isolated(), SeenFeatures(module) as seen:
            for start in range(0, len(x), ROWS_PER_CHUNK):
                chunk = slice(start, start + ROWS_PER_CHUNK)
                self._evaluate(module, x[chunk])
                features[chunk] = seen.of(len(x[chunk])).cpu()
        return features

    def to_arrays(self) -> dict[str, Array]:
        """Return copies of the module's parameters and buffers by name."""
        return {name: value.copy() for name, value in state_of(self._fitted()).items()}

    def from_arrays(self, arrays: Mapping[str, Array]) -> Self:
        """Return a fitted twin; raise `KnowledgeMismatch` for arrays that do not fit."""
        twin = self.initialised()
        check_state(arrays, state_of(twin._fitted()))
        twin._fitted().load_state_dict({name: torch.tensor(arrays[name]) for name in arrays})
        return twin

    def initialised(self, *, rng: np.random.Generator | None = None) -> Self:
        """Return a twin with new parameters, those that `fit` would start from."""
        with isolated(rng):
            return copy.copy(self)._keep(self._new_module(), None)

    def head(self) -> DenseLayer:
        """Return weights (num_classes, num_features) and biases of the last dense layer."""
        layer = head_of(self._fitted())
        return layer.weight.detach().cpu().numpy(), layer.bias.detach().cpu().numpy()

    def to_layers(self) -> list[DenseLayer]:
        """Return weights (outputs, inputs) and biases of every layer, from inputs to logits.

        The layers must be used in the order in which the module names them, with the same
        activation for all units between them.
        """
        layers = as_layers(self.to_arrays())
        if layers is None:
            raise UnsupportedLearner(
                f"{OWNER}: the module must have dense layers with biases and nothing else "
                "that learns, got others. Use an nn.Sequential of nn.Linear and activations."
            )
        return layers

    def from_layers(self, layers: Sequence[DenseLayer]) -> Self:
        """Return a fitted twin of these layers, with as many hidden units as they have."""
        flat = [np.asarray(array, dtype=np.float32) for layer in layers for array in layer]
        arrays = dict(zip(blank_state(self.module_fn), flat, strict=True))
        return self.sized_for(arrays).from_arrays(arrays)

    def sized_for(self, arrays: Mapping[str, Array]) -> Self:
        """Return an unfitted twin with as many hidden units as arrays of its kind have.

        Arrays with other inputs or outputs give it the usual size: memory must follow what
        arrived, and a bias alone would decide how many weights there are.
        """
        twin = copy.copy(self)
        twin.module_fn = resized(self.module_fn, arrays)
        return twin

    def _keep(
        self,
        module: nn.Module,
        row_shape: tuple[int, ...] | None,
        steps: int = 0,
        epochs: int = 0,
    ) -> Self:
        self._module, self._row_shape = module.eval(), row_shape
        self.steps_taken, self.epochs_trained = steps, epochs
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
        return module.to(self._device)

    def _checked_rows(self, x: Array) -> Array:
        x = np.asarray(x)
        check_rows(OWNER, "x", x)
        known = self._row_shape in (None, x.shape[1:])
        rule = f"rows of shape {self._row_shape}, like the training rows"
        require_data(known, OWNER, "x", rule, x.shape[1:])
        return x

    def _scores(self, module: nn.Module, x: Array) -> FloatArray:
        scores = np.empty((len(x), self.num_classes), dtype=np.float32)
        for start in range(0, len(x), ROWS_PER_CHUNK):
            chunk = slice(start, start + ROWS_PER_CHUNK)
            scores[chunk] = self._evaluate(module, x[chunk])
        return scores

    def _evaluate(self, module: nn.Module, x: Array) -> Array:
        rows = torch.from_numpy(as_float32("x", [x]))
        try:
            with torch.no_grad():
                scores = self._answers(module.eval(), rows.to(self._device))
        except (RuntimeError, ValueError, IndexError) as error:
            raise InvalidData(
                f"{OWNER}: x must be rows that the module takes, got shape {x.shape[1:]}. "
                f"PyTorch says: {str(error).partition(chr(10))[0]}"
            ) from error
        shape, expected = tuple(getattr(scores, "shape", ())), (len(x), self.num_classes)
        rule = f"a factory of modules with outputs of shape {expected}"
        require(shape == expected, OWNER, "module_fn", rule, shape)
        return np.asarray(scores.cpu())

    def _answers(self, module: nn.Module, rows: Tensor) -> Tensor:
        model = accelerated(module)
        if isinstance(model, nn.Module):
            return logits_of(model(self._laid_out(rows)))
        return torch.cat([model(some) for some in torch.split(rows, ROWS_IN_CACHE)])

    def _fit_group(self, members: Sequence[_Member]) -> None:
        if len(members) == 1 or not self._stackable(members[0].x[:2]):
            for twin, x, y, rng, watched in counted(members, "models"):
                twin._learn(None, x, y, self._loss, self.epochs, rng, watched=watched)
            return
        modules = []
        for member in members:
            with isolated(member.rng):
                modules.append(self._new_module())
        with isolated():
            stack = make_stack(modules)
            sets = [(member.x, member.y) for member in members]
            rngs = [member.rng for member in members]
            watch = self._watch(modules, [member.watched for member in members])
            epochs = self._train(stack, sets, self._loss, self.epochs, rngs, watch=watch)
        pace = steps_per_epoch(len(members[0].x), self.batch_size)
        for member, module, done in zip(members, modules, epochs, strict=True):
            member.twin._keep(module, member.x.shape[1:], done * pace, done)

    def _stackable(self, x: Array) -> bool:
        if self.task == "multi-label" or self.augment is not None:
            return False
        with isolated():
            if self.channels_last and image_layers(self._new_module()) is None:
                return False
        rows = torch.from_numpy(as_float32("x", [x, x])).to(self._device)
        return can_stack(self._new_module, rows, self.num_classes)

    @property
    def _loss(self) -> BatchLoss:
        return TASK_LOSSES[self.task]

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
        watched: Rows | None = None,
    ) -> Self:
        with isolated(rng):
            module = self._new_module() if module is None else module
            self._evaluate(module, x[:1])  # names a misfit before training starts
            trainer, sets = stepping(self, objective), [(x, targets)]
            with applied(objective, module, loss, self.task) as own:
                model = trainable(module.train(), as_it_is=own is not None)
                watch = self._watch([module], [watched]) if watched is not None else None
                loss = loss if own is None else own.loss
                (done,) = trainer._train(model, sets, loss, epochs, [rng], own, watch)
        pace = steps_per_epoch(len(x), self.batch_size)
        return self._keep(module, x.shape[1:], done * pace, done)

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
    ) -> "CompiledPerceptrons | None":
        """Return what trains the model by kernels; None where they cannot or are slower."""
        usable = self.optimizer == "adam" and self.augment is None and self._device == CPU
        if not usable or not isinstance(model, PerceptronStack):
            return None
        try:
            from clients.networks.compiled import find_trainer
        except MissingExtra:  # without Numba
            return None
        size, decay = self.batch_size, self.weight_decay
        return find_trainer(model, sets, loss, batch_size=size, weight_decay=decay)

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
        optimizer = self._new_optimizer(model.parameters(), fused=self._device == CPU)
        pace = steps_per_epoch(max(len(x) for x, _ in sets), self.batch_size)
        batches = TrainingData(sets).batches(len(rates) // pace, self.batch_size, rngs)
        steps = zip(batches, at_rates(optimizer, rates), strict=True)
        for step, (batch, _) in enumerate(steps, 1):
            optimizer.zero_grad()
            torch.autograd.backward(self._batch_loss(model, loss, *batch))
            if own is not None:
                own.add()
            optimizer.step()
            if watch is not None and step % pace == 0 and watch.ends(model):
                break

    def _new_optimizer(
        self, parameters: Iterable[Tensor], *, fused: bool
    ) -> torch.optim.Optimizer:
        rate, decay = self.learning_rate, self.weight_decay
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, rate, weight_decay=decay, fused=fused)
        return torch.optim.SGD(
            parameters, rate, momentum=self.momentum, weight_decay=decay, fused=fused
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
        first, last = self.learning_rate, self.final_learning_rate
        last = first / 100 if last is None else last
        return learning_rates(self.schedule, first, last, num_steps)

    def _laid_out(self, rows: Tensor) -> Tensor:
        images = self.channels_last and rows.ndim == 4
        return rows.contiguous(memory_format=torch.channels_last) if images else rows

    def _watch(
        self, modules: Sequence[nn.Module], watched: Sequence[Rows]
    ) -> EarlyStopping | None:
        if not self.patience:
            return None
        loss = STOPPING_LOSSES[self.task]
        return EarlyStopping(
            modules, watched, scores=self._scores, loss=loss, patience=self.patience
        )


def _check_settings(learner: TorchLearner) -> None:
    """Raise `InvalidParameter` for the first setting of a learner that cannot be used."""
    require(callable(learner.module_fn), OWNER, "module_fn", "callable", learner.module_fn)
    usable = learner.augment is None or callable(learner.augment)
    require(usable, OWNER, "augment", "callable", learner.augment)
    for name, kind in (("task", Task), ("optimizer", OptimizerName), ("schedule", Schedule)):
        options, given = get_args(kind), getattr(learner, name)
        require(given in options, OWNER, name, f"one of {', '.join(options)}", given)
    check_count("num_classes", learner.num_classes, 2 if learner.task == "single-label" else 1)
    for name in ("epochs", "batch_size"):
        check_count(name, getattr(learner, name))
    check_count("patience", learner.patience, least=0)
    rate, decay = learner.learning_rate, learner.weight_decay
    require(0 < rate < math.inf, OWNER, "learning_rate", "finite and above 0", rate)
    require(0 <= decay < math.inf, OWNER, "weight_decay", "finite and at least 0", decay)
    for name in ("momentum", "validation_share"):
        share = getattr(learner, name)
        require(0 <= share < 1, OWNER, name, "at least 0 and below 1", share)
    stops = learner.patience > 0 or learner.validation_share == 0
    require(stops, OWNER, "patience", "at least 1 with a validation_share", learner.patience)
    last = learner.final_learning_rate
    falls = last is None or 0 <= last <= rate
    require(falls, OWNER, "final_learning_rate", "between 0 and learning_rate", last)
