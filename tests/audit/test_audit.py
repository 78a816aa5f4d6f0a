"""Correct mechanisms survive the audit; broken ones are caught, by the test that should.

All seeds are fixed, so nothing here depends on luck. With other seeds a correct mechanism
fails once in half a million audits, and each broken one passes far more rarely.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fl_strategies._util import Array
from fl_strategies.aggregation.votes import add_votes, consistent_labels
from fl_strategies.errors import InvalidData, InvalidParameter
from fl_strategies.privacy.events import Noise
from fl_strategies.privacy.mechanisms import (
    ConfidentNoisyMax,
    GaussianScores,
    LaplaceScores,
    NoisyMax,
    Release,
    Source,
    SubsampleOnce,
    continuous_gaussian,
    continuous_laplace,
    discrete_laplace,
)
from tests.audit.mechanisms import (
    SIGNIFICANCE,
    AuditResult,
    audit,
    audit_all,
    audit_queries,
    class_chances,
    corrected,
    fit,
    lower_bounds,
)
from tests.audit.sum_cases import caught_by

RUNS = 60_000
VOTES = np.array([8, 4, 4]), np.array([7, 5, 4])
CLOSE = np.array([6, 5]), np.array([5, 6])
SCORES = np.array([[5.0, 0.0]]), np.array([[-5.0, 0.0]])
RECORDS = np.arange(20), np.r_[20, 1:20]
NOISES: tuple[Noise, ...] = ("laplace", "gumbel", "gaussian")


def seeded(seed: int = 11) -> np.random.Generator:
    """Return the generator of one test."""
    return np.random.default_rng(seed)


def selection(noise: Noise = "laplace", *, kind: Any = NoisyMax, **changes: Any) -> Any:
    """Return a noisy max over three classes, or a broken twin of another kind."""
    values: dict[str, Any] = {
        "noise": noise,
        "scale": 2.0,
        "sensitivity": 1,
        "unit": "party",
        "num_classes": 3,
    }
    return kind(**{**values, **changes})


def drawn_as(claimed: Any, **changes: Any) -> Any:
    """Return a mechanism that charges for its settings, but draws with others."""
    broken, twin = copy(claimed), replace(claimed, **changes)
    object.__setattr__(broken, "release", twin.release)
    return broken


@dataclass(frozen=True, kw_only=True)
class NoiseTwice(NoisyMax):
    """Adds its noise a second time."""

    def release(self, counts: Array, rng: Source = None) -> Release:
        draw = continuous_laplace if self.noise == "laplace" else continuous_gaussian
        noise = draw(counts.size, rng) + draw(counts.size, rng)
        labels = np.argmax(counts + self.scale * noise.reshape(counts.shape), axis=1)
        return Release(labels, self.charges(len(counts)))


@dataclass(frozen=True, kw_only=True)
class SharedByClasses(NoisyMax):
    """Draws once a row, so the noise cancels in every comparison."""

    def release(self, counts: Array, rng: Source = None) -> Release:
        noise = self.scale * continuous_laplace(len(counts), rng)
        return Release(np.argmax(counts + noise[:, None], axis=1), self.charges(len(counts)))


@dataclass(frozen=True, kw_only=True)
class SharedByQueries(NoisyMax):
    """Uses the noise of each query for the next one, too."""

    def release(self, counts: Array, rng: Source = None) -> Release:
        labels = super().release(counts[::2], rng).values
        return Release(np.repeat(labels, 2)[: len(counts)], self.charges(len(counts)))


@dataclass(frozen=True, kw_only=True)
class SharedByEntries(LaplaceScores):
    """Draws once a row and adds that to all entries."""

    def release(self, scores: Array, rng: Source = None) -> Release:
        row = np.sign(scores[0])
        noise = self.scale * discrete_laplace(len(row), rng) / 2**24
        return Release(row * self.bound + noise[:, None], self.charges(len(row)))


@dataclass(frozen=True, kw_only=True)
class OftenTheFirst(SubsampleOnce):
    """Takes the first records instead of random ones, once in twenty times."""

    def release(self, rng: Source = None) -> Release:
        release = super().release(rng)
        first = np.arange(self.samples)
        lazy = rng is not None and rng.random() < 0.05
        return Release(first if lazy else release.values, release.charges)


@pytest.fixture(scope="module")
def results() -> Mapping[str, AuditResult]:
    """Audit all real mechanisms once."""
    return audit_all(runs=RUNS, rng=seeded())


def test_every_mechanism_passes(results: Mapping[str, AuditResult]) -> None:
    """No attack exceeds its claim, and all outputs have the exact distribution."""
    assert [name for name, result in results.items() if caught_by(result)] == []
    assert all(result.passed for result in results.values())
    assert len(results) == 13


def test_attacks_are_strong(results: Mapping[str, AuditResult]) -> None:
    """The attacks come close to the claims, so that half the noise cannot hide."""
    share = {
        name: result.lower_bound / result.claimed_epsilon
        for name, result in results.items()
        if not name.startswith("sample")
    }

    assert share.pop("confident-noisy-max") > 0.25
    assert share.pop("noisy-max-gaussian-40-queries") > 0.35
    assert min(share.values()) > 0.6
    assert share["scores-laplace"] > 0.93


def test_the_secure_source_passes() -> None:
    """Noise of the operating system, as real releases use it, survives as well."""
    result = audit(selection(), VOTES, runs=20_000)

    assert result.passed
    assert result.runs == 20_000


def test_a_seed_repeats_an_audit() -> None:
    """The same generator gives the same evidence to the last digit."""
    first, again = (audit(selection(), VOTES, runs=5000, rng=seeded()) for _ in range(2))

    assert first == again
    assert first != audit(selection(), VOTES, runs=5000, rng=seeded(8))


def test_gamma_as_the_scale_is_caught() -> None:
    """Noise of scale gamma instead of 1 / gamma hides nothing."""
    gamma = 0.04
    votes = np.array([60, 40, 30]), np.array([59, 41, 30])
    broken = drawn_as(selection(scale=1 / gamma), scale=gamma)
    close = np.array([31, 30, 0]), np.array([30, 31, 0])

    assert audit(selection(scale=1 / gamma), votes, runs=RUNS, rng=seeded()).passed
    assert "fit" in caught_by(audit(broken, votes, runs=RUNS, rng=seeded()))
    assert caught_by(audit(broken, close, runs=RUNS, rng=seeded())) == {"attack", "fit"}


def vote(parties: list[list[int]]) -> Array:
    """Return consistent votes (3,) of the students of all parties for one row."""
    counts = np.zeros((1, 3), dtype=np.int64)
    for labels in parties:
        add_votes(counts, consistent_labels(np.array(labels)[:, None], 3), len(labels))
    return counts[0]


@pytest.mark.parametrize("noise", ["laplace", "gumbel"])
def test_a_forgotten_s_is_caught_by_the_attack(noise: Noise) -> None:
    """A party with two students moves two votes: through the real voting code."""
    others = [[0, 0]] * 4 + [[1, 1]] + [[2, 2]] * 2 + [[0, 1]]
    neighbours = vote([[0, 0], *others]), vote([[1, 1], *others])
    right, wrong = (selection(noise, scale=4.0, sensitivity=s) for s in (2, 1))

    assert [counts.tolist() for counts in neighbours] == [[10, 2, 4], [8, 4, 4]]
    assert audit(right, neighbours, runs=RUNS, rng=seeded()).passed
    result = audit(wrong, neighbours, runs=RUNS, rng=seeded())
    assert caught_by(result) == {"attack"}
    assert result.lower_bound > 1.2 * result.claimed_epsilon


@pytest.mark.parametrize(
    ("factor", "noise", "expected"),
    [
        (0.5, "laplace", {"attack", "fit"}),
        (0.5, "gumbel", {"attack", "fit"}),
        (0.5, "gaussian", {"attack", "fit"}),
        (0.9, "laplace", {"attack", "fit"}),
        (0.9, "gumbel", {"attack", "fit"}),
        (0.9, "gaussian", {"fit"}),
    ],
)
def test_forty_queries_show_a_tenth_too_little_noise(
    factor: float, noise: Noise, expected: set[str]
) -> None:
    """The whole curve of forty answers catches what a single answer does not show."""
    broken = drawn_as(selection(noise, num_classes=2, scale=6.0), scale=6.0 * factor)
    result = audit_queries(broken, CLOSE, runs=40_000, rng=seeded())

    assert caught_by(result) == expected


def test_noise_shared_by_queries_needs_many_queries() -> None:
    """Each answer alone is perfect; together they vary too much."""
    broken = selection("gumbel", kind=SharedByQueries, num_classes=2, scale=6.0)

    assert audit(broken, CLOSE, runs=RUNS, rng=seeded()).passed
    assert "fit" in caught_by(audit_queries(broken, CLOSE, runs=5000, rng=seeded()))


def test_forty_queries_of_three_classes_pass() -> None:
    """More classes, fewer queries: the attack still stays below the claim."""
    result = audit_queries(selection("gumbel"), VOTES, queries=5, runs=20_000, rng=seeded())

    assert result.passed
    assert 0.4 < result.lower_bound / result.claimed_epsilon <= 1


def confident(num_classes: int = 3) -> ConfidentNoisyMax:
    """Return a selection that answers about two rows of three."""
    return ConfidentNoisyMax(
        threshold=7.0,
        threshold_scale=2.0,
        scale=2.0,
        sensitivity=1,
        unit="party",
        num_classes=num_classes,
    )


@pytest.mark.parametrize(
    ("factor", "expected"), [(0.5, {"attack", "fit"}), (0.9, {"fit"}), (1.1, {"fit"})]
)
def test_a_wrong_threshold_test_is_caught(factor: float, expected: set[str]) -> None:
    """Noise of another scale in the test changes how often there is an answer."""
    broken = drawn_as(confident(), threshold_scale=2.0 * factor)

    assert audit(confident(), VOTES, runs=RUNS, rng=seeded()).passed
    assert caught_by(audit(broken, VOTES, runs=RUNS, rng=seeded())) == expected


@pytest.mark.parametrize("noise", NOISES)
def test_impossible_answers_are_no_obstacle(noise: Noise) -> None:
    """A class that can never win is neither a warning nor evidence."""
    votes = np.array([9000, 0, 4000]), np.array([8999, 1, 4000])

    assert audit(selection(noise), votes, runs=2000, rng=seeded()).passed
    assert audit_queries(selection(noise), votes, runs=1000, queries=3, rng=seeded()).passed


def scores(kind: Any, **changes: Any) -> Any:
    """Return a mechanism for rows of two scores."""
    return kind(**{"bound": 1.0, "scale": 2.0, "num_values": 2, "unit": "party", **changes})


@pytest.mark.parametrize("kind", [LaplaceScores, GaussianScores])
def test_means_of_contributors_pass(kind: Any) -> None:
    """One of three parties is replaced; single scores and long rows are covered, too."""
    rng = seeded()
    for width in (1, 2, 5):
        mechanism = scores(kind, num_values=width, num_contributors=3, scale=0.5)
        first = rng.normal(size=(3, width))
        second = first.copy()
        second[0] *= -1

        assert audit(mechanism, (first, second), runs=20_000, rng=rng).passed


def sample(kind: Any = SubsampleOnce, *, replacement: bool = False, **changes: Any) -> Any:
    """Return a draw of five records out of twenty."""
    return kind(records=20, samples=5, replacement=replacement, **changes)


FIT, BOTH = {"fit"}, {"attack", "fit"}
FRONT = np.arange(20), np.r_[0:19, 20]
FIVE = np.arange(5), np.r_[9, 1:5]
OF_FIVE = [
    SubsampleOnce(records=5, samples=3, replacement=with_it) for with_it in (True, False)
]
# What is broken; its neighbours and runs; what catches it; what the fit's p-value is below.
WRONG: dict[str, tuple[Any, Any, int, set[str], float]] = {
    **{
        f"{noise} noise of a scale {factor} times as large": (
            drawn_as(selection(noise), scale=2.0 * factor),
            *(VOTES, RUNS, caught, 1e-20),
        )
        for noise in NOISES
        for factor, caught in ((0.5, BOTH), (0.9, FIT), (1.1, FIT))
    },
    # Too much noise breaks no promise, but it is not the mechanism that was described.
    "laplace noise twice": (selection(kind=NoiseTwice), VOTES, RUNS, FIT, 1e-100),
    "gaussian noise twice": (selection("gaussian", kind=NoiseTwice), VOTES, RUNS, FIT, 1e-100),
    "one draw for all classes": (selection(kind=SharedByClasses), VOTES, RUNS, FIT, 1e-20),
    # Numbers tell more than labels: the attack notices a tenth too little at once.
    **{
        f"{kind.__name__} of a scale {factor:.2f} times as large": (
            drawn_as(scores(kind), scale=2.0 * factor),
            *(SCORES, RUNS, FIT if factor > 1 else BOTH, 1e-10),
        )
        for kind in (LaplaceScores, GaussianScores)
        for factor in (0.5, 0.9, 1.1, 2**0.5)
    },
    "one draw for all entries": (scores(SharedByEntries), SCORES, 20_000, FIT, 1e-20),
    "unclipped scores": (
        drawn_as(scores(LaplaceScores), bound=1000.0),
        *(SCORES, 20_000, BOTH, 1e-20),
    ),
    # A record is used more often than delta says.
    "a record more": (drawn_as(sample(), samples=6), RECORDS, 5000, BOTH, 1e-10),
    "a record more, with replacement": (
        drawn_as(sample(replacement=True), samples=6),
        *(RECORDS, 5000, BOTH, 1e-10),
    ),
    "no replacement": (drawn_as(OF_FIVE[0], replacement=False), FIVE, 3000, BOTH, 1e-5),
    "replacement": (drawn_as(OF_FIVE[1], replacement=True), FIVE, 3000, FIT, 1e-5),
    "the first records more often": (sample(OftenTheFirst), FRONT, 5000, FIT, 1e-20),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_as_described_is_caught(name: str) -> None:
    """By the fit if its distribution is another, by the attack if it breaks its promise."""
    broken, neighbours, runs, caught, p_value = WRONG[name]
    result = audit(broken, neighbours, runs=runs, rng=seeded())

    assert caught_by(result) == caught
    assert result.p_value < p_value
    assert not result.passed
    if "0.5 times" in name or name == "unclipped scores":
        assert result.lower_bound > 1.2 * result.claimed_epsilon
    if "a record more" in name:
        assert result.delta == pytest.approx(1 - 0.95**5 if "with" in name else 0.25)


def test_exact_chances_match_reference_values() -> None:
    """Two and three classes with Laplace noise, from closed form and other quadrature."""
    two = class_chances(selection(num_classes=2, scale=10.0), np.array([40, 10]))
    three = class_chances(selection(), np.array([6, 3, 1]))

    assert two[1] == pytest.approx(0.062234, abs=1e-6)
    assert 1 - three[0] == pytest.approx(0.236549, abs=1e-6)


@pytest.mark.parametrize("noise", NOISES)
def test_exact_chances_are_a_distribution(noise: Noise) -> None:
    """They add up to one, follow the classes, and favour who leads."""
    mechanism = selection(noise, num_classes=5)
    counts = np.array([0, 3, 9, 3, 200])
    chances = class_chances(mechanism, counts)

    assert chances.sum() == pytest.approx(1, abs=1e-12)
    assert chances[1] == pytest.approx(chances[3], rel=1e-9)
    assert class_chances(mechanism, counts[::-1].copy()) == pytest.approx(chances[::-1])
    assert chances[4] > 1 - 1e-12


def test_gaussian_chances_match_the_closed_form() -> None:
    """Two classes differ by one normal variable; the test before adds no answer."""
    chances = class_chances(confident(num_classes=2), np.array([8, 5]))
    answered = stats.norm.cdf(0.5)
    leads = stats.norm.cdf(3 / (2 * 2**0.5))

    assert chances == pytest.approx([1 - answered, answered * leads, answered * (1 - leads)])


def test_bounds_are_those_of_clopper_and_pearson() -> None:
    """One set of outputs: two exact binomial limits, corrected for four directions."""
    hits, runs, delta = np.array([[900], [400]]), 1000, 0.1
    level = 1 - SIGNIFICANCE / 4
    bets = []
    # The attacker may bet on the set or on its complement, and on either input.
    for own, other in ((900, 400), (400, 900), (100, 600), (600, 100)):
        low = stats.binomtest(own, runs, alternative="greater").proportion_ci(level).low
        high = stats.binomtest(other, runs, alternative="less").proportion_ci(level).high
        bets.append(np.log((low - delta) / high) if low > delta else 0.0)
    (proved,) = lower_bounds(hits, runs, np.array([delta]))

    assert proved == pytest.approx(max(bets), rel=1e-6)


def test_bounds_hold_for_impossible_outputs() -> None:
    """Sets that are never or always hit prove something finite."""
    everything = lower_bounds(np.array([[1000], [0]]), 1000, np.array([0.0, 0.999]))
    nothing = lower_bounds(np.array([[0], [0]]), 1000, np.array([0.0]))

    assert 3 < everything[0] < 7
    assert everything[1] == nothing[0] == 0


def test_correct_tables_rarely_look_odd() -> None:
    """The p-values of right tables are spread evenly, also with rare and pooled cells."""
    rng = seeded()
    chances = np.array([0.6, 0.3, 0.09, 0.0095, 0.0003, 0.0002])
    p_values = np.array(
        [fit(rng.multinomial(5000, chances)[None], chances[None]) for _ in range(2000)]
    )

    assert stats.kstest(p_values, "uniform").pvalue > 1e-4
    assert corrected(np.array([0.5, 0.01])) == 0.02
    assert corrected(np.array([0.9, 0.8])) == 1.0


def test_tables_of_rare_cells_prove_nothing() -> None:
    """Where nothing can be expected, nothing is odd."""
    assert fit(np.array([[0, 9]]), np.array([[0.5, 0.5]])) == 1.0


@pytest.mark.parametrize(
    ("mechanism", "neighbours", "runs", "error", "sentence"),
    [
        (selection(), VOTES, 999, InvalidParameter, "runs must be a whole number, at least"),
        ("noise", VOTES, 1000, InvalidParameter, "audit: mechanism must be one .*, got str"),
        (selection(), CLOSE, 1000, InvalidData, r"counts must be of shape \(3,\), got \(2,\)"),
        (
            sample(),
            (np.arange(20), np.arange(20)),
            1000,
            InvalidData,
            "neighbours must be one record apart, got 0",
        ),
        (
            SubsampleOnce(records=5, samples=5, replacement=False),
            (np.arange(5), np.r_[9, 1:5]),
            1000,
            InvalidParameter,
            "samples must be fewer than all records, got 5",
        ),
    ],
)
def test_wrong_use_is_one_clear_sentence(
    mechanism: Any, neighbours: Any, runs: int, error: type[Exception], sentence: str
) -> None:
    """What cannot be audited is refused by name."""
    with pytest.raises(error, match=sentence):
        audit(mechanism, neighbours, runs=runs)


def test_too_few_queries_are_refused() -> None:
    """A set of queries has at least one."""
    with pytest.raises(InvalidParameter, match="queries must be a whole number, at least 1"):
        audit_queries(selection(), VOTES, queries=0, runs=1000)
    with pytest.raises(InvalidParameter, match="audit_all: runs must be"):
        audit_all(runs=10)
