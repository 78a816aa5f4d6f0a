"""Accuracy and epsilon of FedKT-L1 and L2, compared with Table 2 of the paper (IJCAI 2021).

Run: ``python benchmarks/fedkt_privacy.py [--rule R] [--draws N] [--seeds S ...] [--json OUT]``
with FL_STRATEGIES_DATA set. Noise is secret, so figures vary from run to run: each is the
median over the seeds and several draws of the noise, with the quartiles.

Rules: ``paid`` uses nothing that is not paid for. At L2 votes are corrected, weighted and
matched to class shares by noisy class counts, bought within the epsilon that the paper's noise
costs for the votes alone; at L1, where shares cost too much, each party's one model estimates
those of the public rows by itself where that helps, see `SelfMatched`. ``corrected``: corrected
votes of plain logistic regressions, nothing bought, the paper's number of teachers. ``share``:
plain votes and a class share that is known publicly, see `ShareMatched`.

Parties, noise, gamma and number of queries are the paper's. The paper's query percentages
are shares of public and test rows together, and its L2 rows have 20 parties with 25
teachers each; see the authors' code. The learners are not the paper's.
"""

import argparse
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from noisy_learners import (
    SOLVER_STEPS,
    Projected,
    Projection,
    RememberedTeachers,
    SelfMatched,
    ShareMatched,
)
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression

from clients.app import client_app
from clients.tabular.sklearn import SklearnLearner
from fl_strategies import (
    FedKT,
    FedKTOptions,
    Knowledge,
    Learner,
    Party,
    VotePrivacy,
)
from fl_strategies._util import Array
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.server.replies import PartyReply
from fl_strategies.strategies.fedkt.server import PartyAnswer
from fl_strategies.wire import keys
from simulations.config import Settings, preset
from simulations.federation import load_federation
from simulations.results.report import aligned
from simulations.runtime.local import run_local

SEEDS = (0, 1, 2)
RULES = ("paid", "corrected", "share")


@dataclass(frozen=True)
class Row:
    """One row of the paper's table."""

    data: str
    level: str
    gamma: float
    num_queries: int
    paper_epsilon: float
    paper_accuracy: float


ROWS = [
    Row("adult", "L1", 0.04, 40, 2.56, 76.8),
    Row("adult", "L1", 0.04, 81, 4.73, 80.2),
    Row("adult", "L2", 0.04, 40, 2.59, 77.6),
    Row("adult", "L2", 0.04, 81, 3.72, 78.6),
    Row("cod-rna", "L1", 0.06, 74, 5.48, 82.6),
    Row("cod-rna", "L1", 0.10, 74, 6.89, 84.7),
    Row("cod-rna", "L2", 0.05, 74, 4.51, 82.7),
    Row("cod-rna", "L2", 0.05, 297, 9.78, 84.7),
]


@dataclass(frozen=True)
class Learners:
    """Learner of a data set; chosen on seeds 3 to 9, see docs/results/fedkt.md.

    Parameters
    ----------
    share : float
        Share of class 1, about that of the whole data set: where teachers cut.
    noisy_share : float
        Where those cut who learn from noisy labels. Where rows are ordered badly, fewer
        of the rarer class are right more often.
    noisy_strength : float
    num_components : int
        Principal components that noisy labels are learned from; 0: all columns.
    exchange : "votes" or "scores"
        What students of L2 send where nothing is free; chosen on training rows, as the next.
    self_matched : bool
        Whether parties of L1 estimate the shares of public rows where nothing is free.
    """

    share: float
    noisy_share: float
    noisy_strength: float
    num_components: int
    exchange: str
    self_matched: bool


LEARNERS = {
    "adult": Learners(0.25, 0.16, 0.1, 3, "scores", self_matched=True),
    "cod-rna": Learners(0.33, 0.33, 1.0, 0, "votes", self_matched=False),
}


@lru_cache
def projection_of(data: str, seed: int) -> Projection | None:
    """Return the leading components of the public rows, the first with deviation 1."""
    num_components = LEARNERS[data].num_components
    if not num_components:
        return None
    public = load_federation(Settings.of(data=data, seed=seed, num_parties=1)).dataset.x_public
    components = PCA(num_components, svd_solver="covariance_eigh").fit(public)
    deviation = components.explained_variance_[0] ** 0.5
    return lambda x: components.transform(x) / deviation


def options_of(settings: Settings) -> FedKTOptions:
    if not isinstance(settings.options, FedKTOptions):
        raise TypeError("the preset of this benchmark is FedKT's")
    return settings.options


def rule_of(settings: Settings) -> str:
    """Return the rule that settings follow."""
    options = options_of(settings)
    alone = options.level == "L1" and options.num_teachers == 1
    if alone or options.weights == "noisy-counts":
        return "paid"
    return "corrected" if options.corrected else "share"


def self_matched(settings: Settings) -> bool:
    """Return whether parties estimate the shares of the public rows."""
    chosen, level = LEARNERS[settings.data].self_matched, options_of(settings).level
    return chosen and level == "L1" and rule_of(settings) == "paid"


def learner_of_noise(settings: Settings, public: Array) -> Learner:
    """Return who learns from noisy labels: the final model at L1, a student at L2."""
    chosen, project = LEARNERS[settings.data], projection_of(settings.data, settings.seed)
    if rule_of(settings) == "paid":
        return Projected(project=project)
    if options_of(settings).corrected:
        return Projected(strength=chosen.noisy_strength, project=project)
    return ShareMatched(
        public, share=chosen.noisy_share, strength=chosen.noisy_strength, project=project
    )


def learner_of_votes() -> Learner:
    """Return who learns from votes without noise: a student at L1, the final model at L2."""
    return SklearnLearner(LogisticRegression(max_iter=SOLVER_STEPS), num_classes=2)


def load_party(context: Context) -> Party:
    """Return a party of the simulation with the learners of this benchmark."""
    settings = Settings.from_run_config(context.run_config)
    number = int(context.node_config[keys.PARTITION_ID])
    party = load_federation(settings).party(number)
    options = options_of(settings)
    kind = f"{settings.data} {options.level} {rule_of(settings)}"

    def teacher() -> Learner:
        if self_matched(settings):
            return SelfMatched(party.public)
        if options.corrected:
            return learner_of_votes()
        return ShareMatched(party.public, share=LEARNERS[settings.data].share)

    return replace(
        party,
        teacher_fn=lambda: RememberedTeachers(teacher, (kind, settings.seed, number)),
        learner_fn=(
            (lambda: learner_of_noise(settings, party.public))
            if options.level == "L2"
            else learner_of_votes
        ),
    )


def strategy_of(settings: Settings) -> FedKT:
    """Return the server side with the learners of this benchmark."""
    strategy = load_federation(settings).strategy()
    if not isinstance(strategy, FedKT):
        raise TypeError("the preset of this benchmark is FedKT's")
    public = strategy.public
    strategy.evaluate = False
    strategy.learner_fn = (
        (lambda: learner_of_noise(settings, public))
        if strategy.options.level == "L1"
        else learner_of_votes
    )
    return strategy


def settings_of(row: Row, seed: int, noise: str, rule: str) -> Settings:
    """Return the paper's noise for Laplace, and for Gumbel half of its epsilon.

    Where something is bought, it is within the epsilon that the paper's noise costs.
    """
    sizes = (
        {"num-parties": 20, "num-teachers": 25, "min-records": 25} if row.level == "L2" else {}
    )
    bought = rule == "paid" and row.level == "L2"
    target = own_epsilon(row) if noise == "laplace" else row.paper_epsilon / 2
    by_gamma = noise == "laplace" and not bought
    settings = {
        **preset("paper", "fedkt", row.data),
        **({"num-teachers": 1} if rule == "paid" else {}),
        **sizes,
        **({"gamma": row.gamma} if by_gamma else {"target-epsilon": target}),
        "num-queries": row.num_queries,
        "num-splits": 1,
        "seed": seed,
        "privacy-level": row.level,
        "noise": noise,
        "vote-weights": "noisy-counts" if bought else "none",
        "exchange": LEARNERS[row.data].exchange if bought else "votes",
        "exclude-outliers": False,
        "accept-noise": True,
    }
    alone = rule == "paid" and row.level == "L1" and LEARNERS[row.data].self_matched
    return Settings.from_run_config({**settings, "corrected": rule != "share" and not alone})


def own_epsilon(row: Row) -> float:
    """Return what the paper's noise and queries cost by our own accounting."""
    privacy = VotePrivacy(level="L2", noise="laplace", gamma=row.gamma)
    ledger = PrivacyLedger("example", delta=privacy.delta)
    mechanism = privacy.mechanism(
        unit="example", sensitivity=1, num_classes=2, num_queries=row.num_queries
    )
    ledger.compose_all(mechanism.charges(row.num_queries))
    return ledger.get_epsilon()


def run(strategy: FedKT, settings: Settings) -> None:
    run_local(
        strategy,
        client_app(load_party),
        settings.num_parties,
        run_config=settings.to_run_config(),
        num_workers=1,
    )


@lru_cache
def votes_of(data: str, seed: int, rule: str) -> Sequence[Knowledge]:
    """Return the parties' answers at L1, which do not depend on the server's noise."""
    row = next(row for row in ROWS if (row.data, row.level) == (data, "L1"))
    settings = settings_of(row, seed, "laplace", rule)
    strategy = strategy_of(settings)
    kept: list[Knowledge] = []
    check = strategy.check

    def keep(knowledge: Knowledge) -> PartyAnswer:
        kept.append(knowledge)
        return check(knowledge)

    strategy.check = keep  # type: ignore[method-assign]
    run(strategy, settings)
    return kept


def outcomes(
    row: Row, noise: str, draws: int, seeds: Sequence[int], rule: str
) -> Iterator[tuple[float, float]]:
    """Yield accuracy and epsilon of every seed and draw."""
    for seed in seeds:
        settings = settings_of(row, seed, noise, rule)
        for _ in range(draws):
            strategy = strategy_of(settings)
            if row.level == "L1":
                for number, votes in enumerate(votes_of(row.data, seed, rule)):
                    strategy.state.members[number] = number, number
                    strategy.add(PartyReply(number, number, "", strategy.check(votes), {}))
                strategy.charge()
                strategy.finish()
            else:
                run(strategy, settings)
            accuracy = load_federation(settings).quality(strategy.model_)
            yield accuracy, strategy.ledger_.get_epsilon()


def measure(
    row: Row, noise: str, draws: int, seeds: Sequence[int], rule: str
) -> dict[str, Any]:
    accuracies, epsilons = zip(*outcomes(row, noise, draws, seeds, rule), strict=True)
    low, median, high = 100 * np.quantile(accuracies, [0.25, 0.5, 0.75])
    return {
        "data": row.data,
        "level": row.level,
        "noise": noise,
        "queries": row.num_queries,
        "paper-epsilon": row.paper_epsilon,
        "epsilon": max(epsilons),
        "paper-accuracy": row.paper_accuracy,
        "accuracy": median,
        "low": low,
        "high": high,
    }


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rule", choices=RULES, default=RULES[0])
    parser.add_argument("--draws", type=int, default=10, help="noise draws a seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for row in ROWS:
        for noise in ("laplace", "gumbel"):
            results.append(measure(row, noise, options.draws, options.seeds, options.rule))
            print(json.dumps(results[-1]), flush=True)
    columns = list(results[0])
    cells = [
        [f"{v:.3g}" if isinstance(v, float) else str(v) for v in r.values()] for r in results
    ]
    print(aligned(columns, cells))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
