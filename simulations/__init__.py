"""Federations to run: data, partitions, models, the Flower app and an in-process runner."""

import importlib.util
from pathlib import Path


def _require_own(name: str) -> None:
    """Raise unless Python finds the package beside this one, as they were installed."""
    spec = importlib.util.find_spec(name)
    found = Path(spec.origin).parent if spec is not None and spec.origin else None
    if found is None or found.resolve() != Path(__file__).resolve().parent.parent / name:
        from fl_strategies.errors import ForeignPackage

        raise ForeignPackage(name, found)


for _name in ("fl_strategies", "clients"):
    _require_own(_name)
