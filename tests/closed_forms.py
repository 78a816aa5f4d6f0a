"""Federated kernel regression: what co-distillation must give, in closed form.

Afonin, Karimireddy: Towards Model-Agnostic Federated Learning Using Knowledge
Distillation (ICLR 2022), Propositions I to VII and appendices B to G. Nothing here trains
or sends anything, so that tests can compare real rounds with it.

Conventions of the paper: agent i has rows X_i and its own kernel k_i; matrices hold
k_i(x, x') / N for N records of *all* agents, and every agent solves with the same c,

    g(x) = l_x (c I + L_ii)^-1 targets        (Proposition I)

With c = 0 the inverse is the pseudo-inverse: the fit of least norm (appendix C). Rounds
are counted from 0, the round in which agents learn their own labels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from scipy.linalg import block_diag, eigh, pinvh, solve

from fl_strategies._util import Array, FloatArray

Kernel: TypeAlias = Callable[[Array, Array], FloatArray]


def linear_kernel(one: Array, other: Array) -> FloatArray:
    """Return the inner products of all pairs of rows."""
    products: FloatArray = one @ other.T
    return products


def rbf_kernel(gamma: float) -> Kernel:
    """Return the kernel exp(-gamma |x - x'|^2)."""

    def kernel(one: Array, other: Array) -> FloatArray:
        distances = np.square(one[:, None] - other[None]).sum(axis=2)
        return np.asarray(np.exp(-gamma * distances))

    return kernel


def laplace_kernel(gamma: float) -> Kernel:
    """Return the kernel exp(-gamma |x - x'|_1)."""

    def kernel(one: Array, other: Array) -> FloatArray:
        distances = np.abs(one[:, None] - other[None]).sum(axis=2)
        return np.asarray(np.exp(-gamma * distances))

    return kernel


@dataclass(frozen=True, eq=False)
class KernelAgent:
    """Rows (n, d), targets (n, k) and the kernel of one agent."""

    x: Array
    y: FloatArray
    kernel: Kernel


class KernelFederation:
    """Agents in their order, and the predictors that every scheme leads to.

    Parameters
    ----------
    agents : sequence of KernelAgent
    ridge : float
        The paper's c, at least 0.

    Examples
    --------
    >>> x, y = np.array([[0.0], [1.0]]), np.array([[1.0], [3.0]])
    >>> agents = [KernelAgent(x[:1], y[:1], rbf_kernel(1.0)),
    ...           KernelAgent(x[1:], y[1:], rbf_kernel(1.0))]
    >>> pair = KernelFederation(agents, ridge=0.0)
    >>> pair.akd(0, x).round(3).ravel(), pair.ekd_limit(x).round(3).ravel()
    (array([1.   , 0.368]), array([1., 3.]))
    """

    def __init__(self, agents: Sequence[KernelAgent], ridge: float) -> None:
        self.agents, self.ridge = tuple(agents), ridge
        self.num_records = sum(len(agent.x) for agent in agents)
        self._inverses = [self._inverse(agent) for agent in agents]
        edges = np.cumsum([0, *(len(agent.x) for agent in agents)])
        self._rows = [slice(a, b) for a, b in pairwise(edges)]

    def _inverse(self, agent: KernelAgent) -> FloatArray:
        shifted = self.matrix(agent, agent.x, agent.x) + self.ridge * np.eye(len(agent.x))
        inverse: FloatArray = pinvh(shifted)
        return inverse

    def matrix(self, agent: KernelAgent, one: Array, other: Array) -> FloatArray:
        """Return the paper's matrix of an agent's kernel: k(x, x') / N."""
        values: FloatArray = agent.kernel(one, other) / self.num_records
        return values

    def local_ridge(self, number: int) -> float:
        """Return the c of a learner that divides by its own records instead of all."""
        return self.ridge * self.num_records / len(self.agents[number].x)

    def smoother(self, number: int, x: Array) -> FloatArray:
        """Return the matrix from an agent's targets to its predictions at `x` (Prop. I)."""
        agent = self.agents[number]
        smoother: FloatArray = self.matrix(agent, x, agent.x) @ self._inverses[number]
        return smoother

    def centralised(self, x: Array, number: int = 0) -> FloatArray:
        """Return what one agent's kernel predicts with the data of all, the aim (Eq. 5)."""
        kernel = self.agents[number].kernel
        pooled = KernelAgent(np.concatenate([a.x for a in self.agents]), self.labels, kernel)
        return KernelFederation([pooled], self.ridge).akd(0, x)

    @property
    def labels(self) -> FloatArray:
        """Targets of all agents, one below the other, (N, k)."""
        return np.concatenate([agent.y for agent in self.agents])

    def _predict(self, number: int, targets: FloatArray, x: Array) -> FloatArray:
        prediction: FloatArray = self.smoother(number, x) @ targets[self._rows[number]]
        return prediction

    def _blocks(self, teaches: Callable[[int, int], bool]) -> FloatArray:
        """Return all smoothers from agent j to agent i's rows where j teaches i, (N, N)."""
        blocks = [
            [self.smoother(j, agent.x) * teaches(j, i) for j in range(len(self.agents))]
            for i, agent in enumerate(self.agents)
        ]
        return np.block(blocks)

    def _next(self, number: int) -> int:
        return (number + 1) % len(self.agents)

    def circle(self, start: int) -> FloatArray:
        """Return what one way round does to the targets of the agent it starts from."""
        operator, at = np.eye(len(self.agents[start].x)), start
        for _ in self.agents:
            operator = self.smoother(at, self.agents[self._next(at)].x) @ operator
            at = self._next(at)
        return operator

    def degradation(self) -> float:
        """Return by how much a way round shrinks, in the long run (Prop. IV): below 1."""
        return float(np.abs(np.linalg.eigvals(self.circle(0))).max())

    def akd(self, t: int, x: Array, start: int = 0) -> FloatArray:
        """Return the chain's predictor in round t: powers of a way round (Prop. II)."""
        circles, steps = divmod(t, len(self.agents))
        targets = np.linalg.matrix_power(self.circle(start), circles) @ self.agents[start].y
        at = start
        for _ in range(steps):
            targets = self.smoother(at, self.agents[self._next(at)].x) @ targets
            at = self._next(at)
        prediction: FloatArray = self.smoother(at, x) @ targets
        return prediction

    def avgkd(self, t: int, x: Array, number: int = 0) -> FloatArray:
        """Return an agent's predictor in round t of AvgKD (Prop. V, M agents).

        Targets follow z <- (y + B z) / M from z = y on, which is a geometric series. The
        sum that the paper prints for round t counts its last term like all others; its own
        examples for rounds 1 and 2, and the algorithm, give it M times that weight.
        """
        total, power = _series(self._average_step(), t)
        targets = total @ self.labels / len(self.agents) + power @ self.labels
        return self._predict(number, targets, x)

    def avgkd_limit(self, x: Array, number: int = 0) -> FloatArray:
        """Return where AvgKD goes."""
        share = self.labels / len(self.agents)
        targets = solve(np.eye(self.num_records) - self._average_step(), share)
        return self._predict(number, targets, x)

    def _average_step(self) -> FloatArray:
        return self._blocks(lambda teacher, pupil: teacher != pupil) / len(self.agents)

    def pkd(self, t: int, x: Array, number: int = 0) -> FloatArray:
        """Return an agent's predictor in round t of PKD: averaged projections (App. E)."""
        step = self._blocks(lambda *_: True) / len(self.agents)
        return self._predict(number, np.linalg.matrix_power(step, t) @ self.labels, x)

    def ekd(self, t: int, x: Array) -> FloatArray:
        """Return the signed sum over rounds 0 to t of all chains' models (Eq. 32)."""
        total, _ = _series(-self._hand_on(), t + 1)
        return self._sum(total @ self.labels, x)

    def ekd_limit(self, x: Array) -> FloatArray:
        """Return where the signed sum goes, if the chains go to 0.

        For two agents that is Proposition VII. For more it is what Eq. 32 converges to,
        which neither fits the labels nor equals the pooled model.
        """
        targets = solve(np.eye(self.num_records) + self._hand_on(), self.labels)
        return self._sum(targets, x)

    def _hand_on(self) -> FloatArray:
        return self._blocks(lambda teacher, pupil: self._next(teacher) == pupil != teacher)

    def _sum(self, targets: FloatArray, x: Array) -> FloatArray:
        parts = [self._predict(number, targets, x) for number in range(len(self.agents))]
        return np.asarray(np.sum(parts, axis=0))

    def _pair(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """Return L11, M12, L21 and M22 of two agents."""
        one, other = self.agents
        return (
            self.matrix(one, one.x, one.x),
            self.matrix(other, one.x, other.x),
            self.matrix(one, other.x, one.x),
            self.matrix(other, other.x, other.x),
        )

    def proposition_ii(self, t: int, x: Array) -> FloatArray:
        """Return AKD's predictor in round 2t as the paper prints it, for c > 0."""
        l11, m12, l21, m22 = self._pair()
        first, second = self._shifted(l11), self._shifted(m22)
        circle = m12 @ np.linalg.inv(second) @ l21 @ np.linalg.inv(first)
        one = self.agents[0]
        row = self.matrix(one, x, one.x) @ np.linalg.inv(first)
        prediction: FloatArray = row @ np.linalg.matrix_power(circle, t) @ one.y
        return prediction

    def _shifted(self, matrix: FloatArray) -> FloatArray:
        return matrix + self.ridge * np.eye(len(matrix))

    def proposition_iii(self, t: int) -> FloatArray:
        """Return AKD's predictions for agent 2 in round 2t, by projections, for c > 0.

        Two rounds are two oblique projections with a contraction after each.
        """
        self._pair()
        rows = np.concatenate([agent.x for agent in self.agents])
        grams = [self.matrix(agent, rows, rows) for agent in self.agents]
        values, vectors = eigh(block_diag(*grams))
        metric = np.diag(values + self.ridge)
        count, split = self.num_records, len(self.agents[0].x)
        v1, v2 = vectors[:split].T, vectors[split:count].T
        other1, other2 = vectors[count : count + split].T, vectors[count + split :].T
        p1, p2 = _oblique_projection(v1, metric), _oblique_projection(other2, metric)
        step = v1 @ other1.T @ p2.T @ other2 @ v2.T @ p1.T
        start: FloatArray = v1 @ self.agents[0].y
        prediction: FloatArray = v2.T @ p1.T @ np.linalg.matrix_power(step, t) @ start
        return prediction

    def proposition_vi(self, x: Array) -> tuple[FloatArray, FloatArray]:
        """Return both limits of AvgKD by one linear system (Eq. 8 and 19).

        Off the diagonal similarities are halved, and agent 2's labels change their sign.
        """
        l11, m12, l21, m22 = self._pair()
        one, two = self.agents
        system = np.block([[self._shifted(l11), m12 / 2], [l21 / 2, self._shifted(m22)]])
        beta = solve(system, np.concatenate([one.y, -two.y]))
        halves = beta[: len(one.x)], beta[len(one.x) :]
        first: FloatArray = self.matrix(one, x, one.x) @ halves[0] / 2
        second: FloatArray = -self.matrix(two, x, two.x) @ halves[1] / 2
        return first, second

    def proposition_vii(self, x: Array) -> FloatArray:
        """Return the limit of EKD by one linear system (Eq. 7 and 27)."""
        l11, m12, l21, m22 = self._pair()
        one, two = self.agents
        system = np.block([[self._shifted(l11), m12], [l21, self._shifted(m22)]])
        beta = solve(system, self.labels)
        prediction: FloatArray = (
            self.matrix(one, x, one.x) @ beta[: len(one.x)]
            + self.matrix(two, x, two.x) @ beta[len(one.x) :]
        )
        return prediction


def _series(step: FloatArray, count: int) -> tuple[FloatArray, FloatArray]:
    """Return I + step + ... + step^(count - 1) and step^count; I - step may be singular."""
    identity = np.eye(len(step))
    both = np.block([[step, identity], [np.zeros_like(step), identity]])
    power = np.linalg.matrix_power(both, count)
    return power[: len(step), len(step) :], power[: len(step), : len(step)]


def _oblique_projection(basis: FloatArray, metric: FloatArray) -> FloatArray:
    """Return the projection onto the columns of `basis` in the geometry of `metric`."""
    inner = basis.T @ metric
    projection: FloatArray = basis @ solve(inner @ basis, inner)
    return projection
