"""A mean that some liars cannot move: the filter of robust statistics.

Diakonikolas, Kamath, Kane, Li, Moitra, Stewart: Being Robust (in High Dimensions) Can Be
Practical (ICML 2017), with the weights of Hopkins, Li, Zhang: Robust and Heavy-Tailed Mean
Estimation Made Simple (NeurIPS 2020).

Liars who move a mean far must stand far from it in one direction, and so make the variance
there large. While it is, points lose weight in proportion to their squared distance along
that direction, and the farthest loses all. As long as liars cause most of the variance they
lose more weight than honest points, so at most twice their share is lost before it is small.
What is left is then O(sqrt(share)) deviations of the honest points from their mean. Since at
most half of all weight is lost, this holds for a quarter of liars and less: 40 of 100 at one
distant place keep some weight, and move the mean as far as they like.
"""

import math
from typing import Final

import numpy as np

from fl_strategies.arrays import Array, FloatArray

MOST_TIMES_USUAL: Final = 1.5
"""A deviation is large beyond so many times the usual one, by the median distance."""
MOST_LOST: Final = 0.5
"""Share of all weight that can be lost at most, however many liars are expected."""
_DEVIATION_OF_MEDIAN: Final = 1.4826
_LEAST_VARIANCE: Final = 1e-12


def filtered_mean(points: FloatArray, share: float) -> FloatArray:
    """Return the mean of points after filtering, for many sets of points at once.

    Parameters
    ----------
    points : (num_sets, num_points, num_dimensions)
    share : float
        Largest share of liars; their number is rounded up.

    Returns
    -------
    array of (num_sets, num_dimensions)

    Examples
    --------
    >>> filtered_mean(np.array([[[0.0], [1.0], [2.0], [1.0], [900.0]]]), 0.2).round(2)
    array([[1.]])
    """
    num_points = points.shape[1]
    weights = np.full(points.shape[:2], 1 / num_points)
    most_liars = math.ceil(share * num_points) / num_points
    least = 1 - min(2 * most_liars, MOST_LOST)
    open_ = np.arange(len(points))
    while len(open_):
        squares, suspicious = _suspicion(points[open_], weights[open_])
        open_, squares = open_[suspicious], squares[suspicious]
        shares = squares / squares.max(axis=1, keepdims=True)
        room, lost = weights[open_].sum(axis=1) - least, (weights[open_] * shares).sum(axis=1)
        # Honest points are what is lost beyond twice the share of liars.
        part = np.clip(room / lost, 0.0, 1.0)
        weights[open_] *= 1 - part[:, None] * shares
        open_ = open_[room > lost]
    return _means(points, weights)


def _suspicion(points: FloatArray, weights: FloatArray) -> tuple[FloatArray, Array]:
    """Return squared distances in the direction of most variance, and whether it is large.

    Points without weight have distance 0.
    """
    away = points - _means(points, weights)[:, None, :]
    along = np.einsum("snd,sd->sn", away, _directions(away, weights))
    squares = np.where(weights > 0, along**2, 0.0)
    variance = (weights * squares).sum(axis=1) / weights.sum(axis=1)
    usual = _DEVIATION_OF_MEDIAN * _median_distance(along)
    large = variance > np.maximum((MOST_TIMES_USUAL * usual) ** 2, _LEAST_VARIANCE)
    return squares, large


def _median_distance(along: FloatArray) -> FloatArray:
    """Return the median distance of all points to their median, on which few have a hold."""
    middle = np.median(along, axis=1, keepdims=True)
    return np.asarray(np.median(np.abs(along - middle), axis=1))


def _directions(away: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the unit vector of most variance of each set, by the smaller of two problems."""
    scaled = np.sqrt(weights)[:, :, None] * away
    if scaled.shape[1] >= scaled.shape[2]:
        return np.asarray(np.linalg.eigh(np.einsum("snd,sne->sde", scaled, scaled))[1][..., -1])
    left = np.linalg.eigh(np.einsum("snd,smd->snm", scaled, scaled))[1][..., -1]
    found = np.einsum("sn,snd->sd", left, scaled)
    lengths = np.linalg.norm(found, axis=1, keepdims=True)
    return np.asarray(found / np.where(lengths > 0, lengths, 1.0))


def _means(points: FloatArray, weights: FloatArray) -> FloatArray:
    total = weights.sum(axis=1, keepdims=True)
    return np.asarray(np.einsum("sn,snd->sd", weights, points) / total)
