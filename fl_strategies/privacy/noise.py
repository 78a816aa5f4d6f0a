"""Noise by its scale, or calibrated to a target epsilon.

Scores of all public rows and classes are released, so the cost is high. With 20 parties of
equal weight, 1000 rows of 10 classes, scores clipped at 10 and Laplace noise of scale 1, every
entry costs epsilon 1 and there are ten thousand entries.
"""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from fl_strategies._util.randomness import derive_rng
from fl_strategies.errors import InvalidParameter, require
from fl_strategies.options import Options, option
from fl_strategies.privacy._numeric import check_delta, check_positive
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.events import Unit
from fl_strategies.privacy.ledger import DEFAULT_DELTA, cost_of
from fl_strategies.privacy.mechanisms import GaussianScores, LaplaceScores

_LEAST_SCALE, _LARGEST_SCALE = 1e-9, 1e12
_TOLERANCE = 1e-6


def calibrate_scale(
    make_entries: Callable[[float], Sequence[Entry]],
    target_epsilon: float,
    delta: float,
    *,
    num_batches: int = 1,
    least: float = _LEAST_SCALE,
) -> float:
    """Return the smallest scale of noise that meets the target, to six digits.

    Parameters
    ----------
    make_entries : callable
        Maps a scale to the (event, count) pairs of one batch. More scale must cost less.
    target_epsilon, delta : float
    num_batches : int
        Number of such batches, each released after the answers of those before it.
    least : float
        Smallest scale that the mechanism supports.

    Returns
    -------
    scale : float
        One for which a ledger's epsilon is at most `target_epsilon`, never slightly more.

    Raises
    ------
    InvalidParameter
        If no noise is enough, because other events already cost more.

    Examples
    --------
    >>> from fl_strategies.privacy.events import NoisyMaxEvent
    >>> def votes(scale):
    ...     return [(NoisyMaxEvent(unit="party", relation="replace-one", noise="gumbel",
    ...         scale=scale, sensitivity=1.0, num_classes=10), 40)]
    >>> round(calibrate_scale(votes, 0.934913, 1e-5), 3)
    25.0
    """
    owner = "calibrate_scale"
    check_positive(owner, "target_epsilon", target_epsilon)
    check_delta(owner, delta)

    def cost(scale: float) -> float:
        return cost_of([make_entries(scale)] * num_batches, delta)

    def enough(scale: float) -> bool:
        return cost(scale) <= target_epsilon

    if not enough(_LARGEST_SCALE):
        raise InvalidParameter(
            f"{owner}: target_epsilon must be at least {cost(_LARGEST_SCALE):.6g}, the least "
            f"that these events cost at delta {delta:g}, got {target_epsilon:g}."
        )
    high = max(1.0, least)
    while not enough(high):
        high *= 2
    low = max(high / 2, least)
    while low > least and enough(low):
        low, high = max(low / 2, least), low
    if low == least and enough(least):
        return least
    while high / low > 1 + _TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


logger = logging.getLogger("flwr.fl_strategies")


def require_audible(
    owner: str, words: str, *, accepted: bool, advice_of: Callable[[], str] = str
) -> None:
    """Raise if noise outweighs the signal, so that epsilon would be spent for nothing.

    `words` describe such noise, and are empty if there is none; `advice_of` then returns
    settings that would work. If the noise is accepted, the same is logged as a warning.
    """
    if not words:
        return
    usual = "Ask for fewer answers, have more voters, or allow a larger epsilon"
    advice = advice_of() or usual
    if not accepted:
        raise InvalidParameter(
            f"{owner}: noise must be weaker than what it protects, or accepted "
            f"(accept_noise), got noise of {words}. {advice}."
        )
    logger.warning("%s: noise of %s outweighs the answers. %s.", owner, words, advice)


@dataclass(frozen=True, kw_only=True)
class NoiseSpec(Options):
    """Noise given by its scale (gamma or sigma) or by a target epsilon.

    Parameters
    ----------
    noise : str
        Subclasses define the kinds of noise.
    gamma : float, optional
        Inverse scale of Gumbel or Laplace noise: larger means less noise.
    sigma : float, optional
        Standard deviation of Gaussian noise.
    target_epsilon : float, optional
        Instead of gamma or sigma: the smallest noise that meets it is used.
    """

    noise: str
    gamma: float | None = option(
        None, "inverse scale of gumbel or laplace noise; 0: not given", above=0
    )
    sigma: float | None = option(None, "deviation of gaussian noise; 0: not given", above=0)
    target_epsilon: float | None = option(
        None, "calibrate the noise to it; 0: not given", above=0
    )

    def __post_init__(self) -> None:
        """Check that the scale is given exactly once, by the parameter of its kind of noise."""
        super().__post_init__()
        owner = self._owner()
        right, wrong = ("sigma", "gamma") if self.is_gaussian else ("gamma", "sigma")
        rule = f"omitted for {self.noise} noise"
        require(getattr(self, wrong) is None, owner, wrong, rule, getattr(self, wrong))
        given = [getattr(self, name) for name in (right, "target_epsilon")]
        once = sum(value is not None for value in given) == 1
        require(once, owner, f"{right} or target_epsilon", "given, one of the two", given)

    @property
    def is_gaussian(self) -> bool:
        """Whether the strength is a standard deviation."""
        return self.noise.endswith("gaussian")

    @property
    def given_scale(self) -> float | None:
        """The scale of the noise, unless it follows from a target."""
        if self.target_epsilon is not None:
            return None
        return self.sigma if self.is_gaussian else 1 / float(self.gamma or 1)


@dataclass(frozen=True, kw_only=True)
class ReleaseSpec(NoiseSpec):
    """Noise together with the delta of its guarantee.

    Parameters
    ----------
    delta : float
    seeded_noise : bool
        Draw noise from the experiment's seed, for reproducible simulations. There is no
        guarantee then: epsilon is infinite.
    """

    delta: float = option(DEFAULT_DELTA, "delta of every privacy figure", above=0, below=1)
    seeded_noise: bool = option(False, "repeatable noise, which protects nobody")

    def rng(self, seed: int, *path: str | int) -> np.random.Generator | None:
        """Return the source of noise: the operating system unless noise is seeded."""
        return derive_rng(seed, "noise", *path) if self.seeded_noise else None


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
            Public. Entries are clipped at it, and for Gaussian noise the norms of rows too.
        num_values : int
            Entries of a row.
        num_contributors : int
            Number of contributors that the mean is over.
        num_rows : int
            Total number of rows that will be released; it only determines the scale of a
            calibrated mechanism.
        besides : sequence of (event, count)
            Other releases within the target.
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
        """Return the charges for releasing this many entries."""
        rows = num_entries // mechanism.num_values
        return mechanism.charges(rows, seeded=self.seeded_noise)
