"""Options of FedKT, what it releases, and the keys both sides share.

The scores of a student of noisy labels are timid or bold by its kind and its settings,
and how often it names a class has more to do with noise than with the row. So only the
differences between rows count, on one scale for all parties; class shares come from counts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Literal, TypeAlias

import numpy as np

from fl_strategies._util import Array, FloatArray
from fl_strategies.learners import plan_of
from fl_strategies.options import Options, option, variants
from fl_strategies.party.role import teacher_charges
from fl_strategies.privacy import planning
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.bounds.theorems import gaussian_mu
from fl_strategies.privacy.events import Unit
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.privacy.mechanisms import Charges, GaussianSums, LaplaceCounts
from fl_strategies.privacy.noise import VoteMechanism, VotePrivacy, outweighed_votes
from fl_strategies.privacy.planning import Draft, Facts, advice
from fl_strategies.release import AUDIENCES, Price, ReleaseFacts, ReleasePlan, open_charges
from fl_strategies.wire.knowledge import Quantizer

SCORES: Final = Quantizer(num_levels=256, bound=12.0)
"""A byte for each row and class."""
SCORE_STRENGTH: Final = 1.5
"""Root of the mean square of a party's evidence, chosen on rows cut from training data."""


def one_scale(scores: FloatArray) -> FloatArray:
    """Return scores (rows, classes) of mean 0 by row and by class, and of the usual strength.

    A student that scores all rows alike has no opinion, 0.

    Examples
    --------
    >>> one_scale(np.array([[0.0, 2.0], [0.0, 8.0], [4.0, 4.0]])).round(2)
    array([[ 0.59, -0.59],
           [-2.06,  2.06],
           [ 1.47, -1.47]])
    """
    centred = scores - scores.mean(axis=1, keepdims=True)
    centred = centred - centred.mean(axis=0)
    strength = float(np.sqrt(np.mean(centred**2)))
    if strength < 1e-9 * max(1.0, float(np.abs(scores).max())):
        return np.zeros(scores.shape)
    scaled = SCORE_STRENGTH / strength * centred
    return np.asarray(np.clip(scaled, -SCORES.bound, SCORES.bound))


def score_evidence(codes: Array, counts: FloatArray) -> FloatArray:
    """Return received scores as evidence (rows, classes); 0 for classes without records."""
    seen = counts > 0
    evidence = np.zeros(codes.shape)
    evidence[:, seen] = one_scale(SCORES.decode(codes[:, seen]))
    return evidence


Exchange: TypeAlias = Literal["votes", "models", "scores"]
VoteWeights: TypeAlias = Literal["auto", "none", "counts", "noisy-counts"]

LEVELS: Sequence[str] = ("L0", "L1", "L2")
PRIVACY_LEVEL: Final = "privacy-level"
NUM_TRIMMED: Final = "num-trimmed"

WEIGHTS_AT: Mapping[str, Sequence[VoteWeights]] = {
    "L0": ("counts", "noisy-counts", "none"),
    "L1": ("none",),
    "L2": ("none", "noisy-counts"),
}
"""Vote weights that each level allows; ``"auto"`` is the first."""
WEIGHT_RULES: Mapping[str, str] = {
    "L0": f"one of auto, {', '.join(WEIGHTS_AT['L0'])}",
    "L1": "auto or none at L1, where the noise covers a party's votes and not their weight",
    "L2": "auto, none or noisy-counts at L2, where exact counts would be unprotected",
}
VOTE_INSTEAD = "Let it vote instead: exchange='votes'."

UNPROTECTED = "the labels of students left the party without noise"
EXACT_COUNTS = "exact class counts left the party"
OPEN_VOTES: Final = open_charges(UNPROTECTED)
NOBODY: Final = -1
"""Partition id that stands for parties whose answer nobody could read."""
COUNTED = "class counts protect examples, not parties"

COUNT_PART: Final = 0.1
"""Part of a target, as the mu of Gaussian noise, that class counts cost unless it is given."""
USUAL_COUNT_EPSILON: Final = 1.0
"""Their cost if there is no target."""

# A server cannot make a party train without end.
MAX_SPLITS = 1_000
MAX_TEACHERS = 100_000
MAX_QUERIES = 2**40


@dataclass(frozen=True, kw_only=True)
class FedKTOptions(Options):
    """Options of `FedKT`.

    Parameters
    ----------
    num_splits, num_teachers : int
        The paper's s and t, there 2 and 5. By default whole-party models, s = t = 1; at L2 as
        many teachers as make a unanimous vote four times the scale of the noise, from 5 to 25
        (`privacy.planning`). A party with fewer than t records trains fewer.
    corrected : bool
        Every teacher votes as if its records had equal class shares, among the classes it
        has seen (`aggregation.evidence`). False: the paper's votes. Teachers that train with
        DP-SGD vote plainly at L0 and L1, where nothing but the model is protected.
    consistent : bool
        A party votes on the rows where all its students agree, and with all of them. False:
        every student votes by itself (the paper's comparison), for plain, untrimmed votes. A
        party has at most s votes a row either way, so the noise of L1 is the same.
    vote_weights : "auto", "none", "counts" or "noisy-counts"
        Weigh a party's votes by how well its records let it know each class, then match
        `class_share`. The counts are exact, at L0 only, or cost an example `count_epsilon`,
        at L0 and L2. ``"auto"``: counts at L0, none at L1 and L2.
    count_epsilon : float, optional
        What noisy counts cost by themselves: discrete Laplace noise at L0, where it composes
        with DP-SGD; discrete Gaussian noise at L2, within the target epsilon if that is
        given. By default a tenth of the target, as the mu of Gaussian noise; 1 without one.
    class_share : str
        For weighted votes: "auto", "pooled", "none" or numbers with commas, see
        `EvidencePool`; ``"auto"`` is ``"pooled"`` here. Say ``"none"`` if public rows come
        from another domain.
    exchange : "votes", "models" or "scores"
        ``"scores"``, with noisy counts at L2: how sure students are of each class, a byte
        each, which costs no more than their votes and is worth more.
    privacy : VotePrivacy, optional
        The noise on votes and where it is; by default there is none, the paper's L0.
    num_queries : int, optional
        Public rows labelled by noisy votes, on the server at L1 and at each party at L2,
        drawn by the seed; only they train what learns from noisy labels. Fewer cost less. By
        default all; with a target epsilon the most for which unanimous votes decide 90 % (L1)
        or 60 % (L2) of the labels, but at least five a class (`privacy.planning.queries_for`).
    exclude_outliers : bool
        Do not count weighted votes of parties that contradict most others
        (`aggregation.pool`).
    trim_fraction : float
        Largest share of parties, rounded down and below one half, whose unweighted votes are
        not counted because they contradict all others: see `FedKT`.
    delta : float
        Of epsilons where there is no noise of the strategy's own, which has its delta.
    max_epsilon : float, optional
        The server refuses to label anything if epsilon would exceed it.
    private_diagnostics : bool
        L1: report the agreement of votes before noise, and the data-dependent epsilon. Both
        are computed from private votes, protected by nothing and not to be published.
    accept_noise : bool
        Continue although noise decides more labels than unanimous votes do: of all parties
        at L1, of a partition's teachers at L2. Otherwise refused, as a waste of epsilon.
    """

    owner: ClassVar[str] = "FedKT"

    num_splits: int = option(
        1, "the paper's s: partitions, and so students, of a party", least=1, most=MAX_SPLITS
    )
    num_teachers: int | None = option(
        None,
        "the paper's t: teachers of a partition; 0: one, at L2 as the noise needs",
        least=1,
        most=MAX_TEACHERS,
    )
    corrected: bool = option(True, "votes without the teacher's own class shares")
    consistent: bool = option(True, "parties vote where all their students agree")
    vote_weights: VoteWeights = option("auto", "weights of votes")
    count_epsilon: float | None = option(
        None,
        "what noisy counts cost; 0: a tenth of the target's mu, or 1",
        least=1e-6,
        most=100,
    )
    class_share: str = option(
        "auto", "class shares of public rows: auto, pooled, none, or numbers"
    )
    exchange: Exchange = option("votes", "what parties send")
    privacy: VotePrivacy | None = variants(
        PRIVACY_LEVEL,
        "where noise is: nowhere, at the server or at the parties",
        L0=None,
        L1=VotePrivacy,
        L2=VotePrivacy,
    )
    num_queries: int | None = option(
        None,
        "public rows labelled with noise; 0: all, with target-epsilon the best number",
        least=1,
        most=MAX_QUERIES,
    )
    exclude_outliers: bool = option(True, "no weighted votes of parties that contradict most")
    trim_fraction: float = option(
        0.0, "most liars whose votes are not counted, as a share", least=0, below=0.5
    )
    delta: float = option(DEFAULT_DELTA, "delta of every epsilon", above=0, below=1)
    max_epsilon: float | None = option(None, "budget of the server; 0: none", above=0)
    private_diagnostics: bool = option(False, "report metrics of private votes at L1")
    accept_noise: bool = option(False, "continue although noise outweighs all answers")

    def __post_init__(self) -> None:
        """Check what goes together."""
        super().__post_init__()
        level, weights, trimmed = self.level, self.weights, self.trim_fraction
        rule = "0 at L1, where whether a party's votes count must not depend on other parties"
        self.require("trim_fraction", level != "L1" or not trimmed, rule)
        self.require("vote_weights", weights in WEIGHTS_AT[level], WEIGHT_RULES[level])
        alone = weights == "none" and not trimmed
        rule = "true for votes that are weighted or trimmed"
        self.require("consistent", self.consistent or alone, rule)
        shared = weights != "none" or self.class_share in ("auto", "none")
        self.require("class_share", shared, "auto or none unless votes are weighted")
        scored = self.exchange != "scores" or (level, weights) == ("L2", "noisy-counts")
        rule = "votes or models unless noisy counts weigh votes at L2"
        self.require("exchange", scored, rule)
        if weights == "noisy-counts":
            self.count_noise()
            target = self.privacy.target_epsilon if self.privacy else None
            epsilon = self.count_epsilon
            left = target is None or epsilon is None or epsilon < target
            self.require("count_epsilon", left, "below target_epsilon")

    @property
    def level(self) -> str:
        """The paper's name for where the noise is."""
        return self.privacy.level if self.privacy else "L0"

    @property
    def weights(self) -> VoteWeights:
        """The weights of votes that are meant."""
        return WEIGHTS_AT[self.level][0] if self.vote_weights == "auto" else self.vote_weights

    @property
    def server_privacy(self) -> VotePrivacy | None:
        """The noise that the server adds to all parties' votes."""
        return self.privacy if self.level == "L1" else None

    @property
    def party_privacy(self) -> VotePrivacy | None:
        """The noise that parties add to their teachers' votes."""
        return self.privacy if self.level == "L2" else None

    @property
    def seeded_noise(self) -> bool:
        """Whether noise comes from the seed and protects nobody."""
        return bool(self.privacy and self.privacy.seeded_noise)

    def count_noise(self) -> LaplaceCounts | GaussianSums:
        """Return the noise on class counts, of which replacing one record moves two by one."""
        privacy, epsilon = self.party_privacy, self.count_epsilon
        if privacy is None:
            return LaplaceCounts(epsilon=epsilon or USUAL_COUNT_EPSILON, l1_sensitivity=2.0)
        if epsilon is None and privacy.target_epsilon is not None:
            mu = COUNT_PART * gaussian_mu(privacy.target_epsilon, privacy.delta)
        else:
            mu = gaussian_mu(epsilon or USUAL_COUNT_EPSILON, privacy.delta)
        moved = math.sqrt(2)
        return GaussianSums(scale=moved / mu, l2_sensitivity=moved, unit="example")

    def count_charges(self, num_classes: int, *, seeded: bool) -> Sequence[Entry]:
        """Return what the class counts cost that leave a party, if any do."""
        if self.weights == "counts":
            return open_charges(EXACT_COUNTS)
        if self.weights == "none":
            return ()
        noise = self.count_noise()
        if isinstance(noise, LaplaceCounts):
            return noise.charges(seeded=seeded)
        return noise.charges(num_classes, seeded=seeded)

    def mechanism(
        self, privacy: VotePrivacy, num_classes: int, num_queries: int
    ) -> VoteMechanism:
        """Return the server's noise at L1; that of every party at L2, with its counts' cost.

        A party moves a vote of each partition, an example that of one teacher.
        """
        at_server = privacy.level == "L1"
        return privacy.mechanism(
            unit="party" if at_server else "example",
            sensitivity=self.num_splits if at_server else 1,
            num_classes=num_classes,
            num_queries=num_queries if at_server else self.num_splits * num_queries,
            besides=() if at_server else self.count_charges(num_classes, seeded=False),
        )


def release_plan(options: FedKTOptions, facts: ReleaseFacts) -> ReleasePlan:
    """Return what one round releases.

    L0: votes leave, and what privately trained teachers cost is reported. L1: the server adds
    the noise. L2: each party does, so both ledgers get the same price.
    """
    level, privacy, own = options.level, options.privacy, options.party_privacy
    # A student for every partition, beside its teachers.
    fits = options.num_splits * (num_teachers(options, facts) + 1)
    return ReleasePlan(
        name=f"fedkt {level}",
        trainer=facts.trainer,
        models=options.exchange == "models",
        protected=level == "L2",
        trusted=level == "L1" and not options.seeded_noise,
        seeded=level == "L2" and options.seeded_noise,
        fits=fits,
        predictions=fits * facts.num_public,
        unit="party" if level == "L1" else "example",
        delta=privacy.delta if privacy else options.delta,
        record_delta=own.delta if own else DEFAULT_DELTA,
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
    seeded = options.seeded_noise
    counts = tuple(options.count_charges(facts.num_classes, seeded=seeded))
    if not (privacy := options.party_privacy):
        training = _training(options, facts)
        record = (*(training or OPEN_VOTES), *counts)
        published: Charges = ()
        if facts.num_parties and (privacy := options.server_privacy):
            mechanism = _mechanism(options, privacy, facts)
            published = mechanism.charges(num_queries(options, facts), seeded=seeded)
        return Price(record=record, training=training, published=published)
    mechanism = _mechanism(options, privacy, facts)
    num_labels = options.num_splits * num_queries(options, facts)
    record = (*mechanism.charges(num_labels, seeded=seeded), *counts)
    whole_party: Charges = ()
    if options.weights == "none":
        # All teachers of a partition change when the whole party does.
        moved = num_teachers(options, facts)
        everybody = replace(mechanism, unit="party", sensitivity=moved)
        whole_party = everybody.charges(num_labels, seeded=seeded)
    return Price(record=record, whole_party=whole_party, answers=record)


def _training(options: FedKTOptions, facts: ReleaseFacts) -> Charges:
    """Return what training the teachers costs an example; nothing if it has no price.

    It depends on the number of records and on nothing in a record.
    """
    if facts.trainer is None:
        return ()
    teacher, rows = facts.trainer(), np.arange(facts.num_records)
    subsets = np.array_split(rows, num_teachers(options, facts))
    plans = [plan_of(teacher, len(subset)) for subset in subsets]
    return tuple(teacher_charges(plans * options.num_splits, options.num_splits))


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
    return outweighed_votes(_mechanism(options, privacy, facts), votes)


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
    most_teachers: int = planning.MOST_TEACHERS

    @property
    def level(self) -> Literal["L1", "L2"]:
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
            level=self.level, target_epsilon=facts.target_epsilon, delta=facts.delta
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
        fewest = planning.fewest_queries(facts.num_classes, facts.num_public)
        return outweighed_votes(self._mechanism(facts, fewest), self._most_votes(facts))

    def draft(self, facts: Facts) -> Draft:
        """Return the queries, and at L2 the teachers, that the strategy has by default."""
        most = self._most_votes(facts)
        share = planning.DECIDED_AT_SERVER if self.level == "L1" else planning.DECIDED_AT_PARTY
        queries = planning.vote_queries(
            lambda number: self._mechanism(facts, number), most, share, facts.num_public
        )
        mechanism = self._mechanism(facts, queries)
        votes = (
            most if self.level == "L1" else min(planning.teachers_for(mechanism.scale), most)
        )
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
