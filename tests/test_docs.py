"""What the documents say about experiments is what their result files hold."""
# ruff: noqa: RUF001, RUF002 - rows are named by the letters of the papers

import re
from pathlib import Path
from statistics import fmean

import pytest

from simulations.reproduce import Table, markdown, outcomes_of, read_outcomes

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"<!-- table (\w+) -->\n\n(.*?)\n\n<!-- end -->", re.DOTALL)
BLOCKS = [
    (path.name, name, text)
    for path in sorted(DOCS.glob("*.md"))
    for name, text in BLOCK.findall(path.read_text(encoding="utf-8"))
]


def mean(table: str, row: str, prefix: str = "") -> float:
    """Return the mean over seeds of one cell, in percent; all seeds must be there."""
    experiments = Table.load(table)
    (chosen,) = [one for one in experiments.rows if one.name == row]
    found = outcomes_of(experiments, chosen, read_outcomes(DOCS / "results" / f"{table}.json"))
    assert len(found) == len(experiments.seeds), f"{table}, {row}: some seeds are missing"
    return 100 * fmean(outcome["figures"][prefix] for outcome in found)


def rounds(table: str, row: str) -> list[float]:
    """Return the mean over seeds and parties of every round, in percent."""
    experiments = Table.load(table)
    (chosen,) = [one for one in experiments.rows if one.name == row]
    found = outcomes_of(experiments, chosen, read_outcomes(DOCS / "results" / f"{table}.json"))
    runs = [
        [fmean(one["by-party"] or [one["mean"]]) for one in outcome["rounds"]]
        for outcome in found
    ]
    return [100 * fmean(values) for values in zip(*runs, strict=True)]


@pytest.mark.parametrize(("document", "name", "text"), BLOCKS, ids=[b[1] for b in BLOCKS])
def test_tables_show_their_results(document: str, name: str, text: str) -> None:
    """A table in a document is exactly what its result file gives."""
    assert document
    assert text == markdown(Table.load(name), DOCS / "results" / f"{name}.json")


def test_fedkd_is_far_above_its_parties() -> None:
    """At both degrees of heterogeneity, by more than five points."""
    for alpha in ("α = 1", "α = 0.1"):
        alone = mean("fedkd_cifar10", alpha, "solo-")
        assert mean("fedkd_cifar10", alpha) > alone + 5


def test_class_weights_beat_uniform_ones() -> None:
    """Equation 1 of the paper matters where parties differ."""
    uniform = mean("fedkd_cifar10", "α = 0.1, uniform weights")
    assert mean("fedkd_cifar10", "α = 0.1") > uniform + 2


def test_levels_are_as_good_as_float32() -> None:
    """Two hundred levels are within half a point."""
    for alpha in ("α = 1", "α = 0.1"):
        plain = mean("fedkd_cifar10", f"{alpha}, float32 logits")
        assert abs(mean("fedkd_cifar10", alpha) - plain) <= 0.5


def test_noise_costs_and_public_rows_give_back() -> None:
    """Less and less accuracy with more noise; more with more public rows."""
    quiet, some, much, few, many = (
        mean("fedkd_cifar10", f"α = 1{noise}")
        for noise in (
            "", ", noise 1/γ = 1", ", noise 1/γ = 4", ", noise 1/γ = 4, 1,000 public rows",
            ", noise 1/γ = 4, 10,000 public rows",
        )
    )  # fmt: skip
    assert quiet > some > much
    assert many > much > few


def test_fedmd_grows_with_its_sample() -> None:
    """More records help, all with replacement are about all, and together beats alone."""
    rows = ("k = 18", "k = 60", "k = 300", "k = n = 2,880")
    together = [mean("fedmd_letters", row) for row in rows]
    alone = [mean("fedmd_letters", row, "solo-") for row in rows]

    assert together == sorted(together)
    assert all(a > b for a, b in zip(together, alone, strict=True))
    everything = mean("fedmd_letters", "no privacy, all records")
    assert abs(together[-1] - everything) < 2
    assert everything > mean("fedmd_letters", "no privacy, all records", "solo-")


def test_local_noise_at_that_epsilon_is_chance() -> None:
    """What the server learns from such answers is no better than one guess of six."""
    assert mean("fedmd_letters", "local noise at the ε and δ of k = 60", "server-") < 25


def test_more_parties_help_and_heterogeneity_hurts() -> None:
    """Figure 5 and Table 4 of the paper in shape."""
    two, five, ten = (
        mean("fedmd_letters", f"k = 60{rest}") for rest in (", 2 parties", ", 5 parties", "")
    )
    assert two < five < ten
    assert mean("fedmd_letters", "k = 60, Dirichlet 0.5 instead of i.i.d.") < ten


def test_forests_and_networks_both_gain() -> None:
    """Each kind ends above what it reaches alone, on average of seeds."""
    table = Table.load("fedmd_mixed")
    outcomes = read_outcomes(DOCS / "results" / "fedmd_mixed.json")
    found = outcomes_of(table, table.rows[0], outcomes)
    assert len(found) == 3
    for kind in (0, 1):  # forests and networks take turns
        after = [o["rounds"][-1]["by-party"][kind::2] for o in found]
        before = [o["solo-by-party"][kind::2] for o in found]
        assert fmean(map(fmean, after)) > fmean(map(fmean, before))


def test_chains_forget_and_averages_do_not() -> None:
    """AKD gains nothing, PKD rises and falls, AvgKD gains, EKD starts highest."""
    for alpha in ("α = 0", "α = 0.1"):
        akd, avgkd, pkd, ekd = (
            rounds("codistill_mnist", f"{scheme}, {alpha}")
            for scheme in ("AKD", "AvgKD", "PKD", "EKD")
        )
        assert akd[-1] <= akd[0] + 0.5
        assert avgkd[-1] > avgkd[0]
        assert max(pkd) > pkd[0]
        assert pkd[-1] < max(pkd)
        assert ekd[0] > max(akd[0], avgkd[0], pkd[0])
    falling = rounds("codistill_mnist", "AKD, α = 0.1")
    assert falling[-1] < falling[0] - 2


def test_averaged_distillation_beats_local_models_of_averaged_weights() -> None:
    """At small α: agents' own models in the last round, as the paper compares them."""
    for alpha in ("α = 0", "α = 0.01"):
        experiments = Table.load("codistill_mnist")
        (row,) = [one for one in experiments.rows if one.name == f"FedAvg, {alpha}"]
        outcomes = read_outcomes(DOCS / "results" / "codistill_mnist.json")
        found = outcomes_of(experiments, row, outcomes)
        local = 100 * fmean(outcome["rounds"][-1]["local"] for outcome in found)
        assert mean("codistill_mnist", f"AvgKD, {alpha}") > local
