"""FedKT with noise: on the server (L1) and at the parties (L2)."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from clients.app import client_app
from clients.tabular.kernel import RidgeLearner
from fl_strategies import FedKT, FedKTParty, Knowledge, Party
from fl_strategies.aggregation.votes import count_votes, least_agreeing
from fl_strategies.errors import InvalidParameter, KnowledgeMismatch, RunFailed
from fl_strategies.party.role import PartyState
from fl_strategies.privacy.noise import VotePrivacy, choose_queries
from fl_strategies.strategies.fedkt.options import FedKTOptions
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import pack_labels
from simulations.runtime.local import run_local
from tests.kept import with_journal
from tests.toys import (
    PUBLIC,
    TEST,
    CentroidLearner,
    PrivatelyFitted,
    accuracy,
    hear,
    load_toy_party,
    load_with,
    toy_fedkt,
    toy_party,
    watched,
)

APP = client_app(load_toy_party)
TWO_FIVE = {"num_splits": 2, "num_teachers": 5}
L1 = {"privacy_level": "L1", "gamma": 0.1, "num_queries": 20, **TWO_FIVE}
L2 = {"privacy_level": "L2", "gamma": 0.1, "num_queries": 20, **TWO_FIVE}
CONFIDENT: dict[str, Any] = {
    "noise": "confident-gaussian",
    "sigma": 0.05,
    "threshold_sigma": 0.05,
    "num_queries": 30,
}
TWO_CLASSES = {
    "num_classes": 2,
    "learner_fn": lambda: RidgeLearner(num_classes=2),
    "num_splits": 1,
    "privacy_level": "L1",
    "noise": "laplace",
}


def run(**changes: Any) -> tuple[Any, dict[str, Any]]:
    strategy = toy_fedkt(**changes)
    result = run_local(strategy, APP, 4)
    return strategy, dict(result.train_metrics_clientapp.get(1, {}))


def config(**changes: Any) -> ConfigRecord:
    return ConfigRecord({**toy_fedkt(**changes).party_config(), keys.SEED: 0})


def aggregate(strategy: FedKT, labels: np.ndarray, num_parties: int) -> dict[str, float]:
    """Let a strategy count parties whose students all give these labels; return metrics."""
    votes = pack_labels(labels, strategy.num_classes)
    hear(strategy, *[Knowledge("votes", {"votes": votes})] * num_parties)
    strategy.charge()
    return strategy.finish()[1]


@pytest.mark.parametrize("level", [L1, L2])
@pytest.mark.parametrize("noise", ["gumbel", "laplace"])
def test_weak_noise_leaves_the_federation_useful(level: dict[str, Any], noise: str) -> None:
    """With hardly any noise the model is as good as at L0, and nothing can be promised."""
    strategy, metrics = run(**{**level, "gamma": 50.0, "noise": noise})

    assert accuracy(strategy.model_.predict(TEST[0])) > 0.85
    assert metrics[keys.EPSILON_EXAMPLE] == math.inf
    assert "too coarse" in strategy.ledger_.statement()


def test_l1_charges_one_release_a_query_with_sensitivity_s() -> None:
    """40 binary-like queries: eta = 2 s gamma each, all of them in the server's ledger."""
    strategy, metrics = run(**L1)

    ((event, count),) = strategy.ledger_.entries
    assert (event.unit, event.sensitivity, event.scale, count) == ("party", 2, 10.0, 20)
    assert metrics[keys.NUM_RELEASES] == 20
    assert metrics[keys.EPSILON_PARTY] == strategy.ledger_.get_epsilon()
    assert metrics[keys.EPSILON_EXAMPLE] == metrics[keys.EPSILON_PARTY]
    assert metrics[keys.DELTA_PARTY] == 1e-5


def test_l1_of_the_paper_has_the_known_epsilon() -> None:
    """Adult's gamma .04, s = 1, two classes, 40 queries: 0.934913 by bounded range."""
    public = np.random.default_rng(0).normal(size=(40, 2))
    strategy = toy_fedkt(**TWO_CLASSES, public=public, gamma=0.04)

    metrics = aggregate(strategy, np.ones((1, 40), int), 4)

    assert metrics[keys.EPSILON_PARTY] == pytest.approx(0.934913, abs=1e-6)


def test_l1_trains_on_the_queried_rows_only() -> None:
    """Rows that were not asked for take no part, also those that no party is sure of."""
    fitted: list[Any] = []

    run(**L1, learner_fn=watched(CentroidLearner, fitted))

    np.testing.assert_array_equal(fitted[-1][0], PUBLIC[choose_queries(60, 20, 0)])


def test_l1_answers_rows_without_any_vote() -> None:
    """Leaving out rows on which nobody is consistent would reveal who is not."""
    strategy = toy_fedkt(**{**L1, "num_queries": 60})
    disagreeing = np.stack([np.zeros(60, int), np.ones(60, int)])

    metrics = aggregate(strategy, disagreeing, 1)

    assert metrics[keys.NUM_UNLABELLED] == 0


def test_strong_noise_hides_a_unanimous_vote() -> None:
    """At gamma 1e-4 four unanimous parties lose almost all say: labels are near uniform."""
    public = np.zeros((3000, 2))
    strategy = toy_fedkt(public=public, privacy_level="L1", gamma=1e-4, num_splits=2)
    seen: list[Any] = []
    strategy.learner_fn = watched(CentroidLearner, seen)

    aggregate(strategy, np.full((2, 3000), 2), 4)

    shares = np.bincount(seen[0][1], minlength=3) / 3000
    np.testing.assert_allclose(shares, 1 / 3, atol=0.04)


def test_noise_does_not_come_from_the_seed() -> None:
    """Two runs of one seed label differently; two with seeded noise do not, at a price."""
    seen: list[Any] = []
    for seeded in (False, False, True, True):
        strategy = toy_fedkt(**{**L1, "num_queries": 60, "gamma": 0.01}, seeded_noise=seeded)
        strategy.learner_fn = watched(CentroidLearner, seen)
        metrics = aggregate(strategy, np.ones((2, 60), int), 4)

        assert math.isinf(metrics[keys.EPSILON_PARTY]) == seeded

    labels = [labels for _, labels, _ in seen]
    assert not np.array_equal(labels[0], labels[1])
    np.testing.assert_array_equal(labels[2], labels[3])


def test_the_data_dependent_figure_stands_beside_the_claim() -> None:
    """It is smaller for unanimous votes, and never the claim itself."""
    strategy = toy_fedkt(**TWO_CLASSES, gamma=0.5, private_diagnostics=True)

    metrics = aggregate(strategy, np.zeros((1, 60), int), 50)

    figure = metrics[keys.EPSILON_PARTY_DATA_DEPENDENT]
    assert figure < metrics[keys.EPSILON_PARTY] == strategy.ledger_.get_epsilon()


def test_the_servers_budget_stops_the_release() -> None:
    """Nothing is labelled if epsilon would exceed the budget, and the reason is kept."""
    strategy = toy_fedkt(**{**L1, "gamma": 5.0}, max_epsilon=1.0)
    reason = r"epsilon must be at most 1, the max-epsilon .* all the same: none\."
    with pytest.raises(RunFailed, match=reason):
        run_local(strategy, APP, 4)

    assert strategy.ledger_.entries == ()
    assert keys.NUM_UNLABELLED not in strategy.state.history["train"][1]


def test_answers_beyond_the_servers_budget_are_entered_all_the_same() -> None:
    """Parties have sent them: no model is made, and the ledger says what they cost."""
    strategy = toy_fedkt(**{**L2, "gamma": 5.0}, max_epsilon=1.0)
    with pytest.raises(RunFailed, match="It is recorded and nothing is made of it"):
        run_local(strategy, APP, 4)

    free = toy_fedkt(**{**L2, "gamma": 5.0})
    run_local(free, APP, 4)
    assert strategy.ledger_.entries == free.ledger_.entries != ()


def test_l2_charges_s_times_q_releases_of_sensitivity_one() -> None:
    """Each example is in every partition, so all s x Q labels count."""
    _, metrics = FedKTParty().train(toy_party(0), None, config(**L2), PartyState())

    assert metrics[keys.NUM_RELEASES] == 40
    expected = VotePrivacy(level="L2", gamma=0.1).mechanism(
        unit="example", sensitivity=1, num_classes=3, num_queries=40
    )
    assert expected.event.scale == 10.0
    assert 0 < metrics[keys.EPSILON_EXAMPLE] < metrics[keys.EPSILON_PARTY]


def test_l2_tells_the_server_the_largest_epsilon_and_nothing_about_raw_votes() -> None:
    """Never a mean; agreement of teachers and accuracy on own rows stay at home."""
    strategy = toy_fedkt(**L2)
    result = run_local(strategy, APP, 4)

    metrics = result.train_metrics_clientapp[1]
    own = [party.train[keys.EPSILON_EXAMPLE] for party in strategy.parties_.values()]
    assert metrics[keys.EPSILON_EXAMPLE] == max(own)
    assert math.isnan(metrics[keys.VOTE_AGREEMENT])
    assert keys.ACCURACY not in result.evaluate_metrics_clientapp[1]


def test_a_party_with_a_journal_keeps_its_accuracy_whatever_the_server_says(
    tmp_path: Path,
) -> None:
    """A server that calls the run L0 in its evaluate message still learns nothing."""
    party = toy_party(0)
    model = Knowledge("model", CentroidLearner().to_arrays(), {keys.LEARNER: "centroid"})

    _, open_party = FedKTParty().evaluate(party, model, config(), PartyState())
    kept = with_journal(party, tmp_path)
    _, guarded = FedKTParty().evaluate(kept, model, config(), PartyState())

    assert not math.isnan(open_party[keys.ACCURACY])
    assert math.isnan(guarded[keys.ACCURACY])


def test_l2_adds_no_second_noise_on_the_server() -> None:
    """Given equal students the server's answer is the plain vote."""
    strategy = toy_fedkt(**L2)
    seen: list[Any] = []
    strategy.learner_fn = watched(CentroidLearner, seen)

    metrics = aggregate(strategy, np.full((2, 60), 2), 4)

    ((event, count),) = strategy.ledger_.entries
    assert set(seen[0][1]) == {2}
    assert (event.unit, event.sensitivity, count) == ("example", 1, 40)
    assert keys.EPSILON_PARTY not in metrics


def test_a_target_is_met_and_hardly_undercut() -> None:
    """Calibrated noise keeps epsilon at or just below the target, at both levels."""
    for level in ("L1", "L2"):
        _, metrics = run(privacy_level=level, target_epsilon=2.0, num_queries=20)

        assert 1.95 < metrics[keys.EPSILON_EXAMPLE] <= 2.0


@pytest.mark.parametrize("level", ["L1", "L2"])
def test_gaussian_and_confident_noise_work(level: str) -> None:
    """Gaussian noise is accounted exactly; confident noise answers fewer rows."""
    plain, _ = run(privacy_level=level, noise="gaussian", sigma=0.05, num_queries=30)
    strategy, _ = run(privacy_level=level, threshold=3.5, **CONFIDENT)

    costs = [known.ledger_.bounds()["gaussian"] for known in (plain, strategy)]
    assert costs[0] < costs[1] < math.inf
    assert accuracy(strategy.model_.predict(TEST[0])) > 0.7


def test_no_answer_at_all_is_one_clear_sentence() -> None:
    """A threshold beyond the number of voters leaves nothing to learn from."""
    with pytest.raises(RunFailed, match="queries must be answered for every student"):
        run(privacy_level="L2", threshold=99.0, **CONFIDENT)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"privacy_level": "L1"}, "gamma or target_epsilon must be given, one of the two"),
        ({"privacy_level": "L2"}, "gamma or target_epsilon must be given"),
        (
            {"privacy_level": "L0", "gamma": 0.1},
            "FedKT: gamma must be omitted with these settings, which do not use it, got 0.1",
        ),
        ({**L1, "gamma": 0.0}, "gamma or target_epsilon must be given, one of the two"),
        ({**L1, "gamma": -1.0}, "gamma must be greater than 0, got -1.0"),
        ({**L1, "target_epsilon": 1.0}, "must be given, one of the two, got"),
        ({**L1, "sigma": 1.0}, "sigma must be omitted for gumbel noise, got 1.0"),
        ({**L1, "noise": "pink"}, "noise must be one of gumbel"),
        ({**L1, "delta": 1.5}, "delta must be"),
        ({**L1, "delta": 0.0}, "delta must be"),
        ({**L1, "threshold": 1.0}, "threshold must be omitted for gumbel noise"),
        ({**L1, "num_queries": 61}, "num_queries must be from 1 to 60, .* rows, got 61"),
        ({**L1, "num_queries": -1}, "num_queries must be from 1 to"),
        ({**L1, "fraction_query": 0.5}, "a known one, got 'fraction_query'"),
        ({**L1, "trim_fraction": 0.2}, r"FedKT: trim_fraction must be 0 at L1, .*, got 0\.2\."),
    ],
)
def test_wrong_use_is_refused_in_one_sentence(change: dict[str, Any], sentence: str) -> None:
    """Each mistake names its parameter, rule and value; 0 is no value of a strength."""
    with pytest.raises(InvalidParameter, match=sentence):
        toy_fedkt(**change)
    for name in ("gamma", "target_epsilon", "delta"):
        given = {"gamma": 1.0} if name == "delta" else {}
        with pytest.raises(InvalidParameter, match=f"VotePrivacy: {name} must be greater than"):
            VotePrivacy(level="L1", **{**given, name: 0.0})


def test_a_party_refuses_noise_it_cannot_read() -> None:
    """What a server sends about noise is checked like everything else."""
    asked = config(**L2)
    asked["gamma"] = -3.0

    with pytest.raises(KnowledgeMismatch, match="Server: VotePrivacy: gamma must be greater"):
        FedKTParty().train(toy_party(0), None, asked, PartyState())


def test_queries_are_drawn_by_the_seed_and_equal_on_both_sides() -> None:
    """The same seed asks for the same rows, another seed for others, in order."""
    rows = choose_queries(100, 30, seed=3)

    np.testing.assert_array_equal(rows, choose_queries(100, 30, seed=3))
    assert not np.array_equal(rows, choose_queries(100, 30, seed=4))
    assert (np.diff(rows) > 0).all()
    np.testing.assert_array_equal(choose_queries(5, 5, seed=0), np.arange(5))


class PrivatelyTrained(PrivatelyFitted, CentroidLearner):
    """A teacher that says what its training cost, as a DP-SGD learner does."""


def test_privately_trained_teachers_make_every_vote_free() -> None:
    """With DP-SGD teachers L0 has a finite epsilon: one training run per partition."""
    pytest.importorskip("dp_accounting")
    party = replace(toy_party(0), teacher_fn=PrivatelyTrained)
    asked = config(**TWO_FIVE, vote_weights="none")

    _, metrics = FedKTParty().train(party, None, asked, PartyState())

    assert metrics[keys.NUM_RELEASES] == 2
    assert 0 < metrics[keys.EPSILON_EXAMPLE] < math.inf
    assert metrics[keys.EPSILON_PARTY] == math.inf


def test_one_party_could_decide_which_others_are_counted() -> None:
    """Why L1 refuses: party 4 changes its vote on row 1, and the counts of row 0 change.

    Parties 0 and 1 are odd, and what party 4 says decides which of them is odder.
    """
    counts = []
    for spoken in (2, 1):
        votes = np.array([[2, 1], [1, 0], [0, 0], [0, 0], [0, spoken]])
        trimmed = least_agreeing(votes, 3, 0.2)
        counts.append(count_votes(np.delete(votes, trimmed, axis=0), 3)[0].tolist())

    assert counts == [[3, 1, 0], [3, 0, 1]]


def test_trimming_at_l2_costs_no_epsilon() -> None:
    """The votes are protected before they come, so choosing among them is free."""

    def lie(party: Party) -> Party:
        return replace(party, y=(party.y + 1) % 3)

    strategies, metrics = [], []
    for share in (0.0, 0.3):
        strategy = toy_fedkt(privacy_level="L2", gamma=50.0, trim_fraction=share)
        result = run_local(strategy, client_app(load_with(lie, only=2)), 4)
        strategies.append(strategy)
        metrics.append(result.train_metrics_clientapp[1])

    assert [strategy.trimmed_ for strategy in strategies] == [(), (2,)]
    assert [record["num-trimmed"] for record in metrics] == [0, 1]
    assert strategies[0].ledger_.entries == strategies[1].ledger_.entries
    assert metrics[0][keys.EPSILON_EXAMPLE] == metrics[1][keys.EPSILON_EXAMPLE]


def test_the_delta_of_the_noise_reaches_the_parties() -> None:
    """Noise that parties calibrate must be that of the server's promise."""
    privacy = VotePrivacy(level="L2", target_epsilon=2.0, delta=1e-6)
    options = FedKTOptions(privacy=privacy)

    assert FedKTOptions.received(options.to_config()).privacy == privacy
