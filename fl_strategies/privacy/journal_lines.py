"""The lines of a journal: how they are written, and what is known of those that were read.

A line is read once in a process. Afterwards its bytes are only compared, all at once by
their hash, because a damaged journal must be noticed whenever it is used.
"""

import hashlib
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from fl_strategies.exceptions import InvalidData
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.events import (
    PrivacyEvent,
    SubsampleEvent,
    Unit,
    event_from_json,
    event_to_json,
)

SCHEMA = 1
# A server that names its runs must not fill the party's disk.
MAX_TEXT = 200

_HEAD = b'{"checksum":"'
_DIGITS = slice(len(_HEAD), len(_HEAD) + 64)
_BODY = slice(_DIGITS.stop + 2, -1)
_MOST_REMEMBERED: Final = 64


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """One line, counted from 1: what one call of `charge` spent, on which data and when."""

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
    charges = tuple((_event(c["event"]), c["count"]) for c in fields.pop("charges"))
    entry = JournalEntry(charges=charges, **fields)
    texts = (entry.fingerprint, entry.run, entry.purpose, entry.time)
    whole = all(type(count) is int for _, count in charges)
    if type(entry.sequence) is not int or not all(isinstance(text, str) for text in texts):
        raise InvalidData("its fields are of other types")
    if not whole:
        raise InvalidData("its counts are not whole")
    return entry


def _event(fields: Any) -> PrivacyEvent:
    return _event_of(json.dumps(fields, allow_nan=False))


@lru_cache(maxsize=4096)
def _event_of(text: str) -> PrivacyEvent:
    """Return the event; most lines repeat one of few, and checking it costs most."""
    return event_from_json(json.loads(text))


@dataclass
class Lines:
    """What sound lines say, one after the other.

    Attributes
    ----------
    checksum : bytes
        Of the last line, which the next one continues.
    entries : list of JournalEntry
    releases : dict of charges to int
        How often each release was made, in the order of the first of its kind.
    samples : list of (event, count)
        Secret samples, in their order.
    fingerprints : set of str
    last : bytes
        The last line.
    """

    checksum: bytes
    entries: list[JournalEntry] = field(default_factory=list)
    releases: dict[tuple[Entry, ...], int] = field(default_factory=dict)
    samples: list[Entry] = field(default_factory=list)
    fingerprints: set[str] = field(default_factory=set)
    last: bytes = b""

    @classmethod
    def none_of(cls, unit: Unit) -> "Lines":
        """Return what an empty journal of a unit holds."""
        return cls(hashlib.sha256(unit.encode()).hexdigest().encode())

    def copy(self) -> "Lines":
        """Return the same lines, to be continued apart."""
        return Lines(
            self.checksum,
            list(self.entries),
            dict(self.releases),
            list(self.samples),
            set(self.fingerprints),
            self.last,
        )

    def follow(self, line: bytes) -> str:
        """Take the next line; return why it is none, or nothing."""
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
        self._add(entry)
        self.checksum, self.last = line[_DIGITS], line
        return ""

    def _add(self, entry: JournalEntry) -> None:
        self.entries.append(entry)
        self.releases[entry.charges] = self.releases.get(entry.charges, 0) + 1
        self.samples += [e for e in entry.charges if isinstance(e[0], SubsampleEvent)]
        self.fingerprints.add(entry.fingerprint)


@dataclass
class Contents:
    """What the two files of a journal hold, as far as they can be trusted.

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
    # Taken out: what an error leaves half done is not remembered.
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
    _remember(name, known)
    return Contents(known.lines, known.end), wrong


def _remember(name: str, known: _Remembered) -> None:
    _remembered[name] = known
    while len(_remembered) > _MOST_REMEMBERED:
        _remembered.popitem(last=False)
