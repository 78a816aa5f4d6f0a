"""The closed forms against rounds played by hand, and against each other."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.kernel_ridge import KernelRidge

from fl_strategies._util import Array, FloatArray
from tests.closed_forms import (
    Kernel,
    KernelAgent,
    KernelFederation,
    laplace_kernel,
    linear_kernel,
    rbf_kernel,
)

SAME = [rbf_kernel(0.5)] * 4
DIFFERENT = [rbf_kernel(0.5), laplace_kernel(0.8), rbf_kernel(1.5), laplace_kernel(0.3)]
GRID = np.random.default_rng(1).normal(size=(7, 2))


def federation(
    sizes: tuple[int, ...] = (8, 6), ridge: float = 0.02, kernels: list[Kernel] = DIFFERENT
) -> KernelFederation:
    rng = np.random.default_rng(0)
    agents = [
        KernelAgent(rng.normal(size=(n, 2)), rng.normal(size=(n, 2)), kernel)
        for n, kernel in zip(sizes, kernels, strict=False)
    ]
    return KernelFederation(agents, ridge)


def fit(world: KernelFederation, number: int, targets: FloatArray, x: Array) -> FloatArray:
    """Solve agent's regression as a least-squares problem in its coefficients."""
    agent, shift = world.agents[number], world.ridge * world.num_records
    gram = agent.kernel(agent.x, agent.x)
    dual = np.linalg.lstsq(gram + shift * np.eye(len(gram)), targets, rcond=None)[0]
    return agent.kernel(x, agent.x) @ dual


def play(world: KernelFederation, scheme: str, rounds: int) -> list[list[FloatArray]]:
    """Return the targets of all agents in every round, step by step."""
    agents = world.agents
    history = [[agent.y for agent in agents]]
    for _ in range(rounds):
        last = history[-1]
        seen = [[fit(world, j, last[j], a.x) for j in range(len(agents))] for a in agents]
        if scheme == "ekd":
            new = [seen[i][i - 1] for i in range(len(agents))]
        else:
            for i, agent in enumerate(agents):
                if scheme == "avgkd":
                    seen[i][i] = agent.y
            new = [np.mean(row, axis=0) for row in seen]
        history.append(new)
    return history


def test_one_agent_is_kernel_ridge_regression() -> None:
    """Proposition I is scikit-learn's regression with alpha = c N."""
    world = federation((14,), ridge=0.05)
    agent = world.agents[0]
    gram = agent.kernel(agent.x, agent.x)
    known = KernelRidge(alpha=0.05 * 14, kernel="precomputed").fit(gram, agent.y)

    expected = known.predict(agent.kernel(GRID, agent.x))

    np.testing.assert_allclose(world.akd(0, GRID), expected, atol=1e-10)


def test_without_ridge_the_fit_of_least_norm_is_taken() -> None:
    """More linear rows than columns leave the kernel matrix singular, and lstsq knows."""
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(9, 3)), rng.normal(size=(9, 1))
    world = KernelFederation([KernelAgent(x, y, linear_kernel)], ridge=0.0)

    expected = GRID.repeat(2, axis=1)[:, :3] @ np.linalg.lstsq(x, y, rcond=None)[0]

    np.testing.assert_allclose(world.akd(0, GRID.repeat(2, axis=1)[:, :3]), expected)


@settings(max_examples=25, deadline=None)
@given(
    num_agents=st.integers(2, 4),
    ridge=st.sampled_from([0.0, 0.01, 0.3]),
    t=st.integers(0, 6),
    kernels=st.sampled_from([SAME, DIFFERENT]),
)
def test_closed_forms_equal_rounds_played_by_hand(
    num_agents: int, ridge: float, t: int, kernels: list[Kernel]
) -> None:
    """All schemes, any number of agents and rounds: powers of operators or step by step."""
    world = federation((5, 4, 6, 3)[:num_agents], ridge, kernels)
    close = {"rtol": 1e-6, "atol": 1e-8}

    for scheme, closed in (("avgkd", world.avgkd), ("pkd", world.pkd)):
        targets = play(world, scheme, t)[t]
        for i in range(num_agents):
            expected = fit(world, i, targets[i], GRID)
            np.testing.assert_allclose(closed(t, GRID, i), expected, **close)
    history = play(world, "ekd", t)
    last = [fit(world, i, history[t][i], GRID) for i in range(num_agents)]
    for start in range(num_agents):
        expected = last[(start + t) % num_agents]
        np.testing.assert_allclose(world.akd(t, GRID, start), expected, **close)
    expected = sum(
        (-1) ** s * fit(world, i, history[s][i], GRID)
        for s in range(t + 1)
        for i in range(num_agents)
    )
    np.testing.assert_allclose(world.ekd(t, GRID), expected, **close)


@pytest.mark.parametrize("kernels", [SAME, DIFFERENT], ids=["same", "different"])
@pytest.mark.parametrize("t", [0, 1, 3])
def test_propositions_two_and_three(kernels: list[Kernel], t: int) -> None:
    """AKD in round 2t as printed: by powers, and by oblique projections and contractions."""
    world = federation(kernels=kernels)

    np.testing.assert_allclose(world.akd(2 * t, GRID), world.proposition_ii(t, GRID), atol=1e-9)
    at_second = world.akd(2 * t, world.agents[1].x)
    np.testing.assert_allclose(at_second, world.proposition_iii(t), atol=1e-9)


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_alternating_and_parallel_distillation_go_to_zero(ridge: float) -> None:
    """Propositions II and App. E: nothing is left of the labels."""
    world = federation((4, 4), ridge=ridge)
    assert world.degradation() < 1
    rounds = 2 * math.ceil(math.log(1e-12) / math.log(world.degradation()))

    assert np.abs(world.akd(rounds, GRID)).max() < 1e-9
    assert np.abs(world.pkd(4000, GRID)).max() < 0.01 * np.abs(world.pkd(0, GRID)).max()


def test_degradation_is_faster_with_more_ridge_and_with_distant_data() -> None:
    """Proposition IV: both make a way round the circle shrink more."""
    near, ridged = federation(ridge=0.01, kernels=SAME), federation(ridge=0.3, kernels=SAME)
    one, two = near.agents
    far = KernelFederation([one, KernelAgent(two.x + 2.0, two.y, two.kernel)], 0.01)

    assert ridged.degradation() < near.degradation()
    assert far.degradation() < near.degradation()


@pytest.mark.parametrize("ridge", [0.0, 0.1])
@pytest.mark.parametrize("kernels", [SAME, DIFFERENT], ids=["same", "different"])
def test_propositions_five_and_six(kernels: list[Kernel], ridge: float) -> None:
    """AvgKD's limit as a series, as a linear system, and as what late rounds give."""
    world = federation(ridge=ridge, kernels=kernels)
    one, two = world.agents
    to_one, to_two = world.smoother(1, one.x), world.smoother(0, two.x)
    inverse = np.linalg.inv(np.eye(len(one.x)) - to_one @ to_two / 4)
    other = np.linalg.inv(np.eye(len(two.x)) - to_two @ to_one / 4)
    printed = world.smoother(0, GRID) @ (inverse @ one.y / 2 + to_one @ other @ two.y / 4)

    for number, system in enumerate(world.proposition_vi(GRID)):
        limit = world.avgkd_limit(GRID, number)
        np.testing.assert_allclose(limit, system, atol=1e-8)
        np.testing.assert_allclose(world.avgkd(80, GRID, number), limit, atol=1e-8)
    np.testing.assert_allclose(world.avgkd_limit(GRID), printed, atol=1e-8)


def test_second_round_of_averaging_as_the_appendix_writes_it_out() -> None:
    """The last term has weight 1/2, not the 1/4 of the sum printed for round t."""
    world = federation()
    one, two = world.agents
    to_one, to_two = world.smoother(1, one.x), world.smoother(0, two.x)
    targets = (one.y + to_one @ two.y / 2 + to_one @ to_two @ one.y / 2) / 2

    np.testing.assert_allclose(world.avgkd(2, GRID), world.smoother(0, GRID) @ targets)


@pytest.mark.parametrize("kernels", [SAME, DIFFERENT], ids=["same", "different"])
@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_proposition_seven(kernels: list[Kernel], ridge: float) -> None:
    """The signed sum of two agents converges to the solution of the paper's system."""
    world = federation((5, 4), ridge=ridge, kernels=kernels)

    limit = world.ekd_limit(GRID)

    np.testing.assert_allclose(limit, world.proposition_vii(GRID), atol=1e-8)
    np.testing.assert_allclose(world.ekd(6000, GRID), limit, atol=1e-5)


@pytest.mark.parametrize("ridge", [0.0, 0.1])
def test_two_agents_with_one_kernel_reach_the_pooled_model(ridge: float) -> None:
    """EKD then equals the regression on all data, on every row and for every ridge."""
    world = federation((5, 4), ridge=ridge, kernels=SAME)

    np.testing.assert_allclose(world.ekd_limit(GRID), world.centralised(GRID), atol=1e-8)


def test_two_agents_with_different_kernels_fit_all_labels() -> None:
    """Without ridge the signed sum gives every training row its label."""
    world = federation((5, 4), ridge=0.0)
    rows = np.concatenate([agent.x for agent in world.agents])

    np.testing.assert_allclose(world.ekd_limit(rows), world.labels, atol=1e-8)


def test_three_agents_neither_fit_labels_nor_reach_the_pooled_model() -> None:
    """Eq. 32 converges, to the dense solution of (I + A) z = y, and that is something else."""
    world = federation((4, 3, 3), ridge=0.0, kernels=SAME)
    rows = np.concatenate([agent.x for agent in world.agents])
    edges, total = [0, 4, 7, 10], len(rows)
    handed = np.zeros((total, total))
    for i, agent in enumerate(world.agents):
        before = (i - 1) % 3
        gram = SAME[0](world.agents[before].x, world.agents[before].x)
        smoother = SAME[0](agent.x, world.agents[before].x) @ np.linalg.inv(gram)
        handed[edges[i] : edges[i + 1], edges[before] : edges[before + 1]] = smoother
    targets = np.linalg.solve(np.eye(total) + handed, world.labels)
    dense = sum(fit(world, i, targets[edges[i] : edges[i + 1]], rows) for i in range(3))

    limit = world.ekd_limit(rows)

    np.testing.assert_allclose(limit, dense, atol=1e-8)
    np.testing.assert_allclose(world.ekd(4000, rows), limit, atol=1e-5)
    assert np.abs(limit - world.labels).max() > 0.05


def test_a_learner_that_divides_by_its_own_rows_needs_a_larger_ridge() -> None:
    """C N / n: the paper divides by the records of all agents."""
    world = federation((8, 2), ridge=0.1)

    assert world.local_ridge(0) == pytest.approx(0.125)
    assert world.local_ridge(1) == pytest.approx(0.5)
