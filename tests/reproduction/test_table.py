"""Tables of experiments: what is run, what is kept, and what is shown."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_strategies.errors import InvalidParameter, NotEnoughParties
from reproduction.__main__ import _chosen, main
from reproduction.table import (
    Published,
    Row,
    Table,
    markdown,
    rounds_of,
    run_table,
    summary_of,
    table_names,
)
from simulations.config import Settings
from simulations.experiments.engine import read_outcomes

PUBLISHED = Published.read({"federation": 81.0, "alone": 20.0, "note": "larger"})
TABLE = Table(
    name="toy_table",
    title="Toy.",
    source="nowhere",
    seeds=(0, 1),
    rows=(
        Row("two parties", {"num-parties": 2}, PUBLISHED),
        Row("three parties", {"num-parties": 3}),
    ),
)


class Runs:
    """Stands for the real run, which other tests cover; counts what it was asked for."""

    def __init__(self, stop_after: int = 99) -> None:
        self.asked: list[Settings] = []
        self.stop_after = stop_after

    def __call__(self, settings: Settings) -> dict[str, Any]:
        if len(self.asked) == self.stop_after:
            raise KeyboardInterrupt
        self.asked.append(settings)
        return {
            "metric": "accuracy",
            "accuracy": 0.5 + 0.1 * settings.num_parties + 0.02 * settings.seed,
            "solo-accuracy": 0.25,
            "central-accuracy": None,
            "parties": [{"solo-accuracy": 0.25}] * settings.num_parties,
            "rounds": [
                {"round": 1, "evaluate": {"accuracy": 0.6}, "train": {"local-figure": 0.3}},
                {"round": 2, "evaluate": {"accuracy": 0.7}, "train": {"local-figure": 0.4}},
            ],
            "epsilon-party": float("inf"),
            "epsilon-example": 2.0,
            "num-bytes-sent": 10,
            "cpu-seconds": 1.4,
            "date": "2026-01-02T03:04:05",
            "commit": "0123456789abcdef",
        }


def test_every_row_runs_once_a_seed(tmp_path: Path) -> None:
    """Rows differ by their settings and seeds by their number."""
    runs, said = Runs(), list[str]()
    run_table(TABLE, runs, tmp_path / "kept.json", said.append)

    asked = [(settings.num_parties, settings.seed) for settings in runs.asked]
    assert asked == [(2, 0), (2, 1), (3, 0), (3, 1)]
    first, *rest = "".join(said).splitlines()
    assert first == "4 runs, 0 of them finished before."
    assert rest[0] == "run 1 of 4: two parties, seed 0: 70.0 %; about 0 s left"
    assert [line.partition(":")[0] for line in rest] == [f"run {n} of 4" for n in range(1, 5)]
    plain = json.loads((tmp_path / "kept.json").read_text(), parse_constant=pytest.fail)
    assert plain["outcomes"][0]["epsilon-party-unbounded"] is True


def test_a_stopped_table_goes_on_where_it_was(tmp_path: Path) -> None:
    """What was finished before the stop is kept and not run again."""
    kept, runs = tmp_path / "kept.json", Runs()
    with pytest.raises(KeyboardInterrupt):
        run_table(TABLE, Runs(stop_after=3), kept, lambda _: None)

    assert len(read_outcomes(kept)) == 3
    run_table(TABLE, runs, kept, lambda _: None)

    assert [(s.num_parties, s.seed) for s in runs.asked] == [(3, 1)]


def test_the_table_shows_mean_and_deviation_beside_the_paper(tmp_path: Path) -> None:
    """Also half-way: rows without results are empty."""
    kept = tmp_path / "kept.json"
    with pytest.raises(KeyboardInterrupt):
        run_table(TABLE, Runs(stop_after=2), kept, lambda _: None)

    text = markdown(TABLE, kept)

    assert "| two parties | 71.0 ± 1.4 | 25.0 ± 0.0 | 2 | 81.0, alone 20.0 (larger) |" in text
    assert "| −10.0, alone +5.0 | 1 |" in text  # noqa: RUF001 - a minus
    assert "| three parties |  |  |  |  |  |  |" in text
    assert "commit 0123456789; 2026-01-02" in text
    assert "python -m reproduction table toy_table" in text


def test_two_rows_may_measure_the_same_run(tmp_path: Path) -> None:
    """One shows what was delivered, the other the parties' own models of the last round."""
    own = Row("own models", {"num-parties": 2}, measure="local")
    table = replace(TABLE, rows=(TABLE.rows[0], own))
    runs, kept = Runs(), tmp_path / "kept.json"

    run_table(table, runs, kept, lambda _: None)

    assert len(runs.asked) == len(table.seeds)
    text = markdown(table, kept)
    assert "| two parties | 71.0 ± 1.4 | 25.0 ± 0.0 | 2 | 81.0, alone 20.0 (larger) |" in text
    assert "| own models | 40.0 ± 0.0 |  | 2 |  |  | 1 |" in text
    assert rounds_of(own, read_outcomes(kept)[0]) == [(1, 0.3), (2, 0.4)]


def test_a_run_of_another_table_is_taken(tmp_path: Path) -> None:
    """Papers print the same run in several tables."""
    run_table(TABLE.but(rows=TABLE.rows[:1]), Runs(), tmp_path / "fedkt_cnn.json", print)
    runs, kept = Runs(), tmp_path / "fedkt_l1.json"

    run_table(TABLE, runs, kept, lambda _: None)

    assert [(s.num_parties, s.seed) for s in runs.asked] == [(3, 0), (3, 1)]
    assert len(read_outcomes(kept)) == 4


def test_a_run_that_fails_ends_its_table(tmp_path: Path) -> None:
    """A table without one of its rows would pass for complete."""

    def fail(_: Settings) -> dict[str, Any]:
        raise NotEnoughParties("FedKT: 2 parties must answer, got 1.")

    with pytest.raises(NotEnoughParties):
        run_table(TABLE, fail, tmp_path / "kept.json", lambda _: None)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    """Nothing is overwritten by mistake."""
    kept = tmp_path / "kept.json"
    kept.write_text('{"runs": []}')

    with pytest.raises(
        InvalidParameter, match=r"must hold the outcomes of runs.* Name another"
    ):
        run_table(TABLE, Runs(), kept, lambda _: None)
    assert json.loads(kept.read_text()) == {"runs": []}


@pytest.mark.parametrize("name", table_names())
def test_every_table_of_the_package_is_valid(name: str) -> None:
    """Settings are known ones, rows have names of their own, and there are three seeds."""
    for scale in Table.load(name).scales:
        table = Table.load(name, scale)
        names = [row.name for row in table.rows]
        assert len(set(names)) == len(names) > 0
        assert len(table.seeds) >= 3


SCALED = """
title = "Toy."
source = "nowhere"
seeds = [0, 1]
[settings]
num-parties = 2
epochs = 9
[scales.quick]
minutes = 3
settings = { epochs = 4 }
[scales.paper]
seeds = [7]
[[rows]]
name = "a"
panel = "left"
settings = { epochs = 5 }
[[rows]]
name = "b"
quick = { epochs = 1 }
paper = { num-parties = 9 }
[[rows]]
name = "c"
scales = ["quick"]
"""


@pytest.fixture
def _scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `SCALED` be the only table, and work in an empty folder."""
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "toy_table.toml").write_text(SCALED)
    monkeypatch.setattr("reproduction.table.FOLDER", tmp_path / "tables")
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_scaled")
def test_a_scale_changes_settings_seeds_and_rows() -> None:
    """A scale's settings win over a row's, and a row's own for the scale win over these."""
    quick, paper = Table.load("toy_table"), Table.load("toy_table", "paper")

    assert (quick.seeds, paper.seeds) == ((0, 1), (7,))
    assert [row.name for row in quick.rows] == ["a", "b", "c"]
    assert [row.name for row in paper.rows] == ["a", "b"]
    assert [row.panel for row in quick.rows] == ["left", "", ""]
    assert "panel" not in quick.rows[0].settings
    assert [row.settings["epochs"] for row in quick.rows] == [4, 1, 4]
    assert [row.settings["epochs"] for row in paper.rows] == [5, 9]
    assert [row.settings["num-parties"] for row in paper.rows] == [2, 9]
    assert (quick.minutes, paper.minutes) == (3, None)
    assert paper.command == "python -m reproduction table toy_table --scale paper"


@pytest.mark.parametrize(
    ("read", "sentence"),
    [
        (
            lambda: Row("a row", {}, measure="sum"),
            "measure must be one of mean, local, got 'sum'",
        ),
        (
            lambda: Table.load("fedkd_mnist", "paper"),
            "scale must be one of quick for fedkd_mnist",
        ),
        (lambda: Published.read({"federated": 81.0}), "published must be of PATE, alone"),
    ],
)
def test_what_a_table_does_not_know_is_refused(
    read: Callable[[], object], sentence: str
) -> None:
    """The answer names what it knows."""
    with pytest.raises(InvalidParameter, match=sentence):
        read()


def test_the_summary_is_the_table_for_programs(tmp_path: Path) -> None:
    """Means, deviations and differences are numbers, and what nobody measured is missing."""
    kept = tmp_path / "kept.json"
    run_table(TABLE, Runs(), kept, lambda _: None)

    first, second = summary_of(TABLE, kept)["rows"]

    assert first["figures"]["federation"] == {
        "mean": pytest.approx(71.0),
        "deviation": pytest.approx(100 * 0.01 * 2**0.5),
        "published": 81.0,
        "difference": pytest.approx(-10.0),
    }
    assert first["figures"]["parties alone"]["difference"] == pytest.approx(5.0)
    assert second["figures"]["federation"]["difference"] is None
    assert (first["seeds"], first["epsilon-example"]) == ([0, 1], 2.0)
    assert "epsilon-party" not in first
    assert {*first["figures"]} == {"federation", "parties alone"}


def test_an_unknown_table_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    """The command line answers in one sentence."""
    assert main(["table", "fedkd_imagenet"]) == 1

    error = capsys.readouterr().err
    assert error.startswith("error: table: name must be one of ")
    assert "fedkd_cifar10" in error


@pytest.mark.usefixtures("_scaled")
def test_the_command_line_runs_and_writes_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text, summary and picture are beside the results; seeds may be others."""
    monkeypatch.setattr("simulations.runtime.local.run_once", Runs())

    assert main(["table", "toy_table", "--scale=paper", "--seeds=4,5"]) == 0
    assert main(["tables"]) == 0

    text = capsys.readouterr().out
    names = {path.name for path in Path("runs").iterdir()}
    assert names == {
        "toy_table.json",
        "toy_table_paper.md",
        "toy_table_paper_summary.json",
        "toy_table_paper_rows.png",
    }
    assert "Seeds 4, 5" in Path("runs/toy_table_paper.md").read_text()
    assert "toy_table  quick     3      2            3   not yet  nowhere" in text
    assert "toy_table  paper     2      1            ?   not yet  nowhere" in text


@pytest.mark.usefixtures("_scaled")
def test_single_rows_can_be_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part of a name is enough; the text still shows the whole table."""
    monkeypatch.setattr("simulations.runtime.local.run_once", Runs())

    assert main(["table", "toy_table", "--row", "b"]) == 0
    assert main(["table", "toy_table", "--row", "nobody"]) == 1

    said = capsys.readouterr()
    assert "| a |" in said.out
    asked = [one["settings"] for one in read_outcomes(Path("runs/toy_table.json"))]
    assert [settings["epochs"] for settings in asked] == [1, 1]
    assert "error: table: row must be part of one of " in said.err


def test_the_row_of_that_very_name_is_run_alone() -> None:
    """A row whose name others contain can be asked for, and so can all of them."""
    table = TABLE.but(
        rows=[replace(TABLE.rows[0], name=name) for name in ("A", "A, twice", "B")]
    )

    def names(*texts: str) -> list[str]:
        return [row.name for row in _chosen(table, list(texts)).rows]

    assert names("A") == ["A"]
    assert names("A", "twice") == ["A", "A, twice"]
    assert names("A,") == ["A, twice"]


def test_a_table_shows_bytes_and_missing_seeds(tmp_path: Path) -> None:
    """The bytes of all parties if its file asks for them; means are over which seeds."""
    kept = tmp_path / "kept.json"
    run_table(TABLE.but(seeds=[0], rows=TABLE.rows[:1]), Runs(), kept, lambda _: None)

    assert "| two parties (1 of 2 seeds) |" in markdown(TABLE, kept)
    assert "MB sent" not in markdown(TABLE, kept)
    assert "MB sent" in markdown(replace(TABLE, sizes=True), kept)
