"""Federated learning by knowledge transfer, as Flower strategies.

Every entry of `REGISTRY` is one algorithm: the strategy that runs on the server and the
role that runs at the parties. Adding one takes a module, its test and a line here.
"""

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from flwr.serverapp import strategy

from fl_strategies.errors import InvalidParameter
from fl_strategies.learners import (
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
from fl_strategies.party.party import Party
from fl_strategies.party.role import PartyRole
from fl_strategies.party.state import PartyState
from fl_strategies.privacy.noise import ScorePrivacy
from fl_strategies.privacy.votes import VotePrivacy
from fl_strategies.server.ledgers import write_epsilon_csv
from fl_strategies.server.strategy import KnowledgeStrategy
from fl_strategies.strategies.chain import Chain, chain
from fl_strategies.strategies.codistill import (
    AKD,
    EKD,
    PKD,
    AvgKD,
    CodistillOptions,
    CodistillParty,
)
from fl_strategies.strategies.feddf import FedDF, FedDFOptions, FedDFParty
from fl_strategies.strategies.fedgen import FedGen, FedGenOptions, FedGenParty
from fl_strategies.strategies.fedkd import FedKD, FedKDOptions, FedKDParty
from fl_strategies.strategies.fedkt import FedKT, FedKTOptions, FedKTParty
from fl_strategies.strategies.fedmd import (
    Cronus,
    CronusOptions,
    FedMD,
    FedMDOptions,
    FedMDParty,
    LocalNoise,
    SampleOnce,
    Unprotected,
)
from fl_strategies.strategies.fens import FENS, FENSOptions, FENSParty
from fl_strategies.strategies.pfnm import PFNM, PFNMOptions, PFNMParty
from fl_strategies.strategies.scaffold import Scaffold, ScaffoldOptions, ScaffoldParty
from fl_strategies.strategies.sums import (
    HISTOGRAM_PARTY,
    REGRESSION_PARTY,
    FedHistogram,
    FedHistogramOptions,
    FedRegression,
    FedRegressionOptions,
    SumOptions,
    SumParty,
    SumPrivacy,
)
from fl_strategies.strategies.weights import (
    FedAvg,
    FedAvgOptions,
    FlowerStrategy,
    WeightsOptions,
    WeightsParty,
    flower_strategy,
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
    "cronus": Algorithm(Cronus, FedMDParty()),
    "ekd": Algorithm(EKD, CodistillParty()),
    "fedhistogram": Algorithm(FedHistogram, HISTOGRAM_PARTY),
    "fedavg": Algorithm(FedAvg, WeightsParty()),
    "feddf": Algorithm(FedDF, FedDFParty()),
    "fedgen": Algorithm(FedGen, FedGenParty()),
    "fedkd": Algorithm(FedKD, FedKDParty()),
    "fedkt": Algorithm(FedKT, FedKTParty()),
    "fedmd": Algorithm(FedMD, FedMDParty()),
    "fedregression": Algorithm(FedRegression, REGRESSION_PARTY),
    "fens": Algorithm(FENS, FENSParty()),
    "pfnm": Algorithm(PFNM, PFNMParty()),
    "pkd": Algorithm(PKD, CodistillParty()),
    "scaffold": Algorithm(Scaffold, ScaffoldParty()),
}

FLOWER_STRATEGIES = {
    kind.name: Algorithm(kind, WeightsParty())
    for kind in map(
        flower_strategy,
        (
            strategy.FedAvg,
            strategy.FedProx,
            strategy.FedAvgM,
            strategy.FedAdagrad,
            strategy.FedAdam,
            strategy.FedYogi,
            strategy.FedMedian,
            strategy.FedTrimmedAvg,
            strategy.Krum,
        ),
    )
}
"""Flower's own strategies, ``flower:FedAvg`` and so on; see `FlowerStrategy`."""


def find_algorithm(name: str) -> Algorithm:
    """Return a strategy by its name, ours or Flower's; raise `InvalidParameter` for others."""
    known = {**REGISTRY, **FLOWER_STRATEGIES}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise InvalidParameter(
            f"Settings: strategy must be one of {', '.join(known)}, got {name!r}.{hint}"
        )
    return known[name]


__all__ = [
    "AKD",
    "Algorithm",
    "AvgKD",
    "Chain",
    "CodistillOptions",
    "CodistillParty",
    "Cronus",
    "CronusOptions",
    "EKD",
    "EnsembleLearner",
    "FENS",
    "FENSOptions",
    "FENSParty",
    "FLOWER_STRATEGIES",
    "FedAvg",
    "FedAvgOptions",
    "FedDF",
    "FedDFOptions",
    "FedDFParty",
    "FedGen",
    "FedGenOptions",
    "FedGenParty",
    "FedHistogram",
    "FedHistogramOptions",
    "FedKD",
    "FedKDOptions",
    "FedKDParty",
    "FedKT",
    "FedKTOptions",
    "FedKTParty",
    "FedMD",
    "FedMDOptions",
    "FedMDParty",
    "FedRegression",
    "FedRegressionOptions",
    "FlowerStrategy",
    "GuidedLearner",
    "IncrementalLearner",
    "Knowledge",
    "KnowledgeStrategy",
    "Learner",
    "LearnerFactory",
    "LocalNoise",
    "Objective",
    "PFNM",
    "PFNMOptions",
    "PFNMParty",
    "PKD",
    "Party",
    "PartyRole",
    "PartyState",
    "PortableLearner",
    "REGISTRY",
    "Recipe",
    "SampleOnce",
    "Scaffold",
    "ScaffoldOptions",
    "ScaffoldParty",
    "ScorePrivacy",
    "SoftLearner",
    "SumOptions",
    "SumParty",
    "SumPrivacy",
    "Unprotected",
    "VotePrivacy",
    "WeightsOptions",
    "WeightsParty",
    "__version__",
    "chain",
    "find_algorithm",
    "flower_strategy",
    "write_epsilon_csv",
]


if not TYPE_CHECKING:  # a checker would take any name for one of these

    def __getattr__(name: str) -> NoReturn:
        """Say what replaces the trackers, which were classes of this package once."""
        if name in ("MLflowTracker", "TensorBoardTracker", "Tracker", "WandbTracker"):
            raise ImportError(
                f"fl_strategies: {name} must be a function of your own, given as on_round; "
                "docs/tracking.md has it in ten lines for TensorBoard, MLflow and W&B."
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
