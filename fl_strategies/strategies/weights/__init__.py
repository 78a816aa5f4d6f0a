"""Averages of weights: FedAvg, and every strategy of Flower's own that parties can answer.

    round r   server   sends the present model; in round 1 the first weights
              party    trains it on its own records and sends it
              server   excludes what is not as asked; Flower's class makes the next model

The arithmetic is Flower's. Here is what it lacks: see `FlowerStrategy`.
"""

from fl_strategies.strategies.weights.options import FedAvgOptions, WeightsOptions
from fl_strategies.strategies.weights.party import FLOWER, WeightsParty
from fl_strategies.strategies.weights.server import FedAvg, FlowerStrategy, flower_strategy

__all__ = [
    "FLOWER",
    "FedAvg",
    "FedAvgOptions",
    "FlowerStrategy",
    "WeightsOptions",
    "WeightsParty",
    "flower_strategy",
]
