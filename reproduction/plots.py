"""Pictures (PNG) of a table: its federations round by round, and measured beside published."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fl_strategies.errors import require
from fl_strategies.wire import keys
from reproduction.panels import Line, Panel, draw_panels
from reproduction.table import COLUMNS, Row, Table, lines_of, outcomes_of, rounds_of
from reproduction.table import Line as Measured
from simulations.experiments.engine import Outcome, read_outcomes
from simulations.experiments.plots import GRID, new_figure, save
from simulations.results.report import summarise

WIDTH_INCHES: Final = 9.0
ROW_INCHES: Final = 0.32
FRAME_INCHES: Final = 1.9
COLOURS: Final = {
    prefix: f"C{number}"
    for number, prefix in enumerate(["", "solo-", "central-", "pate-", "public-only-"])
}
"""Columns that are drawn; the others are in the text."""


def draw_rounds(table: Table, kept: Path, target: Path) -> None:
    """Draw the results that a file holds, round by round."""
    panels = make_panels(table, read_outcomes(kept))
    rule = f"a file with measured rounds of {table.name}"
    require(bool(panels), "figure", "results", rule, str(kept))
    save(draw_panels("figure", table.title, panels), target)


def make_panels(table: Table, outcomes: Sequence[Outcome]) -> list[Panel]:
    """Return the table's rows as lines, in its order; rows without results are skipped.

    Rows with the same `panel` and the same metric share a panel.
    """
    grouped: dict[tuple[str, str], list[Line]] = {}
    for row in table.rows:
        found = outcomes_of(table, row, outcomes)
        metric = found[0]["metric"] if found else ""
        line = _line(row, found, 1 if metric == keys.MEAN_SQUARED_ERROR else 100)
        if line.x:
            grouped.setdefault((row.panel, metric), []).append(line)
    panels = []
    for (title, metric), lines in grouped.items():
        unit = "" if metric == keys.MEAN_SQUARED_ERROR else " (%)"
        panels.append(Panel(title, "round", metric.replace("-", " ") + unit, tuple(lines)))
    return panels


def _line(row: Row, outcomes: Sequence[Outcome], factor: float) -> Line:
    """Combine seeds; one that ended earlier, or did not measure a round, is skipped there."""
    by_round: dict[int, list[float]] = {}
    for outcome in outcomes:
        for number, figure in rounds_of(row, outcome):
            if figure is not None and math.isfinite(figure):
                by_round.setdefault(number, []).append(factor * figure)
    rounds = sorted(by_round)
    spreads = [summarise(by_round[number]) for number in rounds]
    return Line(row.name, rounds, [mean for mean, _ in spreads], [dev for _, dev in spreads])


def draw_rows(table: Table, kept: Path, target: Path) -> None:
    """Draw the rows of a table: measured, with deviations, beside published."""
    lines = [line for line in lines_of(table, read_outcomes(kept)) if line.cells]
    require(bool(lines), "table", "results", f"a file with results of {table.name}", str(kept))
    columns = [prefix for prefix in COLOURS if any(prefix in line.cells for line in lines)]
    size = (WIDTH_INCHES, FRAME_INCHES + ROW_INCHES * len(lines))
    figure = new_figure("table", size, table.title, fontsize="medium")
    axes = figure.subplots()
    for prefix in columns:
        _draw_column(axes, lines, prefix)
    axes.set_yticks(range(len(lines)), [line.row.name for line in lines], fontsize="small")
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xlabel("filled: measured, mean and deviation over seeds; hollow: the paper's")
    axes.grid(alpha=GRID)
    figure.legend(loc="outside lower center", ncols=len(columns), fontsize="small")
    save(figure, target)


def _draw_column(axes: Any, lines: Sequence[Measured], prefix: str) -> None:
    measured = [(n, line.cells[prefix]) for n, line in enumerate(lines) if prefix in line.cells]
    axes.errorbar(
        [cell.mean for _, cell in measured],
        [place for place, _ in measured],
        xerr=[cell.deviation for _, cell in measured],
        fmt="o",
        markersize=5,
        capsize=2,
        color=COLOURS[prefix],
        label=COLUMNS[prefix],
    )
    printed = [(cell.published, n) for n, cell in measured if cell.published is not None]
    axes.plot(
        [published for published, _ in printed],
        [place for _, place in printed],
        linestyle="",
        marker="D",
        markersize=6,
        markerfacecolor="none",
        markeredgecolor=COLOURS[prefix],
    )
