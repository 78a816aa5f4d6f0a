"""What the settings of a `TorchLearner` must be."""

import math
from typing import Any, get_args

from clients.torch_training import OWNER, OptimizerName, Schedule, check_count
from fl_strategies.core.tasks import Task
from fl_strategies.exceptions import require


def check_settings(learner: Any) -> None:
    """Raise `InvalidParameter` for the first setting of a learner that cannot be used."""
    require(callable(learner.module_fn), OWNER, "module_fn", "callable", learner.module_fn)
    usable = learner.augment is None or callable(learner.augment)
    require(usable, OWNER, "augment", "callable", learner.augment)
    for name, kind in (("task", Task), ("optimizer", OptimizerName), ("schedule", Schedule)):
        options, given = get_args(kind), getattr(learner, name)
        require(given in options, OWNER, name, f"one of {', '.join(options)}", given)
    check_count("num_classes", learner.num_classes, 2 if learner.task == "single-label" else 1)
    for name in ("epochs", "batch_size"):
        check_count(name, getattr(learner, name))
    check_count("patience", learner.patience, least=0)
    rate, decay = learner.learning_rate, learner.weight_decay
    require(0 < rate < math.inf, OWNER, "learning_rate", "finite and above 0", rate)
    require(0 <= decay < math.inf, OWNER, "weight_decay", "finite and at least 0", decay)
    for name in ("momentum", "validation_share"):
        share = getattr(learner, name)
        require(0 <= share < 1, OWNER, name, "at least 0 and below 1", share)
    stops = learner.patience > 0 or learner.validation_share == 0
    require(stops, OWNER, "patience", "at least 1 with a validation_share", learner.patience)
    last = learner.final_learning_rate
    falls = last is None or 0 <= last <= rate
    require(falls, OWNER, "final_learning_rate", "between 0 and learning_rate", last)
