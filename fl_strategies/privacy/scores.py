"""Protecting a weighted mean of scores: which noise, how strong, and what it costs.

Scores of all public rows and classes are released, so the price is high. With 20 parties of
equal weight, 1000 rows of 10 classes, scores cut at 10 and Laplace noise of scale 1, every
entry costs epsilon 1 and there are ten thousand entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fl_strategies.options import option
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.calibration import calibrate_scale
from fl_strategies.privacy.events import Unit
from fl_strategies.privacy.mechanisms import GaussianScores, LaplaceScores
from fl_strategies.privacy.noise_spec import ReleaseSpec

ScoreNoise: TypeAlias = Literal["laplace", "gaussian"]
ScoreMechanism: TypeAlias = LaplaceScores | GaussianScores


@dataclass(frozen=True, kw_only=True)
class ScorePrivacy(ReleaseSpec):
    """The noise on scores; see `NoiseSpec`.

    Parameters
    ----------
    noise : "laplace" or "gaussian"
        Laplace noise is FedKD's; Gaussian noise costs far less for many entries.
    """

    noise: ScoreNoise = option("laplace", "kind of noise on scores")

    def mechanism(
        self,
        *,
        unit: Unit,
        bound: float,
        num_values: int,
        num_contributors: int,
        num_rows: int,
        besides: Sequence[Entry] = (),
    ) -> ScoreMechanism:
        """Return the mechanism for a number of rows, calibrated if a target was given.

        Laplace noise is accounted entry by entry, Gaussian noise row by row.

        Parameters
        ----------
        unit : "party" or "example"
        bound : float
            Public. Entries are cut at it, and for Gaussian noise the norms of rows too.
        num_values : int
            Entries of a row.
        num_contributors : int
            How many the mean is over.
        num_rows : int
            Rows that will be released in all; it decides the strength of a calibrated
            mechanism and nothing else.
        besides : sequence of (event, count)
            What else is released within the target.
        """

        def with_scale(scale: float) -> ScoreMechanism:
            kind = GaussianScores if self.noise == "gaussian" else LaplaceScores
            width = num_values if self.noise == "gaussian" else 1
            return kind(
                bound=bound,
                scale=scale,
                num_values=width,
                unit=unit,
                num_contributors=num_contributors,
            )

        if self.target_epsilon is None:
            return with_scale(float(self.given_scale or 0))

        def entries(scale: float) -> Sequence[Entry]:
            mechanism = with_scale(scale)
            rows = num_rows * num_values // mechanism.num_values
            return [*mechanism.charges(rows), *besides]

        return with_scale(calibrate_scale(entries, self.target_epsilon, self.delta))

    def charges(self, mechanism: ScoreMechanism, num_entries: int) -> Sequence[Entry]:
        """Return what releasing so many entries will cost."""
        rows = num_entries // mechanism.num_values
        return mechanism.charges(rows, seeded=self.seeded_noise)
