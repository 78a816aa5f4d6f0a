"""FedHistogram: one noisy histogram of records by public cells and classes.

A record is in one cell and has one class, so one release has one price, whatever the number
of public rows, classes and cells. The idea of counting records near public rows is that of
"reverse k nearest neighbours" (arXiv 2207.13253).

Public rows are centred and scaled by their own columns, rotated to their principal components
and clustered, several times from different starts; a cell holds everything that is nearest to
one centre. Whatever the centres are, a record is in exactly one cell of each division, so that
replacing it moves a histogram of records by cell and class by one in two places of each.

Several divisions cost nothing: noise on counts grows with the root of their number, and falls
by as much when a row takes the mean of the cells that it is in. But rows at the rim of a cell
of one division are inside a cell of another.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final

import numpy as np
import scipy

from fl_strategies._util import (
    NEARLY_CONSTANT,
    Array,
    FloatArray,
    IntArray,
    derive_rng,
    one_blas_thread,
)
from fl_strategies.errors import require
from fl_strategies.learners import Learner, Task
from fl_strategies.options import option
from fl_strategies.privacy.mechanisms import MOST_SUMS
from fl_strategies.privacy.planning import (
    Draft,
    Facts,
    outweighed_cells,
    usual_cells,
    usual_cells_of_parties,
)
from fl_strategies.release import variants_at
from fl_strategies.strategies.sums.options import SumOptions, SumPlanner
from fl_strategies.strategies.sums.party import SumParty
from fl_strategies.strategies.sums.server import Counted, SumStrategy
from fl_strategies.strategies.sums.summary import (
    VALUES_AT_ONCE,
    PartySums,
    Summary,
    known_classes,
    most_of_noise,
    principal_axes,
)
from fl_strategies.wire.knowledge import Metrics

NUM_CELLS: Final = "num-cells"
USUAL_COMPONENTS: Final = 30
MOST_DIVISIONS: Final = 64
MOST_RECEIVED: Final = 2**16
"""Most cells that a party accepts from a server, which could keep it busy for ever."""
_ROUNDS: Final = 20
_FLATTENED: Final = 0.25
"""Components are divided by this power of their spread, so that the first decide less alone."""


@dataclass(frozen=True, kw_only=True)
class FedHistogramOptions(SumOptions):
    """Options of `FedHistogram`; see `SumOptions`.

    Parameters
    ----------
    num_divisions : int
        How often the space is divided, each time from another start.
    num_cells, num_components : int, optional
        Into how many cells each time, by how many principal components of the
        public rows; by default what `usual_cells` says, and thirty.
    """

    owner: ClassVar[str] = "FedHistogram"

    num_divisions: int = option(
        8, "divisions of the space of rows", least=1, most=MOST_DIVISIONS
    )
    num_cells: int | None = option(
        None, "cells of the space of rows; 0: as many as stand out from noise", least=2
    )
    num_components: int | None = option(
        None, "principal components of public rows; 0: 30 at most", least=1
    )


@dataclass(frozen=True, eq=False)
class Cells(Summary):
    """Divisions of the space of rows.

    Rows less `mean` (num_values,) are scaled and rotated by `turn` (num_values,
    num_components), and belong to the nearest of `centres` (num_divisions, num_cells,
    num_components).
    """

    kind: ClassVar[str] = "cells"
    signed: ClassVar[bool] = False
    names: ClassVar[tuple[str, ...]] = ("mean", "turn", "centres")
    most: ClassVar[int] = MOST_RECEIVED

    mean: FloatArray
    turn: FloatArray
    centres: FloatArray

    @classmethod
    @one_blas_thread()
    def of_rows(
        cls,
        rows: Array,
        num_cells: int,
        num_components: int,
        rng: np.random.Generator,
        num_divisions: int = 1,
    ) -> "Cells":
        """Divide the space by public rows (n, ...)."""
        centred, mean, scales, variances, axes = principal_axes(rows)
        least = NEARLY_CONSTANT * max(float(variances[0]), np.finfo(float).tiny)
        flatter = np.maximum(variances, least) ** (-_FLATTENED / 2)
        turn = scales[:, None] * (axes * flatter)[:, :num_components]
        placed = centred @ turn
        centres = [_cluster(placed, num_cells, rng) for _ in range(num_divisions)]
        return cls(mean, turn, np.stack(centres))

    @property
    def num_divisions(self) -> int:
        """Number of divisions."""
        return len(self.centres)

    @property
    def num_cells(self) -> int:
        """Number of cells of each division."""
        return int(self.centres.shape[1])

    @one_blas_thread()
    def find(self, rows: Array) -> Array:
        """Return the cell of every row in each division, (num_divisions, n).

        Each row has one, whatever its values.
        """
        flat = rows.reshape(len(rows), -1)
        # Two bytes per place are enough for `MOST_RECEIVED` cells, whoever has sent them.
        found = np.empty((self.num_divisions, len(flat)), dtype=np.uint16)
        with np.errstate(over="ignore", invalid="ignore"):
            step = max(1, VALUES_AT_ONCE // max(self.num_cells, flat.shape[1]))
            for start in range(0, len(flat), step):
                part = slice(start, start + step)
                placed = (flat[part] - self.mean) @ self.turn
                for number, centres in enumerate(self.centres):
                    # Squared distances less those of rows from zero.
                    away = np.square(centres).sum(axis=1) - 2 * placed @ centres.T
                    found[number, part] = np.argmin(away, axis=1)
        return found

    def shape(self, num_classes: int, task: Task) -> tuple[int, ...]:
        """Return cells by classes, or by those without and with each of several labels."""
        classes = (2, num_classes) if task == "multi-label" else (num_classes,)
        return (self.num_divisions, self.num_cells, *classes)

    def of_records(self, x: Array, y: Array, num_classes: int, task: Task) -> IntArray:
        """Return how many records each cell has of each class."""
        shape = self.shape(num_classes, task)[1:]
        return np.stack([count_records(cells, y, shape, task) for cells in self.find(x)])

    def moved(self, num_classes: int, task: Task) -> float:
        """Return the root of 2 for each division: a record leaves one count and enters another.

        With several labels it does so for each of them.
        """
        labels = num_classes if task == "multi-label" else 1
        return math.sqrt(2 * labels * self.num_divisions)

    def possible(self, sums: IntArray, num_records: int, task: Task) -> bool:
        """Return whether so many records can be counted like this.

        Each division has all of them, and as many of a class as any other.
        """
        totals = sums.sum(axis=1)
        if sums.min() < 0 or (totals != totals[0]).any():
            return False
        if task == "multi-label":
            return bool((totals[0].sum(axis=0) <= num_records).all())
        return int(totals[0].sum()) == num_records

    def counts_of(self, rows: Array, totals: FloatArray) -> FloatArray:
        """Return the mean counts of the cells that rows are in, (n, ...)."""
        by_division = zip(totals, self.find(rows), strict=True)
        return np.asarray(sum(total[cells] for total, cells in by_division) / len(totals))

    @classmethod
    def _fits(cls, arrays: Mapping[str, Array]) -> bool:
        centres = arrays["centres"]
        if centres.ndim != 3 or centres.shape[2:] != arrays["turn"].shape[1:]:
            return False
        num_divisions, num_cells, _ = centres.shape
        few = num_divisions <= MOST_DIVISIONS
        return bool(few and 0 < num_divisions * num_cells <= cls.most)


def _cluster(rows: FloatArray, num_cells: int, rng: np.random.Generator) -> FloatArray:
    """Return centres of k-means, (num_cells, d)."""
    with warnings.catch_warnings():
        # Rows that are equal leave cells empty, which harms nobody.
        warnings.simplefilter("ignore", UserWarning)
        centres, _ = scipy.cluster.vq.kmeans2(rows, num_cells, _ROUNDS, minit="points", rng=rng)
    return np.asarray(centres)


def count_records(cells: Array, y: Array, shape: tuple[int, ...], task: Task) -> IntArray:
    """Return how many records each cell has of each class, or without and with each label.

    `y` are classes (n,), or labels (n, num_labels) of -1 (unknown), 0 and 1; `shape` is
    (num_cells, num_classes), or (num_cells, 2, num_labels).
    """
    counts = np.zeros(shape, dtype=np.int64)
    if task == "single-label":
        np.add.at(counts, (cells, y), 1)
        return counts
    rows, labels = np.nonzero(y >= 0)
    np.add.at(counts, (cells[rows], y[rows, labels].astype(np.int64), labels), 1)
    return counts


def class_shares(counts: FloatArray, noise: float) -> FloatArray:
    """Return the shares of classes in every cell, (num_cells, num_classes).

    Counts within one deviation of the noise say nothing; where all do, the largest counts
    alone. With labels, counts (num_cells, 2, num_labels) give the share that has each.
    """
    above = np.maximum(counts - noise, 0.0)
    largest = counts == counts.max(axis=1, keepdims=True)
    above = np.where(above.sum(axis=1, keepdims=True) > 0, above, largest)
    shares = above / above.sum(axis=1, keepdims=True)
    return np.asarray(shares[:, 1] if counts.ndim == 3 else shares)


def plausible_counts(counts: IntArray, num_records: int, noise: float) -> FloatArray | IntArray:
    """Return noisy counts (divisions, cells, ...) as a party of so many records may have them.

    A class has as many records in each division, so that the mean of its totals has little
    noise; they are what one party could add to a class everywhere. Counts that are plausible
    are returned as they are.
    """
    divisions, cells = counts.shape[:2]
    classes = int(np.prod(counts.shape[2:]))
    labels = counts.shape[3] if counts.ndim == 4 else 1
    room = most_of_noise(noise, counts.size)
    found = np.clip(counts, -room, num_records + room)
    totals = found.sum(axis=1).mean(axis=0)
    room = most_of_noise(noise * math.sqrt(cells / divisions), classes)
    found = found - (totals - np.clip(totals, -room, num_records + room)) / cells
    # Records of a cell at most, and noise of the usual length.
    longest = num_records * math.sqrt(divisions * labels)
    longest += noise * math.sqrt(counts.size) + most_of_noise(noise)
    found = found * min(1.0, longest / max(float(np.linalg.norm(found)), 1e-300))
    return counts if np.array_equal(found, counts) else np.asarray(found)


@dataclass(frozen=True, kw_only=True)
class Histogram(SumPlanner):
    """Plans `FedHistogram`: counts of records by cell and class.

    Its methods take the noise on the sum over parties, per length of one unit's vector.
    """

    strategy: ClassVar[str] = "fedhistogram"
    moved_squared: ClassVar[int] = 2
    moved_by_party: ClassVar[float] = math.sqrt(2)

    def cells(self, noise: float, num_public: int, num_parties: int, num_records: int) -> int:
        """Return how many cells stand out from noise."""
        if self.level == "L1":
            return usual_cells_of_parties(num_public, num_parties, noise)
        return usual_cells(num_public, num_records, noise)

    def share(self, cells: int, num_parties: int, num_records: int) -> float:
        """Return what a cell has on average, of parties or of records."""
        return num_parties / math.sqrt(cells) if self.level == "L1" else num_records / cells

    def _usual(self, facts: Facts) -> tuple[int, float, float]:
        """Return how many cells there are, what each has on average, and the noise on it."""
        _, noise = self.noise(facts)
        parties, records = facts.num_parties, facts.all_records
        cells = self.cells(noise, facts.num_public, parties, records)
        return cells, self.share(cells, parties, records), noise

    def problem(self, facts: Facts) -> str:
        """Describe noise that exceeds what a cell has, or return ""."""
        _, share, noise = self._usual(facts)
        return outweighed_cells(share, noise, self.whose)

    def draft(self, facts: Facts) -> Draft:
        """Return the histogram that the strategy makes by default."""
        sums, (cells, share, noise) = self.noise(facts)[0], self._usual(facts)
        return Draft(
            noise="gaussian",
            scale=sums.drawn_scale,
            asked="cells",
            num_asked=cells,
            voters=f"{share:.0f} {self.whose} of a cell",
            right=facts.right_labels("gaussian", noise, share),
            batches=[sums.charges(cells * facts.num_classes)],
            settings=self.settings,
        )


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
    planner_type = Histogram
    private_variants = variants_at("fedhistogram", "L2", "central", "L1")
    usual_final_learners = ("random-features",)
    options: FedHistogramOptions
    _planner: Histogram
    open_setting = "num_cells"

    def _summarise(self) -> Cells:
        num_components = min(self.options.num_components or USUAL_COMPONENTS, self.width)
        rng, divisions = derive_rng(self.seed, "cells"), self.options.num_divisions
        return Cells.of_rows(self.public, self._num_cells(), num_components, rng, divisions)

    def _num_cells(self) -> int:
        """Return what was asked for, or what stands out from the noise of all parties."""
        num_public, parties = len(self.public), self.num_parties
        number = self.options.num_cells or self._planner.cells(
            self._planned_noise(), num_public, parties, self._num_records
        )
        most = min(MOST_RECEIVED, MOST_SUMS // (2 * self.num_classes))
        most = min(num_public, most // self.options.num_divisions)
        rule = f"at most {most}, for so many public rows and classes"
        require(number <= most, "FedHistogram", "num_cells", rule, number)
        return number

    def _no_signal(self) -> str:
        """Describe noise that exceeds the average count of a cell, or return ""."""
        noise = self._of_one_division(self._summed(self._mechanism)) / self._length
        planner, cells = self._planner, self._summary.num_cells
        share = planner.share(cells, self.num_parties, self._num_records)
        return outweighed_cells(share, noise, planner.whose)

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

    def _model_of(self, total: FloatArray, noise: float, counted: Counted) -> Learner:  # noqa: ARG002
        """Return a model of public rows with the class shares of the cells that they are in."""
        counts = self._summary.counts_of(self.public, total)
        return self._labelled(class_shares(counts, self._of_one_division(noise)))

    def _of_one_division(self, noise: float) -> float:
        """Return the noise on mean counts of all divisions: as if there were one alone."""
        return noise / math.sqrt(self.options.num_divisions)

    def _details(self) -> Metrics:
        return {NUM_CELLS: self._summary.num_cells}


HISTOGRAM_PARTY: Final = SumParty(FedHistogramOptions, Cells, Histogram)
