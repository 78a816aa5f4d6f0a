"""What noise leaves of statistics: errors against exact ones, by level, budget and products.

    PYTHONPATH=. python benchmarks/columns.py [RECORDS COLUMNS]

Columns between 0 and 1 are drawn, correlated at 0.4, with two classes; ten parties hold a tenth
of the records each. Errors are medians over columns, of one draw of the noise.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from flwr.app import Context

from clients import MomentsLearner, client_app
from fl_strategies import Column, FedStatistics, FedStatisticsOptions, Party, SumPrivacy
from fl_strategies._util import FloatArray, IntArray
from simulations.runtime.local import run_local

NUM_PARTIES: Final = 10
BUDGETS: Final = (1.0, 0.3)


def drawn(records: int, columns: int) -> tuple[FloatArray, IntArray]:
    """Return records of which a third is of the second class."""
    rng = np.random.default_rng(0)
    middle, spread = rng.uniform(0.3, 0.7, columns), rng.uniform(0.08, 0.2, columns)
    shared = rng.normal(size=(records, 1))
    y = (rng.random(records) < 0.3).astype(np.int64)
    x = 0.6 * shared + 0.8 * rng.normal(size=(records, columns)) + 0.5 * y[:, None]
    return np.clip(middle + spread * x, 0, 1), y


def described(x: FloatArray, y: IntArray, **options: Any) -> FedStatistics:
    """Return the strategy after its round."""

    def learner() -> MomentsLearner:
        return MomentsLearner(num_classes=2)

    def load_party(context: Context) -> Party:
        number = int(context.node_config["partition-id"])
        own = slice(number, None, NUM_PARTIES)
        return Party(x=x[own], y=y[own], num_classes=2, learner_fn=learner, partition_id=number)

    strategy = FedStatistics(
        columns=[Column(name=f"column {n}") for n in range(x.shape[1])],
        num_classes=2,
        learner_fn=learner,
        num_parties=NUM_PARTIES,
        options=FedStatisticsOptions(num_records=len(y), **options),
    )
    run_local(strategy, client_app(load_party), NUM_PARTIES)
    return strategy


def lines(records: int, columns: int) -> Iterator[str]:
    """Yield a line for the exact statistics, and one for each kind of noise."""
    x, y = drawn(records, columns)
    start = time.process_time()
    exact = described(x, y)
    seconds, size = time.process_time() - start, 4 * np.prod(exact._shape) / 1000
    yield f"exact: {seconds:.2f} CPU s, {size:.1f} KB a party"
    right = exact.statistics_
    unit, pairs = right.deviations[0], np.triu_indices(columns, 1)
    for level in ("central", "L2"):
        for budget in BUDGETS:
            for both in (True, False):
                privacy = SumPrivacy(
                    privacy_level=level,  # type: ignore[arg-type]
                    target_epsilon=budget,
                    accept_noise=True,
                )
                found = described(x, y, correlations=both, privacy=privacy).statistics_
                middle = (found.quantiles() - right.quantiles())[0, :, 1]
                errors = [
                    np.median(np.abs(found.means - right.means)[0] / unit),
                    np.nanmedian(np.abs(middle) / unit),
                    np.median(np.abs(found.deviations[0] / unit - 1)),
                ]
                words = "mean {:.3f}, median {:.3f}, deviation {:.1%}".format(*errors)
                if found.correlations is not None and right.correlations is not None:
                    apart = np.abs(found.correlations - right.correlations)[0][pairs]
                    words += f", correlation {np.nanmedian(apart):.2f}"
                yield f"{level}, epsilon {budget:g}: {words}, count {found.noise:.0f}"


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:3]]
    for line in lines(*(given or (30_000, 14))):
        print(line)
