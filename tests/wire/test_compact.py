"""Smaller replies: the same to the bit, only where they were offered, and never a bomb."""

import itertools
import tracemalloc
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, Context, Message
from hypothesis import given, settings
from hypothesis import strategies as st

import clients.app
from clients import client_app
from fl_strategies import REGISTRY, FedAvg, FedKD, FedMD, Party
from fl_strategies.errors import InvalidParameter, KnowledgeMismatch
from fl_strategies.server.strategy import KnowledgeStrategy
from fl_strategies.wire import keys
from fl_strategies.wire import knowledge as wire
from fl_strategies.wire.knowledge import (
    ENCODING,
    ENCODINGS,
    HALF_PRECISION,
    PLAIN_BYTES,
    SCORES,
    Knowledge,
    as_meant,
    as_offered,
    count_bytes,
    decode_array,
    encode_arrays,
    offer,
)
from simulations.runtime.local import InMemoryGrid
from tests.toys import blobs, common_options, load_toy_party, torch_factory

EVERY = wire.readable()
ROWS = blobs(1500, "public", 7)[0]


def said(values: np.ndarray) -> Knowledge:
    return Knowledge(
        "scores", {SCORES: values, "class-counts": np.ones(3)}, {"contrast": "none"}
    )


def few_levels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).binomial(40, 0.4, shape).astype(np.uint8)


def sent(values: np.ndarray, encoding: str) -> Knowledge:
    return as_offered(said(values), {ENCODINGS: encoding})


# Scores.


@pytest.mark.parametrize("encoding", EVERY)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_scores_come_back_to_the_bit(encoding: str, data: st.DataObject) -> None:
    """Whatever their type, shape and order in memory; other arrays stay as they are."""
    kind = data.draw(st.sampled_from([np.uint8, np.uint16, np.float32, np.float64]))
    shape = data.draw(st.tuples(st.integers(1, 700), st.integers(1, 12)))
    values = few_levels(*shape).astype(kind)
    values = np.asfortranarray(values) if data.draw(st.booleans()) else values
    small = sent(values, encoding)
    back = as_meant(small, values.nbytes, half=False).arrays

    assert back[SCORES].dtype == values.dtype
    assert (back[SCORES] == values).all()
    assert back["class-counts"] is small.arrays["class-counts"]
    if ENCODING in small.meta:
        assert small.arrays[SCORES].nbytes < values.nbytes


def test_levels_take_less_than_a_ninth_of_float64() -> None:
    """S = 200 levels of logits: at most 1/9.5 of float64, counted as Flower counts them."""
    rng = np.random.default_rng(1)
    logits = np.clip(rng.normal(0.0, 2.2, (20_000, 10)), -10, 10)
    codes = np.rint((logits + 10) * 199 / 20).astype(np.uint8).reshape(-1)

    for encoding in EVERY:
        small = encode_arrays({SCORES: sent(codes, encoding).arrays[SCORES]})
        assert logits.nbytes / small.count_bytes() > 9.5


def test_what_does_not_pay_travels_as_it_is() -> None:
    """Noise cannot be compressed, and a few bytes are not worth it."""
    noise = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)

    for values in (noise, few_levels(wire.LEAST_BYTES - 1)):
        assert sent(values, "zstd,zlib").meta == {"contrast": "none"}


@pytest.mark.parametrize("offered", [None, "", "lzma,brotli", 7, "azstd", b"zlib"])
def test_nothing_known_is_offered(offered: Any) -> None:
    """A party answers an older server, and any other word, as ever."""
    plain = said(few_levels(5000))

    assert as_offered(plain, {} if offered is None else {ENCODINGS: offered}) is plain


def test_the_best_that_both_know_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zstd is there where pyarrow is."""
    assert EVERY == ("zstd", "zlib")
    assert sent(few_levels(5000), "zlib,zstd").meta[ENCODING] == "zstd"
    assert sent(few_levels(5000), "zlib").meta[ENCODING] == "zlib"
    monkeypatch.setattr(wire, "_zstd", lambda: None)
    assert sent(few_levels(5000), "zlib,zstd").meta[ENCODING] == "zlib"
    assert offer(100, half=False, kept=False) == {ENCODINGS: "zlib"}


def test_a_kept_run_asks_for_what_any_machine_reads() -> None:
    """Replies on disk may be read where pyarrow is not installed."""
    assert offer(100, half=False, kept=True) == {ENCODINGS: "zlib"}
    assert offer(0, half=False, kept=True) == {}


# Hostile replies.


def compressed(encoding: str, plain: bytes) -> np.ndarray:
    return np.frombuffer(wire._compressed(encoding, plain), np.uint8)


def plain_bytes(values: np.ndarray) -> bytes:
    return FlowerArray(values).data


def declared(encoding: object, size: object, packed: np.ndarray) -> Knowledge:
    meta: dict[str, Any] = {ENCODING: encoding, PLAIN_BYTES: size}
    return Knowledge("scores", {SCORES: packed}, meta)


@pytest.mark.parametrize("encoding", EVERY)
@pytest.mark.parametrize("honest", [True, False])
def test_a_bomb_is_refused_before_room_is_made_for_it(encoding: str, honest: bool) -> None:
    """64 MB in a few kilobytes, whether the sender tells its size or another."""
    limit, size = 10_000, 2**26
    bomb = compressed(encoding, plain_bytes(np.zeros(size, np.uint8)))
    assert bomb.nbytes < 100_000
    reply = declared(encoding, size if honest else limit, bomb[:limit])
    whole = declared(encoding, size if honest else limit, bomb)

    tracemalloc.start()
    for knowledge in (reply, whole):
        with pytest.raises(KnowledgeMismatch, match=PLAIN_BYTES if honest else "compressed"):
            as_meant(knowledge, limit, half=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * limit


@pytest.mark.parametrize("encoding", EVERY)
def test_other_bytes_are_refused(encoding: str) -> None:
    """Cut, continued, damaged, of another size, or no array inside: one sentence each."""
    plain = plain_bytes(few_levels(5000))
    packed, size = compressed(encoding, plain), len(plain)
    damaged = packed.copy()
    damaged[:4] ^= 255
    garbage = compressed(encoding, b"x" * 5000)
    large = plain_bytes(np.zeros(9000, np.uint8))[:5000]

    for wrong in (
        declared(encoding, size, packed[:-3]),
        declared(encoding, size, np.concatenate([packed, packed[:50]])),
        declared(encoding, size, damaged),
        declared(encoding, size - 1, packed),
        declared(encoding, size + 1, packed),
        declared(encoding, 5000, garbage),
        declared(encoding, 5000, compressed(encoding, large)),
        declared(encoding, size, packed.astype(np.int8)),
        declared(encoding, size, packed[None]),
        declared(encoding, size, np.tile(packed, 9)),
        declared(encoding, 0, packed),
        declared(encoding, True, packed),
        declared(encoding, "5128", packed),
        declared("lzma", size, packed),
        declared(3, size, packed),
        Knowledge("scores", {}, {ENCODING: encoding, PLAIN_BYTES: size}),
    ):
        with pytest.raises(KnowledgeMismatch):
            as_meant(wrong, size, half=False)


def test_what_was_not_offered_is_refused() -> None:
    small, model = (
        sent(few_levels(5000), "zlib"),
        Knowledge("model", {}, {HALF_PRECISION: True}),
    )

    with pytest.raises(KnowledgeMismatch, match="must be one that was offered"):
        as_meant(small, 0, half=False)
    with pytest.raises(KnowledgeMismatch, match="must be what was offered"):
        as_meant(model, 5000, half=False)
    with pytest.raises(KnowledgeMismatch, match="must be what was offered"):
        as_meant(Knowledge("model", {}, {HALF_PRECISION: "yes"}), 0, half=True)


@pytest.mark.parametrize("encoding", EVERY)
@settings(max_examples=60, deadline=None)
@given(packed=st.binary(max_size=300), size=st.integers(-1, 400))
def test_random_bytes_are_refused_or_an_array(encoding: str, packed: bytes, size: int) -> None:
    try:
        found = as_meant(
            declared(encoding, size, np.frombuffer(packed, np.uint8)), 100, half=False
        )
    except KnowledgeMismatch:
        return
    assert found.arrays[SCORES].nbytes <= size


# Whole runs.


def many_rows(context: Context) -> Party:
    return replace(load_toy_party(context), public=ROWS)


def options(**changes: object) -> dict[str, Any]:
    return {**common_options(), "public": ROWS, **changes}


class Listening(InMemoryGrid):
    """Keeps questions and answers."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.questions: list[Message] = []
        self.answers: list[Message] = []

    def push_messages(self, messages: Any) -> Any:
        messages = list(messages)
        self.questions += messages
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Any) -> list[Message]:
        replies = super().pull_messages(message_ids)
        self.answers += replies
        return replies


def run(strategy: KnowledgeStrategy[Any], **start: Any) -> Listening:
    grid = Listening(client_app(many_rows), 4)
    strategy.start(grid, ArrayRecord(), num_rounds=1, **start)
    assert not strategy.rejected_
    return grid


def declared_by(grid: Listening, key: str) -> list[object]:
    metas = [reply.content.config_records[keys.META] for reply in grid.answers]
    return [meta[key] for meta in metas if key in meta]


STRATEGIES: Mapping[str, Callable[[], KnowledgeStrategy[Any]]] = {
    "fedkd": lambda: FedKD.from_settings(**options()),
    "fedkd-counts": lambda: FedKD.from_settings(**options(weights="counts")),
    "fedkd-floats": lambda: FedKD.from_settings(**options(num_levels=0, weights="uniform")),
    "fedmd": lambda: FedMD.from_settings(**options(payload="softmax")),
}


def first_of_all(known: int) -> Callable[[Knowledge, Any], Knowledge]:
    """Return what the first so many replies are made smaller by, and no others."""
    numbers = itertools.count()

    def some(knowledge: Knowledge, config: Any) -> Knowledge:
        return as_offered(knowledge, config) if next(numbers) < known else knowledge

    return some


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_results_are_the_same_with_parties_that_know_nothing_of_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compressed, plain, or some parties each: the same model, and true byte counts."""
    found = {}
    for known in (4, 2, 0):
        with monkeypatch.context() as patch:
            patch.setattr(clients.app, "as_offered", first_of_all(known))
            strategy = STRATEGIES[name]()
            grid = run(strategy)
        training = [a for a in grid.answers if a.metadata.message_type == "train"]
        total = strategy.state.history["train"][1][keys.NUM_BYTES_SENT]
        assert total == sum(count_bytes(answer.content) for answer in training)
        assert len(declared_by(grid, ENCODING)) == known
        found[known] = strategy.model_.logits(ROWS[:50]).tobytes(), total

    assert found[4][0] == found[2][0] == found[0][0]
    assert found[4][1] < found[2][1] < found[0][1]


@pytest.mark.parametrize(
    ("changes", "offered"),
    [
        ({}, True),
        ({"weights": "uniform"}, True),
        ({"weights": "uniform", "gamma": 0.5}, False),
        ({"weights": "noisy-counts", "gamma": 0.5}, False),
    ],
)
def test_sizes_tell_nothing_where_only_the_server_may_know_the_scores(
    changes: dict[str, object], offered: bool
) -> None:
    """With noise at the server nobody else learns how well the exact scores compress."""
    grid = run(FedKD.from_settings(**options(**changes)))
    questions = [q for q in grid.questions if q.metadata.message_type == "train"]

    assert all(
        (ENCODINGS in q.content.config_records[keys.CONFIG]) == offered for q in questions
    )
    assert bool(declared_by(grid, ENCODING)) == offered


def test_labels_and_final_models_stay_as_they_are() -> None:
    """Packed labels are as small as they can be, and evaluation asks for nothing."""
    grid = run(FedMD.from_settings(**options()))

    assert not declared_by(grid, ENCODING)
    assert not any(ENCODINGS in q.content.config_records[keys.CONFIG] for q in grid.questions)


# Models in half precision.


def test_only_float32_that_fits_is_halved() -> None:
    """What is large, not finite or of another type travels as it is, and all come back."""
    rng = np.random.default_rng(0)
    arrays = {
        "weights": rng.normal(size=(30, 4)).astype(np.float32),
        "large": np.array([1.0, 70_000.0], np.float32),
        "broken": np.array([1.0, np.nan], np.float32),
        "exact": rng.normal(size=5),
        "whole": np.arange(5),
    }
    small = as_offered(Knowledge("model", arrays), {HALF_PRECISION: True})
    back = as_meant(small, 0, half=True).arrays

    assert {name for name, a in small.arrays.items() if a.dtype == np.float16} == {"weights"}
    np.testing.assert_allclose(back["weights"], arrays["weights"], rtol=2**-10, atol=1e-6)
    assert back["weights"].dtype == np.float32
    assert all(back[name] is arrays[name] for name in ("large", "broken", "exact", "whole"))


def test_strategies_without_models_have_no_precision() -> None:
    strategy = FedKD.from_settings(**options(half_precision=True))

    with pytest.raises(InvalidParameter, match="half_precision must be false unless parties"):
        strategy.start(Listening(client_app(many_rows), 4), ArrayRecord(), num_rounds=1)


def test_zlib_bombs_of_many_layers_cost_what_was_asked_for() -> None:
    """Data that expand again after they have been expanded stay bytes."""
    inner = zlib.compress(b"\0" * 2**20)
    plain = plain_bytes(np.frombuffer(inner, np.uint8))
    reply = declared("zlib", len(plain), np.frombuffer(zlib.compress(plain, 0), np.uint8))

    with pytest.raises(KnowledgeMismatch, match="a row of at most"):
        as_meant(reply, len(plain), half=False)


def network() -> Any:
    pytest.importorskip("torch")
    return torch_factory(64, epochs=5, batch_size=16)()


def with_network(context: Context) -> Party:
    return replace(load_toy_party(context), learner_fn=network, learner_name="net")


MODELS = ("fedavg", "scaffold", "feddf", "fedgen", "avgkd", "ekd", "fens", "fedkt")


@pytest.mark.parametrize("name", MODELS)
def test_models_travel_in_half_precision(name: str) -> None:
    """Uploads of float32 networks are about half as large, and results nearly the same."""
    found = []
    for half in (False, True):
        given = {**common_options(), "learner_fn": network, "learner_name": "net"}
        if name == "fedkt":
            given["exchange"] = "models"
        strategy = REGISTRY[name].strategy.from_settings(**given, half_precision=half)
        grid = Listening(client_app(with_network), 4)
        strategy.start(grid, ArrayRecord(), num_rounds=1)
        assert not strategy.rejected_
        first = [a for a in grid.answers if a.metadata.message_type == "train"][:4]
        assert len([m for m in declared_by(grid, HALF_PRECISION) if m]) == (4 if half else 0)
        found.append([count_of(answer) for answer in first])
    halved = np.array(found[1]) / np.array(found[0])

    assert (halved < 0.75).all()


def count_of(answer: Message) -> int:
    """Return the bytes of all arrays, without what numpy and Flower write before them."""
    arrays = [decode_array("", a) for a in answer.content.array_records[keys.ARRAYS].values()]
    return sum(array.nbytes for array in arrays)


def test_a_resumed_run_keeps_its_precision() -> None:
    given = {**common_options(), "learner_fn": network, "learner_name": "net"}
    plain, half = (FedAvg.from_settings(**given, half_precision=h) for h in (False, True))

    assert HALF_PRECISION not in plain.identity()
    assert half.identity() == {**plain.identity(), HALF_PRECISION: True}
