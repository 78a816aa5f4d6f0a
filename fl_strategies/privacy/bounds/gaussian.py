"""Gaussian noise, exactly: composed Gaussian releases are one Gaussian release.

Everything depends on ``mu = sensitivity * sqrt(count) / sigma`` alone, also for vectors
and for releases chosen adaptively.

References
----------
Balle, Wang (2018), Improving the Gaussian mechanism for differential privacy.
Dong, Roth, Su (2019), Gaussian differential privacy.
"""

import math

import numpy as np
import scipy

from fl_strategies._util.arrays import Array, FloatArray
from fl_strategies.privacy._numeric import check_delta, check_loss, smallest_epsilon


def gaussian_delta(mu: float | Array, epsilon: float | Array) -> FloatArray:
    """Return delta of a Gaussian release at `epsilon`; the arguments broadcast.

    Examples
    --------
    >>> float(gaussian_delta(1.0, 1.0)).__round__(6)
    0.126937
    """
    mu, epsilon = np.broadcast_arrays(np.asarray(mu, float), np.asarray(epsilon, float))
    check_loss("gaussian_delta", "mu", float(mu.min()))
    check_loss("gaussian_delta", "epsilon", float(epsilon.min()))
    regular = (mu > 0) & np.isfinite(mu) & np.isfinite(epsilon)
    safe_mu, safe_epsilon = np.where(regular, mu, 1.0), np.where(regular, epsilon, 0.0)
    above = scipy.special.log_ndtr(safe_mu / 2 - safe_epsilon / safe_mu)
    below = scipy.special.log_ndtr(-safe_mu / 2 - safe_epsilon / safe_mu)
    # Both terms may be tiny: their ratio is taken before the exponential.
    delta = np.exp(above) * -np.expm1(np.minimum(safe_epsilon + below - above, 0.0))
    delta = np.where(np.isinf(mu) & np.isfinite(epsilon), 1.0, np.where(regular, delta, 0.0))
    return delta[()]


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the exact epsilon of a Gaussian release at `delta`.

    Examples
    --------
    >>> round(gaussian_epsilon(1.0, 1e-5), 6)
    4.377178
    """
    check_loss("gaussian_epsilon", "mu", mu)
    check_delta("gaussian_epsilon", delta)
    if mu == 0 or math.isinf(mu):
        return mu
    upper = mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta))
    return smallest_epsilon(lambda epsilon: float(gaussian_delta(mu, epsilon)), delta, upper)


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Return the largest mu, that is the least noise, that keeps (epsilon, delta)."""
    check_loss("gaussian_mu", "epsilon", epsilon)
    check_delta("gaussian_mu", delta)
    if math.isinf(epsilon):
        return math.inf

    def excess(mu: float) -> float:
        return math.log(max(float(gaussian_delta(mu, epsilon)), 1e-300)) - math.log(delta)

    upper = 1.0
    while excess(upper) < 0:
        upper *= 2
    lower = upper / 2
    while excess(lower) > 0:
        lower /= 2
    return float(scipy.optimize.brentq(excess, lower, upper, xtol=1e-300, rtol=1e-14))
