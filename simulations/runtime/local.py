"""Federations in one process, without Ray: from a strategy, or from settings to a report.

`InMemoryGrid` hands each message, encoded as for the wire, to the `ClientApp`, keeps
every node's state between messages and answers a failing client with an error reply, as
Flower's own transport does. Strategies run on it unchanged, in about a millisecond per
message, for tests, notebooks and experiments.
"""

import logging
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, Context, Error, Message, RecordDict, UserConfig
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from clients.app import CLIENT_APP_RAISED_EXCEPTION
from fl_strategies import KnowledgeStrategy, _compat
from fl_strategies.errors import require
from fl_strategies.wire import keys
from simulations.config import Settings
from simulations.federation import Federation, load_federation
from simulations.results.report import Report, make_report
from simulations.results.run_folder import require_folder
from simulations.runtime.client_app import app
from simulations.runtime.processes import all_workers_needed, become_worker
from simulations.runtime.progress import SECONDS_BETWEEN_RELAYS, Relay, Watch, no_louder_than

logger = logging.getLogger("flwr.fl_strategies")

_FIRST_NODE_ID = 1000
_PROGRESS_STEPS = 10


@dataclass(frozen=True)
class _Node:
    """State of a node between messages; plain bytes, so it can visit other processes."""

    run_id: int
    node_id: int
    node_config: UserConfig
    run_config: UserConfig
    state: bytes

    def answer(self, client_app: ClientApp, request: bytes) -> "tuple[_Node, bytes]":
        """Run the client on one message; a failure leaves the state as it was."""
        message = _compat.message_from_bytes(request)
        context = Context(
            run_id=self.run_id,
            node_id=self.node_id,
            node_config=dict(self.node_config),
            state=_compat.records_from_bytes(self.state),
            run_config=dict(self.run_config),
        )
        try:
            reply = client_app(message, context)
        except Exception as error:
            logger.exception("The client of node %s failed.", self.node_id)
            reason = f"{type(error)}:<'{error}'>"
            failure = Message(Error(CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
            return self, _compat.message_to_bytes(failure)
        kept = replace(self, state=_compat.records_to_bytes(context.state))
        return kept, _compat.message_to_bytes(reply)


class InMemoryGrid(Grid):
    """Flower's `Grid` for nodes that live in this process or in forked workers.

    Parameters
    ----------
    client_app : ClientApp
    num_nodes : int
        Node i gets the node config ``partition-id = i, num-partitions = num_nodes``.
    run_config : mapping, optional
        What clients find in ``context.run_config``.
    num_workers : int (default: 1)
        Processes that serve nodes, until `close` ends them. Results do not depend on it.
    watch : Watch, optional
        Follows every answer, and measures how long the parties take.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        *,
        run_config: Mapping[str, str | int | float | bool] | None = None,
        num_workers: int = 1,
        watch: Watch | None = None,
    ) -> None:
        require(num_nodes >= 1, "InMemoryGrid", "num_nodes", "at least 1", num_nodes)
        require(num_workers >= 1, "InMemoryGrid", "num_workers", "at least 1", num_workers)
        self.client_app = client_app
        self.num_workers = min(num_workers, num_nodes)
        self._run = _compat.empty_run(_compat.claim_task_identity())
        self._nodes = {
            _FIRST_NODE_ID + i: _Node(
                run_id=self._run.run_id,
                node_id=_FIRST_NODE_ID + i,
                node_config={keys.PARTITION_ID: i, keys.NUM_PARTITIONS: num_nodes},
                run_config=dict(run_config or {}),
                state=_compat.records_to_bytes(RecordDict()),
            )
            for i in range(num_nodes)
        }
        self._replies: dict[str, Message] = {}
        self._pool: tuple[ProcessPoolExecutor, SimpleQueue[str]] | None = None
        self._watch = watch or Watch()

    @property
    def run(self) -> "_compat.Run":
        """The run this grid serves."""
        return self._run

    def set_run(self, run: "_compat.Run") -> None:
        """Take the description of another run."""
        self._run = run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message; strategies create theirs directly."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> list[int]:
        """Return the ids of all nodes."""
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Run the clients; replies wait until they are pulled."""
        sent = list(messages)
        ids = [_compat.assign_message_id(message) for message in sent]
        with self._watch.phase(sent[0].metadata.message_type if sent else "train"):
            for reply in self._deliver(sent):
                self._replies[reply.metadata.reply_to_message_id] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that are there."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,  # noqa: ARG002 - clients run to their end
    ) -> list[Message]:
        """Run the clients and return their replies."""
        return self.pull_messages(self.push_messages(messages))

    def _deliver(self, messages: list[Message]) -> Iterator[Message]:
        nodes = [self._nodes[message.metadata.dst_node_id] for message in messages]
        requests = [_compat.message_to_bytes(message) for message in messages]
        kind, number = _work_of(messages[0]) if messages else ("", 0)
        step = max(1, len(messages) // _PROGRESS_STEPS)
        answers = self._answers if self.num_workers == 1 else self._answers_of_workers
        for count, (node, reply) in enumerate(answers(nodes, requests, number), start=1):
            self._nodes[node.node_id] = node
            self._watch.answered(kind, count, len(messages), number)
            if count % step == 0 or count == len(messages):
                logger.info("%s of %s parties have answered.", count, len(messages))
            yield _compat.message_from_bytes(reply)

    def _answers(
        self, nodes: list[_Node], requests: list[bytes], number: int
    ) -> Iterator[tuple[_Node, bytes]]:
        """Yield what each node answers, while the watch follows the work inside it."""
        for place, (node, request) in enumerate(zip(nodes, requests, strict=True), start=1):
            with self._watch.party(place, len(nodes), number):
                answer = node.answer(self.client_app, request)
            yield answer

    def _answers_of_workers(
        self, nodes: list[_Node], requests: list[bytes], number: int
    ) -> Iterator[tuple[_Node, bytes]]:
        """Yield the same from other processes, in the same order."""
        workers, relayed = self._workers()
        asked = enumerate(zip(nodes, requests, strict=True), start=1)
        futures: list[Future[tuple[_Node, bytes]]] = []
        try:
            with all_workers_needed("InMemoryGrid"):
                for place, (node, request) in asked:
                    where = place, len(nodes), number
                    futures.append(workers.submit(_answer, node, request, where))
                for future in futures:
                    while not wait([future], timeout=SECONDS_BETWEEN_RELAYS).done:
                        while not relayed.empty():
                            self._watch.stepped(relayed.get())
                    yield future.result()
        finally:
            for future in futures:
                future.cancel()

    def _workers(self) -> "tuple[ProcessPoolExecutor, SimpleQueue[str]]":
        """Return the worker processes, which live as long as the grid, and what they relay.

        What a worker has once imported or loaded serves all rounds. Forked workers inherit
        the client app, which need not be importable or picklable.
        """
        if self._pool is None:
            fork = multiprocessing.get_context("fork")
            relayed: SimpleQueue[str] = fork.SimpleQueue()
            workers = ProcessPoolExecutor(
                self.num_workers,
                mp_context=fork,
                initializer=_adopt,
                initargs=(self.client_app, Relay(self._watch.num_rounds, relayed.put)),
            )
            self._pool = workers, relayed
        return self._pool

    def close(self) -> None:
        """End the worker processes; a later message starts new ones."""
        if self._pool is not None:
            workers, relayed = self._pool
            workers.shutdown()
            relayed.close()
            self._pool = None


_adopted: list[tuple[ClientApp, Watch]] = []


def _adopt(client_app: ClientApp, watch: Watch) -> None:
    become_worker()
    _adopted[:] = [(client_app, watch)]


def _answer(node: _Node, request: bytes, place: tuple[int, int, int]) -> tuple[_Node, bytes]:
    client_app, watch = _adopted[0]
    with watch.party(*place):
        return node.answer(client_app, request)


def _work_of(message: Message) -> tuple[str, int]:
    """Return what a message asks for, and the round if it says so."""
    config = message.content.config_records.get(keys.CONFIG)
    number = config.get(keys.SERVER_ROUND, 0) if config else 0
    return message.metadata.message_type, number if isinstance(number, int) else 0


def run_local(
    strategy: Strategy,
    client_app: ClientApp,
    num_nodes: int,
    *,
    num_rounds: int = 1,
    run_config: Mapping[str, str | int | float | bool] | None = None,
    num_workers: int = 1,
    watch: Watch | None = None,
    verbose: bool = False,
) -> Result:
    """Run a strategy against a client app without Ray and return Flower's result.

    Parameters are those of `InMemoryGrid`; `num_rounds` goes to the strategy. Without
    `verbose` the log has warnings only.
    """
    grid = InMemoryGrid(
        client_app, num_nodes, run_config=run_config, num_workers=num_workers, watch=watch
    )
    with ExitStack() as stack:
        if not verbose:
            stack.enter_context(no_louder_than(logging.WARNING))
        stack.enter_context(closing(grid))
        return strategy.start(grid, ArrayRecord(), num_rounds=num_rounds)


def cpu_seconds() -> float:
    """Return the processor time of this process and of its finished workers.

    On Windows, which has no `resource`, that of this process alone.
    """
    try:
        import resource
    except ImportError:
        return time.process_time()
    usages = [
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@dataclass(frozen=True)
class Finished:
    """A run whose model is ready and which is not yet compared with anything."""

    federation: Federation
    strategy: KnowledgeStrategy[Any]
    result: Result
    watch: Watch
    cpu_seconds: float

    def report(self, model: Report | None = None) -> Report:
        """Compare the result as the settings say, and describe all of it."""
        return make_report(
            self.federation,
            self.strategy,
            self.result,
            seconds=self.watch.seconds["federation"],
            cpu_seconds=self.cpu_seconds,
            num_workers=self.federation.settings.workers,
            watch=self.watch,
            model=model,
        )

    def alone(self) -> "Finished":
        """Return the same without comparisons, for when they take too long."""
        settings = self.federation.settings.but(
            solo=False, pooled=False, pate=False, public_only=False
        )
        return replace(self, federation=replace(self.federation, settings=settings))


def run_once(settings: Settings) -> Report:
    """Run a federation in this process, silently, and return its report."""
    return run_federation(settings, Watch(settings.num_rounds)).report()


def run_federation(
    settings: Settings, watch: Watch, *, verbose: bool = False, output: bool = False
) -> Finished:
    """Run a federation in this process; with `output`, if its result can be written."""
    if output:
        require_folder("run", "output-dir", Path(settings.output_dir))
    with watch.loading():
        federation = load_federation(settings)
        strategy = federation.strategy()
    watch.say(_opening(federation))
    if settings.num_parties == 1:
        watch.say("warning: one party has nobody to learn from; num-parties is 1")
    cpu_start = cpu_seconds()
    with watch.phase("federation"):
        result = run_local(
            strategy,
            app,
            settings.num_parties,
            num_rounds=settings.num_rounds,
            run_config=settings.to_run_config(),
            num_workers=settings.workers,
            watch=watch,
            verbose=verbose,
        )
    return Finished(federation, strategy, result, watch, cpu_seconds() - cpu_start)


def _opening(federation: Federation) -> str:
    settings, data = federation.settings, federation.dataset
    rounds = f"{settings.num_rounds} rounds" if settings.num_rounds > 1 else "one round"
    parties = "one party" if settings.num_parties == 1 else f"{settings.num_parties} parties"
    return (
        f"{settings.strategy} on {settings.data}: {parties} with "
        f"{sum(map(len, federation.rows))} records, {len(data.x_public)} public rows, {rounds}"
    )
