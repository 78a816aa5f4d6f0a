"""Federated learning by knowledge transfer, as Flower strategies.

Every entry of `REGISTRY` is one algorithm: the strategy that runs on the server and the
half that runs at the parties. Adding one takes a module, its test and a line here.
"""

from dataclasses import dataclass
from typing import Any

from fl_strategies.base import KnowledgeStrategy
from fl_strategies.fedkt import FedKT, FedKTParty
from fl_strategies.half import PartyHalf
from fl_strategies.knowledge import Knowledge
from fl_strategies.party import Party
from fl_strategies.protocols import (
    EnsembleLearner,
    Learner,
    LearnerFactory,
    PortableLearner,
    SoftLearner,
)

__version__ = "0.1.0"


@dataclass(frozen=True)
class Algorithm:
    """Both halves of one strategy."""

    strategy: type[KnowledgeStrategy[Any]]
    party: PartyHalf


REGISTRY = {
    "fedkt": Algorithm(FedKT, FedKTParty()),
}

__all__ = [
    "Algorithm",
    "EnsembleLearner",
    "FedKT",
    "FedKTParty",
    "Knowledge",
    "KnowledgeStrategy",
    "Learner",
    "LearnerFactory",
    "Party",
    "PartyHalf",
    "PortableLearner",
    "REGISTRY",
    "SoftLearner",
    "__version__",
]
