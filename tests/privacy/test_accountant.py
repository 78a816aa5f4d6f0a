"""What events cost together: reference values, exact enumeration and refusals."""

import dataclasses
import itertools
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_strategies import privacy
from fl_strategies.errors import InvalidParameter, MissingExtra
from fl_strategies.privacy import accountant
from fl_strategies.privacy.accountant import METHODS, Entry, bounds, claim, delta_at
from fl_strategies.privacy.bounds.distributions import sgd_distribution
from fl_strategies.privacy.bounds.theorems import (
    default_orders,
    gaussian_epsilon,
    pure_heterogeneous,
    rdp_to_epsilon,
)
from fl_strategies.privacy.events import (
    DPSGDEvent,
    GaussianEvent,
    LaplaceEvent,
    NoisyMaxEvent,
    NonPrivateEvent,
    PrivacyEvent,
    SubsampleEvent,
    ThresholdEvent,
)
from tests.privacy.oracles import gnmax_mu

ROOT = Path(privacy.__file__).parents[2]
DELTA = 1e-5
ADD: Any = "add-remove-one"
REPLACE: Any = "replace-one"
TRAINING = DPSGDEvent(noise_multiplier=1.0, records=2880, batch_size=64, steps=900)
SHORT = DPSGDEvent(noise_multiplier=2.0, records=1000, batch_size=20, steps=30)


def votes(noise: Any, scale: float, num_classes: int = 2, **other: Any) -> NoisyMaxEvent:
    values = {"unit": "party", "relation": REPLACE, "sensitivity": 1.0, **other}
    return NoisyMaxEvent(noise=noise, scale=scale, num_classes=num_classes, **values)


def gaussian(scale: float, relation: Any = REPLACE) -> GaussianEvent:
    return GaussianEvent(unit="example", relation=relation, scale=scale, l2_sensitivity=1.0)


def applicable(found: Any) -> set[str]:
    return {method for method, epsilon in found.items() if epsilon is not None}


@pytest.mark.parametrize(
    ("event", "count", "method", "epsilon"),
    [
        (votes("laplace", 25.0), 40, "bounded-range", 0.934913),
        (votes("laplace", 25.0, 10), 40, "optimal-composition", 1.932272),
        (votes("gumbel", 25.0, 10), 40, "bounded-range", 0.934913),
        (votes("gumbel", 50.0, 10, sensitivity=2.0), 40, "bounded-range", 0.934913),
        (votes("laplace", 25.0), 20, "bounded-range", 0.637843),
        (votes("laplace", 25.0, 3), 81, "optimal-composition", 2.941853),
        (votes("laplace", 1 / 0.06), 74, "bounded-range", 2.058773),
        (votes("gumbel", 10.0, 7), 74, "bounded-range", 3.664191),
        (votes("laplace", 25.0, relation=ADD), 40, "bounded-range", 0.438954),
        (gaussian(1 / 1.666031), 1, "gaussian", 8.000002),
        (gaussian(40.0), 1600, "gaussian", 4.377178),
    ],
)
def test_reference_values(event: PrivacyEvent, count: int, method: str, epsilon: float) -> None:
    """The claim is the known number, by the known method."""
    found = claim([(event, count)], DELTA)

    # Never less than the exact figure, and more by what imperfect sampling takes of delta.
    assert epsilon - 6e-7 < found.epsilon < epsilon + 1e-5
    assert found.method == method
    assert found.delta == DELTA
    assert found.reason == ""


def test_all_bounds_of_the_papers_mechanism() -> None:
    """Two classes, Laplace noise, forty queries: every column of the reference table."""
    found = bounds([(votes("laplace", 25.0), 40)], DELTA)
    rounded = {name: round(value, 3) for name, value in found.items() if value is not None}

    assert tuple(found) == METHODS
    assert rounded == {
        "pure": 3.2,
        "optimal-composition": 1.932,
        "bounded-range": 0.935,
        "zcdp": 1.025,
        "rdp": 1.025,
        "moments": 2.559,
    }


@pytest.mark.parametrize("num_classes", [3, 10])
def test_laplace_noise_has_no_bounded_range_beyond_two_classes(num_classes: int) -> None:
    """The range of Laplace noisy max is larger than assumed there, so it is not used."""
    found = bounds([(votes("laplace", 25.0, num_classes), 40)], DELTA)

    assert found["bounded-range"] is None
    assert found["zcdp"] == pytest.approx(2.194378, abs=6e-7)
    assert found["moments"] == pytest.approx(2.559214, abs=6e-7)


def test_queries_chosen_on_the_way_lose_the_non_adaptive_optimum() -> None:
    """Bounded range then falls back to its rho; other noise does not mind."""
    gumbel = [(votes("gumbel", 25.0), 40)]

    assert claim(gumbel, DELTA, adaptive=True).epsilon == pytest.approx(1.025440, abs=6e-7)
    assert claim([(gaussian(9.0), 7)], DELTA, adaptive=True) == claim(
        [(gaussian(9.0), 7)], DELTA
    )


@pytest.mark.parametrize(("relation", "factor"), [(REPLACE, 1.0), (ADD, math.sqrt(0.5))])
def test_gaussian_votes_are_exact(relation: Any, factor: float) -> None:
    """Replacing a voter moves two counts, adding one moves one."""
    event = votes("gaussian", 40.0, 10, relation=relation, sensitivity=3.0)
    mu = gnmax_mu(40.0, 100, splits=3) * factor
    found = bounds([(event, 100)], DELTA)

    assert found["gaussian"] == pytest.approx(gaussian_epsilon(mu, DELTA), rel=1e-9)
    assert applicable(found) == {"gaussian", "zcdp", "rdp"}


def test_different_gaussian_events_are_one() -> None:
    """Squares of mu add up, also for the two steps of Confident-GNMax."""
    test = ThresholdEvent(unit="party", relation=REPLACE, scale=30.0, sensitivity=1.0)
    answer = votes("gaussian", 10.0)
    found = bounds([(test, 500), (answer, 60)], DELTA)
    mu = math.sqrt(500 / 30**2 + 2 * 60 / 10**2)
    orders = default_orders()
    curve = orders * (500 / (2 * 30**2) + 60 / 10**2)

    assert found["gaussian"] == pytest.approx(gaussian_epsilon(mu, DELTA), rel=1e-9)
    assert found["rdp"] == pytest.approx(rdp_to_epsilon(orders, curve, DELTA), rel=1e-9)


def test_different_pure_events_compose_optimally() -> None:
    """The heterogeneous theorem is used, and beats the Renyi curves."""
    vector = LaplaceEvent(unit="party", relation=REPLACE, scale=10.0, l1_sensitivity=2.0)
    entries: list[Entry] = [(votes("laplace", 25.0, 5), 40), (vector, 10)]
    found = claim(entries, DELTA)
    best = pure_heterogeneous([0.08, 0.2], [40, 10], DELTA)

    assert found.method == "pld"
    assert 0.95 * best < found.epsilon < best
    assert bounds(entries, DELTA)["optimal-composition"] == pytest.approx(best, rel=1e-12)
    assert bounds(entries, DELTA)["pure"] == pytest.approx(40 * 0.08 + 10 * 0.2)
    assert bounds(entries, DELTA)["moments"] is None


def test_pure_and_gaussian_noise_meet_in_renyi_curves() -> None:
    """The claim lies between the privacy loss distribution and basic composition."""
    from dp_accounting.pld import common
    from dp_accounting.pld import privacy_loss_distribution as oracle

    pure = oracle.from_privacy_parameters(common.DifferentialPrivacyParameters(0.2, 0.0))
    noise = oracle.from_gaussian_mechanism(5.0)
    exact = pure.self_compose(20).compose(noise.self_compose(10)).get_epsilon_for_delta(DELTA)
    vector = LaplaceEvent(unit="example", relation=REPLACE, scale=10.0, l1_sensitivity=2.0)
    found = claim([(vector, 20), (gaussian(5.0), 10)], DELTA)

    assert found.method in ("rdp", "zcdp")
    assert exact < found.epsilon < 1.15 * exact


def exact_delta(first: np.ndarray, second: np.ndarray, count: int, epsilon: float) -> float:
    """Enumerate all outcomes of `count` equal selections under two neighbours."""
    delta = 0.0
    for outcome in itertools.product(range(len(first)), repeat=count):
        chances = first[list(outcome)].prod(), second[list(outcome)].prod()
        delta += max(0.0, float(chances[0] - math.exp(epsilon) * chances[1]))
    return delta


def softmax(counts: np.ndarray, scale: float) -> np.ndarray:
    weights = np.exp((counts - counts.max()) / scale)
    return np.asarray(weights / weights.sum())


def laplace_pair(counts: np.ndarray, scale: float) -> np.ndarray:
    gap = (counts[0] - counts[1]) / scale
    behind = (2 + abs(gap)) / 4 * math.exp(-abs(gap))
    return np.array([1 - behind, behind] if gap >= 0 else [behind, 1 - behind])


@settings(deadline=None, max_examples=30)
@given(
    counts=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    moved=st.permutations([0, 1, 2]),
    scale=st.floats(0.5, 8.0),
    count=st.integers(1, 5),
)
def test_the_claim_holds_for_gumbel_votes(
    counts: list[int], moved: list[int], scale: float, count: int
) -> None:
    """Exact enumeration never finds more delta than was claimed."""
    before, after = np.array(counts, float), np.array(counts, float)
    after[moved[0]] += 1
    after[moved[1]] -= 1
    delta = 0.01
    epsilon = claim([(votes("gumbel", scale, 3), count)], delta).epsilon
    pair = softmax(before, scale), softmax(after, scale)

    assert exact_delta(*pair, count, epsilon) <= delta * (1 + 1e-9)
    assert exact_delta(*pair[::-1], count, epsilon) <= delta * (1 + 1e-9)


@settings(deadline=None, max_examples=30)
@given(
    lead=st.integers(-6, 6),
    splits=st.integers(1, 3),
    scale=st.floats(0.5, 20.0),
    count=st.integers(1, 8),
    add=st.booleans(),
)
def test_the_claim_holds_for_two_class_laplace_votes(
    lead: int, splits: int, scale: float, count: int, add: bool
) -> None:
    """Also by bounded range, and under both relations."""
    before = np.array([lead, 0.0])
    after = before + (np.array([-splits, 0]) if add else np.array([-splits, splits]))
    event = votes("laplace", scale, sensitivity=splits, relation=ADD if add else REPLACE)
    epsilon = claim([(event, count)], 0.02).epsilon
    pair = laplace_pair(before, scale), laplace_pair(after, scale)

    assert exact_delta(*pair, count, epsilon) <= 0.02 * (1 + 1e-9)
    assert exact_delta(*pair[::-1], count, epsilon) <= 0.02 * (1 + 1e-9)


EVENTS: list[PrivacyEvent] = [
    votes("laplace", 25.0),
    votes("laplace", 20.0, 10),
    votes("gumbel", 25.0, 10),
    votes("gaussian", 20.0),
    votes("gumbel", 30.0, relation=ADD),
    ThresholdEvent(unit="party", relation=REPLACE, scale=30.0, sensitivity=1.0),
    LaplaceEvent(unit="party", relation=ADD, scale=30.0, l1_sensitivity=1.0),
]
entry_lists = st.lists(
    st.tuples(st.sampled_from(EVENTS), st.integers(1, 30)), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=25)
@given(entries=entry_lists, data=st.data())
def test_order_does_not_matter_and_more_costs_more(
    entries: list[Entry], data: st.DataObject
) -> None:
    """Any order gives the same epsilon; one more release or less noise never a smaller one."""
    epsilon = claim(entries, DELTA).epsilon
    event, count = entries[0]
    louder = dataclasses.replace(event, scale=event.scale / 1.1)  # type: ignore[attr-defined, call-arg]

    assert claim(data.draw(st.permutations(entries)), DELTA).epsilon == pytest.approx(epsilon)
    assert claim([(event, count + 1), *entries[1:]], DELTA).epsilon >= epsilon - 1e-9
    assert claim([(louder, count), *entries[1:]], DELTA).epsilon >= epsilon - 1e-9
    assert claim(entries, DELTA / 10).epsilon >= epsilon - 1e-9


@settings(deadline=None, max_examples=15)
@given(entries=entry_lists, delta=st.sampled_from([1e-3, 1e-6]))
def test_delta_and_epsilon_are_inverse(entries: list[Entry], delta: float) -> None:
    """Asking back at the claimed epsilon gives the delta it was claimed for."""
    epsilon = claim(entries, delta).epsilon

    assert delta_at(entries, epsilon) == pytest.approx(delta, rel=0.01)


def test_entries_of_equal_events_may_be_split() -> None:
    """Counts of the same event in several entries add up."""
    event = votes("laplace", 25.0, 3)

    assert claim([(event, 15), (event, 25)], DELTA) == claim([(event, 40)], DELTA)


def test_nothing_costs_nothing() -> None:
    """Without a release there is no loss at any delta."""
    assert claim([], DELTA).epsilon == 0
    assert delta_at([], 0.0) == 0
    assert applicable(bounds([], DELTA)) == set()


SAMPLE = SubsampleEvent(records=1000, samples=5, replacement=False)


def test_a_secret_sample_costs_delta_only() -> None:
    """Epsilon is zero if delta is enough, otherwise infinite, and says why."""
    assert claim([(SAMPLE, 1)], 0.005) == (0.0, 0.005, "subsampling", "")
    assert delta_at([(SAMPLE, 1)], 0.0) == 0.005
    short = claim([(SAMPLE, 1)], 0.0049)
    assert short.epsilon == math.inf
    assert "secret sample too large" in short.reason


def test_fresh_samples_compose() -> None:
    """Ten samples are ten chances to be drawn."""
    with_replacement = SubsampleEvent(records=2880, samples=300, replacement=True)

    assert delta_at([(with_replacement, 10)], 1.0) == pytest.approx(0.647, abs=5e-4)
    assert delta_at([(SAMPLE, 2)], 0.0) == pytest.approx(1 - 0.995**2)
    whole = SubsampleEvent(records=5, samples=5, replacement=False)
    assert delta_at([(whole, 1), (SAMPLE, 1)], 9.0) == 1.0
    assert claim([(whole, 1)], 0.999).epsilon == math.inf


def test_a_sample_takes_its_delta_from_the_rest() -> None:
    """The noise must do with what the sample leaves of delta."""
    entries: list[Entry] = [(SAMPLE, 1), (gaussian(2.0), 3)]
    left = (0.006 - 0.005) / 0.995
    expected = gaussian_epsilon(math.sqrt(3) / 2, left)

    assert claim(entries, 0.006).epsilon == pytest.approx(expected, rel=1e-6)
    assert claim(entries, 0.004).epsilon == math.inf
    assert delta_at(entries, expected) == pytest.approx(0.006, rel=1e-6)


def test_training_is_composed_by_steps() -> None:
    """Two runs of 900 steps are one of 1800, to the reference digits."""
    assert claim([(TRAINING, 1)], DELTA).epsilon == pytest.approx(4.151097, abs=1e-5)
    twice = claim([(TRAINING, 2)], DELTA)
    assert twice.epsilon == pytest.approx(5.979993, abs=1e-5)
    assert twice.method == "pld"
    assert delta_at([(TRAINING, 2)], twice.epsilon) == pytest.approx(DELTA, rel=1e-3)


def test_training_joins_other_noise_by_basic_composition() -> None:
    """Half of delta for each; the sum is what is claimed."""
    other = gaussian(4.0, ADD)
    found = claim([(SHORT, 1), (other, 1)], DELTA)
    parts = [claim([(event, 1)], DELTA / 2).epsilon for event in (SHORT, other)]

    assert found.method == "basic"
    assert found.epsilon == pytest.approx(sum(parts))
    assert delta_at([(SHORT, 1), (other, 1)], found.epsilon) == pytest.approx(DELTA, rel=1e-3)


@pytest.mark.parametrize("noise_multiplier", [0.8, 2.0])
def test_training_is_restated_when_relations_mix(noise_multiplier: float) -> None:
    """Replacing is removing and adding: twice epsilon, 1 + exp(epsilon) times delta."""
    run = dataclasses.replace(SHORT, noise_multiplier=noise_multiplier)
    found = claim([(run, 1), (gaussian(4.0), 1)], DELTA)
    training = found.epsilon - gaussian_epsilon(0.25, DELTA / 2)
    single = delta_at([(run, 1)], training / 2)

    assert training > 2 * claim([(run, 1)], DELTA / 2).epsilon
    assert single * (1 + math.exp(training / 2)) == pytest.approx(DELTA / 2, rel=1e-3)


def test_training_that_cannot_be_restated_is_unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no epsilon is found up to the largest one tried, none is claimed."""
    monkeypatch.setattr(accountant, "_LARGEST_EPSILON", 1.1)
    run = dataclasses.replace(SHORT, noise_multiplier=0.8)

    assert claim([(run, 1), (gaussian(4.0), 1)], DELTA).epsilon == math.inf


def test_different_trainings_compose() -> None:
    """Another noise or batch size is another distribution, convolved with the first."""
    other = dataclasses.replace(SHORT, noise_multiplier=3.0, steps=10)
    alone = claim([(SHORT, 1)], DELTA).epsilon
    both = claim([(SHORT, 1), (other, 1)], DELTA).epsilon

    assert alone < both < alone + claim([(other, 1)], DELTA).epsilon


def test_mixed_relations_are_stated_for_replacing() -> None:
    """Vectors move twice as far, votes move a second count."""
    mixed = claim([(gaussian(8.0, ADD), 1), (gaussian(4.0), 1)], DELTA)
    party = votes("gaussian", 4.0, relation=ADD), votes("gaussian", 4.0)
    both = claim([(party[0], 5), (party[1], 5)], DELTA)

    assert mixed.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(2) / 4, DELTA))
    assert both == claim([(party[1], 10)], DELTA)
    vector = LaplaceEvent(unit="party", relation=ADD, scale=10.0, l1_sensitivity=1.0)
    found = bounds([(vector, 3), (votes("laplace", 25.0, 5), 1)], DELTA)
    assert found["pure"] == pytest.approx(3 * 0.2 + 0.08)


def test_without_dp_accounting_training_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The missing package is named; nothing is estimated instead."""
    sgd_distribution.cache_clear()
    monkeypatch.setitem(sys.modules, "dp_accounting.pld.privacy_loss_distribution", None)

    with pytest.raises(MissingExtra, match=r"fl-strategies\[accounting\]"):
        claim([(SHORT, 1)], DELTA)
    assert claim([(gaussian(4.0), 1)], DELTA).epsilon > 0


def test_counting_needs_no_optional_package() -> None:
    """A fresh interpreter counts noisy votes without loading dp-accounting."""
    code = (
        "import sys, fl_strategies.privacy as p\n"
        "e = p.NoisyMaxEvent(unit='party', relation='replace-one', noise='gumbel',"
        " scale=25.0, sensitivity=1.0, num_classes=2)\n"
        "print(round(p.claim([(e, 40)], 1e-5).epsilon, 6), 'dp_accounting' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )

    assert done.stdout.split() == ["0.934913", "False"]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (NonPrivateEvent(unit="party", reason="students left as models"), "students left"),
        (votes("gumbel", 1e6, seeded=True), "known seed"),
    ],
)
def test_one_unprotected_release_ends_the_guarantee(event: PrivacyEvent, words: str) -> None:
    """Epsilon is infinite with the reason, whatever else was done well."""
    entries = [(votes("gumbel", 1e6), 1), (event, 1)]
    found = claim(entries, DELTA)

    assert found.epsilon == math.inf
    assert found.method == "none"
    assert words in found.reason
    assert applicable(bounds(entries, DELTA)) == set()
    assert delta_at(entries, 1e9) == 1.0


@pytest.mark.parametrize("noise", ["laplace", "gumbel", "gaussian"])
@pytest.mark.parametrize("scale", [1e-8, 1e-300])
def test_hopeless_noise_is_infinite_not_an_error(noise: str, scale: float) -> None:
    """Numbers that would overflow end in an honest infinity."""
    found = claim([(votes(noise, scale), 10**4)], DELTA)

    assert found.epsilon == math.inf
    assert "noise is too small" in found.reason


@pytest.mark.parametrize("noise", ["laplace", "gumbel", "gaussian"])
def test_very_many_releases_stay_cheap_to_count(noise: str) -> None:
    """Exact enumeration is skipped where it would need gigabytes."""
    found = bounds([(votes(noise, 1e9), 10**12)], DELTA)

    assert found["bounded-range"] is None
    assert found["zcdp"] == pytest.approx(found["rdp"], rel=0.1)


def test_a_large_loss_is_finite_and_below_the_sum() -> None:
    """Ten thousand careless queries: exponentials overflow, the bound does not."""
    entries = [(votes("gumbel", 1.0), 10**4)]

    assert bounds(entries, DELTA)["bounded-range"] == pytest.approx(5149.148, rel=1e-5)
    assert claim(entries, DELTA).epsilon == math.inf
    assert "too coarse" in claim(entries, DELTA).reason


class Homemade(NoisyMaxEvent):
    """Would be free if the accountant trusted subclasses."""


def test_unknown_events_are_refused() -> None:
    """Neither the base class nor a subclass is counted, least of all as nothing."""
    base = PrivacyEvent(unit="party", relation=REPLACE)

    for event in (base, Homemade(**vars(votes("gumbel", 1.0)))):
        for ask in (bounds, claim, delta_at):
            with pytest.raises(InvalidParameter, match="event must be one of NoisyMaxEvent"):
                ask([(event, 1)], 0.5)


@pytest.mark.parametrize("count", [0, -1, 1.0, True])
def test_counts_are_whole_and_positive(count: Any) -> None:
    """A count of zero would hide an event."""
    with pytest.raises(InvalidParameter, match="count must be a whole number, at least 1"):
        claim([(gaussian(1.0), count)], DELTA)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_delta_is_inside_the_unit_interval(delta: float) -> None:
    """Zero and one are refused, for empty ledgers too."""
    for entries in ([], [(gaussian(1.0), 1)]):
        with pytest.raises(InvalidParameter, match="delta must be greater than 0 and less"):
            claim(entries, delta)


def test_units_do_not_mix() -> None:
    """Parties and records are different promises."""
    with pytest.raises(InvalidParameter, match="about one unit, got 'example and party'"):
        claim([(gaussian(1.0), 1), (votes("gumbel", 1.0), 1)], DELTA)
    with pytest.raises(InvalidParameter, match="epsilon must be at least 0"):
        delta_at([(gaussian(1.0), 1)], -1.0)
