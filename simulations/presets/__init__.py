"""Settings and figures of published experiments, by strategy and data set."""

import tomllib
from importlib import resources
from typing import Any, Final

from fl_strategies.errors import require
from simulations.config import Value, as_published

PRESETS: Final = ("paper",)


def paper_table(strategy: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what a paper says about a strategy, by data set.

    Each data set has the tables `settings` (kebab-case keys), `published` (the paper's
    figures) and `expected` (what our own runs must reach).
    """
    folder = resources.files(__name__)
    files = (item.name for item in folder.iterdir() if item.name.endswith(".toml"))
    known = sorted(name.removesuffix(".toml") for name in files)
    require(strategy in known, "preset", "strategy", f"one of {', '.join(known)}", strategy)
    return tomllib.loads((folder / f"{strategy}.toml").read_text(encoding="utf-8"))


def preset(name: str, strategy: str, data: str) -> dict[str, Value]:
    """Return the settings of a published experiment under their kebab-case keys.

    Examples
    --------
    >>> preset("paper", "fedkt", "adult")["num-parties"]
    50
    """
    require(name in PRESETS, "preset", "name", f"one of {', '.join(PRESETS)}", name)
    table = paper_table(strategy)
    require(data in table, "preset", "data", f"one of {', '.join(table)}", data)
    return {"strategy": strategy, "data": data, **as_published(table[data]["settings"])}
