"""FedHistogram: one noisy histogram of records by public cells and classes; both sides of it.

    server   divides the space of rows into cells by public rows, and sends them
    party    counts its records by cell and class, adds noise and sends the counts
    server   sums the counts, labels every public row by its cell, trains any model on them

A record is in one cell and has one class, so one release has one price, whatever the number
of public rows, classes and cells. The idea of counting records near public rows is that of
"reverse k nearest neighbours" (arXiv 2207.13253).
"""

from fl_strategies.strategies.fedhistogram.options import (
    FedHistogramOptions,
    HistogramPrivacy,
)
from fl_strategies.strategies.fedhistogram.party import FedHistogramParty
from fl_strategies.strategies.fedhistogram.server import FedHistogram

__all__ = ["FedHistogram", "FedHistogramOptions", "FedHistogramParty", "HistogramPrivacy"]
