"""Privacy curves of single releases.

A mechanism has range eta when, between neighbouring inputs, the logarithms of the
probability ratios of any two outputs differ by at most eta. The exponential mechanism
(noisy max with Gumbel noise) has it for any number of classes; noisy max with Laplace
noise has it for two classes only. Every such mechanism is eta-differentially private,
but composes like one of about half that strength.

References
----------
Durfee, Rogers (2019), Practical differentially private top-k selection.
Dong, Durfee, Rogers (2020), Optimal differential privacy composition for exponential
mechanisms and the cost of adaptivity, Theorem 3.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import scipy

from fl_strategies._util import Array, FloatArray
from fl_strategies.privacy._numeric import (
    check_count,
    check_delta,
    check_loss,
    smallest_epsilon,
)
from fl_strategies.privacy.bounds.composition import LossLaw, compose_losses
from fl_strategies.privacy.bounds.gaussian import (
    default_orders,
    gaussian_delta,
    gaussian_epsilon,
    rdp_of_pure,
    rdp_of_zcdp,
    rdp_to_delta,
    rdp_to_epsilon,
    zcdp_to_epsilon,
)
from fl_strategies.privacy.bounds.moments import moments_epsilon
from fl_strategies.privacy.bounds.pure import (
    Loss,
    loss_of,
    pure_heterogeneous,
    pure_optimal,
    pure_optimal_delta,
)
from fl_strategies.privacy.events import PrivacyEvent

# Candidates looked at while searching; the answer is then checked against all of them.
_SEARCH_CANDIDATES = 256


def _worst_pair(
    eta: float, count: int, epsilon: float, index: Array
) -> tuple[FloatArray, FloatArray]:
    """Return the probabilities of the upper of two outcomes, under both inputs."""
    # Each candidate is the location t of the two losses, t and t - eta, that is worst
    # when up to `index` of the `count` outcomes are the lower one.
    # Rounding may carry the last one past eta, where its probability would be negative.
    location = np.minimum((epsilon + (index + 1) * eta) / (count + 1), eta)
    first = np.expm1(location - eta) / math.expm1(-eta)
    return first, np.exp(-location) * first


def _candidate_deltas(eta: float, count: int, epsilon: float, index: Array) -> FloatArray:
    first, second = _worst_pair(eta, count, epsilon, index)
    own = scipy.special.betainc(count - index, index + 1.0, first)
    other = scipy.special.betainc(count - index, index + 1.0, second)
    with np.errstate(divide="ignore"):
        # An underflow to zero drops what would be subtracted: the safe direction.
        deltas: FloatArray = np.maximum(own - np.exp(epsilon + np.log(other)), 0.0)
    return deltas


def _num_candidates(eta: float, count: int, epsilon: float) -> int:
    return max(0, math.ceil(count - epsilon / eta))


def _searched_range(eta: float, count: int, epsilon: float) -> float:
    """Return the largest candidate found by zooming in on a coarse grid."""
    low, high = 0, _num_candidates(eta, count, epsilon) - 1
    if high < 0:
        return 0.0
    while True:
        index = np.unique(np.linspace(low, high, _SEARCH_CANDIDATES).round())
        deltas = _candidate_deltas(eta, count, epsilon, index)
        best = int(deltas.argmax())
        if high - low < _SEARCH_CANDIDATES:
            return float(deltas[best])
        low, high = index[max(best - 2, 0)], index[min(best + 2, index.size - 1)]


def _full_delta(eta: float, count: int, epsilon: float, floor: float) -> float:
    """Return the largest of all candidates, or `floor` if none exceeds it."""
    index = np.arange(_num_candidates(eta, count, epsilon), dtype=float)
    first, _ = _worst_pair(eta, count, epsilon, index)
    share = index / count
    # Chernoff: most candidates provably stay below the floor without being computed.
    exponent = -count * (
        scipy.special.rel_entr(share, 1 - first) + scipy.special.rel_entr(1 - share, first)
    )
    possible = (share >= 1 - first) | (exponent > math.log(floor))
    deltas = _candidate_deltas(eta, count, epsilon, index[possible])
    return float(np.max(deltas, initial=floor))


def bounded_range_optimal_delta(eta: float, count: int, epsilon: float) -> float:
    """Return the exact delta at `epsilon` of `count` mechanisms of range `eta`.

    The mechanisms and their inputs must be fixed in advance.
    """
    owner = "bounded_range_optimal_delta"
    check_loss(owner, "eta", eta)
    check_count(owner, "count", count)
    check_loss(owner, "epsilon", epsilon)
    if count == 0 or epsilon >= count * eta:
        return 0.0
    if math.isinf(eta):
        return 1.0
    found = _searched_range(eta, count, epsilon)
    return _full_delta(eta, count, epsilon, max(found, 1e-300)) if found > 0 else 0.0


def bounded_range_optimal(eta: float, count: int, delta: float) -> float:
    """Return the exact epsilon at `delta` of `count` mechanisms of range `eta`.

    Optimal when the queries are fixed before the first answer. If later queries depend
    on earlier answers it is too small: compose the ``eta**2 / 8`` of zCDP instead.

    Examples
    --------
    >>> round(bounded_range_optimal(0.08, 40, 1e-5), 6)
    0.934913
    """
    check_loss("bounded_range_optimal", "eta", eta)
    check_count("bounded_range_optimal", "count", count)
    check_delta("bounded_range_optimal", delta)
    if count == 0 or eta == 0 or math.isinf(eta):
        return eta if count else 0.0
    upper = count * eta
    found = smallest_epsilon(lambda e: _searched_range(eta, count, e), delta, upper)
    if _full_delta(eta, count, found, delta) <= delta * (1 + 1e-10):
        return found
    return smallest_epsilon(
        lambda e: _full_delta(eta, count, e, delta * 1e-3), delta, upper, tolerance=1e-9
    )


# Exact compositions enumerate outcomes; beyond this many releases the curves take over.
_MOST_EXACT = 10**6
_LEAST_DELTA, _ALMOST_ONE = 1e-18, 1 - 1e-9


class Curve(NamedTuple):
    """One bound, read in both directions; one of them may have to be searched."""

    epsilon_at: Callable[[float], float]
    delta_at: Callable[[float], float] | None = None


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


def smallest_delta(curves: Iterable[Curve], epsilon: float) -> float:
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


def constant(total: float) -> Curve:
    """Return the curve of an epsilon that holds at every delta."""
    return Curve(lambda _: total, lambda epsilon: 0.0 if epsilon >= total else 1.0)


def _optimal_curve(strengths: Mapping[float, int]) -> Curve:
    values, counts = list(strengths), list(strengths.values())
    if len(values) > 1:
        return Curve(lambda delta: pure_heterogeneous(values, counts, delta))
    return Curve(
        lambda delta: pure_optimal(values[0], counts[0], delta),
        lambda epsilon: pure_optimal_delta(values[0], counts[0], epsilon),
    )


def _pure_curves(losses: Mapping[Loss, int], adaptive: bool) -> dict[str, Curve]:
    strengths: Counter[float] = Counter()
    for loss, count in losses.items():
        if loss.pure is None:
            return {}
        strengths[loss.pure] += count
    total = sum(strength * count for strength, count in strengths.items())
    curves = {"pure": constant(total)}
    # The optimum is proved for strengths that were fixed before the first answer.
    fixed = not adaptive or len(strengths) == 1
    if fixed and sum(strengths.values()) <= _MOST_EXACT:
        curves["optimal-composition"] = _optimal_curve(strengths)
    return curves


def _ranged_curves(losses: Mapping[Loss, int]) -> dict[str, Curve]:
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

    return {"bounded-range": Curve(epsilon_at, delta_at)}


def _gaussian_curves(losses: Mapping[Loss, int]) -> dict[str, Curve]:
    squares = [
        count * loss.mu * loss.mu for loss, count in losses.items() if loss.mu is not None
    ]
    if len(squares) < len(losses):
        return {}
    mu = math.sqrt(math.fsum(squares))
    return {
        "gaussian": Curve(
            lambda delta: gaussian_epsilon(mu, delta),
            lambda epsilon: float(gaussian_delta(mu, epsilon)),
        )
    }


def _renyi_curves(losses: Mapping[Loss, int]) -> dict[str, Curve]:
    orders = default_orders()
    rho = math.fsum(count * loss.rho for loss, count in losses.items())
    total = np.zeros(orders.size)
    for loss, count in losses.items():
        curve = rdp_of_zcdp(loss.rho, orders)
        if loss.pure is not None:
            curve = np.minimum(curve, rdp_of_pure(loss.pure, orders))
        total += count * curve
    return {
        "zcdp": Curve(
            lambda delta: zcdp_to_epsilon(rho, delta),
            lambda epsilon: rdp_to_delta(orders, rho * orders, epsilon),
        ),
        "rdp": Curve(
            lambda delta: rdp_to_epsilon(orders, total, delta),
            lambda epsilon: rdp_to_delta(orders, total, epsilon),
        ),
    }


def _law_curves(losses: Mapping[Loss, int], adaptive: bool) -> dict[str, Curve]:
    if all(loss.law is None for loss in losses):
        return {}  # nothing is known beyond what the optimal composition uses
    laws = pure_laws(losses)
    # As for the optimum, strengths must not depend on answers.
    if laws is None or (adaptive and len(laws) > 1):
        return {}
    composed = compose_losses(laws)
    if composed is None:
        return {}
    return {"pld": Curve(composed.epsilon_at, composed.delta_at)}


def pure_laws(losses: Mapping[Loss, int]) -> tuple[tuple[LossLaw, int], ...] | None:
    """Return the laws of losses that are all bounded, or None."""
    laws: Counter[LossLaw] = Counter()
    for loss, count in losses.items():
        if loss.pure is None or math.isinf(loss.pure):
            return None
        if loss.pure > 0:
            laws[loss.law or LossLaw(loss.pure)] += count
    few = 0 < sum(laws.values()) <= _MOST_EXACT
    return tuple(sorted(laws.items())) if few else None


def _moments_curves(losses: Mapping[Loss, int]) -> dict[str, Curve]:
    strengths = {loss.pure for loss in losses if loss.published}
    strength = strengths.pop() if strengths else None
    same = not strengths and all(loss.published for loss in losses)
    if not same or strength is None or math.isinf(strength):
        return {}
    count = sum(losses.values())
    return {"moments": Curve(lambda delta: moments_epsilon(strength / 2, 1, count, delta))}


def losses_of(entries: Iterable[tuple[PrivacyEvent, int]]) -> dict[Loss, int]:
    """Return how often each loss was suffered, in an order that depends on nothing else."""
    found: Counter[Loss] = Counter()
    for event, count in entries:
        found[loss_of(event)] += count
    # Sums of floats depend on the order of their terms; the order of releases must not matter.
    return dict(sorted(found.items(), key=lambda item: repr(item[0])))


def noise_curves(
    entries: Iterable[tuple[PrivacyEvent, int]], adaptive: bool
) -> dict[str, Curve]:
    """Return every bound that applies to releases with noise, by its name."""
    losses = losses_of(entries)
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
