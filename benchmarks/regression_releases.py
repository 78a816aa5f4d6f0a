"""Private releases of a regression compared: sums of features, or one model per party.

    python benchmarks/regression_releases.py

All see the same components of the public rows, the same records and the same epsilon at
delta 1e-5, with noise of each party:

sums        features times labels, once, as `FedRegression` releases them
output      each party's ridge logistic regression with noise on its weights
objective   the same with noise on the objective; its price is taken too low, as if all of
            epsilon were left for that noise

Models of parties are combined by their precision, and get the best of four penalties and four
numbers of components; sums get those that follow from the noise. Rows to judge by are cut
from the private part, so this may be used to choose.
"""

import argparse
import math
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from fl_strategies import SumPrivacy
from fl_strategies._util import FloatArray, IntArray
from fl_strategies.privacy.planning import USUAL_STRENGTH, usual_components
from fl_strategies.strategies.sums.regression import (
    LEVELS,
    Components,
    fitted_weights,
)
from simulations.config import Settings
from simulations.federation import load_federation

PARTIES = 20
PENALTIES = (0.001, 0.01, 0.03, 0.1)
COMPONENTS = (3, 6, 12, 24)
SPREAD = 0.5  # of the parties' true weights, for their precision
CASES = (("adult", 0.3), ("adult", 0.935), ("cod-rna", 1.681))


class Rows(NamedTuple):
    """Public rows, each party's records, and rows cut from the private part to judge by."""

    public: FloatArray
    parties: list[tuple[FloatArray, IntArray]]
    judge: tuple[FloatArray, IntArray]


def load(data: str, seed: int) -> Rows:
    settings = Settings.of(data=data, num_parties=PARTIES, seed=seed)
    federation = load_federation(settings)
    x, y = federation.dataset.x_train, federation.dataset.y_train
    kept = np.random.RandomState(seed).uniform(size=len(y)) >= 0.2
    parties = [(x[rows[kept[rows]]], y[rows[kept[rows]]]) for rows in federation.rows]
    return Rows(federation.dataset.x_public, parties, (x[~kept], y[~kept]))


def by_sums(rows: Rows, epsilon: float, rng: np.random.Generator) -> float:
    privacy = SumPrivacy(target_epsilon=epsilon)
    num_records = sum(len(y) for _, y in rows.parties)
    planned = privacy.mechanism(2.0 * LEVELS).drawn_scale * math.sqrt(PARTIES)
    share = planned / (USUAL_STRENGTH * LEVELS * num_records)
    number = usual_components(len(rows.public), rows.public.shape[1], share)
    components = Components.of_rows(rows.public, number)
    mechanism = privacy.mechanism(components.moved(2, "single-label"))
    total = sum(
        mechanism.release(components.of_records(x, y, 2, "single-label"), rng).values
        for x, y in rows.parties
    )
    whole = LEVELS * num_records
    weights = fitted_weights(
        components.features(rows.public) / LEVELS,
        np.asarray(total) / whole,
        mechanism.drawn_scale * math.sqrt(PARTIES) / whole,
        softmax_link=False,
    )
    return judged(rows, components, weights[:, 0])


def by_models(rows: Rows, epsilon: float, kind: str, rng: np.random.Generator) -> float:
    return max(
        _models(rows, Components.of_rows(rows.public, number), epsilon, kind, penalty, rng)
        for number in COMPONENTS
        if number <= rows.public.shape[1] * 3
        for penalty in PENALTIES
    )


def _models(
    rows: Rows,
    components: Components,
    epsilon: float,
    kind: str,
    penalty: float,
    rng: np.random.Generator,
) -> float:
    # A record of length 1 at most moves the sum of its gradients by 2.
    noise = SumPrivacy(target_epsilon=epsilon).mechanism(2.0).drawn_scale
    total = np.zeros(components.num_features)
    for x, y in rows.parties:
        features, signs = components.features(x) / components.longest, 2.0 * y - 1
        least = 0.5 / (len(y) * epsilon) if kind == "objective" else 0.0
        ridge = max(penalty, least)
        drawn = rng.normal(size=components.num_features) * noise
        tilt = drawn / len(y) if kind == "objective" else np.zeros_like(drawn)
        weights = regressed(features, signs, ridge, tilt)
        deviation = noise / (len(y) * ridge)
        if kind == "output":
            weights = weights + drawn / (len(y) * ridge)
        total += weights / (deviation**2 + SPREAD**2)
    return judged(rows, components, total)


def regressed(x: FloatArray, signs: FloatArray, ridge: float, tilt: FloatArray) -> FloatArray:
    def loss(weights: FloatArray) -> tuple[float, FloatArray]:
        margins = signs * (x @ weights)
        value = (
            np.logaddexp(0, -margins).mean() + ridge / 2 * weights @ weights + tilt @ weights
        )
        pull = -(x * (signs * expit(-margins))[:, None]).mean(axis=0)
        return float(value), pull + ridge * weights + tilt

    return np.asarray(minimize(loss, np.zeros(x.shape[1]), jac=True, method="L-BFGS-B").x)


def judged(rows: Rows, components: Components, weights: FloatArray) -> float:
    x, y = rows.judge
    return 100 * float(((components.features(x) @ weights > 0) == y).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="3,4,5", help="comma-separated (default: 3,4,5)")
    parser.add_argument("--draws", type=int, default=3, help="of the noise (default: 3)")
    options = parser.parse_args()
    print("| data | epsilon | sums | output | objective |\n| --- | --- | --- | --- | --- |")
    for data, epsilon in CASES:
        found: dict[str, list[float]] = {"sums": [], "output": [], "objective": []}
        for seed in map(int, options.seeds.split(",")):
            rows = load(data, seed)
            rng = np.random.default_rng(seed)
            for _ in range(options.draws):
                found["sums"].append(by_sums(rows, epsilon, rng))
                for kind in ("output", "objective"):
                    found[kind].append(by_models(rows, epsilon, kind, rng))
        medians = " | ".join(f"{np.median(found[kind]):.1f}" for kind in found)
        print(f"| {data} | {epsilon:g} | {medians} |", flush=True)


if __name__ == "__main__":
    main()
