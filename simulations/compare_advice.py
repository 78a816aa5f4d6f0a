"""Which strategy to take, in words, and what it is worth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from simulations.compare_table import PARTY, Line, Promise, Summary, size
from simulations.report import summarise

NEGLIGIBLE: Final = 0.01
"""What may be given up for fewer bytes, if seeds do not tell the two apart either."""
NEEDS: Final[Mapping[str, Callable[[Promise], bool]]] = {
    "whole parties": lambda promise: promise.unit == PARTY,
    "examples": lambda _: True,
    "examples from the server too": lambda promise: not promise.trusts_server,
}
"""What users may want to protect; who protects parties protects their examples as well."""


@dataclass(frozen=True)
class Difference:
    """How far one line is above another: mean and deviation over the seeds they share."""

    mean: float
    deviation: float
    num_seeds: int

    @property
    def clear(self) -> bool:
        """Whether it is larger than the deviation over seeds; one seed cannot say."""
        return self.num_seeds > 1 and abs(self.mean) > self.deviation

    def __str__(self) -> str:
        """Return the size in points, and whether seeds explain it."""
        points = f"{100 * abs(self.mean):.1f} points"
        if self.num_seeds == 1:
            return f"{points} (one seed, so perhaps chance)"
        word = "more than" if self.clear else "within"
        return f"{points} ({word} the deviation over seeds, {100 * self.deviation:.1f})"


def difference(one: Line, other: Line) -> Difference:
    """Compare seed by seed: both had the same split, so what that does cancels out."""
    pairs = zip(one.figures, other.figures, strict=True)
    mean, deviation = summarise([mine - theirs for mine, theirs in pairs])
    return Difference(mean, deviation, len(one.figures))


def recommend(summary: Summary) -> list[str]:
    """Return the recommendation as sentences, one list for the whole comparison."""
    if not summary.budgets:
        return _recommend_of(summary, list(summary.lines), "Take")
    sentences = []
    for budget in summary.budgets:
        for need, meets in NEEDS.items():
            kept = summary.within(budget)
            able = [line for line in kept if line.promise and meets(line.promise)]
            opening = f"To protect {need} at epsilon {budget:g}, take"
            sentences += _recommend_of(summary, able, opening)
    return sentences + _price(summary)


def _recommend_of(summary: Summary, lines: Sequence[Line], opening: str) -> list[str]:
    eligible = [line for line in lines if not line.reference]
    if not eligible:
        return [f"{opening} nothing: no strategy compared here can."]
    best = max(eligible, key=lambda line: line.mean)
    if best.mean <= summary.baselines["majority-"].mean:
        return [_useless(summary, best, opening), _worth(summary, best)]
    taken = _cheapest_equal(summary, best, eligible)
    told = f"{opening} {taken.name}: {100 * taken.mean:.1f} % with {size(taken.num_bytes)}"
    return [
        f"{told} a party in {_rounds(taken)}.",
        *_why_not_best(taken, best),
        _worth(summary, taken),
        *_next_cheaper(taken, eligible),
        *_better_references(taken, lines),
    ]


def _useless(summary: Summary, best: Line, opening: str) -> str:
    majority = summary.baselines["majority-"].mean
    return (
        f"{opening} nothing compared here: the best, {best.name}, has {100 * best.mean:.1f} %, "
        f"not above the majority class ({100 * majority:.1f} %), so it learned nothing of use."
    )


def _rounds(line: Line) -> str:
    return "one round" if line.rounds == 1 else f"{line.rounds} rounds"


def _cheapest_equal(summary: Summary, best: Line, lines: Sequence[Line]) -> Line:
    """Return the cheapest line that is as good as the best for all that seeds can tell.

    If the best is above the best party alone, so must be the one that is taken.
    """
    floor = summary.baselines["best-solo-"].mean
    equal = [
        line
        for line in lines
        if _as_good(difference(best, line)) and (line.mean >= floor or best.mean < floor)
    ]
    return min([best, *equal], key=lambda line: line.num_bytes)


def _as_good(found: Difference) -> bool:
    return found.num_seeds > 1 and not found.clear and found.mean <= NEGLIGIBLE


def _why_not_best(taken: Line, best: Line) -> list[str]:
    if taken is best:
        return []
    times = best.num_bytes / max(taken.num_bytes, 1.0)
    found = f"{best.name} has {100 * best.mean:.1f} %, only {difference(best, taken)} more"
    return [f"{found}, for {times:.1f} times the bytes."]


def _worth(summary: Summary, taken: Line) -> str:
    """Say what it is worth beside the best party and pooled data; a loss comes first."""
    party, pooled = summary.baselines["best-solo-"], summary.baselines["central-"]
    beside = f"{_above(taken, pooled)} pooled data ({100 * pooled.mean:.1f} %)"
    against = f"the best party alone ({100 * party.mean:.1f} %)"
    if taken.mean < party.mean:
        return (
            f"WARNING: none of these reaches {against}; this one is "
            f"{difference(taken, party)} below it, and {beside}. Whoever holds that party's "
            "model should keep it."
        )
    return f"It is {_above(taken, party)} {against}, and {beside}."


def _above(one: Line, other: Line) -> str:
    found = difference(one, other)
    return f"{found} {'above' if found.mean >= 0 else 'below'}"


def _next_cheaper(taken: Line, lines: Sequence[Line]) -> list[str]:
    cheaper = [line for line in lines if line.num_bytes < taken.num_bytes]
    if not cheaper:
        return ["Nothing compared here is cheaper."]
    best = max(cheaper, key=lambda line: line.mean)
    found = f"The best of the cheaper ones, {best.name}, takes {size(best.num_bytes)} a party"
    return [f"{found} and is {_above(best, taken)} it."]


def _better_references(taken: Line, lines: Sequence[Line]) -> list[str]:
    return [
        f"{line.name}, which needs one model for all parties, is {_above(line, taken)} it."
        for line in lines
        if line.reference and line.mean > taken.mean
    ]


def _price(summary: Summary) -> list[str]:
    """Say what the promise costs beside the best entry that makes none."""
    free = [
        line
        for line in summary.lines
        if line.budget is None and line.promise is None and not line.reference
    ]
    if not free:
        return []
    best = max(free, key=lambda line: line.mean)
    return [f"Without any promise, {best.name} has {100 * best.mean:.1f} %."]
