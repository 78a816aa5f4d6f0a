"""Principal components of public rows, and the regression that sums of them determine.

Logistic regression learns from labels through one sum alone, that of features times labels:
the gradient of its likelihood is this sum less what the model itself expects, and for that
rows without labels are enough. So parties release the sum, once and with noise, and the
server takes the expectation over public rows. Whoever holds which class, the sum over all
parties is that of their pooled records.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import scipy

from fl_strategies.arrays import Array, FloatArray, IntArray
from fl_strategies.core.tasks import Task
from fl_strategies.strategies.sums.summary import LARGEST_SUM, Summary, principal_axes
from fl_strategies.threads import one_blas_thread

LEVELS: Final = 2**8
"""What a row of length 1 is rounded to, entry by entry."""
MOST_COMPONENTS: Final = 2**12
RIDGE: Final = 0.5
"""Penalty of the regression, as a multiple of the noise on one mean."""
_LEAST_RIDGE: Final = 1e-6
_CONSTANT: Final = 0.2
"""The entry that every row has, for a model's intercept, before rows have length 1."""
CONSTANT: Final = round(LEVELS * _CONSTANT / math.hypot(1.0, _CONSTANT))
"""What it is rounded to."""
_INSIDE: Final = 0.9
"""Share of public rows that are not shortened."""
_STEPS: Final = 300
_VALUES_AT_ONCE: Final = 2**22
# Rounding of a computed length must not leave a row longer than it says.
_A_LITTLE_MORE: Final = 1 + 2.0**-40
_LEAST_VARIANCE: Final = 1e-9


@dataclass(frozen=True, eq=False)
class Components(Summary):
    """Rows as whole-number features of bounded length, for sums of features times labels.

    Parameters
    ----------
    mean : (num_values,)
    turn : (num_values, num_components)
        Turns centred rows to components, of which most rows then have length below 1.
    """

    kind: ClassVar[str] = "components"
    signed: ClassVar[bool] = True
    names: ClassVar[tuple[str, ...]] = ("mean", "turn")
    most: ClassVar[int] = MOST_COMPONENTS

    mean: FloatArray
    turn: FloatArray

    @classmethod
    @one_blas_thread()
    def of_rows(cls, rows: Array, num_components: int) -> "Components":
        """Find the components of public rows (n, ...).

        Each is scaled by the root of its deviation: half way between rows as they are,
        where noise drowns all components but the first, and components of equal spread.
        """
        centred, mean, scales, variances, axes = principal_axes(rows)
        variances, axes = variances[:num_components], axes[:, :num_components]
        # The sign of an axis is the solver's choice; this one is the same everywhere.
        axes = axes * np.where(
            axes[np.abs(axes).argmax(axis=0), range(axes.shape[1])] < 0, -1, 1
        )
        turn = scales[:, None] * axes * np.maximum(variances, _LEAST_VARIANCE) ** -0.25
        lengths = np.linalg.norm(centred @ turn, axis=1)
        longest = float(np.quantile(lengths, _INSIDE))
        return cls(mean, turn / (longest if longest > 0 else 1.0))

    @property
    def num_features(self) -> int:
        """Components and the constant."""
        return int(self.turn.shape[1]) + 1

    @one_blas_thread()
    def features(self, rows: Array) -> IntArray:
        """Return the features of rows, (n, num_features), each row at most `longest` long."""
        flat = rows.reshape(len(rows), -1)
        with np.errstate(over="ignore", invalid="ignore"):
            placed = (flat - self.mean) @ self.turn
            lengths = np.linalg.norm(placed, axis=1, keepdims=True)
            placed = placed / np.maximum(lengths * _A_LITTLE_MORE, 1.0)
        # Rows beyond all numbers are taken for the mean; they too have one place.
        placed = np.where(np.isfinite(placed).all(axis=1, keepdims=True), placed, 0.0)
        constant = np.full((len(flat), 1), _CONSTANT)
        scaled = np.hstack([placed, constant]) * (LEVELS / math.hypot(1.0, _CONSTANT))
        return np.rint(scaled).astype(np.int64)

    @property
    def longest(self) -> float:
        """The most that the features of a row are long: rounding moves each by a half."""
        return LEVELS + math.sqrt(self.num_features) / 2

    def shape(self, num_classes: int, task: Task) -> tuple[int, ...]:
        """Return features by classes or labels; two classes are one label."""
        return (self.num_features, 1 if _is_binary(num_classes, task) else num_classes)

    @one_blas_thread()
    def of_records(self, x: Array, y: Array, num_classes: int, task: Task) -> IntArray:
        """Return the sum of features times labels, or of the features of each class.

        A label counts 1 or -1, and 0 if nobody knows it.
        """
        total = np.zeros(self.shape(num_classes, task), dtype=np.int64)
        widest = max(*total.shape, len(self.mean), num_classes)
        step = max(1, _VALUES_AT_ONCE // widest)
        for start in range(0, len(x), step):
            part = slice(start, start + step)
            # Products of floats are ten times as fast, and exact below 2**53.
            features = self.features(x[part]).astype(np.float64)
            total += (features.T @ _codes(y[part], num_classes, task)).astype(np.int64)
        return total

    def moved(self, num_classes: int, task: Task) -> float:
        """Return twice the length of what one record adds.

        Features times one label or one class are as long as the features; times several
        labels, as the root of their number more.
        """
        labels = num_classes if task == "multi-label" else 1
        return 2 * self.longest * math.sqrt(labels)

    def unused(self, num_classes: int, task: Task) -> float:
        """Return how much less than `moved` replacing one record moves a sum, at least.

        `moved` has a half for rounding the constant too, which is the same for every row.
        """
        placed = LEVELS / math.hypot(1.0, _CONSTANT) + math.sqrt(self.num_features - 1) / 2
        used = math.hypot(placed, CONSTANT) / self.longest
        return self.moved(num_classes, task) * (1 - used)

    def possible(self, sums: IntArray, num_records: int, task: Task) -> bool:
        """Tell whether the features of so many records can have these sums.

        The last feature is constant: its sums are the records of the classes, and no
        other is longer than these records can make it.
        """
        counts, rest = np.divmod(sums[-1], CONSTANT)
        lengths = np.linalg.norm(sums.astype(np.float64), axis=0)
        several = task == "multi-label" or sums.shape[1] == 1
        holders = np.full(len(counts), num_records) if several else counts
        if num_records * LEVELS > LARGEST_SUM:
            # Entries beyond it have been cut.
            return bool((lengths <= num_records * self.longest).all())
        if rest.any() or (lengths > holders * self.longest).any():
            return False
        if several:
            return bool((np.abs(counts) <= num_records).all())
        return bool(counts.min() >= 0) and int(counts.sum()) == num_records

    @classmethod
    def _fits(cls, arrays: Mapping[str, Array]) -> bool:
        return bool(arrays["turn"].shape[1] <= cls.most)


def _is_binary(num_classes: int, task: Task) -> bool:
    return task == "single-label" and num_classes == 2


def _codes(y: Array, num_classes: int, task: Task) -> IntArray:
    """Return what labels count, (n, columns of a sum)."""
    if task == "multi-label":
        return np.where(y >= 0, 2 * y.astype(np.int64) - 1, 0)
    if num_classes == 2:
        return 2 * y.astype(np.int64)[:, None] - 1
    return np.eye(num_classes, dtype=np.int64)[y]


def fitted_shares(
    features: IntArray, means: FloatArray, noise: float, num_classes: int, task: Task
) -> FloatArray:
    """Return the classes' shares of rows by the regression that fits means of records.

    Parameters
    ----------
    features : (n, num_features)
        Of public rows, whose mean stands for that of all records.
    means : (num_features, columns)
        Of features times labels, over records, as multiples of `LEVELS`.
    noise : float
        Deviation of the noise on each mean.
    num_classes : int
    task : "single-label" or "multi-label"
    """
    rows, several = features / LEVELS, task == "multi-label"
    classes = not several and num_classes > 2
    scores = rows @ fitted_weights(rows, means, noise, softmax_link=classes)
    if classes:
        return np.asarray(scipy.special.softmax(scores, axis=1))
    positive = scipy.special.expit(2 * scores)
    return np.asarray(positive if several else np.hstack([1 - positive, positive]))


@one_blas_thread()
def fitted_weights(
    rows: FloatArray, means: FloatArray, noise: float, *, softmax_link: bool
) -> FloatArray:
    """Return the weights of the regression that expects these means, (num_features, columns).

    The loss is convex, and its gradient what the model expects on the rows less the means,
    plus a penalty in proportion to the noise.
    """
    ridge = max(RIDGE * noise, _LEAST_RIDGE)

    def loss(flat: FloatArray) -> tuple[float, FloatArray]:
        weights = flat.reshape(means.shape)
        scores = rows @ weights
        if softmax_link:
            normal = scipy.special.logsumexp(scores, axis=1)
            expected = scipy.special.softmax(scores, axis=1)
        else:
            normal, expected = np.logaddexp(scores, -scores).sum(axis=1), np.tanh(scores)
        value = normal.mean() - np.sum(weights * means) + ridge / 2 * np.sum(weights**2)
        gradient = rows.T @ expected / len(rows) - means + ridge * weights
        return float(value), gradient.ravel()

    start, steps = np.zeros(means.size), {"maxiter": _STEPS}
    found = scipy.optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=steps)
    return np.asarray(found.x.reshape(means.shape))
