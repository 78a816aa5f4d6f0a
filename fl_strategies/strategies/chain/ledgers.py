"""One ledger for what several strategies have released about the same data."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from fl_strategies.core.accounting import AUDIENCES
from fl_strategies.core.reported_ledgers import most_expensive
from fl_strategies.core.strategy import KnowledgeStrategy
from fl_strategies.privacy.ledger import PrivacyLedger

_WEAKEST_FIRST: Final = (AUDIENCES["L0"], AUDIENCES["L1"])


def composed(links: Sequence[KnowledgeStrategy[Any]]) -> PrivacyLedger:
    """Return one ledger for what several strategies have released to the same parties."""
    ledgers = [link.ledger_ for link in links]
    by_party = [getattr(link.state, "ledgers", {}) for link in links]
    known = sorted({number for one in by_party for number in one})
    if not known:
        return compose_ledgers(ledgers)
    totals: dict[str, PrivacyLedger] = {}
    for number in known:
        own = [
            one[number][1] if number in one else ledger.emptied() if one else ledger
            for one, ledger in zip(by_party, ledgers, strict=True)
        ]
        total = compose_ledgers(own)
        totals.setdefault(json.dumps(total.state_dict()["entries"]), total)
    # What parties tell of epsilon is about their own past, not about this composition.
    return most_expensive((math.inf, total) for total in totals.values())


def compose_ledgers(ledgers: Sequence[PrivacyLedger]) -> PrivacyLedger:
    """Return a ledger of all that some ledgers have recorded about the same data.

    Of different units it is about an example; see `PrivacyLedger.include`. Delta is the
    largest of theirs.
    """
    mixed = len({ledger.unit for ledger in ledgers}) > 1
    unit = "example" if mixed else ledgers[0].unit
    audiences = [ledger.audience for ledger in ledgers]
    weakest = [audience for audience in _WEAKEST_FIRST if audience in audiences]
    total = PrivacyLedger(
        unit,
        delta=max(ledger.delta for ledger in ledgers),
        audience=[*weakest, audiences[-1]][0],
        num_records=_smallest(ledger.num_records for ledger in ledgers),
        num_parties=_smallest(ledger.num_parties for ledger in ledgers),
    )
    total.include(ledgers)
    return total


def _smallest(sizes: Iterable[int | None]) -> int | None:
    return min((size for size in sizes if size is not None), default=None)
