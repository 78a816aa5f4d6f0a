"""Fitting many twins of one learner."""

from collections.abc import Sequence

import numpy as np

from fl_strategies.core.protocols import EnsembleLearner, Learner, LearnerFactory, TrainingSet


def fit_ensemble(
    learner_fn: LearnerFactory,
    sets: Sequence[TrainingSet],
    *,
    rngs: Sequence[np.random.Generator],
) -> list[Learner]:
    """Fit one learner per training set, all at once where the learner knows how."""
    first = learner_fn()
    if isinstance(first, EnsembleLearner):
        return list(first.fit_many(sets, rngs=rngs))
    return [learner_fn().fit(x, y, rng=rng) for (x, y), rng in zip(sets, rngs, strict=True)]
