"""The ledger of a party on its own disk, which no server and no restart can reset.

`PartyJournal.charge` locks the folder, compares everything with what it has read before,
reads what is new, checks the budget, writes one line, waits until the disk has it and only
then returns; only then may a release leave.

Torn lines
    A line is first announced in a file next to the journal, which is replaced atomically and
    so is never torn, and then appended. An announced line counts as spent, whether it was
    appended completely, partly or not at all; the next charge completes the journal, so a
    crash needs no attention and costs at most one release that never left. Any other
    damage is refused until the data owner restores the files or calls `repair`.
Changed data
    A fingerprint changes with every record, number type and order. If changed data started
    at zero, adding one record would give all others a second budget. Data that are new to
    a journal are therefore refused, unless their owner says that they are the same set
    after a change (``changing=True``): then old and new compose. Other data take another
    name; the same data under a second name in the same folder are refused as well.
Not covered
    Checksums detect accidents, not forgery: anybody who may write to the folder can delete
    the journal. Releases of another unit or from another folder are not seen. A fingerprint
    can confirm a guess about few records, so it stays in the file and out of all errors.

A line is read once in a process. Afterwards its bytes are only compared, all at once by
their hash, because a damaged journal must be noticed whenever it is used.
"""

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from fl_strategies._util import (
    Array,
    beside,
    content_hash,
    locked,
    make_folder,
    replace_file,
    sync_folder,
    write_through,
)
from fl_strategies.errors import (
    CorruptJournal,
    InvalidData,
    JournalUnavailable,
    PrivacyBudgetExceeded,
    check_delta,
    check_positive,
    require,
)
from fl_strategies.privacy.accountant import Entry, delta_at
from fl_strategies.privacy.events import (
    PrivacyEvent,
    SubsampleEvent,
    Unit,
    event_from_json,
    event_to_json,
)
from fl_strategies.privacy.ledger import PrivacyLedger

_ALLOWANCE = "Allowance"


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """A limit on the charges to records.

    A sample that is used in the clear spends delta whatever epsilon is, and far more of it
    than noise is ever allowed. So it has a limit of its own: up to `sample_delta`, the
    probability of being in a sample comes on top of `delta`, and noise gains nothing from it.
    A larger probability must fit into `delta` itself.

    Parameters
    ----------
    max_epsilon : float, optional
        None: no limit.
    delta : float
    sample_delta : float
        Largest probability that a record is ever in a sample; all samples compose.

    Examples
    --------
    >>> sample = SubsampleEvent(records=100, samples=10, replacement=False)
    >>> Allowance(max_epsilon=1.0, sample_delta=0.1).delta_of([(sample, 1)])
    0.100009
    >>> Allowance(max_epsilon=1.0, sample_delta=0.1).delta_of([(sample, 2)])
    1e-05
    """

    max_epsilon: float | None = None
    delta: float = 1e-5
    sample_delta: float = 0.0

    def __post_init__(self) -> None:
        """Check the limits."""
        check_delta(_ALLOWANCE, self.delta)
        if self.max_epsilon is not None:
            check_positive(_ALLOWANCE, "max_epsilon", self.max_epsilon)
        share = self.sample_delta
        require(0 <= share < 1, _ALLOWANCE, "sample_delta", "at least 0 and below 1", share)

    def delta_of(self, entries: Sequence[Entry]) -> float:
        """Return the delta at which these releases are checked."""
        samples = [entry for entry in entries if isinstance(entry[0], SubsampleEvent)]
        drawn = delta_at(samples, 0.0)
        within = 0 < drawn <= self.sample_delta
        return drawn + (1 - drawn) * self.delta if within else self.delta

    def ledger(
        self, unit: Unit, past: Sequence[Sequence[Entry]], planned: Sequence[Entry] = ()
    ) -> PrivacyLedger:
        """Return a ledger of past releases that is ready to charge what is planned."""
        entries = [entry for release in past for entry in release]
        delta = self.delta_of([*entries, *planned])
        ledger = PrivacyLedger(unit, delta=delta, max_epsilon=self.max_epsilon)
        for release in past:
            ledger.compose_all(release)
        return ledger


SCHEMA = 1
# A server that names its runs must not fill the party's disk.
MAX_TEXT = 200

_HEAD = b'{"checksum":"'
_DIGITS = slice(len(_HEAD), len(_HEAD) + 64)
_BODY = slice(_DIGITS.stop + 2, -1)
_MOST_REMEMBERED: Final = 64


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """One line, numbered from 1: the charge of one call, with its data and time."""

    sequence: int
    fingerprint: str
    charges: tuple[Entry, ...]
    run: str
    purpose: str
    time: str


def sealed_line(previous: bytes, entry: JournalEntry) -> bytes:
    """Return an entry as the line that follows the one with the checksum `previous`."""
    charges = [{"event": event_to_json(e), "count": int(n)} for e, n in entry.charges]
    fields = {"schema": SCHEMA, **vars(entry), "charges": charges}
    body = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode("ascii")
    return _seal(previous, body)


def _seal(previous: bytes, body: bytes) -> bytes:
    """Return the line: its checksum covers the body and, by `previous`, all lines before."""
    checksum = hashlib.sha256(previous + body).hexdigest().encode()
    return _HEAD + checksum + b'",' + body[1:] + b"\n"


def _decode(body: bytes) -> JournalEntry:
    fields: dict[str, Any] = json.loads(body)
    if (schema := fields.pop("schema")) != SCHEMA:
        raise InvalidData(f"schema {schema!r} is none of this version")
    charges = tuple(
        (_event_of(json.dumps(charge["event"], allow_nan=False)), charge["count"])
        for charge in fields.pop("charges")
    )
    entry = JournalEntry(charges=charges, **fields)
    texts = (entry.fingerprint, entry.run, entry.purpose, entry.time)
    if type(entry.sequence) is not int or not all(isinstance(text, str) for text in texts):
        raise InvalidData("its fields are of other types")
    if not all(type(count) is int for _, count in charges):
        raise InvalidData("its counts are not whole")
    return entry


@lru_cache(maxsize=4096)
def _event_of(text: str) -> PrivacyEvent:
    """Return the event, cached: most lines repeat one of a few, and checking is expensive."""
    return event_from_json(json.loads(text))


@dataclass
class Lines:
    """The state after a sequence of sound lines, of which `last` is the last."""

    checksum: bytes
    """Of the last line, which the next one continues."""
    entries: list[JournalEntry] = field(default_factory=list)
    releases: dict[tuple[Entry, ...], int] = field(default_factory=dict)
    """Number of times each release was made, in the order of the first of its kind."""
    samples: list[Entry] = field(default_factory=list)
    """Secret samples, in their order."""
    fingerprints: set[str] = field(default_factory=set)
    last: bytes = b""

    @classmethod
    def none_of(cls, unit: Unit) -> "Lines":
        """Return the state of an empty journal of a unit."""
        return cls(hashlib.sha256(unit.encode()).hexdigest().encode())

    def copy(self) -> "Lines":
        """Return a copy that can be continued independently."""
        return replace(
            self,
            entries=[*self.entries],
            releases={**self.releases},
            samples=[*self.samples],
            fingerprints={*self.fingerprints},
        )

    def follow(self, line: bytes) -> str:
        """Take the next line; return why it is invalid, or ""."""
        body = b"{" + line[_BODY]
        if not line.endswith(b"\n"):
            return "a line that was cut off"
        if line != _seal(self.checksum, body):
            return "a line that does not fit its checksum"
        try:
            entry = _decode(body)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            return f"a line that cannot be read ({str(error).rstrip('.')[:MAX_TEXT]})"
        if entry.sequence != len(self.entries) + 1:
            return f"number {entry.sequence}"
        self.entries.append(entry)
        self.releases[entry.charges] = self.releases.get(entry.charges, 0) + 1
        self.samples += [e for e in entry.charges if isinstance(e[0], SubsampleEvent)]
        self.fingerprints.add(entry.fingerprint)
        self.checksum, self.last = line[_DIGITS], line
        return ""


@dataclass
class Contents:
    """Trusted content of a journal's two files.

    `end` is the length of the sound lines in the journal itself, `unfinished` the announced
    line if it is not among them, `trouble` what is wrong after them.
    """

    lines: Lines
    end: int = 0
    unfinished: bytes = b""
    trouble: str = ""


@dataclass
class _Remembered:
    """Lines that were sound, and the hash of their bytes."""

    lines: Lines
    end: int
    digest: bytes


# By the journal's path. Whoever reads a journal has the lock of its folder.
_remembered: OrderedDict[str, _Remembered] = OrderedDict()


def read_contents(path: Path, unit: Unit, journal: bytes, announced: bytes) -> Contents:
    """Follow the journal as far as it is sound and see whether the announcement fits.

    Lines that this process has read before are not read again if their bytes are the same.
    """
    contents, wrong = _follow(path, unit, journal)
    lines = contents.lines
    if announced in (b"", lines.last) and not wrong:
        return contents
    number, continued = len(lines.entries) + 1, lines.copy()
    only_last_is_wrong = b"\n" not in journal[contents.end : -1]
    if only_last_is_wrong and announced and not continued.follow(announced):
        contents.lines, contents.unfinished = continued, announced
    elif wrong:
        contents.trouble = (
            f"line {number} of {path.name} must be as it was written, got {wrong}"
        )
    elif announced not in journal.splitlines(keepends=True):
        contents.trouble = (
            f"{path.name} must hold the line announced beside it, or all lines before that "
            f"one, got {number - 1} lines that it does not continue"
        )
    return contents


def _follow(path: Path, unit: Unit, journal: bytes) -> tuple[Contents, str]:
    """Return the sound lines, and what is wrong with the first after them, if anything."""
    name, wrong = str(path.absolute()), ""
    # Removed first: a state that an error leaves half done must not be cached.
    known = _remembered.pop(name, None)
    digest = hashlib.sha256(memoryview(journal)[: known.end if known else 0])
    if known is None or digest.digest() != known.digest:
        known, digest = _Remembered(Lines.none_of(unit), 0, b""), hashlib.sha256()
    for line in journal[known.end :].splitlines(keepends=True):
        if wrong := known.lines.follow(line):
            break
        known.end += len(line)
        digest.update(line)
    known.digest = digest.digest()
    _remembered[name] = known
    while len(_remembered) > _MOST_REMEMBERED:
        _remembered.popitem(last=False)
    return Contents(known.lines, known.end), wrong


_OWNER = "PartyJournal"


def data_fingerprint(x: Array, y: Array) -> str:
    """Return a fingerprint of private data, as 64 hexadecimal digits.

    Values, number types and the order of records all count.
    """
    return hashlib.sha256(f"{content_hash(x)} {content_hash(y)}".encode()).hexdigest()


class PartyJournal:
    """All releases that a party has ever made about its data, and the limit on them.

    Nothing is read or written before a method is called. Every method raises
    `CorruptJournal` for a damaged journal, `InvalidData` for one of other data and
    `JournalUnavailable` if the disk fails; in each case nothing may leave the party.

    Parameters
    ----------
    folder : Path
        Made if it is missing, for its owner only. All journals in it share one lock.
    fingerprint : str
        Of the private data; see `data_fingerprint`.
    name : str
        The owner's name for this data set. One set keeps one name for ever.
    changing : bool
        Whether data with a new fingerprint may compose with the old data of this name.
    unit : "example" or "party"
        A party that promises both keeps a journal for each and charges both.
    delta : float
        At which the budget is checked.
    max_epsilon : float, optional
        The budget over the whole life of the data; None records without a limit.
    sample_delta : float (default: 0)
        Largest probability, besides delta, that a record is ever in a sample that is used in
        the clear (FedMD's nfdp); see `Allowance`.

    Examples
    --------
    >>> import tempfile
    >>> from fl_strategies.privacy.events import LaplaceEvent
    >>> mean = LaplaceEvent(unit="example", relation="replace-one", scale=4, l1_sensitivity=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     journal = PartyJournal(Path(folder), fingerprint="0" * 64, max_epsilon=1.0)
    ...     spent = journal.charge([(mean, 2)], run="7", purpose="means")
    ...     round(spent.get_epsilon(), 3), round(journal.epsilon(), 3)
    (0.5, 0.5)
    """

    def __init__(
        self,
        folder: Path,
        *,
        fingerprint: str,
        name: str = "private-data",
        changing: bool = False,
        unit: Unit = "example",
        delta: float = 1e-5,
        max_epsilon: float | None = None,
        sample_delta: float = 0.0,
    ) -> None:
        hexadecimal = re.fullmatch("[0-9a-f]{64}", fingerprint) is not None
        require(hexadecimal, _OWNER, "fingerprint", "one of data_fingerprint", "another text")
        plain = re.fullmatch("[A-Za-z0-9_-]{1,100}", name) is not None
        require(plain, _OWNER, "name", "1 to 100 letters, digits, '-' or '_'", name)
        self.folder = Path(folder)
        self.fingerprint = fingerprint
        self.changing = changing
        self.unit, self.delta, self.max_epsilon = unit, delta, max_epsilon
        self.allowance = Allowance(
            max_epsilon=max_epsilon, delta=delta, sample_delta=sample_delta
        )
        PrivacyLedger(unit, delta=delta)  # which checks them
        self.path = self.folder / f"{name}.{unit}.jsonl"
        self._announced_path = beside(self.path, "announced")

    def charge(self, charges: Sequence[Entry], *, run: str, purpose: str) -> PrivacyLedger:
        """Record a release before it leaves; it may leave only after this call.

        Return a ledger of everything so far. A release charged twice is counted twice.

        Parameters
        ----------
        charges : sequence of (event, count)
            One batch, whose queries were fixed before its first answer.
        run, purpose : str
            The run and the reason of the release, for the owner to read.

        Raises
        ------
        PrivacyBudgetExceeded
            Nothing was written, and nothing may leave.
        """
        with self._locked():
            contents = self._contents()
            line = self._next_line(contents, charges, run, purpose)
            ledger = self._ledger_of(contents, charges)
            ledger.charge_all(charges)
            if contents.unfinished:
                self._write(contents, contents.unfinished)
            self._write(contents, line)
        return ledger

    def check(self, charges: Sequence[Entry]) -> None:
        """Raise the errors of `charge` without writing anything; call this before long work."""
        self.ledger(charges).charge_all(charges)

    def require_budget(self) -> None:
        """Raise if no budget is left; call this before work of unknown cost."""
        limit = self.max_epsilon
        if limit is not None and (spent := self.epsilon()) >= limit:
            raise PrivacyBudgetExceeded(
                f"{_OWNER}: epsilon must be below {limit:g}, the max-epsilon at delta "
                f"{self.delta:g}, for anything to be released, got {spent:.6g}."
            )

    def ledger(self, planned: Sequence[Entry] = ()) -> PrivacyLedger:
        """Return a ledger of everything so far, with this journal's budget.

        It is ready to charge what is planned.
        """
        with self._locked():
            return self._ledger_of(self._contents(), planned)

    def epsilon(self) -> float:
        """Return the total epsilon so far, at this journal's delta."""
        return self.ledger().get_epsilon()

    def entries(self) -> list[JournalEntry]:
        """Return every line, an announced one included."""
        with self._locked():
            return list(self._contents().lines.entries)

    def releases_of(self, run: str) -> list[Sequence[Entry]]:
        """Return the charges of each release of one run."""
        return [entry.charges for entry in self.entries() if entry.run == run]

    def repair(self, charges: Sequence[Entry], *, run: str, purpose: str) -> PrivacyLedger:
        """Continue after damage: replace untrusted lines by charges that the owner states.

        For the data owner, after review. Everything after the last sound line is kept in a
        file of its own and no longer counts; `charges` counts in its place, whatever the
        budget: it must cover everything that may have been released since that line. If that is
        unknown, a `NonPrivateEvent` is honest. `run` and `purpose` say who decided, and why.
        """
        with self._locked():
            contents = self._contents(repairing=True)
            require(contents.trouble != "", _OWNER, "the journal", "damaged", "a sound one")
            line = self._next_line(contents, charges, run, purpose)
            PrivacyLedger(self.unit).charge_all(charges)  # which checks them
            rest = _read(self.path)[contents.end :] + _read(self._announced_path)
            replace_file(beside(self.path, f"damaged-{len(contents.lines.entries) + 1}"), rest)
            self._write(contents, line)
        return self.ledger()

    def _contents(self, *, repairing: bool = False) -> Contents:
        journal, announced = _read(self.path), _read(self._announced_path)
        contents = read_contents(self.path, self.unit, journal, announced)
        if contents.trouble and not repairing:
            raise CorruptJournal(
                f"{_OWNER}: {contents.trouble}. Restore {self.path.name} and "
                f"{self._announced_path.name} from a backup, or call repair() with all that "
                f"may have been released since the last sound line."
            )
        self._check_data(contents.lines.fingerprints)
        return contents

    def _check_data(self, known: set[str]) -> None:
        """Refuse data that are new to this journal, or known to another one."""
        if self.fingerprint in known:
            return
        if known and not self.changing:
            raise InvalidData(
                f"{_OWNER}: the private data must be those of {self.path.name}, got others. "
                f"If they are the same set after a change, open it with changing=True "
                f"(data-changes = true in a node-config), so that both compose; if not, give "
                f"them a name of their own (another state-dir)."
            )
        for other in sorted(self.folder.glob(f"*.{self.unit}.jsonl*")):
            own = other.name.startswith(self.path.name)
            if not own and self.fingerprint.encode() in _read(other):
                raise InvalidData(
                    f"{_OWNER}: the name must be the one under which these data are known, "
                    f"got {self.path.name} although {other.name} holds their releases."
                )

    def _ledger_of(self, contents: Contents, planned: Sequence[Entry] = ()) -> PrivacyLedger:
        lines = contents.lines
        delta = self.allowance.delta_of([*lines.samples, *planned])
        ledger = PrivacyLedger(self.unit, delta=delta, max_epsilon=self.max_epsilon)
        for release, times in lines.releases.items():
            ledger.compose_all(release, times=times)
        return ledger

    def _next_line(
        self, contents: Contents, charges: Sequence[Entry], run: str, purpose: str
    ) -> bytes:
        require(len(charges) > 0, _OWNER, "charges", "at least one", len(charges))
        for name, text in (("run", run), ("purpose", purpose)):
            fits = 0 < len(text) <= MAX_TEXT
            require(fits, _OWNER, name, f"a text of 1 to {MAX_TEXT} characters", len(text))
        entry = JournalEntry(
            sequence=len(contents.lines.entries) + 1,
            fingerprint=self.fingerprint,
            charges=tuple(charges),
            run=run,
            purpose=purpose,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        return sealed_line(contents.lines.checksum, entry)

    def _write(self, contents: Contents, line: bytes) -> None:
        """Announce a line and append it to the sound ones, dropping any torn remainder."""
        replace_file(self._announced_path, line)
        write_through(self.path, line, after=contents.end)
        contents.end += len(line)
        sync_folder(self.folder)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep every other process and thread out of the folder."""
        try:
            make_folder(self.folder)
            with locked(self.folder / ".lock"):
                yield
        except OSError as error:
            raise JournalUnavailable(
                f"{_OWNER}: {self.path.name} must be in a folder (state-dir) that can be read "
                f"and written, got: {error.strerror or type(error).__name__}. Nothing left the "
                f"party."
            ) from error


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""
