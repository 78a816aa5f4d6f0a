"""Teachers on private subsets, students on public rows: what FedKT and PATE share."""

from collections.abc import Sequence

import numpy as np

from fl_strategies.ensemble import fit_ensemble
from fl_strategies.exceptions import InvalidData
from fl_strategies.party import Party
from fl_strategies.protocols import IntArray, Learner, TrainingSet
from fl_strategies.voting import count_votes


def train_teachers(
    party: Party, num_splits: int, num_teachers: int, seed: int
) -> list[Learner]:
    """Train the teachers of all partitions, those of the first partition first.

    Records are dealt to subsets by position only, never by label or value, so that
    replacing one record changes one teacher of each partition and nothing else.
    """
    sets, rngs = [], []
    for split in range(num_splits):
        order = party.rng(seed, "split", split).permutation(len(party.y))
        for number, rows in enumerate(np.array_split(order, num_teachers)):
            sets.append((party.x[rows], party.y[rows]))
            rngs.append(party.rng(seed, "teacher", split, number))
    return fit_ensemble(party.teacher_fn or party.learner_fn, sets, rngs=rngs)


def teacher_votes(party: Party, teachers: Sequence[Learner], num_splits: int) -> IntArray:
    """Count the teachers' votes, (num_splits, num_public, num_classes)."""
    labels = np.stack([teacher.predict(party.public) for teacher in teachers])
    per_split = labels.reshape(num_splits, -1, len(party.public))
    return np.stack([count_votes(votes, party.num_classes) for votes in per_split])


def train_students(party: Party, sets: Sequence[TrainingSet], seed: int) -> list[Learner]:
    """Train one student per partition on public rows with its teachers' labels."""
    if not all(len(labels) for _, labels in sets):
        raise InvalidData(
            f"{party.owner}: queries must be answered for every student, got "
            f"none for some. Lower the threshold or ask more queries."
        )
    rngs = [party.rng(seed, "student", split) for split in range(len(sets))]
    return fit_ensemble(party.learner_fn, sets, rngs=rngs)
