"""A comparison: all strategies that fit some data, on the same splits and seeds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from fl_strategies import SampleOnce, find_algorithm
from fl_strategies.errors import StrategyError, require
from fl_strategies.privacy.bounds.theorems import nfdp_theorem, nfdp_tight
from simulations.config import Settings, options_of
from simulations.experiments.engine import (
    FURTHER,
    PROMISES,
    Experiment,
    Outcome,
    Results,
    Runner,
    Say,
    find,
    run_missing,
)
from simulations.experiments.entries import (
    VARIANTS,
    Draft,
    Entry,
    Given,
    Variant,
    fit,
    refuse_settings,
    shared,
)
from simulations.federation import Federation, load_federation
from simulations.results.report import aligned, size, summarise


@dataclass(frozen=True)
class Plan:
    """What is compared, and by name why something is not."""

    entries: tuple[Entry, ...]
    excluded: Mapping[str, str]


@dataclass(frozen=True)
class Comparison(Experiment):
    """What is compared: the settings of all entries, the seeds, and the entries."""

    plan: Plan


def run_comparison(comparison: Comparison, run: Runner, kept: Path, say: Say) -> Results:
    """Run what is missing, seed by seed; see `run_missing`."""
    entries = (None, *comparison.plan.entries)
    tasks = [comparison.task(entry, seed) for seed in comparison.seeds for entry in entries]
    return run_missing(tasks, run, kept, say)


OWNER: Final = "compare"
NOT_HERE: Final[Mapping[str, str]] = {
    "strategy": "--strategy",
    "seed": "--seeds",
    "target-epsilon": "--epsilon",
    "solo": "every comparison, which always has these baselines",
    "pooled": "every comparison, which always has these baselines",
    "pate": "python -m simulations run, which shows it",
    "public-only": "python -m simulations run, which shows it",
}
"""Settings that a comparison decides itself, and where the user decides them instead."""
MOST_DRAWN: Final = 0.1
"""Largest chance, for a record, to be used in the clear by noise-free privacy."""
LEAST_QUERIES_PER_CLASS: Final = 5


def make_plan(
    given: Given,
    *,
    strategies: Sequence[str],
    rounds: int,
    seeds: Sequence[int],
    budgets: Sequence[float] = (),
) -> Plan:
    """Find out what fits; settings and data that fit nothing at all raise."""
    _check_request(given, strategies, rounds)
    federations = [
        load_federation(Settings.from_run_config({**shared(given), "seed": seed}))
        for seed in (seeds if budgets else seeds[:1])
    ]
    drafts = [Draft(name, {"strategy": name}) for name in strategies]
    for budget in budgets:
        drafts += _private_drafts(given, federations, budget, several=len(budgets) > 1)
    entries, excluded = [], {}
    for draft in drafts:
        if draft.decided["strategy"] not in strategies:
            continue
        try:
            draft = replace(draft, usual={"num-server-rounds": rounds, **draft.usual})
            entries.append(fit(draft, given, federations[0]))
        except StrategyError as error:
            excluded[draft.name] = str(error)
    return Plan(tuple(entries), excluded)


def _check_request(given: Given, strategies: Sequence[str], rounds: int) -> None:
    for name in strategies:
        find_algorithm(name)
    refuse_settings(OWNER, given, NOT_HERE)
    require(rounds >= 1, OWNER, "rounds", "at least 1", rounds)


# Entries that keep to a budget.

ACCEPTED: Final = "accept-noise"
"""A table that compares budgets also shows those that buy nothing."""


def _private_drafts(
    given: Given, federations: Sequence[Federation], budget: float, *, several: bool
) -> list[Draft]:
    """Return every strategy and level that can promise something, at one budget."""
    told = f" at {budget:g}" if several else ""
    drafts = [_private(variant, budget) for variant in VARIANTS]
    drafts.append(_sampling(given, federations, budget))
    return [replace(draft, name=draft.name + told, budget=budget) for draft in drafts]


def _private(variant: Variant, budget: float) -> Draft:
    """Return one of them, however loud its noise."""
    draft = variant.draft(budget)
    if ACCEPTED in options_of(variant.strategy).settings():
        draft = replace(draft, decided={**draft.decided, ACCEPTED: True})
    return draft


def _sampling(given: Given, federations: Sequence[Federation], budget: float) -> Draft:
    """Return FedMD with a sample that the smallest party of any seed can afford."""
    records = min(len(rows) for one in federations for rows in one.rows)
    replacement = bool(
        given.get("with-replacement", SampleOnce.settings()["with-replacement"].default)
    )
    num_samples = 1
    while num_samples < records and _affordable(
        records, num_samples + 1, budget, replacement=replacement
    ):
        num_samples += 1
    decided: Given = {"strategy": "fedmd", "release": "nfdp"}
    return Draft("fedmd nfdp", decided, {"num-samples": num_samples})


def _affordable(records: int, samples: int, budget: float, *, replacement: bool) -> bool:
    theorem = nfdp_theorem(records, samples, replacement=replacement)
    exact = nfdp_tight(records, samples, replacement=replacement)
    return theorem.epsilon <= budget and exact.delta <= MOST_DRAWN


PARTY: Final = "party"
EXAMPLE: Final = "example"
BASELINE_NAMES: Final[Mapping[str, str]] = {
    "majority-": "majority class",
    "solo-": "mean party alone",
    "best-solo-": "best party alone",
    "central-": "pooled data",
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
SLACK: Final = 1e-9
"""What rounding may add to an epsilon that was calibrated to a budget."""


@dataclass(frozen=True)
class Promise:
    """The weakest guarantee over the seeds: epsilons are never averaged."""

    unit: str
    epsilon: float
    delta: float
    against: str

    @property
    def trusts_server(self) -> bool:
        """Whether the server sees what others must not."""
        return "except the server" in self.against


@dataclass(frozen=True)
class Line:
    """One entry over all seeds; baselines have figures only.

    Bytes are those of one party: means over parties and seeds, of all rounds together.
    """

    name: str
    figures: tuple[float, ...]
    further: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    rounds: int = 0
    promise: Promise | None = None
    cpu_seconds: tuple[float, ...] = ()
    reference: bool = False
    budget: float | None = None
    note: str = ""

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return summarise(self.figures)[0]

    @property
    def num_bytes(self) -> float:
        """What a party sends and receives."""
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
    def budgets(self) -> list[float]:
        """The budgets that entries were to keep to, smallest first."""
        return sorted({line.budget for line in self.lines if line.budget is not None})

    def within(self, budget: float) -> list[Line]:
        """Return the entries that keep to a budget, delta included."""
        own = [line for line in self.lines if line.budget == budget]
        return [line for line in own if self._keeps(line.promise, budget)]

    def _keeps(self, promise: Promise | None, budget: float) -> bool:
        return (
            promise is not None
            and promise.epsilon <= budget * (1 + SLACK)
            and promise.delta <= self.delta * (1 + SLACK)
        )

    def groups(self) -> dict[str, list[Line]]:
        """Return the lines by what they promise, in the order of the table."""
        if not self.budgets:
            return {"strategies": list(self.lines)}
        groups = {f"within epsilon {b:g}": self.within(b) for b in self.budgets}
        kept = [line for lines in groups.values() for line in lines]
        others = [line for line in self.lines if line not in kept]
        groups["another promise"] = [line for line in others if line.promise]
        groups["no promise, for reference"] = [line for line in others if not line.promise]
        return {title: lines for title, lines in groups.items() if lines}


def summarise_comparison(comparison: Comparison, results: Results) -> Summary:
    """Combine the seeds of every entry that has results for all of them."""
    settings = comparison.settings(None, comparison.seeds[0])
    measured = _outcomes(comparison, None, results)
    found = {
        entry.name: _outcomes(comparison, entry, results)
        for entry in comparison.plan.entries
        if entry.name not in results.failed
    }
    runs = [outcome for several in found.values() for outcome in several]
    return Summary(
        data=settings.data,
        metric=measured[0]["metric"],
        seeds=comparison.seeds,
        delta=settings.delta,
        baselines={
            prefix: Line(name, tuple(one["figures"][prefix] for one in measured))
            for prefix, name in BASELINE_NAMES.items()
        },
        lines=tuple(
            _line(entry, found[entry.name])
            for entry in comparison.plan.entries
            if entry.name in found
        ),
        excluded={**comparison.plan.excluded, **results.failed},
        models=_models(settings),
        commits=tuple(sorted({one["commit"] for one in runs if one["commit"]})),
    )


def _models(settings: Settings) -> str:
    """Return the models of the baselines, also where none were asked for."""
    federation = load_federation(settings)
    return f"{','.join(federation.learner_names)}; pooled {federation.final_learner}"


def _outcomes(comparison: Comparison, entry: Entry | None, results: Results) -> list[Outcome]:
    found = [find(results.outcomes, comparison.asked(entry, seed)) for seed in comparison.seeds]
    return [outcome for outcome in found if outcome is not None]


def _line(entry: Entry, outcomes: Sequence[Outcome]) -> Line:
    names = [n for n in FURTHER if all(n in one["further"] for one in outcomes)]
    return Line(
        name=entry.name,
        figures=tuple(one["figures"][""] for one in outcomes),
        further={name: tuple(one["further"][name] for one in outcomes) for name in names},
        bytes_up=summarise([one["bytes-up"] for one in outcomes])[0],
        bytes_down=summarise([one["bytes-down"] for one in outcomes])[0],
        rounds=max(one["num-rounds"] for one in outcomes),
        promise=_promise(outcomes),
        cpu_seconds=tuple(one["cpu-seconds"] for one in outcomes),
        reference=entry.reference,
        budget=entry.budget,
        note="; ".join(filter(None, (entry.note, _rejections(outcomes)))),
    )


def _rejections(outcomes: Sequence[Outcome]) -> str:
    most = max(one["num-rejected"] for one in outcomes)
    return f"up to {most} parties excluded in a run, because they failed" if most else ""


def _promise(outcomes: Sequence[Outcome]) -> Promise | None:
    """Return the promise at its worst, to parties if that costs no more than to examples."""
    found = []
    for unit, (epsilon, delta) in PROMISES.items():
        if all(one[epsilon] is not None and one[delta] is not None for one in outcomes):
            worst = max(one[epsilon] for one in outcomes), max(one[delta] for one in outcomes)
            found.append(Promise(unit, *worst, outcomes[0]["against"]))
    return min(found, key=lambda promise: promise.epsilon, default=None)


# For people.


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
    header = [
        "",
        *(f"{name.replace('-', ' ')} %" for name in (summary.metric, *further)),
        "up",
        "down",
        "rounds",
        "epsilon",
        "protects",
        "CPU s",
    ]
    groups = {**summary.groups(), "baselines": list(summary.baselines.values())}
    rows = []
    for title, lines in groups.items():
        rows.append([f"{title}:", *[""] * (len(header) - 1)])
        rows += [_cells(line, further) for line in sorted(lines, key=lambda one: -one.mean)]
    return "\n".join([aligned(header, rows), "", *_legend(summary)])


def _cells(line: Line, further: Sequence[str]) -> list[str]:
    figures = [line.figures, *(line.further.get(name, ()) for name in further)]
    if not line.rounds:
        return [line.name, *map(spread, figures), *["-"] * 6]
    promise = line.promise
    return [
        line.name,
        *map(spread, figures),
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
    lines += _shared_notes(summary)
    lines += [f"not compared: {name}: {why}" for name, why in summary.excluded.items()]
    return lines


def _shared_notes(summary: Summary) -> list[str]:
    """Return each note once, after the names of the lines that it is about."""
    names: dict[str, list[str]] = {}
    for line in summary.lines:
        against = f"protected against {line.promise.against}" if line.promise else ""
        for note in filter(None, (line.note, against)):
            names.setdefault(note, []).append(line.name)
    return [f"{'; '.join(several)}: {note}." for note, several in names.items()]


def to_json(summary: Summary, advice: Sequence[str]) -> dict[str, Any]:
    """Return the table for programs; an epsilon of null promises nothing."""
    groups = {**summary.groups(), "baselines": list(summary.baselines.values())}
    rows = [_row(group, line) for group, lines in groups.items() for line in lines]
    return {
        "data": summary.data,
        "metric": summary.metric,
        "seeds": list(summary.seeds),
        "rows": rows,
        "excluded": dict(summary.excluded),
        "recommendation": list(advice),
        "commits": list(summary.commits),
    }


def _row(group: str, line: Line) -> dict[str, Any]:
    promise = line.promise
    mean, deviation = summarise(line.figures)
    return {
        "group": group,
        "name": line.name,
        "mean": mean,
        "deviation": deviation,
        "by-seed": list(line.figures),
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
