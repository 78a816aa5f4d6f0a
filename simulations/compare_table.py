"""What a comparison shows: one line an entry, means and deviations over the seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from simulations.compare import Comparison
from simulations.config import Settings
from simulations.federation import load_federation
from simulations.fitting import Entry
from simulations.report import summarise, table
from simulations.reproduce import Outcome, find
from simulations.resuming import FURTHER, PROMISES, Results

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


def size(num_bytes: float) -> str:
    """Return a number of bytes as people read it.

    Examples
    --------
    >>> size(512), size(2_340), size(5_600_000)
    ('512 B', '2.3 kB', '5.6 MB')
    """
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes:.0f} B"


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
    return "\n".join([table(header, rows), "", *_legend(summary)])


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
