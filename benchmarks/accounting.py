"""Time and memory of the privacy accountants, on one core.

Run: OMP_NUM_THREADS=1 python benchmarks/accounting.py
Times are processor seconds, so other work on the machine does not count.
"""

import argparse
import math
import resource
import time
from collections.abc import Callable

import numpy as np

from fl_strategies._util import Array
from fl_strategies.privacy.bounds.moments import data_dependent_moments, default_moments
from fl_strategies.privacy.bounds.theorems import (
    bounded_range_optimal,
    pure_heterogeneous,
    pure_optimal,
    rdp_of_pure,
)

GAMMA = 0.1
NUM_EVENTS = 100_000
DELTA = 1e-5


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Return the least processor time of several runs."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def loop_over_queries(votes: Array, gamma: float) -> list[float]:
    """Do what `data_dependent_moments` does, one query and one order after the other."""
    epsilon0 = 2 * gamma
    orders = default_moments().tolist()
    caps = (default_moments() * rdp_of_pure(epsilon0, default_moments() + 1)).tolist()
    totals = [0.0] * len(orders)
    for row in votes.tolist():
        ranked = sorted(row, reverse=True)
        scaled = [gamma * (ranked[0] - count) for count in ranked[1:]]
        q = min(sum((2 + x) / 4 * math.exp(-x) for x in scaled), 1 - 1 / len(row))
        usable = 0 < q < 1 / (1 + math.exp(epsilon0))
        for i, order in enumerate(orders):
            cost = caps[i]
            if usable:
                kept = (1 - q) * ((1 - q) / (1 - math.exp(epsilon0) * q)) ** order
                cost = min(cost, math.log(kept + q * math.exp(epsilon0 * order)))
            totals[i] += cost
    return totals


def report(label: str, value: float, unit: str, limit: str) -> None:
    print(f"{label:<58} {value:>10.3g} {unit:<3} {limit}")


def compare_with_loop(name: str, votes: Array, limit: str) -> None:
    """Print times of both ways on the same votes, and check that they agree."""
    fast = seconds(lambda: data_dependent_moments(votes, GAMMA))
    sample = votes[:: max(1, len(votes) // 500)]
    slow = seconds(lambda: loop_over_queries(sample, GAMMA)) * len(votes) / len(sample)
    totals = data_dependent_moments(sample, GAMMA)
    np.testing.assert_allclose(loop_over_queries(sample, GAMMA), totals, rtol=1e-9, atol=1e-9)
    report(f"data-dependent moments, {name}", fast, "s", "(below 5)")
    report("  a Python loop (500 queries, scaled up)", slow, "s", "")
    report("  ratio", slow / fast, "x", limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, default=1_000_000)
    num_queries = parser.parse_args().queries
    rng = np.random.default_rng(0)
    votes = rng.multinomial(50, [0.7] + [0.3 / 9] * 9, size=num_queries)
    num_orders = default_moments().size
    print(f"{num_queries} queries, 10 classes, 50 voters, {num_orders} orders to 1024")
    compare_with_loop("counts of votes", votes, "(300 or more)")
    # Fractional votes, which no election has: nothing is left to work out only once.
    compare_with_loop("no two queries alike", votes + rng.random(votes.shape), "")
    strengths, ones = rng.uniform(0, 0.01, NUM_EVENTS), np.ones(NUM_EVENTS, dtype=np.int64)
    compositions: dict[str, Callable[[], float]] = {
        "equal pure": lambda: pure_optimal(0.01, NUM_EVENTS, DELTA),
        "equal bounded-range": lambda: bounded_range_optimal(0.01, NUM_EVENTS, DELTA),
        "unequal pure": lambda: pure_heterogeneous(strengths, ones, DELTA),
    }
    for name, work in compositions.items():
        report(f"composing {NUM_EVENTS} {name} events", seconds(work), "s", "(below 1)")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    report("peak memory, with the votes themselves", peak, "MB", "(below 1000)")


if __name__ == "__main__":
    main()
