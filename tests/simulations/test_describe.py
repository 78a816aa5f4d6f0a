"""The command that describes a table: what pandas says of its rows, the page, and errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from simulations.commands import main
from simulations.config import Settings
from simulations.experiments.description import describe_table, pictures, read_records

pytest.importorskip("matplotlib")
ROWS = 400


def table() -> pd.DataFrame:
    """Return patients of two groups, with gaps, dates, categories and times."""
    rng = np.random.default_rng(0)
    ill = rng.integers(0, 2, ROWS)
    age = np.where(rng.random(ROWS) < 0.1, np.nan, rng.integers(20, 80, ROWS) + 10 * ill)
    seen = pd.to_datetime("2020-01-01") + pd.to_timedelta(rng.integers(0, 700, ROWS), "D")
    return pd.DataFrame(
        {
            "age": age,
            "ward": rng.choice(["north", "south"], ROWS),
            "seen": seen.strftime("%Y-%m-%d"),
            "days": rng.integers(0, 100, ROWS),
            "died": rng.integers(0, 2, ROWS),
            "status": np.where(ill, "ill", "well"),
        }
    )


SCHEMA: dict[str, Any] = {
    "label": {"name": "status", "classes": ["ill", "well"]},
    "columns": {
        "age": {"type": "number", "least": 0, "most": 120},
        "ward": {"type": "category", "values": ["north", "south"]},
        "seen": {"type": "date", "least": "2020-01-01", "most": "2022-01-01"},
        "days": {"type": "number", "least": 0, "most": 100},
        "died": {"type": "number", "least": 0, "most": 1},
        "height": {"type": "number", "least": 0, "most": 3},
    },
}


@pytest.fixture
def patients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    table().to_csv("patients.csv", index=False)
    Path("schema.json").write_text(json.dumps(SCHEMA), encoding="utf-8")
    return tmp_path


def described(**given: Any) -> Any:
    settings = Settings.of(
        strategy="fedstatistics", data="patients.csv", num_parties=4, **given
    )
    return describe_table(settings)


def test_with_a_schema_all_rows_are_described(patients: Path) -> None:  # noqa: ARG001
    """A column that the table has not is full of gaps."""
    found, whole = described(schema="schema.json").statistics, table()

    groups = [whole, whole[whole.status == "ill"], whole[whole.status == "well"]]
    assert found.groups == ("all", "ill", "well")
    place = {name: at for at, name in enumerate(found.columns)}
    for group, own in enumerate(groups):
        assert found.counts[group] == len(own)
        age = place["age"]
        assert found.present[group, age] == own.age.notna().sum()
        assert found.means[group, age] == pytest.approx(own.age.mean(), abs=0.01)
        assert found.deviations[group, age] == pytest.approx(own.age.std(), rel=1e-3)
        assert found.means[group, place["ward: south"]] == (own.ward == "south").mean()
        year = 1970 + (pd.to_datetime(own.seen) - pd.Timestamp(0)).dt.days.mean() / 365.2425
        assert found.means[group, place["seen"]] == pytest.approx(year, abs=0.001)
        assert found.missing[group, place["height"]] == 1
        assert np.isnan(found.means[group, place["height"]])


def test_public_rows_decide_bounds_and_are_in_no_figure(patients: Path) -> None:  # noqa: ARG001
    records = read_records(Settings.of(data="patients.csv", label="status"))

    found = described(label="status", time="days", event="died")

    names = [column.name for column in records.columns]
    assert names[:4] == ["age", "age: missing", "ward: north", "ward: south"]
    assert {"seen: year", "seen: month", "seen: missing"} <= {*names}
    assert found.statistics.counts[0] == len(records.y) == ROWS - records.public
    assert found.statistics.survival is not None
    age = found.statistics.columns.index("age")
    known = np.where(records.x[:, 1] > 0, np.nan, records.x[:, 0])
    assert found.statistics.means[0, age] == pytest.approx(np.nanmean(known), abs=0.01)
    drawn = pictures(found.statistics)
    assert [*drawn] == ["Histograms", "Share without an event (Kaplan-Meier)", "Correlations"]
    assert all(picture.startswith("data:image/png;base64,") for picture in drawn.values())


def test_the_command_prints_a_table_and_writes_a_page(
    patients: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["describe", "--data", "patients.csv", "--label", "status", "--schema"]
    noisy = ["--set=target-epsilon=5", "--set=num-parties=4", "--set=accept-noise=true"]

    assert main([*words, "schema.json", *noisy]) == 0

    out = capsys.readouterr()
    lines = out.out.splitlines()
    assert lines[0].split()[:2] == ["column", "group"]
    assert lines[1].startswith("age ")
    assert "epsilon" in out.out
    assert "400 rows of 4 parties" in out.err
    told = json.loads((patients / "runs" / "describe-patients-csv.json").read_text("utf-8"))
    assert told["level"] == "L2"
    assert 4.5 < told["epsilon"] <= 5
    page = (patients / "runs" / "describe-patients-csv.html").read_text("utf-8")
    assert page.count("<img") == 2
    assert "What patients.csv says" in page
    assert "Noise has a deviation of" in page


def test_a_table_without_a_label_is_described_as_a_whole(
    patients: Path,  # noqa: ARG001
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["describe", "--data", "patients.csv", "--drop", "seen"]

    assert main([*words, "--json", "x.json", "--html", "y.html"]) == 0

    assert "status: ill" in capsys.readouterr().out
    assert json.loads(Path("x.json").read_text("utf-8"))["groups"] == ["all"]
    assert Path("y.html").exists()


def test_a_run_writes_statistics_beside_its_model(
    patients: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--quiet", "--strategy", "fedstatistics", "--data", "patients.csv"]
    more = ["--label", "status", "--set=solo=false", "--set=pooled=false"]

    assert main([*words, *more, "--set=num-parties=2"]) == 0

    assert "report.html" in capsys.readouterr().out
    (file,) = patients.glob("runs/*/statistics.json")
    told = json.loads(file.read_text("utf-8"))
    assert told["groups"] == ["all", "class 0", "class 1"]
    assert told["counts"][0] == 300
    assert (file.parent / "model").is_dir()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--data", "digits"], "describe: data must be a table (.csv"),
        (["--data", "none.csv"], "describe: data must be a table (.csv"),
        (["--data", "patients.csv", "--label", "stats"], "Did you mean 'status'?"),
        (["--data", "patients.csv", "--set", "time=day"], "event must be given with time"),
        (
            ["--data", "patients.csv", "--set", "time=day", "--set", "event=died"],
            "time and event must be one of the columns",
        ),
        (
            ["--data", "patients.csv", "--set", "privacy-level=L1", "--set=target-epsilon=1"],
            "L2",
        ),
    ],
)
def test_what_cannot_be_described_is_one_sentence(
    patients: Path,  # noqa: ARG001
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    assert main(["describe", *words]) == 1

    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") <= 2
