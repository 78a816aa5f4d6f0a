"""Privacy events: a complete description of what was done to private data.

An event states the noise, its scale, the sensitivity to one unit, what a unit is and which
inputs are neighbours. Nothing else is needed to account for it. The set is closed: the
accountant refuses any class that is not listed here, subclasses included, because an event
that it cannot account for would be free. `accountant` defines the privacy loss of a single
release and composes releases; `mechanisms` creates events together with their noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

import numpy as np

from fl_strategies._util import Array
from fl_strategies.errors import (
    InvalidData,
    InvalidParameter,
    check_count,
    require,
    require_data,
)

Unit: TypeAlias = Literal["party", "example"]
Relation: TypeAlias = Literal["replace-one", "add-remove-one"]
Noise: TypeAlias = Literal["laplace", "gumbel", "gaussian"]

UNITS: tuple[str, ...] = get_args(Unit)
RELATIONS: tuple[str, ...] = get_args(Relation)
NOISES: tuple[Noise, ...] = get_args(Noise)

SCHEMA = 1
# Whole numbers beyond this are no longer exact once they meet a float.
MOST = 2**53
# Scales and sensitivities beyond this would overflow when they are multiplied.
LARGEST = 1e150
# Files from before vectors said how many entries they have.
_LEGACY_VALUES = 1000

# The rule of a field follows from its name: a positive number, or a whole number of at least
# this.
_POSITIVE: Final = (
    "scale",
    "sensitivity",
    "l1_sensitivity",
    "l2_sensitivity",
    "noise_multiplier",
)
_COUNTS: Final = {"num_classes": 2} | dict.fromkeys(
    ("num_values", "records", "samples", "batch_size", "steps"), 1
)


@dataclass(frozen=True, kw_only=True)
class PrivacyEvent:
    """Base of all events; never composed itself.

    Parameters
    ----------
    unit : "party" or "example"
        The unit whose presence or value is protected.
    relation : "replace-one" or "add-remove-one"
        Neighbouring inputs: one unit has different values, or is added or removed.
    seeded : bool
        Whether the noise came from a known seed, which protects nothing.
    """

    units: ClassVar[tuple[str, ...]] = UNITS
    relations: ClassVar[tuple[str, ...]] = RELATIONS

    unit: Unit
    relation: Relation
    seeded: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check(field.name)

    def _check(self, name: str) -> None:
        """Check one field, and normalise numbers: equal events must be equal."""
        choices = {"unit": self.units, "relation": self.relations, "noise": NOISES}
        value = getattr(self, name)
        if name in choices:
            known = isinstance(value, str) and value in choices[name]
            self._require(known, name, " or ".join(map(repr, choices[name])))
        elif name in _POSITIVE:
            plain = value.item() if isinstance(value, np.generic) else value
            number = isinstance(plain, int | float) and not isinstance(plain, bool)
            rule = f"a number greater than 0, below {LARGEST:g}"
            self._require(number and 0 < plain < LARGEST, name, rule)
            object.__setattr__(self, name, float(plain))
        elif name in _COUNTS:
            check_count(type(self).__name__, name, value, least=_COUNTS[name])
            self._require(value <= MOST, name, f"at most {MOST}")
            object.__setattr__(self, name, int(value))
        elif name in ("seeded", "replacement"):
            self._require(isinstance(value, bool), name, "True or False")

    def _require(self, holds: bool, name: str, rule: str) -> None:
        require(holds, type(self).__name__, name, rule, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class NoisyMaxEvent(PrivacyEvent):
    """One label: the class with the largest count after noise on every count.

    Parameters
    ----------
    noise : "laplace", "gumbel" or "gaussian"
    scale : float
        Scale of Laplace or Gumbel noise (1 / gamma), standard deviation of Gaussian noise.
    sensitivity : float
        The most by which adding or removing one unit moves a single count. Replacing one
        moves one count up and another down by it.
    num_classes : int
    """

    noise: Noise
    scale: float
    sensitivity: float
    num_classes: int


@dataclass(frozen=True, kw_only=True)
class OneVoteEvent(PrivacyEvent):
    """One label of one voter: the class with the largest value after noise on every class.

    The voter's class has the value 1 and all others 0, and replacing a unit may change the
    vote to any other. Answers are randomised response, because all other classes are alike.

    Parameters
    ----------
    noise : "laplace", "gumbel" or "gaussian"
    scale : float
    num_classes : int
    """

    relations = ("replace-one",)

    relation: Relation = "replace-one"
    noise: Noise
    scale: float
    num_classes: int


@dataclass(frozen=True, kw_only=True)
class ThresholdEvent(PrivacyEvent):
    """One yes or no: whether the largest count, with Gaussian noise, reaches a threshold.

    Parameters
    ----------
    scale : float
        Standard deviation.
    sensitivity : float
        The most by which one unit, added, removed or replaced, moves the largest count.
    """

    scale: float
    sensitivity: float


@dataclass(frozen=True, kw_only=True)
class LaplaceEvent(PrivacyEvent):
    """One vector with independent Laplace noise on every entry.

    Parameters
    ----------
    scale : float
    l1_sensitivity : float
        The most by which a neighbour under `relation` moves the vector, in L1 norm.
    num_values : int
        Entries of the vector, all of which are drawn with some error.
    """

    scale: float
    l1_sensitivity: float
    num_values: int = 1


@dataclass(frozen=True, kw_only=True)
class GaussianEvent(PrivacyEvent):
    """One vector with independent Gaussian noise on every entry.

    Parameters
    ----------
    scale : float
        Standard deviation.
    l2_sensitivity : float
        The most by which a neighbour under `relation` moves the vector, in L2 norm.
    num_values : int
        Entries of the vector, all of which are drawn with some error.
    """

    scale: float
    l2_sensitivity: float
    num_values: int = 1


@dataclass(frozen=True, kw_only=True)
class SubsampleEvent(PrivacyEvent):
    """One secret random sample of the records, used in the clear (noise-free privacy).

    Holds for examples that replace one another, the number of records being public.

    Parameters
    ----------
    records, samples : int
    replacement : bool
        Whether a record may be drawn more than once.
    """

    units = ("example",)
    relations = ("replace-one",)

    unit: Unit = "example"
    relation: Relation = "replace-one"
    records: int
    samples: int
    replacement: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.replacement or self.samples <= self.records
        self._require(fits, "samples", f"at most {self.records}")


@dataclass(frozen=True, kw_only=True)
class DPSGDEvent(PrivacyEvent):
    """One training run of DP-SGD with Poisson-sampled batches.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise divided by the clipping norm.
    records : int
    batch_size : int
        Expected size of a batch: it includes each record with probability batch_size / records.
    steps : int
    """

    units = ("example",)
    relations = ("add-remove-one",)

    unit: Unit = "example"
    relation: Relation = "add-remove-one"
    noise_multiplier: float
    records: int
    batch_size: int
    steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.batch_size <= self.records
        self._require(fits, "batch_size", f"at most {self.records}")


@dataclass(frozen=True, kw_only=True)
class NonPrivateEvent(PrivacyEvent):
    """Something left without protection: epsilon is infinite from here on.

    Parameters
    ----------
    reason : str
        Description of what left, for the privacy statement.
    """

    relation: Relation = "replace-one"
    reason: str

    def __post_init__(self) -> None:
        super().__post_init__()
        given = isinstance(self.reason, str) and bool(self.reason.strip())
        self._require(given, "reason", "a sentence that says what left unprotected")


EVENT_TYPES: Mapping[str, type[PrivacyEvent]] = {
    "noisy-max": NoisyMaxEvent,
    "one-vote": OneVoteEvent,
    "threshold": ThresholdEvent,
    "laplace": LaplaceEvent,
    "gaussian": GaussianEvent,
    "subsample": SubsampleEvent,
    "dp-sgd": DPSGDEvent,
    "non-private": NonPrivateEvent,
}
"""Every event there is, by its name in files."""

_NAMES = {kind: name for name, kind in EVENT_TYPES.items()}
_KNOWN = f"one of {', '.join(kind.__name__ for kind in _NAMES)}"


def check_event(owner: str, event: object) -> None:
    """Raise `InvalidParameter` unless `event` is exactly one of the known kinds."""
    require(type(event) in _NAMES, owner, "event", _KNOWN, type(event).__name__)


def event_to_json(event: PrivacyEvent) -> dict[str, Any]:
    """Return an event as plain strings and numbers.

    Examples
    --------
    >>> event_to_json(NonPrivateEvent(unit="party", reason="raw votes"))["type"]
    'non-private'
    """
    check_event("event_to_json", event)
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    return {"schema": SCHEMA, "type": _NAMES[type(event)], **values}


def event_from_json(data: Mapping[str, Any]) -> PrivacyEvent:
    """Return the event that `event_to_json` wrote.

    Raises
    ------
    InvalidData
        For another schema, an unknown type, a missing or an unknown field, or a value
        that the event itself refuses.
    """
    owner, mapped = "PrivacyEvent", isinstance(data, Mapping)
    require_data(mapped, owner, "data", "a mapping", type(data).__name__)
    schema, name = data.get("schema"), data.get("type")
    same = type(schema) is int and schema == SCHEMA
    require_data(same, owner, "schema", f"{SCHEMA}", repr(schema))
    known, rule = isinstance(name, str) and name in EVENT_TYPES, ", ".join(EVENT_TYPES)
    require_data(known, owner, "type", f"one of {rule}", repr(name))
    kind = EVENT_TYPES[str(name)]
    values = {key: value for key, value in data.items() if key not in ("schema", "type")}
    if kind in (LaplaceEvent, GaussianEvent):
        values.setdefault("num_values", _LEGACY_VALUES)
    expected = {field.name for field in fields(kind)}
    odd = ", ".join(sorted(map(str, values.keys() ^ expected)))
    rule, found = f"exactly {', '.join(sorted(expected))}", f"a difference in {odd:.200}"
    require_data(values.keys() == expected, owner, f"the fields of type {name!r}", rule, found)
    try:
        return kind(**values)
    except InvalidParameter as error:
        raise InvalidData(str(error)) from error


def as_replace_one(event: PrivacyEvent) -> PrivacyEvent:
    """Restate an event for replacing a unit, which is removing one and adding another."""
    if event.relation == "replace-one":
        return event
    if isinstance(event, LaplaceEvent):
        return replace(event, relation="replace-one", l1_sensitivity=2 * event.l1_sensitivity)
    if isinstance(event, GaussianEvent):
        return replace(event, relation="replace-one", l2_sensitivity=2 * event.l2_sensitivity)
    # The sensitivity of votes is that of adding one unit, under either relation.
    return replace(event, relation="replace-one")


def check_votes(owner: str, votes: Array) -> None:
    """Raise `InvalidData` unless `votes` (num_queries, num_classes) are counts."""
    shaped = votes.ndim == 2 and votes.shape[1] >= 2
    require_data(shaped, owner, "votes", "a table (queries, classes >= 2)", votes.shape)
    numeric = votes.dtype.kind in "iuf"
    require_data(numeric, owner, "votes", "an array of numbers", votes.dtype)
    if votes.size:
        good = votes.min() >= 0 and np.isfinite(votes.max())
        require_data(bool(good), owner, "votes", "finite and at least 0", votes.min())
