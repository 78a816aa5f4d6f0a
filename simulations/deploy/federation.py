"""A whole deployment on loopback: TLS, node authentication, and a folder for each member.

`prepare` writes what every member would have on its own machine, and `Deployment` starts
and stops their processes. The commands are those of docs/deployment.md.
"""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from fl_strategies import keys
from fl_strategies.exceptions import require
from simulations.config import Settings, Value
from simulations.deploy.app_folder import write_app
from simulations.deploy.client_app import MODEL_SETTINGS
from simulations.deploy.credentials import Certificates, make_certificates, make_node_key
from simulations.deploy.data import ARCHIVE, LABEL, TABLES, write_labelled
from simulations.deploy.server_app import RESULT, SIMULATED, result_folder
from simulations.experiment import load_federation
from simulations.flower import (
    CONNECTION,
    FlowerRunFailed,
    SuperLink,
    flower_environment,
    free_port,
    running_process,
    to_toml,
)

FORMATS: Final = ("npz", "csv", "parquet")
_POLL_SECONDS: Final = 2.0
_ONLINE_SECONDS: Final = 240.0
_STOP_SECONDS: Final = 10.0


@dataclass(frozen=True, kw_only=True)
class Split:
    """Files of one data set, dealt out: one a party, and those that others need."""

    parties: tuple[Path, ...]
    public: Path
    test: Path
    classes: str


def write_split(
    settings: Settings, folder: Path, formats: Sequence[str] = FORMATS[:1]
) -> Split:
    """Deal a data set to parties and write a file for each; formats are taken in turn."""
    known = {ending.removeprefix(".") for ending in (ARCHIVE, *TABLES)}
    for name in formats:
        require(name in known, "split", "format", f"one of {', '.join(sorted(known))}", name)
    federation = load_federation(settings)
    data = federation.dataset
    single = data.task == "single-label"
    require(single, "split", "data", "of single-label records", settings.data)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, rows in enumerate(federation.rows):
        path = folder / f"party-{number}.{formats[number % len(formats)]}"
        write_labelled(path, data.x_train[rows], data.y_train[rows], data.classes)
        paths.append(path)
    public, test = folder / "public.npz", folder / "test.npz"
    write_labelled(public, data.x_public, data.y_public, data.classes)
    write_labelled(test, data.x_test, data.y_test, data.classes)
    classes = ",".join(data.classes)
    return Split(parties=tuple(paths), public=public, test=test, classes=classes)


@dataclass(frozen=True, kw_only=True)
class Member:
    """A party's folder, which could as well be on another machine."""

    folder: Path
    public_key: Path

    @property
    def node_config(self) -> Path:
        """The party's settings."""
        return self.folder / "node.toml"

    @property
    def key(self) -> Path:
        """The party's private key."""
        return self.folder / "node-key"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything that a deployment is made of, on disk."""

    folder: Path
    app: Path
    certificates: Certificates
    members: tuple[Member, ...]
    files: Mapping[str, Value]
    """The run's settings about files on the server."""

    @property
    def results(self) -> Path:
        """Folder that gets one folder of results a run."""
        return self.folder / "server" / "results"


def prepare(
    settings: Settings,
    folder: Path,
    *,
    formats: Sequence[str] = FORMATS,
    max_epsilon: float = 0.0,
) -> Prepared:
    """Write certificates, keys, data files and node-configs of a federation.

    Parameters
    ----------
    settings : Settings
        Which data are dealt to how many parties, and which models these have.
    folder : Path
        A new folder, or one that holds no federation yet.
    formats : sequence of str
        Of the parties' data files, taken in turn.
    max_epsilon : float
        Budget of every party; 0: it only keeps a record.
    """
    folder = folder.resolve()
    require(not (folder / "server").exists(), "prepare", "folder", "a new one", str(folder))
    server = folder / "server"
    certificates = make_certificates(server)
    split = write_split(settings, folder / "data", formats)
    public = shutil.copy(split.public, server)
    test = shutil.copy(split.test, server)
    members = []
    for number, data_file in enumerate(split.parties):
        home = folder / f"party-{number}"
        public_key = make_node_key(home / "node-key")
        own: dict[str, Value] = {
            keys.PARTITION_ID: number,
            "data-file": str(shutil.move(data_file, home / f"records{_ending(data_file)}")),
            "public-file": str(shutil.copy(split.public, home)),
            "classes": split.classes,
            "label": LABEL,
            "learner": settings.learner_names[number % len(settings.learner_names)],
            "state-dir": str(home / "state"),
            "max-epsilon": max_epsilon,
        }
        models = {key: settings.to_run_config()[key] for key in MODEL_SETTINGS}
        shutil.copy(certificates.authority, home)
        member = Member(folder=home, public_key=public_key)
        member.node_config.write_text(_toml({**own, **models}), encoding="utf-8")
        members.append(member)
    files = {"public-file": str(public), "test-file": str(test), "classes": split.classes}
    return Prepared(
        folder=folder, app=write_app(folder / "app"), certificates=certificates,
        members=tuple(members), files=files,
    )  # fmt: skip


class Deployment(SuperLink):
    """The processes of a federation; they live as long as the ``with`` block.

    Parameters
    ----------
    prepared : Prepared
    """

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(simulation=False)
        self.prepared = prepared
        self.process_groups: list[int] = []
        self._nodes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._start_superlink()
            for member in self.prepared.members:
                self._register(member)
            for member in self.prepared.members:
                self._start_member(member)
            self._wait_until_online()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with _uninterrupted():
            groups = _groups_below(self.process_groups)
            self._stack.close()
            _end_groups(groups)

    def run(self, settings: Settings, *, timeout: float | None = None) -> dict[str, Any]:
        """Run a strategy with `flwr run` and return the result that the server wrote."""
        config = {
            **{k: v for k, v in settings.to_run_config().items() if k not in SIMULATED},
            **self.prepared.files,
            "output-dir": str(self.prepared.results),
        }
        answer = self._flwr(
            "run", str(self.prepared.app), CONNECTION, "--format", "json",
            "--run-config", to_toml(config),
        )  # fmt: skip
        if not answer.get("success"):
            raise FlowerRunFailed(f"flwr run: the app must be accepted, got {answer}.")
        run_id = str(answer["run-id"])
        status = self._follow(run_id, timeout or settings.max_wait + settings.timeout)
        path = result_folder(str(self.prepared.results), run_id) / RESULT
        if status != "finished:completed" or not path.is_file():
            raise FlowerRunFailed(
                f"flwr run: the run must be finished:completed with a result, got {status}. "
                f"The logs are in {self.home}."
            )
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {"run-id": run_id, "folder": str(path.parent), **report}

    def _start_superlink(self) -> None:
        server, made = self.prepared.folder / "server", self.prepared.certificates
        self.home = server / "flower"
        self.home.mkdir(parents=True, exist_ok=True)
        self.environment = flower_environment(self.home)
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "{self.address}"\nroot-certificates = "{made.authority}"\n'
        )
        command = ["flower-superlink", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--ssl-ca-certfile", str(made.authority)]
        command += ["--ssl-certfile", str(made.server), "--ssl-keyfile", str(made.server_key)]
        command += ["--enable-supernode-auth", "--database", str(server / "superlink.db")]
        command += ["--disable-runtime-dependency-installation"]
        self._start(command, "superlink")
        self._wait_for_port()

    def _register(self, member: Member) -> None:
        key = str(member.public_key)
        answer = self._flwr("supernode", "register", key, CONNECTION, "--format", "json")
        if not answer.get("success"):
            raise FlowerRunFailed(f"flwr supernode register: must succeed, got {answer}.")

    def _start_member(self, member: Member) -> None:
        home = member.folder / "flower"
        home.mkdir(exist_ok=True)
        command = ["flower-supernode", "--superlink", self.address, "--port", str(free_port())]
        command += ["--root-certificates", str(member.folder / "ca.crt")]
        command += ["--auth-supernode-private-key", str(member.key)]
        command += ["--node-config", str(member.node_config)]
        log = self._stack.enter_context((member.folder / "supernode.log").open("w"))
        self._nodes.append(self._run(command, flower_environment(home), log))

    def _start(self, command: list[str], name: str) -> None:
        log = self._stack.enter_context((self.home / f"{name}.log").open("w"))
        self._run(command, self.environment, log)

    def _run(
        self, command: list[str], environment: Mapping[str, str], log: Any
    ) -> subprocess.Popen[bytes]:
        with _uninterrupted():
            process = self._stack.enter_context(
                running_process(command, environment, stdout=log)
            )
            self.process_groups.append(process.pid)
        return process

    def _wait_until_online(self) -> None:
        """Wait until the SuperLink knows all parties, which a run would wait for as well."""
        deadline, wanted = time.monotonic() + _ONLINE_SECONDS, len(self.prepared.members)
        while (online := self._num_online()) < wanted:
            for member, process in zip(self.prepared.members, self._nodes, strict=True):
                if process.poll() is not None:
                    tail = (member.folder / "supernode.log").read_text()[-500:]
                    raise FlowerRunFailed(
                        f"flower-supernode: {member.folder.name} must run, got its end: {tail}"
                    )
            if time.monotonic() > deadline:
                raise FlowerRunFailed(
                    f"flower-supernode: {wanted} parties must be online within "
                    f"{_ONLINE_SECONDS:.0f} seconds, got {online}."
                )
            time.sleep(_POLL_SECONDS)

    def _num_online(self) -> int:
        answer = self._flwr("supernode", "ls", CONNECTION, "--format", "json")
        return sum(node.get("status") == "online" for node in answer.get("nodes", []))


def _groups_below(leaders: Sequence[int]) -> set[int]:
    """Return the process groups of these processes and of all that they have started.

    Flower's SuperExec leads a group of its own, which a signal to its parent's misses.
    """
    command = ["ps", "-eo", "pid=,ppid=,pgid="]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [[int(number) for number in line.split()] for line in listing.splitlines()]
    family = set(leaders)
    while new := {pid for pid, parent, _ in rows if parent in family} - family:
        family |= new
    return {group for pid, _, group in rows if pid in family} - {os.getpgrp()}


def _end_groups(groups: set[int]) -> None:
    """End what is left of process groups: first politely, then for good."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _STOP_SECONDS
        left = {group for group in groups if _signal(group, number)}
        while left and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 10)
            left = {group for group in left if _signal(group, 0)}
        groups = left


def _signal(group: int, number: int) -> bool:
    """Send a signal, or with 0 none; return whether the group was there."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C and TERM back until the block ends, so that no process is lost in it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    # Not blocked by a mask, which the processes that are started here would inherit.
    before = [signal.signal(number, lambda got, _: held.append(got)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
    for got in held[:1]:
        signal.raise_signal(got)


def _ending(path: Path) -> str:
    return "".join(path.suffixes)


def _toml(settings: Mapping[str, Value]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
