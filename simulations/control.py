"""What `flwr list`, `flwr log` and `flwr supernode ls` tell, asked of a SuperLink directly.

Each call of Flower's command line starts a Python of its own, which takes seconds; who waits
for a run asks often. Flower does not publish this client, so nothing else uses it, and it is
imported where it is used.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import httpx

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient

UNKNOWN: Final = "unknown"


class RunStatus(NamedTuple):
    """How a run stands, in Flower's words, such as ``finished:failed`` and the reason."""

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
    """Questions to a SuperLink.

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
