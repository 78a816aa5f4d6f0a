"""Replies that arrive at the same moment: how many a SuperLink with a database loses.

Run: ``python benchmarks/replies.py [--nodes 20] [--rounds 20] [--superlink flower]``. Prints
JSON. The SuperLink is a real one, and nodes speak to it by Flower's own connection of a
SuperNode, but each is a thread of this process and answers without a ClientApp: so a hundred
of them need little of the machine, and all reply within milliseconds, which is the worst that
a database can meet. A run of docs/reliability.md has two rounds, so ``--rounds 20`` are ten.

`benchmarks/supernodes.py` does the same with real SuperNodes and parties.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError, pull_objects
from flwr.supernode.fleet_http_connection import http_request_response

from simulations.deploy.federation import Deployment
from simulations.runtime.flower import SuperLink

SUPERLINKS = {"queued": Deployment.superlink, "flower": ("flower-superlink",)}
PATIENCE_SECONDS = 120.0
POLL_SECONDS = 3.0
LOCKED = "database is locked"
PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "replies-probe"
version = "0.1.0"
description = "Counts replies."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fl-strategies"

[tool.flwr.app.components]
serverapp = "replies_probe:server"
clientapp = "replies_probe:client"

[tool.flwr.app.config]
nodes = 0
rounds = 0
timeout = 0.0
result = ""
"""
PROBE = """\
import json
import time
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

client = ClientApp()
server = ServerApp()

@server.main()
def main(grid, context):
    given, counts = context.run_config, []
    while len(nodes := sorted(grid.get_node_ids())) < given["nodes"]:
        time.sleep(0.5)
    for number in range(given["rounds"]):
        sent = [
            Message(RecordDict({"round": ConfigRecord({"number": number})}), node, "train")
            for node in nodes
        ]
        replies = grid.send_and_receive(sent, timeout=given["timeout"])
        counts.append(sum(not reply.has_error() for reply in replies))
    Path(given["result"]).write_text(json.dumps(counts))
"""


class Database(SuperLink):
    """A SuperLink with a database, Flower's own or ours, that anybody may join."""

    def __init__(self, kind: str) -> None:
        super().__init__(simulation=False)
        self.superlink = SUPERLINKS[kind]

    def _start_superlink(self, *arguments: str) -> Any:
        return super()._start_superlink(*arguments, "--database", str(self.home / "state.db"))

    def locks(self) -> int:
        """Return the number of "database is locked" errors."""
        return (self.home / "superlink.log").read_text(errors="replace").count(LOCKED)


def reply_to(question: Message, rng: np.random.Generator) -> Message:
    """Return a reply of the size that a party of FedKT has."""
    arrays = ArrayRecord({"votes": Array(rng.integers(0, 255, 400, dtype=np.uint8))})
    records = {
        "arrays": arrays,
        "meta": ConfigRecord({"node": int(rng.integers(2**31))}),
        "metrics": MetricRecord({"num-examples": 40}),
    }
    reply = Message(RecordDict({**records}), reply_to=question)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    return reply


class Node(threading.Thread):
    """A SuperNode without parties' processes: asked, it waits for all others and replies."""

    def __init__(
        self, address: str, number: int, together: threading.Barrier, over: threading.Event
    ) -> None:
        super().__init__(daemon=True)
        self.address, self.together, self.over = address, together, over
        self.rng = np.random.default_rng(number)
        self.failed = 0

    def run(self) -> None:
        """Answer until all is over."""
        with http_request_response(self.address, insecure=True) as connection:
            while not self.over.wait(POLL_SECONDS):
                try:
                    self.answer(*connection)
                except (httpx.HTTPError, ObjectPushError):
                    self.failed += 1  # a SuperNode would drop the reply, too, or end

    def answer(self, _: int, receive: Callable[..., Any], send: Any, *others: Any) -> None:
        """Do for a message what Flower's SuperNode does, but answer by itself."""
        _, _, pull_object, push_object, confirm = others
        if (received := receive()) is None:
            return
        question, tree = received
        run = question.metadata.run_id
        wanted = [each.object_id for each in iterate_object_tree(tree)]
        pull_objects(wanted, pull_object_fn=lambda name: pull_object(run, name))
        confirm(run, question.metadata.message_id)
        reply = reply_to(question, self.rng)
        with suppress(threading.BrokenBarrierError):  # somebody's question was lost
            self.together.wait(PATIENCE_SECONDS / 4)
        contents = get_all_nested_objects(reply)
        missing, session = send(reply, get_object_tree(reply), 0.1)
        for name in missing:
            push_object(run, session, name, contents[name].deflate())


def write_probe(folder: Path) -> Path:
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "replies_probe.py").write_text(PROBE)
    return folder


def measure(nodes: int, rounds: int, superlink: str = "queued") -> dict[str, Any]:
    """Let all nodes reply at once, round by round, and count what the server gets."""
    together, over = threading.Barrier(nodes), threading.Event()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, Database(superlink) as database:
        result = Path(folder) / "counts.json"
        crowd = [Node(database.address, number, together, over) for number in range(nodes)]
        for node in crowd:
            node.start()
        given = {"nodes": nodes, "rounds": rounds, "timeout": PATIENCE_SECONDS}
        app = write_probe(Path(folder) / "app")
        config = {**given, "result": str(result)}
        status = database.run_app(config, app=app, timeout=7200.0, show_log=False)
        counts = json.loads(result.read_text()) if result.exists() else []
        over.set()
        for node in crowd:
            node.join(PATIENCE_SECONDS)
        locked = database.locks()
    return {
        "nodes": nodes,
        "rounds": len(counts),
        "superlink": superlink,
        "status": str(status),
        "replies-asked-for": nodes * rounds,
        "replies-lost": nodes * rounds - sum(counts),
        "locked": locked,
        "requests-failed": sum(node.failed for node in crowd),
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--superlink", choices=SUPERLINKS, default="queued")
    given = parser.parse_args()
    print(json.dumps(measure(given.nodes, given.rounds, given.superlink)))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
