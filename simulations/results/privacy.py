"""The part of a report that a data protection officer reads: the promise and the ledger."""

import math
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from fl_strategies.privacy.events import NonPrivateEvent, PrivacyEvent
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.privacy.statement import chance_in_clear, describe_releases
from fl_strategies.wire import keys
from simulations.results.html import Html, card, element, grid, joined

Report: TypeAlias = Mapping[str, Any]

NOUNS: Final = {"party": "a party", "example": "a record"}
PROMISES: Final = (
    ("example", keys.EPSILON_EXAMPLE, keys.DELTA_EXAMPLE),
    ("party", keys.EPSILON_PARTY, keys.DELTA_PARTY),
)
CHANGES: Final = {
    "replace-one": "another in its place",
    "add-remove-one": "none in its place",
}


def promised(report: Report) -> tuple[str, str]:
    """Return the strongest promise in a few words: a large line and a small one."""
    clear = chance_in_clear(PrivacyLedger.from_state_dict(report["ledger"]).entries)
    if clear > 0:
        return f"{100 * clear:.3g} %", "chance that a record is used in the clear"
    last = report["rounds"][-1]["train"] if report["rounds"] else {}
    for unit, epsilon, delta in PROMISES:
        value = report.get(epsilon, last.get(epsilon))
        if value is not None and math.isfinite(value):
            at = report.get(delta, last.get(delta, 0.0))
            return f"epsilon {value:.3g}", f"for {NOUNS[unit]}, at delta {at:.3g}"
    return "no guarantee", "nothing hides what parties sent"


def privacy_section(report: Report) -> Html:
    """Return the statement as a list, and what it rests on as a table."""
    told: dict[str, list[str]] = {}
    for line in str(report["privacy-statement"]).splitlines():
        name, colon, sentence = line.partition(": ")
        told.setdefault(name if colon else "", []).append(sentence if colon else line)
    lines = [
        joined([element("dt", name), element("dd", _several(told[name]))]) for name in told
    ]
    ledger = report.get("ledger") or {}
    return card(
        "Privacy statement",
        element("dl", *lines),
        element("h3", "Ledger"),
        _ledger(ledger),
    )


def _several(sentences: list[str]) -> Html:
    if len(sentences) == 1:
        return element("span", sentences[0])
    return element("ul", *(element("li", sentence) for sentence in sentences))


def _ledger(state: Report) -> Html:
    entries = state.get("entries") or []
    if not entries:
        return element("p", "Nothing was released.", class_="soft")
    ledger = PrivacyLedger.from_state_dict(state)
    rows = [
        [
            describe_releases([(event, 1)]).removeprefix("1 x ").rstrip("."),
            NOUNS[event.unit],
            f"{count:,}",
            CHANGES[event.relation],
            "known to whoever has the seed" if event.seeded else _drawn(event),
        ]
        for event, count in ledger.entries
    ]
    limit = ledger.max_epsilon
    budget = "no budget was set" if limit is None else f"the budget was epsilon {limit:g}"
    note = f"Against {ledger.audience}. Delta {ledger.delta:.3g}; {budget}."
    table = grid(["release", "about", "times", "compared with", "noise"], rows, (2,))
    return joined([element("p", note, class_="soft"), table])


def _drawn(event: PrivacyEvent) -> str:
    """Return whether anything random hides a release."""
    return "none" if isinstance(event, NonPrivateEvent) else "secret"
