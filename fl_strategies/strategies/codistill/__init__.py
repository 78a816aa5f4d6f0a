"""AKD, AvgKD, PKD and EKD: agents with models of their own teach each other.

Afonin, Karimireddy: Towards Model-Agnostic Federated Learning Using Knowledge
Distillation (ICLR 2022), sections 4 and 5, appendices E to G.

    round 1   every agent trains on its own labels
    round t   an agent predicts its own inputs with models of the round before and trains
              a new model, from scratch, on
                AKD, EKD   the predictions of the agent before it
                AvgKD      the mean of its labels and the predictions of all others
                PKD        the mean of all predictions, its own model's included

Flower counts rounds from 1, the paper from 0.
"""

from fl_strategies.aggregation.ensembles import MeanEnsemble, SignedEnsemble
from fl_strategies.strategies.codistill.options import CodistillOptions
from fl_strategies.strategies.codistill.party import CodistillParty
from fl_strategies.strategies.codistill.server import AKD, EKD, PKD, AvgKD, Codistillation

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
