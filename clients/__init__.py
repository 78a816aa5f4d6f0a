"""Wrappers that turn models of any family into learners, and the Flower client side.

Names are loaded when they are first used, so that a party needs only the libraries of
its own model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clients.app import client_app
    from clients.checks import check_learner
    from clients.opacus_learner import DPTorchLearner
    from clients.sklearn_learner import SklearnLearner
    from clients.torch_learner import TorchLearner
    from clients.xgboost_learner import XGBoostLearner

__all__ = [
    "DPTorchLearner",
    "SklearnLearner",
    "TorchLearner",
    "XGBoostLearner",
    "check_learner",
    "client_app",
]

_MODULES = {
    "DPTorchLearner": "clients.opacus_learner",
    "SklearnLearner": "clients.sklearn_learner",
    "TorchLearner": "clients.torch_learner",
    "XGBoostLearner": "clients.xgboost_learner",
    "check_learner": "clients.checks",
    "client_app": "clients.app",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'clients' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
