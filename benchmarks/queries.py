"""Number of noisy labels for FedKT: validation accuracy by number of queries.

Run: ``python benchmarks/queries.py --data cod-rna --parties 20 --level L2 --seeds 3 4 5`` with
FL_STRATEGIES_DATA set. A fifth of every party's records is kept for validation; no test row
is looked at. The shares in `fl_strategies.privacy.planning` were chosen by it.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fl_strategies import VotePrivacy
from fl_strategies._util import Array, IntArray
from fl_strategies.aggregation.votes import corrected_labels, count_votes, plurality
from fl_strategies.learners import Learner, LearnerFactory
from fl_strategies.privacy.planning import MOST_TEACHERS
from simulations.config import Settings
from simulations.federation import Federation, load_federation

QUERIES = (10, 20, 40, 80, 160, 320, 640, 1280, 2560)
EPSILONS = (0.3, 1.0, 3.0)
MOST_JUDGED = 4000


class Trial:
    """One federation whose parties have set a fifth of their records aside."""

    def __init__(self, data: str, num_parties: int, level: str, seed: int) -> None:
        config: dict[str, Any] = {"strategy": "fedkt", "data": data, "seed": seed}
        config |= {"num-parties": num_parties, "min-records": 25 if num_parties <= 20 else 10}
        self.federation: Federation = load_federation(Settings.from_run_config(config))
        self.level, self.seed, self.rng = level, seed, np.random.default_rng(seed)
        dealt = [self.rng.permutation(rows) for rows in self.federation.rows]
        self.kept = [rows[len(rows) // 5 :] for rows in dealt]
        judged = np.concatenate([rows[: len(rows) // 5] for rows in dealt])
        self.judged = self.rng.permutation(judged)[:MOST_JUDGED]
        self.num_votes = MOST_TEACHERS if level == "L2" else num_parties
        teachers = MOST_TEACHERS if level == "L2" else 1
        self.votes = [self._votes(party, teachers) for party in range(num_parties)]

    def _factory(self, party: int) -> LearnerFactory:
        names = self.federation.learner_names
        return self.federation.factory(names[party % len(names)])

    def _votes(self, party: int, num_teachers: int) -> IntArray:
        data, labels = self.federation.dataset, []
        for rows in np.array_split(self.kept[party], num_teachers):
            model = self._fit(self._factory(party), data.x_train[rows], data.y_train[rows])
            held = np.bincount(data.y_train[rows], minlength=data.num_classes)
            logits = np.nan_to_num(model.logits(data.x_public), neginf=-100, posinf=100)
            labels.append(corrected_labels(logits, held.astype(np.float64)))
        return count_votes(np.stack(labels), data.num_classes)

    def _fit(self, factory: LearnerFactory, x: Array, y: IntArray) -> Learner:
        return factory().fit(x, y, rng=np.random.default_rng(self.seed))

    def accuracy(self, epsilon: float, num_queries: int) -> tuple[float, float]:
        """Return the final model's accuracy, and how many scales a unanimous vote is."""
        data = self.federation.dataset
        party_level = self.level == "L1"
        privacy = VotePrivacy(level="L1" if party_level else "L2", target_epsilon=epsilon)
        mechanism = privacy.mechanism(
            unit="party" if party_level else "example",
            sensitivity=1,
            num_classes=data.num_classes,
            num_queries=num_queries,
        )
        public, final = data.x_public, self.federation.final_factory()
        rows = self.rng.permutation(len(public))[:num_queries]
        if party_level:
            labels = mechanism.release(np.sum(self.votes, axis=0)[rows]).values
            model = self._fit(final, public[rows], labels)
        else:
            said = [mechanism.release(votes[rows]).values for votes in self.votes]
            students = [
                self._fit(self._factory(party), public[rows], labels).predict(public)
                for party, labels in enumerate(said)
            ]
            counts = count_votes(np.stack(students), data.num_classes)
            model = self._fit(final, public, plurality(counts, self.rng))
        right = model.predict(data.x_train[self.judged]) == data.y_train[self.judged]
        return float(right.mean()), self.num_votes / mechanism.scale


def measurements(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield means and deviations over seeds and draws."""
    trials: Sequence[Trial] = [
        Trial(options.data, options.parties, options.level, seed) for seed in options.seeds
    ]
    most = len(trials[0].federation.dataset.x_public)
    for epsilon in EPSILONS:
        for number in (number for number in QUERIES if number <= most):
            runs = [t.accuracy(epsilon, number) for t in trials for _ in range(options.draws)]
            accuracies = [100 * accuracy for accuracy, _ in runs]
            yield {
                "epsilon": epsilon,
                "queries": number,
                "scales": runs[0][1],
                "accuracy": np.mean(accuracies),
                "deviation": np.std(accuracies),
            }


def main() -> None:
    """Print one line for every epsilon and number of queries."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="adult")
    parser.add_argument("--parties", type=int, default=20)
    parser.add_argument("--level", choices=("L1", "L2"), default="L2")
    parser.add_argument("--seeds", type=int, nargs="+", default=(3, 4, 5))
    parser.add_argument("--draws", type=int, default=1, help="noise draws a seed")
    for row in measurements(parser.parse_args()):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
