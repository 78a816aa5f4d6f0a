"""A picture of a table: measured beside published, row by row."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from fl_strategies.errors import require
from simulations.libraries import import_library
from simulations.reproduce import COLUMNS, Table, read_outcomes
from simulations.reproduce_text import Line, lines_of

OWNER: Final = "table"
WIDTH_INCHES: Final = 9.0
ROW_INCHES: Final = 0.32
FRAME_INCHES: Final = 1.9
DOTS_PER_INCH: Final = 150
COLOURS: Final = {
    prefix: f"C{number}"
    for number, prefix in enumerate(["", "solo-", "central-", "pate-", "public-only-"])
}
"""Columns that are drawn; the others are in the text."""


def draw_rows(table: Table, kept: Path, target: Path) -> None:
    """Write a picture (PNG) of the results that a file holds; it needs no display."""
    lines = [line for line in lines_of(table, read_outcomes(kept)) if line.cells]
    require(bool(lines), OWNER, "results", f"a file with results of {table.name}", str(kept))
    target.parent.mkdir(parents=True, exist_ok=True)
    _draw(table, lines).savefig(target, format="png", dpi=DOTS_PER_INCH)


def _draw(table: Table, lines: Sequence[Line]) -> Any:
    # A figure of its own, without pyplot, has Agg's canvas and touches no global setting.
    library = import_library(OWNER, "matplotlib.figure", "figures")
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
