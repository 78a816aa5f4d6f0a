"""Files that are damaged, missing, exchanged or cannot be written."""

import json
import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message
from flwr.clientapp import ClientApp

from clients import client_app
from clients.app import MAX_RUNS
from fl_strategies import REGISTRY
from fl_strategies.errors import CheckpointUnavailable, InvalidData, NotEnoughParties
from simulations.config import Settings
from simulations.deploy.federation import prepare
from simulations.results.run_folder import write_json
from simulations.runtime.flower import SuperLink
from tests.disks import full_disk
from tests.kept import Killed, MortalGrid, bits, build, journal_app, start
from tests.toys import load_toy_party

APP = client_app(load_toy_party)


def killed_run(name: str, folder: Path) -> tuple[ClientApp, bytes]:
    """Keep a run that was killed before its last reply; return its parties and its result."""
    plain, whole = build(name, folder / "whole"), MortalGrid(journal_app(folder / "others"))
    start(plain, whole)
    app = journal_app(folder / "parties")
    with pytest.raises(Killed):
        start(build(name, folder / "run"), MortalGrid(app, sum(whole.asked.values()) - 1))
    return app, bits(plain)


def files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")


def flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_damaged_file_of_a_kept_run_never_changes_the_result(
    name: str, tmp_path: Path
) -> None:
    """A bit flipped somewhere, the end cut off, or nothing left: refused by its name."""
    app, expected = killed_run(name, tmp_path)
    kinds = {path.suffix for path in files_of(tmp_path / "run")}
    assert {".json", ".npz", ".asked", ".message"} <= kinds

    for number, path in enumerate(files_of(tmp_path / "run")):
        content = path.read_bytes()
        damaged = flipped(content, 1_000_003 * number % len(content))
        for other in (damaged, content[:-1], b""):
            path.write_bytes(other)
            with pytest.raises(InvalidData) as caught:
                start(build(name, tmp_path / "run", resume=True), MortalGrid(app))
            assert f"{path} must be as it was written" in str(caught.value)
            assert str(caught.value).count(". ") == 1, "what to do"
        path.write_bytes(content)
    resumed = build(name, tmp_path / "run", resume=True)
    start(resumed, MortalGrid(app))
    assert bits(resumed) == expected


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_missing_file_of_a_kept_run_never_changes_the_result(
    name: str, tmp_path: Path
) -> None:
    """A reply is asked for again if its round is resumed; without the rest, nothing happens."""
    app, expected = killed_run(name, tmp_path)

    for path in files_of(tmp_path / "run"):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "run", copy)
        (copy / path.relative_to(tmp_path / "run")).unlink()
        resumed = build(name, copy, resume=True)
        goes_on = not path.with_name("complete.json").exists()
        alone = path.suffix == ".asked" and not any(path.parent.glob("*.message"))
        asked_again = path.name == "complete.json" or (goes_on and path.suffix == ".message")
        if asked_again or alone:
            start(resumed, MortalGrid(app))
            assert bits(resumed) == expected, path
        else:
            with pytest.raises(InvalidData, match="got none"):
                start(resumed, MortalGrid(app))
        shutil.rmtree(copy)


def test_replies_that_were_exchanged_are_refused(tmp_path: Path) -> None:
    """A checksum is of a file's place as well: one node's reply is not another's."""
    killed_run("fedmd", tmp_path)
    first, second = sorted((tmp_path / "run").glob("round-*/train/*.message"))[:2]
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)

    with pytest.raises(InvalidData, match=r"1000.message must be as it was written"):
        start(build("fedmd", tmp_path / "run", resume=True), MortalGrid(APP))


def test_files_of_another_run_are_refused(tmp_path: Path) -> None:
    """The same place in another run of the same settings is another place."""
    killed_run("fedmd", tmp_path)
    (other,) = (tmp_path / "whole").glob("state-*.npz")
    shutil.copy(other, tmp_path / "run" / other.name)

    with pytest.raises(InvalidData, match=r"state-000000003.npz must be as it was written"):
        start(build("fedmd", tmp_path / "run", resume=True), MortalGrid(APP))


def test_a_damaged_sample_is_never_used_and_paid_anew(tmp_path: Path) -> None:
    """A flipped digit would let a record in that the sample's price does not cover."""
    app = journal_app(tmp_path / "parties")
    nfdp = {"release": "nfdp", "num_samples": 10}
    start(build("fedmd", **nfdp), MortalGrid(app), 1)
    (sample,) = (tmp_path / "parties" / "0").glob("*.sample-*.json")
    journal = tmp_path / "parties" / "0" / "private-data.example.jsonl"
    spent, old = len(journal.read_text().splitlines()), sample.read_text()
    head, _, rows = old.rpartition("[")
    sample.write_text(f"{head}[{2 if rows[0] == '1' else 1}{rows[1:]}")

    start(build("fedmd", **nfdp), MortalGrid(app), 1)

    assert len(journal.read_text().splitlines()) == spent + 1
    assert not sample.read_text().endswith(rows)


class Full(MortalGrid):
    """Parties' disks take nothing in one round."""

    def __init__(self, app: Any, number: int) -> None:
        super().__init__(app)
        self.number = number

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        round_now = max((number for _, number, _ in self.asked), default=0)
        first = len([1 for _, number, _ in self.asked if number == round_now])
        due = round_now if first % 6 or not round_now else round_now + 1
        if max(due, 1) != self.number:
            return super().pull_messages(message_ids)
        with full_disk():
            return super().pull_messages(message_ids)


@pytest.mark.parametrize("number", [1, 2])
def test_a_disk_that_is_full_in_one_round_does_not_skip_it(number: int, tmp_path: Path) -> None:
    """The run stops there, and resumed it ends as if the disk had never been full."""
    plain = build("fedmd", tmp_path / "plain")
    start(plain, MortalGrid(journal_app(tmp_path / "plain-parties")))
    app = journal_app(tmp_path / "parties")

    with pytest.raises(NotEnoughParties, match=rf"round {number} must have .* resume"):
        start(build("fedmd", tmp_path / "run"), Full(app, number))
    resumed, grid = build("fedmd", tmp_path / "run", resume=True), MortalGrid(app)
    start(resumed, grid)

    assert {asked for _, asked, _ in grid.asked} == set(range(number, 4))
    assert bits(resumed) == bits(plain)


def test_a_servers_disk_that_is_full_stops_the_run_where_it_is(tmp_path: Path) -> None:
    """Nothing is half written: with room again, the run resumes to the same bits."""
    plain = build("fedmd")
    start(plain, MortalGrid(APP))

    class FullServer(MortalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            replies = super().pull_messages(message_ids)
            stack.enter_context(full_disk(100))
            return replies

    with ExitStack() as stack, pytest.raises(CheckpointUnavailable, match="must be on a disk"):
        start(build("fedmd", tmp_path), FullServer(APP))
    resumed = build("fedmd", tmp_path, resume=True)
    start(resumed, MortalGrid(APP))

    assert bits(resumed) == bits(plain)
    assert not list(tmp_path.rglob("*.draft-*"))


def test_a_clock_that_goes_back_does_not_delete_the_newest_run(tmp_path: Path) -> None:
    """The file just written stays, and the next one does not push it out."""
    app = journal_app(tmp_path / "parties")
    runs = tmp_path / "parties" / "0" / "runs"
    for number in range(MAX_RUNS):
        start(build("fedmd", tmp_path / f"{number}"), MortalGrid(app), 1)
    old = set(runs.iterdir())
    for path in old:
        os.utime(path, (2**32, 2**32))  # written before the clock went back

    for number in range(3):
        before = set(runs.iterdir())
        start(build("fedmd", tmp_path / f"new-{number}"), MortalGrid(app), 1)
        assert len(set(runs.iterdir()) - before) == 1

    assert len(list(runs.iterdir())) == MAX_RUNS
    assert len(set(runs.iterdir()) - old) == 3


def test_a_result_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    """A file of results is whole, whatever happens while it is written."""
    path = tmp_path / "result.json"
    write_json({"accuracy": 0.5}, path)

    with full_disk(10), pytest.raises(OSError, match="too large"):
        write_json({"accuracy": 0.75}, path)

    assert json.loads(path.read_text()) == {"accuracy": 0.5}


def test_another_user_of_the_machine_cannot_read_records_or_logs(tmp_path: Path) -> None:
    """What a deployment writes is for its owner, file by file."""
    old = os.umask(0o022)
    try:
        prepared = prepare(
            Settings.of(
                num_parties=2, train_rows=60, public_rows=20, test_rows=20, min_records=1
            ),
            tmp_path / "federation",
        )
    finally:
        os.umask(old)

    for member in prepared.members:
        private = [*member.folder.glob("records.*"), member.node_config, member.key]
        assert len(private) == 3
        for path in private:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_what_flowers_processes_write_is_for_their_owner(tmp_path: Path) -> None:
    """Logs, and whatever else a started process writes, databases of replies among it."""
    link, log, other = SuperLink(simulation=False), tmp_path / "node.log", tmp_path / "other"
    old = os.umask(0o022)
    try:
        process = link._start(["sh", "-c", f"echo hello; echo > {other}"], os.environ, log)
        process.wait()
    finally:
        os.umask(old)

    assert log.read_text() == "hello\n"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (log, other)] == [0o600, 0o600]
