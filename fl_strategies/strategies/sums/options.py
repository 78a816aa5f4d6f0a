"""Options of FedHistogram and FedRegression, and the configuration that parties receive."""

from dataclasses import dataclass
from typing import ClassVar, Final, Literal, TypeAlias, get_args

import numpy as np

from fl_strategies._util.randomness import derive_rng
from fl_strategies.errors import require
from fl_strategies.options import Options, group, option
from fl_strategies.privacy.counts import MOST_SUMS, GaussianSums, calibrated_sums
from fl_strategies.privacy.events import Unit
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.strategies.sums.summary import MOST_DIVISIONS

Level: TypeAlias = Literal["L1", "L2", "central"]

LEVELS: Final = ("L0", *get_args(Level))
SUMS: Final = "sums"
TASK: Final = "task"
UNPROTECTED: Final = "exact sums over records left the party"
TRUSTED: Final = f"{UNPROTECTED}, to a server that is trusted to add the noise"


@dataclass(frozen=True, kw_only=True)
class SumPrivacy(Options):
    """The noise on sums, just strong enough for a promise.

    Parameters
    ----------
    privacy_level : "L1", "L2" or "central"
        ``"L2"``: every party adds noise by itself, which protects an example against the
        server and everybody else. ``"central"``: the server is trusted to add noise once,
        which is as much less as there are parties, and protects an example against all
        who see the result only. ``"L1"``: the same for a whole party; every party has the
        same weight, whatever it holds.
    target_epsilon, delta : float
    seeded_noise : bool
        Draw noise from the experiment's seed, for repeatable simulations. Nothing is
        promised then: epsilon is infinite.
    accept_noise : bool
        Run even if the noise exceeds the signal.
    """

    privacy_level: Level = option("L2", "whose noise: of each party, or of a trusted server")
    target_epsilon: float | None = option(
        None, "what the sums cost an example, at L1 a party; 0: no noise", least=1e-3
    )
    delta: float = option(DEFAULT_DELTA, "delta of every privacy figure", above=0, below=1)
    seeded_noise: bool = option(False, "repeatable noise, which protects nobody")
    accept_noise: bool = option(False, "allow noise that drowns the sums")

    def __post_init__(self) -> None:
        """Check that the price is named."""
        super().__post_init__()
        given, rule = self.target_epsilon is not None, "given with the other settings of noise"
        require(given, self._owner(), "target_epsilon", rule, self.target_epsilon)

    @property
    def unit(self) -> Unit:
        """Who is protected."""
        return "party" if self.privacy_level == "L1" else "example"

    def mechanism(self, moved: float, num_sums: int = MOST_SUMS) -> GaussianSums:
        """Return the noise for the most by which one unit can move so many sums.

        Their number hardly matters: each is drawn with a chance of error of its own.
        """
        return calibrated_sums(
            float(self.target_epsilon or 0),
            self.delta,
            l2_sensitivity=moved,
            unit=self.unit,
            num_sums=num_sums,
        )

    def rng(self, seed: int, *path: str | int) -> np.random.Generator | None:
        """Return the source of noise: the operating system unless noise is seeded."""
        return derive_rng(seed, "noise", *path) if self.seeded_noise else None


@dataclass(frozen=True, kw_only=True)
class SumOptions(Options):
    """What `FedHistogram` and `FedRegression` have in common.

    Parameters
    ----------
    privacy : SumPrivacy, optional
        None: exact sums leave the parties, and epsilon is infinite.
    num_records : int, optional
        Records of all parties together, as announced; as many as there are public rows if
        omitted. It decides how much detail there is and nothing about privacy. Parties that
        claim more together are cut; see `aggregation.evidence.believed_sizes`.
    exclude_outliers : bool
        Parties whose sums contradict most others' are not counted: without noise, or with
        that of parties; see `aggregation.pool`.
    """

    privacy: SumPrivacy | None = group(SumPrivacy)
    num_records: int | None = option(
        None, "records of all parties, as announced; 0: as many as public rows", least=1
    )
    exclude_outliers: bool = option(
        True, "no sums of parties that contradict most, unless the noise is the server's"
    )

    @property
    def level(self) -> str:
        """Where the noise is."""
        return "L0" if self.privacy is None else self.privacy.privacy_level

    @property
    def delta(self) -> float:
        """Of every privacy figure."""
        return DEFAULT_DELTA if self.privacy is None else self.privacy.delta


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


@dataclass(frozen=True, kw_only=True)
class FedRegressionOptions(SumOptions):
    """Options of `FedRegression`; see `SumOptions`.

    Parameters
    ----------
    num_components : int, optional
        Principal components of the public rows that the regression sees; by default what
        `usual_components` says.
    """

    owner: ClassVar[str] = "FedRegression"

    num_components: int | None = option(
        None,
        "principal components of public rows; 0: as many as stand out from noise",
        least=1,
    )
