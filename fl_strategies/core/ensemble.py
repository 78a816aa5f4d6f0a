"""Fitting many twins of one learner."""

from collections.abc import Sequence

import numpy as np

from fl_strategies.core.protocols import EnsembleLearner, Learner, LearnerFactory, TrainingSet
from fl_strategies.progress import counted


def fit_ensemble(
    learner_fn: LearnerFactory,
    sets: Sequence[TrainingSet],
    *,
    rngs: Sequence[np.random.Generator],
    kind: str = "models",
) -> list[Learner]:
    """Fit one learner per training set, all at once where the learner knows how.

    `kind` says what they are to whoever watches the progress.
    """
    first = learner_fn()
    if isinstance(first, EnsembleLearner):
        return list(first.fit_many(sets, rngs=rngs))
    members = counted(list(zip(sets, rngs, strict=True)), kind)
    return [learner_fn().fit(x, y, rng=rng) for (x, y), rng in members]
