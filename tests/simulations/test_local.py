import io
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fl_strategies._util import counted
from fl_strategies.errors import InvalidParameter, RunFailed
from simulations.runtime import local, progress
from simulations.runtime.local import InMemoryGrid, run_local
from simulations.runtime.progress import Watch


def counting_app(fail_on: int | None = None) -> ClientApp:
    """Return a client that counts its messages in its state, and may fail."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        state = context.state.setdefault("count", MetricRecord({"messages": 0}))
        state["messages"] += 1
        if state["messages"] == fail_on:
            raise RuntimeError("out of coffee")
        metrics = MetricRecord({"num-examples": 1, "messages": state["messages"]})
        content = RecordDict({"arrays": message.content["arrays"], "metrics": metrics})
        return Message(content, reply_to=message)

    return app


def messages(grid: InMemoryGrid) -> list[Message]:
    content = RecordDict({"arrays": ArrayRecord([np.zeros(2)])})
    return [Message(content, node, "train") for node in grid.get_node_ids()]


def counts(replies: list[Message]) -> list[object]:
    return [reply.content["metrics"]["messages"] for reply in replies]  # type: ignore[index]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_state_lives_as_long_as_the_grid(num_workers: int) -> None:
    """Each node finds what it kept, in one process or in several."""
    grid = InMemoryGrid(counting_app(), 3, num_workers=num_workers)

    first, second = (counts(grid.send_and_receive(messages(grid))) for _ in range(2))

    assert (first, second) == ([1, 1, 1], [2, 2, 2])


def test_a_failing_client_answers_with_an_error_and_keeps_its_old_state() -> None:
    """As in Flower: code 2, and the state of the failed call is lost."""
    grid = InMemoryGrid(counting_app(fail_on=2), 1)
    grid.send_and_receive(messages(grid))

    (failed,) = grid.send_and_receive(messages(grid))
    (again,) = grid.send_and_receive(messages(grid))

    assert failed.error.code == 2
    assert "out of coffee" in str(failed.error.reason)
    assert again.has_error(), "the count is still 1, so the next call is the second again"


def test_replies_answer_their_messages() -> None:
    """Replies carry the ids that Flower's transport would give."""
    grid = InMemoryGrid(counting_app(), 2)
    sent = messages(grid)

    ids = grid.push_messages(sent)
    replies = grid.pull_messages(ids)

    assert [reply.metadata.reply_to_message_id for reply in replies] == ids
    assert [message.metadata.message_id for message in sent] == ids
    assert grid.pull_messages(ids) == []


def test_what_cannot_travel_fails_here_too() -> None:
    """Messages pass through Flower's encoding, so unserialisable content shows up early."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:  # noqa: ARG001
        content = RecordDict({"metrics": MetricRecord({"large": 1})})
        content["metrics"].data["large"] = object()  # type: ignore[attr-defined, union-attr]
        return Message(content, reply_to=message)

    grid = InMemoryGrid(app, 1)

    (reply,) = grid.send_and_receive(messages(grid))

    assert reply.has_error()


def test_flowers_own_strategies_run_on_it() -> None:
    """FedAvg, written for Flower's engine, needs no change."""
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=3)
    grid = InMemoryGrid(counting_app(), 3)

    result = strategy.start(grid, ArrayRecord([np.ones(2)]), num_rounds=2)

    np.testing.assert_array_equal(result.arrays.to_numpy_ndarrays()[0], [1.0, 1.0])
    assert result.train_metrics_clientapp[2]["messages"] == 2


def test_clients_see_their_configuration() -> None:
    """Node config and run config are what Flower's engine would give."""
    seen: list[tuple[object, object]] = []
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        seen.append((context.node_config, context.run_config))
        return Message(message.content, reply_to=message)

    grid = InMemoryGrid(app, 2, run_config={"beta": 0.5})
    grid.send_and_receive(messages(grid))

    assert seen == [({"partition-id": i, "num-partitions": 2}, {"beta": 0.5}) for i in range(2)]
    assert grid.run.run_id != 0


@contextmanager
def ctrl_c_as(handler: Any) -> Iterator[None]:
    """Handle Ctrl-C so for a while, however these tests were started."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_a_worker_whatever_it_is_doing() -> None:
    """Even code that would catch every exception; such a worker would outlive its run."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:  # noqa: ARG001
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        return Message(message.content, reply_to=message)

    lost = pytest.raises(RunFailed, match="InMemoryGrid: a worker process must live until")
    workers = InMemoryGrid(app, 2, num_workers=2)
    with ctrl_c_as(signal.default_int_handler), closing(workers) as grid, lost:
        grid.send_and_receive(messages(grid))


def test_a_worker_ignores_ctrl_c_where_its_run_does() -> None:
    """A run in the background of a shell goes on; the keys were meant for another."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:  # noqa: ARG001
        os.kill(os.getpid(), signal.SIGINT)
        return Message(message.content, reply_to=message)

    workers = InMemoryGrid(app, 2, num_workers=2)
    with ctrl_c_as(signal.SIG_IGN), closing(workers) as grid:
        replies = grid.send_and_receive(messages(grid))

    assert [reply.has_error() for reply in replies] == [False, False]


def test_a_worker_keeps_to_one_thread() -> None:
    """It would wait for ever for threads that a library, such as XGBoost, had in its parent."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:  # noqa: ARG001
        most = max(library["num_threads"] for library in threadpoolctl.threadpool_info())
        content = RecordDict({"metrics": MetricRecord({"messages": most})})
        return Message(content, reply_to=message)

    with threadpoolctl.threadpool_limits(limits=2):
        alone = InMemoryGrid(app, 2)
        here = counts(alone.send_and_receive(messages(alone)))
        with closing(InMemoryGrid(app, 2, num_workers=2)) as grid:
            assert counts(grid.send_and_receive(messages(grid))) == [1, 1]
    assert here == [2, 2]


@pytest.mark.parametrize("options", [{"num_nodes": 0}, {"num_nodes": 2, "num_workers": 0}])
def test_bad_numbers_are_named(options: dict[str, int]) -> None:
    """At least one node and one worker."""
    with pytest.raises(InvalidParameter, match="must be at least 1, got 0"):
        InMemoryGrid(counting_app(), **options)  # type: ignore[arg-type]


def test_run_local_passes_rounds_on() -> None:
    """`num_rounds` reaches the strategy."""
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=2)

    result = run_local(strategy, counting_app(), 2, num_rounds=3)

    metrics = result.train_metrics_clientapp.values()
    assert [record["messages"] for record in metrics] == [1, 2, 3]


def slow_app() -> ClientApp:
    """Return a client with two teachers of two epochs, each of which takes a while."""
    app = ClientApp()

    @app.train()
    def train(message: Message, _: Context) -> Message:
        for _teacher in counted(range(2), "teachers"):
            for _epoch in counted(range(2), "epochs"):
                time.sleep(0.02)
        return Message(message.content, reply_to=message)

    return app


class Heard(Watch):
    """Keeps what it is told of the work inside parties."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def stepped(self, words: str) -> None:
        self.words.append(words)


def test_teachers_and_epochs_of_a_party_are_heard_of() -> None:
    """What is inside of something else stands behind it, and is gone when it is done."""
    watch = Heard()
    grid = InMemoryGrid(slow_app(), 2, watch=watch)
    grid.send_and_receive(messages(grid)[:1])

    assert watch.words == [
        "party 1 of 1: 0 of 2 teachers",
        "party 1 of 1: 0 of 2 teachers, 0 of 2 epochs",
        "party 1 of 1: 0 of 2 teachers, 1 of 2 epochs",
        "party 1 of 1: 0 of 2 teachers",
        "party 1 of 1: 1 of 2 teachers",
        "party 1 of 1: 1 of 2 teachers, 0 of 2 epochs",
        "party 1 of 1: 1 of 2 teachers, 1 of 2 epochs",
        "party 1 of 1: 1 of 2 teachers",
    ]


def test_other_processes_are_heard_of_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what each of them hands on."""
    for module in (local, progress):
        monkeypatch.setattr(module, "SECONDS_BETWEEN_RELAYS", 0.001)
    watch = Heard()
    with closing(InMemoryGrid(slow_app(), 2, num_workers=2, watch=watch)) as grid:
        replies = grid.send_and_receive(messages(grid))

    assert len(replies) == 2
    parties = {words.partition(":")[0] for words in watch.words}
    assert parties == {"party 1 of 2", "party 2 of 2"}


def test_a_long_training_is_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many epochs there are meanwhile."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    watch = progress.Lines(stream=stream)
    with watch.party(3, 20):
        for _ in counted(range(100), "epochs"):
            now[0] += 0.3

    assert stream.getvalue().splitlines() == [
        "party 3 of 20: 34 of 100 epochs",
        "party 3 of 20: 68 of 100 epochs",
    ]


def test_nothing_is_told_unless_somebody_listens(capfd: pytest.CaptureFixture[str]) -> None:
    """Learners in other programs count in silence, also after a watch has ended."""
    watch = Heard()
    with watch.party(1, 1):
        pass
    assert list(counted(range(3), "epochs")) == [0, 1, 2]

    assert watch.words == []
    assert capfd.readouterr() == ("", "")
