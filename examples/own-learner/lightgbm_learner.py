"""LightGBM as a learner, from scratch: the four methods of `fl_strategies.Learner`."""

from typing import Self

import lightgbm
import numpy as np
from fl_strategies.errors import NotFitted

TINY = 1e-7


class LightGBMLearner:
    """Boosted trees of LightGBM.

    Parameters
    ----------
    num_classes : int
        Length of the federation's class list; a party's records may lack some.
    num_rounds : int
    """

    def __init__(self, *, num_classes: int, num_rounds: int = 50) -> None:
        self.num_classes = num_classes
        self.num_rounds = num_rounds
        self.classes: np.ndarray | None = None

    def fit(self, x: np.ndarray, y: np.ndarray, *, rng: np.random.Generator) -> Self:
        """Learn labels `y` (n,) of rows `x` (n, width); all randomness is from `rng`."""
        self._check(x, x.shape[1])
        if len(x) == 0 or y.min() < 0 or y.max() >= self.num_classes:
            raise ValueError(f"y must be labels below {self.num_classes}, and some of them")
        settings = {
            "objective": "multiclass",
            "min_data_in_leaf": 5,
            "seed": int(rng.integers(2**31)),
            "deterministic": True,
            "num_threads": 1,
            "verbose": -1,
        }
        # LightGBM wants labels without gaps, and two classes at least.
        present, encoded = np.unique(y, return_inverse=True)
        if len(present) > 1:
            settings["num_class"] = len(present)
            data = lightgbm.Dataset(x, label=encoded, params=settings)
            self.booster = lightgbm.train(settings, data, self.num_rounds)
        self.classes, self.width = present, x.shape[1]
        return self

    def logits(self, x: np.ndarray) -> np.ndarray:
        """Return log-probabilities (n, num_classes); classes never seen get a tiny one."""
        if self.classes is None:
            raise NotFitted("LightGBMLearner: the learner must be fitted first, got none.")
        self._check(x, self.width)
        chances = np.full((len(x), self.num_classes), TINY)
        if len(self.classes) == 1:
            chances[:, self.classes] = 1.0
        elif len(x):
            chances[:, self.classes] = np.maximum(self.booster.predict(x), TINY)
        return np.log(chances)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Return the likeliest class of every row."""
        return self.logits(x).argmax(axis=1)

    @staticmethod
    def _check(x: np.ndarray, width: int) -> None:
        if x.shape[1] != width or not np.isfinite(x).all():
            raise ValueError(f"x must be finite rows of {width} columns")
