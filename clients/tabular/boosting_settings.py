"""Shared parts of XGBoost's learners: checked settings, and boosters as plain trees."""

import json
from typing import Any, TypedDict

import numpy as np

from clients.tabular.trees import NativeTree, Trees
from fl_strategies.errors import require


class BoostingOptions(TypedDict, total=False):
    """What a learner of XGBoost may be told; `boosting_settings` has the defaults."""

    num_rounds: int
    max_depth: int
    learning_rate: float
    gamma: float
    reg_lambda: float
    max_bin: int
    num_threads: int


def boosting_settings(
    owner: str,
    *,
    num_rounds: int = 100,
    max_depth: int = 6,
    learning_rate: float = 0.3,
    gamma: float = 0.0,
    reg_lambda: float = 1.0,
    max_bin: int = 64,
    num_threads: int = 1,
) -> tuple[int, dict[str, Any]]:
    """Return the number of rounds, and the other settings of `xgboost.train`."""
    require(num_rounds >= 1, owner, "num_rounds", "at least 1", num_rounds)
    require(max_depth >= 1, owner, "max_depth", "at least 1", max_depth)
    require(0 < learning_rate <= 1, owner, "learning_rate", "in (0, 1]", learning_rate)
    require(gamma >= 0, owner, "gamma", "at least 0", gamma)
    require(reg_lambda >= 0, owner, "reg_lambda", "at least 0", reg_lambda)
    require(max_bin >= 2, owner, "max_bin", "at least 2", max_bin)
    require(num_threads >= 1, owner, "num_threads", "at least 1", num_threads)
    settings = {
        "tree_method": "hist",
        "max_depth": max_depth,
        "learning_rate": learning_rate,
        "gamma": gamma,
        "reg_lambda": reg_lambda,
        "max_bin": max_bin,
        "nthread": num_threads,
    }
    return num_rounds, settings


def trees_of(booster: Any) -> Trees:
    """Return the trees of a booster in its own order: round by round, class by class."""
    model = json.loads(booster.save_raw("json"))
    return Trees.grow(map(_native_tree, model["learner"]["gradient_booster"]["model"]["trees"]))


def _native_tree(tree: dict[str, Any]) -> NativeTree:
    # XGBoost goes left below a threshold; for float32 that is up to the number before.
    # Leaves keep their value in the place of a threshold.
    conditions = np.array(tree["split_conditions"], dtype=np.float32)
    return NativeTree(
        left=np.array(tree["left_children"]),
        right=np.array(tree["right_children"]),
        features=np.array(tree["split_indices"]),
        thresholds=np.nextafter(conditions, np.float32(-np.inf)),
        values=conditions[:, np.newaxis],
    )
