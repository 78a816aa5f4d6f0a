"""How a party of FedMD learns: from its own records, and from what the federation says.

A learner that can go on (`partial_fit`, `distill`) and be kept as arrays follows the paper:
initial training, then digest and revisit in every round. Any other learner is fitted anew
each time, to its own records together with the public rows as the last consensus labels
them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np

from fl_strategies.exceptions import InvalidData, NotFitted
from fl_strategies.fedmd.memory import PartyMemory
from fl_strategies.fedmd.release import Payload, public_rows
from fl_strategies.half import receive_model
from fl_strategies.knowledge import Knowledge
from fl_strategies.party import Party
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.reporting import training_charges
from fl_strategies.protocols import (
    Array,
    ContinuingLearner,
    IncrementalLearner,
    IntArray,
    Learner,
    Recipe,
    SoftLearner,
    TrainingSet,
)

RECIPES: Final[Mapping[str, Recipe]] = {
    "logits": Recipe(loss="l1", link="identity"),
    "softmax": Recipe(loss="cross-entropy", link="softmax"),
}
"""How scores are learned; labels are learned like any others."""


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """Passes over the public rows with labels, the records, a consensus, the records."""

    pretrain: int
    initial: int
    digest: int
    revisit: int


@dataclass(frozen=True, eq=False)
class Lesson:
    """A consensus: what the federation says about the public rows of one round."""

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


@dataclass(eq=False)
class Student(ABC):
    """A party's model on its way through the rounds.

    Parameters
    ----------
    party : Party
    memory : PartyMemory
    records : callable
        Returns the private records in use.
    payload : "logits", "softmax" or "argmax"
    num_public : int
    epochs : Epochs
    seed : int
    terms : str
        Under which the server asks; a model of other terms is not gone on with.
    """

    party: Party
    memory: PartyMemory
    records: Callable[[], TrainingSet]
    payload: Payload
    num_public: int
    epochs: Epochs
    seed: int
    terms: str

    @abstractmethod
    def learn(
        self, server_round: int, lesson: Lesson | None, given: Knowledge | None
    ) -> tuple[Learner, Sequence[Entry]]:
        """Return the model after a round, and what its training costs.

        Nothing in place of the costs means that the training promises no privacy.
        """

    @abstractmethod
    def keep(self, model: Learner) -> None:
        """Keep what `learn` returned for the next message."""

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

    def learn(
        self, server_round: int, lesson: Lesson | None, given: Knowledge | None
    ) -> tuple[Learner, Sequence[Entry]]:
        """Train on the records; before that digest a consensus that is new."""
        if server_round == 1:
            self.memory.start_anew()
        model, spent = self._kept(), []
        if model is None:
            model = self._prepared(given)
            model, charges = self._on_records(model, self.epochs.initial, "initial")
            spent.append(charges)
        model = self._digest(model, lesson)
        if server_round > 1:
            epochs = self.epochs.revisit
            model, charges = self._on_records(model, epochs, "revisit", server_round)
            spent.append(charges)
        return model, [entry for charges in spent for entry in charges] if all(spent) else ()

    def keep(self, model: Learner) -> None:
        """Keep the model and which consensus it has digested."""
        kept = cast(ContinuingLearner, model)
        self.memory.keep_model(kept, digested_round=self._digested, terms=self.terms)

    def class_counts(self) -> IntArray:
        """Return those of the records, which it has always seen last."""
        return self._counted(self.records()[1])

    def finish(self, lesson: Lesson) -> Learner:
        """Digest the last consensus; the records are not needed."""
        model = self._kept()
        if model is None:
            raise NotFitted(
                f"{self.party.owner}: a consensus must find a model that was "
                f"trained before, got none."
            )
        model = self._digest(model, lesson)
        self.keep(model)
        return model

    def _kept(self) -> ContinuingLearner | None:
        model = self.memory.model(self.terms)
        self._digested = 0 if model is None else self.memory.digested_round
        return cast(ContinuingLearner | None, model)

    def _prepared(self, given: Knowledge | None) -> ContinuingLearner:
        """Return the model before it sees private records."""
        party, epochs = self.party, self.epochs.pretrain
        if given is not None:
            return cast(ContinuingLearner, receive_model(party, given))
        model = cast(ContinuingLearner, party.learner_fn())
        if not epochs:
            return model
        if party.public_y is None:
            raise InvalidData(
                f"{party.owner}: public_y must be given to train on public rows "
                f"first, got none."
            )
        rng = party.rng(self.seed, "pretrain")
        model = model.partial_fit(party.public, party.public_y, rng=rng, epochs=epochs)
        return self._rebuilt(model)

    def _on_records(
        self, model: ContinuingLearner, epochs: int, purpose: str, *path: int
    ) -> tuple[ContinuingLearner, Sequence[Entry]]:
        x, y = self.records()
        rng = self.party.rng(self.seed, purpose, *path)
        trained = model.partial_fit(x, y, rng=rng, epochs=epochs)
        return self._rebuilt(trained), training_charges([trained], 1)

    def _digest(self, model: ContinuingLearner, lesson: Lesson | None) -> ContinuingLearner:
        if lesson is None or lesson.server_round <= self._digested:
            return model
        rng = self.party.rng(self.seed, "digest", lesson.server_round)
        x = self.party.public[lesson.rows]
        taught = teach(model, x, lesson, self.payload, rng, self.epochs.digest)
        self._digested = lesson.server_round
        return self._rebuilt(cast(ContinuingLearner, taught))

    def _rebuilt(self, model: ContinuingLearner) -> ContinuingLearner:
        twin = cast(ContinuingLearner, self.party.learner_fn())
        return twin.from_arrays(model.to_arrays())


class RefittingStudent(Student):
    """A new model each time, for learners that cannot go on or cannot be kept."""

    def learn(
        self,
        server_round: int,
        lesson: Lesson | None,
        given: Knowledge | None,  # noqa: ARG002 - every fit starts anew
    ) -> tuple[Learner, Sequence[Entry]]:
        """Fit the records and the labels of the newest consensus."""
        if server_round == 1:
            self.memory.start_anew()
        self._take(lesson)
        model = self._fitted()
        return model, training_charges([model], 1)

    def keep(self, model: Learner) -> None:
        """Keep nothing: the consensus is kept, and gives the same model again."""

    def class_counts(self) -> IntArray:
        """Return those of the records and the last consensus together."""
        return self._counted(self._training_set()[1])

    def finish(self, lesson: Lesson) -> Learner:
        """Fit once more, with the last consensus."""
        self._take(lesson)
        return self._fitted()

    def _take(self, lesson: Lesson | None) -> None:
        if lesson is not None and lesson.server_round > self.memory.digested_round:
            self.memory.keep_consensus(lesson.labels, digested_round=lesson.server_round)

    def _fitted(self) -> Learner:
        x, y = self._training_set()
        rng = self.party.rng(self.seed, "refit", self.memory.digested_round)
        return self.party.learner_fn().fit(x, y, rng=rng)

    def _training_set(self) -> TrainingSet:
        x, y = self.records()
        public, last = self.party.public, self.memory.digested_round
        labels = self.memory.consensus_labels(self.num_public)
        if labels is None:
            return x, y
        rows = public_rows(self.seed, last, len(public), self.num_public)
        return np.concatenate([x, public[rows]]), np.concatenate([y, labels])


def student_of(party: Party) -> type[Student]:
    """Return how this party's learner learns."""
    goes_on = isinstance(party.learner_fn(), ContinuingLearner)
    return ContinuingStudent if goes_on else RefittingStudent
