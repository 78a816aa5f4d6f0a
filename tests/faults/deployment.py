"""A deployed federation whose processes come and go, as they do on machines of their own."""

import signal
import subprocess
import time
import tomllib
from collections.abc import Mapping

import httpx
from flwr.proto.control_pb2 import ListNodesRequest

from fl_strategies._util import replace_file
from simulations.config import Value
from simulations.deploy.federation import Deployment, Member, _toml
from simulations.runtime.flower import FlowerRunFailed
from simulations.runtime.processes import _family, _wait_for, send_signal
from tests.leftovers import command_line

_POLL_SECONDS = 0.5
_ONLINE_SECONDS = 240.0


def configure(member: Member, changes: Mapping[str, Value]) -> None:
    """Change a party's settings; a SuperNode reads them when it starts."""
    settings = tomllib.loads(member.node_config.read_text(encoding="utf-8"))
    replace_file(member.node_config, _toml({**settings, **changes}).encode())


class FaultyDeployment(Deployment):
    """A deployment whose members can be stopped, killed and brought back."""

    def member(self, number: int) -> Member:
        """Return the folder of a party."""
        return self.prepared.members[number]

    def stop_member(self, number: int) -> None:
        """End a SuperNode as its owner would; it takes leave of the SuperLink."""
        self.processes.end([self._members[number]])

    def kill_member(self, number: int) -> None:
        """Kill a SuperNode and all that it started, as if its machine had lost power."""
        self._kill(self._members[number])

    def bring_back(self, number: int) -> None:
        """Start a SuperNode again until the SuperLink accepts it.

        A SuperLink refuses the key of a killed SuperNode until it has noticed its end.
        """
        node, deadline = self.node_ids[number], time.monotonic() + _ONLINE_SECONDS
        _, before = self._connection(node)
        while time.monotonic() < deadline:
            if self._members[number].poll() is not None:
                self.start_member(number)
            online, since = self._connection(node)
            if online and since != before:
                return
            time.sleep(_POLL_SECONDS)
        raise FlowerRunFailed(
            f"flower-supernode: party {number} must come back within {_ONLINE_SECONDS:.0f} "
            f"seconds, got: {self.prepared.members[number].log.read_text()[-500:]}"
        )

    def kill_superlink(self) -> None:
        """Kill the SuperLink and what it started: its runs end with it."""
        self._kill(self._superlink)

    def kill_server_app(self) -> None:
        """Kill the processes in which strategies run, and nothing else."""
        for pid in self.processes.living():
            if "flwr-serverapp" in command_line(pid):
                send_signal(pid, signal.SIGKILL)

    def _connection(self, node: int) -> tuple[bool, str]:
        """Return whether a node is online, and when it last connected."""
        try:
            with self.control._client() as client:
                nodes = client.ListNodes(ListNodesRequest()).nodes_info
        except httpx.HTTPError:
            return False, ""
        found = {each.node_id: each for each in nodes}[node]
        return found.status == "online", found.last_activated_at

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        family = _family([process])
        self.processes._signal_all(family, signal.SIGKILL, all_of_them=False)
        _wait_for([process])
