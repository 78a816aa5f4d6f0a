"""Messages of Flower's own strategies, from servers that know nothing of this package.

They hold weights as `arrays`, a `config` without the name of a strategy, and nothing else. An
answer is weights, or figures, and the number of examples that Flower weighs them by. No
epsilon is in it: Flower would average it. What a release costs is in the party's own journal.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp.typing import ClientAppCallable, Mod

from fl_strategies import Knowledge, Party, PartyRole, WeightsParty
from fl_strategies.core.protocols import StartingLearner
from fl_strategies.exceptions import RequestRefused
from fl_strategies.strategies.weights import FLOWER
from fl_strategies.strategies.weights.restraint import as_layout
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import (
    MAX_REPLY_BYTES,
    Metrics,
    decode_arrays,
    encode_arrays,
)

CLIENT_APP_RAISED_EXCEPTION: Final = 2
"""Flower's error code for a client that failed by itself."""
PLAIN_CONFIG: Final[Mapping[str, str | int]] = {
    keys.STRATEGY: FLOWER,
    keys.SEED: 0,
    "local-epochs": 1,
}
"""What a plain message leaves open."""
_FOR_WEIGHTS: Final = (
    "LocalDpMod",
    "adaptiveclipping_mod",
    "fixedclipping_mod",
    "secagg_mod",
    "secaggplus_mod",
)


def error_reply(message: Message, reason: str) -> Message:
    """Return an answer that says why there is none."""
    return Message(Error(CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)


def is_plain(message: Message) -> bool:
    """Return whether a message comes from one of Flower's own strategies."""
    config = message.content.get(keys.CONFIG)
    return isinstance(config, ConfigRecord) and keys.STRATEGY not in config


def role_of(config: ConfigRecord, roles: Mapping[str, PartyRole]) -> str:
    """Return which role answers a strategy; one does for all that are Flower's."""
    name = str(config.get(keys.STRATEGY))
    return FLOWER if name not in roles and name.startswith(f"{FLOWER}:") else name


def plain_model(message: Message, party: Party) -> Knowledge | None:
    """Return the weights that came, in the types of the party's own; None for none at all.

    Flower's means turn whole numbers, such as the counters of a normalisation, into others.
    """
    record = message.content.get(keys.ARRAYS)
    if not isinstance(record, ArrayRecord) or not record:
        return None
    arrays = decode_arrays(record, MAX_REPLY_BYTES)
    learner = party.learner_fn()
    if isinstance(learner, StartingLearner):
        own = learner.initialised(rng=np.random.default_rng(0)).to_arrays()
        typed = as_layout(arrays, own)
        arrays = {name: typed[name] for name in arrays}
    return Knowledge("model", arrays, {keys.LEARNER: party.learner_name})


def plain_weights(received: Knowledge | None, sent: Knowledge) -> RecordDict:
    """Return weights in the order in which they came, and how many records they have seen."""
    names = sent.arrays if received is None else received.arrays
    arrays = encode_arrays({name: sent.arrays[name] for name in names})
    count = MetricRecord({keys.NUM_EXAMPLES: sent.meta[keys.NUM_EXAMPLES]})  # type: ignore[dict-item]
    return RecordDict({keys.ARRAYS: arrays, keys.METRICS: count})


def plain_figures(party: Party, figures: Metrics) -> RecordDict:
    """Return what was measured; raise if that is nothing, which Flower cannot average."""
    if not figures[keys.NUM_EXAMPLES]:
        raise RequestRefused(
            f"{party.owner}: a model must be measured at home only, got a request for figures."
        )
    return RecordDict({keys.METRICS: MetricRecord({**figures})})


def refuse_useless(mods: Sequence[Mod], roles: Mapping[str, PartyRole]) -> Mod:
    """Return a mod that refuses messages for which others would protect nothing."""
    useless = [_name(mod) for mod in mods if is_for_weights(mod)]

    def refuse(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        config = message.content.get(keys.CONFIG)
        named = isinstance(config, ConfigRecord) and not is_plain(message)
        if useless and named and isinstance(config, ConfigRecord):
            role = roles.get(role_of(config, roles))
            if not isinstance(role, WeightsParty):
                return error_reply(
                    message,
                    f"ClientApp: mods must be none that work on weights for "
                    f"{str(config[keys.STRATEGY])[:40]}, which sends none, got "
                    f"{', '.join(useless)}. Use the strategy's own privacy options.",
                )
        return call_next(message, context)

    return refuse


def is_for_weights(mod: Mod) -> bool:
    """Return whether a mod is one of Flower's that change the weights of an answer."""
    return _name(mod) in _FOR_WEIGHTS


def _name(mod: Mod) -> str:
    return getattr(mod, "__name__", type(mod).__name__)
