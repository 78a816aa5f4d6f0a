"""AKD, AvgKD, PKD and EKD: agents with models of their own teach each other.

Afonin, Karimireddy: Towards Model-Agnostic Federated Learning Using Knowledge
Distillation (ICLR 2022), sections 4 and 5, appendices E to G.

    round 1   every agent trains on its own labels
    round t   an agent predicts its own inputs with models of the round before and trains
              a new model, from scratch, on
                AKD, EKD   the predictions of the agent before it
                AvgKD      the mean of its labels and the predictions of all others
                PKD        the mean of all predictions, its own model's included

Flower counts rounds from 1, the paper from 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from flwr.app import ArrayRecord

from fl_strategies.aggregation.ensembles import SignedEnsemble
from fl_strategies.learners import Learner
from fl_strategies.server.replies import PartyReply
from fl_strategies.strategies.codistill.options import (
    Chain,
    join_models,
    take_turns,
    wire_bytes,
)
from fl_strategies.strategies.codistill.party import FIRST_TERM, SIGN
from fl_strategies.strategies.codistill.server import Codistillation, CodistillState
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import MAX_REPLY_BYTES, Knowledge, Metrics


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


@dataclass(kw_only=True)
class ChainsState(CodistillState):
    """Also the chains; of EKD the terms of its sum, and how many of them each node has."""

    chains: list[Chain] = field(default_factory=list)
    terms: list[Knowledge] = field(default_factory=list)
    delivered: dict[int, int] = field(default_factory=dict)


class _Chains(Codistillation):
    """What the schemes share in which a model is handed on from agent to agent."""

    state_type = ChainsState
    state: ChainsState

    _turns: Mapping[int, Chain] = MappingProxyType({})
    """Whose turn it is in this round, by node, and in which chain."""

    def start_chains(self, agents: Sequence[int]) -> list[Chain]:
        """Return the chains that the models of the first round begin."""
        return [Chain(agent, agent, self.state.newest[agent]) for agent in sorted(agents)]

    def nodes_for_round(self, nodes: list[int]) -> list[int]:
        """Return the nodes whose turn it is, all of them in the first round."""
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

    def knowledge_for(self, node_id: int) -> Knowledge | None:
        """Return the one model that this node is to learn from."""
        chain = self._turns.get(node_id)
        return None if chain is None else join_models([chain.model])

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Hand the chains on; one that an agent did not continue skips that agent."""
        replies, result = self.replies, super().finish()
        for node in self._turns.keys() & self.rejected_.keys():
            self._turns[node].skip(self.party_of(node))
        outliers = {*self.outliers_}
        credible = [r for r in replies if r.partition_id not in outliers]
        for reply in replies:
            if reply.node_id in self._turns and reply.partition_id in outliers:
                self._turns[reply.node_id].skip(reply.partition_id)
        for reply in credible:
            if reply.node_id in self._turns:
                chain = self._turns[reply.node_id]
                chain.follow(reply.partition_id, reply.knowledge.model)
                self._note(chain)
        if not self.state.chains:
            self.state.chains = self.start_chains([reply.partition_id for reply in credible])
            for chain in self.state.chains:
                self._note(chain)
        return result

    def _note(self, chain: Chain) -> None:
        """Keep what the scheme needs of a chain's newest model; nothing by default."""


class AKD(_Chains):
    """Alternating distillation: one model goes round, each agent learns it from the last.

    In round 1 all agents train on their labels and the chain starts with the first of
    them; from then on one agent a round is asked, 1 -> 2 -> ... -> M -> 1, and gets the one
    model it needs. The paper lets agent 1 begin alone; that all train costs their time
    once, tells the server who is there and gives every agent's figure without the others.
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
        return super().start_chains(agents)[:1]

    def _parts(self) -> list[Knowledge]:
        return [chain.model for chain in self.state.chains]

    def _combine(self, parts: Sequence[Knowledge]) -> Learner:
        return self._rebuild(parts[0])


class EKD(_Chains):
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
            self._deliveries[first] = self._terms_from(first)
        return None if node_id in self.rejected_ else self._deliveries[first]

    def _terms_from(self, first: int) -> Knowledge | None:
        missing = self.state.terms[first:]
        if not missing or wire_bytes(missing) > MAX_REPLY_BYTES:
            return None
        return join_models(missing, **{FIRST_TERM: first})

    def confirm_delivery(self, replies: Sequence[PartyReply[None]]) -> None:
        """Note who has all terms now."""
        self.state.delivered |= {reply.node_id: len(self.state.terms) for reply in replies}
