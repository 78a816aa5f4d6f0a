"""Noise-free differential privacy."""

import itertools
import math
from collections import Counter

import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_strategies.errors import InvalidParameter
from fl_strategies.privacy.bounds.nfdp import nfdp_theorem, nfdp_tight


def samples_of(records: list[str], samples: int, replacement: bool) -> Counter[tuple[str, ...]]:
    """Count every ordered sample that can be drawn."""
    if replacement:
        return Counter(itertools.product(records, repeat=samples))
    return Counter(itertools.permutations(records, samples))


def delta_by_enumeration(
    records: int, samples: int, replacement: bool, epsilon: float
) -> float:
    """Compare all samples of a data set with those after one record was replaced."""
    shared = [f"record {i}" for i in range(records - 1)]
    own = samples_of([*shared, "mine"], samples, replacement)
    other = samples_of([*shared, "yours"], samples, replacement)
    total = sum(own.values())
    return sum(
        max(0.0, n / total - math.exp(epsilon) * other[s] / total) for s, n in own.items()
    )


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize(("records", "samples"), [(2, 1), (4, 2), (5, 3), (5, 5), (3, 0)])
def test_tight_statement_equals_enumeration(
    records: int, samples: int, replacement: bool
) -> None:
    """Delta is exact at epsilon 0 and does not fall for any larger epsilon."""
    tight = nfdp_tight(records, samples, replacement=replacement)
    stated = nfdp_theorem(records, samples, replacement=replacement)

    assert tight.epsilon == 0
    for epsilon in (0.0, stated.epsilon, 5.0):
        assert delta_by_enumeration(records, samples, replacement, epsilon) == pytest.approx(
            tight.delta, abs=1e-12
        )


@pytest.mark.parametrize(("records", "samples"), [(300, 60), (2880, 300), (10**9, 3)])
def test_closed_forms_in_high_precision(records: int, samples: int) -> None:
    """The natural logarithms and powers agree with forty digits."""
    with mpmath.workdps(40):
        n, k = mpmath.mpf(records), samples
        with_replacement = (k * mpmath.log((n + 1) / n), 1 - ((n - 1) / n) ** k)
        without = (mpmath.log((n + 1) / (n + 1 - k)), k / n)

    assert nfdp_theorem(records, samples) == pytest.approx(
        [float(x) for x in with_replacement], rel=1e-12
    )
    assert nfdp_theorem(records, samples, replacement=False) == pytest.approx(
        [float(x) for x in without], rel=1e-12
    )


def test_fresh_samples_compose() -> None:
    """Ten fresh samples of 300 in 2880 reach a record with chance 0.647."""
    assert nfdp_tight(2880, 300, runs=10).delta == pytest.approx(0.647, abs=5e-4)
    assert nfdp_tight(10, 1, replacement=False, runs=2).delta == pytest.approx(0.19)
    assert nfdp_tight(10, 1, runs=0).delta == 0


def test_everything_drawn_is_no_privacy() -> None:
    """A sample of all records without replacement reveals each of them."""
    assert nfdp_tight(7, 7, replacement=False).delta == 1
    assert nfdp_tight(7, 7, replacement=False, runs=3).delta == 1
    assert nfdp_tight(1, 1).delta == 1
    assert nfdp_tight(1, 0).delta == 0


@settings(deadline=None, max_examples=80)
@given(records=st.integers(1, 10_000), data=st.data())
def test_replacement_is_never_less_private(records: int, data: st.DataObject) -> None:
    """Lemma 1: with replacement both numbers are at most those without."""
    samples = data.draw(st.integers(0, records))
    repeated = nfdp_theorem(records, samples)
    distinct = nfdp_theorem(records, samples, replacement=False)

    assert repeated.epsilon <= distinct.epsilon + 1e-12
    assert repeated.delta <= distinct.delta + 1e-12


@settings(deadline=None, max_examples=50)
@given(records=st.integers(2, 1000), samples=st.integers(0, 1000))
def test_guarantee_is_monotone(records: int, samples: int) -> None:
    """More samples never help and more records never hurt."""
    here = nfdp_theorem(records, samples)

    assert nfdp_theorem(records, samples + 1).delta >= here.delta
    assert nfdp_theorem(records, samples + 1).epsilon >= here.epsilon
    assert nfdp_theorem(records + 1, samples).delta <= here.delta + 1e-15


def test_wrong_use_is_refused() -> None:
    """A wrong argument is refused in one sentence that names it."""
    with pytest.raises(InvalidParameter, match="nfdp_theorem: records must be"):
        nfdp_theorem(0, 0)
    with pytest.raises(InvalidParameter, match="nfdp_tight: samples must be at most 3"):
        nfdp_tight(3, 4, replacement=False)
    with pytest.raises(InvalidParameter, match="nfdp_tight: samples must be a whole"):
        nfdp_tight(3, -1)
    with pytest.raises(InvalidParameter, match="nfdp_tight: runs must be"):
        nfdp_tight(3, 1, runs=-1)
