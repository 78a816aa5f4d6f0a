"""PFNM: one round, in which the server matches the neurons of the parties' perceptrons."""

import math
from collections.abc import Mapping, Sequence
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
from fl_strategies.exceptions import InvalidParameter, UnsupportedLearner, require
from fl_strategies.options import option
from fl_strategies.randomness import derive_rng
from fl_strategies.strategies.pfnm.matching import Network, Prior, match_networks
from fl_strategies.strategies.weights.counted import (
    CountedWeights,
    believed_counts,
    split_counts,
)
from fl_strategies.strategies.weights.options import WeightsOptions
from fl_strategies.strategies.weights.restraint import (
    FEWEST_RESTRAINED,
    MOST_TIMES_DISTANCE,
    Layout,
    layout_of,
)
from fl_strategies.strategies.weights.server import FlowerStrategy
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics

NUM_UNITS: Final = "num-hidden-units"
"""Metric: units of all hidden layers of the global network."""
MOST_GAINS: Final = 2**27
"""Most pairs of neurons and units that are compared at once: 1 GiB."""


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
        Believe no party any number of records, and let no network be much larger than the
        median one.
    """

    owner: ClassVar[str] = "PFNM"

    local_epochs: int = option(10, "passes of a party over its records", least=1, most=10_000)
    restrain: bool = option(True, "limit how large one party's network can be")
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
        neurons of honest parties are as far from each other as a liar's. Only what is larger
        than twice the median network is made smaller.
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
    takes = ("num_classes", "learner_fn", "learner_name", "public", "options")
    options: PFNMOptions
    usual_rounds: ClassVar[int] = 1
    last_round = 1
    model_as_made: ClassVar[bool] = False
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
        # Names what is no perceptron, or too wide to match, before anybody trains one.
        _check_widths(drawn.to_layers(), self.num_parties)
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
        parts = [part for part in said if isinstance(part, CountedWeights)]
        networks, changed = [self._network(part) for part in parts], 0
        if self.options.restrain:
            networks, changed = as_large_as_most(networks)
        layers = self._match(networks, parts)
        model = self._perceptron.from_layers(layers)
        num_units = sum(len(bias) for _, bias in layers[:-1])
        return self.keep_model(model), {NUM_UNITS: num_units, keys.NUM_CAPPED: changed}

    def _network(self, part: CountedWeights) -> Network:
        layers = self._perceptron.from_arrays(part.arrays).to_layers()
        return [(w.astype(np.float64), b.astype(np.float64)) for w, b in layers]

    def _match(
        self, networks: Sequence[Network], parts: Sequence[CountedWeights]
    ) -> list[DenseLayer]:
        options = self.options
        return match_networks(
            networks,
            believed_counts(parts, restrain=options.restrain),
            Prior(options.sigma, options.sigma0, options.gamma),
            num_sweeps=options.num_sweeps,
            rng=derive_rng(self.seed, "pfnm", "sweeps"),
        )


def _check_widths(layers: Sequence[DenseLayer], num_parties: int) -> None:
    """Raise `InvalidParameter` for hidden layers that no server could match."""
    widest = max((len(bias) for _, bias in layers[:-1]), default=0)
    most = math.isqrt(MOST_GAINS // (num_parties + 1))
    rule = f"of at most {most} units in a hidden layer, with {num_parties} parties"
    require(widest <= most, "PFNM", "learner_fn", rule, widest)


def as_large_as_most(networks: Sequence[Network]) -> tuple[list[Network], int]:
    """Return networks of which none is far larger than the median, and how many have changed.

    The size does not depend on the order of neurons. Fewer than three have no median.
    """
    if len(networks) < FEWEST_RESTRAINED:
        return list(networks), 0
    flat = [np.concatenate([a.ravel() for layer in n for a in layer]) for n in networks]
    sizes = np.array([np.linalg.norm(numbers) for numbers in flat])
    most = MOST_TIMES_DISTANCE * float(np.median(sizes))
    return [
        network
        if size <= most
        else [(w * (most / size), b * (most / size)) for w, b in network]
        for network, size in zip(networks, sizes, strict=True)
    ], int((sizes > most).sum())
