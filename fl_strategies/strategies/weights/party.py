"""The party side of weight averaging; see `fl_strategies.strategies.weights`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies._util import Array, FloatArray, IntArray, derive_rng
from fl_strategies.aggregation.evidence import believed_sizes
from fl_strategies.errors import KnowledgeMismatch, UnsupportedLearner, require_known
from fl_strategies.learners import (
    METRICS,
    ContinuingLearner,
    Learner,
    Objective,
    Proximal,
    StartingLearner,
    require_guided,
)
from fl_strategies.party.party import Party
from fl_strategies.party.role import (
    PartyRole,
    PartyState,
    charge_plan,
    check_public_data,
    facts_of,
    ledger_of,
    ledger_to_text,
    public_model,
    read_round,
    read_seed,
    require_finite,
    require_plan,
    trained,
)
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.release import ReleasePlan
from fl_strategies.strategies.weights.options import (
    PROXIMAL_MU,
    TASK,
    WEIGHTS,
    WeightsOptions,
    release_plan,
)
from fl_strategies.strategies.weights.restraint import MAX_RECORDS, LocalWeights
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, Scalar, config_choice, config_float

FLOWER: Final = "flower"
"""Name of all of Flower's own strategies in a party's policy."""
MOST_MU: Final = 1e6


class WeightsParty(PartyRole):
    """The party's role: train the received model on the own records, and send it.

    A message of one of Flower's own strategies, on a server without this package, names
    neither task nor learner; it is answered with this party's own.
    """

    also_leaves: ClassVar[tuple[str, ...]] = ()
    """Why training does not protect what a subclass sends besides weights."""

    def plan(self, party: Party, config: ConfigRecord) -> ReleasePlan:
        """Return that weights leave after so many passes."""
        strategy = str(config.get(keys.STRATEGY))
        return release_plan(
            strategy.partition(":")[0],
            WeightsOptions.received(config),
            facts_of(party),
            also_leaves=self.also_leaves,
            purpose=f"{strategy}, round {config.get(keys.SERVER_ROUND)!s}",
        )

    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Return the weights after training, and how many records they have seen."""
        objective = self.objective(party, received, config)
        _, knowledge, metrics = self.learn(party, received, config, state, objective)
        return knowledge, metrics

    def learn(
        self,
        party: Party,
        received: Knowledge | None,
        config: ConfigRecord,
        state: PartyState,
        objective: Objective | None,
    ) -> tuple[ContinuingLearner, Knowledge, Metrics]:
        """Return the model after training, paid for before, and what of it may leave."""
        owner = party.owner
        _check_problem(party, config)
        require_known(len(party.y) > 0, owner, "x", "records to learn from", "none")
        epochs = WeightsOptions.received(config).local_epochs
        read_round(config)
        learner = require_averaged(owner, party.learner_fn())
        if objective is not None:
            learner = require_guided(owner, learner)
        if received is not None:  # what cannot be read is refused before it is paid for
            learner = learner.from_arrays(self.weights_of(received))
        price, _, metrics = charge_plan(party, self.plan(party, config), state)
        rng = self.rng(party, received, config)
        guided = {} if objective is None else {"objective": objective}

        def train() -> ContinuingLearner:
            model = learner.partial_fit(party.x, party.y, rng=rng, epochs=epochs, **guided)
            require_plan(model, price.training)
            require_finite(model)
            return model

        def stand_in() -> ContinuingLearner:
            return require_averaged(owner, public_model(party, party.learner_fn))

        model = trained(train, stand_in, promised=bool(price.training) and not self.also_leaves)
        measured = self.measure(party, model, config, state)
        metrics[keys.LOCAL_FIGURE] = measured[METRICS[party.task]]
        meta: dict[str, Scalar] = {
            keys.NUM_EXAMPLES: len(party.y),
            keys.PRIVACY_EVENTS: ledger_to_text(ledger_of(price.record, DEFAULT_DELTA)),
        }
        return model, Knowledge(WEIGHTS, model.to_arrays(), meta), metrics

    def weights_of(self, received: Knowledge) -> Mapping[str, Array]:
        """Return the model among what was received."""
        return received.arrays

    def objective(
        self,
        party: Party,  # noqa: ARG002 - for roles with an objective of their own
        received: Knowledge | None,  # noqa: ARG002
        config: ConfigRecord,
    ) -> Objective | None:
        """Return FedProx's term, which pulls towards the weights that training starts from."""
        if PROXIMAL_MU not in config:
            return None
        mu = config_float(config, PROXIMAL_MU, minimum=0.0, maximum=MOST_MU)
        return Objective(terms=(Proximal(mu=mu),)) if mu > 0 else None

    def rng(
        self, party: Party, received: Knowledge | None, config: ConfigRecord
    ) -> np.random.Generator:
        """Return what training draws from; without a model all parties draw the same one."""
        seed = read_seed(config)
        if received is None:
            return derive_rng(seed, "weights", "initial")
        return party.rng(seed, "weights", read_round(config))


def _check_problem(party: Party, config: ConfigRecord) -> None:
    """Raise unless what a server states of its problem is what this party has."""
    if keys.PUBLIC_HASH in config:
        check_public_data(party, config)
    if TASK in config:
        config_choice(config, TASK, [party.task])
    asked = config.get(keys.LEARNER, party.learner_name)
    if asked != party.learner_name:
        raise KnowledgeMismatch(
            f"{party.owner}: the averaged model must be this party's own "
            f"({party.learner_name!r}), got {str(asked)[:80]!r}. Averages need one kind of "
            f"model at all parties and on the server."
        )


def require_averaged(owner: str, learner: Learner) -> ContinuingLearner:
    """Return the learner if its weights can be averaged; say what to do if they cannot."""
    if not isinstance(learner, ContinuingLearner):
        raise UnsupportedLearner(
            f"{owner}: the learner must keep learning (distill, partial_fit) and travel "
            f"(to_arrays, from_arrays) for its weights to be averaged, got "
            f"{type(learner).__name__}. Use a network, or another strategy."
        )
    return learner


def require_starting(owner: str, learner: Learner) -> StartingLearner:
    """Return the learner if the server can draw its first weights; say so if it cannot."""
    if not isinstance(learner, StartingLearner):
        raise UnsupportedLearner(
            f"{owner}: the learner must have initialised, partial_fit, distill, to_arrays and "
            f"from_arrays, so that the server can draw its first weights, got "
            f"{type(learner).__name__}. TorchLearner has them."
        )
    return learner


CLASS_COUNTS: Final = "class-counts"


class CountedParty(WeightsParty):
    """The role of `WeightsParty` that also sends its class counts, as they are."""

    also_leaves: ClassVar[tuple[str, ...]] = ("class counts left the party exactly",)

    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Return the weights after training, and how many records of each class there are."""
        sent, metrics = super().train(party, received, config, state)
        counts = np.bincount(party.y, minlength=party.num_classes)
        return replace(sent, arrays={**sent.arrays, CLASS_COUNTS: counts}), metrics


@dataclass(frozen=True, slots=True)
class CountedWeights(LocalWeights):
    """Also the number of records of every class, (num_classes,)."""

    counts: IntArray


def split_counts(knowledge: Knowledge, num_classes: int) -> tuple[Knowledge, IntArray]:
    """Return the weights alone, and the counts; raise `KnowledgeMismatch` for others."""
    arrays = dict(knowledge.arrays)
    counts = arrays.pop(CLASS_COUNTS, np.empty(0))
    rule, found = f"int64 of shape {(num_classes,)}", f"{counts.dtype} of shape {counts.shape}"
    require_known(found == rule, "Reply", CLASS_COUNTS, rule, found)
    # Bounded first: a sum of large numbers could overflow.
    total = int(counts.sum()) if ((counts >= 0) & (counts <= MAX_RECORDS)).all() else -1
    rule = "numbers from 0 that add up to the number of records"
    fits = total == knowledge.meta.get(keys.NUM_EXAMPLES)
    require_known(fits, "Reply", CLASS_COUNTS, rule, "others")
    return replace(knowledge, arrays=arrays), counts


def believed_counts(parts: Sequence[CountedWeights], *, restrain: bool) -> FloatArray:
    """Return all parties' counts, (num_parties, num_classes); no party claims any number."""
    counts = np.array([part.counts for part in parts], dtype=np.float64)
    if not restrain:
        return counts
    sizes = counts.sum(axis=1)
    return np.asarray(counts * (believed_sizes(sizes) / np.maximum(sizes, 1))[:, None])
