"""FENS: local models that travel once, and an aggregator trained by averaging.

Allouah, Dhasade, Guerraoui, Gupta, Kermarrec, Pinot, Pires, Sharma: Revisiting Ensembling in
One-Shot Federated Learning (NeurIPS 2024).

    round 1   party    trains a model on most of its records and sends it
              server   gives all models to everybody
    round r   server   sends the aggregator of the models' scores
              party    trains it on the records it has held back, and sends it
              server   averages the aggregators
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Unpack

import numpy as np
from flwr.app import ArrayRecord

from fl_strategies.aggregation.ensembles import MeanEnsemble
from fl_strategies.aggregation.stacking import StackedEnsemble, first_weights, read_weights
from fl_strategies.arrays import Array, content_hash
from fl_strategies.core.protocols import Learner, LearnerFactory
from fl_strategies.core.reported_ledgers import read_ledger
from fl_strategies.core.strategy import FederationOptions
from fl_strategies.core.tasks import Task
from fl_strategies.exceptions import require
from fl_strategies.randomness import derive_rng
from fl_strategies.strategies.codistill.model_exchange import MODEL, check_share, join_models
from fl_strategies.strategies.codistill.relay import AgentModel, ModelRelay, RelayState
from fl_strategies.strategies.fens.options import FENSOptions
from fl_strategies.strategies.fens.party import AGGREGATOR, COMMITTEE, STAGE
from fl_strategies.strategies.weights.restraint import (
    LocalWeights,
    read_num_records,
    restrained,
)
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import MAX_REPLY_BYTES, Knowledge, Metrics, Scalar
from fl_strategies.wire.replies import PartyReply


@dataclass(kw_only=True)
class FENSState(RelayState):
    """Also the aggregator, and which nodes have the models.

    Parameters
    ----------
    aggregator : dict of name to array
        Empty before there are models.
    committee : str
        Which models they are.
    delivered : set of node ids
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
    identified_by = (*ModelRelay.identified_by, "last_round")
    usual_rounds: ClassVar[int] = 11
    state_type = FENSState
    state: FENSState

    def __init__(
        self,
        *,
        num_classes: int,
        learner_fn: LearnerFactory | None = None,
        learner_name: str = "learner",
        model_fns: Mapping[str, LearnerFactory] | None = None,
        public: Array | None = None,
        row_shape: Sequence[int] | None = None,
        task: Task = "single-label",
        options: FENSOptions | None = None,
        **federation: Unpack[FederationOptions],
    ) -> None:
        super().__init__(
            num_classes=num_classes,
            learner_fn=learner_fn,
            learner_name=learner_name,
            model_fns=model_fns,
            public=public,
            row_shape=row_shape,
            task=task,
            **federation,
        )
        require(task == "single-label", "FENS", "task", "single-label", task)
        self.options = options or FENSOptions()
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
        return {**super().party_config(), **self.options.to_config(), STAGE: self.stage}

    def check(self, knowledge: Knowledge) -> AgentModel:
        """Check a model before others get it, or the weights of an aggregator."""
        if self.stage == MODEL:
            said = super().check(knowledge)
            # Room for the aggregator in the same message.
            check_share(said.model, MAX_REPLY_BYTES // (1 + self.num_senders))
            return said
        sizes = len(self.state.newest), self.num_classes, self.options.hidden_units
        weights = read_weights(knowledge.arrays, *sizes)
        meta = {keys.NUM_EXAMPLES: read_num_records(knowledge.meta)}
        ledger = read_ledger(knowledge.meta.get(keys.PRIVACY_EVENTS))
        return AgentModel(Knowledge(AGGREGATOR, weights, meta), ledger)

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Keep the models of round 1; later average the aggregators."""
        replies = self.replies
        self.record_releases()
        refused = sum(reply.metrics.get(keys.NUM_MODELS_REFUSED, 0) for reply in replies)
        metrics = {keys.NUM_MODELS_REFUSED: refused, keys.NUM_CAPPED: 0}
        if self.stage == MODEL:
            self._found(replies)
            return None, metrics
        self.state.delivered |= {reply.node_id for reply in replies}
        self.state.delivered -= self.rejected_.keys()
        metrics[keys.NUM_CAPPED] = self._average([reply.knowledge.model for reply in replies])
        return None, metrics

    def _found(self, replies: Sequence[PartyReply[AgentModel]]) -> None:
        """Make the committee of the models, in the order of their parties."""
        self.state.newest = {reply.partition_id: reply.knowledge.model for reply in replies}
        hashes = [
            content_hash(array)
            for model in self.state.newest.values()
            for array in model.arrays.values()
        ]
        self.state.committee = content_hash(np.frombuffer("".join(hashes).encode(), np.uint8))
        self.state.aggregator = first_weights(
            len(self.state.newest),
            self.num_classes,
            self.options.hidden_units,
            derive_rng(self.seed, "server", "aggregator"),
        )

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

    def confirm_delivery(self, replies: Sequence[PartyReply[None]]) -> None:
        """Note who has the models."""
        self.state.delivered |= {reply.node_id for reply in replies}
