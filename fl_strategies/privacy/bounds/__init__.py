"""Bounds on privacy loss, each by one theory, and `curves`, which says which of them apply."""

from fl_strategies.privacy.bounds.composition import compose_losses, nfdp_theorem, nfdp_tight
from fl_strategies.privacy.bounds.curves import (
    Curve,
    constant,
    losses_of,
    noise_curves,
    pure_laws,
    smallest_delta,
)
from fl_strategies.privacy.bounds.gaussian import default_orders, gaussian_mu, rdp_to_epsilon
from fl_strategies.privacy.bounds.moments import (
    data_dependent_epsilon,
    gnmax_rdp,
    gumbel_data_dependent_epsilon,
    threshold_rdp,
)
from fl_strategies.privacy.bounds.pure import loss_of, sampling_error

__all__ = [
    "Curve",
    "compose_losses",
    "constant",
    "data_dependent_epsilon",
    "default_orders",
    "gaussian_mu",
    "gnmax_rdp",
    "gumbel_data_dependent_epsilon",
    "loss_of",
    "losses_of",
    "nfdp_theorem",
    "nfdp_tight",
    "noise_curves",
    "pure_laws",
    "rdp_to_epsilon",
    "sampling_error",
    "smallest_delta",
    "threshold_rdp",
]
