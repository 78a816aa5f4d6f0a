"""FedGen: FedAvg whose server learns what features of each class are like, without data."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, Unpack

import numpy as np
from flwr.app import ArrayRecord

from fl_strategies.arrays import Array
from fl_strategies.core.protocols import HeadedLearner, LearnerFactory, require_headed
from fl_strategies.core.strategy import FederationOptions
from fl_strategies.randomness import derive_rng
from fl_strategies.strategies.fedgen.generator import Adam, Generator, Heads
from fl_strategies.strategies.fedgen.options import FedGenOptions
from fl_strategies.strategies.fedgen.party import CLASS_SHARES, GENERATOR
from fl_strategies.strategies.weights.counted import (
    CountedWeights,
    believed_counts,
    split_counts,
)
from fl_strategies.strategies.weights.restraint import restrained
from fl_strategies.strategies.weights.server import FlowerStrategy, WeightsState
from fl_strategies.wire.knowledge import Knowledge, Metrics

GENERATOR_LOSS: Final = "generator-loss"
"""Metric: the generator's objective in its last steps; NaN without a generator."""
_LAST_STEPS: Final = 20


@dataclass(kw_only=True)
class FedGenState(WeightsState):
    """Also the generator's arrays, and the class shares that it is asked for."""

    generator: dict[str, Array] = field(default_factory=dict)


class FedGen(FlowerStrategy):
    """FedAvg with a generator of features, from which parties learn classes they lack.

    Zhu, Hong, Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning
    (ICML 2021), Algorithm 1: after every round the server trains a generator that makes, for
    a label, features that the parties' last layers recognise (`fedgen.generator`). From round
    2 on parties get it with the model, and their last layer also learns its features.

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
    takes = ("num_classes", "learner_fn", "learner_name", "public", "options")
    options: FedGenOptions
    state_type = FedGenState
    state: FedGenState
    party_learner_needs = final_learner_needs = (HeadedLearner,)

    def __init__(
        self,
        *,
        num_classes: int,
        learner_fn: LearnerFactory,
        learner_name: str = "learner",
        public: Array | None = None,
        options: FedGenOptions | None = None,
        **federation: Unpack[FederationOptions],
    ) -> None:
        super().__init__(
            num_classes=num_classes,
            learner_fn=learner_fn,
            learner_name=learner_name,
            public=public,
            options=options,
            **federation,
        )
        self._learner = require_headed("FedGen", learner_fn())
        self._question: Knowledge | None = None

    def begin_round(self) -> bool:
        """Put model and generator together."""
        ready = super().begin_round()
        self._question, model = self.state.delivery, self.state.delivery
        if model is not None and self.state.generator:
            own = {GENERATOR + name: array for name, array in self.state.generator.items()}
            self._question = Knowledge(model.kind, {**model.arrays, **own}, model.meta)
        return ready

    def knowledge_for(self, node_id: int) -> Knowledge | None:  # noqa: ARG002
        """Return the present model, with the generator once there is one."""
        return self._question

    def check(self, knowledge: Knowledge) -> CountedWeights:
        """Check one party's weights, and that its counts agree with them."""
        weights, counts = split_counts(knowledge, self.num_classes)
        return CountedWeights.of(super().check(weights), counts)

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Average the weights, and train the generator by the parties' last layers."""
        arrays, metrics = super().finish()
        loss = math.nan
        if arrays is not None and self.options.strength:
            said = [reply.knowledge for reply in self.replies]
            loss = self._train_generator(restrained(said)[0] if self.options.restrain else said)
        return arrays, {**metrics, GENERATOR_LOSS: loss}

    def _train_generator(self, parts: Sequence[object]) -> float:
        """Continue training the generator; return its objective at the end."""
        options, known = self.options, [p for p in parts if isinstance(p, CountedWeights)]
        counts = believed_counts(known, restrain=options.restrain)
        heads = Heads(
            [_as_double(self._learner.from_arrays(p.arrays).head()) for p in known],
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
        kept: Mapping[str, Array] = {
            name: array for name, array in self.state.generator.items() if name != CLASS_SHARES
        }
        if kept:
            return Generator.from_arrays(kept, self.num_classes, num_features)
        options = self.options
        sizes = self.num_classes, options.noise_units, options.generator_units, num_features
        return Generator.drawn(sizes, derive_rng(self.seed, "fedgen", "initial"))


def _as_double(layer: tuple[Array, Array]) -> tuple[Array, Array]:
    weight, bias = layer
    return weight.astype(np.float64), bias.astype(np.float64)
