"""A run's configuration, or a node's own contradictions, must not get past a budget."""

import logging
from pathlib import Path

import pytest
from flwr.app import Context, Message, RecordDict

from clients.app import FAILED
from fl_strategies import Party
from fl_strategies.errors import InvalidParameter, PrivacyBudgetExceeded
from fl_strategies.privacy.events import GaussianEvent, SubsampleEvent
from fl_strategies.privacy.journal import PartyJournal
from fl_strategies.wire import keys
from simulations.config import Settings, Value
from simulations.federation import load_federation
from simulations.runtime.client_app import app, load_party
from tests.kept import question

RUN = Settings.of(
    strategy="fedkt",
    num_parties=3,
    train_rows=150,
    public_rows=20,
    test_rows=20,
    partition="iid",
    learner="random-forest",
    num_trees=3,
    privacy_level="L2",
    gamma=3.0,
)


def context(node: dict[str, Value], settings: Settings = RUN) -> Context:
    node_config: dict[str, Value] = {keys.PARTITION_ID: 0, keys.NUM_PARTITIONS: 3, **node}
    return Context(5, 1, dict(node_config), RecordDict(), dict(settings.to_run_config()))


def changed(**changes: Value) -> Settings:
    return Settings.from_run_config(RUN.to_run_config(), **changes)


def loaded(node: dict[str, Value], settings: Settings = RUN) -> Party:
    return load_party(context(node, settings))


def ask(node: dict[str, Value], settings: Settings) -> Message:
    """Ask a party of the simulation app to train as the run's own server would."""
    config = {**load_federation(settings).strategy().party_config(), keys.SEED: 0}
    asked = question({**config, keys.STRATEGY: settings.strategy, keys.SERVER_ROUND: 1})
    return app(asked, context(node, settings))


def test_a_run_with_delta_near_one_does_not_stretch_a_nodes_budget(tmp_path: Path) -> None:
    """At delta 0.999999999 labels at gamma 3 would cost nothing; the node's delta counts."""
    node: dict[str, Value] = {"state-dir": str(tmp_path), "max-epsilon": 1.0}
    generous = changed(delta=0.999999999)

    reply = ask(node, generous)

    assert reply.has_error()
    assert not list(tmp_path.glob("**/*.jsonl"))
    journal = loaded(node, generous).journal
    assert journal is not None
    assert (journal.delta, journal.max_epsilon) == (1e-5, 1.0)


def test_a_run_cannot_choose_the_budget_of_a_node_that_keeps_a_journal(tmp_path: Path) -> None:
    """A folder alone means a record without a limit; the run's wishes are not read."""
    wishes = changed(state_dir=str(tmp_path / "run"), max_epsilon=1e9, delta=0.5)

    journal = loaded({"state-dir": str(tmp_path / "own")}, wishes).journal

    assert journal is not None
    assert journal.folder == tmp_path / "own" / "party-0"
    assert (journal.max_epsilon, journal.delta) == (None, 1e-5)


def test_a_nodes_own_delta_is_the_one_that_counts(tmp_path: Path) -> None:
    """It is named beside the folder, as everything about a budget."""
    journal = loaded({"state-dir": str(tmp_path), "delta": 1e-7}, changed(delta=0.1)).journal

    assert journal is not None
    assert journal.delta == 1e-7


@pytest.mark.parametrize(
    ("node", "rule"),
    [
        ({"max-epsilon": 1.0}, "state-dir must be given with max-epsilon"),
        ({"delta": 1e-6}, "state-dir must be given with delta"),
        ({"max-epsilon": -1.0, "state-dir": "/s"}, "max-epsilon must be at least 0"),
        ({"max-epsilon": float("nan"), "state-dir": "/s"}, "max-epsilon must be finite"),
        ({"max-epsilon": "1", "state-dir": "/s"}, "max-epsilon must be a number"),
        ({"delta": 1.0, "state-dir": "/s"}, "delta must be greater than 0 and below 1"),
        ({"state-dir": "relative"}, "state-dir must be an absolute path"),
        ({"max-epsilom": 1.0}, "keys must be among"),
    ],
)
def test_a_node_that_contradicts_itself_takes_no_part(
    node: dict[str, Value], rule: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A budget without a journal is none: its log says so, and nothing leaves."""
    wishes = changed(state_dir=str(tmp_path))
    with pytest.raises(InvalidParameter, match=rule):
        loaded(node, wishes)
    with caplog.at_level(logging.ERROR, logger="flwr.fl_strategies"):
        reply = ask(node, wishes)

    assert rule in caplog.text
    assert reply.error.reason == FAILED
    assert rule not in str(reply.error.reason)


def test_a_simulation_may_still_give_its_parties_journals(tmp_path: Path) -> None:
    """Where no node says anything, the experiment's own settings decide."""
    settings = changed(state_dir=str(tmp_path), max_epsilon=7.0, delta=1e-4)

    journal = loaded({}, settings).journal

    assert journal is not None
    assert (journal.max_epsilon, journal.delta) == (7.0, 1e-4)
    assert loaded({}, changed()).journal is None


# A sample that is used in the clear


def sampling(records: int = 100, samples: int = 10) -> SubsampleEvent:
    return SubsampleEvent(records=records, samples=samples, replacement=False)


def journal_with(folder: Path, sample_delta: float) -> PartyJournal:
    return PartyJournal(
        folder, fingerprint="0" * 64, max_epsilon=1.0, sample_delta=sample_delta
    )


def test_a_party_with_a_budget_joins_fedmd_with_a_sample(tmp_path: Path) -> None:
    """As docs/reliability.md says: `sample-delta` is what such a party has to set."""
    settings = Settings.from_run_config(
        RUN.to_run_config(),
        strategy="fedmd",
        release="nfdp",
        num_samples=5,
        epochs_initial=1,
        with_replacement=False,
    )
    node: dict[str, Value] = {"state-dir": str(tmp_path), "max-epsilon": 1.0}

    refused = ask(node, settings)
    joined = ask({**node, "sample-delta": 0.1}, settings)

    assert refused.has_error()
    assert not joined.has_error(), joined.error.reason
    journal = loaded({**node, "sample-delta": 0.1}, settings).journal
    assert journal is not None
    assert journal.epsilon() == 0.0
    assert journal.ledger().delta == pytest.approx(0.1 + 0.9 * 1e-5)


def test_a_second_sample_counts_as_well_as_the_first(tmp_path: Path) -> None:
    """Two samples of a tenth are a chance of 0.19; a limit of 0.15 allows one of them."""
    journal = journal_with(tmp_path, 0.15)
    journal.charge([(sampling(), 1)], run="1", purpose="nfdp")

    with pytest.raises(PrivacyBudgetExceeded):
        journal.charge([(sampling(), 1)], run="2", purpose="nfdp")
    with pytest.raises(PrivacyBudgetExceeded):
        journal_with(tmp_path / "none", 0.0).charge([(sampling(), 1)], run="1", purpose="nfdp")
    assert len(journal.entries()) == 1


def test_a_samples_delta_pays_for_no_noise(tmp_path: Path) -> None:
    """What noise may cost is judged at the same delta with a sample and without one."""
    noise = GaussianEvent(unit="example", relation="replace-one", l2_sensitivity=1.0, scale=5.0)
    alone, mixed = journal_with(tmp_path / "a", 0.5), journal_with(tmp_path / "b", 0.5)
    mixed.charge([(sampling(), 1)], run="1", purpose="nfdp")
    for journal in (alone, mixed):
        journal.charge([(noise, 1)], run="1", purpose="noise")

    assert mixed.epsilon() == pytest.approx(alone.epsilon(), rel=1e-6)
    with pytest.raises(PrivacyBudgetExceeded):
        mixed.charge([(noise, 2)], run="1", purpose="noise")
