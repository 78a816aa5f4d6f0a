"""Baselines of a run, its verdict beside them in one line, and likely causes of a loss.

The verdict reads a report and nothing else, so that it can be given for a file as well.

A difference counts if it is larger than one standard error on the test rows and than one test
row; otherwise two models are level. The error is that of the paired difference where both
models' answers to each row are at hand (``standard-errors`` of the report), and
``sqrt(p (1 - p) / n)`` of the federation's share p on n rows where they are not: models that
parties keep are measured by the parties. The best party is a maximum that the test rows chose
themselves, so with many parties it is a hard bar.
"""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from fl_strategies._util import FloatArray, derive_rng
from fl_strategies.aggregation.votes import count_votes, plurality
from fl_strategies.errors import InvalidParameter, require
from fl_strategies.learners import Evaluation, Learner, fit_ensemble, paired_error
from fl_strategies.wire import keys
from simulations.config import options_of
from simulations.federation import Federation

logger = logging.getLogger("flwr.fl_strategies")

MAJORITY: Final = "majority"
MEAN_PARTY: Final = "mean-party"
BEST_PARTY: Final = "best-party"
POOLED: Final = "pooled"
PATE: Final = "pate"
PUBLIC_ONLY: Final = "public-only"
ERRORS: Final = frozenset({keys.MEAN_SQUARED_ERROR, keys.RMSE, keys.MAE})
"""Metrics that are better when smaller."""


class Baseline(NamedTuple):
    """A result that needs no federation."""

    prefix: str
    """Of its metrics at the top of a report."""
    label: str
    """Its name in tables and pictures."""
    phrase: str = ""
    """Its name in a sentence."""


BASELINES: Final[Mapping[str, Baseline]] = {
    MEAN_PARTY: Baseline("solo-", "mean of parties alone", "the mean party"),
    BEST_PARTY: Baseline("best-solo-", "best party alone", "the best party"),
    POOLED: Baseline("central-", "pooled data", "pooled data"),
    PATE: Baseline("pate-", "PATE on pooled data"),
    PUBLIC_ONLY: Baseline("public-only-", "public labels alone"),
    MAJORITY: Baseline("majority-", "majority class"),
}
Counted: TypeAlias = Callable[[int, int], None]
"""Receives the number of parties that are trained, and that of all."""


@dataclass(frozen=True)
class Baselines:
    """Models that need no federation, as far as the settings ask for them."""

    evaluations: Mapping[str, Evaluation]
    solo: list[float]
    """The metric of each party alone; empty if parties are not compared."""

    def top_level(self, metric: str) -> dict[str, float | None]:
        """Return one metric of each baseline, None if it was not asked for."""
        known = {name: one.metrics[metric] for name, one in self.evaluations.items()}
        return {f"{one.prefix}{metric}": known.get(name) for name, one in BASELINES.items()}

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return all metrics that exist."""
        return {name: existing(one.metrics) for name, one in self.evaluations.items()}

    def standard_errors(self, federation: Evaluation) -> dict[str, float]:
        """Return those of the differences between the federation and each baseline."""
        return {
            name: paired_error(federation.shares, one.shares)
            for name, one in self.evaluations.items()
        }


def evaluate_baselines(
    federation: Federation, num_workers: int = 1, counted: Counted | None = None
) -> Baselines:
    """Train and evaluate the baselines that the settings ask for."""
    settings = federation.settings
    found: dict[str, Evaluation] = {}
    solo: list[float] = []
    if settings.solo:
        found, solo = _evaluate_parties(federation, num_workers, counted)
    if settings.pooled:
        found[POOLED] = federation.evaluate_pooled()
    if settings.pate:
        found[PATE] = evaluate_pate(federation)
    if settings.public_only:
        found[PUBLIC_ONLY] = evaluate_public(federation)
    return Baselines({**found, MAJORITY: federation.evaluate_majority()}, solo)


def existing(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that are numbers: test rows of one class have no area."""
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def _evaluate_parties(
    federation: Federation, num_workers: int, counted: Counted | None
) -> tuple[dict[str, Evaluation], list[float]]:
    """Evaluate one party after the other; only the sum and the best are kept by row."""
    metric, metrics = federation.metric, []
    sign = -1 if metric in ERRORS else 1
    best, total = Evaluation({metric: -math.inf * sign}, np.zeros(0)), np.zeros(1)
    for party in federation.evaluate_parties(num_workers):
        metrics.append(party.metrics)
        if counted is not None:
            counted(len(metrics), federation.settings.num_parties)
        total = total + party.shares
        if sign * party.metrics[metric] > sign * best.metrics[metric]:
            best = party
    means = {name: fmean(one[name] for one in metrics) for name in metrics[0]}
    mean = Evaluation(means, total / len(metrics))
    return {MEAN_PARTY: mean, BEST_PARTY: best}, [one[metric] for one in metrics]


def evaluate_pate(federation: Federation) -> Evaluation:
    """Train PATE (Papernot et al., ICLR 2017), without noise, on the pooled private rows.

    All rows are dealt at random to as many teachers as the parties of the federation have
    in one partition, so that a teacher has as many rows as one of FedKT on average. Their
    votes on the public rows, ties decided at random, train the final learner.
    """
    data, seed = federation.dataset, federation.settings.seed
    fits, rule = data.task == "single-label", "false unless rows have one label each"
    require(fits, "Settings", "pate", rule, federation.settings.pate)
    logger.info("Training PATE on the pooled data for comparison.")
    teachers = _pate_teachers(federation)
    votes = np.stack([teacher.predict(data.x_public) for teacher in teachers])
    counts = count_votes(votes, data.num_classes)
    labels = plurality(counts, derive_rng(seed, "pate", "ties"))
    student, rng = federation.final_factory()(), derive_rng(seed, "pate", "student")
    return federation.evaluate(student.fit(data.x_public, labels, rng=rng))


def _pate_teachers(federation: Federation) -> Sequence[Learner]:
    """Train the teachers, with the parties' learners in round-robin, on rows of their own."""
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
    """Return the number of PATE's teachers: those of one partition, at most one per row."""
    per_party: int = getattr(federation.settings.options, "num_teachers", None) or 1
    number = federation.settings.num_parties * per_party
    return min(number, len(federation.dataset.y_train))


def evaluate_public(federation: Federation) -> Evaluation:
    """Train the final learner on labelled public rows alone."""
    data = federation.dataset
    if data.y_public is None:
        raise InvalidParameter(
            "Settings: public-only must be false unless public rows have labels, got true."
        )
    logger.info("Training on the labelled public rows for comparison.")
    model, rng = federation.final_factory()(), derive_rng(federation.settings.seed, "public")
    return federation.evaluate(model.fit(data.x_public, data.y_public, rng=rng))


Report: TypeAlias = Mapping[str, Any]

PROMISES: Final[Mapping[str, tuple[str, str]]] = {
    "party": (keys.EPSILON_PARTY, keys.DELTA_PARTY),
    "example": (keys.EPSILON_EXAMPLE, keys.DELTA_EXAMPLE),
}
"""Keys of epsilon and delta, by the unit that they protect."""
_MOST_CAUSES = 2
CONSTANTS = {
    keys.ACCURACY: "the majority class",
    keys.MEAN_AUC: "chance",
    keys.MEAN_SQUARED_ERROR: "the mean of the targets",
    keys.R2: "the mean of the targets",
}
"""Models that always give the same answer, by the metric of the task."""


@dataclass(frozen=True)
class Gap:
    """Difference between the federation and a baseline; above 0 is better."""

    gain: float
    error: float
    is_error: bool = False
    """Whether the metric is an error, without a scale of its own."""
    unit: str = " points"
    """Of shares; others are numbers."""

    @property
    def side(self) -> int:
        """1 if the federation is better, -1 if it is worse, 0 if the two are level."""
        if abs(self.gain) <= self.error * (1 + 1e-9):
            return 0
        return 1 if self.gain > 0 else -1

    @property
    def word(self) -> str:
        """The comparison in words."""
        words = ("level with", "better than", "worse than")
        return (words if self.is_error else ("level with", "above", "below"))[self.side]

    @property
    def size(self) -> str:
        """The difference, in points where the metric is a share."""
        if self.is_error:
            return f"{abs(self.gain):.3g}"
        if not self.unit:
            return f"{abs(self.gain):.3f}"
        points = 100 * abs(self.gain)
        return f"{points:.1f} points" if points >= 0.05 else f"{points:.1g} points"


def verdict(report: Report) -> str:
    """Return one line that compares a run with all its baselines.

    Examples
    --------
    >>> verdict({"metric": "accuracy", "accuracy": 0.9, "majority-accuracy": 0.5,
    ...          "solo-accuracy": 0.8, "best-solo-accuracy": 0.85, "central-accuracy": 0.95,
    ...          "num-test-rows": 1000})
    'above every party alone by 5.0 points; 5.0 points below pooled data'
    """
    parts = _beside_parties(report)
    majority, pooled = gap_to(report, MAJORITY), gap_to(report, POOLED)
    if majority is not None and (not parts or majority.side <= 0):
        parts.append(_phrase(report, MAJORITY, majority))
    sentences = [", ".join(parts)] if parts else []
    if pooled is not None:
        size = f"{pooled.size} " if pooled.side else ""
        sentences.append(f"{size}{pooled.word} {BASELINES[POOLED].phrase}")
    return "; ".join(sentences) or "compared with nothing"


def _beside_parties(report: Report) -> list[str]:
    """Return phrases about the best and the mean party; parties that gained, by their own."""
    own, mean, best = own_models(report), gap_to(report, MEAN_PARTY), gap_to(report, BEST_PARTY)
    if own:
        key = f"solo-{report['metric']}"
        alone = {party[keys.PARTITION_ID]: party[key] for party in report["parties"]}
        known = [(own[n], alone[n]) for n in own if alone.get(n) is not None]
        gained = sum(_gap(report, together, solo).side > 0 for together, solo in known)
        if mean is None:
            return []
        return [
            f"the parties' own models are {_phrase(report, MEAN_PARTY, mean)}",
            f"{gained} of {len(known)} parties gained",
        ]
    if best is not None and best.side > 0:
        return [f"{best.word} every party alone by {best.size}"]
    pairs = ((BEST_PARTY, best), (MEAN_PARTY, mean))
    return [_phrase(report, name, gap) for name, gap in pairs if gap is not None]


def find_warnings(report: Report) -> list[str]:
    """Return a warning with the likely cause and a remedy if a run loses; else nothing.

    A federation should beat the best party; models that parties keep, the mean party; and
    both a constant answer. Being level is enough.
    """
    bars = [MEAN_PARTY, MAJORITY] if own_models(report) else [BEST_PARTY, MEAN_PARTY, MAJORITY]
    lost = [name for name in bars if (gap := gap_to(report, name)) and gap.side < 0]
    if not lost:
        return []
    metric = report["metric"]
    values = [shown(metric, report[BASELINES[name].prefix + metric]) for name in lost]
    names = [_name(report, *pair) for pair in zip(lost, values, strict=True)]
    word = "worse than" if _is_error(report) else "below"
    causes = likely_causes(report)[:_MOST_CAUSES] or [
        "no single one stands out; python -m simulations compare shows what fits these data"
    ]
    loss = f"The federation ({shown(metric, report[metric])}) is {word} {' and '.join(names)}."
    return [f"{loss} Likely cause: {'. Or: '.join(causes)}."]


def own_models(report: Report) -> dict[int, float]:
    """Return the last metric of each party that keeps its own model; empty if none does."""
    evaluate = report.get("metrics", {}).get("evaluate", {})
    numbers = map(int, evaluate.get(keys.PARTITION_IDS, []))
    values = evaluate.get(f"{report['metric']}-by-party", [])
    pairs = zip(numbers, values, strict=False)
    return {number: v for number, v in pairs if v is not None and not math.isnan(v)}


def gap_to(report: Report, name: str) -> Gap | None:
    """Return the difference to a baseline; None if they were not compared."""
    metric = report["metric"]
    other = report.get(f"{BASELINES[name].prefix}{metric}")
    if other is None or math.isnan(other):
        return None
    return _gap(report, report[metric], other, report.get("standard-errors", {}).get(name))


def _gap(report: Report, value: float, other: float, error: float | None = None) -> Gap:
    is_error, num_rows = _is_error(report), max(report.get("num-test-rows", 1), 1)
    share = is_share(report["metric"])
    if error is None:
        error = math.sqrt(max(value * (1 - value), 0) / num_rows) if share else 0.0
    least = max(error, 1 / num_rows) if share else error
    gain = (other - value) if is_error else (value - other)
    return Gap(gain, least, is_error, " points" if share else "")


def _phrase(report: Report, name: str, gap: Gap) -> str:
    size = f" by {gap.size}" if gap.side else ""
    return f"{gap.word} {_name(report, name)}{size}"


def _name(report: Report, name: str, *details: str) -> str:
    """Return a baseline's name in a sentence, with the best party's number and learner."""
    key, who = f"solo-{report['metric']}", tuple[str, ...]()
    if name == BEST_PARTY:
        best = [p for p in report.get("parties", []) if p[key] == report[f"best-{key}"]]
        who = tuple(f"party {p[keys.PARTITION_ID]}, {p[keys.LEARNER]}" for p in best[:1])
    known = ", ".join((*who, *details))
    plain = CONSTANTS[report["metric"]] if name == MAJORITY else BASELINES[name].phrase
    return f"{plain} ({known})" if known else plain


def shown(metric: str, value: float | None) -> str:
    """Return a metric for people: a share in percent, R2 and errors as they are.

    Examples
    --------
    >>> shown("accuracy", 0.5), shown("r2", 0.5), shown("rmse", 53.21)
    ('50.0 %', '0.500', '53.21')
    """
    if is_share(metric) or value is None or math.isnan(value):
        return percent(value)
    return f"{value:.4g}" if metric in ERRORS else f"{value:.3f}"


def is_share(metric: str) -> bool:
    """Return whether people read a metric in percent."""
    return metric != keys.R2 and metric not in ERRORS


def percent(value: float | None) -> str:
    """Return a share in percent; a dash if it is unknown."""
    return "-" if value is None or math.isnan(value) else f"{100 * value:.1f} %"


def _is_error(report: Report) -> bool:
    return report["metric"] in ERRORS


Cause: TypeAlias = Callable[[Report], str | None]

SKEW: Final = 0.1
"""Least share of a party's records beyond chance for its classes to count as one-sided."""
RECORDS_A_CLASS: Final = 100
"""Records per class that are enough for a teacher."""
PUBLIC_ROWS_A_CLASS: Final = 20
EVIDENCE: Final[Mapping[str, object]] = {
    "weights": "evidence",
    "consensus": "evidence",
    "corrected": True,
}
"""Settings that account for which classes each party has seen."""


def likely_causes(report: Report) -> list[str]:
    """Return the causes that apply, each with a setting to try, the most likely first."""
    found = (cause(report) for cause in _CAUSES)
    return [sentence for sentence in found if sentence]


def noise(report: Report) -> str | None:
    """Name noise, which decides where there is any: it is meant to hide records."""
    settings = report["settings"]
    spent = [report[epsilon] for epsilon, _ in PROMISES.values()]
    finite = [epsilon for epsilon in spent if math.isfinite(epsilon)]
    asked = settings.get("privacy-level") in ("L1", "L2") or settings.get("release") == "ldp"
    if not finite and not asked:
        return None
    size = f" (epsilon {min(finite):.3g})" if finite else ""
    if settings.get("release") == "nfdp":
        return f"parties learn from a sample{size}: set a larger num-samples"
    fewer = "num-queries" if "num-queries" in _declared(report) else "public rows"
    return (
        f"noise hides the answers{size}: allow a larger epsilon, fewer {fewer} or more parties"
    )


def one_sided_classes(report: Report) -> str | None:
    """Name one-sided classes of parties, combined by a rule that ignores them."""
    key, value = _evidence(report)
    beyond = class_skew(report)
    # "auto" is the best rule that the strategy's guarantee allows.
    if not key or report["settings"].get(key) in (value, "auto") or beyond < SKEW:
        return None
    chosen = "true" if value is True else value
    return (
        f"the classes of parties are one-sided ({100 * beyond:.0f} % of their records beyond "
        f"chance) and the rule that combines answers ignores it: set {key}={chosen}"
    )


def few_records_a_teacher(report: Report) -> str | None:
    """Name FedKT's teachers where they share a party's records although nothing needs it."""
    settings = report["settings"]
    if "num-teachers" not in _declared(report):
        return None
    count, level = settings["num-teachers"], settings["privacy-level"]
    if count <= 1 or level == "L2":
        return None
    records = median(party["num-records"] for party in report["parties"]) / count
    if records >= RECORDS_A_CLASS * report["num-classes"]:
        return None
    return f"a teacher has {records:.0f} records only: set num-teachers=1 num-splits=1"


def unlike_public_rows(report: Report) -> str | None:
    """Name public rows that come from another data set than the private ones."""
    settings, (key, value) = report["settings"], _evidence(report)
    if not settings["public"] or not key:
        return None
    shared = settings.get(key) == value and settings.get("class-share") != "none"
    first = "set class-share=none, or " if shared else ""
    return (
        f"public rows ({settings['public']}) are unlike the private ones: "
        f"{first}choose public rows of the same kind"
    )


def few_public_rows(report: Report) -> str | None:
    """Name a public set that is too small to learn from."""
    rows = report["num-public-rows"]
    enough = rows >= PUBLIC_ROWS_A_CLASS * report["num-classes"]
    if enough or not _evidence(report)[0]:
        return None
    return f"there are {rows} public rows only: provide more (public-rows)"


_CAUSES: Final[tuple[Cause, ...]] = (
    noise,
    one_sided_classes,
    few_records_a_teacher,
    unlike_public_rows,
    few_public_rows,
)


def _declared(report: Report) -> Collection[str]:
    """Return the names of the strategy's own settings."""
    return options_of(report["strategy"]).settings()


def _evidence(report: Report) -> tuple[str, object]:
    """Return the strategy's setting that accounts for classes and its value; "" if none."""
    declared = _declared(report)
    return next((pair for pair in EVIDENCE.items() if pair[0] in declared), ("", None))


def class_skew(report: Report) -> float:
    """Return the mean distance of parties' class shares from those of all, beyond chance.

    The distance is total variation: the share of a party's records that would need another
    class. Its expectation for n records drawn from all, the sum over classes of
    ``sqrt(p (1 - p) / (2 pi n))``, is subtracted. 0 without classes.

    Examples
    --------
    >>> class_skew({"parties": [{"class-counts": [900, 0]}, {"class-counts": [0, 900]}]})
    0.4867...
    """
    counts = [party.get("class-counts") for party in report["parties"]]
    if not counts or not all(counts):
        return 0.0
    table: FloatArray = np.array(counts, dtype=np.float64)
    sizes, pooled = table.sum(axis=1), table.sum(axis=0) / table.sum()
    filled = sizes > 0
    shares = table[filled] / sizes[filled, None]
    distances = np.abs(shares - pooled).sum(axis=1) / 2
    spread = np.sqrt(pooled * (1 - pooled)).sum()
    by_chance = spread / np.sqrt(2 * math.pi * sizes[filled])
    return max(0.0, float((distances - by_chance).mean()))
