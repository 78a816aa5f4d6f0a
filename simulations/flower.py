"""Real Flower processes on this machine, started and stopped by their process ids.

`SuperLink` is a context manager around `flower-superlink`, with its own home folder and
port, so that it neither meets nor leaves behind another Flower. In it, `run_app` submits
an app with `flwr run` and waits for its end, because the exit code of `flwr run` does not
tell how the run ended.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

from fl_strategies.exceptions import StrategyError, require
from simulations.config import Settings, Value
from simulations.report import Report

APP_FOLDER = Path(__file__).resolve().parent.parent
CONNECTION = "here"
_POLL_SECONDS = 1.0
_START_SECONDS = 90.0
_STOP_SECONDS = 15.0


class FlowerRunFailed(StrategyError, RuntimeError):
    """A run or a process of Flower did not end well."""


class SuperLink:
    """A SuperLink on loopback that lives as long as its ``with`` block.

    Parameters
    ----------
    simulation : bool
        Run parties in Flower's simulation engine instead of on SuperNodes.
    """

    def __init__(self, *, simulation: bool) -> None:
        self.simulation = simulation
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            self.home = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            self.environment = flower_environment(self.home)
            (self.home / "config.toml").write_text(
                f'[superlink]\ndefault = "{CONNECTION}"\n\n'
                f'[superlink.{CONNECTION}]\naddress = "{self.address}"\ninsecure = true\n'
            )
            command = ["flower-superlink", "--insecure", "--host", "127.0.0.1"]
            command += ["--port", str(self.port), "--disable-runtime-dependency-installation"]
            command += ["--simulation"] if self.simulation else []
            self._start(command, "superlink")
            self._wait_for_port()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start_supernode(self, node_config: Mapping[str, Value]) -> None:
        """Start one party as a process of its own."""
        settings = " ".join(f"{key}={json.dumps(value)}" for key, value in node_config.items())
        command = ["flower-supernode", "--insecure", "--superlink", self.address]
        command += ["--port", str(free_port()), "--node-config", settings]
        self._start(command, f"supernode-{node_config.get('partition-id', 'x')}")

    def run_app(
        self,
        run_config: Mapping[str, Value],
        *,
        num_supernodes: int | None = None,
        timeout: float = 3600.0,
    ) -> str:
        """Submit the app of this checkout, show its log, and return its final status.

        The status is Flower's, for example ``finished:completed``.
        """
        command = ["run", str(APP_FOLDER), CONNECTION, "--format", "json"]
        command += ["--run-config", to_toml(run_config)]
        if num_supernodes is not None:
            resources = f"num-supernodes={num_supernodes} client-resources-num-cpus=1"
            command += ["--federation-config", resources]
        answer = self._flwr(*command)
        if not answer.get("success"):
            raise FlowerRunFailed(f"flwr run: the app must be accepted, got {answer}.")
        return self._follow(str(answer["run-id"]), timeout)

    def _follow(self, run_id: str, timeout: float) -> str:
        follow = ["flwr", "log", run_id, CONNECTION, "--stream"]
        deadline = time.monotonic() + timeout
        with running_process(follow, self.environment, stdout=sys.stderr):
            while time.monotonic() < deadline:
                runs = self._flwr("list", CONNECTION, "--run-id", run_id, "--format", "json")
                status = str(runs["runs"][0]["status"])
                if status.startswith("finished"):
                    return status
                time.sleep(_POLL_SECONDS)
        raise FlowerRunFailed(f"flwr run: the run must end within {timeout} seconds, got none.")

    def _flwr(self, *arguments: str) -> dict[str, Any]:
        done = subprocess.run(
            ["flwr", *arguments],
            env=self.environment, cwd="/", capture_output=True, text=True, check=False,
        )  # fmt: skip
        try:
            answer: dict[str, Any] = json.loads(done.stdout)
        except json.JSONDecodeError as error:
            raise FlowerRunFailed(
                f"flwr {arguments[0]}: the answer must be JSON, got exit code "
                f"{done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}"
            ) from error
        return answer

    def _start(self, command: list[str], name: str) -> None:
        log = self._stack.enter_context((self.home / f"{name}.log").open("w"))
        self._stack.enter_context(running_process(command, self.environment, stdout=log))

    def _wait_for_port(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(_POLL_SECONDS / 5)
        log = (self.home / "superlink.log").read_text()[-500:]
        raise FlowerRunFailed(f"flower-superlink: it must listen on {self.address}, got: {log}")


@contextmanager
def running_process(
    command: list[str], environment: Mapping[str, str], *, stdout: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command with everything it starts; end all of it when the block ends.

    The working folder is the root: Ray's workers import the app from the SuperLink's
    working folder, if that happens to hold packages of the same names.
    """
    process = subprocess.Popen(
        command, env=environment, cwd="/", stdout=stdout, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        _signal_group(process, signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            _signal_group(process, signal.SIGKILL)
            process.wait()
        _signal_group(process, signal.SIGKILL)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


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


def run_with_flower(settings: Settings) -> Report:
    """Run the app with `flwr run` on Flower's simulation engine and return its report."""
    require(
        (APP_FOLDER / "pyproject.toml").exists(),
        "flower", "the app folder", "a checkout with pyproject.toml", str(APP_FOLDER),
    )  # fmt: skip
    with SuperLink(simulation=True) as superlink:
        return run_and_read(superlink, settings, num_supernodes=settings.num_parties)


def _absolute(settings: Settings) -> dict[str, Value]:
    """Return the paths to data as Flower's processes, which run elsewhere, find them."""
    paths = {"data": settings.data, "data-dir": settings.data_dir}
    return {key: str(Path(p).resolve()) for key, p in paths.items() if p and Path(p).exists()}


def run_and_read(
    superlink: SuperLink, settings: Settings, *, num_supernodes: int | None = None
) -> Report:
    """Run the app and read the report that its server wrote."""
    output = Path(settings.output_dir).resolve()
    before = set(output.glob("*/result.json"))
    config = {**settings.to_run_config(), "output-dir": str(output), **_absolute(settings)}
    status = superlink.run_app(
        config, num_supernodes=num_supernodes, timeout=settings.max_wait + settings.timeout
    )
    new = sorted(set(output.glob("*/result.json")) - before)
    if status != "finished:completed" or not new:
        raise FlowerRunFailed(
            f"flwr run: the run must be finished:completed with a result, got {status}. "
            "The log above says why."
        )
    report: Report = json.loads(new[-1].read_text(encoding="utf-8"))
    return report
