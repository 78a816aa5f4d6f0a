"""Scaling of the server's time and memory, from 1,000 to 10,000 parties.

Run: ``python benchmarks/load.py [--checkpoint] [strategy ...]``. Eight parties that hold the
digits of scikit-learn answer a strategy for real. Each simulated party then says what one of
two of them says, row by row, in an encoding of its own on disk; models are sent as they are.
The replies of a size are replayed as Flower messages, one after the other, through a whole
round of `start`, training and evaluation, in a process of their own, so that only what the
strategy keeps adds up. Nothing here measures the network or Flower's SuperLink.

Time must be linear: seconds a party are the same for both sizes. Memory must be flat: bytes
that each further party adds to the peak of the process, of which some hundreds stay
whatever happens, for the party's question, its name and its metrics. Strategies that
exchange models keep those of a round, so they are measured with fewer parties.

With ``--checkpoint`` every reply is written to a folder before it is used, and read from
there; the disk makes this slow, so there are fewer parties as well.
"""

import argparse
import json
import logging
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from clients.app import client_app
from fl_strategies import KnowledgeStrategy, _compat
from fl_strategies._util import Array, derive_rng
from fl_strategies.strategies.fedmd.samples import NUM_RECORDS
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import decode_array, encode_arrays, pack_labels, unpack_labels
from simulations.config import Settings, Value
from simulations.federation import Federation, load_federation
from simulations.runtime.local import InMemoryGrid

SIZES = (1_000, 10_000)
SIZES_OF_CHECKPOINTS = (500, 5_000)
SIZES_OF_MODELS = (200, 2_000)
NUM_TEMPLATES = 8
WARM_UP = 20
_LENGTH = struct.Struct("<I")

STRATEGIES: Mapping[str, Mapping[str, Value]] = {
    "fedkt": {"strategy": "fedkt"},
    "fedkt-trimmed": {"strategy": "fedkt", "trim-fraction": 0.2},
    "fedmd-mean": {"strategy": "fedmd", "payload": "softmax", "consensus": "mean"},
    "fedmd-median": {"strategy": "fedmd", "payload": "softmax", "consensus": "median"},
    "fedmd-nfdp": {"strategy": "fedmd", "release": "nfdp", "num-samples": 50},
    "fedkd": {"strategy": "fedkd"},
    "fedkd-sums": {"strategy": "fedkd", "exclude-outliers": False},
    "fedavg": {"strategy": "fedavg", "learner": "mlp", "final-learner": "mlp"},
    "avgkd": {"strategy": "avgkd"},
}
EXCHANGE_MODELS = ("fedavg", "avgkd")
SAME: Mapping[str, Value] = {
    "learner": "ridge",
    "final-learner": "ridge",
    "partition": "iid",
    "num-parties": NUM_TEMPLATES,
    "max-wait": 1.0,
}


SAME_REPLIES: Mapping[str, str] = {"fedkt-trimmed": "fedkt", "fedmd-median": "fedmd-mean"}
"""Strategies whose parties cannot tell them from another one."""


@cache
def federation_of(name: str) -> Federation:
    return load_federation(Settings.from_run_config({**SAME, **STRATEGIES[name]}))


def strategy_of(
    name: str, num_parties: int, folder: Path | None = None
) -> KnowledgeStrategy[Any]:
    federation = federation_of(name)
    kept = replace(federation.settings, checkpoint_dir=str(folder or ""))
    strategy = replace(federation, settings=kept).strategy()
    strategy.num_parties = num_parties
    return strategy


def sizes_of(name: str, *, checkpoint: bool) -> tuple[int, int]:
    if name in EXCHANGE_MODELS:
        return SIZES_OF_MODELS
    return SIZES_OF_CHECKPOINTS if checkpoint else SIZES


# Replies, written once.


class ListeningGrid(InMemoryGrid):
    """A grid that keeps what parties answer, by the kind of the question."""

    def __init__(self, app: ClientApp, num_nodes: int) -> None:
        super().__init__(app, num_nodes)
        self.heard: dict[str, list[RecordDict]] = {}

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies that are there."""
        replies = super().pull_messages(message_ids)
        for reply in replies:
            self.heard.setdefault(reply.metadata.message_type, []).append(reply.content)
        return replies


def real_replies(name: str) -> Mapping[str, Sequence[RecordDict]]:
    """Let the parties of a small federation answer the strategy's questions of a round."""
    federation = federation_of(name)
    app = client_app(lambda context: federation.party(int(context.node_config["partition-id"])))
    grid = ListeningGrid(app, NUM_TEMPLATES)
    strategy_of(name, NUM_TEMPLATES).start(grid, ArrayRecord(), num_rounds=1)
    return grid.heard


def mixture(name: str, array: str, pair: Sequence[Array], rng: np.random.Generator) -> Array:
    """Return for each public row what one of two parties says."""
    federation = federation_of(name)
    num_rows, num_classes = len(federation.dataset.x_public), federation.dataset.num_classes
    first = rng.random(num_rows) < 0.5
    if array == "votes":
        shape = federation.settings.chosen()["num-splits"], num_rows
        labels = [unpack_labels(packed, shape, num_classes) for packed in pair]
        return pack_labels(np.where(first, *labels), num_classes)
    if name not in EXCHANGE_MODELS and len(pair[0]) == num_rows:
        return np.where(first[:, None], *pair)
    return pair[0]  # class counts, models


def simulated_reply(name: str, templates: Sequence[RecordDict], number: int) -> bytes:
    rng = derive_rng(0, "load", number)
    pair = [templates[i] for i in rng.choice(len(templates), size=2, replace=False)]
    records = [record.array_records[keys.ARRAYS] for record in pair]
    arrays = {
        array: mixture(name, array, [decode_array(array, r[array]) for r in records], rng)
        for array in records[0]
    }
    content = RecordDict({**pair[0], keys.ARRAYS: encode_arrays(arrays)})
    meta = {**pair[0].config_records[keys.META], keys.PARTITION_ID: number}
    if NUM_RECORDS in meta:  # parties differ in size
        meta[NUM_RECORDS] = int(str(meta[NUM_RECORDS])) + number
    content[keys.META] = ConfigRecord(meta)
    return _compat.records_to_bytes(content)


def write_replies(name: str, path: Path, count: int) -> None:
    for phase, templates in real_replies(name).items():
        with phase_of(path, phase).open("wb") as file:
            for number in range(count):
                encoded = simulated_reply(name, templates, number)
                file.write(_LENGTH.pack(len(encoded)) + encoded)


def phase_of(path: Path, phase: str) -> Path:
    return path.with_suffix(f".{phase}")


# Replies, read one by one.


class ReplayingGrid(InMemoryGrid):
    """A grid whose nodes have answered already: replies come from disk when asked for."""

    def __init__(self, path: Path, num_nodes: int) -> None:
        super().__init__(ClientApp(), 1)
        self.path, self.num_nodes = path, num_nodes
        self.asked: dict[str, float] = {}
        self._sent: dict[str, Message] = {}
        self._contents: Iterator[RecordDict] = iter(())

    def get_node_ids(self) -> list[int]:
        """Return the ids of all nodes."""
        return list(range(1, self.num_nodes + 1))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Take the questions of a phase, in the order of the nodes."""
        self._sent = {_compat.assign_message_id(message): message for message in messages}
        phase = next(iter(self._sent.values())).metadata.message_type
        self.asked[phase] = resident()
        self._contents = self.contents(phase)
        return list(self._sent)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the reply to each question, which is gone before the next is read."""
        sent = [self._sent.pop(number) for number in message_ids]
        return [Message(next(self._contents), reply_to=question) for question in sent]

    def send_and_receive(  # type: ignore[override]
        self,
        messages: Iterable[Message],
        *,
        timeout: float | None = None,  # noqa: ARG002 - all have answered
    ) -> Iterator[Message]:
        """Take the questions now, and give the reply to each when it is read."""
        numbers = self.push_messages(messages)
        return (reply for number in numbers for reply in self.pull_messages([number]))

    def contents(self, phase: str) -> Iterator[RecordDict]:
        """Decode the replies of a phase, one by one."""
        with phase_of(self.path, phase).open("rb") as file:
            for _ in range(self.num_nodes):
                (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
                yield _compat.records_from_bytes(file.read(length))


@dataclass(frozen=True)
class Measurement:
    """Seconds and megabytes of one size."""

    num_parties: int
    seconds: float
    replaying: float
    before: float
    asked: float
    peak: float

    @property
    def own(self) -> float:
        """Seconds without what Flower takes to decode messages."""
        return self.seconds - self.replaying


def replay(name: str, path: Path, num_parties: int, folder: Path | None) -> Measurement:
    """Drive the server's side of one round; in a fresh process, for its memory."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    # What libraries load and models need counts for no size.
    play_round(name, ReplayingGrid(path, WARM_UP), folder and folder / "warm-up")
    grid, before = ReplayingGrid(path, num_parties), resident()
    _, seconds = timed(lambda: play_round(name, grid, folder and folder / "run"))
    peak = resident("VmHWM")
    _, replaying = timed(lambda: [sum(1 for _ in grid.contents(p)) for p in grid.asked])
    asked = grid.asked[MessageType.TRAIN]
    return Measurement(num_parties, seconds, replaying, before, asked, peak)


def play_round(name: str, grid: ReplayingGrid, folder: Path | None) -> None:
    strategy = strategy_of(name, grid.num_nodes, folder)
    result = strategy.start(grid, ArrayRecord(), num_rounds=1)
    metrics = result.train_metrics_clientapp.get(1)
    if metrics is None or metrics[keys.NUM_PARTIES] != grid.num_nodes:
        raise RuntimeError(f"replies were refused: {list(strategy.rejected_.items())[:3]}")


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result and the processor time that it took."""
    start = time.process_time()
    return work(), time.process_time() - start


def resident(line: str = "VmRSS") -> float:
    """Return the memory of this process in MB, now or (VmHWM) at its peak."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition(f"{line}:")[2].split()[0]) / 1024


# The report.

HEADER = (
    "| strategy | parties | s in all | of them replaying | µs a party | messages a second | "
    "MB before | MB once asked | peak MB |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def measured_apart(name: str, path: Path, num_parties: int, folder: str) -> Measurement:
    size = str(num_parties)
    command = [sys.executable, __file__, "--replay", name, str(path), size, folder]
    done = subprocess.run(  # noqa: S603 - this very file
        command, check=True, capture_output=True, text=True
    )
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def measure(name: str, path: Path, num_parties: int, *, checkpoint: bool) -> Measurement:
    with tempfile.TemporaryDirectory() as folder:
        return measured_apart(name, path, num_parties, folder if checkpoint else "")


def report(name: str, m: Measurement) -> str:
    return (
        f"| {name} | {m.num_parties:,} | {m.seconds:.2f} | {m.replaying:.2f} | "
        f"{m.own / m.num_parties * 1e6:,.0f} | {m.num_parties / m.seconds:,.0f} | "
        f"{m.before:.0f} | {m.asked:.0f} | {m.peak:.0f} |"
    )


def growth(small: Measurement, large: Measurement) -> str:
    more = large.num_parties - small.num_parties
    peak = (large.peak - small.peak) * 2**20 / more
    asked = ((large.asked - large.before) - (small.asked - small.before)) * 2**20 / more
    return (
        f"each further party adds {peak:,.0f} bytes to the peak ({asked:,.0f} of them by being "
        f"asked), and {(large.own - small.own) / more * 1e6:,.0f} µs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("strategies", nargs="*", default=[*STRATEGIES])
    parser.add_argument("--checkpoint", action="store_true", help="keep the run in a folder")
    parser.add_argument("--replay", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replay:
        name, path, count, folder = arguments.replay
        kept = Path(folder) if folder else None
        print(json.dumps(asdict(replay(name, Path(path), int(count), kept))))
        return
    logging.getLogger("flwr").setLevel(logging.ERROR)
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.strategies:
            compare_sizes(name, Path(folder), checkpoint=arguments.checkpoint)


def compare_sizes(name: str, folder: Path, *, checkpoint: bool) -> None:
    path, sizes = folder / SAME_REPLIES.get(name, name), sizes_of(name, checkpoint=checkpoint)
    training = phase_of(path, MessageType.TRAIN)
    if not training.exists():
        write_replies(name, path, max(sizes))
    small, large = (measure(name, path, size, checkpoint=checkpoint) for size in sizes)
    print(f"{report(name, small)}\n{report(name, large)}", flush=True)
    size = training.stat().st_size / max(sizes)
    print(f"{name}: replies of {size:,.0f} bytes; {growth(small, large)}", flush=True)


if __name__ == "__main__":
    main()
