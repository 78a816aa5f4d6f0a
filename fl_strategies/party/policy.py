"""A party's policy: the requests that it accepts, whatever a server asks.

A `PartyRole` says by a `ReleasePlan` what a message asks for, and the party's `PartyPolicy`
refuses it before any record is touched. Nothing here depends on a record, so the refusal may
say which rule it was. What a release costs is not known before it is charged; `max_run_epsilon`
is therefore checked there (`party.accounting.spend`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final, TypeAlias

from flwr.app import ConfigRecord

from fl_strategies.errors import RequestRefused, require
from fl_strategies.release import ReleasePlan


def asked_number(config: ConfigRecord, key: str) -> int:
    """Return a whole number that a server sent, 0 for what the role will refuse."""
    value = config.get(key)
    return value if type(value) is int and value > 0 else 0


@dataclass(frozen=True, kw_only=True)
class PartyPolicy:
    """What a party takes part in.

    Parameters
    ----------
    strategies : tuple of str
        Names such as ``"fedkd"``, or with a level or release ``"fedkt L2"``; none: all.
    allow_unprotected : bool
        Let answers and models leave that no noise of the party protects: FedKT's L0 and L1,
        FedKD, FedMD and Cronus without a release, averages of weights and co-distillation,
        unless the party's learner trains privately; FedGen, PFNM and the aggregator of FENS
        in any case; and let accuracies on held-out rows leave where nothing is promised.
    allow_models : bool
        Let models leave, and not only answers about public rows.
    allow_seeded_noise : bool
        Draw noise from the experiment's seed if the server asks for it.
    allow_drowned_noise : bool
        Pay for answers that are mostly noise.
    max_run_epsilon : float, optional
        Most that one run may cost a record, at `delta`. A journal limits all runs together.
    delta, sample_delta : float
        See `fl_strategies.privacy.journal.Allowance`.
    max_epochs, max_fits, max_predictions : int
        Most passes over data, models to be trained, and rows to be predicted by them, in
        one request.

    Examples
    --------
    >>> print(PartyPolicy(strategies=("fedkt L2", "fedmd ldp")).describe())
    fedkt L2, fedmd ldp; epsilon of a run at most 10
    """

    strategies: tuple[str, ...] = ()
    allow_unprotected: bool = False
    allow_models: bool = False
    allow_seeded_noise: bool = False
    allow_drowned_noise: bool = False
    max_run_epsilon: float | None = 10.0
    delta: float = 1e-5
    sample_delta: float = 0.0
    max_epochs: int = 10_000
    max_fits: int = 10_000
    max_predictions: int = 10**8

    def __post_init__(self) -> None:
        """Check the limits, and that they do not contradict each other."""
        owner, limit = "PartyPolicy", self.max_run_epsilon
        known = limit is None or 0 < limit < math.inf
        require(known, owner, "max_run_epsilon", "greater than 0 and finite, or None", limit)
        free = limit is None or not self.allow_unprotected
        rule = "None with allow_unprotected: what has no noise costs more than any number"
        require(free, owner, "max_run_epsilon", rule, limit)
        require(0 < self.delta < 1, owner, "delta", "between 0 and 1", self.delta)
        share = self.sample_delta
        require(0 <= share < 1, owner, "sample_delta", "at least 0 and below 1", share)
        for name in ("max_epochs", "max_fits", "max_predictions"):
            require(getattr(self, name) >= 1, owner, name, "at least 1", getattr(self, name))

    def allows(self, name: str) -> bool:
        """Return whether the party takes part in a strategy, by whatever name it is allowed."""
        return (
            not self.strategies or name in self.strategies or _family(name) in self.strategies
        )

    def describe(self) -> str:
        """Return strategies that are named, limits and exceptions, for the owner to read."""
        known = [", ".join(self.strategies)] if self.strategies else []
        if self.max_run_epsilon is not None:
            known.append(f"epsilon of a run at most {self.max_run_epsilon:g}")
        if self.sample_delta:
            known.append(f"samples with chance {self.sample_delta:g} at most")
        flags = ("unprotected", "models", "seeded_noise", "drowned_noise")
        allowed = [name.replace("_", " ") for name in flags if getattr(self, f"allow_{name}")]
        return "; ".join([*known, *([f"also {', '.join(allowed)}"] if allowed else [])])


SIMULATED: Final = PartyPolicy(
    allow_unprotected=True,
    allow_models=True,
    allow_seeded_noise=True,
    allow_drowned_noise=True,
    max_run_epsilon=None,
)
"""The policy of a party that states none: what an experiment needs, within limits of work."""


def check_request(
    policy: PartyPolicy, plan: ReleasePlan, *, owner: str, budgeted: bool, releases: bool
) -> None:
    """Raise `RequestRefused` unless a party's policy allows what a message asks for.

    Parameters
    ----------
    policy : PartyPolicy
    plan : ReleasePlan
    owner : str
        Whose policy it is, for the error.
    budgeted : bool
        Whether the party has a limit on its epsilon, so that nothing may leave without noise.
    releases : bool
        Whether anything about records is to leave; if not, only strategy and work count.
    """
    violated = [_unwanted_work(policy, plan)]
    if releases:
        violated += [_unwanted_release(policy, plan, budgeted), _bad_noise(policy, plan)]
    for what, rule, value in chain.from_iterable(violated):
        raise RequestRefused(f"{owner}: {what} must be {rule}, got {value}.")


def _family(name: str) -> str:
    return name.partition(" ")[0]


_Violations: TypeAlias = Iterator[tuple[str, str, object]]


def _unwanted_work(policy: PartyPolicy, plan: ReleasePlan) -> _Violations:
    if not policy.allows(plan.name):
        rule = f"one that its policy allows ({', '.join(policy.strategies)})"
        yield "the strategy", rule, plan.shown
    for name in ("epochs", "fits", "predictions"):
        asked, most = getattr(plan, name), getattr(policy, f"max_{name}")
        if asked > most:
            yield f"{name} of a request", f"at most {most}, by its policy", asked


def _unwanted_release(policy: PartyPolicy, plan: ReleasePlan, budgeted: bool) -> _Violations:
    if plan.models and not policy.allow_models:
        rule = "answers about public rows, by its policy (allow-models)"
        yield "what leaves", rule, f"models of {plan.shown}"
    may_be_open = policy.allow_unprotected and not budgeted
    if not (may_be_open or plan.protected or plan.trains_privately):
        rule = "protected, by its " + ("budget" if budgeted else "policy (allow-unprotected)")
        got = f"{plan.shown}, by which it would leave the party without noise"
        yield "what leaves", rule, got
    drawn, most = plan.sample_delta, policy.sample_delta
    if not policy.allow_unprotected and drawn > most:
        rule = f"at most {most:g}, by its policy (sample-delta)"
        yield "the chance to be in the sample", rule, f"{drawn:.3g}"


def _bad_noise(policy: PartyPolicy, plan: ReleasePlan) -> _Violations:
    if plan.seeded and not policy.allow_seeded_noise:
        yield (
            "noise",
            "drawn in secret, by its policy (allow-seeded-noise)",
            "noise from the seed",
        )
    elif not policy.allow_drowned_noise and (hidden := plan.no_signal()):
        rule = "weaker than what it protects, by its policy (allow-drowned-noise)"
        yield "noise", rule, f"noise of {hidden}"
