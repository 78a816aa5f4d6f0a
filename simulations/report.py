"""What a run reports: one JSON object, and the same as a table for people."""

import json
import logging
import math
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeAlias

from flwr.serverapp.strategy import Result

from fl_strategies import KnowledgeStrategy, keys
from fl_strategies.exceptions import MissingExtra, StrategyError
from simulations.experiment import Federation

logger = logging.getLogger("flwr.fl_strategies")

Report: TypeAlias = dict[str, Any]

_PACKAGES = (
    "fl-strategies", "flwr", "numpy", "scikit-learn", "xgboost", "xgboost-cpu", "torch",
)  # fmt: skip
_GUARANTEES = (
    ("a party", keys.EPSILON_PARTY, keys.DELTA_PARTY),
    ("an example", keys.EPSILON_EXAMPLE, keys.DELTA_EXAMPLE),
)


def make_report(
    federation: Federation,
    strategy: KnowledgeStrategy[Any],
    result: Result,
    *,
    seconds: float,
    cpu_seconds: float | None = None,
    num_workers: int = 1,
) -> Report:
    """Describe a finished run.

    Raises `NotFitted`, with the reason, if the run has no model. ``seconds`` and
    ``cpu-seconds`` cover the federated run, not the loading of data or the comparisons.
    Epsilon is ``Infinity``, as Python's `json` writes it, where nothing is promised. The
    comparisons use `num_workers` processes.
    """
    rounds = _rounds(result)
    train, evaluate = rounds[-1]["train"], rounds[-1]["evaluate"]
    settings, metric = federation.settings, federation.metric
    figure = _figure(federation, strategy, evaluate)
    solo = federation.solo_qualities(num_workers) if settings.solo else []
    best = min if metric == keys.MEAN_SQUARED_ERROR else max
    return {
        "strategy": settings.strategy,
        "data": settings.data,
        "seed": settings.seed,
        "metric": metric,
        metric: figure,
        f"server-{metric}": None if strategy.central else _server_figure(federation, strategy),
        f"solo-{metric}": fmean(solo) if solo else None,
        f"best-solo-{metric}": best(solo, default=None),
        f"central-{metric}": federation.central_quality() if settings.central else None,
        **{key: train[key] for key in (keys.EPSILON_PARTY, keys.DELTA_PARTY)},
        **{key: train[key] for key in (keys.EPSILON_EXAMPLE, keys.DELTA_EXAMPLE)},
        "ledger": strategy.ledger_.state_dict(),
        "privacy-statement": _privacy_statement(strategy),
        keys.NUM_BYTES_SENT: sum(r["train"].get(keys.NUM_BYTES_SENT, 0) for r in rounds),
        keys.NUM_BYTES_RECEIVED: sum(
            r["train"].get(keys.NUM_BYTES_RECEIVED, 0) for r in rounds
        ),
        "seconds": seconds,
        "cpu-seconds": cpu_seconds,
        "metrics": {"train": train, "evaluate": evaluate},
        "rounds": rounds,
        "parties": _describe_parties(federation, strategy, solo),
        "rejected": {str(node): reason for node, reason in strategy.rejected_.items()},
        "settings": settings.to_run_config(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "commit": _commit(),
    }


def _rounds(result: Result) -> list[Report]:
    """Return the metrics of every round that had any; an empty one if none had."""
    train, evaluate = result.train_metrics_clientapp, result.evaluate_metrics_clientapp
    return [
        {"round": r, "train": dict(train.get(r, {})), "evaluate": dict(evaluate.get(r, {}))}
        for r in sorted({*train, *evaluate})
    ] or [{"round": 0, "train": {}, "evaluate": {}}]


def _total(rounds: Sequence[Report], key: str) -> float:
    return float(sum(one["train"].get(key, 0) for one in rounds))


def _server_figure(federation: Federation, strategy: KnowledgeStrategy[Any]) -> float | None:
    """Return how good the server's own model is, where parties keep theirs."""
    try:
        return federation.quality(strategy.model_)
    except StrategyError:
        return None  # a server may lack the factories to make one


def _figure(
    federation: Federation, strategy: KnowledgeStrategy[Any], evaluate: Report
) -> float:
    """Return how good the final model is, or the mean over parties that keep their own."""
    if strategy.central:
        return federation.quality(strategy.model_)
    told = evaluate.get(f"{federation.metric}-by-party") or []
    own = [figure for figure in told if not math.isnan(figure)]
    return fmean(own) if own else federation.quality(strategy.model_)


def _privacy_statement(strategy: KnowledgeStrategy[Any]) -> str:
    """Return the statement, or why there is none: events of parties may need an extra."""
    try:
        return strategy.ledger_.statement()
    except MissingExtra as error:
        return f"Guarantee: none, because it cannot be computed here. {error}"


def _describe_parties(
    federation: Federation, strategy: KnowledgeStrategy[Any], solo: Sequence[float]
) -> list[Report]:
    """Describe all parties, also those that were left out, which have no metrics."""
    names = federation.settings.learner_names
    return [
        {
            keys.PARTITION_ID: number,
            keys.LEARNER: names[number % len(names)],
            "num-records": len(rows),
            f"solo-{federation.metric}": solo[number] if solo else None,
            "metrics": strategy.parties_[number].train if number in strategy.parties_ else {},
        }
        for number, rows in enumerate(federation.rows)
    ]


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """Return the commit of the code that runs, if it runs from a checkout."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_report(report: Report, output_dir: str) -> Path:
    """Write ``<output-dir>/<timestamp>/result.json`` and return its path."""
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S-%f")
    path = Path(output_dir).resolve() / stamp / "result.json"
    path.parent.mkdir(parents=True)
    write_json(report, path)
    logger.info("The result is in %s", path)
    return path


def write_json(report: Report, path: Path) -> None:
    """Write a report for programs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def log_report(report: Report) -> None:
    """Log a report for people."""
    for line in render(report).splitlines():
        logger.info("%s", line)


def render(report: Report) -> str:
    """Return the table of a run.

    Examples
    --------
    >>> print(table(["party", "accuracy"], [["0", "81.0 %"], ["1", "7.5 %"]]))
    party  accuracy
        0    81.0 %
        1     7.5 %
    """
    metric = report["metric"]
    together, server = _together(report), report.get(f"server-{metric}")
    name = "federation (mean of the parties' own models)" if together else "federation"
    summary = {
        name: report[metric],
        "mean of parties alone": report[f"solo-{metric}"],
        "best party alone": report[f"best-solo-{metric}"],
        **({} if server is None else {"the server's own model": server}),
        "all data in one place": report[f"central-{metric}"],
    }
    learner = report["settings"]["final-learner"]
    figures = [[name, percent(value)] for name, value in summary.items()]
    lines = [
        "",
        _party_table(report, together),
        "",
        f"{report['strategy']} on {report['data']}, seed {report['seed']}, final {learner}",
        table([metric, ""], figures),
        *(
            f"epsilon for {whom}: {report[epsilon]} at delta {report[delta]:.3g}"
            for whom, epsilon, delta in _GUARANTEES
        ),
        f"sent by parties: {report[keys.NUM_BYTES_SENT]} bytes",
        f"seconds: {report['seconds']:.1f}",
    ]
    lines += [f"left out: node {node}: {why}" for node, why in report["rejected"].items()]
    return "\n".join(lines)


def _together(report: Report) -> dict[int, float]:
    """Return the last figure of each party that keeps its own model; empty if none does."""
    evaluate = report["metrics"]["evaluate"]
    numbers = map(int, evaluate.get(keys.PARTITION_IDS, []))
    return dict(zip(numbers, evaluate.get(f"{report['metric']}-by-party", []), strict=False))


def _party_table(report: Report, together: Mapping[int, float]) -> str:
    header = ["party", "learner", "records", "alone", *(["together"] if together else [])]
    rows = []
    for party in report["parties"]:
        number = party[keys.PARTITION_ID]
        row = [str(number), str(party[keys.LEARNER]), str(party["num-records"])]
        figures = [party[f"solo-{report['metric']}"], together.get(number)]
        rows.append(row + [percent(figure) for figure in figures[: len(header) - 3]])
    return table(header, rows)


def percent(value: float | None) -> str:
    """Return a share as people read it."""
    return "-" if value is None else f"{100 * value:.1f} %"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return right-aligned columns."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def summarise(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and sample deviation over seeds; one value has deviation 0."""
    return fmean(values), stdev(values) if len(values) > 1 else 0.0
