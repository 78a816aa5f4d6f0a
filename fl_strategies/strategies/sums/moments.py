"""FedMoments: a linear model of features that is exactly that of pooled records.

    server   decides by public rows or declared bounds which features rows have, and sends this
    party    sums its records' features times targets, and products of features
    server   adds the sums, solves for the weights, and chooses features and penalty by folds

Least squares depends on records through these sums alone. They are whole numbers, so that the
sum over parties is that of all records to the bit, whoever holds which: parties of one class
or of ten records change nothing. Related work has the same idea without accounting: Fed3R
(arXiv 2406.01116), FedCGS (2503.06962), AFL (2405.16240), one-shot ridge (2601.08216).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Final, Literal, Self, TypeAlias, Unpack

import numpy as np
import scipy

from fl_strategies._util import (
    Array,
    FloatArray,
    IntArray,
    derive_rng,
    one_blas_thread,
)
from fl_strategies.aggregation import moments
from fl_strategies.aggregation.moments import Head, Moments, Solution
from fl_strategies.errors import KnowledgeMismatch, require, require_known
from fl_strategies.features import FeatureMap
from fl_strategies.learners import Learner, LearnerFactory, LinearLearner, Task
from fl_strategies.options import option
from fl_strategies.privacy.mechanisms import MOST_SUMS
from fl_strategies.privacy.planning import outweighed_components, usual_components
from fl_strategies.release import variants_at
from fl_strategies.server.strategy import FederationOptions
from fl_strategies.strategies.sums.options import SumOptions
from fl_strategies.strategies.sums.party import SumParty
from fl_strategies.strategies.sums.regression import FARTHEST, Ellipsoid, Regression
from fl_strategies.strategies.sums.server import Counted, SumStrategy
from fl_strategies.strategies.sums.summary import (
    LARGEST_SUM,
    MOST_EXACT,
    PartySums,
    Summary,
    known_classes,
    most_of_noise,
)
from fl_strategies.wire.knowledge import Metrics

Features: TypeAlias = Literal["auto", "columns", "components", "cosines", "products"]

NUM_FEATURES: Final = "num-features"
PENALTY: Final = "penalty"
SHARPNESS: Final = "sharpness"
# Off-diagonal products occur twice in a matrix, so that they may weigh the root of 2 more than
# those on the diagonal for the same length of what one record adds: 7 to 5 is just below it.
_DIAGONAL: Final = 5
_BESIDE: Final = 7
_NOISE_OF_GRAM: Final = 0.25
"""Penalty for noise on products, as a multiple of its spectral norm."""
_NOISE_OF_MEANS: Final = 0.5
"""Penalty for noise on features times targets, as a multiple of that on one mean."""
_MEAN_TARGET: Final = ("target-centre", "target-reach")
_FEWEST: Final = 10
"""A party is not compared by classes of which it has fewer records: few contradict anything,
and count for little."""
_FEWEST_FOLDS: Final = 3
_BY_CHANCE: Final = 5.0
"""Deviations by which class means of honest parties hardly ever differ."""
_AGREES: Final = 2.0
"""Of what noise is along the others' direction, a party that agrees with them has more."""
_WORTH_THE_NOISE: Final = 0.1
"""Weight of noisy products beside public ones from which ridge regression is better."""
_LEAST_PENALTY: Final = 1e-8
_SAMPLING: Final = 0.1
"""Error of a mean over public rows, as a multiple of one over the root of their number."""
# Consecutive odd multiples of it scatter the features of a row over 64 bits.
_GOLDEN: Final = 0x9E3779B97F4A7C15
_CHUNK: Final = 2**22
_TOLERANCE: Final = 1e-9
"""Of what directions must have at least, as a share of what all have together."""


@dataclass(frozen=True, kw_only=True)
class FedMomentsOptions(SumOptions):
    """Options of `FedMoments`; see `SumOptions`.

    Parameters
    ----------
    features : "auto", "columns", "components", "cosines" or "products"
        What a row is made into, besides a constant: its columns; principal components of
        public rows; columns and random cosines, which make the model that of a Gaussian
        kernel; columns and products of two. By default cosines without noise, or columns if
        they are very many, as of encoded images; with noise components, or columns where
        there are no public rows.
    num_cosines, num_products : int
    num_components : int, optional
        As many as stand out from noise by default.
    row_length : float, optional
        Rows whose columns, in units of their spread or bounds, are longer are shortened; by
        default next to none, and with noise a tenth of the public rows.
    head : "ridge", "lda" or "logistic"
        Ridge regression of classes, linear discriminant analysis of its scores, or logistic
        regression, which takes expectations over public rows.
    penalty : float, optional
        Of the squared weights; by default what folds like best, or what the noise needs.
    num_folds : int
        Parts of the records with sums of their own, by which features and penalty are chosen
        and probabilities calibrated; fewer where they would be too large. With noise there
        is one.
    target_low, target_high : float, optional
        Declared bounds of a numeric target; one alone has 0 at the other end.
    """

    owner: ClassVar[str] = "FedMoments"

    features: Features = option("auto", "what a row is made into")
    num_cosines: int = option(390, "random cosines", least=3)
    num_products: int = option(400, "products of two columns", least=1)
    num_components: int | None = option(
        None, "principal components of public rows; 0: as many as stand out from noise", least=1
    )
    row_length: float | None = option(
        None, "length of columns beyond which rows are shortened; 0: by public rows", above=0
    )
    head: Literal["auto", "ridge", "lda", "logistic"] = option("auto", "model of the sums")
    penalty: float | None = option(
        None, "of the squared weights; 0: by folds, or by the noise", above=0
    )
    num_folds: int = option(5, "parts of the records to choose by; 1: none", least=1, most=20)
    target_low: float | None = option(
        None, "least numeric target, declared; 0 with target-high: zero, or by public rows"
    )
    target_high: float | None = option(None, "largest; 0 with target-low: zero")

    def __post_init__(self) -> None:
        """Check each setting, then the declared bounds of targets."""
        super().__post_init__()
        low, high = self.target_low or 0.0, self.target_high or 0.0
        known = self.target_bounds is None or low < high
        self.require("target_high", known, f"above target_low={low:g}")

    @property
    def target_bounds(self) -> tuple[Array, Array] | None:
        """Declared bounds of a numeric target, if there are any."""
        if self.target_low is None and self.target_high is None:
            return None
        return np.array([self.target_low or 0.0]), np.array([self.target_high or 0.0])


@dataclass(frozen=True, eq=False)
class SummedMoments(Summary):
    """Features of rows, for sums of them times targets and of their products.

    Parameters
    ----------
    features : FeatureMap
    num_folds : int
        A record is in one of them by a hash of its features, so that it does not matter
        which party holds it.
    centre, reach : (num_targets,)
        Numeric targets less the one, divided by the other, are between -1 and 1; empty for
        classes.
    """

    kind: ClassVar[str] = "moments"
    signed: ClassVar[bool] = True

    features: FeatureMap
    num_folds: int
    centre: FloatArray
    reach: FloatArray

    def to_arrays(self) -> dict[str, Array]:
        """Return what parties need."""
        return {
            **self.features.to_arrays(),
            "folds": np.array([self.num_folds], dtype=np.int32),
            _MEAN_TARGET[0]: self.centre.astype(np.float64),
            _MEAN_TARGET[1]: self.reach.astype(np.float64),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], num_values: int) -> Self:
        """Read what a server sent; raise `KnowledgeMismatch` for anything else."""
        own = {"folds", *_MEAN_TARGET}
        given = {name: arrays[name] for name in arrays if name not in own}
        features = FeatureMap.from_arrays("Server", given, num_values)
        folds, centre, reach = (arrays.get(name) for name in ("folds", *_MEAN_TARGET))
        sound = (
            folds is not None
            and centre is not None
            and reach is not None
            and folds.dtype == np.int32
            and folds.shape == (1,)
            and 1 <= int(folds[0]) <= 20
            and centre.dtype == reach.dtype == np.float64
            and centre.ndim == 1
            and centre.shape == reach.shape
            and bool(np.isfinite(centre).all() and np.isfinite(reach).all())
            and bool((reach > 0).all())
        )
        if not sound or folds is None or centre is None or reach is None:
            raise KnowledgeMismatch(
                "Server: moments must have 1 to 20 folds and the bounds of targets, got others."
            )
        return cls(features, int(folds[0]), centre, reach)

    @classmethod
    def _fits(cls, arrays: Mapping[str, Array]) -> bool:  # noqa: ARG003
        return True

    def check_task(self, num_classes: int, task: Task) -> None:
        """Raise `KnowledgeMismatch` unless bounds are those of all targets that are numbers."""
        declared, numeric = len(self.centre), num_classes if task == "regression" else 0
        rule = f"of {numeric} numeric targets"
        require_known(declared == numeric, "Server", "bounds of targets", rule, declared)

    # What records add to it

    def shape(self, num_classes: int, task: Task) -> tuple[int, ...]:
        """Return the sums of all folds: see `split`."""
        size = self.features.num_features
        outputs = moments.num_outputs(num_classes, task)
        squares = outputs if task == "regression" else 0
        return (self.num_folds, size * outputs + squares + moments.packed_size(size))

    def split(self, sums: Array, num_classes: int, task: Task) -> tuple[Array, Array, Array]:
        """Return features times targets, squared numeric targets, and packed products."""
        outputs = moments.num_outputs(num_classes, task)
        first = self.features.num_features * outputs
        second = first + (outputs if task == "regression" else 0)
        targets = sums[:, :first].reshape(len(sums), -1, outputs)
        return targets, sums[:, first:second], sums[:, second:]

    def codes(self, y: Array, num_classes: int, task: Task) -> IntArray:
        """Return what targets count, in `target_unit`."""
        if task == "regression":
            with np.errstate(over="ignore"):
                y = (y - self.centre) / self.reach
        return moments.coded(y, num_classes, task, self.target_unit(task))

    def target_unit(self, task: Task) -> int:
        """Return what a target of 1 counts."""
        return self.features.levels if task == "regression" else 1

    def folds_of(self, features: IntArray) -> IntArray:
        """Return the fold of each record, by its features alone."""
        width = features.shape[1]
        odd = np.uint64(_GOLDEN) * (2 * np.arange(width, dtype=np.uint64) + np.uint64(1))
        mixed = features.astype(np.uint64) @ odd
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(_GOLDEN)
        return np.asarray((mixed >> np.uint64(33)) % np.uint64(self.num_folds), dtype=np.int64)

    @one_blas_thread()
    def of_records(self, x: Array, y: Array, num_classes: int, task: Task) -> IntArray:
        """Return the sums of some records, as integers."""
        size, outputs = self.features.num_features, moments.num_outputs(num_classes, task)
        targets = np.zeros((self.num_folds, size, outputs))
        squares = np.zeros((self.num_folds, outputs if task == "regression" else 0))
        gram = np.zeros((self.num_folds, size, size))
        step = max(1, _CHUNK // max(size, outputs, self.features.num_values))
        for start in range(0, len(x), step):
            part = slice(start, start + step)
            whole = self.features(x[part])
            fold = self.folds_of(whole)
            # Products of floats are ten times as fast, and exact below 2**53.
            rows = whole.astype(np.float64)
            codes = self.codes(y[part], num_classes, task).astype(np.float64)
            for number in range(self.num_folds):
                own = fold == number if self.num_folds > 1 else slice(None)
                targets[number] += rows[own].T @ codes[own]
                gram[number] += rows[own].T @ rows[own]
                if task == "regression":
                    squares[number] += np.square(codes[own]).sum(axis=0)
        folds = zip(targets, squares, gram, strict=True)
        packed = [np.concatenate([b.ravel(), s, moments.pack(g)]) for b, s, g in folds]
        return np.stack(packed).astype(np.int64)

    def multiples(self, num_classes: int, task: Task) -> IntArray:
        """Return by what sums are multiplied where noise is as strong on each.

        Targets are brought to the units of products; see `moved`.
        """
        size = self.features.num_features
        beside = moments.pack(np.full((size, size), _BESIDE) - 2 * np.eye(size, dtype=int))
        outputs = moments.num_outputs(num_classes, task)
        first = np.full(size * outputs, self._multiple(task))
        squares = np.ones(outputs if task == "regression" else 0, dtype=int)
        return np.concatenate([first, squares, beside])[None].repeat(self.num_folds, axis=0)

    def _multiple(self, task: Task) -> int:
        return _DIAGONAL * max(1, round(self.features.longest / self.target_unit(task)))

    def moved(self, num_classes: int, task: Task) -> float:
        """Return the most, in L2 norm, by which replacing one record moves multiplied sums.

        Let rows f and g have squared lengths of at most r^2 and the product t = f'g, and let
        m be what a target of 1 is multiplied by, over 5. Products move by

            |ff' - gg'|^2 = |f|^4 + |g|^4 - 2 t^2,

        of which the triangle holds at most 25 times as much, since 7^2 < 2 * 5^2. Each of l
        targets u and v between -1 and 1 moves by m^2 |uf - vg|^2 <= m^2 (2 r^2 + 2 |t|); of
        classes one-hot rows move by m^2 (2 r^2 - 2 t) or, if the class changes, 2 m^2 r^2.
        All are at most

            25 (2 l m^2 (r^2 + |t|) + 2 r^4 - 2 t^2),  largest at |t| = min(l m^2 / 2, r^2),

        which is 25 * 4.5 r^4 for one label and m = r. A record that changes its fold moves
        both by less: 25 (2 l m^2 r^2 + 2 r^4). Squared numeric targets are not multiplied
        and add the fourth power of what a target of 1 counts.
        """
        return self._moved(self.features.longest, num_classes, task)

    def unused(self, num_classes: int, task: Task) -> float:
        """Return how much less than `moved` replacing one record moves a sum, at least.

        `moved` has a half for rounding the constant too, which is the same for every row.
        """
        features = self.features
        others = features.levels * features.reach + math.sqrt(features.num_features - 1) / 2
        used = min(math.hypot(others, features.constant), features.longest)
        return self.moved(num_classes, task) - self._moved(used, num_classes, task)

    def _moved(self, longest: float, num_classes: int, task: Task) -> float:
        square = longest**2
        labels = num_classes if task in ("multi-label", "regression") else 1
        scale = self._multiple(task) * self.target_unit(task) / _DIAGONAL
        within = min(labels * scale**2 / 2, square)
        moved = 2 * labels * scale**2 * (square + within) + 2 * square**2 - 2 * within**2
        squared = labels * self.target_unit(task) ** 4 if task == "regression" else 0
        return math.sqrt(_DIAGONAL**2 * moved + squared)

    def possible(self, sums: IntArray, num_records: int, task: Task) -> bool:
        """Return whether so many records can have these sums.

        The constant makes parts of them known: its own products are the records, and those
        with other features are the sum over classes. No direction of features and targets
        together has less than nothing. Entries at the limit have been cut; what they are part
        of is not known then, but lengths are not larger than without.
        """
        longest, constant = self.features.longest, self.features.constant
        unit, num_classes = self.target_unit(task), self._classes_of(sums, task)
        if np.abs(sums).max() > LARGEST_SUM:
            return False
        found, all_known = 0, True
        for targets, squares, packed in zip(*self.split(sums, num_classes, task), strict=True):
            gram = moments.unpack(packed, self.features.num_features)
            known = int(gram[-1, -1]) < LARGEST_SUM
            all_known = all_known and known
            number, rest = divmod(int(gram[-1, -1]), constant**2)
            if number < 0 or (known and rest) or number > num_records:
                return False
            found += number
            number = number if known else num_records
            counts = self._counts(targets, gram, number, task)
            if counts is None:
                return False
            lengths = np.linalg.norm(targets.astype(np.float64), axis=0)
            if (lengths > counts * longest * unit).any():
                return False
            if (squares < 0).any() or (squares > number * unit**2).any():
                return False
            if np.trace(gram) > number * longest**2:
                return False
            energies = np.where(squares < LARGEST_SUM, squares, number * unit**2)
            energies = energies if task == "regression" else counts
            if targets[:, energies <= 0].any():
                return False
            alone = task == "single-label" and targets.shape[1] > 1
            if not _has_no_negative_direction(gram, targets, energies, alone=alone):
                return False
        return found == num_records if all_known else found <= num_records

    def _counts(
        self, targets: IntArray, gram: IntArray, number: int, task: Task
    ) -> FloatArray | None:
        """Return how many records of a fold each target may have; None if they are impossible.

        Of classes it is known; otherwise all records may have a target.
        """
        constant, unit = self.features.constant, self.target_unit(task)
        levels, whole = targets[-1], np.abs(targets[-1]) < LARGEST_SUM
        if (whole & (levels % constant != 0)).any():
            return None
        if (np.abs(levels) > float(number) * constant * unit).any():
            return None
        if task != "single-label" or targets.shape[1] == 1:
            return np.full(targets.shape[1], float(number))
        total = gram[:, -1]
        inside = (np.abs(targets) < LARGEST_SUM).all(axis=1) & (np.abs(total) < LARGEST_SUM)
        if (levels < 0).any() or (targets.sum(axis=1) * constant != total)[inside].any():
            return None
        return np.where(whole, levels / constant, float(number))

    def read(self, sums: Array, num_classes: int, task: Task) -> Moments:
        """Return sums as moments of features of length 1, and records by the constant."""
        size, levels = self.features.num_features, float(self.features.levels)
        unit, constant = self.target_unit(task), self.features.constant
        targets, squares, packed = self.split(sums, num_classes, task)
        gram = np.stack([moments.unpack(fold, size) for fold in packed])
        counts = gram[:, -1, -1] / constant**2
        if task == "regression":
            squares = squares / unit**2
        elif task == "single-label" and num_classes > 2:
            squares = targets[:, -1] / constant
        else:
            squares = np.repeat(counts[:, None], targets.shape[2], axis=1)
        return Moments(targets / (levels * unit), gram / levels**2, squares, counts)

    def _classes_of(self, sums: Array, task: Task) -> int:
        """Return the number of classes or targets that sums of the right shape are of."""
        size = self.features.num_features
        rest = sums.shape[1] - moments.packed_size(size)
        outputs = rest // (size + 1) if task == "regression" else rest // size
        return 2 if task == "single-label" and outputs == 1 else outputs


@one_blas_thread()
def _has_no_negative_direction(
    gram: IntArray, targets: IntArray, energies: FloatArray, *, alone: bool
) -> bool:
    """Return whether products of features, and of these with targets, can be sums of squares.

    Each target's own squares add up to at most its `energies`; `alone` says that a record has
    one target, whose products with others are 0. Entries that have been cut are left out, with
    all that they are a product of.
    """
    kept = np.diag(gram) < LARGEST_SUM
    own = gram[np.ix_(kept, kept)].astype(np.float64)
    cut = np.abs(targets[kept]) >= LARGEST_SUM
    # No product is larger than the root of that of its two squares.
    large = np.sqrt(np.maximum(np.outer(np.diag(own), energies), 0.0)) >= LARGEST_SUM
    if (np.abs(own) >= LARGEST_SUM).any() or (cut & ~large).any():
        return False
    columns = ~cut.any(axis=0) & (energies > 0)
    shift = _TOLERANCE * max(float(np.trace(own)), 1.0) * len(own)
    try:
        root = np.linalg.cholesky(own + shift * np.eye(len(own)))
    except np.linalg.LinAlgError:
        return False
    scaled = targets[np.ix_(kept, columns)] / np.sqrt(energies[columns])
    along = scipy.linalg.solve_triangular(root, scaled, lower=True)
    if not along.size:
        return True
    if alone:
        most = float(np.linalg.norm(along, 2)) ** 2
    else:
        most = float(np.square(along).sum(axis=0).max())
    return most <= 1 + 1e-5


@dataclass(frozen=True, kw_only=True)
class MomentsPlanner(Regression):
    """Plans `FedMoments`: as a regression, whose products need a little more noise."""

    strategy: ClassVar[str] = "fedmoments"

    @property
    def moved(self) -> float:
        """How far one unit moves the sums, if its own vector has length 1."""
        if self.level == "L1":
            return self.moved_by_party
        return math.sqrt(4.5 if self.num_labels == 1 else 4.0 * self.num_labels)


@one_blas_thread()
def _limited_products(
    gram: FloatArray | IntArray, num_records: int, longest: float, noise: float
) -> FloatArray | IntArray:
    """Return noisy products as so many records may have them; plausible ones as they are.

    No direction has less than what noise takes from it, and all together have no more than
    rows as long as they can be.
    """
    beside, size = noise / _BESIDE, len(gram)
    room = 2 * beside * math.sqrt(size) + most_of_noise(noise / _DIAGONAL)
    values, axes = np.linalg.eigh(gram.astype(np.float64))
    most = num_records * longest**2
    found = np.clip(values, -room, most + room)
    within = most + noise / _DIAGONAL * math.sqrt(size) * most_of_noise(1.0)
    total = float(found.sum())
    if total > within:
        # What is above noise is shortened until all of it is plausible.
        above = np.maximum(found - room, 0.0)
        found = found - above * min(1.0, (total - within) / max(float(above.sum()), 1e-300))
    if np.array_equal(found, values):
        return gram
    return np.asarray((axes * found) @ axes.T)


class FedMoments(SumStrategy[SummedMoments]):
    """One round: parties sum features of their records times targets, and their products.

    Leaves the party
        One number for each feature and class (or label, or target), and one for each pair of
        features: sums over its records, by fold without noise.
    Guarantee
        L2: each record is protected against the server and everybody else, by noise that
        the party itself adds; central: against everybody but the server, which adds the
        noise once; L1: each party, against everybody but the server. One release, so one
        price. Not covered: the number of records, held-out rows, settings chosen on
        private data, and bounds if they were taken from records.

    Parameters
    ----------
    bounds : pair of arrays (num_values,), optional
        Least and largest value of every column, declared and not taken from records. Then no
        public rows are needed; values outside are clipped.
    target_bounds : pair of arrays (num_targets,), optional
        The same of numeric targets, which need them here or, of one target, in `options`.
    **settings
        See `SumStrategy`; `options` are `FedMomentsOptions`. The final model is linear in
        the features if `learner_fn` makes a `LinearLearner`, such as
        `clients.MomentsLearner`; any other learns public rows with this model's classes.

    Attributes
    ----------
    solution_ : Solution
        Weights of targets as they were solved for, penalty and features used.

    Notes
    -----
    The model is that of pooled records, whatever the division among parties. Features and
    penalty are chosen by the squared error on folds, which follows from sums. Under noise
    there are no folds: the penalty follows from the noise and the size of the public sample.
    """

    name: ClassVar[str] = "fedmoments"
    options_type = FedMomentsOptions
    planner_type = MomentsPlanner
    takes = (*SumStrategy.takes, "bounds", "target_bounds")
    identified_by = (*SumStrategy.identified_by, "bounds", "target_bounds")
    tasks: ClassVar[tuple[Task, ...]] = ("single-label", "multi-label", "regression")
    usual_final_learners = ("moments",)
    needs_public = False
    private_variants = variants_at("fedmoments", "L2", "central")
    options: FedMomentsOptions
    _planner: MomentsPlanner
    open_setting = "num_components"

    def __init__(
        self,
        *,
        public: Array | None = None,
        num_classes: int,
        learner_fn: LearnerFactory,
        learner_name: str = "learner",
        task: Task = "single-label",
        options: FedMomentsOptions | None = None,
        bounds: tuple[Array, Array] | None = None,
        target_bounds: tuple[Array, Array] | None = None,
        **federation: Unpack[FederationOptions],
    ) -> None:
        declared = None if options is None else options.target_bounds
        twice = declared is not None and target_bounds is not None
        rule = "omitted with target_low or target_high in options"
        require(not twice, "FedMoments", "target_bounds", rule, target_bounds)
        self.bounds, self.target_bounds = bounds, declared or target_bounds
        known = public is not None or bounds is not None
        require(known, "FedMoments", "bounds", "given where there are no public rows", None)
        own = options or self.options_type()
        announced = public is not None or own.privacy is None or own.num_records is not None
        rule = "announced where there are no public rows, for the noise"
        require(announced, "FedMoments", "num_records", rule, None)
        if public is None and bounds is not None:
            public = np.empty((0, len(np.atleast_1d(bounds[0]))))
        super().__init__(
            public=public,
            num_classes=num_classes,
            learner_fn=learner_fn,
            learner_name=learner_name,
            task=task,
            options=options,
            **federation,
        )

    # Features

    def _summarise(self) -> SummedMoments:
        owner, numeric = "FedMoments", self.task == "regression"
        declared = self.target_bounds is not None or not numeric
        rule = "given for numeric targets (settings target-low and target-high)"
        require(declared, owner, "target_bounds", rule, None)
        low, high = (
            (np.asarray(bound, dtype=np.float64).reshape(-1) for bound in self.target_bounds)
            if numeric and self.target_bounds is not None
            else (np.empty(0), np.empty(0))
        )
        ordered = low.shape == high.shape and bool((low < high).all())
        rule = f"two of {self.num_classes} numbers in order"
        require(
            ordered and len(low) in (0, self.num_classes), owner, "target_bounds", rule, low
        )
        centre, reach = (low + high) / 2, (high - low) / 2
        one = SummedMoments(self._features(), 1, centre, reach)
        noisy = self.options.privacy is not None
        most = MOST_SUMS if noisy else MOST_EXACT
        room = most // one.shape(self.num_classes, self.task)[1]
        size, rule = one.features.num_features, f"few enough for {most} sums"
        require(room > 0, owner, "features", rule, f"{size} of them")
        folds = 1 if noisy or self.options.penalty is not None else self.options.num_folds
        return replace(one, num_folds=min(folds, room))

    def _features(self) -> FeatureMap:
        options, rows = self.options, self.public if len(self.public) else None
        noisy = options.privacy is not None
        if self.bounds is not None:
            made = FeatureMap.of_bounds(*self.bounds, length=options.row_length)
            fits = made.num_values == self.width
            require(fits, options.owner, "bounds", f"of {self.width} columns", made.num_values)
        else:
            made = FeatureMap.of_rows(self.public, length=options.row_length, tight=noisy)
        kind = self._usual_features() if options.features == "auto" else options.features
        if kind == "components":
            rule = "another than components without public rows"
            require(len(self.public) > 0, options.owner, "features", rule, kind)
            made = made.with_components(self.public, self._num_components())
        elif kind == "cosines":
            rng = derive_rng(self.seed, "cosines")
            made = made.with_cosines(rows, options.num_cosines, rng)
        elif kind == "products":
            made = made.with_products(options.num_products)
        return made.for_records(self._num_records, scale=self._scale_of_one)

    def _usual_features(self) -> Features:
        """Return cosines without noise, unless columns are so many that few folds would fit."""
        if self.options.privacy is not None:
            return "components" if len(self.public) else "columns"
        size = self.width + self.options.num_cosines + 1
        many = _FEWEST_FOLDS * size * (size + 1) // 2 > MOST_EXACT
        return "columns" if many else "cosines"

    @property
    def _scale_of_one(self) -> float:
        """Deviation of the noise that hides what moves a sum by one; 0 without any."""
        privacy = self.options.privacy
        return 0.0 if privacy is None else privacy.mechanism(1.0).scale

    def _num_components(self) -> int:
        most, number = self.width, self.options.num_components
        if number is None:
            number = usual_components(len(self.public), most, self._noise_share())
        return min(number, most)

    def _noise_share(self) -> float:
        noise = self._planned_noise()
        return self._planner.noise_share(noise, self.num_parties, self._num_records)

    def _no_signal(self) -> str:
        """Describe noise that leaves no signal in two features, or return ""."""
        return outweighed_components(self._noise_share())

    # Liars

    def _believed(self, said: Sequence[PartySums]) -> FloatArray:
        """Return what parties claim where it adds up to what was announced.

        Otherwise their number is capped, as in the other heads on sums.
        """
        claimed = np.array([one.num_records for one in said], dtype=np.float64)
        announced = self.options.num_records
        if announced is not None and claimed.sum() <= announced:
            return claimed
        return super()._believed(said)

    def _plausible(self, one: PartySums, noise: float) -> FloatArray | IntArray:
        """Return sums that rows like the public ones give; without noise as they are.

        Possible sums without noise count as they are, so that all divisions of the records
        give the same model. Where the noise is the server's, only features times targets are
        projected, and products are possible; with parties' own noise neither are known to be.
        """
        if self.options.level == "L0":
            return one.sums
        summary, task, number = self._summary, self.task, one.num_records
        targets, squares, packed = summary.split(one.sums, self.num_classes, task)
        multiples = summary.multiples(self.num_classes, task)[0]
        labels = 1 if task == "single-label" else targets.shape[2]
        given = targets[0] / summary.target_unit(task) if task == "regression" else targets[0]
        of_target = noise / (int(multiples[0]) * summary.target_unit(task))
        projected = self._ellipsoid.project(given, number, of_target, labels)
        gram: FloatArray | IntArray = moments.unpack(packed[0], summary.features.num_features)
        limited = (
            _limited_products(gram, number, summary.features.longest, noise) if noise else gram
        )
        if projected is given and limited is gram:
            return one.sums
        parts = [
            (projected * summary.target_unit(task)).ravel(),
            squares[0],
            moments.pack(limited),
        ]
        return np.concatenate(parts)[np.newaxis]

    @cached_property
    def _ellipsoid(self) -> Ellipsoid:
        """Where means of features times targets are; without public rows a ball."""
        features = self._summary.features
        if len(self.public):
            return Ellipsoid.of_features(features(self.public), features.longest)
        size = features.num_features
        return Ellipsoid(np.full(size, features.longest**2 / FARTHEST), np.eye(size))

    def _evidence(
        self, sums: FloatArray | IntArray, num_records: float, noise: float
    ) -> tuple[FloatArray, FloatArray]:
        """Return how rows point where a class does, and which classes a party knows.

        A class is known by its own records alone: a party of one class contradicts nobody.
        Labels are known where some records have them and some have not. What all records have
        in common, and public rows too, is no evidence: a party that names one class for all
        would otherwise agree with everybody about it. Of numbers without noise the party's own
        means are what its records have in common: low targets contradict no high ones.
        """
        points, counts = self._points(sums)
        if self.task != "single-label":
            counts = (num_records - np.abs(counts)) / 2
        of_count = self._noise_on_points(noise) / self._summary.features.constant
        known = known_classes(counts, of_count) * (counts >= _FEWEST)
        return self._probes @ (points / num_records), known

    def _points(self, sums: FloatArray | IntArray) -> tuple[FloatArray, FloatArray]:
        """Return sums of features of each class or label less what all have in common.

        The second are the records of classes, or for labels how many more are of the label.
        """
        features = self._summary.features
        own = self._summary.read(np.asarray(sums), self.num_classes, self.task).all
        single = self.task == "single-label"
        summed = moments.class_sums(own, self.num_classes) if single else own.targets[0]
        points = summed * features.levels
        usual = self._probes.mean(axis=0) / features.constant
        if self.task == "regression" and not self._noise_of_party:
            usual = own.gram[0][:, -1] / (own.gram[0][-1, -1] or 1.0)
        return points - np.outer(usual, points[-1]), points[-1] / features.constant

    def _noise_on_points(self, noise: float) -> float:
        """Return the deviation of the noise on what sums of features of a class are of."""
        task, constant = self.task, self._summary.features.constant
        multiple = int(self._summary.multiples(self.num_classes, task)[0, 0])
        of_targets = noise / (multiple * self._summary.target_unit(task))
        if not self._one_score:
            return of_targets
        # Half of what all records have, of products, and of what classes differ by.
        return math.hypot(of_targets, noise / (_DIAGONAL * constant)) / 2

    def _find_outliers(
        self, parts: Sequence[FloatArray | IntArray], sizes: FloatArray
    ) -> Sequence[int]:
        """Return parties that contradict most others; with noise, by more than noise can be.

        Noise is as long as all sums are many, but has no direction: along that of the others,
        of whom each counts as much, it is hardly longer than the noise on a single sum. So a
        party that is far against them is an outlier, and one that is far with them is none.
        """
        found = super()._find_outliers(parts, sizes)
        noise = self._noise_of_party
        if not noise or not self.options.exclude_outliers:
            if self.task == "regression":
                return found  # parties that oppose the others by far, and no other
            return [k for k in found if self._is_no_sample(k, parts, sizes, found)]
        points = [self._points(part)[0] for part in parts]
        lengths = [max(float(np.linalg.norm(one)), 1e-300) for one in points]
        pairs = [*zip(points, lengths, strict=True)]
        total = np.sum([one / length for one, length in pairs], axis=0)
        usual = self._probes.mean(axis=0) / self._summary.features.constant
        along = []
        for one, length in pairs:
            others = total - one / length
            others = others / max(float(np.linalg.norm(others)), 1e-300)
            # Counts are in every feature, as the last one says.
            spread = np.vstack([others[:-1], usual[:-1] @ others[:-1]])
            deviation = self._noise_on_points(noise) * float(np.linalg.norm(spread))
            along.append(float(np.sum(one * others)) / max(deviation, 1e-300))
        against = {k for k, one in enumerate(along) if one < -most_of_noise(math.sqrt(2))}
        against |= {k for k in found if along[k] < _AGREES}
        return sorted(against) if 2 * len(against) < len(parts) else []

    def _is_no_sample(
        self,
        number: int,
        parts: Sequence[FloatArray | IntArray],
        sizes: FloatArray,
        doubted: Sequence[int],
    ) -> bool:
        """Return whether a party's class means differ from others' by more than chance does.

        So that all divisions of the same records give the same model: few records, or classes
        that are hardly apart, agree with nobody.
        """
        said = [self._points(part) for part in parts]
        single = self.task == "single-label"
        counts = [
            one if single else np.full(one.shape, size)
            for (_, one), size in zip(said, sizes, strict=True)
        ]
        others = [k for k in range(len(parts)) if k not in doubted]
        records = np.maximum(np.sum([counts[k] for k in others], axis=0), 1.0)
        ahead = np.sum([said[k][0] for k in others], axis=0) / records
        missing = counts[number] @ np.square(ahead).sum(axis=0) - np.sum(
            said[number][0] * ahead
        )
        spread = np.maximum(counts[number], 0.0) @ (self._probes @ ahead).var(axis=0)
        return bool(missing > _BY_CHANCE * math.sqrt(max(float(spread), 1e-300)))

    @cached_property
    def _probes(self) -> FloatArray:
        """Features of public rows, or of rows that are spread like bounds."""
        rows = self.public
        if not len(rows):
            rng, features = derive_rng(self.seed, "probes"), self._summary.features
            width = features.num_values
            scale = np.where(features.scale > 0, features.scale, 1.0)
            rows = features.centre + rng.uniform(-1, 1, size=(4 * width + 100, width)) / scale
        return self._summary.features(rows).astype(np.float64)

    # The model

    def _model_of(self, total: FloatArray, noise: float, counted: Counted) -> Learner:
        own = self._summary.read(total, self.num_classes, self.task)
        if noise:
            own = self._with_known(own, noise, counted)
        if self._head == "logistic":
            self.solution_ = self._logistic(own, noise)
            weights, self._sharpness = self._logits(self.solution_.weights), 1.0
        else:
            self.solution_ = self._solve(own, noise)
            weights, self._sharpness = self._calibrated(own, noise)
        errors = None
        if self._head == "ridge" and not noise:
            # Of two classes each has half of the one score.
            half = 0.5 if self._one_score else 1.0
            errors = moments.standard_errors(own, self.solution_)
            errors = None if errors is None else errors * (half * self._sharpness)
        features = self._summary.features
        if self.task == "regression":
            weights = weights * self._summary.reach
            weights[-1] += self._summary.centre * (features.levels / features.constant)
            errors = None if errors is None else errors * self._summary.reach
        learner = self.learner_fn()
        if isinstance(learner, LinearLearner):
            found = None if errors is None else np.broadcast_to(errors, weights.shape)
            return learner.with_weights(features, weights, found)
        return self._labelled(self._shares(features(self.public) / features.levels @ weights))

    def _calibrated(self, own: Moments, noise: float) -> tuple[FloatArray, float]:
        """Return the weights of logits, and their multiple of shares of classes."""
        features, solution = self._summary.features, self.solution_
        more = 0.0
        if noise:
            half = 0.5 if self._one_score else 1.0
            _, of_mean = self._deviations(noise, float(own.num_records[0]))
            more = half * moments.overstatement(own, solution.penalty, of_mean)
            # Weights are largest where noise has hidden how far scores spread.
            hidden = solution.penalty * own.num_records[0] * np.eye(own.gram.shape[1])
            hidden[-1, -1] = 0.0
            own = replace(own, gram=own.gram + hidden)
        return moments.log_linear(
            own,
            solution,
            head=self._head,
            constant=features.constant / features.levels,
            num_classes=self.num_classes,
            task=self.task,
            overstated=more,
        )

    def _shares(self, scores: FloatArray) -> FloatArray:
        """Return what public rows have by these logits, for a model that is not linear."""
        labels = len(self.public) and self.task != "regression"
        rule = "a LinearLearner, such as clients.MomentsLearner, without labelled public rows"
        require(bool(labels), "FedMoments", "learner_fn", rule, self.model_name)
        if self.task == "multi-label":
            return np.asarray(scipy.special.expit(2 * scores))
        return np.asarray(scipy.special.softmax(scores, axis=1))

    @property
    def _head(self) -> Head:
        """The head asked for; by default logistic regression where noise hides products.

        Public rows then stand for the records, and no noise on products is in it.
        """
        if self.options.head != "auto":
            return self.options.head
        mechanism = self._mechanism
        if mechanism is None or not len(self.public) or self.task == "regression":
            return "ridge"
        noise = self._summed(mechanism)
        share, _ = self._trust(self._deviations(noise, float(self._num_records))[0])
        return "ridge" if share > _WORTH_THE_NOISE else "logistic"

    def _logistic(self, own: Moments, noise: float) -> Solution:
        """Return logistic regression, whose expectations are those over public rows."""
        rows, number = self._public_features, float(own.num_records[0])
        means = own.targets.sum(axis=0) / own.num_records.sum()
        penalty = self.options.penalty
        if penalty is None:
            of_mean = self._deviations(noise, number)[1] if noise else 0.0
            sampling = _SAMPLING / math.sqrt(len(rows))
            penalty = _NOISE_OF_MEANS * math.hypot(of_mean, sampling)
        several = self.task == "single-label" and self.num_classes > 2
        weights = moments.logistic_weights(rows, means, penalty, softmax_link=several)
        return Solution(weights, penalty, np.arange(rows.shape[1] - 1))

    def _logits(self, weights: FloatArray) -> FloatArray:
        """Return the weights of logits by those of logistic scores."""
        if self.task == "multi-label":
            return 2 * weights
        return np.hstack([-weights, weights]) if self._one_score else weights

    @property
    def _one_score(self) -> bool:
        return moments.num_outputs(self.num_classes, self.task) < self.num_classes

    def _with_known(self, own: Moments, noise: float, counted: Counted) -> Moments:
        """Return noisy moments with what has less noise: records, and products of public rows.

        At L1 the number of records is what the constant says.
        """
        number = float(own.num_records[0])
        if self.options.level != "L1":
            number = counted.num_records
        number = max(number, 1.0)
        gram = own.gram.copy()
        features = self._summary.features
        gram[0, -1, -1] = number * (features.constant / features.levels) ** 2
        if len(self.public):
            share, _ = self._trust(self._deviations(noise, number)[0])
            rows = self._public_features
            gram[0] = share * gram[0] + (1 - share) * (rows.T @ rows) * (number / len(rows))
        gram[0] = moments.without_negative(gram[0])
        return replace(own, gram=gram, num_records=np.array([number]))

    def _solve(self, own: Moments, noise: float) -> Solution:
        penalty = self.options.penalty
        features = self._summary.features
        everything = np.arange(features.num_features - 1)
        if noise:
            return moments.solve_noisy(own, penalty or self._penalty(noise, own))
        if penalty is not None:
            return moments.solve(own, [everything], [penalty])
        return moments.solve(own, moments.subsets(features.blocks))

    def _deviations(self, noise: float, num_records: float) -> tuple[float, float]:
        """Return the noise on a mean product, and on a mean of a feature times targets."""
        features, task = self._summary.features, self.task
        levels, unit = features.levels, self._summary.target_unit(task)
        multiple = int(self._summary.multiples(self.num_classes, task)[0, 0])
        of_product = noise / (_BESIDE * num_records * levels**2)
        return of_product, noise / (multiple * num_records * levels * unit)

    def _penalty(self, noise: float, own: Moments) -> float:
        """Return the penalty for noise of this deviation on multiplied sums."""
        of_product, of_mean = self._deviations(noise, float(own.num_records[0]))
        spectral = 2 * of_product * math.sqrt(self._summary.features.num_features)
        share, sampling = self._trust(of_product)
        of_gram = share * spectral + (1 - share) * sampling
        return max(_NOISE_OF_GRAM * of_gram + _NOISE_OF_MEANS * of_mean, _LEAST_PENALTY)

    def _trust(self, of_product: float) -> tuple[float, float]:
        """Return the weight of noisy products beside public ones, and these' own error.

        Weights are inverse variances: of the noise, and of a mean over so many public rows.
        """
        if not len(self.public):
            return 1.0, 0.0
        rows = self._public_features
        squares = np.square(rows).sum(axis=1)
        size, number = rows.shape[1], len(rows)
        gram = rows.T @ rows / number
        spread = max(float(np.square(squares).mean() - np.square(gram).sum()), 0.0)
        variance = spread / (size**2 * number)
        share = variance / (variance + of_product**2)
        return share, 2 * math.sqrt(variance * size)

    @cached_property
    def _public_features(self) -> FloatArray:
        features = self._summary.features
        return np.asarray(features(self.public) / features.levels)

    def _details(self) -> Metrics:
        return {
            NUM_FEATURES: len(self.solution_.used),
            PENALTY: self.solution_.penalty,
            SHARPNESS: self._sharpness,
        }


MOMENTS_PARTY: Final = SumParty(
    FedMomentsOptions, SummedMoments, MomentsPlanner, FedMoments.tasks
)
