"""CatBoost as a learner, the short way: `TabularLearner` has the four methods already.

It takes care of class lists, missing classes, bad rows and learning from scores; a model says
how it is fitted and what it finds probable.
"""

import catboost
import numpy as np
from clients.tabular.base import TabularLearner


class CatBoostLearner(TabularLearner):
    """Boosted trees of CatBoost.

    Parameters
    ----------
    num_classes : int
        Length of the federation's class list; a party's records may lack some.
    num_rounds : int
    """

    def __init__(self, *, num_classes: int, num_rounds: int = 50) -> None:
        super().__init__(num_classes=num_classes)
        self.num_rounds = num_rounds

    def _fit(self, x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> None:
        """Fit a new model; `y` has the classes that are there, renumbered from 0."""
        self.model = catboost.CatBoostClassifier(
            iterations=self.num_rounds,
            loss_function="MultiClass",
            random_seed=int(rng.integers(2**31)),
            thread_count=1,
            allow_writing_files=False,
            verbose=False,
        )
        self.model.fit(x, y)

    def _probabilities(self, x: np.ndarray) -> np.ndarray:
        """Return the probabilities of these classes, (n, k)."""
        return self.model.predict_proba(x)
