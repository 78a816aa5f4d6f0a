"""Trees of many levels whose larger children are all on one side, by all compiled loops.

Run by `tests/clients/test_boosted_trees_learner.py` with Numba's compiler switched off.
"""

import json
import sys

import numpy as np

from clients.compiled.boosting import Rule, bin_rows
from clients.tabular.boosted_trees import boost_trees, sum_of_trees
from fl_strategies._util import FloatArray

NUM_ROWS = 240


def scores() -> FloatArray:
    """Return what trees say of their rows by training and when asked, left and right."""
    steps = np.arange(NUM_ROWS, dtype=np.float32)
    x = np.stack([steps * 0, steps, -steps], axis=1)
    # The best split always takes the last 24 rows away.
    rise = (2.5 ** (steps // 24 - 9)).astype(np.float32)
    first = np.zeros(1, dtype=np.float32)
    rule = Rule(max_depth=50, learning_rate=1.0, gamma=0.0, reg_lambda=0.0)
    found = []
    for shares in (rise, rise[::-1].copy()):
        trees, trained = boost_trees(bin_rows(x, NUM_ROWS), shares[np.newaxis], first, 2, rule)
        found += [trained[0], sum_of_trees(trees, x, first)[0]]
    return np.stack(found)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(scores().tolist()))
