"""A FedKT party by this package and by a plain script: ratios, accuracy, memory.

Run: ``python -m benchmarks.parties [name ...]`` with names of `benchmarks.workloads`. Both
sides train ten teachers and two students with one thread and answer on the public rows.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import plain
from benchmarks.machine import (
    Limits,
    interleaved,
    limits,
    peak_megabytes,
    peak_so_far,
)
from benchmarks.workloads import NAMES, NUM_SPLITS, NUM_TEACHERS, SEED, Workload, make, make_all
from fl_strategies._util import IntArray, one_blas_thread
from fl_strategies.aggregation.votes import plurality
from fl_strategies.party.party import Party
from fl_strategies.strategies.fedkt.party import (
    teacher_votes,
    train_students,
    train_teachers,
)
from simulations.models import LEARNERS, _module_factory

SIDES = ("plain", "ours")
GOALS = {
    "mlp party": 12.0,
    "cnn party": 4.0,
    "xgboost party (boosted-trees)": 4.0,
    "forest party": 8.0,
}


def answers(work: Workload) -> IntArray:
    """Return the labels of the public rows by the package's own functions, (s, num_public)."""
    party = Party(
        x=work.rows,
        y=work.y,
        public=work.public_rows,
        num_classes=work.num_classes,
        learner_fn=lambda: LEARNERS[work.learner](work.options, work.problem),
    )
    teachers = train_teachers(party, NUM_SPLITS, NUM_TEACHERS, SEED)
    votes = teacher_votes(party, teachers, NUM_SPLITS)
    labels = [plurality(own, party.rng(SEED, "ties", i)) for i, own in enumerate(votes)]
    students = train_students(party, [(party.public, own) for own in labels], SEED)
    return np.stack([student.predict(party.public) for student in students])


@one_blas_thread()
def measure(
    repeats: int, *, names: Sequence[str] = NAMES, scale: float = 1.0, memory: bool = True
) -> dict[str, Any]:
    """Return a claim for each kind of party, and one for each further learner of ours."""
    torch.set_num_threads(1)
    found = limits(repeats)
    works = [work for name in names for work in make_all(name, scale)]
    claims = [_claim(work, repeats, found, memory=memory) for work in works]
    return {"limits": found.to_dict(), "claims": claims}


def _claim(work: Workload, repeats: int, found: Limits, *, memory: bool) -> dict[str, Any]:
    kept: dict[str, IntArray] = {}

    def run(side: str) -> None:
        kept[side] = (plain.answers if side == "plain" else answers)(work)

    both = [lambda: run("plain"), lambda: run("ours")]
    slow, fast = interleaved(both, repeats)
    claim = {
        "claim": work.title,
        "goal": GOALS.get(work.title),
        "ratio-cpu": slow.cpu / fast.cpu,
        "ratio-wall": slow.wall / fast.wall,
        "plain-cpu-seconds": slow.cpu,
        "ours-cpu-seconds": fast.cpu,
        **{f"{side}-accuracy": float((kept[side] == work.public_y).mean()) for side in SIDES},
        "share-of-limit": _fastest(work, found) / fast.cpu,
    }
    if memory:
        for side in SIDES:
            told = "--memory", side, "--learner", work.learner, work.name
            claim[f"{side}-megabytes"] = peak_megabytes("benchmarks.parties", *told)
    return claim


def _fastest(work: Workload, found: Limits) -> float:
    """Return the seconds that the work would take at the machine's own speed.

    A network's operations are those of its products and convolutions. A tree's are the
    bytes of the rows: it must read all of them, one byte a number, at every level.
    """
    models = NUM_SPLITS * NUM_TEACHERS
    if not work.images:
        rows = NUM_SPLITS * (len(work.x) + len(work.public))
        columns, trees = work.x.shape[1], work.options.boosting_rounds
        if work.name == "forest":  # looks at the root of the columns only
            columns, trees = math.isqrt(columns), work.options.num_trees
        read = rows * columns * trees * work.options.max_depth
        return read / (found.gigabytes_a_second * 1e9)
    trained = NUM_SPLITS * (len(work.x) + len(work.public)) * work.options.epochs
    asked = (models + NUM_SPLITS) * len(work.public)
    forwards, both = _operations(work)
    return (trained * both + asked * forwards) / (found.gflops * 1e9)


def _operations(work: Workload) -> tuple[int, int]:
    """Return the operations of one row: for an answer, and for a step of training."""
    module = _module_factory(work.learner, work.problem)()
    row = torch.zeros(1, *work.problem.row_shape)
    with FlopCounterMode(display=False) as forwards:
        module(row)
    with FlopCounterMode(display=False) as both:
        torch.autograd.backward(module(row).sum())
    return forwards.get_total_flops(), both.get_total_flops()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory", choices=SIDES, help="run one side and print its memory")
    parser.add_argument("--learner", help="ours, with --memory; omitted: the fastest")
    given = parser.parse_args()
    if not given.memory:
        print(json.dumps(measure(given.repeats, names=given.names), indent=2))
        return
    torch.set_num_threads(1)
    (name,) = given.names
    work = make(name)
    work = replace(work, learner=given.learner or work.learner)
    (plain.answers if given.memory == "plain" else answers)(work)
    print(peak_so_far())


if __name__ == "__main__":
    main()
