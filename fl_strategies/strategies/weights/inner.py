"""One of Flower's strategies inside ours: what it sees, what it keeps, what it may not be."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    Strategy,
)

from fl_strategies.arrays import Array
from fl_strategies.exceptions import NotEnoughParties, require
from fl_strategies.wire.knowledge import decode_arrays, encode_arrays

_CLIPPED_ELSEWHERE: Final = (
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyClientSideAdaptiveClipping,
)
_MOST_LOOKS: Final = 8
_PLAIN: Final = (bool, int, float, str, type(None), np.ndarray)
_WITHOUT_LIMIT: Final = 2**62


class PresentNodes(Grid):
    """All that Flower's class sees of the federation: who is there, and nobody else comes.

    Its own sampling waits for ever if it wants more nodes than there are.
    """

    def __init__(self, owner: str, nodes: Collection[int]) -> None:
        self._owner, self._nodes, self._looks = owner, list(nodes), 0

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes; raise if somebody waits for more."""
        self._looks += 1
        if self._looks > _MOST_LOOKS:
            raise NotEnoughParties(
                f"{self._owner}: min_train_nodes and min_available_nodes of Flower's strategy "
                f"must be at most the parties that are there, {len(self._nodes)}, got more."
            )
        return self._nodes

    def _unused(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("Only ids of nodes can be asked for.")

    set_run = create_message = push_messages = pull_messages = send_and_receive = _unused

    @property
    def run(self) -> Any:
        """Not there."""
        return self._unused()


@dataclass(frozen=True)
class KeptArrays:
    """An `ArrayRecord` as a checkpoint keeps it."""

    arrays: Mapping[str, Array]


def check_inner(owner: str, flower: Strategy, *, is_kept: bool) -> None:
    """Raise `InvalidParameter` for a strategy that cannot do here what it promises."""
    for part in layers(flower):
        clipped = not isinstance(part, _CLIPPED_ELSEWHERE)
        rule = (
            "one that clips at the server (DifferentialPrivacyServerSide...): whether parties "
            "clip, which their mods decide, nobody here would notice"
        )
        require(clipped, owner, "flower", rule, type(part).__name__)
        share = getattr(part, "fraction_train", 1.0)
        require(share == 1.0, owner, "fraction_train", "given to this strategy", share)
    if is_kept:
        for name, value in attributes(flower):
            rule = f"omitted: a checkpoint cannot hold {name} of {type(flower).__name__}"
            kept = callable(value) or isinstance(value, Strategy) or _is_plain(value)
            require(kept, owner, "checkpoint_dir", rule, type(value).__name__)


def layers(flower: Strategy) -> Iterator[Strategy]:
    """Give a strategy, then what it wraps, and so on."""
    part: object = flower
    while isinstance(part, Strategy):
        yield part
        part = getattr(part, "strategy", None)


def attributes(flower: Strategy) -> Iterator[tuple[str, object]]:
    """Give what a strategy, and what it wraps, has by attribute."""
    for depth, part in enumerate(layers(flower)):
        for name, value in vars(part).items():
            yield f"{depth}.{name}", value


def remember(flower: Strategy) -> dict[str, object]:
    """Return what a strategy has, as plain values: momenta, its last model, settings."""
    found = {name: _to_plain(value) for name, value in attributes(flower) if _is_plain(value)}
    return {name: value for name, value in found.items() if not name.endswith(".strategy")}


def recall(flower: Strategy, kept: Mapping[str, object]) -> None:
    """Give a strategy back what `remember` returned."""
    parts = list(layers(flower))
    for name, value in kept.items():
        depth, _, attribute = name.partition(".")
        setattr(parts[int(depth)], attribute, _from_plain(value))


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping) and not isinstance(value, ArrayRecord):
        return all(_is_plain(part) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (*_PLAIN, ArrayRecord))


def _to_plain(value: object) -> object:
    if isinstance(value, ArrayRecord):
        return KeptArrays(decode_arrays(value, _WITHOUT_LIMIT))
    return value


def _from_plain(value: object) -> object:
    return encode_arrays(value.arrays) if isinstance(value, KeptArrays) else value


def weight_key(flower: Strategy) -> str:
    """Return the metric by which Flower's class weighs replies."""
    found = [getattr(part, "weighted_by_key", None) for part in layers(flower)]
    return next((name for name in found if name), "num-examples")


def config_of(messages: Sequence[Message]) -> dict[str, Any]:
    """Return what Flower's class wants parties to know, the same for all of them."""
    records = [
        record
        for message in messages[:1]
        for record in message.content.values()
        if isinstance(record, ConfigRecord)
    ]
    return dict(records[0]) if records else {}
