"""Copied to ``sitecustomize.py`` in a party's folder: its SuperNode posts each reply twice."""

import threading
from pathlib import Path

from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import PushObjectRequest, PushObjectResponse
from flwr.supernode.fleet_http_client import FleetHttpClient

_push_message, _push_object = FleetHttpClient.PushMessages, FleetHttpClient.PushObject
_replies: dict[str, PushMessagesRequest] = {}
_parts: dict[str, set[str]] = {}
_lock = threading.Lock()


def _begin(self: FleetHttpClient, request: PushMessagesRequest) -> PushMessagesResponse:
    """Announce a reply, and remember what belongs to it."""
    answer = _push_message(self, request)
    _replies[answer.session_id] = request
    _parts[answer.session_id] = set(answer.objects_to_push)
    return answer


def _go_on(self: FleetHttpClient, request: PushObjectRequest) -> PushObjectResponse:
    """Send a part of a reply; after the last one, post the whole of it again."""
    answer = _push_object(self, request)
    with _lock:
        parts = _parts[request.session_id]
        parts.discard(request.object_id)
        if not parts:
            again = _push_message(self, _replies[request.session_id])
            with (Path(__file__).parent / "doubled").open("a") as file:
                file.write(f"{again.objects_to_push}\n")
    return answer


if __name__ == "sitecustomize":
    FleetHttpClient.PushMessages = _begin  # type: ignore[method-assign]
    FleetHttpClient.PushObject = _go_on  # type: ignore[method-assign]
