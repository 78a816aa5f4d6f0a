"""Metrics of many parties as one record, each by the rule its meaning asks for.

Flower's default takes a weighted mean of every key. For an epsilon that is wrong: the
mean of 1 and 50 promises more to the second party than anybody kept. Privacy figures
are therefore combined by maximum, and a party that reports none counts as unprotected.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from fl_strategies.privacy.events import MOST
from fl_strategies.wire import keys

Rule: TypeAlias = Callable[[Sequence[float], Sequence[float]], float]


def _total(values: Sequence[float], _: Sequence[float]) -> float:
    return sum(value for value in values if not math.isnan(value))


def _largest(values: Sequence[float], _: Sequence[float]) -> float:
    return math.inf if any(map(math.isnan, values)) else max(values)


def _weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    pairs = [
        (value, weight)
        for value, weight in zip(values, weights, strict=True)
        if weight > 0 and not math.isnan(value)
    ]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else math.nan


RULES: Mapping[str, Rule] = {
    keys.NUM_EXAMPLES: _total,
    keys.NUM_BYTES_SENT: _total,
    keys.NUM_BYTES_RECEIVED: _total,
    keys.NUM_RELEASES: _total,
    keys.NUM_TEACHERS_MISSING: _total,
    keys.NUM_MODELS_REFUSED: _total,
    keys.EPSILON_PARTY: _largest,
    keys.EPSILON_EXAMPLE: _largest,
    keys.DELTA_PARTY: _largest,
    keys.DELTA_EXAMPLE: _largest,
}
"""Everything not listed is averaged, weighted by the number of examples."""


LONGEST_NAME: Final = 64
# Times a number of examples, and summed over all parties, it still fits into a float.
_LARGEST: Final = 1e100
_SHARES: Final = frozenset(
    {
        keys.ACCURACY,
        keys.BALANCED_ACCURACY,
        keys.MACRO_F1,
        keys.AUC,
        keys.MEAN_AUC,
        keys.BETTER_THAN_ALONE,
        keys.VOTE_AGREEMENT,
        keys.CONSISTENT_FRACTION,
    }
)


def clean_metrics(told: Mapping[str, float]) -> dict[str, float]:
    """Return what of a party's figures can be true; the rest counts as not told.

    NaN is what an honest party says where it has nothing to measure, and epsilon is
    infinite where nothing is promised.

    Examples
    --------
    >>> clean_metrics({"accuracy": 1e308, "num-examples": float("inf"), "auc": 0.5})
    {'auc': 0.5}
    """
    return {name: value for name, value in told.items() if _can_be(name, value)}


def _can_be(name: str, value: float) -> bool:
    least, most = _range_of(name)
    # Compared as it is: a whole number may be too large for a float.
    inside = _is_nan(value) or least <= value <= most
    return inside and 1 <= len(name) <= LONGEST_NAME and name.isprintable()


def _is_nan(value: float) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _range_of(name: str) -> tuple[float, float]:
    """Return the smallest and the largest value that a figure can have."""
    if name in _SHARES or name.startswith("delta-"):
        return 0.0, 1.0
    if name.startswith("epsilon-"):
        return 0.0, math.inf
    if name.startswith("num-"):
        return 0, MOST
    is_positive = name == keys.MEAN_SQUARED_ERROR
    return 0.0 if is_positive else -_LARGEST, _LARGEST


def aggregate_metrics(parties: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of all parties key by key.

    A key that some party lacks counts as NaN there: ignored by totals and means, infinite
    in privacy figures.

    Examples
    --------
    >>> a = {"num-examples": 10, "accuracy": 0.5, "epsilon-example": 1.0}
    >>> b = {"num-examples": 30, "accuracy": 0.9, "epsilon-example": 50.0}
    >>> aggregate_metrics([a, b])
    {'accuracy': 0.8, 'epsilon-example': 50.0, 'num-examples': 40}
    """
    weights = [max(party.get(keys.NUM_EXAMPLES, 0), 0) for party in parties]
    names = sorted({name for party in parties for name in party})
    return {
        name: RULES.get(name, _weighted_mean)(
            [party.get(name, math.nan) for party in parties], weights
        )
        for name in names
    }


def without_unknown(
    metrics: Mapping[str, float | list[float]],
) -> dict[str, float | list[float]]:
    """Return metrics without those that nobody knows.

    Examples
    --------
    >>> without_unknown({"accuracy": math.nan, "accuracy-by-party": [0.5, math.nan]})
    {'accuracy-by-party': [0.5, nan]}
    """
    return {
        name: value
        for name, value in metrics.items()
        if not all(map(math.isnan, value if isinstance(value, list) else [value]))
    }
