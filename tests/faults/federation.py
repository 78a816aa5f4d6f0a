"""A small deployed federation whose parties fail on demand, and what must come of it."""

import json
import shutil
import subprocess
import tomllib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message

from clients import client_app
from fl_strategies import KnowledgeStrategy, Party
from fl_strategies.errors import InvalidData
from fl_strategies.wire import keys
from simulations.config import Settings, Value
from simulations.deploy.client_app import build_party
from simulations.deploy.federation import Deployment, Member, Prepared, prepare
from simulations.deploy.server_app import load, run_settings
from simulations.runtime.local import InMemoryGrid
from tests.faults import doubling, faulty
from tests.faults.deployment import configure
from tests.leftovers import wait_until

FEDKT = Settings.of(
    strategy="fedkt",
    num_parties=4,
    train_rows=240,
    public_rows=40,
    test_rows=40,
    partition="iid",
    num_teachers=2,
    num_trees=3,
    learner="random-forest",
    seed=7,
    max_wait=240.0,
)


def fedmd(num_rounds: int, **change: Value) -> Settings:
    """Return the settings of a run with several rounds.

    Its model learns the mean of scores, which shows every answer that is missing.
    """
    return Settings.from_run_config(
        FEDKT.to_run_config(),
        strategy="fedmd",
        num_server_rounds=num_rounds,
        payload="softmax",
        final_learner="mlp",
        epochs=2,
        epochs_initial=2,
        **change,
    )


def faulty_federation(
    folder: Path, num_parties: int = FEDKT.num_parties, *, learner: str = FEDKT.learner
) -> Prepared:
    """Prepare parties that fail when they are told to; see `plan`."""
    settings = Settings.from_run_config(FEDKT.to_run_config(), num_parties=num_parties)
    prepared = prepare(settings, folder, formats=["npz"])
    for member in prepared.members:
        shutil.copy(faulty.__file__, member.folder / "faulty.py")
        (member.folder / "learner").write_text(learner)
        configure(member, {"learner": "faulty:make"})
    return prepared


def let_double(member: Member) -> None:
    """Let a party's SuperNode, when it starts, send every reply twice."""
    shutil.copy(doubling.__file__, member.folder / "sitecustomize.py")


def plan_when_paid(member: Member, kind: str) -> None:
    """Let a party fail when it next makes a model after it has paid for an answer."""
    plan(member, f"{kind} {len(journal(member)) + 1}")


def plan(member: Member, kind: str) -> None:
    """Let a party fail when it next makes a model."""
    for name in ("met", "go"):
        (member.folder / name).unlink(missing_ok=True)
    (member.folder / "fault").write_text(kind)


def wait_for_fault(member: Member) -> None:
    """Wait until a party has met the fault that is planned."""
    wait_until((member.folder / "met").exists)


UNAVAILABLE = "Error: Node Unavailable"
"""How Flower begins its sentence about a SuperNode that is gone."""


def let_go(member: Member) -> None:
    """Let a party that waits continue."""
    (member.folder / "go").touch()


# A disk that is full


def mount_small_disk(folder: Path) -> bool:
    """Put a folder on a disk of its own; return whether this is permitted here."""
    folder.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def fill_disk(folder: Path) -> Path:
    """Fill a disk to the last byte; return the file to remove afterwards."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


# What must come of a run


def left_out(deployment: Deployment, report: dict[str, Any]) -> dict[int, str]:
    """Return which parties were excluded from the last round, and why."""
    nodes = {str(node): number for number, node in enumerate(deployment.node_ids)}
    return {nodes[node]: reason for node, reason in report["rejected"].items()}


def check_journals(prepared: Prepared, report: dict[str, Any]) -> None:
    """No reply counted that its party had not written down before it left."""
    lines = {
        number: [line for line in journal(member) if line["run"] == report["run-id"]]
        for number, member in enumerate(prepared.members)
    }
    accepted = sum(one["train"]["num-parties"] for one in report["rounds"] if one["train"])
    assert accepted > 0
    assert sum(map(len, lines.values())) >= accepted
    answered = [party[keys.PARTITION_ID] for party in report["parties"] if party["train"]]
    assert all(lines[number] for number in answered)


def journal(member: Member) -> list[dict[str, Any]]:
    """Return the lines of a party's journal."""
    path = member.state / "private-data.example.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def same_model(report: dict[str, Any], strategy: KnowledgeStrategy[Any]) -> bool:
    """Return whether a run's model has the bits of one that was made in this process."""
    expected = strategy.model_.to_arrays()  # type: ignore[attr-defined]
    with np.load(
        Path(report["folder"]) / "model" / "arrays.npz", allow_pickle=False
    ) as written:
        return set(written) == set(expected) and all(
            written[name].tobytes() == array.tobytes() for name, array in expected.items()
        )


class LossyGrid(InMemoryGrid):
    """Loses all replies of some nodes in round 1; they have done their work all the same."""

    lost: Collection[int] = ()

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Run the clients and return the replies that arrive."""
        sent = list(messages)
        replies = super().send_and_receive(sent, timeout=timeout)
        gone = {one.metadata.message_id for one in sent if self._is_lost(one)}
        return [one for one in replies if one.metadata.reply_to_message_id not in gone]

    def _is_lost(self, message: Message) -> bool:
        config = message.content[keys.CONFIG]
        assert isinstance(config, ConfigRecord)
        number = self.get_node_ids().index(message.metadata.dst_node_id)
        return number in self.lost and config[keys.SERVER_ROUND] == 1


def in_process(
    prepared: Prepared,
    settings: Settings,
    *,
    failing: Collection[int] = (),
    away: Collection[int] = (),
    late: Collection[int] = (),
    learner: str = FEDKT.learner,
) -> KnowledgeStrategy[Any]:
    """Return the strategy after the same run in this process, with the same parties missing.

    Parties that are `failing` never answer, those that are `away` do nothing in round 1, and
    the replies of those that are `late` are lost in round 1.
    """
    calls: dict[int, int] = {}

    def load_one(context: Context) -> Party:
        number = int(context.node_config[keys.PARTITION_ID])
        calls[number] = calls.get(number, 0) + 1
        if number in failing or (number in away and calls[number] <= _MESSAGES_A_ROUND):
            raise InvalidData("Party: it must be there, got a fault.")
        config = tomllib.loads(prepared.members[number].node_config.read_text())
        own: dict[str, Value] = {"learner": learner, "state-dir": "", **faulty.SETTINGS}
        return build_party({**config, **own}, run=str(context.run_id))

    strategy = load(run_config(prepared, settings)).strategy()
    grid = LossyGrid(client_app(load_one), len(prepared.members))
    grid.lost = late
    strategy.start(grid, ArrayRecord(), num_rounds=settings.num_rounds)
    return strategy


_MESSAGES_A_ROUND = 2


def run_config(prepared: Prepared, settings: Settings) -> dict[str, Value]:
    """Return what a run is submitted with."""
    given = settings.to_run_config()
    return {**{key: given[key] for key in run_settings() if key in given}, **prepared.files}
