"""The server half that every strategy of this package shares.

Subclasses say what to ask of a party, how to read its answer and how to combine the
answers. Here is the rest: waiting for the parties, one deterministic order of replies,
leaving out a bad reply without ending the run, metrics, and the delivery of the result.
"""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import ClassVar, Generic, TypeVar, Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid

from fl_strategies.aggregation.metrics import aggregate_metrics
from fl_strategies.core.federation import FederationOptions as FederationOptions
from fl_strategies.core.federation import check_federation
from fl_strategies.core.members import Known, check_claim, registered, settle
from fl_strategies.core.protocols import Learner, require_portable
from fl_strategies.exceptions import (
    NotEnoughParties,
    NotFitted,
    UnsupportedLearner,
)
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.runtime.connections import wait_for_parties
from fl_strategies.runtime.resumable import ResumableStrategy, described
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import (
    MAX_REPLY_BYTES,
    Knowledge,
    Metrics,
    Scalar,
    encode_arrays,
    write_messages,
)
from fl_strategies.wire.replies import (
    EVALUATION,
    PartyReply,
    PartyReport,
    cut_short,
    figures_by_party,
    parse_reply,
)

# A child of Flower's logger, so that our lines appear among Flower's own.
logger = logging.getLogger("flwr.fl_strategies")

T = TypeVar("T")
S = TypeVar("S")


class KnowledgeStrategy(ResumableStrategy, Generic[T]):
    """Base of all strategies; implement `party_config`, `read` and `aggregate`.

    Parameters
    ----------
    num_parties : int
        Parties to wait for before a round. All that are connected then take part.
    min_parties : int (default: 2, or 1 if only one party is expected)
        Fewest parties to go on with, both after waiting and after bad replies.
    max_wait : float (default: 120)
        Seconds to wait for `num_parties` to connect.
    seed : int (default: 0)
        Seed of the experiment. It never feeds noise that protects privacy.
    evaluate : bool (default: True)
        Deliver the final model to the parties, who report its accuracy on their own
        held-out rows, if they have any.
    max_reply_bytes : int (default: 256 MiB)
        Largest reply that is read.
    members : mapping of node id to partition id, optional
        Who is who, as its operator knows; other nodes are not asked. Without, a node has
        the number of its first answer, for the whole run (see `core.members`).
    checkpoint_dir : str or Path, optional
        Folder in which the run is kept, so that it can go on after the server was killed.
        It holds what parties sent, so it needs the protection that the server itself has.
    resume : bool (default: False)
        Go on with the run in `checkpoint_dir`, if there is one. Parties are not asked again
        for what has arrived, and the result is the same to the bit.

    Attributes
    ----------
    parties_ : dict of partition id to `PartyReport`
        What each party reported last.
    ledger_ : PrivacyLedger
        What the run released, in the unit that its guarantee is about.
    rejected_ : dict
        Per node id: why its reply of the last round was left out.
    round_ : int
        Rounds asked so far, over all calls of `start`: a second call goes on.
    """

    reply_kind: str
    ledger_: PrivacyLedger
    model_name: str = ""
    """What parties call the final model; they need a factory of this name to receive it."""
    run_settings: Mapping[str, Scalar]
    """What else a resumed run must have as before, such as the settings of its learner."""
    last_round: int | None = None
    """Round after which the strategy has nothing more to ask, or None."""
    central: ClassVar[bool] = True
    """Whether the run ends in one model for everybody, or each party keeps its own."""
    party_learner_needs: ClassVar[tuple[type, ...]] = ()
    """Protocols beyond `Learner` that the parties' models must have."""
    final_learner_needs: ClassVar[tuple[type, ...]] = ()
    """Protocols beyond `Learner` that the server's model must have."""
    kept = (*ResumableStrategy.kept, "parties_", "ledger_", "_delivery", "_known")
    kept_kinds: ClassVar[tuple[type, ...]] = (Knowledge, PartyReport)

    def __init__(self, **federation: Unpack[FederationOptions]) -> None:
        folder = federation.get("checkpoint_dir")
        super().__init__(folder, resume=federation.get("resume", False))
        self.num_parties = federation.get("num_parties", 2)
        self.min_parties = federation.get("min_parties", min(2, self.num_parties))
        self.max_wait = federation.get("max_wait", 120.0)
        self.seed = federation.get("seed", 0)
        self.evaluate = federation.get("evaluate", True)
        self.max_reply_bytes = federation.get("max_reply_bytes", MAX_REPLY_BYTES)
        owner = type(self).__name__
        check_federation(owner, {**federation, "num_parties": self.num_parties})
        self._registered = registered(owner, federation.get("members"), self.num_parties)
        self._known: Known = {}
        self.run_settings = {}
        self.parties_: dict[int, PartyReport] = {}
        self.rejected_: dict[int, str] = {}
        self._model: Learner | None = None
        self._delivery: Knowledge | None = None
        self._failure = "the strategy has not run"
        self._sent: list[Message] = []

    # What a subclass says about its algorithm.

    @abstractmethod
    def party_config(self) -> dict[str, Scalar]:
        """Return the settings that parties need in round `round_`."""

    @abstractmethod
    def read(self, knowledge: Knowledge) -> T:
        """Check one party's knowledge; raise `KnowledgeMismatch` to leave it out."""

    @abstractmethod
    def aggregate(self, replies: Sequence[PartyReply[T]]) -> tuple[ArrayRecord | None, Metrics]:
        """Combine the accepted replies, sorted by partition id, and add own metrics."""

    def record_releases(self, replies: Sequence[PartyReply[T]]) -> None:
        """Record in the ledger what has left the parties although too few of them answered.

        `aggregate` records this by itself in a round that ends well.
        """

    def prepare_round(self) -> bool:
        """Make ready to ask the parties; return whether they may be asked at all."""
        return True

    def nodes_for_round(self, nodes: list[int]) -> list[int]:
        """Return which of the connected nodes to ask; all of them by default.

        With none, nothing is sent and the round does not count.
        """
        return nodes

    def num_replies_needed(self) -> int:
        """Return how many valid replies a round needs; `min_parties` by default.

        Never more are needed than nodes were asked.
        """
        return self.min_parties

    def knowledge_for(self, node_id: int) -> Knowledge | None:  # noqa: ARG002
        """Return what this node is to learn from before it trains; nothing by default."""
        return None

    def delivery_for(self, node_id: int) -> Knowledge | None:  # noqa: ARG002
        """Return what this node is given after a round; by default the final model."""
        return self._delivery

    def identity(self) -> dict[str, object]:
        """Return what must be the same for a run to go on: all settings but patience."""
        patience = FederationOptions.__annotations__.keys() - {"num_parties", "seed"}
        own = {
            name: described(value)
            for name, value in vars(self).items()
            if not (name.startswith("_") or name.endswith("_") or name in patience)
        }
        ledger = self.ledger_
        budget = [ledger.unit, ledger.delta, ledger.max_epsilon]
        return {**own, **self.party_config(), "budget": budget, keys.STRATEGY: self.name}

    # What the strategy has learned.

    @property
    def model_(self) -> Learner:
        """The final model."""
        if self._model is None:
            raise NotFitted(
                f"{type(self).__name__}: model_ must be read after a run that ended well, "
                f"got none: {self._failure}."
            )
        return self._model

    def _keep_model(self, model: Learner) -> ArrayRecord | None:
        """Keep the final model; return its arrays if it can travel."""
        self._model = model
        try:
            arrays = require_portable(model).to_arrays()
        except UnsupportedLearner as error:
            logger.info("%s: the final model stays on the server. %s", self.name, error)
            return None
        self._delivery = Knowledge("model", arrays, {keys.LEARNER: self.model_name})
        return encode_arrays(arrays)

    # Flower's five methods.

    def summary(self) -> None:
        """Log the settings."""
        logger.info("\t├──> %s:", type(self).__name__)
        for key, value in {**self.party_config(), "num-parties": self.num_parties}.items():
            logger.info("\t│\t├── %s: %s", key, value)

    def configure_train(
        self,
        server_round: int,
        arrays: ArrayRecord,  # noqa: ARG002 - Flower's signature
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """Ask the parties of this round, once the expected ones are there."""
        self._sent = []
        if self.last_round is not None and server_round > self.last_round:
            logger.info("%s has ended; nothing is sent.", self.name)
            return []
        self._begin_round()
        if not self.prepare_round():
            return []
        nodes = self.nodes_for_round(self._wait_for_parties(grid))
        if not nodes:
            logger.info("%s has nobody to ask; nothing is sent.", self.name)
            return []
        self.rejected_ = {}
        self.round_ += 1
        content = {node: self.knowledge_for(node) for node in nodes}
        self._sent = self._messages(MessageType.TRAIN, content, config)
        return self._sent

    def aggregate_train(
        self,
        server_round: int,  # noqa: ARG002 - Flower's signature
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the valid replies; with too few of them, report nothing and say why."""
        accepted = self._accept(replies, self.reply_kind, self.read)
        if not self._sent:
            return None, None
        needed = min(self.num_replies_needed(), len(self._sent))
        if len(accepted) < needed:
            self._fail(
                f"{len(accepted)} of {len(self._sent)} parties sent a valid reply and "
                f"{needed} are needed ({self._first_rejection()})"
            )
            self.record_releases(accepted)
            self._sent = []  # there is nothing new to deliver
            self._stop_to_resume()
            return None, None
        arrays, metrics = self.aggregate(accepted)
        totals = aggregate_metrics([reply.metrics for reply in accepted])
        totals |= {
            keys.NUM_PARTIES: len(accepted),
            keys.NUM_REJECTED: len(self.rejected_),
            **metrics,
        }
        self._history["train"][self.round_] = totals
        return arrays, MetricRecord({**totals})

    def configure_evaluate(
        self,
        server_round: int,  # noqa: ARG002 - Flower's signature
        arrays: ArrayRecord,  # noqa: ARG002 - Flower's signature
        config: ConfigRecord,
        grid: Grid,  # noqa: ARG002 - Flower's signature
    ) -> list[Message]:
        """Deliver the result to the parties of this round."""
        nodes = [message.metadata.dst_node_id for message in self._sent if self.evaluate]
        content = {node: self.delivery_for(node) for node in nodes}
        content = {node: given for node, given in content.items() if given is not None}
        self._sent = self._messages(MessageType.EVALUATE, content, config)
        return self._sent

    def aggregate_evaluate(
        self,
        server_round: int,  # noqa: ARG002 - Flower's signature
        replies: Iterable[Message],
    ) -> MetricRecord | None:
        """Combine what the parties measured on their own held-out rows."""
        accepted = self._accept(replies, EVALUATION, lambda _: None)
        self._sent = []
        if not accepted:
            return None
        totals: dict[str, float | list[float]] = {
            **aggregate_metrics([reply.metrics for reply in accepted])
        }
        if not self.central:
            totals |= figures_by_party(accepted)
        self._history["evaluate"][self.round_] = totals
        return MetricRecord({**totals})

    # Messages.

    def _messages(
        self,
        kind: str,
        content: Mapping[int, Knowledge | None],
        config: Mapping[str, object],
    ) -> list[Message]:
        """Return a message a node, with the settings of this round."""
        ours = {
            **config,
            **self.party_config(),
            keys.STRATEGY: self.name,
            keys.SERVER_ROUND: self.round_,
            keys.SEED: self.seed,
            **({keys.RUN_NAME: self._checkpoint.run_name} if self._checkpoint else {}),
        }
        return write_messages(kind, content, ours)

    def _wait_for_parties(self, grid: Grid) -> list[int]:
        return wait_for_parties(
            type(self).__name__,
            grid,
            num_parties=self.num_parties,
            min_parties=self.min_parties,
            max_wait=self.max_wait,
            only=self._registered,
        )

    @property
    def _who_is_who(self) -> Known:
        return self._registered or self._known

    # Replies.

    def _accept(
        self, replies: Iterable[Message], kind: str, read: Callable[[Knowledge], S]
    ) -> list[PartyReply[S]]:
        """Parse all replies; a bad one costs its party the round and nobody else anything."""
        waiting = {m.metadata.message_id: m for m in self._sent}
        accepted: list[PartyReply[S]] = []
        asked, attempt = {m.metadata.dst_node_id for m in self._sent}, 1
        for reply in replies:
            request = waiting.pop(reply.metadata.reply_to_message_id, None)
            if request is None:
                logger.warning("%s ignores a reply to no open question.", self.name)
                continue
            node_id = request.metadata.dst_node_id
            if self.first_attempt_of(node_id) > attempt:
                # Who answered before a resume is known by now; see `check_claim`.
                attempt = self.first_attempt_of(node_id)
                accepted = settle(self._who_is_who, accepted)
            check = partial(check_claim, self._who_is_who, asked, node_id)
            limit = self.max_reply_bytes
            try:
                accepted.append(parse_reply(request, reply, kind, limit, read, check=check))
            except Exception as error:  # hostile input may make a learner raise anything
                self._reject(node_id, str(error) or type(error).__name__)
        for request in waiting.values():
            self._reject(request.metadata.dst_node_id, "it did not answer in time")
        accepted = settle(self._who_is_who, accepted)
        for party in accepted:
            report = self.parties_.setdefault(
                party.partition_id, PartyReport(party.learner_name, {}, {})
            )
            (report.evaluate if kind == EVALUATION else report.train).update(party.metrics)
        return accepted

    def _reject(self, node_id: int, reason: str) -> None:
        reason = cut_short(reason)
        self.rejected_.setdefault(node_id, reason)
        logger.warning("%s leaves out node %s: %s", self.name, node_id, reason)

    def _fail(self, reason: str) -> None:
        self._failure = reason
        logger.error("%s has no result: %s.", self.name, reason)

    def _stop_to_resume(self) -> None:
        """End a run that is kept where it failed: later rounds would bury this one."""
        if self._checkpoint is not None:
            self._checkpoint.reopen(self.rejected_)
            raise NotEnoughParties(
                f"{type(self).__name__}: round {self.round_} must have enough replies, got too "
                f"few: {self._failure}. Give resume to ask these parties again."
            )

    def _first_rejection(self) -> str:
        reasons = [f"node {node}: {reason}" for node, reason in self.rejected_.items()]
        return f"for example {reasons[0].rstrip('.')}" if reasons else "no reply was bad"
