"""Federated learning by knowledge transfer, as Flower strategies.

Every entry of `REGISTRY` is one algorithm: the strategy that runs on the server and the
role that runs at the parties. Adding one takes a module, its test and a line here.
"""

from dataclasses import dataclass
from typing import Any

from fl_strategies.core.party import Party
from fl_strategies.core.party_state import PartyState
from fl_strategies.core.protocols import (
    EnsembleLearner,
    GuidedLearner,
    IncrementalLearner,
    Learner,
    LearnerFactory,
    Objective,
    PortableLearner,
    Recipe,
    SoftLearner,
)
from fl_strategies.core.role import PartyRole
from fl_strategies.core.strategy import KnowledgeStrategy
from fl_strategies.privacy.scores import ScorePrivacy
from fl_strategies.privacy.votes import VotePrivacy
from fl_strategies.strategies.codistill import (
    AKD,
    EKD,
    PKD,
    AvgKD,
    CodistillOptions,
    CodistillParty,
)
from fl_strategies.strategies.fedavg import FedAvg, FedAvgOptions, FedAvgParty
from fl_strategies.strategies.fedkd import FedKD, FedKDOptions, FedKDParty
from fl_strategies.strategies.fedkt import FedKT, FedKTOptions, FedKTParty
from fl_strategies.strategies.fedmd import (
    FedMD,
    FedMDOptions,
    FedMDParty,
    LocalNoise,
    SampleOnce,
    Unprotected,
)
from fl_strategies.wire.knowledge import Knowledge

__version__ = "0.1.0"


@dataclass(frozen=True)
class Algorithm:
    """Both sides of one strategy."""

    strategy: type[KnowledgeStrategy[Any]]
    party: PartyRole


REGISTRY = {
    "akd": Algorithm(AKD, CodistillParty()),
    "avgkd": Algorithm(AvgKD, CodistillParty()),
    "ekd": Algorithm(EKD, CodistillParty()),
    "fedavg": Algorithm(FedAvg, FedAvgParty()),
    "fedkd": Algorithm(FedKD, FedKDParty()),
    "fedkt": Algorithm(FedKT, FedKTParty()),
    "fedmd": Algorithm(FedMD, FedMDParty()),
    "pkd": Algorithm(PKD, CodistillParty()),
}

__all__ = [
    "AKD",
    "Algorithm",
    "AvgKD",
    "CodistillOptions",
    "CodistillParty",
    "EKD",
    "EnsembleLearner",
    "FedAvg",
    "FedAvgOptions",
    "FedAvgParty",
    "FedKD",
    "FedKDOptions",
    "FedKDParty",
    "FedKT",
    "FedKTOptions",
    "FedKTParty",
    "FedMD",
    "FedMDOptions",
    "FedMDParty",
    "GuidedLearner",
    "IncrementalLearner",
    "Knowledge",
    "KnowledgeStrategy",
    "Learner",
    "LearnerFactory",
    "LocalNoise",
    "Objective",
    "PKD",
    "Party",
    "PartyRole",
    "PartyState",
    "PortableLearner",
    "REGISTRY",
    "Recipe",
    "SampleOnce",
    "ScorePrivacy",
    "SoftLearner",
    "Unprotected",
    "VotePrivacy",
    "__version__",
]
