"""A whole deployment on loopback: TLS, node authentication, and a folder for each member.

`prepare` writes what every member would have on its own machine, and `Deployment` starts
and stops their processes. The commands are those of docs/deployment.md.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, NamedTuple

from fl_strategies._util import replace_file
from fl_strategies.errors import StrategyError, require
from fl_strategies.wire import keys
from simulations.config import Settings, Value
from simulations.data.tables import TABLES
from simulations.deploy.client_app import MODEL_SETTINGS
from simulations.deploy.data import ARCHIVE, LABEL, write_labelled
from simulations.deploy.server_app import SIMULATED, result_folder, run_settings
from simulations.federation import load_federation
from simulations.results.page import RESULT
from simulations.results.run_folder import read_json, require_folder
from simulations.runtime.flower import (
    CONNECTION,
    Control,
    FlowerRunFailed,
    SuperLink,
    flower_environment,
    free_port,
)

_DAYS: Final = "365"
LOOPBACK: Final = "DNS:localhost,IP:127.0.0.1"


class CredentialsFailed(StrategyError, RuntimeError):
    """A certificate or key could not be made."""


class Certificates(NamedTuple):
    """Files of an own certificate authority and of the server that it vouches for."""

    authority: Path
    server: Path
    server_key: Path


def make_certificates(folder: Path, names: str = LOOPBACK) -> Certificates:
    """Make an own certificate authority and a server certificate for these names."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "server.ext").write_text(
        f"subjectAltName={names}\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n"
        "authorityKeyIdentifier=keyid\n"
    )
    new_key = ["-newkey", "rsa:2048", "-nodes"]
    authority = ["openssl", "req", "-x509", *new_key, "-days", _DAYS]
    authority += ["-subj", "/CN=federation CA"]
    authority += ["-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    _run([*authority, "-keyout", "ca.key", "-out", "ca.crt"], folder)
    request = ["openssl", "req", *new_key, "-subj", "/CN=superlink"]
    _run([*request, "-keyout", "server.key", "-out", "server.csr"], folder)
    signed = ["openssl", "x509", "-req", "-in", "server.csr", "-days", _DAYS]
    signed += ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "server.ext"]
    _run([*signed, "-out", "server.crt"], folder)
    return Certificates(folder / "ca.crt", folder / "server.crt", folder / "server.key")


def make_node_key(path: Path) -> Path:
    """Make the key pair of a party, `path` and `path`.pub; return the public one."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-C", ""]
    _run([*command, "-f", path.name], path.parent)
    return path.with_name(f"{path.name}.pub")


def _run(command: list[str], folder: Path) -> None:
    try:
        subprocess.run(
            command,
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise CredentialsFailed(
            f"{command[0]}: the command must be installed, got none."
        ) from error
    except subprocess.CalledProcessError as error:
        raise CredentialsFailed(
            f"{command[0]}: the command must end well, got {error.stderr.strip()[-300:]}"
        ) from error


_HEAD = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fl-strategies-deployment"
version = "{version}"
description = "Names the components of fl-strategies; the code is installed on each machine."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fl-strategies"

[tool.flwr.app.components]
serverapp = "simulations.deploy.server_app:app"
clientapp = "simulations.deploy.client_app:app"

[tool.flwr.app.config]
"""


def write_app(folder: Path) -> Path:
    """Write the app that `flwr run` submits: one file of settings, and no code.

    Every machine runs the components of the fl-strategies that is installed there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = [f"{key} = {json.dumps(value)}" for key, value in run_settings().items()]
    text = _HEAD.format(version=metadata.version("fl-strategies"))
    (folder / "pyproject.toml").write_text(text + "\n".join(settings) + "\n", encoding="utf-8")
    return folder


FORMATS: Final = ("npz", "csv", "parquet")
_POLL_SECONDS: Final = 0.5
_ONLINE_SECONDS: Final = 240.0
_ONLINE_SECONDS_A_PARTY: Final = 20.0
_YIELDING: Final = 5


@dataclass(frozen=True, kw_only=True)
class Split:
    """Files of one data set, dealt out: one per party, and those that others need."""

    parties: tuple[Path, ...]
    public: Path
    test: Path
    classes: str
    """The class list; empty where labels are numbers."""

    @property
    def labels(self) -> dict[str, Value]:
        """Settings of server and parties about labels."""
        return {"classes": self.classes} if self.classes else {"task": "numbers"}


def write_split(
    settings: Settings, folder: Path, formats: Sequence[str] = FORMATS[:1]
) -> Split:
    """Deal a data set to parties and write a file for each; formats are round-robin."""
    known = {ending.removeprefix(".") for ending in (ARCHIVE, *TABLES)}
    for name in formats:
        require(name in known, "split", "format", f"one of {', '.join(sorted(known))}", name)
    federation = load_federation(settings)
    data = federation.dataset
    given, rule = settings.encoder, "omitted: parties get what data sets hold, not encoded rows"
    require(not given, "split", "encoder", rule, given)
    given, rule = settings.schema, "omitted: parties have tables of their own to read by it"
    require(not given, "split", "schema", rule, given)
    single = data.task != "multi-label"
    require(single, "split", "data", "of single-label records or numbers", settings.data)
    require_folder("split", "folder", folder, "Name another one")
    paths = []
    for number, rows in enumerate(federation.rows):
        path = folder / f"party-{number}.{formats[number % len(formats)]}"
        write_labelled(path, data.x_train[rows], data.y_train[rows], data.classes)
        paths.append(path)
    public, test = folder / "public.npz", folder / "test.npz"
    write_labelled(public, data.x_public, data.y_public, data.classes)
    write_labelled(test, data.x_test, data.y_test, data.classes)
    classes = "" if data.task == "regression" else ",".join(data.classes)
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

    @property
    def log(self) -> Path:
        """Output of its SuperNode."""
        return self.folder / "supernode.log"

    @property
    def state(self) -> Path:
        """Folder of its journal, unless its settings name another one."""
        return self.folder / "state"


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
    def members_file(self) -> Path:
        """Node ids of the parties; written when their keys are registered."""
        return self.folder / "server" / "members.toml"

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
    names: str = LOOPBACK,
) -> Prepared:
    """Write certificates, keys, data files and node-configs of a federation.

    Parameters
    ----------
    settings : Settings
        Which data are dealt to how many parties, and which models these have.
    folder : Path
        A new folder, or one that holds no federation yet.
    formats : sequence of str
        Of the parties' data files, round-robin.
    max_epsilon : float
        Budget of every party; 0: it only keeps a record, and its policy allows releases
        without noise, which are public data here.
    names : str
        Of the server, in its certificate (``subjectAltName``).
    """
    folder = folder.resolve()
    require(not (folder / "server").exists(), "prepare", "folder", "a new one", str(folder))
    require_folder("prepare", "folder", folder, "Name another one: --work FOLDER")
    server = folder / "server"
    certificates = make_certificates(server, names)
    split = write_split(settings, folder / "data", formats)
    federation = load_federation(settings)
    models = federation.learner_names
    public = shutil.copy(split.public, server)
    test = shutil.copy(split.test, server)
    members = []
    for number, data_file in enumerate(split.parties):
        home, ending = folder / f"party-{number}", "".join(data_file.suffixes)
        member = Member(folder=home, public_key=make_node_key(home / "node-key"))
        own: dict[str, Value] = {
            keys.PARTITION_ID: number,
            "data-file": str(shutil.move(data_file, home / f"records{ending}")),
            "public-file": str(shutil.copy(split.public, home)),
            **split.labels,
            "label": LABEL,
            "learner": models[number % len(models)],
            "receives": ", ".join(sorted({*models, federation.final_learner})),
            "state-dir": str(member.state),
            "max-epsilon": max_epsilon,
            "allow-unprotected": not max_epsilon,
            "allow-models": not max_epsilon,
        }
        tuned = {key: settings.to_config()[key] for key in MODEL_SETTINGS}
        shutil.copy(certificates.authority, home)
        replace_file(member.node_config, _toml({**own, **tuned}).encode())
        members.append(member)
    files = {"public-file": str(public), "test-file": str(test), **split.labels}
    return Prepared(
        folder=folder,
        app=write_app(folder / "app"),
        certificates=certificates,
        members=tuple(members),
        files=files,
    )


class Deployment(SuperLink):
    """The processes of a federation; they live as long as the ``with`` block.

    Parameters
    ----------
    prepared : Prepared
    """

    node_ids: tuple[int, ...] = ()
    """Flower's name of each party, by which results say who was excluded."""
    superlink = (sys.executable, "-m", "simulations.deploy.superlink")
    """Flower's, but it loses no reply."""

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(simulation=False)
        self.prepared = prepared
        self.control = Control(self.address, prepared.certificates.authority)
        self._superlink: subprocess.Popen[bytes]
        self._members: dict[int, subprocess.Popen[bytes]] = {}

    def run(
        self, settings: Settings, *, timeout: float | None = None, show_log: bool = False
    ) -> dict[str, Any]:
        """Run a strategy with `flwr run` and return the result that the server wrote."""
        limit = timeout or settings.longest_run
        return self.finish(self.submit(settings), limit, show_log=show_log)

    def finish(self, run_id: str, timeout: float, *, show_log: bool = False) -> dict[str, Any]:
        """Wait for the end of a run and return its result; raise if it has none."""
        status = self.wait_for_run(run_id, timeout, show_log=show_log)
        if not status.completed:
            raise FlowerRunFailed(
                f"flwr run: the run must be finished:completed with a result, got {status}. "
                f"The logs are in {self.home}."
            )
        return self.result(run_id)

    def submit(self, settings: Settings) -> str:
        """Submit a run, do not wait for it, and return its number."""
        own = {k: v for k, v in settings.to_run_config().items() if k not in SIMULATED}
        files = {
            **self.prepared.files,
            "output-dir": str(self.prepared.results),
            "members-file": str(self.prepared.members_file),
        }
        return self._submit(self.prepared.app, {**own, **files})

    def result(self, run_id: str) -> dict[str, Any]:
        """Return what the server wrote about a run that has ended."""
        path = result_folder(str(self.prepared.results), run_id) / RESULT
        if not path.is_file():
            raise FlowerRunFailed(f"flwr run: run {run_id} must have a result, got none.")
        return {"run-id": run_id, "folder": str(path.parent), **read_json("deploy", path)}

    def start_member(self, number: int) -> None:
        """Start a party's SuperNode; it has its folder, its key and so its identity."""
        member = self.prepared.members[number]
        home = member.folder / "flower"
        home.mkdir(exist_ok=True)
        command = [*self.inside(number), "flower-supernode"]
        command += ["--superlink", self.address_for(number)]
        command += ["--port", str(free_port())]
        command += ["--root-certificates", str(member.folder / "ca.crt")]
        command += ["--auth-supernode-private-key", str(member.key)]
        command += ["--node-config", str(member.node_config)]
        environment = flower_environment(home)
        # Code of its own, which a learner `module:function` names, may be in its folder.
        paths = [str(member.folder), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        process = self._members[number] = self._start(command, environment, member.log)
        # On one machine, parties at work must not keep the SuperLink from answering in time.
        with suppress(ProcessLookupError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, process.pid, own + _YIELDING)
        self._nodes.append(process)

    def inside(self, number: int) -> tuple[str, ...]:  # noqa: ARG002 - all alike here
        """Return a command that starts others where a party is: on this machine, none."""
        return ()

    def address_for(self, number: int) -> str:  # noqa: ARG002 - the same for all here
        """Return the address at which a party reaches the SuperLink."""
        return self.address

    def start_superlink(self) -> None:
        """Start the SuperLink, or start it again with all that its database holds."""
        server, made = self.prepared.folder / "server", self.prepared.certificates
        security = ["--ssl-ca-certfile", str(made.authority), "--enable-supernode-auth"]
        security += ["--ssl-certfile", str(made.server), "--ssl-keyfile", str(made.server_key)]
        # In a file, so that it can be started again.
        database = ["--database", str(server / "superlink.db")]
        self._superlink = self._start_superlink(*security, *database)

    def wait_until_online(self) -> None:
        """Wait until all parties are known to the SuperLink."""
        wanted = len(self.prepared.members)
        patience = max(_ONLINE_SECONDS, wanted * _ONLINE_SECONDS_A_PARTY)
        deadline = time.monotonic() + patience
        while (online := self.control.num_online()) != wanted:
            for number, process in self._members.items():
                if process.poll() is not None:
                    member = self.prepared.members[number]
                    raise FlowerRunFailed(
                        f"flower-supernode: {member.folder.name} must run, got its end: "
                        f"{member.log.read_text()[-500:]}"
                    )
            if time.monotonic() > deadline:
                raise FlowerRunFailed(
                    f"flower-supernode: {wanted} parties must be online within "
                    f"{patience:.0f} seconds, got {online}."
                )
            time.sleep(_POLL_SECONDS)

    def _open(self) -> None:
        authority = self.prepared.certificates.authority
        self._settle(
            self.prepared.folder / "server" / "flower", f'root-certificates = "{authority}"'
        )
        self.start_superlink()
        with ThreadPoolExecutor(os.cpu_count()) as workers:
            self.node_ids = tuple(workers.map(self._register, self.prepared.members))
        numbered = {str(number): node for number, node in enumerate(self.node_ids)}
        replace_file(self.prepared.members_file, _toml(numbered).encode())
        for number in range(len(self.prepared.members)):
            self.start_member(number)
        self.wait_until_online()

    def _register(self, member: Member) -> int:
        key = str(member.public_key)
        answer = self._flwr("supernode", "register", key, CONNECTION, "--format", "json")
        return int(answer["node-id"])


def _toml(settings: Mapping[str, Value]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
