"""The server side of every strategy that hands parties' models on to other parties."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Unpack

import numpy as np

from fl_strategies.aggregation.ensembles import raw_outputs, rebuild
from fl_strategies.arrays import Array, content_hash
from fl_strategies.core.inputs import check_factories, public_array
from fl_strategies.core.protocols import Learner, LearnerFactory, PortableLearner
from fl_strategies.core.reported_ledgers import (
    Reported,
    most_expensive,
    read_ledger,
    reported_epsilon,
)
from fl_strategies.core.state import State
from fl_strategies.core.strategy import FederationOptions, KnowledgeStrategy
from fl_strategies.core.tasks import Task, check_task
from fl_strategies.exceptions import require
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.strategies.codistill.model_exchange import (
    MODEL,
    check_relayed,
    check_share,
    fill_ledger,
    has_forgotten,
    new_ledger,
)
from fl_strategies.strategies.codistill.party import PRIVACY_EVENTS, TASK
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import MAX_REPLY_BYTES, Knowledge, Scalar
from fl_strategies.wire.replies import PartyReply

ROWS_TO_SCORE = 32


@dataclass(frozen=True, slots=True)
class AgentModel:
    """What a party sent: a model, and what all its releases have cost a record so far."""

    model: Knowledge
    ledger: PrivacyLedger


@dataclass(kw_only=True)
class RelayState(State):
    """Also the newest models, and what parties report to have spent.

    Parameters
    ----------
    newest : dict of partition id to Knowledge
    reported : dict of partition id to dict of node id to (epsilon, ledger)
        By node, since a party that comes back as another one has forgotten the past.
    lost : dict of partition id to (epsilon, ledger)
        What a party has spent, or may have, and does not know any more.
    ledgers : dict of partition id to (epsilon, ledger)
        All of it together.
    """

    newest: dict[int, Knowledge] = field(default_factory=dict)
    reported: dict[int, dict[int, Reported]] = field(default_factory=dict)
    lost: dict[int, Reported] = field(default_factory=dict)
    ledgers: dict[int, Reported] = field(default_factory=dict)


class ModelRelay(KnowledgeStrategy[AgentModel]):
    """Base of strategies whose server relays models: which it takes, and what they cost.

    A model is relayed only if the server itself can rebuild it, and it scores some rows. It
    may have its share of the largest message that parties read, so that all models together
    reach everybody. See `Codistillation` for parameters.
    """

    takes: ClassVar[tuple[str, ...]] = (
        "num_classes",
        "learner_fn",
        "learner_name",
        "model_fns",
        "public",
        "row_shape",
        "task",
        "options",
    )
    identified_by: ClassVar[tuple[str, ...]] = (
        "num_classes",
        "task",
        "model_name",
        "model_fns",
        "options",
    )
    relays_models: ClassVar[bool] = True
    reply_kind = MODEL
    party_learner_needs: ClassVar[tuple[type, ...]] = (PortableLearner,)
    state_type: ClassVar[type[RelayState]] = RelayState

    def __init__(
        self,
        *,
        num_classes: int,
        learner_fn: LearnerFactory | None,
        learner_name: str,
        model_fns: Mapping[str, LearnerFactory] | None,
        public: Array | None,
        row_shape: Sequence[int] | None,
        task: Task,
        **federation: Unpack[FederationOptions],
    ) -> None:
        super().__init__(**federation)
        owner = type(self).__name__
        check_task(owner, task, num_classes)
        self.num_classes, self.task = num_classes, task
        self.model_name = learner_name
        own = {} if learner_fn is None else {learner_name: learner_fn}
        self.model_fns: dict[str, LearnerFactory] = {**own, **(model_fns or {})}
        check_factories(owner, learner_fn, num_classes, model_fns=model_fns)
        self._check_models(owner)
        self._public = None if public is None else public_array(owner, public)
        self._public_hash = None if self._public is None else content_hash(self._public)
        self._rows = _rows_to_score(owner, self._public, row_shape)
        self.state: RelayState = self.state_type(ledger=self._new_ledger())

    def _check_models(self, owner: str) -> None:
        rule = "given, or learner_fn: models without a factory are not relayed"
        require(bool(self.model_fns), owner, "model_fns", rule, self.model_fns)
        for name, factory in self.model_fns.items():
            learner = factory()
            portable = isinstance(learner, PortableLearner)
            rule = "learners with to_arrays and from_arrays"
            require(portable, owner, "model_fns", rule, f"{name}: {type(learner).__name__}")

    def _new_ledger(self) -> PrivacyLedger:
        return new_ledger(
            num_parties=self.num_parties,
            audience="the server, the other agents and everybody who sees a model",
        )

    def party_config(self) -> dict[str, Scalar]:
        """Return the problem: task, number of classes and what identifies public rows."""
        public = {} if self._public_hash is None else {keys.PUBLIC_HASH: self._public_hash}
        return {keys.NUM_CLASSES: self.num_classes, TASK: self.task, **public}

    @property
    def num_senders(self) -> int:
        """How many parties may send a model."""
        return max(self.num_parties, self.num_asked)

    def check(self, knowledge: Knowledge) -> AgentModel:
        """Check a model before others get it: its size, its arrays, and what it scores."""
        share = MAX_REPLY_BYTES // self.num_senders
        model = Knowledge(MODEL, knowledge.arrays, {keys.LEARNER: check_relayed(knowledge)})
        check_share(model, share)
        raw_outputs(self._rebuild(model), self._rows, self.task)
        ledger = read_ledger(knowledge.meta.get(PRIVACY_EVENTS))
        return AgentModel(model, ledger)

    @property
    def has_result(self) -> bool:
        """Whether any party has a model that others could use."""
        return bool(self.state.newest)

    def record_releases(self) -> None:
        """Record what agents say that their models have cost."""
        for reply in self.replies:
            self._charge(reply)
        if self.state.ledgers:
            self.state.ledger = most_expensive(self.state.ledgers.values())

    def _charge(self, reply: PartyReply[AgentModel]) -> None:
        """Record what the agent has spent.

        A node tells all that it has spent in this run, but an agent that comes back as
        another node, or as the same one without its state, has forgotten what it spent
        before.
        """
        agent, ledger = reply.partition_id, reply.knowledge.ledger
        reported = self.state.reported.setdefault(agent, {})
        old = reported.get(reply.node_id)
        if old is not None and has_forgotten(ledger, old[1]):
            self._lose(agent, *old)
        reported[reply.node_id] = reported_epsilon(reply.metrics, ledger), ledger
        for _ in range(1, self.run.attempts_of(reply.node_id)):
            # An answer that was lost on its way has cost no more than all that is reported.
            self._lose(agent, *reported[reply.node_id])
        parts = [*reported.values(), self.state.lost.get(agent, (0.0, new_ledger()))]
        whole = fill_ledger(self._new_ledger(), [part for _, part in parts])
        self.state.ledgers[agent] = sum(epsilon for epsilon, _ in parts), whole

    def _lose(self, agent: int, epsilon: float, ledger: PrivacyLedger) -> None:
        """Count what an agent has spent, or may have spent, and does not know any more."""
        before, lost = self.state.lost.get(agent, (0.0, new_ledger()))
        self.state.lost[agent] = before + epsilon, fill_ledger(lost, [lost, ledger])

    @property
    def models_(self) -> dict[int, Learner]:
        """The newest model of every agent."""
        known = sorted(self.state.newest.items())
        return {agent: self._rebuild(model) for agent, model in known}

    def _rebuild(self, part: Knowledge) -> Learner:
        name, owner = str(part.meta[keys.LEARNER]), type(self).__name__
        return rebuild(owner, name, part.arrays, self.model_fns, self.num_classes)

    @property
    def ends_early(self) -> bool:
        """Once there are models, a run that too few agents are left for keeps its result."""
        return bool(self.state.newest)


def _rows_to_score(owner: str, public: Array | None, row_shape: Sequence[int] | None) -> Array:
    """Return what a model must score to be relayed: public rows, or zeros of that shape."""
    if public is None:
        require(row_shape is not None, owner, "row_shape", "given, or public", row_shape)
        sides = tuple(row_shape or ())
        require(min(sides, default=0) >= 1, owner, "row_shape", "sides of at least 1", sides)
        return np.zeros((1, *sides))
    shape = public.shape[1:]
    same = row_shape is None or tuple(row_shape) == shape
    require(same, owner, "row_shape", f"{shape} as in public", row_shape)
    return public[:ROWS_TO_SCORE] if len(public) else np.zeros((1, *shape))
