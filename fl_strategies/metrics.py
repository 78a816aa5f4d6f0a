"""Metrics of many parties as one record, each by the rule its meaning asks for.

Flower's default takes a weighted mean of every key. For an epsilon that is wrong: the
mean of 1 and 50 promises more to the second party than anybody kept. Privacy figures
are therefore combined by maximum, and a party that reports none counts as unprotected.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from fl_strategies import keys

Rule: TypeAlias = Callable[[Sequence[float], Sequence[float]], float]


def _total(values: Sequence[float], _: Sequence[float]) -> float:
    return sum(values)


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


def aggregate_metrics(parties: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of all parties key by key.

    A key that some party lacks counts as NaN there: ignored by means, infinite in
    privacy figures.

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
