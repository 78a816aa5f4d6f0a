"""Heads on sums: one noisy sum over each party's records, and a model that follows from it.

    server   decides by public rows how records are summed, and sends this
    party    sums its records, adds noise and sends the sums
    server   adds the sums, labels every public row by them, trains any model on these

Replacing a record moves a sum by a known distance, so one release has one price, whatever the
number of public rows. `histogram` counts records by cell and class; `regression` sums features
by class. Each of these two files is a whole head: its options, its `Summary` of records, its
planner, its server side, and the party's role that follows from them. Levels, mechanisms,
limits and the exclusion of outliers are in `options`, `summary`, `party` and `server`.
"""

from fl_strategies.strategies.sums.histogram import (
    HISTOGRAM_PARTY,
    FedHistogram,
    FedHistogramOptions,
)
from fl_strategies.strategies.sums.moments import (
    MOMENTS_PARTY,
    FedMoments,
    FedMomentsOptions,
)
from fl_strategies.strategies.sums.options import SumOptions, SumPrivacy
from fl_strategies.strategies.sums.party import SumParty
from fl_strategies.strategies.sums.regression import (
    REGRESSION_PARTY,
    FedRegression,
    FedRegressionOptions,
)
from fl_strategies.strategies.sums.statistics import (
    STATISTICS_PARTY,
    FedStatistics,
    FedStatisticsOptions,
)

__all__ = [
    "FedHistogram",
    "FedHistogramOptions",
    "FedRegression",
    "FedRegressionOptions",
    "FedMoments",
    "FedMomentsOptions",
    "FedStatistics",
    "FedStatisticsOptions",
    "HISTOGRAM_PARTY",
    "MOMENTS_PARTY",
    "REGRESSION_PARTY",
    "STATISTICS_PARTY",
    "SumOptions",
    "SumParty",
    "SumPrivacy",
]
