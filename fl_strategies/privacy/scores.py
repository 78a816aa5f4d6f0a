"""Protecting a weighted mean of scores: which noise, how strong, and what it costs.

Scores of all public rows and classes are released, so the price is high. With 20 parties of
equal weight, 1000 rows of 10 classes, scores cut at 10 and Laplace noise of scale 1, every
entry costs epsilon 1 and there are ten thousand entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from fl_strategies.exceptions import require
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.calibration import calibrate_scale
from fl_strategies.privacy.events import Unit
from fl_strategies.privacy.mechanisms import GaussianScores, LaplaceScores
from fl_strategies.randomness import derive_rng

ScoreNoise: TypeAlias = Literal["laplace", "gaussian"]
ScoreMechanism: TypeAlias = LaplaceScores | GaussianScores

SCORE_NOISES: tuple[str, ...] = get_args(ScoreNoise)


@dataclass(frozen=True, kw_only=True)
class ScorePrivacy:
    """The noise on scores, by its strength or by the epsilon to be kept.

    Parameters
    ----------
    noise : "laplace" or "gaussian"
        Laplace noise is FedKD's; Gaussian noise costs far less for many entries.
    gamma : float, optional
        Inverse scale of Laplace noise: larger means less noise.
    sigma : float, optional
        Standard deviation of Gaussian noise.
    target_epsilon : float, optional
        Instead of gamma or sigma: the noise is made just strong enough for it.
    delta : float
    seeded_noise : bool
        Draw noise from the experiment's seed, for repeatable simulations. Nothing is
        promised then: epsilon is infinite.
    """

    noise: ScoreNoise = "laplace"
    gamma: float | None = None
    sigma: float | None = None
    target_epsilon: float | None = None
    delta: float = 1e-5
    seeded_noise: bool = False

    def __post_init__(self) -> None:
        """Check that the strength is said exactly once, in the words of the noise."""
        owner, noises = "ScorePrivacy", ", ".join(SCORE_NOISES)
        require(self.noise in SCORE_NOISES, owner, "noise", f"one of {noises}", self.noise)
        require(0 < self.delta < 1, owner, "delta", "between 0 and 1", self.delta)
        right, wrong = ("sigma", "gamma") if self.noise == "gaussian" else ("gamma", "sigma")
        rule = f"left out for {self.noise} noise"
        require(getattr(self, wrong) is None, owner, wrong, rule, getattr(self, wrong))
        given = [getattr(self, name) for name in (right, "target_epsilon")]
        once = sum(value is not None for value in given) == 1
        require(once, owner, f"{right} or target_epsilon", "given, one of the two", given)
        for name in (right, "target_epsilon"):
            value = getattr(self, name)
            require(value is None or value > 0, owner, name, "greater than 0", value)

    def rng(self, seed: int, *path: str | int) -> np.random.Generator | None:
        """Return the source of noise: the operating system unless noise is seeded."""
        return derive_rng(seed, "noise", *path) if self.seeded_noise else None

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
                bound=bound, scale=scale, num_values=width, unit=unit,
                num_contributors=num_contributors,
            )  # fmt: skip

        if self.target_epsilon is None:
            return with_scale(self.sigma or 1 / (self.gamma or 1))

        def entries(scale: float) -> Sequence[Entry]:
            mechanism = with_scale(scale)
            rows = num_rows * num_values // mechanism.num_values
            return [*mechanism.charges(rows), *besides]

        return with_scale(calibrate_scale(entries, self.target_epsilon, self.delta))

    def charges(self, mechanism: ScoreMechanism, num_entries: int) -> Sequence[Entry]:
        """Return what releasing so many entries will cost."""
        rows = num_entries // mechanism.num_values
        return mechanism.charges(rows, seeded=self.seeded_noise)
