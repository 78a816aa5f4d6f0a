"""Noise that drowns every answer must not burn a budget unless its owner accepts it."""

import logging
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from clients.app import client_app
from fl_strategies import FedKT, FedMD, Party
from fl_strategies.errors import InvalidParameter
from fl_strategies.party.party import PartyPolicy
from fl_strategies.privacy.journal import PartyJournal
from fl_strategies.wire import keys
from tests.kept import journal_of, question
from tests.toys import PUBLIC, CentroidLearner, common_options, toy_party

L2 = {"privacy_level": "L2", "num_teachers": 5, "num_queries": 20}
LDP = {"release": "ldp", "payload": "softmax", "noise": "gaussian"}


def toy_fedkt(**changes: Any) -> FedKT:
    return FedKT.from_settings(**{**common_options(), **changes})


def toy_fedmd(**changes: Any) -> FedMD:
    return FedMD.from_settings(**{**common_options(), **changes})


@pytest.mark.parametrize(
    "settings",
    [
        {"privacy_level": "L1", "gamma": 0.1, "num_splits": 2},
        {"privacy_level": "L1", "noise": "gaussian", "sigma": 8.1, "num_splits": 2},
        {**L2, "gamma": 0.1},
        {**L2, "num_teachers": None, "target_epsilon": 0.5, "num_queries": 60},
    ],
)
def test_a_run_of_fedkt_that_buys_nothing_but_noise_does_not_start(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """More noise than votes: refused when the strategy is made, before anybody is asked."""
    with pytest.raises(InvalidParameter, match=r"noise of scale .* against \d+ votes"):
        toy_fedkt(**settings)
    with caplog.at_level(logging.WARNING, logger="flwr.fl_strategies"):
        assert isinstance(toy_fedkt(**settings, accept_noise=True), FedKT)

    assert "outweighs the answers" in caplog.text


@pytest.mark.parametrize(
    "settings",
    [
        {**LDP, "sigma": 2.1},
        {**LDP, "noise": "laplace", "gamma": 0.1},
        {**LDP, "payload": "argmax", "noise": "gumbel", "gamma": 0.4},
        {**LDP, "payload": "logits", "clipping_norm": 5.0, "sigma": 11.0},
        {**LDP, "target_epsilon": 2.0, "num_rounds_planned": 1},
    ],
)
def test_a_run_of_fedmd_that_buys_nothing_but_noise_does_not_start(
    settings: dict[str, Any],
) -> None:
    """Four parties that agree halve the noise of their mean, no more."""
    with pytest.raises(InvalidParameter, match=r"answers up to \d of 4 parties"):
        toy_fedmd(**settings)

    assert isinstance(toy_fedmd(**settings, accept_noise=True), FedMD)


def test_noise_that_leaves_something_to_hear_is_not_refused() -> None:
    """Votes that decide most labels if they agree, and answers up to the noise's scale."""
    assert toy_fedkt(**L2, gamma=0.3).options.num_teachers == 5
    assert toy_fedkt(privacy_level="L1", gamma=0.1, num_parties=15).num_parties == 15
    assert toy_fedmd(**LDP, sigma=2.0).settings.noise is not None
    assert toy_fedmd(**{**LDP, "payload": "argmax"}, sigma=1.9).settings.noise is not None


# A server that asks all the same


def ask(party: Party, config: dict[str, Any]) -> Message:
    asked = question({**config, keys.SEED: 0, keys.SERVER_ROUND: 1})
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    return client_app(lambda _: party)(asked, context)


def careful(journal: PartyJournal | None = None, **changes: Any) -> Party:
    """Return a party with a policy, whose learner must not be asked to learn."""

    class Untouched(CentroidLearner):
        def fit(self, *_args: Any, **_options: Any) -> Any:
            pytest.fail("The party must not train before it refuses.")

    party = toy_party(0)
    values = {**vars(party), "journal": journal, "learner_fn": Untouched}
    return Party(**{**values, "policy": PartyPolicy(**changes)})


@pytest.mark.parametrize("name", ["fedkt", "fedmd"])
def test_a_party_is_not_charged_for_answers_that_nobody_can_hear(
    name: str, tmp_path: Any
) -> None:
    """The server has accepted the noise; the party's own budget is not the server's to burn."""
    strategy: Any = (
        toy_fedkt(**L2, gamma=0.01, accept_noise=True)
        if name == "fedkt"
        else toy_fedmd(**LDP, sigma=60.0, accept_noise=True)
    )
    config = {**strategy.party_config(), keys.STRATEGY: name}
    plain = toy_party(0)
    journal = journal_of(plain, tmp_path, max_epsilon=4.0)

    reply = ask(careful(journal), config)

    assert "weaker than what it protects, by its policy" in str(reply.error.reason)
    assert journal.entries() == []
    willing = Party(
        **{**vars(plain), "journal": journal, "policy": PartyPolicy(allow_drowned_noise=True)}
    )
    assert not ask(willing, config).has_error()
    assert 0 < journal.epsilon() < 4


def test_a_party_counts_its_own_teachers_not_those_it_was_told_of() -> None:
    """A party of 40 records has at most 40 teachers, whatever the server counts on."""
    strategy = toy_fedkt(**{**L2, "num_teachers": 1000}, gamma=0.002)

    reply = ask(careful(), {**strategy.party_config(), keys.STRATEGY: "fedkt"})

    assert "noise of scale 500 against 40 votes for one of 3 classes" in str(reply.error.reason)


def test_the_refusal_looks_at_settings_and_at_no_vote() -> None:
    """Whether a party answers would tell something about its records otherwise."""
    strategy = toy_fedkt(**{**L2, "num_queries": len(PUBLIC)}, gamma=0.1, accept_noise=True)
    config = {**strategy.party_config(), keys.STRATEGY: "fedkt"}
    party = careful()
    alike = Party(**{**vars(party), "y": np.zeros_like(party.y)})

    reasons = [str(ask(one, config).error.reason) for one in (party, alike)]

    assert reasons[0] == reasons[1]
    assert "against 5 votes" in reasons[0]
