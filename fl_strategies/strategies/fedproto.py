"""FedProto: networks whose features of a class agree across parties, and no public rows.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: FedProto: Federated Prototype Learning across
Heterogeneous Clients (AAAI 2022). A prototype is the mean of a network's features over the
records of one class.

    round r   server   sends the model, from round 2 on with the prototypes of all classes
              party    trains it on its records, with features pulled towards the prototypes
                       sends it, its own prototypes and its class counts
              server   averages the models, and the prototypes by the class counts
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord

from fl_strategies.extend import (
    CLASS_COUNTS,
    Array,
    CountedParty,
    CountedStrategy,
    CountedWeights,
    FeatureLearner,
    FloatArray,
    HeadedLearner,
    Knowledge,
    Learner,
    Metrics,
    Objective,
    Party,
    PartyState,
    Prototypes,
    WeightsOptions,
    WeightsState,
    believed_counts,
    option,
    require_features,
    require_headed,
    require_known,
)

PROTOTYPES: Final = "class-prototypes"
KNOWN: Final = "known-prototypes"
MOST_TIMES_MEDIAN: Final = 4.0
"""With `restrain`, no prototype is longer than this many times the median one."""
DRIFT: Final = "prototype-drift"
"""Metric: mean distance of a party's prototypes to the federation's; NaN in round 1."""


@dataclass(frozen=True, kw_only=True)
class FedProtoOptions(WeightsOptions):
    """Options of `FedProto`; see also `WeightsOptions`.

    Parameters
    ----------
    strength : float
        The paper's lambda, weight of the distance to prototypes; with 0 it is FedAvg.
    """

    owner: ClassVar[str] = "FedProto"

    strength: float = option(1.0, "weight of the distance to prototypes", least=0, most=1e6)


class FedProtoParty(CountedParty):
    """The role of `CountedParty` that also pulls features to prototypes, and sends its own."""

    also_leaves = (*CountedParty.also_leaves, "class means of features left without noise")

    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Return the weights after training, with the mean features and counts of classes."""
        require_features(party.owner, party.learner_fn())
        objective = self.objective(party, received, config)
        model, sent, metrics = self.learn(party, received, config, state, objective)
        features = require_features(party.owner, model).features(party.x).astype(np.float64)
        counts = np.bincount(party.y, minlength=party.num_classes)
        sums = np.zeros((party.num_classes, features.shape[1]))
        np.add.at(sums, party.y, features)
        means = sums / np.maximum(counts, 1)[:, None]
        own: dict[str, Array] = {CLASS_COUNTS: counts, PROTOTYPES: means.astype(np.float32)}
        return replace(sent, arrays={**sent.arrays, **own}), metrics

    def weights_of(self, received: Knowledge) -> Mapping[str, Array]:
        """Return the model's arrays."""
        own = (PROTOTYPES, KNOWN)
        return {name: array for name, array in received.arrays.items() if name not in own}

    def objective(
        self, party: Party, received: Knowledge | None, config: ConfigRecord
    ) -> Objective | None:
        """Return the distance to prototypes; none before there are any."""
        strength = FedProtoOptions.received(config).strength
        if received is None or PROTOTYPES not in received.arrays or not strength:
            return None
        learner = require_headed(party.owner, party.learner_fn())
        weight, _ = learner.from_arrays(self.weights_of(received)).head()
        known = np.asarray(received.arrays.get(KNOWN, np.empty(0)))
        fits = known.dtype == np.bool_ and known.shape == (party.num_classes,)
        require_known(fits, "Server", KNOWN, "one truth value per class", "others")
        means = read_prototypes(received, "Server", (party.num_classes, weight.shape[1]))
        term = Prototypes(prototypes=means, known=known, strength=strength)
        return Objective(terms=(term,))


def read_prototypes(knowledge: Knowledge, owner: str, shape: tuple[int, int]) -> FloatArray:
    """Return prototypes as they are asked for; raise `KnowledgeMismatch` for others."""
    means = np.asarray(knowledge.arrays.get(PROTOTYPES, np.empty(0)))
    rule, found = f"float32 of shape {shape}", f"{means.dtype} of shape {means.shape}"
    require_known(found == rule, owner, PROTOTYPES, rule, found)
    finite = bool(np.isfinite(means).all())
    require_known(finite, owner, PROTOTYPES, "finite", "NaN or infinity")
    return means.astype(np.float64)


@dataclass(frozen=True, slots=True)
class PrototypeWeights(CountedWeights):
    """Also the party's prototypes, (num_classes, num_features)."""

    prototypes: FloatArray


@dataclass(kw_only=True)
class FedProtoState(WeightsState):
    """Also the prototypes, and which classes have one."""

    prototypes: Array | None = None
    known: Array | None = None


class FedProto(CountedStrategy):
    """FedAvg of networks whose features agree on a prototype of every class.

    Leaves the party
        In every round the weights of its model, its number of records of every class, and
        the mean features of every class.
    Guarantee
        None: epsilon is infinite, also if parties train privately, because class counts and
        mean features leave as they are.
    Differs from the paper
        Parties share one network, which is averaged, so that there is a final model for
        everybody; the paper's keep networks of their own and send prototypes alone. As in the
        authors' code, distances are mean squares over the features.

    Parameters
    ----------
    num_classes, learner_name, public, **federation
        See `FlowerStrategy`. Records have one label each.
    learner_fn : factory
        Of networks that end in a dense layer (`FeatureLearner`), such as `TorchLearner`.
    options : FedProtoOptions, optional

    Attributes
    ----------
    prototypes_ : (num_classes, num_features) or None
        NaN for classes of which no party had a record.

    Examples
    --------
    ``FedProto(learner_fn=..., num_classes=10, options=FedProtoOptions(strength=0.1))``
    """

    name: ClassVar[str] = "fedproto"
    options_type = FedProtoOptions
    options: FedProtoOptions
    state_type = FedProtoState
    state: FedProtoState
    party_learner_needs = final_learner_needs = (HeadedLearner, FeatureLearner)

    _learner: HeadedLearner

    def require_learner(self, learner: Learner) -> HeadedLearner:
        """Return the learner if it has features and a last layer."""
        require_features("FedProto", learner)
        return require_headed("FedProto", learner)

    @property
    def prototypes_(self) -> FloatArray | None:
        """What features of every class are like."""
        means, known = self.state.prototypes, self.state.known
        if means is None or known is None:
            return None
        return np.where(known[:, None], means, np.nan)

    def lesson(self) -> Knowledge | None:
        """Return the present model, with the prototypes once there are any."""
        model, means, known = self.state.delivery, self.state.prototypes, self.state.known
        if model is None or means is None or known is None:
            return model
        own = {PROTOTYPES: means.astype(np.float32), KNOWN: known}
        return replace(model, arrays={**model.arrays, **own})

    def check(self, knowledge: Knowledge) -> PrototypeWeights:
        """Check one party's weights, and that counts and prototypes fit them."""
        plain = {n: a for n, a in knowledge.arrays.items() if n != PROTOTYPES}
        local = super().check(replace(knowledge, arrays=plain))
        head, _ = self._learner.from_arrays(local.arrays).head()
        means = read_prototypes(knowledge, "Reply", (self.num_classes, head.shape[1]))
        charges, counts = local.charges, local.counts
        return PrototypeWeights(local.arrays, local.num_records, charges, counts, means)

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Average the weights, and the prototypes of each class by its counts."""
        arrays, metrics = super().finish()
        parts = [part for part in self.counted if isinstance(part, PrototypeWeights)]
        drift = self._average(parts) if arrays is not None else math.nan
        return arrays, {**metrics, DRIFT: drift}

    def _average(self, parts: Sequence[PrototypeWeights]) -> float:
        """Keep the new prototypes; return how far the parties' are from the last ones.

        Classes that nobody has in this round keep theirs.
        """
        counts = believed_counts(parts, restrain=self.options.restrain)
        means = np.array([part.prototypes for part in parts])
        if self.options.restrain:
            means = means * _believed_lengths(means, counts > 0)[:, :, None]
        last, known_before = self.state.prototypes, self.state.known
        drift = math.nan
        if last is not None and known_before is not None:
            apart = np.linalg.norm(means - last, axis=2)[(counts > 0) & known_before]
            drift = float(apart.mean()) if len(apart) else math.nan
        totals = counts.sum(axis=0)
        new = np.einsum("kc,kcd->cd", counts, means) / np.maximum(totals, 1e-300)[:, None]
        known = totals > 0
        self.state.prototypes = new if last is None else np.where(known[:, None], new, last)
        self.state.known = known if known_before is None else known | known_before
        return drift


def _believed_lengths(means: FloatArray, known: Array) -> FloatArray:
    """Return by how much each prototype is to be shortened, (num_parties, num_classes).

    One that is huge would be pulled at by everybody until no honest model is finite.
    """
    lengths = np.linalg.norm(means, axis=2)
    limit = MOST_TIMES_MEDIAN * float(np.median(lengths[known])) if known.any() else 0.0
    return np.where(lengths > limit, limit / np.maximum(lengths, 1e-300), 1.0)
