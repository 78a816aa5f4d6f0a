"""Teachers on private subsets, students on public rows: what FedKT and PATE share."""

from collections.abc import Sequence

import numpy as np
import scipy

from fl_strategies.aggregation.evidence import corrected_labels
from fl_strategies.aggregation.voting import count_votes
from fl_strategies.arrays import FloatArray, IntArray
from fl_strategies.core.ensemble import fit_ensemble
from fl_strategies.core.party import Party
from fl_strategies.core.protocols import Learner, TrainingSet, plan_of
from fl_strategies.core.training import (
    finite_logits,
    fit_on_records,
    labels_of,
    teacher_charges,
)
from fl_strategies.exceptions import KnowledgeMismatch
from fl_strategies.privacy.accountant import Entry
from fl_strategies.strategies.fedkt.scores import one_scale


def deal_records(
    party: Party, num_splits: int, num_teachers: int, seed: int
) -> list[list[IntArray]]:
    """Return the positions of the records of every teacher, partition by partition.

    They depend on the number of records and on nothing that a record says, so that
    replacing one record changes one subset of each partition and nothing else.
    """
    orders = [
        party.rng(seed, "split", split).permutation(len(party.y)) for split in range(num_splits)
    ]
    return [np.array_split(order, num_teachers) for order in orders]


def planned_charges(party: Party, num_splits: int, num_teachers: int) -> Sequence[Entry]:
    """Return what training the teachers will cost an example; nothing if it has no price.

    It depends on the number of records and on nothing that a record says.
    """
    teacher = (party.teacher_fn or party.learner_fn)()
    sizes = [len(rows) for rows in np.array_split(np.arange(len(party.y)), num_teachers)]
    plans = [plan_of(teacher, size) for size in sizes]
    return teacher_charges(plans * num_splits, num_splits)


def train_teachers(
    party: Party, num_splits: int, num_teachers: int, seed: int, *, promised: bool = False
) -> list[Learner]:
    """Train the teachers of all partitions, those of the first partition first.

    With `promised` a teacher that cannot be trained is replaced by one of public rows.
    """
    dealt = deal_records(party, num_splits, num_teachers, seed)
    sets = [(party.x[rows], party.y[rows]) for subsets in dealt for rows in subsets]

    def rngs() -> list[np.random.Generator]:
        places = np.ndindex(num_splits, num_teachers)
        return [party.rng(seed, "teacher", *place) for place in places]

    learner_fn = party.teacher_fn or party.learner_fn
    return fit_on_records(party, learner_fn, sets, rngs, promised=promised)


def teacher_counts(
    party: Party, num_splits: int, num_teachers: int, seed: int
) -> list[FloatArray]:
    """Return how many records of each class every teacher has, in their order."""
    dealt = deal_records(party, num_splits, num_teachers, seed)
    return [
        np.bincount(party.y[rows], minlength=party.num_classes).astype(np.float64)
        for subsets in dealt
        for rows in subsets
    ]


def teacher_votes(
    party: Party,
    teachers: Sequence[Learner],
    num_splits: int,
    counts: Sequence[FloatArray] | None = None,
    *,
    promised: bool = False,
) -> IntArray:
    """Count the teachers' votes, (num_splits, num_public, num_classes).

    With `counts`, those of `teacher_counts`, every teacher votes as if its records had
    equal class shares, among the classes that it has seen. This moves no more votes than
    before when one record is replaced: a teacher's vote depends on its own subset alone, on
    the model trained on it and on its counts, and only one subset of each partition has
    changed (`deal_records`). So one teacher of each partition may name another class, also
    one that it knows only now, or no longer a class that it has lost, and all other
    teachers vote as they did: in a row of a partition one count falls by one and another
    rises by one at most.
    """
    public = party.public
    if counts is None:
        labels = [labels_of(teacher, public, promised=promised) for teacher in teachers]
    else:
        logits = [finite_logits(party.owner, t, public, promised=promised) for t in teachers]
        labels = [corrected_labels(*pair) for pair in zip(logits, counts, strict=True)]
    per_split = np.stack(labels).reshape(num_splits, -1, len(party.public))
    return np.stack([count_votes(votes, party.num_classes) for votes in per_split])


def train_students(party: Party, sets: Sequence[TrainingSet], seed: int) -> list[Learner]:
    """Train one student per partition on public rows with its teachers' labels."""
    if not all(len(labels) for _, labels in sets):
        # Labels have been released with noise, so that there are none may be told.
        raise KnowledgeMismatch(
            f"{party.owner}: queries must be answered for every student, got "
            f"none for some. Lower the threshold or ask more queries."
        )
    rngs = [party.rng(seed, "student", split) for split in range(len(sets))]
    return fit_ensemble(party.learner_fn, sets, rngs=rngs, kind="students")


def student_scores(party: Party, students: Sequence[Learner]) -> FloatArray:
    """Return how sure the students are of each class on average, (num_public, num_classes)."""
    logits = [finite_logits(party.owner, s, party.public, promised=True) for s in students]
    return one_scale(
        np.mean([scipy.special.log_softmax(own, axis=1) for own in logits], axis=0)
    )
