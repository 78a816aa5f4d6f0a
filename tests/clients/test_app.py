"""The Flower client side: answers, runs that are kept on disk, and comparisons at home."""

import errno
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from clients import app, client_app
from clients.app import FAILED, NO_BUDGET, run_name
from fl_strategies import REGISTRY, FedKTParty, FedMD, Party
from fl_strategies._compat import assign_message_id, records_to_bytes
from fl_strategies._util import Array, IntArray
from fl_strategies.errors import InvalidParameter
from fl_strategies.party.role import PartyState
from fl_strategies.privacy.events import LaplaceEvent, NonPrivateEvent
from fl_strategies.privacy.journal import PartyJournal, data_fingerprint
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge, Scalar
from simulations.runtime.local import InMemoryGrid, run_local
from tests.fuzz.federations import network
from tests.kept import forget
from tests.toys import (
    TEST,
    CentroidLearner,
    blobs,
    common_options,
    load_toy_party,
    toy_fedkt,
    toy_party,
)


def context(state: RecordDict | None = None) -> Context:
    return Context(1, 2, {"partition-id": 0}, RecordDict() if state is None else state, {})


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


KNOWN = ", ".join(sorted([*REGISTRY, "flower"]))
LACKING: dict[str, tuple[str, RecordDict, str]] = {
    "a strategy that it knows": (
        "train",
        RecordDict({keys.CONFIG: config(strategy="steal-data")}),
        f"one this party takes part in ({KNOWN}), got 'steal-data'",
    ),
    "configuration": ("train", RecordDict(), "must hold 'config', got none"),
    "a model": (
        "evaluate",
        RecordDict({keys.CONFIG: config()}),
        "an evaluate message must carry a model, got none",
    ),
    "arrays of a model": ("evaluate", with_model(ArrayRecord()), "centroids must be (3, 2)"),
    "meta of knowledge": (
        "train",
        RecordDict({keys.CONFIG: config(), keys.ARRAYS: ArrayRecord()}),
        "must hold the records 'arrays' and 'knowledge-meta'",
    ),
}


@pytest.mark.parametrize("lacking", LACKING)
def test_a_message_that_lacks_something_is_refused(lacking: str) -> None:
    """A party takes part only in what it knows, and reads the server's words as untrusted."""
    kind, content, sentence = LACKING[lacking]

    assert sentence in reason(ask(kind, content))


def test_a_party_can_restrict_its_strategies() -> None:
    """`roles` names the strategies a party is ready for."""
    reply = ask("train", RecordDict({keys.CONFIG: config()}), roles={"mine": FedKTParty()})

    assert "(mine), got 'fedkt'" in reason(reply)


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
    centroids = FlowerArray(model.to_arrays()["centroids"])  # type: ignore[attr-defined]

    reply = ask("evaluate", with_model(ArrayRecord({"centroids": centroids})))

    metrics = reply.content.metric_records[keys.METRICS]
    assert metrics[keys.NUM_EXAMPLES] == 200
    assert metrics[keys.ACCURACY] == (model.predict(TEST[0]) == TEST[1]).mean()
    assert len(reply.content.array_records[keys.ARRAYS]) == 0


# --- runs on disk -------------------------------------------------------------------------


NUM_PARTIES = 3
NFDP = {"release": "nfdp", "num_samples": 10}


def fedmd(**changes: Any) -> FedMD:
    return FedMD.from_settings(**{**common_options(NUM_PARTIES), **changes})


def networks(**changes: Any) -> FedMD:
    """Return a FedMD whose parties continue with the weights of their last round."""
    own = {"learner_fn": network, "learner_name": "network", "payload": "softmax"}
    return fedmd(**own, epochs_initial=3, **changes)


def app_with_journals(
    journal_of: Callable[[Party], PartyJournal], change: Callable[[Party], Party] = lambda p: p
) -> ClientApp:
    def load(context: Context) -> Party:
        party = change(load_toy_party(context))
        return replace(party, journal=journal_of(party), run=str(context.run_id))

    return client_app(load)


def journals(folder: Path, **options: Any) -> Callable[[Party], PartyJournal]:
    """Return what opens the journal of a party, in a folder of its own."""
    return lambda party: PartyJournal(
        folder / str(party.partition_id),
        fingerprint=data_fingerprint(party.x, party.y),
        **options,
    )


def with_network(party: Party) -> Party:
    return replace(party, learner_fn=network, learner_name="network")


def run(strategy: FedMD, app: ClientApp, *, rounds: int = 3, grid: Any = InMemoryGrid) -> bytes:
    """Return the bits of the last consensus, in which all parties' models show."""
    strategy.start(grid(app, NUM_PARTIES), ArrayRecord(), num_rounds=rounds)
    assert strategy.rejected_ == {}
    assert strategy.consensus_ is not None
    return strategy.consensus_.tobytes()


class Amnesic(InMemoryGrid):
    """Nodes that lose their memory before every message."""

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        forget(self)
        return super().push_messages(messages)


def test_a_restarted_party_goes_on_in_the_middle_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedMD's models survive nodes that lose their memory; without the disk they do not."""
    whole = run(networks(), app_with_journals(journals(tmp_path / "whole"), with_network))
    torn = app_with_journals(journals(tmp_path / "torn"), with_network)
    assert run(networks(), torn, grid=Amnesic) == whole

    monkeypatch.setattr(app.KeptRun, "state", None)
    forgetful = networks()
    lost = app_with_journals(journals(tmp_path / "lost"), with_network)
    forgetful.start(Amnesic(lost, NUM_PARTIES), ArrayRecord(), num_rounds=1)
    assert set(forgetful.rejected_.values()) == {FAILED}


def test_two_runs_keep_apart(tmp_path: Path) -> None:
    """A run that is resumed finds its own state, not that of another one meanwhile."""
    plain = app_with_journals(journals(tmp_path / "plain"), with_network)
    expected = run(networks(checkpoint_dir=tmp_path / "whole"), plain)
    app = app_with_journals(journals(tmp_path / "parties"), with_network)
    run(networks(checkpoint_dir=tmp_path / "one"), app, rounds=1)

    grid = InMemoryGrid(app, NUM_PARTIES)
    run(networks(checkpoint_dir=tmp_path / "two", seed=9), app, grid=lambda *_: grid)
    resumed = networks(checkpoint_dir=tmp_path / "one", resume=True)

    assert run(resumed, app, grid=lambda *_: grid) == expected


def test_a_full_disk_does_not_bring_back_an_older_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is newer than the disk counts."""
    whole = run(networks(), app_with_journals(journals(tmp_path / "whole"), with_network))
    written = app.replace_file
    numbers = iter(range(100))

    def sometimes(path: Path, content: bytes) -> None:
        if next(numbers) in {NUM_PARTIES * 2, NUM_PARTIES * 3}:
            raise OSError(errno.ENOSPC, "No space left on device")
        written(path, content)

    monkeypatch.setattr(app, "replace_file", sometimes)
    full = app_with_journals(journals(tmp_path / "full"), with_network)
    assert run(networks(), full) == whole


def test_a_sample_is_of_the_records_that_paid_for_it(tmp_path: Path) -> None:
    """Records that are exchanged in the middle of a run draw, and pay, anew."""
    loaded: dict[int, int] = {}
    x, y = blobs(40, "party", 99)

    def exchanged(party: Party) -> Party:
        number = party.partition_id
        loaded[number] = loaded.get(number, 0) + 1
        return replace(party, x=x, y=y) if number == 0 and loaded[number] > 2 else party

    app = app_with_journals(journals(tmp_path, changing=True), exchanged)
    run(fedmd(**NFDP), app)

    lines = PartyJournal(
        tmp_path / "0", fingerprint=data_fingerprint(x, y), changing=True
    ).entries()
    assert [line.fingerprint == data_fingerprint(x, y) for line in lines] == [False, True]


def test_two_journals_in_one_folder_keep_apart(tmp_path: Path) -> None:
    """Each set of records pays for its own sample, and its own budget refuses."""

    def journal_of(party: Party) -> PartyJournal:
        return PartyJournal(
            tmp_path,
            fingerprint=data_fingerprint(party.x, party.y),
            name=f"set-{party.partition_id}",
            max_epsilon=0.001 if party.partition_id == 2 else None,
        )

    strategy = fedmd(**NFDP)
    strategy.start(
        InMemoryGrid(app_with_journals(journal_of), NUM_PARTIES), ArrayRecord(), num_rounds=2
    )

    assert sorted(strategy.parties_) == [0, 1]
    assert set(strategy.rejected_.values()) == {NO_BUDGET}
    sizes = [len(path.read_text().splitlines()) for path in sorted(tmp_path.glob("*.jsonl"))]
    assert sizes == [1, 1]


@pytest.mark.parametrize(
    "name",
    ["../../x", "/etc/x", "", "x\n", "0" * 31, "0" * 33, "G" * 32, f"{0:032}\n", 7, b"0" * 32],
)
def test_a_server_cannot_choose_a_path(name: Any, tmp_path: Path) -> None:
    """Whatever a run is called, nothing is written outside the party's own folder."""
    question = RecordDict({keys.CONFIG: config(**{keys.RUN_NAME: name})})
    message = Message(question, dst_node_id=2, message_type=MessageType.TRAIN)
    assign_message_id(message)
    reply = app_with_journals(journals(tmp_path / "party"))(message, context())

    assert run_name(question.config_records[keys.CONFIG]) is None
    assert not reply.has_error()
    runs = [path.name for path in tmp_path.rglob("*") if path.suffix == ".run"]
    assert runs == ["flower-1.private-data.example.run"]
    assert [path.name for path in tmp_path.iterdir()] == ["party"]


def test_the_last_model_can_be_repeated_for_each_kind_of_question(tmp_path: Path) -> None:
    """Train and evaluate are remembered apart; both repeat without a new charge."""
    app = app_with_journals(journals(tmp_path))
    first, second = fedmd(**NFDP), fedmd(**NFDP)
    run(first, app, rounds=1)

    before = (tmp_path / "0" / "private-data.example.jsonl").read_bytes()
    run(second, app, rounds=1)

    assert (tmp_path / "0" / "private-data.example.jsonl").read_bytes() == before
    assert first.model_.predict(TEST[0]).tolist() == second.model_.predict(TEST[0]).tolist()


# --- comparison at home -------------------------------------------------------------------


class Wrong(CentroidLearner):
    """Learns every class as the next one."""

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:
        return super().fit(x, (y + 1) % 3, rng=rng)


class Failing(CentroidLearner):
    """Quotes what it should not."""

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:  # noqa: ARG002
        raise ValueError("the record of Ms. Doe")


class Counting(CentroidLearner):
    """Knows how often one of its kind was trained."""

    num_fits = 0

    def fit(self, x: Array, y: IntArray, *, rng: np.random.Generator) -> Self:
        type(self).num_fits += 1
        return super().fit(x, y, rng=rng)


def delivered(flaw: int = 0, **changes: Scalar) -> Message:
    """Return the message that delivers a model which takes some test rows for others."""
    model = CentroidLearner().fit(*TEST, rng=np.random.default_rng(0))
    model.centroids = model.centroids + np.array([flaw, 0.0])
    content = RecordDict({keys.CONFIG: config(**changes)})  # type: ignore[arg-type]
    Knowledge("model", model.to_arrays(), {keys.LEARNER: "centroid"}).write(content)
    message = Message(content, dst_node_id=2, message_type="evaluate")
    assign_message_id(message)
    return message


def evaluated(
    message: Message, state: RecordDict | None = None, **changes: object
) -> RecordDict:
    party = replace(toy_party(0), **changes)  # type: ignore[arg-type]
    # The model that arrives is read by a sound learner, whatever the party's own is.
    party = replace(party, learner_name="own", catalogue={"centroid": CentroidLearner})
    reply = client_app(lambda _: party)(message, context(state))
    assert not reply.has_error()
    return reply.content


def told(content: RecordDict) -> dict[str, object]:
    return dict(content.metric_records[keys.METRICS])


@pytest.mark.parametrize(
    ("own", "flaw", "word"),
    [(Wrong, 0, "better than"), (CentroidLearner, 9, "worse than")],
)
def test_what_is_found_at_home_stays_there(
    own: Callable[[], CentroidLearner], flaw: int, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has it; the answer is the same to the byte as that of a party with no opinion."""
    message = delivered(flaw)
    with caplog.at_level(logging.INFO, "flwr.fl_strategies"):
        answer = evaluated(message, compare_at_home=True, learner_fn=own)
    assert f"Party 0: the model of this run is {word} one of its own: accuracy" in caplog.text

    for other in (
        {"compare_at_home": False},
        {"compare_at_home": True, "learner_fn": CentroidLearner},
        {"compare_at_home": True, "learner_fn": Wrong},
        {"compare_at_home": True, "learner_fn": Failing},
    ):
        assert records_to_bytes(evaluated(message, **other)) == records_to_bytes(answer)


def test_a_model_like_its_own_is_level(caplog: pytest.LogCaptureFixture) -> None:
    """One standard error of the difference decides; the same answers are no win."""
    with caplog.at_level(logging.INFO, "flwr.fl_strategies"):
        content = evaluated(delivered(), plain(), compare_at_home=True, tell_verdict=True)

    assert "level with one of its own" in caplog.text
    assert told(content)[keys.BETTER_THAN_ALONE] == 0.0


def test_an_error_at_home_is_logged_there(caplog: pytest.LogCaptureFixture) -> None:
    """Even a party that tells its verdict then tells none."""
    content = evaluated(
        delivered(), plain(), compare_at_home=True, tell_verdict=True, learner_fn=Failing
    )

    assert "the record of Ms. Doe" in caplog.text
    assert math.isnan(told(content)[keys.BETTER_THAN_ALONE])  # type: ignore[arg-type]


def test_the_own_model_is_trained_once_a_run() -> None:
    """Strategies of many rounds deliver many models."""
    Counting.num_fits, state = 0, RecordDict()
    for flaw in (0, 1, 2):
        evaluated(delivered(flaw), state, compare_at_home=True, learner_fn=Counting)

    assert Counting.num_fits == 1


def noisy() -> RecordDict:
    """Return the state of a party whose labels left it with noise."""
    state = RecordDict()
    event = LaplaceEvent(unit="example", relation="replace-one", scale=4.0, l1_sensitivity=2.0)
    PartyState(state).charge([(event, 3)], 1e-5)
    return state


def plain() -> RecordDict:
    """Return the state of a party whose labels left it without."""
    state = RecordDict()
    PartyState(state).charge([(NonPrivateEvent(unit="example", reason="labels"), 1)], 1e-5)
    return state


def test_one_bit_leaves_with_leave_only() -> None:
    """And never where privacy was promised, by the server's word or the party's own record."""
    leave = {"compare_at_home": True, "tell_verdict": True, "learner_fn": Wrong}
    noise: dict[str, Any] = {"gamma": 0.5, "vote-weights": "none"}

    assert told(evaluated(delivered(), plain(), **leave))[keys.BETTER_THAN_ALONE] == 1.0
    for answer in (
        evaluated(delivered(), noisy(), **leave),
        evaluated(delivered(), RecordDict(), **leave),  # it has not answered in this run
        evaluated(delivered(**noise, **{"privacy-level": "L1"}), plain(), **leave),
        evaluated(delivered(**noise, **{"privacy-level": "L2"}), plain(), **leave),
        evaluated(delivered(), plain(), **leave, x_test=None, y_test=None),
        evaluated(delivered(), plain(), **{**leave, "tell_verdict": False}),
    ):
        assert keys.BETTER_THAN_ALONE not in told(answer)


def test_a_party_with_a_journal_tells_nothing(tmp_path: Path) -> None:
    """Not one bit, whatever its settings say; it compares all the same."""
    party = toy_party(0)
    journal = PartyJournal(
        tmp_path / "party", fingerprint=data_fingerprint(party.x, party.y), delta=1e-5
    )
    leave = {"compare_at_home": True, "tell_verdict": True, "learner_fn": Counting}
    Counting.num_fits = 0

    metrics = told(evaluated(delivered(), **leave, journal=journal))

    assert Counting.num_fits == 1
    assert keys.BETTER_THAN_ALONE not in metrics
    figures = [metrics[name] for name in ("accuracy", "balanced-accuracy", "macro-f1")]
    assert np.isnan(figures).all()


def test_the_server_averages_what_it_is_told() -> None:
    """Of four parties three say so, and one of these gained."""

    def load(context: Context) -> Party:
        party = load_toy_party(context)
        number = party.partition_id
        # Two own models learn far too little; only one of them may say that it gained.
        few = replace(party, x=party.x[:1], y=party.y[:1]) if number < 2 else party
        return replace(few, compare_at_home=True, tell_verdict=number > 0)

    result = run_local(toy_fedkt(num_splits=1, num_teachers=1), client_app(load), 4)

    metrics = result.evaluate_metrics_clientapp[1]
    assert metrics[keys.BETTER_THAN_ALONE] == pytest.approx(1 / 3)


def test_leave_without_a_comparison_is_refused() -> None:
    """There would be nothing to tell."""
    with pytest.raises(InvalidParameter, match="tell_verdict must be false without compare_at"):
        replace(toy_party(0), tell_verdict=True)
