"""Nothing private leaves: values that cannot be mistaken, sought in real deployment traffic.

Three parties run as processes of their own. Each talks to the SuperLink through a relay that
keeps every byte it sends. Among its records are rows of numbers and names that occur nowhere
else; they are sought in what was sent, in arrays that can be read from it, and in all that
the server keeps: its database, its logs, its results and what ``flwr log`` shows.

Two parties have a model that carries its training rows along, as a kernel machine does. The
third has one that fails, and quotes its file in the error. Votes and answers on public rows
must leak neither. In the last run the same parties send models, and errors of this package's
own kind, which do travel: there the same search must find the rows, or it is blind.
"""

import io
import os
import socket
import socketserver
import sqlite3
import subprocess
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import pandas as pd
import pyarrow
import pytest
from flwr.app import Array as FlowerArray

from clients.app import FAILED
from fl_strategies.errors import KnowledgeMismatch
from fl_strategies.wire.knowledge import Knowledge, as_offered, decode_array, readable
from simulations.config import Settings, Value
from simulations.deploy.data import class_list, read_labelled, read_public
from simulations.deploy.federation import write_app
from simulations.deploy.server_app import SIMULATED
from simulations.runtime.flower import (
    CONNECTION,
    SuperLink,
    flower_environment,
    free_port,
    to_toml,
)

NUM_PARTIES = 3
NUM_CANARIES = 4
PATIENCE = 480.0
HARMLESS = ("fedkt", "fedkd", "fedmd")
CLASSES = ("sick", "well")
NAMES = ("ann", "bob", "eve")
SETTINGS: dict[str, Value] = {
    "num-parties": NUM_PARTIES,
    "num-server-rounds": 1,
    "final-learner": "ridge",
    "min-parties": 2,
    "max-wait": 240.0,
    "seed": 3,
    "fedkt.num-teachers": 2,
    "fedmd.epochs-initial": 2,
}


def settings_of(strategy: str) -> Settings:
    return Settings.from_run_config({**SETTINGS, "strategy": strategy})


LEARNERS = '''
"""The models of a party: one carries its rows along, one fails and says why."""

from pathlib import Path
from tokenize import TokenError

import numpy as np

from fl_strategies.errors import InvalidData

FILE = Path(__file__).with_name("records.csv")


class Keeper:
    """Nearest class mean; as arrays it also has the rows it was made of."""

    def __init__(self, row_shape, num_classes):
        self.num_classes = num_classes
        self.means = np.zeros((num_classes, *row_shape))
        self.rows = np.zeros((0, *row_shape))

    def fit(self, x, y, *, rng):
        self.rows = np.array(x, dtype=np.float64)
        for label in np.unique(y):
            self.means[label] = x[y == label].mean(axis=0)
        return self

    def partial_fit(self, x, y, *, rng, epochs):
        return self.fit(x, y, rng=rng)

    def distill(self, x, targets, *, rng, recipe):
        return self.fit(x, targets.argmax(axis=1), rng=rng)

    def logits(self, x):
        distances = ((x[:, None] - self.means[None]) ** 2).sum(axis=2)
        return -np.minimum(distances, 50.0)

    def predict(self, x):
        return self.logits(x).argmax(axis=1)

    def to_arrays(self):
        return {"means": self.means, "rows": self.rows}

    def from_arrays(self, arrays):
        twin = Keeper(self.means.shape[1:], self.num_classes)
        twin.means, twin.rows = np.array(arrays["means"]), np.array(arrays["rows"])
        return twin


class Clumsy(Keeper):
    """Cannot learn, and quotes what it was given."""

    def fit(self, x, y, *, rng):
        print("rows:", x[:5].tolist())
        raise ValueError(f"cannot learn {x[:5].tolist()} of {FILE.read_text()}")

    def distill(self, x, targets, *, rng, recipe):
        raise InvalidData(f"cannot learn {x[:5].tolist()} of {FILE.read_text()[:1500]}")


def keeper(*, row_shape, num_classes):
    return Keeper(row_shape, num_classes)


def clumsy(*, row_shape, num_classes):
    return Clumsy(row_shape, num_classes)
'''


# Private files.


def canary_numbers(party: int) -> np.ndarray:
    """Return numbers with many digits, other ones for every party, (rows, columns)."""
    rng = np.random.default_rng([20_261_116, party])
    return rng.uniform(3.0, 9.0, (NUM_CANARIES, 2))


def canary_name(party: int) -> str:
    return f"canary-zebra-{party}-kq"


def people(num_rows: int, *path: int) -> pd.DataFrame:
    """Return rows of a table whose label follows from its numbers."""
    rng = np.random.default_rng([num_rows, *path])
    age, pressure = rng.normal(size=(2, num_rows)).round(1)
    names = rng.choice(NAMES, num_rows)
    label = np.where(age + pressure > 0, *CLASSES)
    return pd.DataFrame({"name": names, "age": age, "pressure": pressure, "label": label})


def private_table(party: int) -> pd.DataFrame:
    """Return a party's records, whose first rows are canaries."""
    table = people(30, party)
    table.loc[: NUM_CANARIES - 1, "name"] = canary_name(party)
    table.loc[: NUM_CANARIES - 1, ["age", "pressure"]] = canary_numbers(party)
    return table


def write_party(folder: Path, party: int) -> dict[str, Value]:
    """Write the files of a party and return its node-config."""
    folder.mkdir(parents=True)
    people(40).to_csv(folder / "public.csv", index=False)
    private_table(party).to_csv(folder / "records.csv", index=False)
    (folder / "own_learners.py").write_text(LEARNERS)
    learner = "keeper" if party < NUM_PARTIES - 1 else "clumsy"
    return {
        "partition-id": party,
        "data-file": str(folder / "records.csv"),
        "public-file": str(folder / "public.csv"),
        "classes": ",".join(CLASSES),
        "learner": f"own_learners:{learner}",
        "state-dir": str(folder / "state"),
        "allow-unprotected": True,
        "allow-models": True,
    }


# The search.


def texts_of(number: float) -> set[bytes]:
    """Return how a number starts when it is written down, however many digits follow."""
    written = (repr(float(number)), f"{number:.9f}", f"{number:.9e}", str(np.float32(number)))
    return {text.lstrip("-")[:8].encode() for text in written}


@dataclass(frozen=True)
class Needles:
    """What is sought: bytes by kind, and numbers by their value."""

    forms: Mapping[str, set[bytes]]
    numbers: list[float]


def needles(party: int, prepared_rows: np.ndarray) -> Needles:
    """Return every form in which canaries of a party could leave, by kind.

    They are sought as they stand in the file, and as the party's models see them. Single
    numbers of four bytes turn up by chance, so of these two neighbours are sought.
    """
    raw, seen = canary_numbers(party), prepared_rows[:NUM_CANARIES, -2:]
    singles = [*raw.ravel().tolist(), *seen.astype(np.float64).ravel().tolist()]
    pairs = [*raw, *seen]
    forms = {
        "name": {canary_name(party).encode(), canary_name(party).encode("utf-16-le")},
        "text": set().union(*map(texts_of, singles)),
        "float64": {np.array(v, o).tobytes() for v in singles for o in (">f8", "<f8")},
        "float32": {pair.astype(o).tobytes() for pair in pairs for o in (">f4", "<f4")},
    }
    return Needles(forms, singles)


def found(haystack: bytes, sought: Needles) -> set[str]:
    """Return the kinds of canaries that are in some bytes, or in arrays that are in them."""
    arrays = list(embedded_arrays(haystack))
    parts = [haystack, *(array.tobytes() for array in arrays)]
    kinds = {
        kind
        for kind, forms in sought.forms.items()
        if any(form in part for form in forms for part in parts)
    }
    numbers = [array.astype(np.float64) for array in arrays if array.dtype.kind == "f"]
    if any(np.isin(each, sought.numbers).any() for each in numbers):
        kinds.add("array")
    return kinds


def embedded_arrays(data: bytes) -> Iterator[np.ndarray]:
    """Yield every array that is in some bytes: of Flower, and in archives."""
    for start in positions(data, b"\x93NUMPY"):
        header = data.find(b"\n", start) + 1
        for end in (header + size for size in promised_bytes(data[start:header])):
            with suppress(KnowledgeMismatch):
                array = decode_array("found", FlowerArray("", (), "", data[start:end]))
                yield array
                if array.dtype == np.uint8 and array.tobytes()[:2] == b"PK":
                    yield from archived_arrays(array.tobytes())
                if array.dtype == np.uint8 and array.ndim == 1:
                    yield from embedded_arrays(decompressed(array.tobytes()))


def decompressed(data: bytes) -> bytes:
    """Return what scores were before they were compressed; nothing for other bytes."""
    with suppress(OSError, ValueError):
        return pyarrow.input_stream(io.BytesIO(data), compression="zstd").read()
    with suppress(zlib.error):
        return zlib.decompress(data)
    return b""


def promised_bytes(header: bytes) -> Iterator[int]:
    """Yield how many bytes follow a header of numpy."""
    with suppress(ValueError, SyntaxError, TypeError, EOFError, TokenError):
        file = io.BytesIO(header)
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        yield int(np.prod(shape)) * dtype.itemsize


def archived_arrays(data: bytes) -> Iterator[np.ndarray]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            yield from embedded_arrays(archive.read(name))
            yield np.frombuffer(archive.read(name), np.uint8)


def positions(data: bytes, word: bytes) -> Iterator[int]:
    start = data.find(word)
    while start >= 0:
        yield start
        start = data.find(word, start + 1)


def stored(folder: Path) -> bytes:
    """Return all that is in a folder, databases row by row and archives unpacked."""
    parts = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        parts.append(path.read_bytes())
        if path.suffix == ".npz":
            parts += [array.tobytes() for array in archived_arrays(path.read_bytes())]
        if path.suffix == ".db":
            parts += database_cells(path)
    return b"\n".join(parts)


def database_cells(path: Path) -> list[bytes]:
    """Return every cell; the file itself spreads large ones over several pages."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        rows = [
            row
            for (name,) in tables.fetchall()
            for row in database.execute(f'SELECT * FROM "{name}"')  # noqa: S608 - its own name
        ]
    cells = [cell for row in rows for cell in row if cell is not None]
    return [cell if isinstance(cell, bytes) else str(cell).encode() for cell in cells]


def test_the_search_finds_every_form() -> None:
    """Numbers in both orders and types, in text, in arrays and archives; and no others."""
    rows = np.zeros((NUM_CANARIES, 5), np.float32)
    rows[:, -2:] = (canary_numbers(0) - 0.3) / 1.7
    sought, number = needles(0, rows), canary_numbers(0)[1, 1]
    archive = io.BytesIO()
    np.savez_compressed(archive, a=np.array([1.0, number]))
    packed = FlowerArray(np.frombuffer(archive.getvalue(), np.uint8)).data

    assert found(b"xx" + np.array([number], ">f8").tobytes() + b"yy", sought) == {"float64"}
    assert found(rows[2, -2:].astype(">f4").tobytes(), sought) == {"float32"}
    assert found(f"row [{number}, 1.0]".encode(), sought) == {"text"}
    assert found(f"row {rows[0, -1]}".encode(), sought) == {"text"}
    assert found(b"who: canary-zebra-0-kq", sought) == {"name"}
    assert "array" in found(b"ab" + FlowerArray(np.array([[2.0, number]])).data + b"cd", sought)
    assert {"array", "float64"} <= found(packed, sought)
    for encoding in readable():
        many = np.full(200, number)
        small = as_offered(Knowledge("", {"scores": many}), {"score-encodings": encoding})
        assert "array" in found(FlowerArray(small.arrays["scores"]).data, sought)
    # One number of a row that was rounded to float32 is seen by its value alone.
    lonely = FlowerArray(np.array([0.5, rows[0, -1]], np.float32)).data
    assert found(lonely, sought) == {"array"}
    assert found(FlowerArray(np.arange(9.0)).data + b" 3.14159265358979", sought) == set()


# The deployment.


class Relay(socketserver.ThreadingTCPServer):
    """Passes connections on to an address and keeps what came from the client."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.target = port
        self.sent: list[bytearray] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def heard(self) -> bytes:
        """Return all that clients have sent, connection after connection."""
        return b"\n".join(bytes(each) for each in self.sent)

    def handle_error(self, *_: object) -> None:
        """Say nothing: connections end when processes do."""


class _Connection(socketserver.BaseRequestHandler):
    server: Relay

    def handle(self) -> None:
        kept = bytearray()
        self.server.sent.append(kept)
        with socket.create_connection(("127.0.0.1", self.server.target)) as target:
            back = threading.Thread(target=pass_on, args=(target, self.request), daemon=True)
            back.start()
            pass_on(self.request, target, kept)
            back.join()


def pass_on(source: Any, target: Any, kept: bytearray | None = None) -> None:
    """Copy bytes until one side ends, and tell the other."""
    with suppress(OSError):
        while data := source.recv(65536):
            if kept is not None:
                kept += data
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


class Tapped(SuperLink):
    """A SuperLink with a database, and parties that reach it through relays only."""

    def __init__(self, folder: Path) -> None:
        super().__init__(simulation=False)
        self.folder = folder
        self.relays: list[Relay] = []

    def _open(self) -> None:
        self._settle(self.folder / "server" / "flower")
        database = str(self.folder / "server" / "superlink.db")
        self._start_superlink("--insecure", "--database", database)

    def start_party(self, number: int) -> None:
        folder = self.folder / f"party-{number}"
        node_config = write_party(folder, number)
        relay = Relay(self.port)
        self._stack.callback(relay.server_close)
        self._stack.callback(relay.shutdown)
        self.relays.append(relay)
        command = ["flower-supernode", "--insecure", "--superlink", relay.address]
        command += ["--port", str(free_port()), "--node-config", to_toml(node_config)]
        environment = flower_environment(folder / "flower")
        paths = [str(folder), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._nodes.append(self._start(command, environment, folder / "supernode.log"))

    def run(self, settings: Settings) -> tuple[str, str]:
        """Run a strategy; return how it ended and what `flwr log` shows."""
        public = self.folder / "server" / "public.csv"
        people(40).to_csv(public, index=False)
        own = {k: v for k, v in settings.to_run_config().items() if k not in SIMULATED}
        files = {"public-file": str(public), "classes": ",".join(CLASSES)}
        output = {"output-dir": str(self.folder / "server" / "results")}
        app = write_app(self.folder / "app")
        run_id = self._submit(app, {**own, **files, **output})
        status = self.wait_for_run(run_id, PATIENCE)
        shown = subprocess.run(
            ["flwr", "log", run_id, CONNECTION, "--show"],
            env=self.environment,
            cwd="/",
            capture_output=True,
            check=True,
        )
        return str(status), (shown.stdout + shown.stderr).decode()


def left(tapped: Tapped, log: str) -> tuple[list[bytes], bytes]:
    """Return what each party has sent, and all that is on the server or shown there."""
    return [relay.heard() for relay in tapped.relays], stored(
        tapped.folder / "server"
    ) + log.encode()


def sought_of(folder: Path) -> list[Needles]:
    public = read_public(folder / "party-0" / "public.csv", class_list(",".join(CLASSES)))
    files = [folder / f"party-{number}" / "records.csv" for number in range(NUM_PARTIES)]
    return [needles(n, read_labelled(file, public)[0]) for n, file in enumerate(files)]


def found_by_party(
    sought: Sequence[Needles], sent: Sequence[bytes], server: bytes
) -> list[set[str]]:
    return [
        found(own, forms) | found(server, forms)
        for own, forms in zip(sent, sought, strict=True)
    ]


@pytest.mark.deployment
def test_no_canary_leaves_a_deployed_party(tmp_path: Path) -> None:
    """Votes, answers, errors, logs and databases hold none; models do."""
    with Tapped(tmp_path) as tapped:
        for number in range(NUM_PARTIES):
            tapped.start_party(number)
        runs = [tapped.run(settings_of(name)) for name in HARMLESS]
        clean = left(tapped, "".join(log for _, log in runs))
        leaking = tapped.run(settings_of("avgkd"))
        leaked = left(tapped, leaking[1])
        living = tapped.processes
    assert living.living() == set()

    sought = sought_of(tmp_path)
    for own, word in zip(clean[0], (b"votes", b"votes", FAILED.encode()), strict=True):
        assert b"ransfer-encoding: chunked" not in own.lower()
        assert word in own, "the relay must have heard the party's answers"
    for status, log in runs:
        assert status == "finished:completed"
        assert FAILED in log
    assert b'"model-sha256"' in clean[1], "the server's results must be among what is searched"
    assert found_by_party(sought, *clean) == [set()] * NUM_PARTIES

    # The same search, once parties send what a model holds; who fails tells nobody why.
    kinds = found_by_party(sought, *leaked)
    for number in range(NUM_PARTIES - 1):
        assert {"float64", "array"} <= kinds[number]
    assert kinds[-1] == set()
    assert FAILED in leaking[1]
    # And at home everything is, in the party's own log as well.
    for number, forms in enumerate(sought):
        assert "name" in found(stored(tmp_path / f"party-{number}"), forms)
    own_log = (tmp_path / f"party-{NUM_PARTIES - 1}" / "supernode.log").read_bytes()
    assert {"text", "name"} <= found(own_log, sought[-1])
