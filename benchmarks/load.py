"""How the server's time and memory grow from 1,000 to 10,000 parties.

Run: ``python benchmarks/load.py [strategy ...]``. Eight parties that hold the digits of
scikit-learn answer a strategy for real. Each simulated party then says what one of two of
them says, row by row, in an encoding of its own on disk. The replies of a size are replayed
as Flower messages, one after the other, through `configure_train` and `aggregate_train` in a
process of their own, so that only what the strategy keeps adds up. Nothing here measures
the network, or Flower's SuperLink, or the final model's training.

Time must be linear: seconds a party are the same for both sizes. Memory must be flat: bytes
that each further party adds to the peak of the process, of which some hundreds stay
whatever happens, for the party's question, its name and its metrics.
"""

import argparse
import json
import logging
import resource
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from clients.app import client_app
from fl_strategies import KnowledgeStrategy
from fl_strategies.arrays import Array
from fl_strategies.randomness import derive_rng
from fl_strategies.runtime import _compat
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import decode_array, encode_arrays
from fl_strategies.wire.packing import pack_labels, unpack_labels
from simulations.config import Settings, Value
from simulations.experiment import Federation, load_federation
from simulations.local import InMemoryGrid

SIZES = (1_000, 10_000)
NUM_TEMPLATES = 8
_LENGTH = struct.Struct("<I")

STRATEGIES: Mapping[str, Mapping[str, Value]] = {
    "fedkt": {"strategy": "fedkt"},
    "fedkt-trimmed": {"strategy": "fedkt", "trim-fraction": 0.2},
    "fedmd-mean": {"strategy": "fedmd", "payload": "softmax", "consensus": "mean"},
    "fedmd-median": {"strategy": "fedmd", "payload": "softmax", "consensus": "median"},
    "fedkd": {"strategy": "fedkd"},
    "fedkd-sums": {"strategy": "fedkd", "exclude-outliers": False},
}
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


def strategy_of(name: str, num_parties: int) -> KnowledgeStrategy[Any]:
    strategy = federation_of(name).strategy()
    strategy.num_parties = num_parties
    return strategy


# Replies, written once.


def real_replies(name: str) -> list[RecordDict]:
    """Let the parties of a small federation answer the strategy's question."""
    federation = federation_of(name)
    app = client_app(lambda context: federation.party(int(context.node_config["partition-id"])))
    grid = InMemoryGrid(app, NUM_TEMPLATES)
    questions = strategy_of(name, NUM_TEMPLATES).configure_train(
        1, ArrayRecord(), ConfigRecord(), grid
    )
    return [reply.content for reply in grid.send_and_receive(questions)]


def mixture(name: str, array: str, pair: Sequence[Array], rng: np.random.Generator) -> Array:
    """Return for each public row what one of two parties says."""
    federation = federation_of(name)
    num_rows, num_classes = len(federation.dataset.x_public), federation.dataset.num_classes
    first = rng.random(num_rows) < 0.5
    if array == "votes":
        shape = federation.settings.chosen()["num-splits"], num_rows
        labels = [unpack_labels(packed, shape, num_classes) for packed in pair]
        return pack_labels(np.where(first, *labels), num_classes)
    if len(pair[0]) == num_rows:
        return np.where(first[:, None], *pair)
    return pair[0]  # class counts


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
    content[keys.META] = ConfigRecord(meta)
    return _compat.records_to_bytes(content)


def write_replies(name: str, path: Path, count: int) -> None:
    templates = real_replies(name)
    with path.open("wb") as file:
        for number in range(count):
            encoded = simulated_reply(name, templates, number)
            file.write(_LENGTH.pack(len(encoded)) + encoded)


# Replies, read one by one.


class ReplayingGrid(InMemoryGrid):
    """A grid whose nodes have answered already: replies come from disk when asked for."""

    def __init__(self, path: Path, num_nodes: int) -> None:
        super().__init__(ClientApp(), 1)
        self.path, self.num_nodes = path, num_nodes

    def get_node_ids(self) -> list[int]:
        """Return the ids of all nodes."""
        return list(range(1, self.num_nodes + 1))

    def replay(self, questions: Sequence[Message]) -> Iterator[Message]:
        """Yield the reply to each question, which is gone before the next is read."""
        with self.path.open("rb") as file:
            for question in questions:
                (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
                content = _compat.records_from_bytes(file.read(length))
                yield Message(content, reply_to=question)


@dataclass(frozen=True)
class Measurement:
    """Seconds and megabytes of one size."""

    num_parties: int
    asking: float
    replaying: float
    aggregating: float
    before: float
    asked: float
    peak: float


def replay(name: str, path: Path, num_parties: int) -> Measurement:
    """Drive the server's side of one round; in a fresh process, for its memory."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    warm_up(name, path)
    strategy, grid = strategy_of(name, num_parties), ReplayingGrid(path, num_parties)
    before = resident()
    questions, asking = timed(
        lambda: strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid)
    )
    _, naming = timed(lambda: [_compat.assign_message_id(question) for question in questions])
    asked = resident()
    (_, metrics), aggregating = timed(
        lambda: strategy.aggregate_train(1, grid.replay(questions))
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if metrics is None or metrics[keys.NUM_PARTIES] != num_parties:
        raise RuntimeError(f"replies were refused: {list(strategy.rejected_.items())[:3]}")
    _, replaying = timed(lambda: sum(1 for _ in grid.replay(questions)))
    return Measurement(
        num_parties, asking + naming, replaying, aggregating, before, asked, peak
    )


def warm_up(name: str, path: Path) -> None:
    """Run a small round first: what libraries load and models need counts for no size."""
    strategy, grid = strategy_of(name, 20), ReplayingGrid(path, 20)
    questions = strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid)
    for question in questions:
        _compat.assign_message_id(question)
    strategy.aggregate_train(1, grid.replay(questions))


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result and the processor time that it took."""
    start = time.process_time()
    return work(), time.process_time() - start


def resident() -> float:
    """Return the memory of this process now, in MB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


# The report.

HEADER = (
    "| strategy | parties | s in all | of them replaying | µs a party | messages a second | "
    "MB before | MB once asked | peak MB |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def measured_apart(name: str, path: Path, num_parties: int) -> Measurement:
    command = [sys.executable, __file__, "--replay", name, str(path), str(num_parties)]
    done = subprocess.run(  # noqa: S603 - this very file
        command, check=True, capture_output=True, text=True
    )
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def report(name: str, measurement: Measurement) -> str:
    m = measurement
    seconds = m.asking + m.aggregating
    own = seconds - m.replaying
    return (
        f"| {name} | {m.num_parties:,} | {seconds:.2f} | {m.replaying:.2f} | "
        f"{own / m.num_parties * 1e6:.0f} | {m.num_parties / seconds:,.0f} | {m.before:.0f} | "
        f"{m.asked:.0f} | {m.peak:.0f} |"
    )


def growth(small: Measurement, large: Measurement) -> str:
    more = large.num_parties - small.num_parties
    peak = (large.peak - small.peak) * 2**20 / more
    asked = ((large.asked - large.before) - (small.asked - small.before)) * 2**20 / more
    own = [m.asking + m.aggregating - m.replaying for m in (small, large)]
    return (
        f"each further party adds {peak:,.0f} bytes to the peak ({asked:,.0f} of them by being "
        f"asked), and {(own[1] - own[0]) / more * 1e6:.0f} µs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("strategies", nargs="*", default=[*STRATEGIES])
    parser.add_argument("--replay", nargs=3, metavar=("STRATEGY", "FILE", "PARTIES"))
    arguments = parser.parse_args()
    if arguments.replay:
        name, path, count = arguments.replay
        print(json.dumps(asdict(replay(name, Path(path), int(count)))))
        return
    logging.getLogger("flwr").setLevel(logging.ERROR)
    print(HEADER, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.strategies:
            path = Path(folder) / SAME_REPLIES.get(name, name)
            if not path.exists():
                write_replies(name, path, max(SIZES))
            small, large = (measured_apart(name, path, size) for size in SIZES)
            size = path.stat().st_size / max(SIZES)
            print(f"{report(name, small)}\n{report(name, large)}", flush=True)
            print(f"{name}: replies of {size:,.0f} bytes; {growth(small, large)}", flush=True)


if __name__ == "__main__":
    main()
