"""What a party finds out for itself: whether the model of a run beats one of its own.

In a deployment nobody holds the data to compare, but each party holds its own. The answer is
a line of its own log. It leaves the party as one bit, and only if the party says so.
"""

import logging
import math

from flwr.app import ConfigRecord

from fl_strategies import Learner, Party
from fl_strategies.arrays import Array, FloatArray
from fl_strategies.core.party_state import PartyState
from fl_strategies.core.role import read_seed
from fl_strategies.core.tasks import METRICS, judge, paired_error
from fl_strategies.privacy.events import NonPrivateEvent
from fl_strategies.privacy.ledger import DEFAULT_DELTA
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Metrics

logger = logging.getLogger("flwr.fl_strategies")


def compare_at_home(
    model: Learner, party: Party, config: ConfigRecord, state: PartyState
) -> bool | None:
    """Log whether a model beats the party's own on its held-out rows; None if unknown.

    It does if its figure is better by more than one standard error of the difference. An
    error is logged and goes no further: what is answered must not depend on it.
    """
    x, y = party.x_test, party.y_test
    if not party.compare_at_home or x is None or y is None or not len(y):
        return None
    try:
        own = _shares_alone(party, x, y, config, state)
        return _log(party, judge(model, x, y, party.task).shares, own)
    except Exception:
        logger.exception("The model of the run could not be compared with one of its own.")
        return None


def verdict_to_tell(party: Party, better: bool | None, told: Metrics) -> Metrics:
    """Return the one bit if the party tells it, and its metrics as well."""
    if not party.tell_verdict or math.isnan(told[METRICS[party.task]]):
        return {}
    return {keys.BETTER_THAN_ALONE: math.nan if better is None else float(better)}


def answers_openly(state: PartyState) -> bool:
    """Tell whether the party has released something in this run, and all without noise."""
    released = [event for event, _ in state.ledger(DEFAULT_DELTA).entries]
    return bool(released) and all(isinstance(event, NonPrivateEvent) for event in released)


def _shares_alone(
    party: Party, x: Array, y: Array, config: ConfigRecord, state: PartyState
) -> FloatArray:
    """Judge a model that learned from the party's records only; trained once a run."""
    if state.alone is not None:
        return state.alone
    rng = party.rng(read_seed(config), "alone")
    shares = judge(party.learner_fn().fit(party.x, party.y, rng=rng), x, y, party.task).shares
    state.alone = shares
    return shares


def _log(party: Party, received: FloatArray, own: FloatArray) -> bool:
    sign = -1 if party.task == "regression" else 1
    gain, error = sign * (received.mean() - own.mean()), paired_error(received, own)
    better = bool(gain > error)
    word = "better than" if better else "worse than" if -gain > error else "level with"
    logger.info(
        "%s: the model of this run is %s one of its own: %s %.4g against %.4g on %d held-out "
        "rows.",
        party.owner,
        word,
        METRICS[party.task],
        received.mean(),
        own.mean(),
        len(own),
    )
    return better
