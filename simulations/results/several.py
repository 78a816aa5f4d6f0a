"""Several runs on one page: what each is worth, what it costs, and in what they differ."""

from collections.abc import Mapping
from typing import Final

from fl_strategies.wire import keys
from simulations.experiments.compare import size
from simulations.results.html import Html, card, document, element, grid, setting
from simulations.results.page import bytes_of, federation_figure, headline, num_rounds
from simulations.results.privacy import promised
from simulations.results.report import Report, shown
from simulations.results.style import STYLE
from simulations.results.svg import Bar, bars
from simulations.results.verdict import CONSTANTS

NOT_TOLD: Final = frozenset({"output-dir", "num-workers"})
"""Settings that change no result."""


def comparison_page(runs: Mapping[str, Report]) -> str:
    """Return the page of several runs, by the names of their folders."""
    labels = _labels(runs)
    title = f"{len(runs)} runs compared"
    return document(
        title,
        STYLE,
        _opening(title, runs),
        *_figures(runs, labels),
        _costs(runs, labels),
        _verdicts(runs, labels),
        _differences(runs, labels),
    )


def _labels(runs: Mapping[str, Report]) -> dict[str, str]:
    """Return strategy and seed of each run, and its name where these are the same."""
    told = {name: f"{one['strategy']}, seed {one['seed']}" for name, one in runs.items()}
    repeated = [*told.values()]
    return {
        name: label if repeated.count(label) == 1 else f"{label} ({name})"
        for name, label in told.items()
    }


def _opening(title: str, runs: Mapping[str, Report]) -> Html:
    data = dict.fromkeys(str(one.get("data", "the parties' own data")) for one in runs.values())
    return element("header", element("p", ", ".join(data)), element("h1", title))


def _figures(runs: Mapping[str, Report], labels: Mapping[str, str]) -> list[Html]:
    """Return a chart for each figure and data set: others cannot be compared."""
    groups: dict[tuple[str, str], dict[str, Report]] = {}
    for name, one in runs.items():
        if federation_figure(one) is not None:
            kind = str(one.get("metric", keys.ACCURACY)), str(one.get("data", ""))
            groups.setdefault(kind, {})[name] = one
    return [_chart(metric, data, group, labels) for (metric, data), group in groups.items()]


def _chart(
    metric: str, data: str, runs: Mapping[str, Report], labels: Mapping[str, str]
) -> Html:
    lines = [
        Bar(labels[name], figure, shown(metric, figure), True)
        for name, one in runs.items()
        if (figure := federation_figure(one)) is not None
    ]
    first = next(iter(runs.values()))
    constant = first.get(f"majority-{metric}")
    if constant is not None:
        name = CONSTANTS[metric].removeprefix("the ")
        lines.append(Bar(name, constant, shown(metric, constant)))
    is_error = metric == keys.MEAN_SQUARED_ERROR
    ordered = sorted(lines, key=lambda line: line.value if is_error else -line.value)
    known = metric.replace("-", " ").capitalize()
    return card(
        f"{known} on {data}" if data else known,
        bars(ordered, None if is_error else 1.0),
        note="Smaller is better." if is_error else "",
    )


def _costs(runs: Mapping[str, Report], labels: Mapping[str, str]) -> Html:
    rows = [
        [
            labels[name],
            *promised(one),
            size(bytes_of(one, keys.NUM_BYTES_SENT)),
            size(bytes_of(one, keys.NUM_BYTES_RECEIVED)),
            num_rounds(one),
            f"{one['seconds']:.1f}",
            len(one.get("rejected") or {}),
        ]
        for name, one in runs.items()
    ]
    header = ["", "promise", "to whom", "sent up", "sent down", "rounds", "seconds", "excluded"]
    return card("What it costs", grid(header, rows, range(3, len(header))))


def _verdicts(runs: Mapping[str, Report], labels: Mapping[str, str]) -> Html:
    lines = []
    for name, one in runs.items():
        warnings = [
            element("p", sentence, class_="bad") for sentence in one.get("warnings", [])
        ]
        lines.append(element("h3", labels[name]))
        lines += [element("p", headline(one)), *warnings]
    return card("What each is worth", *lines)


def _differences(runs: Mapping[str, Report], labels: Mapping[str, str]) -> Html:
    told = [one["settings"] for one in runs.values()]
    known = dict.fromkeys(key for settings in told for key in settings)
    differing = [
        key
        for key in known
        if key not in NOT_TOLD and len({str(settings.get(key, "-")) for settings in told}) > 1
    ]
    rows = [[key, *(setting(one.get(key, "-")) for one in told)] for key in differing]
    table = grid(["setting", *(labels[name] for name in runs)], rows)
    same = element("p", "All settings are the same.", class_="soft")
    return card("Settings in which they differ", table if rows else same)
