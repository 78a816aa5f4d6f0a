"""PFNM: one round, in which the server matches the neurons of the parties' perceptrons."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Unpack

import numpy as np
from flwr.app import ArrayRecord

from fl_strategies.arrays import Array
from fl_strategies.core.protocols import (
    DenseLayer,
    DenseLearner,
    LearnerFactory,
    StartingLearner,
)
from fl_strategies.core.strategy import FederationOptions
from fl_strategies.exceptions import InvalidParameter, UnsupportedLearner
from fl_strategies.options import option
from fl_strategies.randomness import derive_rng
from fl_strategies.strategies.pfnm.matching import Prior, match_networks
from fl_strategies.strategies.weights.counted import (
    CountedWeights,
    believed_counts,
    split_counts,
)
from fl_strategies.strategies.weights.options import WeightsOptions
from fl_strategies.strategies.weights.restraint import Layout, layout_of
from fl_strategies.strategies.weights.server import FlowerStrategy
from fl_strategies.wire.knowledge import Knowledge, Metrics

NUM_UNITS: Final = "num-hidden-units"
"""Metric: units of all hidden layers of the global network."""


@dataclass(frozen=True, kw_only=True)
class PFNMOptions(WeightsOptions):
    """Options of `PFNM`.

    Parameters
    ----------
    local_epochs : int
        Passes of a party over its records.
    sigma, sigma0 : float
        Variance of a party's neuron around its unit, and of units around 0.
    gamma : float
        Expected number of units of a party: the larger, the more units are new.
    num_sweeps : int
        How often all parties are matched anew, in random order, after the first time.
    common_start : bool
        Let all parties train from the same random weights. The paper's start from their own.
    restrain : bool
        Believe no party any number of records.
    """

    owner: ClassVar[str] = "PFNM"

    local_epochs: int = option(10, "passes of a party over its records", least=1, most=10_000)
    restrain: bool = option(True, "believe no party any number of records")
    sigma: float = option(1.0, "variance of neurons around their unit", above=0)
    sigma0: float = option(10.0, "variance of units", above=0)
    gamma: float = option(50.0, "the larger, the more units are new", above=0)
    num_sweeps: int = option(5, "how often parties are matched anew", least=0, most=1000)
    common_start: bool = option(False, "parties train from the same random weights")


class PFNM(FlowerStrategy):
    """Neurons matched across parties, as many global units as they need; one round.

    Yurochkin, Agarwal, Ghosh, Greenewald, Hoang, Khazaeni: Bayesian Nonparametric Federated
    Learning of Neural Networks (ICML 2019), Algorithm 1 and its multilayer form: see
    `pfnm.matching`. The model has the parties' layers, with more units in hidden ones.

    Leaves the party
        Once the weights of its network, and its number of records of every class.
    Guarantee
        None: epsilon is infinite, also if parties train privately, because class counts leave
        as they are. And weights cannot be restrained as in `FedAvg`: before they are matched,
        neurons of honest parties are as far from each other as a liar's.
    Differs from the paper
        Parties are matched in the order of their numbers first. The prior mean of biases is 0,
        as the paper says; its code has 0.1, and half the weight on how popular units are.

    Parameters
    ----------
    num_classes, learner_name, public, **federation
        See `FlowerStrategy`. Records have one label each.
    learner_fn : factory
        Of perceptrons (`DenseLearner`), such as `TorchLearner` with an `nn.Sequential` of
        dense layers and activations.
    options : PFNMOptions, optional

    Examples
    --------
    ``PFNM(learner_fn=..., num_classes=10, options=PFNMOptions(sigma=0.5))``
    """

    name: ClassVar[str] = "pfnm"
    options_type = PFNMOptions
    options: PFNMOptions
    usual_rounds: ClassVar[int] = 1
    last_round = 1
    party_learner_needs = final_learner_needs = (StartingLearner, DenseLearner)

    def __init__(
        self,
        *,
        num_classes: int,
        learner_fn: LearnerFactory,
        learner_name: str = "learner",
        public: Array | None = None,
        options: PFNMOptions | None = None,
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
        learner = learner_fn()
        if not (isinstance(learner, StartingLearner) and isinstance(learner, DenseLearner)):
            raise UnsupportedLearner(
                f"PFNM: the learner must be a perceptron (to_layers, from_layers) that can "
                f"draw its first weights (initialised), got {type(learner).__name__}. Use "
                f"TorchLearner, or another strategy."
            )
        drawn = learner.initialised(rng=derive_rng(0, "pfnm"))
        drawn.to_layers()  # names what is no perceptron before anybody trains one
        self._perceptron: DenseLearner = drawn
        self._layout = layout_of(drawn.to_arrays())

    def warm_start(self, arrays: Mapping[str, Array]) -> None:  # noqa: ARG002
        """Refuse: units are found by the parties' neurons alone."""
        raise InvalidParameter(
            "PFNM: initial_arrays must be empty, got some. Its model is made of the parties' "
            "networks, not continued from another one."
        )

    def begin_round(self) -> bool:
        """Let the parties draw their first weights."""
        return True

    def check(self, knowledge: Knowledge) -> CountedWeights:
        """Check one party's weights, and that its counts agree with them."""
        weights, counts = split_counts(knowledge, self.num_classes)
        return CountedWeights.of(super().check(weights), counts)

    def _model_layout(self) -> Layout:
        return self._layout

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Match the parties' neurons."""
        self.record_releases()
        said = [reply.knowledge for reply in self.replies]
        layers = self._match([part for part in said if isinstance(part, CountedWeights)])
        model = self._perceptron.from_layers(layers)
        num_units = sum(len(bias) for _, bias in layers[:-1])
        return self.keep_model(model), {NUM_UNITS: num_units}

    def _match(self, parts: list[CountedWeights]) -> list[DenseLayer]:
        options = self.options
        return match_networks(
            [
                [
                    (np.asarray(w, dtype=np.float64), np.asarray(b, dtype=np.float64))
                    for w, b in self._perceptron.from_arrays(part.arrays).to_layers()
                ]
                for part in parts
            ],
            believed_counts(parts, restrain=options.restrain),
            Prior(options.sigma, options.sigma0, options.gamma),
            num_sweeps=options.num_sweeps,
            rng=derive_rng(self.seed, "pfnm", "sweeps"),
        )
