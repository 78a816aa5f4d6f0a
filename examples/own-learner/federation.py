"""A party with LightGBM, one with CatBoost and one with a forest, in one process."""

import numpy as np
from clients import SklearnLearner, client_app
from fl_strategies import FedKD, Party
from simulations.runtime.local import run_local
from sklearn.datasets import load_digits
from sklearn.ensemble import ExtraTreesClassifier

from catboost_learner import CatBoostLearner
from lightgbm_learner import LightGBMLearner

NUM_CLASSES = 10
x, y = load_digits(return_X_y=True)
rows = np.random.default_rng(0).permutation(len(y))
test, public, private = rows[:300], rows[300:600], rows[600:]


def make_lightgbm():
    """Return the first party's model."""
    return LightGBMLearner(num_classes=NUM_CLASSES)


def make_catboost():
    """Return the second party's model."""
    return CatBoostLearner(num_classes=NUM_CLASSES)


def make_forest():
    """Return the third party's model, and the server's."""
    return SklearnLearner(ExtraTreesClassifier(), num_classes=NUM_CLASSES)


MODELS = {"lightgbm": make_lightgbm, "catboost": make_catboost, "forest": make_forest}


def load_party(context) -> Party:
    """Return one of the three parties, with a third of the records."""
    number = int(context.node_config["partition-id"])
    name = list(MODELS)[number]
    return Party(
        x=x[private[number::3]],
        y=y[private[number::3]],
        public=x[public],
        num_classes=NUM_CLASSES,
        learner_fn=MODELS[name],
        learner_name=name,
        partition_id=number,
        catalogue={"forest": make_forest},
    )


def main() -> float:
    """Run the federation and return the accuracy on rows that took no part."""
    strategy = FedKD(
        public=x[public],
        num_classes=NUM_CLASSES,
        learner_fn=make_forest,
        learner_name="forest",
        num_parties=3,
    )
    run_local(strategy, client_app(load_party), num_nodes=3)
    return float((strategy.model_.predict(x[test]) == y[test]).mean())


if __name__ == "__main__":
    print(f"accuracy {main():.3f}")
