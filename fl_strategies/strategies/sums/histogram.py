"""FedHistogram: one noisy histogram of records by public cells and classes.

A record is in one cell and has one class, so one release has one price, whatever the number
of public rows, classes and cells. The idea of counting records near public rows is that of
"reverse k nearest neighbours" (arXiv 2207.13253).
"""

import math
from functools import cached_property
from typing import ClassVar, Final

import numpy as np

from fl_strategies._util import FloatArray, IntArray, derive_rng
from fl_strategies.errors import require
from fl_strategies.privacy.counts import MOST_SUMS
from fl_strategies.privacy.planning.rules import (
    drowned_cells,
    usual_cells,
    usual_cells_of_parties,
)
from fl_strategies.strategies.sums.options import FedHistogramOptions, Histogram
from fl_strategies.strategies.sums.server import Counted, SumStrategy
from fl_strategies.strategies.sums.summary import (
    DIRECTION,
    MOST_RECEIVED,
    USUAL_COMPONENTS,
    Cells,
    PartySums,
    class_shares,
    known_classes,
    plausible_counts,
)
from fl_strategies.wire.knowledge import Metrics

NUM_CELLS: Final = "num-cells"


class FedHistogram(SumStrategy[Cells]):
    """One round: parties count their records in cells that public rows define.

    Leaves the party
        One number for each cell and class: how many of its records are there, with noise.
    Guarantee
        L2: each record is protected against the server and everybody else, by noise that
        the party itself adds; central: against everybody but the server, which adds the
        noise once; L1: each party, against everybody but the server. One release, so one
        price, for any number of public rows, cells and classes. Not covered: the number of
        records, held-out rows, settings chosen on private data.

    Parameters
    ----------
    **settings
        See `SumStrategy`; `options` are `FedHistogramOptions`.

    Notes
    -----
    Parties' own models are not used. The cells travel, so that all parties count alike; they
    are made of public rows, and no choice of cells weakens the promise, because a record is
    in one cell whatever they are.
    """

    name: ClassVar[str] = "fedhistogram"
    options_type = FedHistogramOptions
    options: FedHistogramOptions
    open_setting = "num_cells"

    def _summarise(self) -> Cells:
        width = int(np.prod(self.public.shape[1:]))
        components = min(self.options.num_components or USUAL_COMPONENTS, width)
        rng = derive_rng(self.seed, "cells")
        divisions = self.options.num_divisions
        cells = Cells.of_rows(self.public, self._num_cells(), components, rng, divisions)
        # Everybody counts by what travels, the server too.
        return Cells.from_arrays(cells.to_arrays(), width)

    def _num_cells(self) -> int:
        """Return what was asked for, or what stands out from the noise of all parties."""
        num_public = len(self.public)
        number = self.options.num_cells or self._usual_cells()
        most = min(MOST_RECEIVED, MOST_SUMS // (2 * self.num_classes))
        most = min(num_public, most // self.options.num_divisions)
        rule = f"at most {most}, for so many public rows and classes"
        require(number <= most, "FedHistogram", "num_cells", rule, number)
        return number

    def _usual_cells(self) -> int:
        if self.options.level == "L1":
            noise = self._planned_noise(math.sqrt(2) * DIRECTION) / DIRECTION
            return usual_cells_of_parties(len(self.public), self.num_parties, noise)
        labels = self._num_labels
        noise = self._planned_noise(math.sqrt(2 * labels))
        return usual_cells(len(self.public), self._num_records, noise)

    def _drowned(self) -> str:
        """Describe noise that exceeds the average count of a cell, or return ""."""
        noise = self._of_one_division(self._summed(self._mechanism))
        cells = self._summary.num_cells
        if self.options.level == "L1":
            return drowned_cells(
                self.num_parties / math.sqrt(cells), noise / DIRECTION, "parties"
            )
        return drowned_cells(self._num_records / cells, noise)

    def _planner(self, level: str, num_labels: int) -> Histogram:
        return Histogram(level=level, num_labels=num_labels)

    def _plausible(self, one: PartySums, noise: float) -> FloatArray | IntArray:
        """Return counts within what noise makes likely; without noise all are possible."""
        return plausible_counts(one.sums, one.num_records, noise) if noise else one.sums

    def _evidence(
        self, sums: FloatArray | IntArray, num_records: float, noise: float
    ) -> tuple[FloatArray, FloatArray]:
        """Return how crowded each class is where a public row is, against all public rows.

        Where noise is more than a party has in a cell, counts as they are.
        """
        usual = num_records * self._public_shares + noise
        spread = usual.reshape(*usual.shape, *[1] * (sums.ndim - 2))
        dense = self._summary.counts_of(self.public, sums / spread)
        counts = sums.sum(axis=1).mean(axis=0)
        if self.task == "multi-label":
            dense, counts = dense[:, 1], counts[1]
        of_class = self._of_one_division(noise) * math.sqrt(self._summary.num_cells)
        return dense, known_classes(counts, of_class)

    @cached_property
    def _public_shares(self) -> FloatArray:
        """Share of the public rows that each cell has, none of them 0."""
        cells = self._summary.find(self.public)
        counts = [np.bincount(found, minlength=self._summary.num_cells) for found in cells]
        return (np.stack(counts) + 1.0) / len(self.public)

    def _shares(self, total: FloatArray, noise: float, counted: Counted) -> FloatArray:  # noqa: ARG002
        """Return the class shares of the cells that every public row is in."""
        counts = self._summary.counts_of(self.public, total)
        return class_shares(counts, self._of_one_division(noise))

    def _of_one_division(self, noise: float) -> float:
        """Return the noise on mean counts of all divisions: as if there were one alone."""
        return noise / math.sqrt(self.options.num_divisions)

    def _details(self) -> Metrics:
        return {NUM_CELLS: self._summary.num_cells}
