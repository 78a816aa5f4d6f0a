"""Pages of results for people: of one run, or of several side by side.

Everything comes from reports and nothing else, so that the page of an old result can be made
again. Parts that a report does not have are omitted. Names of parties, reasons for exclusions
and columns of data files are untrusted: the templates escape all of them.
"""

import functools
import math
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from statistics import fmean
from typing import Any, Final, NamedTuple

from fl_strategies._util import import_library
from fl_strategies.aggregation.statistics import HEADER, Statistics
from fl_strategies.privacy.accountant import chance_in_clear
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.ledger import PrivacyLedger, describe_releases
from fl_strategies.wire import keys
from simulations.results.report import (
    Report,
    compared_of,
    federation_of,
    size,
    stopping_of,
    strategy_of,
)
from simulations.results.verdict import (
    CONSTANTS,
    ERRORS,
    PROMISES,
    is_share,
    own_models,
    shown,
)

RESULT: Final = "result.json"
PAGE: Final = "report.html"
COMPARISON: Final = "comparison.html"
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
"""Metrics of the last round in words, and whether they are shares."""
NOUNS: Final = {"party": "a party", "example": "a record"}
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
    """One line of a bar chart; the page is about its `own` bars."""

    name: str
    value: float
    shown: str
    is_own: bool = False


@functools.cache
def _templates() -> Any:
    """Return the environment of all templates."""
    jinja2 = import_library("report", "jinja2", "simulation")
    text = (resources.files(__package__) / "templates.toml").read_text(encoding="utf-8")
    made = jinja2.Environment(
        loader=jinja2.DictLoader(tomllib.loads(text)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals |= {"size": size, "headline": headline}
    return made


def page(report: Report) -> str:
    """Return the page of one run."""
    name, seed = strategy_of(report), report.get("seed")
    opening = (
        f"{name} on {report['data']}" if "data" in report else name,
        "" if seed is None else f"seed {seed}",
        str(report.get("date", ""))[:10],
    )
    phases, cpu, last = report.get("phases") or {}, report.get("cpu-seconds"), _last(report)
    stopped, statement = stopping_of(report), dict[str, list[str]]()
    for line in str(report["privacy-statement"]).splitlines():
        topic, colon, sentence = line.partition(": ")
        statement.setdefault(topic if colon else "", []).append(sentence if colon else line)
    notes = (
        f"The federated run took {cpu:.1f} s of processor time." if cpu else "",
        f"{stopped[0].upper()}{stopped[1:]}." if stopped else "",
    )
    html: str = (
        _templates()
        .get_template("run")
        .render(
            report=report,
            title=f"{name} on {report.get('data', 'the parties own data')}",
            opening=" · ".join(filter(None, opening)),
            tiles=_tiles(report),
            comparison=_comparison(report),
            parties=_parties(report),
            rounds=_rounds(report),
            sent=_sent(report),
            statement=statement,
            ledger=_ledger(report.get("ledger") or {}),
            conduct=[
                [words, f"{100 * last[key]:.1f} %" if is_share else f"{last[key]:g}"]
                for key, (words, is_share) in CONDUCT.items()
                if last.get(key) is not None
            ],
            phases=[
                Bar(words, phases[key], f"{phases[key]:.2f} s", key != "comparison")
                for key, words in PHASES.items()
                if key in phases
            ],
            time_note=" ".join(filter(None, notes)),
            settings=[(key, setting(value)) for key, value in report["settings"].items()],
        )
    )
    return html


def comparison_page(runs: Mapping[str, Report]) -> str:
    """Return the page of several runs, by the names of their folders.

    Each metric and data set has a chart of its own: others cannot be compared.
    """
    titles = {name: f"{one['strategy']}, seed {one['seed']}" for name, one in runs.items()}
    repeated = [*titles.values()]
    labelled = {
        label if repeated.count(label) == 1 else f"{label} ({name})": runs[name]
        for name, label in titles.items()
    }
    kinds: dict[tuple[str, str], dict[str, Report]] = {}
    for label, one in labelled.items():
        if _metric_of(one) is not None:
            kind = str(one.get("metric", keys.ACCURACY)), str(one.get("data", ""))
            kinds.setdefault(kind, {})[label] = one
    data = dict.fromkeys(str(one.get("data", "the parties' own data")) for one in runs.values())
    settings = [one["settings"] for one in runs.values()]
    known = dict.fromkeys(key for one in settings for key in one if key not in NO_RESULT)
    html: str = (
        _templates()
        .get_template("several")
        .render(
            title=f"{len(runs)} runs compared",
            data=", ".join(data),
            charts=[_chart(metric, on, several) for (metric, on), several in kinds.items()],
            costs=[
                (
                    label,
                    *promised(one),
                    size(_bytes_of(one, keys.NUM_BYTES_SENT)),
                    size(_bytes_of(one, keys.NUM_BYTES_RECEIVED)),
                    _num_rounds(one),
                    f"{one['seconds']:.1f}",
                    len(one.get("rejected") or {}),
                )
                for label, one in labelled.items()
            ],
            runs=labelled,
            differing=[
                [key, *(setting(one.get(key, "-")) for one in settings)]
                for key in known
                if len({str(one.get(key, "-")) for one in settings}) > 1
            ],
        )
    )
    return html


def statistics_page(
    found: Statistics, *, title: str, opening: str, statement: str, pictures: Mapping[str, str]
) -> str:
    """Return the page of statistics of columns; pictures are addresses by their titles."""
    groups = zip(found.groups, found.counts.tolist(), strict=True)
    likely = f"Noise has a deviation of {found.noise:.3g}." if found.noise else ""
    html: str = (
        _templates()
        .get_template("statistics")
        .render(
            title=title,
            opening=opening,
            statement=statement.splitlines(),
            groups=[Bar(name, count, f"{count:.0f}") for name, count in groups],
            note=likely,
            header=HEADER,
            rows=found.rows(),
            pictures=pictures,
        )
    )
    return html


def headline(report: Report) -> str:
    """Return the verdict as a sentence."""
    verdict = str(report.get("verdict") or "compared with nothing")
    return f"{verdict[:1].upper()}{verdict[1:]}."


def _metric_of(report: Report) -> float | None:
    """Return the metric of the federation, if it was measured."""
    value = report.get(str(report.get("metric", keys.ACCURACY)))
    finite = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if finite else None  # type: ignore[arg-type]


def _bytes_of(report: Report, key: str, part: str = "train") -> int:
    """Return the bytes of all rounds, of training or of delivering the result."""
    return sum(int(one[part].get(key) or 0) for one in report["rounds"])


def _num_rounds(report: Report) -> int:
    return max((int(one["round"]) for one in report["rounds"]), default=0)


def promised(report: Report) -> tuple[str, str]:
    """Return the strongest guarantee in a few words: a large line and a small one."""
    clear = chance_in_clear(PrivacyLedger.from_state_dict(report["ledger"]).entries)
    if clear > 0:
        return f"{100 * clear:.3g} %", "chance that a record is used in the clear"
    last = _last(report)
    for unit in ("example", "party"):
        epsilon, delta = PROMISES[unit]
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


def _last(report: Report) -> Report:
    last: Report = report["rounds"][-1]["train"] if report["rounds"] else {}
    return last


def _title(metric: str) -> str:
    return metric.replace("-", " ").capitalize()


def _tiles(report: Report) -> list[tuple[str, str]]:
    metric, value = str(report.get("metric", keys.ACCURACY)), _metric_of(report)
    rows, rounds = report.get("num-test-rows"), _num_rounds(report)
    tested = f" on {rows} test rows" if rows else ""
    several = f"{rounds} rounds" if rounds > 1 else "one round"
    sent = size(_bytes_of(report, keys.NUM_BYTES_SENT))
    tiles = [
        (
            "not measured" if value is None else shown(metric, value),
            f"{metric.replace('-', ' ')} of the federation{tested}",
        ),
        promised(report),
        (sent, f"sent by {len(report['parties'])} parties in {several}"),
    ]
    if report.get("seconds") is not None:
        tiles.append((f"{report['seconds']:.1f} s", "for the federated run"))
    return tiles


def _ranked(title: str, metric: str, values: Mapping[str, float], own: set[str]) -> Report:
    """Return a bar chart, the best first, and how to read it."""
    is_error = metric in ERRORS
    bars = [Bar(name, v, shown(metric, v), name in own) for name, v in values.items()]
    return {
        "title": title,
        "bars": sorted(bars, key=lambda bar: bar.value if is_error else -bar.value),
        "most": 0 if is_error else 1,
        "note": "Smaller is better." if is_error else "",
    }


def _comparison(report: Report) -> Report | None:
    if not report.get("figures"):
        return None
    metric, rows, own = report["metric"], compared_of(report), federation_of(report)
    columns = [name for name in [*rows.values()][-1] if name != metric]
    values = {name: one[metric] for name, one in rows.items() if one.get(metric) is not None}
    title = f"{_title(metric)} against what needs no federation"
    return {
        **_ranked(title, metric, values, {own}),
        "header": ["", *(column.replace("-", " ") for column in columns)],
        "rows": [
            [name, *(shown(c, one.get(c)) for c in columns)] for name, one in rows.items()
        ],
    }


def _chart(metric: str, data: str, runs: Mapping[str, Report]) -> Report:
    values = {
        label: value for label, one in runs.items() if (value := _metric_of(one)) is not None
    }
    constant = next(iter(runs.values())).get(f"majority-{metric}")
    if constant is not None:
        values[CONSTANTS[metric].removeprefix("the ")] = constant
    title = f"{_title(metric)} on {data}" if data else _title(metric)
    return _ranked(title, metric, values, {*runs})


def _parties(report: Report) -> Report:
    """Return each party before and after; where that was not measured, its name and model."""
    metric, parties = report.get("metric"), report["parties"]
    if metric is None or not any(f"solo-{metric}" in party for party in parties):
        plain = [(one[keys.PARTITION_ID], one[keys.LEARNER]) for one in parties]
        return {"plain": plain, "rows": []}
    together, whole = own_models(report), _metric_of(report)
    pairs = [
        (
            party.get(f"solo-{metric}"),
            together.get(party[keys.PARTITION_ID]) if together else whole,
        )
        for party in parties
    ]
    ends = [value for pair in pairs for value in pair if value is not None]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    room = (high - low) or 1.0
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
            is_error, change = metric in ERRORS, after - before
            better = change < 0 if is_error else change > 0
            row["change"] = f"{100 * change:+.1f}" if is_share(metric) else f"{change:+.3g}"
            row["kind"] = "good" if better else "bad" if change else "soft"
            row["ends"] = [f"{6 + 88 * (value - low) / room:.1f}%" for value in (before, after)]
        rows.append(row)
    result = "its own model after the federation" if together else "the federation's model"
    return {
        "plain": [],
        "rows": rows,
        "left": len(parties) - len(rows),
        "note": f"Alone: its own model, trained on its own records. Together: {result}.",
    }


def _rounds(report: Report) -> Report | None:
    """Return the federation's metric after each round, as parties measured it."""
    metric = str(report.get("metric", keys.ACCURACY))
    points = []
    for one in report["rounds"]:
        by_party = one["evaluate"].get(f"{metric}-by-party") or []
        own = [f for f in by_party if f is not None and math.isfinite(f)]
        value = one["evaluate"].get(metric, fmean(own) if own else None)
        if value is not None and math.isfinite(value):
            points.append((int(one["round"]), float(value)))
    if len(points) < 2:
        return None
    best = report.get(f"best-solo-{metric}")
    levels = {"best party alone": best} if best is not None else {}
    return {
        "chart": curve(points, levels, percent=is_share(metric)),
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


def _sent(report: Report) -> Report:
    up = _bytes_of(report, keys.NUM_BYTES_SENT)
    parts = {
        "sent by parties": up,
        "sent to parties": _bytes_of(report, keys.NUM_BYTES_RECEIVED),
    }
    if delivery := _bytes_of(report, keys.NUM_BYTES_RECEIVED, "evaluate"):
        parts["delivering the result"] = delivery
    note = ""
    if model := (report.get("model") or {}).get("num-bytes"):
        copies = model * len(report["parties"]) * max(1, _num_rounds(report))
        parts["if parties sent their models"] = copies
        note = (
            f"The last line is what averaging weights would send: the final model "
            f"({size(model)}) from each party in each round."
        )
        if up and copies >= up:
            note += f" That is {copies / up:.3g} times as much."
    bars = [Bar(name, sent, size(sent), sent is up) for name, sent in parts.items()]
    return {"bars": bars, "note": note}


def _ledger(state: Report) -> Report | None:
    """Return the releases of a ledger and its audience; None if there was no release."""
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
