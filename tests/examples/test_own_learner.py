"""Learners of other libraries: with the library itself, or with a stand-in for it."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier

from clients import check_learner
from tests.examples.flower_apps import ROOT

FOLDER = ROOT / "examples" / "own-learner"
MODULES = ("lightgbm_learner", "catboost_learner", "federation")
LEARNERS = {"lightgbm": "LightGBMLearner", "catboost": "CatBoostLearner"}


class FakeBooster:
    """Answers like a booster of LightGBM."""

    def __init__(self, settings: dict[str, Any], data: SimpleNamespace, rounds: int) -> None:
        assert settings["num_class"] == len(np.unique(data.label))
        forest = RandomForestClassifier(rounds // 5, random_state=settings["seed"])
        self.forest = forest.fit(data.x, data.label)

    def predict(self, x: Any) -> Any:
        return self.forest.predict_proba(x)


def fake_lightgbm() -> Any:
    module: Any = ModuleType("lightgbm")
    module.Dataset = lambda x, label, params: SimpleNamespace(x=x, label=label, params=params)
    module.train = FakeBooster
    return module


def fake_catboost() -> Any:
    module: Any = ModuleType("catboost")
    module.CatBoostClassifier = lambda *, iterations, random_seed, **_: RandomForestClassifier(
        iterations // 5, random_state=random_seed
    )
    return module


@pytest.fixture
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the folder's modules import each other, and forget them afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


def learner_class(library: str) -> Any:
    return getattr(importlib.import_module(f"{library}_learner"), LEARNERS[library])


@pytest.mark.usefixtures("_importable")
@pytest.mark.parametrize("library", LEARNERS)
def test_the_learner_keeps_the_contract(library: str) -> None:
    """With the real library."""
    pytest.importorskip(library, reason=f"{library} is not installed: pip install {library}")
    made = learner_class(library)

    check_learner(lambda: made(num_classes=3, num_rounds=10))


@pytest.mark.usefixtures("_importable")
@pytest.mark.parametrize("library", LEARNERS)
def test_our_part_keeps_the_contract(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes, rows, labels and randomness, with a forest in place of the library."""
    fake = {"lightgbm": fake_lightgbm, "catboost": fake_catboost}[library]
    monkeypatch.setitem(sys.modules, library, fake())
    made = learner_class(library)

    check_learner(lambda: made(num_classes=3))


@pytest.mark.usefixtures("_importable")
def test_the_federation_of_three_libraries_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forests stand in for libraries that are not there."""
    for library, fake in (("lightgbm", fake_lightgbm), ("catboost", fake_catboost)):
        try:
            importlib.import_module(library)
        except ImportError:
            monkeypatch.setitem(sys.modules, library, fake())

    assert importlib.import_module("federation").main() > 0.85


@pytest.mark.parametrize("library", LEARNERS)
def test_a_learner_is_short(library: str) -> None:
    """Each fits on a page or two, with its explanations."""
    lines = Path(FOLDER / f"{library}_learner.py").read_text().splitlines()

    assert len(lines) <= 75
