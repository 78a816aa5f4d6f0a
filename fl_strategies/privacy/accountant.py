"""What recorded events cost together: every valid bound, and the smallest of them.

Only bounds that do not look at the private votes are given, so all of them may be
published, and so may their minimum. How events compose:

- Gaussian noise is exact, however it is mixed: squares of mu add up.
- Pure privacy composes by the optimal theorem; with different strengths only if they were
  fixed before the first answer.
- Bounded range (Gumbel noise; Laplace noise if there are just two classes) composes better
  still, but only if all queries were fixed before the first answer.
- Anything with anything: Renyi curves add up.
- A secret sample costs delta only; DP-SGD is composed by dp-accounting and joins the rest
  by basic composition, half of delta each.
- If neighbouring relations are mixed, all is stated for replacing one unit. Where an event
  says how far a unit moves a value, that is exact; of DP-SGD only (epsilon, delta) is known,
  which becomes (2 epsilon, (1 + exp(epsilon)) delta).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fl_strategies.exceptions import require
from fl_strategies.privacy import pld
from fl_strategies.privacy._numeric import (
    check_count,
    check_delta,
    check_loss,
    smallest_epsilon,
)
from fl_strategies.privacy.bounded_range import (
    bounded_range_optimal,
    bounded_range_optimal_delta,
)
from fl_strategies.privacy.events import (
    DPSGDEvent,
    Loss,
    NonPrivateEvent,
    PrivacyEvent,
    SubsampleEvent,
    as_replace_one,
    check_event,
    loss_of,
)
from fl_strategies.privacy.gaussian import gaussian_delta, gaussian_epsilon
from fl_strategies.privacy.moments import moments_epsilon
from fl_strategies.privacy.nfdp import nfdp_tight
from fl_strategies.privacy.pure import pure_heterogeneous, pure_optimal, pure_optimal_delta
from fl_strategies.privacy.renyi import (
    default_orders,
    rdp_of_pure,
    rdp_of_zcdp,
    rdp_to_delta,
    rdp_to_epsilon,
    zcdp_to_epsilon,
)

Entry: TypeAlias = tuple[PrivacyEvent, int]

METHODS = (
    "pure", "optimal-composition", "bounded-range", "zcdp", "rdp", "moments",
    "gaussian", "pld", "subsampling", "basic",
)  # fmt: skip
"""Names of the bounds, as `bounds` lists them."""

# Exact compositions enumerate outcomes; beyond this many releases the curves take over.
_MOST_EXACT = 10**6
_LEAST_DELTA, _ALMOST_ONE = 1e-18, 1 - 1e-9
_LARGEST_EPSILON = 1e6


class Claim(NamedTuple):
    """The guarantee that may be published.

    Parameters
    ----------
    epsilon, delta : float
    method : str
        The bound that is smallest, one of `METHODS`, or "none" if nothing is promised.
    reason : str
        Why epsilon is infinite; empty otherwise.
    """

    epsilon: float
    delta: float
    method: str
    reason: str = ""


class _Curve(NamedTuple):
    """One bound, read in both directions; one of them may have to be searched."""

    epsilon_at: Callable[[float], float]
    delta_at: Callable[[float], float] | None = None


def _searched_delta(curve: _Curve, epsilon: float, known: float) -> float:
    """Return the delta of a curve at `epsilon`, to four digits, or `known` if that is less."""
    if curve.epsilon_at(known) > epsilon:
        return known
    low, high = math.log(_LEAST_DELTA), math.log(known)
    while high - low > 1e-5:
        middle = (low + high) / 2
        enough = curve.epsilon_at(math.exp(middle)) <= epsilon
        low, high = (low, middle) if enough else (middle, high)
    return math.exp(high)


def _smallest_delta(curves: Iterable[_Curve], epsilon: float) -> float:
    known, searched = _ALMOST_ONE, []
    for curve in curves:
        if curve.delta_at is None:
            searched.append(curve)
        else:
            known = min(known, curve.delta_at(epsilon))
    for curve in searched:
        known = _searched_delta(curve, epsilon, known) if known > _LEAST_DELTA else known
    return known if known < _ALMOST_ONE else 1.0


def _constant(total: float) -> _Curve:
    return _Curve(lambda _: total, lambda epsilon: 0.0 if epsilon >= total else 1.0)


def _optimal_curve(strengths: Mapping[float, int]) -> _Curve:
    values, counts = list(strengths), list(strengths.values())
    if len(values) > 1:
        return _Curve(lambda delta: pure_heterogeneous(values, counts, delta))
    return _Curve(
        lambda delta: pure_optimal(values[0], counts[0], delta),
        lambda epsilon: pure_optimal_delta(values[0], counts[0], epsilon),
    )


def _pure_curves(losses: Mapping[Loss, int], adaptive: bool) -> dict[str, _Curve]:
    strengths: Counter[float] = Counter()
    for loss, count in losses.items():
        if loss.pure is None:
            return {}
        strengths[loss.pure] += count
    total = sum(strength * count for strength, count in strengths.items())
    curves = {"pure": _constant(total)}
    # The optimum is proved for strengths that were fixed before the first answer.
    fixed = not adaptive or len(strengths) == 1
    if fixed and sum(strengths.values()) <= _MOST_EXACT:
        curves["optimal-composition"] = _optimal_curve(strengths)
    return curves


def _ranged_curves(losses: Mapping[Loss, int]) -> dict[str, _Curve]:
    spreads = {loss.spread for loss in losses}
    count = sum(losses.values())
    spread = spreads.pop()
    if spreads or spread is None or count > _MOST_EXACT:
        return {}

    def epsilon_at(delta: float) -> float:
        # What overflows is subtracted from a probability: the answer is then zero.
        with np.errstate(over="ignore"):
            return bounded_range_optimal(spread, count, delta)

    def delta_at(epsilon: float) -> float:
        with np.errstate(over="ignore"):
            return bounded_range_optimal_delta(spread, count, epsilon)

    return {"bounded-range": _Curve(epsilon_at, delta_at)}


def _gaussian_curves(losses: Mapping[Loss, int]) -> dict[str, _Curve]:
    squares = [
        count * loss.mu * loss.mu for loss, count in losses.items() if loss.mu is not None
    ]
    if len(squares) < len(losses):
        return {}
    mu = math.sqrt(math.fsum(squares))
    return {
        "gaussian": _Curve(
            lambda delta: gaussian_epsilon(mu, delta),
            lambda epsilon: float(gaussian_delta(mu, epsilon)),
        )
    }


def _renyi_curves(losses: Mapping[Loss, int]) -> dict[str, _Curve]:
    orders = default_orders()
    rho = math.fsum(count * loss.rho for loss, count in losses.items())
    total = np.zeros(orders.size)
    for loss, count in losses.items():
        curve = rdp_of_zcdp(loss.rho, orders)
        if loss.pure is not None:
            curve = np.minimum(curve, rdp_of_pure(loss.pure, orders))
        total += count * curve
    return {
        "zcdp": _Curve(
            lambda delta: zcdp_to_epsilon(rho, delta),
            lambda epsilon: rdp_to_delta(orders, rho * orders, epsilon),
        ),
        "rdp": _Curve(
            lambda delta: rdp_to_epsilon(orders, total, delta),
            lambda epsilon: rdp_to_delta(orders, total, epsilon),
        ),
    }


def _moments_curves(losses: Mapping[Loss, int]) -> dict[str, _Curve]:
    strengths = {loss.pure for loss in losses if loss.published}
    strength = strengths.pop() if strengths else None
    same = not strengths and all(loss.published for loss in losses)
    if not same or strength is None or math.isinf(strength):
        return {}
    count = sum(losses.values())
    return {"moments": _Curve(lambda delta: moments_epsilon(strength / 2, 1, count, delta))}


def _noise_curves(entries: Iterable[Entry], adaptive: bool) -> dict[str, _Curve]:
    found: Counter[Loss] = Counter()
    for event, count in entries:
        found[loss_of(event)] += count
    if not found:
        return {}
    # Sums of floats depend on the order of their terms; the order of releases must not matter.
    losses = dict(sorted(found.items(), key=lambda item: repr(item[0])))
    return {
        **_pure_curves(losses, adaptive),
        **({} if adaptive else _ranged_curves(losses)),
        **_gaussian_curves(losses),
        **_renyi_curves(losses),
        **_moments_curves(losses),
    }


def _sgd_curve(entries: Iterable[tuple[DPSGDEvent, int]], replace: bool) -> _Curve:
    steps: Counter[tuple[float, float]] = Counter()
    for event, count in entries:
        chance = event.batch_size / event.records
        steps[event.noise_multiplier, chance] += event.steps * count
    distribution = pld.sgd_distribution(tuple(sorted((*kind, n) for kind, n in steps.items())))
    if replace:
        return _doubled(distribution)
    return _Curve(
        lambda delta: float(distribution.get_epsilon_for_delta(delta)),
        lambda epsilon: float(distribution.get_delta_for_epsilon(epsilon)),
    )


def _doubled(distribution: Any) -> _Curve:
    """Turn add-or-remove into replace where only epsilon and delta are known."""

    def delta_at(epsilon: float) -> float:
        factor = 1 + math.exp(min(epsilon / 2, 700.0))
        return min(1.0, factor * float(distribution.get_delta_for_epsilon(epsilon / 2)))

    def epsilon_at(delta: float) -> float:
        upper = 1.0
        # Small steps: beyond some epsilon the cut tails of the distribution take over.
        while delta_at(upper) > delta:
            upper *= 1.2
            if upper > _LARGEST_EPSILON:
                return math.inf
        return smallest_epsilon(delta_at, delta, upper)

    return _Curve(epsilon_at, delta_at)


def _summed(first: _Curve, others: Iterable[_Curve]) -> _Curve:
    rest = list(others)

    def epsilon_at(delta: float) -> float:
        return first.epsilon_at(delta / 2) + min(c.epsilon_at(delta / 2) for c in rest)

    return _Curve(epsilon_at)


def _sampling_delta(entries: Iterable[tuple[SubsampleEvent, int]]) -> float:
    """Return the chance that a record is in one of several independent secret samples."""
    spent = 0.0
    for event, count in entries:
        drawn = nfdp_tight(
            event.records, event.samples, replacement=event.replacement, runs=count
        )
        spent += (1 - spent) * drawn.delta
    return spent


def _compose(
    entries: Sequence[Entry], adaptive: bool, replaced: bool
) -> tuple[float, dict[str, _Curve]]:
    """Return the delta that is spent whatever epsilon is, and the curves of the rest."""
    samples = [(e, n) for e, n in entries if isinstance(e, SubsampleEvent)]
    runs = [(e, n) for e, n in entries if isinstance(e, DPSGDEvent)]
    noisy = [(e, n) for e, n in entries if not isinstance(e, SubsampleEvent | DPSGDEvent)]
    mixed = replaced or len({event.relation for event, _ in entries}) > 1
    if mixed:
        noisy = [(as_replace_one(event), count) for event, count in noisy]
    curves = _noise_curves(noisy, adaptive)
    if runs:
        training = _sgd_curve(runs, mixed)
        curves = {"basic": _summed(training, curves.values())} if noisy else {"pld": training}
    return _sampling_delta(samples), curves or {"subsampling": _constant(0.0)}


def _why_not_private(entries: Sequence[Entry]) -> str:
    for event, _ in entries:
        if isinstance(event, NonPrivateEvent):
            return event.reason
    if any(event.seeded for event, _ in entries):
        return "noise was drawn from a known seed, so anybody can subtract it"
    return ""


def _check_entries(owner: str, entries: Sequence[Entry]) -> None:
    for event, count in entries:
        check_event(owner, event)
        check_count(owner, "count", count, least=1)
    units = sorted({event.unit for event, _ in entries})
    require(len(units) <= 1, owner, "entries", "about one unit", " and ".join(units))


def bounds(
    entries: Sequence[Entry], delta: float, *, adaptive: bool = False, replaced: bool = False
) -> Mapping[str, float | None]:
    """Return epsilon by every method that applies.

    Parameters
    ----------
    entries : sequence of (event, count)
        All of one unit; the order does not matter.
    delta : float
    adaptive : bool
        Whether a query may depend on earlier answers. Bounded range then composes by its
        rho ("zcdp") only.
    replaced : bool
        State all for replacing one unit, also if no event asks for that.

    Returns
    -------
    mapping of each of `METHODS` to epsilon, None where the method does not apply.

    Examples
    --------
    >>> sample = SubsampleEvent(records=100, samples=5, replacement=False)
    >>> found = bounds([(sample, 1)], 0.06)
    >>> found["subsampling"], found["pure"]
    (0.0, None)
    """
    _check_entries("bounds", entries)
    check_delta("bounds", delta)
    answer: dict[str, float | None] = dict.fromkeys(METHODS)
    if not entries or _why_not_private(entries):
        return answer
    spent, curves = _compose(entries, adaptive, replaced)
    left = (delta - spent) / (1 - spent) if spent < 1 else -1.0
    for method, curve in curves.items():
        usable = left > 0 or (left == 0 and method == "subsampling")
        answer[method] = curve.epsilon_at(left) if usable else math.inf
    return answer


def claim(
    entries: Sequence[Entry], delta: float, *, adaptive: bool = False, replaced: bool = False
) -> Claim:
    """Return the smallest bound, which is the one to publish.

    Parameters are those of `bounds`. Nothing released costs nothing.

    Examples
    --------
    >>> claim([(NonPrivateEvent(unit="party", reason="raw votes left"), 1)], 1e-5).reason
    'raw votes left'
    """
    found = bounds(entries, delta, adaptive=adaptive, replaced=replaced)
    if not entries:
        return Claim(0.0, delta, "none")
    valid = {method: epsilon for method, epsilon in found.items() if epsilon is not None}
    method = min(valid, key=valid.__getitem__, default="none")
    if valid and valid[method] < math.inf:
        return Claim(valid[method], delta, method)
    fallback = "the noise is too small, or the secret sample too large, for this delta"
    return Claim(math.inf, delta, "none", _why_not_private(entries) or fallback)


def delta_at(entries: Sequence[Entry], epsilon: float, *, adaptive: bool = False) -> float:
    """Return the smallest delta at which `epsilon` is proved, 1 if none is."""
    _check_entries("delta_at", entries)
    check_loss("delta_at", "epsilon", epsilon)
    if not entries or math.isinf(epsilon):
        return 0.0
    if _why_not_private(entries):
        return 1.0
    spent, curves = _compose(entries, adaptive, replaced=False)
    return spent + (1 - spent) * _smallest_delta(curves.values(), epsilon)
