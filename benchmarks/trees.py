"""A FedKT party's trees against the usual loop: one model after another, by its library.

Run: ``python benchmarks/trees.py``. Ten teachers on a party's records and two students on
the public rows, with all answers on the public rows. Both sides are measured in turn in one
run, in processor seconds; accuracies are those of the students on rows cut from the private
part. The loop uses scikit-learn's and XGBoost's own classifiers with one thread; a case has the
name of our learner.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from fl_strategies._util import Array, IntArray, import_library
from fl_strategies.learners import Learner, LearnerFactory, fit_ensemble
from simulations.data.sets import Request, load_dataset
from simulations.models import ModelOptions, learner_factory

NUM_SPLITS, NUM_TEACHERS, NUM_PARTIES, VALIDATION_ROWS = 2, 5, 50, 4000
ADULT = ModelOptions(num_trees=100, max_depth=6)
COD_RNA = ModelOptions(
    boosting_rounds=100, max_depth=6, boosting_learning_rate=0.05, boosting_gamma=1.0
)


class Case(NamedTuple):
    """Data, our learner and the classifier that the loop uses instead."""

    data: str
    learner: str
    settings: ModelOptions
    classifier: Callable[[int], Any]


class Work(NamedTuple):
    """Data of a party: its teachers' sets, public rows, and rows that test its students."""

    sets: list[tuple[Array, IntArray]]
    public: Array
    unseen: Array
    truth: IntArray


def sklearn_forest(seed: int) -> Any:
    library = import_library("random-forest", "sklearn.ensemble", "sklearn")
    return library.RandomForestClassifier(100, max_depth=6, n_jobs=1, random_state=seed)


def xgboost_classifier(seed: int) -> Any:
    library = import_library("xgboost", "xgboost", "xgboost")
    return library.XGBClassifier(
        n_estimators=100,
        max_depth=6,
        learning_rate=0.05,
        gamma=1.0,
        n_jobs=1,
        random_state=seed,
    )


CASES = {
    "forest": Case("adult", "forest", ADULT, sklearn_forest),
    "boosted-trees": Case("cod-rna", "boosted-trees", COD_RNA, xgboost_classifier),
    "xgboost": Case("cod-rna", "xgboost", COD_RNA, xgboost_classifier),
    "lightgbm": Case("cod-rna", "lightgbm", COD_RNA, xgboost_classifier),
}


def party_work(data: str, seed: int) -> Work:
    """Return the work of an average party; records are dealt evenly."""
    rows = load_dataset(data, Request(rng=np.random.RandomState(seed)))
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(rows.x_train))
    unseen, private = order[:VALIDATION_ROWS], order[VALIDATION_ROWS:]
    own = private[: len(rows.x_train) // NUM_PARTIES]
    dealt = [
        part
        for _ in range(NUM_SPLITS)
        for part in np.array_split(rng.permutation(own), NUM_TEACHERS)
    ]
    sets = [(rows.x_train[part], rows.y_train[part]) for part in dealt]
    return Work(sets, rows.x_public, rows.x_train[unseen], rows.y_train[unseen])


def votes(labels: list[IntArray]) -> list[IntArray]:
    """Return what the teachers of each partition say by plurality; both sides count alike."""
    per_split = np.stack(labels).reshape(NUM_SPLITS, NUM_TEACHERS, -1)
    return [
        np.asarray(2 * own.sum(axis=0) > NUM_TEACHERS).astype(np.int64) for own in per_split
    ]


def plain_loop(case: Case, work: Work, seed: int) -> list[Any]:
    """Fit and ask one model after another."""
    teachers = [case.classifier(seed + i).fit(x, y) for i, (x, y) in enumerate(work.sets)]
    labels = votes([teacher.predict(work.public) for teacher in teachers])
    students = [case.classifier(seed + i).fit(work.public, own) for i, own in enumerate(labels)]
    for student in students:
        student.predict(work.public)
    return students


def ours(learner_fn: LearnerFactory, work: Work, seed: int) -> list[Learner]:
    """Do the same as a party of FedKT does."""
    rngs = [np.random.default_rng([seed, i]) for i in range(len(work.sets))]
    teachers = fit_ensemble(learner_fn, work.sets, rngs=rngs)
    labels = votes([teacher.predict(work.public) for teacher in teachers])
    sets = [(work.public, own) for own in labels]
    students = fit_ensemble(learner_fn, sets, rngs=rngs[: len(sets)])
    for student in students:
        student.predict(work.public)
    return students


def measure_case(case: Case, repeats: int) -> dict[str, Any]:
    """Return processor seconds and accuracies of both sides, measured in turn."""
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    accuracy: dict[str, list[float]] = {"plain": [], "ours": []}
    for repeat in range(repeats):
        seed = 3 + repeat
        work = party_work(case.data, seed)
        learner_fn = learner_factory(
            case.learner,
            row_shape=work.public.shape[1:],
            num_classes=2,
            settings=case.settings,
        )
        sides: dict[str, Callable[[], list[Any]]] = {
            "plain": lambda work=work, seed=seed: plain_loop(case, work, seed),
            "ours": lambda work=work, seed=seed, make=learner_fn: ours(make, work, seed),
        }
        for name, side in sides.items():
            start = time.process_time()
            students = side()
            seconds[name].append(time.process_time() - start)
            hits = [(each.predict(work.unseen) == work.truth).mean() for each in students]
            accuracy[name].append(float(np.mean(hits)))
    ratios = [plain / own for plain, own in zip(seconds["plain"], seconds["ours"], strict=True)]
    return {
        "data": case.data,
        "plain-cpu-seconds": statistics.median(seconds["plain"]),
        "cpu-seconds": statistics.median(seconds["ours"]),
        "ratio": statistics.median(ratios),
        "plain-accuracy": statistics.mean(accuracy["plain"]),
        "accuracy": statistics.mean(accuracy["ours"]),
    }


def measure(repeats: int) -> dict[str, Any]:
    """Return all cases by name; a repeat is a seed from 3 on."""
    for case in CASES.values():
        measure_case(case, 1)  # imports and first uses belong to nobody
    return {name: measure_case(case, repeats) for name, case in CASES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    print(json.dumps(measure(parser.parse_args().repeats), indent=2))


if __name__ == "__main__":
    main()
