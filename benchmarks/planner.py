"""The planner's expected share of right labels, compared with the measured one.

Run: ``python benchmarks/planner.py [--seeds S ...] [--draws N] [--data D ...] [--json OUT]``
with FL_STRATEGIES_DATA set for Adult.

A federation is simulated up to the release: FedHistogram-L2's counts and FedRegression-L2's
sums of the records of all parties, FedKT-L2's votes of all teachers. Leads are read off these,
the planner plans with them, and then noise is drawn several times and labels are compared with
those without noise.
The same with the planner's default margins shows how far these are off. Margins of private
records are private themselves: nobody but a simulation can state them like this.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fl_strategies import FedHistogram, FedKT, FedRegression
from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.privacy import DEFAULT_MARGINS, Plan, plan
from fl_strategies.privacy.noise import choose_queries
from fl_strategies.strategies.fedkt.party import (
    teacher_counts,
    teacher_votes,
    train_teachers,
)
from fl_strategies.strategies.sums.server import SumStrategy
from simulations.config import Settings
from simulations.federation import Federation, load_federation
from simulations.results.report import aligned

EPSILONS = {"adult": (0.3, 1.0, 3.0), "digits": (1.0, 2.0, 4.0, 8.0)}
PARTIES = {"adult": 20, "digits": 10}


@dataclass(frozen=True)
class Measured:
    """Shares of right labels: measured, expected by own and by default margins."""

    found: Plan
    by_default: Plan
    right: float


def settings_of(strategy: str, data: str, epsilon: float, seed: int, **more: Any) -> Settings:
    """Return the settings of a run that says its epsilon and nothing else."""
    return Settings.from_run_config(
        {
            "strategy": strategy,
            "data": data,
            "num-parties": PARTIES[data],
            "target-epsilon": epsilon,
            "accept-noise": True,
            "seed": seed,
            **more,
        }
    )


def leads(counts: Array) -> FloatArray:
    """Return by how much the largest count of every row leads each other class."""
    largest = np.sort(counts, axis=1)[:, ::-1].astype(np.float64)
    return np.asarray(largest[:, :1] - largest[:, 1:])


def both_plans(
    name: str, federation: Federation, epsilon: float, margins: FloatArray
) -> tuple[Plan, Plan]:
    """Return what the planner says with these margins and with its own."""
    sizes = list(map(len, federation.rows))
    first, second = (
        plan(
            target_epsilon=epsilon,
            num_parties=len(sizes),
            num_records=sum(sizes) // len(sizes),
            num_classes=federation.dataset.num_classes,
            num_public=len(federation.dataset.x_public),
            num_columns=federation.dataset.num_features,
            margins=given,
        )[name]
        for given in (margins.tolist(), DEFAULT_MARGINS)
    )
    return first, second


def histogram(data: str, epsilon: float, seed: int, draws: int) -> Measured:
    """Compare labels of public rows by noisy and by exact counts of their cells."""
    federation, strategy, parties, noisy = sums("fedhistogram", data, epsilon, seed)
    if not isinstance(strategy, FedHistogram):
        raise TypeError("the settings of this benchmark are FedHistogram's")
    cells, public = strategy._summary, strategy.public
    exact = cells.counts_of(public, np.sum(parties, axis=0))
    margins = leads(exact) / (sum(map(len, federation.rows)) / cells.num_cells)
    drawn = (cells.counts_of(public, noisy()).argmax(axis=1) for _ in range(draws))
    same = [(labels == exact.argmax(axis=1)).mean() for labels in drawn]
    found = both_plans("fedhistogram L2", federation, epsilon, margins)
    return Measured(*found, float(np.mean(same)))


def regression(data: str, epsilon: float, seed: int, draws: int) -> Measured:
    """Compare labels of public rows by the regressions of noisy and of exact sums."""
    federation, strategy, parties, noisy = sums("fedregression", data, epsilon, seed)
    if not isinstance(strategy, FedRegression):
        raise TypeError("the settings of this benchmark are FedRegression's")
    noise = strategy._summed(strategy._mechanism)
    exact = strategy._shares(np.sum(parties, axis=0), noise, len(parties))
    drawn = (strategy._shares(noisy(), noise, len(parties)).argmax(1) for _ in range(draws))
    same = [(labels == exact.argmax(axis=1)).mean() for labels in drawn]
    found = both_plans("fedregression L2", federation, epsilon, leads(exact))
    return Measured(*found, float(np.mean(same)))


def sums(
    name: str, data: str, epsilon: float, seed: int
) -> tuple[Federation, Any, list[IntArray], Callable[[], FloatArray]]:
    """Return a federation, its strategy, exact sums of parties, and a draw of their total."""
    federation = load_federation(settings_of(name, data, epsilon, seed))
    strategy, train = federation.strategy(), federation.dataset
    if not isinstance(strategy, SumStrategy) or strategy._mechanism is None:
        raise TypeError("the settings of this benchmark are those of noisy sums")
    summary, mechanism = strategy._summary, strategy._mechanism
    parties = [
        summary.of_records(
            train.x_train[rows], train.y_train[rows], train.num_classes, train.task
        )
        for rows in federation.rows
    ]

    def noisy() -> FloatArray:
        return np.asarray(np.sum([mechanism.release(own).values for own in parties], axis=0))

    return federation, strategy, parties, noisy


@lru_cache
def votes_of(data: str, seed: int, num_teachers: int) -> Sequence[IntArray]:
    """Return the teachers' votes of every party, (num_public, num_classes) each."""
    settings = settings_of("fedkt", data, 1.0, seed, **{"privacy-level": "L2"})
    federation = load_federation(settings)
    found = []
    for number in range(settings.num_parties):
        party = federation.party(number)
        size = 1, min(num_teachers, len(party.y))
        teachers = train_teachers(party, *size, seed)
        counts = teacher_counts(party, *size, seed)
        found.append(teacher_votes(party, teachers, 1, counts)[0])
    return found


def votes(data: str, epsilon: float, seed: int, draws: int) -> Measured:
    """Compare labels that parties release for their queries with those without noise."""
    settings = settings_of("fedkt", data, epsilon, seed, **{"privacy-level": "L2"})
    federation = load_federation(settings)
    strategy = federation.strategy()
    if not isinstance(strategy, FedKT) or strategy.options.privacy is None:
        raise TypeError("the settings of this benchmark are FedKT's")
    options, queries = strategy.options, strategy.num_queries
    mechanism, teachers = strategy._mechanism(options.privacy), options.num_teachers or 1
    rows = choose_queries(len(strategy.public), queries, seed)
    counts = np.concatenate([own[rows] for own in votes_of(data, seed, teachers)])
    rng, same = np.random.default_rng(seed), []
    for _ in range(draws):
        # Of classes with equally many votes, each would be the label as often.
        broken = (counts + rng.random(counts.shape) / 2).argmax(axis=1)
        same.append((mechanism.release(counts, None).values == broken).mean())
    found = both_plans("fedkt L2", federation, epsilon, leads(counts) / teachers)
    return Measured(*found, float(np.mean(same)))


def measurements(
    names: Sequence[str], seeds: Sequence[int], draws: int
) -> Iterator[dict[str, Any]]:
    """Yield one row for every set, strategy and epsilon: means over the seeds."""
    for data in names:
        for measure in (histogram, regression, votes):
            for epsilon in EPSILONS[data]:
                runs = [measure(data, epsilon, seed, draws) for seed in seeds]
                found = [run.found for run in runs]
                yield {
                    "data": data,
                    "plan": found[0].strategy,
                    "epsilon": epsilon,
                    "asked": f"{found[0].num_asked} {found[0].asked}",
                    "expected": 100 * np.mean([one.right for one in found]),
                    "measured": 100 * np.mean([run.right for run in runs]),
                    "largest difference": 100
                    * max(abs(run.found.right - run.right) for run in runs),
                    "by default margins": 100 * np.mean([run.by_default.right for run in runs]),
                    "works": found[0].works,
                }


def main() -> None:
    """Print a row as soon as it is known, and all as a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="+", choices=list(EPSILONS), default=list(EPSILONS))
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1))
    parser.add_argument("--draws", type=int, default=50, help="noise draws a seed")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for row in measurements(options.data, options.seeds, options.draws):
        results.append(row)
        print(json.dumps(row), flush=True)
    cells = [
        [f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()]
        for row in results
    ]
    print(aligned(list(results[0]), cells))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
