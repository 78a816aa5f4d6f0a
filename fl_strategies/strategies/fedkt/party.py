"""The party half of FedKT; see `fl_strategies.strategies.fedkt`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from fl_strategies.aggregation.class_weights import CLASS_COUNTS, class_counts
from fl_strategies.aggregation.evidence import valid_counts
from fl_strategies.aggregation.voting import agreement, consistent_mask, plurality
from fl_strategies.arrays import Array, IntArray
from fl_strategies.core.accounting import (
    is_promise,
    ledger_of,
    ledger_to_text,
    privacy_metrics,
    spend,
    unprotected,
)
from fl_strategies.core.party import Party
from fl_strategies.core.policy import Request
from fl_strategies.core.protocols import TrainingSet, require_portable
from fl_strategies.core.role import PartyHalf, check_public_data, read_seed
from fl_strategies.exceptions import require_known
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.counts import LaplaceCounts
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.privacy.votes import VoteMechanism, VotePrivacy, choose_queries
from fl_strategies.strategies.fedkt.asked import request_of
from fl_strategies.strategies.fedkt.teaching import (
    planned_charges,
    teacher_counts,
    teacher_votes,
    train_students,
    train_teachers,
)
from fl_strategies.strategies.fedkt.words import (
    CORRECTED,
    COUNT_EPSILON,
    COUNTED,
    EXACT_COUNTS,
    EXCHANGE,
    EXCHANGES,
    LEVELS,
    MAX_SPLITS,
    MAX_TEACHERS,
    NUM_QUERIES,
    NUM_SPLITS,
    NUM_TEACHERS,
    PRIVACY_LEVEL,
    PRIVATE_DIAGNOSTICS,
    UNPROTECTED,
    VOTE_INSTEAD,
    VOTE_WEIGHTS,
    WEIGHTS_AT,
    count_noise,
)
from fl_strategies.wire import keys
from fl_strategies.wire.config import config_choice, config_float, config_int
from fl_strategies.wire.knowledge import (
    Knowledge,
    Metrics,
    Scalar,
    join_arrays,
)
from fl_strategies.wire.packing import pack_labels


class FedKTParty(PartyHalf):
    """The party's half: teachers on private subsets, students on the public rows."""

    def request(self, party: Party, config: ConfigRecord) -> Request:
        """Return what a level and so many teachers mean for the party."""
        return request_of(party, config)

    def train(
        self,
        party: Party,
        received: Knowledge | None,  # noqa: ARG002 - one round, nothing to receive
        config: ConfigRecord,
        state: RecordDict,
    ) -> tuple[Knowledge, Metrics]:
        """Return the labels of the public rows or the students, and class counts if asked."""
        check_public_data(party, config)
        require_known(len(party.y) > 0, party.owner, "x", "records to learn from", "none")
        work = _Work.read(party, config)
        metrics = self._charge(party, work, config, state)
        votes = self._votes(party, work, config)
        sets, agreed = self._label(party, votes, work, config)
        arrays, labels = self._answer(party, sets, config)
        metrics |= {
            keys.VOTE_AGREEMENT: _diagnostic(agreed, config),
            keys.NUM_TEACHERS_MISSING: work.num_missing,
            keys.CONSISTENT_FRACTION: _diagnostic(consistent_mask(labels).mean(), config),
        }
        exchange = config_choice(config, EXCHANGE, EXCHANGES)
        arrays |= _class_counts(party, config)
        return Knowledge(exchange, arrays, _events(work)), metrics

    def _answer(
        self, party: Party, sets: Sequence[TrainingSet], config: ConfigRecord
    ) -> tuple[dict[str, Array], IntArray]:
        """Return what leaves the party, votes or students, and the labels that these give."""
        exchange = config_choice(config, EXCHANGE, EXCHANGES)
        alone = config[NUM_TEACHERS] == 1 and config[PRIVACY_LEVEL] != "L2"
        if alone and exchange == "votes":
            # A student would but copy its only teacher.
            labels = np.stack([labels for _, labels in sets])
            return {"votes": pack_labels(labels, party.num_classes)}, labels
        students = train_students(party, sets, read_seed(config))
        labels = np.stack([student.predict(party.public) for student in students])
        if exchange == "votes":
            return {"votes": pack_labels(labels, party.num_classes)}, labels
        models = [require_portable(student, VOTE_INSTEAD).to_arrays() for student in students]
        return join_arrays(models), labels

    def _votes(self, party: Party, work: "_Work", config: ConfigRecord) -> IntArray:
        """Count the teachers' votes, corrected if that is asked for and free.

        What a privately trained teacher says is free as long as nothing but its model
        decides it; the exact counts of its records would undo that where no noise follows.
        """
        size = work.num_splits, work.num_teachers
        seed, promised = read_seed(config), work.promised
        teachers = train_teachers(party, *size, seed, promised=promised)
        paid = work.level != "L2" and work.training
        corrected = config.get(CORRECTED) is True and not paid
        counts = teacher_counts(party, *size, seed) if corrected else None
        return teacher_votes(party, teachers, work.num_splits, counts, promised=promised)

    def _charge(
        self, party: Party, work: "_Work", config: ConfigRecord, state: RecordDict
    ) -> Metrics:
        """Record what the answer will cost, before a record is looked at."""
        charges, delta = [*work.charges], work.delta
        ledger = spend(party, charges, f"fedkt {work.level}", delta, state)
        if work.mechanism is None or work.counting:
            reason = COUNTED if work.mechanism is not None else UNPROTECTED
            return privacy_metrics(party=unprotected(reason), example=ledger)
        # All teachers of a partition change when the whole party does.
        whole = replace(work.mechanism, unit="party", sensitivity=work.num_teachers)
        seeded, num_labels = _is_seeded(config), work.num_splits * len(work.rows)
        everybody = ledger_of(whole.charges(num_labels, seeded=seeded), delta)
        return privacy_metrics(party=everybody, example=ledger)

    def _label(
        self, party: Party, votes: IntArray, work: "_Work", config: ConfigRecord
    ) -> tuple[list[TrainingSet], float]:
        """Return what each student learns from, and how far teachers agree if that is told."""
        seed = read_seed(config)
        if work.mechanism is None:
            sets = [
                (party.public, plurality(own, party.rng(seed, "ties", split)))
                for split, own in enumerate(votes)
            ]
            return sets, agreement(votes.reshape(-1, party.num_classes))
        privacy, sets = VotePrivacy.from_config(config), []
        for split, own in enumerate(votes):
            rng = privacy.rng(seed, "party", party.partition_id, split)
            labels = work.mechanism.release(own[work.rows], rng).values
            answered = labels >= 0
            sets.append((party.public[work.rows[answered]], labels[answered]))
        # How far the teachers agree is private here.
        return sets, math.nan


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What a party is asked to do and what that will cost, known without its records."""

    level: str
    num_splits: int
    num_teachers: int
    num_missing: int
    rows: IntArray
    mechanism: VoteMechanism | None
    training: Sequence[Entry]
    counting: Sequence[Entry]
    charges: Sequence[Entry]
    delta: float

    @property
    def promised(self) -> bool:
        """Whether anybody is promised anything, so that the party must not fail."""
        return self.level != "L0" or is_promise(self.charges)

    @classmethod
    def read(cls, party: Party, config: ConfigRecord) -> "_Work":
        """Read the server's request."""
        level = config_choice(config, PRIVACY_LEVEL, LEVELS)
        num_splits = config_int(config, NUM_SPLITS, minimum=1, maximum=MAX_SPLITS)
        asked = config_int(config, NUM_TEACHERS, minimum=1, maximum=MAX_TEACHERS)
        num_teachers = min(asked, len(party.y))
        training = planned_charges(party, num_splits, num_teachers)
        counting = _count_charges(config, seeded=_is_seeded(config))
        mechanism, rows, labelling, delta = _labelling(party, config, num_splits, training)
        return cls(
            level=level,
            num_splits=num_splits,
            num_teachers=num_teachers,
            num_missing=num_splits * (asked - num_teachers),
            rows=rows,
            mechanism=mechanism,
            training=training,
            counting=counting,
            charges=[*labelling, *counting],
            delta=delta,
        )


def _labelling(
    party: Party, config: ConfigRecord, num_splits: int, training: Sequence[Entry]
) -> tuple[VoteMechanism | None, IntArray, Sequence[Entry], float]:
    """Return the noise on votes at L2, the rows that are labelled, their cost and delta."""
    num_public, seed = len(party.public), read_seed(config)
    if config[PRIVACY_LEVEL] != "L2":
        open_ = NonPrivateEvent(unit="example", reason=UNPROTECTED)
        return None, np.arange(num_public), training or [(open_, 1)], DEFAULT_DELTA
    asked = config_int(config, NUM_QUERIES, minimum=1, maximum=num_public)
    rows = choose_queries(num_public, asked, seed)
    privacy, num_labels = VotePrivacy.from_config(config), num_splits * len(rows)
    besides = _count_charges(config, seeded=False)
    mechanism = privacy.for_examples(party.num_classes, num_labels, besides=besides)
    charges = mechanism.charges(num_labels, seeded=privacy.seeded_noise)
    return mechanism, rows, charges, privacy.delta


def _diagnostic(figure: float, config: ConfigRecord) -> float:
    """Return a figure of votes without noise; nothing at L1 unless it is asked for by name."""
    hidden = config.get(PRIVACY_LEVEL) == "L1" and config.get(PRIVATE_DIAGNOSTICS) is not True
    return math.nan if hidden else float(figure)


def _events(work: _Work) -> dict[str, Scalar]:
    """Return what privately trained teachers cost, for the server's account at L0."""
    if work.level != "L0" or not work.training:
        return {}
    return {keys.PRIVACY_EVENTS: ledger_to_text(ledger_of(work.training, DEFAULT_DELTA))}


def _weights(config: ConfigRecord) -> str:
    level = config_choice(config, PRIVACY_LEVEL, LEVELS)
    return config_choice(config, VOTE_WEIGHTS, WEIGHTS_AT[level])


def _is_seeded(config: ConfigRecord) -> bool:
    return config.get("seeded-noise") is True


def _noise_on_counts(config: ConfigRecord) -> LaplaceCounts:
    return count_noise(config_float(config, COUNT_EPSILON, minimum=1e-6, maximum=100))


def _count_charges(config: ConfigRecord, *, seeded: bool) -> list[Entry]:
    """Return what the class counts cost that leave the party, if any do."""
    weights = _weights(config)
    if weights == "none":
        return []
    if weights == "counts":
        return [(NonPrivateEvent(unit="example", reason=EXACT_COUNTS), 1)]
    return list(_noise_on_counts(config).charges(seeded=seeded))


def _class_counts(party: Party, config: ConfigRecord) -> dict[str, Array]:
    """Return the class counts that leave the party; they have been charged before."""
    weights = _weights(config)
    if weights == "none":
        return {}
    counts = class_counts(party.y, party.num_classes, party.task)
    if weights == "counts":
        return {CLASS_COUNTS: counts.astype(np.float64)}
    noise = _noise_on_counts(config)
    rng = party.rng(read_seed(config), "counts") if _is_seeded(config) else None
    return {CLASS_COUNTS: valid_counts(noise.release(counts, rng).values, noise.scale)}
