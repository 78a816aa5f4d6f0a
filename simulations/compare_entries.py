"""What a comparison runs: every strategy that fits the data, and why the others do not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from fl_strategies import SampleOnce, find_algorithm
from fl_strategies.errors import StrategyError, require
from fl_strategies.privacy.bounds.nfdp import nfdp_theorem, nfdp_tight
from simulations.config import Settings, options_of
from simulations.federation import Federation, load_federation
from simulations.fitting import Draft, Entry, Given, fit, refuse_settings, shared
from simulations.private_variants import VARIANTS, Variant

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
