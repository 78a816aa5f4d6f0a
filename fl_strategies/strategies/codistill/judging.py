"""Which agents' models contradict most others on the public rows."""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from fl_strategies.aggregation.ensembles import outputs
from fl_strategies.aggregation.outliers import outliers
from fl_strategies.arrays import Array, FloatArray
from fl_strategies.core.protocols import Learner
from fl_strategies.core.tasks import Task

MOST_ROWS: Final = 1000
LEAST_TYPICAL: Final = 0.5
"""Models are judged only where most predict about the same. Agents do not say which classes
they know, and honest ones that know different classes contradict each other."""


def find_outliers(
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
