"""Models between agents: packing, an agent's memory, and the order of chains."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_strategies import Knowledge
from fl_strategies.errors import KnowledgeMismatch
from fl_strategies.party.role import ledger_to_text
from fl_strategies.privacy.events import (
    MOST,
    DPSGDEvent,
    GaussianEvent,
    NonPrivateEvent,
    PrivacyEvent,
    event_to_json,
)
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.server.replies import (
    MAX_DISTINCT_EVENTS,
    UNCOUNTED,
    read_ledger,
    reported_epsilon,
)
from fl_strategies.strategies.codistill.options import (
    MAX_MODELS,
    NUM_MODELS,
    Chain,
    check_relayed,
    check_share,
    fill_ledger,
    has_forgotten,
    join_models,
    new_ledger,
    part_models,
    take_turns,
    wire_bytes,
)
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import encode_arrays

NOISE = GaussianEvent(unit="example", relation="replace-one", scale=2.0, l2_sensitivity=1.0)


def model(value: float, name: str = "a") -> Knowledge:
    return Knowledge("model", {"w": np.full(2, value)}, {keys.LEARNER: name, "sign": -1})


def test_joined_models_come_apart_again() -> None:
    """Order, arrays and every scalar beside them survive."""
    parts = part_models(join_models([model(1.0), model(2.0, "b/0")]))

    assert [part.meta for part in parts] == [
        {keys.LEARNER: "a", "sign": -1},
        {keys.LEARNER: "b/0", "sign": -1},
    ]
    np.testing.assert_array_equal(parts[1].arrays["w"], [2.0, 2.0])


@pytest.mark.parametrize("count", [0, -1, MAX_MODELS + 1, 1.0, True, "2"])
def test_a_number_of_models_that_cannot_be_is_refused(count: int | float | str) -> None:
    """Before anything of that size is made."""
    joined = join_models([model(1.0)])
    hostile = Knowledge(joined.kind, joined.arrays, {**joined.meta, NUM_MODELS: count})

    with pytest.raises(KnowledgeMismatch, match="num-models must be at least 1"):
        part_models(hostile)


def test_strays_are_refused_or_ignored() -> None:
    """Arrays of a model that is not there are an error; so is another kind."""
    joined = join_models([model(1.0)])

    with pytest.raises(KnowledgeMismatch, match="must belong to models 0 to 0"):
        part_models(Knowledge(joined.kind, {"7/w": np.zeros(1)}, joined.meta))
    with pytest.raises(KnowledgeMismatch, match="of kind 'votes'"):
        part_models(Knowledge("votes", joined.arrays, joined.meta))
    (part,) = part_models(Knowledge(joined.kind, joined.arrays, {**joined.meta, "9/x": 1}))
    assert "x" not in part.meta


def test_relayed_models_have_a_name_and_finite_numbers() -> None:
    """What no receiver could use is refused on the way."""
    assert check_relayed(model(1.0)) == "a"
    for meta in ({}, {keys.LEARNER: ""}, {keys.LEARNER: 3}, {keys.LEARNER: "x" * 201}):
        with pytest.raises(KnowledgeMismatch, match="learner must be a name"):
            check_relayed(Knowledge("model", {"w": np.zeros(1)}, meta))
    with pytest.raises(KnowledgeMismatch, match="arrays of a model must be given, got none"):
        check_relayed(Knowledge("model", {}, {keys.LEARNER: "a"}))


def test_a_model_has_a_share_of_a_message() -> None:
    """What is counted is never less than what the models take in one message."""
    models = [model(1.0)] * 1000
    size = wire_bytes(models)

    assert encode_arrays(join_models(models).arrays).count_bytes() <= size
    check_share(models[0], size // 1000)
    with pytest.raises(KnowledgeMismatch, match=f"at most {size // 1000 - 1} bytes"):
        check_share(models[0], size // 1000 - 1)


RAW = NonPrivateEvent(unit="example", reason="raw")


def charged(*batches: list[tuple[PrivacyEvent, int]]) -> PrivacyLedger:
    ledger = new_ledger()
    for batch in batches:
        ledger.charge_all(batch)
    return ledger


def test_a_ledger_survives_the_wire() -> None:
    """Events, their counts and in how many rounds are read as they were written."""
    ledger = charged([(NOISE, 3), (RAW, 1)], [(NOISE, 2)])

    read = read_ledger(ledger_to_text(ledger))

    assert read.entries == ((NOISE, 5), (RAW, 1))
    assert read.state_dict()["entries"] == ledger.state_dict()["entries"]


def test_ledgers_of_several_nodes_add_up() -> None:
    """Counts and rounds of equal events are summed, up to what a ledger can hold."""
    one = charged([(NOISE, 3), (RAW, MOST)])
    two = charged([(RAW, 7)], [(NOISE, 4)], [(NOISE, 4)])

    total = fill_ledger(new_ledger(), [one, two])

    assert total.entries == ((NOISE, 11), (RAW, MOST))
    assert [entry["batches"] for entry in total.state_dict()["entries"]] == [3, 1]
    assert one.entries == ((NOISE, 3), (RAW, MOST))


def ledger_text(count: object = 1, **changes: object) -> str:
    entry = {"event": {**event_to_json(NOISE), **changes}, "count": count, "batches": 1}
    return json.dumps({**new_ledger().state_dict(), "entries": [entry]})


@pytest.mark.parametrize(
    "text",
    [
        *(None, 3, "", "{}", "[]", "[1]", "[[1, 2]]", "[" * 90_000, " " * 200_000),
        ledger_to_text(new_ledger()),
        ledger_text(0),
        ledger_text(1.5),
        ledger_text(True),
        ledger_text(MOST + 1),
        ledger_text(scale=-1),
        ledger_text(unit="party"),
    ],
    ids=lambda text: str(text)[:12],
)
def test_events_that_were_not_written_here_are_refused(text: object) -> None:
    """A stranger's text is one clear error, whatever is in it."""
    assert read_ledger(ledger_text()).entries == ((NOISE, 1),)
    with pytest.raises(KnowledgeMismatch, match="privacy events must be"):
        read_ledger(text)


def sgd(**changes: object) -> DPSGDEvent:
    settings = {"noise_multiplier": 2.0, "records": 40, "batch_size": 8, "steps": 50}
    return DPSGDEvent(**{**settings, **changes})  # type: ignore[arg-type]


def read_back(*entries: tuple[PrivacyEvent, int]) -> tuple[tuple[PrivacyEvent, int], ...]:
    return read_ledger(ledger_to_text(charged([*entries]))).entries


def test_of_too_many_events_the_rest_counts_as_unprotected() -> None:
    """Two hundred kinds of training would keep the accountant busy for minutes."""
    events = [(sgd(steps=number), 2) for number in range(1, 201)]

    found = read_back(*events)

    assert len(found) <= MAX_DISTINCT_EVENTS + 1
    assert found[-1][0] == UNCOUNTED
    assert sum(count for _, count in found) == 400
    few = [(replace(NOISE, scale=2.0 + number), 1) for number in range(MAX_DISTINCT_EVENTS)]
    assert read_back(*few) == tuple(few)


@pytest.mark.parametrize(
    ("event", "count"),
    [
        (sgd(noise_multiplier=0.01), 1),
        (sgd(noise_multiplier=1e100), 1),
        (sgd(steps=10**7), 1),
        (sgd(steps=10**6), 2),
        (sgd(records=MOST), 1),
        (sgd(noise_multiplier=0.3, batch_size=40, steps=10**4), 1),
        (NonPrivateEvent(unit="example", reason="x" * 1000), 1),
        (NonPrivateEvent(unit="example", reason="raw\nGuarantee: perfect"), 1),
    ],
)
def test_events_beyond_reason_count_as_unprotected(event: PrivacyEvent, count: int) -> None:
    """They cost no time and no run, and nobody is promised anything."""
    assert read_back((sgd(), 1), (event, count)) == ((sgd(), 1), (UNCOUNTED, count))


@pytest.mark.parametrize(
    "event",
    [
        sgd(),
        sgd(noise_multiplier=1.0, records=10**6, batch_size=1000, steps=10**5),
        sgd(noise_multiplier=0.5, records=10_000, batch_size=100, steps=1000),
        RAW,
        NOISE,
    ],
    ids=lambda event: str(event)[:60],
)
def test_usual_events_are_read_as_they_are(event: PrivacyEvent) -> None:
    """Common settings of private training are within all limits."""
    assert read_back((event, 1)) == ((event, 1),)


def test_ledgers_that_are_added_up_stay_within_the_limits() -> None:
    """An agent that comes back again and again cannot fill the ledger either."""
    total = new_ledger()

    for number in range(40):
        fill_ledger(total, [charged([(sgd(steps=number + 1), 1)])])

    assert len(total.entries) <= MAX_DISTINCT_EVENTS + 1
    assert total.get_epsilon() == float("inf")
    assert sum(count for _, count in total.entries) == 40


def test_a_ledger_has_forgotten_what_it_counts_less_often() -> None:
    """More of everything is memory, less of anything is not."""
    old = charged([(NOISE, 2)])
    more, other = charged([(RAW, 1), (NOISE, 3)]), charged([(RAW, 9), (NOISE, 1)])

    assert has_forgotten(old, old), "the release that it came with is missing"
    assert not has_forgotten(more, old)
    assert has_forgotten(other, old)
    assert has_forgotten(new_ledger(), old)


@pytest.mark.parametrize("told", [{}, {"epsilon-example": math.nan}, {"epsilon-example": -1}])
def test_a_claim_that_is_none_counts_as_unprotected(told: dict[str, float]) -> None:
    """Only a number of at least 0 from a party whose events protect is believed."""
    kept, both = charged([(NOISE, 1)]), charged([(NOISE, 1), (RAW, 1)])

    assert reported_epsilon({"epsilon-example": 0.5}, kept) == 0.5
    assert reported_epsilon(told, kept) == math.inf
    assert reported_epsilon({"epsilon-example": 0.5}, both) == math.inf


def test_a_chain_goes_round_and_skips() -> None:
    """The next agent follows the holder; after a failure, the one after that."""
    chain = Chain(0, 0, model(1.0))
    assert chain.sign == 1
    assert chain.next_agent([0, 1, 2]) == 1

    chain.skip(1)
    assert chain.next_agent([0, 1, 2]) == 2
    chain.skip(2)
    assert chain.next_agent([0, 1, 2]) == 1, "never the holder, who trained the model"
    assert chain.next_agent([0]) is None

    chain.follow(2, model(2.0))
    assert (chain.sign, chain.length) == (-1, 2)
    assert chain.next_agent([0, 1, 2]) == 0


@given(
    num_agents=st.integers(2, 6),
    away=st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=12),
    failing=st.sets(st.integers(0, 5)),
)
def test_chains_take_turns(num_agents: int, away: list[set[int]], failing: set[int]) -> None:
    """Whoever is away or fails: nobody trains two chains, or its own model again."""
    chains = [Chain(agent, agent, model(float(agent))) for agent in range(num_agents)]
    for absent in away:
        present = set(range(num_agents)) - absent
        turns = take_turns(chains, present)

        assert set(turns) <= present
        assert len(set(map(id, turns.values()))) == len(turns)
        assert len(present) < 2 or turns, "somebody can always continue"
        for agent, chain in turns.items():
            assert agent != chain.holder
            if agent in failing:
                chain.skip(agent)
            else:
                chain.follow(agent, model(0.0))


@given(num_agents=st.integers(2, 6), rounds=st.integers(1, 15))
def test_undisturbed_chains_go_in_step(num_agents: int, rounds: int) -> None:
    """All are of one length, and each is where its start and the round say."""
    chains = [Chain(agent, agent, model(float(agent))) for agent in range(num_agents)]
    for _ in range(rounds):
        for agent, chain in take_turns(chains, range(num_agents)).items():
            chain.follow(agent, model(0.0))

    for chain in chains:
        assert chain.length == rounds + 1
        assert chain.holder == (chain.start + rounds) % num_agents
