"""What somebody tried who wanted a reported epsilon to be too small, or too large to use."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord

from clients.app import client_app
from fl_strategies import FedAvg, FedKTParty, Knowledge, KnowledgeStrategy, Party
from fl_strategies.errors import RunFailed
from fl_strategies.party.role import PartyState, ledger_of, ledger_to_text
from fl_strategies.privacy.accountant import Entry
from fl_strategies.privacy.events import DPSGDEvent, OneVoteEvent, PrivacyEvent, event_to_json
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.privacy.mechanisms import LaplaceCounts
from fl_strategies.privacy.noise import ScorePrivacy, VotePrivacy
from fl_strategies.server.replies import PartyReply
from fl_strategies.strategies.fedkt.party import deal_records
from fl_strategies.strategies.weights.restraint import LocalWeights
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import pack_labels
from simulations.runtime.local import run_local
from tests.toys import (
    CentroidLearner,
    common_options,
    load_toy_party,
    toy_fedkd,
    toy_fedkt,
    toy_party,
)

SMALL = DPSGDEvent(noise_multiplier=8.0, records=40, batch_size=8, steps=10)
LARGE = replace(SMALL, noise_multiplier=2.0)


class PrivateCentroids(CentroidLearner):
    """Says that it was trained by DP-SGD; the arithmetic of epsilon is what is tested."""

    events: tuple[tuple[PrivacyEvent, int], ...] = ((LARGE, 1),)

    @property
    def privacy_events(self) -> Sequence[Entry]:
        return self.events

    def planned_events(self, num_records: int, **_: object) -> Sequence[Entry]:  # noqa: ARG002
        return self.events


def private_party(partition_id: int) -> Party:
    return replace(toy_party(partition_id), teacher_fn=PrivateCentroids)


PRIVATE_APP = client_app(lambda c: private_party(int(c.node_config["partition-id"])))


def test_a_server_that_says_infinity_to_privately_trained_teachers() -> None:
    """The parties' DP-SGD is in the server's ledger, and both name the same epsilon."""
    strategy = toy_fedkt(vote_weights="none")
    result = run_local(strategy, PRIVATE_APP, 4)

    told = result.train_metrics_clientapp[1][keys.EPSILON_EXAMPLE]
    assert 0 < strategy.ledger_.get_epsilon() == told < math.inf
    assert "training by DP-SGD" in strategy.ledger_.statement()


def test_one_unprotected_party_among_private_ones_is_not_hidden() -> None:
    """A party without DP-SGD sends no events, and the federation promises nothing."""
    strategy = toy_fedkt(vote_weights="none")

    def load(context: Any) -> Party:
        number = int(context.node_config["partition-id"])
        return toy_party(number) if number == 2 else private_party(number)

    run_local(strategy, client_app(load), 4)

    assert strategy.ledger_.get_epsilon() == math.inf
    assert "without noise" in strategy.ledger_.statement()


def told(number: int, event: PrivacyEvent, epsilon: float, read: Any) -> PartyReply[Any]:
    """Return a reply whose events and whose own epsilon need not agree."""
    text = ledger_to_text(ledger_of([(event, 1)], 1e-5))
    return PartyReply(number, number, "", read(text), {keys.EPSILON_EXAMPLE: epsilon})


def take(strategy: KnowledgeStrategy[Any], *replies: PartyReply[Any]) -> None:
    """Let a strategy add replies that are checked."""
    for reply in replies:
        strategy.state.members[reply.node_id] = reply.partition_id, reply.partition_id
        strategy.add(reply)


def test_a_liar_cannot_put_its_harmless_events_before_those_of_honest_parties() -> None:
    """A huge epsilon told for tiny events would make the server show the tiny ones."""
    honest = ledger_of([(LARGE, 1)], 1e-5).get_epsilon()
    strategy = toy_fedkt(vote_weights="none")
    votes = pack_labels(np.ones((1, 60), int), 3)

    def read(text: str) -> Any:
        return strategy.check(Knowledge("votes", {"votes": votes}, {"privacy-events": text}))

    take(strategy, told(0, LARGE, honest, read), told(1, SMALL, 1e9, read))
    strategy.charge()
    strategy.finish()

    assert strategy.ledger_.get_epsilon() == honest


def test_a_liar_cannot_hide_events_from_averaging_either() -> None:
    """The same against the ledger of FedAvg."""
    honest = ledger_of([(LARGE, 1)], 1e-5).get_epsilon()
    strategy = FedAvg(**common_options(2))

    def read(text: str) -> LocalWeights:
        return LocalWeights({}, 1, tuple(ledger_of_text(text).entries))

    take(strategy, told(0, LARGE, honest, read), told(1, SMALL, 1e9, read))
    strategy.charge()

    assert strategy.ledger_.get_epsilon() == honest


def ledger_of_text(text: str) -> PrivacyLedger:
    return PrivacyLedger.from_state_dict(json.loads(text))


@pytest.mark.parametrize(
    "events",
    ["", "{}", "[" * 10_000, 7, json.dumps({"schema": 1}), json.dumps(event_to_json(LARGE))],
)
def test_events_that_no_ledger_has_written_are_refused(events: Any) -> None:
    """A party that sends them takes no part, whatever it claims."""
    strategy = toy_fedkt(vote_weights="none")
    votes = {"votes": pack_labels(np.ones((1, 60), int), 3)}

    with pytest.raises(Exception, match="privacy events must be as written here"):
        strategy.check(Knowledge("votes", votes, {"privacy-events": events}))


def subsets_of(party: Party) -> list[set[bytes]]:
    return [
        {party.x[row].tobytes() for row in rows}
        for subsets in deal_records(party, 2, 5, seed=0)
        for rows in subsets
    ]


def test_removing_a_record_deals_all_records_anew_and_is_not_what_is_promised() -> None:
    """A blanked record stays in its place; one that is gone moves the others."""
    party = toy_party(0)
    blank = party.x.copy()
    blank[7] = 0.0
    blanked = replace(party, x=blank)
    shorter = replace(party, x=np.delete(party.x, 7, axis=0), y=np.delete(party.y, 7))

    before = subsets_of(party)
    changed = [
        sum(a != b for a, b in zip(before, subsets_of(p), strict=True))
        for p in (blanked, shorter)
    ]

    assert changed == [2, 10]
    statement = ledger_of([(LARGE, 1)], 1e-5).statement()
    assert "excluded" not in statement
    assert "had one record been blanked" in statement
    assert "number of records is public and stays the same" in statement


def test_replacing_a_record_is_not_sold_at_the_price_of_blanking_it() -> None:
    """The statement of DP-SGD also says what the replacement of a record costs."""
    ledger = ledger_of([(LARGE, 1)], 1e-5)
    blanked = ledger.get_epsilon()
    words = ledger.statement()

    replaced = float(words.split("replaced by any other, epsilon is ")[1].split(" ")[0])
    assert 2 * blanked < replaced < 3 * blanked


SCORES = {"unit": "example", "bound": 10.0, "num_contributors": 5}


@pytest.mark.parametrize("target", [0.7, 2.0, 8.0])
@pytest.mark.parametrize("noise", ["laplace", "gaussian"])
def test_calibrated_scores_beside_counts_keep_their_target(noise: Any, target: float) -> None:
    """A target of 2 used to come to 2.09 in the ledger."""
    counts = LaplaceCounts(epsilon=0.5, l1_sensitivity=2.0).charges()
    privacy = ScorePrivacy(noise=noise, target_epsilon=target)
    mechanism = privacy.mechanism(
        **SCORES,
        num_values=3,
        num_rows=60,
        besides=counts,  # type: ignore[arg-type]
    )
    ledger = PrivacyLedger("example", max_epsilon=target)

    ledger.charge_all([*counts, *privacy.charges(mechanism, 180)])

    assert 0.99 * target < ledger.get_epsilon() <= target


@pytest.mark.parametrize("noise", ["gumbel", "laplace", "gaussian", "confident-gaussian"])
@pytest.mark.parametrize("counted", [False, True])
def test_calibrated_votes_keep_their_target(noise: Any, counted: bool) -> None:
    """Whatever noise, with and without counts beside it, in either order."""
    confident = {"threshold": 4.0, "threshold_sigma": 200.0} if "confident" in noise else {}
    counts = LaplaceCounts(epsilon=0.5, l1_sensitivity=2.0).charges() if counted else ()
    for target in (1.3, 6.0):
        privacy = VotePrivacy(level="L2", noise=noise, target_epsilon=target, **confident)
        mechanism = privacy.mechanism(
            unit="example", sensitivity=1, num_classes=6, num_queries=50, besides=counts
        )
        for charges in ([*counts, *mechanism.charges(50)], [*mechanism.charges(50), *counts]):
            ledger = PrivacyLedger("example", max_epsilon=target)
            ledger.charge_all(charges)

            assert 0.9 * target < ledger.get_epsilon() <= target


def test_fedkd_that_weighs_by_noisy_counts_keeps_its_target() -> None:
    """In a whole run with Laplace noise on the scores."""
    strategy = toy_fedkd(
        weights="noisy-counts",
        noise="laplace",
        target_epsilon=2.0,
        count_epsilon=0.5,
        max_epsilon=2.0,
    )
    run_local(strategy, client_app(load_toy_party), 4)

    assert strategy.model_
    assert 1.9 < strategy.ledger_.get_epsilon() <= 2.0


def test_a_person_with_two_records_is_told_the_delta_that_holds() -> None:
    """Epsilon doubles, and delta grows by the factor 1 + exp(epsilon)."""
    ledger = ledger_of([(LARGE, 1)], 1e-5)
    epsilon, words = ledger.get_epsilon(), ledger.statement()

    assert "with k records epsilon counts k times and delta " in words
    figures = (
        words.split("with two records epsilon is ")[1]
        .splitlines()[0]
        .strip(".")
        .split(" and delta ")
    )
    assert float(figures[0]) == pytest.approx(2 * epsilon, rel=1e-2)
    assert float(figures[1]) == pytest.approx(1e-5 * (1 + math.exp(epsilon)), rel=1e-2)


L1 = {"privacy_level": "L1", "gamma": 0.1, "num_queries": 20, "num_teachers": 5}


def test_unnoised_figures_of_votes_stay_out_of_results_unless_asked_for_by_name() -> None:
    """At L1 everybody who sees the results is to learn no more than the labels say."""
    private = (keys.VOTE_AGREEMENT, keys.CONSISTENT_FRACTION, keys.EPSILON_PARTY_DATA_DEPENDENT)
    seen = {}
    for asked in (False, True):
        strategy = toy_fedkt(**L1, private_diagnostics=asked)
        metrics = run_local(strategy, client_app(load_toy_party), 4).train_metrics_clientapp[1]
        seen[asked] = [not math.isnan(float(metrics.get(name, math.nan))) for name in private]

    assert seen == {False: [False] * 3, True: [True] * 3}


def test_a_party_sends_no_agreement_at_l1_that_nobody_asked_for() -> None:
    """It does not even leave the party."""
    config = ConfigRecord({**toy_fedkt(**L1).party_config(), keys.SEED: 0})
    _, metrics = FedKTParty().train(toy_party(0), None, config, PartyState())

    assert math.isnan(metrics[keys.VOTE_AGREEMENT])
    assert math.isnan(metrics[keys.CONSISTENT_FRACTION])


def test_counts_beside_private_teachers_are_in_the_server_s_ledger_too() -> None:
    """A party cannot leave them out of what it tells: the server enters them itself."""
    strategy = toy_fedkt(vote_weights="noisy-counts", count_epsilon=1.0)
    result = run_local(strategy, PRIVATE_APP, 4)

    told = result.train_metrics_clientapp[1][keys.EPSILON_EXAMPLE]
    alone = ledger_of([(LARGE, 1)], 1e-5).get_epsilon()
    assert alone < strategy.ledger_.get_epsilon() == told < alone + 0.6
    assert "laplace noise" in strategy.ledger_.statement()


def test_a_budget_of_the_server_counts_what_the_parties_trained() -> None:
    """With private teachers that cost more than the server allows there is no model."""
    strategy = toy_fedkt(vote_weights="none", max_epsilon=1.0)
    with pytest.raises(RunFailed, match=r"epsilon must be at most 1.* training by DP-SGD"):
        run_local(strategy, PRIVATE_APP, 4)

    assert strategy.ledger_.get_epsilon() > 1.0


def test_a_failed_round_whose_answers_nobody_could_read_is_not_forgotten() -> None:
    """What left then is unknown, also after a round that promises something."""
    strategy = toy_fedkt(vote_weights="none")
    strategy.charge(failed=True)
    run_local(strategy, PRIVATE_APP, 4)

    assert strategy.ledger_.get_epsilon() == math.inf


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e-3, 1.0, 1e149])
@pytest.mark.parametrize("num_classes", [2, 2**40])
@pytest.mark.parametrize("noise", ["gumbel", "laplace", "gaussian"])
def test_labels_with_absurd_noise_are_accounted_for_at_once(
    scale: float, num_classes: int, noise: Any
) -> None:
    """An untrusted ledger may say anything; nobody waits for it, and little noise is none."""
    event = OneVoteEvent(unit="example", noise=noise, scale=scale, num_classes=num_classes)
    start = time.monotonic()
    epsilon = ledger_of([(event, 10**6)], 1e-5).get_epsilon()

    assert time.monotonic() - start < 20
    assert epsilon == math.inf if scale < 1 else epsilon >= 0
