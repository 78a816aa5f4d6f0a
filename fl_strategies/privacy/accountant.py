"""Compose recorded events: every valid bound, and the smallest of them.

All bounds are independent of the private votes, so they and their minimum may be published.
Events compose as follows:

- Gaussian noise is exact, however it is mixed: squares of mu add up.
- Pure differential privacy composes by the optimal theorem; with different epsilons only if
  they were fixed before the first answer.
- Bounded range (Gumbel noise; Laplace noise if there are just two classes) composes better
  still, but only if all queries were fixed before the first answer.
- Any events compose by adding their Renyi curves.
- Labels of one voter and Laplace noise compose by their privacy-loss distributions; with
  different scales only if they were fixed before the first answer.
- A secret sample costs delta only. DP-SGD is composed by dp-accounting. Releases of bounded
  loss in the same batch join its distribution; everything else adds up, with half of delta
  for each.
- Sampled noise is not quite ideal: 1 + exp(epsilon) times the distance is taken out of delta.
- If neighbouring relations are mixed, everything is stated for replacing one unit. That is
  exact where an event states a sensitivity; of DP-SGD only (epsilon, delta) is known, which
  becomes (2 epsilon, (1 + exp(epsilon)) delta).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import scipy

from fl_strategies.errors import check_count, check_delta, require
from fl_strategies.privacy.bounds import theorems
from fl_strategies.privacy.bounds.distributions import (
    LossLaw,
    Runs,
    compose_losses,
    joined_distribution,
    sgd_distribution,
    sgd_epsilon,
)
from fl_strategies.privacy.bounds.moments import moments_epsilon
from fl_strategies.privacy.events import (
    DPSGDEvent,
    GaussianEvent,
    LaplaceEvent,
    NoisyMaxEvent,
    NonPrivateEvent,
    OneVoteEvent,
    PrivacyEvent,
    SubsampleEvent,
    ThresholdEvent,
    as_replace_one,
    check_event,
)

Entry: TypeAlias = tuple[PrivacyEvent, int]

METHODS = (
    "pure",
    "optimal-composition",
    "bounded-range",
    "zcdp",
    "rdp",
    "moments",
    "gaussian",
    "pld",
    "subsampling",
    "basic",
)
"""Names of the bounds, as `bounds` lists them."""

# A loss like this protects nobody, and its square still fits into a float.
_HOPELESS = 1e6
# Beyond so many scales noise is drawn with a chance below 1e-300.
_FAR = 700.0
# What numerical integrals may be off, with room to spare.
_SAFETY = 1e-9
# Exact compositions enumerate outcomes; beyond this many releases the curves take over.
_MOST_EXACT = 10**6
_LEAST_DELTA, _ALMOST_ONE = 1e-18, 1 - 1e-9
# Share of delta that is set aside for imperfect sampling at least; it is hardly felt.
_LEAST_SHARE = 1e-7
_LARGEST_EPSILON = 1e6


@dataclass(frozen=True)
class Loss:
    """Privacy loss of one release, by every measure that applies to it.

    Parameters
    ----------
    pure : float, optional
        The largest log-ratio between the chances of an outcome under two neighbours.
    spread : float, optional
        The largest difference between two such log-ratios, the bounded range.
    mu : float, optional
        The distance of two unit Gaussians that are as hard to tell apart.
    published : bool
        Whether it is noisy max with Laplace noise, for which papers print moments.
    law : LossLaw, optional
        The law of the loss, where more is known than `pure`.
    """

    pure: float | None = None
    spread: float | None = None
    mu: float | None = None
    published: bool = False
    law: LossLaw | None = None

    @property
    def rho(self) -> float:
        """Return the smallest rho for which the release is known to be rho-zCDP."""
        if self.mu is not None:
            return self.mu * self.mu / 2
        if self.spread is not None:
            return self.spread * self.spread / 8
        return math.inf if self.pure is None else self.pure * self.pure / 2


def loss_of(event: PrivacyEvent) -> Loss:
    """Return the loss of one release with noise; infinite for any other event."""
    match event:
        case NoisyMaxEvent():
            return _loss_of_noisy_max(event)
        case OneVoteEvent():
            return _loss_of_one_vote(event)
        case ThresholdEvent():
            return Loss(mu=_ratio(event.sensitivity, event.scale))
        case GaussianEvent():
            return Loss(mu=_ratio(event.l2_sensitivity, event.scale))
        case LaplaceEvent():
            pure = _ratio(event.l1_sensitivity, event.scale)
            return Loss(pure, law=LossLaw(pure, smooth=True))
    return Loss(pure=math.inf)


def _loss_of_noisy_max(event: NoisyMaxEvent) -> Loss:
    step = _ratio(event.sensitivity, event.scale)
    moved = 2 if event.relation == "replace-one" else 1
    if event.noise == "gaussian":
        return Loss(mu=step * math.sqrt(moved))
    pure, laplace = moved * step, event.noise == "laplace"
    # For three classes and more, Laplace noise exceeds this range by up to a sixth.
    ranged = not laplace or event.num_classes == 2
    return Loss(pure=pure, spread=pure if ranged else None, published=laplace)


def _loss_of_one_vote(event: OneVoteEvent) -> Loss:
    """Noise that is the same for all classes makes one vote randomised response."""
    wrong = _chance_of_each_other(event.noise, event.scale, event.num_classes)
    right = 1 - (event.num_classes - 1) * wrong
    pure = math.log(right / wrong) if wrong > 0 else math.inf
    if event.noise == "gumbel":
        pure = _ratio(1.0, event.scale)
    law = LossLaw(pure, silent=(event.num_classes - 2) * wrong)
    mu = _ratio(math.sqrt(2), event.scale) if event.noise == "gaussian" else None
    return Loss(pure, mu=mu, law=law)


@lru_cache(maxsize=256)
def _chance_of_each_other(noise: str, scale: float, num_classes: int) -> float:
    """Return a lower bound on the chance of each class that was not voted for."""
    step, others = 1 / scale, num_classes - 1
    if step > _FAR:
        return 0.0
    if noise == "gumbel":
        return 1 / (math.exp(step) + others)
    laplace = noise == "laplace"

    def beaten(x: float) -> float:
        """Density of the voter's class at x, times the chance that another class is above."""
        if laplace:
            log_density = -abs(x - step) - math.log(2)
            log_share = math.log1p(-math.exp(-x) / 2) if x >= 0 else x - math.log(2)
        else:
            log_density = -(x - step) * (x - step) / 2 - math.log(2 * math.pi) / 2
            log_share = float(scipy.special.log_ndtr(x))
        return math.exp(log_density) * -math.expm1(others * log_share)

    reach = 80.0 if laplace else 20.0
    edges = [-reach, 0.0, step / 2, step, step + 4, step + reach]
    pieces = [
        scipy.integrate.quad(beaten, a, b, epsabs=0, epsrel=1e-11, limit=200, full_output=1)[:2]
        for a, b in pairwise(edges)
    ]
    # Less than the truth: the vote then counts as clearer than it is.
    least = math.fsum(value - error for value, error in pieces) * (1 - _SAFETY)
    return max(0.0, least) / others


def _ratio(distance: float, scale: float) -> float:
    ratio = distance / scale
    return ratio if ratio < _HOPELESS else math.inf


def sampling_error(event: PrivacyEvent) -> float:
    """Return the distance between the chances of a drawn release and the ideal ones.

    It is a distance in total variation; see `fl_strategies.privacy.mechanisms`. Two neighbours
    that are both off by so much are (epsilon, delta + (1 + exp(epsilon)) error)-private. The
    noise of DP-SGD is drawn by torch and is taken as it is.
    """
    match event:
        case NoisyMaxEvent() | OneVoteEvent():
            return float(event.num_classes * 2.0 ** (-50 if event.noise == "gumbel" else -45))
        case ThresholdEvent():
            return 2.0**-45
        case LaplaceEvent():
            return float(event.num_values * 2.0**-57)
        case GaussianEvent():
            return float(event.num_values * 2.0**-50)
    return 0.0


class Curve(NamedTuple):
    """One bound, read in both directions; one of them may have to be searched."""

    epsilon_at: Callable[[float], float]
    delta_at: Callable[[float], float] | None = None


def _constant(total: float) -> Curve:
    return Curve(lambda _: total, lambda epsilon: 0.0 if epsilon >= total else 1.0)


def _searched_delta(curve: Curve, epsilon: float, known: float) -> float:
    """Return the delta of a curve at `epsilon`, to four digits, or `known` if that is less."""
    if curve.epsilon_at(known) > epsilon:
        return known
    low, high = math.log(_LEAST_DELTA), math.log(known)
    while high - low > 1e-5:
        middle = (low + high) / 2
        enough = curve.epsilon_at(math.exp(middle)) <= epsilon
        low, high = (low, middle) if enough else (middle, high)
    return math.exp(high)


def _smallest_delta(curves: Iterable[Curve], epsilon: float) -> float:
    """Return the smallest delta that any of the curves proves at `epsilon`, 1 if none does."""
    known, searched = _ALMOST_ONE, []
    for curve in curves:
        if curve.delta_at is None:
            searched.append(curve)
        else:
            known = min(known, curve.delta_at(epsilon))
    for curve in searched:
        known = _searched_delta(curve, epsilon, known) if known > _LEAST_DELTA else known
    return known if known < _ALMOST_ONE else 1.0


def _pure_curves(losses: Mapping[Loss, int], adaptive: bool) -> dict[str, Curve]:
    strengths: Counter[float] = Counter()
    for loss, count in losses.items():
        if loss.pure is None:
            return {}
        strengths[loss.pure] += count
    curves = {"pure": _constant(sum(pure * count for pure, count in strengths.items()))}
    # The optimum is proved for strengths that were fixed before the first answer.
    fixed = not adaptive or len(strengths) == 1
    if fixed and sum(strengths.values()) <= _MOST_EXACT:
        values, counts = list(strengths), list(strengths.values())
        curves["optimal-composition"] = (
            Curve(partial(theorems.pure_heterogeneous, values, counts))
            if len(values) > 1
            else Curve(
                partial(theorems.pure_optimal, values[0], counts[0]),
                partial(theorems.pure_optimal_delta, values[0], counts[0]),
            )
        )
    return curves


def _ranged_curves(losses: Mapping[Loss, int]) -> dict[str, Curve]:
    spread, *others = {loss.spread for loss in losses}
    count = sum(losses.values())
    if others or spread is None or count > _MOST_EXACT:
        return {}
    epsilon_at = partial(theorems.bounded_range_optimal, spread, count)
    return {
        "bounded-range": Curve(
            epsilon_at, partial(theorems.bounded_range_optimal_delta, spread, count)
        )
    }


def _gaussian_curves(losses: Mapping[Loss, int]) -> dict[str, Curve]:
    squares = [
        count * loss.mu * loss.mu for loss, count in losses.items() if loss.mu is not None
    ]
    if len(squares) < len(losses):
        return {}
    mu = math.sqrt(math.fsum(squares))
    return {
        "gaussian": Curve(
            partial(theorems.gaussian_epsilon, mu),
            lambda epsilon: float(theorems.gaussian_delta(mu, epsilon)),
        )
    }


def _renyi_curves(losses: Mapping[Loss, int]) -> dict[str, Curve]:
    orders = theorems.default_orders()
    rho = math.fsum(count * loss.rho for loss, count in losses.items())
    total = np.zeros(orders.size)
    for loss, count in losses.items():
        curve = theorems.rdp_of_zcdp(loss.rho, orders)
        if loss.pure is not None:
            curve = np.minimum(curve, theorems.rdp_of_pure(loss.pure, orders))
        total += count * curve
    return {
        "zcdp": Curve(
            partial(theorems.zcdp_to_epsilon, rho),
            partial(theorems.rdp_to_delta, orders, rho * orders),
        ),
        "rdp": Curve(
            partial(theorems.rdp_to_epsilon, orders, total),
            partial(theorems.rdp_to_delta, orders, total),
        ),
    }


def _laws_of(losses: Mapping[Loss, int]) -> tuple[tuple[LossLaw, int], ...]:
    """Return the laws of losses that are all bounded; none if any is not."""
    laws: Counter[LossLaw] = Counter()
    for loss, count in losses.items():
        if loss.pure is None or math.isinf(loss.pure):
            return ()
        if loss.pure > 0:
            laws[loss.law or LossLaw(loss.pure)] += count
    return tuple(sorted(laws.items())) if sum(laws.values()) <= _MOST_EXACT else ()


def _law_curves(losses: Mapping[Loss, int], adaptive: bool) -> dict[str, Curve]:
    if all(loss.law is None for loss in losses):
        return {}  # nothing is known beyond what the optimal composition uses
    laws = _laws_of(losses)
    # As for the optimum, strengths must not depend on answers.
    if not laws or (adaptive and len(laws) > 1):
        return {}
    composed = compose_losses(laws)
    return {} if composed is None else {"pld": Curve(composed.epsilon_at, composed.delta_at)}


def _moments_curves(losses: Mapping[Loss, int]) -> dict[str, Curve]:
    strength, *others = {loss.pure if loss.published else None for loss in losses}
    if others or strength is None or math.isinf(strength):
        return {}
    return {"moments": Curve(partial(moments_epsilon, strength / 2, 1, sum(losses.values())))}


def _losses_of(entries: Iterable[Entry]) -> dict[Loss, int]:
    """Return how often each loss was suffered, in an order that depends on nothing else."""
    found: Counter[Loss] = Counter()
    for event, count in entries:
        found[loss_of(event)] += count
    # Sums of floats depend on the order of their terms; the order of releases must not matter.
    return dict(sorted(found.items(), key=lambda item: repr(item[0])))


def _noise_curves(losses: Mapping[Loss, int], adaptive: bool) -> dict[str, Curve]:
    """Return every bound that applies to releases with noise, by its name."""
    if not losses:
        return {}
    return {
        **_pure_curves(losses, adaptive),
        **({} if adaptive else _ranged_curves(losses)),
        **_gaussian_curves(losses),
        **_law_curves(losses, adaptive),
        **_renyi_curves(losses),
        **_moments_curves(losses),
    }


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


def _runs_of(entries: Iterable[tuple[DPSGDEvent, int]]) -> Runs:
    steps: Counter[tuple[float, float]] = Counter()
    for event, count in entries:
        chance = event.batch_size / event.records
        steps[event.noise_multiplier, chance] += event.steps * count
    return tuple(sorted((*kind, n) for kind, n in steps.items()))


def _joined_curve(runs: Runs, losses: Mapping[Loss, int]) -> Curve | None:
    """Return the curve of DP-SGD and releases of bounded loss together, if there is one."""
    laws = _laws_of(losses)
    law = joined_distribution(runs, laws) if laws else None
    if law is None:
        return None
    return Curve(partial(sgd_epsilon, runs, laws=laws), partial(_delta_of, law))


def _delta_of(distribution: Any, epsilon: float) -> float:
    return float(distribution.get_delta_for_epsilon(epsilon))


def _doubled(distribution: Any) -> Curve:
    """Turn add-or-remove into replace where only epsilon and delta are known."""

    def delta_at(epsilon: float) -> float:
        factor = 1 + math.exp(min(epsilon / 2, 700.0))
        return min(1.0, factor * _delta_of(distribution, epsilon / 2))

    def epsilon_at(delta: float) -> float:
        upper = 1.0
        # Small steps: beyond some epsilon the cut tails of the distribution take over.
        while delta_at(upper) > delta:
            upper *= 1.2
            if upper > _LARGEST_EPSILON:
                return math.inf
        return theorems.smallest_epsilon(delta_at, delta, upper)

    return Curve(epsilon_at, delta_at)


def _summed(first: Curve, others: Iterable[Curve]) -> Curve:
    rest = list(others)

    def epsilon_at(delta: float) -> float:
        return first.epsilon_at(delta / 2) + min(c.epsilon_at(delta / 2) for c in rest)

    return Curve(epsilon_at)


def chance_in_clear(entries: Iterable[Entry]) -> float:
    """Return the chance that a record is in any of the independent secret samples.

    Examples
    --------
    >>> chance_in_clear([(SubsampleEvent(records=100, samples=30, replacement=False), 1)])
    0.3
    """
    spent = 0.0
    for event, count in entries:
        if isinstance(event, SubsampleEvent):
            drawn = theorems.nfdp_tight(
                event.records, event.samples, replacement=event.replacement, runs=count
            )
            spent += (1 - spent) * drawn.delta
    return spent


def _compose(
    entries: Sequence[Entry], adaptive: bool, replaced: bool
) -> tuple[float, dict[str, Curve]]:
    """Return the delta that is spent whatever epsilon is, and the curves of the rest."""
    runs = [(e, n) for e, n in entries if isinstance(e, DPSGDEvent)]
    noisy = [(e, n) for e, n in entries if not isinstance(e, SubsampleEvent | DPSGDEvent)]
    mixed = replaced or len({event.relation for event, _ in entries}) > 1
    if mixed:
        noisy = [(as_replace_one(event), count) for event, count in noisy]
    losses = _losses_of(noisy)
    curves = _noise_curves(losses, adaptive)
    if runs:
        composed = _runs_of(runs)
        law = sgd_distribution(composed)
        training = Curve(partial(sgd_epsilon, composed), partial(_delta_of, law))
        training = _doubled(law) if mixed else training
        joined = None if mixed or adaptive else _joined_curve(composed, losses)
        curves = {"basic": _summed(training, curves.values())} if noisy else {"pld": training}
        if joined is not None:
            curves["pld"] = joined
    return chance_in_clear(entries), curves or {"subsampling": _constant(0.0)}


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
    """Return epsilon by every method that applies, for ideally drawn noise.

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
    return _epsilons(entries, delta, adaptive, replaced, error=0.0)


def _epsilons(
    entries: Sequence[Entry], delta: float, adaptive: bool, replaced: bool, error: float
) -> dict[str, float | None]:
    _check_entries("bounds", entries)
    check_delta("bounds", delta)
    answer: dict[str, float | None] = dict.fromkeys(METHODS)
    if not entries or _why_not_private(entries):
        return answer
    spent, curves = _compose(entries, adaptive, replaced)
    left = (delta - spent) / (1 - spent) if spent < 1 else -1.0
    for method, curve in curves.items():
        usable = left > 0 or (left == 0 and method == "subsampling")
        answer[method] = paid_epsilon(curve.epsilon_at, left, error) if usable else math.inf
    return answer


def error_of(entries: Iterable[Entry]) -> float:
    """Return the distance of all releases together from ideal noise; see `sampling_error`."""
    return math.fsum(count * sampling_error(event) for event, count in entries)


def paid_epsilon(epsilon_at: Callable[[float], float], delta: float, error: float) -> float:
    """Return epsilon at a delta that also pays for imperfect sampling.

    `epsilon_at` maps a delta to the epsilon of ideal noise.
    """
    if not error:
        return epsilon_at(delta)
    reserve = _LEAST_SHARE * delta
    while reserve < delta:
        epsilon = epsilon_at(delta - reserve)
        price = error * (1 + math.exp(min(epsilon, 700.0)))
        if price <= reserve:
            return epsilon
        reserve = 1.5 * price
    return math.inf


def claim(
    entries: Sequence[Entry], delta: float, *, adaptive: bool = False, replaced: bool = False
) -> Claim:
    """Return the smallest bound for noise as it is drawn, which is the one to publish.

    Parameters are those of `bounds`. Nothing released costs nothing.

    Examples
    --------
    >>> claim([(NonPrivateEvent(unit="party", reason="raw votes left"), 1)], 1e-5).reason
    'raw votes left'
    """
    found = _epsilons(entries, delta, adaptive, replaced, error_of(entries))
    if not entries:
        return Claim(0.0, delta, "none")
    valid = {method: epsilon for method, epsilon in found.items() if epsilon is not None}
    method = min(valid, key=valid.__getitem__, default="none")
    if valid and valid[method] < math.inf:
        return Claim(valid[method], delta, method)
    fallback = "the noise is too small or too coarse, or the secret sample too large, for delta"
    return Claim(math.inf, delta, "none", _why_not_private(entries) or fallback)


def delta_at(entries: Sequence[Entry], epsilon: float, *, adaptive: bool = False) -> float:
    """Return the smallest delta at which `epsilon` is proved, 1 if none is."""
    _check_entries("delta_at", entries)
    theorems.check_loss("delta_at", "epsilon", epsilon)
    if not entries or math.isinf(epsilon):
        return 0.0
    if _why_not_private(entries):
        return 1.0
    spent, curves = _compose(entries, adaptive, replaced=False)
    price = error_of(entries) * (1 + math.exp(min(epsilon, 700.0)))
    return min(1.0, spent + (1 - spent) * _smallest_delta(curves.values(), epsilon) + price)
