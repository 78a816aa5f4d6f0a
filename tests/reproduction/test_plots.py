"""Figures of accuracy over rounds: what is drawn, and that something is drawn."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_strategies.errors import InvalidParameter, MissingExtra
from reproduction.__main__ import main
from reproduction.panels import PANEL_INCHES, draw_panels, line_look
from reproduction.plots import draw_rounds, make_panels
from reproduction.table import Row, Table
from simulations.experiments.plots import DOTS_PER_INCH
from tests.pictures import size_of

SEEDS = (0, 1, 2)
TABLE = Table(
    name="toy_table",
    title="Toy.",
    source="nowhere",
    seeds=SEEDS,
    rows=(
        Row("two", {"num-parties": 2}, panel="few"),
        Row("three", {"num-parties": 3}, panel="few"),
        Row("thirty", {"num-parties": 30}, panel="many"),
        Row("never run", {"num-parties": 40}, panel="many"),
    ),
)


def outcome(num_parties: int, seed: int, figures_: list[Any], **more: Any) -> dict[str, Any]:
    rounds = [{"round": r, "mean": f, "by-party": None} for r, f in enumerate(figures_, 1)]
    settings = {"num-parties": num_parties, "seed": seed}
    return {"settings": settings, "metric": "accuracy", "rounds": rounds, **more}


def some_outcomes(gain: float = 0.1) -> list[dict[str, Any]]:
    return [
        outcome(parties, seed, [0.3 + 0.01 * seed + gain * r for r in range(4)])
        for parties in (2, 3, 30)
        for seed in SEEDS
    ]


def write(path: Path, outcomes: list[dict[str, Any]]) -> Path:
    path.write_text(json.dumps({"table": TABLE.name, "outcomes": outcomes}))
    return path


def test_rows_become_curves_in_panels() -> None:
    """In the table's order, in percent, with a band; a row that was never run is excluded."""
    panels = make_panels(TABLE, some_outcomes())

    assert [(p.title, [line.name for line in p.lines]) for p in panels] == [
        ("few", ["two", "three"]),
        ("many", ["thirty"]),
    ]
    line = panels[0].lines[0]
    assert line.x == [1, 2, 3, 4]
    assert line.y == pytest.approx([31, 41, 51, 61])
    assert line.deviations == pytest.approx([1] * 4)

    few, many = draw_panels("figure", "Toy.", panels).axes
    assert [drawn.get_label() for drawn in few.get_lines()] == ["two", "three"]
    assert list(many.get_lines()[0].get_ydata()) == pytest.approx([31, 41, 51, 61])
    band = many.collections[0].get_paths()[0].vertices[:, 1]
    assert (min(band), max(band)) == pytest.approx((30, 62))
    assert few.get_ylabel() == "accuracy (%)"
    assert len({drawn.get_color() for drawn in few.get_lines()}) == 2


def test_a_curve_shows_what_its_row_measures() -> None:
    """Local models have a curve of their own beside the delivered ones of the same run."""
    own = Row("own models", {"num-parties": 2}, panel="few", measure="local")
    run = outcome(2, 0, [0.8, 0.9])
    for one, figure in zip(run["rounds"], (0.4, None), strict=True):
        one["local"] = figure

    (panel,) = make_panels(replace(TABLE, rows=(TABLE.rows[0], own)), [run])

    assert [line.name for line in panel.lines] == ["two", "own models"]
    assert [line.x for line in panel.lines] == [[1, 2], [1]]
    assert panel.lines[1].y == [40]


def test_what_a_seed_did_not_measure_is_left_out_there() -> None:
    """Missing, unknown and later rounds take the seeds that have them."""
    outcomes = [
        outcome(2, 0, [0.2, None, 0.6]),
        outcome(2, 1, [0.4, 0.5]),
        outcome(2, 2, [math.nan, 0.7]),
    ]

    ((line,),) = (panel.lines for panel in make_panels(TABLE, outcomes))

    assert line.x == [1, 2, 3]
    assert line.y == pytest.approx([30, 60, 60])
    assert line.deviations[2] == 0


def test_different_kinds_of_figure_do_not_share_axes() -> None:
    """An error beside an accuracy gets a panel of its own."""
    outcomes = [
        outcome(2, 0, [0.5]),
        outcome(3, 0, [0.1], metric="mean-squared-error"),
    ]

    panels = make_panels(TABLE, outcomes)

    assert [(panel.title, panel.y_label, panel.lines[0].y) for panel in panels] == [
        ("few", "accuracy (%)", [50]),
        ("few", "mean squared error", [0.1]),
    ]


def test_a_picture_is_drawn_and_tells_results_apart(tmp_path: Path) -> None:
    """Its width follows from the panels; equal results give equal bytes, others do not."""
    pictures = []
    for name, gain in (("a", 0.1), ("b", 0.1), ("c", 0.15)):
        kept = write(tmp_path / f"{name}.json", some_outcomes(gain))
        draw_rounds(TABLE, kept, tmp_path / "new folder" / f"{name}.png")
        pictures.append(tmp_path / "new folder" / f"{name}.png")

    width, height = size_of(pictures[0])
    assert width == pytest.approx(2 * PANEL_INCHES[0] * DOTS_PER_INCH, abs=2)
    assert height >= PANEL_INCHES[1] * DOTS_PER_INCH
    first, again, other = (picture.read_bytes() for picture in pictures)
    assert first == again != other


def test_many_rows_and_panels_have_looks_and_places_of_their_own() -> None:
    """Forty rows differ in colour or style, and four panels take two lines of three."""
    rows = tuple(Row(f"{n}", {"num-parties": n}, panel=f"{n % 4}") for n in range(1, 9))
    table = Table("toy_table", "Toy.", "nowhere", (0,), rows)
    panels = make_panels(table, [outcome(n, 0, [0.1 * n]) for n in range(1, 9)])

    figure = draw_panels("figure", table.title, panels)

    width, height = figure.get_size_inches()
    assert width == pytest.approx(3 * PANEL_INCHES[0])
    assert height >= 2 * PANEL_INCHES[1]
    assert [axes.axison for axes in figure.axes] == [True] * 4 + [False] * 2
    assert len({tuple(line_look(number).values()) for number in range(40)}) == 40


def test_no_results_is_one_clear_sentence(tmp_path: Path) -> None:
    """Neither a missing file nor one of another table becomes an empty picture."""
    target = tmp_path / "none.png"
    other = write(tmp_path / "other.json", [outcome(99, 0, [0.5])])

    for kept in (tmp_path / "missing.json", other):
        with pytest.raises(InvalidParameter, match=r"rounds of toy_table, got .*json"):
            draw_rounds(TABLE, kept, target)
    assert not target.exists()


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence says what to install."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    kept = write(tmp_path / "kept.json", some_outcomes())

    with pytest.raises(MissingExtra, match=r"'matplotlib' .*fl-strategies\[figures\]"):
        draw_rounds(TABLE, kept, tmp_path / "a.png")


def test_the_command_line_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the results that `table` keeps, to the file that is named, or beside them."""
    table = Table.load("fedkd_mnist")
    settings = dict(table.rows[0].settings)
    outcomes = [
        {**outcome(0, seed, [0.5, 0.6]), "settings": {**settings, "seed": seed}}
        for seed in table.seeds
    ]
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    kept = write(Path("runs/fedkd_mnist.json"), outcomes)

    assert main(["figure", "fedkd_mnist"]) == 0
    assert main(["figure", "fedkd_mnist", "--json", str(kept), "--png", "own.png"]) == 0
    assert main(["figure", "fedkd_mnist", "--json", "nowhere.json"]) == 1

    text = capsys.readouterr()
    assert "figure: runs/fedkd_mnist.png" in text.out
    assert "error: figure: results must be a file with measured rounds" in text.err
    assert Path("own.png").read_bytes() == Path("runs/fedkd_mnist.png").read_bytes()
