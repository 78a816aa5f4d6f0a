"""PFNM: perceptrons of one round whose neurons are matched.

    party    trains a network from weights of its own, sends it and its class counts
    server   finds units that the parties' neurons are likely copies of, layer by layer

Neurons are matched under a Beta-Bernoulli process. A neuron is a vector v: its bias, its
outgoing weights, and in the first layer its incoming ones. Units of the global network are
drawn from N(0, sigma0), each party has some of them, more likely those that other parties have
as well, and sees each of them as v ~ N(unit, sigma). Units of a layer are found party by party:
with those of all others held fixed, which units a party's neurons are is a linear assignment
(Proposition 2 of the paper).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
import scipy
from flwr.app import ArrayRecord, ConfigRecord

from fl_strategies.extend import (
    CountedParty,
    CountedStrategy,
    CountedWeights,
    FloatArray,
    IntArray,
    Knowledge,
    KnowledgeStrategy,
    Learner,
    Metrics,
    Party,
    PartyState,
    StartingLearner,
    UnsupportedLearner,
    WeightsOptions,
    believed_counts,
    derive_rng,
    keys,
    option,
    read_round,
    read_seed,
    require,
)
from fl_strategies.learners import DenseLayer, DenseLearner
from fl_strategies.party.role import receiver_of
from fl_strategies.strategies.weights.restraint import (
    FEWEST_RESTRAINED,
    MOST_TIMES_DISTANCE,
    Layout,
    layout_of,
)

Network: TypeAlias = Sequence[DenseLayer]


@dataclass(frozen=True)
class Prior:
    """Variances of a party's neurons around units and of units around 0; how many are new."""

    sigma: float
    sigma0: float
    gamma: float


@dataclass(frozen=True)
class Units:
    """Units that some parties' neurons have been assigned to.

    Sums (num_units, size) of these neurons, each number times its precision; sums of the
    precisions, with the prior's; and how many parties have each unit (num_units,).
    """

    sums: FloatArray
    precisions: FloatArray
    uses: IntArray

    @property
    def means(self) -> FloatArray:
        """The likeliest units."""
        return self.sums / self.precisions


def match_networks(
    networks: Sequence[Network],
    counts: FloatArray,
    prior: Prior,
    *,
    num_sweeps: int,
    rng: np.random.Generator,
) -> list[DenseLayer]:
    """Return one network of the units that the parties' networks are likely made of.

    Layers are matched from the last hidden one to the first: the units that a layer leads to
    are then known. Weights to a class count by a party's share of its records, of which
    `counts` (num_parties, num_classes) has the numbers. After the first time all parties are
    matched anew `num_sweeps` times, in random order.
    """
    weight, bias = _mean_outputs(networks, counts, prior)
    shares = counts / np.maximum(counts.sum(axis=0), 1)
    above = [np.arange(len(bias))] * len(networks)
    precisions, layers = list(shares / prior.sigma), list[DenseLayer]()
    for depth in reversed(range(len(networks[0]) - 1)):
        vectors = [
            _neurons(network, depth, units, len(bias))
            for network, units in zip(networks, above, strict=True)
        ]
        num_own = vectors[0].shape[1] - len(bias)
        own = np.full(num_own, 1 / prior.sigma)
        known = [np.concatenate([own, outgoing]) for outgoing in precisions]
        above, units = match_layer(vectors, known, prior, num_sweeps=num_sweeps, rng=rng)
        layers.insert(0, (units.means[:, num_own:].T, bias))
        weight, bias = units.means[:, 1:num_own], units.means[:, 0]
        precisions = [np.full(len(bias), 1 / prior.sigma)] * len(networks)
    return [(weight, bias), *layers]


def _mean_outputs(networks: Sequence[Network], counts: FloatArray, prior: Prior) -> DenseLayer:
    """Return the likeliest last layer of networks that are matched already."""
    shares = counts / np.maximum(counts.sum(axis=0), 1) / prior.sigma
    total = 1 / prior.sigma0 + shares.sum(axis=0)
    outputs = [network[-1] for network in networks]
    bias = sum(own * b for own, (_, b) in zip(shares, outputs, strict=True))
    if len(networks[0]) > 1:  # hidden units decide what their weights are
        return np.empty((0, 0)), np.asarray(bias / total)
    weight = sum(own[:, None] * w for own, (w, _) in zip(shares, outputs, strict=True))
    return np.asarray(weight / total[:, None]), np.asarray(bias / total)


def _neurons(network: Network, depth: int, above: IntArray, num_above: int) -> FloatArray:
    """Return the neurons of a hidden layer, their outgoing weights by units of the next."""
    weight, bias = network[depth]
    outgoing = np.zeros((len(bias), num_above))
    outgoing[:, above] = network[depth + 1][0].T
    return np.hstack([bias[:, None], weight if depth == 0 else weight[:, :0], outgoing])


def match_layer(
    vectors: Sequence[FloatArray],
    precisions: Sequence[FloatArray],
    prior: Prior,
    *,
    num_sweeps: int,
    rng: np.random.Generator,
) -> tuple[list[IntArray], Units]:
    """Return which units the neurons of each party are, and the units.

    `vectors` has an array (num_neurons, size) per party, `precisions` one (size,) of the
    inverse variances of the numbers of its neurons.
    """
    num_parties, assigned = len(vectors), dict[int, IntArray]()
    sweeps = [rng.permutation(num_parties) for _ in range(num_sweeps)]
    for party in map(int, np.concatenate([np.arange(num_parties), *sweeps])):
        assigned.pop(party, None)
        assigned = _renumbered(assigned)
        units = _units(vectors, precisions, assigned, prior)
        gains = match_gains(vectors[party], precisions[party], units, prior, num_parties)
        _, found = scipy.optimize.linear_sum_assignment(gains, maximize=True)
        is_new = found >= len(units.uses)
        found[is_new] = len(units.uses) + np.arange(is_new.sum())
        assigned[party] = found
    units = _units(vectors, precisions, assigned, prior)
    return [assigned[party] for party in range(num_parties)], units


def match_gains(
    vectors: FloatArray, precisions: FloatArray, units: Units, prior: Prior, num_parties: int
) -> FloatArray:
    """Return what each neuron adds to twice the log-posterior as each unit; then as new ones.

    `vectors` (num_neurons, size) and `precisions` (size,) are those of one party, `units` those
    of all others; the gains are (num_neurons, num_units + num_neurons).
    """
    scaled, joint = vectors * precisions, 1 / (units.precisions + precisions)
    # (sums + scaled)^2 * joint, multiplied out: neurons by units by numbers would fill memory.
    known = scaled**2 @ joint.T + 2 * scaled @ (units.sums * joint).T
    known += (units.sums**2 * (joint - 1 / units.precisions)).sum(axis=1)
    known += 2 * np.log(units.uses / (num_parties - units.uses))
    alone = (scaled**2 / (1 / prior.sigma0 + precisions)).sum(axis=1)
    numbers = np.arange(1, len(vectors) + 1)
    new = alone[:, None] + 2 * np.log(prior.gamma / num_parties / numbers)
    return np.hstack([known, new])


def _renumbered(assigned: Mapping[int, IntArray]) -> dict[int, IntArray]:
    """Return the assignments without units that nobody has."""
    if not assigned:
        return {}
    used = np.unique(np.concatenate(list(assigned.values())))
    return {party: np.searchsorted(used, found) for party, found in assigned.items()}


def _units(
    vectors: Sequence[FloatArray],
    precisions: Sequence[FloatArray],
    assigned: Mapping[int, IntArray],
    prior: Prior,
) -> Units:
    num_units = max((int(found.max()) + 1 for found in assigned.values()), default=0)
    shape = num_units, vectors[0].shape[1]
    sums, totals = np.zeros(shape), np.full(shape, 1 / prior.sigma0)
    uses = np.zeros(num_units, dtype=np.int64)
    for party in sorted(assigned):  # in one order: sums of floats depend on it
        found = assigned[party]
        sums[found] += vectors[party] * precisions[party]
        totals[found] += precisions[party]
        uses[found] += 1
    return Units(sums, totals, uses)


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


@runtime_checkable
class Perceptron(StartingLearner, DenseLearner, Protocol):
    """A perceptron whose first weights can be drawn."""


class PFNM(CountedStrategy):
    """Neurons matched across parties, as many global units as they need; one round.

    Yurochkin, Agarwal, Ghosh, Greenewald, Hoang, Khazaeni: Bayesian Nonparametric Federated
    Learning of Neural Networks (ICML 2019), Algorithm 1 and its multilayer form. The model has
    the parties' layers, with more units in hidden ones.

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
    options: PFNMOptions
    usual_rounds: ClassVar[int] = 1
    last_round = 1
    model_as_made: ClassVar[bool] = False
    party_learner_needs = final_learner_needs = (StartingLearner, DenseLearner)

    _learner: Perceptron

    def require_learner(self, learner: Learner) -> Perceptron:
        """Return a perceptron with weights; raise for others, and those too wide to match."""
        if not isinstance(learner, Perceptron):
            raise UnsupportedLearner(
                f"PFNM: the learner must be a perceptron (to_layers, from_layers) that can "
                f"draw its first weights (initialised), got {type(learner).__name__}. Use "
                f"TorchLearner, or another strategy."
            )
        drawn = learner.initialised(rng=derive_rng(0, "pfnm"))
        widest = max((len(bias) for _, bias in drawn.to_layers()[:-1]), default=0)
        most = math.isqrt(MOST_GAINS // (self.num_parties + 1))
        rule = f"of at most {most} units in a hidden layer, with {self.num_parties} parties"
        require(widest <= most, "PFNM", "learner_fn", rule, widest)
        return drawn

    # Units are found by the parties' neurons alone.
    warm_start = KnowledgeStrategy.warm_start

    def begin_round(self) -> bool:
        """Let the parties draw their first weights."""
        return True

    def _model_layout(self) -> Layout:
        return layout_of(self._learner.to_arrays())

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Match the parties' neurons."""
        parts, options, changed = self.counted, self.options, 0
        networks = [self._network(part) for part in parts]
        if options.restrain:
            networks, changed = as_large_as_most(networks)
        layers = match_networks(
            networks,
            believed_counts(parts, restrain=options.restrain),
            Prior(options.sigma, options.sigma0, options.gamma),
            num_sweeps=options.num_sweeps,
            rng=derive_rng(self.seed, "pfnm", "sweeps"),
        )
        num_units = sum(len(bias) for _, bias in layers[:-1])
        model = self.keep_model(self._learner.from_layers(layers))
        return model, {NUM_UNITS: num_units, keys.NUM_CAPPED: changed}

    def _network(self, part: CountedWeights) -> Network:
        layers = self._learner.from_arrays(part.arrays).to_layers()
        return [(w.astype(np.float64), b.astype(np.float64)) for w, b in layers]


def as_large_as_most(networks: Sequence[Network]) -> tuple[list[Network], int]:
    """Return networks of which none is far larger than the median, and how many have changed.

    The size does not depend on the order of neurons. Fewer than three have no median.
    """
    if len(networks) < FEWEST_RESTRAINED:
        return list(networks), 0
    flat = [np.concatenate([a.ravel() for layer in n for a in layer]) for n in networks]
    sizes = np.array([np.linalg.norm(numbers) for numbers in flat])
    most = MOST_TIMES_DISTANCE * float(np.median(sizes))
    scales = np.minimum(1.0, most / np.maximum(sizes, 1e-300))
    limited = [
        [(scale * w, scale * b) for w, b in network] if scale < 1 else network
        for network, scale in zip(networks, scales, strict=True)
    ]
    return limited, int((scales < 1).sum())


class PFNMParty(CountedParty):
    """The role of `CountedParty`, whose networks are not alike, and the result is wider."""

    def rng(
        self, party: Party, received: Knowledge | None, config: ConfigRecord
    ) -> np.random.Generator:
        """Return a generator of the party's own, unless all are to start alike."""
        if PFNMOptions.received(config).common_start:
            return super().rng(party, received, config)
        return party.rng(read_seed(config), "weights", read_round(config))

    def evaluate(
        self, party: Party, received: Knowledge, config: ConfigRecord, state: PartyState
    ) -> tuple[Learner, Metrics]:
        """Take the matched network, of whatever width, and measure it."""
        twin = receiver_of(party, str(received.meta.get(keys.LEARNER)))
        if isinstance(twin, DenseLearner):
            twin = twin.sized_for(received.arrays)
        model = twin.from_arrays(received.arrays)
        return model, self.measure(party, model, config, state)
