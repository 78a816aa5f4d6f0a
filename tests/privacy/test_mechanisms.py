"""Mechanisms: exact chances of their answers, honest events, and what they refuse."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from scipy import integrate, stats

from fl_strategies.errors import InvalidData, InvalidParameter
from fl_strategies.privacy.accountant import bounds, claim
from fl_strategies.privacy.bounds.theorems import gaussian_epsilon, pure_optimal
from fl_strategies.privacy.events import NoisyMaxEvent, PrivacyEvent, ThresholdEvent
from fl_strategies.privacy.mechanisms import (
    GRID,
    UNANSWERED,
    ConfidentNoisyMax,
    GaussianScores,
    LaplaceCounts,
    LaplaceScores,
    NoisyMax,
    SubsampleOnce,
)
from fl_strategies.privacy.noise import ScorePrivacy

ROWS = 100_000
LEAST_P_VALUE = 1e-3
NOISES = ["laplace", "gumbel", "gaussian"]
EXACT = {"laplace": stats.laplace, "gumbel": stats.gumbel_r, "gaussian": stats.norm}


def noisy_max(noise: Any = "gumbel", **other: Any) -> NoisyMax:
    values = {"scale": 3.0, "sensitivity": 1.0, "unit": "party", "num_classes": 3, **other}
    return NoisyMax(noise=noise, **values)


def confident(**other: Any) -> ConfidentNoisyMax:
    values: dict[str, Any] = {
        "threshold": 6.0,
        "threshold_scale": 2.0,
        "scale": 3.0,
        "sensitivity": 1.0,
        "unit": "party",
        "num_classes": 3,
        **other,
    }
    return ConfidentNoisyMax(**values)


def exact_chances(counts: list[int], noise: str, scale: float) -> np.ndarray:
    """Integrate, for each class, its density times the others' distribution functions."""
    law = EXACT[noise]
    x = np.linspace(min(counts) - 40 * scale, max(counts) + 40 * scale, 100_001)
    standardised = (x[:, None] - np.array(counts)) / scale
    densities, below = law.pdf(standardised) / scale, law.cdf(standardised)
    others = [np.delete(below, own, axis=1).prod(axis=1) for own in range(len(counts))]
    chances = np.array(
        [integrate.trapezoid(densities[:, own] * rest, x) for own, rest in enumerate(others)]
    )
    assert chances.sum() == pytest.approx(1, abs=1e-6)
    return np.asarray(chances / chances.sum())


def goodness(labels: np.ndarray, chances: np.ndarray) -> float:
    observed = np.bincount(labels, minlength=len(chances))
    return float(stats.chisquare(observed, chances * len(labels)).pvalue)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(
    ("counts", "scale"),
    [([6, 3, 1], 2.0), ([40, 10], 10.0), ([5, 5, 5, 5], 1.0), ([0, 9, 2, 7, 1], 4.0)],
)
def test_labels_have_their_exact_chances(noise: str, counts: list[int], scale: float) -> None:
    """A hundred thousand labels fit the integrals of the definition."""
    mechanism = noisy_max(noise, scale=scale, num_classes=len(counts))
    release = mechanism.release(np.tile(counts, (ROWS, 1)), np.random.default_rng(1))

    assert goodness(release.values, exact_chances(counts, noise, scale)) > LEAST_P_VALUE
    assert release.values.dtype == np.int64


@pytest.mark.parametrize("noise", NOISES)
def test_the_goodness_of_fit_notices_ten_percent_less_noise(noise: str) -> None:
    """The test above can fail: a slightly wrong scale is found."""
    mechanism = noisy_max(noise, scale=1.8)
    release = mechanism.release(np.tile([6, 3, 1], (ROWS, 1)), np.random.default_rng(1))

    assert goodness(release.values, exact_chances([6, 3, 1], noise, 2.0)) < 1e-6


@pytest.mark.parametrize("noise", NOISES)
def test_rows_get_independent_noise(noise: str) -> None:
    """Pairs of neighbouring equal rows agree as often as independent labels would."""
    counts = np.tile([6, 3, 1], (ROWS, 1))
    labels = noisy_max(noise, scale=2.0).release(counts, np.random.default_rng(2)).values
    chances = exact_chances([6, 3, 1], noise, 2.0)
    pairs = 3 * labels[::2] + labels[1::2]

    assert goodness(pairs, np.outer(chances, chances).ravel()) > LEAST_P_VALUE


@pytest.mark.parametrize("noise", NOISES)
def test_the_release_says_what_it_cost(noise: Any) -> None:
    """One event per row, with the settings of the mechanism."""
    mechanism = noisy_max(noise, sensitivity=2, unit="example")
    release = mechanism.release(np.array([[3, 0, 1]] * 7))
    expected = NoisyMaxEvent(
        unit="example",
        relation="replace-one",
        noise=noise,
        scale=3.0,
        sensitivity=2.0,
        num_classes=3,
    )

    assert mechanism.event == expected
    assert release.charges == mechanism.charges(7) == ((expected, 7),)


def every_release(rng: np.random.Generator | None) -> list[Any]:
    counts = np.tile([5, 4, 5], (40, 1))
    scores = np.zeros((40, 3))
    score_settings: Any = {"bound": 1.0, "scale": 0.5, "num_values": 3, "unit": "party"}
    return [
        *(noisy_max(noise).release(counts, rng) for noise in NOISES),
        confident().release(counts, rng),
        LaplaceScores(**score_settings).release(scores, rng),
        GaussianScores(**score_settings).release(scores, rng),
        LaplaceCounts(epsilon=1.0, l1_sensitivity=2.0).release(np.full(40, 50), rng),
        SubsampleOnce(records=1000, samples=40, replacement=False).release(rng),
    ]


def test_a_seed_repeats_everything_and_is_confessed() -> None:
    """With equal generators all values are equal, and every event says so."""
    first, second = (every_release(np.random.default_rng(8)) for _ in range(2))

    for one, other in zip(first, second, strict=True):
        assert (one.values == other.values).all()
        assert all(event.seeded for event, _ in one.charges)


def test_secret_noise_never_repeats() -> None:
    """Without a generator two releases differ although the global seeds are equal."""
    both = []
    for _ in range(2):
        np.random.seed(0)  # noqa: NPY002 - the global state is what this test is about
        both.append(every_release(None))

    for one, other in zip(*both, strict=True):
        assert (one.values != other.values).any()
        assert not any(event.seeded for event, _ in one.charges)


@pytest.mark.parametrize("make", [noisy_max, confident])
@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (np.array([[1, -1, 0]]), "finite and at least 0, got -1"),
        (np.array([[1.0, np.nan, 0.0]]), "finite and at least 0, got nan"),
        (np.array([[1.0, np.inf, 0.0]]), "finite and at least 0"),
        (np.array([[1.0, 0.5, 0.0]]), "whole numbers"),
        (np.array([[2**60, 1, 0]]), "whole numbers below"),
        (np.array([[1, 2]]), "3 columns, one per class"),
        (np.array([1, 2, 3]), "a table"),
        (np.zeros((0, 3), dtype=int), "at least one row"),
        (np.array([[True, False, False]]), "an array of numbers"),
        (np.array([["1", "0", "0"]]), "an array of numbers"),
    ],
)
def test_wrong_votes_are_refused(make: Any, counts: np.ndarray, words: str) -> None:
    """One sentence says what is wrong with them."""
    with pytest.raises(InvalidData, match=f"votes must be .*{words}"):
        make().release(counts)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint64, np.float32])
def test_votes_of_any_type_of_number(dtype: Any) -> None:
    """Unsigned counts do not wrap around when they are compared."""
    counts = np.array([[0, 200, 1], [200, 0, 1]], dtype=dtype)

    for noise in NOISES:
        labels = noisy_max(noise, scale=0.5).release(counts).values
        assert labels.tolist() == [1, 0]


@pytest.mark.parametrize("noise", NOISES)
def test_huge_counts_keep_their_differences(noise: str) -> None:
    """Only gaps matter: adding a constant to all counts leaves the chances alone."""
    far = np.tile(np.array([6, 3, 1]) + 2**52, (ROWS, 1))
    labels = noisy_max(noise, scale=2.0).release(far, np.random.default_rng(3)).values

    assert goodness(labels, exact_chances([6, 3, 1], noise, 2.0)) > LEAST_P_VALUE


def laplace_scores(**other: Any) -> LaplaceScores:
    values: dict[str, Any] = {"bound": 1.0, "scale": 1.0, "num_values": 2, "unit": "party"}
    return LaplaceScores(**{**values, **other})


def laplace_counts(epsilon: float) -> LaplaceCounts:
    return LaplaceCounts(epsilon=epsilon, l1_sensitivity=2.0)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (noisy_max, {"scale": 0.0}),
        (noisy_max, {"scale": -1.0}),
        (noisy_max, {"sensitivity": 0}),
        (noisy_max, {"num_classes": 1}),
        (noisy_max, {"unit": "row"}),
        (noisy_max, {"noise": "uniform"}),
        (confident, {"threshold": math.nan}),
        (confident, {"threshold_scale": 0.0}),
        (laplace_scores, {"bound": 0.0}),
        (laplace_scores, {"bound": math.inf}),
        (laplace_scores, {"scale": 1e-9}),
        (laplace_scores, {"scale": math.nan}),
        (laplace_scores, {"num_values": 0}),
        (laplace_scores, {"num_contributors": 0}),
        (laplace_scores, {"unit": "row"}),
        *((laplace_counts, {"epsilon": wrong}) for wrong in (0.0, -1.0, 1e-9, 1e9, math.nan)),
    ],
)
def test_an_impossible_mechanism_cannot_be_made(make: Any, change: dict[str, Any]) -> None:
    """The error comes at construction, before any data is seen, and names the setting."""
    with pytest.raises(
        InvalidParameter, match=f"{next(iter(change)).removeprefix('threshold_')} must be"
    ):
        make(**change)


def test_charges_are_for_at_least_one_row() -> None:
    """A release of nothing is a mistake, not a free event."""
    for mechanism in (noisy_max(), confident(), laplace_scores()):
        with pytest.raises(InvalidParameter, match="num_rows must be a whole number"):
            mechanism.charges(0)


def test_confident_answers_have_their_exact_chances() -> None:
    """A row is answered with the chance of its lead, then labelled as by noisy max."""
    counts = np.tile([7, 3, 1], (ROWS, 1))
    labels = confident().release(counts, np.random.default_rng(4)).values
    passing = float(stats.norm.sf((6.0 - 7) / 2.0))
    chances = np.array([1 - passing, *passing * exact_chances([7, 3, 1], "gaussian", 3.0)])

    assert goodness(labels - UNANSWERED, chances) > LEAST_P_VALUE


def test_confident_answers_are_charged_for_every_row() -> None:
    """What is paid does not depend on how many rows passed."""
    mechanism = confident()
    agreed, split = np.tile([90, 0, 0], (20, 1)), np.tile([0, 0, 0], (20, 1))
    answered, refused = mechanism.release(agreed), confident(threshold=60).release(split)

    assert (answered.values == 0).all()
    assert (refused.values == UNANSWERED).all()
    test = ThresholdEvent(unit="party", relation="replace-one", scale=2.0, sensitivity=1.0)
    assert answered.charges == refused.charges == ((test, 20), (mechanism.event, 20))


SCORES: list[tuple[Any, int]] = [(LaplaceScores, 1), (GaussianScores, 2)]


@pytest.mark.parametrize(("kind", "norm"), SCORES)
def test_scores_are_the_clipped_mean_plus_noise(kind: Any, norm: int) -> None:
    """The mean of many noisy releases is the mean of the clipped rows."""
    mechanism = kind(bound=2.0, scale=0.5, num_values=2, unit="party", num_contributors=2)
    rows = np.array([[30.0, 40.0], [0.3, -0.4]])
    stack = np.repeat(rows[:, None], 20_000, axis=1)
    values = mechanism.release(stack, np.random.default_rng(5)).values
    clipped = np.array([rows[0] * 2 / np.linalg.norm(rows[0], norm), rows[1]]).mean(axis=0)
    deviation = 0.5 * (math.sqrt(2) if norm == 1 else 1)

    assert values.shape == (20_000, 2)
    assert np.abs(values.mean(axis=0) - clipped).max() < 5 * deviation / math.sqrt(20_000)
    assert values.std(axis=0) == pytest.approx([deviation] * 2, rel=0.03)


@pytest.mark.parametrize(("kind", "norm"), SCORES)
def test_released_scores_lie_on_a_public_grid(kind: Any, norm: int) -> None:
    """Whatever the input, outputs are whole multiples: their low bits tell nothing."""
    mechanism = kind(bound=1.0, scale=0.3, num_values=4, unit="party")
    scores = np.random.default_rng(6).normal(size=(500, 4)) / norm
    steps = mechanism.release(scores).values / (0.3 / GRID)

    assert np.abs(steps - np.rint(steps)).max() < 1e-6
    assert np.bincount(np.rint(steps).astype(int).ravel() % 2, minlength=2).min() > 800


@pytest.mark.parametrize(("kind", "norm"), SCORES)
def test_the_event_covers_the_worst_replacement(kind: Any, norm: int) -> None:
    """Opposite rows at the bound, rounded to the grid, stay within the stated sensitivity."""
    mechanism = kind(bound=1.0, scale=0.7, num_values=3, unit="party", num_contributors=4)
    event = mechanism.event
    stated = event.l1_sensitivity if norm == 1 else event.l2_sensitivity
    row = np.full(3, 1e6)
    zeros = np.zeros((3, 1, 3))
    stacks = [np.concatenate([sign * row[None, None], zeros]) for sign in (1, -1)]
    first, second = (
        mechanism.release(stack, np.random.default_rng(7)).values[0] for stack in stacks
    )

    moved = np.linalg.norm(first - second, norm)
    assert 2 / 4 - 1e-6 < moved <= stated
    assert stated == pytest.approx(2 / 4, rel=1e-5)


@pytest.mark.parametrize(("kind", "norm"), SCORES)
def test_nearby_inputs_cannot_be_told_by_their_low_bits(kind: Any, norm: int) -> None:
    """Inputs a third of a grid unit apart give the very same output, to the last bit."""
    mechanism = kind(bound=norm, scale=1.0, num_values=1, unit="party")
    near = np.array([[0.25], [0.25 + 0.3 / GRID], [0.25 - 0.3 / GRID]])
    outputs = [mechanism.release(x[None], np.random.default_rng(9)).values for x in near]

    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (np.zeros((4, 3)), "of shape"),
        (np.zeros((2, 4)), "of shape"),
        (np.zeros((1, 4, 2, 2)), "of shape"),
        (np.zeros((0, 2)), "of shape"),
        (np.array([[np.nan, 0.0]]), "within"),
        (np.array([[np.inf, 0.0]]), "within"),
        (np.array([[1e200, 0.0]]), "within"),
        (np.array([[True, False]]), "numbers"),
    ],
)
def test_wrong_scores_are_refused(scores: np.ndarray, words: str) -> None:
    """NaN, infinity and wrong shapes never reach the noise."""
    mechanism = GaussianScores(bound=1.0, scale=1.0, num_values=2, unit="party")
    if scores.shape == (2, 4):
        mechanism = dataclasses.replace(mechanism, num_contributors=2)

    with pytest.raises(InvalidData, match=f"scores must be {words}"):
        mechanism.release(scores)


def test_whole_numbers_are_scores_too() -> None:
    """Quantised scores need no conversion."""
    mechanism = LaplaceScores(bound=9.0, scale=1e-3, num_values=2, unit="example")

    assert mechanism.release(np.array([[3, 4]])).values.round().tolist() == [[3.0, 4.0]]


@pytest.mark.parametrize(("replacement", "delta"), [(False, 0.3), (True, 1 - 0.9**3)])
def test_a_record_is_drawn_with_the_stated_chance(replacement: bool, delta: float) -> None:
    """The frequency of record 0 in many samples is the event's delta."""
    sampler = SubsampleOnce(records=10, samples=3, replacement=replacement)
    rng = np.random.default_rng(10)
    drawn = [0 in sampler.release(rng).values for _ in range(5000)]

    assert stats.binomtest(sum(drawn), 5000, delta).pvalue > LEAST_P_VALUE


def test_a_sample_says_what_it_cost() -> None:
    """One event, once; impossible samples are refused at construction."""
    sampler = SubsampleOnce(records=10, samples=3, replacement=False)
    release = sampler.release()

    assert release.charges == ((sampler.event, 1),) == sampler.charges()
    assert release.values.shape == (3,)
    with pytest.raises(InvalidParameter, match="samples must be"):
        SubsampleOnce(records=10, samples=11, replacement=False)


def test_mechanisms_and_releases_cannot_be_changed() -> None:
    """What was accounted for is what is used."""
    event: PrivacyEvent = noisy_max().event
    for target, name in ((noisy_max(), "scale"), (event, "scale")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(target, name, 99.0)


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 3.0])
def test_the_price_is_at_most_what_was_asked(epsilon: float) -> None:
    """The scale is rounded up to a power of two, so epsilon is met and at least half used."""
    mechanism = LaplaceCounts(epsilon=epsilon, l1_sensitivity=2.0)

    cost = claim(mechanism.charges(), 1e-5, replaced=True).epsilon

    assert epsilon / 2 - 1e-4 < cost <= epsilon


def test_noise_has_the_distribution_of_its_event() -> None:
    """A Kolmogorov-Smirnov test against the Laplace distribution of the event's scale."""
    mechanism = LaplaceCounts(epsilon=1.0, l1_sensitivity=2.0)
    high = np.full(4_000, 10**6)

    noise = np.concatenate([mechanism.release(high).values - 10**6 for _ in range(5)])

    event = mechanism.charges()[0][0]
    assert event.scale == 2.0  # type: ignore[attr-defined]
    assert stats.kstest(noise, stats.laplace(scale=2.0).cdf).pvalue > 1e-4
    assert stats.kstest(noise, stats.laplace(scale=1.8).cdf).pvalue < 1e-4


def test_noisy_counts_are_whole_steps_and_never_negative() -> None:
    """Released numbers lie on the grid of the noise, so their low bits tell nothing."""
    mechanism = LaplaceCounts(epsilon=0.5, l1_sensitivity=2.0)

    values = mechanism.release(np.zeros(1000, np.int64)).values

    steps = values * GRID / mechanism.scale
    assert (steps == np.rint(steps)).all()
    assert values.min() == 0.0
    assert 0.4 < (values > 0).mean() < 0.6


def test_a_blanked_record_moves_half_as_much() -> None:
    """It leaves one count and enters none; a replaced one enters another."""
    charges = LaplaceCounts(epsilon=1.0, l1_sensitivity=2.0).charges()

    assert claim(charges, 1e-9).epsilon == pytest.approx(0.5, rel=1e-6)
    assert claim(charges, 1e-9, replaced=True).epsilon == pytest.approx(1.0, rel=1e-6)
    several = LaplaceCounts(epsilon=1.0, l1_sensitivity=8.0, halved=False).charges()
    assert claim(several, 1e-9).epsilon == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("counts", [np.array([1.5]), np.zeros(5000, int)])
def test_other_counts_are_refused(counts: np.ndarray) -> None:
    """Counts are whole numbers, and not too many."""
    with pytest.raises(InvalidData, match="counts must be"):
        LaplaceCounts(epsilon=1.0, l1_sensitivity=2.0).release(counts)


def test_counts_beyond_the_grid_are_clipped() -> None:
    """A refusal would tell about a record."""
    mechanism = LaplaceCounts(epsilon=100.0, l1_sensitivity=2.0)

    values = mechanism.release(np.array([-(2**40), 2**40, 2**31 - 1])).values

    assert values[0] < 1
    np.testing.assert_allclose(values[1:], 2**31 - 1, atol=2)


def cost(privacy: ScorePrivacy, rows: int, classes: int, parties: int, bound: float) -> float:
    mechanism = privacy.mechanism(
        unit="party", bound=bound, num_values=classes, num_contributors=parties, num_rows=rows
    )
    return claim(privacy.charges(mechanism, rows * classes), privacy.delta).epsilon


def test_gaussian_noise_costs_what_the_analytic_formula_says() -> None:
    """Mu = 2 B sqrt(Q) / (K sigma); sigma / B = 1.90 for 1000 rows and 20 parties is eps 8."""
    privacy = ScorePrivacy(noise="gaussian", sigma=19.0)
    mu = 2 * 10.0 * math.sqrt(1000) / (20 * 19.0)

    epsilon = cost(privacy, rows=1000, classes=10, parties=20, bound=10.0)

    assert epsilon == pytest.approx(gaussian_epsilon(mu, 1e-5), rel=1e-3)
    assert epsilon == pytest.approx(8.0, abs=0.05)


def test_laplace_noise_is_accounted_entry_by_entry() -> None:
    """Each entry costs 2 B gamma / K; composition is at most optimal for pure privacy."""
    privacy = ScorePrivacy(gamma=0.01)

    epsilon = cost(privacy, rows=100, classes=3, parties=5, bound=10.0)

    assert epsilon <= pure_optimal(2 * 10.0 * 0.01 / 5 * (1 + 1e-5), 300, 1e-5)
    assert epsilon > pure_optimal(2 * 10.0 * 0.01 / 5, 150, 1e-5)


def test_the_paper_s_noise_promises_nothing() -> None:
    """Gamma 1, 50000 rows of 10 classes, 20 parties, clip 10: basic composition says 5e5."""
    privacy = ScorePrivacy(gamma=1.0)
    mechanism = privacy.mechanism(
        unit="party", bound=10.0, num_values=10, num_contributors=20, num_rows=50_000
    )
    charges = privacy.charges(mechanism, 500_000)

    ideal = [value for value in bounds(charges, 1e-5).values() if value is not None]
    assert 1e5 < min(ideal) < 5e5
    assert claim(charges, 1e-5).epsilon == math.inf


@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_calibration_meets_its_target(noise: str) -> None:
    """The noise is just strong enough, for either kind."""
    privacy = ScorePrivacy(noise=noise, target_epsilon=4.0)  # type: ignore[arg-type]

    assert 3.9 < cost(privacy, rows=200, classes=4, parties=10, bound=5.0) <= 4.0


def test_seeded_noise_protects_nobody() -> None:
    """Whoever knows the seed can subtract the noise."""
    privacy = ScorePrivacy(gamma=0.1, seeded_noise=True)

    assert cost(privacy, rows=2, classes=2, parties=2, bound=1.0) == math.inf
    assert privacy.rng(3, "server") is not None
    assert ScorePrivacy(gamma=0.1).rng(3, "server") is None


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({}, "gamma or target_epsilon must be given, one of the two"),
        ({"gamma": 1.0, "target_epsilon": 1.0}, "gamma or target_epsilon must be given"),
        ({"gamma": 0.0}, "gamma must be greater than 0"),
        ({"sigma": 1.0}, "sigma must be omitted for laplace noise"),
        ({"noise": "gaussian", "gamma": 1.0}, "gamma must be omitted for gaussian noise"),
        ({"noise": "gumbel", "gamma": 1.0}, "noise must be one of laplace, gaussian"),
        ({"gamma": 1.0, "delta": 1.0}, "delta must be greater than 0 and below 1"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], rule: str) -> None:
    """The strength is said once, in the words of the noise."""
    with pytest.raises(InvalidParameter, match=rule):
        ScorePrivacy(**settings)  # type: ignore[arg-type]
