"""What a party keeps of a run on its disk: of these records, this run, and the last answer."""

import errno
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from clients import app, client_app
from clients.app import FAILED, NO_BUDGET, run_name
from fl_strategies import FedMD, Party
from fl_strategies._compat import assign_message_id
from fl_strategies.privacy.journal import PartyJournal, data_fingerprint
from fl_strategies.wire import keys
from simulations.runtime.local import InMemoryGrid
from tests.fuzz.federations import network
from tests.toys import TEST, blobs, common_options, load_toy_party, toy_fedkt

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
        fresh = InMemoryGrid(self.client_app, NUM_PARTIES)._nodes
        self._nodes = {i: replace(n, state=fresh[i].state) for i, n in self._nodes.items()}
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
    [
        "../../x",
        "/etc/x",
        "",
        "x\n",
        "0" * 31,
        "0" * 33,
        "G" * 32,
        "0" * 32 + "\n",
        7,
        b"0" * 32,
    ],
)
def test_a_server_cannot_choose_a_path(name: Any, tmp_path: Path) -> None:
    """Whatever a run is called, nothing is written outside the party's own folder."""
    config = toy_fedkt().party_config() | {keys.SEED: 0, keys.STRATEGY: "fedkt"}
    question = RecordDict({keys.CONFIG: ConfigRecord({**config, keys.RUN_NAME: name})})
    message = Message(question, dst_node_id=2, message_type=MessageType.TRAIN)
    assign_message_id(message)
    context = Context(1, 2, {keys.PARTITION_ID: 0}, RecordDict(), {})

    reply = app_with_journals(journals(tmp_path / "party"))(message, context)

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
