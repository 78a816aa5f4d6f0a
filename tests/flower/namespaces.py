"""Network namespaces: machines for the network, though processes of one machine.

Run: ``unshare --net python -m tests.flower.namespaces FOLDER``, as root, with ``ip`` of
iproute2. The SuperLink is in a namespace of its own, and so is every party: each has its own
loopback and one address, from which only the SuperLink's network can be reached. Nothing of
the machine's own network is met or changed. Prints what came of a run as one line of JSON.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from simulations.config import Settings
from simulations.deploy.federation import Deployment, Prepared, prepare

NUM_PARTIES: Final = 2
PATIENCE: Final = 2400.0
SETTINGS: Final = Settings.of(
    strategy="fedkt",
    num_parties=NUM_PARTIES,
    train_rows=120,
    public_rows=40,
    test_rows=40,
    partition="iid",
    num_teachers=2,
    num_trees=3,
    learner="random-forest",
    solo=False,
    pooled=False,
    seed=7,
    max_wait=PATIENCE,
)
HOST: Final = "192.0.2.1"
_MASK: Final = "/24"


def allowed() -> bool:
    """Return whether namespaces can be made here."""
    return os.geteuid() == 0 and all(map(shutil.which, ("ip", "unshare")))


class Namespaces(Deployment):
    """A deployment whose parties are in network namespaces of their own."""

    host = HOST

    def __init__(self, prepared: Prepared) -> None:
        super().__init__(prepared)
        self._mark = secrets.token_hex(3)

    def inside(self, number: int) -> tuple[str, ...]:
        """Return the command that starts others in a party's namespace."""
        return ("ip", "netns", "exec", self._name(number))

    def _name(self, number: int) -> str:
        return f"fl{self._mark}-{number}"

    def _open(self) -> None:
        bridge = "bridge"
        self._ip("link", "set", "lo", "up")
        self._ip("link", "add", bridge, "type", "bridge")
        self._ip("address", "add", HOST + _MASK, "dev", bridge)
        self._ip("link", "set", bridge, "up")
        for number in range(len(self.prepared.members)):
            self._connect(number, bridge)
        super()._open()

    def _connect(self, number: int, bridge: str) -> None:
        """Make a party's namespace, with a cable to the SuperLink's bridge."""
        name, near, far = self._name(number), f"party-{number}", "cable"
        self._ip("netns", "add", name, undo=("netns", "delete", name))
        self._ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        self._ip("link", "set", near, "master", bridge, "up")
        inside = ("-netns", name)
        self._ip(*inside, "address", "add", f"192.0.2.{number + 10}{_MASK}", "dev", far)
        for device in (far, "lo"):
            self._ip(*inside, "link", "set", device, "up")

    def _ip(self, *words: str, undo: tuple[str, ...] = ()) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)
        if undo:
            self._stack.callback(subprocess.run, ["ip", *undo], check=False)


def addresses(inside: tuple[str, ...]) -> list[str]:
    """Return the addresses of a namespace besides loopback's."""
    command = [*inside, "ip", "-4", "-o", "address"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = [line.split() for line in shown.splitlines()]
    return [word[3].partition("/")[0] for word in words if word[1] != "lo"]


def main(folder: Path) -> None:
    """Run a federation of machines once."""
    prepared = prepare(SETTINGS, folder, formats=["npz"], names=f"IP:{HOST}")
    with Namespaces(prepared) as deployment:
        places = [(), *(deployment.inside(number) for number in range(NUM_PARTIES))]
        found = list(map(addresses, places))
        report = deployment.run(SETTINGS, timeout=PATIENCE)
    told = {key: report[key] for key in ("rejected", "model-sha256")}
    print(json.dumps({**told, "addresses": found}))  # noqa: T201 - for the test


if __name__ == "__main__":
    main(Path(sys.argv[1]))
