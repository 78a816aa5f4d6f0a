"""Why a federation may lose: each cause that the report of a run can show, with its remedy."""

import math
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Final, TypeAlias

import numpy as np

from fl_strategies._util.arrays import FloatArray
from fl_strategies.wire import keys

Report: TypeAlias = Mapping[str, Any]
Cause: TypeAlias = Callable[[Report], str | None]

SKEW: Final = 0.1
"""Part of a party's records in other classes than chance explains, from which on it counts."""
RECORDS_A_CLASS: Final = 100
"""Fewest records a class for a teacher of which none can be said to be missing."""
PUBLIC_ROWS_A_CLASS: Final = 20
EVIDENCE: Final[Mapping[str, tuple[str, object]]] = {
    "fedkd": ("weights", "evidence"),
    "fedmd": ("consensus", "evidence"),
    "fedkt": ("corrected", True),
}
"""The setting by which a strategy allows for what classes each party has seen."""
LEARNS_FROM_PUBLIC: Final = tuple(EVIDENCE)


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
    fewer = "num-queries" if report["strategy"] == "fedkt" else "public rows"
    return (
        f"noise hides the answers{size}: allow a larger epsilon, fewer {fewer} or more parties"
    )


def one_sided_classes(report: Report) -> str | None:
    """Name parties with classes of their own, combined by a rule that ignores it."""
    key, value = EVIDENCE.get(report["strategy"], ("", None))
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
    if report["strategy"] != "fedkt":
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
    settings, strategy = report["settings"], report["strategy"]
    if not settings["public"] or strategy not in LEARNS_FROM_PUBLIC:
        return None
    key, value = EVIDENCE[strategy]
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
    if enough or report["strategy"] not in LEARNS_FROM_PUBLIC:
        return None
    return f"there are {rows} public rows only: provide more (public-rows)"


_CAUSES: Final[tuple[Cause, ...]] = (
    noise,
    one_sided_classes,
    few_records_a_teacher,
    unlike_public_rows,
    few_public_rows,
)


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
