"""Pictures (PNG) of comparisons and curves."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fl_strategies._util import import_library
from simulations.experiments.compare import Summary
from simulations.experiments.curve import MAJORITY, REFUSED, Curve, CurveSummary
from simulations.experiments.engine import TRUSTED
from simulations.experiments.entries import VARIANTS
from simulations.results.report import summarise

DOTS_PER_INCH: Final = 150
GRID: Final = 0.3


def new_figure(owner: str, size: tuple[float, float], title: str = "", **options: Any) -> Any:
    """Return an empty figure.

    It is made without pyplot: it has Agg's canvas, which needs no display, and changes no
    global setting.
    """
    library = import_library(owner, "matplotlib.figure", "figures")
    figure = library.Figure(figsize=size, layout="constrained")
    if title:
        figure.suptitle(title, wrap=True, **options)
    return figure


def save(figure: Any, target: Path) -> None:
    """Write a picture; its folder may be new."""
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, format="png", dpi=DOTS_PER_INCH)


# Comparisons: accuracy against bytes and, with budgets, against epsilon

COMPARISON_INCHES: Final = (6.4, 4.8)
COLOURS: Final = (
    "#0072b2",
    "#56b4e9",
    "#d55e00",
    "#e69f00",
    "#009e73",
    "#7f5539",
    "#cc79a7",
    "#3a0ca3",
    "#6a994e",
    "#9d0208",
)
"""Colours that people who see few of them can tell apart; the first ones do best."""
MARKERS: Final = "osD^vP*X<"  # nine, so that with ten colours ninety points differ
STEP_ASIDE: Final = 1.06
BASELINE_STYLES: Final = {"central-": "-", "best-solo-": "--", "solo-": "-.", "majority-": ":"}


def draw_comparison(summary: Summary, target: Path) -> None:
    """Write the picture of a comparison."""
    width, height = COMPARISON_INCHES
    panels, seeds = 1 + bool(summary.budgets), ", ".join(map(str, summary.seeds))
    title = f"{summary.data}, seeds {seeds}: mean and deviation"
    figure = new_figure("compare", (panels * width, height + 1.2), title)
    axes = figure.subplots(1, panels, squeeze=False).flat
    _draw_points(axes[0], summary, {line.name: line.num_bytes for line in summary.lines})
    _draw_baselines(axes[0], summary)
    axes[0].set_xlabel("bytes of one party, up and down, all rounds")
    if summary.budgets:
        _draw_budgets(axes[1], summary)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="x-small")
    save(figure, target)


def _draw_budgets(axes: Any, summary: Summary) -> None:
    """Draw what keeps to a budget beside it: epsilons of one budget would hide each other."""
    budgets = summary.budgets
    for budget in budgets:
        lines = summary.within(budget)
        places = {
            line.name: budget * STEP_ASIDE ** (number - (len(lines) - 1) / 2)
            for number, line in enumerate(lines)
        }
        _draw_points(axes, summary, places)
    _draw_baselines(axes, summary)
    _set_budgets(axes, budgets, room=2)
    axes.set_xlabel("epsilon, of a party or an example: see the table (points set apart)")


def _set_budgets(axes: Any, budgets: Sequence[float], room: float) -> None:
    """Make the x axis one of epsilons, with a mark at each budget."""
    axes.set_xscale("log")
    axes.set_xticks(budgets, labels=[f"{budget:g}" for budget in budgets])
    axes.minorticks_off()
    axes.set_xlim(budgets[0] / room, budgets[-1] * room)


def _draw_points(axes: Any, summary: Summary, places: Mapping[str, float]) -> None:
    for number, line in enumerate(summary.lines):  # so that both panels have the same look
        if line.name not in places:
            continue
        mean, deviation = summarise(line.values)
        axes.errorbar(
            places[line.name],
            summary.factor * mean,
            yerr=summary.factor * deviation,
            label=line.name,
            capsize=2,
            **point_look(number),
            linestyle="none",
            fillstyle="none" if line.promise is None else "full",
        )


def _draw_baselines(axes: Any, summary: Summary) -> None:
    for prefix, style in BASELINE_STYLES.items():
        line = summary.baselines[prefix]
        axes.axhline(
            summary.factor * line.mean,
            label=line.name,
            linestyle=style,
            color="grey",
            linewidth=1,
        )
    axes.set_xscale("log")
    unit = " (%)" if summary.factor == 100 else ""
    axes.set_ylabel(f"{summary.metric.replace('-', ' ')}{unit}")
    axes.grid(alpha=GRID)


def point_look(number: int) -> dict[str, str]:
    """Return the colour and marker of an entry."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


# Curves: accuracy against epsilon

INCHES: Final = (9.6, 5.0)
GREY: Final = "#555555"
ROOM: Final = 1.25
"""Factor by which the axis of epsilon exceeds the first and the last budget."""
ROOM_BELOW: Final = 0.3
"""Range shown below the majority class, as a share of the range above it."""


def draw_curves(summary: CurveSummary, target: Path) -> None:
    """Write the picture of curves."""
    figure = new_figure("curve", INCHES)
    axes = figure.subplots()
    for curve in summary.curves:
        _draw_curve(axes, summary, curve)
    _draw_references(axes, summary)
    _set_budgets(axes, summary.epsilons, ROOM)
    whom = "an example" if summary.unit == "example" else "a whole party"
    axes.set_xlabel(f"ε that {whom} pays, at δ = {summary.shown_delta}")
    axes.set_ylabel(summary.shown_metric)
    axes.set_ylim(bottom=max(axes.get_ylim()[0], summary.factor * lowest_shown(summary)))
    axes.grid(alpha=GRID)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    title = f"{summary.title}: {summary.metric.replace('-', ' ')} against ε"
    axes.set_title(title, loc="left", pad=24)
    axes.text(0, 1.03, summary.runs, transform=axes.transAxes, fontsize="small", color=GREY)
    figure.legend(loc="outside right center", fontsize="small", frameon=False)
    save(figure, target)


def _draw_curve(axes: Any, summary: CurveSummary, curve: Curve) -> None:
    budgets = sorted(curve.points)
    spreads = [curve.points[budget] for budget in budgets]
    medians, lower, upper = (
        [summary.factor * getattr(spread, part) for spread in spreads]
        for part in ("median", "lower", "upper")
    )
    look = _curve_look(curve.name)
    label = _label(summary, curve)
    axes.plot(budgets, medians, label=label, linewidth=1.8, markersize=5, **look)
    axes.fill_between(budgets, lower, upper, color=look["color"], alpha=0.15, linewidth=0)
    # A band of one budget has no width, so every budget has its own line as well.
    axes.vlines(budgets, lower, upper, color=look["color"], alpha=0.5, linewidth=1.2)


def _curve_look(name: str) -> dict[str, str]:
    """Return colour and marker, the same in every picture of a unit."""
    (own,) = (variant for variant in VARIANTS if variant.name == name)
    return point_look([one for one in VARIANTS if one.unit == own.unit].index(own))


def _label(summary: CurveSummary, curve: Curve) -> str:
    """Return the name and, below it, whom it trusts and where there is nothing to see."""
    floor = lowest_shown(summary)
    low = [budget for budget, spread in curve.points.items() if spread.median < floor]
    remarks = [
        "trusted server" if TRUSTED in curve.against else "",
        _where(summary, REFUSED, curve.refused),
        _where(summary, "below this picture", low),
    ]
    return "\n".join([curve.name, *(f"({words})" for words in remarks if words)])


def _where(summary: CurveSummary, words: str, budgets: Collection[float]) -> str:
    """Return at which budgets something is the case; nothing if at none."""
    if len(budgets) == len(summary.epsilons):
        return f"{words} everywhere" if words == REFUSED else words
    shown = ", ".join(f"{budget:g}" for budget in sorted(budgets))
    return f"{words} at {shown}" if shown else ""


def lowest_shown(summary: CurveSummary) -> float:
    """Return the least value that is drawn.

    What is far below the majority class is worth nothing, and would leave no room for the rest.
    """
    curves = [spread for curve in summary.curves for spread in curve.points.values()]
    best = max(spread.upper for spread in (*curves, *summary.references.values()))
    majority = summary.references[MAJORITY].median
    return majority - ROOM_BELOW * (best - majority)


def _draw_references(axes: Any, summary: CurveSummary) -> None:
    """Draw what no budget changes, in the colour of its strategy's first curve if any."""
    for number, (name, spread) in enumerate(summary.references.items()):
        own = [one.name for one in summary.curves if name.startswith(f"{one.strategy},")]
        axes.axhline(
            summary.factor * spread.median,
            label=name,
            linestyle=":" if name == MAJORITY else ("--", "-.")[number % 2],
            color=_curve_look(own[0])["color"] if own else GREY,
            linewidth=1.4,
            zorder=1,
        )
