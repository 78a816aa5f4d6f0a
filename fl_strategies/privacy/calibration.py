"""How much noise, or how many answers, a promise allows."""

import math
from collections.abc import Callable, Sequence

from fl_strategies.exceptions import InvalidParameter
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.bounds._numeric import check_count, check_delta, check_positive
from fl_strategies.privacy.ledger import cost_of

_LEAST_SCALE, _LARGEST_SCALE = 1e-9, 1e12
_TOLERANCE = 1e-6


def _check_target(owner: str, target_epsilon: float, delta: float) -> None:
    check_positive(owner, "target_epsilon", target_epsilon)
    check_delta(owner, delta)


def _out_of_reach(owner: str, target_epsilon: float, delta: float, least: float) -> Exception:
    return InvalidParameter(
        f"{owner}: target_epsilon must be at least {least:.6g}, the least that these events "
        f"cost at delta {delta:g}, got {target_epsilon:g}."
    )


def calibrate_scale(
    make_entries: Callable[[float], Sequence[Entry]], target_epsilon: float, delta: float
) -> float:
    """Return the least scale of noise that keeps the promise, to six digits.

    Parameters
    ----------
    make_entries : callable
        Maps a scale to the (event, count) pairs of one batch. More scale must cost less.
    target_epsilon, delta : float

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
    _check_target(owner, target_epsilon, delta)

    def enough(scale: float) -> bool:
        return cost_of([make_entries(scale)], delta) <= target_epsilon

    if not enough(_LARGEST_SCALE):
        least = cost_of([make_entries(_LARGEST_SCALE)], delta)
        raise _out_of_reach(owner, target_epsilon, delta, least)
    high = 1.0
    while not enough(high):
        high *= 2
    low = high / 2
    while low > _LEAST_SCALE and enough(low):
        low, high = low / 2, low
    while high / low > 1 + _TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def calibrate_count(
    make_entries: Callable[[int], Sequence[Entry]],
    target_epsilon: float,
    delta: float,
    *,
    most: int,
) -> int:
    """Return the largest number of answers, from 1 to `most`, that keeps the promise.

    Parameters
    ----------
    make_entries : callable
        Maps a number of answers to the (event, count) pairs of one batch.
    target_epsilon, delta : float
    most : int
        As many as there are questions.

    Raises
    ------
    InvalidParameter
        If a single answer already costs more.

    Examples
    --------
    >>> from fl_strategies.privacy.events import GaussianEvent
    >>> event = GaussianEvent(
    ...     unit="party", relation="replace-one", scale=10.0, l2_sensitivity=1.0
    ... )
    >>> calibrate_count(lambda count: [(event, count)], 4.3772, 1e-5, most=1000)
    100
    """
    owner = "calibrate_count"
    _check_target(owner, target_epsilon, delta)
    check_count(owner, "most", most, least=1)

    def cost(count: int) -> float:
        return cost_of([make_entries(count)], delta)

    if cost(1) > target_epsilon:
        raise _out_of_reach(owner, target_epsilon, delta, cost(1))
    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= target_epsilon else (low, middle)
    return low
