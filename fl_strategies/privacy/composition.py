"""Every way to compose releases without looking at the votes, under one name.

The smallest valid bound wins: `bounded_range_optimal` for the exponential mechanism and
queries fixed in advance, zero-concentrated privacy if they are chosen on the way,
`gaussian_epsilon` for Gaussian noise, `pure_optimal` for anything else that is pure.
"""

from fl_strategies.privacy.bounded_range import (
    bounded_range_optimal,
    bounded_range_optimal_delta,
    bounded_range_zcdp,
)
from fl_strategies.privacy.gaussian import (
    gaussian_delta,
    gaussian_epsilon,
    gaussian_mu,
    gaussian_sigma,
)
from fl_strategies.privacy.pure import pure_heterogeneous, pure_optimal, pure_optimal_delta
from fl_strategies.privacy.renyi import (
    default_orders,
    rdp_of_gaussian,
    rdp_of_pure,
    rdp_of_zcdp,
    rdp_to_delta,
    rdp_to_epsilon,
    zcdp_to_epsilon,
    zcdp_to_epsilon_simple,
)

__all__ = [
    "pure_optimal",
    "pure_optimal_delta",
    "pure_heterogeneous",
    "bounded_range_optimal",
    "bounded_range_optimal_delta",
    "bounded_range_zcdp",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_mu",
    "gaussian_sigma",
    "default_orders",
    "rdp_of_pure",
    "rdp_of_zcdp",
    "rdp_of_gaussian",
    "rdp_to_epsilon",
    "rdp_to_delta",
    "zcdp_to_epsilon",
    "zcdp_to_epsilon_simple",
]
