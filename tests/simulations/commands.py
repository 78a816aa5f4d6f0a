"""Commands that make many runs: settings with which these are fast, and what is asked for."""

from typing import Any

import pytest

from simulations.experiments.curve import Curve, CurveSummary, Spread
from simulations.runtime import local

FAST = {
    "data": "breast-cancer",
    "num-parties": 3,
    "num-trees": 5,
    "boosting-rounds": 3,
    "epochs": 2,
    "num-workers": 1,
}


def assigned(settings: dict[str, Any]) -> list[str]:
    """Return settings as options of a command line."""
    return [f"--set={key}={value}" for key, value in settings.items()]


def record_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the strategy of each run that the real runner will make."""
    asked: list[str] = []
    whole = local.run_local

    def recorded(strategy: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(strategy.name)
        return whole(strategy, *arguments, **options)

    monkeypatch.setattr(local, "run_local", recorded)
    return asked


def constructed_report(figure: float, **changes: Any) -> dict[str, Any]:
    """Return a report as a real run's, with all that experiments read."""
    traffic = {"num-bytes-sent": 30, "num-bytes-received": 60}
    report = {
        "metric": "accuracy",
        "accuracy": figure,
        "parties": [],
        "rounds": [{"round": 1, "train": traffic, "evaluate": traffic}],
        "figures": {"federation": {"balanced-accuracy": figure / 2, "macro-f1": float("nan")}},
        "epsilon-party": float("inf"),
        "delta-party": 0.0,
        "epsilon-example": 1.0,
        "delta-example": 1e-5,
        "num-bytes-sent": 30,
        "cpu-seconds": 1.0,
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "c0ffee" * 6 + "-dirty",
    }
    return {**report, **{key.replace("_", "-"): value for key, value in changes.items()}}


def curve_summary(content: dict[str, Any]) -> CurveSummary:
    """Return what `simulations.experiments.curve.to_json` was made of."""
    plain: dict[str, Any] = {
        key.replace("-", "_"): tuple(value) if isinstance(value, list) else value
        for key, value in content.items()
    }
    plain["curves"] = tuple(
        Curve(
            name=one["name"],
            strategy=one["strategy"],
            points={point["epsilon"]: Spread.of(point["figures"]) for point in one["points"]},
            refused={point["epsilon"]: point["reason"] for point in one["refused"]},
            against=one["protected-against"],
            note=one["note"],
        )
        for one in content["curves"]
    )
    plain["references"] = {
        one["name"]: Spread.of(one["figures"]) for one in content["references"]
    }
    return CurveSummary(**plain)
