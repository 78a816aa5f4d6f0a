"""What a run is worth, and why it may be worth little."""

import json
import logging
import math
from typing import Any

import pytest

from simulations.config import Settings
from simulations.federation import load_federation
from simulations.results.report import render
from simulations.results.verdict import (
    Gap,
    class_skew,
    find_warnings,
    gap_to,
    likely_causes,
    verdict,
)
from simulations.runtime.local import run_once

ONE_SIDED = [[90, 10], [10, 90], [50, 50]]
UNLIKE = "public rows (mnist) are unlike the private ones"
BEST = "the best party (party 1, xgboost)"
NOISE = "noise hides the answers"
ALIKE = [[500, 500], [510, 490], [495, 505]]


def report(**changes: Any) -> dict[str, Any]:
    """Return as much of a report as decides, of three parties that hold 1,000 records each."""
    settings = Settings.of(strategy="fedkt", corrected=False).to_report()
    told: dict[str, Any] = {
        "strategy": "fedkt",
        "metric": "accuracy",
        "accuracy": 0.8,
        "solo-accuracy": 0.7,
        "best-solo-accuracy": 0.75,
        "central-accuracy": 0.812,
        "majority-accuracy": 0.5,
        "standard-errors": dict.fromkeys(("majority", "mean-party", "best-party", "pooled"), 0),
        "num-classes": 2,
        "num-public-rows": 1000,
        "num-test-rows": 1000,
        "epsilon-party": math.inf,
        "epsilon-example": math.inf,
        "parties": parties(ALIKE),
        "settings": settings,
    }
    given = {key.replace("_", "-"): value for key, value in changes.items()}
    given["settings"] = settings | given.get("settings", {})
    return {**told, **given}


def parties(counts: list[list[int]], metric: str = "accuracy") -> list[dict[str, Any]]:
    names = ("random-forest", "xgboost", "mlp")
    return [
        {
            "partition-id": number,
            "learner": names[number],
            "num-records": sum(held),
            "class-counts": held,
            f"solo-{metric}": (0.65, 0.75, 0.7)[number],
        }
        for number, held in enumerate(counts)
    ]


def lost(**changes: Any) -> dict[str, Any]:
    return report(**{"accuracy": 0.73, "solo_accuracy": 0.656, **changes})


# The line


ALONE = {"solo_accuracy": None, "best_solo_accuracy": None}
OF_A_SHARE = {"accuracy": 0.8, "standard_errors": {}, "central_accuracy": None}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "above every party alone by 5.0 points; 1.2 points below pooled data"),
        ({"central_accuracy": None}, "above every party alone by 5.0 points"),
        (
            {"accuracy": 0.73, "solo_accuracy": 0.656},
            (
                f"below {BEST} by 2.0 points, above the mean party by 7.4 points; "
                "8.2 points below pooled data"
            ),
        ),
        ({**ALONE}, "above the majority class by 30.0 points; 1.2 points below pooled data"),
        ({**ALONE, "central_accuracy": None}, "above the majority class by 30.0 points"),
        (
            {**ALONE, "accuracy": 0.5},
            "level with the majority class; 31.2 points below pooled data",
        ),
        (
            {"accuracy": 0.29, "central_accuracy": None},
            (
                f"below {BEST} by 46.0 points, below the mean party by 41.0 points, "
                "below the majority class by 21.0 points"
            ),
        ),
        # Without answers to each row the error is sqrt(p (1 - p) / n) = 0.0126.
        (
            {**OF_A_SHARE, "best_solo_accuracy": 0.788},
            "level with the best party, above the mean party by 10.0 points",
        ),
        (
            {**OF_A_SHARE, "best_solo_accuracy": 0.787},
            "above every party alone by 1.3 points",
        ),
    ],
)
def test_the_verdict_names_what_was_compared(changes: dict[str, Any], line: str) -> None:
    """A win is over every party, a loss names the best; a constant only if not beaten."""
    assert verdict(report(**changes)) == line


@pytest.mark.parametrize(
    ("gain", "error", "side"),
    [
        (0.02, 0.019, 1),
        (0.02, 0.02, 0),
        (-0.02, 0.021, 0),
        (-0.02, 0.01, -1),
        (0.001, 0.0, 0),  # one of a thousand rows
        (-0.001, 0.0, 0),
        (0.002, 0.0, 1),
        (0.0, 0.0, 0),
    ],
)
def test_within_an_error_or_a_row_two_models_are_level(
    gain: float, error: float, side: int
) -> None:
    """Neither a win nor a loss."""
    told = report(accuracy=0.75 + gain, standard_errors={"best-party": error})
    gap = gap_to(told, "best-party")

    assert gap is not None
    assert gap.side == side


def test_small_differences_on_many_rows_are_not_rounded_away() -> None:
    """A significant one never reads 0.0."""
    assert Gap(0.0004, 0.0001).size == "0.04 points"


def own(figures: list[float], **changes: Any) -> dict[str, Any]:
    evaluate = {"partition-ids": [0.0, 1.0, 2.0], "accuracy-by-party": figures}
    return report(metrics={"evaluate": evaluate}, standard_errors={}, **changes)


def test_models_that_parties_keep_are_compared_with_their_own_past() -> None:
    """The mean counts, and who gained; the best party is no bar for a mean."""
    told = own([0.8, 0.74, 0.74], accuracy=0.76, solo_accuracy=0.7, strategy="fedmd")

    assert verdict(told) == (
        "the parties' own models are above the mean party by 6.0 points, "
        "2 of 3 parties gained; 5.2 points below pooled data"
    )
    below_the_best = own([0.74] * 3, accuracy=0.74, strategy="fedmd")
    assert find_warnings(below_the_best) == []
    worse = own([0.6] * 3, accuracy=0.6, strategy="fedmd")
    assert "is below the mean party (70.0 %)" in find_warnings(worse)[0]


def test_a_party_that_tells_nothing_is_not_counted() -> None:
    """NaN is no figure."""
    told = own([0.8, math.nan, 0.6], accuracy=0.7, solo_accuracy=0.5)

    assert "1 of 2 parties gained" in verdict(told)


def test_a_smaller_error_is_better() -> None:
    """Regression has no points."""
    told = {
        "metric": "mean-squared-error",
        "mean-squared-error": 0.5,
        "solo-mean-squared-error": 0.9,
        "best-solo-mean-squared-error": 0.75,
        "central-mean-squared-error": 0.4,
        "majority-mean-squared-error": 1.0,
        "standard-errors": {"pooled": 0.2},
        "num-test-rows": 50,
    }
    assert verdict(told) == "better than every party alone by 0.25; level with pooled data"
    numbers = parties(ALIKE, "mean-squared-error")
    worse = {**report(parties=numbers), **told, "mean-squared-error": 1.25}
    assert find_warnings(worse)[0].startswith(
        "The federation (1.25) is worse than the best party (party 1, xgboost, 0.75) and the "
        "mean party (0.9) and the mean of the targets (1)."
    )


def test_r2_is_a_number_and_has_no_points() -> None:
    told = {
        "metric": "r2",
        "r2": 0.5,
        "solo-r2": 0.125,
        "best-solo-r2": 0.25,
        "central-r2": 0.5004,
        "majority-r2": -0.01,
        "standard-errors": {"pooled": 0.001, "best-party": 0.1},
        "num-test-rows": 50,
    }
    assert verdict(told) == "above every party alone by 0.250; level with pooled data"
    numbers = parties(ALIKE, "r2")
    worse = {**report(parties=numbers), **told, "r2": -0.25, "standard-errors": {}}
    assert find_warnings(worse)[0].startswith(
        "The federation (-0.250) is below the best party (0.250) and the mean party (0.125) "
        "and the mean of the targets (-0.010)."
    )


# The warning


def test_the_warning_names_all_that_is_lost_to() -> None:
    """With their figures, the cause, and what to try."""
    (warning,) = find_warnings(report(accuracy=0.29, parties=parties(ONE_SIDED)))

    assert warning == (
        "The federation (29.0 %) is below the best party (party 1, xgboost, 75.0 %) and the "
        "mean party (70.0 %) and the majority class (50.0 %). Likely cause: the classes of "
        "parties are one-sided (23 % of their records beyond chance) and the rule that "
        "combines answers ignores it: set corrected=true."
    )


@pytest.mark.parametrize(
    ("strategy", "ignoring", "remedy"),
    [
        ("fedkd", {"weights": "counts"}, "weights=evidence"),
        ("fedmd", {"consensus": "mean"}, "consensus=evidence"),
        ("fedkt", {"corrected": False}, "corrected=true"),
    ],
)
def test_one_sided_classes_need_a_rule_that_knows(
    strategy: str, ignoring: dict[str, Any], remedy: str
) -> None:
    """By the strategy's own setting; with it, or with like parties, it is no cause."""
    skewed = parties(ONE_SIDED)
    key, _, value = remedy.partition("=")
    knowing = {key: True if value == "true" else value}

    (cause,) = likely_causes(lost(strategy=strategy, parties=skewed, settings=ignoring))
    assert cause.endswith(f"set {remedy}")
    assert likely_causes(lost(strategy=strategy, parties=skewed, settings=knowing)) == []
    assert likely_causes(lost(strategy=strategy, settings=ignoring)) == []
    assert likely_causes(lost(strategy="fedavg", parties=skewed)) == []
    assert likely_causes(lost(strategy=strategy, parties=skewed, settings={key: "auto"})) == []


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        (
            {"settings": {"num-teachers": 20, "num-splits": 2}},
            "a teacher has 50 records only: set num-teachers=1 num-splits=1",
        ),
        (
            {"num_public_rows": 30},
            "there are 30 public rows only: provide more (public-rows)",
        ),
        (
            {"settings": {"public": "mnist", "corrected": True}},
            f"{UNLIKE}: set class-share=none, or choose public rows of the same kind",
        ),
        (
            {"settings": {"public": "mnist", "corrected": True, "class-share": "none"}},
            f"{UNLIKE}: choose public rows of the same kind",
        ),
        (
            {"epsilon_party": 0.5, "settings": {"privacy-level": "L1", "num-teachers": 2}},
            f"{NOISE} (epsilon 0.5): allow a larger epsilon, fewer num-queries or more parties",
        ),
        (
            {"strategy": "fedmd", "settings": {"release": "ldp"}},
            f"{NOISE}: allow a larger epsilon, fewer public rows or more parties",
        ),
        (
            {"strategy": "fedmd", "epsilon_example": 3.0, "settings": {"release": "nfdp"}},
            "parties learn from a sample (epsilon 3): set a larger num-samples",
        ),
    ],
)
def test_each_cause_is_found_alone(changes: dict[str, Any], cause: str) -> None:
    """By what the run knows, and with its remedy."""
    assert likely_causes(lost(**changes)) == [cause]


def test_two_causes_are_named_and_the_likeliest_first() -> None:
    """Noise before classes before teachers."""
    everything = {"settings": {"num-teachers": 50, "privacy-level": "L1"}, "epsilon_party": 1.0}
    told = lost(**everything, parties=parties(ONE_SIDED), num_public_rows=9)
    found, (warning,) = likely_causes(told), find_warnings(told)

    assert [text.split(" ")[0] for text in found] == ["noise", "the", "a", "there"]
    assert warning.endswith(f"Likely cause: {found[0]}. Or: {found[1]}.")


def test_a_loss_without_a_known_cause_says_so() -> None:
    """Then other strategies are to be tried; a win has no warning."""
    assert find_warnings(report()) == []
    (warning,) = find_warnings(lost())

    assert warning.endswith("python -m simulations compare shows what fits these data.")


def test_chance_makes_no_class_one_sided() -> None:
    """Small parties drawn from all records differ, and are not skewed for that."""
    federation = load_federation(Settings.of(partition="iid", num_parties=20, data="digits"))
    counts = [
        [int((federation.dataset.y_train[rows] == label).sum()) for label in range(10)]
        for rows in federation.rows
    ]

    assert class_skew({"parties": [{"class-counts": held} for held in counts]}) < 0.05
    assert class_skew({"parties": [{"class-counts": None}]}) == 0.0
    apart = [{"class-counts": [1000 * (i == j) for j in range(10)]} for i in range(10)]
    assert class_skew({"parties": apart}) == pytest.approx(0.9, abs=0.05)


# Real runs


def run(**changes: Any) -> dict[str, Any]:
    small = {
        "strategy": "fedkt",
        "num_parties": 3,
        "num_trees": 5,
        "final.num-trees": 5,
        "num_workers": 1,
        "learner": "random-forest",
    }
    return run_once(Settings.of(**{**small, **changes}))


def test_a_run_that_loses_to_noise_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """FedKT's L2 with ten labels at epsilon 0.5 knows less than every party."""
    with caplog.at_level(logging.WARNING, "flwr.fl_strategies"):
        told = run(
            privacy_level="L2",
            target_epsilon=0.5,
            num_queries=10,
            partition="iid",
            accept_noise=True,
        )

    assert told["warnings"] == [caplog.records[-1].getMessage()]
    assert "Likely cause: noise hides the answers (epsilon 0.5)" in told["warnings"][0]
    assert told["verdict"].startswith("below the best party (party ")
    assert render(told).splitlines()[-1] == f"verdict: {told['verdict']}"


def test_a_run_of_small_teachers_loses_and_the_remedy_is_one() -> None:
    """Whole parties do better, and are told nothing about teachers."""
    told = run(num_teachers=30, partition="iid", pooled=False)
    better = run(num_teachers=1, num_splits=1, partition="iid", pooled=False)

    assert "set num-teachers=1 num-splits=1" in told["warnings"][0]
    assert better["accuracy"] > told["accuracy"] + 0.1
    assert "teacher" not in " ".join(better["warnings"])
    assert json.loads(json.dumps(better)) == better


def test_parties_that_keep_their_models_have_all_figures() -> None:
    """FedMD's figures are the means of what its parties measure."""
    told = run(strategy="fedmd", learner="logistic-regression", num_server_rounds=2)

    assert {*told["figures"]["federation"]} == {"accuracy", "balanced-accuracy", "macro-f1"}
    assert told["figures"]["federation"]["accuracy"] == told["accuracy"]
    assert told["standard-errors"] == {}
    assert "of 3 parties gained" in told["verdict"]
