"""Pages of results: one run, or several side by side, and the command that makes them again.

Everything comes from reports and nothing else, so that the page of an old result can be made
again. A part that a report says nothing about is omitted. Names of parties, reasons for
exclusions and columns of data files are untrusted: the templates escape all of them.
"""

import argparse
import functools
import math
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

from fl_strategies._util import SHARED, import_library, replace_file
from fl_strategies.errors import InvalidData, StrategyError, require, require_data
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.ledger import PrivacyLedger, chance_in_clear, describe_releases
from fl_strategies.wire import keys
from simulations.results.baselines import MAJORITY
from simulations.results.files import read_json, require_files
from simulations.results.report import (
    BASELINES,
    Report,
    federation_of,
    shown,
    size,
    stopping_of,
    strategy_of,
)
from simulations.results.verdict import CONSTANTS, own_models

OWNER: Final = "report"
RESULT: Final = "result.json"
PAGE: Final = "report.html"
COMPARISON: Final = "comparison.html"
NEEDED: Final = (
    "strategy",
    "seed",
    "seconds",
    "rounds",
    "parties",
    "settings",
    "ledger",
    "privacy-statement",
)
SHAPES: Final = {"rounds": list, "parties": list, "settings": dict}
MOST_PARTIES: Final = 200
PHASES: Final = {
    "loading": "loading the data",
    "training": "parties: training",
    "aggregation": "server: combining answers, final model",
    "evaluation": "parties: receiving and testing the result",
    "federation": "the federation",
    "comparison": "training models to compare with",
}
CONDUCT: Final = {
    keys.VOTE_AGREEMENT: ("agreement of the votes", True),
    keys.CONSISTENT_FRACTION: ("rows on which a party's students agree", True),
    keys.NUM_PARTIES: ("parties in the last round", False),
    keys.NUM_REJECTED: ("answers refused", False),
    keys.NUM_OUTLIERS: ("parties not counted, which contradict most others", False),
    keys.NUM_CAPPED: ("parties counted for less than they claim", False),
    keys.NUM_TEACHERS_MISSING: ("teachers that could not be trained", False),
    keys.NUM_MODELS_REFUSED: ("models that parties refused", False),
    keys.NUM_UNLABELLED: ("public rows without a label", False),
}
NOUNS: Final = {"party": "a party", "example": "a record"}
PROMISES: Final = (
    ("example", keys.EPSILON_EXAMPLE, keys.DELTA_EXAMPLE),
    ("party", keys.EPSILON_PARTY, keys.DELTA_PARTY),
)
NEIGHBOURS: Final = {
    "replace-one": "another in its place",
    "add-remove-one": "none in its place",
}
NO_RESULT: Final = frozenset({"output-dir", "num-workers"})
"""Settings that change no result."""
WIDTH: Final = 560
HEIGHT: Final = 210
LEFT: Final = 58
RIGHT: Final = WIDTH - 12
TOP: Final = 14
BOTTOM: Final = HEIGHT - 30
NUM_STEPS: Final = 4
MOST_LABELS: Final = 10


class Bar(NamedTuple):
    """One line of a bar chart."""

    name: str
    value: float
    shown: str
    is_own: bool = False
    """Whether it is what the page is about."""


@functools.cache
def _templates() -> Any:
    """Return the environment of all templates."""
    jinja2 = import_library(OWNER, "jinja2", "simulation")
    text = (resources.files(__package__) / "templates.toml").read_text(encoding="utf-8")
    made = jinja2.Environment(
        loader=jinja2.DictLoader(tomllib.loads(text)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["size"] = size
    return made


def page(report: Report) -> str:
    """Return the page of one run."""
    data = report.get("data", "the parties own data")
    opening = (
        f"{strategy_of(report)} on {report['data']}"
        if "data" in report
        else strategy_of(report),
        f"seed {report['seed']}" if "seed" in report else "",
        str(report.get("date", ""))[:10],
    )
    versions = {**report.get("versions", {}), "commit": report.get("commit")}
    phases, cpu = report.get("phases") or {}, report.get("cpu-seconds")
    stopped = stopping_of(report)
    notes = [
        f"The federated run took {cpu:.1f} s of processor time." if cpu else "",
        f"{stopped[0].upper()}{stopped[1:]}." if stopped else "",
    ]
    last = _last_round(report)
    html: str = (
        _templates()
        .get_template("run")
        .render(
            report=report,
            title=f"{strategy_of(report)} on {data}",
            opening=" · ".join(filter(None, opening)),
            headline=headline(report),
            tiles=_tiles(report),
            comparison=_comparison(report),
            parties=_parties(report),
            rounds=_rounds(report),
            sent=_sent(report),
            statement=_statement(report),
            ledger=_ledger(report.get("ledger") or {}),
            conduct=[
                [words, f"{100 * last[key]:.1f} %" if is_share else f"{last[key]:g}"]
                for key, (words, is_share) in CONDUCT.items()
                if last.get(key) is not None
            ],
            excluded=report.get("rejected") or {},
            without=report.get("undelivered") or {},
            phases=[
                Bar(words, phases[key], f"{phases[key]:.2f} s", key != "comparison")
                for key, words in PHASES.items()
                if key in phases
            ],
            time_note=" ".join(filter(None, notes)),
            model=report.get("model"),
            versions=[pair for pair in versions.items() if pair[1]],
            settings=[(key, setting(value)) for key, value in report["settings"].items()],
        )
    )
    return html


def comparison_page(runs: Mapping[str, Report]) -> str:
    """Return the page of several runs, by the names of their folders.

    Each metric and data set has a chart of its own: others cannot be compared.
    """
    told = {name: f"{one['strategy']}, seed {one['seed']}" for name, one in runs.items()}
    repeated = [*told.values()]
    labels = {
        name: label if repeated.count(label) == 1 else f"{label} ({name})"
        for name, label in told.items()
    }
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, one in runs.items():
        if federation_figure(one) is not None:
            kind = str(one.get("metric", keys.ACCURACY)), str(one.get("data", ""))
            kinds.setdefault(kind, []).append(name)
    data = dict.fromkeys(str(one.get("data", "the parties' own data")) for one in runs.values())
    settings = [one["settings"] for one in runs.values()]
    known = dict.fromkeys(key for one in settings for key in one if key not in NO_RESULT)
    html: str = (
        _templates()
        .get_template("several")
        .render(
            title=f"{len(runs)} runs compared",
            data=", ".join(data),
            charts=[
                _chart(metric, on, {labels[name]: runs[name] for name in names})
                for (metric, on), names in kinds.items()
            ],
            costs=[
                (
                    labels[name],
                    *promised(one),
                    size(bytes_of(one, keys.NUM_BYTES_SENT)),
                    size(bytes_of(one, keys.NUM_BYTES_RECEIVED)),
                    num_rounds(one),
                    f"{one['seconds']:.1f}",
                    len(one.get("rejected") or {}),
                )
                for name, one in runs.items()
            ],
            verdicts=[
                (labels[name], headline(one), one.get("warnings", []))
                for name, one in runs.items()
            ],
            labels=[*labels.values()],
            differing=[
                [key, *(setting(one.get(key, "-")) for one in settings)]
                for key in known
                if len({str(one.get(key, "-")) for one in settings}) > 1
            ],
        )
    )
    return html


def headline(report: Report) -> str:
    """Return the verdict as a sentence."""
    verdict = str(report.get("verdict") or "compared with nothing")
    return f"{verdict[:1].upper()}{verdict[1:]}."


def federation_figure(report: Report) -> float | None:
    """Return how good the federation is, if that was measured."""
    figure = report.get(str(report.get("metric", keys.ACCURACY)))
    if not isinstance(figure, int | float) or not math.isfinite(figure):
        return None
    return float(figure)


def bytes_of(report: Report, key: str, part: str = "train") -> int:
    """Return the bytes of all rounds, of training or of delivering the result."""
    return sum(int(one[part].get(key) or 0) for one in report["rounds"])


def num_rounds(report: Report) -> int:
    """Return how many rounds asked for something."""
    return max((int(one["round"]) for one in report["rounds"]), default=0)


def promised(report: Report) -> tuple[str, str]:
    """Return the strongest promise in a few words: a large line and a small one."""
    clear = chance_in_clear(PrivacyLedger.from_state_dict(report["ledger"]).entries)
    if clear > 0:
        return f"{100 * clear:.3g} %", "chance that a record is used in the clear"
    last = _last_round(report)
    for unit, epsilon, delta in PROMISES:
        value = report.get(epsilon, last.get(epsilon))
        if value is not None and math.isfinite(value):
            at = report.get(delta, last.get(delta, 0.0))
            return f"epsilon {value:.3g}", f"for {NOUNS[unit]}, at delta {at:.3g}"
    return "no guarantee", "nothing hides what parties sent"


def setting(value: object) -> str:
    """Return a setting as the command line takes it.

    Examples
    --------
    >>> setting(True), setting(0.5), setting("")
    ('true', '0.5', '-')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if value != "" else "-"


def _last_round(report: Report) -> Report:
    last: Report = report["rounds"][-1]["train"] if report["rounds"] else {}
    return last


def _title(metric: str) -> str:
    return metric.replace("-", " ").capitalize()


def _tiles(report: Report) -> list[tuple[str, str]]:
    metric, figure = str(report.get("metric", keys.ACCURACY)), federation_figure(report)
    rows, rounds = report.get("num-test-rows"), num_rounds(report)
    tested = f" on {rows} test rows" if rows else ""
    several = f"{rounds} rounds" if rounds > 1 else "one round"
    tiles = [
        (
            shown(metric, figure) if figure is not None else "not measured",
            f"{metric.replace('-', ' ')} of the federation{tested}",
        ),
        promised(report),
        (
            size(bytes_of(report, keys.NUM_BYTES_SENT)),
            f"sent by {len(report['parties'])} parties in {several}",
        ),
    ]
    if report.get("seconds") is not None:
        tiles.append((f"{report['seconds']:.1f} s", "for the federated run"))
    return tiles


def _ranked(metric: str, lines: Sequence[Bar]) -> dict[str, Any]:
    """Return bars, the best first, and how to read them."""
    is_error = metric == keys.MEAN_SQUARED_ERROR
    return {
        "bars": sorted(lines, key=lambda line: line.value if is_error else -line.value),
        "most": 0 if is_error else 1,
        "note": "Smaller is better." if is_error else "",
    }


def _comparison(report: Report) -> dict[str, Any] | None:
    figures = report.get("figures")
    if not figures:
        return None
    metric, own = report["metric"], federation_of(report)
    rows = {own: figures["federation"]}
    rows |= {name: figures[key] for key, name in BASELINES.items() if key in figures}
    rows[CONSTANTS[metric].removeprefix("the ")] = figures[MAJORITY]
    columns = [name for name in figures[MAJORITY] if name != metric]
    return {
        "title": f"{_title(metric)} against what needs no federation",
        "header": ["", *(column.replace("-", " ") for column in columns)],
        "rows": [
            [name, *(shown(c, one.get(c)) for c in columns)] for name, one in rows.items()
        ],
        **_ranked(
            metric,
            [
                Bar(name, one[metric], shown(metric, one[metric]), name == own)
                for name, one in rows.items()
                if one.get(metric) is not None
            ],
        ),
    }


def _chart(metric: str, data: str, runs: Mapping[str, Report]) -> dict[str, Any]:
    lines = [
        Bar(label, figure, shown(metric, figure), True)
        for label, one in runs.items()
        if (figure := federation_figure(one)) is not None
    ]
    constant = next(iter(runs.values())).get(f"majority-{metric}")
    if constant is not None:
        name = CONSTANTS[metric].removeprefix("the ")
        lines.append(Bar(name, constant, shown(metric, constant)))
    title = f"{_title(metric)} on {data}" if data else _title(metric)
    return {"title": title, **_ranked(metric, lines)}


def _parties(report: Report) -> dict[str, Any]:
    """Return each party before and after; where that was not measured, its name and model."""
    metric, parties = report.get("metric"), report["parties"]
    if metric is None or not any(f"solo-{metric}" in party for party in parties):
        plain = [(one[keys.PARTITION_ID], one[keys.LEARNER]) for one in parties]
        return {"plain": plain, "rows": []}
    together, whole = own_models(report), federation_figure(report)
    pairs = [
        (
            party.get(f"solo-{metric}"),
            together.get(party[keys.PARTITION_ID]) if together else whole,
        )
        for party in parties
    ]
    ends = [value for pair in pairs for value in pair if value is not None]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    rows = []
    for party, (before, after) in zip(parties[:MOST_PARTIES], pairs, strict=False):
        row = {
            "number": party[keys.PARTITION_ID],
            "model": party[keys.LEARNER],
            "cells": [party["num-records"], shown(metric, before), shown(metric, after)],
            "change": "-",
            "kind": "soft",
            "ends": None,
        }
        if before is not None and after is not None:
            is_error, change = metric == keys.MEAN_SQUARED_ERROR, after - before
            better = change < 0 if is_error else change > 0
            row["change"] = f"{change:+.3g}" if is_error else f"{100 * change:+.1f}"
            row["kind"] = "good" if better else "bad" if change else "soft"
            room = (high - low) or 1.0
            row["ends"] = [f"{6 + 88 * (value - low) / room:.1f}%" for value in (before, after)]
        rows.append(row)
    result = "its own model after the federation" if together else "the federation's model"
    return {
        "plain": [],
        "rows": rows,
        "left": len(parties) - len(rows),
        "note": f"Alone: its own model, trained on its own records. Together: {result}.",
    }


def _rounds(report: Report) -> dict[str, Any] | None:
    """Return how good the federation was after each round, as parties measured it."""
    metric = str(report.get("metric", keys.ACCURACY))
    points = []
    for one in report["rounds"]:
        by_party = one["evaluate"].get(f"{metric}-by-party") or []
        own = [f for f in by_party if f is not None and math.isfinite(f)]
        figure = one["evaluate"].get(metric)
        if figure is None and own:
            figure = fmean(own)
        if figure is not None and math.isfinite(figure):
            points.append((int(one["round"]), float(figure)))
    if len(points) < 2:
        return None
    best = report.get(f"best-solo-{metric}")
    levels = {"best party alone": best} if best is not None else {}
    return {
        "chart": curve(points, levels, percent=metric != keys.MEAN_SQUARED_ERROR),
        "note": f"{_title(metric)} as parties measured it.",
    }


def curve(
    points: Sequence[tuple[int, float]], levels: Mapping[str, float], *, percent: bool
) -> str:
    """Return a drawing of a metric after each round, beside some levels to compare with."""
    values = [value for _, value in points] + [*levels.values()]
    low, high, step = _scale(min(values), max(values))
    first, last = points[0][0], points[-1][0]

    def x(number: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (number - first) / max(1, last - first), 1)

    def y(value: float) -> float:
        return round(TOP + (BOTTOM - TOP) * (high - value) / (high - low), 1)

    marks = [low + count * step for count in range(round((high - low) / step) + 1)]
    every = max(1, math.ceil(len(points) / MOST_LABELS))
    drawn: str = (
        _templates()
        .get_template("macros")
        .module.curve(
            title=f"{len(points)} rounds, from {first} to {last}",
            width=WIDTH,
            height=HEIGHT,
            left=LEFT,
            right=RIGHT,
            grid=[
                (f"{100 * mark:.3g} %" if percent else f"{mark:.3g}", y(mark)) for mark in marks
            ],
            levels=[(name, y(value)) for name, value in levels.items()],
            ticks=[(number, x(number)) for number, _ in points[::every]],
            points=[(x(number), y(value)) for number, value in points],
        )
    )
    return drawn


def _scale(low: float, high: float) -> tuple[float, float, float]:
    """Return the ends of an axis and the distance of its lines, in round numbers.

    Examples
    --------
    >>> _scale(0.53, 0.94)
    (0.4, 1.0, 0.2)
    """
    room = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(room / NUM_STEPS))
    step = next(s * power for s in (1, 2, 5, 10) if s * power * NUM_STEPS >= room)
    start, end = math.floor(low / step), math.ceil(high / step)
    return round(start * step, 12), round(max(end, start + 1) * step, 12), step


def _sent(report: Report) -> dict[str, Any]:
    up = bytes_of(report, keys.NUM_BYTES_SENT)
    down = bytes_of(report, keys.NUM_BYTES_RECEIVED)
    lines = [
        Bar("sent by parties", up, size(up), True),
        Bar("sent to parties", down, size(down)),
    ]
    delivery = bytes_of(report, keys.NUM_BYTES_RECEIVED, "evaluate")
    if delivery:
        lines.append(Bar("delivering the result", delivery, size(delivery)))
    note, model = "", (report.get("model") or {}).get("num-bytes")
    if model:
        copies = model * len(report["parties"]) * max(1, num_rounds(report))
        lines.append(Bar("if parties sent their models", copies, size(copies)))
        note = (
            f"The last line is what averaging weights would send: the final model "
            f"({size(model)}) from each party in each round."
        )
        if up and copies >= up:
            note += f" That is {copies / up:.3g} times as much."
    return {"bars": lines, "note": note}


def _statement(report: Report) -> dict[str, list[str]]:
    """Return the privacy statement as its sentences by what they are about."""
    told: dict[str, list[str]] = {}
    for line in str(report["privacy-statement"]).splitlines():
        name, colon, sentence = line.partition(": ")
        told.setdefault(name if colon else "", []).append(sentence if colon else line)
    return told


def _ledger(state: Report) -> dict[str, Any] | None:
    """Return each release of a ledger and whom it is told to; None if there was none."""
    if not state.get("entries"):
        return None
    ledger = PrivacyLedger.from_state_dict(state)
    limit = ledger.max_epsilon
    budget = "no budget was set" if limit is None else f"the budget was epsilon {limit:g}"
    rows = []
    for event, count in ledger.entries:
        drawn = "none" if isinstance(event, NonPrivateEvent) else "secret"
        rows.append(
            (
                describe_releases([(event, 1)]).removeprefix("1 x ").rstrip("."),
                NOUNS[event.unit],
                f"{count:,}",
                NEIGHBOURS[event.relation],
                "known to whoever has the seed" if event.seeded else drawn,
            )
        )
    note = f"Against {ledger.audience}. Delta {ledger.delta:.3g}; {budget}."
    return {"note": note, "rows": rows}


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``report``."""
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its result.json"
    )
    parser.add_argument(
        "--html",
        type=Path,
        metavar="OUT",
        help=f"page (default: RUN/{PAGE}; of several runs {COMPARISON} beside the first)",
    )
    parser.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    files = [path / RESULT if path.is_dir() else path for path in options.runs]
    require(len({*files}) == len(files), OWNER, "runs", "different", [*map(str, files)])
    reports = [read_run(path) for path in files]
    first = files[0].resolve().parent
    usual = first / PAGE if len(files) == 1 else first.parent / COMPARISON
    target = options.html or usual
    require_files(OWNER, html=target)
    folders = [
        path.resolve().parent.name if path.name == RESULT else path.stem for path in files
    ]
    undefined = import_library(OWNER, "jinja2", "simulation").TemplateError
    try:
        if len(files) == 1:
            made = page(reports[0])
        else:
            made = comparison_page(dict(zip(folders, reports, strict=True)))
    except StrategyError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, undefined) as error:
        got = f"{type(error).__name__}: {error}"
        raise InvalidData(f"{OWNER}: runs must be results of runs, got {got:.200}.") from error
    replace_file(target, made.encode(), SHARED)
    sys.stdout.write(f"report: {target}\n")
    return 0


def read_run(path: Path) -> Report:
    """Read the result of a run; say what is missing if it is something else."""
    found = read_json(OWNER, path)
    missing = [key for key in NEEDED if key not in found]
    rule = f"the result of a run, with {', '.join(NEEDED)}"
    require_data(not missing, OWNER, str(path), rule, f"none of {', '.join(missing)}")
    for key, kind in SHAPES.items():
        if not isinstance(found[key], kind):
            got = type(found[key]).__name__
            raise InvalidData(f"{OWNER}: {key} of {path} must be a {kind.__name__}, got {got}.")
    return found
