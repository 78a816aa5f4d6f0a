"""The comparison: what fits, what is kept, what is shown and what is recommended."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_strategies.errors import NotEnoughParties
from simulations.__main__ import main
from simulations.config import Settings
from simulations.experiments.compare import (
    BASELINE_NAMES,
    Comparison,
    Line,
    Promise,
    Summary,
    plan_comparison,
    recommend,
    render,
    summarise_comparison,
    to_json,
)
from simulations.experiments.plots import DOTS_PER_INCH, draw_comparison, point_look
from simulations.federation import Federation, load_federation
from simulations.runtime import local
from tests.pictures import size_of
from tests.simulations import commands
from tests.simulations.commands import constructed_report

FAST = {**commands.FAST, "fedmd.epochs-initial": 2}
Y = ("y_train", "y_test")
TRUSTED = "everybody who sees the final model, except the server, which is trusted"


def compare(folder: Path, *options: str) -> int:
    kept = folder / "kept.json"
    usual = [*commands.assigned(FAST), "--seeds=0", "--rounds=2"]
    return main(["compare", *usual, f"--json={kept}", *options])


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count what the real runner is asked for: strategies, and baselines."""
    asked = commands.record_runs(monkeypatch)
    solo = Federation.evaluate_parties

    def count_solo(federation: Federation, num_workers: int = 1) -> Any:
        asked.append("baselines")
        return solo(federation, num_workers)

    monkeypatch.setattr(Federation, "evaluate_parties", count_solo)
    return asked


def test_a_real_comparison_is_shown_kept_and_not_run_twice(
    tmp_path: Path, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Baselines once a seed; a table, a picture and results; another setting runs anew."""
    chosen = "--strategy=fedkt,fedkd,avgkd,fedavg"
    assert compare(tmp_path, chosen) == 0

    told = capsys.readouterr()
    result = json.loads((tmp_path / "kept.json").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert runs == ["baselines", "fedkt", "fedkd", "avgkd", "fedavg"]
    assert {"fedkt", "avgkd", "fedavg (mlp everywhere)", *BASELINE_NAMES.values()} < {*rows}
    assert rows["fedavg (mlp everywhere)"]["rounds"] == 2
    assert rows["fedkt"]["rounds"] == 1
    assert rows["fedkt"]["bytes-down-per-party"] > rows["fedkt"]["bytes-up-per-party"] > 0
    assert rows["fedkt"]["epsilon"] is None
    assert "accuracy %" in told.out
    assert "Take " in told.out
    models = "random-forest,xgboost,logistic-regression,mlp; pooled extra-trees"
    assert f"Baselines: {models}." in told.out
    assert "run 2 of 5: fedkt, seed 0: " in told.err
    assert "left" in told.err
    assert size_of(tmp_path / "kept.png")[0] > 500

    runs.clear()
    assert compare(tmp_path, chosen) == 0
    assert runs == []
    assert capsys.readouterr().out == told.out

    assert compare(tmp_path, "--strategy=fedkt", "--set=num-teachers=2") == 0
    assert runs == ["fedkt"]
    runs.clear()
    assert compare(tmp_path, "--strategy=fedkt", "--set=num-trees=6") == 0
    assert runs == ["baselines", "fedkt"]


def test_private_entries_keep_to_the_budget(
    tmp_path: Path, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has its unit; what promises nothing, or something else, has a group of its own."""
    assert compare(tmp_path, "--epsilon=2", "--strategy=fedkt,fedkd,fedmd") == 0

    assert len(runs) == 10
    result = json.loads((tmp_path / "kept.json").read_text())
    private = {r["name"]: r for r in result["rows"] if r["group"] == "within epsilon 2"}
    units = {name.partition(" (")[0]: row["unit"] for name, row in private.items()}
    assert units == {
        "fedkt L1": "party",
        "fedkt L2": "example",
        "fedmd ldp": "example",
        "fedkd noise": "party",
        "fedkd noise, noisy counts": "example",
    }
    assert all(0 < row["epsilon"] <= 2 + 1e-6 for row in private.values())
    (other,) = (row for row in result["rows"] if row["group"] == "another promise")
    assert other["name"] == "fedmd nfdp"
    assert other["delta"] <= 0.1
    text = capsys.readouterr().out
    assert "party, delta 1e-05" in text
    assert "To protect whole parties at epsilon 2, take " in text
    width, height = size_of(tmp_path / "kept.png")
    assert width > 1.5 * height


def test_a_stopped_comparison_keeps_what_is_finished(
    tmp_path: Path,
    runs: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C in the middle of the last run costs this run alone."""
    finished = local.run_local

    def interrupted(strategy: Any, *arguments: Any, **options: Any) -> Any:
        if strategy.name == "fedkd":
            raise KeyboardInterrupt
        return finished(strategy, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(local, "run_local", interrupted)
        assert compare(tmp_path, "--strategy=fedkt,fedkd") == 130
    assert "the same command resumes" in capsys.readouterr().err
    assert runs == ["baselines", "fedkt"]

    runs.clear()
    assert compare(tmp_path, "--strategy=fedkt,fedkd") == 0
    assert runs == ["fedkd"]
    assert "2 of them finished before" in capsys.readouterr().err


def test_what_does_not_fit_is_excluded_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A setting that a strategy would ignore ends no comparison of the others."""
    assert compare(tmp_path, "--strategy=fedkt,fedmd", "--set=num-teachers=2") == 0

    text = capsys.readouterr().out
    reason = "key must be a setting of fedmd, got 'num-teachers', which fedkt has."
    assert f"not compared: fedmd: Settings: {reason}" in text
    assert "Take fedkt" in text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--strategy=fedmagic"], "strategy must be one of akd, "),
        (["--set=seed=3"], "compare: --set seed must be left to --seeds, got 3."),
        (["--seeds=1,1"], "compare: seeds must be different numbers"),
        (["--rounds=0"], "compare: rounds must be at least 1, got 0."),
        (["--epsilon=much"], "compare: epsilon must be numbers"),
        (["--epsilon=0"], "compare: epsilon must be finite and above 0, got 0.0."),
        (["--set=betta=1"], "Did you mean 'beta'?"),
        (
            ["--strategy=fedmd", "--set=num-samples=5"],
            "compare: strategy must be one that fits",
        ),
    ],
)
def test_wrong_requests_are_one_sentence(
    tmp_path: Path, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is run."""
    assert compare(tmp_path, *options) == 1

    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "kept.json").exists()


def test_what_decides_a_result_is_part_of_its_key(tmp_path: Path) -> None:
    """Such as the content of a user's own file, but not the number of processes."""
    file, keys = tmp_path / "own.csv", []
    for content, num_workers in (("1,0", 1), ("1,0", 2), ("2,0", 2)):
        file.write_text(f"a,label\n{content}\n")
        given = {"data": str(file), "num-workers": num_workers}
        keys.append(Comparison(given, (0,)).key(None, 0))

    first, other_workers, other_content = keys
    assert first == other_workers != other_content
    assert first.keys() == other_content.keys()


def test_fedavg_takes_a_network_that_the_parties_have() -> None:
    """One kind of network at all parties is no substitution, and may be recommended."""
    given = {**FAST, "learner": "mlp", "final-learner": "mlp"}
    (entry,) = plan_comparison(given, strategies=["fedavg"], rounds=3, seeds=(0,)).entries

    assert (entry.name, entry.reference) == ("fedavg", False)
    assert entry.settings["num-server-rounds"] == 3


def test_a_strategy_of_classes_is_not_run_on_several_labels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is excluded before it runs; one that knows such labels is not."""
    federation = load_federation(Settings.from_run_config(FAST))
    data = federation.dataset
    labels = {name: np.eye(2, dtype=np.int64)[getattr(data, name)] for name in Y}
    several = replace(federation, dataset=replace(data, task="multi-label", **labels))
    monkeypatch.setattr("simulations.experiments.compare.load_federation", lambda _: several)
    plan = plan_comparison(FAST, strategies=["fedkt", "fedkd"], rounds=1, seeds=(0,))

    assert [entry.name.partition(" ")[0] for entry in plan.entries] == ["fedkd"]
    reason = "fedkt: task must be single-label, got 'multi-label'."
    assert plan.excluded == {"fedkt": reason}


def test_the_users_settings_win_over_usual_ones() -> None:
    """But not over what makes an entry what it is."""
    given = {**FAST, "num-teachers": 7, "num-queries": 11, "privacy-level": "L0"}
    plan = plan_comparison(given, strategies=["fedkt"], rounds=2, seeds=(0,), budgets=(1.0,))

    (level_two,) = (entry for entry in plan.entries if entry.name == "fedkt L2")
    keys = ("num-teachers", "num-queries", "privacy-level")
    told = [level_two.settings[f"fedkt.{key}"] for key in keys]
    assert told == [7, 11, "L2"]


# A comparison of constructed runs.


def two_seeds(folder: Path, run: Callable[[Settings], dict[str, Any]]) -> Summary:
    comparison = plan_comparison(FAST, strategies=["fedkt", "fedmd"], rounds=1, seeds=(0, 1))
    results = comparison.run(run, folder / "kept.json", lambda _: None)
    return summarise_comparison(comparison, results)


def test_seeds_are_averaged_and_epsilons_are_not(tmp_path: Path) -> None:
    """The largest epsilon counts; bytes are a party's, delivery included."""

    def run(settings: Settings) -> dict[str, Any]:
        seed = settings.seed
        rejected = {"1000": "it did not answer in time"} if seed else {}
        figure, epsilon = 0.8 + 0.1 * seed, 1.0 + seed
        return constructed_report(figure, epsilon_example=epsilon, rejected=rejected)

    summary = two_seeds(tmp_path, run)

    line = summary.lines[0]
    assert line.mean == pytest.approx(0.85)
    assert line.promise is not None
    assert (line.promise.unit, line.promise.epsilon) == ("example", 2.0)
    assert (line.bytes_up, line.bytes_down) == (20, 40)
    assert line.further == {"balanced-accuracy": (0.4, 0.45)}
    text = render(summary)
    assert "85.0 ± 7.1" in text
    assert "balanced accuracy %" in text
    assert "up to 1 parties excluded in a run" in text


def test_a_run_that_fails_excludes_its_strategy_alone(tmp_path: Path) -> None:
    """With its sentence; it is not tried on further seeds, and not kept."""
    asked = []

    def run(settings: Settings) -> dict[str, Any]:
        asked.append((settings.strategy, settings.seed))
        if settings.strategy == "fedkt":
            raise NotEnoughParties("FedKT: 2 parties must answer, got 1.")
        return constructed_report(0.9)

    summary = two_seeds(tmp_path, run)

    assert asked == [("fedkt", 0), ("fedmd", 0), ("fedmd", 1)]
    assert [line.name for line in summary.lines] == ["fedmd"]
    assert "not compared: fedkt: FedKT: 2 parties must answer, got 1." in render(summary)


# The recommendation and the picture, from constructed lines.


def constructed(*lines: Line, best: float = 0.80) -> Summary:
    figures = {"majority-": 0.5, "solo-": 0.6, "best-solo-": best, "central-": 0.95}
    return Summary(
        data="toy",
        metric="accuracy",
        seeds=(0, 1, 2),
        delta=1e-5,
        lines=lines,
        excluded={},
        baselines={
            prefix: Line(BASELINE_NAMES[prefix], (figure,) * len(lines[0].values))
            for prefix, figure in figures.items()
        },
    )


def line(name: str, figures: tuple[float, ...], num_bytes: float, **more: Any) -> Line:
    return Line(name, figures, bytes_up=num_bytes, rounds=1, **more)


def test_a_clear_winner_is_recommended_with_its_worth() -> None:
    """Beside the best party, pooled data and the best of the cheaper ones."""
    good = line("good", (0.90, 0.91, 0.92), 5000)
    cheap = line("cheap", (0.84, 0.86, 0.87), 100)
    advice = recommend(constructed(good, cheap, line("bad", (0.3, 0.3, 0.3), 10)))

    assert advice == [
        "Take good: 91.0 % with 5.0 kB a party in one round.",
        (
            "It is 11.0 points (more than the deviation over seeds, 1.0) above the best party "
            "alone (80.0 %), and 4.0 points (more than the deviation over seeds, 1.0) below "
            "pooled data (95.0 %)."
        ),
        (
            "The best of the cheaper ones, cheap, takes 100 B a party and is 5.3 points (more "
            "than the deviation over seeds, 0.6) below it."
        ),
    ]


def test_of_equals_the_cheaper_is_recommended() -> None:
    """Equal for all that seeds can tell; the better one is named."""
    best = line("best", (0.90, 0.93, 0.90), 5000)
    equal = line("equal", (0.91, 0.91, 0.90), 100)
    advice = recommend(constructed(best, equal))

    assert advice[0].startswith("Take equal: 90.7 %")
    assert advice[1] == (
        "best has 91.0 %, only 0.3 points (within the deviation over seeds, 1.5) more, for "
        "50.0 times the bytes."
    )
    assert advice[-1] == "Nothing compared here is cheaper."


def test_chance_alone_does_not_excuse_a_large_loss() -> None:
    """Where seeds differ much, the best mean is still the best guess."""
    best = line("best", (0.95, 0.95, 0.95), 5000)
    noisy = line("noisy", (0.99, 0.70, 0.95), 100)
    advice = recommend(constructed(best, noisy))

    assert advice[0].startswith("Take best")
    assert "within the deviation over seeds" in advice[-1]


def test_a_cheaper_one_below_the_best_party_is_not_taken() -> None:
    """If the better one is above it."""
    above = line("above", (0.80, 0.83, 0.80), 5000)
    below = line("below", (0.80, 0.79, 0.80), 100)

    assert recommend(constructed(above, below))[0].startswith("Take above")


def test_one_seed_proves_nothing() -> None:
    """The best is taken, with a doubt."""
    advice = recommend(constructed(line("best", (0.905,), 5000), line("equal", (0.90,), 100)))

    assert advice[0].startswith("Take best")
    assert "one seed, so perhaps chance" in advice[1]


@pytest.mark.parametrize(
    ("figures", "best_party", "opening"),
    [
        ((0.7, 0.7, 0.7), 0.9, "Take weak: 70.0 %"),
        ((0.4, 0.5, 0.5), 0.8, "Take nothing compared here: the best, weak, has 46.7 %"),
    ],
    ids=["below the best party", "below the majority class too"],
)
def test_a_loss_to_the_best_party_is_a_warning(
    figures: tuple[float, ...], best_party: float, opening: str
) -> None:
    """Nothing is recommended that the majority class beats, however cheap it is."""
    _, warning, *_ = advice = recommend(constructed(line("weak", figures, 10), best=best_party))

    assert advice[0].startswith(opening)
    reached = f"none of these reaches the best party alone ({100 * best_party} %)"
    assert warning.startswith(f"WARNING: {reached}; this one is ")
    assert "should keep it" in warning


def test_a_reference_is_named_and_never_recommended() -> None:
    """It needs one model at all parties, which they do not have."""
    reference = line("fedavg (mlp everywhere)", (0.94,) * 3, 10, reference=True)
    advice = recommend(constructed(line("own", (0.9,) * 3, 100), reference))

    assert advice[0].startswith("Take own")
    assert advice[-1].startswith("fedavg (mlp everywhere), which needs one model for all")


def private_summary() -> Summary:
    def promise(unit: str, against: str, epsilon: float = 1.0) -> dict[str, Any]:
        return {"promise": Promise(unit, epsilon, 1e-5, against), "budget": 1.0}

    return constructed(
        line("free", (0.93,) * 3, 10),
        line("votes", (0.85,) * 3, 10, **promise("party", TRUSTED)),
        line("counts", (0.90,) * 3, 10, **promise("example", TRUSTED)),
        line("local", (0.82,) * 3, 10, **promise("example", "the server and everybody")),
        line("too much", (0.92,) * 3, 10, **promise("example", TRUSTED, epsilon=1.1)),
    )


def test_each_need_for_privacy_has_a_recommendation_of_its_own() -> None:
    """Parties, examples, and examples from the server too; a budget is never exceeded."""
    advice = recommend(private_summary())

    taken = [sentence.partition(":")[0] for sentence in advice if "take " in sentence]
    assert taken == [
        "To protect whole parties at epsilon 1, take votes",
        "To protect examples at epsilon 1, take counts",
        "To protect examples from the server too at epsilon 1, take local",
    ]
    assert advice[-1] == "Without any promise, free has 93.0 %."
    assert [row["name"] for row in to_json(private_summary(), advice)["rows"][3:5]] == [
        "too much",
        "free",
    ]


@pytest.mark.parametrize("private", [False, True])
def test_the_picture_is_a_png_of_one_panel_or_two(tmp_path: Path, private: bool) -> None:
    """Twice as wide with budgets; other figures give another picture."""
    plain = constructed(line("a", (0.9, 0.8, 0.7), 10), line("b", (0.9,) * 3, 1e6))
    summary = private_summary() if private else plain
    draw_comparison(summary, tmp_path / "new" / "one.png")

    assert size_of(tmp_path / "new" / "one.png")[0] == (1 + private) * 6.4 * DOTS_PER_INCH
    other = constructed(line("a", (0.9, 0.8, 0.2), 10), line("b", (0.9,) * 3, 1e6))
    draw_comparison(other, tmp_path / "two.png")
    assert (tmp_path / "two.png").read_bytes() != (tmp_path / "new" / "one.png").read_bytes()


def test_no_two_of_fifty_entries_look_the_same() -> None:
    """There are more strategies than colours."""
    assert len({tuple(point_look(number).values()) for number in range(50)}) == 50
