"""What each party's releases have cost, round by round, as a table for other programs."""

import csv
import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from fl_strategies.core.strategy import KnowledgeStrategy
from fl_strategies.exceptions import MissingExtra
from fl_strategies.privacy.events import event_to_json
from fl_strategies.runtime.atomic_files import SHARED, replace_file
from fl_strategies.wire import keys

ALL: Final = "all"
COLUMNS: Final = (
    "round",
    "party",
    "unit",
    "epsilon",
    f"epsilon{keys.UNBOUNDED}",
    "delta",
    keys.NUM_RELEASES,
    "mechanism",
)
_UNITS: Final = (
    ("example", keys.EPSILON_EXAMPLE, keys.DELTA_EXAMPLE),
    ("party", keys.EPSILON_PARTY, keys.DELTA_PARTY),
)


def write_epsilon_csv(strategy: KnowledgeStrategy[Any], path: str | Path) -> None:
    """Write what each party's releases have cost by the end of each round.

    A figure is what the party itself reports, and counts everything that it has released by
    then. The lines of the party ``all`` have what the round's metrics say: the worst of all
    parties, or, where the server is trusted to add noise, what everybody else learns.

    Parameters
    ----------
    strategy : KnowledgeStrategy
        After a run, also one that failed.
    path : str or Path
        Of the file, which is replaced if it is there.

    Notes
    -----
    ``epsilon`` is empty and ``epsilon-unbounded`` true where nothing is promised, also
    because a party reports nothing. ``mechanism`` names the kinds of event in the run's ledger
    by which a finite epsilon holds; it is empty where that ledger promises nothing.
    """
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(_lines(strategy))
    replace_file(Path(path), text.getvalue().encode(), SHARED)


def _lines(strategy: KnowledgeStrategy[Any]) -> Iterator[dict[str, object]]:
    combined, mechanism = strategy.state.history["train"], _mechanism(strategy)
    prices = strategy.state.prices
    for number in sorted({*prices, *combined}):
        told: dict[object, Mapping[str, float]] = dict(sorted(prices.get(number, {}).items()))
        if number in combined:
            told[ALL] = combined[number]
        for party, figures in told.items():
            for unit, epsilon, delta in _UNITS:
                found = figures.get(epsilon, math.inf)
                bounded = math.isfinite(found)
                values = (
                    number,
                    party,
                    unit,
                    _known(found),
                    "false" if bounded else "true",
                    _known(figures.get(delta, math.nan)),
                    _known(figures.get(keys.NUM_RELEASES, math.nan)),
                    mechanism if bounded else "",
                )
                yield dict(zip(COLUMNS, values, strict=True))


def _known(figure: float) -> float | str:
    return figure if math.isfinite(figure) else ""


def _mechanism(strategy: KnowledgeStrategy[Any]) -> str:
    """Return the kinds of event that bound what a run costs; nothing if none does."""
    ledger = strategy.ledger_
    try:
        bounded = math.isfinite(ledger.get_epsilon())
    except MissingExtra:  # events of parties may need one
        return ""
    kinds = {str(event_to_json(event)["type"]) for event, _ in ledger.entries}
    return " ".join(sorted(kinds)) if bounded else ""
