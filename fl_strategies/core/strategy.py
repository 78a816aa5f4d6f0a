"""The server side that every strategy of this package shares.

Subclasses say what to ask of a party, how to read its answer and how to combine the
answers. Here is the rest: waiting for the parties, one deterministic order of replies,
excluding a bad reply without ending the run, metrics, and the delivery of the result.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fl_strategies.aggregation.metrics import aggregate_metrics, without_unknown
from fl_strategies.core.callbacks import Callbacks, followed_by
from fl_strategies.core.collecting import Collector
from fl_strategies.core.federation import FederationOptions as FederationOptions
from fl_strategies.core.federation import check_federation, expected_parties, sample
from fl_strategies.core.identity import described
from fl_strategies.core.members import registered, settle
from fl_strategies.core.outcome import Outcome
from fl_strategies.exceptions import InvalidParameter, NotEnoughParties, require
from fl_strategies.runtime._compat import warn_of_untested_flower
from fl_strategies.runtime.connections import wait_for_parties
from fl_strategies.runtime.runs import EvaluateFn, KeptRun, Run, once_there_is_a_model
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import (
    MAX_REPLY_BYTES,
    Knowledge,
    decode_arrays,
    write_messages,
)
from fl_strategies.wire.replies import (
    EVALUATION,
    PartyReply,
    cut_short,
    figures_by_party,
)

# A child of Flower's logger, so that our lines appear among Flower's own.
logger = logging.getLogger("flwr.fl_strategies")

T = TypeVar("T")
S = TypeVar("S")


class KnowledgeStrategy(Outcome[T], Strategy):
    """Base of all strategies.

    A subclass says what to ask (`party_config`), whether a reply is as asked (`check`), what
    becomes of it (`add`) and what a round comes to (`finish`). What a round leaves to the next
    is in `state`, and nothing else is.

    Parameters
    ----------
    num_parties : int
        Parties to wait for before a round.
    min_available_nodes : int
        Flower's name for `num_parties`.
    min_parties : int (default: 2, or 1 if only one party is expected)
        Fewest parties to continue with, both after waiting and after bad replies.
    fraction_train, min_train_nodes : float, int (default: 1, 1)
        Share of the connected parties that a round asks, and fewest to ask. Who is not asked
        is for this round like a party that is away. No privacy is claimed from it.
    max_wait : float (default: 120)
        Seconds to wait for `num_parties` to connect.
    seed : int (default: 0)
        Seed of the experiment. It never feeds noise that protects privacy.
    evaluate : bool (default: True)
        Deliver the final model to the parties, who report its accuracy on their own
        held-out rows, if they have any.
    max_reply_bytes : int (default: 256 MiB)
        Largest reply that is read.
    half_precision : bool (default: False)
        Let parties send float32 models as float16, at half the bytes and three digits.
    members : mapping of node id to partition id, optional
        Who is who, as its operator knows; other nodes are not asked. Without, a node has
        the number of its first answer, for the whole run (see `core.members`).
    checkpoint_dir : str or Path, optional
        Folder in which the run is kept, so that it can be resumed after the server was killed.
        It holds what parties sent, so it needs the protection that the server itself has.
    resume : bool (default: False)
        Resume the run in `checkpoint_dir`, if there is one. Parties are not asked again
        for what has arrived, and the result is the same to the bit.
    on_round : callable or list of callables, optional
        Called as `on_round(number, metrics)` after each round, with the round's figures by
        names such as ``"train/epsilon-example"``; see docs/tracking.md. An exception in it is
        logged once and ends nothing. The last round may come again after a resume.

    Attributes
    ----------
    parties_ : dict of partition id to `PartyReport`
        What each party reported last.
    ledger_ : PrivacyLedger
        What the run released, in the unit that its guarantee is about.
    rejected_ : dict
        Per node id: why its reply of the last round was excluded.
    undelivered_ : dict
        Per node id: why it did not confirm that it has what the last round came to.
    round_ : int
        Rounds asked so far, over all calls of `start`: a second call continues.
    """

    def __init__(self, **federation: Unpack[FederationOptions]) -> None:
        owner = type(self).__name__
        self.require_arguments(federation)
        self.num_parties = expected_parties(owner, federation)
        self.min_parties = federation.get("min_parties", min(2, self.num_parties))
        self.max_wait = federation.get("max_wait", 120.0)
        self.seed = federation.get("seed", 0)
        self.evaluate = federation.get("evaluate", True)
        self.max_reply_bytes = federation.get("max_reply_bytes", MAX_REPLY_BYTES)
        check_federation(owner, federation)
        self._federation = federation
        self._registered = registered(owner, federation.get("members"), self.num_parties)
        self.run = self._make_run(federation.get("checkpoint_dir"), federation.get("resume"))
        self.run_settings = {}
        self.rejected_: dict[int, str] = {}
        self.undelivered_: dict[int, str] = {}
        self._half = federation.get("half_precision", False)
        self._model = None
        self._kept: list[PartyReply[T]] = []
        self._sent: list[Message] = []
        self._refused = 0
        self._callbacks = Callbacks(owner, federation.get("on_round"))
        self._judged_later = False
        self._is_started = False

    def _make_run(self, folder: str | Path | None, resume: bool | None) -> Run:
        given, owner = bool(folder) or not resume, type(self).__name__
        require(given, owner, "checkpoint_dir", "given with resume", folder)
        if not folder:
            return Run()
        return KeptRun(Path(folder), resume=bool(resume), kinds=self.state_type.kinds)

    def adopt(self, run: Run) -> None:
        """Take part in a run that somebody else keeps, such as a chain of strategies."""
        self.run = run

    def identity(self) -> dict[str, object]:
        """Return what must be the same to resume a run: all settings but patience."""
        names = ("num_parties", "seed", "run_settings", *self.identified_by)
        own = {name: described(getattr(self, name)) for name in names}
        ledger = self.state.ledger
        budget = [ledger.unit, ledger.delta, ledger.max_epsilon]
        own |= self.party_config() | self.precision
        return {**own, "budget": budget, keys.STRATEGY: self.name}

    # Flower's methods.

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Run some rounds; see Flower's `Strategy.start`. Raise `RunFailed` without a result.

        `initial_arrays` are for strategies that continue from a model; others refuse any.
        `evaluate_fn` gets the arrays of the final model by the names that `to_arrays` gives
        them, for a network those of its state; before there are any it is not called.
        With a checkpoint `num_rounds` counts from the beginning of the run, and rounds that
        are over are not repeated.
        """
        warn_of_untested_flower()
        begin = partial(
            super().start,
            initial_arrays=initial_arrays,
            timeout=timeout,
            train_config=train_config,
            evaluate_config=evaluate_config,
        )
        if initial_arrays:
            self.warm_start(decode_arrays(initial_arrays, self.max_reply_bytes))
        judged = evaluate_fn and once_there_is_a_model(evaluate_fn)
        self._judged_later = judged is not None
        judged = judged and followed_by(judged, self._end_round)
        self._is_started = True
        try:
            result = self.run.execute(self, begin, grid, num_rounds, judged)
        finally:
            self._is_started = False
        self.require_result()
        return result

    def summary(self) -> None:
        """Log the settings."""
        logger.info("\t├──> %s:", type(self).__name__)
        for key, value in {**self.party_config(), "num-parties": self.num_parties}.items():
            logger.info("\t│\t├── %s: %s", key, value)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Ask the parties of this round, for `start` alone.

        Flower's wrappers call this from a `start` of their own. They clip and blur arrays as
        if they were updates of weights: around a strategy whose messages are votes, scores or
        whole models they would run and protect nothing.
        """
        if not self._is_started:
            owner = type(self).__name__
            raise InvalidParameter(
                f"{owner}: it must be run by its own start, got run by something else. "
                f"Around {owner} a wrapper protects nothing: use the strategy's own privacy "
                f"options, or wrap Flower's own class and give that to FlowerStrategy."
            )
        return self.ask_parties(server_round, arrays, config, grid)

    def ask_parties(
        self,
        server_round: int,
        arrays: ArrayRecord,  # noqa: ARG002 - Flower's signature
        config: ConfigRecord,
        grid: Grid,
    ) -> list[Message]:
        """Ask the parties of this round, once the expected ones are there."""
        self.check_precision()
        self._callbacks.begin(self.round_)
        self._sent = []
        if self.last_round is not None and server_round > self.last_round:
            logger.info("%s has ended; nothing is sent.", self.name)
            return []
        self.run.begin_round(self)
        self._kept = []
        if not self.begin_round():
            return []
        try:
            present = self._wait_for_parties(grid)
        except NotEnoughParties as error:
            if not self.ends_early or self.run.is_kept:
                raise
            logger.warning("%s ended after round %s: %s", self.name, self.round_, error)
            return []
        asked = sample(present, self._federation, self.seed, self.round_ + 1)
        nodes = self.nodes_for_round(asked)
        if not nodes:
            self.failure_ = "nobody was asked"
            logger.info("%s has nobody to ask; nothing is sent.", self.name)
            return []
        self.rejected_, self.undelivered_ = {}, {}
        self.state.round += 1
        content = {node: self.knowledge_for(node) for node in nodes}
        self._sent = self._messages(MessageType.TRAIN, content, config)
        return self._sent

    def aggregate_train(
        self,
        server_round: int,  # noqa: ARG002 - Flower's signature
        replies: Iterable[Message],
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Combine the valid replies; with too few of them, report nothing and say why."""
        accepted = self._collect(replies, self.reply_kind, self.check, self.add)
        if not self._sent:
            return None, None
        needed = min(self.num_replies_needed(), len(self._sent))
        if len(accepted) < needed:
            self.fail(
                f"{len(accepted)} of {len(self._sent)} parties sent a valid reply and "
                f"{needed} are needed ({self._first_rejection()})"
            )
            if self._refused < len(self._sent):  # otherwise nothing can have left a party
                self.record_releases()
            self._sent = []  # there is nothing new to deliver
            self._stop_to_resume()
            return None, None
        arrays, metrics = self.finish()
        self._kept = []
        totals = aggregate_metrics([reply.metrics for reply in accepted])
        totals |= {
            keys.NUM_PARTIES: len(accepted),
            keys.NUM_REJECTED: len(self.rejected_),
            **metrics,
        }
        self.state.history["train"][self.round_] = totals
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
        totals = self._evaluated(replies)
        if not self._judged_later:
            self._end_round()
        return None if totals is None else MetricRecord({**totals})

    def _evaluated(
        self, replies: Iterable[Message]
    ) -> Mapping[str, float | list[float]] | None:
        sent = {message.metadata.dst_node_id for message in self._sent}
        accepted = self._collect(replies, EVALUATION, lambda _: None, lambda _: None)
        self._sent = []
        self.confirm_delivery(accepted)
        self._note_undelivered(sent - {reply.node_id for reply in accepted})
        if not sent:
            return None
        totals: dict[str, float | list[float]] = {
            **aggregate_metrics([reply.metrics for reply in accepted]),
            keys.NUM_UNDELIVERED: len(self.undelivered_),
        }
        if not self.central:
            totals |= figures_by_party(accepted)
        totals = without_unknown(totals)
        if not totals.get(keys.NUM_EXAMPLES):
            logger.info(
                "No party tells how good the model is: one without held-out rows (x_test) "
                "cannot, and one with a journal, a policy or a promise of privacy does not."
            )
        self.state.history["evaluate"][self.round_] = totals
        return totals

    def _note_undelivered(self, nodes: Iterable[int]) -> None:
        """Name the nodes that have answered, and paid, for a model that they do not have."""
        unknown = "it did not confirm it"
        self.undelivered_ = {node: self.rejected_.get(node, unknown) for node in sorted(nodes)}
        if self.undelivered_:
            named = "; ".join(f"node {node}: {why}" for node, why in self.undelivered_.items())
            logger.warning("%s: not everybody has the model. %s", self.name, named)

    def _end_round(self, judged: Mapping[str, Any] | None = None) -> None:
        """Tell the user's functions what this round came to."""
        history = {phase: of.get(self.round_) for phase, of in self.state.history.items()}
        self._callbacks.end(self.round_, len(self.rejected_), **history, server=judged)

    # Messages.

    def _messages(
        self,
        kind: str,
        content: Mapping[int, Knowledge | None],
        config: Mapping[str, object],
    ) -> list[Message]:
        """Return a message a node, with the settings of this round."""
        named = {keys.RUN_NAME: self.run.name} if self.run.name else {}
        offered = self.offered() if kind == MessageType.TRAIN else {}
        if kind == MessageType.TRAIN and self.evaluate and self.delivered_learner:
            offered[keys.FINAL_LEARNER] = self.delivered_learner
        own = {keys.STRATEGY: self.name, keys.SERVER_ROUND: self.round_, keys.SEED: self.seed}
        settings = {**config, **self.party_config(), **own, **named, **offered}
        return write_messages(kind, content, settings)

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
    def num_asked(self) -> int:
        """How many parties are asked in this round."""
        return len(self._sent)

    # Replies.

    def _collect(
        self,
        replies: Iterable[Message],
        kind: str,
        check: Callable[[Knowledge], S],
        add: Callable[[PartyReply[S]], None],
    ) -> list[PartyReply[None]]:
        """Take all replies in; return who answered, sorted by party."""
        collector = Collector(
            owner=self.name,
            sent=self._sent,
            members=self.members,
            run=self.run,
            kind=kind,
            max_bytes=self.max_reply_bytes,
            check=check,
            restore=self.restored,
            reject=self._reject,
        )
        accepted = []
        for reply in collector.collect(replies):
            add(reply)
            accepted.append(reply.without_knowledge())
        self._refused = len(collector.refused)
        unfit = self.exclude(self._kept) if kind != EVALUATION else {}
        for node, reason in unfit.items():
            self._reject(node, reason)
        self._kept = [reply for reply in self._kept if reply.node_id not in unfit]
        fit = [reply for reply in accepted if reply.node_id not in unfit]
        settled = settle(self.members, fit)
        self.state.note(settled, evaluated=kind == EVALUATION)
        return settled

    def _reject(self, node_id: int, reason: str) -> None:
        reason = cut_short(reason)
        self.rejected_.setdefault(node_id, reason)
        logger.warning("%s excludes node %s: %s", self.name, node_id, reason)

    def _stop_to_resume(self) -> None:
        """End a run that is kept where it failed: later rounds would bury this one."""
        if self.run.is_kept:
            self.run.reopen(self.rejected_)
            raise NotEnoughParties(
                f"{type(self).__name__}: round {self.round_} must have enough replies, got too "
                f"few: {self.failure_}. Give resume to ask these parties again."
            )

    def _first_rejection(self) -> str:
        reasons = [f"node {node}: {reason}" for node, reason in self.rejected_.items()]
        return f"for example {reasons[0].rstrip('.')}" if reasons else "no reply was bad"
