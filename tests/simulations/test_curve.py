"""Curves of accuracy against epsilon: what runs, what is kept and what is shown."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_strategies.errors import InvalidParameter, NotEnoughParties
from fl_strategies.registry import REFERENCES
from fl_strategies.release import PrivateVariant
from simulations.__main__ import main
from simulations.config import Settings, options_of
from simulations.experiments.curve import (
    INTRODUCTION,
    MAJORITY,
    Curve,
    CurveSummary,
    Spread,
    markdown,
    plan_curves,
    summarise_curves,
    to_json,
    write_section,
)
from simulations.experiments.entries import VARIANTS
from simulations.experiments.plots import DOTS_PER_INCH, INCHES, draw_curves, lowest_shown
from simulations.results.verdict import PROMISES
from simulations.runtime import local
from tests.pictures import size_of
from tests.simulations.commands import (
    FAST,
    assigned,
    constructed_report,
    curve_summary,
    record_runs,
)

HISTOGRAM = "--strategy=fedhistogram L2"


def curve(folder: Path, *options: str) -> int:
    kept = folder / "kept.json"
    usual = ["--seeds=0", "--draws=2", "--epsilons=1,5", HISTOGRAM]
    return main(["curve", *assigned(FAST), *usual, f"--json={kept}", *options])


def read_strictly(path: Path) -> Any:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record what the real runner is asked for."""
    return record_runs(monkeypatch)


def test_real_curves_are_shown_kept_and_not_run_twice(
    tmp_path: Path, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """References once a seed, budgets once a draw; more draws add to what is there."""
    assert curve(tmp_path) == 0

    told = capsys.readouterr()
    private = "fedhistogram"
    assert runs == [private, "fedregression", "fedmoments", "fedkd", *[private] * 4]
    assert "run 6 of 9: fedhistogram L2 at 1, seed 0, draw 1: " in told.err
    assert "left" in told.err
    assert told.out.startswith("| accuracy (%) | ε 1 | ε 5 | without ε |\n")
    result = read_strictly(tmp_path / "kept.json")
    (line,) = result["curves"]
    assert [point["epsilon"] for point in line["points"]] == [1, 5]
    assert all(len(point["figures"]) == 2 for point in line["points"])
    assert [one["name"] for one in result["references"]] == [
        "fedhistogram, no privacy",
        "fedregression, no privacy",
        "fedmoments, no privacy",
        "fedkd, no privacy",
        MAJORITY,
    ]
    assert "--epsilons=1,5 --unit=example" in result["command"]
    size = tuple(round(inch * DOTS_PER_INCH) for inch in INCHES)
    assert size_of(tmp_path / "kept.png") == size

    runs.clear()
    assert curve(tmp_path, "--quiet") == 0
    assert runs == []
    again = capsys.readouterr()
    assert (again.out, again.err) == (told.out, "")

    summary, document = tmp_path / "summary.json", tmp_path / "document.md"
    assert curve(tmp_path, "--draws=3", f"--summary={summary}", f"--markdown={document}") == 0
    assert runs == [private] * 2
    assert markdown(curve_summary(read_strictly(summary))) in document.read_text()


def test_a_stop_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The baselines are kept by then."""

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "run_local", interrupted)

    assert curve(tmp_path) == 130
    assert "the same command resumes.\n" in capsys.readouterr().err
    assert len(read_strictly(tmp_path / "kept.json")["outcomes"]) == 1


def test_what_refuses_a_budget_is_shown_and_the_others_run(
    tmp_path: Path, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """With its reason below the table; noise that is accepted leaves references as they are."""
    options = ["--strategy=fedhistogram L2,fedmd", "--draws=1", "--epsilons=0.001,5"]
    assert curve(tmp_path, *options) == 0

    text = capsys.readouterr().out
    assert "| fedhistogram L2 | refused | " in text
    assert "| fedmd ldp | refused | refused |  |" in text
    reason = "FedHistogram: noise must be weaker than what it protects"
    assert f"- fedhistogram L2, refused at 0.001; at 0.001: {reason}" in text
    assert runs == [*REFERENCES, "fedhistogram"]

    runs.clear()
    assert curve(tmp_path, *options, "--set=fedhistogram.accept-noise=true") == 0
    assert runs == ["fedhistogram"] * 2
    assert "fedhistogram L2, refused" not in capsys.readouterr().out


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_variant_protects_its_unit(variant: PrivateVariant, tmp_path: Path) -> None:
    """A real run of each, which keeps to its budget."""
    given = dict(FAST)
    if "accept-noise" in options_of(variant.strategy).settings():
        given["accept-noise"] = True
    plan = plan_curves(
        given,
        unit=variant.unit,
        names=[variant.name],
        budgets=[2.0],
        seeds=[0],
        draws=1,
    )
    curves = replace(plan, references=())
    results = curves.run(local.run_once, tmp_path / "kept.json", lambda _: None)

    assert results.failed == {}
    (line,) = summarise_curves(curves, results).curves
    assert line.refused == {}
    assert line.against
    epsilon, _ = PROMISES[variant.unit]
    assert 1.9 < results.outcomes[-1][epsilon] <= 2 + 1e-6


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--strategy=fedavg"], "curve: strategy must be one of fedhistogram, "),
        (["--strategy=fedkt L1"], "for --unit example, got 'fedkt L1'."),
        (["--epsilons=much"], "curve: epsilons must be numbers"),
        (["--epsilons=-1"], "curve: epsilons must be finite and above 0, got -1.0."),
        (["--epsilons="], "curve: epsilons must be at least one number"),
        (["--seeds=1,1"], "curve: seeds must be different numbers"),
        (["--draws=0"], "curve: draws must be at least 1, got 0."),
        (["--set=target-epsilon=1"], "--set target-epsilon must be left to --epsilons"),
        (["--set=num-cell=9"], "Did you mean 'num-cells'?"),
    ],
)
def test_wrong_requests_are_one_sentence(
    tmp_path: Path, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is run."""
    assert curve(tmp_path, *options) == 1

    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "kept.json").exists()


# Curves of constructed runs.


def two_seeds(folder: Path, run: Callable[[Settings], dict[str, Any]]) -> CurveSummary:
    curves = plan_curves(
        FAST,
        unit="example",
        names=["fedhistogram L2"],
        budgets=[1.0, 5.0],
        seeds=[0, 1],
        draws=2,
    )
    results = curves.run(run, folder / "kept.json", lambda _: None)
    return summarise_curves(curves, results, "the command")


def budget_of(settings: Settings) -> float:
    return float(settings.chosen().get("target-epsilon") or 0)


def report(figure: float, settings: Settings) -> dict[str, Any]:
    return constructed_report(figure, epsilon_example=budget_of(settings))


def test_quartiles_are_over_seeds_and_draws(tmp_path: Path) -> None:
    """Four figures of two seeds with two draws; the file is JSON for everybody."""
    plain = [0.9] * len(REFERENCES)
    figures = iter([*plain, 0.1, 0.2, *plain, 0.4, 0.6, 0.3, 0.8, 0.3, 0.8])

    summary = two_seeds(tmp_path, lambda settings: report(next(figures), settings))

    spread = summary.curves[0].points[1.0]
    assert spread.values == (0.1, 0.4, 0.3, 0.3)
    assert (spread.lower, spread.median, spread.upper) == pytest.approx((0.25, 0.3, 0.325))
    text = markdown(summary)
    assert "| fedhistogram L2 | 30.0 (25.0 to 32.5) | 70.0 (50.0 to 80.0) |  |" in text
    assert "over seeds 0, 1 with 2 draws of the noise each" in text
    assert "Commit c0ffeec0ff-dirty; 2026-01-02." in text
    assert to_json(summary)["curves"][0]["points"][0]["median"] == pytest.approx(0.3)
    assert read_strictly(tmp_path / "kept.json")["outcomes"]


def test_nothing_is_drawn_that_promises_less_than_its_budget(tmp_path: Path) -> None:
    """Such as noise that a seed decides, which promises nothing."""

    def run(settings: Settings) -> dict[str, Any]:
        promised = report(0.9, settings)
        return {**promised, "epsilon-example": float("inf")} if settings.seed else promised

    summary = two_seeds(tmp_path, run)

    assert summary.curves[0].points == {}
    told = "It promised epsilon inf at delta 1e-05 only."
    assert dict(summary.curves[0].refused) == {1.0: told, 5.0: told}


def test_a_run_that_fails_takes_its_point_alone(tmp_path: Path) -> None:
    """It is not tried again in this call, and it is not kept."""
    asked = []

    def run(settings: Settings) -> dict[str, Any]:
        asked.append(budget_of(settings))
        if budget_of(settings) == 1:
            raise NotEnoughParties("FedHistogram: 2 parties must answer, got 1.")
        return report(0.9, settings)

    (line,) = two_seeds(tmp_path, run).curves

    assert asked.count(1) == 1
    assert asked.count(5) == 4
    assert line.refused == {1.0: "FedHistogram: 2 parties must answer, got 1."}
    assert list(line.points) == [5.0]


def test_parties_and_other_noise_are_other_results() -> None:
    """A draw's number and every setting are part of what a result is kept under."""
    asked = {"unit": "example", "names": ["fedhistogram L2"], "budgets": [1.0], "seeds": [0]}
    plans = [plan_curves({**FAST, "num-parties": n}, **asked, draws=2) for n in (3, 4)]
    keys = [plan.key(*cell) for plan in plans for cell in plan.cells()]

    assert all(one not in keys[:number] for number, one in enumerate(keys))
    assert len(keys) == 2 * (1 + len(REFERENCES) + 2)


# The picture, the summary and the section, from constructed curves.


def constructed(low: float = 0.7, **changes: Any) -> CurveSummary:
    spreads = [Spread.of([figure - 0.01, figure, figure + 0.02]) for figure in (low, 0.8)]
    summary = CurveSummary(
        data="toy",
        unit="example",
        metric="accuracy",
        num_parties=3,
        delta=1e-5,
        epsilons=(0.1, 1.0),
        seeds=(0, 1, 2),
        draws=1,
        curves=(
            Curve("fedkt L2", "fedkt", dict(zip((0.1, 1.0), spreads, strict=True))),
            Curve("fedmd ldp", "fedmd", {1.0: spreads[0]}, {0.1: "Noise."}),
        ),
        references={"fedkd, no privacy": spreads[1], MAJORITY: Spread.of([0.6])},
        command="python -m simulations curve --data toy",
    )
    return replace(summary, **changes)


def test_other_figures_give_another_picture(tmp_path: Path) -> None:
    """Of the same size, also where the folder is new and there is one budget."""
    draw_curves(constructed(), tmp_path / "new" / "one.png")
    draw_curves(constructed(low=0.75), tmp_path / "two.png")
    single = replace(constructed().curves[1], refused={})
    draw_curves(constructed(curves=(single,), epsilons=(1.0,)), tmp_path / "three.png")

    pictures = [tmp_path / "new" / "one.png", tmp_path / "two.png", tmp_path / "three.png"]
    assert len({picture.read_bytes() for picture in pictures}) == 3
    assert len({size_of(picture) for picture in pictures}) == 1


def test_what_is_worthless_leaves_room_for_the_rest() -> None:
    """The picture ends below the majority class, by a share of what is above it."""
    assert lowest_shown(constructed(low=0.2)) == pytest.approx(0.6 - 0.3 * (0.81 - 0.6))
    assert lowest_shown(constructed(low=0.2)) == lowest_shown(constructed(low=0.7))


def test_a_summary_in_a_file_is_the_whole_table() -> None:
    """So a document can be compared with it without the runs."""
    refused = {"fedhistogram, no privacy": "It does not fit."}
    summary = constructed(excluded=refused, commits=("c0ffee",), dates=("2026-01-02",))

    again = curve_summary(json.loads(json.dumps(to_json(summary), allow_nan=False)))

    assert again == summary
    assert markdown(again) == markdown(summary)


def test_a_section_takes_the_place_of_its_older_self(tmp_path: Path) -> None:
    """Other sections and what people wrote between them stay."""
    target, picture = tmp_path / "docs" / "curves.md", tmp_path / "docs" / "pictures" / "a.png"
    write_section(constructed(), picture, target)
    write_section(constructed(unit="party"), picture, target)
    assert target.read_text().startswith(INTRODUCTION)
    target.write_text(target.read_text() + "\nMy own words.\n")

    write_section(constructed(low=0.65), picture, target)

    text = target.read_text()
    assert text.count("## toy, 3 parties, example level") == 1
    assert text.index("example level") < text.index("party level") < text.index("My own words.")
    assert "65.5 (65.0 to 66.0)" not in text
    assert "65.0 (64.5 to 66.0)" in text
    assert "70.0 (69.5 to 71.0)" in text
    assert "](pictures/a.png)" in text
    assert "```sh\npython -m simulations curve --data toy\n```" in text


def test_a_section_without_an_end_is_not_overwritten(tmp_path: Path) -> None:
    """Nobody knows what after it is the reader's own."""
    target = tmp_path / "curves.md"
    write_section(constructed(), tmp_path / "a.png", target)
    broken = target.read_text().replace("<!-- end of", "<!-- of")
    target.write_text(broken)

    with pytest.raises(InvalidParameter, match="markdown must be a file with <!-- end of"):
        write_section(constructed(), tmp_path / "a.png", target)
    assert target.read_text() == broken
