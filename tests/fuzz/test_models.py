"""Untrusted models: `from_arrays` of every learner that can travel."""

import random
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array as FlowerArray
from hypothesis import given
from hypothesis import strategies as st
from sklearn.ensemble import ExtraTreesClassifier, RandomForestClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier

from clients import (
    BoostedTreesLearner,
    DPTorchLearner,
    ForestLearner,
    ForestScores,
    KernelRidgeLearner,
    LightGBMLearner,
    MomentsLearner,
    MultiLabelLearner,
    RandomFeaturesLearner,
    RidgeLearner,
    SklearnLearner,
    TorchLearner,
    XGBoostLearner,
    XGBoostScores,
)
from fl_strategies.aggregation.ensembles import SignedEnsemble
from fl_strategies.errors import StrategyError
from fl_strategies.wire.knowledge import decode_array
from tests.fuzz.mutation import mutate_arrays, mutate_bytes, mutate_numbers
from tests.fuzz.records import any_arrays, as_often_as
from tests.fuzz.trials import Trials
from tests.toys import NUM_CLASSES, blobs

X, Y = blobs(40, "models")
ROWS = X[:5]
Arrays = Mapping[str, np.ndarray]


def sklearn(estimator: Any) -> SklearnLearner:
    return SklearnLearner(estimator, num_classes=NUM_CLASSES)


def network() -> TorchLearner:
    def module() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, NUM_CLASSES)
        )

    return TorchLearner(module, num_classes=NUM_CLASSES, epochs=1)


def private_network() -> DPTorchLearner:
    return DPTorchLearner(
        lambda: torch.nn.Linear(2, NUM_CLASSES),
        num_classes=NUM_CLASSES,
        epochs=1,
        noise_multiplier=1.0,
    )


def ensemble() -> SignedEnsemble:
    fit = RidgeLearner(num_classes=NUM_CLASSES).fit(X, Y, rng=np.random.default_rng(0))
    return SignedEnsemble(
        [fit, fit],
        [1, -1],
        ["ridge", "ridge"],
        num_classes=NUM_CLASSES,
        task="single-label",
        model_fns={"ridge": partial(RidgeLearner, num_classes=NUM_CLASSES)},
    )


def labels_of_trees() -> MultiLabelLearner:
    tree = partial(SklearnLearner, DecisionTreeClassifier(max_depth=2), num_classes=2)
    return MultiLabelLearner(tree, num_classes=NUM_CLASSES)


LEARNERS: Mapping[str, Callable[[], Any]] = {
    "tree": partial(sklearn, DecisionTreeClassifier()),
    "forest": partial(sklearn, RandomForestClassifier(n_estimators=3)),
    "forest-of-bits": partial(ForestLearner, num_classes=NUM_CLASSES, num_trees=3),
    "extra-trees": partial(sklearn, ExtraTreesClassifier(n_estimators=2)),
    "logistic": partial(sklearn, LogisticRegression()),
    "ridge-classifier": partial(sklearn, RidgeClassifier()),
    "naive-bayes": partial(sklearn, GaussianNB()),
    "perceptrons": partial(
        sklearn, MLPClassifier((3,), max_iter=2000, tol=0.1, n_iter_no_change=2)
    ),
    "pipeline": partial(sklearn, make_pipeline(StandardScaler(), LogisticRegression())),
    "boosted-trees": partial(
        BoostedTreesLearner, num_classes=NUM_CLASSES, num_rounds=2, max_depth=2
    ),
    "lightgbm": partial(LightGBMLearner, num_classes=NUM_CLASSES, num_rounds=2, max_depth=2),
    "xgboost": partial(XGBoostLearner, num_classes=NUM_CLASSES, num_rounds=2, max_depth=2),
    "xgboost-scores": partial(
        XGBoostScores, num_classes=NUM_CLASSES, num_rounds=2, max_depth=2
    ),
    "forest-scores": partial(
        ForestScores, RandomForestRegressor(n_estimators=2), num_classes=NUM_CLASSES
    ),
    "ridge": partial(RidgeLearner, num_classes=NUM_CLASSES),
    "moments": partial(MomentsLearner, num_classes=NUM_CLASSES, num_cosines=6),
    "random-features": partial(RandomFeaturesLearner, num_classes=NUM_CLASSES, num_features=5),
    "kernel": partial(KernelRidgeLearner, num_classes=NUM_CLASSES, reveal_rows=True),
    "kernel-polynomial": partial(
        KernelRidgeLearner, num_classes=NUM_CLASSES, reveal_rows=True, kernel="polynomial"
    ),
    "network": network,
    "private-network": private_network,
    "ensemble": ensemble,
    "labels": labels_of_trees,
}


@cache
def arrays_of(name: str) -> dict[str, np.ndarray]:
    """Return a fitted model as it travels."""
    learner = LEARNERS[name]()
    if name != "ensemble":
        y = np.eye(NUM_CLASSES, dtype=int)[Y] if name == "labels" else Y
        learner = learner.fit(X, y, rng=np.random.default_rng(0))
    return dict(learner.to_arrays())


def use(name: str, arrays: Arrays) -> np.ndarray:
    """Rebuild a model and let it predict, as every receiver does."""
    model = LEARNERS[name]().from_arrays(arrays)
    model.predict(ROWS)
    logits: np.ndarray = model.logits(ROWS)
    return logits


def damaged(rng: random.Random, arrays: Arrays) -> dict[str, Any]:
    """Return arrays of which one or two were changed, as numbers, or as bytes on the wire."""
    changed: dict[str, Any] = dict(arrays)
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(sorted(changed)) if changed else "none"
        array = changed.get(name)
        raw = array is not None and array.dtype == np.uint8 and rng.random() < 0.5
        if raw:
            data = mutate_bytes(rng, array.tobytes())
            changed[name] = np.frombuffer(data, dtype=np.uint8)
        elif array is not None and rng.random() < 0.85:
            changed[name] = mutate_numbers(rng, array)
        else:
            wire = mutate_arrays(rng, {n: FlowerArray(a) for n, a in changed.items()})
            changed = {n: decode_array(n, a) for n, a in wire.items()}
    return changed


@pytest.mark.share(0.005)
@pytest.mark.parametrize("name", sorted(LEARNERS))
def test_damaged_models(name: str, trials: Trials) -> None:
    """A model that was changed predicts the right shape, or is refused."""
    valid = arrays_of(name)
    assert use(name, valid).shape == (len(ROWS), NUM_CLASSES)
    for rng in trials.numbers():
        try:
            arrays = damaged(rng, valid)
        except StrategyError:
            trials.count(refused=True)
            continue
        logits = trials.attempt(use, name, arrays)
        assert logits is None or logits.shape == (len(ROWS), NUM_CLASSES)
    trials.require_both()


@pytest.mark.share(0.0005)
@pytest.mark.parametrize("name", sorted(LEARNERS))
def test_wrong_models(name: str, trials: Trials) -> None:
    """Arrays of any type and shape in place of one that a model has, objects included."""
    valid = arrays_of(name)

    @as_often_as(trials)
    @given(st.sampled_from(sorted(valid)) | st.text(max_size=5), any_arrays())
    def attempt(place: str, array: np.ndarray) -> None:
        trials.attempt(use, name, {**valid, place: array})

    attempt()
    assert trials.refused
