"""Real Flower processes on this machine, started and stopped by their process ids.

`SuperLink` is a context manager around `flower-superlink`, with its own home folder and
port, so that it neither meets nor leaves behind another Flower. In it, `run_app` submits
an app with `flwr run` and waits for its end, because the exit code of `flwr run` does not
show how the run ended.
"""

import json
import os
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import httpx

from fl_strategies._util import open_private
from fl_strategies.errors import StrategyError, require
from simulations.config import Settings, Value
from simulations.results.report import Report
from simulations.results.run_folder import read_json
from simulations.runtime.processes import Processes, terminable, uninterrupted

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient

UNKNOWN: Final = "unknown"


class RunStatus(NamedTuple):
    """Status of a run in Flower's words, such as ``finished:failed`` and the reason."""

    status: str
    details: str = ""

    @property
    def finished(self) -> bool:
        """Whether the run has ended, well or not."""
        return self.status.startswith("finished")

    @property
    def completed(self) -> bool:
        """Whether the server's part of the run ended well."""
        return self.status == "finished:completed"

    def __str__(self) -> str:
        """Return both in one line."""
        return f"{self.status} ({self.details})" if self.details else self.status


class Control:
    """Answers of `flwr list`, `flwr log` and `flwr supernode ls`, from a SuperLink directly.

    Each call of Flower's command line starts a Python of its own, which takes seconds, and who
    waits for a run asks often. Flower does not publish this client, so nothing else uses it,
    and it is imported where it is used.

    Parameters
    ----------
    address : str
        Host and port.
    authority : Path, optional
        Certificate of the authority that vouches for it; without, nothing is encrypted.
    """

    def __init__(self, address: str, authority: Path | None = None) -> None:
        self._address, self._authority = address, authority

    def status(self, run_id: str) -> RunStatus:
        """Return how a run stands; `UNKNOWN` if the SuperLink does not answer."""
        from flwr.proto.control_pb2 import ListRunsRequest

        try:
            with self._client() as client:
                answer = client.ListRuns(ListRunsRequest(run_id=int(run_id)))
        except httpx.HTTPError as error:
            return RunStatus(UNKNOWN, type(error).__name__)
        status = answer.run_dict[int(run_id)].status
        words = [status.status, status.sub_status]
        return RunStatus(":".join(filter(None, words)), status.details)

    def log(self, run_id: str) -> str:
        """Return what the server's part of a run has logged so far."""
        from flwr.proto.control_pb2 import StreamLogsRequest

        with self._client() as client:
            request = StreamLogsRequest(run_id=int(run_id), after_timestamp=0.0)
            return next((part.log_output for part in client.StreamLogs(request)), "")

    def num_online(self) -> int:
        """Return how many SuperNodes are online; none if the SuperLink does not answer."""
        from flwr.proto.control_pb2 import ListNodesRequest

        try:
            with self._client() as client:
                nodes = client.ListNodes(ListNodesRequest()).nodes_info
        except httpx.HTTPError:
            return 0
        return sum(node.status == "online" for node in nodes)

    def _client(self) -> "ControlHttpClient":
        from flwr.supercore.control import ControlHttpClient

        certificate = None if self._authority is None else self._authority.read_bytes()
        return ControlHttpClient.from_server_address(
            self._address, self._authority is None, certificate, interceptors=()
        )


APP_FOLDER = Path(__file__).resolve().parents[2]
CONNECTION = "here"
_POLL_SECONDS = 0.5
_START_SECONDS = 90.0
_LOG_SECONDS = 5.0


class FlowerRunFailed(StrategyError, RuntimeError):
    """A run or a process of Flower did not end well."""


class SuperLink:
    """A SuperLink on loopback that lives as long as its ``with`` block.

    However the block is left, by an exception, Ctrl-C or a TERM, everything that it has
    started is ended.

    Parameters
    ----------
    simulation : bool
        Run parties in Flower's simulation engine instead of on SuperNodes.
    """

    home: Path
    environment: dict[str, str]
    superlink: tuple[str, ...] = ("flower-superlink",)
    """The command that starts it."""
    host = "127.0.0.1"
    """Address of this machine at which it is reached; loopback unless a subclass says more."""

    def __init__(self, *, simulation: bool) -> None:
        self.simulation = simulation
        self.port = free_port()
        self.address = f"{self.host}:{self.port}"
        self.processes = Processes()
        self.control = Control(self.address)
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._stack.enter_context(terminable())
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with uninterrupted():
            # While their SuperLink is there, SuperNodes take leave of it quickly.
            self.processes.end(self._nodes)
            self.processes.end()
        self._stack.close()

    def run_app(
        self,
        run_config: Mapping[str, Value],
        *,
        num_supernodes: int | None = None,
        timeout: float = 3600.0,
        app: Path = APP_FOLDER,
        show_log: bool = True,
    ) -> RunStatus:
        """Submit an app, by default this checkout's, and wait for its end.

        Without `show_log`, its log is shown if it does not end well.
        """
        run_id = self._submit(app, run_config, num_supernodes=num_supernodes)
        status = self.wait_for_run(run_id, timeout, show_log=show_log)
        if not show_log and not status.completed:
            sys.stderr.write(self.control.log(run_id))
        return status

    def wait_for_run(self, run_id: str, timeout: float, *, show_log: bool = False) -> RunStatus:
        """Wait until a run has ended, for at most `timeout` seconds, and return how."""
        deadline = time.monotonic() + timeout
        follow = ["flwr", "log", run_id, CONNECTION, "--stream"]
        log = self.processes.start(follow, self.environment, sys.stderr) if show_log else None
        try:
            while time.monotonic() < deadline:
                status = self.control.status(run_id)
                if status.finished:
                    return status
                time.sleep(_POLL_SECONDS)
        finally:
            if log is not None:
                with suppress(subprocess.TimeoutExpired):
                    log.wait(_LOG_SECONDS)  # its last lines
                self.processes.end([log])
        raise FlowerRunFailed(
            f"flwr run: run {run_id} must end within {timeout:.0f} seconds, got {status}."
        )

    def _open(self) -> None:
        self._settle(Path(self._stack.enter_context(tempfile.TemporaryDirectory())))
        self._start_superlink("--insecure", *(["--simulation"] if self.simulation else []))

    def _settle(self, home: Path, security: str = "insecure = true") -> None:
        """Give Flower's commands a home, with the connection to this SuperLink."""
        home.mkdir(parents=True, exist_ok=True)
        self.home, self.environment = home, flower_environment(home)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n'
            f'[superlink.{CONNECTION}]\naddress = "{self.address}"\n{security}\n'
        )

    def _start_superlink(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [*self.superlink, "--host", self.host, "--port", str(self.port)]
        command += ["--disable-runtime-dependency-installation", *arguments]
        log = self.home / "superlink.log"
        process = self._start(command, self.environment, log)
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex((self.host, self.port)) == 0:
                    return process
            time.sleep(_POLL_SECONDS / 5)
        raise FlowerRunFailed(
            f"flower-superlink: it must listen on {self.address}, got: {log.read_text()[-500:]}"
        )

    def _start(
        self, command: list[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        with open_private(log) as output:
            return self.processes.start(command, environment, output)

    def _submit(
        self, app: Path, run_config: Mapping[str, Value], *, num_supernodes: int | None = None
    ) -> str:
        """Submit an app and return the number of its run."""
        command = ["run", str(app), CONNECTION, "--format", "json"]
        command += ["--run-config", to_toml(run_config)]
        if num_supernodes is not None:
            resources = f"num-supernodes={num_supernodes} client-resources-num-cpus=1"
            command += ["--federation-config", resources]
        return str(self._flwr(*command)["run-id"])

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        """Return the answer of Flower's command line; raise unless it succeeds."""
        done = subprocess.run(
            ["flwr", *arguments],
            env=self.environment,
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except json.JSONDecodeError as error:
            raise FlowerRunFailed(
                f"flwr {arguments[0]}: the answer must be JSON, got exit code "
                f"{done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}"
            ) from error
        if not answer.get("success"):
            raise FlowerRunFailed(f"flwr {arguments[0]}: it must succeed, got {answer}.")
        return answer


def flower_environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's commands: own home, no telemetry, no installs."""
    scripts = sysconfig.get_path("scripts")
    return {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        # Parties share the cores already; more threads each would slow all of them.
        "OMP_NUM_THREADS": "1",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Otherwise Ray joins the cluster that was last started here, whose ever that is.
        "RAY_ADDRESS": os.environ.get("RAY_ADDRESS", "local"),
    }


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def to_toml(run_config: Mapping[str, Value]) -> str:
    """Return settings as `flwr run --run-config` takes them.

    Examples
    --------
    >>> to_toml({"data": "digits", "solo": True, "beta": 0.5})
    'data="digits" solo=true beta=0.5'
    """
    return " ".join(f"{key}={json.dumps(value)}" for key, value in run_config.items())


def run_with_flower(settings: Settings, *, show_log: bool = True) -> tuple[Report, Path]:
    """Run the app with `flwr run` on Flower's simulation engine; return report and folder."""
    found = (APP_FOLDER / "pyproject.toml").exists()
    rule = "a checkout with pyproject.toml"
    require(found, "flower", "the app folder", rule, str(APP_FOLDER))
    with SuperLink(simulation=True) as superlink:
        return run_and_read(
            superlink, settings, num_supernodes=settings.num_parties, show_log=show_log
        )


def run_and_read(
    superlink: SuperLink,
    settings: Settings,
    *,
    num_supernodes: int | None = None,
    show_log: bool = True,
) -> tuple[Report, Path]:
    """Run the app; return the report that its server wrote, and the folder."""
    output = Path(settings.output_dir).resolve()
    before = set(output.glob("*/result.json"))
    config = {**settings.to_run_config(), "output-dir": str(output)}
    # Flower's processes run elsewhere.
    for key, path in (("data", settings.data), ("data-dir", settings.data_dir)):
        if path and Path(path).exists():
            config[key] = str(Path(path).resolve())
    status = superlink.run_app(
        config, num_supernodes=num_supernodes, timeout=settings.longest_run, show_log=show_log
    )
    new = sorted(set(output.glob("*/result.json")) - before)
    if not status.completed or not new:
        raise FlowerRunFailed(
            f"flwr run: the run must be finished:completed with a result, got {status}. "
            "The log above says why."
        )
    return read_json("flwr run", new[-1]), new[-1].parent
