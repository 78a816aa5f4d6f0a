"""Replies one by one: a bad one costs its sender the round, and nobody else anything."""

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from sklearn.ensemble import RandomForestClassifier
from xgboost import XGBClassifier

from clients import client_app
from fl_strategies import REGISTRY, KnowledgeStrategy
from fl_strategies._compat import is_flowers_own
from fl_strategies.errors import InvalidData, InvalidParameter
from fl_strategies.server.replies import StreamingGrid
from fl_strategies.wire import keys
from simulations.runtime.local import InMemoryGrid
from tests.toys import PUBLIC, CentroidLearner, common_options, load_toy_party

NUM_NODES = 3
APP = client_app(load_toy_party)


class FlowersGrid(InMemoryGrid):
    """Hands out replies as Flower does: each once, and read on the server's side."""

    hostile = 1001
    change: Callable[[Message], None]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = super().pull_messages(message_ids)
        return [self._received(reply) for reply in replies]

    def _received(self, reply: Message) -> Message:
        if reply.metadata.src_node_id == self.hostile:
            type(self).change(reply)
        parts = {name: each.deflate() for name, each in get_all_nested_objects(reply).items()}
        read: Any = inflate_object_from_contents(reply.object_id, parts)
        read.metadata.__dict__["_message_id"] = reply.object_id
        return read  # type: ignore[no-any-return]


# What the strategy asks of the type of a grid.
FlowersGrid.__module__ = "flwr.superlink.grid"


def without_records(reply: Message) -> None:
    """Flower raises for it when it is fetched."""
    reply.__dict__["_content"] = ConfigRecord({"no": "records"})


def first_array(reply: Message) -> tuple[ArrayRecord, str, Array]:
    record = next(iter(reply.content.array_records.values()))
    return record, *next(iter(record.items()))


def with_endless_side(reply: Message) -> None:
    """Flower reads it, and cannot write it."""
    record, name, array = first_array(reply)
    record[name] = Array(array.dtype, (2**70,), array.stype, array.data)


def with_half_a_letter(reply: Message) -> None:
    record, _, array = first_array(reply)
    record["\ud800"] = array


def with_a_nameless_record(reply: Message) -> None:
    reply.content["\ud800"] = ConfigRecord({"a": 1})


@pytest.mark.parametrize("folder", [None, "run"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, without_records) for name in sorted(REGISTRY)),
        ("fedavg", with_endless_side),
        ("fedavg", with_half_a_letter),
        ("fedavg", with_a_nameless_record),
    ],
)
def test_a_reply_that_flower_cannot_handle_ends_no_run(
    name: str, change: Callable[[Message], None], folder: str | None, tmp_path: Path
) -> None:
    """Flower itself raises for it; the others' replies still count."""
    kept = None if folder is None else tmp_path / folder
    options = {**common_options(NUM_NODES), "checkpoint_dir": kept}
    strategy = REGISTRY[name].strategy(**options)  # type: ignore[arg-type]
    grid = FlowersGrid(APP, NUM_NODES)
    grid.hostile, type(grid).change = 1001, change
    assert is_flowers_own(grid)

    strategy.start(grid, ArrayRecord(), num_rounds=1)

    assert {0, 2} <= set(strategy.parties_)
    if kept is not None or change is without_records:
        assert "must be a message of Flower's" in strategy.rejected_[1001]


def requests() -> list[Message]:
    return [
        Message(RecordDict(), dst_node_id=1000 + number, message_type=MessageType.TRAIN)
        for number in range(NUM_NODES)
    ]


def test_replies_come_one_by_one() -> None:
    """The next is fetched when the last has been used, and messages are sent at once."""
    pulled: list[str] = []

    class Watched(InMemoryGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            pulled.extend(message_ids)
            return super().pull_messages(message_ids)

    asked = requests()
    replies = StreamingGrid(Watched(APP, NUM_NODES)).send_and_receive(asked)

    assert all(message.metadata.message_id for message in asked)
    for number, _ in enumerate(replies, start=1):
        assert len(pulled) == number


def test_a_superlink_that_is_gone_is_nobodys_bad_reply() -> None:
    class Gone(InMemoryGrid):
        def pull_messages(self, _: Iterable[str]) -> list[Message]:
            raise httpx.ConnectError("refused")

    with pytest.raises(httpx.ConnectError):
        list(StreamingGrid(Gone(APP, NUM_NODES)).send_and_receive(requests()))


def test_a_superlink_that_is_busy_is_asked_again() -> None:
    """What its database refuses in one moment, it gives in the next."""
    refused = httpx.Response(500, request=httpx.Request("POST", "http://superlink"))

    class Busy(InMemoryGrid):
        tries = 0

        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            self.tries += 1
            if self.tries < 5:
                raise httpx.HTTPStatusError("locked", request=refused.request, response=refused)
            return super().pull_messages(message_ids)

    assert len(list(StreamingGrid(Busy(APP, NUM_NODES)).send_and_receive(requests()))) == 3


def test_who_answered_in_time_is_heard_after_it() -> None:
    """A party that takes long to be fetched, and a slow reader, cost others nothing."""

    class Dragging(InMemoryGrid):
        first = True

        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            ids = list(message_ids)
            if self.first:
                self.first = False
                time.sleep(0.4)
            elif time.monotonic() < self.there:
                return []
            return super().pull_messages(ids)

        there = time.monotonic() + 0.2

    replies = StreamingGrid(Dragging(APP, NUM_NODES)).send_and_receive(requests(), timeout=0.3)
    heard = []
    for reply in replies:
        heard.append(reply.metadata.src_node_id)
        time.sleep(0.1)

    assert sorted(heard) == [1000, 1001, 1002]


def test_waiting_for_replies_ends_in_time() -> None:
    class Silent(InMemoryGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            ids = list(message_ids)
            return [r for r in super().pull_messages(ids) if r.metadata.src_node_id != 1000]

    start = time.monotonic()
    replies = list(
        StreamingGrid(Silent(APP, NUM_NODES)).send_and_receive(requests(), timeout=0.5)
    )

    assert [reply.metadata.src_node_id for reply in replies] == [1001, 1002]
    assert time.monotonic() - start < 5


NAMES = ["fedkt", "fedkd", "fedmd", "avgkd", "ekd", "fens"]
OTHERS = dict.fromkeys(("avgkd", "ekd", "fens"), "model_fns") | {"fedkt": "student_fns"}
RULE = "a function without arguments that makes a new learner"
CONVERSIONS: dict[str, Callable[[np.ndarray], Any]] = {
    "lists": lambda array: array.tolist(),
    "pandas": pd.DataFrame,
    "torch": torch.tensor,
}


def build(name: str, **changes: Any) -> KnowledgeStrategy[Any]:
    return REGISTRY[name].strategy(**{**common_options(), **changes})


@pytest.mark.parametrize("kind", CONVERSIONS)
@pytest.mark.parametrize("name", NAMES)
def test_lists_frames_and_tensors_are_public_rows(name: str, kind: str) -> None:
    strategy = build(name, public=CONVERSIONS[kind](PUBLIC))

    expected = build(name).party_config()[keys.PUBLIC_HASH]
    assert strategy.party_config()[keys.PUBLIC_HASH] == expected


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_are_no_numbers_are_a_sentence(name: str) -> None:
    with pytest.raises(InvalidData, match="public must be an array, or a list, frame or"):
        build(name, public=[[1.0, 2.0], [3.0]])
    with pytest.raises(InvalidData, match="public must be an array of numbers"):
        build(name, public=pd.DataFrame({"a": ["1", "2"], "b": ["3", "4"]}))


@pytest.mark.parametrize(
    ("given", "got", "write"),
    [
        (
            RandomForestClassifier,
            "the class RandomForestClassifier",
            "SklearnLearner(RandomForestClassifier(...), num_classes=3)",
        ),
        (CentroidLearner(), "an object of the class CentroidLearner", "CentroidLearner(...)"),
        (
            lambda: RandomForestClassifier(),
            "one that makes objects of the class RandomForestClassifier",
            "SklearnLearner(RandomForestClassifier(...), num_classes=3)",
        ),
        (
            lambda: XGBClassifier(),
            "one that makes objects of the class XGBClassifier",
            "XGBoostLearner(num_classes=3)",
        ),
        (
            lambda: torch.nn.Linear(2, 3),
            "one that makes objects of the class Linear",
            "TorchLearner(lambda: Linear(...), num_classes=3)",
        ),
        (lambda: None, "one that makes objects of the class NoneType", None),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_what_makes_no_learner_is_a_sentence(
    name: str, given: Any, got: str, write: str | None
) -> None:
    hint = "" if write is None else f" Write: lambda: {write}"
    places: dict[str, dict[str, Any]] = {"learner_fn": {"learner_fn": given}}
    if other := OTHERS.get(name):
        places[f"{other}['other']"] = {other: {"other": given}}
    for place, change in places.items():
        sentence = re.escape(f": {place} must be {RULE}, got {got}.{hint}")
        with pytest.raises(InvalidParameter, match=rf"^\w+{sentence}$"):
            build(name, **change)
