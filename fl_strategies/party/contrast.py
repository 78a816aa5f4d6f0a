"""Telling own records from public rows, so that evidence of different parties compares.

A classifier of own records against public rows estimates p(x) / p_public(x), the density of
the party's records over that of the public rows. With it the party's evidence for a class
is not only relative to its other classes but to the public rows, which all parties share:
a row that is like none of its records gets little evidence for any of its classes.

Public rows are scored by a classifier that has not seen them.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from fl_strategies._util.arrays import Array, FloatArray, IntArray
from fl_strategies.aggregation.pool import Contrast
from fl_strategies.learners import TrainingSet, fit_ensemble
from fl_strategies.party.party import Party

LEAST_COVERAGE: Final = 0.5
"""Below it the public rows are taken to be unlike the party's records; see `coverage`."""
MAX_RECORDS: Final = 1000
"""More records than these make a slower contrast and hardly a better one."""
_ROWS_PER_RECORD: Final = 2
_FEWEST_ROWS: Final = 100
_NUM_FOLDS: Final = 2
# Flexible models exaggerate on rows they have not seen. How it was chosen:
# docs/results/consensus.md.
_TRUST: Final = 0.7
_LARGEST: Final = 5.0


def contrasted(
    party: Party, views: Sequence[Array], seed: int
) -> tuple[FloatArray | None, Contrast]:
    """Return what to add to a party's evidence, and how its records relate to public rows.

    Nothing is added where public rows are unlike the records, or too few.
    """
    if len(party.public) < 2 * _NUM_FOLDS:
        return None, "none"
    ratio = log_ratio_to_public(party, views, seed)
    if coverage(ratio, party.num_classes) < LEAST_COVERAGE:
        return None, "uncovered"
    return _TRUST * ratio, "public"


def log_ratio_to_public(party: Party, views: Sequence[Array], seed: int) -> FloatArray:
    """Return log p(x) / p_public(x) for every row of every view of the public rows.

    Parameters
    ----------
    party : Party
    views : arrays like `party.public`
        The public rows, perhaps changed by augmentation; row i of each is public row i.
    seed : int

    Returns
    -------
    log_ratio : (num_views * num_public,)
        Cut at plus and minus 5.
    """
    own, folds = _own_rows(party, seed), _folds(party, seed)
    sets, offsets = _training_sets(party, own, folds, seed)
    rngs = [party.rng(seed, "contrast", 2, number) for number in range(_NUM_FOLDS)]
    models = fit_ensemble(party.learner_fn, sets, rngs=rngs)
    ratio = np.empty((len(views), len(party.public)))
    for model, fold, offset in zip(models, folds, offsets, strict=True):
        for number, view in enumerate(views):
            logits = model.logits(view[fold])
            ratio[number, fold] = logits[:, 1] - logits[:, 0] - offset
    return np.clip(ratio, -_LARGEST, _LARGEST).reshape(-1)


def coverage(log_ratio: FloatArray, num_classes: int) -> float:
    """Return the share of a party's records that lie where public rows are, about.

    The mean over public rows of p(x) / p_public(x) is 1 if public rows are found wherever
    the party's records are, whatever the classes of both; and near 0 if they are not. A
    party of one class of C, as frequent as the others, has a ratio of C at most, so larger
    ones are cut: they would let a few odd rows speak for all.
    """
    return float(np.exp(np.minimum(log_ratio, np.log(2 * num_classes))).mean())


def _own_rows(party: Party, seed: int) -> IntArray:
    order = party.rng(seed, "contrast", 0).permutation(len(party.y))
    return order[:MAX_RECORDS]


def _folds(party: Party, seed: int) -> list[IntArray]:
    order = party.rng(seed, "contrast", 1).permutation(len(party.public))
    return [order[number::_NUM_FOLDS] for number in range(_NUM_FOLDS)]


def _training_sets(
    party: Party, own: IntArray, folds: Sequence[IntArray], seed: int
) -> tuple[list[TrainingSet], list[float]]:
    """Return for each fold the rows to learn from, and the log-odds that they start from."""
    most = max(_ROWS_PER_RECORD * len(own), _FEWEST_ROWS)
    sets: list[TrainingSet] = []
    offsets = []
    for fold in folds:
        others = np.setdiff1d(np.arange(len(party.public)), fold)
        order = party.rng(seed, "contrast", 3, len(sets)).permutation(len(others))
        background = others[order[:most]]
        x = np.concatenate([party.x[own], party.public[background]])
        y = np.concatenate([np.ones(len(own)), np.zeros(len(background))]).astype(np.int64)
        sets.append((x, y))
        offsets.append(float(np.log(len(own) / len(background))))
    return sets, offsets
