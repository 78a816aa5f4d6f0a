import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fl_strategies.errors import MissingExtra
from simulations.config import Settings
from simulations.federation import load_federation
from simulations.results import report as reports
from simulations.results.report import make_report, render, summarise
from simulations.results.run_folder import RunFolder, read_json
from simulations.results.verdict import BASELINES, percent
from simulations.runtime.client_app import app
from simulations.runtime.local import run_local

SETTINGS = Settings.of(
    num_parties=3,
    num_trees=5,
    learner="random-forest,logistic-regression",
    pate=True,
    public_only=True,
)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    federation = load_federation(SETTINGS)
    strategy = federation.strategy()
    result = run_local(strategy, app, 3, run_config=SETTINGS.to_run_config())
    return make_report(federation, strategy, result, seconds=1.5, cpu_seconds=1.25)


def test_the_report_has_what_readers_need(report: dict[str, Any]) -> None:
    """All promised keys are there, with plausible values."""
    assert 0.5 < report["accuracy"] <= 1
    assert 0 < report["solo-accuracy"] <= report["best-solo-accuracy"] <= 1
    assert report["central-accuracy"] > report["accuracy"] > report["majority-accuracy"]
    for name, (prefix, *_) in BASELINES.items():
        figures = report["figures"][name]
        assert list(figures) == ["accuracy", "balanced-accuracy", "macro-f1"]
        assert figures["accuracy"] == report[f"{prefix}accuracy"]
        assert 0 < report["standard-errors"][name] < 0.05
    assert report["figures"]["federation"]["accuracy"] == report["accuracy"]
    assert [sum(party["class-counts"]) for party in report["parties"]] == [
        party["num-records"] for party in report["parties"]
    ]
    assert report["epsilon-party"] == report["epsilon-example"] == float("inf")
    assert report["num-bytes-sent"] > 2 * 359 * 4 / 8
    assert (report["seconds"], report["cpu-seconds"]) == (1.5, 1.25)
    assert report["settings"] == {**SETTINGS.to_report(), "final-learner": "extra-trees"}
    assert [party["learner"] for party in report["parties"]] == [
        "random-forest",
        "logistic-regression",
        "random-forest",
    ]
    assert report["versions"]["flwr"].startswith("1.")


def test_the_report_survives_json(report: dict[str, Any], tmp_path: Path) -> None:
    """What is written, into a new folder, is what was measured, in standard JSON."""
    assert RunFolder.new(tmp_path) != RunFolder.new(tmp_path)
    path = RunFolder.new(tmp_path).write(report)

    assert path.name == "result.json"
    plain = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert plain["epsilon-party"] is None
    assert plain["epsilon-party-unbounded"] is True
    assert read_json("test", path) == report


def test_the_table_shows_parties_and_comparison(report: dict[str, Any]) -> None:
    """People see each party's model, records and accuracy beside the federation's."""
    text = render({**report, "rejected": {"17": "Party 4: x must be records, got none."}})

    assert "logistic-regression" in text
    assert f"federation    {percent(report['accuracy'])}" in text
    assert f"majority class     {percent(report['majority-accuracy'])}" in text
    assert "together" not in text
    assert "epsilon for a party: inf at delta 1e-05" in text
    assert f"best party alone    {percent(report['best-solo-accuracy'])}" in text
    assert f"PATE on pooled data    {percent(report['pate-accuracy'])}" in text
    assert f"public labels alone    {percent(report['public-only-accuracy'])}" in text
    assert "excluded: node 17: Party 4: x must be records, got none." in text


def test_comparisons_can_be_left_out() -> None:
    """Without solo and central runs their cells are empty, not zero."""
    settings = SETTINGS.but(solo=False, pooled=False, pate=False, public_only=False)
    federation = load_federation(settings)
    strategy = federation.strategy()
    result = run_local(strategy, app, 3, run_config=settings.to_run_config())

    report = make_report(federation, strategy, result, seconds=1.0)

    assert report["solo-accuracy"] is report["central-accuracy"] is None
    assert report["cpu-seconds"] is None
    assert "          pooled data         -" in render(report)
    assert report["pate-accuracy"] is None
    assert "PATE" not in render(report)


def test_mean_and_deviation_are_those_of_a_sample() -> None:
    """1, 2 and 3 have mean 2 and sample deviation 1; one value has deviation 0."""
    assert summarise([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert summarise([4.0]) == (4.0, 0.0)


def test_the_commit_is_known_only_in_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An installed package has no commit to name, and git may be missing."""
    monkeypatch.setattr(
        reports, "__file__", str(tmp_path / "simulations" / "results" / "report.py")
    )
    assert reports._commit() is None
    (tmp_path / ".git").mkdir()
    assert reports._commit() is None


def own_models(report: dict[str, Any], figures: list[float]) -> dict[str, Any]:
    """Return the report of a run in which the first and the last party kept own models."""
    evaluate = {"partition-ids": [0.0, 2.0], "accuracy-by-party": figures}
    return {**report, "metrics": {**report["metrics"], "evaluate": evaluate}}


def test_the_table_says_where_parties_keep_their_own_models(report: dict[str, Any]) -> None:
    """The figure is a mean then, and each party sees its own beside that of its model alone."""
    guarantee = {"epsilon-example": 0.0, "delta-example": 0.02061}

    text = render({**own_models(report, [0.123, 0.456]), **guarantee})

    mean = f"federation (mean of the parties' own models)    {percent(report['accuracy'])}"
    assert mean in text
    header, *rows = text.splitlines()[1:5]
    assert header.split()[-2:] == ["alone", "together"]
    assert [row.split("  ")[-1].strip() for row in rows] == ["12.3 %", "-", "45.6 %"]
    assert "epsilon for an example: 0.0 at delta 0.0206" in text


def test_a_party_without_a_figure_does_not_spoil_the_mean() -> None:
    """NaN is excluded, as it is in the mean of all other figures."""

    class Keeping:
        central = False

    data = SimpleNamespace(task="single-label", num_classes=3)
    federation = SimpleNamespace(metric="accuracy", dataset=data)
    told = {"accuracy-by-party": [0.5, float("nan"), 1.0], "macro-f1": float("nan")}

    found = reports._own_metrics(federation, Keeping(), told)  # type: ignore[arg-type]

    assert found == {"accuracy": 0.75}
    assert not reports._own_metrics(federation, Keeping(), {})  # type: ignore[arg-type]


def test_a_statement_that_cannot_be_computed_says_so() -> None:
    """Without the extra a party's events must not end the report."""

    def statement() -> str:
        raise MissingExtra("DPSGDEvent", "dp-accounting", "accounting")

    strategy = SimpleNamespace(ledger_=SimpleNamespace(statement=statement))

    found = reports._privacy_statement(strategy)  # type: ignore[arg-type]

    assert found.startswith("Guarantee: none, because it cannot be computed here.")


def test_a_figure_that_nobody_knows_is_a_dash() -> None:
    """It is never shown as a number that is none."""
    assert percent(float("nan")) == percent(None) == "-"
    assert percent(0.5) == "50.0 %"
