"""What the documents say about experiments is what their result files hold."""
# ruff: noqa: RUF001 - rows are named by the letters of the papers

import json
from pathlib import Path
from statistics import fmean

import pytest

from reproduction.page import BLOCK, all_tables, page_text, results_of, write_page
from reproduction.table import Row, Table, figure_of, markdown, outcomes_of, rounds_of
from simulations.experiments.curve import markdown as curve_markdown
from simulations.experiments.engine import Outcome, read_outcomes
from tests.simulations.commands import curve_summary

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = [
    (path.name, name, text)
    for path in sorted((DOCS / "results").glob("*.md"))
    for _, name, text, _ in BLOCK.findall(path.read_text(encoding="utf-8"))
]

CURVES = sorted((DOCS / "results").glob("curve_*.json"))


def find_row(table: str, name: str) -> tuple[Row, list[Outcome]]:
    """Return a row of a table and its results; all seeds must be there."""
    experiments = Table.load(table)
    (row,) = [one for one in experiments.rows if one.name == name]
    found = outcomes_of(experiments, row, read_outcomes(DOCS / "results" / f"{table}.json"))
    assert len(found) == len(experiments.seeds), f"{table}, {name}: some seeds are missing"
    return row, found


def mean(table: str, name: str, prefix: str = "") -> float:
    """Return the mean over seeds of one cell, in percent."""
    row, found = find_row(table, name)
    figures = [figure_of(row, outcome, prefix) for outcome in found]
    return 100 * fmean(figure for figure in figures if figure is not None)


def rounds(table: str, name: str) -> list[float]:
    """Return the mean over seeds and parties of every round, in percent."""
    row, found = find_row(table, name)
    runs = [[figure or 0.0 for _, figure in rounds_of(row, outcome)] for outcome in found]
    return [100 * fmean(values) for values in zip(*runs, strict=True)]


def fall_of_chain(table: str, name: str) -> float:
    """Return how much AKD's chain loses from its first to its last model, in points.

    In the first round all agents train, and the chain starts with the model of the first.
    """
    _, found = find_row(table, name)
    ends = [(o["rounds"][0]["by-party"][0], o["rounds"][-1]["by-party"][0]) for o in found]
    return 100 * fmean(first - last for first, last in ends)


@pytest.mark.parametrize(("document", "name", "text"), BLOCKS, ids=[b[1] for b in BLOCKS])
def test_tables_show_their_results(document: str, name: str, text: str) -> None:
    assert document
    assert text == markdown(Table.load(name), DOCS / "results" / f"{name}.json")


def test_the_page_of_tables_is_what_the_command_makes() -> None:
    """Nothing below its mark is written by hand, and every table is named."""
    text = (DOCS / "reproduction.md").read_text(encoding="utf-8")

    assert text == page_text(text, DOCS / "results")
    assert all(f"| `{table.name}` |" in text for table in all_tables())


def test_runs_of_two_scales_are_shown_once() -> None:
    """A scale with no run of its own has no section; one with others has."""
    text, paper = page_text("", DOCS / "results"), Table.load("fedkt_cnn", "paper")

    assert results_of(paper, DOCS / "results")
    assert "### `fedkt_cnn`\n" in text
    assert "### `fedkt_cnn`, at the paper's size" not in text
    assert "### `fedkt_table1_mnist`, at the paper's size" in text


def test_writing_keeps_what_people_wrote(tmp_path: Path) -> None:
    """Words above the mark stay, the rest is made anew, and so are tables of other pages."""
    (tmp_path / "results").mkdir()
    kept = (DOCS / "results" / "fedmd_mixed.json").read_bytes()
    (tmp_path / "results" / "fedmd_mixed.json").write_bytes(kept)
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    page.write_text("# By hand\n")
    other.write_text("<!-- table fedmd_mixed -->\n\nold\n\n<!-- end -->\n")

    write_page(page)
    first = page.read_text()
    page.write_text(first + "forged\n")
    write_page(page)

    assert page.read_text() == first
    assert first.startswith("# By hand\n")
    expected = markdown(Table.load("fedmd_mixed"), DOCS / "results" / "fedmd_mixed.json")
    assert expected in first
    assert expected in other.read_text()
    assert "`fedmd_letters`, at" not in first


@pytest.mark.parametrize("path", CURVES, ids=[path.stem for path in CURVES])
def test_curves_show_their_results(path: Path) -> None:
    """A table of curves, its picture and its command are those of its result file."""
    summary = curve_summary(json.loads(path.read_text(encoding="utf-8")))
    text = (DOCS / "privacy_curves.md").read_text(encoding="utf-8")

    assert curve_markdown(summary) in text
    assert summary.command in text
    assert f"]({path.stem}.png)" in text


def test_fedkd_is_far_above_its_parties() -> None:
    for alpha in ("α = 1", "α = 0.1"):
        alone = mean("fedkd_cifar10", alpha, "solo-")
        assert mean("fedkd_cifar10", alpha) > alone + 5


def test_class_weights_beat_uniform_ones() -> None:
    """Equation 1 of the paper matters where parties differ."""
    uniform = mean("fedkd_cifar10", "α = 0.1, uniform weights")
    assert mean("fedkd_cifar10", "α = 0.1") > uniform + 2


def test_levels_are_as_good_as_float32() -> None:
    for alpha in ("α = 1", "α = 0.1"):
        plain = mean("fedkd_cifar10", f"{alpha}, float32 logits")
        assert abs(mean("fedkd_cifar10", alpha) - plain) <= 0.5


def test_noise_costs_and_public_rows_give_back() -> None:
    """Less and less accuracy with more noise; more with more public rows."""
    quiet, some, much, few, many = (
        mean("fedkd_cifar10", f"α = 1{noise}")
        for noise in (
            "",
            ", noise 1/γ = 1",
            ", noise 1/γ = 4",
            ", noise 1/γ = 4, 1,000 public rows",
            ", noise 1/γ = 4, 10,000 public rows",
        )
    )
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


def test_labels_alone_cost_more_than_in_the_paper() -> None:
    """Logits and softmax agree; labels are below, most where public rows are digits."""
    for table, softmax in (
        ("fedmd_letters", "k = 300"),
        ("fedmd_pretrained", "k = 300, softmax"),
    ):
        scores = mean(table, softmax)
        assert abs(scores - mean(table, "k = 300, logits")) < 1
        assert 3 < scores - mean(table, "k = 300, argmax") < 6
    letters, labels = (
        mean("fedmd_letters", f"k = 300, public letters, {payload}")
        for payload in ("softmax", "argmax")
    )
    assert 1 < letters - labels < 2


def test_all_payloads_agree_with_all_records_by_the_measure_of_fedmd() -> None:
    """Table 3 of the paper, after parties have revisited their records."""
    last = [
        rounds("fedmd_letters", f"k = n = 2,880, public letters, {payload}, after the revisit")[
            -1
        ]
        for payload in ("softmax", "logits", "argmax")
    ]
    assert max(last) - min(last) < 1


def test_pretrained_parties_gain_from_scores_and_not_from_labels() -> None:
    alone = mean("fedmd_pretrained", "k = 300, softmax", "solo-")
    for payload in ("softmax", "logits"):
        assert mean("fedmd_pretrained", f"k = 300, {payload}") > alone + 4
    assert abs(mean("fedmd_pretrained", "k = 300, argmax") - alone) < 1


@pytest.mark.parametrize("payload", ["argmax", "logits"])
@pytest.mark.parametrize("data", ["digits", "letters"])
def test_evidence_beats_the_mean_where_classes_differ(data: str, payload: str) -> None:
    """And is not below it where they do not."""
    gains = {
        split: mean("fedmd_evidence", f"{data}, {split}, {payload}, evidence")
        - mean("fedmd_evidence", f"{data}, {split}, {payload}, mean")
        for split in ("Dirichlet 0.1", "Dirichlet 0.5", "i.i.d.")
    }
    assert gains["Dirichlet 0.1"] > 20
    assert gains["Dirichlet 0.5"] > 1
    assert gains["i.i.d."] >= 0


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


def test_chains_of_few_records_fall_alike() -> None:
    """With 1,500 records an agent, heterogeneity does not make AKD fall faster."""
    alphas = ("1", "0.5", "0.1", "0.01", "0")
    falls = [fall_of_chain("codistill_mnist", f"AKD, α = {alpha}") for alpha in alphas]

    assert all(1 < fall < 5 for fall in falls)
    assert min(falls[:2]) > falls[2] > falls[3] > falls[4]


def test_chains_of_all_records_fall_faster_with_heterogeneity() -> None:
    """With 30,000 records an agent, a chain of agents that differ loses far more."""
    alike, apart = (
        fall_of_chain("codistill_forgetting", f"AKD, α = {alpha}") for alpha in ("1", "0.01")
    )
    assert alike > 1
    assert apart > 2 * alike


def test_averaged_distillation_is_between_the_two_measures_of_fedavg() -> None:
    """Above agents' own models, which the paper compares, and below the averaged model."""
    for alpha in ("α = 0", "α = 0.01", "α = 0.1"):
        own = mean("codistill_mnist", f"FedAvg, {alpha}, agents' own models")
        averaged = mean("codistill_mnist", f"FedAvg, {alpha}, the averaged model")
        assert own < mean("codistill_mnist", f"AvgKD, {alpha}") < averaged
