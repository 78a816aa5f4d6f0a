"""Bounds refuse wrong arguments in one sentence that names function and parameter."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fl_strategies.errors import InvalidData, InvalidParameter
from fl_strategies.privacy.bounds.distributions import dpsgd_epsilon, two_class_laplace_epsilon
from fl_strategies.privacy.bounds.moments import (
    data_dependent_epsilon,
    data_dependent_moments,
    gnmax_rdp,
    moments_epsilon,
    threshold_rdp,
)
from fl_strategies.privacy.bounds.theorems import (
    bounded_range_optimal,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    nfdp_theorem,
    nfdp_tight,
    pure_heterogeneous,
    pure_optimal,
    rdp_of_pure,
    rdp_of_zcdp,
    rdp_to_delta,
    rdp_to_epsilon,
    zcdp_to_epsilon,
)

DELTA = 1e-5
VOTES = np.array([[3, 1]])
ONE, TWO, NONE = np.array([1.0]), np.array([2.0]), np.array([])
NAN = math.nan


@pytest.mark.parametrize(
    ("function", "arguments", "rule"),
    [
        (gaussian_epsilon, (-1.0, DELTA), "mu must be at least 0"),
        (gaussian_epsilon, (1.0, 0.0), "delta"),
        (gaussian_delta, (1.0, -1.0), "epsilon"),
        (gaussian_mu, (NAN, DELTA), "epsilon"),
        (pure_optimal, (-0.1, 1, 0.1), "epsilon0"),
        (pure_optimal, (NAN, 1, 0.1), "epsilon0"),
        (pure_optimal, (0.1, -1, 0.1), "count"),
        (pure_optimal, (0.1, 1.5, 0.1), "count"),
        (pure_optimal, (0.1, True, 0.1), "count"),
        (pure_optimal, (0.1, 1, 0.0), "delta"),
        (pure_optimal, (0.1, 1, 1.0), "delta"),
        (pure_optimal, (0.1, 1, NAN), "delta"),
        (pure_heterogeneous, ([0.1], [1, 2], DELTA), "counts"),
        (pure_heterogeneous, ([-0.1], [1], DELTA), "epsilons"),
        (pure_heterogeneous, ([0.1], [-1], DELTA), "counts"),
        (pure_heterogeneous, ([NAN], [1], DELTA), "epsilons"),
        (pure_heterogeneous, ([0.1], [0.5], DELTA), "counts"),
        (bounded_range_optimal, (-1.0, 1, 0.1), "eta"),
        (bounded_range_optimal, (0.1, -1, 0.1), "count"),
        (bounded_range_optimal, (0.1, 1, 1.5), "delta"),
        (rdp_of_pure, (-0.1, TWO), "epsilon0"),
        (rdp_of_pure, (0.1, ONE), "orders"),
        (rdp_of_zcdp, (-0.1, TWO), "rho"),
        (rdp_of_zcdp, (0.1, ONE / 2), "orders"),
        (rdp_to_epsilon, (TWO, ONE, 0.0), "delta"),
        (rdp_to_epsilon, (NONE, NONE, 0.1), "orders"),
        (rdp_to_epsilon, (TWO, np.ones(2), 0.1), "rdp"),
        (rdp_to_epsilon, (TWO, NAN * ONE, 0.1), "rdp"),
        (rdp_to_epsilon, (ONE, ONE, 0.1), "orders"),
        (rdp_to_delta, (TWO, -ONE, 0.1), "rdp"),
        (rdp_to_delta, (TWO, ONE, -0.1), "epsilon"),
        (zcdp_to_epsilon, (-1.0, 0.1), "rho"),
        (zcdp_to_epsilon, (1.0, 2.0), "delta"),
        (zcdp_to_epsilon, (1.0, 0.0), "delta"),
        (nfdp_theorem, (0, 0), "records"),
        (nfdp_tight, (3, -1), "samples must be a whole"),
        (dpsgd_epsilon, (10, 1, 1, math.inf, DELTA), "noise_multiplier"),
        (dpsgd_epsilon, (10, 1, -1, 1.0, DELTA), "steps"),
        (dpsgd_epsilon, (10, 11, 1, 1.0, DELTA), "batch"),
        (dpsgd_epsilon, (0, 1, 1, 1.0, DELTA), "records"),
        (dpsgd_epsilon, (10, 1, 1, 1.0, 1.0), "delta"),
        (two_class_laplace_epsilon, (-1.0, 5, 1, DELTA), "gamma"),
        (two_class_laplace_epsilon, (1.0, 0, 1, DELTA), "num_voters"),
        (moments_epsilon, (0.0, 1, 10, DELTA), "gamma must be greater than 0"),
        (moments_epsilon, (-1.0, 1, 10, DELTA), "gamma"),
        (moments_epsilon, (math.inf, 1, 10, DELTA), "gamma"),
        (moments_epsilon, (NAN, 1, 10, DELTA), "gamma"),
        (moments_epsilon, (0.1, 0, 10, DELTA), "splits"),
        (moments_epsilon, (0.1, 1, -1, DELTA), "queries"),
        (moments_epsilon, (0.1, 1, 1, 1.0), "delta"),
        (data_dependent_moments, (VOTES, 0.1, 1, np.zeros(1)), "orders"),
        (gnmax_rdp, (VOTES, 0.0, TWO), "sigma"),
        (gnmax_rdp, (VOTES, 1.0, TWO, 0), "splits"),
        (gnmax_rdp, (VOTES, 1.0, ONE), "orders"),
        (threshold_rdp, (VOTES, 1.0, NAN, TWO), "threshold"),
    ],
)
def test_a_wrong_argument_is_named(
    function: Callable[..., Any], arguments: tuple[Any, ...], rule: str
) -> None:
    """With the name of the function, which the caller knows."""
    with pytest.raises(InvalidParameter, match=f"{function.__name__}: {rule}"):
        function(*arguments)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: nfdp_tight(3, 4, replacement=False), "nfdp_tight: samples must be at most 3"),
        (lambda: nfdp_tight(3, 1, runs=-1), "nfdp_tight: runs must be"),
        (lambda: moments_epsilon(0.1, 1, 1, DELTA, max_order=0), "max_order must be"),
        (lambda: data_dependent_moments(VOTES, 0.1, bound="loose"), "bound must be"),  # type: ignore[arg-type]
        (lambda: data_dependent_epsilon(VOTES, 0.1, delta=0.0), "delta must be"),
    ],
)
def test_a_wrong_keyword_is_named(call: Callable[[], Any], sentence: str) -> None:
    """In the same form."""
    with pytest.raises(InvalidParameter, match=sentence):
        call()


@pytest.mark.parametrize(
    ("votes", "rule"),
    [
        (np.array([3, 1]), "a table"),
        (np.array([[3], [1]]), "a table"),
        (np.array([[3, -1]]), "at least 0"),
        (np.array([[3.0, np.nan]]), "finite"),
        (np.array([[np.inf, 1.0]]), "finite"),
        (np.array([["3", "1"]]), "numbers"),
        (np.array([[True, False]]), "numbers"),
    ],
)
def test_votes_that_are_no_counts_are_refused(votes: np.ndarray, rule: str) -> None:
    """Shapes, types and values that are not vote counts raise a data error, with any noise."""
    for ask in (lambda: data_dependent_moments(votes, 0.1), lambda: gnmax_rdp(votes, 1.0, TWO)):
        with pytest.raises(InvalidData, match=f"votes must be .*{rule}"):
            ask()
