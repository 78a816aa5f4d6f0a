"""The ledger: composition, budget, files and the statement."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fl_strategies._util import FloatArray
from fl_strategies.errors import (
    InvalidData,
    InvalidParameter,
    PrivacyBudgetExceeded,
    StrategyError,
)
from fl_strategies.privacy import accountant
from fl_strategies.privacy.bounds.theorems import default_orders, rdp_to_epsilon
from fl_strategies.privacy.events import (
    DPSGDEvent,
    GaussianEvent,
    LaplaceEvent,
    NoisyMaxEvent,
    NonPrivateEvent,
    PrivacyEvent,
    SubsampleEvent,
    ThresholdEvent,
)
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.privacy.mechanisms import ConfidentNoisyMax, NoisyMax
from fl_strategies.privacy.noise import VOTE_NOISES, VoteMechanism, epsilon_of_votes

PARTY: Any = {"unit": "party", "relation": "replace-one"}


def votes(noise: Any = "gumbel", scale: float = 25.0, **other: Any) -> NoisyMaxEvent:
    values: dict[str, Any] = {**PARTY, "sensitivity": 1.0, "num_classes": 2, **other}
    return NoisyMaxEvent(noise=noise, scale=scale, **values)


def filled(
    unit: Any = "party", *entries: tuple[PrivacyEvent, int], **other: Any
) -> PrivacyLedger:
    ledger = PrivacyLedger(unit, **other)
    for event, count in entries:
        ledger.compose(event, count)
    return ledger


def test_an_empty_ledger_has_spent_nothing() -> None:
    """Zero, at every delta."""
    ledger = PrivacyLedger("party")

    assert ledger.get_epsilon() == 0
    assert ledger.num_releases == 0
    assert ledger.entries == ()


def test_delta_can_be_asked_for() -> None:
    """The ledger's delta is a default, not a limit."""
    ledger = filled("party", (votes(), 40), delta=1e-3)

    assert ledger.get_epsilon(1e-5) == pytest.approx(0.934913, abs=6e-7)
    assert ledger.get_epsilon() < ledger.get_epsilon(1e-5)
    assert ledger.claim(1e-5).delta == 1e-5
    assert ledger.bounds(1e-5)["pure"] == pytest.approx(3.2)
    assert ledger.bounds() == accountant.bounds([(votes(), 40)], 1e-3)


def test_separate_batches_count_as_adaptive() -> None:
    """What is asked after an answer may depend on it: the non-adaptive bound is given up."""
    at_once = filled("party", (votes(), 40))
    one_by_one = filled("party", (votes(), 20), (votes(), 20))

    assert one_by_one.entries == at_once.entries == ((votes(), 40),)
    assert one_by_one.get_epsilon() == pytest.approx(1.025440, abs=6e-7)
    assert one_by_one.bounds()["bounded-range"] is None
    other_classes = filled("party", (votes(), 20), (votes(num_classes=9), 20))
    assert other_classes.get_epsilon() == pytest.approx(1.025440, abs=6e-7)


def test_strengths_chosen_on_the_way_lose_the_optimal_composition() -> None:
    """Its proof needs strengths that were fixed before the first answer.

    Equal strengths keep it, whatever was asked in between.
    """
    mixed, equal = PrivacyLedger("party"), PrivacyLedger("party")
    for scale in (25.0, 20.0):
        mixed.charge(votes("laplace", scale, num_classes=10), 40)
        equal.charge(votes("laplace", 25.0, num_classes=10), 40)

    assert mixed.bounds()["optimal-composition"] is None
    assert equal.bounds()["optimal-composition"] is not None
    assert mixed.claim().method in ("rdp", "zcdp")


def test_events_of_one_call_are_one_batch() -> None:
    """Their strengths were fixed together, so the optimal composition holds."""
    both = [(votes("laplace", scale, num_classes=10), 40) for scale in (25.0, 20.0)]
    at_once, in_turn = PrivacyLedger("party"), PrivacyLedger("party")
    at_once.charge_all(both)
    for charge in both:
        in_turn.charge_all([charge])

    assert (at_once.adaptive, in_turn.adaptive) == (False, True)
    assert at_once.get_epsilon() == accountant.claim(both, 1e-5).epsilon
    assert at_once.get_epsilon() < in_turn.get_epsilon()


def test_batches_do_not_matter_to_gaussian_noise() -> None:
    """It composes exactly however it was asked."""
    event = votes("gaussian", 9.0)

    assert (
        filled("party", (event, 3), (event, 4)).claim() == filled("party", (event, 7)).claim()
    )


EVENTS: list[PrivacyEvent] = [
    votes(),
    votes("laplace", num_classes=5),
    votes("gaussian", 20.0),
    ThresholdEvent(**PARTY, scale=30.0, sensitivity=1.0),
    LaplaceEvent(**PARTY, scale=30.0, l1_sensitivity=1.0),
    GaussianEvent(unit="party", relation="add-remove-one", scale=30.0, l2_sensitivity=1.0),
]
charges = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(1, 40)), max_size=5)


@settings(deadline=None, max_examples=25)
@given(entries=charges, data=st.data())
def test_order_does_not_matter(entries: list[Any], data: st.DataObject) -> None:
    """The same events in any order are the same account."""
    one = filled("party", *entries)
    other = filled("party", *data.draw(st.permutations(entries)))

    assert other.get_epsilon() == pytest.approx(one.get_epsilon(), rel=1e-9)
    assert other.num_releases == one.num_releases
    assert dict(other.entries) == dict(one.entries)


@settings(deadline=None, max_examples=25)
@given(entries=charges, event=st.sampled_from(EVENTS), count=st.integers(1, 20))
def test_epsilon_never_falls(entries: list[Any], event: PrivacyEvent, count: int) -> None:
    """Nothing that is recorded makes the account better."""
    ledger = filled("party", *entries)
    before = ledger.get_epsilon()
    ledger.compose(event, count)

    assert ledger.get_epsilon() >= before - 1e-9


@settings(deadline=None, max_examples=25)
@given(entries=charges)
def test_files_lose_nothing(entries: list[Any]) -> None:
    """Through JSON and back: same entries, same settings, same epsilon to the last bit."""
    ledger = filled(
        "party", *entries, delta=1e-6, max_epsilon=7.0, num_parties=9, audience="us"
    )
    text = json.dumps(ledger.state_dict(), allow_nan=False)
    again = PrivacyLedger.from_state_dict(json.loads(text))

    assert again.state_dict() == ledger.state_dict()
    assert again.entries == ledger.entries
    assert again.claim() == ledger.claim()


def test_a_charge_within_the_budget_is_recorded() -> None:
    """Up to and including the limit."""
    ledger = PrivacyLedger("party", max_epsilon=0.935)
    ledger.charge(votes(), 40)

    assert ledger.entries == ((votes(), 40),)


@pytest.mark.parametrize(
    ("event", "count"),
    [
        (votes(), 41),
        (votes("gaussian", 1.0), 1),
        (votes(seeded=True), 1),
        (NonPrivateEvent(unit="party", reason="raw votes"), 1),
    ],
)
def test_a_charge_beyond_the_budget_changes_nothing(event: PrivacyEvent, count: int) -> None:
    """It raises the typed error, and the ledger is as it was."""
    ledger = PrivacyLedger("party", max_epsilon=0.935)
    ledger.charge(votes(), 1)
    before = ledger.state_dict()

    with pytest.raises(PrivacyBudgetExceeded, match=r"epsilon must be at most 0\.935.*, got "):
        ledger.charge(event, count)
    assert ledger.state_dict() == before


def test_the_refusal_is_a_runtime_error_with_a_reason() -> None:
    """Callers that do not know this package can still catch it, and read why."""
    ledger = PrivacyLedger("party", max_epsilon=1.0)

    with pytest.raises(RuntimeError, match="known seed") as caught:
        ledger.charge(votes(seeded=True))
    assert isinstance(caught.value, StrategyError)
    assert "Nothing was recorded" in str(caught.value)


def test_a_release_with_two_costs_is_charged_as_a_whole() -> None:
    """Either both events of Confident-GNMax are recorded or neither."""
    confident = mechanism("confident-gaussian", 40.0)
    assert isinstance(confident, ConfidentNoisyMax)
    ledger = PrivacyLedger("party", max_epsilon=1.0)
    ledger.charge_all(confident.charges(20))
    recorded = ledger.entries

    assert recorded == ((confident.threshold_event, 20), (confident.event, 20))
    with pytest.raises(PrivacyBudgetExceeded):
        ledger.charge_all([*confident.charges(1), (votes("gaussian", 0.1), 1)])
    assert ledger.entries == recorded


def test_compose_records_what_has_happened_whatever_it_cost() -> None:
    """A loss that is past cannot be refused, only stated."""
    ledger = PrivacyLedger("party", max_epsilon=0.1)
    ledger.compose(NonPrivateEvent(unit="party", reason="raw votes left"))

    assert ledger.get_epsilon() == math.inf
    assert ledger.claim().method == "none"


class Homemade(NoisyMaxEvent):
    """Not one of the package's events."""


@pytest.mark.parametrize(
    ("event", "count", "words"),
    [
        (votes(unit="example"), 1, "event.unit must be 'party'"),
        (votes(), 0, "count must be a whole number"),
        (votes(), 2.0, "count must be a whole number"),
        (votes(), 2**60, "count must be at most"),
        (PrivacyEvent(**PARTY), 1, "event must be one of"),
        (Homemade(**vars(votes())), 1, "event must be one of"),
        ("noisy-max", 1, "event must be one of"),
    ],
)
def test_what_cannot_be_counted_is_refused(event: Any, count: Any, words: str) -> None:
    """By every way into the ledger, which stays empty."""
    ledger = PrivacyLedger("party", max_epsilon=1e9)

    for record in (ledger.compose, ledger.charge):
        with pytest.raises(InvalidParameter, match=words):
            record(event, count)
    assert ledger.entries == ()


@pytest.mark.parametrize(
    "change",
    [
        {"unit": "person"},
        {"delta": 0.0},
        {"delta": 1.0},
        {"max_epsilon": 0.0},
        {"max_epsilon": math.inf},
        {"audience": " "},
        {"num_records": 0},
        {"num_parties": 1.5},
    ],
)
def test_settings_are_checked(change: dict[str, Any]) -> None:
    """A wrong setting is found before anything is recorded."""
    with pytest.raises(InvalidParameter, match=r"^PrivacyLedger: "):
        PrivacyLedger(**{"unit": "party", **change})


def test_loading_continues_the_account_under_the_own_limit() -> None:
    """A second run composes with the first; the file cannot raise the budget."""
    first = filled("party", (votes("gaussian", 20.0), 40), max_epsilon=100.0)
    second = PrivacyLedger("party", max_epsilon=2.5)
    second.load_state_dict(first.state_dict())
    second.charge(votes("gaussian", 20.0), 5)

    assert second.get_epsilon() == filled("party", (votes("gaussian", 20.0), 45)).get_epsilon()
    with pytest.raises(PrivacyBudgetExceeded):
        second.charge(votes("gaussian", 20.0), 40)


def test_batches_survive_the_file() -> None:
    """A continued account is adaptive, however often it was saved."""
    first = filled("party", (votes(), 20))
    second = PrivacyLedger("party")
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.compose(votes(), 20)

    assert second.get_epsilon() == filled("party", (votes(), 20), (votes(), 20)).get_epsilon()


def broken(**change: Any) -> dict[str, Any]:
    return {**filled("party", (votes(), 40)).state_dict(), **change}


def broken_entry(**change: Any) -> dict[str, Any]:
    state = broken()
    return broken(entries=[{**state["entries"][0], **change}])


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (broken(schema=2), "schema must be 1, got 2"),
        (broken(schema="1"), "schema must be 1, got '1'"),
        ([], "schema must be 1, got None"),
        (None, "schema must be 1, got None"),
        (broken(unit="example"), "unit must be 'party', got 'example'"),
        (broken(colour="red"), "got a difference in colour"),
        ({"schema": 1}, "got a difference in"),
        (broken(entries={}), "entries must be a list, got dict"),
        (broken(entries=[3]), "an entry must have event, count and batches"),
        (broken(entries=broken()["entries"] * 2), "events must be distinct"),
        (broken_entry(count=0), "count must be a whole number from 1"),
        (broken_entry(count=True), "count must be a whole number from 1"),
        (broken_entry(count=2**60), "count must be a whole number from 1"),
        (broken_entry(batches=-1), "batches must be a whole number from 0"),
        (broken_entry(batches=0), "events must come in batches, got none"),
        (broken_entry(event={"type": "free"}), "PrivacyEvent: schema must be 1"),
        (broken_entry(event=None), "PrivacyEvent: data must be a mapping"),
        (broken_entry(more=1), "an entry must have"),
    ],
)
def test_a_broken_file_is_refused(state: Any, words: str) -> None:
    """One sentence, a typed error, and the ledger keeps what it had."""
    ledger = filled("party", (votes("gaussian", 9.0), 3))
    before = ledger.state_dict()

    with pytest.raises(InvalidData, match=words):
        ledger.load_state_dict(state)
    assert ledger.state_dict() == before


def test_events_of_another_unit_in_a_file_are_refused() -> None:
    """Also if the file claims the right unit as a whole."""
    foreign = filled("example", (votes(unit="example"), 3)).state_dict()

    with pytest.raises(InvalidData, match="of one unit"):
        PrivacyLedger("party").load_state_dict({**foreign, "unit": "party"})


@pytest.mark.parametrize(
    "change",
    [{"delta": 2.0}, {"delta": "x"}, {"max_epsilon": -1}, {"audience": 3}, {"unit": []}],
)
def test_a_file_with_impossible_settings_is_refused(change: dict[str, Any]) -> None:
    """Whatever is wrong with them, the error is about the data."""
    with pytest.raises(InvalidData, match="settings must be valid"):
        PrivacyLedger.from_state_dict(broken(**change))


def test_the_statement_names_protected_audience_and_numbers() -> None:
    """Who, against whom, how much, by what, and in one sentence what it means."""
    ledger = filled("party", (votes(), 40), audience="the server and everybody else")
    text = ledger.statement()

    assert "Protected: each party as a whole" in text
    assert "Against: the server and everybody else." in text
    assert "epsilon 0.935 and delta 1e-05" in text
    assert (
        "40 x label by noisy max (gumbel noise of scale 25, sensitivity 1, 2 classes)" in text
    )
    assert "had one party been replaced by any other" in text
    assert "a factor of at most 2.55" in text
    assert text.count("Not covered: ") == 6
    assert "of which parties report no accuracy or other metric under this promise" in text
    assert "Warning" not in text


def test_the_statement_never_rounds_down() -> None:
    """The printed epsilon is at least the true one."""
    for count in range(1, 30, 4):
        ledger = filled("party", (votes(), count))
        printed = float(ledger.statement().split("epsilon ")[1].split(" ")[0])
        assert ledger.get_epsilon() <= printed <= ledger.get_epsilon() + 1e-3


def test_the_statement_for_records() -> None:
    """Records are named as such, and what several records of one person mean."""
    event = GaussianEvent(
        unit="example", relation="add-remove-one", scale=4.0, l2_sensitivity=1.0
    )
    text = filled("example", (event, 1)).statement()

    assert "each single record of a party" in text
    assert "had one record been blanked" in text
    assert "with k records epsilon counts k times" in text


def test_the_statement_admits_that_nothing_is_promised() -> None:
    """It begins with it, and the reason stands where the numbers would."""
    text = filled("party", (NonPrivateEvent(unit="party", reason="models left"), 1)).statement()

    assert text.startswith("Not protected: each party as a whole")
    assert "\nGuarantee: none, because models left." in text
    assert "rows held out for testing, wherever results on them are reported." in text
    assert "release without protection (models left)" in text
    assert "nothing has been released" in PrivacyLedger("party").statement()


def test_the_statement_warns_of_seeds() -> None:
    """It says that nothing is private, and what secret noise would have given."""
    text = filled("party", (votes(seeded=True), 40)).statement()

    assert "seeded: not private" in text
    assert "with secret noise epsilon would be 0.9349" in text
    both = filled("party", (votes(seeded=True), 20), (votes(), 20)).statement()
    assert "with secret noise epsilon would be 1.025" in both


@pytest.mark.parametrize(
    ("unit", "options", "scale", "words"),
    [
        ("party", {"num_parties": 49}, 25.0, "with 49 parties, fewer than 50"),
        ("party", {"num_parties": 60, "delta": 0.02}, 25.0, "not below 1 / 60"),
        ("example", {"num_records": 1000, "delta": 1e-3}, 25.0, "not below 1 / 1000"),
        ("party", {}, 3.0, "an epsilon above 10"),
    ],
)
def test_the_statement_warns_of_empty_promises(
    unit: Any, options: dict[str, Any], scale: float, words: str
) -> None:
    """Numbers that formally hold but protect little are called that."""
    text = filled(unit, (votes(scale=scale, unit=unit), 40), **options).statement()

    assert sum(line.startswith("Warning: ") for line in text.splitlines()) == 1
    assert words in text


def test_sizes_without_danger_do_not_warn() -> None:
    """Enough parties, enough records, small delta."""
    assert "Warning" not in filled("party", (votes(), 4), num_parties=50).statement()
    quiet = filled("example", (votes(unit="example"), 4), num_records=1000, num_parties=5)
    assert "Warning" not in quiet.statement()


def test_every_event_can_be_described() -> None:
    """The statement finds words for whatever is in the ledger."""
    training = DPSGDEvent(noise_multiplier=2.0, records=1000, batch_size=20, steps=30)
    sample = SubsampleEvent(records=1000, samples=5, replacement=True)
    text = filled("example", (training, 1), (sample, 1), delta=0.05).statement()
    party = filled("party", *((event, 2) for event in EVENTS)).statement()

    assert "training by DP-SGD (30 steps, noise multiplier 2" in text
    assert "secret sample of 5 of 1000 records" in text
    assert text.startswith("In short: a record is used in the clear with chance 0.5 %.")
    assert "In short" not in party
    assert "test of agreement" in party
    assert party.count("vector (") == 2


def test_a_sample_leads_with_the_chance_to_be_in_it() -> None:
    """The largest number of a statement without noise is its delta, so it comes first."""
    once = SubsampleEvent(records=100, samples=30, replacement=False)
    again = SubsampleEvent(records=10, samples=1, replacement=True)

    lead = filled("example", (once, 1), delta=0.5).statement().splitlines()[0]
    both = filled("example", (once, 1), (again, 2), delta=0.5).statement().splitlines()[0]

    assert lead == "In short: a record is used in the clear with chance 30 %."
    assert both == "In short: a record is used in the clear with chance 43.3 %."  # 1 - .7 x .81


DELTA = 1e-5


def mechanism(noise: str, scale: float = 2.0, **other: Any) -> VoteMechanism:
    given: dict[str, Any] = {"sensitivity": 1, "unit": "party", "num_classes": 2, **other}
    if noise != "confident-gaussian":
        return NoisyMax(noise=noise, scale=scale, **given)  # type: ignore[arg-type]
    return ConfidentNoisyMax(scale=scale, threshold=60.0, threshold_scale=2 * scale, **given)


@pytest.mark.parametrize("noise", VOTE_NOISES)
def test_agreement_makes_every_figure_small(noise: str) -> None:
    """Unanimous votes cost almost nothing, ties cost, and wider steps cost no less."""
    agreed, tied = np.tile([200, 0], (40, 1)), np.tile([60, 60], (40, 1))

    assert 0 <= epsilon_of_votes(mechanism(noise), agreed, DELTA) < 0.05
    cost = epsilon_of_votes(mechanism(noise), tied, DELTA)
    assert 5 < cost < np.inf
    wider = (mechanism(noise, sensitivity=s) for s in (1.5, 2))
    costs = [epsilon_of_votes(one, tied, DELTA) for one in wider]
    assert cost < costs[0] == costs[1]


def log_chances(lead: float, first: int, confident: ConfidentNoisyMax) -> FloatArray:
    """Return the exact log-chances of silence and of either class, of 100 voters."""
    test = (lead - confident.threshold) / confident.threshold_scale
    gap = (2 * first - 100) / (confident.scale * np.sqrt(2))
    answers = norm.logcdf(test) + norm.logcdf([gap, -gap])
    return np.array([norm.logsf(test), *answers])


@pytest.mark.parametrize("first", [50, 60, 70, 90])
def test_the_confident_figure_covers_the_exact_divergence(first: int) -> None:
    """It is at least what the exact chances of silence and labels give."""
    confident = ConfidentNoisyMax(
        scale=6.0,
        threshold=65.0,
        threshold_scale=10.0,
        sensitivity=1,
        unit="party",
        num_classes=2,
    )
    orders = default_orders()[:1200]
    own = log_chances(first, first, confident)
    curves = []
    for moved in (first - 1, first + 1):
        other = log_chances(max(moved, 100 - moved), moved, confident)
        powers = orders[:, None] * own + (1 - orders[:, None]) * other
        curves.append(np.logaddexp.reduce(powers, axis=1) / (orders - 1))
    exact = rdp_to_epsilon(orders, 50 * np.maximum(*curves), DELTA)
    votes = np.tile([first, 100 - first], (50, 1))

    assert 0 < exact <= epsilon_of_votes(confident, votes, DELTA)
