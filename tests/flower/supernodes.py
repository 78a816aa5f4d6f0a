"""A SuperLink without keys, and SuperNodes that anybody may start."""

from collections.abc import Mapping

from simulations.config import Value
from simulations.runtime.flower import SuperLink, free_port, to_toml


class OpenSuperLink(SuperLink):
    """A SuperLink on loopback with parties as processes of their own."""

    def __init__(self) -> None:
        super().__init__(simulation=False)

    def start_supernode(self, node_config: Mapping[str, Value]) -> None:
        """Start one party as a process of its own."""
        command = ["flower-supernode", "--insecure", "--superlink", self.address]
        command += ["--port", str(free_port()), "--node-config", to_toml(node_config)]
        log = self.home / f"supernode-{node_config['partition-id']}.log"
        self._nodes.append(self._start(command, self.environment, log))
