"""Linear regression of two agents that distil each other (AKD, AvgKD, EKD), solved exactly.

Afonin, Karimireddy: Towards Model-Agnostic Federated Learning Using Knowledge Distillation
(ICLR 2022), Section 6 and Figure 3. A model is a vector of weights, so a round is one linear
equation for each agent.
"""

from dataclasses import dataclass

import numpy as np

from fl_strategies._util.arrays import FloatArray

NUM_AGENTS = 2


@dataclass(frozen=True, eq=False)
class TwoAgents:
    """Rows and targets of two agents, and the penalty c of both."""

    x: tuple[FloatArray, FloatArray]
    y: tuple[FloatArray, FloatArray]
    penalty: float

    @classmethod
    def draw(
        cls,
        *,
        records: int,
        features: int,
        noise: float,
        penalty: float,
        sorted_targets: bool,
        rng: np.random.Generator,
    ) -> "TwoAgents":
        """Draw a problem and halve it, at random or by the size of the targets."""
        x = rng.normal(size=(records, features))
        y = x @ rng.normal(size=features) / np.sqrt(features)
        y += noise * rng.normal(size=records)
        order = np.argsort(y) if sorted_targets else np.arange(records)
        first, second = np.array_split(order, NUM_AGENTS)
        return cls((x[first], x[second]), (y[first], y[second]), penalty)

    def fit(self, agent: int, targets: FloatArray) -> FloatArray:
        """Return an agent's weights for some targets; the penalty is per record of both."""
        return _ridge(self.x[agent], targets, self.penalty * sum(map(len, self.y)))

    def pooled(self) -> FloatArray:
        """Return the weights of all data in one place."""
        y = np.concatenate(self.y)
        return _ridge(np.concatenate(self.x), y, self.penalty * len(y))

    def error(self, weights: FloatArray) -> float:
        """Return the mean squared error on the rows of both."""
        gaps = np.concatenate(self.x) @ weights - np.concatenate(self.y)
        return float(np.mean(gaps**2))

    def chain(self, start: int, num_rounds: int) -> list[FloatArray]:
        """Return the weights of AKD: each agent learns what the other's model says."""
        at, found = start, [self.fit(start, self.y[start])]
        for _ in range(num_rounds):
            at = 1 - at
            found.append(self.fit(at, self.x[at] @ found[-1]))
        return found

    def averaged(self, num_rounds: int) -> list[tuple[FloatArray, FloatArray]]:
        """Return both weights of AvgKD: targets are the mean of labels and the other's."""
        found = [(self.fit(0, self.y[0]), self.fit(1, self.y[1]))]
        for _ in range(num_rounds):
            last = found[-1]
            pair = [
                self.fit(agent, (self.y[agent] + self.x[agent] @ last[1 - agent]) / 2)
                for agent in range(NUM_AGENTS)
            ]
            found.append((pair[0], pair[1]))
        return found

    def ensemble(self, num_rounds: int) -> list[FloatArray]:
        """Return the weights of EKD: the chains' models with alternating signs, summed."""
        chains = [self.chain(start, num_rounds) for start in range(NUM_AGENTS)]
        signs = (-1.0) ** np.arange(num_rounds + 1)
        return list(np.cumsum(signs[:, None] * (np.array(chains[0]) + chains[1]), axis=0))


def _ridge(x: FloatArray, targets: FloatArray, penalty: float) -> FloatArray:
    weights: FloatArray = np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ targets)
    return weights
