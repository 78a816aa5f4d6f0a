"""Shared parts of learners of boosted trees: settings, bins of public rows, and arrays."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple, Self, TypedDict

import numpy as np

from clients.tabular.base import TabularLearner, all_but, require_array
from clients.tabular.trees import Trees, num_received_trees
from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import require, require_known
from fl_strategies.learners import TrainingSet

OFFSETS: Final = "offsets"


class BoostingOptions(TypedDict, total=False):
    """Settings of a learner of boosted trees; `BoostingSettings` has the defaults."""

    num_rounds: int
    max_depth: int
    learning_rate: float
    gamma: float
    reg_lambda: float
    max_bin: int
    num_threads: int


class BoostingSettings(NamedTuple):
    """Settings of boosting, by the names of XGBoost."""

    num_rounds: int = 100
    max_depth: int = 6
    learning_rate: float = 0.3
    gamma: float = 0.0
    reg_lambda: float = 1.0
    max_bin: int = 64
    num_threads: int = 1

    def checked(self, owner: str) -> Self:
        """Return the settings; raise `InvalidParameter` for the first that cannot be used."""
        rate = self.learning_rate
        require(0 < rate <= 1, owner, "learning_rate", "in (0, 1]", rate)
        smallest = {"gamma": 0, "reg_lambda": 0, "max_bin": 2}
        for name in (
            "num_rounds",
            "max_depth",
            "gamma",
            "reg_lambda",
            "max_bin",
            "num_threads",
        ):
            value, least = getattr(self, name), smallest.get(name, 1)
            require(value >= least, owner, name, f"at least {least}", value)
        return self


class BoostedLearner(TabularLearner):
    """Base of learners that boost trees, round by round one per score.

    A subclass implements `_fit_shared`, `_sent` and `_receive`, besides what `TabularLearner`
    asks for. Two classes have one score, more have one each.
    """

    number: ClassVar[Any] = np.float32
    """Type of offsets and of the numbers in leaves."""

    def fit_many(
        self, sets: Sequence[TrainingSet], *, rngs: Sequence[np.random.Generator]
    ) -> list[Self]:
        """Return one new fitted twin per training set, each as `fit` makes it by itself.

        Sets on one array share its bins, also with later calls on equal rows.
        """
        twins, waiting = self._twins(sets, rngs)
        for twin, rows, labels, rng, is_shared in waiting:
            fit = twin._fit_shared if is_shared else twin._fit
            fit(rows, labels, rng)
        return twins

    @abstractmethod
    def _fit_shared(self, x: Array, y: IntArray, rng: np.random.Generator) -> None:
        """Do as `_fit` does, on rows of float32 whose bins may be kept."""

    @abstractmethod
    def _sent(self) -> tuple[FloatArray, Trees]:
        """Return the scores before the first tree, and the trees."""

    @abstractmethod
    def _receive(self, offsets: FloatArray, trees: Trees) -> None:
        """Become a model that somebody else has trained."""

    @property
    def _takes_weights(self) -> bool:
        return True

    def _num_trees(self, owner: str, nodes: Mapping[str, Array], per_round: int) -> int:
        """Return how many trees must have arrived; any number of rounds here."""
        num_trees = num_received_trees(owner, nodes)
        rule = f"those of rounds of {per_round} trees"
        require_known(num_trees % per_round == 0, owner, "tree-sizes", rule, num_trees)
        return num_trees

    def _to_arrays(self) -> dict[str, Array]:
        offsets, trees = self._sent()
        return {OFFSETS: offsets.copy(), **trees.to_arrays(self._width)}

    def _from_arrays(self, arrays: Mapping[str, Array]) -> None:
        owner, nodes = self._owner, all_but(self._owner, arrays, OFFSETS)
        per_round = 1 if self._num_present == 2 else self._num_present
        offsets = require_array(owner, arrays, OFFSETS, self.number, (per_round,))
        trees = Trees.from_arrays(
            owner,
            nodes,
            num_trees=self._num_trees(owner, nodes, per_round),
            width=self._width,
            num_values=1,
            dtype=self.number,
        )
        self._receive(offsets, trees)
