"""The ledger of all releases about one kind of unit, its budget, and its statement in words.

The ledger has the interface of Flower's privacy accountants (compose, get_epsilon,
state_dict), but accounts for the events of this package. One call is one batch whose queries
were fixed before its first answer; between calls anything may depend on what was released
before.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from fl_strategies.errors import (
    InvalidData,
    PrivacyBudgetExceeded,
    StrategyError,
    check_count,
    check_delta,
    check_positive,
    require,
    require_data,
)
from fl_strategies.privacy import accountant
from fl_strategies.privacy.accountant import Claim, Entry, chance_in_clear, loss_of
from fl_strategies.privacy.events import (
    MOST,
    UNITS,
    DPSGDEvent,
    GaussianEvent,
    LaplaceEvent,
    NoisyMaxEvent,
    NonPrivateEvent,
    OneVoteEvent,
    PrivacyEvent,
    SubsampleEvent,
    ThresholdEvent,
    Unit,
    as_replace_one,
    check_event,
    event_from_json,
    event_to_json,
)

DEFAULT_DELTA: Final = 1e-5
# Beyond this the factor exp(epsilon) exceeds twenty thousand.
LARGE_EPSILON = 10
FEW_PARTIES = 50

SCHEMA = 1
_OWNER = "PrivacyLedger"
_STATE_KEYS = {
    "schema",
    "unit",
    "delta",
    "max_epsilon",
    "audience",
    "num_records",
    "num_parties",
    "entries",
}


@dataclass(frozen=True)
class _Tally:
    """Number of times an event happened, and of calls that began with it."""

    count: int
    batches: int


class PrivacyLedger:
    """Events about one unit, their total cost, and a budget for it.

    Parameters
    ----------
    unit : "party" or "example"
        Events of the other unit are refused.
    delta : float
        The delta of budgets, and of reports unless another is given.
    max_epsilon : float, optional
        The budget: `charge` refuses what would exceed it.
    audience : str
        The audience that the guarantee holds against, in words for `statement`.
    num_records, num_parties : int, optional
        Public sizes, for the warnings in `statement`.

    Examples
    --------
    >>> from fl_strategies.privacy.mechanisms import NoisyMax
    >>> votes = NoisyMax(
    ...     noise="gumbel", scale=25.0, sensitivity=1.0, unit="party", num_classes=2
    ... )
    >>> ledger = PrivacyLedger("party", max_epsilon=1.0)
    >>> ledger.charge_all(votes.charges(40))
    >>> round(ledger.get_epsilon(), 6)
    0.934913
    """

    def __init__(
        self,
        unit: Unit,
        *,
        delta: float = 1e-5,
        max_epsilon: float | None = None,
        audience: str = "everybody who sees what was released",
        num_records: int | None = None,
        num_parties: int | None = None,
    ) -> None:
        require(unit in UNITS, _OWNER, "unit", " or ".join(map(repr, UNITS)), unit)
        check_delta(_OWNER, delta)
        if max_epsilon is not None:
            check_positive(_OWNER, "max_epsilon", max_epsilon)
        require(bool(audience.strip()), _OWNER, "audience", "a few words", audience)
        for name, size in (("num_records", num_records), ("num_parties", num_parties)):
            if size is not None:
                check_count(_OWNER, name, size, least=1)
        self.unit: Unit = unit
        self.delta = float(delta)
        self.max_epsilon = None if max_epsilon is None else float(max_epsilon)
        self.audience = audience
        self.num_records = num_records
        self.num_parties = num_parties
        self._tallies: dict[PrivacyEvent, _Tally] = {}

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every distinct event with its count, in the order of first appearance."""
        return tuple((event, tally.count) for event, tally in self._tallies.items())

    @property
    def num_releases(self) -> int:
        """Number of releases in the ledger."""
        return sum(tally.count for tally in self._tallies.values())

    @property
    def adaptive(self) -> bool:
        """Whether anything could depend on an earlier answer: more than one batch."""
        return _adaptive(self._tallies)

    def _extended(self, charges: Iterable[Entry], times: int = 1) -> dict[PrivacyEvent, _Tally]:
        tallies, begun = dict(self._tallies), False
        for event, count in charges:
            check_event(_OWNER, event)
            require(event.unit == self.unit, _OWNER, "event.unit", repr(self.unit), event.unit)
            check_count(_OWNER, "count", count, least=1)
            old = tallies.get(event, _Tally(0, 0))
            more = times * int(count)
            require(old.count + more <= MOST, _OWNER, "count", f"at most {MOST}", more)
            # One call is one batch, however many events it has.
            tallies[event] = _Tally(old.count + more, old.batches + times * (not begun))
            begun = True
        return tallies

    def emptied(self) -> Self:
        """Return another ledger with the same settings and nothing in it."""
        return type(self).from_state_dict({**self.state_dict(), "entries": []})

    def compose(self, event: PrivacyEvent, count: int = 1) -> None:
        """Record an event that has happened, whatever its cost."""
        self.compose_all([(event, count)])

    def compose_all(self, charges: Iterable[Entry], *, times: int = 1) -> None:
        """Record several events of one release, whatever their cost; see `compose`.

        With `times`, as many releases of these events, one after the other.
        """
        self._tallies = self._extended(charges, times)

    def include(self, others: Iterable["PrivacyLedger"]) -> None:
        """Record everything in other ledgers of the same data, with its counts.

        A ledger of examples also accepts ledgers of parties, but not vice versa: a party with
        one different record is a different party, so events about a party's absence are
        restated for its replacement.
        """
        tallies = dict(self._tallies)
        for other in others:
            fits = other.unit in (self.unit, "party")
            require(fits, _OWNER, "unit", f"{self.unit!r} or 'party'", other.unit)
            for event, tally in other._tallies.items():
                own = event
                if other.unit != self.unit:
                    own = replace(as_replace_one(event), unit="example")
                old = tallies.get(own, _Tally(0, 0))
                count, batches = old.count + tally.count, old.batches + tally.batches
                tallies[own] = _Tally(min(count, MOST), min(batches, MOST))
        self._tallies = tallies

    def charge(self, event: PrivacyEvent, count: int = 1) -> None:
        """Record an event before it happens, unless it would exceed the budget.

        Raises
        ------
        PrivacyBudgetExceeded
            Nothing is recorded, and nothing must be released.
        """
        self.charge_all([(event, count)])

    def charge_all(self, charges: Iterable[Entry]) -> None:
        """Record several events of one release, all of them or none; see `charge`."""
        tallies = self._extended(charges)
        self._check_budget(tallies, "Nothing was recorded")
        self._tallies = tallies

    def check_budget(self) -> None:
        """Raise `PrivacyBudgetExceeded` if the recorded events exceed the budget."""
        self._check_budget(self._tallies, "It is recorded and nothing is made of it")

    def _check_budget(self, tallies: Mapping[PrivacyEvent, _Tally], outcome: str) -> None:
        if self.max_epsilon is None:
            return
        after = _claim(tallies, self.delta)
        if after.epsilon <= self.max_epsilon:
            return
        hint = f" ({after.reason})" if after.reason else ""
        advice = "release fewer rows or add more noise"
        if math.isinf(after.epsilon):
            advice = "choose a release with noise, or another strategy"
        raise PrivacyBudgetExceeded(
            f"{_OWNER}: epsilon must be at most {self.max_epsilon:g}, the max-epsilon at "
            f"delta {self.delta:g}, got {after.epsilon:.6g} with this release{hint}. "
            f"{outcome}; {advice}."
        )

    def claim(self, delta: float | None = None) -> Claim:
        """Return the smallest bound, with the method that proves it."""
        return _claim(self._tallies, self.delta if delta is None else delta)

    def get_epsilon(self, delta: float | None = None) -> float:
        """Return epsilon of everything recorded; infinite if something was unprotected."""
        return self.claim(delta).epsilon

    def bounds(self, delta: float | None = None) -> Mapping[str, float | None]:
        """Return epsilon by every method, None where one does not apply."""
        asked = self.delta if delta is None else delta
        return accountant.bounds(self.entries, asked, adaptive=self.adaptive)

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain strings and numbers, fit for JSON."""
        entries = [
            {"event": event_to_json(event), "count": tally.count, "batches": tally.batches}
            for event, tally in self._tallies.items()
        ]
        return {
            "schema": SCHEMA,
            "unit": self.unit,
            "delta": self.delta,
            "max_epsilon": self.max_epsilon,
            "audience": self.audience,
            "num_records": self.num_records,
            "num_parties": self.num_parties,
            "entries": entries,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the recorded events by those of another ledger of the same unit.

        Settings such as the budget stay as they are: a file cannot raise a limit.

        Raises
        ------
        InvalidData
            For another schema or unit, or anything that `state_dict` would not write. The
            ledger is then unchanged.
        """
        _check_state(state)
        unit, rule = state["unit"], repr(self.unit)
        require_data(unit == self.unit, _OWNER, "the state's unit", rule, repr(unit))
        tallies = dict(map(_read_tally, state["entries"]))
        if len(tallies) < len(state["entries"]):
            raise InvalidData(f"{_OWNER}: the state's events must be distinct, got repeats.")
        if tallies and not any(tally.batches for tally in tallies.values()):
            raise InvalidData(f"{_OWNER}: events must come in batches, got none.")
        if any(event.unit != self.unit for event in tallies):
            raise InvalidData(f"{_OWNER}: all events must be of one unit, got both.")
        self._tallies = tallies

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the ledger that `state_dict` wrote, settings included."""
        _check_state(state)
        settings = {key: state[key] for key in _STATE_KEYS - {"schema", "entries"}}
        try:
            ledger = cls(**settings)
        except (StrategyError, TypeError, AttributeError) as error:
            raise InvalidData(
                f"{_OWNER}: the state's settings must be valid, got an error: {error}"
            ) from error
        ledger.load_state_dict(state)
        return ledger

    def statement(self) -> str:
        """Return who is protected against whom, with which epsilon, and what is not covered."""
        claim, chance = self.claim(), chance_in_clear(self.entries)
        percent = math.ceil(1000 * chance - 1e-6) / 10
        # Delta comes first where it is not small: a sample protects nobody who is in it.
        sample = f"In short: a record is used in the clear with chance {percent:g} %."
        protected = "Not protected" if math.isinf(claim.epsilon) else "Protected"
        lines = [
            *([sample] if chance > 0 else []),
            f"{protected}: {_PROTECTED[self.unit]}",
            f"Against: {self.audience}.",
            f"Guarantee: {_guarantee(self, claim)}",
            f"Releases: {describe_releases(self.entries)}",
            *(f"Not covered: {sentence}" for sentence in _not_covered(self.unit, claim)),
            *(f"Warning: {sentence}" for sentence in _warnings(self, claim)),
        ]
        return "\n".join(lines)


def _adaptive(tallies: Mapping[PrivacyEvent, _Tally]) -> bool:
    if all(loss_of(e).mu is not None and loss_of(e).pure is None for e in tallies):
        return False  # Gaussian noise composes exactly, however it was asked for
    return sum(tally.batches for tally in tallies.values()) > 1


def cost_of(batches: Iterable[Sequence[Entry]], delta: float) -> float:
    """Return the epsilon that a ledger reports after these batches, by its own rule."""
    ledger = None
    for charges in batches:
        ledger = ledger or PrivacyLedger(charges[0][0].unit, delta=delta)
        ledger.compose_all(charges)
    return 0.0 if ledger is None else ledger.get_epsilon()


def _claim(tallies: Mapping[PrivacyEvent, _Tally], delta: float) -> Claim:
    entries = [(event, tally.count) for event, tally in tallies.items()]
    return accountant.claim(entries, delta, adaptive=_adaptive(tallies))


def _check_state(state: Mapping[str, Any]) -> None:
    schema = state.get("schema") if isinstance(state, Mapping) else None
    same = type(schema) is int and schema == SCHEMA
    require_data(same, _OWNER, "the state's schema", f"{SCHEMA}", repr(schema))
    odd = ", ".join(sorted(map(str, state.keys() ^ _STATE_KEYS)))
    complete, rule = state.keys() == _STATE_KEYS, f"those of schema {SCHEMA}"
    require_data(complete, _OWNER, "the state's keys", rule, f"a difference in {odd}")
    entries = state["entries"]
    listed, found = isinstance(entries, list), type(entries).__name__
    require_data(listed, _OWNER, "the state's entries", "a list", found)


def _read_tally(entry: object) -> tuple[PrivacyEvent, _Tally]:
    if not isinstance(entry, Mapping) or entry.keys() != {"event", "count", "batches"}:
        raise InvalidData(
            f"{_OWNER}: an entry must have event, count and batches, got {entry!r:.80}."
        )
    for name, least in (("count", 1), ("batches", 0)):
        value = entry[name]
        whole = type(value) is int and least <= value <= MOST
        rule = f"a whole number from {least} to {MOST}"
        require_data(whole, _OWNER, name, rule, repr(value))
    return event_from_json(entry["event"]), _Tally(entry["count"], entry["batches"])


_NOUN: Mapping[str, str] = {"party": "party", "example": "record"}
_PROTECTED: Mapping[str, str] = {
    "party": "each party as a whole, with all its records.",
    "example": "each single record of a party.",
}
_NOUNS: Mapping[str, str] = {"party": "parties", "example": "records"}
# Their number determines sampling rates, steps and the assignment to teachers.
_CHANGED: Mapping[str, str] = {
    "replace-one": "had one {unit} been replaced by any other",
    "add-remove-one": "had one {unit} been blanked, so that nothing learns from it while the "
    "number of {units} is public and stays the same",
}
_WORDS: Mapping[type[PrivacyEvent], str] = {
    NoisyMaxEvent: "label by noisy max ({0.noise} noise of scale {0.scale:g}, sensitivity "
    "{0.sensitivity:g}, {0.num_classes} classes)",
    OneVoteEvent: "label of one voter ({0.noise} noise of scale {0.scale:g}, "
    "{0.num_classes} classes)",
    ThresholdEvent: "test of agreement (gaussian noise of scale {0.scale:g})",
    LaplaceEvent: "vector (laplace noise of scale {0.scale:g})",
    GaussianEvent: "vector (gaussian noise of scale {0.scale:g})",
    SubsampleEvent: "secret sample of {0.samples} of {0.records} records",
    DPSGDEvent: "training by DP-SGD ({0.steps} steps, noise multiplier "
    "{0.noise_multiplier:g}, batches of {0.batch_size} of {0.records} records)",
    NonPrivateEvent: "release without protection ({0.reason})",
}


def _guarantee(ledger: PrivacyLedger, claim: Claim) -> str:
    if not ledger.entries:
        return "nothing has been released, so nothing has been revealed."
    if math.isinf(claim.epsilon):
        return f"none, because {claim.reason}."
    relations = {event.relation for event, _ in ledger.entries}
    blanked = relations == {"add-remove-one"}
    change = _CHANGED["add-remove-one" if blanked else "replace-one"]
    unit, units, epsilon = _NOUN[ledger.unit], _NOUNS[ledger.unit], _rounded_up(claim.epsilon)
    factor = f"{math.exp(epsilon):.3g}" if epsilon < 100 else f"exp({epsilon:g})"
    guarantee = (
        f"differential privacy with epsilon {epsilon:g} and delta {claim.delta:g}, proved "
        f"by the method {claim.method!r} without looking at the data. This means: "
        f"{change.format(unit=unit, units=units)}, the chance of any conclusion from what "
        f"was released would change by a factor of at most {factor}, except for "
        f"a chance of {claim.delta:g}."
    )
    if not blanked:
        return guarantee
    stronger = accountant.claim(
        ledger.entries, ledger.delta, adaptive=ledger.adaptive, replaced=True
    )
    return (
        f"{guarantee} Had one {unit} been replaced by any other, epsilon is "
        f"{_rounded_up(stronger.epsilon):g} at the same delta."
    )


def _rounded_up(epsilon: float) -> float:
    return math.ceil(epsilon * 1000) / 1000 if epsilon < math.inf else epsilon


def _warnings(ledger: PrivacyLedger, claim: Claim) -> Iterable[str]:
    if any(event.seeded for event, _ in ledger.entries):
        secret = [(replace(event, seeded=False), count) for event, count in ledger.entries]
        ideal = accountant.claim(secret, ledger.delta, adaptive=ledger.adaptive).epsilon
        yield (
            "seeded: not private. The noise can be computed again by whoever knows the seed; "
            f"with secret noise epsilon would be {ideal:.4g}."
        )
    by_party = ledger.unit == "party"
    population = ledger.num_parties if by_party else ledger.num_records
    if population is not None and ledger.delta >= 1 / population:
        yield (
            f"delta {ledger.delta:g} is not below 1 / {population}: publishing one "
            f"{_NOUN[ledger.unit]} at random would satisfy it."
        )
    if LARGE_EPSILON < claim.epsilon < math.inf:
        yield f"an epsilon above {LARGE_EPSILON} gives little protection."
    if by_party and population is not None and population < FEW_PARTIES:
        yield (
            f"with {population} parties, fewer than {FEW_PARTIES}, no noise hides a "
            f"party and keeps the answers useful."
        )


def _of_several(unit: Unit, claim: Claim) -> str:
    """Return the guarantee for a person whose data are in several units."""
    rule = (
        f"with k {_NOUNS[unit]} epsilon counts k times and delta 1 + exp(epsilon) + ... + "
        "exp((k - 1) epsilon) times"
    )
    if not 0 < claim.epsilon < math.inf:
        return f"{rule}."
    epsilon = _rounded_up(claim.epsilon)
    delta = min(1.0, claim.delta * (1 + math.exp(min(epsilon, 700.0))))
    return f"{rule}; with two {_NOUNS[unit]} epsilon is {2 * epsilon:g} and delta {delta:.3g}."


def _not_covered(unit: Unit, claim: Claim) -> Iterable[str]:
    yield "anything that left without being entered here."
    if math.isinf(claim.epsilon):
        yield (
            "figures computed from private data and reported beside the releases, such as "
            "accuracies, agreement of votes or a data-dependent epsilon."
        )
        yield "rows held out for testing, wherever results on them are reported."
    else:
        yield (
            "figures computed from private votes where a setting asks for them by name, such "
            "as their agreement or a data-dependent epsilon."
        )
        yield (
            "rows held out for testing, of which parties report no accuracy or other metric "
            "under this promise unless they declare the rows public."
        )
    yield "settings that were chosen by trying them on private data."
    yield (
        "how many parties, records and classes there are, and how many records of each "
        "class where that is reported: these are taken as public."
    )
    if unit == "example":
        yield (
            "people with several records, whose losses add up, also over several parties: "
            + _of_several(unit, claim)
        )
    else:
        yield f"people whose data several parties hold: {_of_several(unit, claim)}"


def describe_releases(entries: Iterable[Entry]) -> str:
    """Describe the releases and their counts."""
    parts = [f"{count} x {_WORDS[type(event)].format(event)}" for event, count in entries]
    return "; ".join(parts) + "." if parts else "none."
