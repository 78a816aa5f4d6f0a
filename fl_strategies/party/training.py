"""Training on private records: paid for before it starts, and never without a model.

Whether a party answers at all is a release like any other. So where a party promises
privacy, training that fails, or a model that says nothing finite, does not end in an error:
a model of public rows, or even scores, take its place, and the party's own log says so.
What replaces a model depends on nothing but the model's own training set, so no bound on
what one record can change is touched.

Telling own records from public rows, so that evidence of different parties compares.

A classifier of own records against public rows estimates p(x) / p_public(x), the density of
the party's records over that of the public rows. With it the party's evidence for a class
is not only relative to its other classes but to the public rows, which all parties share:
a row that is like none of its records gets little evidence for any of its classes.

Public rows are scored by a classifier that has not seen them.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np

from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.aggregation.pool import Contrast
from fl_strategies.errors import InvalidData, InvalidParameter, KnowledgeMismatch
from fl_strategies.learners import (
    Learner,
    LearnerFactory,
    PortableLearner,
    TrainingSet,
    events_of,
    fit_ensemble,
)
from fl_strategies.party.party import Party
from fl_strategies.privacy.accountant import Entry, claim
from fl_strategies.privacy.ledger import DEFAULT_DELTA

logger = logging.getLogger("flwr.fl_strategies")

T = TypeVar("T")
Plan = Sequence[Entry]

_PUBLIC_ROWS: Final = 32
"""Number of public rows that a stand-in for a failed model is trained on."""


def teacher_charges(plans: Sequence[Plan], num_splits: int) -> Sequence[Entry]:
    """Return what privately trained teachers cost an example, or nothing if some are not.

    An example is in one teacher of each split: the most expensive teacher of a split
    counts, and splits add up.
    """
    if not all(plans):
        return ()
    size = len(plans) // num_splits
    splits = [plans[start : start + size] for start in range(0, len(plans), size)]
    largest = [max(split, key=_epsilon) for split in splits]
    return [entry for plan in largest for entry in plan]


def _epsilon(plan: Plan) -> float:
    return claim(plan, DEFAULT_DELTA).epsilon


def trained(train: Callable[[], T], stand_in: Callable[[], T], *, promised: bool) -> T:
    """Return what training gives; where privacy is promised and it fails, the stand-in.

    Raises
    ------
    InvalidData
        In place of `KnowledgeMismatch`, which is about requests and so is reported to servers.
    """
    try:
        return train()
    except Exception as error:
        if promised:
            logger.exception("Training failed; a model of public rows answers in its place.")
            return stand_in()
        if isinstance(error, KnowledgeMismatch):
            raise InvalidData(str(error)) from error
        raise


def public_model(party: Party, learner_fn: LearnerFactory) -> Learner:
    """Return a model that has seen public rows only, all of the first class or of zeros."""
    x = party.rows_to_try(_PUBLIC_ROWS)
    shape = (len(x),) if party.task == "single-label" else (len(x), party.num_classes)
    dtype = np.float64 if party.task == "regression" else np.int64
    return learner_fn().fit(x, np.zeros(shape, dtype=dtype), rng=np.random.default_rng(0))


def fit_on_records(
    party: Party,
    learner_fn: LearnerFactory,
    sets: Sequence[TrainingSet],
    rngs: Callable[[], Sequence[np.random.Generator]],
    *,
    promised: bool,
) -> list[Learner]:
    """Fit one model per training set, all at once where the learner knows how.

    Where privacy is promised, a set that cannot be learned costs its own model only.
    """

    def fit_each() -> list[Learner]:
        stand_in = functools.partial(public_model, party, learner_fn)
        fits = [
            functools.partial(learner_fn().fit, *one, rng=rng)
            for one, rng in zip(sets, rngs(), strict=True)
        ]
        return [trained(fit, stand_in, promised=True) for fit in fits]

    return trained(
        lambda: fit_ensemble(learner_fn, sets, rngs=rngs(), kind="teachers"),
        fit_each,
        promised=promised,
    )


def finite_logits(owner: str, model: Learner, x: Array, *, promised: bool) -> FloatArray:
    """Return a model's logits of rows; where it has none that are finite, even ones.

    Raises
    ------
    InvalidData
        In place of even logits, unless privacy is promised.
    """

    def ask() -> FloatArray:
        logits = np.asarray(model.logits(x), dtype=np.float64)
        sound = np.isfinite(logits).all(axis=1, keepdims=True)
        if not (promised or sound.all()):
            raise InvalidData(f"{owner}: logits must be finite, got NaN or infinity.")
        return np.where(sound, logits, 0.0)

    return trained(ask, lambda: np.zeros((len(x), model.num_classes)), promised=promised)


def labels_of(model: Learner, x: Array, *, promised: bool) -> IntArray:
    """Return the classes that a model names; the first one where it cannot be asked."""
    return trained(
        lambda: np.asarray(model.predict(x), dtype=np.int64),
        lambda: np.zeros(len(x), dtype=np.int64),
        promised=promised,
    )


def require_plan(model: Learner, plan: Plan) -> None:
    """Raise unless training has spent what was charged before it; nothing leaves then."""
    if tuple(events_of(model)) != tuple(plan):
        raise InvalidParameter(
            f"Learner: planned_events must be what training then spends, got other events of "
            f"{type(model).__name__}."
        )


def require_finite(model: PortableLearner) -> None:
    """Raise `InvalidData` for a model with parameters that are not finite."""
    for array in model.to_arrays().values():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InvalidData("Learner: parameters must be finite, got NaN or infinity.")


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
