"""Shared parts of learners of boosted trees: settings, bins of public rows, and arrays."""

import copy
import threading
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, Final, Generic, NamedTuple, Self, TypedDict, TypeVar

import numpy as np

from clients.tabular.base import CommonRows, SharedRows, TabularLearner, require_array
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
        for name, least in (("num_rounds", 1), ("max_depth", 1)):
            value = getattr(self, name)
            require(value >= least, owner, name, f"at least {least}", value)
        rate = self.learning_rate
        require(0 < rate <= 1, owner, "learning_rate", "in (0, 1]", rate)
        for name, least in (
            ("gamma", 0),
            ("reg_lambda", 0),
            ("max_bin", 2),
            ("num_threads", 1),
        ):
            value = getattr(self, name)
            require(value >= least, owner, name, f"at least {least}", value)
        return self


class BoostedLearner(TabularLearner):
    """Base of learners that boost trees, round by round one per score.

    A subclass implements `_fit_shared`, `_sent` and `_receive`, besides what `TabularLearner`
    asks for. Two classes have one score, more have one each.
    """

    number: ClassVar[Any] = np.float32
    """What leaves hold, and offsets."""

    def fit_many(
        self, sets: Sequence[TrainingSet], *, rngs: Sequence[np.random.Generator]
    ) -> list[Self]:
        """Return one new fitted twin per training set, each as `fit` makes it by itself.

        Sets on one array share its bins, also with later calls on equal rows.
        """
        twins = [copy.copy(self) for _ in sets]
        common = CommonRows(self._owner, sets)
        for twin, (x, y), rng in zip(twins, sets, rngs, strict=True):
            rows = common.get(x, twin._training_rows)
            classes, encoded = twin._numbered(y, len(rows))
            twin._classes, twin._width = classes, rows.shape[1]
            if len(classes) == 1:
                continue
            if common.are_common(x):
                twin._fit_shared(rows, encoded, rng)
            else:
                twin._fit(rows, encoded, rng)
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
        owner, found = self._owner, sorted(map(str, arrays))
        require_known(OFFSETS in arrays, owner, "arrays", f"with {OFFSETS!r}", found)
        per_round = 1 if self._num_present == 2 else self._num_present
        offsets = require_array(owner, arrays, OFFSETS, self.number, (per_round,))
        nodes = {name: array for name, array in arrays.items() if name != OFFSETS}
        trees = Trees.from_arrays(
            owner,
            nodes,
            num_trees=self._num_trees(owner, nodes, per_round),
            width=self._width,
            num_values=1,
            dtype=self.number,
        )
        self._receive(offsets, trees)


Made = TypeVar("Made")


class SharedBins(threading.local, Generic[Made]):
    """The last public rows of this thread with their bins, for one choice of settings.

    Of one thread, because libraries write the labels of a model into its bins.
    """

    def __init__(self) -> None:
        self._key: Hashable = None
        self._rows: SharedRows[Made] = SharedRows()

    def get(self, key: Hashable, rows: Array, make: Callable[[Array], Made]) -> Made:
        """Return what `make` makes of rows, or made of equal rows with this key."""
        if self._key != key:
            self._key = key
            self._rows = SharedRows()
        return self._rows.get(rows, make)
