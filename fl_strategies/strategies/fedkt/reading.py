"""Reading what a FedKT party sent, as the answer of an untrusted party."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fl_strategies.aggregation.class_weights import CLASS_COUNTS, read_counts
from fl_strategies.aggregation.voting import consistent_labels
from fl_strategies.arrays import Array, FloatArray, IntArray
from fl_strategies.core.protocols import Learner, LearnerFactory, require_portable
from fl_strategies.exceptions import KnowledgeMismatch
from fl_strategies.strategies.fedkt.options import VOTE_INSTEAD
from fl_strategies.strategies.fedkt.scores import SCORES
from fl_strategies.strategies.fedkt.tally import PartyVotes
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, part_arrays, party_of, shown
from fl_strategies.wire.packing import unpack_labels


@dataclass(frozen=True, eq=False)
class VoteReader:
    """What a reply must fit; anything else raises `KnowledgeMismatch`."""

    public: Array
    num_classes: int
    num_splits: int
    student_fns: Mapping[str, LearnerFactory]
    consistent: bool = True

    def read(self, knowledge: Knowledge, *, weighted: bool) -> PartyVotes:
        """Return one party's votes, and its class counts if votes are weighted."""
        counts = self._counts(knowledge) if weighted else None
        if knowledge.kind == "scores":
            return self._scored(knowledge, counts)
        labels = self._labels(knowledge)
        if self.consistent:
            labels = consistent_labels(labels, self.num_classes)
        return PartyVotes(labels, counts, party_of(knowledge))

    def _counts(self, knowledge: Knowledge) -> FloatArray:
        counts = read_counts(knowledge.arrays, self.num_classes)
        if counts.sum() < 1:
            raise KnowledgeMismatch(
                f"FedKT: {CLASS_COUNTS} must hold at least one record, got {counts[:8]}."
            )
        return counts

    def _scored(self, knowledge: Knowledge, counts: FloatArray | None) -> PartyVotes:
        """Return scores, and the likeliest classes as votes."""
        packed = knowledge.arrays.get("scores", np.empty(0, np.uint8))
        codes = SCORES.from_wire(packed, (len(self.public), self.num_classes))
        return PartyVotes(codes.argmax(axis=1), counts, party_of(knowledge), codes)

    def _labels(self, knowledge: Knowledge) -> IntArray:
        """Return the labels of one party's students, (num_splits, num_public)."""
        shape = self.num_splits, len(self.public)
        if knowledge.kind == "votes":
            packed = knowledge.arrays.get("votes", np.empty(0, np.uint8))
            return unpack_labels(packed, shape, self.num_classes)
        students = self._students(knowledge)
        labels = np.stack([student.predict(self.public) for student in students])
        if labels.shape != shape or labels.min() < 0 or labels.max() >= self.num_classes:
            raise KnowledgeMismatch(
                f"FedKT: students must name a class below {self.num_classes} for each of "
                f"{len(self.public)} public rows, got others."
            )
        return labels

    def _students(self, knowledge: Knowledge) -> list[Learner]:
        name = str(knowledge.meta.get(keys.LEARNER))
        if name not in self.student_fns:
            raise KnowledgeMismatch(
                f"FedKT: a student's learner must be one of {', '.join(self.student_fns)}, "
                f"got {shown(name)}. Name its factory in student_fns."
            )
        arrays = {key: a for key, a in knowledge.arrays.items() if key != CLASS_COUNTS}
        return [
            require_portable(self.student_fns[name](), VOTE_INSTEAD).from_arrays(own)
            for own in part_arrays(arrays, self.num_splits)
        ]
