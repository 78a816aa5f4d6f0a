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
FOUND = json.loads(LIARS.RESULTS.read_text(encoding="utf-8"))


def test_both_deals_are_shown() -> None:
    """Alike and unlike parties."""
    assert [deal for deal, _ in BLOCKS] == [*LIARS.DEALS]


@pytest.mark.parametrize(("deal", "text"), BLOCKS, ids=[deal for deal, _ in BLOCKS])
def test_the_table_of_liars_shows_its_results(deal: str, text: str) -> None:
    """It is exactly what the result file gives."""
    assert text == LIARS.markdown(FOUND, deal)


@pytest.mark.parametrize("row", [row for row in LIARS.ROWS if "nobody excluded" not in row])
def test_one_liar_of_ten_alike_parties_decides_nothing_by_default(row: str) -> None:
    """At most 5 points are lost, and 10 % of the rows of other classes are taken for t."""
    for attack in LIARS.attacks_on(str(LIARS.ROWS[row]["strategy"])):
        lost, success = LIARS.differences(FOUND, row, "iid", attack, 1, LIARS.SEEDS)
        assert lost <= 5, (attack, lost)
        assert success <= 10, (attack, success)
