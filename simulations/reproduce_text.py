"""A table of experiments for people and for programs: measured beside published."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from fl_strategies.wire import keys
from simulations.published import WORDS
from simulations.report import summarise
from simulations.reproduce import (
    ALL_CPU,
    COLUMNS,
    Outcome,
    Row,
    Table,
    factor_of,
    figure_of,
    outcomes_of,
    read_outcomes,
)
from simulations.strict_json import write_json

EPSILONS: Final = {
    keys.EPSILON_PARTY: "ε of a party",
    keys.EPSILON_EXAMPLE: "ε of an example",
}
SECONDS: Final = "CPU s a run"
SENT: Final = "MB sent"
MEGA: Final = 1_000_000
NOT_MEASURED: Final = "nothing yet"


@dataclass(frozen=True)
class Cell:
    """One figure of a row: mean and deviation over seeds, and what the paper prints."""

    mean: float
    deviation: float
    decimals: int
    published: float | None = None

    @property
    def difference(self) -> float | None:
        """Measured minus published; None where nothing is published."""
        return None if self.published is None else self.mean - self.published

    def __str__(self) -> str:
        """Return mean and deviation."""
        return f"{self.mean:.{self.decimals}f} ± {self.deviation:.{self.decimals}f}"


@dataclass(frozen=True)
class Line:
    """A row and what was measured of it."""

    row: Row
    cells: Mapping[str, Cell]
    epsilons: Mapping[str, float]
    seeds: tuple[int, ...]
    cpu_seconds: float | None
    megabytes: float | None = None

    @property
    def differences(self) -> str:
        """Measured minus published, in the words of the column `paper`."""
        told = []
        for word, prefix in WORDS.items():
            gap = self.cells[prefix].difference if prefix in self.cells else None
            if gap is not None:
                told.append(f"{word} {gap:+.1f}" if prefix else f"{gap:+.1f}")
        return ", ".join(told).replace("-", "−")  # noqa: RUF001 - a minus, as tables have it


def lines_of(table: Table, outcomes: Sequence[Outcome]) -> list[Line]:
    """Return every row with what results there are."""
    return [_line(row, outcomes_of(table, row, outcomes)) for row in table.rows]


def _line(row: Row, found: Sequence[Outcome]) -> Line:
    cells = {prefix: cell for prefix in COLUMNS if (cell := _cell(row, found, prefix))}
    epsilons = {
        key: max(one[key] for one in found)
        for key in EPSILONS
        if found and all(_is_finite(one.get(key)) for one in found)
    }
    seconds = [one.get(ALL_CPU) or one.get("cpu-seconds") for one in found]
    known = [second for second in seconds if second is not None]
    seeds = tuple(one["settings"]["seed"] for one in found)
    sent = [one[keys.NUM_BYTES_SENT] / MEGA for one in found if one.get(keys.NUM_BYTES_SENT)]
    means = (fmean(numbers) if numbers else None for numbers in (known, sent))
    return Line(row, cells, epsilons, seeds, *means)


def _is_finite(epsilon: float | None) -> bool:
    return epsilon is not None and math.isfinite(epsilon)


def _cell(row: Row, found: Sequence[Outcome], prefix: str) -> Cell | None:
    figures = [figure_of(row, one, prefix) for one in found]
    known = [figure for figure in figures if figure is not None]
    if not known:
        return None
    factor = factor_of(found[0]["metric"])
    mean, deviation = summarise(known)
    decimals = 1 if factor > 1 else 4
    published = row.published.figures.get(prefix)
    return Cell(factor * mean, factor * deviation, decimals, published)


def markdown(table: Table, kept: Path) -> str:
    """Return the table for documentation: mean and deviation over seeds, in percent."""
    outcomes = read_outcomes(kept)
    lines = lines_of(table, outcomes)
    columns = _columns(lines, table.sizes)
    header = ["", *columns]
    rows = [[_name(table, line), *(show(line) for show in columns.values())] for line in lines]
    cells = ["| " + " | ".join(one) + " |" for one in [header, ["---"] * len(header), *rows]]
    return "\n".join([*cells, "", _caption(table, outcomes)])


def _name(table: Table, line: Line) -> str:
    """Return a row's name, with the number of its seeds where some are missing."""
    found, all_seeds = len(line.seeds), len(table.seeds)
    part = 0 < found < all_seeds
    return f"{line.row.name} ({found} of {all_seeds} seeds)" if part else line.row.name


def _columns(lines: Sequence[Line], sizes: bool) -> dict[str, Callable[[Line], str]]:
    """Return how to show each column that has anything to show."""
    known: dict[str, Callable[[Line], str]] = {
        name: partial(_shown_cell, prefix) for prefix, name in COLUMNS.items()
    }
    known |= {name: partial(_shown_epsilon, key) for key, name in EPSILONS.items()}
    known["paper"] = lambda line: str(line.row.published)
    known["difference"] = lambda line: line.differences
    if sizes:
        known[SENT] = _shown_megabytes
    known[SECONDS] = _shown_seconds
    return {name: show for name, show in known.items() if any(map(show, lines))}


def _shown_cell(prefix: str, line: Line) -> str:
    return str(line.cells.get(prefix, ""))


def _shown_epsilon(key: str, line: Line) -> str:
    return f"{line.epsilons[key]:.3g}" if key in line.epsilons else ""


def _shown_seconds(line: Line) -> str:
    return "" if line.cpu_seconds is None else f"{line.cpu_seconds:.0f}"


def _shown_megabytes(line: Line) -> str:
    return "" if line.megabytes is None else f"{line.megabytes:.3g}"


def _caption(table: Table, outcomes: Sequence[Outcome]) -> str:
    shown = [one for row in table.rows for one in outcomes_of(table, row, outcomes)]
    commits = ", ".join(sorted({str(one["commit"])[:10] for one in shown})) or NOT_MEASURED
    dates = ", ".join(sorted({str(one["date"])[:10] for one in shown})) or NOT_MEASURED
    found = {one["settings"]["seed"] for one in shown}
    seeds = ", ".join(str(seed) for seed in table.seeds if seed in found or not found)
    return (
        f"{table.title} Paper: {table.source}. Seeds {seeds}; commit {commits}; {dates}; "
        f"`{table.command}`."
    )


def summary_of(table: Table, kept: Path) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        "table": table.name,
        "scale": table.scale,
        "source": table.source,
        "rows": [
            {
                "name": line.row.name,
                "seeds": list(line.seeds),
                "cpu-seconds": line.cpu_seconds,
                "published": str(line.row.published),
                **line.epsilons,
                "figures": {
                    COLUMNS[prefix]: {
                        "mean": cell.mean,
                        "deviation": cell.deviation,
                        "published": cell.published,
                        "difference": cell.difference,
                    }
                    for prefix, cell in line.cells.items()
                },
            }
            for line in lines_of(table, read_outcomes(kept))
        ],
    }


def write_table(table: Table, kept: Path, text: Path, summary: Path) -> None:
    """Write what is shown as Markdown and as JSON."""
    text.parent.mkdir(parents=True, exist_ok=True)
    text.write_text(markdown(table, kept) + "\n", encoding="utf-8")
    write_json(summary_of(table, kept), summary)
