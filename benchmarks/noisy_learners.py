"""Learners of `fedkt_privacy.py`: who votes, and who learns from noisy labels."""

from collections.abc import Callable, Sequence
from typing import ClassVar, Self, TypeAlias

import numpy as np
from scipy.special import expit, logit
from sklearn.linear_model import LogisticRegression

from clients.tabular.sklearn import SklearnLearner
from fl_strategies import Learner, LearnerFactory
from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.learners import TrainingSet

Projection: TypeAlias = Callable[[Array], Array]

SOLVER_STEPS = 500
NUM_STAND_INS = 500
SHARE_STEPS = 100


class ShareMatched:
    """Logistic regression that calls a fixed share of the public rows positive.

    Parties with skewed classes otherwise vote for one class whatever the row, and a model
    of forty noisy labels learns little but the larger class. Here only the order of rows
    is learned; where to cut is said by the share, which is public knowledge about the
    task. A class that a training set lacks is stood in for by public rows. All this uses
    public rows and the training set only, so it changes no guarantee.

    Parameters
    ----------
    public : (num_public, num_features)
    share : float
        Share of the public rows that get class 1.
    strength : float
        Inverse of the L2 penalty.
    project : callable, optional
        What is learned from instead of the columns themselves.
    """

    num_classes = 2

    def __init__(
        self,
        public: Array,
        *,
        share: float,
        strength: float = 1.0,
        project: Projection | None = None,
    ) -> None:
        self._public, self._share, self._projection = public, share, project
        self._model = LogisticRegression(
            C=strength, class_weight="balanced", max_iter=SOLVER_STEPS
        )
        self._cut = 0.0

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:  # noqa: ARG002
        """Learn to order rows, then cut where the share of the public rows says."""
        present = np.unique(y)
        if len(present) == 1:
            stand_ins = self._public[:NUM_STAND_INS]
            x = np.concatenate([x, stand_ins])
            y = np.concatenate([y, np.full(len(stand_ins), 1 - present[0])])
        self._model.fit(self._project(x), y)
        self._cut = float(np.quantile(self._order(self._public), 1 - self._share))
        return self

    def predict(self, x: Array) -> IntArray:
        """Return class 1 above the cut."""
        return (self._order(x) > self._cut).astype(np.int64)

    def logits(self, x: Array) -> FloatArray:
        """Return scores whose larger one is the prediction."""
        above = self._order(x) - self._cut
        return np.stack([np.zeros_like(above), above], axis=1)

    def _order(self, x: Array) -> FloatArray:
        scores: FloatArray = self._model.decision_function(self._project(x))
        return scores

    def _project(self, x: Array) -> Array:
        return x if self._projection is None else self._projection(x)


class Projected:
    """Logistic regression on what a projection leaves of the rows."""

    num_classes = 2

    def __init__(self, *, strength: float = 1.0, project: Projection | None = None) -> None:
        model = LogisticRegression(C=strength, max_iter=SOLVER_STEPS)
        self._learner = SklearnLearner(model, num_classes=2)
        self._project = project or (lambda x: x)

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:
        """Learn labels of projected rows."""
        self._learner.fit(self._project(x), y, rng=rng)
        return self

    def predict(self, x: Array) -> IntArray:
        """Return the likelier class."""
        return self._learner.predict(self._project(x))

    def logits(self, x: Array) -> FloatArray:
        """Return log-probabilities."""
        return self._learner.logits(self._project(x))


class SelfMatched(Projected):
    """Logistic regression that estimates the class shares of the public rows by itself.

    Its own records may have quite other shares. Expectation maximisation finds those under
    which its answers about the public rows have them as their mean (Saerens et al. 2002), and
    so many public rows are called positive. This uses public rows and the training set only,
    so it changes no guarantee.
    """

    def __init__(self, public: Array) -> None:
        super().__init__()
        self._public, self._cut = public, 0.0

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:
        """Learn to order rows, then estimate how many public ones are positive."""
        super().fit(x, y, rng=rng)
        odds = self._order(self._public)
        if len(np.unique(y)) == 2:
            share = share_among(odds, (y.sum() + 0.5) / (len(y) + 1))
            self._cut = float(np.quantile(odds, 1 - share))
        return self

    def predict(self, x: Array) -> IntArray:
        """Return class 1 above the cut."""
        return (self._order(x) > self._cut).astype(np.int64)

    def _order(self, x: Array) -> FloatArray:
        logits = self.logits(x)
        return logits[:, 1] - logits[:, 0]


def share_among(log_odds: FloatArray, own_share: float) -> float:
    """Return the share of class 1 among rows, by a model of records with another share."""
    relative, share = log_odds - logit(own_share), own_share
    for _ in range(SHARE_STEPS):
        share = float(np.clip(expit(relative + logit(share)).mean(), 0.01, 0.99))
    return share


class RememberedTeachers(Projected):
    """Teachers that are trained once a party; they do not depend on the noise."""

    _memory: ClassVar[dict[tuple[str, int, int], list[Learner]]] = {}

    def __init__(self, make: LearnerFactory, name: tuple[str, int, int]) -> None:
        super().__init__()
        self._make, self._name = make, name

    def fit_many(
        self, sets: Sequence[TrainingSet], *, rngs: Sequence[np.random.Generator]
    ) -> list[Learner]:
        """Return the teachers of this name, trained when they are first asked for."""
        if self._name not in self._memory:
            self._memory[self._name] = [
                self._make().fit(x, y, rng=rng) for (x, y), rng in zip(sets, rngs, strict=True)
            ]
        return self._memory[self._name]
