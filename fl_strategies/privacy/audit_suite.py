"""Every mechanism audited on inputs that show an attacker most of what there is."""

from collections.abc import Iterator, Mapping

import numpy as np

from fl_strategies.privacy._numeric import check_count
from fl_strategies.privacy.audit import (
    LEAST_RUNS,
    AuditResult,
    Mechanism,
    Neighbours,
    Source,
    audit,
    audit_queries,
)
from fl_strategies.privacy.counts import GaussianSums
from fl_strategies.privacy.events import NOISES
from fl_strategies.privacy.mechanisms import (
    ConfidentNoisyMax,
    GaussianScores,
    LaplaceScores,
    NoisyMax,
    SubsampleOnce,
)


def audit_all(*, runs: int = 300_000, rng: Source = None) -> Mapping[str, AuditResult]:
    """Audit every mechanism, on inputs that show an attacker most of what there is.

    Parameters
    ----------
    runs : int
        Releases of each input. Forty queries are attacked a tenth as often, and samples are
        drawn a fiftieth as often, because each takes longer.
    rng : Generator, optional

    Returns
    -------
    results : mapping of a name to an `AuditResult`
    """
    check_count("audit_all", "runs", runs, least=LEAST_RUNS)
    results = {}
    for name, mechanism, neighbours in _suite():
        share = 50 if isinstance(mechanism, SubsampleOnce) else 1
        times = max(LEAST_RUNS, runs // share)
        results[name] = audit(mechanism, neighbours, runs=times, rng=rng)
    for noise in NOISES:
        many = NoisyMax(noise=noise, scale=6.0, sensitivity=1, unit="party", num_classes=2)
        votes = np.array([6, 5]), np.array([5, 6])
        times = max(LEAST_RUNS, runs // 10)
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
    laplace = LaplaceScores(bound=1.0, scale=2.0, num_values=2, unit="party")
    yield "scores-laplace", laplace, scores
    gaussian = GaussianScores(bound=1.0, scale=2.0, num_values=2, unit="party")
    yield "scores-gaussian", gaussian, scores
    yield from _sums()
    records = np.arange(20), np.r_[20, 1:20]
    yield "sample", SubsampleOnce(records=20, samples=5, replacement=False), records
    drawn = SubsampleOnce(records=20, samples=5, replacement=True)
    yield "sample-with-replacement", drawn, records


def _sums() -> Iterator[tuple[str, Mechanism, Neighbours]]:
    """Yield sums over records of which one is replaced."""
    # It leaves one count and enters another.
    histogram = GaussianSums(scale=2.0, l2_sensitivity=2**0.5, unit="example")
    yield "sums-histogram", histogram, (np.array([6, 3, 0, 2]), np.array([5, 3, 1, 2]))
    # Features as long as they may be, and their opposite.
    rest, own = np.array([120, -75, 9]), np.array([36, -48, 0])
    signed = GaussianSums(scale=100.0, l2_sensitivity=120.0, unit="example")
    yield "sums-signed", signed, (rest + own, rest - own)
