"""What the server of FedKT keeps of the parties' votes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fl_strategies.aggregation.evidence import VOTE_STRENGTH, vote_evidence
from fl_strategies.aggregation.evidence_pool import ClassShare, EvidencePool
from fl_strategies.aggregation.voting import VoteSum, plurality
from fl_strategies.arrays import Array, FloatArray, IntArray
from fl_strategies.privacy.accountant import Entry
from fl_strategies.strategies.fedkt.scores import SCORES, score_evidence
from fl_strategies.wire.knowledge import Metrics


@dataclass(frozen=True, eq=False)
class PartyVotes:
    """One party's votes (num_rows,), -1 for none, its class counts or None, and its id.

    Students that vote by themselves have votes of (num_students, num_rows).

    `scores` are how sure it is of each class (num_rows, num_classes), as they came, if it says.
    """

    labels: Array
    counts: FloatArray | None
    party: int = 0
    scores: Array | None = None


@dataclass(frozen=True, eq=False)
class PartyAnswer:
    """What was read of a party: votes that are not counted yet, if any, and their training.

    `training` is what the party says its privately trained teachers cost a record.
    """

    votes: PartyVotes | None
    training: Sequence[Entry] = ()


class VoteTally:
    """Votes of all parties, kept as sums, whatever the number of parties.

    Parameters
    ----------
    shape : (rows, classes)
    worth : int
        What a vote counts for: the number of students that cast it together.
    share : optional
        Weigh votes by the parties' class counts, and give the classes these shares; see
        `EvidencePool`. Left out, all votes weigh the same.
    exclude_outliers : bool
        Of weighted votes, those of parties that contradict most others are not counted.
    scored : bool
        Of weighted votes, parties say how sure they are of each class.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        worth: int,
        share: ClassShare | None = None,
        exclude_outliers: bool = True,
        scored: bool = False,
    ) -> None:
        self._votes = VoteSum(shape, worth)
        self._pool: EvidencePool | None = None
        if share is not None:
            self._pool = EvidencePool(
                shape,
                bound=SCORES.bound if scored else VOTE_STRENGTH,
                task="single-label",
                share=share,
                decode=score_evidence if scored else vote_evidence,
                exclude_outliers=exclude_outliers,
            )

    def add(self, votes: PartyVotes) -> None:
        """Count one party's votes."""
        if self._pool is not None and votes.counts is not None:
            said = votes.labels if votes.scores is None else votes.scores
            self._pool.add(said, votes.counts, "none", votes.party)
        for labels in np.atleast_2d(votes.labels):
            self._votes.add(labels)

    @property
    def counts(self) -> IntArray:
        """Votes for each class, (rows, classes)."""
        return self._votes.counts

    def winners(self, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
        """Return the rows that anybody has voted on, and their labels."""
        counts = self.counts
        rows = np.flatnonzero(counts.any(axis=1))
        if not len(rows):
            return rows, rows
        scores = counts if self._pool is None else self._pool.result()
        return rows, plurality(scores, rng)[rows]

    def report(self) -> tuple[tuple[int, ...], Metrics]:
        """Return who was not counted, and how many these are or count for less."""
        if self._pool is None:
            return (), {}
        return self._pool.outliers, self._pool.report("FedKT")
