"""FedHistogram and FedRegression: one noisy sum over a party's records; both sides of them.

    server   decides by public rows how records are summed up, and sends this
    party    sums its records up, adds noise and sends the sums
    server   adds the sums up, labels every public row by them, trains any model on these

Replacing a record moves a sum by a known distance, so one release has one price, whatever the
number of public rows. `histogram` counts records by cell and class; `regression` sums up
features by class.
"""

from fl_strategies.strategies.sums.histogram import FedHistogram
from fl_strategies.strategies.sums.options import (
    FedHistogramOptions,
    FedRegressionOptions,
    Histogram,
    Regression,
    SumOptions,
    SumPrivacy,
)
from fl_strategies.strategies.sums.party import SumParty
from fl_strategies.strategies.sums.regression import Components, FedRegression
from fl_strategies.strategies.sums.summary import Cells

HISTOGRAM_PARTY = SumParty(FedHistogramOptions, Cells, Histogram(level="L2"))
REGRESSION_PARTY = SumParty(FedRegressionOptions, Components, Regression(level="L2"))

__all__ = [
    "FedHistogram",
    "FedHistogramOptions",
    "FedRegression",
    "FedRegressionOptions",
    "HISTOGRAM_PARTY",
    "REGRESSION_PARTY",
    "SumOptions",
    "SumParty",
    "SumPrivacy",
]
