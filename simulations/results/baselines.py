"""What a run is compared with: a constant, each party alone, pooled data, public labels."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final, TypeAlias

import numpy as np

from fl_strategies._util import derive_rng
from fl_strategies.aggregation.votes import count_votes, plurality
from fl_strategies.errors import InvalidParameter, require
from fl_strategies.learners import Judgement, Learner, fit_ensemble, paired_error
from fl_strategies.wire import keys
from simulations.federation import Federation

MAJORITY: Final = "majority"
MEAN_PARTY: Final = "mean-party"
BEST_PARTY: Final = "best-party"
POOLED: Final = "pooled"
PATE: Final = "pate"
PUBLIC_ONLY: Final = "public-only"
PREFIXES: Final[Mapping[str, str]] = {
    MEAN_PARTY: "solo-",
    BEST_PARTY: "best-solo-",
    POOLED: "central-",
    PATE: "pate-",
    PUBLIC_ONLY: "public-only-",
    MAJORITY: "majority-",
}
"""How the figure of each baseline is called at the top of a report."""
Counted: TypeAlias = Callable[[int, int], None]
"""Is told how many parties of all are trained."""


@dataclass(frozen=True)
class Baselines:
    """How good models are that need no federation.

    Parameters
    ----------
    judged : mapping of baseline to `Judgement`
        Those that the settings ask for.
    solo : list of float
        The figure of each party alone; empty if they are not compared.
    """

    judged: Mapping[str, Judgement]
    solo: list[float]

    def top_level(self, metric: str) -> dict[str, float | None]:
        """Return one figure of each baseline, None if it was not asked for."""
        return {
            f"{prefix}{metric}": self.judged[name].figures[metric]
            if name in self.judged
            else None
            for name, prefix in PREFIXES.items()
        }

    def figures(self) -> dict[str, dict[str, float]]:
        """Return all figures that exist."""
        return {name: existing(judged.figures) for name, judged in self.judged.items()}

    def standard_errors(self, federation: Judgement) -> dict[str, float]:
        """Return that of the difference between the federation and each baseline."""
        return {
            name: paired_error(federation.shares, judged.shares)
            for name, judged in self.judged.items()
        }


def judge_baselines(
    federation: Federation, num_workers: int = 1, counted: Counted | None = None
) -> Baselines:
    """Train and judge what the settings ask for."""
    settings = federation.settings
    judged: dict[str, Judgement] = {}
    solo: list[float] = []
    if settings.solo:
        judged, solo = _judge_parties(federation, num_workers, counted)
    if settings.pooled:
        judged[POOLED] = federation.judge_pooled()
    if settings.pate:
        judged[PATE] = judge_pate(federation)
    if settings.public_only:
        judged[PUBLIC_ONLY] = judge_public(federation)
    return Baselines({**judged, MAJORITY: federation.judge_majority()}, solo)


def existing(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures that are numbers: test rows of one class have no area."""
    return {name: figure for name, figure in figures.items() if not math.isnan(figure)}


def _judge_parties(
    federation: Federation, num_workers: int, counted: Counted | None
) -> tuple[dict[str, Judgement], list[float]]:
    """Judge one party after the other; only the sum and the best are kept by row."""
    metric, figures = federation.metric, []
    sign = -1 if metric == keys.MEAN_SQUARED_ERROR else 1
    best, total = Judgement({metric: -math.inf * sign}, np.zeros(0)), np.zeros(1)
    for judged in federation.judge_parties(num_workers):
        figures.append(judged.figures)
        if counted is not None:
            counted(len(figures), federation.settings.num_parties)
        total = total + judged.shares
        if sign * judged.figures[metric] > sign * best.figures[metric]:
            best = judged
    means = {name: fmean(one[name] for one in figures) for name in figures[0]}
    mean = Judgement(means, total / len(figures))
    return {MEAN_PARTY: mean, BEST_PARTY: best}, [one[metric] for one in figures]


logger = logging.getLogger("flwr.fl_strategies")


def judge_pate(federation: Federation) -> Judgement:
    """Train PATE (Papernot et al., ICLR 2017), without noise, on the pooled private rows.

    All rows are dealt at random to as many teachers as the parties of the federation have
    in one partition, so that a teacher has as many rows as one of FedKT on average. Their
    votes on the public rows, ties decided at random, train the final learner.
    """
    data, seed = federation.dataset, federation.settings.seed
    fits, rule = data.task == "single-label", "false unless rows have one label each"
    require(fits, "Settings", "pate", rule, federation.settings.pate)
    logger.info("Training PATE on the pooled data for comparison.")
    votes = np.stack([teacher.predict(data.x_public) for teacher in _teachers(federation)])
    counts = count_votes(votes, data.num_classes)
    labels = plurality(counts, derive_rng(seed, "pate", "ties"))
    student, rng = federation.final_factory()(), derive_rng(seed, "pate", "student")
    return federation.judge(student.fit(data.x_public, labels, rng=rng))


def _teachers(federation: Federation) -> Sequence[Learner]:
    """Train the teachers, of the parties' kinds in turn, each on rows of its own."""
    data, settings = federation.dataset, federation.settings
    number = num_pate_teachers(federation)
    order = derive_rng(settings.seed, "pate", "split").permutation(len(data.y_train))
    dealt = np.array_split(order, number)
    names = (settings.teacher,) if settings.teacher else federation.learner_names
    teachers: list[Learner] = []
    for kind, name in enumerate(names):
        mine = range(kind, number, len(names))
        sets = [(data.x_train[dealt[one]], data.y_train[dealt[one]]) for one in mine]
        rngs = [derive_rng(settings.seed, "pate", "teacher", one) for one in mine]
        teachers += fit_ensemble(federation.factory(name), sets, rngs=rngs)
    return teachers


def num_pate_teachers(federation: Federation) -> int:
    """Return how many teachers PATE has: all of one partition, but no more than rows."""
    per_party: int = getattr(federation.settings.options, "num_teachers", None) or 1
    number = federation.settings.num_parties * per_party
    return min(number, len(federation.dataset.y_train))


def judge_public(federation: Federation) -> Judgement:
    """Train the final learner on the public rows with their own labels, nothing private."""
    data = federation.dataset
    if data.y_public is None:
        raise InvalidParameter(
            "Settings: public-only must be false unless public rows have labels, got true."
        )
    logger.info("Training on the labelled public rows for comparison.")
    model, rng = federation.final_factory()(), derive_rng(federation.settings.seed, "public")
    return federation.judge(model.fit(data.x_public, data.y_public, rng=rng))
