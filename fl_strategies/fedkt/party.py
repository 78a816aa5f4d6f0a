"""The party half of FedKT; see `fl_strategies.fedkt`."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from fl_strategies import keys
from fl_strategies.class_weights import CLASS_COUNTS, class_counts
from fl_strategies.evidence import valid_counts
from fl_strategies.exceptions import InvalidData
from fl_strategies.fedkt.words import (
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
    VOTE_INSTEAD,
    VOTE_WEIGHTS,
    WEIGHTS_AT,
    count_noise,
)
from fl_strategies.half import PartyHalf, check_public_data, read_seed
from fl_strategies.knowledge import (
    Knowledge,
    Metrics,
    Scalar,
    config_choice,
    config_float,
    config_int,
    join_arrays,
)
from fl_strategies.packing import pack_labels
from fl_strategies.party import Party
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.counts import LaplaceCounts
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.reporting import (
    DEFAULT_DELTA,
    UNPROTECTED,
    ledger_of,
    ledger_to_text,
    privacy_metrics,
    spend,
    training_charges,
    unprotected,
)
from fl_strategies.privacy.votes import VotePrivacy, choose_queries
from fl_strategies.protocols import Array, IntArray, Learner, TrainingSet, require_portable
from fl_strategies.teaching import (
    teacher_counts,
    teacher_votes,
    train_students,
    train_teachers,
)
from fl_strategies.voting import agreement, consistent_mask, plurality


class FedKTParty(PartyHalf):
    """The party's half: teachers on private subsets, students on the public rows."""

    def train(
        self,
        party: Party,
        received: Knowledge | None,  # noqa: ARG002 - one round, nothing to receive
        config: ConfigRecord,
        state: RecordDict,
    ) -> tuple[Knowledge, Metrics]:
        """Return the labels of the public rows or the students, and class counts if asked."""
        check_public_data(party, config)
        if not len(party.y):
            raise InvalidData(f"{party.owner}: x must hold records, got none.")
        num_splits = config_int(config, NUM_SPLITS, minimum=1, maximum=MAX_SPLITS)
        asked = config_int(config, NUM_TEACHERS, minimum=1, maximum=MAX_TEACHERS)
        num_teachers = min(asked, len(party.y))
        teachers = train_teachers(party, num_splits, num_teachers, read_seed(config))
        votes = self._votes(party, teachers, num_splits, config)
        sets, metrics = self._label(party, votes, teachers, config, state)
        arrays, labels = self._answer(party, sets, config)
        metrics |= {
            keys.NUM_TEACHERS_MISSING: num_splits * (asked - num_teachers),
            keys.CONSISTENT_FRACTION: _diagnostic(consistent_mask(labels).mean(), config),
        }
        exchange = config_choice(config, EXCHANGE, EXCHANGES)
        arrays |= _class_counts(party, config)
        return Knowledge(exchange, arrays, _events(teachers, num_splits, config)), metrics

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

    def _votes(
        self, party: Party, teachers: Sequence[Learner], num_splits: int, config: ConfigRecord
    ) -> IntArray:
        """Count the teachers' votes, corrected if that is asked for and free.

        What a privately trained teacher says is free as long as nothing but its model
        decides it; the exact counts of its records would undo that where no noise follows.
        """
        private = config.get(PRIVACY_LEVEL) != "L2" and training_charges(teachers, num_splits)
        if config.get(CORRECTED) is not True or private:
            return teacher_votes(party, teachers, num_splits)
        size = len(teachers) // num_splits
        counts = teacher_counts(party, num_splits, size, read_seed(config))
        return teacher_votes(party, teachers, num_splits, counts)

    def _label(
        self,
        party: Party,
        counts: IntArray,
        teachers: Sequence[Learner],
        config: ConfigRecord,
        state: RecordDict,
    ) -> tuple[list[TrainingSet], Metrics]:
        """Return what each student learns from, after recording what all this costs."""
        level, seed = config_choice(config, PRIVACY_LEVEL, LEVELS), read_seed(config)
        if level == "L2":
            return self._label_with_noise(party, counts, config, state)
        unprotected_labels = NonPrivateEvent(unit="example", reason=UNPROTECTED)
        votes = training_charges(teachers, len(counts)) or [(unprotected_labels, 1)]
        charges = [*votes, *_count_charges(config, seeded=_is_seeded(config))]
        ledger = spend(party, charges, f"fedkt {level}", DEFAULT_DELTA, state)
        sets = [
            (party.public, plurality(own, party.rng(seed, "ties", split)))
            for split, own in enumerate(counts)
        ]
        return sets, {
            keys.VOTE_AGREEMENT: _diagnostic(
                agreement(counts.reshape(-1, party.num_classes)), config
            ),
            **privacy_metrics(party=unprotected(UNPROTECTED), example=ledger),
        }

    def _label_with_noise(
        self, party: Party, counts: IntArray, config: ConfigRecord, state: RecordDict
    ) -> tuple[list[TrainingSet], Metrics]:
        num_public, seed = len(party.public), read_seed(config)
        asked = config_int(config, NUM_QUERIES, minimum=1, maximum=num_public)
        rows = choose_queries(num_public, asked, seed)
        privacy, num_labels = VotePrivacy.from_config(config), len(counts) * len(rows)
        counting, seeded = _count_charges(config, seeded=False), privacy.seeded_noise
        mechanism = privacy.for_examples(party.num_classes, num_labels, besides=counting)
        labelling = mechanism.charges(num_labels, seeded=seeded)
        charges = [*labelling, *_count_charges(config, seeded=seeded)]
        example = spend(party, charges, "fedkt L2", privacy.delta, state)
        sets = []
        for split, votes in enumerate(counts):
            rng = privacy.rng(seed, "party", party.partition_id, split)
            labels = mechanism.release(votes[rows], rng).values
            answered = labels >= 0
            sets.append((party.public[rows[answered]], labels[answered]))
        # All teachers of a partition change when the whole party does.
        whole = replace(mechanism, unit="party", sensitivity=int(counts[0, 0].sum()))
        everybody = ledger_of(whole.charges(num_labels, seeded=seeded), privacy.delta)
        if counting:
            everybody = unprotected(COUNTED)
        # How far the teachers agree is private here.
        unknown = {keys.VOTE_AGREEMENT: math.nan}
        return sets, {**unknown, **privacy_metrics(party=everybody, example=example)}

    def evaluate(
        self, party: Party, received: Knowledge, config: ConfigRecord, state: RecordDict
    ) -> tuple[Learner, Metrics]:
        """Take the final model; tell a server that is not trusted nothing about it."""
        model, metrics = super().evaluate(party, received, config, state)
        if config.get(PRIVACY_LEVEL) == "L2":
            metrics[keys.ACCURACY] = math.nan
        return model, metrics


def _diagnostic(figure: float, config: ConfigRecord) -> float:
    """Return a figure of votes without noise; nothing at L1 unless it is asked for by name."""
    hidden = config.get(PRIVACY_LEVEL) == "L1" and config.get(PRIVATE_DIAGNOSTICS) is not True
    return math.nan if hidden else float(figure)


def _events(
    teachers: Sequence[Learner], num_splits: int, config: ConfigRecord
) -> dict[str, Scalar]:
    """Return what privately trained teachers cost, for the server's account at L0."""
    training = training_charges(teachers, num_splits)
    if config.get(PRIVACY_LEVEL) != "L0" or not training:
        return {}
    return {keys.PRIVACY_EVENTS: ledger_to_text(ledger_of(training, DEFAULT_DELTA))}


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
