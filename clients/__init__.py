"""Wrappers that turn models of any family into learners, and the Flower client side.

Names are loaded when they are first used, so that a party needs only the libraries of
its own model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clients.app import client_app
    from clients.boosted_trees_learner import BoostedTreesLearner
    from clients.checks import check_learner
    from clients.dealt_data import party_loader
    from clients.forest_learner import ForestLearner
    from clients.forest_scores import ForestScores
    from clients.kernel_learner import KernelRidgeLearner, RidgeLearner
    from clients.multilabel import MultiLabelLearner
    from clients.opacus_learner import DPTorchLearner
    from clients.random_features import RandomFeaturesLearner
    from clients.saved_model import ModelCard, load_model, save_model
    from clients.sklearn_learner import SklearnLearner
    from clients.soft_trees import XGBoostScores
    from clients.torch_augment import crop_and_flip
    from clients.torch_learner import TorchLearner
    from clients.xgboost_learner import XGBoostLearner

__all__ = [
    "BoostedTreesLearner",
    "DPTorchLearner",
    "ForestLearner",
    "ForestScores",
    "KernelRidgeLearner",
    "ModelCard",
    "MultiLabelLearner",
    "RandomFeaturesLearner",
    "RidgeLearner",
    "SklearnLearner",
    "TorchLearner",
    "XGBoostLearner",
    "XGBoostScores",
    "check_learner",
    "client_app",
    "crop_and_flip",
    "load_model",
    "party_loader",
    "save_model",
]

_MODULES = {
    "BoostedTreesLearner": "clients.boosted_trees_learner",
    "DPTorchLearner": "clients.opacus_learner",
    "ForestLearner": "clients.forest_learner",
    "ForestScores": "clients.forest_scores",
    "KernelRidgeLearner": "clients.kernel_learner",
    "ModelCard": "clients.saved_model",
    "MultiLabelLearner": "clients.multilabel",
    "RandomFeaturesLearner": "clients.random_features",
    "RidgeLearner": "clients.kernel_learner",
    "SklearnLearner": "clients.sklearn_learner",
    "TorchLearner": "clients.torch_learner",
    "XGBoostLearner": "clients.xgboost_learner",
    "XGBoostScores": "clients.soft_trees",
    "check_learner": "clients.checks",
    "client_app": "clients.app",
    "crop_and_flip": "clients.torch_augment",
    "load_model": "clients.saved_model",
    "party_loader": "clients.dealt_data",
    "save_model": "clients.saved_model",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'clients' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
