"""How strong noise is, said once: what votes and scores have in common."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fl_strategies.exceptions import InvalidParameter, require
from fl_strategies.options import Options, option
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.randomness import derive_rng

logger = logging.getLogger("flwr.fl_strategies")


def require_audible(
    owner: str, words: str, *, accepted: bool, advice_of: Callable[[], str] = str
) -> None:
    """Raise if noise drowns what it protects: epsilon would be spent for nothing.

    `words` say how it does, and nothing if it does not; `advice_of` is asked then what would
    work. Where the noise is accepted, a warning says the same.
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
    logger.warning("%s: noise of %s drowns the answers. %s.", owner, words, advice)


@dataclass(frozen=True, kw_only=True)
class NoiseSpec(Options):
    """Noise by its scale, in the words of its kind, or by the epsilon to be kept.

    Parameters
    ----------
    noise : str
        Subclasses say which kinds there are and what they are for.
    gamma : float, optional
        Inverse scale of Gumbel or Laplace noise: larger means less noise.
    sigma : float, optional
        Standard deviation of Gaussian noise.
    target_epsilon : float, optional
        Instead of gamma or sigma: the noise is made just strong enough for it.
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
        """Check that the strength is said exactly once, in the words of the noise."""
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
    """Noise together with what its promise is stated for.

    Parameters
    ----------
    delta : float
    seeded_noise : bool
        Draw noise from the experiment's seed, for repeatable simulations. Nothing is
        promised then: epsilon is infinite.
    """

    delta: float = option(DEFAULT_DELTA, "delta of every privacy figure", above=0, below=1)
    seeded_noise: bool = option(False, "repeatable noise, which protects nobody")

    def rng(self, seed: int, *path: str | int) -> np.random.Generator | None:
        """Return the source of noise: the operating system unless noise is seeded."""
        return derive_rng(seed, "noise", *path) if self.seeded_noise else None
