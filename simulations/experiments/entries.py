"""One line of a comparison or a curve: a strategy with models that fit it and the data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from fl_strategies import find_algorithm
from fl_strategies.errors import StrategyError, require
from fl_strategies.registry import PRIVATE_VARIANTS
from fl_strategies.release import PrivateVariant
from simulations.config import Settings, Value, common_settings
from simulations.federation import SCORERS, WORD_MODEL, Federation

Given: TypeAlias = Mapping[str, Value]

LEARN_SCORES: Final[Mapping[str, str]] = {
    "random-forest": "forest-scores",
    "forest": "forest-scores",
    "extra-trees": "forest-scores",
    "decision-tree": "forest-scores",
    "boosted-trees": "xgboost-scores",
    "lightgbm": "xgboost-scores",
    "xgboost": "xgboost-scores",
    "gradient-boosting": "xgboost-scores",
    "logistic-regression": "ridge",
    "svm": "mlp",
    "k-nearest-neighbours": "mlp",
    "kernel-ridge": "mlp",
}
"""The nearest portable model that learns from scores, where a strategy needs one."""
SCORE_MODELS: Final = " (score models)"
EVERYWHERE: Final = "everywhere)"
NETWORK: Final = "mlp"
RUN: Final = "python -m simulations run, which shows it"
DECIDED: Final = {"strategy": "--strategy", "seed": "--seeds", "pate": RUN, "public-only": RUN}
"""Settings that experiments decide, and where the user decides them instead."""


@dataclass(frozen=True)
class Draft:
    """An entry that may not fit."""

    name: str
    decided: Given
    """Settings that define it; the user cannot change them."""
    usual: Given = field(default_factory=dict)
    """Settings that suit it, unless the user chose others."""
    budget: float | None = None
    """The epsilon that it must keep to."""
    note: str = ""
    """Remark for readers of its results."""


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


def shared(given: Given) -> Given:
    """Return the settings that are not about one strategy or another."""
    return {key: value for key, value in given.items() if key in common_settings()}


def refuse_settings(owner: str, given: Given, elsewhere: Mapping[str, str]) -> None:
    """Raise for settings that are decided elsewhere, and say where."""
    for key, place in {**DECIDED, **elsewhere}.items():
        require(key not in given, owner, f"--set {key}", f"left to {place}", given.get(key))


def fit(draft: Draft, given: Given, federation: Federation) -> Entry:
    """Return the entry with the models that were asked for, or with those nearest to them."""
    asked = {**draft.usual, **given, **draft.decided, "solo": False, "pooled": False}
    reason: StrategyError | None = None
    for change in _changes(asked):
        try:
            return _built(draft, asked, change, federation)
        except StrategyError as error:
            reason = error
    assert reason is not None  # noqa: S101 - the first change is always tried
    raise reason


def _changes(asked: Given) -> Iterator[tuple[str, Given]]:
    """Yield changes that may make a strategy fit, none first, with suffixes of its name."""
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
    final = LEARN_SCORES.get(settings.final_learner, settings.final_learner)
    learners = ",".join(LEARN_SCORES.get(name, name) for name in settings.learner_names)
    yield f" (final {final})", {"final-learner": final}
    yield SCORE_MODELS, {"learner": learners, "final-learner": final}


def _built(
    draft: Draft, asked: Given, change: tuple[str, Given], federation: Federation
) -> Entry:
    """Return the entry if its strategy can be made."""
    suffix, changed = change
    settings = Settings.from_run_config({**asked, **changed})
    task, takes = federation.dataset.task, find_algorithm(settings.strategy).strategy.takes
    fits = "task" in takes or task == "single-label"
    require(fits, settings.strategy, "task", "single-label", task)
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


VARIANTS: Final = tuple(variant for variant in PRIVATE_VARIANTS if not variant.sample)
"""Those that add noise, which is what curves are about."""


def draft_of(variant: PrivateVariant, budget: float, *, apart: bool = False) -> Draft:
    """Return a draft that spends a budget; `apart` names it for the budget."""
    shares = {key: share * budget for key, share in variant.shares.items()}
    return Draft(
        f"{variant.name} at {budget:g}" if apart else variant.name,
        {**variant.decided, "target-epsilon": budget},
        {**variant.usual, **shares},
        budget=budget,
        note=variant.note,
    )
