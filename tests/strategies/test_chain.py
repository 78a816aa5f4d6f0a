"""One strategy's final model starts another, in one run with one ledger."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message
from flwr.serverapp import strategy as flower

from clients import client_app
from fl_strategies import (
    PFNM,
    AvgKD,
    Chain,
    FedAvg,
    FedHistogram,
    FedKD,
    FedKT,
    FedMD,
    FedMoments,
    FedRegression,
    KnowledgeStrategy,
    chain,
    flower_strategy,
    write_epsilon_csv,
)
from fl_strategies.errors import InvalidData, InvalidParameter, RunFailed
from fl_strategies.privacy.events import (
    DPSGDEvent,
    GaussianEvent,
    NonPrivateEvent,
    PrivacyEvent,
    Relation,
    Unit,
)
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.release import AUDIENCES
from fl_strategies.strategies.chain import compose_ledgers
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import encode_arrays
from simulations.runtime.local import InMemoryGrid, run_local
from tests.kept import NUM_PARTIES, Killed, MortalGrid, bits, figures, journal_app
from tests.toys import (
    TEST,
    CentroidLearner,
    WatchedGrid,
    accuracy,
    arrays_in,
    common_options,
    load_toy_party,
)

APP = client_app(load_toy_party)
L2 = {"privacy_level": "L2", "target_epsilon": 4.0, "accept_noise": True}
FIRST: dict[str, tuple[type[KnowledgeStrategy[Any]], dict[str, Any]]] = {
    "fedkt": (FedKT, {}),
    "fedkt L2": (FedKT, L2),
    "fedkt L1": (FedKT, {**L2, "privacy_level": "L1"}),
    "fedkd": (FedKD, {}),
    "fedmd": (FedMD, {}),
    "fedhistogram": (FedHistogram, {"target_epsilon": 4.0, "accept_noise": True}),
    "fedregression": (FedRegression, {}),
    "fedmoments": (FedMoments, {}),
    "fedmoments L2": (FedMoments, L2),
}


def build(kind: type[KnowledgeStrategy[Any]], **changes: Any) -> Any:
    return kind.from_settings(**{**common_options(NUM_PARTIES), **changes})


def prox(**changes: Any) -> Any:
    return build(flower_strategy(flower.FedProx), **changes)


def fedkt_prox(**changes: Any) -> Chain:
    return chain(build(FedKT), prox(), num_rounds=2, **changes)


@pytest.mark.parametrize("name", FIRST)
def test_the_second_starts_from_the_firsts_model_and_adds_to_its_ledger(name: str) -> None:
    """To the bit; and every event of both is in the ledger as often as in theirs."""
    kind, options = FIRST[name]
    first, grid = build(kind, **options), WatchedGrid(APP, NUM_PARTIES)

    both = chain(first, prox(), num_rounds=2)
    both.start(grid)

    handed, _ = grid.wire[first.usual_rounds]
    expected = first.model_.to_arrays()
    assert len(handed) == NUM_PARTIES
    for message in handed:
        got = arrays_in(message)
        assert got.keys() == expected.keys()
        assert all(got[key].tobytes() == expected[key].tobytes() for key in got)
        config = message.content.config_records[keys.CONFIG]
        assert (config[keys.STRATEGY], config[keys.SERVER_ROUND]) == ("flower:FedProx", 1)
    assert accuracy(both.model_.predict(TEST[0])) > 0.85
    (own, second), total = (link.ledger_ for link in both.links), both.ledger_
    assert total.num_releases == own.num_releases + second.num_releases
    assert total.unit == (own.unit if own.unit == second.unit else "example")
    reasons = [e.reason for e, _ in second.entries if isinstance(e, NonPrivateEvent)]
    assert all(reason in total.statement() for reason in reasons)
    assert total.get_epsilon() == math.inf


def test_callbacks_and_prices_are_about_all_links(tmp_path: Path) -> None:
    """The user's function hears of every round once, and so does the file of epsilons."""
    told: list[int] = []

    both = fedkt_prox(on_round=lambda number, _: told.append(number))
    run_local(both, APP, NUM_PARTIES)
    write_epsilon_csv(both, tmp_path / "epsilon.csv")

    lines = (tmp_path / "epsilon.csv").read_text().splitlines()[1:]
    rounds = [line.split(",")[0] for line in lines if line.split(",")[1] == "1"]
    assert told == [1, 2, 3]
    assert sorted(set(rounds)) == ["1", "2", "3"]


def test_it_is_the_same_as_two_runs_by_hand() -> None:
    """The second link is what FedProx makes of the first's model as `initial_arrays`."""
    both, first, second = fedkt_prox(), build(FedKT), prox()

    result = run_local(both, APP, NUM_PARTIES)
    run_local(first, APP, NUM_PARTIES)
    arrays = encode_arrays(first.model_.to_arrays())
    second.start(InMemoryGrid(APP, NUM_PARTIES), arrays, num_rounds=2)

    assert bits(both) == bits(second)
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]
    assert both.name == "fedkt+flower:FedProx"


@pytest.mark.parametrize("name", ["fedkt L1", "fedkd", "fedhistogram L1"])
def test_a_first_link_that_trusts_the_server_leaves_the_whole_to_it(name: str) -> None:
    """Whoever is trusted once is not among those that the composition holds against."""
    trusting = {**FIRST, "fedhistogram L1": (FedHistogram, {**L2, "privacy_level": "L1"})}
    kind, options = trusting[name]

    both = chain(build(kind, **options), prox(), num_rounds=1)

    assert compose_ledgers([link.ledger_ for link in both.links]).audience == AUDIENCES["L1"]


def spent(*events: PrivacyEvent, unit: Unit = "example", **settings: Any) -> PrivacyLedger:
    ledger = PrivacyLedger(unit, **settings)
    for event in events:
        ledger.compose(event)
    return ledger


def noise(unit: Unit, scale: float, relation: Relation = "replace-one") -> GaussianEvent:
    return GaussianEvent(unit=unit, relation=relation, scale=scale, l2_sensitivity=1.0)


def training(steps: int) -> DPSGDEvent:
    return DPSGDEvent(noise_multiplier=2.0, records=1000, batch_size=10, steps=steps)


def test_links_that_promise_are_composed_as_one_mechanism() -> None:
    """Two Gaussian releases of noise s are one of noise s / sqrt(2), by arithmetic."""
    each = noise("example", 3.0)

    total = compose_ledgers([spent(each), spent(each, audience="the server")])

    one = spent(noise("example", 3.0 / math.sqrt(2)))
    assert total.get_epsilon() == pytest.approx(one.get_epsilon(), rel=1e-6)
    assert total.audience == "the server"


def test_the_party_that_has_spent_most_in_all_links_counts() -> None:
    """Not the one that has spent most in the last: events of each party are added up."""
    both = chain(build(FedAvg), prox(), num_rounds=(1, 1))
    steps = {0: (100, 10), 1: (10, 90), 2: (60, 60)}
    for position, link in enumerate(both.links):
        link.state.round = 1
        for number, own in steps.items():
            link.state.ledgers[number] = 0.0, spent(training(own[position]))

    alone = [spent(*map(training, own)).get_epsilon() for own in steps.values()]
    assert both.ledger_.get_epsilon() == pytest.approx(max(alone))


@pytest.mark.parametrize(
    ("relation", "sensitivity"), [("replace-one", 1), ("add-remove-one", 2)]
)
def test_units_that_differ_become_examples(relation: Relation, sensitivity: float) -> None:
    """Another record makes another party: what compares with no party counts twice."""
    party = spent(noise("party", 3.0, relation), unit="party")
    example = spent(noise("example", 3.0))
    one = spent(noise("example", 3.0 / math.sqrt(1 + sensitivity**2)))

    total = compose_ledgers([party, example])

    assert (total.unit, total.num_releases) == ("example", 2)
    assert total.get_epsilon() == pytest.approx(one.get_epsilon(), rel=1e-6)
    with pytest.raises(InvalidParameter, match="unit must be 'party' or 'party', got"):
        party.include([example])


def test_flowers_own_strategy_is_given_the_firsts_parties_and_learner() -> None:
    """`chain(FedKT(...), FedProx(...))` with Flower's class is the same run."""
    ours = chain(build(FedKT), prox(proximal_mu=0.5), num_rounds=2)
    theirs = chain(build(FedKT), flower.FedProx(proximal_mu=0.5, min_available_nodes=1,
                   min_train_nodes=1), num_rounds=2)  # fmt: skip

    run_local(ours, APP, NUM_PARTIES)
    run_local(theirs, APP, NUM_PARTIES)

    assert bits(ours) == bits(theirs)


def test_a_run_killed_anywhere_ends_with_the_same_bits(tmp_path: Path) -> None:
    """In either link and between them; nobody is asked twice, and the ledger is the same."""
    plain = fedkt_prox(checkpoint_dir=tmp_path / "whole")
    grid = MortalGrid(journal_app(tmp_path / "plain"))
    expected = plain.start(grid)
    total = sum(grid.asked.values())

    for dies_after in range(1, total, 5):
        folder, parties = tmp_path / f"{dies_after}", tmp_path / f"{dies_after}-parties"
        with pytest.raises(Killed):
            fedkt_prox(checkpoint_dir=folder).start(
                MortalGrid(journal_app(parties), dies_after)
            )
        second = MortalGrid(journal_app(parties))
        resumed = fedkt_prox(checkpoint_dir=folder, resume=True)
        result = resumed.start(second)

        assert bits(resumed) == bits(plain), dies_after
        assert figures(result) == figures(expected), dies_after
        assert dict(resumed.ledger_.entries).keys() == dict(plain.ledger_.entries).keys()
        assert sum(second.asked.values()) == total - dies_after


def test_another_chain_is_not_resumed(tmp_path: Path) -> None:
    """Links, their settings and all rounds but the last's must be the same."""
    with pytest.raises(Killed):
        fedkt_prox(checkpoint_dir=tmp_path).start(MortalGrid(APP, 4))

    other = chain(
        build(FedKT), prox(proximal_mu=3.0), num_rounds=2, checkpoint_dir=tmp_path, resume=True
    )
    with pytest.raises((InvalidParameter, InvalidData), match="must be"):
        other.start(MortalGrid(APP))


def test_fedmd_can_be_second(tmp_path: Path) -> None:
    """It gives the model to parties of this kind, also after a resume in its first round."""

    def make(folder: Path, **options: Any) -> Chain:
        return chain(build(FedKT), build(FedMD), num_rounds=2, checkpoint_dir=folder, **options)

    whole, plain = MortalGrid(journal_app(tmp_path / "p")), make(tmp_path / "whole")
    plain.start(whole)
    with pytest.raises(Killed):
        make(tmp_path / "run").start(
            MortalGrid(journal_app(tmp_path / "q"), 2 * NUM_PARTIES + 1)
        )
    resumed = make(tmp_path / "run", resume=True)
    resumed.start(MortalGrid(journal_app(tmp_path / "q")))

    assert bits(resumed) == bits(plain)
    assert not resumed.central


def test_a_first_link_without_a_result_ends_the_run() -> None:
    """There is no model to hand over, and the sentence is the first link's."""

    class Silent(InMemoryGrid):
        def send_and_receive(self, *_: Any, **__: Any) -> list[Message]:
            return []

    with pytest.raises(RunFailed, match="FedKT: the run must end with a result"):
        fedkt_prox().start(Silent(APP, NUM_PARTIES))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: chain(build(FedKT)), "links must be at least two strategies"),
        (lambda: chain(build(AvgKD), prox()), "a link must be one whose server makes a model"),
        (lambda: chain(build(PFNM), prox()), "a link must be one whose server makes a model"),
        (
            lambda: chain(build(FedAvg), build(FedKT)),
            "the next link must be one that can begin",
        ),
        (lambda: chain(build(FedAvg), build(PFNM)), "the next link must be one that can"),
        (
            lambda: chain(build(FedKT, learner_name="other"), prox()),
            "learner_name must be 'other' in all links",
        ),
        (
            lambda: chain(build(FedKT), prox(), num_rounds=(1, 2, 3)),
            "num_rounds must be a whole",
        ),
        (
            lambda: chain(build(FedKT, checkpoint_dir="somewhere"), prox()),
            "checkpoint_dir must be given to chain",
        ),
    ],
)
def test_links_that_do_not_fit_are_refused_at_once(make: Any, sentence: str) -> None:
    """Before anything is asked of anybody."""
    with pytest.raises(InvalidParameter, match=f"chain: {sentence}"):
        make()


def test_it_starts_once_and_refuses_wrappers() -> None:
    """Rounds belong to the links, and a wrapper around them would protect nothing."""
    both = fedkt_prox()
    run_local(both, APP, NUM_PARTIES)
    with pytest.raises(InvalidParameter, match="chain: start must be called once, got 3"):
        both.start(InMemoryGrid(APP, NUM_PARTIES))

    wrapper = flower.DifferentialPrivacyServerSideFixedClipping(fedkt_prox(), 1.0, 1.0, 3)
    with pytest.raises(InvalidParameter, match="must be run by its own start"):
        wrapper.start(InMemoryGrid(APP, NUM_PARTIES), ArrayRecord(), num_rounds=1)


def test_the_first_link_may_begin_with_a_given_model() -> None:
    """`initial_arrays` are for the first link, if it takes any."""
    given = CentroidLearner().fit(*TEST, rng=np.random.default_rng(0)).to_arrays()
    grid, both = WatchedGrid(APP, NUM_PARTIES), chain(build(FedAvg), prox(), num_rounds=(1, 1))

    both.start(grid, encode_arrays(given))

    (first, *_), _ = grid.wire[0]
    assert arrays_in(first)["centroids"].tobytes() == given["centroids"].tobytes()
    assert len(both.parties_) == NUM_PARTIES
