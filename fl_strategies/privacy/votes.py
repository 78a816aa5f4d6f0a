"""Protecting a vote: which noise, how strong, and what it costs.

One description serves both sides: the server of FedKT-L1, where a unit is a party and moves
a count by s, and a party of FedKT-L2, where a unit is an example and moves a count by one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Self, TypeAlias, get_args

import numpy as np

from fl_strategies.exceptions import InvalidParameter, KnowledgeMismatch, require
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.calibration import calibrate_scale
from fl_strategies.privacy.events import Unit
from fl_strategies.privacy.mechanisms import ConfidentNoisyMax, NoisyMax
from fl_strategies.protocols import IntArray
from fl_strategies.randomness import derive_rng

VoteNoise: TypeAlias = Literal["gumbel", "laplace", "gaussian", "confident-gaussian"]
VoteMechanism: TypeAlias = NoisyMax | ConfidentNoisyMax

VOTE_NOISES: tuple[str, ...] = get_args(VoteNoise)


@dataclass(frozen=True, kw_only=True)
class VotePrivacy:
    """The noise on votes, by its strength or by the epsilon to be kept.

    Parameters
    ----------
    noise : "gumbel", "laplace", "gaussian" or "confident-gaussian"
        Gumbel noise is the exponential mechanism and costs least at equal accuracy;
        Laplace noise is the papers'. Confident Gaussian noise answers only where, after
        noise of its own, the leading class reaches `threshold`.
    gamma : float, optional
        Inverse scale of Gumbel or Laplace noise: larger means less noise.
    sigma : float, optional
        Standard deviation of Gaussian noise.
    target_epsilon : float, optional
        Instead of gamma or sigma: the noise is made just strong enough for it.
    delta : float
    threshold, threshold_sigma : float, optional
        For confident Gaussian noise.
    seeded_noise : bool
        Draw noise from the experiment's seed, for repeatable simulations. Nothing is
        promised then: epsilon is infinite.
    """

    noise: VoteNoise = "gumbel"
    gamma: float | None = None
    sigma: float | None = None
    target_epsilon: float | None = None
    delta: float = 1e-5
    threshold: float | None = None
    threshold_sigma: float | None = None
    seeded_noise: bool = False

    def __post_init__(self) -> None:
        """Check that the strength is said exactly once, in the words of the noise."""
        require(
            self.noise in VOTE_NOISES,
            "VotePrivacy", "noise", f"one of {', '.join(VOTE_NOISES)}", self.noise,
        )  # fmt: skip
        require(0 < self.delta < 1, "VotePrivacy", "delta", "between 0 and 1", self.delta)
        right, wrong = ("sigma", "gamma") if self.is_gaussian else ("gamma", "sigma")
        rule = f"left out for {self.noise} noise"
        require(getattr(self, wrong) is None, "VotePrivacy", wrong, rule, getattr(self, wrong))
        given = [getattr(self, name) for name in (right, "target_epsilon")]
        require(
            sum(value is not None for value in given) == 1,
            "VotePrivacy", f"{right} or target_epsilon", "given, one of the two", given,
        )  # fmt: skip
        for name in (right, "target_epsilon"):
            value = getattr(self, name)
            require(value is None or value > 0, "VotePrivacy", name, "greater than 0", value)
        for name in ("threshold", "threshold_sigma"):
            value, confident = getattr(self, name), self.noise == "confident-gaussian"
            rule = "greater than 0" if confident else f"left out for {self.noise} noise"
            holds = (value is not None and value > 0) if confident else value is None
            require(holds, "VotePrivacy", name, rule, value)

    def to_config(self) -> dict[str, str | float | bool]:
        """Return what a party needs to build the same mechanism."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {n.replace("_", "-"): v for n, v in given.items() if v is not None}

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        """Read what a server sent; raise `KnowledgeMismatch` for anything unreasonable."""
        names = {field.name: field.name.replace("_", "-") for field in fields(cls)}
        given = {name: config[key] for name, key in names.items() if key in config}
        try:
            return cls(**given)  # type: ignore[arg-type]
        except (InvalidParameter, TypeError) as error:
            raise KnowledgeMismatch(f"Server: {error}") from error

    def rng(self, seed: int, *path: str | int) -> np.random.Generator | None:
        """Return the source of noise: the operating system unless noise is seeded."""
        return derive_rng(seed, "noise", *path) if self.seeded_noise else None

    @property
    def is_gaussian(self) -> bool:
        """Whether the strength is a standard deviation."""
        return self.noise in ("gaussian", "confident-gaussian")

    def mechanism(
        self, *, unit: Unit, sensitivity: float, num_classes: int, num_queries: int
    ) -> VoteMechanism:
        """Return the mechanism for a number of queries, calibrated if a target was given.

        `num_queries` is how many labels will be released in all; it decides the strength
        of a calibrated mechanism and nothing else.
        """

        def with_scale(scale: float) -> VoteMechanism:
            return self._with_scale(scale, unit, sensitivity, num_classes)

        if self.target_epsilon is None:
            strength = self.sigma if self.is_gaussian else self.gamma
            scale = float(strength or 0)
            return with_scale(scale if self.is_gaussian else 1 / scale)

        def entries(scale: float) -> Sequence[Entry]:
            return with_scale(scale).charges(num_queries)

        return with_scale(calibrate_scale(entries, self.target_epsilon, self.delta))

    def for_examples(self, num_classes: int, num_labels: int) -> VoteMechanism:
        """Return the noise of a party: an example moves the vote of one teacher."""
        return self.mechanism(
            unit="example", sensitivity=1, num_classes=num_classes, num_queries=num_labels
        )

    def _with_scale(
        self, scale: float, unit: Unit, sensitivity: float, num_classes: int
    ) -> VoteMechanism:
        if self.noise == "confident-gaussian":
            return ConfidentNoisyMax(
                scale=scale,
                threshold=float(self.threshold or 0),
                threshold_scale=float(self.threshold_sigma or 0),
                sensitivity=sensitivity,
                unit=unit,
                num_classes=num_classes,
            )
        return NoisyMax(
            noise=self.noise,
            scale=scale,
            sensitivity=sensitivity,
            unit=unit,
            num_classes=num_classes,
        )


def count_queries(num_public: int, number: int | None, fraction: float) -> int:
    """Return how many public rows are labelled, asked for as a number or as a share."""
    require(0 < fraction <= 1, "queries", "fraction_query", "above 0 and at most 1", fraction)
    require(
        number is None or fraction == 1, "queries", "num_queries",
        "left out if fraction_query is given", number,
    )  # fmt: skip
    asked = max(1, int(fraction * num_public)) if number is None else number
    rule = f"from 1 to {num_public}, the public rows"
    require(1 <= asked <= num_public, "queries", "num_queries", rule, asked)
    return asked


def choose_queries(num_public: int, num_queries: int, seed: int) -> IntArray:
    """Return which public rows are labelled by noisy votes; the same on every side."""
    if num_queries == num_public:
        return np.arange(num_public)
    return np.sort(derive_rng(seed, "queries").permutation(num_public)[:num_queries])
