"""A report as one page of HTML: the verdict first, and then what it rests on.

Everything comes from a report and nothing else, so that the page of an old result can be
made again. A part that a report says nothing about is omitted.
"""

import math
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, Final, TypeAlias

from fl_strategies.wire import keys
from simulations.experiments.compare import size
from simulations.results.baselines import (
    BEST_PARTY,
    MAJORITY,
    MEAN_PARTY,
    PATE,
    POOLED,
    PUBLIC_ONLY,
)
from simulations.results.html import Html, card, document, element, grid, setting, text
from simulations.results.privacy import privacy_section, promised
from simulations.results.report import shown, stopping_of, strategy_of
from simulations.results.style import STYLE
from simulations.results.svg import Bar, bars, curve, dumbbell
from simulations.results.verdict import CONSTANTS, own_models

Report: TypeAlias = Mapping[str, Any]
Section: TypeAlias = Callable[[Report], Html | None]

MOST_PARTIES: Final = 200
NAMES: Final = {
    BEST_PARTY: "best party alone",
    MEAN_PARTY: "mean of parties alone",
    POOLED: "all data in one place",
    PATE: "PATE on pooled data",
    PUBLIC_ONLY: "public labels alone",
}
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


def page(report: Report) -> str:
    """Return the page of one run."""
    parts = [section(report) for section in _SECTIONS]
    title = f"{strategy_of(report)} on {report.get('data', 'the parties own data')}"
    return document(title, STYLE, *(part for part in parts if part is not None))


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


def _opening(report: Report) -> Html:
    told = [
        f"{strategy_of(report)} on {report['data']}"
        if "data" in report
        else strategy_of(report),
        f"seed {report['seed']}" if "seed" in report else "",
        str(report.get("date", ""))[:10],
    ]
    return element(
        "header",
        element("p", " · ".join(filter(None, told))),
        element("h1", headline(report)),
    )


def _warnings(report: Report) -> Html | None:
    found = report.get("warnings") or []
    lines = [element("p", sentence) for sentence in found]
    return element("div", *lines, class_="warning") if lines else None


def _tiles(report: Report) -> Html:
    metric, figure = str(report.get("metric", keys.ACCURACY)), federation_figure(report)
    rows = report.get("num-test-rows")
    tested = f" on {rows} test rows" if rows else ""
    told = [
        (
            shown(metric, figure) if figure is not None else "not measured",
            f"{metric.replace('-', ' ')} of the federation{tested}",
        ),
        promised(report),
        (size(bytes_of(report, keys.NUM_BYTES_SENT)), _sent_by(report)),
    ]
    if report.get("seconds") is not None:
        told.append((f"{report['seconds']:.1f} s", "for the federated run"))
    tiles = [
        element("div", element("b", big), element("span", small), class_="tile")
        for big, small in told
    ]
    return element("div", *tiles, class_="tiles")


def _sent_by(report: Report) -> str:
    rounds = num_rounds(report)
    several = f"{rounds} rounds" if rounds > 1 else "one round"
    return f"sent by {len(report['parties'])} parties in {several}"


def _comparison(report: Report) -> Html | None:
    figures = report.get("figures")
    if not figures:
        return None
    metric = report["metric"]
    own = "federation (mean of the parties' own models)" if own_models(report) else "federation"
    rows = {own: figures["federation"]}
    rows |= {name: figures[key] for key, name in NAMES.items() if key in figures}
    rows[CONSTANTS[metric].removeprefix("the ")] = figures[MAJORITY]
    lines = [
        Bar(name, found[metric], shown(metric, found[metric]), name == own)
        for name, found in rows.items()
        if found.get(metric) is not None
    ]
    is_error = metric == keys.MEAN_SQUARED_ERROR
    ordered = sorted(lines, key=lambda line: line.value if is_error else -line.value)
    columns = [name for name in figures[MAJORITY] if name != metric]
    header = ["", *(column.replace("-", " ") for column in columns)]
    cells = [[name, *(shown(c, found.get(c)) for c in columns)] for name, found in rows.items()]
    others = grid(header, cells, range(1, len(header))) if columns else None
    note = "Smaller is better." if is_error else ""
    known = metric.replace("-", " ").capitalize()
    more = element("details", element("summary", "Other figures"), others) if others else None
    return card(
        f"{known} against what needs no federation",
        bars(ordered, None if is_error else 1.0),
        more,
        note=note,
    )


def _parties(report: Report) -> Html | None:
    metric = report.get("metric")
    parties = report["parties"]
    if metric is None or not any(f"solo-{metric}" in party for party in parties):
        told = [[party[keys.PARTITION_ID], party[keys.LEARNER]] for party in parties]
        return card("Parties", grid(["party", "model"], told)) if told else None
    together, whole = own_models(report), federation_figure(report)
    found = []
    for party in parties:
        before = party.get(f"solo-{metric}")
        number = party[keys.PARTITION_ID]
        after = together.get(number) if together else whole
        found.append((party, before, after))
    ends = [value for _, *pair in found for value in pair if value is not None]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    rows = [
        [
            party[keys.PARTITION_ID],
            party[keys.LEARNER],
            party["num-records"],
            shown(metric, before),
            shown(metric, after),
            _gain(metric, before, after),
            dumbbell(before, after, low, high)
            if before is not None and after is not None
            else "",
        ]
        for party, before, after in found[:MOST_PARTIES]
    ]
    header = ["party", "model", "records", "alone", "together", "change", ""]
    left = len(found) - len(rows)
    return card(
        "Parties before and after",
        grid(header, rows, (2, 3, 4, 5)),
        element("p", f"{left} more are in result.json.", class_="soft") if left else None,
        note="Alone: its own model, trained on its own records. Together: "
        + ("its own model after the federation." if together else "the federation's model."),
    )


def _gain(metric: str, before: float | None, after: float | None) -> Html:
    if before is None or after is None:
        return text("-")
    is_error = metric == keys.MEAN_SQUARED_ERROR
    change = after - before
    better = change < 0 if is_error else change > 0
    told = f"{change:+.3g}" if is_error else f"{100 * change:+.1f}"
    return element("span", told, class_="good" if better else "bad" if change else "soft")


def _rounds(report: Report) -> Html | None:
    metric = str(report.get("metric", keys.ACCURACY))
    points = [
        (int(one["round"]), float(figure))
        for one in report["rounds"]
        if (figure := _measured(one["evaluate"], metric)) is not None
    ]
    if len(points) < 2:
        return None
    best = report.get(f"best-solo-{metric}")
    levels = {"best party alone": best} if best is not None else {}
    percent = metric != keys.MEAN_SQUARED_ERROR
    name = metric.replace("-", " ").capitalize()
    return card(
        "Round by round",
        curve(points, levels, percent=percent),
        note=f"{name} as parties measured it.",
    )


def _measured(evaluate: Mapping[str, Any], metric: str) -> float | None:
    figure = evaluate.get(metric)
    if figure is None:
        told = [f for f in evaluate.get(f"{metric}-by-party") or [] if f is not None]
        finite = [f for f in told if math.isfinite(f)]
        return fmean(finite) if finite else None
    return figure if math.isfinite(figure) else None


def _bytes(report: Report) -> Html:
    sent, received = keys.NUM_BYTES_SENT, keys.NUM_BYTES_RECEIVED
    lines = [
        Bar("sent by parties", up := bytes_of(report, sent), size(up), True),
        Bar("sent to parties", down := bytes_of(report, received), size(down)),
    ]
    delivery = bytes_of(report, received, "evaluate")
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
    return card("What was sent", bars(lines), note=note)


def _conduct(report: Report) -> Html | None:
    last = report["rounds"][-1]["train"] if report["rounds"] else {}
    rows: list[list[object]] = [
        [words, f"{100 * last[key]:.1f} %" if is_share else f"{last[key]:g}"]
        for key, (words, is_share) in CONDUCT.items()
        if last.get(key) is not None
    ]
    refused = report.get("rejected") or {}
    excluded = [[node, reason] for node, reason in refused.items()]
    without = [[node, why] for node, why in (report.get("undelivered") or {}).items()]
    if not rows and not excluded and not without:
        return None
    return card(
        "Agreement, failures and exclusions",
        grid(["in the last round", ""], rows, (1,)) if rows else None,
        element("h3", "Excluded") if excluded else None,
        grid(["node", "why"], excluded)
        if excluded
        else element("p", "Nobody was excluded.", class_="soft"),
        element("h3", "Without the model") if without else None,
        grid(["node", "why"], without) if without else None,
    )


def _time(report: Report) -> Html | None:
    phases = report.get("phases") or {}
    lines = [
        Bar(words, phases[key], f"{phases[key]:.2f} s", key != "comparison")
        for key, words in PHASES.items()
        if key in phases
    ]
    cpu = report.get("cpu-seconds")
    took = f"The federated run took {cpu:.1f} s of processor time." if cpu else ""
    stopped = stopping_of(report)
    notes = [took, f"{stopped[0].upper()}{stopped[1:]}." if stopped else ""]
    return card("Time", bars(lines), note=" ".join(filter(None, notes))) if lines else None


def _model(report: Report) -> Html | None:
    told = report.get("model")
    if not told:
        return None
    if "missing" in told:
        reason = element("p", f"No model was saved: {told['missing']}")
        return card("The model", reason)
    code = 'from clients import load_model\n\nmodel = load_model("RUN")  # this folder'
    files = element("p", "Files: ", ", ".join(told["files"]))
    return card(
        "The model",
        element("p", f"{told['learner']}, {size(told['num-bytes'])}."),
        element("pre", element("code", code)),
        files,
    )


def _settings(report: Report) -> Html:
    versions = [[name, version] for name, version in report.get("versions", {}).items()]
    if report.get("commit"):
        versions.append(["commit", report["commit"]])
    rows = [[key, setting(value)] for key, value in report["settings"].items()]
    return card(
        "Settings and versions",
        grid(["package", "version"], versions),
        element(
            "details",
            element("summary", f"All {len(rows)} settings"),
            grid(["setting", "value"], rows),
        ),
    )


_SECTIONS: Final[tuple[Section, ...]] = (
    _opening,
    _tiles,
    _warnings,
    _comparison,
    _parties,
    _rounds,
    _bytes,
    privacy_section,
    _conduct,
    _time,
    _model,
    _settings,
)
