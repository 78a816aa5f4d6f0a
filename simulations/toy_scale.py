"""A table in seconds: few rows of random data, few parties, one epoch, one seed.

Its figures mean nothing. It shows that the table's settings still run.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from simulations.config import Settings, Value
from simulations.reproduce import Row, Table
from simulations.stand_ins import write_stand_ins

TOY: Final = "toy"
ALWAYS: Final[Mapping[str, Value]] = {
    "train-rows": 90,
    "public-rows": 40,
    "test-rows": 40,
    "min-records": 2,
    "epochs": 1,
    "num-trees": 3,
    "boosting-rounds": 2,
    "num-workers": 1,
}
AT_MOST: Final[Mapping[str, int]] = {
    "num-splits": 1,
    "num-teachers": 2,
    "num-queries": 20,
    "num-public": 30,
    "num-samples": 10,
    "num-predictions": 2,
    "local-epochs": 1,
    "final-learner-epochs": 1,
    "pretrain-epochs": 1,
    "distill-epochs": 1,
}
IF_KNOWN: Final[Mapping[str, int]] = {
    "epochs-initial": 1,
    "epochs-digest": 1,
    "epochs-revisit": 1,
}
MOST_PARTIES: Final = 3
MOST_ROUNDS: Final = 2
TOLD_APART: Final = ("strategy", "data", "public", "learner", "privacy-level", "release")
"""Settings in which two rows must differ to be both of interest."""


def toy(table: Table, folder: Path) -> Table:
    """Return a table with stand-ins for data, and one row of each kind."""
    write_stand_ins(folder)
    kinds: dict[tuple[Value | None, ...], Row] = {}
    for row in table.rows:
        kinds.setdefault(tuple(map(row.settings.get, TOLD_APART)), row)
    rows = tuple(
        replace(row, settings=_toy_settings(row.settings, folder)) for row in kinds.values()
    )
    return replace(table, rows=rows, seeds=table.seeds[:1], scale=TOY)


def _toy_settings(given: Mapping[str, Value], folder: Path) -> dict[str, Value]:
    settings = Settings.from_run_config(given)
    known = settings.options.settings()
    capped = {
        key: min(int(value), most)
        for key, value in given.items()
        if (most := AT_MOST.get(key.rpartition(".")[2])) is not None
    }
    return {
        **given,
        **ALWAYS,
        **capped,
        **{key: value for key, value in IF_KNOWN.items() if key in known},
        "num-parties": min(settings.num_parties, MOST_PARTIES),
        "num-server-rounds": min(settings.num_rounds, MOST_ROUNDS),
        "data-dir": str(folder),
    }
