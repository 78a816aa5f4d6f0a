"""How much noise a promise needs."""

import math
from collections.abc import Callable, Sequence

from fl_strategies.exceptions import InvalidParameter
from fl_strategies.privacy._numeric import check_delta, check_positive
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.ledger import cost_of

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
    """Return the least scale of noise that keeps the promise, to six digits.

    Parameters
    ----------
    make_entries : callable
        Maps a scale to the (event, count) pairs of one batch. More scale must cost less.
    target_epsilon, delta : float
    num_batches : int
        How many such batches are released, each after the answers of those before it.
    least : float
        The least scale that the mechanism has.

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
