"""What hostile input may cost: memory within a stated limit, and no code is ever run.

Memory is measured where it matters: headers that claim 10**12 numbers, counts that ask for
lists. In a process of its own the limit is the
system's (``RLIMIT_AS``), so native allocations count as well.
"""

import io
import json
import os
import pickle
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Context, Message, RecordDict

from fl_strategies.errors import StrategyError
from fl_strategies.server.replies import parse_reply, read_ledger
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import decode_array
from tests.fuzz.federations import VARIANTS, recorded
from tests.fuzz.mutation import SHAPES, mutate_array, npy, wrap
from tests.fuzz.test_models import LEARNERS, arrays_of, use
from tests.fuzz.test_replies import hostile
from tests.fuzz.trials import Trials

PER_BYTE, AT_LEAST = 64, 16 * 2**20
"""A decoder may take 64 bytes of memory for each byte that came, and 16 MiB beside them."""
HEADROOM = 128 * 2**20
"""What a whole process may take beyond its start: a row of the widest table a model can name
(`clients.tabular.base.MAX_WIDTH` numbers of eight bytes, 8 MiB) a few times over."""

CLAIMS = (
    *("(1000000000000,)", "(1000000, 1000000)", "(999999999999999999,)"),
    *("(1000000000000, 1)", "(4294967296, 4294967296)", "(0, 1000000000000)"),
)


def peak_of(function: Callable[..., Any], *arguments: Any) -> int:
    """Return the most memory that Python and numpy held during a call, refused or not."""
    tracemalloc.start()
    try:
        function(*arguments)
    except StrategyError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.share(0.005)
def test_memory_of_damaged_arrays_follows_their_bytes(trials: Trials) -> None:
    """No header makes the reader take more than the bytes that came."""
    valid = FlowerArray(np.arange(64, dtype=np.float32))
    for rng in trials.numbers():
        array = mutate_array(rng, valid)
        peak = peak_of(decode_array, "x", array)
        assert peak <= 2**20 + PER_BYTE * len(array.data)
        trials.count(refused=False)


@pytest.mark.share(0.0005)
@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_memory_of_damaged_replies_follows_their_bytes(name: str, trials: Trials) -> None:
    """Reading a reply takes no more than a small multiple of it."""
    exchange = recorded(name)[0]
    for rng in trials.numbers():
        number = rng.randrange(len(exchange.sent))
        request = exchange.sent[number]
        reply = hostile(rng, request, exchange.replies[number])
        trials.count(refused=reply is None)
        if reply is None:
            continue
        strategy = exchange.again()
        size = (
            sum(len(str(each)) for each in reply.content.values()) if reply.has_content() else 0
        )
        kind, limit = strategy.reply_kind, strategy.max_reply_bytes
        peak = peak_of(parse_reply, request, reply, kind, limit, strategy.check)
        assert peak <= AT_LEAST + PER_BYTE * size


# In a process with a limit.


def claims() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield everything that could be made to allocate, by name."""
    for shape in (*CLAIMS, *SHAPES):
        for descr in ("<f8", "|u1", "|O", "<c16"):
            data = npy(descr, shape, b"\x00" * 8)
            yield (
                f"header {descr} {shape[:40]}",
                lambda data=data: decode_array("x", wrap(data)),
            )
    for text in ("[" * 10**5, '{"a":' * 10**4, "9" * 99_999, "[" + "0," * 40_000 + "0]"):
        yield "ledger", lambda text=text: read_ledger(text)
    for name in sorted(LEARNERS):
        yield from claims_of_model(name)


def claims_of_model(name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield models whose sizes promise far more than their arrays hold."""
    valid = arrays_of(name)
    for place in ("width", "tree-sizes", "row-shape", "0/width", "0/tree-sizes"):
        for value in (2**20, 2**20 - 1, 2**24, 2**31, 2**40, 2**62, -1):
            if place in valid:
                changed = np.full_like(valid[place], value)
                yield (
                    f"{name} {place} {value}",
                    lambda c=changed, p=place: use(name, {**valid, p: c}),
                )


def under_limit() -> None:
    """Try all claims with little memory to spare; called in a process of its own."""
    attempts = list(claims())
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + HEADROOM, size + HEADROOM))
    refused = 0
    for name, attempt in attempts:
        said = ""
        try:
            attempt()
        except StrategyError as error:
            refused += 1
            # Some readers turn whatever happens into a typed error.
            said = f"{error} {error.__cause__!r}"
        except BaseException as error:
            raise AssertionError(f"{name} ended in {type(error).__name__}") from error
        assert "MemoryError" not in said, name
    os.write(1, json.dumps([len(attempts), refused]).encode())


@pytest.mark.share(0.0)
def test_claims_of_terabytes_allocate_nothing(trials: Trials) -> None:
    """With the system's own limit: headers, counts and widths that promise more."""
    code = "from tests.fuzz.test_limits import under_limit; under_limit()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    assert done.returncode == 0, done.stderr[-3000:]
    tried, refused = json.loads(done.stdout)
    assert tried > 150
    assert refused > 100
    for number in range(tried):
        trials.count(refused=number < refused)


def test_the_limit_is_one() -> None:
    """The process of the test above does end if something allocates what it is told."""
    code = (
        "import resource, numpy as np\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({2**31}, {2**31}))\n"
        "np.ones(10**10)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )

    assert done.returncode != 0
    assert "MemoryError" in done.stderr


# Code in messages.


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def payloads(path: Path) -> list[bytes]:
    """Return bytes that run code in a reader that unpickles."""
    plain = pickle.dumps(Payload(path))
    saved, array = io.BytesIO(), io.BytesIO()
    torch.save(Payload(path), saved)
    np.save(array, np.array([Payload(path)], dtype=object), allow_pickle=True)
    archive = io.BytesIO()
    np.savez(archive, x=np.array([Payload(path)], dtype=object), allow_pickle=True)
    return [plain, saved.getvalue(), array.getvalue(), archive.getvalue()]


def unpicklers() -> list[Callable[[bytes], Any]]:
    """Return, for each payload, the reader that it is made for."""
    return [
        pickle.loads,
        lambda data: torch.load(io.BytesIO(data), weights_only=False),
        lambda data: np.load(io.BytesIO(data), allow_pickle=True),
        lambda data: np.load(io.BytesIO(data), allow_pickle=True)["x"],
    ]


@pytest.mark.parametrize("number", range(4))
def test_the_payloads_work(number: int, tmp_path: Path) -> None:
    """A reader that unpickles does run them; else the test below would show nothing."""
    path = tmp_path / "made"

    unpicklers()[number](payloads(path)[number])

    assert path.exists()


@pytest.mark.share(0.0)
def test_no_message_runs_code(trials: Trials, tmp_path: Path) -> None:
    """Code in every array of every message, to servers, to parties and to learners."""
    path = tmp_path / "made"
    for data, stype in zip(payloads(path), ("numpy.ndarray", "torch.Tensor") * 2, strict=True):
        for name in sorted(VARIANTS):
            plant_in_messages(name, data, stype, trials)
        for name in sorted(LEARNERS):
            valid = arrays_of(name)
            for place in valid:
                array = np.frombuffer(data, np.uint8)
                trials.attempt(use, name, {**valid, place: array})
        trials.attempt(read_ledger, data.decode("latin-1"))
    for name in sorted(LEARNERS):
        for place in arrays_of(name):
            objects = np.array([Payload(path)], dtype=object)
            trials.attempt(use, name, {**arrays_of(name), place: objects})

    assert not path.exists()
    assert trials.refused


def plant_in_messages(name: str, data: bytes, stype: str, trials: Trials) -> None:
    """Put bytes in the place of all arrays of a run's messages, in both directions."""
    app = VARIANTS[name].app()
    for exchange in recorded(name):
        question, answer = exchange.sent[0], exchange.replies[0]
        reply = Message(planted(answer.content, data, stype), reply_to=question)
        strategy = exchange.again()
        strategy.aggregate_train(1, [reply, *exchange.replies[1:]])
        trials.count(refused=bool(strategy.rejected_))
        kind, node = question.metadata.message_type, question.metadata.dst_node_id
        asked = Message(planted(question.content, data, stype), node, kind)
        answer = app(asked, Context(1, 1, {"partition-id": 0}, RecordDict(), {}))
        trials.count(refused=answer.has_error())


def planted(content: RecordDict, data: bytes, stype: str) -> RecordDict:
    names = list(content.get(keys.ARRAYS) or ["x"])
    arrays = ArrayRecord({name: wrap(data, stype=stype) for name in names})
    return RecordDict({**content, keys.ARRAYS: arrays})
