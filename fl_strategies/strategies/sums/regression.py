"""FedRegression: logistic regression on public components, by one noisy sum of each party."""

from functools import cached_property
from typing import ClassVar, Final

import numpy as np

from fl_strategies.arrays import FloatArray, IntArray
from fl_strategies.exceptions import require
from fl_strategies.privacy.counts import MOST_SUMS
from fl_strategies.privacy.planning.rules import (
    USUAL_STRENGTH,
    drowned_components,
    usual_components,
)
from fl_strategies.privacy.planning.sums import Regression
from fl_strategies.strategies.sums.components import (
    CONSTANT,
    LEVELS,
    MOST_COMPONENTS,
    Components,
    fitted_shares,
)
from fl_strategies.strategies.sums.limits import Ellipsoid, PartySums, known_classes
from fl_strategies.strategies.sums.options import FedRegressionOptions
from fl_strategies.strategies.sums.server import Counted, SumStrategy
from fl_strategies.strategies.sums.summary import DIRECTION
from fl_strategies.wire.knowledge import Metrics

NUM_COMPONENTS: Final = "num-components"
_SMALL: Final = 0.03
"""Length of the mean of parties' directions, whose own length says nothing: so small that the
regression is that of least squares."""


class FedRegression(SumStrategy[Components]):
    """One round: parties sum up principal components of their records times labels.

    Leaves the party
        One number for each component and class (or label): the sum of this component over
        the records of the class, with noise.
    Guarantee
        L2: each record is protected against the server and everybody else, by noise that
        the party itself adds; central: against everybody but the server, which adds the
        noise once; L1: each party, against everybody but the server. One release, so one
        price. Not covered: the number of records, held-out rows, settings chosen on
        private data.

    Parameters
    ----------
    **settings
        See `SumStrategy`; `options` are `FedRegressionOptions`.

    Notes
    -----
    The labels of records enter the likelihood of logistic regression through these sums
    alone; what else it needs, the server takes from public rows, which must be like the
    records. Sums are those of pooled records, so that it does not matter which party holds
    which class, and a party counts by its records: nothing need be weighted. The penalty of
    the regression and the number of components follow from the noise.

    The public rows are then labelled by the regression, and the final model learns them. At
    L1 these labels are hard: how sure the regression is does not follow from directions.
    """

    name: ClassVar[str] = "fedregression"
    options_type = FedRegressionOptions
    options: FedRegressionOptions
    open_setting = "num_components"

    def _summarise(self) -> Components:
        width = int(np.prod(self.public.shape[1:]))
        number = self.options.num_components
        if number is None:
            width_used = min(width, MOST_COMPONENTS)
            number = usual_components(len(self.public), width_used, self._noise_share())
        most = min(width, MOST_COMPONENTS, MOST_SUMS // self.num_classes - 1)
        rule = f"at most {most}, for so many columns and classes"
        require(number <= most, "FedRegression", "num_components", rule, number)
        components = Components.of_rows(self.public, number)
        # Everybody sums up by what travels, the server too.
        return Components.from_arrays(components.to_arrays(), width)

    def _noise_share(self) -> float:
        """Return the noise on one sum as a share of what all sums usually are together."""
        if self.options.level == "L1":
            return self._planned_noise(2.0 * DIRECTION) / (DIRECTION * self.num_parties)
        labels = self.num_classes if self.task == "multi-label" else 1
        usual = USUAL_STRENGTH * LEVELS * self._num_records
        return self._planned_noise(2.0 * LEVELS * labels**0.5) / usual

    def _drowned(self) -> str:
        """Return how noise drowns two components; nothing if it does not."""
        return drowned_components(self._noise_share())

    def _planner(self, level: str, num_labels: int) -> Regression:
        return Regression(level=level, num_labels=num_labels)

    def _plausible(self, one: PartySums, noise: float) -> FloatArray | IntArray:
        """Return the nearest sums that rows like the public ones give."""
        labels = self.num_classes if self.task == "multi-label" else 1
        return self._ellipsoid.project(one.sums, one.num_records, noise, labels)

    @cached_property
    def _ellipsoid(self) -> Ellipsoid:
        return Ellipsoid.of_features(self._features, self._summary.longest)

    @cached_property
    def _features(self) -> IntArray:
        return self._summary.features(self.public)

    def _evidence(
        self, sums: FloatArray | IntArray, num_records: float, noise: float
    ) -> tuple[FloatArray, FloatArray]:
        """Return how far public rows point where a class does; of two, or labels, one scale."""
        scores = self._features @ (sums / num_records)
        if self.task == "multi-label" or self.num_classes == 2:
            return scores, np.ones(scores.shape[1])
        return scores, known_classes(sums[-1] / CONSTANT, noise / CONSTANT)

    def _shares(self, total: FloatArray, noise: float, counted: Counted) -> FloatArray:
        """Return the classes of public rows by the regression that fits the sums."""
        by_party = self.options.level == "L1"
        if by_party:
            whole = counted.num_parties * DIRECTION / _SMALL
        else:
            whole = LEVELS * counted.num_records
        shares = fitted_shares(
            self._features, total / whole, noise / whole, self.num_classes, self.task
        )
        return _hard(shares, several=self.task == "multi-label") if by_party else shares

    def _details(self) -> Metrics:
        return {NUM_COMPONENTS: self._summary.num_features - 1}


def _hard(shares: FloatArray, *, several: bool) -> FloatArray:
    """Return all of a row's share for its likeliest class, or each likely label."""
    if several:
        return (shares > 0.5).astype(np.float64)
    likeliest: FloatArray = np.eye(shares.shape[1])[shares.argmax(axis=1)]
    return likeliest
