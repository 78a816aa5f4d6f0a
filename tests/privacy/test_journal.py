"""Every test uses real files, and where it matters real processes that race or are killed."""

import hashlib
import json
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from fl_strategies.errors import (
    CorruptJournal,
    InvalidData,
    InvalidParameter,
    JournalUnavailable,
    PrivacyBudgetExceeded,
    StrategyError,
)
from fl_strategies.privacy import journal as journal_lines
from fl_strategies.privacy.events import (
    GaussianEvent,
    LaplaceEvent,
    NoisyMaxEvent,
    NonPrivateEvent,
    SubsampleEvent,
)
from fl_strategies.privacy.journal import MAX_TEXT, PartyJournal, data_fingerprint
from fl_strategies.privacy.ledger import PrivacyLedger

FORK = multiprocessing.get_context("fork")
DIGITS_X, DIGITS_Y = load_digits(return_X_y=True)
DIGITS = data_fingerprint(DIGITS_X, DIGITS_Y)
OTHERS = data_fingerprint(DIGITS_X[1:], DIGITS_Y[1:])

MEAN = LaplaceEvent(unit="example", relation="replace-one", scale=10.0, l1_sensitivity=1.0)
LABEL = NoisyMaxEvent(
    unit="example",
    relation="replace-one",
    noise="gumbel",
    scale=25.0,
    sensitivity=1.0,
    num_classes=10,
)
SCORE = GaussianEvent(unit="example", relation="replace-one", scale=9.0, l2_sensitivity=1.0)


def open_journal(folder: Path, max_epsilon: float | None = None) -> PartyJournal:
    return PartyJournal(folder, fingerprint=DIGITS, max_epsilon=max_epsilon)


def announcement_of(journal: PartyJournal) -> Path:
    return journal.path.with_name(f"{journal.path.name}.announced")


def charge_thrice(journal: PartyJournal) -> None:
    """Charge three releases of different events."""
    journal.charge([(MEAN, 2)], run="1", purpose="means")
    journal.charge([(LABEL, 40), (SCORE, 1)], run="1", purpose="labels")
    journal.charge([(SCORE, 3)], run="2", purpose="scores")


@cache
def written() -> tuple[bytes, bytes]:
    """Return what three charges leave in a journal and in its announcement."""
    with TemporaryDirectory() as folder:
        journal = open_journal(Path(folder))
        charge_thrice(journal)
        return journal.path.read_bytes(), announcement_of(journal).read_bytes()


def three_lines(folder: Path) -> PartyJournal:
    """Return a journal after three charges, without waiting for the disk again."""
    journal = open_journal(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in zip((journal.path, announcement_of(journal)), written(), strict=True):
        path.write_bytes(content)
    return journal


def last_line(whole: bytes) -> int:
    """Return where the last line of a journal begins."""
    return whole.rindex(b"\n", 0, -1) + 1


def epsilon_of(*charges: tuple[LaplaceEvent | NoisyMaxEvent | GaussianEvent, int]) -> float:
    ledger = PrivacyLedger("example")
    for event, count in charges:
        ledger.compose(event, count)
    return ledger.get_epsilon()


EPSILONS = (
    0.0,
    epsilon_of((MEAN, 2)),
    epsilon_of((MEAN, 2), (LABEL, 40), (SCORE, 1)),
    epsilon_of((MEAN, 2), (LABEL, 40), (SCORE, 1), (SCORE, 3)),
)


# What is kept.


def test_a_second_run_composes_with_the_first(tmp_path: Path) -> None:
    """Two journals on the same data, opened one after the other, are one account."""
    first = open_journal(tmp_path).charge([(LABEL, 40)], run="1", purpose="labels")
    second = open_journal(tmp_path).charge([(LABEL, 40)], run="2", purpose="labels")

    assert first.get_epsilon() == epsilon_of((LABEL, 40))
    assert second.get_epsilon() == epsilon_of((LABEL, 40), (LABEL, 40))
    assert open_journal(tmp_path).epsilon() == second.get_epsilon() > first.get_epsilon()
    assert open_journal(tmp_path).ledger().entries == ((LABEL, 80),)


def test_a_line_says_everything(tmp_path: Path) -> None:
    """Each line is JSON with version, number, events, counts, run, purpose, time, checksum."""
    journal = three_lines(tmp_path)
    lines = [json.loads(line) for line in journal.path.read_text().splitlines()]

    assert [line["sequence"] for line in lines] == [1, 2, 3]
    assert {line["schema"] for line in lines} == {1}
    assert {line["fingerprint"] for line in lines} == {DIGITS}
    assert [len(line["charges"]) for line in lines] == [1, 2, 1]
    assert lines[1]["charges"][0]["count"] == 40
    assert lines[1]["charges"][0]["event"]["noise"] == "gumbel"
    assert (lines[2]["run"], lines[2]["purpose"]) == ("2", "scores")
    assert all(line["time"].endswith("+00:00") for line in lines)
    assert len({line["checksum"] for line in lines}) == 3


def test_entries_come_back_without_loss(tmp_path: Path) -> None:
    """What is read equals what was charged, numbers of numpy and odd texts included."""
    awkward = 'a "quoted"\nline \udcff ü'
    open_journal(tmp_path).charge([(SCORE, np.int64(7))], run=awkward, purpose="x")  # type: ignore[list-item]
    (entry,) = open_journal(tmp_path).entries()

    assert entry.charges == ((SCORE, 7),)
    assert entry.run == awkward


def test_an_unused_journal_has_spent_nothing(tmp_path: Path) -> None:
    """Before the first charge epsilon is 0 and there is no journal file."""
    journal = open_journal(tmp_path / "new" / "folder")

    assert journal.epsilon() == 0
    assert not journal.path.exists()


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    """Files are 0600 and new folders 0700, whatever the process's habits are."""
    habit = os.umask(0)
    try:
        journal = open_journal(tmp_path / "party" / "state")
        charge_thrice(journal)
    finally:
        os.umask(habit)

    files = list(journal.folder.iterdir())
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert len(files) == 3
    assert journal.folder.stat().st_mode & 0o777 == 0o700
    assert journal.folder.parent.stat().st_mode & 0o777 == 0o700


def test_the_disk_has_the_line_before_charge_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The announcement is synced before the journal grows, and the journal in full."""
    journal = three_lines(tmp_path)
    before, synced, really = journal.path.stat().st_size, [], os.fsync

    def watch(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        synced.append((name, journal.path.stat().st_size))
        really(descriptor)

    monkeypatch.setattr(os, "fsync", watch)
    journal.charge([(MEAN, 1)], run="3", purpose="means")
    after = journal.path.stat().st_size

    draft = synced[0][0]
    assert draft.startswith(f"{announcement_of(journal).name}.draft-")
    assert synced == [
        (draft, before),
        (tmp_path.name, before),
        (journal.path.name, after),
        (tmp_path.name, after),
    ]


# What is read again.


def test_a_line_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every charge reads the line before it and no older one, whoever opens the journal."""
    read: list[bytes] = []
    really = journal_lines._decode
    monkeypatch.setattr(
        journal_lines, "_decode", lambda body: (read.append(body), really(body))[1]
    )
    for number in range(1, 9):
        open_journal(tmp_path).charge([(MEAN, number)], run="1", purpose="means")
        assert len(read) == number - 1
    assert len(open_journal(tmp_path).entries()) == len(read) == 8


def test_what_is_remembered_is_what_a_new_process_reads(tmp_path: Path) -> None:
    """Ledgers of both are the same, with samples, repeats and batches of several events."""
    sample = SubsampleEvent(records=1000, samples=3, replacement=False)
    releases = [[(MEAN, 2)], [(sample, 1)], [(LABEL, 4), (MEAN, 1), (LABEL, 1)], [(sample, 2)]]
    journal = PartyJournal(tmp_path, fingerprint=DIGITS, sample_delta=0.5)
    for release in [*releases, *releases[::-1], *releases]:
        journal.charge(release, run="1", purpose="x")  # type: ignore[arg-type]
    remembered, entries = journal.ledger(), journal.entries()
    plain = journal.allowance.ledger("example", [entry.charges for entry in entries])
    journal_lines._remembered.clear()

    assert journal.ledger().state_dict() == remembered.state_dict() == plain.state_dict()
    assert journal.entries() == entries


def test_an_old_line_that_changes_later_is_noticed(tmp_path: Path) -> None:
    """Although it was sound when this process read it, and its length is the same."""
    journal = three_lines(tmp_path)
    whole = journal.path.read_bytes()
    assert journal.epsilon() == EPSILONS[3]
    journal.path.write_bytes(whole.replace(b'"count":2', b'"count":1', 1))

    with pytest.raises(CorruptJournal, match=r"line 1 of .* does not fit its checksum"):
        journal.charge([(MEAN, 1)], run="3", purpose="means")
    journal.path.write_bytes(whole)
    assert journal.epsilon() == EPSILONS[3]


def test_few_journals_are_remembered(tmp_path: Path) -> None:
    """A process with many parties keeps the lines of some of them only."""
    most = journal_lines._MOST_REMEMBERED
    for number in range(most + 3):
        assert three_lines(tmp_path / str(number)).epsilon() == EPSILONS[3]

    assert len(journal_lines._remembered) == most
    assert open_journal(tmp_path / "0").epsilon() == EPSILONS[3]


# The budget.


def test_a_spent_budget_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    """The party itself says no, in a sentence, and its files stay as they are."""
    journal = open_journal(tmp_path, max_epsilon=epsilon_of((LABEL, 40)))
    journal.charge([(LABEL, 40)], run="1", purpose="labels")
    before = journal.path.read_bytes(), announcement_of(journal).read_bytes()

    with pytest.raises(PrivacyBudgetExceeded, match=r"must be at most .*, the max-epsilon at"):
        journal.charge([(LABEL, 1)], run="2", purpose="labels")
    with pytest.raises(PrivacyBudgetExceeded):
        journal.charge(
            [(NonPrivateEvent(unit="example", reason="raw"), 1)], run="2", purpose="x"
        )
    assert (journal.path.read_bytes(), announcement_of(journal).read_bytes()) == before


def test_check_asks_without_spending_and_a_batch_is_charged_as_a_whole(tmp_path: Path) -> None:
    """Both raise the same and leave no line, even if the first event would still fit."""
    journal = open_journal(tmp_path, max_epsilon=0.25)

    journal.check([(MEAN, 2)])
    for act in (journal.check, partial(journal.charge, run="1", purpose="means")):
        with pytest.raises(PrivacyBudgetExceeded):
            act([(MEAN, 2), (MEAN, 1)])
    assert journal.entries() == []


def test_a_lowered_budget_still_reads_the_past(tmp_path: Path) -> None:
    """A journal above its new limit can be read, and refuses everything else."""
    open_journal(tmp_path).charge([(MEAN, 10)], run="1", purpose="means")
    strict = open_journal(tmp_path, max_epsilon=0.5)

    assert strict.epsilon() > 0.5
    with pytest.raises(PrivacyBudgetExceeded):
        strict.charge([(MEAN, 1)], run="2", purpose="means")


# Other processes.


def affordable(event: LaplaceEvent, max_epsilon: float) -> int:
    """Return how many single charges a ledger in memory grants."""
    ledger = PrivacyLedger("example", max_epsilon=max_epsilon)
    for granted in range(1000):
        try:
            ledger.charge(event)
        except PrivacyBudgetExceeded:
            return granted
    raise AssertionError


def spend_all(folder: Path, max_epsilon: float, tries: int, start: Callable[[], object]) -> int:
    journal = open_journal(folder, max_epsilon)
    start()
    granted = 0
    for _ in range(tries):
        try:
            journal.charge([(MEAN, 1)], run=str(os.getpid()), purpose="race")
            granted += 1
        except PrivacyBudgetExceeded:
            pass
    return granted


def test_two_processes_cannot_spend_the_same_budget(tmp_path: Path) -> None:
    """Of 2 x 30 tries exactly as many succeed as one ledger in memory would grant."""
    budget, tries = 2.05, 30
    gate, counts = FORK.Barrier(2), FORK.SimpleQueue()

    def race() -> None:
        counts.put(spend_all(tmp_path, budget, tries, gate.wait))

    racers = [FORK.Process(target=race) for _ in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()

    assert [racer.exitcode for racer in racers] == [0, 0]
    granted = [counts.get() for _ in racers]
    assert sum(granted) == affordable(MEAN, budget) < 2 * tries
    entries = open_journal(tmp_path).entries()
    assert [entry.sequence for entry in entries] == list(range(1, sum(granted) + 1))


def test_two_threads_cannot_spend_the_same_budget(tmp_path: Path) -> None:
    """The lock also holds inside one process."""
    budget, granted, gate = 1.05, [], threading.Barrier(2)
    threads = [
        threading.Thread(
            target=lambda: granted.append(spend_all(tmp_path, budget, 20, gate.wait))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sum(granted) == affordable(MEAN, budget) == len(open_journal(tmp_path).entries())


def test_a_killed_process_never_loses_a_release(tmp_path: Path) -> None:
    """After each of 20 kill -9 there are as many entries as returned charges, or one more."""
    delays = np.random.default_rng(0).uniform(0.0, 0.03, size=20)
    returned, entries = 0, 0
    for kill, delay in enumerate(delays, start=1):
        read_end, write_end = os.pipe()
        child = FORK.Process(target=charge_for_ever, args=(tmp_path, write_end))
        child.start()
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            returned += len(pipe.read(1))
            time.sleep(delay)
            os.kill(child.pid or 0, signal.SIGKILL)
            returned += len(pipe.read())
        child.join()
        entries = len(open_journal(tmp_path).entries())
        assert returned <= entries <= returned + kill

    assert entries >= 20


def charge_for_ever(folder: Path, write_end: int) -> None:
    journal = open_journal(folder)
    while True:
        journal.charge([(MEAN, 1)], run="killed", purpose="means")
        os.write(write_end, b".")


# Torn and damaged files.


def test_a_last_line_cut_anywhere_counts_in_full(tmp_path: Path) -> None:
    """Wherever the last line is cut, even before its first byte, its release counts.

    There it was only announced, as after a crash between announcement and journal.
    """
    journal = three_lines(tmp_path)
    whole = journal.path.read_bytes()
    last = last_line(whole)
    assert announcement_of(journal).read_bytes() == whole[last:]

    for size in range(last, len(whole) + 1):
        journal.path.write_bytes(whole[:size])
        assert journal.epsilon() == EPSILONS[3]


def test_the_next_charge_completes_a_cut_line(tmp_path: Path) -> None:
    """Afterwards the journal is whole without any help from the announcement."""
    journal = three_lines(tmp_path)
    whole = journal.path.read_bytes()
    last = last_line(whole)

    for size in range(last, len(whole) + 1, 29):
        journal.path.write_bytes(whole[:size])
        announcement_of(journal).write_bytes(whole[last:])
        journal.charge([(MEAN, 1)], run="3", purpose="means")
        announcement_of(journal).unlink()
        assert journal.path.read_bytes().startswith(whole)
        assert [entry.run for entry in journal.entries()] == ["1", "1", "2", "3"]


def test_lost_lines_are_noticed(tmp_path: Path) -> None:
    """A journal that is cut before its last line is refused, not read as a cheaper one."""
    journal = three_lines(tmp_path)
    whole = journal.path.read_bytes()
    last = last_line(whole)

    for size in (*range(0, last, 7), last - 1):
        journal.path.write_bytes(whole[:size])
        with pytest.raises(CorruptJournal, match="from a backup"):
            journal.epsilon()
    journal.path.unlink()
    with pytest.raises(CorruptJournal, match="got 0 lines that it does not continue"):
        journal.epsilon()


def test_a_cut_without_announcement_is_never_cheaper(tmp_path: Path) -> None:
    """With the journal file alone, complete lines count and a piece of a line is refused."""
    journal = three_lines(tmp_path)
    whole = journal.path.read_bytes()
    announcement_of(journal).unlink()
    ends = [0, *(at + 1 for at, byte in enumerate(whole) if byte == ord("\n"))]

    for size in {*range(0, len(whole), 7), *ends, *(end - 1 for end in ends[1:])}:
        journal.path.write_bytes(whole[:size])
        if size in ends:
            assert journal.epsilon() == EPSILONS[ends.index(size)]
        else:
            with pytest.raises(CorruptJournal, match="a line that was cut off"):
                journal.epsilon()


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [lines[0], lines[2]],
        lambda lines: [lines[1], lines[0], lines[2]],
        lambda lines: [lines[0], lines[1].replace(b'"count":40', b'"count":10'), lines[2]],
        lambda lines: [lines[0], lines[0], lines[1], lines[2]],
        lambda lines: [lines[0], b"\n", lines[1], lines[2]],
        lambda lines: [lines[0], b"[" * 100_000 + b"\n", lines[2]],
        lambda lines: [lines[1], lines[2]],
    ],
    ids=["deleted", "reordered", "edited", "doubled", "blank", "nested", "headless"],
)
def test_damage_in_the_middle_is_refused(
    tmp_path: Path, damage: Callable[[list[bytes]], list[bytes]]
) -> None:
    """The sentence names the first wrong line and says what to do; nothing is written."""
    journal = three_lines(tmp_path)
    lines = journal.path.read_bytes().splitlines(keepends=True)
    damaged = damage(lines)
    first = next(n for n, line in enumerate(damaged, start=1) if line != lines[n - 1])
    journal.path.write_bytes(b"".join(damaged))

    rule = rf"line {first} of private-data\.example\.jsonl must be as it was written, got .*"
    with pytest.raises(CorruptJournal, match=rule + "Restore .* or call repair"):
        journal.charge([(MEAN, 1)], run="3", purpose="means")
    assert journal.path.read_bytes() == b"".join(damaged)


def test_a_line_of_another_journal_does_not_fit(tmp_path: Path) -> None:
    """A sound second line after a different first one is refused: checksums are chained."""
    journal = three_lines(tmp_path / "one")
    other = open_journal(tmp_path / "two")
    for _ in range(2):
        other.charge([(MEAN, 1)], run="1", purpose="means")
    lines = journal.path.read_bytes().splitlines(keepends=True)
    lines[1] = other.path.read_bytes().splitlines(keepends=True)[1]
    journal.path.write_bytes(b"".join(lines))

    with pytest.raises(CorruptJournal, match=r"line 2 of .* does not fit its checksum"):
        journal.epsilon()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_changed_bytes_never_make_it_cheaper(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any run of bytes overwritten by any others: the same epsilon, or the typed error."""
    journal = three_lines(tmp_path_factory.mktemp("journal"))
    path = data.draw(st.sampled_from([journal.path, announcement_of(journal)]))
    content = path.read_bytes()
    start = data.draw(st.integers(0, len(content) - 1))
    stop = data.draw(st.integers(start, len(content)))
    path.write_bytes(content[:start] + data.draw(st.binary(max_size=40)) + content[stop:])

    with suppress(CorruptJournal):
        assert journal.epsilon() == EPSILONS[3]


def forged(line: bytes, old: bytes, new: bytes) -> bytes:
    """Return a first line with other content and the checksum that fits it."""
    body = b"{" + line[line.index(b'",') + 2 : -1].replace(old, new)
    start = hashlib.sha256(b"example").hexdigest().encode()
    digest = hashlib.sha256(start + body).hexdigest().encode()
    return b'{"checksum":"' + digest + b'",' + body[1:] + b"\n"


@pytest.mark.parametrize(
    ("old", "new", "got"),
    [
        (b'"schema":1,"sequence"', b'"schema":2,"sequence"', "schema 2 is none"),
        (b'"sequence":1', b'"sequence":7', "number 7"),
        (b'"type":"laplace"', b'"type":"free"', "type must be one of"),
        (b'"run":"1"', b'"walk":"1"', "unexpected keyword"),
        (b'"charges":[', b'"charges":[7,', "not subscriptable"),
    ],
    ids=["schema", "number", "event", "field", "charge"],
)
def test_a_line_that_means_nothing_is_refused(
    tmp_path: Path, old: bytes, new: bytes, got: str
) -> None:
    """A right checksum is not enough: what this version cannot read is never free."""
    journal = three_lines(tmp_path)
    announcement_of(journal).unlink()
    first = journal.path.read_bytes().splitlines(keepends=True)[0]
    assert forged(first, b"", b"") == first
    journal.path.write_bytes(forged(first, old, new))

    with pytest.raises(CorruptJournal, match=f"line 1 of .* got .*{got}"):
        journal.epsilon()


# Repair by the data owner.


def test_repair_counts_what_the_owner_states(tmp_path: Path) -> None:
    """Sound lines stay, the rest is kept aside, and the stated releases take its place."""
    journal = three_lines(tmp_path)
    whole = journal.path.read_bytes()
    announcement_of(journal).unlink()
    journal.path.write_bytes(whole[:-100])
    last = last_line(whole)

    ledger = journal.repair([(SCORE, 5)], run="owner", purpose="reviewed the log of run 2")

    assert ledger.entries == ((MEAN, 2), (LABEL, 40), (SCORE, 6))
    assert journal.path.read_bytes().startswith(whole[:last])
    aside = journal.path.with_name(f"{journal.path.name}.damaged-3")
    assert aside.read_bytes() == whole[last:-100]
    assert aside.stat().st_mode & 0o777 == 0o600
    journal.charge([(MEAN, 1)], run="3", purpose="means")
    assert [entry.run for entry in journal.entries()] == ["1", "1", "owner", "3"]


def test_repair_after_damage_in_the_middle_can_be_unlimited(tmp_path: Path) -> None:
    """If nobody knows what left, epsilon is infinite and a budget refuses all that follows."""
    journal = three_lines(tmp_path)
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole.replace(b'"count":40', b'"count":41'))
    unknown = NonPrivateEvent(unit="example", reason="part of the journal was lost")

    journal.repair([(unknown, 1)], run="owner", purpose="disk failure")

    assert journal.epsilon() == float("inf")
    with pytest.raises(PrivacyBudgetExceeded, match="part of the journal was lost"):
        open_journal(tmp_path, max_epsilon=1e9).charge([(MEAN, 1)], run="3", purpose="means")


def test_repair_needs_damage_and_valid_charges(tmp_path: Path) -> None:
    """It is no way around the budget, and never writes what could not be read again."""
    journal = three_lines(tmp_path)
    with pytest.raises(InvalidParameter, match="must be damaged, got 'a sound one'"):
        journal.repair([(MEAN, 1)], run="owner", purpose="why not")
    journal.path.unlink()
    announced = announcement_of(journal).read_bytes()
    for wrong in ([], [(MEAN, 0)], [(NonPrivateEvent(unit="party", reason="raw"), 1)]):
        with pytest.raises(InvalidParameter):
            journal.repair(wrong, run="owner", purpose="review")

    assert announcement_of(journal).read_bytes() == announced


# A disk that fails.


class DiskFailure:
    """Let `os.fsync` fail once, at the given call: no real disk fails on demand."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.really = os.fsync

    def __call__(self, descriptor: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(5, "Input/output error")
        self.really(descriptor)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_failing_disk_lets_nothing_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """At whichever sync it fails: typed error, no earlier line lost, then all continues."""
    journal = three_lines(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", DiskFailure(at))
        with pytest.raises(JournalUnavailable, match=r"Input/output.*Nothing left the party"):
            journal.charge([(MEAN, 1)], run="3", purpose="means")

    assert len(journal.entries()) == (3 if at == 1 else 4)
    journal.charge([(MEAN, 1)], run="4", purpose="means")
    assert [entry.run for entry in journal.entries()][-1] == "4"


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6])
def test_a_repair_that_fails_can_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The stated releases are counted once, whenever the disk failed."""
    journal = three_lines(tmp_path)
    journal.path.write_bytes(journal.path.read_bytes().replace(b'"count":2', b'"count":1', 1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", DiskFailure(at))
        with pytest.raises(JournalUnavailable):
            journal.repair([(SCORE, 9)], run="owner", purpose="review")
    if at <= 4:
        journal.repair([(SCORE, 9)], run="owner", purpose="review")

    assert journal.ledger().entries == ((SCORE, 9),)


@pytest.mark.parametrize(("room", "counted"), [(-1, 0), (0, 1), (100, 1)])
def test_a_full_disk_lets_nothing_leave(tmp_path: Path, room: int, counted: int) -> None:
    """Files that may not grow: typed error, journal sound, at most the one release counted."""
    journal = three_lines(tmp_path)
    size = journal.path.stat().st_size

    def charge_twice() -> None:
        limit = size + room if room >= 0 else 50
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        for _ in range(2):
            with pytest.raises(JournalUnavailable, match=r"File too large\. Nothing left"):
                journal.charge([(MEAN, 1)], run="full", purpose="means")

    child = FORK.Process(target=charge_twice)
    child.start()
    child.join()

    assert child.exitcode == 0
    assert journal.path.stat().st_size == size + max(room, 0)
    assert len(journal.entries()) == 3 + counted
    journal.charge([(MEAN, 1)], run="again", purpose="means")
    assert len(open_journal(tmp_path).entries()) == 4 + counted


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A file in the place of the folder gives the typed error, not a bare one."""
    (tmp_path / "file").write_text("")
    journal = open_journal(tmp_path / "file" / "state")

    with pytest.raises(JournalUnavailable, match=r"in a folder \(state-dir\) that") as caught:
        journal.charge([(MEAN, 1)], run="1", purpose="means")
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, StrategyError)
    assert str(tmp_path) not in str(caught.value)


# Which data.


def test_a_fingerprint_tells_data_apart() -> None:
    """Values, order, number type and labels count; the memory layout does not."""
    swapped = np.r_[1, 0, 2 : len(DIGITS_Y)]
    variants = [
        (DIGITS_X, DIGITS_Y),
        (DIGITS_X[:-1], DIGITS_Y[:-1]),
        (DIGITS_X[swapped], DIGITS_Y[swapped]),
        (DIGITS_X.astype(np.float32), DIGITS_Y),
        (DIGITS_X, DIGITS_Y[::-1]),
        (DIGITS_X + np.eye(*DIGITS_X.shape), DIGITS_Y),
    ]

    assert len({data_fingerprint(x, y) for x, y in variants}) == len(variants)
    assert data_fingerprint(np.asfortranarray(DIGITS_X), DIGITS_Y.copy()) == DIGITS


def test_other_data_are_refused(tmp_path: Path) -> None:
    """A changed record gives no new budget; the error tells no fingerprint."""
    journal = three_lines(tmp_path)
    before = journal.path.read_bytes()
    others = PartyJournal(tmp_path, fingerprint=OTHERS)

    for act in (others.epsilon, lambda: others.charge([(MEAN, 1)], run="3", purpose="x")):
        with pytest.raises(InvalidData, match=r"got others.*data-changes = true") as caught:
            act()
        assert DIGITS[:8] not in str(caught.value)
        assert OTHERS[:8] not in str(caught.value)
    assert journal.path.read_bytes() == before


def test_changed_data_compose_if_their_owner_says_so(tmp_path: Path) -> None:
    """Old and new version share one budget, and both are known from then on."""
    three_lines(tmp_path)
    changed = PartyJournal(tmp_path, fingerprint=OTHERS, changing=True)

    assert changed.epsilon() == EPSILONS[3]
    changed.charge([(MEAN, 1)], run="3", purpose="means")
    for fingerprint in (DIGITS, OTHERS):
        assert len(PartyJournal(tmp_path, fingerprint=fingerprint).entries()) == 4


def test_other_data_under_their_own_name(tmp_path: Path) -> None:
    """Two data sets in one folder have an account each."""
    three_lines(tmp_path)
    other = PartyJournal(tmp_path, fingerprint=OTHERS, name="ward-2")
    other.charge([(MEAN, 1)], run="1", purpose="means")

    assert other.epsilon() == epsilon_of((MEAN, 1))
    assert open_journal(tmp_path).epsilon() == EPSILONS[3]


@pytest.mark.parametrize("lost", ["nothing", "journal", "announcement"])
def test_the_same_data_have_one_name(tmp_path: Path, lost: str) -> None:
    """A second name does not open a second budget, also if only one file knows the data."""
    journal = open_journal(tmp_path)
    journal.charge([(MEAN, 1)], run="1", purpose="means")
    if lost != "nothing":
        (journal.path if lost == "journal" else announcement_of(journal)).unlink()

    for changing in (False, True):
        again = PartyJournal(tmp_path, fingerprint=DIGITS, name="fresh", changing=changing)
        with pytest.raises(InvalidData, match=r"got fresh\.example\.jsonl although private-"):
            again.charge([(MEAN, 1)], run="2", purpose="means")


def test_each_unit_has_its_journal(tmp_path: Path) -> None:
    """Promises to examples and to parties are kept apart, and events in the right one."""
    three_lines(tmp_path)
    party = PartyJournal(tmp_path, fingerprint=DIGITS, unit="party")

    assert party.epsilon() == 0
    with pytest.raises(InvalidParameter, match="unit must be 'party', got 'example'"):
        party.charge([(MEAN, 1)], run="1", purpose="means")
    assert not party.path.exists()


def test_a_journal_of_the_other_unit_is_refused(tmp_path: Path) -> None:
    """A file that was renamed from one unit to the other does not fit its checksums."""
    journal = three_lines(tmp_path)
    party = PartyJournal(tmp_path, fingerprint=DIGITS, unit="party")
    journal.path.rename(party.path)

    with pytest.raises(CorruptJournal, match=r"line 1 of .* does not fit its checksum"):
        party.epsilon()


# Wrong use.


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"fingerprint": "abc"}, "fingerprint must be one of data_fingerprint"),
        ({"name": "../elsewhere"}, "name must be 1 to 100 letters"),
        ({"name": ""}, "name must be 1 to 100 letters"),
        ({"unit": "person"}, "unit must be 'party' or 'example', got 'person'"),
        ({"delta": 1.0}, "delta must be greater than 0 and less than 1"),
        ({"max_epsilon": 0.0}, "max_epsilon must be greater than 0"),
    ],
)
def test_wrong_settings_are_refused(
    tmp_path: Path, setting: dict[str, object], sentence: str
) -> None:
    """Each in one sentence, before any file is touched."""
    with pytest.raises(InvalidParameter, match=sentence):
        PartyJournal(tmp_path / "state", **{"fingerprint": DIGITS, **setting})  # type: ignore[arg-type]
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("charges", "run", "purpose"),
    [
        ([], "1", "means"),
        ([(MEAN, 0)], "1", "means"),
        ([(MEAN, 1.5)], "1", "means"),
        ([(MEAN, 1)], "", "means"),
        ([(MEAN, 1)], "1", "x" * (MAX_TEXT + 1)),
        ([("laplace", 1)], "1", "means"),
    ],
    ids=["none", "zero", "half", "no-run", "long", "no-event"],
)
def test_wrong_charges_are_refused(
    tmp_path: Path, charges: list[tuple[LaplaceEvent, int]], run: str, purpose: str
) -> None:
    """Nothing is written for them."""
    journal = open_journal(tmp_path)

    with pytest.raises(InvalidParameter):
        journal.charge(charges, run=run, purpose=purpose)
    assert not journal.path.exists()
    assert not announcement_of(journal).exists()
