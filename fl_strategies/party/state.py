"""State that a party keeps between messages, the counterpart of a server's `State`.

Flower holds it as records for the duration of a run; `clients.kept_run` also keeps them on
disk. A party's state declares the records and their types.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fl_strategies._util.arrays import Array
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, decode_arrays, encode_arrays

Plain = TypeVar("Plain", str, int)

_SPENT = "privacy-spent"


@dataclass(frozen=True)
class Field:
    """An attribute of a `PartyState`, kept in the record of this name.

    A record or value of a type other than declared counts as missing.
    """

    record: str


@dataclass(frozen=True)
class ScalarField(Field, Generic[Plain]):
    """A text or an integer, stored by name in a shared record."""

    name: str
    default: Plain

    def __get__(self, state: "PartyState", _: type) -> Plain:
        value = self._scalars(state).get(self.name)
        return value if isinstance(value, type(self.default)) else self.default

    def __set__(self, state: "PartyState", value: Plain) -> None:
        state.records[self.record] = ConfigRecord({**self._scalars(state), self.name: value})

    def _scalars(self, state: "PartyState") -> ConfigRecord:
        record = state.records.get(self.record)
        return record if isinstance(record, ConfigRecord) else ConfigRecord()


class ArraysField(Field):
    """Named arrays of numbers, read-only; None removes them."""

    def __get__(self, state: "PartyState", _: type) -> Mapping[str, Array] | None:
        record = state.records.get(self.record)
        return decode_arrays(record, sys.maxsize) if isinstance(record, ArrayRecord) else None

    def __set__(self, state: "PartyState", value: Mapping[str, Array] | None) -> None:
        if value is None:
            state.records.pop(self.record, None)
        else:
            state.records[self.record] = encode_arrays(value)


@dataclass(frozen=True)
class ArrayField(Field):
    """One array, stored by name in a record of its own, read-only; None removes it."""

    name: str

    def __get__(self, state: "PartyState", owner: type) -> Array | None:
        return (ArraysField(self.record).__get__(state, owner) or {}).get(self.name)

    def __set__(self, state: "PartyState", value: Array | None) -> None:
        ArraysField(self.record).__set__(state, None if value is None else {self.name: value})


@dataclass(frozen=True)
class KnowledgeField(Field):
    """Knowledge of one kind, such as a model with its learner's name; another is an error."""

    kind: str

    def __get__(self, state: "PartyState", _: type) -> Knowledge | None:
        arrays, meta = (state.records.get(name) for name in self._names)
        if not isinstance(arrays, ArrayRecord) or not isinstance(meta, ConfigRecord):
            return None
        content = RecordDict({keys.ARRAYS: arrays, keys.META: meta})
        return Knowledge.read(content, kind=self.kind, max_bytes=sys.maxsize)

    def __set__(self, state: "PartyState", value: Knowledge) -> None:
        content = RecordDict()
        value.write(content)
        written = zip(self._names, (content[keys.ARRAYS], content[keys.META]), strict=True)
        state.records.update(written)

    @property
    def _names(self) -> tuple[str, str]:
        return self.record, f"{self.record}-meta"


class PartyState:
    """State of every party; a strategy whose parties keep more adds fields in a subclass.

    Fields are written immediately: a charge stays if the rest of a message fails.

    Parameters
    ----------
    records : RecordDict, optional
        Flower's `Context.state`, or the records of another state; none if omitted.

    Examples
    --------
    >>> class MomentumState(PartyState):
    ...     momentum = ArraysField("mymethod-momentum")
    ...     steps = ScalarField("mymethod", "steps", 0)
    >>> state = PartyState()
    >>> MomentumState(state.records).steps += 2
    >>> MomentumState(state.records).steps, sorted(state.records)
    (2, ['mymethod'])
    """

    alone = ArrayField("alone", "alone")
    """Score of the party's own model on each held-out row."""
    answered_for = ScalarField("kept-run", "data", "")
    """Run and records that a state kept on disk belongs to."""
    num_answers = ScalarField("kept-run", "number", 0)
    """Number of answers that it covers."""

    def __init__(self, records: RecordDict | None = None) -> None:
        self.records = RecordDict() if records is None else records

    @property
    def has_released(self) -> bool:
        """Whether anything about the party's records has been released in this run."""
        return _SPENT in self.records

    def ledger(self, delta: float) -> PrivacyLedger:
        """Return the releases of this run about the party's records so far.

        A record that cannot be read is an error: it must not count as no release.
        """
        ledger, kept = PrivacyLedger("example", delta=delta), self.records.get(_SPENT)
        if kept is not None:
            ledger.load_state_dict(json.loads(str(kept["ledger"])))
        return ledger

    def charge(self, charges: Sequence[Entry], delta: float) -> PrivacyLedger:
        """Record a release, and return all releases of the run."""
        ledger = self.ledger(delta)
        ledger.charge_all(charges)
        self.records[_SPENT] = ConfigRecord({"ledger": json.dumps(ledger.state_dict())})
        return ledger
