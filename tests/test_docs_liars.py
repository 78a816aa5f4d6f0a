"""The tables of liars in docs/results show their results, which are as promised."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"<!-- liars ([^>]+) -->\n\n(.*?)\n\n<!-- end liars -->", re.DOTALL)
BLOCKS = BLOCK.findall((ROOT / "docs/results/robustness.md").read_text("utf-8"))


def benchmark() -> ModuleType:
    """Return the benchmark as a module."""
    spec = importlib.util.spec_from_file_location("liars", ROOT / "benchmarks" / "liars.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LIARS = benchmark()
MOST_LOST, MOST_SUCCESS = 3.0, 25.0
FOUND = json.loads(LIARS.RESULTS.read_text(encoding="utf-8"))


def test_all_deals_are_shown() -> None:
    """Alike and unlike parties, three data sets."""
    assert [deal for deal, _ in BLOCKS] == [*LIARS.DEALS]


@pytest.mark.parametrize(("deal", "text"), BLOCKS, ids=[deal for deal, _ in BLOCKS])
def test_the_table_of_liars_shows_its_results(deal: str, text: str) -> None:
    """It is exactly what the result file gives."""
    assert text == LIARS.markdown(FOUND, deal)


ALIKE = [deal for deal in LIARS.DEALS if deal.endswith("iid")]


@pytest.mark.parametrize("deal", ALIKE)
@pytest.mark.parametrize("row", [row for row in LIARS.ROWS if "nobody excluded" not in row])
def test_one_liar_of_ten_alike_parties_decides_nothing_by_default(row: str, deal: str) -> None:
    """At most 3 points are lost, and a quarter of the rows that the liar is after."""
    if row not in LIARS.rows_of(deal):
        return
    for attack in LIARS.attacks_on(str(LIARS.ROWS[row]["strategy"])):
        lost, success = LIARS.differences(FOUND, row, deal, attack, 1, LIARS.SEEDS)
        assert lost <= MOST_LOST, (attack, lost)
        assert success <= MOST_SUCCESS, (attack, success)


@pytest.mark.parametrize("deal", [deal for deal in LIARS.DEALS if deal not in ALIKE])
def test_one_liar_of_ten_unlike_parties_moves_fedkd_a_little(deal: str) -> None:
    """The same where classes differ."""
    for attack in LIARS.attacks_on("fedkd"):
        lost, success = LIARS.differences(FOUND, "FedKD", deal, attack, 1, LIARS.SEEDS)
        assert lost <= MOST_LOST, (attack, lost)
        assert success <= MOST_SUCCESS, (attack, success)
