"""A killed run is resumed: same bits, nobody asked twice, no noise drawn twice."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp

from clients import client_app
from clients.app import MAX_RUNS
from fl_strategies import REGISTRY, FedKT, KnowledgeStrategy, Party
from fl_strategies.errors import (
    CheckpointUnavailable,
    InvalidData,
    InvalidParameter,
    NotEnoughParties,
    NotFitted,
    RunFailed,
)
from fl_strategies.privacy.events import event_from_json
from fl_strategies.server.run import Checkpoint, dump_state, load_state
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge
from tests.kept import NUM_PARTIES, Killed, MortalGrid, bits, build, figures, journal_app, start
from tests.toys import CentroidLearner, common_options, load_toy_party, load_with

PRIVATE: Sequence[tuple[str, dict[str, Any]]] = (
    ("fedkt", {"privacy_level": "L2", "gamma": 0.5}),
    ("fedkd", {"weights": "noisy-counts", "gamma": 1.0, "num_levels": 256}),
    ("fedmd", {"release": "nfdp", "num_samples": 10}),
    ("fedmd", {"release": "ldp", "noise": "gumbel", "gamma": 1.0}),
)


class Lossy(MortalGrid):
    """The server dies after the first reply has been made, and before it has it."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        super().pull_messages(message_ids)
        raise Killed


def check_ledger(
    resumed: KnowledgeStrategy[Any], plain: KnowledgeStrategy[Any], *, exact: bool
) -> None:
    """Compare what was released: where parties say what they spent, each question counts."""
    if exact:
        assert resumed.ledger_.state_dict() == plain.ledger_.state_dict()
    counts, least = dict(resumed.ledger_.entries), dict(plain.ledger_.entries)
    assert counts.keys() == least.keys()
    assert all(counts[event] >= count for event, count in least.items())


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_run_killed_anywhere_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """After a kill at any reply the result is that of a run without one, asking once each."""
    plain, grid = build(name, tmp_path / "whole"), MortalGrid(journal_app(tmp_path / "plain"))
    expected = start(plain, grid)
    total = sum(grid.asked.values())
    assert total > NUM_PARTIES

    # Every reply in one round, fewer in many; `make kills` takes any moment.
    step = {"fedkt": 1, "fedmd": 2}.get(name, 3)
    for dies_after in (*range(0, total, step), total):
        folder, parties = tmp_path / f"{dies_after}", tmp_path / f"{dies_after}-parties"
        first = MortalGrid(journal_app(parties), dies_after)
        if dies_after < total:
            with pytest.raises(Killed):
                start(build(name, folder), first)
        else:
            start(build(name, folder), first)
        # A new process on the server, a new Flower run, and nothing left of `Context.state`.
        second, resumed = MortalGrid(journal_app(parties)), build(name, folder, resume=True)
        result = start(resumed, second)

        assert bits(resumed) == bits(plain), dies_after
        assert figures(result) == figures(expected), dies_after
        check_ledger(resumed, plain, exact=name in {"fedkd", "fedmd"})
        assert set((first.asked + second.asked).values()) == {1}, dies_after
        assert first.asked + second.asked == grid.asked


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_run_without_a_kill_is_the_same_with_and_without_a_checkpoint(
    name: str, tmp_path: Path
) -> None:
    app = client_app(load_toy_party)
    plain, recorded = build(name), build(name, tmp_path)

    expected, result = start(plain, MortalGrid(app)), start(recorded, MortalGrid(app))

    assert bits(plain) == bits(recorded)
    assert set(result.train_metrics_clientapp) == set(expected.train_metrics_clientapp)


CENTRAL = {"privacy_level": "central", "target_epsilon": 3.0, "num_cells": 4}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedkt", {"privacy_level": "L1", "gamma": 0.3, "noise": "laplace"}),
        ("fedhistogram", CENTRAL),
    ],
)
def test_the_servers_noise_is_drawn_once(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Killed after the noise is drawn, a run uses it again; a new run draws another."""
    options = {**options, "accept_noise": True}
    app = client_app(load_toy_party)
    first = build(name, tmp_path / "run", **options)
    with pytest.raises(Killed):
        start(first, MortalGrid(app, NUM_PARTIES), 1)  # dies while the model is delivered

    resumed = build(name, tmp_path / "run", resume=True, **options)
    start(resumed, MortalGrid(app), 1)
    others = [build(name, tmp_path / f"{n}", **options) for n in range(3)]
    for other in others:
        start(other, MortalGrid(app), 1)

    assert bits(resumed) == bits(first)
    assert resumed.ledger_.num_releases == others[0].ledger_.num_releases
    assert len({bits(strategy) for strategy in (first, *others)}) > 1


def test_a_question_that_was_answered_costs_nothing_again(tmp_path: Path) -> None:
    """A reply that is lost after it left is repeated from disk, with the same noise."""
    options: dict[str, Any] = {"privacy_level": "L2", "gamma": 0.5}
    app = journal_app(tmp_path / "parties")

    with pytest.raises(Killed):
        start(build("fedkt", tmp_path / "run", **options), Lossy(app), 1)
    (spent,) = (tmp_path / "parties").glob("*/*.jsonl")
    before = spent.read_bytes()
    resumed = build("fedkt", tmp_path / "run", resume=True, **options)
    start(resumed, MortalGrid(app), 1)

    assert spent.read_bytes() == before
    # The server cannot know this, so its own ledger counts both questions.
    once = FedKT.from_settings(**{**common_options(NUM_PARTIES), **options})  # type: ignore[arg-type]
    start(once, MortalGrid(client_app(load_toy_party)), 1)
    assert resumed.ledger_.num_releases == 2 * once.ledger_.num_releases


def test_a_party_without_memory_spends_again(tmp_path: Path) -> None:
    """Another run, or other settings, are other questions: they are charged."""
    app = journal_app(tmp_path)
    for seed in (0, 0, 1):
        start(build("fedkt", privacy_level="L2", gamma=0.5, seed=seed), MortalGrid(app), 1)

    assert len((tmp_path / "0" / "private-data.example.jsonl").read_text().splitlines()) == 3


def test_rounds_are_counted_from_the_beginning(tmp_path: Path) -> None:
    """More rounds can be asked for later; the evaluation of a user sees the right numbers."""
    app, seen = journal_app(tmp_path / "parties"), []

    def evaluate(number: int, _: ArrayRecord) -> MetricRecord:
        seen.append(number)
        return MetricRecord({"number": number})

    plain = build("fedmd")
    start(plain, MortalGrid(journal_app(tmp_path / "plain")), 4)
    start(build("fedmd", tmp_path / "run"), MortalGrid(app), 2)
    longer = build("fedmd", tmp_path / "run", resume=True)
    result = longer.start(MortalGrid(app), ArrayRecord(), num_rounds=4, evaluate_fn=evaluate)

    assert bits(longer) == bits(plain)
    assert seen == [2, 3, 4]
    assert sorted(result.evaluate_metrics_serverapp) == [2, 3, 4]
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3, 4]
    with pytest.raises(InvalidParameter, match="num_rounds must be at least 4"):
        start(build("fedmd", tmp_path / "run", resume=True), MortalGrid(app), 2)


def test_parties_that_failed_are_asked_again_if_too_few_did_not(tmp_path: Path) -> None:
    def fail(_: Party) -> Party:
        raise ValueError("not today")

    broken = MortalGrid(client_app(load_with(fail, only=1)))
    first = build("fedkt", tmp_path, min_parties=NUM_PARTIES)
    with pytest.raises(NotEnoughParties, match=r"2 of 3 parties sent a valid reply.* resume"):
        start(first, broken, 1)
    with pytest.raises(NotFitted, match="2 of 3 parties sent a valid reply"):
        _ = first.model_

    mended = MortalGrid(client_app(load_toy_party))
    resumed = build("fedkt", tmp_path, min_parties=NUM_PARTIES, resume=True)
    start(resumed, mended, 1)

    assert resumed.rejected_ == {}
    assert [node for kind, _, node in mended.asked if kind == "train"] == [1001]


def test_a_round_that_failed_delivers_nothing_until_it_is_complete(tmp_path: Path) -> None:
    """What parties measured of an older result does not count as the new one's."""
    well = build("fedmd", tmp_path / "well", min_parties=3)
    expected = start(well, MortalGrid(journal_app(tmp_path / "plain")), 2)
    app, broken = journal_app(tmp_path / "parties"), client_app(raise_error)

    class Fallible(MortalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            ill = self.asked["train", 2, 1000] and not self.asked["train", 2, 1001]
            self.client_app = broken if ill else app
            return super().pull_messages(message_ids)

    first = Fallible(app)
    with pytest.raises(NotEnoughParties):
        start(build("fedmd", tmp_path / "run", min_parties=3), first, 2)
    assert not any(first.asked["evaluate", 2, node] for node in first.get_node_ids())
    second = MortalGrid(app)
    resumed = build("fedmd", tmp_path / "run", min_parties=3, resume=True)
    result = start(resumed, second, 2)

    assert {kind for kind, _, _ in second.asked} == {"train", "evaluate"}
    assert bits(resumed) == bits(well)
    assert figures(result) == figures(expected)


@pytest.mark.parametrize(
    ("name", "options"),
    [*PRIVATE, *((name, {}) for name in ("fedkt", "fedkd", "fedmd", "fedavg", "pkd"))],
)
def test_a_round_that_failed_is_paid_for(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """What parties told the server has left them, whether or not it could use it."""

    def load(context: Context) -> Party:
        return raise_error(context) if context.node_id == 1002 else load_toy_party(context)

    strategy = build(name, min_parties=3, **options)
    with pytest.raises(RunFailed, match="2 of 3 parties sent a valid reply and 3 are needed"):
        start(strategy, MortalGrid(client_app(load)), 1)

    # The server's own noise, which here was never drawn, is no part of what parties told.
    assert strategy.ledger_.num_releases > 0
    at_home = journal_app(tmp_path)
    start(build(name, **options), MortalGrid(at_home), 1)
    journal = tmp_path / "0" / "private-data.example.jsonl"
    told = {
        event_from_json(charge["event"])
        for line in journal.read_text().splitlines()
        for charge in json.loads(line)["charges"]
    }
    kinds = {type(event) for event, _ in strategy.ledger_.entries}
    assert kinds & {type(event) for event in told}


def raise_error(_: Context) -> Party:
    raise ValueError("not today")


def test_parties_that_answered_badly_are_asked_again(tmp_path: Path) -> None:
    """A reply that is no error, but not what was asked for, does not stay on disk."""
    app = client_app(load_toy_party)

    class Lying(MortalGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            replies = super().pull_messages(message_ids)
            for reply in replies:
                if reply.metadata.src_node_id == 1001:
                    reply.content[keys.META] = ConfigRecord({keys.KIND: "votes"})
            return replies

    failed = build("fedkt", tmp_path, min_parties=3)
    with pytest.raises(NotEnoughParties):
        start(failed, Lying(app), 1)
    assert 1001 in failed.rejected_
    grid, resumed = MortalGrid(app), build("fedkt", tmp_path, min_parties=3, resume=True)
    start(resumed, grid, 1)

    assert [node for kind, _, node in grid.asked if kind == "train"] == [1001]
    assert resumed.rejected_ == {}
    assert bits(resumed) == bits(build_and_run("fedkt", app))


def build_and_run(name: str, app: ClientApp, **options: Any) -> KnowledgeStrategy[Any]:
    strategy = build(name, **options)
    start(strategy, MortalGrid(app), 1)
    return strategy


@pytest.mark.parametrize(("name", "options"), [*PRIVATE, ("fedavg", {}), ("avgkd", {})])
def test_answers_that_were_lost_are_counted(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Parties that keep nothing may have drawn twice, and the ledger is never behind."""
    app = client_app(load_toy_party)

    with pytest.raises(Killed):
        start(build(name, tmp_path, **options), Lossy(app), 1)
    resumed = build(name, tmp_path, resume=True, **options)
    start(resumed, MortalGrid(app), 1)
    once = build_and_run(name, app, **options)

    counts = dict(resumed.ledger_.entries)
    assert any(counts[event] >= 2 * count for event, count in once.ledger_.entries)
    if options.get("release") == "nfdp":
        assert resumed.ledger_.delta > once.ledger_.delta


def test_a_reply_that_is_too_large_is_not_written(tmp_path: Path) -> None:
    strategy = build("fedkt", tmp_path, max_reply_bytes=10, min_parties=1)

    with pytest.raises(NotEnoughParties):
        start(strategy, MortalGrid(client_app(load_toy_party)), 1)

    assert "must be at most 10 bytes" in str(strategy.rejected_)
    assert max(path.stat().st_size for path in tmp_path.glob("round-*/*/*")) < 1000


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    """Another run's folder, other settings, a second start, a second server, a torn file."""
    app = client_app(load_toy_party)
    strategy = build("fedkt", tmp_path / "run")
    start(strategy, MortalGrid(app), 1)

    with pytest.raises(InvalidParameter, match="omitted to start a second time"):
        start(strategy, MortalGrid(app), 1)
    with pytest.raises(InvalidParameter, match="a new folder, or resume given"):
        start(build("fedkt", tmp_path / "run"), MortalGrid(app), 1)
    with pytest.raises(InvalidData, match="settings must be those"):
        start(build("fedkt", tmp_path / "run", resume=True, seed=1), MortalGrid(app), 1)
    with pytest.raises(InvalidData, match="settings must be those"):
        start(build("fedmd", tmp_path / "run", resume=True), MortalGrid(app), 1)
    trimmed = build("fedkt", tmp_path / "run", resume=True, trim_fraction=0.4)
    with pytest.raises(InvalidData, match="settings must be those"):
        start(trimmed, MortalGrid(app), 1)
    patient = build("fedkt", tmp_path / "run", resume=True, max_wait=1.0, min_parties=1)
    start(patient, MortalGrid(app), 1)
    with pytest.raises(InvalidParameter, match="checkpoint_dir must be given with resume"):
        build("fedkt", resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointUnavailable, match="must be on a disk"):
        start(build("fedkt", tmp_path / "file" / "run"), MortalGrid(app), 1)
    checkpoint = Checkpoint(tmp_path / "run", resume=True)
    with (
        checkpoint.opened(strategy.identity()),
        pytest.raises(CheckpointUnavailable, match="one run at a time"),
    ):
        start(build("fedkt", tmp_path / "run", resume=True), MortalGrid(app), 1)
    (tmp_path / "run" / "run.json").write_text("[]")
    with pytest.raises(InvalidData, match="as it was written"):
        start(build("fedkt", tmp_path / "run", resume=True), MortalGrid(app), 1)


L1 = {"privacy_level": "L1", "gamma": 0.1, "accept_noise": True}
LDP = {"release": "ldp", "payload": "softmax", "sigma": 9.0, "accept_noise": True}
NFDP = {"release": "nfdp", "num_samples": 4}
MORE = {"model_fns": {"another": CentroidLearner}}
PUBLIC = common_options(NUM_PARTIES)["public"]


def each(**settings: Any) -> list[dict[str, Any]]:
    """Return changes of one setting each."""
    return [{name: value} for name, value in settings.items()]


@pytest.mark.parametrize(
    ("name", "settings", "changes"),
    [
        (
            "fedkt",
            L1,
            [
                *each(gamma=0.01, noise="laplace", delta=1e-3, seeded_noise=True, seed=1),
                *each(max_epsilon=99.0, num_splits=3, num_teachers=2, num_queries=5),
                *each(public=PUBLIC[1:], exchange="models", learner_name="other"),
                {"gamma": None, "sigma": 9.0, "noise": "gaussian"},
                {"gamma": None, "target_epsilon": 3.0},
            ],
        ),
        ("fedkt", {}, [L1, {"trim_fraction": 0.2}, {"student_fns": MORE["model_fns"]}]),
        (
            "fedkd",
            {"gamma": 1.0, "weights": "uniform"},
            [
                *each(gamma=9.0, loss="l2", delta=1e-3, max_epsilon=1e9, weights="counts"),
                *each(clip=2.0, num_levels=None, rounding="stochastic", distill_epochs=2),
                {"noise": "gaussian", "gamma": None, "sigma": 1.0},
                {"loss": "kl", "temperature": 2.0},
                {"scale": "max"},
            ],
        ),
        (
            "fedkd",
            {"weights": "uniform"},
            [{"consensus": "median"}, {"consensus": "trimmed-mean"}, {"trim_fraction": 0.3}],
        ),
        (
            "fedmd",
            LDP,
            [
                *each(sigma=8.0, delta=1e-3, max_epsilon=1e9, payload="argmax"),
                {"noise": "laplace", "sigma": None, "gamma": 1.0},
                {"seeded_noise": True},
            ],
        ),
        ("fedmd", {}, [{"pretrained": {"w": np.zeros(2)}}, {"pretrained": {"w": np.ones(2)}}]),
        ("fedmd", NFDP, each(num_samples=5, with_replacement=False)),
        (
            "fedmd",
            {},
            [
                *each(epochs_digest=3, epochs_initial=3, epochs_revisit=3, num_public=4),
                *each(consensus="mean", class_share="none"),
                *(LDP, NFDP, {"consensus": "median", "payload": "softmax"}),
            ],
        ),
        ("akd", {}, [{"target_loss": "cross-entropy"}, MORE]),
        ("fedavg", {}, [{"local_epochs": 2}]),
    ],
)
def test_every_setting_is_part_of_what_a_run_is(
    name: str, settings: dict[str, Any], changes: list[dict[str, Any]]
) -> None:
    """A run that went on with less noise, or charged for more, would report a wrong epsilon."""
    strategies = [build(name, **{**settings, **change}) for change in ({}, *changes)]
    known = [json.dumps(one.identity(), sort_keys=True) for one in strategies]

    assert len(set(known)) == len(known)
    again = build(name, **settings, max_wait=1.0, max_reply_bytes=10)
    assert json.dumps(again.identity(), sort_keys=True) == known[0]


def test_the_folder_is_for_its_owner(tmp_path: Path) -> None:
    start(build("fedmd", tmp_path / "run"), MortalGrid(client_app(load_toy_party)))

    assert [path.name for path in (tmp_path / "run").glob("round-*")] == ["round-000000003"]
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
    _, _, run = (tmp_path / "run" / "run.json").read_text().partition("\n")
    assert set(json.loads(run)) == {"schema", "run-name", "settings"}


def test_a_party_keeps_few_runs_and_survives_a_damaged_one(tmp_path: Path) -> None:
    """A server that names runs cannot fill the disk, and a torn file only costs memory."""
    app = journal_app(tmp_path / "parties")
    for number in range(MAX_RUNS + 2):
        start(build("fedmd", tmp_path / f"{number}"), MortalGrid(app), 1)
    kept = sorted((tmp_path / "parties" / "0" / "runs").iterdir())
    assert len(kept) == MAX_RUNS
    for path in kept:
        assert path.stat().st_mode & 0o077 == 0
        path.write_bytes(b"torn" + path.read_bytes()[:50])

    strategy = build("fedmd", tmp_path / f"{MAX_RUNS + 1}", resume=True)
    start(strategy, MortalGrid(app), 3)

    assert strategy.rejected_ == {}


def test_plain_state_holds_numbers_and_nothing_else() -> None:
    """Objects that were not named are refused on both ways, and so are torn files."""
    model = Knowledge("model", {"w": np.eye(2)}, {"learner": "a"})
    state: dict[str, object] = {"pair": (1, [None, {2.5}]), "models": {0: model, 1: model}}
    data = dump_state(state, [Knowledge])

    loaded = load_state(data, [Knowledge])
    assert loaded["pair"] == (1, [None, {2.5}])
    assert loaded["models"][1].arrays["w"].tolist() == [[1, 0], [0, 1]]
    assert len(data) < len(dump_state({**state, "more": np.eye(2)}, [Knowledge]))
    with pytest.raises(InvalidData, match="values must be plain, got Knowledge"):
        dump_state(state)
    with pytest.raises(InvalidData, match="values must be plain, got ndarray"):
        dump_state({"a": np.array([object()])})
    with pytest.raises(InvalidData, match="as it was written"):
        load_state(data)
    with pytest.raises(InvalidData, match="as it was written"):
        load_state(data[:-30], [Knowledge])
