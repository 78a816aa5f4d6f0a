"""Attack our own mechanisms: the noise must be what the account says.

Every mechanism is run many times on two neighbouring inputs, through the code that real
releases use, and has to pass two tests.

1. An attacker who knows both inputs guesses from the output which one it was, by the
   optimal rule (the likelihood ratio). The hit rates bound epsilon from below (Clopper and
   Pearson) at every delta, and no bound may exceed the claim. This catches too little noise
   and a sensitivity that is too small.
2. The outputs must follow the exact distribution of the mechanism (chi-square). This also
   catches what an attacker does not notice: too much noise, a scale that is a tenth off,
   noise that is shared between classes, rows or entries.

Each of the two fails a correct mechanism with a chance of `SIGNIFICANCE`, one in a million,
whatever the number of runs, because attacks and tables are corrected for being many. An
audit of a dozen mechanisms is thus wrong about once in forty thousand times. Both tests look
at the inputs given; what other inputs would show is the accountant's proof, not measured.
The exact chances are computed independently of the mechanisms on purpose: an error made twice
would not be noticed.

References
----------
Clopper, Pearson (1934), The use of confidence or fiducial limits.
Jagielski, Ullman, Oprea (2020), Auditing differentially private machine learning.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import scipy

from fl_strategies._util import Array, FloatArray, IntArray
from fl_strategies.errors import InvalidParameter, check_count, require, require_data
from fl_strategies.privacy.accountant import claim, delta_at
from fl_strategies.privacy.bounds.theorems import nfdp_tight
from fl_strategies.privacy.events import NOISES
from fl_strategies.privacy.mechanisms import (
    UNANSWERED,
    Charges,
    ConfidentNoisyMax,
    GaussianScores,
    GaussianSums,
    LaplaceScores,
    NoisyMax,
    Source,
    SubsampleOnce,
)

SIGNIFICANCE = 1e-6
"""Chance that a correct mechanism fails either of the two tests."""

CELLS = 8
"""Quantiles of noise that a table tells apart, per entry."""

# Cells in which fewer hits are expected are pooled: chi-square is an approximation.
_LEAST_EXPECTED = 10.0


def _selection_chances(scaled: FloatArray, noise: Any) -> FloatArray:
    """Integrate density times the rivals' distribution functions, (num_classes,)."""
    # Laplace densities have a kink at every count: panels end there, and are exact between.
    steps = np.arange(scaled.min() - 40, scaled.max() + 41)
    ends = np.unique(np.concatenate([scaled, steps]))
    nodes, weights = np.polynomial.legendre.leggauss(20)
    half, middle = np.diff(ends) / 2, (ends[:-1] + ends[1:]) / 2
    points = (middle[:, None] + half[:, None] * nodes).ravel()
    gaps = points - scaled[:, None]
    below = noise.cdf(gaps)
    rivals = np.stack(
        [np.delete(below, own, axis=0).prod(axis=0) for own in range(len(scaled))]
    )
    return np.asarray((noise.pdf(gaps) * rivals) @ (half[:, None] * weights).ravel())


def fit(observed: IntArray, chances: FloatArray) -> float:
    """Return the p-value of tables (num_tables, num_cells) under their exact chances."""
    return corrected(
        np.array([_chi_square(*pair) for pair in zip(observed, chances, strict=True)])
    )


def corrected(p_values: Array) -> float:
    """Return the smallest p-value, corrected for choosing it among several."""
    return min(1.0, float(np.size(p_values) * np.min(p_values)))


def _chi_square(observed: IntArray, chances: FloatArray) -> float:
    expected = observed.sum() * chances
    # Cells too rare for the approximation join the rarest that is not.
    kept = max(1, int(np.count_nonzero(expected >= _LEAST_EXPECTED)))
    group = np.empty(expected.size, dtype=np.int64)
    group[np.argsort(-expected)] = np.minimum(np.arange(expected.size), kept - 1)
    counted = np.bincount(group, weights=observed)
    foreseen = np.bincount(group, weights=expected)
    statistic = ((counted - foreseen) ** 2 / foreseen).sum()
    return float(scipy.stats.chi2.sf(statistic, kept - 1)) if kept > 1 else 1.0


def _pair_tables(uniform: FloatArray) -> IntArray:
    """Count cells of neighbouring entries, (num_pairs, num_cells); evenly filled if right.

    Pairs rather than single entries show noise that entries share.
    """
    cells = np.minimum((uniform * CELLS).astype(np.int64), CELLS - 1)
    codes = cells if cells.shape[1] == 1 else cells[:, :-1] * CELLS + cells[:, 1:]
    width = CELLS ** min(2, cells.shape[1])
    return np.stack([np.bincount(column, minlength=width) for column in codes.T])


def _thresholds(span: float, count: int) -> FloatArray:
    """Return `count` thresholds for log-ratios between -span and span."""
    # Rounding must not keep the most telling outputs just below the last threshold.
    return np.linspace(-span, span, count) * (1 - 1e-9)


def _reached(ratios: FloatArray, thresholds: FloatArray) -> IntArray:
    """Count the runs whose ratio is at least each threshold, (num_thresholds,)."""
    return ratios.size - np.searchsorted(np.sort(ratios), thresholds)


def lower_bounds(hits: IntArray, runs: int, deltas: Array) -> FloatArray:
    """Return lower bounds on epsilon from bets on sets of outputs, (num_deltas,).

    Parameters
    ----------
    hits : (2, num_sets)
        Hits of each set under the first and under the second input.
    runs : int
    deltas : (num_deltas,)
    """
    both = np.concatenate([hits, runs - hits], axis=1)
    # All bounds hold together: the upper bound of a set is the lower one of its complement.
    level = SIGNIFICANCE / both.size
    least = np.where(both > 0, scipy.stats.beta.ppf(level, both, runs - both + 1), 0.0)
    most = 1 - np.roll(least, hits.shape[1], axis=1)
    surplus = np.maximum(least - np.reshape(deltas, (-1, 1, 1)), 0.0)
    with np.errstate(divide="ignore"):
        proved = np.log(surplus / most[::-1])
    return np.asarray(np.maximum(proved.max(axis=(1, 2)), 0.0))


Mechanism: TypeAlias = (
    NoisyMax | ConfidentNoisyMax | LaplaceScores | GaussianScores | GaussianSums | SubsampleOnce
)
Neighbours: TypeAlias = tuple[Array, Array]
Draw: TypeAlias = Callable[[int, int], Array]
"""Maps an input, 0 or 1, and a number of runs to their releases, (runs, ...)."""

# Small deltas show what is pure about a mechanism, large ones the body of its curve.
_DELTAS = (*np.geomspace(1e-9, 1e-3, 4), *np.linspace(0.02, 0.98, 49))
LEAST_RUNS = 1000
_ROWS_AT_ONCE = 1 << 18
_NUM_THRESHOLDS = 65


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit.

    Parameters
    ----------
    claimed_epsilon : float
        The accountant's claim at `delta`.
    lower_bound : float
        Proved by the attack at `delta`, with confidence 1 - `SIGNIFICANCE`.
    p_value : float
        Chance of outputs at least as odd as these if the noise is right.
    passed : bool
    delta : float
        Where the attack came closest to the claim, or exceeded it most.
    runs : int
        Releases of each of the two inputs.
    """

    claimed_epsilon: float
    lower_bound: float
    p_value: float
    passed: bool
    delta: float
    runs: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)


def audit(
    mechanism: Mechanism, neighbours: Neighbours, *, runs: int, rng: Source = None
) -> AuditResult:
    """Run a mechanism `runs` times on each of two inputs and test its claim.

    Parameters
    ----------
    mechanism : one of `Mechanism`
        A subclass is audited as what it claims to be.
    neighbours : pair of arrays
        Two inputs that differ by one unit of the world to be protected: counts
        (num_classes,), scores (num_contributors, num_values), sums (num_sums,), or distinct
        numbers that stand for the records (num_records,).
    runs : int
        At least 1000; a hundred thousand show an error of a tenth.
    rng : Generator, optional
        For repeatable tests. By default the secure source that real releases use.

    Examples
    --------
    >>> votes = np.array([7, 4]), np.array([6, 5])
    >>> right = NoisyMax(noise="gumbel", scale=2, sensitivity=1, unit="party", num_classes=2)
    >>> audit(right, votes, runs=10_000).passed
    True
    >>> wrong = NoisyMax(noise="gumbel", scale=2, sensitivity=0.1, unit="party", num_classes=2)
    >>> audit(wrong, votes, runs=10_000).passed
    False
    """
    check_count("audit", "runs", runs, least=LEAST_RUNS)
    match mechanism:
        case NoisyMax() | ConfidentNoisyMax():
            return _audit_selection(mechanism, neighbours, runs, rng)
        case LaplaceScores() | GaussianScores():
            return _audit_scores(mechanism, neighbours, runs, rng)
        case GaussianSums():
            return _audit_sums(mechanism, neighbours, runs, rng)
        case SubsampleOnce():
            return _audit_sample(mechanism, neighbours, runs, rng)
    raise InvalidParameter(
        "audit: mechanism must be one whose exact distribution is known here, got "
        f"{type(mechanism).__name__}."
    )


def audit_queries(
    mechanism: NoisyMax,
    neighbours: Neighbours,
    *,
    queries: int = 40,
    runs: int,
    rng: Source = None,
) -> AuditResult:
    """Attack the labels of many queries together, against the whole claimed curve.

    The attacker adds up log-likelihood ratios over queries that all have the same counts,
    and is compared with the accountant's epsilon at every delta. The number of answers of the
    first class must be binomial, which it is not if queries share noise. `runs` releases of
    `queries` labels each; the other parameters are those of `audit`.
    """
    check_count("audit_queries", "runs", runs, least=LEAST_RUNS)
    check_count("audit_queries", "queries", queries, least=1)
    chances = _both_chances(mechanism, neighbours)
    ratios = np.log(chances[0] / chances[1])
    thresholds = _thresholds(queries * np.abs(ratios).max(), 2 * queries + 1)
    hits = np.zeros((2, thresholds.size), dtype=np.int64)
    firsts = np.zeros((2, queries + 1), dtype=np.int64)
    for side, size in _portions(runs, queries):
        rows = np.broadcast_to(neighbours[side], (size * queries, mechanism.num_classes))
        labels = mechanism.release(rows, rng).values.reshape(size, queries)
        hits[side] += _reached(ratios[labels].sum(axis=1), thresholds)
        firsts[side] += np.bincount((labels == 0).sum(axis=1), minlength=queries + 1)
    expected = scipy.stats.binom.pmf(np.arange(queries + 1), queries, chances[:, :1])
    return _result(mechanism.charges(queries), hits, fit(firsts, expected), runs)


def class_chances(mechanism: NoisyMax | ConfidentNoisyMax, counts: Array) -> FloatArray:
    """Return the exact chance of every answer to one row of counts, (num_classes,).

    It is preceded by the chance of no answer if the mechanism may give none.

    Examples
    --------
    >>> laplace = NoisyMax(noise="laplace", scale=2, sensitivity=1, unit="party", num_classes=3)
    >>> float(class_chances(laplace, np.array([6, 3, 1]))[1:].sum()).__round__(6)
    0.236549
    """
    shape = (mechanism.num_classes,)
    require_data(counts.shape == shape, "audit", "counts", f"of shape {shape}", counts.shape)
    scaled = counts / mechanism.scale
    if isinstance(mechanism, ConfidentNoisyMax):
        lead = (counts.max() - mechanism.threshold) / mechanism.threshold_scale
        answers = scipy.special.ndtr(lead) * _selection_chances(scaled, scipy.stats.norm)
        return np.concatenate([[scipy.special.ndtr(-lead)], answers])
    if mechanism.noise == "gumbel":
        return np.asarray(scipy.special.softmax(scaled))
    noise = scipy.stats.laplace if mechanism.noise == "laplace" else scipy.stats.norm
    return _selection_chances(scaled, noise)


def _both_chances(
    mechanism: NoisyMax | ConfidentNoisyMax, neighbours: Neighbours
) -> FloatArray:
    """Return the chances of every answer under both inputs, (2, num_answers)."""
    chances = np.stack([class_chances(mechanism, counts) for counts in neighbours])
    # A chance that underflows must not turn a ratio into nonsense.
    return np.maximum(chances, 1e-300)


def _audit_selection(
    mechanism: NoisyMax | ConfidentNoisyMax, neighbours: Neighbours, runs: int, rng: Source
) -> AuditResult:
    chances = _both_chances(mechanism, neighbours)
    least = UNANSWERED if isinstance(mechanism, ConfidentNoisyMax) else 0
    answers = np.zeros(chances.shape, dtype=np.int64)
    for side, size in _portions(runs, mechanism.num_classes):
        rows = np.broadcast_to(neighbours[side], (size, mechanism.num_classes))
        labels = mechanism.release(rows, rng).values - least
        answers[side] += np.bincount(labels, minlength=chances.shape[1])
    # All sets of answers that an optimal attacker may bet on: the most telling ones first.
    order = np.argsort(chances[1] / chances[0])
    hits = np.cumsum(answers[:, order], axis=1)[:, :-1]
    return _result(mechanism.charges(1), hits, fit(answers, chances), runs)


def _clipped_mean(mechanism: LaplaceScores | GaussianScores, scores: Array) -> FloatArray:
    order = 1 if isinstance(mechanism, LaplaceScores) else 2
    norms = np.linalg.norm(scores, ord=order, axis=1, keepdims=True)
    shrunk = scores * np.minimum(1.0, mechanism.bound / np.maximum(norms, 1e-300))
    return np.asarray(shrunk.mean(axis=0))


def _audit_scores(
    mechanism: LaplaceScores | GaussianScores, neighbours: Neighbours, runs: int, rng: Source
) -> AuditResult:
    def draw(side: int, size: int) -> Array:
        return mechanism.release(np.repeat(neighbours[side][:, None], size, axis=1), rng).values

    noise = scipy.stats.laplace if isinstance(mechanism, LaplaceScores) else scipy.stats.norm
    centres = [_clipped_mean(mechanism, scores) / mechanism.scale for scores in neighbours]
    hits, p_value = _attack_numbers(draw, centres, mechanism.scale, noise, runs)
    return _result(mechanism.charges(1), hits, p_value, runs)


def _audit_sums(
    mechanism: GaussianSums, neighbours: Neighbours, runs: int, rng: Source
) -> AuditResult:
    def draw(side: int, size: int) -> Array:
        sums = neighbours[side]
        return mechanism.release(np.broadcast_to(sums, (size, *sums.shape)), rng).values

    return audit_sums(mechanism, neighbours, draw, runs=runs)


def audit_sums(
    mechanism: GaussianSums, neighbours: Neighbours, draw: Draw, *, runs: int
) -> AuditResult:
    """Test the claim of a mechanism for sums on releases of its user.

    Parameters
    ----------
    mechanism : GaussianSums
        Its charges are paid for each release.
    neighbours : pair of arrays
        The two releases without noise, computed by another route than theirs.
    draw : Draw
    runs : int
    """
    check_count("audit_sums", "runs", runs, least=LEAST_RUNS)
    scale = mechanism.drawn_scale
    centres = [np.ravel(sums) / scale for sums in neighbours]
    hits, p_value = _attack_numbers(draw, centres, scale, scipy.stats.norm, runs)
    return _result(mechanism.charges(centres[0].size), hits, p_value, runs)


def _attack_numbers(
    draw: Draw, centres: Sequence[FloatArray], scale: float, noise: Any, runs: int
) -> tuple[IntArray, float]:
    """Return the hits of bets on noisy numbers, and the p-value of their fit.

    `centres` are the numbers without noise, as multiples of its scale.
    """
    apart, width = np.abs(centres[0] - centres[1]), centres[0].size
    length = float(np.linalg.norm(apart))
    # Laplace ratios end here; Gaussian ones hardly reach four deviations beyond the mean.
    span = float(apart.sum()) if noise is scipy.stats.laplace else length * (length / 2 + 4)
    thresholds = _thresholds(span, _NUM_THRESHOLDS)
    hits = np.zeros((2, thresholds.size), dtype=np.int64)
    tables = np.zeros((2, max(1, width - 1), CELLS ** min(2, width)), dtype=np.int64)
    successive = np.zeros((2, CELLS**2), dtype=np.int64)
    for side, size in _portions(runs, width):
        values = draw(side, size).reshape(size, width) / scale
        gaps = [values - centre for centre in centres]
        ratios = (noise.logpdf(gaps[0]) - noise.logpdf(gaps[1])).sum(axis=1)
        hits[side] += _reached(ratios, thresholds)
        uniform = noise.cdf(gaps[side])
        tables[side] += _pair_tables(uniform)
        # Noise that a release shares with the one before it.
        even = size - size % 2
        successive[side] += _pair_tables(
            np.stack([uniform[:even:2].ravel(), uniform[1:even:2].ravel()], axis=1)
        )[0]
    found = (tables.reshape(-1, tables.shape[2]), successive)
    fits = [fit(part, np.full(part.shape, 1 / part.shape[1])) for part in found]
    return hits, corrected(np.array(fits))


def _audit_sample(
    mechanism: SubsampleOnce, neighbours: Neighbours, runs: int, rng: Source
) -> AuditResult:
    records, samples = mechanism.records, mechanism.samples
    delta = nfdp_tight(records, samples, replacement=mechanism.replacement).delta
    require(delta < 1, "audit", "samples", "fewer than all records", samples)
    first, second = neighbours
    changed = np.flatnonzero(first != second)
    require_data(changed.size == 1, "audit", "neighbours", "one record apart", changed.size)
    telling = np.array([first[changed[0]], second[changed[0]]])
    hits = np.zeros((2, 2), dtype=np.int64)
    draws = np.zeros((2, records), dtype=np.int64)
    for side, size in _portions(runs, samples):
        rows = np.stack([mechanism.release(rng).values for _ in range(size)])
        draws[side] += np.bincount(rows.ravel(), minlength=records)
        found = neighbours[side][rows][:, :, None] == telling
        hits[side] += np.count_nonzero(found.any(axis=1), axis=0)
    seen = np.stack([np.diag(hits), runs - np.diag(hits)], axis=1)
    p_value = min(fit(seen, np.array([[delta, 1 - delta]] * 2)), _fit_draws(mechanism, draws))
    return _result(mechanism.charges(), hits, min(1.0, 2 * p_value), runs, deltas=(delta,))


def _fit_draws(mechanism: SubsampleOnce, draws: IntArray) -> float:
    """Test that all records are drawn equally often; `draws` is (2, num_records)."""
    records, total = mechanism.records, draws[0].sum()
    # Drawing without replacement makes the counts of a run less variable.
    left = 1.0 if mechanism.replacement else (records - mechanism.samples) / (records - 1)
    expected = total / records
    spread = ((draws - expected) ** 2).sum(axis=1) / (expected * left)
    return corrected(scipy.stats.chi2.sf(spread, records - 1))


def _portions(runs: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield an input and a number of its runs, so that a portion's table fits into memory."""
    most = max(1, _ROWS_AT_ONCE // width)
    for side in (0, 1):
        for start in range(0, runs, most):
            yield side, min(most, runs - start)


def _result(
    charges: Charges,
    hits: IntArray,
    p_value: float,
    runs: int,
    deltas: tuple[float, ...] = (),
) -> AuditResult:
    """Compare the proved with the claimed epsilon at the delta where they come closest."""
    # Where epsilon is claimed to vanish, an attack on the total variation is sharpest.
    deltas = deltas or (*_DELTAS, min(delta_at(charges, 0.0), _DELTAS[-1]))
    proved = lower_bounds(hits, runs, np.array(deltas))
    claimed = np.array([claim(charges, delta).epsilon for delta in deltas])
    excess = proved - claimed
    with np.errstate(divide="ignore", invalid="ignore"):
        closeness = np.where(proved > 0, proved / claimed, 0.0)
    worst = int(np.argmax(excess if excess.max() > 0 else closeness))
    sound = bool(excess.max() <= 0) and p_value >= SIGNIFICANCE
    return AuditResult(
        claimed_epsilon=float(claimed[worst]),
        lower_bound=float(proved[worst]),
        p_value=p_value,
        passed=sound,
        delta=float(deltas[worst]),
        runs=runs,
    )


def audit_all(*, runs: int = 300_000, rng: Source = None) -> Mapping[str, AuditResult]:
    """Audit every mechanism, on inputs that show an attacker most of what there is.

    `runs` are the releases of each input. Forty queries are attacked a tenth as often, and
    samples are drawn a fiftieth as often, because each takes longer.
    """
    check_count("audit_all", "runs", runs, least=LEAST_RUNS)
    results = {}
    for name, mechanism, neighbours in _suite():
        share = 50 if isinstance(mechanism, SubsampleOnce) else 1
        times = max(LEAST_RUNS, runs // share)
        results[name] = audit(mechanism, neighbours, runs=times, rng=rng)
    votes, times = (np.array([6, 5]), np.array([5, 6])), max(LEAST_RUNS, runs // 10)
    for noise in NOISES:
        many = NoisyMax(noise=noise, scale=6.0, sensitivity=1, unit="party", num_classes=2)
        found = audit_queries(many, votes, runs=times, rng=rng)
        results[f"noisy-max-{noise}-40-queries"] = found
    return results


def _suite() -> Iterator[tuple[str, Mechanism, Neighbours]]:
    """Yield the name, the mechanism and the two inputs of every single-release audit."""
    votes = np.array([8, 4, 4]), np.array([7, 5, 4])
    for noise in NOISES:
        mechanism = NoisyMax(noise=noise, scale=2.0, sensitivity=1, unit="party", num_classes=3)
        yield f"noisy-max-{noise}", mechanism, votes
    confident = ConfidentNoisyMax(
        threshold=7.0,
        threshold_scale=2.0,
        scale=2.0,
        sensitivity=1,
        unit="party",
        num_classes=3,
    )
    yield "confident-noisy-max", confident, votes
    # Far outside the bound, so that a mechanism that forgets to clip is noticed.
    scores = np.array([[5.0, 0.0]]), np.array([[-5.0, 0.0]])
    for name, kind in (("scores-laplace", LaplaceScores), ("scores-gaussian", GaussianScores)):
        yield name, kind(bound=1.0, scale=2.0, num_values=2, unit="party"), scores
    # A record leaves one count of a histogram and enters another.
    histogram = GaussianSums(scale=2.0, l2_sensitivity=2**0.5, unit="example")
    yield "sums-histogram", histogram, (np.array([6, 3, 0, 2]), np.array([5, 3, 1, 2]))
    # Features as long as they may be, and their opposite.
    rest, own = np.array([120, -75, 9]), np.array([36, -48, 0])
    signed = GaussianSums(scale=100.0, l2_sensitivity=120.0, unit="example")
    yield "sums-signed", signed, (rest + own, rest - own)
    records = np.arange(20), np.r_[20, 1:20]
    for name, replacement in (("sample", False), ("sample-with-replacement", True)):
        yield name, SubsampleOnce(records=20, samples=5, replacement=replacement), records


def report(runs: int) -> tuple[dict[str, Any], list[str], int]:
    """Return what the command ``privacy audit`` says, as JSON, lines and an exit code."""
    results = audit_all(runs=runs)
    failed = [name for name, result in results.items() if not result.passed]
    content = {
        "passed": not failed,
        "runs": runs,
        "results": {name: result.to_json() for name, result in results.items()},
    }
    lines = [f"{'mechanism':30} {'claimed':>8} {'attacked':>8} {'p-value':>8}  verdict"]
    lines += [
        f"{name:30} {result.claimed_epsilon:8.4f} {result.lower_bound:8.4f} "
        f"{result.p_value:8.2g}  {'passed' if result.passed else 'FAILED'}"
        for name, result in results.items()
    ]
    return content, lines, int(bool(failed))
