"""Commands that make many runs: settings with which these are fast, and what is asked for."""

from typing import Any

import pytest

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
