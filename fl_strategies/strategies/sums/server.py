"""The server side that FedHistogram and FedRegression share."""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, Generic, TypeVar, Unpack

import numpy as np
from flwr.app import ArrayRecord

from fl_strategies.arrays import Array, FloatArray, IntArray, content_hash
from fl_strategies.core.accounting import AUDIENCES as USUAL_AUDIENCES
from fl_strategies.core.accounting import privacy_metrics
from fl_strategies.core.inputs import check_factories, public_array
from fl_strategies.core.protocols import Learner, LearnerFactory, Link, Recipe, SoftLearner
from fl_strategies.core.state import State
from fl_strategies.core.strategy import FederationOptions, KnowledgeStrategy
from fl_strategies.core.tasks import Task, check_task
from fl_strategies.exceptions import KnowledgeMismatch, require
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.counts import GaussianSums
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.privacy.noise_spec import require_audible
from fl_strategies.privacy.planning.draft import Planner
from fl_strategies.privacy.planning.facts import Facts
from fl_strategies.privacy.planning.remedies import advice
from fl_strategies.randomness import derive_rng
from fl_strategies.strategies.sums.options import SUMS, TASK, UNPROTECTED, SumOptions
from fl_strategies.strategies.sums.summary import DIRECTION, Summary, is_direction, limited
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, Scalar

S = TypeVar("S", bound=Summary)

NOISE_SCALE: Final = "noise-scale"
AUDIENCES: Final[Mapping[str, str]] = {**USUAL_AUDIENCES, "central": USUAL_AUDIENCES["L1"]}
_OF_EXAMPLES: Final = (keys.EPSILON_EXAMPLE, keys.DELTA_EXAMPLE)
_PRICES: Final[Mapping[str, Sequence[str]]] = {
    "central": _OF_EXAMPLES,
    "L1": (keys.EPSILON_PARTY, keys.DELTA_PARTY, *_OF_EXAMPLES),
}
"""Which figures the server knows better than the parties."""
_TOTAL: Final = "total"


class SumStrategy(KnowledgeStrategy[IntArray], Generic[S]):
    """One round: parties sum their records up as public rows say, and add noise.

    A subclass says how records are summed up (`_summarise`), when noise drowns the sums
    (`_drowned`) and which classes public rows have by the sums (`_shares`).

    Parameters
    ----------
    public : (num_public, ...)
        They decide how records are summed up and are what the final model learns from.
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
    """

    options_type: ClassVar[type[SumOptions]] = SumOptions
    reply_kind = SUMS
    last_round = 1
    parties_train = False
    options: SumOptions
    open_setting: ClassVar[str]
    """What decides how detailed the sums are, unless it is left open."""

    def __init__(
        self,
        *,
        public: Array,
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
        require(task != "regression", owner, "task", "single-label or multi-label", task)
        check_factories(owner, learner_fn, num_classes)
        self.public = public_array(owner, public)
        self.num_classes, self.task = num_classes, task
        self.learner_fn, self.model_name = learner_fn, learner_name
        self.options = options or self.options_type()
        self._public_hash = content_hash(self.public)
        self._summary = self._summarise()
        self._mechanism = self._make_mechanism()
        self.state = State(ledger=self._new_ledger())
        privacy = self.options.privacy
        accepted = privacy is not None and privacy.accept_noise
        drowned = self._drowned()
        require_audible(owner, drowned, accepted=accepted, advice_of=self._what_works)

    # What a subclass says

    @abstractmethod
    def _summarise(self) -> S:
        """Return how records are summed up, by public rows and settings alone."""

    @abstractmethod
    def _drowned(self) -> str:
        """Return how noise drowns the sums; nothing if it does not."""

    @abstractmethod
    def _planner(self, level: str, num_labels: int) -> Planner:
        """Return what plans this strategy."""

    @abstractmethod
    def _shares(self, total: FloatArray, noise: float, num_answers: int) -> FloatArray:
        """Return the shares of classes in every public row, (num_public, num_classes)."""

    def _what_works(self) -> str:
        """Return what would work instead of what is refused."""
        privacy = self.options.privacy
        if privacy is None or privacy.target_epsilon is None:
            return ""
        labels = self.num_classes if self.task == "multi-label" else 1
        facts = Facts(
            target_epsilon=privacy.target_epsilon,
            delta=privacy.delta,
            num_parties=self.num_parties,
            num_records=max(1, self._num_records // self.num_parties),
            num_classes=max(2, self.num_classes),
            num_public=len(self.public),
        )
        return advice(self._planner(self.options.level, labels), facts, self.open_setting)

    # Settings and noise

    def _new_ledger(self) -> PrivacyLedger:
        options = self.options
        return PrivacyLedger(
            "party" if options.level == "L1" else "example",
            delta=options.delta,
            num_parties=self.num_parties,
            audience=AUDIENCES[options.level],
        )

    def _make_mechanism(self) -> GaussianSums | None:
        privacy = self.options.privacy
        if privacy is None:
            return None
        by_record = self._summary.moved(self.num_classes, self.task)
        by_party = self._summary.moved_by_party
        moved = by_party if self.options.level == "L1" else by_record
        return privacy.mechanism(moved, int(np.prod(self._shape)))

    def _planned_noise(self, moved: float) -> float:
        """Return the deviation of the noise on a sum over parties, if a unit moves so much."""
        privacy = self.options.privacy
        return 0.0 if privacy is None else self._summed(privacy.mechanism(moved))

    def _summed(self, mechanism: GaussianSums | None, num_answers: int | None = None) -> float:
        """Return the deviation of the noise on a sum over parties."""
        if mechanism is None:
            return 0.0
        draws = (num_answers or self.num_parties) if self.options.level == "L2" else 1
        return mechanism.drawn_scale * math.sqrt(draws)

    @property
    def _num_records(self) -> int:
        return self.options.num_records or len(self.public)

    @property
    def _shape(self) -> tuple[int, ...]:
        return self._summary.shape(self.num_classes, self.task)

    # A round

    def party_config(self) -> dict[str, Scalar]:
        """Return the settings, and what identifies the public data."""
        return {
            **self.options.to_config(),
            TASK: self.task,
            keys.NUM_CLASSES: self.num_classes,
            keys.PUBLIC_HASH: self._public_hash,
        }

    def knowledge_for(self, node_id: int) -> Knowledge | None:  # noqa: ARG002
        """Return how records are summed up, the same for everybody."""
        return Knowledge(self._summary.kind, self._summary.to_arrays())

    def check(self, knowledge: Knowledge) -> IntArray:
        """Check one party's sums: whole numbers of the right shape, and possible ones."""
        sums, shape = knowledge.arrays.get(SUMS), self._shape
        if set(knowledge.arrays) != {SUMS} or sums is None or sums.dtype != np.int32:
            raise KnowledgeMismatch("Reply: it must hold sums as int32 and nothing else.")
        if sums.shape != shape:
            raise KnowledgeMismatch(f"Reply: sums must have shape {shape}, got {sums.shape}.")
        exact = self.options.level != "L2"
        if exact and not self._summary.signed and sums.min() < 0:
            raise KnowledgeMismatch("Reply: counts without noise must be at least 0, got less.")
        whole = sums.astype(np.int64)
        if self.options.level == "L1" and not is_direction(whole):
            raise KnowledgeMismatch(f"Reply: sums must be at most {DIRECTION} long, got more.")
        return whole

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Sum over parties, label the public rows, and train the final model."""
        self.ledger_.charge_all(self._charges())
        sums, capped = [reply.knowledge for reply in self.replies], 0
        if self.options.level in ("L0", "L2"):
            # Elsewhere a limit that depends on other parties would let a unit move more.
            sums, capped = limited(sums)
        noise = self._summed(self._mechanism, len(sums))
        shares = self._shares(self._total(sums), noise, len(sums))
        found = {NOISE_SCALE: noise, keys.NUM_CAPPED: capped, **self._details()}
        return self.keep_model(self._learn(shares)), {**found, **self._server_price()}

    def _details(self) -> Metrics:
        """Return how detailed the sums are."""
        return {}

    def _server_price(self) -> Metrics:
        """Return what everybody but the server learns; parties can only tell what it does."""
        found = privacy_metrics(party=self.ledger_, example=self.ledger_)
        return {key: found[key] for key in _PRICES.get(self.options.level, ())}

    def _total(self, sums: Sequence[IntArray]) -> FloatArray:
        """Return the sum over parties; with noise, where the server is to add it."""
        privacy, mechanism, whole = self.options.privacy, self._mechanism, np.sum(sums, axis=0)
        if privacy is None or mechanism is None or self.options.level == "L2":
            return np.asarray(whole, dtype=np.float64)
        rng = privacy.rng(self.seed, SUMS)
        drawn = self.run.draw_once(SUMS, lambda: {_TOTAL: mechanism.release(whole, rng).values})
        return np.asarray(drawn[_TOTAL], dtype=np.float64)

    def _learn(self, shares: FloatArray) -> Learner:
        learner, rng = self.learner_fn(), derive_rng(self.seed, "server", "final")
        if isinstance(learner, SoftLearner):
            link: Link = "sigmoid" if self.task == "multi-label" else "softmax"
            recipe = Recipe(loss="cross-entropy", link=link)
            return learner.distill(self.public, shares, rng=rng, recipe=recipe)
        labels = shares > 0.5 if self.task == "multi-label" else shares.argmax(axis=1)
        return learner.fit(self.public, labels.astype(np.int64), rng=rng)

    def record_releases(self) -> None:
        """Record the sums of a failed round; a trusted server has released nothing."""
        if self.options.level not in _PRICES:
            self.ledger_.compose_all(self._charges())

    def _charges(self) -> Sequence[Entry]:
        """Return the price of one release: every example is in the sums of one party.

        Asked again after a resume, a party may have drawn other noise and released twice; a
        server draws its noise once.
        """
        privacy, mechanism = self.options.privacy, self._mechanism
        if privacy is None or mechanism is None:
            return [(NonPrivateEvent(unit="example", reason=UNPROTECTED), 1)]
        once = mechanism.charges(int(np.prod(self._shape)), seeded=privacy.seeded_noise)
        return once * (self.run.num_attempts if self.options.level == "L2" else 1)
