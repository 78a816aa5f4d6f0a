"""Release plan of FedKT, and its part of the planner."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fl_strategies.learners import LearnerFactory, plan_of
from fl_strategies.party.training import teacher_charges
from fl_strategies.privacy.events import Unit
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.privacy.mechanisms import Charges
from fl_strategies.privacy.planning import rules
from fl_strategies.privacy.planning.facts import Draft, Facts
from fl_strategies.privacy.planning.plans import advice
from fl_strategies.privacy.votes import VoteMechanism, VotePrivacy, drowned_votes
from fl_strategies.release import AUDIENCES, Price, ReleaseFacts, ReleasePlan
from fl_strategies.strategies.fedkt.options import (
    COUNTED,
    MAX_TEACHERS,
    OPEN_VOTES,
    UNPROTECTED,
    FedKTOptions,
)


def release_plan(options: FedKTOptions, facts: ReleaseFacts) -> ReleasePlan:
    """Return what one round releases.

    L0: votes leave, and what privately trained teachers cost is reported. L1: the server adds
    the noise. L2: each party does, so both ledgers get the same price.
    """
    level, privacy = options.level, options.privacy
    # A student for every partition, beside its teachers.
    fits = options.num_splits * (num_teachers(options, facts) + 1)
    return ReleasePlan(
        name=f"fedkt {level}",
        trainer=facts.trainer,
        models=options.exchange == "models",
        protected=level == "L2",
        trusted=level == "L1" and not options.server_seeds_noise,
        seeded=options.party_seeds_noise,
        fits=fits,
        predictions=fits * facts.num_public,
        unit="party" if level == "L1" else "example",
        delta=options.delta if privacy is None else privacy.delta,
        record_delta=privacy.delta if privacy is not None and level == "L2" else DEFAULT_DELTA,
        audience=AUDIENCES[level],
        reason=COUNTED if level == "L2" else UNPROTECTED,
        reported=level == "L0",
        price=lambda: _price(options, facts),
        no_signal=lambda: _no_signal(options, facts),
        accepted=options.accept_noise,
        advice=lambda: _advice(options, facts),
    )


def num_teachers(options: FedKTOptions, facts: ReleaseFacts) -> int:
    """Return how many teachers a partition has, never more than records if these are known."""
    asked = options.num_teachers or 1
    return min(asked, facts.num_records) if facts.num_records else asked


def num_queries(options: FedKTOptions, facts: ReleaseFacts) -> int:
    """Return how many public rows get labels with noise."""
    return options.num_queries or facts.num_public


def _mechanism(
    options: FedKTOptions, privacy: VotePrivacy, facts: ReleaseFacts
) -> VoteMechanism:
    return options.mechanism(privacy, facts.num_classes, num_queries(options, facts))


def _price(options: FedKTOptions, facts: ReleaseFacts) -> Price:
    privacy, num_classes = options.privacy, facts.num_classes
    counts = tuple(options.count_charges(num_classes, seeded=options.party_seeds_noise))
    if privacy is None or privacy.level == "L1":
        training = _training(options, facts)
        record = (*(training or OPEN_VOTES), *counts)
        published: Charges = ()
        if privacy is not None and facts.num_parties:
            queries, seeded = num_queries(options, facts), privacy.seeded_noise
            published = _mechanism(options, privacy, facts).charges(queries, seeded=seeded)
        return Price(record=record, training=training, published=published)
    mechanism = _mechanism(options, privacy, facts)
    num_labels = options.num_splits * num_queries(options, facts)
    votes = mechanism.charges(num_labels, seeded=privacy.seeded_noise)
    whole_party: Charges = ()
    if options.weights == "none":
        # All teachers of a partition change when the whole party does.
        moved = num_teachers(options, facts)
        everybody = replace(mechanism, unit="party", sensitivity=moved)
        whole_party = everybody.charges(num_labels, seeded=privacy.seeded_noise)
    record = (*votes, *counts)
    return Price(record=record, whole_party=whole_party, answers=record)


def _training(options: FedKTOptions, facts: ReleaseFacts) -> Charges:
    """Return what training the teachers costs an example; nothing if it has no price.

    It depends on the number of records and on nothing that a record says.
    """
    if facts.trainer is None:
        return ()
    return planned_charges(
        facts.trainer, facts.num_records, options.num_splits, num_teachers(options, facts)
    )


def planned_charges(
    trainer: LearnerFactory, num_records: int, num_splits: int, teachers: int
) -> Charges:
    """Return what so many teachers per partition cost an example."""
    teacher = trainer()
    sizes = [len(rows) for rows in np.array_split(np.arange(num_records), teachers)]
    plans = [plan_of(teacher, size) for size in sizes]
    return tuple(teacher_charges(plans * num_splits, num_splits))


def _no_signal(options: FedKTOptions, facts: ReleaseFacts) -> str:
    """Return how noise hides the votes of all parties at L1, of a party's teachers at L2."""
    privacy = options.privacy
    if privacy is None:
        return ""
    votes = num_teachers(options, facts)
    if privacy.level == "L1":
        votes = facts.num_parties * options.num_splits
        if not votes:  # at a party, which adds none
            return ""
    return drowned_votes(_mechanism(options, privacy, facts), votes)


def _advice(options: FedKTOptions, facts: ReleaseFacts) -> str:
    """Return what would work instead, for a target; nothing for noise that is given."""
    privacy = options.privacy
    if privacy is None or privacy.target_epsilon is None:
        return ""
    planned = Facts(
        target_epsilon=privacy.target_epsilon,
        delta=privacy.delta,
        num_parties=facts.num_parties,
        # Nobody has announced any; with enough of them there are teachers enough.
        num_records=MAX_TEACHERS,
        num_classes=facts.num_classes,
        num_public=facts.num_public,
    )
    unit: Unit = "party" if privacy.level == "L1" else "example"
    return advice(Votes(unit=unit), planned, "num_queries and num_teachers")


@dataclass(frozen=True, kw_only=True)
class Votes:
    """`FedKT`: labels by noisy votes, of parties at the server (L1) or of teachers (L2).

    Parameters
    ----------
    most_teachers : int
        How many teachers of a party may vote, at L2.
    """

    unit: Unit
    most_teachers: int = rules.MOST_TEACHERS

    @property
    def level(self) -> str:
        """The paper's name for where the noise is."""
        return "L1" if self.unit == "party" else "L2"

    @property
    def name(self) -> str:
        """Name of strategy and level."""
        return f"fedkt {self.level}"

    @property
    def trusts_server(self) -> bool:
        """At L1 the server adds the noise."""
        return self.level == "L1"

    @property
    def knobs(self) -> Sequence[str]:
        """What may be changed if nothing works."""
        voters = "num_parties" if self.level == "L1" else "most_teachers"
        return (voters, "num_classes", "target_epsilon")

    def _mechanism(self, facts: Facts, num_queries: int) -> VoteMechanism:
        privacy = VotePrivacy(
            level="L1" if self.unit == "party" else "L2",
            target_epsilon=facts.target_epsilon,
            delta=facts.delta,
        )
        return privacy.mechanism(
            unit=self.unit,
            sensitivity=1,
            num_classes=facts.num_classes,
            num_queries=num_queries,
        )

    def _most_votes(self, facts: Facts) -> int:
        if self.level == "L1":
            return facts.num_parties
        return min(self.most_teachers, facts.num_records)

    def problem(self, facts: Facts) -> str:
        """Say if the fewest labels of unanimous votes are mostly noise."""
        fewest = rules.fewest_queries(facts.num_classes, facts.num_public)
        return drowned_votes(self._mechanism(facts, fewest), self._most_votes(facts))

    def draft(self, facts: Facts) -> Draft:
        """Return the queries, and at L2 the teachers, that the strategy has by default."""
        most = self._most_votes(facts)
        share = rules.DECIDED_AT_SERVER if self.level == "L1" else rules.DECIDED_AT_PARTY
        queries = rules.vote_queries(
            lambda number: self._mechanism(facts, number), most, share, facts.num_public
        )
        mechanism = self._mechanism(facts, queries)
        votes = most if self.level == "L1" else min(rules.teachers_for(mechanism.scale), most)
        voters = f"{votes} parties" if self.level == "L1" else f"{votes} teachers of a party"
        return Draft(
            noise=mechanism.event.noise,
            scale=mechanism.scale,
            asked="queries",
            num_asked=queries,
            voters=voters,
            right=facts.right_labels(mechanism.event.noise, mechanism.scale, votes),
            batches=[mechanism.charges(queries)],
            settings=f"privacy-level={self.level}",
        )

    def with_knob(self, facts: Facts, knob: str, value: float) -> tuple["Votes", Facts]:  # noqa: ARG002
        """Return the planner with more teachers, which need at least as many records."""
        records = max(facts.num_records, int(value))
        return replace(self, most_teachers=int(value)), replace(facts, num_records=records)
