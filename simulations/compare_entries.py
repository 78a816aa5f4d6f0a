"""What a comparison runs: every strategy that fits the data, and why the others do not."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from fl_strategies import SampleOnce, find_algorithm
from fl_strategies.core.tasks import Task
from fl_strategies.exceptions import StrategyError, require
from fl_strategies.privacy.bounds.nfdp import nfdp_theorem, nfdp_tight
from simulations.config import Settings, Value
from simulations.experiment import SCORERS, WORD_MODEL, Federation, load_federation

Given: TypeAlias = Mapping[str, Value]

OWNER: Final = "compare"
LEARN_SCORES: Final[Mapping[str, str]] = {
    "random-forest": "forest-scores",
    "extra-trees": "forest-scores",
    "decision-tree": "forest-scores",
    "xgboost": "xgboost-scores",
    "gradient-boosting": "xgboost-scores",
    "logistic-regression": "ridge",
    "svm": "mlp",
    "k-nearest-neighbours": "mlp",
    "kernel-ridge": "mlp",
}
"""The nearest model that learns from scores and can travel, where a strategy needs one."""
SCORE_MODELS: Final = " (score models)"
EVERYWHERE: Final = "everywhere)"
NETWORK: Final = "mlp"
NOT_HERE: Final[Mapping[str, str]] = {
    "strategy": "--strategy",
    "seed": "--seeds",
    "target-epsilon": "--epsilon",
    "solo": "every comparison, which always has these baselines",
    "central": "every comparison, which always has these baselines",
}
"""Settings that a comparison decides itself, and where the user decides them instead."""
MOST_DRAWN: Final = 0.1
"""Largest chance, for a record, to be used in the clear by noise-free privacy."""
SERVER_MODEL: Final = "the server's model, because parties keep the figures of theirs at home"


@dataclass(frozen=True)
class Draft:
    """An entry before anybody knows whether it fits.

    Parameters
    ----------
    name : str
    decided : mapping
        Settings that make it what it is; nobody can change them.
    usual : mapping
        Settings that suit it, unless the user chose others.
    budget : float, optional
        The epsilon that it must keep to.
    note : str
        What readers of its figure must know.
    """

    name: str
    decided: Given
    usual: Given = field(default_factory=dict)
    budget: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Entry:
    """One line of a comparison: a strategy with all its settings but the seed.

    An entry may run other models than were asked for; its name or its note says which. A
    reference needs the same model at every party and is never recommended.
    """

    name: str
    settings: Given
    note: str = ""
    reference: bool = False
    budget: float | None = None


@dataclass(frozen=True)
class Plan:
    """What is compared, and by name why something is not."""

    entries: tuple[Entry, ...]
    excluded: Mapping[str, str]


def make_plan(
    given: Given,
    *,
    strategies: Sequence[str],
    rounds: int,
    seeds: Sequence[int],
    budgets: Sequence[float] = (),
) -> Plan:
    """Find out what fits; settings and data that fit nothing at all raise."""
    _check_request(given, strategies, seeds, budgets, rounds)
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
            entries.append(_fit(draft, given, federations[0]))
        except StrategyError as error:
            excluded[draft.name] = str(error)
    return Plan(tuple(entries), excluded)


def shared(given: Given) -> Given:
    """Return the settings that are not about one strategy or another."""
    return {key: value for key, value in given.items() if key in Settings.settings()}


def _check_request(
    given: Given,
    strategies: Sequence[str],
    seeds: Sequence[int],
    budgets: Sequence[float],
    rounds: int,
) -> None:
    for name in strategies:
        find_algorithm(name)
    for key in NOT_HERE.keys() & given.keys():
        require(False, OWNER, f"--set {key}", f"left to {NOT_HERE[key]}", given[key])
    different = len({*seeds}) == len(seeds) > 0
    require(different, OWNER, "seeds", "different numbers, at least one", list(seeds))
    require(rounds >= 1, OWNER, "rounds", "at least 1", rounds)
    for budget in budgets:
        require(0 < budget < float("inf"), OWNER, "epsilon", "finite and above 0", budget)


def _fit(draft: Draft, given: Given, federation: Federation) -> Entry:
    """Return the entry with the models that were asked for, or with those nearest to them."""
    asked = {**draft.usual, **given, **draft.decided, "solo": False, "central": False}
    reason: StrategyError | None = None
    for change in _changes(asked):
        try:
            return _built(draft, asked, change, federation)
        except StrategyError as error:
            reason = error
    assert reason is not None  # noqa: S101 - the first change is always tried
    raise reason


def _changes(asked: Given) -> Iterator[tuple[str, Given]]:
    """Yield what may be changed to make a strategy fit, nothing first."""
    settings = Settings.from_run_config(asked)
    kind = find_algorithm(settings.strategy).strategy
    if settings.learner_names:
        yield "", {}
    if kind.same_learner:
        for name in dict.fromkeys([*settings.learner_names, NETWORK, WORD_MODEL]):
            yield f" ({name} {EVERYWHERE}", {"learner": name, "final-learner": name}
        return
    if not settings.learner_names:
        yield "", {}
        return
    final = _learns_scores(settings.final_learner)
    learners = ",".join(map(_learns_scores, settings.learner_names))
    yield f" (final {final})", {"final-learner": final}
    yield SCORE_MODELS, {"learner": learners, "final-learner": final}


def _learns_scores(name: str) -> str:
    return LEARN_SCORES.get(name, name)


def _built(
    draft: Draft, asked: Given, change: tuple[str, Given], federation: Federation
) -> Entry:
    """Return the entry if its strategy can be made."""
    suffix, changed = change
    settings = Settings.from_run_config({**asked, **changed})
    _check_task(settings.strategy, federation.dataset.task)
    fitted = replace(federation, settings=settings)
    if not settings.learner_names and {*fitted.learner_names} <= {*SCORERS}:
        suffix = SCORE_MODELS  # the usual models do not fit
    strategy = fitted.strategy()
    if strategy.last_round == 1:
        settings = replace(settings, num_server_rounds=1)
    models = f"party models {','.join(fitted.learner_names)}" if suffix == SCORE_MODELS else ""
    return Entry(
        name=draft.name + suffix,
        settings={k: v for k, v in settings.to_run_config().items() if k != "seed"},
        note="; ".join(filter(None, (draft.note, models))),
        reference=suffix.endswith(EVERYWHERE),
        budget=draft.budget,
    )


def _check_task(name: str, task: Task) -> None:
    """Raise for labels of a kind that a strategy cannot even be told of."""
    told = "task" in inspect.signature(find_algorithm(name).strategy.__init__).parameters
    require(told or task == "single-label", name, "task", "single-label", task)


# Entries that keep to a budget.

ACCEPTED: Final[Given] = {"accept-noise": True}
"""A table that compares budgets also shows those that buy nothing."""


def _private_drafts(
    given: Given, federations: Sequence[Federation], budget: float, *, several: bool
) -> list[Draft]:
    """Return every strategy and level that can promise something, at one budget."""
    told = f" at {budget:g}" if several else ""
    noisy = {"target-epsilon": budget}
    drafts = [
        _voting("L1", budget),
        _voting("L2", budget),
        Draft(
            "fedmd ldp",
            {"strategy": "fedmd", "release": "ldp", **noisy, **ACCEPTED},
            {"num-server-rounds": 1},
            note=SERVER_MODEL,
        ),
        _sampling(given, federations, budget),
        Draft(
            "fedkd noise",
            {"strategy": "fedkd", "weights": "uniform", **noisy},
            {"noise": "gaussian"},
        ),
        Draft(
            "fedkd noise, noisy counts",
            {"strategy": "fedkd", "weights": "noisy-counts", **noisy},
            {"noise": "gaussian", "count-epsilon": budget / 2},
        ),
    ]
    return [replace(draft, name=draft.name + told, budget=budget) for draft in drafts]


def _voting(level: str, budget: float) -> Draft:
    """Return FedKT at a level; how many queries its noise leaves readable, it says itself."""
    return Draft(
        f"fedkt {level}",
        {
            "strategy": "fedkt",
            "privacy-level": level,
            "target-epsilon": budget,
            **ACCEPTED,
        },
    )


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
