"""The server side of FedHistogram; see `fl_strategies.strategies.fedhistogram`."""

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, Unpack

import numpy as np
from flwr.app import ArrayRecord

from fl_strategies.aggregation.cells import (
    MOST_RECEIVED,
    USUAL_COMPONENTS,
    Cells,
    class_shares,
    limited,
)
from fl_strategies.arrays import Array, FloatArray, IntArray, content_hash
from fl_strategies.core.inputs import check_factories, public_array
from fl_strategies.core.protocols import Learner, LearnerFactory, Link, Recipe, SoftLearner
from fl_strategies.core.state import State
from fl_strategies.core.strategy import FederationOptions, KnowledgeStrategy
from fl_strategies.core.tasks import Task, check_task
from fl_strategies.exceptions import KnowledgeMismatch, require
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.counts import MOST_CELLS, GaussianCounts
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.ledger import DEFAULT_DELTA, PrivacyLedger
from fl_strategies.privacy.noise_spec import require_audible
from fl_strategies.privacy.planning.facts import Facts
from fl_strategies.privacy.planning.planners import Histogram
from fl_strategies.privacy.planning.remedies import advice
from fl_strategies.privacy.planning.rules import drowned_cells, usual_cells
from fl_strategies.randomness import derive_rng
from fl_strategies.strategies.fedhistogram.options import (
    CELLS,
    COUNTS,
    HISTOGRAM,
    TASK,
    UNPROTECTED,
    FedHistogramOptions,
)
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, Scalar

NUM_CELLS: Final = "num-cells"
NOISE_SCALE: Final = "noise-scale"
AUDIENCES: Final[Mapping[str, str]] = {
    "L0": "nobody",
    "central": "everybody who sees the final model, except the server, which is trusted",
    "L2": "the server, the other parties and everybody who sees the final model",
}
_TOTAL: Final = "total"


class FedHistogram(KnowledgeStrategy[IntArray]):
    """One round: parties count their records in cells that public rows define.

    Leaves the party
        One number for each cell and class: how many of its records are there, with noise.
    Guarantee
        L2: each record is protected against the server and everybody else, by noise that
        the party itself adds; central: against everybody but the server, which adds the
        noise once. One release, so one price, for any number of public rows, cells and
        classes. Not covered: the number of records, held-out rows, settings chosen on
        private data.

    Parameters
    ----------
    public : (num_public, ...)
        They define the cells and are what the final model learns from.
    num_classes : int
        Length of the federation's class list; labels in multi-label learning.
    learner_fn : factory
        Makes the final model; it learns shares of classes if it can (`SoftLearner`), and the
        likeliest class of every public row otherwise.
    learner_name : str
    task : "single-label" or "multi-label"
    options : FedHistogramOptions, optional
    **federation
        See `KnowledgeStrategy`.

    Notes
    -----
    Parties' own models are not used. The cells travel, so that all parties count alike; they
    are made of public rows, and no choice of cells weakens the promise, because a record is
    in one cell whatever they are.
    """

    name: ClassVar[str] = "fedhistogram"
    options_type = FedHistogramOptions
    reply_kind = HISTOGRAM
    last_round = 1

    def __init__(
        self,
        *,
        public: Array,
        num_classes: int,
        learner_fn: LearnerFactory,
        learner_name: str = "learner",
        task: Task = "single-label",
        options: FedHistogramOptions | None = None,
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
        self.options = options or FedHistogramOptions()
        self._public_hash = content_hash(self.public)
        self._mechanism = self._make_mechanism()
        self._cells: Cells | None = None
        self.state = State(ledger=self._new_ledger())
        accepted = self.options.privacy is not None and self.options.privacy.accept_noise
        require_audible(
            "FedHistogram", self._drowned(), accepted=accepted, advice_of=self._what_works
        )

    def _make_mechanism(self) -> GaussianCounts | None:
        privacy = self.options.privacy
        return None if privacy is None else privacy.mechanism(self.task, self.num_classes)

    def _new_ledger(self) -> PrivacyLedger:
        privacy = self.options.privacy
        return PrivacyLedger(
            "example",
            delta=DEFAULT_DELTA if privacy is None else privacy.delta,
            num_parties=self.num_parties,
            audience=AUDIENCES[self.options.level],
        )

    def party_config(self) -> dict[str, Scalar]:
        """Return the settings, and what identifies the public data."""
        return {
            **self.options.to_config(),
            TASK: self.task,
            keys.NUM_CLASSES: self.num_classes,
            keys.PUBLIC_HASH: self._public_hash,
        }

    def begin_round(self) -> bool:
        """Divide the space of rows, once."""
        if self._cells is None:
            width = int(np.prod(self.public.shape[1:]))
            components = self.options.num_components or USUAL_COMPONENTS
            rng = derive_rng(self.seed, "cells")
            self._cells = Cells.of_rows(
                self.public, self._num_cells(), min(components, width), rng
            )
        return True

    def _num_cells(self) -> int:
        """Return what was asked for, or what stands out from the noise of all parties."""
        options, num_public = self.options, len(self.public)
        usual = usual_cells(num_public, self._num_records, self._noise())
        number = options.num_cells or usual
        most = min(num_public, MOST_RECEIVED, MOST_CELLS // (2 * self.num_classes))
        rule = f"at most {most}, for so many public rows and classes"
        require(number <= most, "FedHistogram", "num_cells", rule, number)
        return number

    def _drowned(self) -> str:
        """Return how noise drowns what a cell has on average; nothing if it does not."""
        return drowned_cells(self._num_records, self._num_cells(), self._noise())

    def _what_works(self) -> str:
        """Return what would work instead."""
        privacy, mechanism = self.options.privacy, self._mechanism
        if privacy is None or mechanism is None or privacy.target_epsilon is None:
            return ""
        facts = Facts(
            target_epsilon=privacy.target_epsilon,
            delta=privacy.delta,
            num_parties=self.num_parties,
            num_records=max(1, self._num_records // self.num_parties),
            num_classes=max(2, self.num_classes),
            num_public=len(self.public),
        )
        planner = Histogram(
            level=privacy.privacy_level,
            trusts_server=privacy.privacy_level == "central",
            moved=mechanism.l2_sensitivity,
        )
        return advice(planner, facts, "num_cells")

    @property
    def _num_records(self) -> int:
        return self.options.num_records or len(self.public)

    def _noise(self, num_parties: int | None = None) -> float:
        """Return the deviation of the noise on a sum of counts."""
        if self._mechanism is None:
            return 0.0
        times = (num_parties or self.num_parties) if self.options.level == "L2" else 1
        return self._mechanism.drawn_scale * math.sqrt(times)

    def knowledge_for(self, node_id: int) -> Knowledge | None:  # noqa: ARG002
        """Return the cells, the same for everybody."""
        return None if self._cells is None else Knowledge(CELLS, self._cells.to_arrays())

    def check(self, knowledge: Knowledge) -> IntArray:
        """Check one party's counts: whole numbers of the right shape, and plausible."""
        counts, shape = knowledge.arrays.get(COUNTS), self._shape
        if set(knowledge.arrays) != {COUNTS} or counts is None or counts.dtype != np.int32:
            raise KnowledgeMismatch("Reply: it must hold counts as int32 and nothing else.")
        if counts.shape != shape:
            raise KnowledgeMismatch(
                f"Reply: counts must have shape {shape}, got {counts.shape}."
            )
        if self.options.level != "L2" and counts.min() < 0:
            raise KnowledgeMismatch("Reply: counts without noise must be at least 0, got less.")
        return counts.astype(np.int64)

    @property
    def _shape(self) -> tuple[int, ...]:
        cells = 0 if self._cells is None else self._cells.num_cells
        classes = (2, self.num_classes) if self.task == "multi-label" else (self.num_classes,)
        return (cells, *classes)

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Sum the counts, label the public rows by them, and train the final model."""
        self.record_releases()
        counts, capped = [reply.knowledge for reply in self.replies], 0
        if self.options.level != "central":
            counts, capped = limited(counts)
        total, noise = self._total(counts), self._noise(len(counts))
        model = self._learn(class_shares(total, noise)[self._cell_of_rows()])
        found = {NUM_CELLS: self._shape[0], NOISE_SCALE: noise, keys.NUM_CAPPED: capped}
        return self.keep_model(model), {**found, **self._central_price()}

    def _central_price(self) -> Metrics:
        """Return what everybody but the server learns; parties can only tell what it does."""
        if self.options.level != "central":
            return {}
        return {keys.EPSILON_EXAMPLE: self.ledger_.get_epsilon()}

    def _cell_of_rows(self) -> IntArray:
        cells = self._cells
        assert cells is not None  # noqa: S101 - made before parties are asked
        return Cells.from_arrays(cells.to_arrays(), self.public[0].size).find(self.public)

    def _total(self, counts: Sequence[IntArray]) -> FloatArray:
        """Return the sum of all counts; with noise, where the server is to add it."""
        privacy, mechanism = self.options.privacy, self._mechanism
        if privacy is None or mechanism is None or self.options.level != "central":
            return np.asarray(np.sum(counts, axis=0), dtype=np.float64)
        # Limits that depend on other parties would let a record move more than its counts.
        whole, rng = np.sum(counts, axis=0), privacy.rng(self.seed, HISTOGRAM)
        drawn = self.run.draw_once(
            HISTOGRAM, lambda: {_TOTAL: mechanism.release(whole, rng).values}
        )
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
        """Record one histogram: every example is in that of one party."""
        self.ledger_.charge_all(self._charges())

    def _charges(self) -> Sequence[Entry]:
        privacy, mechanism = self.options.privacy, self._mechanism
        if privacy is None or mechanism is None:
            return [(NonPrivateEvent(unit="example", reason=UNPROTECTED), 1)]
        seeded = privacy.seeded_noise
        return mechanism.charges(int(np.prod(self._shape)), seeded=seeded)
