"""Tables that are computed, against formulas and closed forms that do not use their code."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from reproduction.__main__ import main
from reproduction.calculated import TwoAgents, calculate, calculation_names, nfdp_noise
from tests.closed_forms import KernelAgent, KernelFederation, linear_kernel
from tests.pictures import size_of


@pytest.fixture(scope="module")
def world() -> TwoAgents:
    return TwoAgents.draw(
        records=40,
        features=5,
        noise=0.3,
        penalty=0.05,
        sorted_targets=True,
        rng=np.random.default_rng(1),
    )


@pytest.fixture(scope="module")
def closed(world: TwoAgents) -> KernelFederation:
    pairs = zip(world.x, world.y, strict=True)
    agents = [KernelAgent(x, y[:, None], linear_kernel) for x, y in pairs]
    return KernelFederation(agents, ridge=world.penalty)


@pytest.mark.parametrize("t", [0, 1, 2, 7])
def test_every_scheme_is_its_closed_form(
    world: TwoAgents, closed: KernelFederation, t: int
) -> None:
    """Propositions II, V and VII of the paper, with a linear kernel."""
    grid = np.random.default_rng(2).normal(size=(6, 5))
    for start in (0, 1):
        np.testing.assert_allclose(
            grid @ world.chain(start, t)[t], closed.akd(t, grid, start)[:, 0], atol=1e-9
        )
        np.testing.assert_allclose(
            grid @ world.averaged(t)[t][start], closed.avgkd(t, grid, start)[:, 0], atol=1e-9
        )
    np.testing.assert_allclose(
        grid @ world.ensemble(t)[t], closed.ekd(t, grid)[:, 0], atol=1e-9
    )
    np.testing.assert_allclose(grid @ world.pooled(), closed.centralised(grid)[:, 0], atol=1e-9)


def test_the_figure_of_regressions_has_the_paper_s_order() -> None:
    """EKD comes to the pooled error, and AKD ends far above the agents alone."""
    rows = {
        (row[0], row[1]): [float(cell) for cell in row[2:]]
        for row in _rows("codistill_regression")
    }

    for panel in ("same data", "different data", "strong penalty"):
        *_, last, pooled = rows[panel, "EKD"]
        assert last == pytest.approx(pooled, abs=2e-4)
        assert rows[panel, "AKD"][-2] > 3 * rows[panel, "agents alone"][-2]
        assert pooled < rows[panel, "AvgKD"][-2] < rows[panel, "AKD"][-2]
    weak, strong = (rows[panel, "EKD"] for panel in ("different data", "strong penalty"))
    assert abs(strong[2] - strong[-1]) < abs(weak[2] - weak[-1])


def _rows(name: str) -> tuple[tuple[str, ...], ...]:
    return calculate(name).rows


def test_the_budget_is_the_paper_s_theorem() -> None:
    """Ten parties: log10 of epsilon and delta is close to -3 for FEMNIST, -2 for CIFAR."""
    found = {(row[0], row[1]): row for row in _rows("nfdp_budget")}

    for data, total in (("FEMNIST", 28_800), ("CIFAR", 3_000)):
        own = total // 10
        row = found[data, "10"]
        epsilon, delta = 3 * math.log((own + 1) / own), 1 - ((own - 1) / own) ** 3
        assert float(row[3]) == pytest.approx(math.log10(epsilon), abs=0.006)
        assert float(row[4]) == pytest.approx(math.log10(delta), abs=0.006)
        assert 4 < float(row[5]) < 7


def test_the_noise_of_many_answers_costs_what_was_asked() -> None:
    """Gaussian noise on n answers that move by the root of 2, by its exact curve."""
    epsilon, delta, queries = 0.01, 0.003, 1000
    exact, usual = nfdp_noise(epsilon, delta, queries)
    mu = math.sqrt(2 * queries) / exact

    spent = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(
        -mu / 2 - epsilon / mu
    )

    assert spent == pytest.approx(delta, rel=1e-6)
    assert usual > 10 * exact


@pytest.mark.parametrize("name", calculation_names())
def test_a_computed_table_is_shown_and_drawn(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the command of all tables, without a run."""
    monkeypatch.chdir(tmp_path)

    assert main(["table", name]) == 0

    assert capsys.readouterr().out == Path(f"runs/{name}.md").read_text()
    assert size_of(Path(f"runs/{name}.png"))[0] > 1000
