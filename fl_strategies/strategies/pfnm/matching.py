"""Neurons of several perceptrons matched under a Beta-Bernoulli process: PFNM's arithmetic.

A neuron is a vector v: its bias, its outgoing weights, and in the first layer its incoming
ones. Units of the global network are drawn from N(0, sigma0), each party has some of them,
more likely those that other parties have as well, and sees each of them as v ~ N(unit, sigma).
Units of a layer are found party by party: with those of all others held fixed, which units a
party's neurons are is a linear assignment (Proposition 2 of the paper).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import scipy

from fl_strategies.arrays import FloatArray, IntArray
from fl_strategies.core.protocols import DenseLayer

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

    Parameters
    ----------
    sums : (num_units, size)
        Sums of these neurons, each number times its precision.
    precisions : (num_units, size)
        Sums of the precisions, with the prior's.
    uses : (num_units,)
        How many parties have each of them.
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
    are then known.

    Parameters
    ----------
    networks : one a party, of as many layers
    counts : (num_parties, num_classes)
        Records of each class; weights to a class count by a party's share of its records.
    prior : Prior
    num_sweeps : int
        How often all parties are matched anew, in random order, after the first time.
    rng : Generator
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
    bias = sum(own * network[-1][1] for own, network in zip(shares, networks, strict=True))
    if len(networks[0]) > 1:  # hidden units decide what their weights are
        return np.empty((0, 0)), np.asarray(bias / total)
    weight = sum(
        own[:, None] * network[-1][0] for own, network in zip(shares, networks, strict=True)
    )
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

    Parameters
    ----------
    vectors : one array (num_neurons, size) a party
    precisions : one array (size,) a party
        Inverse variances of the numbers of its neurons.
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
    return (
        [assigned[party] for party in range(num_parties)],
        _units(vectors, precisions, assigned, prior),
    )


def match_gains(
    vectors: FloatArray,
    precisions: FloatArray,
    units: Units,
    prior: Prior,
    num_parties: int,
) -> FloatArray:
    """Return what each neuron adds to twice the log-posterior as each unit; then as new ones.

    Parameters
    ----------
    vectors : (num_neurons, size)
    precisions : (size,)
    units : Units
        Of all other parties.
    prior : Prior
    num_parties : int
        Of the federation.

    Returns
    -------
    gains : (num_neurons, num_units + num_neurons)
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
