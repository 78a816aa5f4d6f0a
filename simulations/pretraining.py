"""What models know before they see private records: public rows with their labels.

FedMD's authors let every party train on labelled public rows first; Sun and Lyu start all
parties from one such model.
"""

from collections.abc import Sequence

import numpy as np

from fl_strategies.core.protocols import ContinuingLearner, Learner
from fl_strategies.exceptions import InvalidParameter, require
from simulations.config import Settings
from simulations.splits import Dataset

OWNER = "Settings"


def pretrained(
    learner: Learner, data: Dataset, settings: Settings, rng: np.random.Generator
) -> ContinuingLearner:
    """Return a new learner after `pretrain-epochs` passes over the public rows."""
    epochs = getattr(settings.options, "pretrain_epochs", 0)
    require(epochs > 0, OWNER, "pretrain-epochs", "at least 1 with pretrain-once", epochs)
    if not isinstance(learner, ContinuingLearner):
        raise InvalidParameter(
            f"{OWNER}: learner must be a network, which continues learning, to train on public "
            f"rows first, got {settings.learner!r}."
        )
    if data.y_public is None:
        raise InvalidParameter(
            f"{OWNER}: joint-classes must be true for public rows of another set to have "
            f"labels, got False."
        )
    return learner.partial_fit(data.x_public, data.y_public, rng=rng, epochs=epochs)


def check_one_kind(learners: Sequence[str], final: str) -> None:
    """Raise unless all parties have the model that they are to start from."""
    alike = {*learners} == {final}
    rule = "the final-learner with pretrain-once"
    require(alike, OWNER, "learner", rule, ",".join(learners))
