"""What a run reports: one JSON object, and the same as a table for people."""

import json
import logging
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeAlias

from flwr.serverapp.strategy import Result

from fl_strategies import KnowledgeStrategy, keys
from simulations.experiment import Federation

logger = logging.getLogger("flwr.fl_strategies")

Report: TypeAlias = dict[str, Any]

_PACKAGES = (
    "fl-strategies", "flwr", "numpy", "scikit-learn", "xgboost", "xgboost-cpu", "torch",
)  # fmt: skip


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
    train = dict(result.train_metrics_clientapp.get(1, {}))
    evaluate = dict(result.evaluate_metrics_clientapp.get(1, {}))
    settings, accuracy = federation.settings, federation.accuracy(strategy.model_)
    solo = federation.solo_accuracies(num_workers) if settings.solo else []
    return {
        "strategy": settings.strategy,
        "data": settings.data,
        "seed": settings.seed,
        "accuracy": accuracy,
        "solo-accuracy": fmean(solo) if solo else None,
        "best-solo-accuracy": max(solo, default=None),
        "central-accuracy": federation.central_accuracy() if settings.central else None,
        **{key: train[key] for key in (keys.EPSILON_PARTY, keys.DELTA_PARTY)},
        **{key: train[key] for key in (keys.EPSILON_EXAMPLE, keys.DELTA_EXAMPLE)},
        "ledger": strategy.ledger_.state_dict(),
        "privacy-statement": strategy.ledger_.statement(),
        keys.NUM_BYTES_SENT: train[keys.NUM_BYTES_SENT],
        keys.NUM_BYTES_RECEIVED: train[keys.NUM_BYTES_RECEIVED],
        "seconds": seconds,
        "cpu-seconds": cpu_seconds,
        "metrics": {"train": train, "evaluate": evaluate},
        "parties": _describe_parties(federation, strategy, solo),
        "rejected": {str(node): reason for node, reason in strategy.rejected_.items()},
        "settings": settings.to_run_config(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": _versions(),
        "commit": _commit(),
    }


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
            "solo-accuracy": solo[number] if solo else None,
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
    rows = [
        [
            str(party[keys.PARTITION_ID]),
            str(party[keys.LEARNER]),
            str(party["num-records"]),
            percent(party["solo-accuracy"]),
        ]
        for party in report["parties"]
    ]
    summary = {
        "federation": report["accuracy"],
        "mean of parties alone": report["solo-accuracy"],
        "best party alone": report["best-solo-accuracy"],
        "all data in one place": report["central-accuracy"],
    }
    learner = report["settings"]["final-learner"]
    accuracies = [[name, percent(value)] for name, value in summary.items()]
    lines = [
        "",
        table(["party", "learner", "records", "alone"], rows),
        "",
        f"{report['strategy']} on {report['data']}, seed {report['seed']}, final {learner}",
        table(["accuracy", ""], accuracies),
        f"epsilon for a party: {report[keys.EPSILON_PARTY]}",
        f"epsilon for an example: {report[keys.EPSILON_EXAMPLE]}",
        f"sent by parties: {report[keys.NUM_BYTES_SENT]} bytes",
        f"seconds: {report['seconds']:.1f}",
    ]
    lines += [f"left out: node {node}: {why}" for node, why in report["rejected"].items()]
    return "\n".join(lines)


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
