"""The student of a FedMD party: it learns from its own records and from the consensus.

A learner that can continue (`partial_fit`, `distill`) and be kept as arrays follows the paper:
initial training, then digest and revisit in every round. Any other learner is fitted anew
each time, to its own records together with the public rows as the last consensus labels
them.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies._util import Array, IntArray
from fl_strategies.errors import KnowledgeMismatch, NotFitted, require_known
from fl_strategies.learners import (
    ContinuingLearner,
    IncrementalLearner,
    Learner,
    Recipe,
    SoftLearner,
    TrainingSet,
    plan_of,
)
from fl_strategies.party.party import Party
from fl_strategies.party.role import (
    PartyState,
    check_public_data,
    is_promise,
    public_model,
    read_round,
    read_seed,
    receive_model,
    require_finite,
    require_plan,
    trained,
)
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.privacy.mechanisms import SubsampleOnce
from fl_strategies.strategies.fedmd.options import FedMDSettings, Payload, public_rows
from fl_strategies.strategies.fedmd.samples import FedMDPartyState, check_size, sample_records
from fl_strategies.wire.knowledge import Knowledge, config_int, pack_labels, unpack_labels

CONSENSUS: Final = "consensus"
CONSENSUS_ROUND: Final = "consensus-round"

RECIPES: Final[Mapping[str, Recipe]] = {
    "logits": Recipe(loss="l1", link="identity"),
    "softmax": Recipe(loss="cross-entropy", link="softmax"),
}
"""Training on scores; labels are learned as usual."""


@dataclass(frozen=True, eq=False)
class Lesson:
    """A consensus: the federation's answers about the public rows of one round."""

    server_round: int
    rows: IntArray
    answers: Array

    @property
    def labels(self) -> IntArray:
        """The class of every row."""
        labels: IntArray = self.answers if self.answers.ndim == 1 else self.answers.argmax(1)
        return labels


def teach(
    model: Learner,
    x: Array,
    lesson: Lesson,
    payload: Payload,
    rng: np.random.Generator,
    epochs: int | None = None,
) -> Learner:
    """Let a model learn a consensus on its rows; from labels, if it cannot from scores."""
    if payload != "argmax" and isinstance(model, SoftLearner):
        recipe = replace(RECIPES[payload], epochs=epochs)
        targets = lesson.answers.astype(np.float64)
        return model.distill(x, targets, rng=rng, recipe=recipe)
    if epochs is not None and isinstance(model, IncrementalLearner):
        return model.partial_fit(x, lesson.labels, rng=rng, epochs=epochs)
    return model.fit(x, lesson.labels, rng=rng)


class Student(ABC):
    """A party's model on its way through the rounds, and one message about it, checked.

    Attributes
    ----------
    promised : bool
        Whether answers promise privacy, so that training must not fail.
    """

    def __init__(self, party: Party, config: ConfigRecord, state: PartyState) -> None:
        check_public_data(party, config)
        require_known(len(party.y) > 0, party.owner, "x", "records to learn from", "none")
        single = party.task == "single-label"
        require_known(single, party.owner, "task", "single-label for FedMD", party.task)
        self.party, self.state = party, FedMDPartyState(state.records)
        self.seed, self.server_round = read_seed(config), read_round(config)
        self.settings = FedMDSettings.from_config(
            config, num_public=len(party.public), num_classes=party.num_classes
        )
        self.options = self.settings.options
        released = state.ledger(DEFAULT_DELTA).entries
        self.promised = is_promise(released) or self.options.is_private
        if sample := self.options.sample:
            check_size(party, sample.num_samples, replacement=sample.with_replacement)

    @property
    def terms(self) -> str:
        """What a model of this message is trained on, and for whom.

        A model of other terms is not continued.
        """
        return f"{self.options.terms}, {len(self.party.y)} records, run {self.party.run}"

    def check_terms(self) -> None:
        """Raise unless the party has trained, and under the terms of this message."""
        last = self.state.terms
        if not last:
            raise self._not_fitted()
        rule = "those of the party's last training"
        name = "release and sample of an evaluate message"
        require_known(last == self.terms, "Server", name, rule, self.options.terms)

    def _not_fitted(self) -> NotFitted:
        rule = "a consensus must find a model that was trained before, got none"
        return NotFitted(f"{self.party.owner}: {rule}.")

    def records(self) -> TrainingSet:
        """Return the records in use; with NFDP a sample, and nothing else is looked at."""
        party, options, sample = self.party, self.options, self.options.sample
        if sample is None:
            return party.x, party.y
        mechanism = SubsampleOnce(
            records=len(party.y),
            samples=sample.num_samples,
            replacement=sample.with_replacement,
        )
        rng = options.secret_rng(self.seed, "sample", party.partition_id)
        rows = sample_records(party, self.state, mechanism, rng, delta=options.delta)
        return party.x[rows], party.y[rows]

    def rows_of(self, server_round: int) -> IntArray:
        """Return which public rows a round is about."""
        num_rows, num_public = len(self.party.public), self.settings.num_public
        return public_rows(self.seed, server_round, num_rows, num_public)

    def lesson(self, received: Knowledge | None, *, newest: int) -> Lesson | None:
        """Read the consensus that a message carries, if it carries one."""
        if received is None or received.kind != CONSENSUS:
            return None
        require_known(newest > 0, "Server", CONSENSUS, "omitted before the second round", "one")
        meta = ConfigRecord({**received.meta})
        server_round = config_int(meta, CONSENSUS_ROUND, minimum=1, maximum=newest)
        answers = self.settings.consensus.decode(received.arrays)
        return Lesson(server_round, self.rows_of(server_round), answers)

    @abstractmethod
    def plan(self, lesson: Lesson | None) -> Sequence[Entry]:
        """Return what the training of a round will cost, before a record is looked at.

        Nothing means that the training promises no privacy.
        """

    @abstractmethod
    def learn(self, lesson: Lesson | None, given: Knowledge | None) -> Learner:
        """Return the model after a round, and keep it for the next message."""

    @abstractmethod
    def class_counts(self) -> IntArray:
        """Return how many rows of each class the model of `learn` goes back to.

        They say which class shares it answers with.
        """

    @abstractmethod
    def finish(self, lesson: Lesson) -> Learner:
        """Digest the consensus of the round that has just ended, and keep the result."""

    def _counted(self, labels: Array) -> IntArray:
        return np.bincount(labels, minlength=self.party.num_classes).astype(np.int64)


class ContinuingStudent(Student):
    """Digest and revisit, as in the paper.

    After every step the model is rebuilt from its arrays, so that nothing else, such as
    an optimizer's momentum, decides whether a step came in the same message as the last.
    """

    _digested = 0

    def plan(self, lesson: Lesson | None) -> Sequence[Entry]:  # noqa: ARG002
        """Return the cost of the first training, of going back to the records, or of both.

        Digesting public rows costs nothing.
        """
        starts, options = self.server_round == 1 or self._kept() is None, self.options
        epochs = [options.epochs_initial] * starts
        epochs += [options.epochs_revisit] * (self.server_round > 1)
        learner, num_records = self.party.learner_fn(), len(self.party.y)
        plans = [plan_of(learner, num_records, epochs=passes) for passes in epochs]
        return [entry for plan in plans for entry in plan] if all(plans) else ()

    def learn(self, lesson: Lesson | None, given: Knowledge | None) -> Learner:
        """Train on the records; before that digest a consensus that is new."""
        model, options = self._kept(), self.options
        if model is None:
            model = self._prepared(given)
            model = self._on_records(model, options.epochs_initial, "initial")
        model = self._digest(model, lesson)
        if self.server_round > 1:
            model = self._on_records(
                model, options.epochs_revisit, "revisit", self.server_round
            )
        return self._keep(model)

    def _keep(self, model: ContinuingLearner) -> Learner:
        self.state.keep_model(model, digested_round=self._digested, terms=self.terms)
        return model

    def class_counts(self) -> IntArray:
        """Return those of the records, which it has always seen last."""
        return self._counted(self.records()[1])

    def finish(self, lesson: Lesson) -> Learner:
        """Digest the last consensus; the records are not needed."""
        model = self._kept()
        if model is None:
            raise self._not_fitted()
        return self._keep(self._digest(model, lesson))

    def _kept(self) -> ContinuingLearner | None:
        model = self.state.model(self.party.learner_fn, self.terms)
        self._digested = 0 if model is None else self.state.digested_round
        return cast(ContinuingLearner | None, model)

    def _prepared(self, given: Knowledge | None) -> ContinuingLearner:
        """Return the model before it sees private records."""
        party, epochs = self.party, self.options.pretrain_epochs
        if given is not None:
            return cast(ContinuingLearner, receive_model(party, given))
        model = cast(ContinuingLearner, party.learner_fn())
        if not epochs:
            return model
        if party.public_y is None:
            raise KnowledgeMismatch(f"{party.owner}: public_y must be given, got none.")
        rng = party.rng(self.seed, "pretrain")
        model = model.partial_fit(party.public, party.public_y, rng=rng, epochs=epochs)
        return self._rebuilt(model)

    def _on_records(
        self, model: ContinuingLearner, epochs: int, purpose: str, *path: int
    ) -> ContinuingLearner:
        x, y = self.records()
        rng = self.party.rng(self.seed, purpose, *path)
        plan = plan_of(model, len(y), epochs=epochs)

        def train() -> ContinuingLearner:
            learned = model.partial_fit(x, y, rng=rng, epochs=epochs)
            require_plan(learned, plan)
            return self._rebuilt(learned)

        return self._trained(train)

    def _digest(self, model: ContinuingLearner, lesson: Lesson | None) -> ContinuingLearner:
        if lesson is None or lesson.server_round <= self._digested:
            return model
        rng = self.party.rng(self.seed, "digest", lesson.server_round)
        x, options = self.party.public[lesson.rows], self.options
        self._digested = lesson.server_round

        def train() -> ContinuingLearner:
            taught = teach(model, x, lesson, options.lesson, rng, options.epochs_digest)
            return self._rebuilt(cast(ContinuingLearner, taught))

        return self._trained(train)

    def _trained(self, train: Callable[[], ContinuingLearner]) -> ContinuingLearner:
        def stand_in() -> ContinuingLearner:
            model = public_model(self.party, self.party.learner_fn)
            return self._rebuilt(cast(ContinuingLearner, model))

        return trained(train, stand_in, promised=self.promised)

    def _rebuilt(self, model: ContinuingLearner) -> ContinuingLearner:
        twin = cast(ContinuingLearner, self.party.learner_fn())
        require_finite(model)
        return twin.from_arrays(model.to_arrays())


class RefittingStudent(Student):
    """A new model each time, for learners that cannot continue or cannot be kept."""

    def plan(self, lesson: Lesson | None) -> Sequence[Entry]:
        """Return the cost of one training on the records and the last consensus."""
        kept = self.server_round > 1 and self._consensus_labels() is not None
        num_public = (kept or lesson is not None) * self.settings.num_public
        return plan_of(self.party.learner_fn(), len(self.party.y) + num_public)

    def learn(self, lesson: Lesson | None, given: Knowledge | None) -> Learner:  # noqa: ARG002
        """Fit the records and the labels of the newest consensus, which is kept instead.

        Every fit starts anew, not from a `given` model.
        """
        return self._fitted(lesson)

    def class_counts(self) -> IntArray:
        """Return those of the records and the last consensus together."""
        return self._counted(self._training_set()[1])

    def finish(self, lesson: Lesson) -> Learner:
        """Fit once more, with the last consensus."""
        return self._fitted(lesson)

    def _consensus_labels(self) -> IntArray | None:
        packed, size = self.state.packed_consensus, (self.settings.num_public,)
        return None if packed is None else unpack_labels(packed, size, self.party.num_classes)

    def _fitted(self, lesson: Lesson | None) -> Learner:
        if lesson is not None and lesson.server_round > self.state.digested_round:
            self.state.packed_consensus = pack_labels(lesson.labels, self.party.num_classes)
            self.state.digested_round = lesson.server_round
        x, y = self._training_set()
        rng = self.party.rng(self.seed, "refit", self.state.digested_round)
        learner_fn = self.party.learner_fn

        def fit() -> Learner:
            model = learner_fn().fit(x, y, rng=rng)
            require_plan(model, plan_of(learner_fn(), len(y)))
            return model

        stand_in = functools.partial(public_model, self.party, learner_fn)
        return trained(fit, stand_in, promised=self.promised)

    def _training_set(self) -> TrainingSet:
        x, y = self.records()
        public, last = self.party.public, self.state.digested_round
        labels = self._consensus_labels()
        if labels is None:
            return x, y
        rows = self.rows_of(last)
        return np.concatenate([x, public[rows]]), np.concatenate([y, labels])


def student_of(party: Party) -> type[Student]:
    """Return how this party's learner learns."""
    goes_on = isinstance(party.learner_fn(), ContinuingLearner)
    return ContinuingStudent if goes_on else RefittingStudent
