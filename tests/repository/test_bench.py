"""The benchmarks run, and their page says what their file says."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kept import benchmark

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def suite() -> Iterator[Any]:
    with benchmark("suite") as module:
        yield module


def test_a_quick_run_writes_results_page_and_picture(suite: Any, tmp_path: Path) -> None:
    """With a claim for every kind of party."""
    pytest.importorskip("matplotlib")
    suite.main(["--quick", "--docs", str(tmp_path)])
    found = json.loads((tmp_path / "results" / "bench.json").read_text(encoding="utf-8"))

    claims = found["parties"]["claims"]
    trees = [f"xgboost party ({name})" for name in ("boosted-trees", "xgboost", "lightgbm")]
    assert [c["claim"] for c in claims] == ["mlp party", "cnn party", *trees, "forest party"]
    for one in claims:
        assert one["plain-cpu-seconds"] > 0
        assert one["share-of-limit"] > 0
    assert set(found["growth"]) == {"parties", "public-rows", "rounds", "records", "classes"}
    assert "mlp party" in (tmp_path / "performance.md").read_text(encoding="utf-8")
    assert (tmp_path / "bench_growth.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("suite")
def test_whole_runs_count_the_processes_they_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And those without data are left out."""
    end_to_end = importlib.import_module("benchmarks.end_to_end")
    (tmp_path / "there.npz").touch()
    run = "digits", "decision-tree", {**end_to_end.PAPER, "num-parties": 3}
    runs = {name: (f"{name}.npz", *run) for name in ("there", "missing")}
    monkeypatch.setattr(end_to_end, "RUNS", runs)
    monkeypatch.setenv("FL_STRATEGIES_DATA", str(tmp_path))
    monkeypatch.chdir(ROOT)
    found = end_to_end.measure(repeats=1)

    assert list(found) == ["there"]
    assert found["there"]["cpu-seconds"] > 0.5
    assert found["there"]["accuracy"] > 0.2


@pytest.mark.parametrize("name", ["mlp", "cnn", "xgboost", "forest"])
def test_both_sides_answer_for_the_same_rows(suite: Any, name: str) -> None:
    """As many students, in the classes that there are."""
    for work in suite.parties.make_all(name, 0.05):
        plain, ours = suite.parties.plain.answers(work), suite.parties.answers(work)

        assert plain.shape == ours.shape == (2, len(work.public))
        assert set(np.unique(plain)) | set(np.unique(ours)) <= set(range(work.num_classes))


def test_the_page_holds_what_was_measured(suite: Any) -> None:
    """`make bench` writes both."""
    found = json.loads((ROOT / "docs" / "results" / "bench.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")

    assert suite.markdown(found) in page


def test_peak_memory_is_the_child_s_own(suite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the process that starts it, however large."""
    held = np.ones(40_000_000)  # 320 MB, all touched
    told = "from benchmarks.machine import peak_so_far; print(peak_so_far())"
    machine = sys.modules["benchmarks.machine"]
    run = machine.subprocess.run
    monkeypatch.setattr(
        machine.subprocess, "run", lambda _, **given: run([sys.executable, "-c", told], **given)
    )
    monkeypatch.chdir(ROOT)

    own = machine.peak_so_far()
    assert machine.peak_megabytes("any") < own - 200
    assert held.nbytes == 320_000_000
    assert suite.parties.peak_megabytes is machine.peak_megabytes
