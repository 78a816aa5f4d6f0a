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
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from fl_strategies.errors import (
    require,
)
from fl_strategies.privacy._numeric import (
    check_count,
    check_delta,
    check_loss,
    smallest_epsilon,
)
from fl_strategies.privacy.bounds import (
    Curve,
    constant,
    gaussian,
    losses_of,
    nfdp_tight,
    noise_curves,
    pure_laws,
    sampling_error,
    smallest_delta,
)
from fl_strategies.privacy.events import (
    DPSGDEvent,
    NonPrivateEvent,
    PrivacyEvent,
    SubsampleEvent,
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

# Share of delta that is set aside for imperfect sampling at least; it is hardly felt.
_LEAST_SHARE = 1e-7
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


def _runs_of(entries: Iterable[tuple[DPSGDEvent, int]]) -> gaussian.Runs:
    steps: Counter[tuple[float, float]] = Counter()
    for event, count in entries:
        chance = event.batch_size / event.records
        steps[event.noise_multiplier, chance] += event.steps * count
    return tuple(sorted((*kind, n) for kind, n in steps.items()))


def _sgd_curve(runs: gaussian.Runs, replace: bool) -> Curve:
    law = gaussian.sgd_distribution(runs)
    if replace:
        return _doubled(law)
    return Curve(partial(gaussian.sgd_epsilon, runs), partial(_delta_of, law))


def _joined_curve(runs: gaussian.Runs, noisy: Sequence[Entry]) -> Curve | None:
    """Return the curve of DP-SGD and releases of bounded loss together, if there is one."""
    laws = pure_laws(losses_of(noisy)) or ()
    law = gaussian.joined_distribution(runs, laws) if laws else None
    if law is None:
        return None
    return Curve(partial(gaussian.sgd_epsilon, runs, laws=laws), partial(_delta_of, law))


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
        return smallest_epsilon(delta_at, delta, upper)

    return Curve(epsilon_at, delta_at)


def _summed(first: Curve, others: Iterable[Curve]) -> Curve:
    rest = list(others)

    def epsilon_at(delta: float) -> float:
        return first.epsilon_at(delta / 2) + min(c.epsilon_at(delta / 2) for c in rest)

    return Curve(epsilon_at)


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
) -> tuple[float, dict[str, Curve]]:
    """Return the delta that is spent whatever epsilon is, and the curves of the rest."""
    samples = [(e, n) for e, n in entries if isinstance(e, SubsampleEvent)]
    runs = [(e, n) for e, n in entries if isinstance(e, DPSGDEvent)]
    noisy = [(e, n) for e, n in entries if not isinstance(e, SubsampleEvent | DPSGDEvent)]
    mixed = replaced or len({event.relation for event, _ in entries}) > 1
    if mixed:
        noisy = [(as_replace_one(event), count) for event, count in noisy]
    curves = noise_curves(noisy, adaptive)
    if runs:
        composed = _runs_of(runs)
        training = _sgd_curve(composed, mixed)
        joined = None if mixed or adaptive else _joined_curve(composed, noisy)
        sums = {"basic": _summed(training, curves.values())} if noisy else {"pld": training}
        curves = sums if joined is None else {**sums, "pld": joined}
    return _sampling_delta(samples), curves or {"subsampling": constant(0.0)}


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
    """Return how far all releases together lie from ideal noise; see `sampling_error`."""
    return math.fsum(count * sampling_error(event) for event, count in entries)


def paid_epsilon(epsilon_at: Callable[[float], float], delta: float, error: float) -> float:
    """Return epsilon at a delta that also pays for imperfect sampling.

    Parameters
    ----------
    epsilon_at : callable
        Epsilon of ideal noise at some delta.
    delta, error : float
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
    check_loss("delta_at", "epsilon", epsilon)
    if not entries or math.isinf(epsilon):
        return 0.0
    if _why_not_private(entries):
        return 1.0
    spent, curves = _compose(entries, adaptive, replaced=False)
    price = error_of(entries) * (1 + math.exp(min(epsilon, 700.0)))
    return min(1.0, spent + (1 - spent) * smallest_delta(curves.values(), epsilon) + price)
