"""SCAFFOLD: averages of weights whose parties know where the others are going.

    round r   server   sends the model x and its control variate c
              party    takes K plain steps y <- y - local_rate (g(y) + c - c_i) from y = x,
                       sends y and c_i' - c_i, and keeps
                       c_i' = c_i - c + (x - y) / (K local_rate)
              server   x <- x + server_rate (mean of y - x)
                       c <- c + (share of parties that answered) (mean of c_i' - c_i)

A control variate is the mean of the gradients that a party, or all of them, went along.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Final

import numpy as np
from flwr.app import ConfigRecord

from fl_strategies.extend import (
    Array,
    ArraysField,
    Correction,
    FlowerStrategy,
    GuidedLearner,
    Knowledge,
    KnowledgeMismatch,
    Learner,
    LocalWeights,
    Metrics,
    Objective,
    Party,
    PartyState,
    StartingLearner,
    WeightsOptions,
    WeightsParty,
    WeightsState,
    option,
    require_guided,
)
from fl_strategies.strategies.weights.options import MODEL
from fl_strategies.strategies.weights.party import require_starting
from fl_strategies.strategies.weights.restraint import (
    LARGEST_WEIGHT,
    check_sizes,
    layout_of,
    restrained,
)
from fl_strategies.wire.knowledge import join_arrays, part_arrays

Arrays = Mapping[str, Array]
LARGEST_CONTROL: Final = LARGEST_WEIGHT / 4
"""Changes of control variates of this size are below `LARGEST_WEIGHT`, too."""
LEAST_RATE: Final = 1e-6
MOST_RATE: Final = 100.0


@dataclass(frozen=True, kw_only=True)
class ScaffoldOptions(WeightsOptions):
    """Options of `Scaffold`; the others are those of `WeightsOptions`.

    Parameters
    ----------
    local_rate : float
        The paper's local step size. Parties take plain steps of gradient descent, since the
        control variates are means of gradients only then: batch size and weight decay are
        the learner's own, its optimizer, schedule and learning rate are not used.
    server_rate : float
        The paper's global step size, 1 in its experiments.
    """

    owner: ClassVar[str] = "Scaffold"

    local_rate: float = option(
        0.1, "step size of a party's plain descent", least=LEAST_RATE, most=MOST_RATE
    )
    server_rate: float = option(
        1.0, "step size of the server towards the mean", above=0, most=MOST_RATE
    )


@dataclass(kw_only=True)
class ScaffoldState(WeightsState):
    """Also the server's control variate; nothing stands for zeros."""

    control: dict[str, Array] = field(default_factory=dict)


class ScaffoldPartyState(PartyState):
    """Also the party's own control variate, which never leaves it."""

    control = ArraysField("scaffold-control")


@dataclass(frozen=True, slots=True)
class ControlledWeights(LocalWeights):
    """Also by how much the party's control variate has changed."""

    change: Arrays


def numbers_of(arrays: Arrays) -> dict[str, Array]:
    """Return the arrays that gradients can move; counters of batches are none."""
    return {name: array for name, array in arrays.items() if array.dtype.kind == "f"}


class ScaffoldParty(WeightsParty):
    """The party's role: descend as the others do, too, and remember its own way."""

    def train(
        self, party: Party, received: Knowledge | None, config: ConfigRecord, state: PartyState
    ) -> tuple[Knowledge, Metrics]:
        """Return the weights after training, and the change of the control variate."""
        if received is None:
            raise KnowledgeMismatch(f"{party.owner}: a model must be given, got none.")
        model, control = part_arrays(received.arrays, 2)
        if layout_of(control) != layout_of(numbers_of(model)):
            raise KnowledgeMismatch(
                f"{party.owner}: the control variate must have the model's layout, got another."
            )
        check_sizes(control)  # what is kept of it would spoil all later rounds
        rate = ScaffoldOptions.received(config).local_rate
        kept = ScaffoldPartyState(state.records)
        own = kept.control or {}
        if layout_of(own) != layout_of(control):
            own = {name: np.zeros_like(array) for name, array in control.items()}
        correction = {name: control[name] - own[name] for name in control}
        objective = Objective(terms=(Correction(correction),), step_size=rate)
        start = Knowledge(MODEL, model, received.meta)
        learned, sent, metrics = self.learn(party, start, config, state, objective)
        way = rate * max(require_guided(party.owner, learned).steps_taken, 1)
        change = {
            name: _mean_step(model[name], sent.arrays[name], way) - control[name]
            for name in control
        }
        kept.control = {name: own[name] + change[name] for name in change}
        return replace(sent, arrays=join_arrays([sent.arrays, change])), metrics


def _mean_step(before: Array, after: Array, way: float) -> Array:
    """Return the mean of the gradients that led from one array to another (option II)."""
    with np.errstate(over="ignore"):
        mean = (before - after) / before.dtype.type(way)
    return np.asarray(np.clip(mean, -LARGEST_CONTROL, LARGEST_CONTROL))


class Scaffold(FlowerStrategy):
    """SCAFFOLD, with control variates of option II that parties keep.

    Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging
    for Federated Learning (ICML 2020), Algorithm 1. Parties whose records differ drift apart
    in many local steps; each step is corrected by the difference of what all parties descend
    along, and what this one does.

    Leaves the party
        In every round the weights of its model after training, the change of its control
        variate, which follows from these weights, and its number of records.
    Guarantee
        That of `FedAvg`: none, unless every party trains with differential privacy. The
        control variates are made of weights that have been paid for, and cost nothing more.

    Parameters
    ----------
    num_classes, learner_fn, learner_name, task, public
        See `FlowerStrategy`. The learner must take an `Objective`, and its first weights
        must be known before there are records; `TorchLearner` and `DPTorchLearner` do.
    options : ScaffoldOptions, optional
    **federation
        See `KnowledgeStrategy`. With `fraction_train` the control variates of parties that
        are not asked stay as they are, as in the paper.

    Notes
    -----
    Deviations: weights travel whole, not as differences, so that a first round is FedAvg's to
    the bit; means are by numbers of records, as FedAvg's are, which is the paper's mean for
    parties of equal size. Unless `restrain` is off, both are limited as in `FedAvg`.
    A party that loses its state starts again from a control variate of zeros.
    """

    name: ClassVar[str] = "scaffold"
    options_type = ScaffoldOptions
    state_type = ScaffoldState
    party_learner_needs = final_learner_needs = (GuidedLearner, StartingLearner)
    options: ScaffoldOptions
    state: ScaffoldState

    def require_learner(self, learner: Learner) -> StartingLearner:
        """Return the learner if it takes corrections, and first weights can be drawn."""
        require_guided("Scaffold", learner)
        return require_starting("Scaffold", learner)

    def lesson(self) -> Knowledge:
        """Return the present model with the server's control variate."""
        model = self._present_model()
        if not self.state.control:
            self.state.control = {n: np.zeros_like(a) for n, a in numbers_of(model).items()}
        return Knowledge(MODEL, join_arrays([model, self.state.control]), self._model_meta)

    def check(self, knowledge: Knowledge) -> ControlledWeights:
        """Check one party's weights, and the change of its control variate."""
        arrays, change = part_arrays(knowledge.arrays, 2)
        weights = super().check(replace(knowledge, arrays=arrays))
        check_sizes(change)
        if layout_of(change) != layout_of(self.state.control):
            raise KnowledgeMismatch(
                "Reply: the control variate must have the model's layout, got another."
            )
        return ControlledWeights(arrays, weights.num_records, weights.charges, change)

    def _aggregate(
        self, nodes: Sequence[int], weights: Sequence[LocalWeights], model: Arrays
    ) -> dict[str, Array]:
        """Return the next model, and note the next control variate."""
        arrays = super()._aggregate(nodes, weights, model)
        rate = self.options.server_rate
        if rate != 1.0:  # a mean that is taken as it is stays the same to the bit
            moved = {n: model[n] + rate * (arrays[n] - model[n]) for n in numbers_of(arrays)}
            arrays |= {name: array.astype(model[name].dtype) for name, array in moved.items()}
        self.state.control = self._next_control(weights, model)
        return arrays

    def _next_control(self, weights: Sequence[LocalWeights], model: Arrays) -> dict[str, Array]:
        parts = [part for part in weights if isinstance(part, ControlledWeights)]
        changes = [replace(part, arrays=part.change) for part in parts]
        if self.options.restrain:
            changes, _ = restrained(changes)
        share = min(len(parts) / self.num_parties, 1.0)
        sizes = np.array([part.num_records for part in parts], dtype=np.float64)
        shares = share * sizes / sizes.sum()
        moved = {
            name: before + sum(p * c.arrays[name] for p, c in zip(shares, changes, strict=True))
            for name, before in self.state.control.items()
        }
        # Two parties have no middle: what one of them adds in many rounds must not overflow.
        return {
            name: np.clip(array, -LARGEST_CONTROL, LARGEST_CONTROL).astype(model[name].dtype)
            for name, array in moved.items()
        }
