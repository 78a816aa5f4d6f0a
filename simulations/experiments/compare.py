"""A comparison: all strategies that fit some data, on the same splits and seeds."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Final

from fl_strategies import SampleOnce, find_algorithm
from fl_strategies.errors import StrategyError, require
from fl_strategies.privacy.bounds.theorems import nfdp_theorem, nfdp_tight
from fl_strategies.registry import PRIVATE_VARIANTS
from fl_strategies.release import PrivateVariant
from fl_strategies.wire import keys
from simulations.config import Settings, options_of
from simulations.experiments.engine import (
    FURTHER,
    TRUSTED,
    Experiment,
    Outcome,
    Results,
    keeps_to,
    shared_notes,
    weakest_promise,
)
from simulations.experiments.entries import (
    Draft,
    Entry,
    Given,
    draft_of,
    fit,
    refuse_settings,
    shared,
)
from simulations.federation import Federation, load_federation
from simulations.results.report import aligned, size, summarise
from simulations.results.verdict import (
    BASELINES,
    BEST_PARTY,
    CONSTANTS,
    MAJORITY,
    MEAN_PARTY,
    POOLED,
    PROMISES,
    is_share,
    shown,
)

OWNER: Final = "compare"
ALWAYS: Final = "every comparison, which always has these baselines"
MOST_DRAWN: Final = 0.1
"""Largest chance, for a record, to be used in the clear by noise-free privacy."""
BY_PROMISE: Final = tuple(sorted(PRIVATE_VARIANTS, key=lambda variant: bool(variant.sample)))
"""Variants with noise, before those that promise another kind of privacy."""
ACCEPTED: Final = "accept-noise"
"""A table that compares budgets also shows those that buy nothing."""


@dataclass(frozen=True)
class Comparison(Experiment):
    """The entries of a comparison and, by name, why others are excluded."""

    entries: tuple[Entry, ...] = ()
    excluded: Mapping[str, str] = field(default_factory=dict)

    def cells(self) -> Iterator[tuple[Entry | None, int, int | None]]:
        """Yield all runs, seed by seed."""
        for seed in self.seeds:
            for entry in (None, *self.entries):
                yield entry, seed, None


def plan_comparison(
    given: Given,
    *,
    strategies: Sequence[str],
    rounds: int,
    seeds: Sequence[int],
    budgets: Sequence[float] = (),
) -> Comparison:
    """Find out what fits; settings and data that fit nothing at all raise."""
    for name in strategies:
        find_algorithm(name)
    elsewhere = {"target-epsilon": "--epsilon", "solo": ALWAYS, "pooled": ALWAYS}
    refuse_settings(OWNER, given, elsewhere)
    require(rounds >= 1, OWNER, "rounds", "at least 1", rounds)
    federations = [
        load_federation(Settings.from_run_config({**shared(given), "seed": seed}))
        for seed in (seeds if budgets else seeds[:1])
    ]
    drafts = [Draft(name, {"strategy": name}) for name in strategies]
    for budget in budgets:
        suffix = f" at {budget:g}" if len(budgets) > 1 else ""
        private = [_private(variant, given, federations, budget) for variant in BY_PROMISE]
        drafts += [replace(one, name=one.name + suffix, budget=budget) for one in private]
    entries, excluded = [], {}
    for draft in drafts:
        if draft.decided["strategy"] not in strategies:
            continue
        try:
            draft = replace(draft, usual={"num-server-rounds": rounds, **draft.usual})
            entries.append(fit(draft, given, federations[0]))
        except StrategyError as error:
            excluded[draft.name] = str(error)
    return Comparison(given, tuple(seeds), tuple(entries), excluded)


def _private(
    variant: PrivateVariant, given: Given, federations: Sequence[Federation], budget: float
) -> Draft:
    """Return a private variant, also where its noise leaves no useful signal."""
    if variant.sample:
        return _sampling(variant, given, federations, budget)
    draft = draft_of(variant, budget)
    if ACCEPTED in options_of(variant.strategy).settings():
        draft = replace(draft, decided={**draft.decided, ACCEPTED: True})
    return draft


def _sampling(
    variant: PrivateVariant, given: Given, federations: Sequence[Federation], budget: float
) -> Draft:
    """Return a variant with the largest sample that the smallest party can afford."""
    records = min(len(rows) for one in federations for rows in one.rows)
    usual = SampleOnce.settings()["with-replacement"].default
    replacement = bool(given.get("with-replacement", usual))

    def affordable(samples: int) -> bool:
        theorem = nfdp_theorem(records, samples, replacement=replacement)
        exact = nfdp_tight(records, samples, replacement=replacement)
        return theorem.epsilon <= budget and exact.delta <= MOST_DRAWN

    num_samples = max(takewhile(affordable, range(2, records + 1)), default=1)
    return Draft(variant.name, variant.decided, {variant.sample: num_samples})


# The summary


BASELINE_NAMES: Final[Mapping[str, str]] = {
    BASELINES[name].prefix: BASELINES[name].label
    for name in (MAJORITY, MEAN_PARTY, BEST_PARTY, POOLED)
}
BYTES: Final = (
    "Mean ± deviation over seeds. Bytes are those of one party, in the mean, over all rounds: "
    "up to the server, and down from it with the delivered model."
)
NOISE: Final = "Epsilon and delta are the largest over seeds. Noise is new in every run."
ANOTHER_PROMISE: Final = (
    "Another promise: epsilon or delta is larger than asked for. With nfdp, delta is the "
    "chance that a record is used in the clear, which a small epsilon does not make up for."
)


@dataclass(frozen=True)
class Promise:
    """The weakest guarantee over the seeds: epsilons are never averaged."""

    unit: str
    epsilon: float
    delta: float
    against: str


@dataclass(frozen=True)
class Line:
    """One entry over all seeds; baselines have values only.

    Bytes are those of one party: means over parties and seeds, of all rounds together.
    """

    name: str
    values: tuple[float, ...]
    further: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    rounds: int = 0
    promise: Promise | None = None
    cpu_seconds: tuple[float, ...] = ()
    reference: bool = False
    budget: float | None = None
    note: str = ""
    metric: str = keys.ACCURACY

    @property
    def shown(self) -> str:
        """The mean for people."""
        return shown(self.metric, self.mean)

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return summarise(self.values)[0]

    @property
    def num_bytes(self) -> float:
        """Bytes that a party sends and receives."""
        return self.bytes_up + self.bytes_down


@dataclass(frozen=True)
class Summary:
    """All lines of a comparison and, by name, why something is not among them."""

    data: str
    metric: str
    seeds: tuple[int, ...]
    delta: float
    baselines: Mapping[str, Line]
    lines: tuple[Line, ...]
    excluded: Mapping[str, str]
    models: str = ""
    commits: tuple[str, ...] = ()

    @property
    def factor(self) -> int:
        """Factor of the metric for people: shares are in percent."""
        return 100 if is_share(self.metric) else 1

    @property
    def budgets(self) -> list[float]:
        """The budgets that entries were to keep to, smallest first."""
        return sorted({line.budget for line in self.lines if line.budget is not None})

    def within(self, budget: float) -> list[Line]:
        """Return the entries that keep to a budget, delta included."""
        return [
            line
            for line in self.lines
            if line.budget == budget
            and line.promise is not None
            and keeps_to(budget, self.delta, line.promise.epsilon, line.promise.delta)
        ]

    def groups(self) -> dict[str, list[Line]]:
        """Return the lines by their promises, in the order of the table, and the baselines."""
        groups = {"strategies": list(self.lines)}
        if self.budgets:
            groups = {f"within epsilon {b:g}": self.within(b) for b in self.budgets}
            kept = [line for lines in groups.values() for line in lines]
            others = [line for line in self.lines if line not in kept]
            groups["another promise"] = [line for line in others if line.promise]
            groups["no promise, for reference"] = [line for line in others if not line.promise]
        groups["baselines"] = list(self.baselines.values())
        return {title: lines for title, lines in groups.items() if lines}


def summarise_comparison(comparison: Comparison, results: Results) -> Summary:
    """Combine the seeds of every entry that has results for all of them."""
    settings = comparison.settings(None, comparison.seeds[0])
    federation = load_federation(settings)  # which knows the models that were not asked for
    measured = comparison.found(results, None)
    runs = [
        (entry, comparison.found(results, entry))
        for entry in comparison.entries
        if entry.name not in results.failed
    ]
    commits = {one["commit"] for _, outcomes in runs for one in outcomes}
    metric = measured[0]["metric"]
    constant = CONSTANTS[metric].removeprefix("the ")
    return Summary(
        data=settings.data,
        metric=metric,
        seeds=comparison.seeds,
        delta=settings.delta,
        baselines={
            prefix: Line(
                constant if prefix == BASELINES[MAJORITY].prefix else name,
                tuple(one["figures"][prefix] for one in measured),
                metric=metric,
            )
            for prefix, name in BASELINE_NAMES.items()
        },
        lines=tuple(_line(entry, outcomes, metric) for entry, outcomes in runs),
        excluded={**comparison.excluded, **results.failed},
        models=f"{','.join(federation.learner_names)}; pooled {federation.final_learner}",
        commits=tuple(sorted(filter(None, commits))),
    )


def _line(entry: Entry, outcomes: Sequence[Outcome], metric: str) -> Line:
    names = [n for n in FURTHER if all(n in one["further"] for one in outcomes)]
    most = max(one["num-rejected"] for one in outcomes)
    rejections = f"up to {most} parties excluded in a run, because they failed" if most else ""
    promises = [
        Promise(unit, *weakest_promise(outcomes, unit), outcomes[0]["against"])
        for unit in PROMISES
    ]
    finite = [one for one in promises if math.isfinite(one.epsilon + one.delta)]
    return Line(
        name=entry.name,
        values=tuple(one["figures"][""] for one in outcomes),
        further={name: tuple(one["further"][name] for one in outcomes) for name in names},
        bytes_up=summarise([one["bytes-up"] for one in outcomes])[0],
        bytes_down=summarise([one["bytes-down"] for one in outcomes])[0],
        rounds=max(one["num-rounds"] for one in outcomes),
        # To parties, if that costs no more than to examples.
        promise=min(finite, key=lambda promise: promise.epsilon, default=None),
        cpu_seconds=tuple(one["cpu-seconds"] for one in outcomes),
        reference=entry.reference,
        budget=entry.budget,
        note="; ".join(filter(None, (entry.note, rejections))),
        metric=metric,
    )


# The table


def spread(values: Sequence[float], factor: float = 100, digits: int = 1) -> str:
    """Return mean and deviation.

    Examples
    --------
    >>> spread([0.8, 0.9])
    '85.0 ± 7.1'
    """
    if not values:
        return "-"
    mean, deviation = summarise(values)
    deviated = f" ± {factor * deviation:.{digits}f}" if len(values) > 1 else ""
    return f"{factor * mean:.{digits}f}{deviated}"


def render(summary: Summary) -> str:
    """Return the table and what must be known to read it."""
    further = [n for n in FURTHER if any(n in line.further for line in summary.lines)]
    metrics = [
        f"{name.replace('-', ' ')} %" if is_share(name) else name.replace("-", " ")
        for name in (summary.metric, *further)
    ]
    header = ["", *metrics, "up", "down", "rounds", "epsilon", "protects", "CPU s"]
    rows = []
    for title, lines in summary.groups().items():
        rows.append([f"{title}:", *[""] * (len(header) - 1)])
        rows += [_cells(line, further) for line in sorted(lines, key=lambda one: -one.mean)]
    return "\n".join([aligned(header, rows), "", *_legend(summary)])


def _cells(line: Line, further: Sequence[str]) -> list[str]:
    columns = {line.metric: line.values}
    columns |= {name: line.further.get(name, ()) for name in further}
    cells = [
        spread(values) if is_share(name) else spread(values, 1, 3)
        for name, values in columns.items()
    ]
    if not line.rounds:
        return [line.name, *cells, *["-"] * 6]
    promise = line.promise
    return [
        line.name,
        *cells,
        size(line.bytes_up),
        size(line.bytes_down),
        str(line.rounds),
        f"{promise.epsilon:.3g}" if promise else "none",
        f"{promise.unit}, delta {promise.delta:.2g}" if promise else "nothing",
        spread(line.cpu_seconds, 1),
    ]


def _legend(summary: Summary) -> list[str]:
    seeds = ", ".join(map(str, summary.seeds))
    commits = ", ".join(dict.fromkeys(commit[:10] for commit in summary.commits))
    lines = [f"{summary.data}, seeds {seeds}, commit {commits or 'unknown'}.", BYTES]
    lines.append(f"Baselines: {summary.models}.")
    if any(line.promise for line in summary.lines):
        lines.append(NOISE)
    if "another promise" in summary.groups():
        lines.append(ANOTHER_PROMISE)
    notes = []
    for line in summary.lines:
        against = f"protected against {line.promise.against}" if line.promise else ""
        notes += [(line.name, line.note), (line.name, against)]
    lines += [f"{'; '.join(names)}: {note}." for note, names in shared_notes(notes).items()]
    return lines + [f"not compared: {name}: {why}" for name, why in summary.excluded.items()]


def to_json(summary: Summary, advice: Sequence[str]) -> dict[str, Any]:
    """Return the table for programs; an epsilon of null promises nothing."""
    return {
        "data": summary.data,
        "metric": summary.metric,
        "seeds": list(summary.seeds),
        "rows": [
            {"group": group, **_row(line)}
            for group, lines in summary.groups().items()
            for line in lines
        ],
        "excluded": dict(summary.excluded),
        "recommendation": list(advice),
        "commits": list(summary.commits),
    }


def _row(line: Line) -> dict[str, Any]:
    promise = line.promise
    mean, deviation = summarise(line.values)
    return {
        "name": line.name,
        "mean": mean,
        "deviation": deviation,
        "by-seed": list(line.values),
        **{name: summarise(values)[0] for name, values in line.further.items()},
        "bytes-up-per-party": line.bytes_up,
        "bytes-down-per-party": line.bytes_down,
        "rounds": line.rounds,
        "unit": promise.unit if promise else None,
        "epsilon": promise.epsilon if promise else None,
        "delta": promise.delta if promise else None,
        "protected-against": promise.against if promise else None,
        "cpu-seconds": summarise(line.cpu_seconds)[0] if line.cpu_seconds else None,
        "note": line.note,
    }


# The recommendation


NEGLIGIBLE: Final = 0.01
"""Loss to accept for fewer bytes, if seeds do not tell the two apart either."""
NEEDS: Final[Mapping[str, Callable[[Promise], bool]]] = {
    "whole parties": lambda promise: promise.unit == "party",
    "examples": lambda _: True,
    "examples from the server too": lambda promise: TRUSTED not in promise.against,
}
"""Units that users may want to protect; protecting parties includes their examples."""


@dataclass(frozen=True)
class Difference:
    """Gap between two lines: mean and deviation over the seeds they share."""

    mean: float
    deviation: float
    num_seeds: int
    metric: str = keys.ACCURACY

    @property
    def clear(self) -> bool:
        """Whether it is larger than the deviation over seeds; one seed cannot show it."""
        return self.num_seeds > 1 and abs(self.mean) > self.deviation

    def __str__(self) -> str:
        """Return the size, in points of shares, and whether seeds explain it."""
        share = is_share(self.metric)
        gap = f"{100 * abs(self.mean):.1f} points" if share else f"{abs(self.mean):.3f}"
        if self.num_seeds == 1:
            return f"{gap} (one seed, so perhaps chance)"
        word = "more than" if self.clear else "within"
        deviation = f"{100 * self.deviation:.1f}" if share else f"{self.deviation:.3f}"
        return f"{gap} ({word} the deviation over seeds, {deviation})"


def difference(one: Line, other: Line) -> Difference:
    """Compare seed by seed: both had the same split, so what that does cancels out."""
    pairs = zip(one.values, other.values, strict=True)
    mean, deviation = summarise([mine - theirs for mine, theirs in pairs])
    return Difference(mean, deviation, len(one.values), one.metric)


def recommend(summary: Summary) -> list[str]:
    """Return the recommendation as sentences, one list for the whole comparison."""
    if not summary.budgets:
        return _recommend_of(summary, summary.lines, "Take")
    sentences = []
    for budget in summary.budgets:
        for need, meets in NEEDS.items():
            kept = summary.within(budget)
            able = [line for line in kept if line.promise and meets(line.promise)]
            opening = f"To protect {need} at epsilon {budget:g}, take"
            sentences += _recommend_of(summary, able, opening)
    free = [
        line
        for line in summary.lines
        if line.budget is None and line.promise is None and not line.reference
    ]
    if free:
        best = max(free, key=lambda line: line.mean)
        sentences.append(f"Without any promise, {best.name} has {best.shown}.")
    return sentences


def _recommend_of(summary: Summary, lines: Sequence[Line], opening: str) -> list[str]:
    eligible = [line for line in lines if not line.reference]
    if not eligible:
        return [f"{opening} nothing: no strategy compared here can."]
    best = max(eligible, key=lambda line: line.mean)
    majority = summary.baselines["majority-"]
    if best.mean <= majority.mean:
        useless = (
            f"{opening} nothing compared here: the best, {best.name}, has {best.shown}, not "
            f"above the {majority.name} ({majority.shown}), so it learned nothing of use."
        )
        return [useless, _worth(summary, best)]
    taken = _cheapest_equal(summary, best, eligible)
    rounds = "one round" if taken.rounds == 1 else f"{taken.rounds} rounds"
    choice = f"{opening} {taken.name}: {taken.shown} with {size(taken.num_bytes)}"
    sentences = [f"{choice} a party in {rounds}."]
    if taken is not best:
        times = best.num_bytes / max(taken.num_bytes, 1.0)
        more = f"{best.shown}, only {difference(best, taken)} more"
        sentences.append(f"{best.name} has {more}, for {times:.1f} times the bytes.")
    return [
        *sentences,
        _worth(summary, taken),
        _next_cheaper(taken, eligible),
        *(
            f"{line.name}, which needs one model for all parties, is {_above(line, taken)} it."
            for line in lines
            if line.reference and line.mean > taken.mean
        ),
    ]


def _cheapest_equal(summary: Summary, best: Line, lines: Sequence[Line]) -> Line:
    """Return the cheapest line that is as good as the best for all that seeds can tell.

    If the best is above the best party alone, so must be the one that is taken.
    """
    floor = summary.baselines["best-solo-"].mean
    gaps = [(line, difference(best, line)) for line in lines]
    equal = [
        line
        for line, gap in gaps
        if (gap.num_seeds > 1 and not gap.clear and gap.mean <= NEGLIGIBLE)
        and (line.mean >= floor or best.mean < floor)
    ]
    return min([best, *equal], key=lambda line: line.num_bytes)


def _worth(summary: Summary, taken: Line) -> str:
    """Compare with the best party and with pooled data; a loss comes first."""
    party, pooled = summary.baselines["best-solo-"], summary.baselines["central-"]
    beside = f"{_above(taken, pooled)} pooled data ({pooled.shown})"
    against = f"the best party alone ({party.shown})"
    if taken.mean < party.mean:
        return (
            f"WARNING: none of these reaches {against}; this one is "
            f"{difference(taken, party)} below it, and {beside}. Whoever holds that party's "
            "model should keep it."
        )
    return f"It is {_above(taken, party)} {against}, and {beside}."


def _above(one: Line, other: Line) -> str:
    gap = difference(one, other)
    return f"{gap} {'above' if gap.mean >= 0 else 'below'}"


def _next_cheaper(taken: Line, lines: Sequence[Line]) -> str:
    cheaper = [line for line in lines if line.num_bytes < taken.num_bytes]
    if not cheaper:
        return "Nothing compared here is cheaper."
    best = max(cheaper, key=lambda line: line.mean)
    takes = f"The best of the cheaper ones, {best.name}, takes {size(best.num_bytes)} a party"
    return f"{takes} and is {_above(best, taken)} it."
