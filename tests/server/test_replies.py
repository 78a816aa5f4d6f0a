"""What an untrusted reply may be: no larger than agreed, and one plain line in the log."""

import logging
from collections.abc import Callable

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord

from clients import client_app
from fl_strategies import FedKT
from fl_strategies.server.replies import MAX_ERROR, MAX_METRICS, cut_short
from fl_strategies.wire import keys
from simulations.runtime.local import InMemoryGrid
from tests.toys import load_toy_party, toy_fedkt

LIMIT = 10_000


class Changed(InMemoryGrid):
    """Lets a test change what the first party says."""

    change: Callable[[Message], Message]

    def pull_messages(self, message_ids: list[str]) -> list[Message]:  # type: ignore[override]
        replies = super().pull_messages(message_ids)
        return [self.change(r) if r.metadata.src_node_id == 1000 else r for r in replies]


def run(change: Callable[[Message], Message], **options: object) -> FedKT:
    strategy = toy_fedkt(num_parties=4, max_reply_bytes=LIMIT, **options)
    grid = Changed(client_app(load_toy_party), 4)
    grid.change = change
    strategy.start(grid, ArrayRecord(), num_rounds=1)
    return strategy


def many_metrics(reply: Message) -> Message:
    own = reply.content.metric_records[keys.METRICS]
    more = {f"m{number}": 1.0 for number in range(MAX_METRICS)}
    reply.content[keys.METRICS] = MetricRecord({**own, **more})
    return reply


def long_names(reply: Message) -> Message:
    own = reply.content.metric_records[keys.METRICS]
    reply.content[keys.METRICS] = MetricRecord({**own, "m" * 5_000: 1.0})
    return reply


def large_meta(reply: Message) -> Message:
    own = reply.content.config_records[keys.META]
    reply.content[keys.META] = ConfigRecord({**own, "essay": "x" * LIMIT})
    return reply


def another_record(reply: Message) -> Message:
    reply.content["more"] = ConfigRecord({"essay": "x" * LIMIT})
    return reply


def long_error(reply: Message) -> Message:
    return Message(Error(2, "y" * 10**6), reply_to=_request_of(reply))


def _request_of(reply: Message) -> Message:
    request = Message(reply.content, dst_node_id=1000, message_type="train")
    request.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    return request


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (many_metrics, f"metrics must be at most {MAX_METRICS}"),
        (long_names, "with names of at most 200 letters"),
        (large_meta, f"it must be at most {LIMIT} bytes"),
        (another_record, f"it must be at most {LIMIT} bytes"),
        (long_error, "yyy"),
    ],
)
@pytest.mark.parametrize("kept", [False, True], ids=["memory", "disk"])
def test_a_reply_is_limited_as_a_whole(
    change: Callable[[Message], Message], reason: str, kept: bool, tmp_path: object
) -> None:
    """Not only its arrays count; the party is excluded, and what is said of it is short."""
    strategy = run(change, checkpoint_dir=tmp_path if kept else None)

    (said,) = strategy.rejected_.values()
    assert reason in said
    assert len(said) <= MAX_ERROR
    assert sorted(strategy.parties_) == [1, 2, 3]


def test_a_reason_is_one_plain_line(caplog: pytest.LogCaptureFixture) -> None:
    def shout(reply: Message) -> Message:
        return Message(Error(2, "a\nb\x1b[2Jc\x07d\u202ee"), reply_to=_request_of(reply))

    with caplog.at_level(logging.WARNING, logger="flwr.fl_strategies"):
        strategy = run(shout)

    (said,) = strategy.rejected_.values()
    assert said == "a b [2Jc d e"
    assert "\x1b" not in caplog.text


def test_long_reasons_are_cut() -> None:
    assert cut_short("x" * 10_000) == "x" * MAX_ERROR
    assert cut_short(" " * 10**7 + "x") == ""
    assert cut_short("") == ""
