# ruff: noqa: RUF001 - the letters of the paper
"""Tables of a paper for which nothing is run: formulas, and regressions solved exactly."""

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypeAlias

import numpy as np

from fl_strategies._util import FloatArray
from fl_strategies.privacy.bounds.theorems import gaussian_mu, nfdp_theorem
from reproduction.panels import Line, Panel, draw_panels
from reproduction.table import FOLDER, table_names
from simulations.experiments.plots import save
from simulations.results.report import markdown_table

NUM_AGENTS: Final = 2


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
        """Return the weights of pooled data."""
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


@dataclass(frozen=True)
class Calculated:
    """A table that is computed: its cells, and the same as a picture."""

    name: str
    title: str
    source: str
    remark: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    panels: tuple[Panel, ...]

    def markdown(self) -> str:
        """Return the table for documentation."""
        caption = (
            f"{self.title} Paper: {self.source}. `python -m reproduction table {self.name}`."
        )
        return "\n".join([markdown_table(self.header, self.rows), "", caption])

    def draw(self, target: Path) -> None:
        """Write the picture (PNG)."""
        save(draw_panels("table", "", self.panels), target)


def calculation_names() -> list[str]:
    """Return the names of all tables that are computed."""
    return table_names("\ncalculation = ")


def calculate(name: str) -> Calculated:
    """Compute a table by the name of its file."""
    content = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    header, rows, panels = CALCULATIONS[content["calculation"]](content["parameters"])
    told = (content["title"], content["source"], content["remark"])
    return Calculated(name, *told, tuple(header), tuple(map(tuple, rows)), tuple(panels))


Content: TypeAlias = tuple[list[str], list[list[str]], list[Panel]]


def nfdp_noise(epsilon: float, delta: float, queries: int) -> tuple[float, float]:
    """Return the Gaussian noise for so many answers of this cost: exact, and as is usual.

    An answer is a probability vector, which moves by the root of 2. The usual way shares the
    cost by advanced composition and takes the noise of one share from the textbook's formula.
    """
    moved = math.sqrt(2)
    exact = moved * math.sqrt(queries) / gaussian_mu(epsilon, delta)
    half = delta / 2
    share = epsilon / (2 * math.sqrt(2 * queries * math.log(1 / half)))
    usual = moved * math.sqrt(2 * math.log(1.25 * queries / half)) / share
    return exact, usual


def _nfdp_budget(told: Mapping[str, Any]) -> Content:
    header = ["data", "N", "records", "log10 ε", "log10 δ", "log10 σ, exact", "usual formula"]
    rows, found = [], {}
    for data, total in told["records"].items():
        logs = []
        for parties in told["parties"]:
            own = total // parties
            cost = nfdp_theorem(own, told["samples"])
            noise = nfdp_noise(cost.epsilon, cost.delta, told["queries"])
            values = [math.log10(value) for value in (cost.epsilon, cost.delta, *noise)]
            logs.append(values)
            rows.append([data, str(parties), str(own), *(f"{value:.2f}" for value in values)])
        found[data] = np.array(logs)
    panels = [
        Panel(
            "",
            "number of parties N",
            name,
            tuple(
                Line(data, told["parties"], logs[:, place].tolist())
                for data, logs in found.items()
            ),
        )
        for place, name in enumerate(["log10 ε", "log10 δ", "log10 σ (exact)"])
    ]
    return header, rows, panels


def _two_regressions(told: Mapping[str, Any]) -> Content:
    shown, most = told["rounds"], max(told["rounds"])
    header = ["", "scheme", *(f"after round {number}" for number in shown), "one place"]
    rows, panels = [], []
    for title, panel in told["panels"].items():
        world = TwoAgents.draw(
            records=told["records"],
            features=told["features"],
            noise=told["noise"],
            penalty=panel["penalty"],
            sorted_targets=panel["sorted"],
            rng=np.random.default_rng(told["seed"]),
        )
        pooled, curves = world.error(world.pooled()), _curves(world, most)
        for name, errors in curves.items():
            cells = [f"{errors[number - 1]:.4f}" for number in shown]
            rows.append([title, name, *cells, f"{pooled:.4f}"])
        places = range(1, most + 1)
        lines = [Line(name, places, errors[:most]) for name, errors in curves.items()]
        lines.append(Line("pooled data", places, [pooled] * most))
        panels.append(Panel(title, "round", "mean squared error", tuple(lines), log=True))
    return header, rows, panels


def _curves(world: TwoAgents, num_rounds: int) -> dict[str, list[float]]:
    """Return the error of each scheme round by round, the mean of both agents' models."""
    chains = [world.chain(start, num_rounds) for start in range(NUM_AGENTS)]

    def mean_errors(pairs: Iterable[tuple[FloatArray, ...]]) -> list[float]:
        return [fmean(map(world.error, pair)) for pair in pairs]

    akd = mean_errors(zip(*chains, strict=True))
    return {
        "agents alone": akd[:1] * (num_rounds + 1),
        "AKD": akd,
        "AvgKD": mean_errors(world.averaged(num_rounds)),
        "EKD": [world.error(weights) for weights in world.ensemble(num_rounds)],
    }


CALCULATIONS: Final[Mapping[str, Callable[[Mapping[str, Any]], Content]]] = {
    "nfdp-budget": _nfdp_budget,
    "two-regressions": _two_regressions,
}
