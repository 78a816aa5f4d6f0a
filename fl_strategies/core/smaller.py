"""What every strategy says and reads of replies that were made smaller to travel."""

from typing import TypeVar

from fl_strategies.core.contract import Contract
from fl_strategies.exceptions import require
from fl_strategies.runtime.runs import Run
from fl_strategies.wire.compact import HALF_PRECISION, as_meant, offer
from fl_strategies.wire.knowledge import Knowledge, Scalar

T = TypeVar("T")


class SmallerReplies(Contract[T]):
    """A strategy whose parties may compress scores, and models may be of half precision."""

    run: Run
    _half = False

    @property
    def precision(self) -> dict[str, Scalar]:
        """What a resumed run must have as before, besides its settings."""
        return {HALF_PRECISION: True} if self._half else {}

    def check_precision(self) -> None:
        """Raise `InvalidParameter` for half precision where no models are sent."""
        fits, rule = self.sends_models or not self._half, "false unless parties send models"
        require(fits, type(self).__name__, "half_precision", rule, self._half)

    def offered(self) -> dict[str, Scalar]:
        """Return what a question says about smaller replies."""
        return offer(self.most_score_bytes, half=self._half, kept=self.run.is_kept)

    def restored(self, knowledge: Knowledge) -> Knowledge:
        """Return what a reply says, as it was before it was made smaller."""
        return as_meant(knowledge, self.most_score_bytes, half=self._half)
