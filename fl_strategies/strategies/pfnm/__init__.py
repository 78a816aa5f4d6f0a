"""PFNM: perceptrons of one round whose neurons are matched.

    party    trains a network from weights of its own, sends it and its class counts
    server   finds units that the parties' neurons are likely copies of, layer by layer

The arithmetic is in `matching`.
"""

from fl_strategies.strategies.pfnm.party import PFNMParty
from fl_strategies.strategies.pfnm.server import PFNM, PFNMOptions

__all__ = ["PFNM", "PFNMOptions", "PFNMParty"]
