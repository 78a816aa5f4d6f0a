"""State that one round leaves to the next, and its form in a checkpoint.

`dump_state` turns nested containers, arrays, ledgers and the data classes that the caller
names into the bytes of an ``.npz`` archive; `load_state` rebuilds just these.
"""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Final

import numpy as np

from fl_strategies._util.arrays import Array
from fl_strategies.errors import InvalidData
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.server.members import Known
from fl_strategies.server.replies import PartyReply, PartyReport
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics

PRICE: Final[Sequence[str]] = (
    keys.EPSILON_PARTY,
    keys.DELTA_PARTY,
    keys.EPSILON_EXAMPLE,
    keys.DELTA_EXAMPLE,
    keys.NUM_RELEASES,
)
"""A party's report of the cost of all its releases."""


@dataclass(kw_only=True)
class State:
    """State of every strategy; one that leaves more to the next round adds fields.

    Parameters
    ----------
    ledger : PrivacyLedger
        What the run has released.
    round : int
        Rounds asked so far, over all calls of `start`.
    history : dict
        Metrics of the rounds, by phase and round.
    parties : dict of partition id to PartyReport
        What each party reported last.
    prices : dict of round to dict of partition id to metrics
        What each party's releases had cost by the end of a round, as it reports.
    members : dict
        Which node is which party.
    delivery : Knowledge, optional
        What parties are given after a round.
    ledgers : dict of partition id to (epsilon, ledger)
        What parties report that their training costs, where only they can know.
    """

    kinds: ClassVar[tuple[type, ...]] = (Knowledge, PartyReport)
    """Data classes that occur in the fields."""

    ledger: PrivacyLedger
    round: int = 0
    history: dict[str, dict[int, dict[str, Any]]] = field(
        default_factory=lambda: {"train": {}, "evaluate": {}}
    )
    parties: dict[int, PartyReport] = field(default_factory=dict)
    prices: dict[int, dict[int, Metrics]] = field(default_factory=dict)
    members: Known = field(default_factory=dict)
    delivery: Knowledge | None = None
    ledgers: dict[int, tuple[float, PrivacyLedger]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Return all fields by their names."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def note(self, replies: Iterable[PartyReply[None]], *, evaluated: bool) -> None:
        """Keep what parties report: after training also what their releases have cost."""
        for reply in replies:
            party, told = reply.partition_id, reply.metrics
            report = self.parties.setdefault(party, PartyReport(reply.learner_name, {}, {}))
            (report.evaluate if evaluated else report.train).update(told)
            if not evaluated:
                price = {key: told[key] for key in PRICE if key in told}
                self.prices.setdefault(self.round, {})[party] = price

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take what `to_dict` once gave."""
        for name, value in values.items():
            setattr(self, name, value)


_OWNER = "State"
_TREE = "tree"
_CONTAINERS: Mapping[str, type] = {"list": list, "tuple": tuple, "set": set}


def dump_state(values: Mapping[str, object], kinds: Sequence[type] = ()) -> bytes:
    """Return the values as bytes; raise `InvalidData` for anything that is not plain.

    Examples
    --------
    >>> load_state(dump_state({"rounds": {1: (0.5, None)}, "rows": np.arange(3)}))
    {'rounds': {1: (0.5, None)}, 'rows': array([0, 1, 2])}
    """
    writer = _Writer(kinds)
    tree = json.dumps(writer.write(dict(values))).encode()
    file = io.BytesIO()
    arrays: dict[str, Any] = {_TREE: np.frombuffer(tree, np.uint8), **writer.arrays}
    np.savez(file, **arrays)
    return file.getvalue()


def load_state(data: bytes, kinds: Sequence[type] = ()) -> dict[str, Any]:
    """Undo `dump_state`; raise `InvalidData` for bytes that it has not written."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            arrays = dict(archive)
        tree = json.loads(arrays.pop(_TREE).tobytes())
        state: dict[str, Any] = _Reader(kinds, arrays).read(tree)
    except InvalidData:
        raise
    except Exception as error:  # a damaged archive may fail in any way
        raise InvalidData(
            f"{_OWNER}: the file must be as it was written, got another "
            f"({type(error).__name__})."
        ) from error
    return state


class _Writer:
    """Collects arrays beside a tree; one that occurs twice is stored once."""

    def __init__(self, kinds: Sequence[type]) -> None:
        self._kinds = tuple(kinds)
        self._names: dict[int, str] = {}
        self.arrays: dict[str, Array] = {}

    def write(self, value: object) -> object:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return {"array": self._name(value)}
        if isinstance(value, Mapping):
            return {"dict": [[self.write(key), self.write(v)] for key, v in value.items()]}
        if isinstance(value, PrivacyLedger):
            return {"ledger": value.state_dict()}
        if is_dataclass(value) and type(value) in self._kinds:
            own = {field.name: getattr(value, field.name) for field in fields(value)}
            return {type(value).__name__: self.write(own)}
        for name, kind in _CONTAINERS.items():
            if type(value) is kind:
                return {name: [self.write(item) for item in value]}  # type: ignore[attr-defined]
        raise InvalidData(f"{_OWNER}: values must be plain, got {type(value).__name__}.")

    def _name(self, array: Array) -> str:
        name = self._names.setdefault(id(array), f"array-{len(self._names)}")
        self.arrays[name] = array
        return name


class _Reader:
    def __init__(self, kinds: Sequence[type], arrays: Mapping[str, Array]) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._arrays = arrays

    def read(self, tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        ((name, content),) = tree.items()
        if name == "array":
            return self._arrays[content]
        if name == "dict":
            return {self.read(key): self.read(value) for key, value in content}
        if name == "ledger":
            return PrivacyLedger.from_state_dict(content)
        if name in _CONTAINERS:
            return _CONTAINERS[name](self.read(item) for item in content)
        return self._kinds[name](**self.read(content))
