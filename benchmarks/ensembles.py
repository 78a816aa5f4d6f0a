"""Speed-up of fitting ten networks at once over fitting one after the other.

Run: ``python benchmarks/ensembles.py``. Ratios of processor time within one run; absolute
times depend on the machine.
"""

import time
from collections.abc import Callable
from functools import partial

import numpy as np

from clients import TorchLearner
from simulations.models import multilayer_perceptron

NUM_MODELS, NUM_ROWS, NUM_FEATURES, NUM_CLASSES, EPOCHS, REPEATS = 10, 1200, 784, 10, 3, 5


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    rng = np.random.default_rng(0)
    sets = [
        (
            rng.normal(size=(NUM_ROWS, NUM_FEATURES)).astype(np.float32),
            rng.integers(NUM_CLASSES, size=NUM_ROWS),
        )
        for _ in range(NUM_MODELS)
    ]
    module_fn = partial(multilayer_perceptron, NUM_FEATURES, NUM_CLASSES)
    learner = TorchLearner(module_fn, num_classes=NUM_CLASSES, epochs=EPOCHS)

    def generators() -> list[np.random.Generator]:
        return [np.random.default_rng(i) for i in range(NUM_MODELS)]

    def together() -> object:
        return learner.fit_many(sets, rngs=generators())

    def one_by_one() -> object:
        return [learner.fit(x, y, rng=g) for (x, y), g in zip(sets, generators(), strict=True)]

    together()  # the first use of an optimiser imports half of torch
    pairs = [(cpu_seconds(one_by_one), cpu_seconds(together)) for _ in range(REPEATS)]
    for loop, stacked in pairs:
        print(f"loop {loop:.2f} s, stacked {stacked:.2f} s, ratio {loop / stacked:.2f}")
    print(f"median ratio {np.median([loop / stacked for loop, stacked in pairs]):.2f}")


if __name__ == "__main__":
    main()
