"""AKD, AvgKD, PKD and EKD: agents that learn from each other's models; both sides of them."""

from fl_strategies.aggregation.ensembles import MeanEnsemble, SignedEnsemble
from fl_strategies.strategies.codistill.options import CodistillOptions
from fl_strategies.strategies.codistill.party import CodistillParty
from fl_strategies.strategies.codistill.server import Codistillation
from fl_strategies.strategies.codistill.strategies import AKD, EKD, PKD, AvgKD

__all__ = [
    "AKD",
    "AvgKD",
    "CodistillOptions",
    "CodistillParty",
    "Codistillation",
    "EKD",
    "MeanEnsemble",
    "PKD",
    "SignedEnsemble",
]
