"""Privacy statements: a ledger's guarantee and its caveats in plain words."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from fl_strategies.privacy import accountant
from fl_strategies.privacy.accountant import Claim, Entry
from fl_strategies.privacy.bounds.nfdp import nfdp_tight
from fl_strategies.privacy.events import (
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
)

# Beyond this the factor exp(epsilon) exceeds twenty thousand.
LARGE_EPSILON = 10
FEW_PARTIES = 50

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


class Account(Protocol):
    """The subject of a statement, such as a `PrivacyLedger`."""

    unit: Unit
    delta: float
    audience: str
    num_parties: int | None
    num_records: int | None

    @property
    def entries(self) -> Sequence[Entry]:
        """The releases, with their counts."""

    @property
    def adaptive(self) -> bool:
        """Whether later releases depend on earlier ones."""

    def claim(self) -> Claim:
        """Return the guarantee."""


def statement_of(ledger: Account) -> str:
    """Return who is protected against whom, with which epsilon, and what is not covered."""
    claim = ledger.claim()
    protected = "Not protected" if math.isinf(claim.epsilon) else "Protected"
    lines = [
        *(f"In short: {sentence}" for sentence in _in_short(ledger.entries)),
        f"{protected}: {_PROTECTED[ledger.unit]}",
        f"Against: {ledger.audience}.",
        f"Guarantee: {_guarantee(ledger, claim)}",
        f"Releases: {describe_releases(ledger.entries)}",
        *(f"Not covered: {sentence}" for sentence in _not_covered(ledger.unit, claim)),
        *(f"Warning: {sentence}" for sentence in _warnings(ledger, claim)),
    ]
    return "\n".join(lines)


def chance_in_clear(entries: Iterable[Entry]) -> float:
    """Return the probability that a record is in a sample that is used without noise.

    Examples
    --------
    >>> chance_in_clear([(SubsampleEvent(records=100, samples=30, replacement=False), 1)])
    0.3
    """
    samples = [(event, count) for event, count in entries if isinstance(event, SubsampleEvent)]
    if len(samples) == 1:
        return _chance(*samples[0])
    return 1 - math.prod(1 - _chance(event, count) for event, count in samples)


def _chance(event: SubsampleEvent, count: int) -> float:
    drawn = nfdp_tight(event.records, event.samples, replacement=event.replacement, runs=count)
    return drawn.delta


def _in_short(entries: Sequence[Entry]) -> Iterable[str]:
    """Explain delta first where it is not small: a sample protects nobody who is in it."""
    chance = chance_in_clear(entries)
    if chance > 0:
        percent = math.ceil(1000 * chance - 1e-6) / 10
        yield f"a record is used in the clear with chance {percent:g} %."


def _guarantee(ledger: Account, claim: Claim) -> str:
    if not ledger.entries:
        return "nothing has been released, so nothing has been revealed."
    if math.isinf(claim.epsilon):
        return f"none, because {claim.reason}."
    relations = {event.relation for event, _ in ledger.entries}
    blanked = relations == {"add-remove-one"}
    change = _CHANGED["add-remove-one" if blanked else "replace-one"]
    unit, units, epsilon = _NOUN[ledger.unit], _NOUNS[ledger.unit], _rounded_up(claim.epsilon)
    return (
        f"differential privacy with epsilon {epsilon:g} and delta {claim.delta:g}, proved "
        f"by the method {claim.method!r} without looking at the data. This means: "
        f"{change.format(unit=unit, units=units)}, the chance of any conclusion from what "
        f"was released would change by a factor of at most {_factor(epsilon)}, except for "
        f"a chance of {claim.delta:g}." + (_if_replaced(ledger) if blanked else "")
    )


def _if_replaced(ledger: Account) -> str:
    stronger = accountant.claim(
        ledger.entries, ledger.delta, adaptive=ledger.adaptive, replaced=True
    )
    return (
        f" Had one {_NOUN[ledger.unit]} been replaced by any other, epsilon is "
        f"{_rounded_up(stronger.epsilon):g} at the same delta."
    )


def _rounded_up(epsilon: float) -> float:
    return math.ceil(epsilon * 1000) / 1000 if epsilon < math.inf else epsilon


def _warnings(ledger: Account, claim: Claim) -> Iterable[str]:
    if any(event.seeded for event, _ in ledger.entries):
        yield _seeded_warning(ledger)
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


def _seeded_warning(ledger: Account) -> str:
    secret = [(replace(event, seeded=False), count) for event, count in ledger.entries]
    ideal = accountant.claim(secret, ledger.delta, adaptive=ledger.adaptive).epsilon
    return (
        "seeded: not private. The noise can be computed again by whoever knows the seed; "
        f"with secret noise epsilon would be {ideal:.4g}."
    )


def _factor(epsilon: float) -> str:
    return f"{math.exp(epsilon):.3g}" if epsilon < 100 else f"exp({epsilon:g})"


def _of_several(unit: Unit, claim: Claim) -> str:
    """Return the guarantee for a person whose data are in several units."""
    rule = (
        f"with k {_NOUNS[unit]} epsilon counts k times and delta 1 + exp(epsilon) + ... + "
        f"exp((k - 1) epsilon) times"
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
