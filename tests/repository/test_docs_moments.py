"""The table of docs/fedmoments.md shows its results, which are as promised."""

import json
from pathlib import Path

from tests.kept import benchmark_file

MOMENTS = benchmark_file("moments")
FOUND = json.loads(MOMENTS.RESULTS.read_text("utf-8"))
PAGE = Path(__file__).parents[2] / "docs" / "fedmoments.md"


def test_the_page_shows_the_results() -> None:
    block = f"<!-- moments -->\n\n{MOMENTS.summary(FOUND)}\n\n<!-- end moments -->"

    assert block in PAGE.read_text("utf-8")


def test_the_results_are_as_promised() -> None:
    """The same bits however records are divided; near pooled data, above the best party."""
    assert MOMENTS.divided(FOUND) == 0
    lines = MOMENTS.summary(FOUND).splitlines()[2:]
    for line in lines:
        federation, _, mean, best, pooled = (float(v) for v in line.split(" | ")[1:6])
        assert federation >= pooled - 1.5
        assert federation > mean
        assert federation > best or "iid" in line
