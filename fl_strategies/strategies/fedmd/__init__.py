"""FedMD: many rounds of distillation from a consensus on public rows; both sides of it."""

from fl_strategies.strategies.fedmd.options import (
    CronusOptions,
    FedMDOptions,
    LocalNoise,
    SampleOnce,
    Unprotected,
)
from fl_strategies.strategies.fedmd.party import FedMDParty
from fl_strategies.strategies.fedmd.server import Cronus, FedMD

__all__ = [
    "Cronus",
    "CronusOptions",
    "FedMD",
    "FedMDOptions",
    "FedMDParty",
    "LocalNoise",
    "SampleOnce",
    "Unprotected",
]
