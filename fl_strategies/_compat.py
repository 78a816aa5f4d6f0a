"""The one place of this package that touches names which Flower does not publish.

They are imported where they are used: if another Flower lacks one, what needs it fails, and
not every import of this package.
"""

import functools
import logging
import secrets
from typing import TYPE_CHECKING, Final

import flwr
import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

if TYPE_CHECKING:
    from flwr.supercore.run import Run as Run

logger = logging.getLogger("flwr.fl_strategies")

TESTED_FLOWER: Final = ("1.41", "1.42")
"""Releases of Flower that all tests pass with, oldest first."""

TRANSPORT_ERRORS = (OSError, httpx.HTTPError)
"""Errors of Flower's grid if the SuperLink cannot be reached."""


def warn_of_untested_flower() -> None:
    """Log once per process if the installed Flower is none of `TESTED_FLOWER`."""
    _warn_of(flwr.__version__)


@functools.cache
def _warn_of(version: str) -> None:
    if ".".join(version.split(".")[:2]) not in TESTED_FLOWER:
        logger.warning(
            "fl-strategies is tested with flwr %s, got %s, in which names it needs may have "
            "moved. If something fails, install one of these.",
            " and ".join(TESTED_FLOWER),
            version,
        )


def is_temporary(error: Exception) -> bool:
    """Return whether the SuperLink was reached and could not answer, as when it is busy."""
    return (
        isinstance(error, httpx.HTTPStatusError)
        and error.response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR
    )


def is_flowers_own(grid: Grid) -> bool:
    """Return whether a grid is one of Flower's, of the simulation or of a deployment."""
    return type(grid).__module__.partition(".")[0] == "flwr"


def claim_task_identity() -> int:
    """Let this process create messages outside a Flower run, and return a run id.

    From flwr 1.38 on, `Message(...)` raises outside a process that Flower itself started.
    The in-process runner and the tests are such processes.
    """
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id = secrets.randbits(62) + 1
    TaskIdentity.node_id = 1
    TaskIdentity.task_id = 1
    return TaskIdentity.run_id


def empty_run(run_id: int) -> "Run":
    """Return Flower's description of a run of which nothing but its id is known."""
    from flwr.supercore.run import Run

    return Run.create_empty(run_id)


def assign_message_id(message: Message) -> str:
    """Give a message the id that Flower's own transport would give it."""
    message.metadata.__dict__["_message_id"] = message.object_id
    return message.object_id


def message_to_bytes(message: Message) -> bytes:
    """Encode a message as Flower does for the wire."""
    from flwr.common.serde import message_to_proto

    return bytes(message_to_proto(message).SerializeToString())


def message_from_bytes(data: bytes) -> Message:
    """Decode a message as Flower does from the wire."""
    from flwr.common.serde import message_from_proto
    from flwr.proto.message_pb2 import Message as ProtoMessage

    return message_from_proto(ProtoMessage.FromString(data))


def records_to_bytes(records: RecordDict) -> bytes:
    """Encode records, for example a node's state."""
    from flwr.common.serde import recorddict_to_proto

    return bytes(recorddict_to_proto(records).SerializeToString())


def records_from_bytes(data: bytes) -> RecordDict:
    """Undo `records_to_bytes`."""
    from flwr.common.serde import recorddict_from_proto
    from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict

    return recorddict_from_proto(ProtoRecordDict.FromString(data))
