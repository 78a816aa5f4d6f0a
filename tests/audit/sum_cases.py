"""Broken mechanisms for sums, and the worst neighbours, whose sums are written down by hand."""

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from fl_strategies._util import Array, IntArray
from fl_strategies.features import FeatureMap
from fl_strategies.learners import Task
from fl_strategies.privacy.mechanisms import GaussianSums, Release, Source, discrete_gaussian
from fl_strategies.strategies.sums import SumPrivacy
from fl_strategies.strategies.sums.histogram import Cells
from fl_strategies.strategies.sums.moments import SummedMoments
from fl_strategies.strategies.sums.regression import Components
from fl_strategies.strategies.sums.statistics import NUMBER, Tally
from fl_strategies.strategies.sums.summary import Summary
from tests.audit.mechanisms import SIGNIFICANCE, AuditResult

EPSILON = 5.0


def seeded(seed: int = 5) -> np.random.Generator:
    return np.random.default_rng(seed)


def caught_by(result: AuditResult) -> set[str]:
    """Return which of the two tests failed."""
    attack = {"attack"} if result.lower_bound > result.claimed_epsilon else set()
    return attack | ({"fit"} if result.p_value < SIGNIFICANCE else set())


def honest(broken: GaussianSums, factor: float = 1.0) -> GaussianSums:
    """Return the mechanism that a broken one says it is, or with another scale."""
    values = {field.name: getattr(broken, field.name) for field in fields(GaussianSums)}
    return GaussianSums(**{**values, "scale": broken.scale * factor})


@dataclass(frozen=True, kw_only=True)
class Quiet(GaussianSums):
    """Draws half the noise that it charges for."""

    factor: ClassVar[float] = 0.5

    def release(self, sums: Array, rng: Source = None) -> Release:
        return honest(self, self.factor).release(sums, rng)


class TenthOff(Quiet):
    """Draws nine tenths of the noise that it charges for."""

    factor = 0.9


@dataclass(frozen=True, kw_only=True)
class OneDraw(GaussianSums):
    """Adds the same number to all sums of a release."""

    def release(self, sums: Array, rng: Source = None) -> Release:
        drawn = self.drawn_scale * discrete_gaussian(len(sums), rng) / 2**24
        noisy = sums + drawn.reshape(-1, *[1] * (sums.ndim - 1))
        return Release(noisy, self.charges(sums.size))


@dataclass(frozen=True, kw_only=True)
class DrawnBefore(GaussianSums):
    """Uses the noise of each release for the next one, too."""

    def release(self, sums: Array, rng: Source = None) -> Release:
        noise = honest(self).release(np.zeros_like(sums[::2]), rng).values
        return Release(sums + np.repeat(noise, 2, axis=0)[: len(sums)], self.charges(sums.size))


BROKEN: dict[Any, set[str]] = {
    Quiet: {"attack", "fit"},
    TenthOff: {"fit"},
    OneDraw: {"fit"},
    DrawnBefore: {"fit"},
}


class Case(NamedTuple):
    """Neighbouring records, and what they sum up to, multiplied as noise needs it."""

    summary: Summary
    num_classes: int
    task: Task
    x: tuple[Array, Array]
    y: tuple[IntArray, IntArray]
    exact: tuple[IntArray, IntArray]
    """Multiplied as they are before noise is added."""


FAR = 9.0
"""Beyond the ball of length 1, and within what a party's public rows allow."""
SIDE, CONSTANT = 251, 50
"""The features of a row at the edge: 256 times 1 and 0.2, over their length, rounded."""
CELLS = Cells(np.zeros(2), np.eye(2), np.array([[[0.0, 0.0], [3.0, 0.0], [0.0, 3.0]]]))
COMPONENTS = Components(np.zeros(2), np.eye(2))
PLAIN = FeatureMap.of_bounds(-np.ones(2), np.ones(2), length=1.0).settled()
MOMENTS = SummedMoments(PLAIN, 1, np.empty(0), np.empty(0))
FOLDED = SummedMoments(PLAIN, 2, np.empty(0), np.empty(0))
OF_A_NUMBER = SummedMoments(PLAIN, 1, np.zeros(1), np.ones(1))


PRODUCTS = Tally(
    num_values=2,
    low=np.full(2, -1.0),
    high=np.ones(2),
    kinds=np.array([NUMBER, NUMBER]),
    gaps=np.full(2, -1),
    levels=8,
    digits=1,
    num_bins=2,
    num_times=2,
)
"""Two numbers: the constant is 12, whose square weighs 5, and 7 times 12 each value."""
TIMES = replace(PRODUCTS, correlations=False, time=0, event=1)
"""Squares alone, and times that end by an event where the other number is at least a half."""


def rows(*own: float) -> Array:
    """Return two records at the origin, and the one that makes the difference."""
    return np.array([[0.0, 0.0], [0.0, 0.0], own])


def outer(features: list[int], code: list[int]) -> IntArray:
    return np.outer(features, code)


def tally(first: list[int], second: list[int]) -> IntArray:
    """Return sums of one record at the origin, and of two by steps of values and bins."""
    values, products, bins = second[:2], second[2:5], second[5:]
    steps = [1440, *(672 * value for value in values), *products, *(961 * n for n in bins)]
    return np.array([[first, steps]])


ONE = [128, 0, 0, 0, 0, 0, 128, 0, 128, 0, 0, 181, 0]
TWO = [256, 64, 64, 64, 64, 0, 256, 0, 256, 0, 0, 181, 181]
"""Counts, values, squares, bins of each number, and times without and with an event."""
SHARED = 60
"""Records that both neighbours of moments have, so that their products are not small."""
CORNER = [178, 178, CONSTANT]
"""The features of a row in the middle between both axes: 251.03 over the root of 2, rounded."""
NORTH, SLANTED, ACUTE = [0, SIDE, CONSTANT], [-140, 208, CONSTANT], [120, 220, CONSTANT]
"""Features of the others; the slanted one is at cosine -1/2 to one along the first axis."""
EAST = [SIDE, 0, CONSTANT]
PLACES = {
    tuple(EAST): (FAR, 0.0),
    tuple(NORTH): (0.0, FAR),
    tuple(SLANTED): (-2.8, 4.16),
    tuple(ACUTE): (2.4, 4.4),
}


def many(own: list[int]) -> Array:
    """Return records at the corner, and the one that makes the difference."""
    return np.array([*[(3.0, 3.0)] * SHARED, PLACES[tuple(own)]])


def labelled(own: int) -> IntArray:
    return np.array([*[0, 1] * (SHARED // 2), own])


def moments_of(
    own: list[int], codes: list[list[int]], multiple: int, code: int = 1, squares: int = 0
) -> IntArray:
    """Return multiplied moments of the shared records and another one, the last of `codes`.

    Targets are 5 times the rounded 257 times a class, and products 5 and 7 times as large.
    """
    features = np.array([*[CORNER] * SHARED, own])
    targets = features.T @ (np.array(codes) * code)
    gram = features.T @ features
    packed = [(5 if i == j else 7) * gram[i, j] for i in range(3) for j in range(i, 3)]
    middle = [squares] if squares else []
    return np.array([[*(multiple * targets.ravel()), *middle, *packed]])


def one_of(number: int, labels: IntArray) -> list[list[int]]:
    return [[int(label == k) for k in range(number)] for label in labels]


CASES = {
    "histogram": Case(
        CELLS,
        3,
        "single-label",
        (rows(0, 0), rows(FAR, 0)),
        (np.array([0, 1, 0]), np.array([0, 1, 2])),
        (
            np.array([[[2, 1, 0], [0, 0, 0], [0, 0, 0]]]),
            np.array([[[1, 1, 0], [0, 0, 1], [0, 0, 0]]]),
        ),
    ),
    "histogram of labels": Case(
        CELLS,
        2,
        "multi-label",
        (rows(0, 0), rows(0, FAR)),
        (np.array([[0, -1], [1, 1], [1, 0]]), np.array([[0, -1], [1, 1], [0, 1]])),
        (
            np.array([[[[1, 1], [2, 1]], [[0, 0], [0, 0]], [[0, 0], [0, 0]]]]),
            np.array([[[[1, 0], [1, 1]], [[0, 0], [0, 0]], [[1, 0], [0, 1]]]]),
        ),
    ),
    "components of a class": Case(
        COMPONENTS,
        3,
        "single-label",
        (rows(FAR, 0), rows(-FAR, 0)),
        (np.array([0, 1, 1]), np.array([0, 1, 1])),
        (
            np.array([[0, SIDE, 0], [0, 0, 0], [CONSTANT, 2 * CONSTANT, 0]]),
            np.array([[0, -SIDE, 0], [0, 0, 0], [CONSTANT, 2 * CONSTANT, 0]]),
        ),
    ),
    "components of two classes": Case(
        COMPONENTS,
        2,
        "single-label",
        (rows(0, FAR), rows(0, FAR)),
        (np.array([0, 1, 1]), np.array([0, 1, 0])),
        (outer([0, SIDE, CONSTANT], [1]), outer([0, SIDE, CONSTANT], [-1])),
    ),
    "moments of a class": Case(
        MOMENTS,
        3,
        "single-label",
        (many(EAST), many(SLANTED)),
        (labelled(1), labelled(1)),
        (
            moments_of(EAST, one_of(3, labelled(1)), 5 * 257),
            moments_of(SLANTED, one_of(3, labelled(1)), 5 * 257),
        ),
    ),
    "moments of two classes": Case(
        MOMENTS,
        2,
        "single-label",
        (many(EAST), many(ACUTE)),
        (labelled(1), labelled(0)),
        (
            moments_of(EAST, [[1 if y else -1] for y in labelled(1)], 5 * 257),
            moments_of(ACUTE, [[1 if y else -1] for y in labelled(0)], 5 * 257),
        ),
    ),
    "moments of a number": Case(
        OF_A_NUMBER,
        1,
        "regression",
        (many(EAST), many(ACUTE)),
        (
            np.array([[0.0]] * SHARED + [[FAR]]),
            np.array([[0.0]] * SHARED + [[-FAR]]),
        ),
        (
            moments_of(EAST, [[0]] * SHARED + [[1]], 5, 256, 256**2),
            moments_of(ACUTE, [[0]] * SHARED + [[-1]], 5, 256, 256**2),
        ),
    ),
    "components of labels": Case(
        COMPONENTS,
        2,
        "multi-label",
        (rows(FAR, 0), rows(FAR, 0)),
        (np.array([[1, 0], [0, 1], [1, 1]]), np.array([[1, 0], [0, 1], [0, 0]])),
        (outer([SIDE, 0, CONSTANT], [1, 1]), outer([SIDE, 0, CONSTANT], [-1, -1])),
    ),
    "products of columns": Case(
        PRODUCTS,
        2,
        "single-label",
        (rows(FAR, FAR), rows(-FAR, -FAR)),
        (np.array([0, 1, 1]), np.array([0, 1, 1])),
        (
            tally([720, 0, 0, 0, 0, 0, 0, 961, 0, 961], [1, 1, 320, 448, 320, 0, 2, 0, 2]),
            tally([720, 0, 0, 0, 0, 0, 0, 961, 0, 961], [-1, -1, 320, 448, 320, 1, 1, 1, 1]),
        ),
    ),
    "times of an event": Case(
        TIMES,
        2,
        "single-label",
        (rows(FAR, FAR), rows(FAR, FAR)),
        (np.array([0, 1, 1]), np.array([0, 1, 0])),
        (np.array([[ONE, TWO]]), np.array([[TWO, ONE]])),
    ),
}


@cache
def calibrated(moved: float, epsilon: float = EPSILON) -> GaussianSums:
    return SumPrivacy(target_epsilon=epsilon, delta=1e-5).mechanism(moved)


def repeat_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let secret noise come from a seed; it is charged as if it were secret."""
    rng = seeded()
    monkeypatch.setattr(SumPrivacy, "rng", lambda *_: rng)
