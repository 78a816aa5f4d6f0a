"""The record of all strategies covers them, repeats, and finds what changed."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_strategies import REGISTRY
from simulations.experiments.entries import VARIANTS
from tests.kept import benchmark

SUMS, KRUM = "fedhistogram-l2-secret", "flower-own-krum"


@pytest.fixture(scope="module")
def golden() -> Iterator[Any]:
    with benchmark("golden") as module:
        yield module


@pytest.fixture
def cheap(golden: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Leave two cases: a strategy of ours with journals, and a server of Flower's."""
    pytest.importorskip("torch")
    monkeypatch.setattr(golden, "CASES", {name: golden.CASES[name] for name in (SUMS, KRUM)})
    return golden


def changed(golden: Any, **settings: Any) -> dict[str, Any]:
    """Return the cases with other settings of the sums."""
    given = {name.replace("_", "-"): value for name, value in settings.items()}
    case = golden.CASES[SUMS]
    return {**golden.CASES, SUMS: replace(case, settings={**case.settings, **given})}


def test_every_strategy_of_the_registry_has_a_case(golden: Any) -> None:
    assert golden.uncovered(REGISTRY) == []
    assert golden.uncovered([*REGISTRY, "fednew"]) == ["fednew"]


def test_every_strategy_has_parties_that_refuse(golden: Any) -> None:
    refusing = [c for c in golden.CASES.values() if c.policies == golden.POLICIES]

    assert {*REGISTRY} <= {name for case in refusing for name in case.strategies}


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_every_private_variant_has_a_case_with_secret_noise(golden: Any, variant: Any) -> None:
    """With seeded noise alone no epsilon would be finite."""
    secret = [
        name
        for name, case in golden.CASES.items()
        if variant.decided.items() <= case.settings.items()
        and "seeded-noise" not in case.settings
        and not case.stops
    ]

    assert secret


def test_chains_flowers_classes_and_resumed_runs_have_cases(golden: Any) -> None:
    """Two of Flower's own servers ask our parties."""
    cases = golden.CASES.values()

    assert {type(case.server()).__name__ for case in cases if case.server} == {"FedAvg", "Krum"}
    assert any(case.settings.get("then") for case in cases)
    assert any(case.dies_after for case in cases)


def test_two_records_are_equal_to_the_bit(cheap: Any, tmp_path: Path) -> None:
    """Secret noise, journals and Flower's sampling included."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"

    assert cheap.main(["record", str(first)]) == 0
    assert cheap.main(["record", str(second)]) == 0
    assert first.read_bytes() == second.read_bytes()
    assert cheap.main(["compare", str(first)]) == 0

    sums = json.loads(first.read_text(encoding="utf-8"))["cases"][SUMS]
    assert "round 1, train, party 3 -> server" in sums
    assert sums["epsilon.csv"]["line 2"].startswith("'1,0,example,4.99")
    assert "charges" in sums["journal party-0/private-data.example.jsonl"]
    assert "logits" in sums["final model"]


def test_a_changed_setting_is_named_where_it_shows_first(
    cheap: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message and the field come first, what follows from it later; the rest is equal."""
    file = tmp_path / "golden.json"
    cheap.main(["record", str(file)])
    monkeypatch.setattr(cheap, "CASES", changed(cheap, target_epsilon=4.0))
    capsys.readouterr()

    assert cheap.main(["compare", str(file)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        f"{SUMS}: round 1, train, server -> party 0: config/target-epsilon differs: "
        "was 5.0, is 4.0 (and 7 more like it)"
    )
    assert f"{SUMS}: round 1, train, server -> party 0: arrays/centres differs" in lines[1]
    assert not any(line.startswith(KRUM) for line in lines)


def test_a_case_that_raises_is_not_recorded(
    cheap: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cheap, "CASES", changed(cheap, privacy_level="L9"))

    assert cheap.main(["record", str(tmp_path / "golden.json"), "--only", SUMS]) == 1
    assert f"{SUMS}: raised InvalidParameter" in capsys.readouterr().out
    assert not (tmp_path / "golden.json").exists()


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({"a": {"x": "1", "y": "2"}, "b": {}}, []),
        ({"a": {"x": "1", "y": "3"}, "b": {}}, ["case: a: y differs: was 2, is 3"]),
        ({"a": {"x": "1"}, "b": {}}, ["case: a: y differs: was 2, is missing"]),
        ({"a": {"y": "2", "x": "1"}, "b": {}}, ["case: a: y comes where x was"]),
        ({"a": {"x": "1", "y": "2"}}, ["case: b: missing now"]),
        ({"a": {"x": "1", "y": "2"}, "b": {}, "c": {}}, ["case: c: only now"]),
        ({"b": {}, "a": {"x": "1", "y": "2"}}, ["case: b: comes where a was"]),
    ],
)
def test_differences_of_any_kind_are_named(
    golden: Any, now: dict[str, dict[str, str]], expected: list[str]
) -> None:
    before = {"a": {"x": "1", "y": "2"}, "b": {}}

    assert golden.compare({"case": before}, {"case": now}) == expected


def test_bytes_count_where_all_fields_are_the_same(golden: Any) -> None:
    """For example another way to encode a number."""
    before, now = ({"a": {"bytes": size, "x": "1"}} for size in ("8 bytes", "9 bytes"))

    differences = golden.compare({"case": before}, {"case": now})
    assert differences == ["case: a: the same fields in other bytes"]
