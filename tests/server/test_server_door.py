"""What comes in at a server's door: public rows and factories, checked like a party's."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from xgboost import XGBClassifier

from fl_strategies import REGISTRY, KnowledgeStrategy
from fl_strategies.errors import InvalidData, InvalidParameter
from fl_strategies.wire import keys
from tests.toys import PUBLIC, CentroidLearner, common_options

NAMES = ["fedkt", "fedkd", "fedmd", "avgkd", "ekd", "fens"]
OTHERS = dict.fromkeys(("avgkd", "ekd", "fens"), "model_fns") | {"fedkt": "student_fns"}
RULE = "a function without arguments that makes a new learner"
CONVERSIONS: dict[str, Callable[[np.ndarray], Any]] = {
    "lists": lambda array: array.tolist(),
    "pandas": pd.DataFrame,
    "torch": torch.tensor,
}


def build(name: str, **changes: Any) -> KnowledgeStrategy[Any]:
    return REGISTRY[name].strategy(**{**common_options(), **changes})


@pytest.mark.parametrize("kind", CONVERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_lists_frames_and_tensors_are_public_rows(name: str, kind: str) -> None:
    """They are the very rows that parties hold as arrays."""
    strategy = build(name, public=CONVERSIONS[kind](PUBLIC))

    expected = build(name).party_config()[keys.PUBLIC_HASH]
    assert strategy.party_config()[keys.PUBLIC_HASH] == expected


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_are_no_numbers_are_a_sentence(name: str) -> None:
    """The same as at a party."""
    with pytest.raises(InvalidData, match="public must be an array, or a list, frame or"):
        build(name, public=[[1.0, 2.0], [3.0]])
    with pytest.raises(InvalidData, match="public must be an array of numbers"):
        build(name, public=pd.DataFrame({"a": ["1", "2"], "b": ["3", "4"]}))


@pytest.mark.parametrize(
    ("given", "got", "write"),
    [
        (
            RandomForestClassifier,
            "the class RandomForestClassifier",
            "SklearnLearner(RandomForestClassifier(...), num_classes=3)",
        ),
        (
            CentroidLearner(),
            "an object of the class CentroidLearner",
            "CentroidLearner(...)",
        ),
        (
            lambda: RandomForestClassifier(),
            "one that makes objects of the class RandomForestClassifier",
            "SklearnLearner(RandomForestClassifier(...), num_classes=3)",
        ),
        (
            lambda: XGBClassifier(),
            "one that makes objects of the class XGBClassifier",
            "XGBoostLearner(num_classes=3)",
        ),
        (
            lambda: torch.nn.Linear(2, 3),
            "one that makes objects of the class Linear",
            "TorchLearner(lambda: Linear(...), num_classes=3)",
        ),
        (lambda: None, "one that makes objects of the class NoneType", None),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_what_makes_no_learner_is_a_sentence(
    name: str, given: Any, got: str, write: str | None
) -> None:
    """It says what to write, before anybody is asked anything."""
    hint = "" if write is None else f" Write: lambda: {write}"
    places: dict[str, dict[str, Any]] = {"learner_fn": {"learner_fn": given}}
    if other := OTHERS.get(name):
        places[f"{other}['other']"] = {other: {"other": given}}
    for place, change in places.items():
        sentence = re.escape(f": {place} must be {RULE}, got {got}.{hint}")
        with pytest.raises(InvalidParameter, match=rf"^\w+{sentence}$"):
            build(name, **change)
