"""The Flower client side: what a party answers, refuses and keeps to itself."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from clients.app import FAILED, client_app
from fl_strategies import REGISTRY, FedKTParty, Party
from fl_strategies._compat import assign_message_id
from fl_strategies.wire import keys
from tests.toys import TEST, load_toy_party, toy_fedkt


def context() -> Context:
    return Context(
        run_id=1,
        node_id=2,
        node_config={"partition-id": 0},
        state=RecordDict(),
        run_config={},
    )


def ask(kind: str, content: RecordDict, **options: object) -> Message:
    message = Message(content, dst_node_id=2, message_type=kind)
    assign_message_id(message)
    return client_app(load_toy_party, **options)(message, context())  # type: ignore[arg-type]


def config(**changes: str | int | float) -> ConfigRecord:
    asked = {**toy_fedkt().party_config(), keys.SEED: 0, keys.STRATEGY: "fedkt", **changes}
    return ConfigRecord(asked)  # type: ignore[arg-type]


def with_model(arrays: ArrayRecord) -> RecordDict:
    meta = ConfigRecord({keys.KIND: "model", keys.LEARNER: "centroid"})
    return RecordDict({keys.CONFIG: config(), keys.ARRAYS: arrays, keys.META: meta})


def reason(reply: Message) -> str:
    assert reply.has_error()
    assert reply.error.reason is not None
    return reply.error.reason


def test_a_party_answers_a_train_message() -> None:
    """The reply carries knowledge, identity and metrics."""
    reply = ask("train", RecordDict({keys.CONFIG: config()}))

    meta = reply.content.config_records[keys.META]
    assert meta[keys.PARTITION_ID] == 0
    assert meta[keys.LEARNER] == "centroid"
    assert reply.content.metric_records[keys.METRICS][keys.NUM_EXAMPLES] == 40


def test_an_unknown_strategy_is_refused() -> None:
    """A party takes part only in what it knows."""
    reply = ask("train", RecordDict({keys.CONFIG: config(strategy="steal-data")}))

    known = ", ".join(sorted([*REGISTRY, "flower"]))
    assert f"one this party takes part in ({known}), got 'steal-data'" in reason(reply)


def test_a_party_can_restrict_its_strategies() -> None:
    """`roles` names the strategies a party is ready for."""
    reply = ask("train", RecordDict({keys.CONFIG: config()}), roles={"mine": FedKTParty()})

    assert "(mine), got 'fedkt'" in reason(reply)


def test_a_message_without_config_is_refused() -> None:
    """There is nothing to go by."""
    assert "must hold 'config', got none" in reason(ask("train", RecordDict()))


def test_an_evaluate_message_without_model_is_refused() -> None:
    """There is nothing to evaluate."""
    reply = ask("evaluate", RecordDict({keys.CONFIG: config()}))

    assert "an evaluate message must carry a model, got none" in reason(reply)


def test_a_corrupt_model_is_refused() -> None:
    """A party reads the server's arrays as untrusted."""
    reply = ask("evaluate", with_model(ArrayRecord()))

    assert "centroids must be (3, 2)" in reason(reply)


def test_arrays_without_meta_are_refused() -> None:
    """Knowledge needs both records."""
    content = RecordDict({keys.CONFIG: config(), keys.ARRAYS: ArrayRecord()})

    assert "must hold the records 'arrays' and 'knowledge-meta'" in reason(
        ask("train", content)
    )


def foreign(_: Context) -> Party:
    raise KeyError("column 'diagnosis of Ms. Doe'")


def mislabelled(context: Context) -> Party:
    party = load_toy_party(context)
    return replace(party, y=party.y[:-1])


@pytest.mark.parametrize(
    ("load", "text"),
    [(foreign, "Ms. Doe"), (mislabelled, "y must be 40 labels, one per row, got 39")],
)
def test_an_error_about_records_keeps_its_text_at_home(
    load: Callable[[Context], Party], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server gets a sentence that is always the same; the text is in the party's log."""
    message = Message(RecordDict({keys.CONFIG: config()}), dst_node_id=2, message_type="train")
    reply = client_app(load)(message, context())

    assert reason(reply) == FAILED
    assert text in caplog.text


def test_a_party_measures_the_model_on_its_own_rows() -> None:
    """Accuracy and the number of held-out rows travel, nothing else does."""
    party = load_toy_party(context())
    model = party.learner_fn().fit(party.x, party.y, rng=np.random.default_rng(0))
    centroids = Array(model.to_arrays()["centroids"])  # type: ignore[attr-defined]

    reply = ask("evaluate", with_model(ArrayRecord({"centroids": centroids})))

    metrics = reply.content.metric_records[keys.METRICS]
    assert metrics[keys.NUM_EXAMPLES] == 200
    assert metrics[keys.ACCURACY] == (model.predict(TEST[0]) == TEST[1]).mean()
    assert len(reply.content.array_records[keys.ARRAYS]) == 0
