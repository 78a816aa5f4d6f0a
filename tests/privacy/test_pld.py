"""Privacy loss distributions through dp-accounting."""

import importlib
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_strategies.errors import InvalidParameter, MissingExtra
from fl_strategies.privacy.bounds import pld
from fl_strategies.privacy.bounds.curves import bounded_range_optimal
from fl_strategies.privacy.bounds.gaussian import gaussian_epsilon
from fl_strategies.privacy.bounds.losses import Loss
from fl_strategies.privacy.bounds.pure import pure_optimal
from fl_strategies.privacy.bounds.renyi import zcdp_to_epsilon
from tests.privacy.oracles import gaussian_pld_epsilon, laplace_pld_epsilon

DELTA = 1e-5
CALLS = {
    "dpsgd_epsilon": (100, 10, 3, 1.0, DELTA),
    "two_class_laplace_epsilon": (0.1, 5, 3, DELTA),
}


def test_optimal_composition_equals_randomised_response() -> None:
    """The distribution of randomised response, composed, is our optimal composition."""
    distributions = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")
    flip = 2 / (1 + math.exp(0.08))
    coin = distributions.from_randomized_response(flip, 2, value_discretization_interval=1e-5)
    rounded_up = coin.self_compose(40).get_epsilon_for_delta(DELTA)
    exact = pure_optimal(0.08, 40, DELTA)

    assert exact <= rounded_up <= exact + 1e-4


def test_gaussian_equals_closed_form() -> None:
    """The grid of losses reproduces the exact Gaussian epsilon from above."""
    pytest.importorskip("dp_accounting")
    grid = gaussian_pld_epsilon(4.0, 9, DELTA)
    exact = gaussian_epsilon(0.75, DELTA)

    assert exact - 1e-9 <= grid <= exact + 1e-4


def test_laplace_is_between_one_event_and_the_pure_optimum() -> None:
    """Laplace noise is no worse than the worst pure mechanism, and not free."""
    pytest.importorskip("dp_accounting")
    epsilon = laplace_pld_epsilon(0.05, 60, DELTA)

    assert 0.5 < epsilon < pure_optimal(0.05, 60, DELTA)
    assert laplace_pld_epsilon(0.05, 1, 1e-12) == pytest.approx(0.05, abs=1e-4)


def test_two_classes_lie_between_non_adaptive_and_zcdp() -> None:
    """Freely chosen queries cost more than fixed ones, and less than the zCDP bound."""
    pytest.importorskip("dp_accounting")
    adaptive = pld.two_class_laplace_epsilon(0.04, 50, 40, DELTA)

    assert bounded_range_optimal(0.08, 40, DELTA) < adaptive
    assert adaptive < zcdp_to_epsilon(40 * Loss(spread=0.08).rho, DELTA)


def test_two_classes_with_one_query_equal_enumeration() -> None:
    """One query's epsilon is where the worst pair of neighbouring votes meets delta."""
    pytest.importorskip("dp_accounting")
    gamma, num_voters, delta = 0.5, 3, 0.02

    def chance(lead: int) -> float:
        wrong = (2 + gamma * abs(lead)) / 4 * math.exp(-gamma * abs(lead))
        return 1 - wrong if lead >= 0 else wrong

    def worst(epsilon: float) -> float:
        sticks = []
        for lead in range(-num_voters, num_voters + 1):
            for other in range(max(-num_voters, lead - 2), min(num_voters, lead + 2) + 1):
                p, q = chance(lead), chance(other)
                stick = max(0.0, p - math.exp(epsilon) * q)
                sticks.append(stick + max(0.0, (1 - p) - math.exp(epsilon) * (1 - q)))
        return max(sticks)

    grid = np.linspace(0, 2 * gamma, 5001)
    exact = next(epsilon for epsilon in grid if worst(epsilon) <= delta)

    assert pld.two_class_laplace_epsilon(gamma, num_voters, 1, delta) == pytest.approx(
        exact, abs=3e-4
    )


def test_only_the_product_of_splits_and_gamma_matters() -> None:
    """Twice the votes at half the gamma is the same mechanism."""
    pytest.importorskip("dp_accounting")

    assert pld.two_class_laplace_epsilon(0.02, 20, 10, DELTA, splits=2) == pytest.approx(
        pld.two_class_laplace_epsilon(0.04, 20, 10, DELTA)
    )


def test_dpsgd_agrees_with_opacus() -> None:
    """Opacus' own accountant finds the same epsilon for the same training."""
    pytest.importorskip("dp_accounting")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accountants: Any = pytest.importorskip("opacus.accountants")
        accountant = accountants.PRVAccountant()
        accountant.history = [(1.0, 64 / 2880, 90)]
        theirs = accountant.get_epsilon(delta=DELTA, eps_error=0.005)

    assert pld.dpsgd_epsilon(2880, 64, 90, 1.0, DELTA) == pytest.approx(theirs, abs=0.01)


def test_dpsgd_grows_with_steps_and_falls_with_noise() -> None:
    """Training longer costs more, noisier training less, no training nothing."""
    pytest.importorskip("dp_accounting")
    base = pld.dpsgd_epsilon(500, 10, 20, 1.5, DELTA)

    assert pld.dpsgd_epsilon(500, 10, 40, 1.5, DELTA) > base
    assert pld.dpsgd_epsilon(500, 10, 20, 3.0, DELTA) < base
    assert pld.dpsgd_epsilon(500, 50, 0, 1.5, DELTA) == 0


def test_no_release_is_free() -> None:
    """Zero releases cost zero."""
    pytest.importorskip("dp_accounting")

    assert pld.two_class_laplace_epsilon(1.0, 5, 0, DELTA) == 0


@pytest.mark.parametrize("name", CALLS)
def test_missing_package_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dp-accounting the error says what to install."""
    monkeypatch.setitem(sys.modules, "dp_accounting.pld.privacy_loss_distribution", None)

    with pytest.raises(MissingExtra, match=rf"{name}: .*dp-accounting.*\[accounting\]"):
        getattr(pld, name)(*CALLS[name])


def test_module_imports_without_dp_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optional package is touched only when a function needs it."""
    monkeypatch.setitem(sys.modules, "dp_accounting", None)

    importlib.reload(pld)


def test_accountant_that_ignores_counts_is_not_used() -> None:
    """The accountant class of dp-accounting 0.6 forgets repetitions, so it is avoided."""
    assert "PLDAccountant" not in Path(pld.__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "arguments", "parameter"),
    [
        ("dpsgd_epsilon", (10, 1, 1, math.inf, DELTA), "noise_multiplier"),
        ("dpsgd_epsilon", (10, 1, -1, 1.0, DELTA), "steps"),
        ("dpsgd_epsilon", (10, 11, 1, 1.0, DELTA), "batch"),
        ("dpsgd_epsilon", (0, 1, 1, 1.0, DELTA), "records"),
        ("dpsgd_epsilon", (10, 1, 1, 1.0, 1.0), "delta"),
        ("two_class_laplace_epsilon", (-1.0, 5, 1, DELTA), "gamma"),
        ("two_class_laplace_epsilon", (1.0, 0, 1, DELTA), "num_voters"),
    ],
)
def test_wrong_use_names_the_parameter(
    name: str, arguments: tuple[Any, ...], parameter: str
) -> None:
    """A wrong argument is refused in one sentence that names it."""
    with pytest.raises(InvalidParameter, match=f"{name}: {parameter} must be"):
        getattr(pld, name)(*arguments)
