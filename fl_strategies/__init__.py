"""Federated learning by knowledge transfer, as Flower strategies.

Every entry of `REGISTRY` is one algorithm: the strategy that runs on the server and the
role that runs at the parties. Adding one takes a module, its test and a line in
`fl_strategies.registry`.
"""

from typing import TYPE_CHECKING, NoReturn

from fl_strategies.aggregation.statistics import Column, Statistics
from fl_strategies.learners import (
    Correction,
    EnsembleLearner,
    FeatureLearner,
    Generated,
    GuidedLearner,
    IncrementalLearner,
    Learner,
    LearnerFactory,
    Objective,
    PortableLearner,
    Prototypes,
    Proximal,
    Recipe,
    SoftLearner,
)
from fl_strategies.party.party import Party
from fl_strategies.party.role import PartyRole, PartyState
from fl_strategies.privacy.noise import ScorePrivacy, VotePrivacy
from fl_strategies.registry import FLOWER_STRATEGIES, REGISTRY, Algorithm, find_algorithm
from fl_strategies.server.run import write_epsilon_csv
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
from fl_strategies.strategies.fedproto import FedProto, FedProtoOptions, FedProtoParty
from fl_strategies.strategies.fens import FENS, FENSOptions, FENSParty
from fl_strategies.strategies.pfnm import PFNM, PFNMOptions, PFNMParty
from fl_strategies.strategies.scaffold import Scaffold, ScaffoldOptions, ScaffoldParty
from fl_strategies.strategies.sums import (
    FedHistogram,
    FedHistogramOptions,
    FedMoments,
    FedMomentsOptions,
    FedRegression,
    FedRegressionOptions,
    FedStatistics,
    FedStatisticsOptions,
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


__all__ = [
    "AKD",
    "Algorithm",
    "AvgKD",
    "Chain",
    "CodistillOptions",
    "CodistillParty",
    "Column",
    "Correction",
    "Cronus",
    "CronusOptions",
    "EKD",
    "EnsembleLearner",
    "FENS",
    "FENSOptions",
    "FENSParty",
    "FLOWER_STRATEGIES",
    "FeatureLearner",
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
    "FedMoments",
    "FedMomentsOptions",
    "FedProto",
    "FedProtoOptions",
    "FedProtoParty",
    "FedRegression",
    "FedRegressionOptions",
    "FedStatistics",
    "FedStatisticsOptions",
    "FlowerStrategy",
    "Generated",
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
    "Prototypes",
    "Proximal",
    "REGISTRY",
    "Recipe",
    "SampleOnce",
    "Scaffold",
    "ScaffoldOptions",
    "ScaffoldParty",
    "ScorePrivacy",
    "SoftLearner",
    "Statistics",
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
