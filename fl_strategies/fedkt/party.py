"""The party half of FedKT; see `fl_strategies.fedkt`."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from fl_strategies import keys
from fl_strategies.exceptions import InvalidData
from fl_strategies.half import PartyHalf, check_public_data, read_seed
from fl_strategies.knowledge import Knowledge, Metrics, config_choice, config_int, join_arrays
from fl_strategies.packing import pack_labels
from fl_strategies.party import Party
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.reporting import (
    DEFAULT_DELTA,
    UNPROTECTED,
    ledger_of,
    privacy_metrics,
    spend,
    training_charges,
    unprotected,
)
from fl_strategies.privacy.votes import VotePrivacy, choose_queries
from fl_strategies.protocols import IntArray, Learner, TrainingSet, require_portable
from fl_strategies.teaching import teacher_votes, train_students, train_teachers
from fl_strategies.voting import agreement, consistent_mask, plurality

NUM_SPLITS = "num-splits"
NUM_TEACHERS = "num-teachers"
NUM_QUERIES = "num-queries"
PRIVACY_LEVEL = "privacy-level"
EXCHANGE = "exchange"
EXCHANGES: Sequence[str] = ("votes", "models")
VOTE_INSTEAD = "Let it vote instead: exchange='votes'."
LEVELS: Sequence[str] = ("L0", "L1", "L2")

# A server cannot make a party train without end.
MAX_SPLITS = 1_000
MAX_TEACHERS = 100_000


class FedKTParty(PartyHalf):
    """The party's half: teachers on private subsets, students on the public rows."""

    def train(
        self,
        party: Party,
        received: Knowledge | None,  # noqa: ARG002 - one round, nothing to receive
        config: ConfigRecord,
        state: RecordDict,
    ) -> tuple[Knowledge, Metrics]:
        """Return the students or their labels on the public rows."""
        check_public_data(party, config)
        if not len(party.y):
            raise InvalidData(f"{party.owner}: x must hold records, got none.")
        num_splits = config_int(config, NUM_SPLITS, minimum=1, maximum=MAX_SPLITS)
        asked = config_int(config, NUM_TEACHERS, minimum=1, maximum=MAX_TEACHERS)
        num_teachers = min(asked, len(party.y))
        seed = read_seed(config)
        teachers = train_teachers(party, num_splits, num_teachers, seed)
        counts = teacher_votes(party, teachers, num_splits)
        sets, metrics = self._label(party, counts, teachers, config, state)
        students = train_students(party, sets, seed)
        labels = np.stack([student.predict(party.public) for student in students])
        metrics |= {
            keys.NUM_TEACHERS_MISSING: num_splits * (asked - num_teachers),
            keys.CONSISTENT_FRACTION: float(consistent_mask(labels).mean()),
        }
        if config_choice(config, EXCHANGE, EXCHANGES) == "votes":
            packed = pack_labels(labels, party.num_classes)
            return Knowledge("votes", {"votes": packed}), metrics
        models = [require_portable(student, VOTE_INSTEAD).to_arrays() for student in students]
        return Knowledge("models", join_arrays(models)), metrics

    def _label(
        self,
        party: Party,
        counts: IntArray,
        teachers: Sequence[Learner],
        config: ConfigRecord,
        state: RecordDict,
    ) -> tuple[list[TrainingSet], Metrics]:
        """Return what each student learns from, after recording what it costs."""
        level, seed = config_choice(config, PRIVACY_LEVEL, LEVELS), read_seed(config)
        if level == "L2":
            return self._label_with_noise(party, counts, config, state)
        unprotected_labels = NonPrivateEvent(unit="example", reason=UNPROTECTED)
        charges = training_charges(teachers, len(counts)) or [(unprotected_labels, 1)]
        ledger = spend(party, charges, f"fedkt {level}", DEFAULT_DELTA, state)
        sets = [
            (party.public, plurality(votes, party.rng(seed, "ties", split)))
            for split, votes in enumerate(counts)
        ]
        return sets, {
            keys.VOTE_AGREEMENT: agreement(counts.reshape(-1, party.num_classes)),
            **privacy_metrics(party=unprotected(UNPROTECTED), example=ledger),
        }

    def _label_with_noise(
        self, party: Party, counts: IntArray, config: ConfigRecord, state: RecordDict
    ) -> tuple[list[TrainingSet], Metrics]:
        num_public, seed = len(party.public), read_seed(config)
        asked = config_int(config, NUM_QUERIES, minimum=1, maximum=num_public)
        rows = choose_queries(num_public, asked, seed)
        privacy, num_labels = VotePrivacy.from_config(config), len(counts) * len(rows)
        mechanism = privacy.for_examples(party.num_classes, num_labels)
        seeded = privacy.seeded_noise
        charges = mechanism.charges(num_labels, seeded=seeded)
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
