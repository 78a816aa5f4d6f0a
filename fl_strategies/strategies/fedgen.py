"""FedGen: FedAvg with a generator of features, and no public rows.

    round r   server   sends the model, from round 2 on with the generator
              party    trains it on its records and on generated features
                       sends it and its class counts
              server   averages the models; trains the generator by their last layers

The generator learns features of a class from nothing but the parties' last layers. Label y and
noise e give features z = A2 relu(A1 [y, e] + a1) + a2. Its objective is the mean over labels
and noise of

    sum_k share_k(y) CE(W_k z + b_k, y)  +  diversity exp(-mean |e_i - e_j|^2 |z_i - z_j|)

where share_k(y) is party k's share of the records of class y. The network is so small that
its gradient is written out here, and the server needs no library of networks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final, Self

import numpy as np
import scipy
from flwr.app import ArrayRecord, ConfigRecord

from fl_strategies.extend import (
    Array,
    CountedParty,
    CountedStrategy,
    CountedWeights,
    FloatArray,
    Generated,
    HeadedLearner,
    IntArray,
    Knowledge,
    Learner,
    Metrics,
    Objective,
    Party,
    ReleasePlan,
    WeightsOptions,
    WeightsState,
    believed_counts,
    derive_rng,
    option,
    read_round,
    read_seed,
    require_headed,
    require_known,
)
from fl_strategies.learners import DenseLayer
from fl_strategies.strategies.weights.restraint import restrained

MOST_GENERATED: Final = 100_000
NAMES: Final = ("hidden-weight", "hidden-bias", "feature-weight", "feature-bias")
MOST_UNITS: Final = 10_000
ROWS_PER_CHUNK: Final = 1024
GENERATOR: Final = "generator/"
"""Prefix of the names of the generator's arrays; the others are the model's."""
CLASS_SHARES: Final = "class-shares"
GENERATOR_LOSS: Final = "generator-loss"
"""Metric: the generator's objective in its last steps; NaN without a generator."""
_LAST_STEPS: Final = 20
_DECAYS: Final = (0.9, 0.999)
_TINY: Final = 1e-8


@dataclass(frozen=True, kw_only=True)
class FedGenOptions(WeightsOptions):
    """Options of `FedGen`; see also `WeightsOptions`.

    Parameters
    ----------
    strength : float
        Weight of generated features in a party's training; with 0 it is FedAvg.
    num_generated : int
        Features that a party generates in a round, all of which count in every step.
    generator_steps, generator_batch, generator_rate : int, int, float
        How the server trains the generator in a round: steps of Adam, features in each, and
        their size.
    generator_units, noise_units : int
        Its hidden units, and numbers of noise that it turns into features.
    diversity : float
        Weight of the term that keeps features of one class apart.
    """

    owner: ClassVar[str] = "FedGen"

    strength: float = option(1.0, "weight of generated features; 0: FedAvg", least=0, most=1e6)
    num_generated: int = option(
        256, "features that a party generates in a round", least=1, most=MOST_GENERATED
    )
    generator_steps: int = option(100, "steps of the generator in a round", least=1)
    generator_batch: int = option(32, "features in such a step", least=2, most=4096)
    generator_rate: float = option(0.001, "size of such a step", above=0)
    generator_units: int = option(128, "hidden units of the generator", least=1, most=10_000)
    noise_units: int = option(32, "numbers of its noise", least=1, most=5_000)
    diversity: float = option(1.0, "weight of keeping features apart", least=0)


@dataclass(frozen=True)
class Heads:
    """Last layers of the parties' networks, and how much each knows of a class.

    `shares` (num_parties, num_classes) are those of the records of each class; 0 for classes
    that nobody has.
    """

    layers: Sequence[DenseLayer]
    shares: FloatArray


class Generator:
    """Features of labels; see the module. Its four arrays have the order of `NAMES`."""

    def __init__(self, weights: Sequence[FloatArray], num_classes: int) -> None:
        self.weights, self.num_classes = list(weights), num_classes

    @classmethod
    def drawn(cls, sizes: tuple[int, int, int, int], rng: np.random.Generator) -> Self:
        """Return one of so many classes, noise, hidden units and features, at random."""
        num_classes, num_noise, num_hidden, num_features = sizes
        inputs = num_classes + num_noise
        hidden = rng.normal(size=(num_hidden, inputs)) * np.sqrt(2 / inputs)
        features = rng.normal(size=(num_features, num_hidden)) / np.sqrt(num_hidden)
        return cls(
            [hidden, np.zeros(num_hidden), features, np.zeros(num_features)], num_classes
        )

    def to_arrays(self) -> dict[str, Array]:
        """Return the weights by their names."""
        return dict(zip(NAMES, self.weights, strict=True))

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Array], num_classes: int, num_features: int
    ) -> Self:
        """Return a received one; raise `KnowledgeMismatch` for arrays that are none."""
        named = arrays.keys() == set(NAMES)
        require_known(named, "Generator", "arrays", ", ".join(NAMES), "others")
        weights = [np.asarray(arrays[name]) for name in NAMES]
        hidden, features = weights[0], weights[2]
        matrices = hidden.ndim == features.ndim == 2 and num_classes < hidden.shape[1]
        rule = f"matrices, of {num_classes} classes and noise"
        require_known(matrices, "Generator", "weights", rule, "others")
        num_hidden, num_inputs = hidden.shape
        shapes = [(num_hidden, num_inputs), (num_hidden,)]
        shapes += [(num_features, num_hidden), (num_features,)]
        fits = [weight.shape for weight in weights] == shapes
        fits = fits and max(num_hidden, num_inputs) <= MOST_UNITS
        require_known(fits, "Generator", "shapes", f"{shapes}", "others")
        finite = all(w.dtype == np.float64 and np.isfinite(w).all() for w in weights)
        require_known(finite, "Generator", "weights", "finite float64", "others")
        return cls(weights, num_classes)

    def sample(self, labels: IntArray, rng: np.random.Generator) -> FloatArray:
        """Return features of labels (n,), each with noise of its own, (n, num_features)."""
        # A few at a time: whoever sends a generator decides how many hidden units it has.
        starts = range(0, len(labels), ROWS_PER_CHUNK)
        parts = [labels[start : start + ROWS_PER_CHUNK] for start in starts]
        return np.concatenate([self.forward(self.inputs(part, rng))[1] for part in parts])

    def inputs(self, labels: IntArray, rng: np.random.Generator) -> FloatArray:
        """Return one-hot labels beside new noise."""
        num_noise = self.weights[0].shape[1] - self.num_classes
        noise = rng.normal(size=(len(labels), num_noise))
        return np.hstack([np.eye(self.num_classes)[labels], noise])

    def forward(self, inputs: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return hidden units and features."""
        first, first_bias, second, second_bias = self.weights
        hidden = np.maximum(inputs @ first.T + first_bias, 0)
        return hidden, hidden @ second.T + second_bias

    def gradient(
        self, inputs: FloatArray, labels: IntArray, heads: Heads, diversity: float
    ) -> tuple[float, list[FloatArray]]:
        """Return the objective on a batch, and its gradient by the weights."""
        hidden, features = self.forward(inputs)
        loss, by_features = ensemble_loss(features, labels, heads)
        spread, by_spread = diversity_loss(features, inputs[:, self.num_classes :])
        by_features = by_features + diversity * by_spread
        by_hidden = (by_features @ self.weights[2]) * (hidden > 0)
        slopes = [by_hidden.T @ inputs, by_hidden.sum(axis=0)]
        slopes += [by_features.T @ hidden, by_features.sum(axis=0)]
        return loss + diversity * spread, slopes


def ensemble_loss(
    features: FloatArray, labels: IntArray, heads: Heads
) -> tuple[float, FloatArray]:
    """Return how badly the parties' last layers recognise features, and its gradient."""
    rows, loss, slope = np.arange(len(labels)), 0.0, np.zeros_like(features)
    for (weight, bias), shares in zip(heads.layers, heads.shares, strict=True):
        scores = scipy.special.log_softmax(features @ weight.T + bias, axis=1)
        counted = shares[labels] / len(labels)
        loss -= float(counted @ scores[rows, labels])
        errors = np.exp(scores)
        errors[rows, labels] -= 1
        slope += (counted[:, None] * errors) @ weight
    return loss, slope


def diversity_loss(features: FloatArray, noise: FloatArray) -> tuple[float, FloatArray]:
    """Return how alike features of different noise are, from 0 to 1, and its gradient."""
    (count, size), sums, away = features.shape, np.empty_like(features), []
    # Row by row: features by features by numbers would fill memory.
    for row, (made, drawn) in enumerate(zip(features, noise, strict=True)):
        apart, steps = np.square(drawn - noise).mean(axis=1), made - features
        away.append(apart * np.abs(steps).mean(axis=1))
        sums[row] = (apart[:, None] * np.sign(steps)).sum(axis=0)
    alike = float(np.exp(-np.mean(away)))
    return alike, -alike * 2 / (count**2 * size) * sums


class Adam:
    """Steps of the optimizer Adam (Kingma and Ba, ICLR 2015)."""

    def __init__(self, rate: float) -> None:
        self.rate, self._steps = rate, 0
        self._moments: list[tuple[FloatArray, FloatArray]] = []

    def step(self, weights: list[FloatArray], slopes: Sequence[FloatArray]) -> None:
        """Change the weights along their slopes."""
        if not self._moments:
            self._moments = [(np.zeros_like(slope), np.zeros_like(slope)) for slope in slopes]
        self._steps += 1
        first, second = _DECAYS
        for at, slope in enumerate(slopes):
            mean, square = self._moments[at]
            mean = first * mean + (1 - first) * slope
            square = second * square + (1 - second) * slope**2
            self._moments[at] = mean, square
            unbiased = mean / (1 - first**self._steps)
            spread = np.sqrt(square / (1 - second**self._steps))
            weights[at] = weights[at] - self.rate * unbiased / (spread + _TINY)


class FedGenParty(CountedParty):
    """The role of `CountedParty` that also learns to recognise what a generator makes."""

    def plan(self, party: Party, config: ConfigRecord) -> ReleasePlan:
        """Return also how many generated features are to be learned."""
        asked, options = super().plan(party, config), FedGenOptions.received(config)
        return replace(asked, predictions=options.num_generated * options.local_epochs)

    def weights_of(self, received: Knowledge) -> Mapping[str, Array]:
        """Return the model's arrays."""
        return {n: a for n, a in received.arrays.items() if not n.startswith(GENERATOR)}

    def objective(
        self, party: Party, received: Knowledge | None, config: ConfigRecord
    ) -> Objective | None:
        """Return the cross-entropy of generated features; none before there is a generator."""
        options = FedGenOptions.received(config)
        if received is None or not options.strength:
            return None
        own = {
            name.removeprefix(GENERATOR): array
            for name, array in received.arrays.items()
            if name.startswith(GENERATOR)
        }
        if not own:
            return None
        shares = np.asarray(own.pop(CLASS_SHARES, np.empty(0)))
        fits = shares.shape == (party.num_classes,) and bool((shares >= 0).all())
        fits = fits and bool(np.isclose(shares.sum(), 1))
        require_known(fits, "Generator", CLASS_SHARES, "shares of all classes", "others")
        learner = require_headed(party.owner, party.learner_fn())
        weight, _ = learner.from_arrays(self.weights_of(received)).head()
        generator = Generator.from_arrays(own, party.num_classes, weight.shape[1])
        rng = party.rng(read_seed(config), "generated", read_round(config))
        labels = rng.choice(len(shares), size=options.num_generated, p=shares / shares.sum())
        features = generator.sample(labels, rng)
        term = Generated(features=features, labels=labels, strength=options.strength)
        return Objective(terms=(term,))


@dataclass(kw_only=True)
class FedGenState(WeightsState):
    """Also the generator's arrays, and the class shares that it is asked for."""

    generator: dict[str, Array] = field(default_factory=dict)


class FedGen(CountedStrategy):
    """FedAvg with a generator of features, from which parties learn classes they lack.

    Zhu, Hong, Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning
    (ICML 2021), Algorithm 1: after every round the server trains a generator that makes, for
    a label, features that the parties' last layers recognise. From round 2 on parties get it
    with the model, and their last layer also learns its features.

    Leaves the party
        In every round the weights of its model, and its number of records of every class.
    Guarantee
        None: epsilon is infinite, also if parties train privately, because class counts leave
        as they are.
    Differs from the paper
        Weights and class shares of the objective are as in the authors' code. A party draws
        its generated features once a round, and all of them count in every step. The
        generator has no batch normalisation, and the code's further term, which compares a
        party's scores of records with those of generated features, is omitted.

    Parameters
    ----------
    num_classes, learner_name, public, **federation
        See `FlowerStrategy`. Records have one label each.
    learner_fn : factory
        Of networks that end in a dense layer (`HeadedLearner`), such as `TorchLearner`.
    options : FedGenOptions, optional

    Examples
    --------
    ``FedGen(learner_fn=..., num_classes=10, options=FedGenOptions(strength=0.5))``
    """

    name: ClassVar[str] = "fedgen"
    options_type = FedGenOptions
    options: FedGenOptions
    state_type = FedGenState
    state: FedGenState
    party_learner_needs = final_learner_needs = (HeadedLearner,)

    _learner: HeadedLearner

    def require_learner(self, learner: Learner) -> HeadedLearner:
        """Return the learner if it has a last layer."""
        return require_headed("FedGen", learner)

    def lesson(self) -> Knowledge | None:
        """Return the present model, with the generator once there is one."""
        model = self.state.delivery
        own = {GENERATOR + name: array for name, array in self.state.generator.items()}
        return None if model is None else replace(model, arrays={**model.arrays, **own})

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Average the weights, and train the generator by the parties' last layers."""
        arrays, metrics = super().finish()
        loss = math.nan
        if arrays is not None and self.options.strength:
            parts = self.counted
            loss = self._train_generator(
                restrained(parts)[0] if self.options.restrain else parts
            )
        return arrays, {**metrics, GENERATOR_LOSS: loss}

    def _train_generator(self, parts: Sequence[CountedWeights]) -> float:
        """Continue training the generator; return its objective at the end."""
        options = self.options
        counts = believed_counts(parts, restrain=options.restrain)
        heads = Heads(
            [_as_double(self._learner.from_arrays(part.arrays).head()) for part in parts],
            counts / np.maximum(counts.sum(axis=0), 1),
        )
        shares = counts.sum(axis=0) / counts.sum()
        rng = derive_rng(self.seed, "fedgen", self.round_)
        generator = self._generator(heads.layers[0][0].shape[1])
        adam, losses = Adam(options.generator_rate), list[float]()
        for _ in range(options.generator_steps):
            labels = rng.choice(self.num_classes, size=options.generator_batch, p=shares)
            inputs = generator.inputs(labels, rng)
            loss, slopes = generator.gradient(inputs, labels, heads, options.diversity)
            adam.step(generator.weights, slopes)
            losses.append(loss)
        self.state.generator = {**generator.to_arrays(), CLASS_SHARES: shares}
        return float(np.mean(losses[-_LAST_STEPS:]))

    def _generator(self, num_features: int) -> Generator:
        if self.state.generator:
            kept = {name: self.state.generator[name] for name in NAMES}
            return Generator.from_arrays(kept, self.num_classes, num_features)
        options = self.options
        sizes = self.num_classes, options.noise_units, options.generator_units, num_features
        return Generator.drawn(sizes, derive_rng(self.seed, "fedgen", "initial"))


def _as_double(layer: DenseLayer) -> DenseLayer:
    weight, bias = layer
    return weight.astype(np.float64), bias.astype(np.float64)
