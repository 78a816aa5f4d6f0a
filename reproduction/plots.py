"""Pictures of a table: its federations round by round, and measured beside published."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fl_strategies._util import import_library
from fl_strategies.errors import require
from fl_strategies.wire import keys
from reproduction.table import COLUMNS, Line, Row, Table, lines_of, outcomes_of, rounds_of
from simulations.experiments.engine import Outcome, read_outcomes
from simulations.experiments.plots import DOTS_PER_INCH
from simulations.results.report import summarise

OWNER: Final = "figure"
PANELS_A_LINE: Final = 3
PANEL_INCHES: Final = (4.6, 3.6)
ROUNDS_WITH_MARKERS: Final = 25
STYLES: Final = ("-", "--", ":", "-.")
NUM_COLOURS: Final = 10


@dataclass(frozen=True)
class Curve:
    """One row of a table, round by round: mean and deviation over seeds."""

    name: str
    rounds: tuple[int, ...]
    means: tuple[float, ...]
    deviations: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    """Rows that are drawn into the same axes."""

    title: str
    metric: str
    curves: tuple[Curve, ...]


def make_panels(table: Table, outcomes: Sequence[Outcome]) -> list[Panel]:
    """Return the table's rows as curves, in its order; rows without results are skipped.

    Rows with the same `panel` and the same kind of figure share a panel.
    """
    grouped: dict[tuple[str, str], list[Curve]] = {}
    for row in table.rows:
        found = outcomes_of(table, row, outcomes)
        curve = _curve(row, found)
        if curve.rounds:
            grouped.setdefault((row.panel, found[0]["metric"]), []).append(curve)
    return [Panel(title, metric, tuple(curves)) for (title, metric), curves in grouped.items()]


def _curve(row: Row, outcomes: Sequence[Outcome]) -> Curve:
    """Combine seeds; one that ended earlier, or did not measure a round, is skipped there."""
    by_round: dict[int, list[float]] = {}
    for outcome in outcomes:
        for number, figure in rounds_of(row, outcome):
            if figure is not None and math.isfinite(figure):
                by_round.setdefault(number, []).append(figure)
    rounds = tuple(sorted(by_round))
    spreads = [summarise(by_round[number]) for number in rounds]
    means, deviations = zip(*spreads, strict=True) if spreads else ((), ())
    return Curve(row.name, rounds, means, deviations)


def draw_table(table: Table, kept: Path, target: Path) -> None:
    """Write a picture (PNG) of the results that a file holds; it needs no display."""
    panels = make_panels(table, read_outcomes(kept))
    rule = f"a file with measured rounds of {table.name}"
    require(bool(panels), OWNER, "results", rule, str(kept))
    target.parent.mkdir(parents=True, exist_ok=True)
    _draw(table.title, panels).savefig(target, format="png", dpi=DOTS_PER_INCH)


def _draw(title: str, panels: Sequence[Panel]) -> Any:
    # A figure of its own, without pyplot, has Agg's canvas and touches no global setting.
    library = import_library(OWNER, "matplotlib.figure", "figures")
    columns = min(len(panels), PANELS_A_LINE)
    lines = math.ceil(len(panels) / columns)
    size = (columns * PANEL_INCHES[0], lines * PANEL_INCHES[1] + 0.4)
    figure = library.Figure(figsize=size, layout="constrained")
    figure.suptitle(title, wrap=True)
    axes = figure.subplots(lines, columns, squeeze=False).flat
    for one, panel in zip(axes, panels, strict=False):
        _draw_panel(one, panel)
    for empty in list(figure.axes)[len(panels) :]:
        empty.set_axis_off()
    return figure


def _draw_panel(axes: Any, panel: Panel) -> None:
    factor, unit = (1, "") if panel.metric == keys.MEAN_SQUARED_ERROR else (100, " (%)")
    for number, curve in enumerate(panel.curves):
        rounds, look = curve.rounds, _look(number)
        marker = "." if len(rounds) <= ROUNDS_WITH_MARKERS else ""
        spreads = list(zip(curve.means, curve.deviations, strict=True))
        axes.plot(
            rounds,
            [factor * mean for mean in curve.means],
            label=curve.name,
            marker=marker,
            **look,
        )
        axes.fill_between(
            rounds,
            [factor * (mean - deviation) for mean, deviation in spreads],
            [factor * (mean + deviation) for mean, deviation in spreads],
            color=look["color"],
            alpha=0.15,
            linewidth=0,
        )
    axes.set_title(panel.title, fontsize="medium")
    axes.set(xlabel="round", ylabel=panel.metric.replace("-", " ") + unit)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")


def _look(number: int) -> dict[str, str]:
    """Return colour and style of a line, all different for forty lines."""
    style = STYLES[number // NUM_COLOURS % len(STYLES)]
    return {"color": f"C{number % NUM_COLOURS}", "linestyle": style}


WIDTH_INCHES: Final = 9.0
ROW_INCHES: Final = 0.32
FRAME_INCHES: Final = 1.9
COLOURS: Final = {
    prefix: f"C{number}"
    for number, prefix in enumerate(["", "solo-", "central-", "pate-", "public-only-"])
}
"""Columns that are drawn; the others are in the text."""


def draw_rows(table: Table, kept: Path, target: Path) -> None:
    """Write a picture (PNG) of the results that a file holds; it needs no display."""
    lines = [line for line in lines_of(table, read_outcomes(kept)) if line.cells]
    require(bool(lines), "table", "results", f"a file with results of {table.name}", str(kept))
    target.parent.mkdir(parents=True, exist_ok=True)
    _draw_rows(table, lines).savefig(target, format="png", dpi=DOTS_PER_INCH)


def _draw_rows(table: Table, lines: Sequence[Line]) -> Any:
    # A figure of its own, without pyplot, has Agg's canvas and touches no global setting.
    library = import_library("table", "matplotlib.figure", "figures")
    columns = [p for p in COLOURS if any(p in line.cells for line in lines)]
    size = (WIDTH_INCHES, FRAME_INCHES + ROW_INCHES * len(lines))
    figure = library.Figure(figsize=size, layout="constrained")
    figure.suptitle(table.title, wrap=True, fontsize="medium")
    axes = figure.subplots()
    for prefix in columns:
        _draw_column(axes, lines, prefix)
    axes.set_yticks(range(len(lines)), [line.row.name for line in lines], fontsize="small")
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xlabel("filled: measured, mean and deviation over seeds; hollow: the paper's")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(columns), fontsize="small")
    return figure


def _draw_column(axes: Any, lines: Sequence[Line], prefix: str) -> None:
    colour = COLOURS[prefix]
    measured = [(n, line.cells[prefix]) for n, line in enumerate(lines) if prefix in line.cells]
    axes.errorbar(
        [cell.mean for _, cell in measured],
        [place for place, _ in measured],
        xerr=[cell.deviation for _, cell in measured],
        fmt="o",
        markersize=5,
        capsize=2,
        color=colour,
        label=COLUMNS[prefix],
    )
    printed = [
        (cell.published, place) for place, cell in measured if cell.published is not None
    ]
    if printed:
        axes.plot(
            *zip(*printed, strict=True),
            linestyle="",
            marker="D",
            markersize=6,
            markerfacecolor="none",
            markeredgecolor=colour,
        )
