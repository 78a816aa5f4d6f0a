"""Ray's cluster of two nodes, which could be two machines, on loopback."""

import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

from simulations.runtime.flower import FlowerRunFailed, flower_environment, free_port
from simulations.runtime.processes import Processes, _family
from tests.leftovers import command_line

NUM_NODES: Final = 2
_ACTOR: Final = "ray::ClientAppActor"
_PATIENCE_SECONDS: Final = 600.0
_POLL_SECONDS: Final = 1.0
RAY: Final = str(Path(sysconfig.get_path("scripts")) / "ray")


class RayCluster:
    """A head and another node with a processor each; they live as long as the ``with`` block.

    Attributes
    ----------
    address : str
        What a driver gets as ``RAY_ADDRESS``.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.processes = Processes()
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._seen: list[set[int]] = [set() for _ in range(NUM_NODES)]
        self._done = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            # Ray writes down the newest cluster, which drivers without an address then join.
            environment = {**flower_environment(folder), "RAY_TMPDIR": str(folder)}
            del environment["RAY_ADDRESS"]
            same = ["--num-cpus", "1", "--node-ip-address", "127.0.0.1", "--block"]
            head = ["--head", "--port", str(self.port), "--include-dashboard", "false"]
            self._start([*head, *same], environment, folder / "head.log")
            self._wait_for_nodes(1, environment)
            self._start(["--address", self.address, *same], environment, folder / "other.log")
            self._wait_for_nodes(NUM_NODES, environment)
            self._watch.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.processes.end()
        self._stack.close()

    def workers_seen(self) -> tuple[int, ...]:
        """Return how many of Flower's workers each node has had so far."""
        return tuple(map(len, self._seen))

    def _start(self, words: list[str], environment: Mapping[str, str], log: Path) -> None:
        with log.open("wb") as output:
            node = self.processes.start([RAY, "start", *words], environment, output)
        self._nodes.append(node)

    def _wait_for_nodes(self, wanted: int, environment: Mapping[str, str]) -> None:
        """Ask Ray itself, in a process of its own, until so many nodes are alive."""
        code = (
            "import ray, time\n"
            f"ray.init(address='{self.address}', log_to_driver=False)\n"
            f"while sum(node['Alive'] for node in ray.nodes()) < {wanted}: time.sleep(0.5)\n"
        )
        command = [str(Path(RAY).with_name("python")), "-c", code]
        deadline = _PATIENCE_SECONDS
        while subprocess.run(
            command, env=dict(environment), capture_output=True, timeout=deadline, check=False
        ).returncode:
            if any(node.poll() is not None for node in self._nodes):
                raise FlowerRunFailed("ray start: a node must live, got its end.")

    def _look(self) -> None:
        while not self._done.wait(_POLL_SECONDS):
            for node, seen in zip(self._nodes, self._seen, strict=True):
                seen |= {pid for pid in _family([node]) if _ACTOR in command_line(pid)}
