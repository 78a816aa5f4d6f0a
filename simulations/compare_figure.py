"""The picture of a comparison: figures against bytes and, with budgets, against epsilon."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from simulations.compare_table import Summary
from simulations.figures import DOTS_PER_INCH
from simulations.libraries import import_library
from simulations.report import summarise

PANEL_INCHES: Final = (6.4, 4.8)
MARKERS: Final = "osD^vP*X<"  # nine, so that with ten colours ninety points differ
NUM_COLOURS: Final = 10
STEP_ASIDE: Final = 1.06
BASELINE_STYLES: Final = {"central-": "-", "best-solo-": "--", "solo-": "-.", "majority-": ":"}


def draw_comparison(summary: Summary, target: Path) -> None:
    """Write the picture (PNG); it needs no display."""
    library = import_library("compare", "matplotlib.figure", "figures")
    panels = 2 if summary.budgets else 1
    size = (panels * PANEL_INCHES[0], PANEL_INCHES[1] + 1.2)
    figure = library.Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False).flat
    seeds = ", ".join(map(str, summary.seeds))
    figure.suptitle(f"{summary.data}, seeds {seeds}: mean and deviation")
    _draw_points(axes[0], summary, {line.name: line.num_bytes for line in summary.lines})
    _draw_baselines(axes[0], summary)
    axes[0].set_xlabel("bytes of one party, up and down, all rounds")
    if summary.budgets:
        _draw_budgets(axes[1], summary)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="x-small")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, format="png", dpi=DOTS_PER_INCH)


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
    axes.set_xticks(budgets, labels=[f"{budget:g}" for budget in budgets])
    axes.minorticks_off()
    axes.set_xlim(budgets[0] / 2, budgets[-1] * 2)
    axes.set_xlabel("epsilon, of a party or an example: see the table (points set apart)")


def _draw_points(axes: Any, summary: Summary, places: Mapping[str, float]) -> None:
    for number, line in enumerate(summary.lines):  # so that both panels have the same look
        if line.name not in places:
            continue
        mean, deviation = summarise(line.figures)
        axes.errorbar(
            places[line.name],
            100 * mean,
            yerr=100 * deviation,
            label=line.name,
            capsize=2,
            **look(number),
            linestyle="none",
            fillstyle="none" if line.promise is None else "full",
        )


def _draw_baselines(axes: Any, summary: Summary) -> None:
    for prefix, style in BASELINE_STYLES.items():
        line = summary.baselines[prefix]
        axes.axhline(
            100 * line.mean, label=line.name, linestyle=style, color="grey", linewidth=1
        )
    axes.set_xscale("log")
    axes.set_ylabel(f"{summary.metric.replace('-', ' ')} (%)")
    axes.grid(alpha=0.3)


def look(number: int) -> dict[str, str]:
    """Return the colour and marker of an entry."""
    return {"color": f"C{number % NUM_COLOURS}", "marker": MARKERS[number % len(MARKERS)]}
