"""FedKT: federated learning via knowledge transfer, in one round.

Li, He, Song: Practical One-Shot Federated Learning for Cross-Silo Setting (IJCAI 2021),
Algorithm 1.

    party    s random partitions of its records, each into t disjoint subsets
             a teacher per subset; the t teachers of a partition vote on the public rows
             a student per partition, trained on the public rows with these labels
    server   a party whose s students agree on a row gives s votes, otherwise none
             the final model is trained on the public rows with the winning labels
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from fl_strategies import keys
from fl_strategies.base import FederationOptions, KnowledgeStrategy
from fl_strategies.ensemble import fit_ensemble
from fl_strategies.exceptions import (
    InvalidData,
    KnowledgeMismatch,
    UnsupportedLearner,
    require,
)
from fl_strategies.half import PartyHalf, check_public_data, read_seed
from fl_strategies.knowledge import (
    Knowledge,
    Metrics,
    Scalar,
    config_choice,
    config_int,
    join_arrays,
    part_arrays,
)
from fl_strategies.metrics import NO_GUARANTEE
from fl_strategies.packing import pack_labels, unpack_labels
from fl_strategies.party import Party, check_rows, content_hash
from fl_strategies.protocols import Array, IntArray, Learner, LearnerFactory, PortableLearner
from fl_strategies.randomness import derive_rng
from fl_strategies.replies import PartyReply
from fl_strategies.voting import (
    agreement,
    consistent_mask,
    consistent_votes,
    count_votes,
    plurality,
)

Exchange = Literal["votes", "models"]
PrivacyLevel = Literal["L0"]

NUM_SPLITS = "num-splits"
NUM_TEACHERS = "num-teachers"
PRIVACY_LEVEL = "privacy-level"
EXCHANGE = "exchange"
EXCHANGES: Sequence[str] = ("votes", "models")

# A server cannot make a party train without end.
MAX_SPLITS = 1_000
MAX_TEACHERS = 100_000


class FedKT(KnowledgeStrategy[IntArray]):
    """One round of two-tier knowledge transfer with consistent voting.

    Leaves the party
        ``exchange="votes"``: the labels its s students give to the public rows, packed
        into ceil(log2 C) bits each. ``exchange="models"``: the students themselves, as in
        the paper. The server uses students only to label the public rows, so both lead
        to the same final model, to the bit.
    Guarantee
        L0: none. Epsilon is reported as infinite.

    Parameters
    ----------
    public : (num_public, ...)
        Unlabelled rows; every party holds the same.
    num_classes : int
        Length of the federation's class list.
    learner_fn : factory
        Makes the final model.
    learner_name : str
        What parties call the final model when it is delivered to them.
    num_splits, num_teachers : int
        The paper's s and t. A party with fewer than t records trains fewer teachers.
    privacy_level : "L0"
    exchange : "votes" or "models"
    student_fns : mapping of learner name to factory
        For ``exchange="models"``: how the server rebuilds the students it receives.
    **federation
        See `KnowledgeStrategy`.

    Notes
    -----
    Ties, among teachers and on the server, go to one of the leading classes at random,
    from a generator named by the seed. Public rows on which no party is consistent take
    no part in the final training; their number is the metric ``num-unlabelled``.

    Deviations from the authors' code: it gives such rows, and ties, to class 0; and for
    neural networks it counts all students' votes, consistent or not.
    """

    name: ClassVar[str] = "fedkt"
    last_round: ClassVar[int | None] = 1

    def __init__(
        self,
        *,
        public: Array,
        num_classes: int,
        learner_fn: LearnerFactory,
        learner_name: str = "learner",
        num_splits: int = 2,
        num_teachers: int = 5,
        privacy_level: PrivacyLevel = "L0",
        exchange: Exchange = "votes",
        student_fns: Mapping[str, LearnerFactory] | None = None,
        **federation: Unpack[FederationOptions],
    ) -> None:
        super().__init__(**federation)
        check_rows("FedKT", "public", public)
        require(len(public) > 0, "FedKT", "public", "at least one row", len(public))
        require(num_classes >= 2, "FedKT", "num_classes", "at least 2", num_classes)
        require(
            1 <= num_splits <= MAX_SPLITS,
            "FedKT", NUM_SPLITS, f"from 1 to {MAX_SPLITS}", num_splits,
        )  # fmt: skip
        require(
            1 <= num_teachers <= MAX_TEACHERS,
            "FedKT", NUM_TEACHERS, f"from 1 to {MAX_TEACHERS}", num_teachers,
        )  # fmt: skip
        require(privacy_level == "L0", "FedKT", PRIVACY_LEVEL, "'L0'", privacy_level)
        require(exchange in EXCHANGES, "FedKT", EXCHANGE, "'votes' or 'models'", exchange)
        self.public = public
        self.num_classes = num_classes
        self.learner_fn = learner_fn
        self.model_name = learner_name
        self.num_splits = num_splits
        self.num_teachers = num_teachers
        self.privacy_level = privacy_level
        self.reply_kind = exchange
        self.student_fns = {learner_name: learner_fn, **(student_fns or {})}

    def party_config(self, server_round: int) -> dict[str, Scalar]:  # noqa: ARG002
        """Return s, t and what identifies the public data."""
        return {
            NUM_SPLITS: self.num_splits,
            NUM_TEACHERS: self.num_teachers,
            PRIVACY_LEVEL: self.privacy_level,
            EXCHANGE: self.reply_kind,
            keys.NUM_CLASSES: self.num_classes,
            keys.PUBLIC_HASH: content_hash(self.public),
        }

    def read(self, knowledge: Knowledge) -> IntArray:
        """Return the labels of one party's students, (num_splits, num_public)."""
        if self.reply_kind == "votes":
            packed = knowledge.arrays.get("votes", np.empty(0, np.uint8))
            return unpack_labels(packed, (self.num_splits, len(self.public)), self.num_classes)
        students = self._read_students(knowledge)
        return np.stack([student.predict(self.public) for student in students])

    def _read_students(self, knowledge: Knowledge) -> list[Learner]:
        name = str(knowledge.meta.get(keys.LEARNER))
        if name not in self.student_fns:
            raise KnowledgeMismatch(
                f"FedKT: a student's learner must be one of {', '.join(self.student_fns)}, "
                f"got {name!r}. Name its factory in student_fns."
            )
        models = part_arrays(knowledge.arrays, self.num_splits)
        return [portable(self.student_fns[name]()).from_arrays(arrays) for arrays in models]

    def aggregate(
        self,
        server_round: int,  # noqa: ARG002 - there is only one
        replies: Sequence[PartyReply[IntArray]],
    ) -> tuple[ArrayRecord | None, Metrics]:
        """Count consistent votes and train the final model on the winners."""
        counts = np.zeros((len(self.public), self.num_classes), dtype=np.int64)
        for reply in replies:
            counts += consistent_votes(reply.knowledge, self.num_classes)
        labelled = counts.any(axis=1)
        metrics: Metrics = {keys.NUM_UNLABELLED: int((~labelled).sum()), **NO_GUARANTEE}
        if not labelled.any():
            self._fail("on no public row did all students of any party agree")
            return None, metrics
        labels = plurality(counts, derive_rng(self.seed, "server", "ties"))
        rng = derive_rng(self.seed, "server", "final")
        model = self.learner_fn().fit(self.public[labelled], labels[labelled], rng=rng)
        return self._keep_model(model), metrics


class FedKTParty(PartyHalf):
    """The party's half: teachers on private subsets, students on the public rows."""

    def train(
        self,
        party: Party,
        received: Knowledge | None,  # noqa: ARG002 - one round, nothing to receive
        config: ConfigRecord,
        state: RecordDict,  # noqa: ARG002 - one round, nothing to keep
    ) -> tuple[Knowledge, Metrics]:
        """Return the students or their labels on the public rows."""
        check_public_data(party, config)
        config_choice(config, PRIVACY_LEVEL, ["L0"])
        if not len(party.y):
            raise InvalidData(f"Party {party.partition_id}: x must hold records, got none.")
        num_splits = config_int(config, NUM_SPLITS, minimum=1, maximum=MAX_SPLITS)
        asked = config_int(config, NUM_TEACHERS, minimum=1, maximum=MAX_TEACHERS)
        num_teachers = min(asked, len(party.y))
        seed = read_seed(config)
        counts = teacher_votes(party, num_splits, num_teachers, seed)
        students = train_students(party, counts, seed)
        labels = np.stack([student.predict(party.public) for student in students])
        metrics: Metrics = {
            keys.NUM_TEACHERS_MISSING: num_splits * (asked - num_teachers),
            keys.VOTE_AGREEMENT: agreement(counts.reshape(-1, party.num_classes)),
            keys.CONSISTENT_FRACTION: float(consistent_mask(labels).mean()),
            **NO_GUARANTEE,
        }
        if config_choice(config, EXCHANGE, EXCHANGES) == "votes":
            packed = pack_labels(labels, party.num_classes)
            return Knowledge("votes", {"votes": packed}), metrics
        models = [portable(student).to_arrays() for student in students]
        return Knowledge("models", join_arrays(models)), metrics


def teacher_votes(party: Party, num_splits: int, num_teachers: int, seed: int) -> IntArray:
    """Train s x t teachers and count their votes, (num_splits, num_public, num_classes).

    Records are dealt to subsets by position only, never by label or value, so that
    replacing one record changes one teacher of each partition and nothing else.
    """
    sets, rngs = [], []
    for split in range(num_splits):
        order = derive_rng(seed, "party", party.partition_id, "split", split)
        for number, rows in enumerate(
            np.array_split(order.permutation(len(party.y)), num_teachers)
        ):
            sets.append((party.x[rows], party.y[rows]))
            rngs.append(derive_rng(seed, "party", party.partition_id, "teacher", split, number))
    teachers = fit_ensemble(party.teacher_fn or party.learner_fn, sets, rngs=rngs)
    labels = np.stack([teacher.predict(party.public) for teacher in teachers])
    per_split = labels.reshape(num_splits, num_teachers, len(party.public))
    return np.stack([count_votes(votes, party.num_classes) for votes in per_split])


def train_students(party: Party, counts: IntArray, seed: int) -> list[Learner]:
    """Train one student per partition on the public rows, labelled by its teachers."""

    def stream(purpose: str, split: int) -> np.random.Generator:
        return derive_rng(seed, "party", party.partition_id, purpose, split)

    splits = range(len(counts))
    sets = [(party.public, plurality(counts[j], stream("ties", j))) for j in splits]
    return fit_ensemble(party.learner_fn, sets, rngs=[stream("student", j) for j in splits])


def portable(learner: Learner) -> PortableLearner:
    """Return the learner if it can travel; say what to do if it cannot."""
    if not isinstance(learner, PortableLearner):
        raise UnsupportedLearner(
            f"FedKT: a learner must have to_arrays and from_arrays for exchange='models', "
            f"got {type(learner).__name__}. Use exchange='votes'."
        )
    return learner
