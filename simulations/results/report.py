"""The report of a run: one JSON object, and the same as tables for people."""

import logging
import math
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeAlias

from flwr.serverapp.strategy import Result

from fl_strategies import KnowledgeStrategy, Learner
from fl_strategies.aggregation.votes import class_counts
from fl_strategies.errors import MissingExtra, StrategyError
from fl_strategies.learners import metric_names
from fl_strategies.wire import keys
from simulations.federation import Federation
from simulations.results.verdict import (
    BASELINES,
    CONSTANTS,
    MAJORITY,
    PATE,
    PROMISES,
    PUBLIC_ONLY,
    Baselines,
    evaluate_baselines,
    existing,
    find_warnings,
    own_models,
    shown,
    verdict,
)
from simulations.runtime.progress import ALONE, EVALUATE, TRAIN, Watch

logger = logging.getLogger("flwr.fl_strategies")

Report: TypeAlias = dict[str, Any]

_PACKAGES = (
    "fl-strategies",
    "flwr",
    "numpy",
    "scikit-learn",
    "lightgbm",
    "xgboost",
    "xgboost-cpu",
    "torch",
)
_IF_ASKED_FOR = (PATE, PUBLIC_ONLY)
_UNITS = {"party": "a party", "example": "an example"}


def make_report(
    federation: Federation,
    strategy: KnowledgeStrategy[Any],
    result: Result,
    *,
    seconds: float,
    cpu_seconds: float | None = None,
    num_workers: int = 1,
    watch: Watch | None = None,
    model: Report | None = None,
) -> Report:
    """Describe a finished run.

    Raises `NotFitted`, with the reason, if the run has no model. ``seconds`` and
    ``cpu-seconds`` cover the federated run, not the loading of data or the baselines, which
    use `num_workers` processes. Epsilon is infinite without a guarantee. `watch` has the time
    of each part; `model` describes the saved files.
    """
    rounds = rounds_of(result)
    train, evaluate = rounds[-1]["train"], rounds[-1]["evaluate"]
    settings, learners = federation.settings, ",".join(federation.learner_names)
    watch = watch or Watch()
    with watch.phase("comparison"):
        baselines = evaluate_baselines(federation, num_workers, partial(watch.answered, ALONE))
    report = {
        "strategy": settings.strategy,
        "data": settings.data,
        "seed": settings.seed,
        **_compared(federation, strategy, evaluate, baselines),
        **{key: train[key] for pair in PROMISES.values() for key in pair},
        **{
            key: sum(one["train"].get(key, 0) for one in rounds)
            for key in (keys.NUM_BYTES_SENT, keys.NUM_BYTES_RECEIVED)
        },
        "seconds": seconds,
        "cpu-seconds": cpu_seconds,
        "early-stopping": _early_stopping(federation, _model_of(strategy)),
        "phases": _phases(watch.seconds),
        "model": model,
        "metrics": {"train": train, "evaluate": evaluate},
        "parties": _describe_parties(federation, strategy, baselines.solo),
        "settings": {
            **settings.to_report(),
            "learner": learners,
            "final-learner": federation.final_learner,
        },
        "commit": _commit(),
        **describe_run(strategy, result),
    }
    report |= {"verdict": verdict(report), "warnings": find_warnings(report)}
    for sentence in report["warnings"]:
        logger.warning("%s", sentence)
    return report


def describe_run(strategy: KnowledgeStrategy[Any], result: Result) -> Report:
    """Return the part of a report that needs no `Federation`."""
    return {
        "ledger": strategy.ledger_.state_dict(),
        "privacy-statement": _privacy_statement(strategy),
        "rounds": rounds_of(result),
        "rejected": {str(node): reason for node, reason in strategy.rejected_.items()},
        "undelivered": {str(node): why for node, why in strategy.undelivered_.items()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
    }


def describe_answers(strategy: KnowledgeStrategy[Any]) -> list[Report]:
    """Describe the parties that have answered, where nobody knows their records."""
    return [
        {keys.PARTITION_ID: number, keys.LEARNER: party.learner_name, "train": party.train}
        for number, party in sorted(strategy.parties_.items())
    ]


def strategy_of(report: Mapping[str, Any]) -> str:
    """Return the strategy's name, and that of the one that continued."""
    then = report["settings"].get("then")
    return f"{report['strategy']} then {then}" if then else str(report["strategy"])


def _phases(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each part, as far as they were measured.

    The rest of the federation is the server's: it combines replies and trains the final model.
    """
    known = {key: seconds[key] for key in ("loading", "comparison") if key in seconds}
    if "federation" not in seconds:
        return known
    training, evaluation = seconds.get(TRAIN, 0.0), seconds.get(EVALUATE, 0.0)
    if not (training or evaluation):
        return {**known, "federation": seconds["federation"]}
    rest = max(0.0, seconds["federation"] - training - evaluation)
    return {**known, "training": training, "evaluation": evaluation, "aggregation": rest}


def _model_of(strategy: KnowledgeStrategy[Any]) -> Learner | None:
    """Return the server's model; None if the server lacks the factories to make it."""
    try:
        return strategy.model_
    except StrategyError:
        return None


def _early_stopping(federation: Federation, model: Learner | None) -> Report | None:
    """Return the epochs of the final model, if it could stop before its last one.

    It was trained on released knowledge, so its epochs cost no privacy. Those of the parties'
    own models depend on their records and stay with them.
    """
    settings, trained = federation.final_settings, getattr(model, "epochs_trained", 0)
    if not (settings.patience and trained):
        return None
    return {"final-epochs": trained, "most-epochs": settings.epochs}


def stopping_of(report: Mapping[str, Any]) -> str:
    """Return the effect of early stopping in words, "" if there was none."""
    found = report.get("early-stopping")
    words = "final model trained for {final-epochs} of at most {most-epochs} epochs"
    return f"{words} (early stopping)".format_map(found) if found else ""


def _compared(
    federation: Federation,
    strategy: KnowledgeStrategy[Any],
    evaluate: Report,
    baselines: Baselines,
) -> Report:
    """Return the metrics of the federation and of its baselines, and on how many rows."""
    data, metric = federation.dataset, federation.metric
    own = _own_metrics(federation, strategy, evaluate)
    one = None if own else federation.evaluate(strategy.model_)
    kept = None if strategy.central else _model_of(strategy)
    metrics = own if one is None else existing(one.metrics)
    return {
        "metric": metric,
        metric: metrics.get(metric, math.nan),
        f"server-{metric}": None if kept is None else federation.quality(kept),
        **baselines.top_level(metric),
        "figures": {"federation": metrics, **baselines.metrics()},
        "standard-errors": {} if one is None else baselines.standard_errors(one),
        "num-classes": data.num_classes,
        "num-public-rows": len(data.x_public),
        "num-test-rows": len(data.y_test),
    }


def rounds_of(result: Result) -> list[Report]:
    """Return the metrics of every round that had any; an empty one if none had."""
    train, evaluate = result.train_metrics_clientapp, result.evaluate_metrics_clientapp
    return [
        {"round": r, "train": dict(train.get(r, {})), "evaluate": dict(evaluate.get(r, {}))}
        for r in sorted({*train, *evaluate})
    ] or [{"round": 0, "train": {}, "evaluate": {}}]


def _own_metrics(
    federation: Federation, strategy: KnowledgeStrategy[Any], evaluate: Report
) -> dict[str, float]:
    """Return the mean metrics of models that parties keep; nothing if they keep none."""
    by_party = evaluate.get(f"{federation.metric}-by-party") or []
    own = [value for value in by_party if not math.isnan(value)]
    if strategy.central or not own:
        return {}
    names = metric_names(federation.dataset.task, federation.dataset.num_classes)
    means = {name: evaluate.get(name, math.nan) for name in names}
    return existing({**means, federation.metric: fmean(own)})


def _privacy_statement(strategy: KnowledgeStrategy[Any]) -> str:
    """Return the statement, or why there is none: events of parties may need an extra."""
    try:
        return strategy.ledger_.statement()
    except MissingExtra as error:
        return f"Guarantee: none, because it cannot be computed here. {error}"


def _describe_parties(
    federation: Federation, strategy: KnowledgeStrategy[Any], solo: Sequence[float]
) -> list[Report]:
    """Describe all parties, also those that were excluded, which have no metrics.

    Classes are counted per label where records have several, and not in a regression.
    """
    names, data = federation.learner_names, federation.dataset
    return [
        {
            keys.PARTITION_ID: number,
            keys.LEARNER: names[number % len(names)],
            "num-records": len(rows),
            "class-counts": None
            if data.task == "regression"
            else class_counts(data.y_train[rows], data.num_classes, data.task).tolist(),
            f"solo-{federation.metric}": solo[number] if solo else None,
            "metrics": strategy.parties_[number].train if number in strategy.parties_ else {},
        }
        for number, rows in enumerate(federation.rows)
    ]


def versions() -> dict[str, str]:
    """Return the versions of the packages that a result may depend on."""
    found = {}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _commit() -> str | None:
    """Return the commit of the code that runs, if it runs from a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def log_lines(text: str) -> None:
    """Log each line of a text."""
    for line in text.splitlines():
        logger.info("%s", line)


def render(report: Report) -> str:
    """Return the tables of a run.

    Examples
    --------
    >>> print(aligned(["party", "accuracy"], [["0", "81.0 %"], ["1", "7.5 %"]]))
    party  accuracy
        0    81.0 %
        1     7.5 %
    """
    lines = [
        "",
        _party_table(report),
        "",
        "{named} on {data}, seed {seed}, final {final}".format(
            **report, named=strategy_of(report), final=report["settings"]["final-learner"]
        ),
        _summary_table(report),
        *(
            f"epsilon for {_UNITS[unit]}: {report[epsilon]} at delta {report[delta]:.3g}"
            for unit, (epsilon, delta) in PROMISES.items()
        ),
        f"sent by parties: {report[keys.NUM_BYTES_SENT]} bytes",
        f"seconds: {report['seconds']:.1f}",
        *filter(None, [stopping_of(report)]),
    ]
    lines += [f"excluded: node {node}: {why}" for node, why in report["rejected"].items()]
    without = report.get("undelivered", {})
    lines += [f"without the model: node {node}: {why}" for node, why in without.items()]
    lines += [f"warning: {sentence}" for sentence in report.get("warnings", [])]
    return "\n".join([*lines, f"verdict: {report['verdict']}"])


def _summary_table(report: Report) -> str:
    metric, compared = report["metric"], compared_of(report)
    columns = list(report["figures"][MAJORITY])
    rows = {federation_of(report): compared.pop(federation_of(report))}
    rows |= {
        one.label: compared.get(one.label, {})
        for key, one in BASELINES.items()
        if key != MAJORITY and (one.label in compared or key not in _IF_ASKED_FOR)
    }
    rows |= compared
    if report[f"server-{metric}"] is not None:
        rows["the server's own model"] = {metric: report[f"server-{metric}"]}
    cells = [
        [row, *(shown(column, found.get(column)) for column in columns)]
        for row, found in rows.items()
    ]
    return aligned(["", *columns], cells)


def compared_of(report: Report) -> dict[str, dict[str, float]]:
    """Return all metrics of the federation and of its baselines, by their names."""
    metrics, constant = report["figures"], CONSTANTS[report["metric"]].removeprefix("the ")
    labels = {key: constant if key == MAJORITY else one.label for key, one in BASELINES.items()}
    return {
        federation_of(report): metrics["federation"],
        **{label: metrics[key] for key, label in labels.items() if key in metrics},
    }


def federation_of(report: Report) -> str:
    """Return the name of the federation's metrics: of one model, or of the parties' own."""
    return (
        "federation (mean of the parties' own models)" if own_models(report) else "federation"
    )


def _party_table(report: Report) -> str:
    together, metric = own_models(report), report["metric"]
    header = ["party", "learner", "records", "alone", *(["together"] if together else [])]
    rows = []
    for party in report["parties"]:
        number = party[keys.PARTITION_ID]
        row = [str(number), str(party[keys.LEARNER]), str(party["num-records"])]
        values = [party[f"solo-{metric}"], together.get(number)]
        rows.append(row + [shown(metric, value) for value in values[: len(header) - 3]])
    return aligned(header, rows)


def size(num_bytes: float) -> str:
    """Return a number of bytes for people.

    Examples
    --------
    >>> size(512), size(2_340), size(5_600_000)
    ('512 B', '2.3 kB', '5.6 MB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return right-aligned columns."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown.

    Examples
    --------
    >>> print(markdown_table(["", "accuracy"], [["FedKT", "81.0"]]))
    |  | accuracy |
    | --- | --- |
    | FedKT | 81.0 |
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def summarise(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and sample deviation over seeds; one value has deviation 0."""
    return fmean(values), stdev(values) if len(values) > 1 else 0.0
