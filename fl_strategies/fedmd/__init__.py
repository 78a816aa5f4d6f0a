"""FedMD: many rounds of distillation from a consensus on public rows, with its two halves."""

from fl_strategies.fedmd.party import FedMDParty
from fl_strategies.fedmd.strategy import FedMD

__all__ = ["FedMD", "FedMDParty"]
