"""The server side that all heads on sums share."""

import logging
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, Generic, NamedTuple, TypeVar, Unpack

import numpy as np
from flwr.app import ArrayRecord

from fl_strategies._util import Array, FloatArray, IntArray, content_hash, derive_rng
from fl_strategies.aggregation.evidence import believed_sizes
from fl_strategies.aggregation.pool import LEAST_OF_TYPICAL, LEAST_TYPICAL, outliers
from fl_strategies.errors import KnowledgeMismatch, require
from fl_strategies.learners import (
    Learner,
    LearnerFactory,
    Link,
    Recipe,
    SoftLearner,
    Task,
    check_task,
)
from fl_strategies.party.role import privacy_metrics
from fl_strategies.privacy.mechanisms import GaussianSums
from fl_strategies.release import ReleaseFacts, ReleasePlan, forms_at
from fl_strategies.server.run import State
from fl_strategies.server.strategy import (
    FederationOptions,
    KnowledgeStrategy,
    check_factories,
    logger,
    public_array,
)
from fl_strategies.strategies.sums.options import (
    LEVELS,
    SUMS,
    TASK,
    SumOptions,
    SumPlanner,
    mechanism_of,
    release_plan,
)
from fl_strategies.strategies.sums.party import CLASSES
from fl_strategies.strategies.sums.summary import DIRECTION, PartySums, Summary, is_direction
from fl_strategies.strategies.weights.restraint import read_num_records
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, Scalar

S = TypeVar("S", bound=Summary)

NOISE_SCALE: Final = "noise-scale"
_OF_EXAMPLES: Final = (keys.EPSILON_EXAMPLE, keys.DELTA_EXAMPLE)
_PRICES: Final[Mapping[str, Sequence[str]]] = {
    "central": _OF_EXAMPLES,
    "L1": (keys.EPSILON_PARTY, keys.DELTA_PARTY, *_OF_EXAMPLES),
}
"""Metrics that the server knows better than the parties."""
_TOTAL: Final = "total"
LEAST_AGREEMENT: Final = 0.5
"""With noise, no party is excluded where the median one agrees less than this with the others:
small parties' sums are mostly noise then. Of numbers neither: a curve that differs from range
to range is no contradiction."""
OPPOSED: Final = -0.5
"""Of numbers, a party is excluded if it opposes the others by more than this share of the
median party's agreement: curves may rise in the range of one party and fall in another's."""


class Counted(NamedTuple):
    """Whose sums were added up."""

    num_parties: int
    num_records: float
    """As many as these parties are believed to have."""


@dataclass
class SumState(State):
    """Also what every party sent in the last round, by its number."""

    sums: dict[int, Knowledge] = field(default_factory=dict)


class SumStrategy(KnowledgeStrategy[PartySums], Generic[S]):
    """One round: parties sum their records as public rows define, and add noise.

    A head defines the summary of records (`_summarise`), when noise exceeds the sums
    (`_no_signal`), which sums are plausible (`_plausible`), how two parties' are compared
    (`_evidence`) and which model follows from the sums (`_model_of`).

    Parameters
    ----------
    public : (num_public, ...)
        They decide how records are summed and are what the final model learns from.
    num_classes : int
        Length of the federation's class list; labels in multi-label learning.
    learner_fn : factory
        Makes the final model; it learns shares of classes if it can (`SoftLearner`), and the
        likeliest class of every public row otherwise.
    learner_name : str
    task : "single-label" or "multi-label"
    options : SumOptions, optional
    **federation
        See `KnowledgeStrategy`.

    Attributes
    ----------
    outliers_ : tuple of int
        Partition ids of the parties whose sums contradict most others'; they are not
        counted. No party is excluded where the noise is the server's.
    """

    options_type: ClassVar[type[SumOptions]] = SumOptions
    tasks: ClassVar[Sequence[Task]] = CLASSES
    planner_type: ClassVar[type[SumPlanner]]
    record_length: ClassVar[int] = 1
    """Length of what one record adds to a sum, rounding aside."""
    reply_kind = SUMS
    forms = forms_at(LEVELS, {"target-epsilon": 1.0})
    last_round = 1
    parties_train = False
    state: SumState
    state_type = SumState
    options: SumOptions
    open_setting: ClassVar[str]
    """What decides how detailed the sums are, unless it is left open."""

    def __init__(
        self,
        *,
        public: Array | None = None,
        num_classes: int,
        learner_fn: LearnerFactory,
        learner_name: str = "learner",
        task: Task = "single-label",
        options: SumOptions | None = None,
        **federation: Unpack[FederationOptions],
    ) -> None:
        super().__init__(**federation)
        owner = type(self).__name__
        check_task(owner, task, num_classes)
        require(task in self.tasks, owner, "task", " or ".join(self.tasks), task)
        check_factories(owner, learner_fn, num_classes)
        require(public is not None, owner, "public", "given", None)
        self.public = public_array(owner, public)
        self.num_classes, self.task = num_classes, task
        self.learner_fn, self.model_name = learner_fn, learner_name
        self.options = options or self.options_type()
        labels, level = self.num_labels, self.options.level
        self._planner = self.planner_type(level=level, num_labels=labels)
        # Everybody sums by what travels, the server too.
        made = self._summarise()
        self._question = Knowledge(made.kind, made.to_arrays())
        self._summary = made.from_arrays(self._question.arrays, self.width)
        self._mechanism: GaussianSums | None = None
        if self.options.privacy is not None:
            self._mechanism = mechanism_of(self.options.privacy, self._facts, self._summary)
        self.outliers_: tuple[int, ...] = ()
        self.state = SumState(ledger=self.new_ledger(self.plan))

    @property
    def plan(self) -> ReleasePlan:
        """What the round releases."""
        return release_plan(
            self.options,
            self._facts,
            self._planner,
            summary=self._summary,
            no_signal=self._no_signal,
            setting=self.open_setting,
        )

    @property
    def _facts(self) -> ReleaseFacts:
        return ReleaseFacts(
            num_classes=self.num_classes,
            num_public=len(self.public),
            task=self.task,
            num_parties=self.num_parties,
        )

    @property
    def num_labels(self) -> int:
        """Labels of a record."""
        return self.num_classes if self.task == "multi-label" else 1

    @property
    def width(self) -> int:
        """Values of a row."""
        return int(np.prod(self.public.shape[1:]))

    # What a head defines

    @abstractmethod
    def _summarise(self) -> S:
        """Return how records are summed, by public rows and settings alone."""

    @abstractmethod
    def _no_signal(self) -> str:
        """Describe noise that leaves no signal in the sums, or return ""."""

    @abstractmethod
    def _plausible(self, one: PartySums, noise: float) -> FloatArray | IntArray:
        """Return the plausible sums nearest to a party's; plausible ones as they are.

        They depend on the party's sums alone, and on public facts.
        """

    @abstractmethod
    def _evidence(
        self, sums: FloatArray | IntArray, num_records: float, noise: float
    ) -> tuple[FloatArray, FloatArray]:
        """Return how a party ranks the public rows, class by class, and 1 where it knows one.

        They are (num_public, num_classes) and (num_classes,); see `aggregation.pool`.
        """

    @abstractmethod
    def _model_of(self, total: FloatArray, noise: float, counted: "Counted") -> Learner:
        """Return the final model that follows from the sum over parties."""

    # Noise

    @property
    def _length(self) -> int:
        """Length of what one unit, a record or at L1 a party, adds to a sum."""
        return DIRECTION if self.options.level == "L1" else self.record_length

    def _planned_noise(self) -> float:
        """Return the deviation of the noise on a sum over parties, per length of one unit.

        It decides how detailed the sums are, so nothing here depends on that.
        """
        privacy = self.options.privacy
        if privacy is None:
            return 0.0
        mechanism = privacy.mechanism(self._planner.moved * self._length)
        return self._summed(mechanism) / self._length

    def _summed(self, mechanism: GaussianSums | None, num_answers: int | None = None) -> float:
        """Return the deviation of the noise on a sum over parties."""
        if mechanism is None:
            return 0.0
        draws = (num_answers or self.num_parties) if self.options.level == "L2" else 1
        return mechanism.drawn_scale * math.sqrt(draws)

    @property
    def _num_records(self) -> int:
        return self.options.num_records or max(1, len(self.public))

    @property
    def _shape(self) -> tuple[int, ...]:
        return self._summary.shape(self.num_classes, self.task)

    # A round

    def party_config(self) -> dict[str, Scalar]:
        """Return the settings, and what identifies the public data."""
        public = {keys.PUBLIC_HASH: content_hash(self.public)} if len(self.public) else {}
        return {
            **self.options.to_config(),
            TASK: self.task,
            keys.NUM_CLASSES: self.num_classes,
            **public,
        }

    def knowledge_for(self, node_id: int) -> Knowledge | None:  # noqa: ARG002
        """Return how records are summed, which is encoded once for all nodes."""
        return self._question

    def check(self, knowledge: Knowledge) -> PartySums:
        """Check one party's sums: whole numbers of the right shape, and possible ones."""
        sums, shape = knowledge.arrays.get(SUMS), self._shape
        if set(knowledge.arrays) != {SUMS} or sums is None or sums.dtype != np.int32:
            raise KnowledgeMismatch("Reply: it must hold sums as int32 and nothing else.")
        if sums.shape != shape:
            raise KnowledgeMismatch(f"Reply: sums must have shape {shape}, got {sums.shape}.")
        level = self.options.level
        num_records = 1 if level == "L1" else read_num_records(knowledge.meta)
        if level != "L2" and not self._summary.signed and sums.min() < 0:
            raise KnowledgeMismatch("Reply: counts without noise must be at least 0, got less.")
        whole = sums.astype(np.int64)
        if level == "L1" and not is_direction(whole):
            raise KnowledgeMismatch(f"Reply: sums must be at most {DIRECTION} long, got more.")
        exact = level in ("L0", "central")
        if exact and not self._summary.possible(whole, num_records, self.task):
            raise KnowledgeMismatch(
                f"Reply: sums without noise must be those of {num_records} records, got others."
            )
        return PartySums(whole, num_records)

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Sum over parties, and make the final model of the sum."""
        answers = {reply.partition_id: reply.knowledge for reply in self.replies}
        self.state.sums = {party: _as_sent(one) for party, one in answers.items()}
        made, metrics = self._model_from(answers, SUMS)
        model = self.keep_model(made)
        # What everybody but the server learns, parties cannot tell.
        prices = privacy_metrics(party=self.ledger_, example=self.ledger_)
        known = {key: prices[key] for key in _PRICES.get(self.options.level, ())}
        return model, {**metrics, **self._details(), **known}

    def without(self, partition_id: int) -> Learner:
        """Return the model of all parties of the last round but one, which wants to leave.

        Its sums are not added, so that without noise the model is, to the bit, that of a
        round without it. What its sums have told before stays told: noise of its own is in
        the ledger already. Where the server adds noise, that for the others is new, and is
        charged again before it is drawn.

        Raises
        ------
        InvalidParameter
            If the party's sums are not in the last round, or too few are left.
        PrivacyBudgetExceeded
            If new noise would exceed the run's budget. Nothing is drawn then.
        """
        sums, owner = self.state.sums, type(self).__name__
        rule = f"one of the last round's parties, {sorted(sums)}"
        require(partition_id in sums, owner, "partition_id", rule, partition_id)
        rest = {party: one for party, one in sums.items() if party != partition_id}
        enough, rule = len(rest) >= self.min_parties, f"at least {self.min_parties}"
        require(enough, owner, "parties that are left", rule, len(rest))
        if published := self.plan.price().published:
            self.ledger_.charge_all(published)
        answers = {party: self.check(one) for party, one in rest.items()}
        return self._model_from(answers, f"{SUMS}-without-{partition_id}")[0]

    def _model_from(
        self, answers: Mapping[int, PartySums], draw: str
    ) -> tuple[Learner, Metrics]:
        """Return the model of parties' sums, with noise by this name, and its metrics."""
        parties, said = [*answers], [*answers.values()]
        sizes = self._believed(said)
        parts = [self._limited(one, size) for one, size in zip(said, sizes, strict=True)]
        contradicting = self._find_outliers(parts, sizes)
        self.outliers_ = tuple(parties[k] for k in contradicting)
        if self.outliers_:
            # Noise and few records can explain it, so only without noise it is a warning.
            level = logging.INFO if self._noise_of_party else logging.WARNING
            logger.log(
                level,
                "%s does not count the sums of parties %s, which are unlike most others'.",
                self.name,
                [*self.outliers_],
            )
        kept = [k for k in range(len(said)) if k not in contradicting]
        noise = self._summed(self._mechanism, len(kept))
        total = self._total([parts[k] for k in kept], draw)
        counted = Counted(len(kept), float(sizes[kept].sum()))
        metrics: Metrics = {NOISE_SCALE: noise, **self._counted(said, sizes, parts)}
        return self._model_of(total, noise, counted), metrics

    def _believed(self, said: Sequence[PartySums]) -> FloatArray:
        """Return for how many records each party counts; at L1 all weigh the same."""
        claimed = np.array([one.num_records for one in said], dtype=np.float64)
        if self.options.level == "L1":
            return claimed
        return believed_sizes(claimed, self.options.num_records)

    def _limited(self, one: PartySums, size: float) -> FloatArray | IntArray:
        """Return what counts of a party's sums; all of them as whole numbers if it can.

        At `central` this must bring no two sums of one party farther apart. Multiples of
        whole numbers by 1 at most do not, rounded one by one. A projection does not
        either, but its rounding to the noise's units does, which `_is_fine` is about.
        """
        level, part = self.options.level, one.sums
        if level == "L1":
            return part
        projected = level != "central" or self._is_fine
        found = self._plausible(one, self._noise_of_party) if projected else part
        if size < one.num_records:
            found = found * (size / one.num_records)
            if level == "central" and (not self._summary.signed or not projected):
                return np.rint(found).astype(np.int64)
        return found

    @property
    def _noise_of_party(self) -> float:
        """The deviation of the noise on a party's own sums."""
        own = self._mechanism if self.options.level == "L2" else None
        return 0.0 if own is None else own.drawn_scale

    @property
    def _is_fine(self) -> bool:
        """Whether rounding to the noise's units is covered by what the noise is made for.

        Each of two vectors is moved by half a unit an entry. As much again is left for the
        projection's own arithmetic.
        """
        mechanism, size = self._mechanism, int(np.prod(self._shape))
        unused = self._summary.unused(self.num_classes, self.task)
        return mechanism is not None and 2 * mechanism.grain * math.sqrt(size) <= unused

    def _find_outliers(
        self, parts: Sequence[FloatArray | IntArray], sizes: FloatArray
    ) -> Sequence[int]:
        """Return the positions of parties whose sums contradict most others'.

        A rule that looks at several parties lets a unit move more than its own sums, so there
        is none where the noise comes later.
        """
        options, noise = self.options, self._noise_of_party
        numeric = self.task == "regression"
        if options.level not in ("L0", "L2") or not options.exclude_outliers:
            return []
        pairs = zip(parts, sizes, strict=True)
        evidence = [self._evidence(part, size, noise) for part, size in pairs]
        found = outliers(
            lambda position: evidence[position][0],
            np.array([known for _, known in evidence]),
            np.ones(len(evidence), dtype=np.int64),
            least_typical=LEAST_AGREEMENT if noise or numeric else LEAST_TYPICAL,
            least_of_typical=OPPOSED if numeric else LEAST_OF_TYPICAL,
        )
        return [*found]

    def _counted(
        self,
        said: Sequence[PartySums],
        sizes: FloatArray,
        parts: Sequence[FloatArray | IntArray],
    ) -> Metrics:
        """Return how many parties count for less than they sent.

        Where the noise is the server's, only what their public claims say.
        """
        pairs = zip(said, sizes.tolist(), strict=True)
        claims = [size < one.num_records for one, size in pairs]
        if self.options.level not in ("L0", "L2"):
            return {keys.NUM_CAPPED: sum(claims)}
        moved = [part is not one.sums for one, part in zip(said, parts, strict=True)]
        return {keys.NUM_CAPPED: sum(moved), keys.NUM_OUTLIERS: len(self.outliers_)}

    def _details(self) -> Metrics:
        """Return how detailed the sums are."""
        return {}

    def _total(self, parts: Sequence[FloatArray | IntArray], draw: str) -> FloatArray:
        """Return the sum over parties; where the server adds noise, with the one so named."""
        privacy, mechanism = self.options.privacy, self._mechanism
        if privacy is None or mechanism is None or self.options.level == "L2":
            return np.asarray(np.sum(parts, axis=0), dtype=np.float64)
        rng = privacy.rng(self.seed, draw)
        multiples = self._summary.multiples(self.num_classes, self.task)
        # At L1 a party has multiplied its sums already.
        larger = parts if self.options.level == "L1" else [part * multiples for part in parts]
        drawn = self.run.draw_once(draw, lambda: {_TOTAL: _released(mechanism, larger, rng)})
        return np.asarray(drawn[_TOTAL] / multiples, dtype=np.float64)

    def _labelled(self, shares: FloatArray) -> Learner:
        """Return a model that learns public rows of these shares of classes."""
        learner, rng = self.learner_fn(), derive_rng(self.seed, "server", "final")
        if isinstance(learner, SoftLearner):
            link: Link = "sigmoid" if self.task == "multi-label" else "softmax"
            recipe = Recipe(loss="cross-entropy", link=link)
            return learner.distill(self.public, shares, rng=rng, recipe=recipe)
        labels = shares > 0.5 if self.task == "multi-label" else shares.argmax(axis=1)
        return learner.fit(self.public, labels.astype(np.int64), rng=rng)


def _as_sent(one: PartySums) -> Knowledge:
    """Return what a party sent as its reply had it."""
    claim = {keys.NUM_EXAMPLES: one.num_records}
    return Knowledge(SUMS, {SUMS: one.sums.astype(np.int32)}, claim)


def _released(
    mechanism: GaussianSums,
    parts: Sequence[FloatArray | IntArray],
    rng: np.random.Generator | None,
) -> FloatArray:
    """Return the sum of parts with noise; fractions are rounded to the noise's units."""
    below = [np.floor(part).astype(np.int64) for part in parts]
    whole = np.sum(below, axis=0)
    if all(part.dtype.kind == "i" for part in parts):
        return mechanism.release(whole, rng).values
    pairs = zip(parts, below, strict=True)
    rests = [np.asarray(part - low, dtype=np.float64) for part, low in pairs]
    units = np.sum([mechanism.in_units(rest) for rest in rests], axis=0)
    return mechanism.release(whole, rng, units=units).values
