"""What a run comes to: its model, its ledger, who took part, or why there is no result."""

import logging
from typing import TypeVar

from flwr.app import ArrayRecord

from fl_strategies.core.contract import Contract
from fl_strategies.core.members import Known
from fl_strategies.core.protocols import Learner, require_portable
from fl_strategies.exceptions import NotFitted, RunFailed, UnsupportedLearner, require
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.privacy.statement import describe_releases
from fl_strategies.runtime.runs import Run
from fl_strategies.wire import keys
from fl_strategies.wire.compact import HALF_PRECISION, as_meant, offer
from fl_strategies.wire.knowledge import Knowledge, Scalar, encode_arrays
from fl_strategies.wire.replies import PartyReport

logger = logging.getLogger("flwr.fl_strategies")

T = TypeVar("T")


class Outcome(Contract[T]):
    """The part of a strategy that is read after a run, and how small its replies may be.

    Parties may compress scores, and models may be of half precision.
    """

    failure_: str = "the strategy has not run"
    """Why the last round that failed has no result."""
    run: Run
    _half = False
    _model: Learner | None
    _registered: Known

    @property
    def round_(self) -> int:
        """Rounds asked so far."""
        return self.state.round

    @property
    def parties_(self) -> dict[int, PartyReport]:
        """What each party reported last."""
        return self.state.parties

    @property
    def ledger_(self) -> PrivacyLedger:
        """What the run released."""
        return self.state.ledger

    @property
    def members(self) -> Known:  # type: ignore[override]
        """Which node is which party: as its operator says, or as their first answers did."""
        return self._registered or self.state.members

    @property
    def model_(self) -> Learner:
        """The final model."""
        if self._model is None:
            raise NotFitted(
                f"{type(self).__name__}: model_ must be read after a run that ended well, "
                f"got none: {self.failure_}."
            )
        return self._model

    def keep_model(self, model: Learner) -> ArrayRecord | None:
        """Keep the final model; return its arrays if it can travel."""
        self._model = model
        try:
            arrays = require_portable(model).to_arrays()
        except UnsupportedLearner as error:
            logger.info("%s: the final model stays on the server. %s", self.name, error)
            return None
        self.state.delivery = Knowledge("model", arrays, {keys.LEARNER: self.model_name})
        return encode_arrays(arrays)

    def fail(self, reason: str) -> None:
        """Note why a round has no result."""
        self.failure_ = reason.removesuffix(".")
        logger.error("%s has no result: %s.", self.name, self.failure_)

    @property
    def has_result(self) -> bool:
        """Whether there is something to show for the run; by default a model."""
        return self._model is not None

    def require_result(self) -> None:
        """Raise if the run was for nothing, and say what has left the parties all the same."""
        if self.has_result:
            return
        released = describe_releases(self.ledger_.entries)
        raise RunFailed(
            f"{type(self).__name__}: the run must end with a result, got none: "
            f"{self.failure_}. What has left the parties all the same: {released}"
        )

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
