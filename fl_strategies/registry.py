"""All strategies by name: their two sides, and what plans their privacy."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from flwr.serverapp import strategy

from fl_strategies.errors import InvalidParameter
from fl_strategies.party.role import PartyRole
from fl_strategies.privacy.planning import Planner
from fl_strategies.server.strategy import KnowledgeStrategy
from fl_strategies.strategies.codistill import AKD, EKD, PKD, AvgKD, CodistillParty
from fl_strategies.strategies.feddf import FedDF, FedDFParty
from fl_strategies.strategies.fedgen import FedGen, FedGenParty
from fl_strategies.strategies.fedkd import FedKD, FedKDParty
from fl_strategies.strategies.fedkd.options import Scores
from fl_strategies.strategies.fedkt import FedKT, FedKTParty
from fl_strategies.strategies.fedkt.options import Votes
from fl_strategies.strategies.fedmd import Cronus, FedMD, FedMDParty
from fl_strategies.strategies.fedmd.options import Answers
from fl_strategies.strategies.fedproto import FedProto, FedProtoParty
from fl_strategies.strategies.fens import FENS, FENSParty
from fl_strategies.strategies.pfnm import PFNM, PFNMParty
from fl_strategies.strategies.scaffold import Scaffold, ScaffoldParty
from fl_strategies.strategies.sums import (
    HISTOGRAM_PARTY,
    MOMENTS_PARTY,
    REGRESSION_PARTY,
    STATISTICS_PARTY,
    FedHistogram,
    FedMoments,
    FedRegression,
    FedStatistics,
)
from fl_strategies.strategies.sums.histogram import Histogram
from fl_strategies.strategies.sums.moments import MomentsPlanner
from fl_strategies.strategies.sums.regression import Regression
from fl_strategies.strategies.weights import FedAvg, WeightsParty, flower_strategy


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
    "fedmoments": Algorithm(FedMoments, MOMENTS_PARTY),
    "fedproto": Algorithm(FedProto, FedProtoParty()),
    "fedregression": Algorithm(FedRegression, REGRESSION_PARTY),
    "fedstatistics": Algorithm(FedStatistics, STATISTICS_PARTY),
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


DEFAULT_STRATEGY: Final = FedKD.name
"""Of a run that names none."""
DESCRIBING: Final = FedStatistics
"""The strategy that describes tables before anybody learns from them."""
DEMO_STRATEGY: Final = FedKT.name
"""Of a deployment on one machine, to look at."""
REFERENCES: Final = (FedHistogram.name, FedRegression.name, FedMoments.name, FedKD.name)
"""Strategies that curves of private ones also show without privacy."""
PRIVATE_VARIANTS: Final = tuple(
    variant
    for unit in ("example", "party")
    for kind in (FedHistogram, FedRegression, FedMoments, FedKT, FedMD, FedKD)
    for variant in kind.private_variants
    if variant.unit == unit
)
"""Variants that comparisons run at a budget, in the order of their tables."""

PLANNERS: Final[Sequence[Planner]] = (
    Histogram(level="L2"),
    Regression(level="L2"),
    MomentsPlanner(level="L2"),
    Histogram(level="central"),
    Regression(level="central"),
    MomentsPlanner(level="central"),
    Votes(unit="example"),
    Answers(),
    Answers(num_rounds=5),
    Histogram(level="L1"),
    Regression(level="L1"),
    Votes(unit="party"),
    Scores(unit="example"),
    Scores(unit="party"),
)
"""Every private strategy there is, for `fl_strategies.privacy.plan`."""
