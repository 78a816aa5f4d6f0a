"""What can be set about FedHistogram, and what both sides say to each other."""

import math
from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias, get_args

import numpy as np

from fl_strategies.core.tasks import Task
from fl_strategies.exceptions import require
from fl_strategies.options import Options, group, option
from fl_strategies.privacy.counts import GaussianCounts, calibrated_counts
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.randomness import derive_rng

Level: TypeAlias = Literal["L2", "central"]

LEVELS: Final = ("L0", *get_args(Level))
COUNTS: Final = "counts"
HISTOGRAM: Final = "histogram"
CELLS: Final = "cells"
TASK: Final = "task"
UNPROTECTED: Final = "an exact histogram of records left the party"
TRUSTED: Final = f"{UNPROTECTED}, to a server that is trusted to add the noise"


@dataclass(frozen=True, kw_only=True)
class HistogramPrivacy(Options):
    """The noise on counts, just strong enough for a promise to every example.

    Parameters
    ----------
    privacy_level : "L2" or "central"
        ``"L2"``: every party adds noise by itself, which protects against the server and
        everybody else. ``"central"``: the server is trusted to add noise once, which is as
        much less as there are parties, and protects against all who see the result only.
    target_epsilon, delta : float
    seeded_noise : bool
        Draw noise from the experiment's seed, for repeatable simulations. Nothing is
        promised then: epsilon is infinite.
    accept_noise : bool
        Run although the records of a cell will not stand out from the noise.
    """

    owner: ClassVar[str] = "FedHistogram"

    privacy_level: Level = option("L2", "whose noise: of each party, or of a trusted server")
    target_epsilon: float | None = option(
        None, "what the histogram costs an example; 0: no noise", least=1e-3
    )
    delta: float = option(DEFAULT_DELTA, "delta of every privacy figure", above=0, below=1)
    seeded_noise: bool = option(False, "repeatable noise, which protects nobody")
    accept_noise: bool = option(False, "allow noise that drowns the counts")

    def __post_init__(self) -> None:
        """Check that the price is named."""
        super().__post_init__()
        given, rule = self.target_epsilon is not None, "given with the other settings of noise"
        require(given, "FedHistogram", "target_epsilon", rule, self.target_epsilon)

    def mechanism(self, task: Task, num_classes: int) -> GaussianCounts:
        """Return the noise for the most by which one record can move the counts.

        A record leaves one count and enters another; with several labels, for each of them.
        """
        moved = math.sqrt(2 * (num_classes if task == "multi-label" else 1))
        target = float(self.target_epsilon or 0)
        return calibrated_counts(target, self.delta, l2_sensitivity=moved, unit="example")

    def rng(self, seed: int, *path: str | int) -> np.random.Generator | None:
        """Return the source of noise: the operating system unless noise is seeded."""
        return derive_rng(seed, "noise", *path) if self.seeded_noise else None


@dataclass(frozen=True, kw_only=True)
class FedHistogramOptions(Options):
    """Options of `FedHistogram`.

    Parameters
    ----------
    privacy : HistogramPrivacy, optional
        None: exact counts leave the parties, and epsilon is infinite.
    num_cells, num_components : int, optional
        Into how many cells the space is divided, by how many principal components of the
        public rows; by default what `usual_cells` says, and twenty.
    num_records : int, optional
        Records of all parties together, as announced; as many as there are public rows if
        omitted. It decides the number of cells and nothing else.
    """

    owner: ClassVar[str] = "FedHistogram"

    privacy: HistogramPrivacy | None = group(HistogramPrivacy)
    num_cells: int | None = option(
        None, "cells of the space of rows; 0: as many as stand out from noise", least=2
    )
    num_components: int | None = option(
        None, "principal components of public rows; 0: 20 at most", least=1
    )
    num_records: int | None = option(
        None, "records of all parties, as announced; 0: as many as public rows", least=1
    )

    @property
    def level(self) -> str:
        """Where the noise is."""
        return "L0" if self.privacy is None else self.privacy.privacy_level
