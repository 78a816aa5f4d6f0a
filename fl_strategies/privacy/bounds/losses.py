"""Privacy loss of a single release, by every measure that applies to it."""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import scipy

from fl_strategies.privacy.bounds.composition import LossLaw
from fl_strategies.privacy.events import (
    GaussianEvent,
    LaplaceEvent,
    NoisyMaxEvent,
    OneVoteEvent,
    PrivacyEvent,
    ThresholdEvent,
)

# A loss like this protects nobody, and its square still fits into a float.
_HOPELESS = 1e6
# Beyond so many scales noise is drawn with a chance below 1e-300.
_FAR = 700.0
# What numerical integrals may be off, with room to spare.
_SAFETY = 1e-9


@dataclass(frozen=True)
class Loss:
    """Privacy loss of one release, by every measure that applies to it.

    Parameters
    ----------
    pure : float, optional
        The largest log-ratio between the chances of an outcome under two neighbours.
    spread : float, optional
        The largest difference between two such log-ratios, the bounded range.
    mu : float, optional
        The distance of two unit Gaussians that are as hard to tell apart.
    published : bool
        Whether it is noisy max with Laplace noise, for which papers print moments.
    law : LossLaw, optional
        The law of the loss, where more is known than `pure`.
    """

    pure: float | None = None
    spread: float | None = None
    mu: float | None = None
    published: bool = False
    law: LossLaw | None = None

    @property
    def rho(self) -> float:
        """Return the smallest rho for which the release is known to be rho-zCDP."""
        if self.mu is not None:
            return self.mu * self.mu / 2
        if self.spread is not None:
            return self.spread * self.spread / 8
        return math.inf if self.pure is None else self.pure * self.pure / 2


def loss_of(event: PrivacyEvent) -> Loss:
    """Return what one release with noise can tell; infinite for any other event."""
    if isinstance(event, NoisyMaxEvent):
        return _loss_of_noisy_max(event)
    if isinstance(event, OneVoteEvent):
        return _loss_of_one_vote(event)
    if isinstance(event, ThresholdEvent):
        return Loss(mu=_ratio(event.sensitivity, event.scale))
    if isinstance(event, GaussianEvent):
        return Loss(mu=_ratio(event.l2_sensitivity, event.scale))
    if isinstance(event, LaplaceEvent):
        pure = _ratio(event.l1_sensitivity, event.scale)
        return Loss(pure, law=LossLaw(pure, smooth=True))
    return Loss(pure=math.inf)


def _loss_of_noisy_max(event: NoisyMaxEvent) -> Loss:
    step = _ratio(event.sensitivity, event.scale)
    moved = 2 if event.relation == "replace-one" else 1
    if event.noise == "gaussian":
        return Loss(mu=step * math.sqrt(moved))
    pure, laplace = moved * step, event.noise == "laplace"
    # For three classes and more, Laplace noise exceeds this range by up to a sixth.
    ranged = not laplace or event.num_classes == 2
    return Loss(pure=pure, spread=pure if ranged else None, published=laplace)


def _loss_of_one_vote(event: OneVoteEvent) -> Loss:
    """Noise that is the same for all classes makes one vote randomised response."""
    wrong = _chance_of_each_other(event.noise, event.scale, event.num_classes)
    right = 1 - (event.num_classes - 1) * wrong
    pure = math.log(right / wrong) if wrong > 0 else math.inf
    if event.noise == "gumbel":
        pure = _ratio(1.0, event.scale)
    law = LossLaw(pure, silent=(event.num_classes - 2) * wrong)
    mu = _ratio(math.sqrt(2), event.scale) if event.noise == "gaussian" else None
    return Loss(pure, mu=mu, law=law)


@lru_cache(maxsize=256)
def _chance_of_each_other(noise: str, scale: float, num_classes: int) -> float:
    """Return how likely each class that was not voted for is answered, at most."""
    step, others = 1 / scale, num_classes - 1
    if step > _FAR:
        return 0.0
    if noise == "gumbel":
        return 1 / (math.exp(step) + others)
    laplace = noise == "laplace"
    log_density, log_share = (
        (_laplace_log_density, _laplace_log_share)
        if laplace
        else (_gaussian_log_density, lambda x: float(scipy.special.log_ndtr(x)))
    )

    def beaten(x: float) -> float:
        return math.exp(log_density(x - step)) * -math.expm1(others * log_share(x))

    reach = 80.0 if laplace else 20.0
    edges = [-reach, 0.0, step / 2, step, step + 4, step + reach]
    pieces = [
        scipy.integrate.quad(beaten, a, b, epsabs=0, epsrel=1e-11, limit=200, full_output=1)[:2]
        for a, b in pairwise(edges)
    ]
    # Less than the truth: the vote then counts as clearer than it is.
    least = math.fsum(value - error for value, error in pieces) * (1 - _SAFETY)
    return max(0.0, least) / others


def _laplace_log_density(x: float) -> float:
    return -abs(x) - math.log(2)


def _laplace_log_share(x: float) -> float:
    return math.log1p(-math.exp(-x) / 2) if x >= 0 else x - math.log(2)


def _gaussian_log_density(x: float) -> float:
    return -x * x / 2 - math.log(2 * math.pi) / 2


def _ratio(distance: float, scale: float) -> float:
    ratio = distance / scale
    return ratio if ratio < _HOPELESS else math.inf


def sampling_error(event: PrivacyEvent) -> float:
    """Return how far the chances of a drawn release lie from the ideal ones.

    It is a distance in total variation; see `fl_strategies.privacy.secure`. Two neighbours that
    are both off by so much are (epsilon, delta + (1 + exp(epsilon)) error)-private. The
    noise of DP-SGD is drawn by torch and is taken as it is.
    """
    if isinstance(event, NoisyMaxEvent | OneVoteEvent):
        return float(event.num_classes * 2.0 ** (-50 if event.noise == "gumbel" else -45))
    if isinstance(event, ThresholdEvent):
        return 2.0**-45
    if isinstance(event, LaplaceEvent):
        return float(event.num_values * 2.0**-57)
    if isinstance(event, GaussianEvent):
        return float(event.num_values * 2.0**-50)
    return 0.0
