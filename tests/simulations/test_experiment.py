import sys
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from clients import BoostedTreesLearner
from fl_strategies import FedKT, Party
from fl_strategies.errors import InvalidParameter
from simulations import federation as experiment
from simulations.config import Settings
from simulations.data.sets import Dataset, Request, load_dataset
from simulations.deploy.server_app import DeployedFederation
from simulations.federation import load_federation
from simulations.runtime.client_app import app, load_party, read_settings
from simulations.runtime.local import run_local

SETTINGS = Settings.of(num_parties=5, num_trees=5, learner="random-forest,decision-tree")


def test_parties_share_out_the_private_rows() -> None:
    """Every private row belongs to exactly one party, and learners are taken in turn."""
    federation = load_federation(SETTINGS)
    parties = [federation.party(number) for number in range(5)]

    rows = np.sort(np.concatenate(federation.rows))
    np.testing.assert_array_equal(rows, np.arange(len(federation.dataset.y_train)))
    assert sum(len(party.y) for party in parties) == len(rows)
    names = [party.learner_name for party in parties]
    assert names == ["random-forest", "decision-tree"] * 2 + ["random-forest"]


def test_a_missing_library_takes_only_its_own_model_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where XGBoost is not installed, parties have the other usual models."""
    monkeypatch.setitem(sys.modules, "xgboost", None)

    names = load_federation(Settings.of(data="breast-cancer")).learner_names

    assert names == ("random-forest", "logistic-regression", "mlp")


@pytest.mark.parametrize("strategy", ["fedhistogram", "fedregression"])
def test_a_server_without_records_takes_public_rows_for_their_number(strategy: str) -> None:
    """As in a deployment, where nobody has to announce how many records there are."""
    whole = load_federation(Settings.of(data="breast-cancer", strategy=strategy))
    deployed = DeployedFederation(whole.settings, whole.dataset, [])

    assert deployed.strategy().options.num_records is None
    assert whole.strategy().options.num_records == sum(map(len, whole.rows))


def test_everybody_holds_the_same_public_and_test_rows() -> None:
    """And teachers are of a kind of their own where settings name one."""
    federation = load_federation(SETTINGS)
    party = federation.party(0)

    assert party.public is federation.dataset.x_public
    assert party.x_test is federation.dataset.x_test
    assert party.teacher_fn is None
    taught = Settings.of(strategy="fedkt", num_parties=2, teacher="decision-tree")
    assert load_federation(taught).party(0).teacher_fn is not None


def test_the_strategy_takes_the_settings_it_names() -> None:
    """Settings reach the constructor by their names."""
    settings = Settings.of(
        strategy="fedkt", num_splits=3, num_teachers=4, exchange="models", seed=9, num_parties=2
    )

    strategy = load_federation(settings).strategy()

    assert isinstance(strategy, FedKT)
    assert (strategy.options.num_splits, strategy.options.num_teachers) == (3, 4)
    assert (strategy.reply_kind, strategy.seed, strategy.num_parties) == ("models", 9, 2)
    assert strategy.model_name == "extra-trees"


def test_kernels_are_loaded_before_workers_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever makes the strategy, not by each worker again."""
    loaded: list[int] = []
    monkeypatch.setattr(BoostedTreesLearner, "load_kernels", lambda _: loaded.append(1))

    load_federation(SETTINGS).strategy()
    assert not loaded

    load_federation(Settings.of(num_parties=5, learner="boosted-trees")).strategy()
    assert loaded


def test_a_strategy_may_have_a_final_model_of_its_own() -> None:
    """FedHistogram's is smooth by default; one that is asked for counts."""
    settings = Settings.of(strategy="fedhistogram", num_parties=2)
    asked = settings.but(final_learner="mlp")

    names = [load_federation(each).strategy().model_name for each in (settings, asked)]

    assert names == ["random-features", "mlp"]


def test_parties_that_train_nothing_need_no_other_model() -> None:
    """Unless each is to be trained alone, to compare."""
    settings = Settings.of(strategy="fedregression", num_parties=2)
    names = [load_federation(settings.but(solo=solo)).learner_names for solo in (False, True)]

    assert names[0] == ("logistic-regression",)
    assert len(names[1]) > 1


def test_a_node_beyond_the_federation_is_refused() -> None:
    """A sixth node of five finds no data."""
    with pytest.raises(InvalidParameter, match="partition-id must be from 0 to 4, got 5"):
        load_federation(SETTINGS).party(5)


@pytest.mark.parametrize("change", [{"seed": 1}, {"beta": 5.0}, {"partition": "iid"}])
def test_settings_decide_who_holds_what(change: dict[str, Any]) -> None:
    """Another seed, concentration or scheme deals the rows differently."""
    base = load_federation(SETTINGS).rows[0]

    other = load_federation(SETTINGS.but(**change)).rows[0]

    assert not np.array_equal(base, other)


def test_central_training_is_better_than_chance() -> None:
    """The comparison on pooled data is a real model."""
    assert load_federation(SETTINGS).evaluate_pooled().metrics["accuracy"] > 0.8


def loaded(settings: Settings, partition_id: int) -> Party:
    """Return a party as a worker of Flower's simulation engine loads it for a message."""
    node_config = {"partition-id": partition_id, "num-partitions": settings.num_parties}
    run_config = dict(settings.to_run_config())
    return load_party(Context(1, partition_id, node_config, RecordDict(), run_config))


def test_parties_in_one_worker_share_the_loaded_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker reads a run's data once, keeps those of one run, and gives the same bits."""
    reads: list[str] = []

    def counted(name: str, request: Request) -> Dataset:
        reads.append(name)
        return load_dataset(name, request)

    monkeypatch.setattr(experiment, "load_dataset", counted)
    first, second = Settings.of(num_parties=3, seed=1), Settings.of(num_parties=3, seed=2)
    load_federation.cache_clear()

    parties = [loaded(first, number) for number in (0, 1, 2, 0)]
    assert reads == [first.data]
    assert all(party.public is parties[0].public for party in parties)
    loaded(second, 0)
    assert len(reads) == 2
    assert load_federation.cache_info().currsize == 1

    load_federation.cache_clear()
    alone = loaded(first, 1)
    assert alone.x.tobytes() == parties[1].x.tobytes()
    assert alone.public.tobytes() == parties[1].public.tobytes()


def test_equal_configurations_are_read_once() -> None:
    """What is read is what `from_run_config` gives, and the same object the next time."""
    config = {"strategy": "fedkt", "num-parties": 7}

    assert read_settings(config) == Settings.from_run_config(config)
    assert read_settings(dict(config)) is read_settings(config)
    assert read_settings({**config, "num-parties": 8}).num_parties == 8


def test_equal_numbers_of_other_types_are_other_settings() -> None:
    """True equals 1, but is no number of parties."""
    read_settings({"num-parties": 1})

    with pytest.raises(InvalidParameter, match="num-parties"):
        read_settings({"num-parties": True})


@pytest.mark.parametrize("final", ["random-forest", "xgboost", "logistic-regression", "mlp"])
def test_votes_and_models_end_in_the_same_bits(final: str) -> None:
    """Sending labels and sending models are the same algorithm, for models of all kinds."""
    scores = []
    for exchange in ("votes", "models"):
        settings = Settings.of(
            strategy="fedkt",
            num_parties=4,
            num_teachers=2,
            num_trees=8,
            boosting_rounds=8,
            epochs=3,
            exchange=exchange,
            final_learner=final,
            seed=2,
        )
        federation = load_federation(settings)
        strategy = federation.strategy()
        run_local(strategy, app, 4, run_config=settings.to_run_config())
        assert not strategy.rejected_
        scores.append(strategy.model_.logits(federation.dataset.x_test).tobytes())

    assert scores[0] == scores[1]
