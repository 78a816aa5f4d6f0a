"""Whether a change of the code has changed a result: every strategy, to the bit.

    python benchmarks/golden.py record runs/golden.json
    python benchmarks/golden.py compare runs/golden.json

Noise is seeded here, so that runs can be compared at all. Bits are those of one machine and
of one set of packages: record before a change, and compare after it.
"""

import argparse
import hashlib
import json
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fl_strategies.wire import keys
from simulations.client_app import app
from simulations.config import Settings
from simulations.experiment import load_federation
from simulations.local import run_local

DATA = ("digits", "breast-cancer")
SMALL: Mapping[str, Any] = {
    "num-parties": 4,
    "num-trees": 12,
    "boosting-rounds": 6,
    "epochs": 4,
    "num-workers": 1,
    "solo": False,
    "central": False,
}
SCORERS = "xgboost-scores,forest-scores,mlp"
CASES: Mapping[str, Mapping[str, Any]] = {
    "fedkd": {"strategy": "fedkd"},
    "fedkd equation 1": {
        "strategy": "fedkd",
        "weights": "counts",
        "loss": "l1",
        "final-learner": "mlp",
    },
    "fedkd largest logit": {
        "strategy": "fedkd",
        "weights": "counts",
        "scale": "max",
        "num-levels": 16,
        "rounding": "stochastic",
        "num-server-rounds": 2,
    },
    "fedkd median": {"strategy": "fedkd", "weights": "uniform", "consensus": "median"},
    "fedkd noise": {
        "strategy": "fedkd",
        "weights": "uniform",
        "noise": "laplace",
        "gamma": 5.0,
        "seeded-noise": True,
    },
    "fedkt": {"strategy": "fedkt"},
    "fedkt paper": {
        "strategy": "fedkt",
        "num-splits": 2,
        "num-teachers": 3,
        "corrected": False,
        "vote-weights": "none",
    },
    "fedkt L1": {
        "strategy": "fedkt",
        "privacy-level": "L1",
        "gamma": 2.0,
        "num-queries": 40,
        "seeded-noise": True,
    },
    "fedkt L2": {
        "strategy": "fedkt",
        "privacy-level": "L2",
        "gamma": 2.0,
        "num-queries": 40,
        "seeded-noise": True,
    },
    "fedkt target": {
        "strategy": "fedkt",
        "privacy-level": "L1",
        "noise": "gaussian",
        "target-epsilon": 30.0,
        "num-queries": 30,
        "seeded-noise": True,
    },
    "fedkt models": {"strategy": "fedkt", "exchange": "models"},
    "fedkt trim": {"strategy": "fedkt", "trim-fraction": 0.25},
    "fedmd": {"strategy": "fedmd", "num-server-rounds": 3},
    "fedmd logits": {
        "strategy": "fedmd",
        "num-server-rounds": 3,
        "payload": "logits",
        "final-learner": "mlp",
    },
    "fedmd trimmed mean": {
        "strategy": "fedmd",
        "num-server-rounds": 2,
        "payload": "softmax",
        "consensus": "trimmed-mean",
        "final-learner": "mlp",
    },
    "fedmd nfdp": {
        "strategy": "fedmd",
        "num-server-rounds": 2,
        "release": "nfdp",
        "num-samples": 40,
        "seeded-noise": True,
    },
    "fedmd ldp": {
        "strategy": "fedmd",
        "num-server-rounds": 2,
        "release": "ldp",
        "noise": "gaussian",
        "sigma": 1.0,
        "num-public": 50,
        "seeded-noise": True,
    },
    "fedhistogram": {"strategy": "fedhistogram"},
    "fedhistogram L1": {
        "strategy": "fedhistogram",
        "privacy-level": "L1",
        "target-epsilon": 100.0,
        "seeded-noise": True,
    },
    "fedhistogram L2": {
        "strategy": "fedhistogram",
        "target-epsilon": 4.0,
        "seeded-noise": True,
    },
    "fedhistogram central": {
        "strategy": "fedhistogram",
        "privacy-level": "central",
        "target-epsilon": 1.0,
        "seeded-noise": True,
    },
    "fedregression": {"strategy": "fedregression"},
    "fedregression L1": {
        "strategy": "fedregression",
        "privacy-level": "L1",
        "target-epsilon": 100.0,
        "seeded-noise": True,
    },
    "fedregression L2": {
        "strategy": "fedregression",
        "target-epsilon": 4.0,
        "seeded-noise": True,
    },
    "fedregression central": {
        "strategy": "fedregression",
        "privacy-level": "central",
        "target-epsilon": 1.0,
        "seeded-noise": True,
    },
    "akd": {
        "strategy": "akd",
        "num-server-rounds": 3,
        "learner": SCORERS,
        "final-learner": "mlp",
    },
    "avgkd": {
        "strategy": "avgkd",
        "num-server-rounds": 3,
        "learner": SCORERS,
        "final-learner": "mlp",
    },
    "ekd": {
        "strategy": "ekd",
        "num-server-rounds": 3,
        "learner": SCORERS,
        "final-learner": "mlp",
    },
    "pkd": {
        "strategy": "pkd",
        "num-server-rounds": 3,
        "learner": SCORERS,
        "final-learner": "mlp",
    },
    "fedavg": {
        "strategy": "fedavg",
        "num-server-rounds": 3,
        "learner": "mlp",
        "final-learner": "mlp",
    },
}
REPORTED = (
    keys.EPSILON_PARTY,
    keys.EPSILON_EXAMPLE,
    keys.NUM_BYTES_SENT,
    keys.NUM_BYTES_RECEIVED,
)


def run(name: str, data: str) -> dict[str, Any]:
    """Run one case and return what must not change."""
    settings = Settings.from_run_config({**SMALL, **CASES[name], "data": data})
    federation = load_federation(settings)
    strategy = federation.strategy()
    result = run_local(
        strategy,
        app,
        settings.num_parties,
        num_rounds=settings.num_rounds,
        run_config=settings.to_run_config(),
    )
    rounds = [dict(m) for m in result.train_metrics_clientapp.values()]
    measured = [dict(m) for m in result.evaluate_metrics_clientapp.values()]
    logits = strategy.model_.logits(federation.dataset.x_test)
    figures = {key: repr([metrics.get(key) for metrics in rounds]) for key in REPORTED}
    return {
        "accuracy": federation.quality(strategy.model_),
        "evaluated": repr([metrics.get("accuracy") for metrics in measured]),
        "model": hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()[:16],
        "ledger": repr(strategy.ledger_.get_epsilon()),
        **figures,
    }


def main() -> int:
    """Record or compare; return how many cases differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    found = {f"{name}, {data}": _tried(name, data) for data in DATA for name in CASES}
    if options.action == "record":
        options.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    before = json.loads(options.file.read_text(encoding="utf-8"))
    different = [case for case in before if _result(before[case]) != _result(found.get(case))]
    for case in different:
        print(f"{case}:\n  before {before[case]}\n  now    {found.get(case)}")
    print(f"{len(before) - len(different)} of {len(before)} cases are the same to the bit")
    return len(different)


def _result(case: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return all but what parties receive, which the names of settings decide."""
    return {k: v for k, v in (case or {}).items() if k != keys.NUM_BYTES_RECEIVED}


def _tried(name: str, data: str) -> dict[str, Any]:
    try:
        return run(name, data)
    except Exception as error:  # a case that fails must continue failing in the same way
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main())
