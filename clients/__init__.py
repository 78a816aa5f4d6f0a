"""Wrappers that turn models of any family into learners, and the Flower client side.

Names are loaded when they are first used, so that a party needs only the libraries of
its own model.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clients.app import client_app, party_loader
    from clients.checks import check_learner
    from clients.encoders.encoder import Encoder
    from clients.encoders.named import find_encoder
    from clients.networks.images import crop_and_flip
    from clients.networks.learner import TorchLearner
    from clients.networks.private import DPTorchLearner
    from clients.saved_model import ModelCard, load_model, save_model
    from clients.tabular.boosted_trees import BoostedTreesLearner
    from clients.tabular.forest import ForestLearner
    from clients.tabular.kernel import KernelRidgeLearner, RandomFeaturesLearner, RidgeLearner
    from clients.tabular.lightgbm import LightGBMLearner
    from clients.tabular.moments import MomentsLearner
    from clients.tabular.multilabel import MultiLabelLearner
    from clients.tabular.sklearn import ForestScores, SklearnLearner
    from clients.tabular.xgboost import XGBoostLearner, XGBoostScores

__all__ = [
    "BoostedTreesLearner",
    "DPTorchLearner",
    "Encoder",
    "ForestLearner",
    "ForestScores",
    "KernelRidgeLearner",
    "LightGBMLearner",
    "ModelCard",
    "MomentsLearner",
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
    "find_encoder",
    "load_model",
    "party_loader",
    "save_model",
]

_MODULES = {
    "BoostedTreesLearner": "clients.tabular.boosted_trees",
    "DPTorchLearner": "clients.networks.private",
    "Encoder": "clients.encoders.encoder",
    "ForestLearner": "clients.tabular.forest",
    "ForestScores": "clients.tabular.sklearn",
    "KernelRidgeLearner": "clients.tabular.kernel",
    "LightGBMLearner": "clients.tabular.lightgbm",
    "ModelCard": "clients.saved_model",
    "MomentsLearner": "clients.tabular.moments",
    "MultiLabelLearner": "clients.tabular.multilabel",
    "RandomFeaturesLearner": "clients.tabular.kernel",
    "RidgeLearner": "clients.tabular.kernel",
    "SklearnLearner": "clients.tabular.sklearn",
    "TorchLearner": "clients.networks.learner",
    "XGBoostLearner": "clients.tabular.xgboost",
    "XGBoostScores": "clients.tabular.xgboost",
    "check_learner": "clients.checks",
    "client_app": "clients.app",
    "crop_and_flip": "clients.networks.images",
    "find_encoder": "clients.encoders.named",
    "load_model": "clients.saved_model",
    "party_loader": "clients.app",
    "save_model": "clients.saved_model",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'clients' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
