"""The server side of AKD, AvgKD, PKD and EKD; see `fl_strategies.strategies.codistill`."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Final, Unpack

import numpy as np
from flwr.app import ArrayRecord

from fl_strategies.aggregation.ensembles import MeanEnsemble, outputs
from fl_strategies.aggregation.outliers import outliers
from fl_strategies.arrays import Array, FloatArray
from fl_strategies.core.protocols import (
    Learner,
    LearnerFactory,
    PortableLearner,
    SoftLearner,
)
from fl_strategies.core.strategy import FederationOptions
from fl_strategies.core.tasks import Task
from fl_strategies.exceptions import require
from fl_strategies.strategies.codistill.model_exchange import Chain, join_models
from fl_strategies.strategies.codistill.options import CodistillOptions
from fl_strategies.strategies.codistill.party import KEPT, NUM_MODELS_REFUSED
from fl_strategies.strategies.codistill.relay import ModelRelay, RelayState
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Metrics, Scalar

logger = logging.getLogger("flwr.fl_strategies")

MOST_ROWS: Final = 1000
LEAST_TYPICAL: Final = 0.5
"""Models are judged only where most predict about the same. Agents do not say which classes
they know, and honest ones that know different classes contradict each other."""


@dataclass(kw_only=True)
class CodistillState(RelayState):
    """Also the agents that sent a model last."""

    kinds: ClassVar[tuple[type, ...]] = (*RelayState.kinds, Chain)

    answered: set[int] = field(default_factory=set)


class Codistillation(ModelRelay):
    """Base of the four schemes: the server relays models and learns nothing itself.

    Leaves the party
        Its model of every round that it takes part in, to the server and by it to other
        agents, as arrays; nothing is unpickled. A model that contains its training rows
        carries them out of the party; kernel regression refuses to, unless it was told
        ``reveal_rows=True``; the thresholds of XGBoost's trees are values of single records
        (those of forests lie between two). An exchange of predictions instead of models is
        not offered: models are asked about the receiver's inputs, which would have to leave
        the receiver.
    Guarantee
        None: epsilon is infinite. Only if every agent trains with differential privacy,
        by a learner whose `distill` adds to its `privacy_events` (``DPTorchLearner`` with
        ``private_distill=True``), each record is protected against the server and all
        agents, and the events of all rounds add up, also of those whose model got lost on
        its way. `ledger_` is that of the agent whose events, as the agents report them,
        cost most. Not covered: rows that agents only evaluate on, the number of records,
        settings chosen on private data.

    Parameters
    ----------
    num_classes : int
        Length of the federation's class list; in regression the number of outputs.
    learner_fn : factory, optional
        How the server rebuilds models named `learner_name`.
    learner_name : str
    model_fns : mapping of learner name to factory, optional
        Factories for the other learners of the federation. A model is relayed only if the
        server itself can rebuild it and it scores some rows; one without a factory is refused.
    public : (num_public, ...), optional
        Not learned from. If it is given, agents that hold other public rows are excluded:
        that mostly means other preprocessing; and models that contradict most others on
        them, where most agree, are not relayed.
    row_shape : tuple of int, optional
        Shape of a record, if there are no public rows to tell: a row of zeros is scored.
    task : "single-label" or "regression"
    options : CodistillOptions, optional
    **federation
        See `KnowledgeStrategy`.

    Attributes
    ----------
    models_ : dict of partition id to Learner
        The newest model of every agent.

    Notes
    -----
    Agents are ordered by partition id, which the server learns from the first round.
    Parties need a factory, their own or in `Party.catalogue`, for every learner that they
    are to learn from. The server keeps the newest model of every agent and no older one.
    A model may have its share of the largest message that parties read, so that all models
    together reach everybody.
    """

    options_type = CodistillOptions
    usual_rounds: ClassVar[int] = 3
    central: ClassVar[bool] = False
    party_learner_needs = (SoftLearner, PortableLearner)
    state_type = CodistillState
    state: CodistillState

    def __init__(
        self,
        *,
        num_classes: int,
        learner_fn: LearnerFactory | None = None,
        learner_name: str = "learner",
        model_fns: Mapping[str, LearnerFactory] | None = None,
        public: Array | None = None,
        row_shape: Sequence[int] | None = None,
        task: Task = "single-label",
        options: CodistillOptions | None = None,
        **federation: Unpack[FederationOptions],
    ) -> None:
        super().__init__(
            num_classes=num_classes,
            learner_fn=learner_fn,
            learner_name=learner_name,
            model_fns=model_fns,
            public=public,
            row_shape=row_shape,
            task=task,
            **federation,
        )
        owner = type(self).__name__
        require(task != "multi-label", owner, "task", "single-label or regression", task)
        self.options = options or CodistillOptions()
        target_loss = self.options.target_loss
        fits = task != "regression" or target_loss == "mse"
        require(fits, owner, "target_loss", "'mse' in regression", target_loss)
        self.outliers_: tuple[int, ...] = ()

    def party_config(self) -> dict[str, Scalar]:
        """Return the problem, and the loss."""
        return {**super().party_config(), **self.options.to_config()}

    def finish(self) -> tuple[ArrayRecord | None, Metrics]:
        """Keep the new models, except those of outliers, and what they cost."""
        replies = self.replies
        new = {reply.partition_id: reply.knowledge.model for reply in replies}
        self.outliers_ = self._find_outliers(new)
        self.record_releases()
        outliers = {*self.outliers_}
        credible = {agent: model for agent, model in new.items() if agent not in outliers}
        self.state.newest |= credible
        if credible:
            self.state.answered = {*credible}
        refused = sum(reply.metrics.get(NUM_MODELS_REFUSED, 0) for reply in replies)
        return None, {NUM_MODELS_REFUSED: refused, keys.NUM_OUTLIERS: len(outliers)}

    def _find_outliers(self, new: Mapping[int, Knowledge]) -> tuple[int, ...]:
        """Return which agents' new models contradict the newest ones of most others."""
        models = {
            agent: partial(self._rebuild, model)
            for agent, model in {**self.state.newest, **new}.items()
        }
        if self._public is None or not models:
            return ()
        found = _contradicting(models, self._public[:MOST_ROWS], self.task)
        outliers = tuple(agent for agent in found if agent in new)
        if outliers:
            logger.warning(
                "%s does not relay the models of agents %s, which contradict most others.",
                self.name,
                outliers,
            )
        return outliers

    @property
    def _agents(self) -> dict[int, int]:
        """The agents by node id, longest known first."""
        return {node: agent for node, (_, agent) in self.members.items()}

    @property
    def model_(self) -> Learner:
        """The scheme's predictor, rebuilt from the models that the server holds."""
        parts = self._parts()
        return self._combine(parts) if parts else super().model_

    def _parts(self) -> list[Knowledge]:
        """Return the models that `model_` is made of."""
        return [self.state.newest[agent] for agent in sorted(self.state.answered)]

    def _combine(self, parts: Sequence[Knowledge]) -> Learner:
        members = [self._rebuild(part) for part in parts]
        return MeanEnsemble(members, num_classes=self.num_classes, task=self.task)

    def knowledge_for(self, node_id: int) -> Knowledge | None:
        """Return the other agents' models of the last round."""
        own = self._agents.get(node_id)
        others = [
            self.state.newest[agent] for agent in sorted(self.state.answered) if agent != own
        ]
        return join_models(others) if others else None

    def delivery_for(self, node_id: int) -> Knowledge | None:
        """Ask agents whose model was accepted to measure it; they have kept it."""
        return None if node_id in self.rejected_ else Knowledge(KEPT, {})


def _contradicting(
    models: Mapping[int, Callable[[], Learner]], rows: Array, task: Task
) -> tuple[int, ...]:
    """Return the agents, of those whose models are given, that contradict most others."""
    agents = sorted(models)
    said = [_outputs(models[agent], rows, task) for agent in agents]
    found = outliers(
        lambda position: said[position],
        np.ones((len(said), said[0].shape[1])),
        np.ones(len(said), dtype=np.int64),
        least_typical=LEAST_TYPICAL,
    )
    return tuple(agents[position] for position in found)


def _outputs(make: Callable[[], Learner], rows: Array, task: Task) -> FloatArray:
    model = make()
    try:
        return outputs(model, rows, task)
    except Exception:  # a hostile model may make a learner raise anything
        return np.zeros((len(rows), model.num_classes))
