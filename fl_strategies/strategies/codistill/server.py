"""The server side of co-distillation: models are checked, scored and relayed."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Final, Unpack

import numpy as np
from flwr.app import ArrayRecord

from fl_strategies._util import Array, FloatArray, content_hash
from fl_strategies.aggregation.ensembles import (
    MeanEnsemble,
    SignedEnsemble,
    outputs,
    raw_outputs,
    rebuild,
)
from fl_strategies.aggregation.pool import outliers
from fl_strategies.errors import require
from fl_strategies.learners import (
    Learner,
    LearnerFactory,
    PortableLearner,
    SoftLearner,
    Task,
    check_task,
)
from fl_strategies.options import Options
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.release import ReleaseFacts, ReleasePlan
from fl_strategies.server.replies import (
    PartyReply,
    Reported,
    most_expensive,
    read_ledger,
    reported_epsilon,
)
from fl_strategies.server.run import State
from fl_strategies.server.strategy import (
    FederationOptions,
    KnowledgeStrategy,
    check_factories,
    public_array,
)
from fl_strategies.strategies.codistill.options import (
    MODEL,
    Chain,
    CodistillOptions,
    check_relayed,
    check_share,
    fill_ledger,
    has_forgotten,
    join_models,
    new_ledger,
    release_plan,
    take_turns,
    wire_bytes,
)
from fl_strategies.strategies.codistill.party import FIRST_TERM, KEPT, SIGN, TASK
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import MAX_REPLY_BYTES, Knowledge, Metrics, Scalar

logger = logging.getLogger("flwr.fl_strategies")

ROWS_TO_SCORE: Final = 32
"""Public rows that a model must score to be relayed."""
MOST_ROWS: Final = 1000
"""Public rows on which models are compared to find outliers."""
LEAST_TYPICAL: Final = 0.5
"""Models are compared only where most predict about the same. Agents do not say which classes
they know, and honest ones that know different classes contradict each other."""


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
    """

    newest: dict[int, Knowledge] = field(default_factory=dict)
    reported: dict[int, dict[int, Reported]] = field(default_factory=dict)
    lost: dict[int, Reported] = field(default_factory=dict)


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
    options: Options
    reply_kind = MODEL
    party_learner_needs: ClassVar[tuple[type, ...]] = (PortableLearner,)
    state_type: ClassVar[type[RelayState]] = RelayState

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
        options: Options | None = None,
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
        rule = "given, or learner_fn: models without a factory are not relayed"
        require(bool(self.model_fns), owner, "model_fns", rule, self.model_fns)
        for name, factory in self.model_fns.items():
            learner, rule = factory(), "learners with to_arrays and from_arrays"
            portable = isinstance(learner, PortableLearner)
            require(portable, owner, "model_fns", rule, f"{name}: {type(learner).__name__}")
        self._public = None if public is None else public_array(owner, public)
        self._public_hash = None if self._public is None else content_hash(self._public)
        self._rows = _rows_to_score(owner, self._public, row_shape)
        self.state: RelayState = self.state_type(ledger=self.new_ledger(self.plan))
        self.options = options or self.options_type()
        fits, rule = isinstance(self.options, self.options_type), self.options_type.__name__
        require(fits, owner, "options", rule, options)
        self.settle(owner)

    def settle(self, owner: str) -> None:
        """Check the settings of a subclass, and set what follows from them."""

    @property
    def plan(self) -> ReleasePlan:
        """What one round releases, as its parties report."""
        return release_plan(self.name, ReleaseFacts(num_classes=self.num_classes))

    def party_config(self) -> dict[str, Scalar]:
        """Return the problem, what identifies public rows, and the options."""
        public = {} if self._public_hash is None else {keys.PUBLIC_HASH: self._public_hash}
        problem = {keys.NUM_CLASSES: self.num_classes, TASK: self.task}
        return {**problem, **public, **self.options.to_config()}

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
        ledger = read_ledger(knowledge.meta.get(keys.PRIVACY_EVENTS))
        return AgentModel(model, ledger)

    @property
    def has_result(self) -> bool:
        """Whether any party has a model that others could use."""
        return bool(self.state.newest)

    def enter_reported(self, replies: Sequence[PartyReply[AgentModel]]) -> None:
        """Enter what agents say that all their models of this run have cost."""
        for reply in replies:
            self._enter(reply)
        if self.state.ledgers:
            self.state.ledger = most_expensive(self.state.ledgers.values())

    def _enter(self, reply: PartyReply[AgentModel]) -> None:
        """Record what the agent has spent.

        A node reports all that it has spent in this run, but an agent that comes back as
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
        whole = fill_ledger(self.ledger_.emptied(), [part for _, part in parts])
        self.state.ledgers[agent] = sum(epsilon for epsilon, _ in parts), whole

    def _lose(self, agent: int, epsilon: float, ledger: PrivacyLedger) -> None:
        """Count what an agent has spent, or may have spent, and does not know any more."""
        before, lost = self.state.lost.get(agent, (0.0, new_ledger()))
        self.state.lost[agent] = before + epsilon, fill_ledger(lost, [ledger])

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


@dataclass(kw_only=True)
class CodistillState(RelayState):
    """Also the agents that sent a model last, and models that are handed on.

    Parameters
    ----------
    answered : set of partition ids
    chains : list of Chain
        Those of AKD and EKD.
    terms : list of Knowledge
        Of the sum of EKD.
    delivered : dict of node id to number of terms that it has
    """

    kinds: ClassVar[tuple[type, ...]] = (*RelayState.kinds, Chain)

    answered: set[int] = field(default_factory=set)
    chains: list[Chain] = field(default_factory=list)
    terms: list[Knowledge] = field(default_factory=list)
    delivered: dict[int, int] = field(default_factory=dict)


class Codistillation(ModelRelay):
    """Base of the four schemes: the server relays models and learns nothing itself.

    Leaves the party
        Its model of every round that it takes part in, to the server and by it to other
        agents, as arrays; nothing is unpickled. A model that contains its training rows
        carries them out of the party; kernel regression refuses to, unless it is given
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
        How the server rebuilds models named `learner_name`.
    learner_name : str
    model_fns : mapping of learner name to factory, optional
        Factories for the other learners of the federation. A model is relayed only if the
        server itself can rebuild it and it scores some rows; one without a factory is refused.
    public : (num_public, ...), optional
        Not learned from. If it is given, agents that hold other public rows are excluded:
        that mostly means other preprocessing; and models that contradict most others on
        them, where most agree, are not relayed.
    row_shape : tuple of int, optional
        Shape of a record, if there are no public rows: a row of zeros is scored.
    task : "single-label" or "regression"
    options : CodistillOptions, optional
    **federation
        See `KnowledgeStrategy`.

    Attributes
    ----------
    models_ : dict of partition id to Learner
        The newest model of every agent.

    Notes
    -----
    Agents are ordered by partition id, which the server learns from the first round.
    Parties need a factory, their own or in `Party.catalogue`, for every learner that they
    are to learn from. The server keeps the newest model of every agent and no older one.
    A model may have its share of the largest message that parties read, so that all models
    together reach everybody.
    """

    options_type = CodistillOptions
    tasks: ClassVar[Sequence[Task]] = ("single-label", "regression")
    usual_rounds: ClassVar[int] = 3
    central: ClassVar[bool] = False
    party_learner_needs = (SoftLearner, PortableLearner)
    state_type = CodistillState
    state: CodistillState

    options: CodistillOptions
    outliers_: tuple[int, ...] = ()
    _turns: Mapping[int, Chain] = MappingProxyType({})

    def settle(self, owner: str) -> None:
        """Raise for several labels of a record, and for a loss of classes in regression."""
        task, loss = self.task, self.options.target_loss
        require(task != "multi-label", owner, "task", "single-label or regression", task)
        fits = task != "regression" or loss == "mse"
        require(fits, owner, "target_loss", "'mse' in regression", loss)

    def start_chains(self, agents: Sequence[int]) -> list[Chain]:  # noqa: ARG002
        """Return the chains that the models of the first round begin; none by default."""
        return []

    def chains_of(self, agents: Sequence[int]) -> list[Chain]:
        """Return a chain for each of these agents, which begins with its model."""
        return [Chain(agent, agent, self.state.newest[agent]) for agent in sorted(agents)]

    def nodes_for_round(self, nodes: list[int]) -> list[int]:
        """Return the nodes whose turn it is; all of them without chains."""
        self._turns = {}
        if not self.state.chains:
            return nodes
        # Of two nodes that have been one agent, the longest known is asked.
        known, connected = reversed(self._agents.items()), {*nodes}
        present = {agent: node for node, agent in known if node in connected}
        turns = take_turns(self.state.chains, present)
        self._turns = {present[agent]: chain for agent, chain in turns.items()}
        return sorted(self._turns)

    def num_replies_needed(self) -> int:
        """Return 0 once there are chains: one that nobody continues with waits."""
        return 0 if self._turns else super().num_replies_needed()

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Keep the new models, except those of outliers, and what they cost."""
        replies = self.replies
        new = {reply.partition_id: reply.knowledge.model for reply in replies}
        self.outliers_ = self._find_outliers(new)
        outliers = {*self.outliers_}
        credible = {agent: model for agent, model in new.items() if agent not in outliers}
        self.state.newest |= credible
        if credible:
            self.state.answered = {*credible}
        self._hand_on(replies, credible)
        refused = sum(reply.metrics.get(keys.NUM_MODELS_REFUSED, 0) for reply in replies)
        return None, {keys.NUM_MODELS_REFUSED: refused, keys.NUM_OUTLIERS: len(outliers)}

    def _hand_on(
        self, replies: Sequence[PartyReply[AgentModel]], credible: Mapping[int, Knowledge]
    ) -> None:
        """Hand the chains on; one that an agent did not continue skips that agent."""
        for node in self._turns.keys() & self.rejected_.keys():
            self._turns[node].skip(self.party_of(node))
        for reply in replies:
            chain, agent = self._turns.get(reply.node_id), reply.partition_id
            if chain is not None and agent in credible:
                chain.follow(agent, reply.knowledge.model)
                self._note(chain)
            elif chain is not None:
                chain.skip(agent)
        if not self.state.chains:
            self.state.chains = self.start_chains([*credible])
            for chain in self.state.chains:
                self._note(chain)

    def _note(self, chain: Chain) -> None:
        """Keep what the scheme needs of a chain's newest model; nothing by default."""

    def _find_outliers(self, new: Mapping[int, Knowledge]) -> tuple[int, ...]:
        """Return which agents' new models contradict the newest ones of most others."""
        newest = {**self.state.newest, **new}
        if self._public is None or not newest:
            return ()
        agents, rows = sorted(newest), self._public[:MOST_ROWS]
        sent = [_outputs(self._rebuild(newest[agent]), rows, self.task) for agent in agents]
        found = outliers(
            lambda position: sent[position],
            np.ones((len(sent), sent[0].shape[1])),
            np.ones(len(sent), dtype=np.int64),
            least_typical=LEAST_TYPICAL,
        )
        unlike = tuple(agents[position] for position in found if agents[position] in new)
        if unlike:
            logger.warning(
                "%s does not relay the models of agents %s, which contradict most others.",
                self.name,
                unlike,
            )
        return unlike

    @property
    def _agents(self) -> dict[int, int]:
        """The agents by node id, longest known first."""
        return {node: agent for node, (_, agent) in self.members.items()}

    @property
    def model_(self) -> Learner:
        """The scheme's predictor, rebuilt from the models that the server holds."""
        parts = self._parts()
        return self._combine(parts) if parts else super().model_

    def _parts(self) -> list[Knowledge]:
        """Return the models that `model_` is made of."""
        return [self.state.newest[agent] for agent in sorted(self.state.answered)]

    def _combine(self, parts: Sequence[Knowledge]) -> Learner:
        members = [self._rebuild(part) for part in parts]
        return MeanEnsemble(members, num_classes=self.num_classes, task=self.task)

    def knowledge_for(self, node_id: int) -> Knowledge | None:
        """Return the other agents' models of the last round; of a chain its newest one."""
        if node_id in self._turns:
            return join_models([self._turns[node_id].model])
        own = self._agents.get(node_id)
        others = [
            self.state.newest[agent] for agent in sorted(self.state.answered) if agent != own
        ]
        return join_models(others) if others else None

    def delivery_for(self, node_id: int) -> Knowledge | None:
        """Ask agents whose model was accepted to measure it; they have kept it."""
        return None if node_id in self.rejected_ else Knowledge(KEPT, {})


def _outputs(model: Learner, rows: Array, task: Task) -> FloatArray:
    try:
        return outputs(model, rows, task)
    except Exception:  # a hostile model may make a learner raise anything
        return np.zeros((len(rows), model.num_classes))


class AvgKD(Codistillation):
    """Averaged distillation: agents learn the mean of their labels and others' predictions.

    With M agents the target of agent i is (labels + sum of the other M - 1 predictions) / M
    (appendix G). It does not degrade over the rounds. `model_` is the mean of the agents'
    probabilities or outputs.

    An agent that fails or leaves has no part in the next round's targets, and M is the
    number of models that an agent can read, its labels counted as one. It is asked again
    as long as it is connected; so are agents that come late.

    See `Codistillation` for what leaves the parties, guarantees and parameters.
    """

    name: ClassVar[str] = "avgkd"


class PKD(Codistillation):
    """Parallel distillation: agents learn the mean of all M predictions, without labels.

    It rises at first and then degrades. The mean contains what the agent's own last model
    predicts, as in the authors' code and in Eq. 22; the algorithm that the paper prints
    has the last targets instead, which is the same for models that fit them exactly.

    `model_`, agents that leave and those that come are as in `AvgKD`; see `Codistillation`
    for what leaves the parties, guarantees and parameters.
    """

    name: ClassVar[str] = "pkd"


class AKD(Codistillation):
    """Alternating distillation: one model goes round, each agent learns it from the last.

    In round 1 all agents train on their labels and the chain starts with the first of
    them; from then on one agent a round is asked, 1 -> 2 -> ... -> M -> 1, and gets the one
    model it needs. The paper lets agent 1 begin alone; that all train costs their time
    once, shows the server who is there and measures every agent without the others.
    It degrades over the rounds. `model_` is the newest model of the chain.

    An agent that is away, fails or cannot read the model is skipped: in the next round the
    model goes to the agent after it, and so on round the circle, never back to the agent
    that trained it. When no other agent is left, nothing more is sent and the result
    stays. Agents whose reply to the first round was bad have no place in the circle.

    See `Codistillation` for what leaves the parties, guarantees and parameters.
    """

    name: ClassVar[str] = "akd"

    def start_chains(self, agents: Sequence[int]) -> list[Chain]:
        """Return the chain that the first agent begins."""
        return self.chains_of(agents)[:1]

    def _parts(self) -> list[Knowledge]:
        return [chain.model for chain in self.state.chains]

    def _combine(self, parts: Sequence[Knowledge]) -> Learner:
        return self._rebuild(parts[0])


class EKD(Codistillation):
    """Ensembled distillation: M alternating chains at once, and the signed sum of all models.

    Every agent begins a chain in round 1 and in each round continues the one that the agent
    before it held. The predictor is the sum over rounds t = 0, 1, ... of (-1)^t times the
    sum of the M models of that round (Eq. 9 and 32). `model_` is this sum, a
    `SignedEnsemble`, which can be evaluated and saved.

    For two agents the sum converges to the predictions of one model of the pooled data
    (Proposition VII). Eq. 32 carries it over to M agents with the same weights, plus and
    minus one; for three agents and more its limit is *not* the pooled model
    (`tests/closed_forms.py`).

    A skipped agent (see `AKD`) may be next in two chains; the longer one then waits for a
    round. A sign is decided by the place in its chain, so nothing else changes.

    The result is one for everybody: after every round the parties that took part are sent
    the terms they do not have yet, and measure the whole sum. Server and parties keep all
    terms, O(rounds x M) models; ``evaluate=False`` leaves them on the server only. A party
    that lacks more terms than fit into one message is sent none, and measures nothing.

    See `Codistillation` for what leaves the parties, guarantees and parameters.
    """

    name: ClassVar[str] = "ekd"
    central: ClassVar[bool] = True
    _deliveries: dict[int, Knowledge | None]
    """What is delivered in this round, by the first term in it."""

    def start_chains(self, agents: Sequence[int]) -> list[Chain]:
        """Return the chains that all models of the first round begin."""
        return self.chains_of(agents)

    def begin_round(self) -> bool:
        """Forget what was delivered in the round before."""
        self._deliveries = {}
        return super().begin_round()

    def _note(self, chain: Chain) -> None:
        self._deliveries = {}
        meta = {**chain.model.meta, SIGN: chain.sign}
        self.state.terms.append(Knowledge(chain.model.kind, chain.model.arrays, meta))

    def _parts(self) -> list[Knowledge]:
        return self.state.terms

    def _combine(self, parts: Sequence[Knowledge]) -> Learner:
        return SignedEnsemble(
            [self._rebuild(part) for part in parts],
            [int(part.meta[SIGN]) for part in parts],
            [str(part.meta[keys.LEARNER]) for part in parts],
            num_classes=self.num_classes,
            task=self.task,
            model_fns=self.model_fns,
        )

    def delivery_for(self, node_id: int) -> Knowledge | None:
        """Return the terms of the sum that this node has not confirmed yet, if they fit."""
        first = self.state.delivered.get(node_id, 0)
        if first not in self._deliveries:
            missing = self.state.terms[first:]
            too_large = wire_bytes(missing) > MAX_REPLY_BYTES
            joined = join_models(missing, **{FIRST_TERM: first})
            self._deliveries[first] = joined if missing and not too_large else None
        return None if node_id in self.rejected_ else self._deliveries[first]

    def confirm_delivery(self, replies: Sequence[PartyReply[None]]) -> None:
        """Note who has all terms now."""
        self.state.delivered |= {reply.node_id: len(self.state.terms) for reply in replies}
