"""Laws of privacy losses: brute force, closed forms, other libraries and simulated losses."""

import math
from itertools import product

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit

from fl_strategies.privacy.accountant import bounds, claim, delta_at, loss_of, sampling_error
from fl_strategies.privacy.bounds.distributions import LossLaw, compose_losses
from fl_strategies.privacy.bounds.theorems import (
    gaussian_delta,
    pure_heterogeneous,
    pure_optimal,
    pure_optimal_delta,
)
from fl_strategies.privacy.events import DPSGDEvent, LaplaceEvent, OneVoteEvent, PrivacyEvent
from fl_strategies.privacy.mechanisms import LaplaceCounts, NoisyMax
from tests.privacy.oracles import laplace_pld_epsilon

DELTA = 1e-5
EPSILONS = (0.0, 0.3, 1.0, 2.5)


def vote(scale: float, num_classes: int, noise: str = "gumbel") -> OneVoteEvent:
    return OneVoteEvent(unit="example", noise=noise, scale=scale, num_classes=num_classes)  # type: ignore[arg-type]


def vector(strength: float) -> LaplaceEvent:
    return LaplaceEvent(
        unit="example", relation="replace-one", scale=1 / strength, l1_sensitivity=1.0
    )


def delta_by_enumeration(scale: float, num_classes: int, count: int, epsilon: float) -> float:
    """Add up all answers of two voters who disagree on every row, label by label."""
    right = 1 / (1 + (num_classes - 1) * math.exp(-1 / scale))
    wrong = (1 - right) / (num_classes - 1)
    chances = {"own": (right, wrong), "other": (wrong, right), "third": (wrong, wrong)}
    number = {"own": 1, "other": 1, "third": num_classes - 2}
    total = 0.0
    for answers in product(chances, repeat=count):
        ways = math.prod(number[a] for a in answers)
        first = math.prod(chances[a][0] for a in answers)
        second = math.prod(chances[a][1] for a in answers)
        total += ways * max(0.0, first - math.exp(epsilon) * second)
    return total


@pytest.mark.parametrize("num_classes", [2, 3, 10])
@pytest.mark.parametrize("epsilon", EPSILONS)
def test_labels_of_one_voter_cost_what_all_their_answers_say(
    num_classes: int, epsilon: float
) -> None:
    """Eight rows: delta by every possible answer, label by label."""
    exact = delta_by_enumeration(0.9, num_classes, 8, epsilon)
    found = delta_at([(vote(0.9, num_classes), 8)], epsilon, adaptive=True)

    assert exact <= found
    assert found == pytest.approx(exact, abs=1e-11)


@pytest.mark.parametrize(("num_classes", "gain"), [(2, 1.0), (6, 1.7), (10, 2.0), (100, 4.0)])
def test_labels_of_one_voter_cost_less_than_the_pure_bound(
    num_classes: int, gain: float
) -> None:
    """Other classes than the two in question tell nothing."""
    found = bounds([(vote(20.0, num_classes), 100)], DELTA, adaptive=True)
    pure = pure_optimal(0.05, 100, DELTA)

    assert found["optimal-composition"] == pytest.approx(pure, rel=1e-9)
    assert found["pld"] is not None
    assert found["pld"] * gain <= pure * (1 + 1e-6)


def test_two_classes_are_the_worst_pure_mechanism() -> None:
    """Without a third class the law is that of the optimal composition."""
    composed = compose_losses(((LossLaw(0.08), 40),))

    assert composed is not None
    assert composed.epsilon_at(DELTA) == pytest.approx(1.932272, abs=6e-7)
    for epsilon in EPSILONS:
        exact = pure_optimal_delta(0.08, 40, epsilon)
        assert exact <= composed.delta_at(epsilon) <= exact + 1e-11


@pytest.mark.parametrize("noise", ["gumbel", "laplace", "gaussian"])
@pytest.mark.parametrize("num_classes", [2, 5])
def test_one_vote_is_answered_as_often_as_its_law_says(noise: str, num_classes: int) -> None:
    """The real mechanism, two hundred thousand times: the own class, and each other one."""
    event = vote(0.7, num_classes, noise)
    law = loss_of(event).law
    mechanism = NoisyMax(
        noise=event.noise, scale=0.7, sensitivity=1, unit="example", num_classes=num_classes
    )
    rows = np.tile(np.eye(num_classes, dtype=np.int64)[1], (200_000, 1))

    shares = np.bincount(mechanism.release(rows).values, minlength=num_classes) / 200_000

    assert law is not None
    right = (1 - law.silent) * expit(law.strength)
    wrong = (1 - law.silent) * expit(-law.strength)
    expected = np.where(np.arange(num_classes) == 1, right, wrong)
    np.testing.assert_allclose(shares, expected, atol=5 * math.sqrt(0.25 / 200_000))


@pytest.mark.parametrize("scale", [0.1, 0.7, 5.0, 300.0])
def test_the_chance_of_a_wrong_label_is_known_to_many_digits(scale: float) -> None:
    """Two classes by the closed form; three, Laplace and Gaussian noise, by fifty digits."""
    step = 1 / scale
    closed = (2 + step) / 4 * math.exp(-step)
    assert loss_of(vote(scale, 2, "laplace")).pure == pytest.approx(
        math.log((1 - closed) / closed), rel=1e-7, abs=1e-8
    )
    for noise in ("laplace", "gaussian"):
        wrong = _wrong_of_three(noise, step)
        exact = math.log((1 - 2 * wrong) / wrong)
        pure = loss_of(vote(scale, 3, noise)).pure
        assert pure is not None
        assert exact <= pure <= exact * (1 + 1e-6) + 1e-8


def _wrong_of_three(noise: str, step: float) -> float:
    with mpmath.workdps(30):

        def share(x: mpmath.mpf) -> mpmath.mpf:
            if noise == "gaussian":
                return mpmath.ncdf(x)
            return 1 - mpmath.exp(-x) / 2 if x >= 0 else mpmath.exp(x) / 2

        def density(x: mpmath.mpf) -> mpmath.mpf:
            return mpmath.npdf(x) if noise == "gaussian" else mpmath.exp(-abs(x)) / 2

        ends = [-60, -5, 0, step / 2, step, step + 5, step + 60]
        lost = mpmath.quad(lambda x: density(x - step) * (1 - share(x) ** 2), ends)
        return float(lost / 2)


@pytest.mark.parametrize(("strength", "count"), [(0.1, 2000), (0.02, 1000), (1.0, 10)])
def test_laplace_noise_agrees_with_another_library(strength: float, count: int) -> None:
    """To the digits of both grids, and never below (27.685883 is a reference value)."""
    composed = compose_losses(((LossLaw(strength, smooth=True), count),))
    theirs = laplace_pld_epsilon(strength, count, DELTA)

    assert composed is not None
    assert composed.epsilon_at(DELTA) == pytest.approx(theirs, rel=3e-4)
    assert composed.epsilon_at(DELTA) < pure_optimal(strength, count, DELTA)


@given(strength=st.floats(0.01, 6.0), epsilon=st.floats(0.0, 6.0))
@settings(deadline=None, max_examples=40)
def test_one_laplace_release_has_its_closed_form(strength: float, epsilon: float) -> None:
    """Delta is 1 - exp((epsilon - strength) / 2); the grid may only add to it."""
    composed = compose_losses(((LossLaw(strength, smooth=True), 1),))
    exact = max(0.0, -math.expm1((epsilon - strength) / 2))

    assert composed is not None
    assert exact - 1e-12 <= composed.delta_at(epsilon) <= exact + 1e-5 * strength**2 + 1e-11


def _laplace_losses(shift: float, size: int, rng: np.random.Generator) -> np.ndarray:
    noise = rng.laplace(size=size)
    return np.abs(noise - shift) - np.abs(noise)


def test_simulated_losses_of_a_mixed_batch_stay_within_the_bound() -> None:
    """A million draws of thirty Laplace losses and twenty labels of six classes."""
    rng = np.random.default_rng(0)
    event = vote(2.0, 6)
    law = loss_of(event).law
    assert law is not None
    total = sum(_laplace_losses(0.3, 200_000, rng) for _ in range(30))
    chances = [(1 - law.silent) * expit(-law.strength), law.silent]
    for _ in range(20):
        drawn = rng.choice(3, size=200_000, p=[*chances, 1 - sum(chances)])
        total = total + law.strength * (drawn - 1)
    entries: list[tuple[PrivacyEvent, int]] = [(vector(0.3), 30), (event, 20)]

    for epsilon in (1.0, 2.0, 4.0):
        gains = -np.expm1(np.minimum(epsilon - total, 0.0))
        error = 4 * gains.std() / math.sqrt(gains.size)
        found = delta_at(entries, epsilon)
        assert gains.mean() - error <= found <= gains.mean() + error + 1e-5


@given(first=st.floats(0.05, 3.0), second=st.floats(0.05, 3.0), epsilon=st.floats(0.0, 4.0))
@settings(deadline=None, max_examples=20)
def test_one_entry_that_moves_all_the_way_is_the_worst_vector(
    first: float, second: float, epsilon: float
) -> None:
    """Two entries that share a distance tell less than one that takes it all."""
    parts = compose_losses(
        ((LossLaw(first, smooth=True), 1), (LossLaw(second, smooth=True), 1))
    )
    assert parts is not None

    whole = max(0.0, -math.expm1((epsilon - first - second) / 2))
    # The grid of the parts may only overstate them, and does so by little.
    assert parts.delta_at(epsilon) <= whole + 1e-4


@given(
    strengths=st.lists(st.floats(0.005, 1.5), min_size=1, max_size=3, unique=True),
    smooth=st.booleans(),
    count=st.integers(1, 60),
)
@settings(deadline=None, max_examples=15)
def test_laws_are_never_worse_than_the_pure_optimum_nor_below_one_release(
    strengths: list[float], smooth: bool, count: int
) -> None:
    """Knowing more can only help, and more releases can only cost more."""
    laws = tuple((LossLaw(s, smooth=smooth), count) for s in sorted(strengths))
    composed = compose_losses(laws)
    assert composed is not None

    epsilon = composed.epsilon_at(DELTA)
    limit = pure_heterogeneous(strengths, [count] * len(strengths), DELTA)
    assert epsilon <= limit * (1 + 2e-3) + 1e-6
    if smooth:
        assert epsilon >= max(strengths) + 2 * math.log1p(-DELTA) - 1e-9


def test_strengths_chosen_on_the_way_have_no_law() -> None:
    """Equal ones keep it, whatever was asked in between."""
    mixed: list[tuple[PrivacyEvent, int]] = [(vote(9.0, 6), 10), (vote(8.0, 6), 10)]

    assert bounds(mixed, DELTA, adaptive=True)["pld"] is None
    assert bounds(mixed, DELTA)["pld"] is not None
    assert bounds(mixed[:1], DELTA, adaptive=True)["pld"] is not None


def test_counts_and_dp_sgd_are_one_composition() -> None:
    """One step on all records is Gaussian noise, whose delta is known for every loss."""
    run = DPSGDEvent(noise_multiplier=2.0, records=10, batch_size=10, steps=1)
    charges = [*LaplaceCounts(epsilon=1.0, l1_sensitivity=2.0).charges(), (run, 1)]
    strength = loss_of(charges[0][0]).pure
    assert strength is not None
    found = claim(charges, DELTA)

    # The losses of the counts, spread evenly over the law of Laplace noise.
    shares = (np.arange(200_000) + 0.5) / 200_000
    noise = np.where(shares < 0.5, np.log(2 * shares), -np.log(2 * (1 - shares)))
    losses = np.abs(noise - strength) - np.abs(noise)
    left = np.maximum(found.epsilon - losses, 0.0)
    exact = float(np.mean(gaussian_delta(0.5, left)))

    assert found.method == "pld"
    assert found.epsilon < bounds(charges, DELTA)["basic"]  # type: ignore[operator]
    assert exact == pytest.approx(DELTA, rel=2e-2)
    assert exact <= DELTA * (1 + 1e-4)


def test_imperfect_sampling_is_paid_for_as_often_as_it_counts() -> None:
    """Ten thousand labels of ten classes lie 3e-9 from ideal, 1 + exp(epsilon) times."""
    event = NoisyMax(
        noise="laplace", scale=500.0, sensitivity=1, unit="party", num_classes=10
    ).event
    entries = [(event, 10_000)]
    error = 10_000 * sampling_error(event)
    found = claim(entries, DELTA)
    ideal = min(value for value in bounds(entries, DELTA).values() if value is not None)

    assert error == pytest.approx(2.84e-9, rel=1e-2)
    assert ideal < found.epsilon < 1.01 * ideal
    paid = error * (1 + math.exp(found.epsilon))
    rest = min(v for v in bounds(entries, DELTA - paid).values() if v is not None)
    assert rest <= found.epsilon
    assert delta_at(entries, found.epsilon) <= DELTA
    assert delta_at(entries, 100 * ideal) > error


def test_noise_that_is_drawn_too_coarsely_promises_nothing() -> None:
    """At a large epsilon the error alone exceeds delta, and no bound may hide that."""
    event = NoisyMax(
        noise="laplace", scale=1.0, sensitivity=1, unit="party", num_classes=10
    ).event

    found = claim([(event, 40)], DELTA)

    assert min(v for v in bounds([(event, 40)], DELTA).values() if v is not None) < 80
    assert found.epsilon == math.inf
    assert "too coarse" in found.reason
