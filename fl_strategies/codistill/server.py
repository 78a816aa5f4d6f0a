"""The server half that AKD, AvgKD, PKD and EKD share; see `fl_strategies.codistill`."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar, Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from fl_strategies import keys
from fl_strategies.base import FederationOptions, KnowledgeStrategy
from fl_strategies.codistill.committee import MeanEnsemble, rebuild
from fl_strategies.codistill.party import (
    KEPT,
    LOSS,
    LOSSES,
    NUM_MODELS_REFUSED,
    PRIVACY_EVENTS,
    TASK,
)
from fl_strategies.codistill.relay import (
    MODEL,
    Chain,
    check_finite,
    check_relayed,
    fill_ledger,
    has_forgotten,
    join_models,
    new_ledger,
)
from fl_strategies.exceptions import NotEnoughParties, require
from fl_strategies.knowledge import Knowledge, Metrics, Scalar
from fl_strategies.party import check_rows, content_hash
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.protocols import Array, Learner, LearnerFactory, PortableLearner, SoftLearner
from fl_strategies.replies import PartyReply, costliest, read_ledger, told_epsilon
from fl_strategies.tasks import Task, check_task

logger = logging.getLogger("flwr.fl_strategies")

CodistillLoss = Literal["mse", "cross-entropy"]
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class AgentModel:
    """What an agent sent: a model, and what all its models have cost a record so far."""

    model: Knowledge
    ledger: PrivacyLedger


class Codistillation(KnowledgeStrategy[AgentModel]):
    """Base of the four schemes: the server relays models and learns nothing itself.

    Leaves the party
        Its model of every round that it takes part in, to the server and by it to other
        agents, as arrays; nothing is unpickled. A model that contains its training rows
        carries them out of the party; kernel regression refuses to, unless it was told
        ``reveal_rows=True``; the thresholds of XGBoost's trees are values of single records
        (those of forests lie between two). An exchange of predictions instead of models is
        not offered: models are asked about the receiver's inputs, which would have to leave
        the receiver.
    Guarantee
        None: epsilon is infinite. Only if every agent trains with differential privacy,
        by a learner whose `distill` adds to its `privacy_events` (``DPTorchLearner`` with
        ``private_distill=True``), each record is protected against the server and all
        agents, and the events of all rounds add up, also of those whose model got lost on
        its way. `ledger_` is that of the agent whose events, as the agents report them,
        cost most. Not covered: rows that agents only evaluate on, the number of records,
        settings chosen on private data.

    Parameters
    ----------
    num_classes : int
        Length of the federation's class list; in regression the number of outputs.
    learner_fn : factory, optional
        How the server rebuilds models named `learner_name`. Without any factory it relays
        models unread, and there is no `model_`.
    learner_name : str
    model_fns : mapping of learner name to factory, optional
        Factories for the other learners of the federation. With a factory the server
        refuses a model that does not fit; without one it checks types, sizes and that all
        numbers are finite.
    public : (num_public, ...), optional
        Not learned from. If it is given, agents that hold other public rows are left out:
        that mostly means other preprocessing.
    task : "single-label" or "regression"
    target_loss : "mse" or "cross-entropy"
        How agents learn probabilities, "mse" in the paper's figures; regression has "mse".
    **federation
        See `KnowledgeStrategy`.

    Attributes
    ----------
    models_ : dict of partition id to Learner
        The newest model of every agent whose learner the server has a factory for.

    Notes
    -----
    Agents are ordered by partition id, which the server learns from the first round.
    Parties need a factory, their own or in `Party.catalogue`, for every learner that they
    are to learn from. The server keeps the newest model of every agent and no older one.
    """

    reply_kind = MODEL
    central: ClassVar[bool] = False
    party_learner_needs = (SoftLearner, PortableLearner)
    kept = (
        *KnowledgeStrategy.kept,
        "_ledgers", "_told", "_lost", "_agents", "_newest", "_answered",
    )  # fmt: skip
    kept_kinds = (*KnowledgeStrategy.kept_kinds, Chain)

    def __init__(
        self,
        *,
        num_classes: int,
        learner_fn: LearnerFactory | None = None,
        learner_name: str = "learner",
        model_fns: Mapping[str, LearnerFactory] | None = None,
        public: Array | None = None,
        task: Task = "single-label",
        target_loss: CodistillLoss = "mse",
        **federation: Unpack[FederationOptions],
    ) -> None:
        super().__init__(**federation)
        owner = type(self).__name__
        check_task(owner, task, num_classes)
        require(task != "multi-label", owner, "task", "single-label or regression", task)
        require(
            target_loss in LOSSES,
            owner,
            "target_loss",
            f"one of {', '.join(LOSSES)}",
            target_loss,
        )
        fits = task != "regression" or target_loss == "mse"
        require(fits, owner, "target_loss", "'mse' in regression", target_loss)
        if public is not None:
            check_rows(owner, "public", public)
        self.num_classes, self.task, self.target_loss = num_classes, task, target_loss
        self.model_name = learner_name
        own = {} if learner_fn is None else {learner_name: learner_fn}
        self.model_fns: dict[str, LearnerFactory] = {**own, **(model_fns or {})}
        self._check_factories(owner)
        self._public_hash = None if public is None else content_hash(public)
        self.ledger_ = self._new_ledger()
        self._ledgers: dict[int, tuple[float, PrivacyLedger]] = {}
        self._told: dict[int, dict[int, tuple[float, PrivacyLedger]]] = {}
        self._lost: dict[int, tuple[float, PrivacyLedger]] = {}
        self._agents: dict[int, int] = {}
        self._newest: dict[int, Knowledge] = {}
        self._answered: set[int] = set()
        self._prepare()

    def _prepare(self) -> None:
        """Create what a scheme keeps besides the newest models; nothing by default."""

    def _check_factories(self, owner: str) -> None:
        for name, factory in self.model_fns.items():
            learner = factory()
            portable = isinstance(learner, PortableLearner)
            rule = "learners with to_arrays and from_arrays"
            require(portable, owner, "model_fns", rule, f"{name}: {type(learner).__name__}")
            rule = f"learners of {self.num_classes} classes or outputs"
            same = learner.num_classes == self.num_classes
            require(same, owner, "model_fns", rule, f"{name}: {learner.num_classes}")

    def _new_ledger(self) -> PrivacyLedger:
        return new_ledger(
            num_parties=self.num_parties,
            audience="the server, the other agents and everybody who sees a model",
        )

    def party_config(self) -> dict[str, Scalar]:
        """Return the problem: task, number of classes and loss."""
        public = {} if self._public_hash is None else {keys.PUBLIC_HASH: self._public_hash}
        return {
            keys.NUM_CLASSES: self.num_classes,
            TASK: self.task,
            LOSS: self.target_loss,
            **public,
        }

    def read(self, knowledge: Knowledge) -> AgentModel:
        """Check a model: by its factory, or as far as numbers can be judged without one."""
        name = check_relayed(knowledge)
        if name in self.model_fns:
            owner = type(self).__name__
            rebuild(owner, name, knowledge.arrays, self.model_fns, self.num_classes)
        else:
            check_finite(knowledge)
        ledger = read_ledger(knowledge.meta.get(PRIVACY_EVENTS))
        return AgentModel(Knowledge(MODEL, knowledge.arrays, {keys.LEARNER: name}), ledger)

    def aggregate(
        self, replies: Sequence[PartyReply[AgentModel]]
    ) -> tuple[ArrayRecord | None, Metrics]:
        """Keep the new models and what they cost."""
        for reply in replies:
            agent = reply.partition_id
            self._agents = {n: other for n, other in self._agents.items() if other != agent}
            self._agents[reply.node_id] = agent
            self._newest[agent] = reply.knowledge.model
        self.record_releases(replies)
        if replies:
            self._answered = {reply.partition_id for reply in replies}
        refused = sum(reply.metrics.get(NUM_MODELS_REFUSED, 0) for reply in replies)
        return None, {NUM_MODELS_REFUSED: refused}

    def record_releases(self, replies: Sequence[PartyReply[AgentModel]]) -> None:
        """Record what agents say that their models have cost."""
        for reply in replies:
            self._charge(reply)

    def _charge(self, reply: PartyReply[AgentModel]) -> None:
        """Record what the agent has spent; see `costliest` for whose ledger is shown.

        A node tells all that it has spent in this run, but an agent that comes back as
        another node, or as the same one without its state, has forgotten what it spent
        before.
        """
        agent, ledger = reply.partition_id, reply.knowledge.ledger
        told = self._told.setdefault(agent, {})
        old = told.get(reply.node_id)
        if old is not None and has_forgotten(ledger, old[1]):
            self._lose(agent, *old)
        told[reply.node_id] = told_epsilon(reply.metrics, ledger), ledger
        for _ in range(1, self.attempts_of(reply.node_id)):
            # An answer that was lost on its way has cost no more than all that is told.
            self._lose(agent, *told[reply.node_id])
        parts = [*told.values(), self._lost.get(agent, (0.0, new_ledger()))]
        whole = fill_ledger(self._new_ledger(), [part for _, part in parts])
        self._ledgers[agent] = sum(epsilon for epsilon, _ in parts), whole
        self.ledger_ = costliest(self._ledgers.values())

    def _lose(self, agent: int, epsilon: float, ledger: PrivacyLedger) -> None:
        """Count what an agent has spent, or may have spent, and does not know any more."""
        before, lost = self._lost.get(agent, (0.0, new_ledger()))
        self._lost[agent] = before + epsilon, fill_ledger(lost, [lost, ledger])

    @property
    def models_(self) -> dict[int, Learner]:
        """The newest model of every agent whose learner the server can rebuild."""
        known = sorted(self._newest.items())
        return {
            agent: self._rebuild(model)
            for agent, model in known
            if model.meta[keys.LEARNER] in self.model_fns
        }

    @property
    def model_(self) -> Learner:
        """The scheme's predictor, rebuilt from the models that the server holds."""
        parts = self._parts()
        missing = {str(part.meta[keys.LEARNER]) for part in parts} - set(self.model_fns)
        if parts and not missing:
            return self._combine(parts)
        if missing:
            names = ", ".join(map(repr, sorted(missing)))
            self._failure = (
                f"the server relays models of {names} without a factory in model_fns"
            )
        return super().model_

    def _rebuild(self, part: Knowledge) -> Learner:
        name, owner = str(part.meta[keys.LEARNER]), type(self).__name__
        return rebuild(owner, name, part.arrays, self.model_fns, self.num_classes)

    def _parts(self) -> list[Knowledge]:
        """Return the models that `model_` is made of."""
        return [self._newest[agent] for agent in sorted(self._answered)]

    def _combine(self, parts: Sequence[Knowledge]) -> Learner:
        members = [self._rebuild(part) for part in parts]
        return MeanEnsemble(members, num_classes=self.num_classes, task=self.task)

    def knowledge_for(self, node_id: int) -> Knowledge | None:
        """Return the other agents' models of the last round."""
        own = self._agents.get(node_id)
        others = [self._newest[agent] for agent in sorted(self._answered) if agent != own]
        return join_models(others) if others else None

    def delivery_for(self, node_id: int) -> Knowledge | None:
        """Ask agents whose model was accepted to measure it; they have kept it."""
        return None if node_id in self.rejected_ else Knowledge(KEPT, {})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask the agents; once too few are left, send nothing and keep the result."""
        try:
            return super().configure_train(server_round, arrays, config, grid)
        except NotEnoughParties as error:
            if not self._newest:
                raise
            logger.warning("%s ended after round %s: %s", self.name, self.round_, error)
            return []

    def _accept(
        self, replies: Iterable[Message], kind: str, read: Callable[[Knowledge], S]
    ) -> list[PartyReply[S]]:
        """Leave out nodes that answer as an agent they were not before."""
        asked = {message.metadata.dst_node_id for message in self._sent}
        kept = []
        for reply in super()._accept(replies, kind, read):
            node, agent = reply.node_id, reply.partition_id
            others = {other for n, other in self._agents.items() if n in asked - {node}}
            if self._agents.get(node, agent) == agent and agent not in others:
                kept.append(reply)
            else:
                self._reject(
                    node, f"Reply: {keys.PARTITION_ID} must stay the same, got {agent}."
                )
        return kept
