"""What a run is worth, in one line, and why it may be worth little.

Everything here reads a report and nothing else, so that it can be asked of a file as well.

A difference counts if it is larger than one standard error on the test rows and than one test
row; otherwise two models are level. The error is that of the paired difference where both
models' answers to each row are at hand (``standard-errors`` of the report), and
``sqrt(p (1 - p) / n)`` of the federation's figure p on n rows where they are not: models that
parties keep are measured by the parties. The best party is a maximum that the test rows chose
themselves, so with many parties it is a hard bar.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, TypeAlias

import numpy as np

from fl_strategies._util import FloatArray
from fl_strategies.wire import keys
from simulations.config import options_of
from simulations.results.baselines import BEST_PARTY, MAJORITY, MEAN_PARTY, POOLED, PREFIXES

Report: TypeAlias = Mapping[str, Any]

_MOST_CAUSES = 2
_NAMES = {
    MEAN_PARTY: "the mean party",
    BEST_PARTY: "the best party",
    POOLED: "pooled data",
}
CONSTANTS = {
    keys.ACCURACY: "the majority class",
    keys.MEAN_AUC: "chance",
    keys.MEAN_SQUARED_ERROR: "the mean of the targets",
}
"""What always gives the same answer, by the figure of the task."""


@dataclass(frozen=True)
class Gap:
    """How far the federation is from something; above 0 is better."""

    gain: float
    error: float
    is_error: bool = False
    """Whether the figure is an error, without a scale of its own."""

    @property
    def side(self) -> int:
        """1 if the federation is better, -1 if it is worse, 0 if the two are level."""
        if abs(self.gain) <= self.error * (1 + 1e-9):
            return 0
        return 1 if self.gain > 0 else -1

    @property
    def word(self) -> str:
        """How the federation stands to it."""
        words = ("level with", "better than", "worse than")
        return (words if self.is_error else ("level with", "above", "below"))[self.side]

    @property
    def size(self) -> str:
        """The difference, in points where the figure is a share."""
        if self.is_error:
            return f"{abs(self.gain):.3g}"
        points = 100 * abs(self.gain)
        return f"{points:.1f} points" if points >= 0.05 else f"{points:.1g} points"


def verdict(report: Report) -> str:
    """Return one line that says what a run is worth, by all that it was compared with.

    Examples
    --------
    >>> verdict({"metric": "accuracy", "accuracy": 0.9, "majority-accuracy": 0.5,
    ...          "solo-accuracy": 0.8, "best-solo-accuracy": 0.85, "central-accuracy": 0.95,
    ...          "num-test-rows": 1000})
    'above every party alone by 5.0 points; 5.0 points below pooled data'
    """
    own = own_models(report)
    parts = _parts_of_own_models(report, own) if own else _parts_of_one_model(report)
    pooled = gap_to(report, POOLED)
    if pooled is not None:
        size = f"{pooled.size} " if pooled.side else ""
        parts = [*parts, f"{size}{pooled.word} {_NAMES[POOLED]}"]
    return "; ".join(part for part in parts if part) or "compared with nothing"


def find_warnings(report: Report) -> list[str]:
    """Return what to say of a run that loses, with the likely cause and what to try.

    A federation should beat the best party; models that parties keep, the mean party; and
    both a constant answer. The list is empty if they do, or are level.
    """
    bars = [MEAN_PARTY, MAJORITY] if own_models(report) else [BEST_PARTY, MEAN_PARTY, MAJORITY]
    lost = [name for name in bars if (gap := gap_to(report, name)) and gap.side < 0]
    if not lost:
        return []
    told = [_name(report, name, _shown(report, PREFIXES[name])) for name in lost]
    word = "worse than" if _is_error(report) else "below"
    causes = likely_causes(report)[:_MOST_CAUSES] or [
        "no single one stands out; python -m simulations compare shows what fits these data"
    ]
    loss = f"The federation ({_shown(report, '')}) is {word} {' and '.join(told)}."
    return [f"{loss} Likely cause: {'. Or: '.join(causes)}."]


def own_models(report: Report) -> dict[int, float]:
    """Return the last figure of each party that keeps its own model; empty if none does."""
    evaluate = report.get("metrics", {}).get("evaluate", {})
    numbers = map(int, evaluate.get(keys.PARTITION_IDS, []))
    figures = evaluate.get(f"{report['metric']}-by-party", [])
    pairs = zip(numbers, figures, strict=False)
    return {number: f for number, f in pairs if f is not None and not math.isnan(f)}


def gap_to(report: Report, name: str) -> Gap | None:
    """Return how far the federation is from a baseline; None if they were not compared."""
    metric = report["metric"]
    other = report.get(f"{PREFIXES[name]}{metric}")
    if other is None or math.isnan(other):
        return None
    return _gap(report, report[metric], other, report.get("standard-errors", {}).get(name))


def _gap(report: Report, figure: float, other: float, error: float | None = None) -> Gap:
    is_error, num_rows = _is_error(report), max(report.get("num-test-rows", 1), 1)
    if error is None:
        error = 0.0 if is_error else math.sqrt(max(figure * (1 - figure), 0) / num_rows)
    least = error if is_error else max(error, 1 / num_rows)
    return Gap((other - figure) if is_error else (figure - other), least, is_error)


def _parts_of_one_model(report: Report) -> list[str]:
    best, mean = gap_to(report, BEST_PARTY), gap_to(report, MEAN_PARTY)
    if best is not None and best.side > 0:
        told = [f"{best.word} every party alone by {best.size}"]
    else:
        told = [_phrase(report, n) for n, g in ((BEST_PARTY, best), (MEAN_PARTY, mean)) if g]
    return [", ".join([*told, *_majority(report, named=not told)])]


def _parts_of_own_models(report: Report, own: Mapping[int, float]) -> list[str]:
    alone = {p[keys.PARTITION_ID]: p[f"solo-{report['metric']}"] for p in report["parties"]}
    known = [(own[n], alone[n]) for n in own if alone.get(n) is not None]
    gained = sum(_gap(report, together, solo).side > 0 for together, solo in known)
    told = []
    if gap_to(report, MEAN_PARTY) is not None:
        told = [
            f"the parties' own models are {_phrase(report, MEAN_PARTY)}",
            f"{gained} of {len(known)} parties gained",
        ]
    return [", ".join([*told, *_majority(report, named=not told)])]


def _majority(report: Report, *, named: bool) -> list[str]:
    """Return a phrase about the constant answer if it is all there is, or is not beaten."""
    gap = gap_to(report, MAJORITY)
    shown = gap is not None and (named or gap.side <= 0)
    return [_phrase(report, MAJORITY)] if shown else []


def _phrase(report: Report, name: str) -> str:
    gap = gap_to(report, name)
    if gap is None:
        return ""
    size = f" by {gap.size}" if gap.side else ""
    return f"{gap.word} {_name(report, name)}{size}"


def _name(report: Report, name: str, *details: str) -> str:
    """Return what people call a baseline, with the best party's number and learner."""
    key, who = f"solo-{report['metric']}", tuple[str, ...]()
    if name == BEST_PARTY:
        best = [p for p in report.get("parties", []) if p[key] == report[f"best-{key}"]]
        who = tuple(f"party {p[keys.PARTITION_ID]}, {p[keys.LEARNER]}" for p in best[:1])
    known = ", ".join((*who, *details))
    plain = CONSTANTS[report["metric"]] if name == MAJORITY else _NAMES[name]
    return f"{plain} ({known})" if known else plain


def _shown(report: Report, prefix: str) -> str:
    figure = report[f"{prefix}{report['metric']}"]
    return f"{figure:.4g}" if _is_error(report) else f"{100 * figure:.1f} %"


def _is_error(report: Report) -> bool:
    return bool(report["metric"] == keys.MEAN_SQUARED_ERROR)


Cause: TypeAlias = Callable[[Report], str | None]

SKEW: Final = 0.1
"""Part of a party's records in other classes than chance explains, from which on it counts."""
RECORDS_A_CLASS: Final = 100
"""Fewest records a class for a teacher of which none can be said to be missing."""
PUBLIC_ROWS_A_CLASS: Final = 20
EVIDENCE: Final[Mapping[str, object]] = {
    "weights": "evidence",
    "consensus": "evidence",
    "corrected": True,
}
"""The settings by which strategies allow for what classes each party has seen."""


def likely_causes(report: Report) -> list[str]:
    """Return the causes that apply, each with a setting to try, the most likely first."""
    found = (cause(report) for cause in _CAUSES)
    return [sentence for sentence in found if sentence]


def noise(report: Report) -> str | None:
    """Name noise: where there is some it decides, for it is meant to hide what parties know."""
    settings = report["settings"]
    spent = [report[key] for key in (keys.EPSILON_PARTY, keys.EPSILON_EXAMPLE)]
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
    """Name parties with classes of their own, combined by a rule that ignores it."""
    key, value = _evidence(report)
    beyond = class_skew(report)
    # What a strategy takes by itself is the rule that its promise allows.
    if not key or report["settings"].get(key) in (value, "auto") or beyond < SKEW:
        return None
    told = "true" if value is True else value
    return (
        f"the classes of parties are one-sided ({100 * beyond:.0f} % of their records beyond "
        f"chance) and the rule that combines answers ignores it: set {key}={told}"
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
    """Return the setting by which the strategy allows for classes and its value; "" if none."""
    declared = _declared(report)
    return next((pair for pair in EVIDENCE.items() if pair[0] in declared), ("", None))


def class_skew(report: Report) -> float:
    """Return how far parties' class shares are from those of all, beyond what chance does.

    That is the total variation distance: which part of a party's records would need another
    class. What n records drawn from all would show, the sum over classes of
    ``sqrt(p (1 - p) / (2 pi n))``, is taken off. The mean is over parties, since each of
    them votes. 0 without classes.

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
