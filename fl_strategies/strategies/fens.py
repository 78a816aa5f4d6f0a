"""FENS: local models, sent once, and a small aggregator of their scores; both sides of it.

Allouah, Dhasade, Guerraoui, Gupta, Kermarrec, Pinot, Pires, Sharma: Revisiting Ensembling in
One-Shot Federated Learning (NeurIPS 2024).

    round 1   party    trains a model on most of its records and sends it
              server   gives all models to everybody
    round r   server   sends the aggregator of the models' scores
              party    trains it on the records it has held back, and sends it
              server   averages the aggregators
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord

from fl_strategies.aggregation.ensembles import (
    MeanEnsemble,
    StackedEnsemble,
    Unreadable,
    first_weights,
    learned,
    read_weights,
)
from fl_strategies.errors import RequestRefused
from fl_strategies.extend import (
    Array,
    IntArray,
    Knowledge,
    KnowledgeField,
    KnowledgeMismatch,
    Learner,
    LocalWeights,
    Metrics,
    Options,
    Party,
    PartyReply,
    PartyRole,
    PartyState,
    PortableLearner,
    ReleasePlan,
    Scalar,
    content_hash,
    derive_rng,
    facts_of,
    keys,
    plan_of,
    read_round,
    read_seed,
    require,
    require_finite,
    require_known,
    require_plan,
    require_portable,
    trained,
)
from fl_strategies.options import option
from fl_strategies.party.role import ledger_to_text
from fl_strategies.server.replies import read_ledger
from fl_strategies.strategies.codistill.options import (
    MODEL,
    MODELS,
    check_share,
    join_models,
    part_models,
    release_plan,
)
from fl_strategies.strategies.codistill.party import (
    charge_model,
    check_problem,
    new_portable,
    portable_stand_in,
    receive_all,
)
from fl_strategies.strategies.codistill.server import AgentModel, ModelRelay, RelayState
from fl_strategies.strategies.weights.restraint import read_num_records, restrained
from fl_strategies.wire.knowledge import MAX_REPLY_BYTES, config_choice

Aggregator: TypeAlias = Literal["linear", "network", "mean"]

# A server cannot make a party train without end, or something of any size.
MAX_EPOCHS: Final = 10_000
MAX_HIDDEN: Final = 4096
AGGREGATOR: Final = "aggregator"
STAGE: Final = "stage"
STAGES: Final = (MODEL, AGGREGATOR)
COMMITTEE: Final = "committee"
MOST_SCORES: Final = 2**27
"""Most scores of all models on a party's rows: 1 GiB."""
UNPROTECTED_WEIGHTS: Final = "weights of an aggregator left that were trained without noise"


@dataclass(frozen=True, kw_only=True)
class FENSOptions(Options):
    """Options of `FENS`.

    Parameters
    ----------
    aggregator : "linear", "network" or "mean"
        "linear": one weight a model and class; "network": also a hidden layer over the
        scores of all models; both begin as the mean of log-probabilities. "mean" of
        probabilities is not trained, so one round is all.
    num_hidden : int
        Units of the hidden layer.
    aggregator_epochs : int
        Passes of a party over its held-back records in a round.
    aggregator_rate : float
        Step size.
    holdback : float
        Share of a party's records that its own model does not see: on records that it has
        learned, it would look better than all others.
    restrain : bool
        Limit how far one party can pull the average of aggregators; see
        `strategies.weights.restraint`.
    """

    owner: ClassVar[str] = "FENS"

    aggregator: Aggregator = option("linear", "what combines the scores of all models")
    num_hidden: int = option(32, "units of the network", least=1, most=MAX_HIDDEN)
    aggregator_epochs: int = option(5, "passes a round", least=1, most=MAX_EPOCHS)
    aggregator_rate: float = option(0.05, "step size of the aggregator", above=0, most=10)
    holdback: float = option(0.1, "share of records for the aggregator", above=0, below=1)
    restrain: bool = option(True, "limit how far one party can pull the average")

    @property
    def is_trained(self) -> bool:
        """Whether the aggregator learns from records."""
        return self.aggregator != "mean"

    @property
    def hidden_units(self) -> int:
        """Units of the hidden layer, 0 where there is none."""
        return self.num_hidden if self.aggregator == "network" else 0


class FENSPartyState(PartyState):
    """What a party keeps."""

    models = KnowledgeField("fens-models", MODELS)
    """All models of the committee, as they came."""


class FENSParty(PartyRole):
    """The party's role: send a model once, then train the aggregator of all models.

    A model that cannot be rebuilt here is counted in ``num-models-refused``; it scores 0.
    """

    def plan(self, party: Party, config: ConfigRecord) -> ReleasePlan:
        """Return what leaves: a model or, whatever the learner, weights without noise."""
        options, facts = FENSOptions.received(config), facts_of(party)
        if config.get(STAGE) == MODEL or not options.is_trained:
            return release_plan(
                "fens",
                facts,
                training=lambda: plan_of(party.learner_fn(), len(_own_rows(party, config))),
            )
        return release_plan(
            "fens",
            replace(facts, trainer=lambda: Unreadable(party.num_classes)),
            reason=UNPROTECTED_WEIGHTS,
            epochs=options.aggregator_epochs,
        )

    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Return the party's model, or the aggregator after training."""
        check_problem(party, config)
        if config_choice(config, STAGE, STAGES) == MODEL:
            return self._train_model(party, config, state)
        return self._train_aggregator(party, received, config, state)

    def _train_model(
        self, party: Party, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        rows, learner = _own_rows(party, config), new_portable(party)
        price, ledger, metrics = charge_model(party, self.plan(party, config), state)
        rng = party.rng(read_seed(config), "fens")

        def train() -> PortableLearner:
            model = require_portable(learner.fit(party.x[rows], party.y[rows], rng=rng))
            require_plan(model, price.training)
            require_finite(model)
            return model

        promised = bool(price.training)
        model = trained(train, lambda: portable_stand_in(party), promised=promised)
        meta = {keys.PRIVACY_EVENTS: ledger_to_text(ledger)}
        metrics = {keys.NUM_MODELS_REFUSED: 0, **metrics}
        return Knowledge(MODEL, model.to_arrays(), meta), metrics

    def _train_aggregator(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        if received is None:
            raise KnowledgeMismatch(f"Server: an {AGGREGATOR} must be sent, got none.")
        ensemble, refused = _ensemble(party, received, config, state)
        if not isinstance(ensemble, StackedEnsemble):
            raise KnowledgeMismatch(
                f"Server: the {AGGREGATOR} must be one that learns, got mean."
            )
        _, ledger, metrics = charge_model(party, self.plan(party, config), state)
        options, rows = FENSOptions.received(config), held_back(party, config)
        weights = learned(
            ensemble.weights,
            ensemble.evidence(party.x[rows]),
            party.y[rows],
            rng=party.rng(read_seed(config), "aggregator", read_round(config)),
            epochs=options.aggregator_epochs,
            rate=options.aggregator_rate,
        )
        meta: dict[str, Scalar] = {
            keys.PRIVACY_EVENTS: ledger_to_text(ledger),
            keys.NUM_EXAMPLES: len(rows),
        }
        metrics = {keys.NUM_MODELS_REFUSED: refused, **metrics}
        return Knowledge(AGGREGATOR, weights, meta), metrics

    def evaluate(
        self, party: Party, received: Knowledge, config: ConfigRecord, state: PartyState
    ) -> tuple[Learner, Metrics]:
        """Measure all models together."""
        model, refused = _ensemble(party, received, config, state)
        measured = self.measure(party, model, config, state)
        return model, {**measured, keys.NUM_MODELS_REFUSED: refused}


def held_back(party: Party, config: ConfigRecord) -> IntArray:
    """Return which records the party's own model does not learn from, at least one."""
    options, count = FENSOptions.received(config), len(party.y)
    if not options.is_trained:
        return np.empty(0, dtype=np.int64)
    rows = party.rng(read_seed(config), "holdback").permutation(count)
    return rows[: max(round(options.holdback * count), 1)]


def _own_rows(party: Party, config: ConfigRecord) -> IntArray:
    """Return which records the party's own model learns from."""
    rows = np.setdiff1d(np.arange(len(party.y)), held_back(party, config))
    # A single record must do for both.
    return rows if len(rows) else np.arange(len(party.y))


def _ensemble(
    party: Party, received: Knowledge, config: ConfigRecord, state: PartyState
) -> tuple[Learner, int]:
    """Return all models together, and how many of them this party cannot rebuild."""
    kept = FENSPartyState(state.records)
    *models, aggregator = part_models(received)
    if models:
        kept.models = join_models(models, **{COMMITTEE: str(received.meta.get(COMMITTEE))})
    known = kept.models
    if known is None or known.meta.get(COMMITTEE) != received.meta.get(COMMITTEE):
        raise KnowledgeMismatch(
            f"{party.owner}: the models of the {COMMITTEE} must have come before, got others."
        )
    parts = part_models(known)
    _check_work(party, config, len(parts))
    readable, errors = receive_all(party, parts)
    refused = len(errors)
    members = [readable.get(n, Unreadable(party.num_classes)) for n in range(len(parts))]
    rule = "one that this party can read"
    require_known(refused < len(parts), party.owner, "a model", rule, f"none of {refused}")
    options, num_classes = FENSOptions.received(config), party.num_classes
    if not options.is_trained:
        return MeanEnsemble(members, num_classes=num_classes, task=party.task), refused
    units = options.hidden_units
    weights = read_weights(aggregator.arrays, len(members), num_classes, units)
    return StackedEnsemble(members, weights, num_classes=num_classes), refused


def _check_work(party: Party, config: ConfigRecord, num_models: int) -> None:
    """Raise `RequestRefused` for more models than the party lets predict its rows."""
    num_test = 0 if party.x_test is None else len(party.x_test)
    num_rows = max(len(held_back(party, config)), num_test)
    most = min(party.policy.max_predictions, MOST_SCORES // party.num_classes)
    if num_rows * num_models > most:
        raise RequestRefused(
            f"{party.owner}: predictions of a request must be at most {most}, got those of "
            f"{num_models} models."
        )


@dataclass(kw_only=True)
class FENSState(RelayState):
    """Also the aggregator, the hash of the models that it combines, and the nodes with them.

    Both are empty before there are models.
    """

    aggregator: dict[str, Array] = field(default_factory=dict)
    committee: str = ""
    delivered: set[int] = field(default_factory=set)


class FENS(ModelRelay):
    """All parties' models in one ensemble, whose aggregator learns from all parties.

    No public rows are needed, and every party may have a model of its own kind, as far as it
    travels (`PortableLearner`) and the others have a factory for it.

    Leaves the party
        Its model, once, to the server and by it to all parties, as arrays; then in every
        round the weights of the aggregator after training, and how many records it has
        held back for that.
    Guarantee
        None: epsilon is infinite, because the aggregator is trained without noise. Only with
        ``aggregator="mean"``, which is not trained, the guarantee of learners that train
        privately stands; see `Codistillation`.

    Parameters
    ----------
    num_classes : int
    learner_fn, learner_name, model_fns, public, row_shape
        See `Codistillation`; public rows are not learned from.
    task : "single-label"
    options : FENSOptions, optional
    **federation
        See `KnowledgeStrategy`.

    Attributes
    ----------
    models_ : dict of partition id to Learner
        The models, which stay as they are from round 2 on.
    model_ : StackedEnsemble or MeanEnsemble

    Notes
    -----
    A party that comes after round 1, or that failed in it, has no model in the ensemble but
    trains the aggregator. One that has lost the models is sent them again in the next round.

    Deviations from the paper: its network has no linear part and begins at random, ours
    begins as the mean of log-probabilities; models are not quantised. An aggregator gives a
    hostile model little weight if most parties are honest, but nothing else keeps it out.
    """

    name: ClassVar[str] = "fens"
    options_type = FENSOptions
    options: FENSOptions
    identified_by = (*ModelRelay.identified_by, "last_round")
    usual_rounds: ClassVar[int] = 11
    state_type = FENSState
    state: FENSState

    def settle(self, owner: str) -> None:
        """Raise for another task; without an aggregator the first round is the last."""
        require(self.task == "single-label", owner, "task", "single-label", self.task)
        self.last_round = None if self.options.is_trained else 1

    @property
    def stage(self) -> str:
        """What parties are asked for: first their models, then the aggregator."""
        return AGGREGATOR if self.state.committee else MODEL

    @property
    def reply_kind(self) -> str:  # type: ignore[override]
        """What a reply must be."""
        return self.stage

    def party_config(self) -> dict[str, Scalar]:
        """Return the problem, what to send, and how to train it."""
        return {**super().party_config(), STAGE: self.stage}

    def check(self, knowledge: Knowledge) -> AgentModel:
        """Check a model before others get it, or the weights of an aggregator."""
        if self.stage == MODEL:
            sent = super().check(knowledge)
            # Room for the aggregator in the same message.
            check_share(sent.model, MAX_REPLY_BYTES // (1 + self.num_senders))
            return sent
        sizes = len(self.state.newest), self.num_classes, self.options.hidden_units
        weights = read_weights(knowledge.arrays, *sizes)
        meta = {keys.NUM_EXAMPLES: read_num_records(knowledge.meta)}
        ledger = read_ledger(knowledge.meta.get(keys.PRIVACY_EVENTS))
        return AgentModel(Knowledge(AGGREGATOR, weights, meta), ledger)

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Keep the models of round 1; later average the aggregators."""
        replies = self.replies
        refused = sum(reply.metrics.get(keys.NUM_MODELS_REFUSED, 0) for reply in replies)
        metrics = {keys.NUM_MODELS_REFUSED: refused, keys.NUM_CAPPED: 0}
        if self.stage == MODEL:
            self._form_committee(replies)
            return None, metrics
        self.confirm_delivery(replies)
        self.state.delivered -= self.rejected_.keys()
        metrics[keys.NUM_CAPPED] = self._average([reply.knowledge.model for reply in replies])
        return None, metrics

    def _form_committee(self, replies: Sequence[PartyReply[AgentModel]]) -> None:
        """Make the committee of the models, in the order of their parties."""
        self.state.newest = {reply.partition_id: reply.knowledge.model for reply in replies}
        models = self.state.newest.values()
        hashes = [content_hash(array) for model in models for array in model.arrays.values()]
        self.state.committee = content_hash(np.frombuffer("".join(hashes).encode(), np.uint8))
        rng = derive_rng(self.seed, "server", "aggregator")
        sizes = len(models), self.num_classes, self.options.hidden_units
        self.state.aggregator = first_weights(*sizes, rng)

    def _average(self, sent: Sequence[Knowledge]) -> int:
        """Make the next aggregator; return how many of those sent count for less."""
        parts = [LocalWeights(s.arrays, int(s.meta[keys.NUM_EXAMPLES]), ()) for s in sent]
        parts, changed = restrained(parts) if self.options.restrain else (parts, 0)
        sizes = np.array([part.num_records for part in parts], dtype=np.float64)
        shares = sizes / sizes.sum()
        self.state.aggregator = {
            name: np.tensordot(shares, [part.arrays[name] for part in parts], axes=1)
            for name in self.state.aggregator
        }
        return changed

    @property
    def model_(self) -> Learner:
        """All models together."""
        members = list(self.models_.values())
        if not members:
            return super().model_
        if not self.options.is_trained:
            return MeanEnsemble(members, num_classes=self.num_classes, task=self.task)
        return StackedEnsemble(members, self.state.aggregator, num_classes=self.num_classes)

    def knowledge_for(self, node_id: int) -> Knowledge | None:
        """Return the aggregator, for a node that has none of them with the models."""
        if self.stage == MODEL:
            return None
        known = node_id in self.state.delivered
        models = [] if known else [m for _, m in sorted(self.state.newest.items())]
        aggregator = Knowledge(MODEL, self.state.aggregator)
        return join_models([*models, aggregator], **{COMMITTEE: self.state.committee})

    def delivery_for(self, node_id: int) -> Knowledge | None:
        """Return the same for nodes whose reply was taken."""
        return None if node_id in self.rejected_ else self.knowledge_for(node_id)

    def confirm_delivery(self, replies: Sequence[PartyReply[Any]]) -> None:
        """Note who has the models."""
        self.state.delivered |= {reply.node_id for reply in replies}
