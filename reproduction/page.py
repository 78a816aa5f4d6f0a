"""The page of all tables, made from their files and from kept results.

What people have written stands above a mark and stays; all below it is made anew.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from reproduction.calculated import Calculated, calculate, calculation_names
from reproduction.table import (
    QUICK,
    Table,
    cpu_seconds_of,
    markdown,
    outcomes_of,
    table_names,
)
from simulations.experiments.engine import Outcome, read_outcomes
from simulations.results.report import markdown_table

COMMAND: Final = "python -m reproduction tables --write docs/reproduction.md"
MARK: Final = f"<!-- below made by: {COMMAND} -->"
BLOCK: Final = re.compile(r"(<!-- table (\w+) -->\n\n)(.*?)(\n\n<!-- end -->)", re.DOTALL)
GROUPS: Final[Mapping[str, str]] = {
    "fedkt": "FedKT",
    "fedkd": "FedKD",
    "fedmd": "FedMD and its noise-free privacy",
    "nfdp": "FedMD and its noise-free privacy",
    "codistill": "AKD, AvgKD, PKD and EKD",
    "consensus": "Our own: evidence",
}
"""Papers by the first word of a table's name, in the order of the page."""
OTHERS: Final = "Others"
ELSEWHERE: Final = """\
- [Table 2 of FedKT](results/fedkt.md#table-2-of-the-paper-and-the-same-for-less): with a \
class share that is known publicly, settings by accuracy on test rows of seeds 3 to 9, among \
about 470 combinations; it is the fourth configuration on the seeds reported, 0 to 2.
- [FedHistogram](results/fedhistogram.md): the number of divisions, by validation rows, \
after figures of seeds 200 to 204 with one division had been seen.
- [Robustness](results/robustness.md): the rule of trimming, after eight others had been \
tried on test rows of seeds 0 to 2; it is reported on other seeds."""
"""The same about figures that are in no table of this page."""
UNKNOWN: Final = "?"


def write_page(page: Path) -> None:
    """Make a page anew, and the tables between marks in the pages beside and below it."""
    results = page.parent / "results"
    page.write_text(page_text(page.read_text(encoding="utf-8"), results), encoding="utf-8")
    for other in sorted(page.parent.rglob("*.md")):
        text = other.read_text(encoding="utf-8")
        fresh = BLOCK.sub(lambda found: _block(found, results), text)
        if fresh != text:
            other.write_text(fresh, encoding="utf-8")


def _block(found: re.Match[str], results: Path) -> str:
    table = Table.load(found[2])
    return f"{found[1]}{markdown(table, results / f'{table.name}.json')}{found[4]}"


def page_text(written: str, results: Path) -> str:
    """Return a page: what is written above the mark, and all tables below."""
    head = written.partition(MARK)[0].rstrip("\n")
    tables = all_tables()
    sections = [_overview(tables, results)]
    titles = dict.fromkeys([*GROUPS.values(), OTHERS])
    for title in titles:
        shown = [_section(one, results) for one in tables if _group(one.name) == title]
        told = [text for text in shown if text]
        sections += [f"## {title}", *told] if told else []
    sections.append(_choices(tables))
    return "\n\n".join([head, MARK, *sections]) + "\n"


def all_tables() -> list[Table | Calculated]:
    """Return every table at every scale, by name; once if the paper's has all of the quick."""
    runs = [one for name in table_names() for one in _different_scales(name)]
    return sorted([*runs, *map(calculate, calculation_names())], key=lambda one: one.name)


@functools.cache  # every row is validated, and a page asks for each table several times
def _different_scales(name: str) -> list[Table]:
    quick = Table.load(name)
    others = [Table.load(name, scale) for scale in quick.scales[1:]]
    contained = any(one.rows == quick.rows and {*quick.seeds} <= {*one.seeds} for one in others)
    return others if contained else [quick, *others]


def _group(name: str) -> str:
    return GROUPS.get(name.partition("_")[0], OTHERS)


def _overview(tables: list[Table | Calculated], results: Path) -> str:
    header = ["table", "paper", "scale", "rows", "seeds", "CPU minutes", "measured"]
    rows = [[f"`{one.name}`", one.source, *facts(one, results)] for one in tables]
    return f"## All tables\n\n{markdown_table(header, rows)}"


def facts(table: Table | Calculated, results: Path) -> list[str]:
    """Return scale, rows, seeds, expected minutes, and how many runs there are results of."""
    if isinstance(table, Calculated):
        return ["", str(len(table.rows)), "", "0", "computed"]
    found, wanted = results_of(table, results), len(table.rows) * len(table.seeds)
    measured = f"{len(found)} of {wanted}" if 0 < len(found) < wanted else ""
    return [
        table.scale,
        str(len(table.rows)),
        str(len(table.seeds)),
        _minutes(table, found, wanted),
        measured or ("yes" if found else "not yet"),
    ]


def results_of(table: Table, results: Path) -> list[Outcome]:
    """Return the kept results of a table at its scale."""
    outcomes = read_outcomes(results / f"{table.name}.json")
    return [one for row in table.rows for one in outcomes_of(table, row, outcomes)]


def _to_show(table: Table, results: Path) -> bool:
    """Tell whether there are runs at its scale that the section of the first does not show."""
    first = _different_scales(table.name)[0]
    shown = [] if first.scale == table.scale else results_of(first, results)
    return any(one not in shown for one in results_of(table, results))


def _minutes(table: Table, found: list[Outcome], wanted: int) -> str:
    """Return how long it takes: as measured, if all of it was, or as its file says."""
    known = [second for second in map(cpu_seconds_of, found) if second is not None]
    if len(known) == wanted:
        return f"{sum(known) / 60:.0f}"
    return UNKNOWN if table.minutes is None else f"{table.minutes:g}"


def _section(table: Table | Calculated, results: Path) -> str:
    """Return a table with its remark and picture; nothing if it was never run."""
    if isinstance(table, Calculated):
        name, scale, text = table.name, "", table.markdown()
    elif not _to_show(table, results):
        return ""
    else:
        name, scale = table.name, "" if table.scale == QUICK else f"_{table.scale}"
        text = markdown(table, results / f"{name}.json")
    picture = f"{name}{scale}_rows.png"
    drawn = (results.parent / picture).exists()
    size = ", at the paper's size" if scale else ""
    parts = [f"### `{name}`{size}", text, table.remark.strip()]
    parts.append(f"![measured beside published]({picture})" if drawn else "")
    return "\n\n".join(part for part in parts if part)


def _choices(tables: list[Table | Calculated]) -> str:
    """Return in one place what test rows had a part in."""
    told = {
        one.name: one.chosen.strip() for one in tables if isinstance(one, Table) and one.chosen
    }
    lines = [f"- `{name}`: {text}" for name, text in told.items()]
    return "\n".join(["## Chosen after test rows had been seen", "", *lines, ELSEWHERE])
