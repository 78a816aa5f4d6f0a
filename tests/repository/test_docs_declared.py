"""The table of declared bounds shows its results, which are as promised."""

import json
import re
from pathlib import Path

import pytest

from simulations.data.schema import Schema
from tests.kept import benchmark_file

PAGE = Path(__file__).parents[2] / "docs" / "schemas.md"
DECLARED = benchmark_file("declared")
FOUND = json.loads(DECLARED.RESULTS.read_text("utf-8"))


def test_the_table_shows_its_results() -> None:
    (shown,) = re.findall(
        r"<!-- declared -->\n\n(.*?)\n\n<!-- end declared -->",
        PAGE.read_text("utf-8"),
        re.DOTALL,
    )

    assert shown == DECLARED.markdown(FOUND)


@pytest.mark.parametrize(
    ("name", "epsilon", "least"),
    [
        ("adult", 1.0, 83.5),
        ("adult", 0.3, 82.5),
        ("adult", 0.1, 81.0),
        ("cod_rna", 0.3, 91.0),
    ],
)
def test_declared_bounds_are_enough(name: str, epsilon: float, least: float) -> None:
    assert DECLARED.mean_of(FOUND, name, epsilon) >= least


@pytest.mark.parametrize("name", DECLARED.ROWS)
def test_the_schemas_can_be_read(name: str) -> None:
    schema = Schema.load(DECLARED.SCHEMAS / f"{name}.json")

    assert schema.width == len(schema.bounds[0]) > 7
