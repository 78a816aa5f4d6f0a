"""Slopes of losses in compiled kernels: what one row's scores should move by."""

from typing import Any, NamedTuple

import numpy as np

from clients.compiling import fast_part
from fl_strategies.arrays import Array

LABELS, SHARES, L1, L2, SQUARES = range(5)
"""What is minimised: the cross-entropy of labels or of shares of classes, or a norm."""

_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)


class Goal(NamedTuple):
    """What is to be learned: labels int64 (n,) or targets float32 (n, classes)."""

    kind: int
    of_shares: bool
    temperature: Any
    labels: Array
    targets: Array


@fast_part
def write_slopes(goal: Goal, row: int, scores: Array, share: Any, slopes: Array) -> None:
    """Write the gradient of a row's share of the loss."""
    if goal.kind == LABELS:
        _softmax(scores, goal.temperature, share, slopes)
        slopes[goal.labels[row]] -= share
    elif goal.kind == SHARES:
        targets, part = goal.targets[row], share / goal.temperature
        mass = _ZERO
        for c in range(len(targets)):
            mass += targets[c]
        _softmax(scores, goal.temperature, part * mass, slopes)
        for c in range(len(slopes)):
            slopes[c] -= part * targets[c]
    elif goal.of_shares:
        _softmax(scores, goal.temperature, _ONE, slopes)
        _through_softmax(goal.kind, goal.targets[row], share / goal.temperature, slopes)
    else:
        targets = goal.targets[row]
        length = _distance(scores, targets)
        for c in range(len(slopes)):
            slope = _norm_slope(goal.kind, scores[c] - targets[c], length, len(slopes))
            slopes[c] = share * slope


@fast_part
def _softmax(scores: Array, temperature: Any, mass: Any, out: Array) -> None:
    """Write shares of a mass."""
    top, total = scores[0], _ZERO
    for c in range(len(out)):
        top = max(top, scores[c])
    for c in range(len(out)):
        out[c] = np.exp((scores[c] - top) / temperature)
        total += out[c]
    for c in range(len(out)):
        out[c] *= mass / total


@fast_part
def _through_softmax(kind: int, targets: Array, share: Any, slopes: Array) -> None:
    """Turn shares of classes into the slopes of scores, by those of a norm."""
    length, mean = _distance(slopes, targets), _ZERO
    for c in range(len(slopes)):
        away = slopes[c] - targets[c]
        mean += slopes[c] * _norm_slope(kind, away, length, len(slopes))
    for c in range(len(slopes)):
        away = slopes[c] - targets[c]
        slopes[c] *= share * (_norm_slope(kind, away, length, len(slopes)) - mean)


@fast_part
def _distance(outputs: Array, targets: Array) -> Any:
    total = _ZERO
    for c in range(len(outputs)):
        total += (outputs[c] - targets[c]) * (outputs[c] - targets[c])
    return np.sqrt(total)


@fast_part
def _norm_slope(kind: int, away: Any, length: Any, size: int) -> Any:
    """Return the slope of a norm in one direction: 0 at 0, as PyTorch has it."""
    if kind == L1:
        return np.sign(away) / np.float32(size)
    if kind == SQUARES:
        return _TWO * away / np.float32(size)
    return away / length if length > 0 else _ZERO
