"""Time of the server for votes, scores, a checkpoint and a journal, and its scaling.

Run: python -m benchmarks.server [--repeats N]
Prints JSON. Times are processor seconds, medians of the repeats, which alternate between what
is compared; memory is what a process of its own needs beyond what it had before.
"""

import argparse
import hashlib
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.machine import seconds
from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.aggregation.consensus import Consensus, RobustConsensus, make_consensus
from fl_strategies.aggregation.pool import EvidencePool
from fl_strategies.aggregation.votes import VoteSum, count_votes
from fl_strategies.privacy import journal as journal_lines
from fl_strategies.privacy.events import LaplaceEvent
from fl_strategies.privacy.journal import PartyJournal
from fl_strategies.server.run import Checkpoint, RecordedGrid
from fl_strategies.wire.knowledge import Quantizer
from simulations.runtime.local import InMemoryGrid

PARTIES, ROWS, CLASSES = 1000, 10_000, 100
MANY, FEW_ROWS, FEW_CLASSES = (1_000, 10_000), 500, 10
RULES = ("mean", "class-weighted", "corrected")
LEVELS = Quantizer(num_levels=200, bound=10.0)
RELEASE = LaplaceEvent(unit="example", relation="replace-one", scale=10.0, l1_sensitivity=1.0)
NUM_LINES = (1000, 2000, 5000, 10_000)


def measure(repeats: int) -> dict[str, Any]:
    """Return all figures, by what they are about."""
    return {
        "votes": votes(repeats),
        "scores": scores(repeats),
        "medians": medians(repeats),
        "checkpoint": checkpoints(repeats),
        "journal": journals(repeats),
    }


def growth(
    repeats: int, name: str, sizes: Sequence[int], work: Callable[[int], Callable[[], object]]
) -> dict[str, list[float]]:
    """Return the seconds of work that is made for each size."""
    found = seconds(repeats, *(work(size) for size in sizes))
    return {name: list(map(float, sizes)), "seconds": found}


# Memory, in a process of its own.


def extra_megabytes(name: str, *sizes: int) -> float:
    """Return by how much the work of this name raises the peak of a fresh process."""
    command = [sys.executable, "-m", "benchmarks.server", "--child", name, *map(str, sizes)]
    done = subprocess.run(  # noqa: S603 - this very file
        command, check=True, capture_output=True, text=True
    )
    return float(done.stdout.splitlines()[-1])


def child(name: str, sizes: Sequence[int]) -> None:
    work = CHILDREN[name](*sizes)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins here
    before = peak_megabytes()
    work()
    print(peak_megabytes() - before)


def peak_megabytes() -> float:
    """Return the peak of this process; what `getrusage` says includes its parent's."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


# Votes.


def labels_of(parties: int, rows: int, classes: int) -> IntArray:
    rng = np.random.default_rng(0)
    labels: IntArray = rng.integers(0, classes, (parties, rows), dtype=np.uint8)
    return labels


def one_by_one(labels: Array, num_classes: int) -> IntArray:
    """Count as one would write it first: each voter adds one to its cells."""
    counts = np.zeros((labels.shape[1], num_classes), dtype=np.int64)
    rows = np.arange(labels.shape[1])
    for voter in labels:
        counts[rows, voter] += 1
    return counts


def class_by_class(labels: Array, num_classes: int) -> IntArray:
    """Count as one would write it second: compare all votes with every class."""
    return np.stack([(labels == c).sum(axis=0) for c in range(num_classes)], axis=1)


def streamed(labels: Array, num_classes: int) -> IntArray:
    """Count as a server does, which sees one reply after the other."""
    votes = VoteSum((labels.shape[1], num_classes))
    for voter in labels:
        votes.add(voter)
    return votes.counts


def votes(repeats: int) -> dict[str, Any]:
    labels = labels_of(PARTIES, ROWS, CLASSES)
    same = np.array_equal(count_votes(labels, CLASSES), one_by_one(labels, CLASSES))
    same = same and np.array_equal(count_votes(labels, CLASSES), streamed(labels, CLASSES))
    together, apart, voters, classes = seconds(
        repeats,
        lambda: count_votes(labels, CLASSES),
        lambda: streamed(labels, CLASSES),
        lambda: one_by_one(labels, CLASSES),
        lambda: class_by_class(labels, CLASSES),
    )
    counting = {
        "parties": lambda n: (n, ROWS, CLASSES),
        "rows": lambda n: (PARTIES, n, CLASSES),
        "classes": lambda n: (PARTIES, ROWS, n),
    }
    sizes = {"parties": (250, 500, 1000, 2000), "rows": (2500, 5000, 10_000, 20_000)}
    return {
        "parties": PARTIES,
        "rows": ROWS,
        "classes": CLASSES,
        "same": bool(same),
        "seconds": together,
        "streamed-seconds": apart,
        "voter-by-voter-seconds": voters,
        "class-by-class-seconds": classes,
        "times-faster-than-voter-by-voter": voters / together,
        "times-faster-than-class-by-class": classes / together,
        "extra-megabytes": extra_megabytes("votes", PARTIES, ROWS, CLASSES),
        "streamed-extra-megabytes": extra_megabytes("streamed", PARTIES, ROWS, CLASSES),
        "growth": {
            name: growth(repeats, name, sizes.get(name, (25, 50, 100, 200)), _counts(shape))
            for name, shape in counting.items()
        },
    }


def _counts(
    shape: Callable[[int], tuple[int, int, int]],
) -> Callable[[int], Callable[[], object]]:
    def made(size: int) -> Callable[[], object]:
        labels = labels_of(*shape(size))
        return lambda: count_votes(labels, shape(size)[2])

    return made


# Scores.


def replies(parties: int) -> Iterator[tuple[Array, FloatArray]]:
    """Yield levels and class counts of one party after the other, of a few that differ."""
    rng = np.random.default_rng(0)
    shape = FEW_ROWS, FEW_CLASSES
    templates = [LEVELS.encode(rng.normal(0, 2, shape)).astype(np.uint8) for _ in range(16)]
    for number in range(parties):
        counts = np.full(FEW_CLASSES, 20.0 + number % 97)
        yield templates[number % 16].copy(), counts


def combined(rule: str, parties: int) -> FloatArray:
    """Return what the server makes of so many parties' scores by a rule."""
    shape = FEW_ROWS, FEW_CLASSES
    if rule == "corrected":
        pool = EvidencePool(
            shape,
            bound=LEVELS.bound,
            task="single-label",
            share="pooled",
            decode=lambda values, _: LEVELS.decode(values),
            exclude_outliers=False,
        )
        for values, counts in replies(parties):
            pool.add(values, counts, "none")
        return pool.result()
    consensus: Consensus = make_consensus(rule, shape, bound=LEVELS.bound)  # type: ignore[arg-type]
    for values, counts in replies(parties):
        consensus.add(LEVELS.decode(values), counts.astype(np.int64))
    return consensus.result()


def stacked(parties: int) -> FloatArray:
    """Return the mean as one would write it first: of all scores at once."""
    kept = np.stack([LEVELS.decode(values) for values, _ in replies(parties)])
    mean: FloatArray = kept.mean(axis=0)
    return mean


def scores(repeats: int) -> dict[str, Any]:
    few, many = MANY
    sizes = (500, 1000, 2000, 4000)
    found: dict[str, Any] = {"rows": FEW_ROWS, "classes": FEW_CLASSES}
    for rule in RULES:
        memory = [extra_megabytes("scores", RULES.index(rule), size) for size in MANY]
        found[rule] = {
            "growth": growth(repeats, "parties", sizes, _combining(rule)),
            "extra-megabytes": dict(zip(map(str, MANY), memory, strict=True)),
            "bytes-a-further-party": (memory[1] - memory[0]) * 2**20 / (many - few),
        }
    own, plain = seconds(repeats, lambda: combined("mean", few), lambda: stacked(few))
    found["mean"]["times-the-stacked-mean"] = own / plain
    found["stacked-extra-megabytes"] = {str(few): extra_megabytes("stacked", few)}
    return found


def _combining(rule: str) -> Callable[[int], Callable[[], object]]:
    return lambda parties: lambda: combined(rule, parties)


# Medians.


def medians(repeats: int) -> dict[str, Any]:
    def made(parties: int) -> Callable[[], object]:
        consensus = RobustConsensus("median", decode=LEVELS.decode)
        for values, _ in replies(parties):
            consensus.add(values)
        return consensus.result

    kept = np.stack([LEVELS.decode(v).astype(np.float32) for v, _ in replies(200)])
    own, plain = seconds(repeats, made(200), lambda: np.median(kept, axis=0))
    return {
        "parties": 200,
        "seconds": own,
        "numpy-seconds": plain,
        "times-faster-than-numpy": plain / own,
        "growth": growth(repeats, "parties", (500, 1000, 2000, 4000), made),
        "extra-megabytes": extra_megabytes("median", 1000),
        "stacked-extra-megabytes": extra_megabytes("stacked-median", 1000),
    }


def median_of(parties: int) -> None:
    consensus = RobustConsensus("median", decode=LEVELS.decode)
    for values, _ in replies(parties):
        consensus.add(values)
    consensus.result()


def stacked_median(parties: int) -> None:
    np.median(np.stack([LEVELS.decode(values) for values, _ in replies(parties)]), axis=0)


# A checkpoint.


def checkpoints(repeats: int) -> dict[str, Any]:
    """Time a phase of a round whose replies go to disk and come from there."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    return growth(repeats, "parties", (25, 50, 100, 200), lambda n: lambda: kept_round(n))


def kept_round(parties: int) -> None:
    app = ClientApp()
    content = RecordDict({"arrays": ArrayRecord([np.zeros(10_000, np.uint8)])})

    @app.train()
    def train(message: Message, _: object) -> Message:
        return Message(content, reply_to=message)

    inner = InMemoryGrid(app, parties)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Checkpoint(Path(folder), resume=False)
        with checkpoint.opened({}):
            checkpoint.keep_state(1, {})
            grid = RecordedGrid(inner, checkpoint, max_reply_bytes=2**20)
            nodes = grid.get_node_ids()
            asked = [Message(RecordDict(), dst_node_id=n, message_type="train") for n in nodes]
            answered = sum(not reply.has_error() for reply in grid.send_and_receive(asked))
    if answered != parties:
        raise RuntimeError(f"{answered} of {parties} replies came back")


# The journal.


def journal_of(folder: Path, num_lines: int) -> PartyJournal:
    """Return a journal of so many lines, written without waiting for the disk each time."""
    journal = PartyJournal(folder, fingerprint=hashlib.sha256(b"rows").hexdigest())
    lines, written = journal_lines.Lines.none_of("example"), []
    for number in range(num_lines):
        entry = journal_lines.JournalEntry(
            sequence=number + 1,
            fingerprint=journal.fingerprint,
            charges=((RELEASE, 1 + number % 7),),
            run=f"run {number // 10}",
            purpose="answers",
            time="2026-01-01T00:00:00+00:00",
        )
        written.append(journal_lines.sealed_line(lines.checksum, entry))
        lines.checksum = written[-1][13:77]
    folder.mkdir(parents=True)
    journal.path.write_bytes(b"".join(written))
    return journal


def charge(journal: PartyJournal) -> None:
    journal.charge([(RELEASE, 1)], run="now", purpose="answers")


def charge_anew(journal: PartyJournal) -> None:
    """Charge as a new process does, which has read nothing yet."""
    journal_lines._remembered.clear()
    charge(journal)


def journals(repeats: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        kept = {n: journal_of(Path(folder) / str(n), n) for n in NUM_LINES}

        def anew(num_lines: int) -> Callable[[], object]:
            return lambda: charge_anew(kept[num_lines])

        reading = growth(repeats, "lines", NUM_LINES, anew)
        for journal in kept.values():
            charge(journal)
        knowing = growth(repeats, "lines", NUM_LINES, lambda n: lambda: charge(kept[n]))
    return {
        "growth": knowing,
        "in-a-new-process": reading,
        "times-faster": reading["seconds"][-1] / knowing["seconds"][-1],
    }


CHILDREN: Mapping[str, Callable[..., Callable[[], object]]] = {
    "votes": lambda *shape: _counting(count_votes, *shape),
    "streamed": lambda *shape: _counting(streamed, *shape),
    "scores": lambda rule, parties: lambda: combined(RULES[rule], parties),
    "stacked": lambda parties: lambda: stacked(parties),
    "median": lambda parties: lambda: median_of(parties),
    "stacked-median": lambda parties: lambda: stacked_median(parties),
}


def _counting(count: Callable[[Array, int], object], *shape: int) -> Callable[[], object]:
    parties, rows, classes = shape
    labels = labels_of(parties, rows, classes)
    return lambda: count(labels, classes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], [int(size) for size in arguments.child[1:]])
    else:
        print(json.dumps(measure(arguments.repeats), indent=1))


if __name__ == "__main__":
    main()
