"""The settings that all learners of XGBoost share, checked once."""

from typing import Any

from fl_strategies.exceptions import require


def boosting_settings(
    owner: str,
    *,
    num_rounds: int,
    max_depth: int,
    learning_rate: float,
    gamma: float,
    reg_lambda: float,
    max_bin: int,
    num_threads: int,
) -> dict[str, Any]:
    """Return the settings of `xgboost.train`, which takes the rounds beside them."""
    require(num_rounds >= 1, owner, "num_rounds", "at least 1", num_rounds)
    require(max_depth >= 1, owner, "max_depth", "at least 1", max_depth)
    require(0 < learning_rate <= 1, owner, "learning_rate", "in (0, 1]", learning_rate)
    require(gamma >= 0, owner, "gamma", "at least 0", gamma)
    require(reg_lambda >= 0, owner, "reg_lambda", "at least 0", reg_lambda)
    require(max_bin >= 2, owner, "max_bin", "at least 2", max_bin)
    require(num_threads >= 1, owner, "num_threads", "at least 1", num_threads)
    return {
        "tree_method": "hist",
        "max_depth": max_depth,
        "learning_rate": learning_rate,
        "gamma": gamma,
        "reg_lambda": reg_lambda,
        "max_bin": max_bin,
        "nthread": num_threads,
    }
