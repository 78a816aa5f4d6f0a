"""FedRegression: sums of features times labels on public principal components.

Logistic regression learns from labels through one sum alone, that of features times labels:
the gradient of its likelihood is this sum less what the model itself expects, and for that
rows without labels are enough. So parties release the sum, once and with noise, and the
server takes the expectation over public rows. Whoever holds which class, the sum over all
parties is that of their pooled records.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final

import numpy as np
import scipy

from fl_strategies._util import Array, FloatArray, IntArray, one_blas_thread
from fl_strategies.aggregation.moments import logistic_weights
from fl_strategies.errors import require
from fl_strategies.learners import Learner, Task
from fl_strategies.options import option
from fl_strategies.privacy.mechanisms import MOST_SUMS
from fl_strategies.privacy.planning import (
    USUAL_STRENGTH,
    Draft,
    Facts,
    outweighed_components,
    usual_components,
)
from fl_strategies.release import variants_at
from fl_strategies.strategies.sums.options import SumOptions, SumPlanner
from fl_strategies.strategies.sums.party import SumParty
from fl_strategies.strategies.sums.server import Counted, SumStrategy
from fl_strategies.strategies.sums.summary import (
    DIRECTION,
    LARGEST_SUM,
    VALUES_AT_ONCE,
    PartySums,
    Summary,
    known_classes,
    most_of_noise,
    principal_axes,
)
from fl_strategies.wire.knowledge import Metrics

LEVELS: Final = 2**8
"""Length of a unit row in rounded units."""
MOST_COMPONENTS: Final = 2**12
NUM_COMPONENTS: Final = "num-components"
RIDGE: Final = 0.5
"""Penalty of the regression, as a multiple of the noise on one mean."""
_LEAST_RIDGE: Final = 1e-6
_CONSTANT: Final = 0.2
"""The entry that every row has, for a model's intercept, before rows have length 1."""
CONSTANT: Final = round(LEVELS * _CONSTANT / math.hypot(1.0, _CONSTANT))
"""The constant entry in rounded units."""
_INSIDE: Final = 0.9
"""Share of public rows that are not shortened."""
# Rounding of a computed length must not leave a row longer than it says.
_A_LITTLE_MORE: Final = 1 + 2.0**-40
_LEAST_VARIANCE: Final = 1e-9
FARTHEST: Final = 2.0
"""Square of the length of a mean of features times labels, where the features of public rows
have deviation 1 in every direction. Labels of rows like these give 1 at most, the rows of one
class alone up to 1 divided by its share."""
_SCORE_NOISE: Final = 1.4
"""Noise on the score of a public row, by that on one mean and one feature: 1.2 to 1.8 on Adult,
cod-rna, digits and breast-cancer from four components on."""
_SMALL: Final = 0.03
"""Length of the mean of parties' directions, whose own length says nothing: so small that the
regression is that of least squares."""


@dataclass(frozen=True, kw_only=True)
class FedRegressionOptions(SumOptions):
    """Options of `FedRegression`; see `SumOptions`.

    Parameters
    ----------
    num_components : int, optional
        Principal components of the public rows that the regression sees; by default what
        `usual_components` says.
    """

    owner: ClassVar[str] = "FedRegression"

    num_components: int | None = option(
        None, "principal components of public rows; 0: as many as stand out from noise", least=1
    )


@dataclass(frozen=True, eq=False)
class Components(Summary):
    """Rows as integer features of bounded length, for sums of features times labels.

    `mean` (num_values,) and `turn` (num_values, num_components) make components of rows, of
    which most rows then have length below 1.
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

        Each is divided by the square root of its deviation: half way between unscaled rows,
        where only the first component stands out from noise, and components of equal spread.
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
        step = max(1, VALUES_AT_ONCE // widest)
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

    `features` (n, num_features) are those of public rows, whose mean stands for that of all
    records. `means` (num_features, columns) are those of features times labels, over records,
    as multiples of `LEVELS`; `noise` is the deviation of the noise on each.
    """
    rows, several = features / LEVELS, task == "multi-label"
    classes = not several and num_classes > 2
    scores = rows @ fitted_weights(rows, means, noise, softmax_link=classes)
    if classes:
        return np.asarray(scipy.special.softmax(scores, axis=1))
    positive = scipy.special.expit(2 * scores)
    return np.asarray(positive if several else np.hstack([1 - positive, positive]))


def fitted_weights(
    rows: FloatArray, means: FloatArray, noise: float, *, softmax_link: bool
) -> FloatArray:
    """Return the weights of the regression that expects these means, (num_features, columns).

    The loss is convex, and its gradient what the model expects on the rows less the means,
    plus a penalty in proportion to the noise.
    """
    ridge = max(RIDGE * noise, _LEAST_RIDGE)
    return logistic_weights(rows, means, ridge, softmax_link=softmax_link)


@dataclass(frozen=True, eq=False)
class Ellipsoid:
    """Means of features times labels that rows like the public ones give.

    By the inequality of Bessel, a mean m of features times numbers from -1 to 1 has
    m' S^-1 m at most 1, where S is the mean square of the features. Projections on a convex
    set bring no two points farther apart. `squares` are the mean squares along the axes, which
    are the columns of `axes`.
    """

    squares: FloatArray
    axes: FloatArray

    @classmethod
    @one_blas_thread()
    def of_features(cls, features: IntArray, longest: float) -> "Ellipsoid":
        """Return that of public rows, and of one more that is as long as rows can be."""
        squares, axes = np.linalg.eigh(features.T @ features / len(features))
        return cls(np.maximum(squares, 0.0) + longest**2 / len(features), axes)

    @one_blas_thread()
    def project(
        self, sums: IntArray, num_records: int, noise: float, num_labels: int = 1
    ) -> FloatArray | IntArray:
        """Return the nearest plausible sums (num_features, columns), unchanged if plausible.

        `noise` is the deviation of the noise on each, `num_labels` the labels of a record.
        """
        variance = (noise / num_records) ** 2
        squares = self.squares + variance
        parts = variance / squares
        # Means of few rows are as much longer as there are features.
        usual = num_labels * (FARTHEST + len(squares) / num_records)
        by_noise = math.sqrt(sums.shape[1] * float(parts.sum()))
        by_noise += most_of_noise(math.sqrt(float(parts.max())))
        most = (math.sqrt(usual) + by_noise) ** 2
        along = self.axes.T @ (sums / num_records)
        energy = np.square(along).sum(axis=1)

        def beyond(shift: float) -> float:
            return float((energy * squares / (squares + shift) ** 2).sum()) - most

        if beyond(0.0) <= 0:
            return sums
        largest = math.sqrt(float((energy * squares).sum()) / most)
        shift = scipy.optimize.brentq(beyond, 0.0, largest, xtol=1e-300, rtol=1e-15)
        nearest = self.axes @ (along * (squares / (squares + shift))[:, None])
        return np.asarray(nearest * num_records)


@dataclass(frozen=True, kw_only=True)
class Regression(SumPlanner):
    """Plans `FedRegression`: sums of components by class.

    A margin is the lead of the first class at a row; noise on the sums becomes noise on the
    regression's score of the row.
    """

    strategy: ClassVar[str] = "fedregression"
    moved_squared: ClassVar[int] = 4
    moved_by_party: ClassVar[float] = 2.0

    def noise_share(self, noise: float, num_parties: int, num_records: int) -> float:
        """Return the noise on one sum as a share of what all sums usually are together."""
        by_party = self.level == "L1"
        return noise / (num_parties if by_party else USUAL_STRENGTH * num_records)

    def _share(self, facts: Facts) -> float:
        _, noise = self.noise(facts)
        return self.noise_share(noise, facts.num_parties, facts.all_records)

    def problem(self, facts: Facts) -> str:
        """Describe noise that leaves no signal in even one component, or return ""."""
        return outweighed_components(self._share(facts))

    def draft(self, facts: Facts) -> Draft:
        """Return the regression that the strategy makes by default."""
        sums, share = self.noise(facts)[0], self._share(facts)
        columns = facts.num_columns or facts.num_public
        components = usual_components(facts.num_public, columns, share)
        score = _SCORE_NOISE * USUAL_STRENGTH * share * (components + 1)
        # With two classes one score has the noise, with more the score of each class.
        binary = facts.num_classes == 2
        each, classes = (score / math.sqrt(2), 1) if binary else (score, facts.num_classes)
        return Draft(
            noise="gaussian",
            scale=sums.drawn_scale,
            asked="components",
            num_asked=components,
            voters=f"all {self.whose}, a linear model",
            right=facts.right_labels("gaussian", each, 1.0),
            batches=[sums.charges((components + 1) * classes)],
            settings=self.settings,
            # From so many labels least squares would learn two classes as well.
            worth=(components + 1) / score**2 if binary else None,
        )


class FedRegression(SumStrategy[Components]):
    """One round: parties sum principal components of their records times labels.

    Leaves the party
        One number for each component and class (or label): the sum of this component over
        the records of the class, with noise.
    Guarantee
        L2: each record is protected against the server and everybody else, by noise that
        the party itself adds; central: against everybody but the server, which adds the
        noise once; L1: each party, against everybody but the server. One release, so one
        price. Not covered: the number of records, held-out rows, settings chosen on
        private data.

    Parameters
    ----------
    **settings
        See `SumStrategy`; `options` are `FedRegressionOptions`.

    Notes
    -----
    The labels of records enter the likelihood of logistic regression through these sums
    alone; what else it needs, the server takes from public rows, which must be like the
    records. Sums are those of pooled records, so that it does not matter which party holds
    which class, and a party counts by its records: nothing need be weighted. The penalty of
    the regression and the number of components follow from the noise.

    The public rows are then labelled by the regression, and the final model learns them. At
    L1 these labels are hard: how sure the regression is does not follow from directions.
    """

    name: ClassVar[str] = "fedregression"
    options_type = FedRegressionOptions
    planner_type = Regression
    private_variants = variants_at("fedregression", "L2", "central", "L1")
    usual_final_learners = ("logistic-regression",)
    record_length = LEVELS
    options: FedRegressionOptions
    _planner: Regression
    open_setting = "num_components"

    def _summarise(self) -> Components:
        most, number = min(self.width, MOST_COMPONENTS), self.options.num_components
        if number is None:
            number = usual_components(len(self.public), most, self._noise_share())
        most = min(most, MOST_SUMS // self.num_classes - 1)
        rule = f"at most {most}, for so many columns and classes"
        require(number <= most, "FedRegression", "num_components", rule, number)
        return Components.of_rows(self.public, number)

    def _noise_share(self) -> float:
        noise = self._planned_noise()
        return self._planner.noise_share(noise, self.num_parties, self._num_records)

    def _no_signal(self) -> str:
        """Describe noise that leaves no signal in two components, or return ""."""
        return outweighed_components(self._noise_share())

    def _plausible(self, one: PartySums, noise: float) -> FloatArray | IntArray:
        """Return the nearest sums that rows like the public ones give."""
        return self._ellipsoid.project(one.sums, one.num_records, noise, self.num_labels)

    @cached_property
    def _ellipsoid(self) -> Ellipsoid:
        return Ellipsoid.of_features(self._features, self._summary.longest)

    @cached_property
    def _features(self) -> IntArray:
        return self._summary.features(self.public)

    def _evidence(
        self, sums: FloatArray | IntArray, num_records: float, noise: float
    ) -> tuple[FloatArray, FloatArray]:
        """Return how far public rows point where a class does; of two, or labels, one scale."""
        scores = self._features @ (sums / num_records)
        if self.task == "multi-label" or self.num_classes == 2:
            return scores, np.ones(scores.shape[1])
        return scores, known_classes(sums[-1] / CONSTANT, noise / CONSTANT)

    def _model_of(self, total: FloatArray, noise: float, counted: Counted) -> Learner:
        """Return a model of public rows that are labelled by the fitting regression."""
        by_party = self.options.level == "L1"
        if by_party:
            whole = counted.num_parties * DIRECTION / _SMALL
        else:
            whole = LEVELS * counted.num_records
        shares = fitted_shares(
            self._features, total / whole, noise / whole, self.num_classes, self.task
        )
        if by_party:
            # All of a row's share for its likeliest class, or each likely label.
            sharp = np.eye(shares.shape[1])[shares.argmax(axis=1)]
            shares = (shares > 0.5).astype(np.float64) if self.task == "multi-label" else sharp
        return self._labelled(shares)

    def _details(self) -> Metrics:
        return {NUM_COMPONENTS: self._summary.num_features - 1}


REGRESSION_PARTY: Final = SumParty(FedRegressionOptions, Components, Regression)
