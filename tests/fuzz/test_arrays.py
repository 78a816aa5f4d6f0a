"""Everything below a message: array headers, packed bits, levels, answers, knowledge."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fl_strategies.aggregation.evidence import read_counts
from fl_strategies.errors import KnowledgeMismatch
from fl_strategies.server.replies import parse_reply
from fl_strategies.strategies.codistill.options import join_models, part_models
from fl_strategies.strategies.fedmd.options import PAYLOADS, AnswerFormat
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import (
    Knowledge,
    count_bytes,
    decode_array,
    packed_size,
    part_arrays,
    score_format,
    unpack_labels,
)
from tests.fuzz.federations import recorded
from tests.fuzz.mutation import mutate_array, npy, wrap
from tests.fuzz.records import as_often_as, numbers, replies, scalars, wire_arrays
from tests.fuzz.trials import Trials

PLAIN = "biuf"


def check_plain(array: np.ndarray, data: bytes) -> None:
    """Fail unless this is numbers, and no more of them than bytes came."""
    assert array.dtype.kind in PLAIN
    assert array.nbytes <= len(data)
    assert array.ndim <= 8
    assert not array.flags.writeable or not array.size


@pytest.mark.share(0.3)
def test_damaged_arrays(trials: Trials) -> None:
    """An array whose header or bytes were changed is plain numbers, or refused."""
    valid = [
        FlowerArray(np.arange(12, dtype=np.float64).reshape(3, 4)),
        FlowerArray(np.zeros((2, 0, 3), dtype=np.uint8)),
        FlowerArray(np.array(5)),
        FlowerArray(np.asfortranarray(np.ones((3, 2), dtype=np.float32))),
        FlowerArray(np.array([True, False])),
    ]
    for rng in trials.numbers():
        array = rng.choice(valid)
        for _ in range(rng.choice((1, 1, 2))):
            array = mutate_array(rng, array)
        read = trials.attempt(decode_array, "x", array)
        if read is not None:
            check_plain(read, array.data)
    trials.require_both()


@pytest.mark.share(0.008)
def test_wrong_arrays(trials: Trials) -> None:
    """Arrays of any type, with any header."""

    @as_often_as(trials)
    @given(wire_arrays())
    def attempt(array: FlowerArray) -> None:
        read = trials.attempt(decode_array, "x", array)
        if read is not None:
            check_plain(read, array.data)

    attempt()
    trials.require_both()


@pytest.mark.share(0.006)
def test_wrong_replies(trials: Trials) -> None:
    """Whole replies with the right records and wrong contents."""
    exchange = recorded("fedkt")[0]
    request = exchange.sent[0]

    @as_often_as(trials)
    @given(
        replies(("votes", "models", "scores"), ("votes", "scores", "0/coef", "class-counts"))
    )
    def attempt(content: RecordDict) -> None:
        reply = Message(content, reply_to=request)
        trials.attempt(parse_reply, request, reply, "votes", 2**20, lambda known: known)

    attempt()
    trials.require_both()


@pytest.mark.share(0.003)
@pytest.mark.parametrize("name", ["fedkd", "fedmd-logits", "fedmd-nfdp", "avgkd", "fedavg"])
def test_wrong_replies_of_a_strategy(name: str, trials: Trials) -> None:
    """The same, read by the strategy itself, beside an untouched reply."""
    exchange = recorded(name)[0]
    request, own = exchange.sent[0], exchange.replies[0].content
    kind = exchange.strategy.reply_kind
    names = tuple(own[keys.ARRAYS])

    @as_often_as(trials)
    @given(replies((kind,), names), st.integers(0, 3))
    def attempt(content: RecordDict, kept: int) -> None:
        # Some records stay as they were, so that the others are looked at.
        records = dict(content)
        for record in [(), (keys.META,), (keys.ARRAYS,), (keys.META, keys.METRICS)][kept]:
            records[record] = own[record]
        strategy = exchange.again()
        reply = Message(RecordDict(records), reply_to=request)
        trials.attempt(parse_reply, request, reply, kind, 2**20, strategy.check)

    attempt()
    assert trials.tried
    assert trials.refused


@pytest.mark.share(0.008)
def test_wrong_numbers(trials: Trials) -> None:
    """Arrays that arrived well and are not what packed labels, levels or answers are."""
    forms = [score_format(levels, 2.0, "nearest") for levels in (0, 2, 200, 256, 65536)]
    answers = [
        AnswerFormat(payload=payload, num_rows=2, num_classes=3, low=-1.0, high=1.0)
        for payload in PAYLOADS
    ]

    @as_often_as(trials)
    @given(numbers(), st.data())
    def attempt(array: np.ndarray, data: Any) -> None:
        step, shape = data.draw(st.integers(0, 4)), (2, 2)
        if step == 0:
            classes = data.draw(st.sampled_from((2, 3, 10, 256, 257)))
            count = data.draw(st.integers(0, 6))
            size = packed_size(count, classes)
            right = st.binary(min_size=size, max_size=size)
            packed = np.frombuffer(data.draw(right), np.uint8)
            labels = trials.attempt(unpack_labels, packed, (count,), classes)
            assert labels is None or not labels.size or labels.max() < classes
            trials.attempt(unpack_labels, array, (array.size,), classes)
        elif step == 1:
            form = data.draw(st.sampled_from(forms))
            values = trials.attempt(form.from_wire, array, shape)
            assert values is None or np.abs(form.decode(values)).max() <= 2.0
        elif step == 2:
            form = data.draw(st.sampled_from(answers))
            name = data.draw(st.sampled_from(("labels", "scores")))
            trials.attempt(form.decode, {name: array})
        elif step == 3:
            trials.attempt(read_counts, {"class-counts": array}, 3)
        else:
            name = data.draw(st.sampled_from(("0/x", "1/x", "2/x", "x")) | st.text())
            trials.attempt(part_arrays, {name: array}, 2)

    attempt()
    trials.require_both()


@pytest.mark.share(0.004)
def test_wrong_models_in_a_bundle(trials: Trials) -> None:
    """A bundle of models with wrong counts, names and numbers."""
    one = Knowledge("model", {"w": np.zeros(2)}, {keys.LEARNER: "ridge"})
    valid = join_models([one, one], sign=1)

    @as_often_as(trials)
    @given(st.dictionaries(st.sampled_from(("num-models", "1/learner", "9/x")), scalars()))
    def attempt(meta: dict[str, Any]) -> None:
        plain = {k: v for k, v in meta.items() if isinstance(v, str | int | float | bool)}
        parts = trials.attempt(
            part_models, Knowledge(valid.kind, valid.arrays, {**valid.meta, **plain})
        )
        assert parts is None or len(parts) >= 2

    attempt()
    trials.require_both()


# What was found.


def test_a_header_of_many_sides_is_not_multiplied() -> None:
    """Millions of them took hours; a header is as short as numpy writes it."""
    sides = "(" + "999999999999999999, " * 5_000 + ")"

    with pytest.raises(KnowledgeMismatch, match="NUMPY"):
        decode_array("x", wrap(npy("<f8", sides, b"")))


def test_empty_settings_are_counted() -> None:
    """Flower's own count raises for an empty text or list, and does not for any other."""
    full = {"a": 1, "bc": "text", "d": [1.0, 2.0], "e": True, "f": ["x", "yz"]}
    content = RecordDict({"config": ConfigRecord({**full, "no": "", "non": b"", "none": []})})

    assert count_bytes(content) == ConfigRecord(full).count_bytes() + len("nononnone")


@pytest.mark.parametrize("number", [True, 0, -1, 2**60, 1.0, "1"])
def test_a_party_number_is_a_whole_number(number: object) -> None:
    """Flags are whole numbers in Python, and no numbers of parties."""
    exchange = recorded("fedkt")[0]
    content = exchange.replies[1].content
    meta = ConfigRecord({**content[keys.META], keys.PARTITION_ID: number})
    reply = Message(RecordDict({**content, keys.META: meta}), reply_to=exchange.sent[1])
    arguments = (exchange.sent[1], reply, "votes", 2**20, lambda known: known)

    if number == 0 and type(number) is int:
        assert parse_reply(*arguments).partition_id == 0
    else:
        with pytest.raises(KnowledgeMismatch, match="partition-id"):
            parse_reply(*arguments)


def test_a_flag_in_place_of_a_number_of_records_costs_the_party_its_round() -> None:
    """It was taken, and then ended the whole run when privacy was accounted for."""
    exchange = recorded("fedmd-nfdp")[0]
    content = exchange.replies[0].content
    meta = ConfigRecord({**content[keys.META], "num-records": True})
    reply = Message(RecordDict({**content, keys.META: meta}), reply_to=exchange.sent[0])
    strategy = exchange.again()

    strategy.aggregate_train(1, [reply, *exchange.replies[1:]])

    assert list(strategy.rejected_) == [exchange.sent[0].metadata.dst_node_id]


@pytest.mark.parametrize("scale", [np.array(2.0), np.zeros((0, 2)), np.array([[1.0]])])
def test_a_scale_of_another_shape_is_refused(scale: np.ndarray) -> None:
    """A single number without a side ended in an IndexError."""
    strategy = recorded("fedkd-scale")[0].again()

    with pytest.raises(KnowledgeMismatch, match="the largest logit"):
        strategy.check(Knowledge("scale", {"scale": scale}))


def test_untrusted_words_are_cut_short() -> None:
    """Neither names nor reasons of a party can fill logs and results."""
    exchange = recorded("fedkt")[0]
    content, request = exchange.replies[0].content, exchange.sent[0]
    meta = ConfigRecord({**content[keys.META], keys.LEARNER: "x" * 10**6})
    reply = Message(RecordDict({**content, keys.META: meta}), reply_to=request)
    wrong = RecordDict({"x" * 10**6: MetricRecord()})

    assert len(parse_reply(request, reply, "votes", 2**20, lambda _: 0).learner_name) <= 200
    with pytest.raises(KnowledgeMismatch) as caught:
        parse_reply(request, Message(wrong, reply_to=request), "votes", 2**20, lambda _: 0)
    assert len(str(caught.value)) < 1_000
