"""Runs kept in a folder on a server that can be killed, and other helpers of many tests."""

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Result

from clients import client_app
from fl_strategies import REGISTRY, KnowledgeStrategy, Party
from fl_strategies._compat import assign_message_id, records_to_bytes
from fl_strategies.privacy.journal import PartyJournal, data_fingerprint
from fl_strategies.wire import keys
from simulations.runtime.local import InMemoryGrid
from tests.toys import SHORT, TEST, common_options, load_toy_party

NUM_PARTIES = 3
NUM_ROUNDS = 3


class Killed(BaseException):
    """The server process ends here and now."""


class MortalGrid(InMemoryGrid):
    """Runs one client a time and dies after some replies; counts who was asked what."""

    def __init__(self, app: ClientApp, dies_after: int = 10**9) -> None:
        super().__init__(app, NUM_PARTIES)
        self.left = dies_after
        self.asked: Counter[tuple[str, int, int]] = Counter()
        self._queue: dict[str, Message] = {}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        sent = {assign_message_id(message): message for message in messages}
        self._queue |= sent
        return list(sent)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        if self.left == 0:
            raise Killed
        self.left -= 1
        number = next(i for i in self._queue if i in set(message_ids))
        message = self._queue.pop(number)
        config = message.content.config_records[keys.CONFIG]
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        self.asked[kind, int(str(config[keys.SERVER_ROUND])), node] += 1
        return list(self._deliver([message]))

    def send_and_receive(self, messages: Any, **_: Any) -> list[Message]:
        ids = self.push_messages(messages)
        return [reply for number in ids for reply in self.pull_messages([number])]


@contextmanager
def benchmark(name: str) -> Iterator[ModuleType]:
    """Import a benchmark of this checkout: other packages of that name may be installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1]))
        for known in [
            known for known in sys.modules if known.partition(".")[0] == "benchmarks"
        ]:
            patch.delitem(sys.modules, known)
        yield importlib.import_module(f"benchmarks.{name}")


def benchmark_file(name: str) -> ModuleType:
    """Return a benchmark that is no module of a package."""
    path = Path(__file__).parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def forget(grid: InMemoryGrid, *nodes: int) -> None:
    """Let these nodes, or all, start again without their state."""
    for node in nodes or [*grid._nodes]:
        grid._nodes[node] = replace(grid._nodes[node], state=records_to_bytes(RecordDict()))


def question(config: Mapping[str, Any], kind: str = "train") -> Message:
    """Return a server's message with this configuration, as a party gets it."""
    record = RecordDict({keys.CONFIG: ConfigRecord(dict(config))})
    message = Message(record, dst_node_id=1, message_type=kind)
    assign_message_id(message)
    return message


def journal_of(party: Party, folder: Path, **limits: Any) -> PartyJournal:
    """Return a party's journal in a folder."""
    own = data_fingerprint(party.x, party.y)
    return PartyJournal(folder, fingerprint=own, **limits)


def with_journal(party: Party, folder: Path, **limits: Any) -> Party:
    return replace(party, journal=journal_of(party, folder, **limits))


def journal_app(folder: Path, **limits: Any) -> ClientApp:
    """Return the app of toy parties that keep their state in a folder each."""

    def load(context: Context) -> Party:
        party = load_toy_party(context)
        kept = with_journal(party, folder / str(party.partition_id), **limits)
        return replace(kept, run=str(context.run_id))

    return client_app(load)


def build(name: str, folder: Path | None = None, **changes: Any) -> KnowledgeStrategy[Any]:
    options = {
        **common_options(NUM_PARTIES),
        **SHORT.get(name, {}),
        "checkpoint_dir": folder,
        **changes,
    }
    return REGISTRY[name].strategy.from_settings(**options)


def start(
    strategy: KnowledgeStrategy[Any], grid: InMemoryGrid, num_rounds: int = NUM_ROUNDS
) -> Result:
    return strategy.start(grid, ArrayRecord(), num_rounds=num_rounds)


def figures(result: Result) -> list[dict[int, dict[str, Any]]]:
    """Return all metrics of a result."""
    records = (result.train_metrics_clientapp, result.evaluate_metrics_clientapp)
    return [
        {
            number: {name: repr(value) for name, value in r.items()}
            for number, r in phase.items()
        }
        for phase in records
    ]


def bits(strategy: KnowledgeStrategy[Any]) -> bytes:
    return strategy.model_.logits(TEST[0]).tobytes()
