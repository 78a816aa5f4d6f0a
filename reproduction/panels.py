"""Panels of lines, as pictures of the papers' tables have them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from simulations.experiments.plots import GRID, new_figure

PANEL_INCHES: Final = (4.6, 3.6)
PANELS_PER_ROW: Final = 3
POINTS_WITH_MARKERS: Final = 25
NUM_COLOURS: Final = 10
STYLES: Final = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Line:
    """A line and, where it has deviations, a band around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    deviations: Sequence[float] = ()


@dataclass(frozen=True)
class Panel:
    """Axes and the lines in them."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log: bool = False


def draw_panels(owner: str, title: str, panels: Sequence[Panel]) -> Any:
    """Return a figure of panels, three side by side."""
    columns = min(len(panels), PANELS_PER_ROW)
    rows = math.ceil(len(panels) / columns)
    size = (columns * PANEL_INCHES[0], rows * PANEL_INCHES[1] + 0.4)
    figure = new_figure(owner, size, title)
    axes = [*figure.subplots(rows, columns, squeeze=False).flat]
    for one, panel in zip(axes, panels, strict=False):
        _draw_panel(one, panel)
    for empty in axes[len(panels) :]:
        empty.set_axis_off()
    return figure


def _draw_panel(axes: Any, panel: Panel) -> None:
    for number, line in enumerate(panel.lines):
        look = line_look(number)
        marker = "." if len(line.x) <= POINTS_WITH_MARKERS else ""
        axes.plot(line.x, line.y, label=line.name, marker=marker, **look)
        if line.deviations:
            spreads = list(zip(line.y, line.deviations, strict=True))
            lower, upper = [y - d for y, d in spreads], [y + d for y, d in spreads]
            axes.fill_between(
                line.x, lower, upper, color=look["color"], alpha=0.15, linewidth=0
            )
    axes.set_title(panel.title, fontsize="medium")
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_yscale("log" if panel.log else "linear")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=GRID)
    axes.legend(fontsize="x-small")


def line_look(number: int) -> dict[str, str]:
    """Return colour and style of a line, all different for forty lines."""
    style = STYLES[number // NUM_COLOURS % len(STYLES)]
    return {"color": f"C{number % NUM_COLOURS}", "linestyle": style}
