"""A comparison: all strategies that fit some data, on the same splits and seeds."""

from dataclasses import dataclass
from pathlib import Path

from simulations.compare_entries import Plan
from simulations.reproduce import Runner
from simulations.resuming import Experiment, Results, Say, run_missing


@dataclass(frozen=True)
class Comparison(Experiment):
    """What is compared: the settings of all entries, the seeds, and the entries."""

    plan: Plan


def run_comparison(comparison: Comparison, run: Runner, kept: Path, say: Say) -> Results:
    """Run what is missing, seed by seed; see `run_missing`."""
    entries = (None, *comparison.plan.entries)
    tasks = [comparison.task(entry, seed) for seed in comparison.seeds for entry in entries]
    return run_missing(tasks, run, kept, say)
