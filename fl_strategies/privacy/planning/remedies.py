"""What would have to be different for a strategy to work: the nearest value, by search."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from fl_strategies.privacy.planning.draft import Planner
from fl_strategies.privacy.planning.facts import Facts
from fl_strategies.privacy.planning.planners import with_knob
from fl_strategies.privacy.statement import LARGE_EPSILON

_MOST: Final[Mapping[str, float]] = {
    "num_parties": 10**6,
    "num_records": 10**9,
    "most_teachers": 10**5,
    "target_epsilon": LARGE_EPSILON,
}
_LEAST: Final[Mapping[str, int]] = {"num_classes": 2, "num_public": 10}
_WORDS: Final[Mapping[str, str]] = {
    "num_parties": "parties",
    "num_records": "records of a party",
    "most_teachers": "teachers of a party (num-teachers)",
    "num_classes": "classes",
    "num_public": "public rows",
    "target_epsilon": "epsilon",
}
_FINE: Final = 1.005


@dataclass(frozen=True)
class Remedy:
    """The nearest value of one fact with which a strategy works, all others as they are."""

    knob: str
    value: float

    def __str__(self) -> str:
        """Say it in words."""
        bound = "at most" if self.knob in _LEAST else "at least"
        if self.knob == "target_epsilon":
            return f"epsilon of {bound} {self.value:.3g}"
        return f"{bound} {self.value:.0f} {_WORDS[self.knob]}"


def remedies(planner: Planner, facts: Facts) -> tuple[Remedy, ...]:
    """Return what would work instead, each alone; nothing where no value does."""
    found = ((knob, _nearest(planner, facts, knob)) for knob in planner.knobs)
    return tuple(Remedy(knob, value) for knob, value in found if value is not None)


def advice(planner: Planner, facts: Facts, setting: str) -> str:
    """Return what to do instead of what is refused: leave a setting open, or change a fact."""
    if not planner.problem(facts):
        draft = planner.draft(facts)
        return f"Leave {setting} open, which gives {draft.num_asked} {draft.asked}"
    found = "; or ".join(map(str, remedies(planner, facts)))
    return f"What would work: {found}" if found else "No number of parties or epsilon would do"


def _nearest(planner: Planner, facts: Facts, knob: str) -> float | None:
    def works(value: float) -> bool:
        changed, other = with_knob(planner, facts, knob, value)
        return not changed.problem(other)

    start = float(getattr(facts, knob, 0) or getattr(planner, knob, 1))
    if knob in _LEAST:
        return _whole(works, int(start), _LEAST[knob])
    if knob == "target_epsilon":
        return _larger(works, start, _MOST[knob])
    return _whole(works, int(start), int(_MOST[knob]))


def _whole(works: Callable[[int], bool], start: int, end: int) -> int | None:
    """Return the whole number nearest to the start that works, in the direction of an end."""
    bad, good, step = start, start, 1 if end > start else -1
    while good != end:
        good = min(2 * good, end) if step > 0 else max(good // 2, end)
        if works(good):
            break
        bad = good
    if good == bad:
        return None
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        bad, good = (bad, middle) if works(middle) else (middle, good)
    return good


def _larger(works: Callable[[float], bool], start: float, most: float) -> float | None:
    """Return the least number above the start that works, rounded up to three digits."""
    if start >= most or not works(most):
        return None
    low, high = start, most
    while high / low > _FINE:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if works(middle) else (middle, high)
    rounded = float(f"{high * _FINE:.3g}")
    return rounded if works(rounded) else high
