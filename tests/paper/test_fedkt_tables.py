"""Figures at full scale: minutes to an hour, so not part of `make test`; see `make paper`."""

import json
import os
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from simulations.__main__ import main
from simulations.config import paper_table

pytestmark = pytest.mark.paper


def repeat(tmp_path: Path, *options: str) -> list[dict[str, Any]]:
    target = tmp_path / "runs.json"
    assert main(["repeat", *options, "--json", str(target)]) == 0
    runs: list[dict[str, Any]] = json.loads(target.read_text())["runs"]
    return runs


@pytest.mark.skipif("FL_STRATEGIES_DATA" not in os.environ, reason="needs FL_STRATEGIES_DATA")
@pytest.mark.parametrize("data", sorted(paper_table("fedkt")))
def test_published_accuracy_is_reached(data: str, tmp_path: Path) -> None:
    """The mean over seeds reaches the floor that goes with the published figure."""
    expected = paper_table("fedkt")[data]["expected"]
    seeds = ",".join(map(str, expected["seeds"]))

    runs = repeat(
        tmp_path, "--data", data, "--preset=paper", f"--seeds={seeds}", "--set=pooled=false"
    )

    assert fmean(run["accuracy"] for run in runs) >= expected["accuracy-at-least"]


def test_four_model_families_beat_their_best_party(tmp_path: Path) -> None:
    """On digits the default federation ends above its best party, on average of five seeds."""
    runs = repeat(tmp_path, "--seeds=0,1,2,3,4", "--set=pooled=false")

    assert fmean(run["accuracy"] for run in runs) > fmean(
        run["best-solo-accuracy"] for run in runs
    )
