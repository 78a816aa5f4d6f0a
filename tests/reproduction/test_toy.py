"""Every table of the package at toy size: its settings run, and all of it can be shown."""

import json
from pathlib import Path
from typing import Any

import pytest

from reproduction.__main__ import main
from reproduction.table import Table, lines_of, markdown, run_table, table_names
from reproduction.toy import toy
from simulations.config import Settings
from simulations.experiments.engine import Runner
from simulations.runtime.local import run_once

DONE: dict[Settings, dict[str, Any]] = {}
"""Tables share many runs at this size, so each is made once."""


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stand_ins")


@pytest.fixture(scope="module")
def run() -> Runner:
    def once(settings: Settings) -> dict[str, Any]:
        if settings not in DONE:
            DONE[settings] = run_once(settings)
        return DONE[settings]

    return once


@pytest.mark.parametrize("name", table_names())
def test_a_table_runs_at_toy_size(
    name: str, stand_ins: Path, run: Runner, tmp_path: Path
) -> None:
    """One row of each kind gives a figure, and so do the models that it is compared with."""
    table, kept = toy(Table.load(name), stand_ins), tmp_path / "kept.json"

    run_table(table, run, kept, lambda _: None)

    outcomes = json.loads(kept.read_text())["outcomes"]
    lines = lines_of(table, outcomes)
    assert len(lines) >= 1
    for line in lines:
        settings = Settings.from_run_config(line.row.settings)
        asked = {"": True, "solo-": settings.solo, "pate-": settings.pate}
        measured = line.row.measure == "mean"
        assert {p for p, wanted in asked.items() if wanted and measured} <= {*line.cells, ""}
        assert "" in line.cells
        assert line.row.name in markdown(table, kept)


def test_a_toy_has_every_kind_of_row_and_no_file_of_others(tmp_path: Path) -> None:
    """Strategies and data sets are those of the table, and all data come from stand-ins."""
    table = Table.load("fedkt_table1")

    small = toy(table, tmp_path)

    for key in ("strategy", "data", "learner"):
        assert {row.settings.get(key) for row in small.rows} == {
            row.settings.get(key) for row in table.rows
        }
    assert {row.settings["data-dir"] for row in small.rows} == {str(tmp_path)}
    assert max(int(row.settings["num-parties"]) for row in small.rows) == 3
    assert small.seeds == table.seeds[:1]


def test_the_command_line_keeps_toys_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their figures mean nothing, so they have files of their own."""
    monkeypatch.chdir(tmp_path)

    assert main(["table", "fedkt_consistency", "--scale=toy"]) == 0

    names = {path.name for path in Path("runs").iterdir()}
    assert names == {
        "stand_ins",
        "fedkt_consistency_toy.json",
        "fedkt_consistency_toy.md",
        "fedkt_consistency_toy_summary.json",
        "fedkt_consistency_toy_rows.png",
    }
    assert "--scale toy" in capsys.readouterr().out
