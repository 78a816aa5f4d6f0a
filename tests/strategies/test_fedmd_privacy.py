"""FedMD's promises: the sample of NFDP, the noise of LDP, and nothing for nothing."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result

from clients.app import NO_BUDGET
from fl_strategies import Knowledge, Party
from fl_strategies._util import sealed, unsealed
from fl_strategies.errors import (
    InvalidData,
    InvalidParameter,
    KnowledgeMismatch,
    NotFitted,
    PrivacyBudgetExceeded,
)
from fl_strategies.party.role import PartyState
from fl_strategies.privacy.bounds.theorems import nfdp_theorem, nfdp_tight
from fl_strategies.privacy.events import DPSGDEvent, GaussianEvent, SubsampleEvent
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.privacy.mechanisms import SubsampleOnce
from fl_strategies.privacy.noise import calibrate_scale
from fl_strategies.strategies.fedmd import FedMD, FedMDParty
from fl_strategies.strategies.fedmd.options import (
    AnswerNoise,
    GaussianProbabilities,
    least_scale,
)
from fl_strategies.strategies.fedmd.samples import FedMDPartyState, spent_metrics
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import pack_labels
from tests.kept import forget, with_journal
from tests.strategies.test_fedmd import (
    Federation,
    Refitted,
    SoftmaxRegression,
    linear_fedmd,
    linear_party,
    refitted_party,
    request,
    train,
    watching,
)
from tests.toys import TEST, Planned, accuracy, hear

NFDP = {"release": "nfdp", "num_samples": 10}
LDP = {"release": "ldp", "payload": "softmax", "sigma": 50.0}
GUMBEL = {"noise": "gumbel", "gamma": 1.0}
MAKERS = [linear_party, refitted_party]


def sample_of(state: PartyState) -> list[int]:
    return FedMDPartyState(state.records).sample.tolist()


# Noise-free privacy.


@pytest.mark.parametrize("replacement", [True, False])
def test_the_figures_of_a_sample(replacement: bool) -> None:
    """(0, delta) is the claim, the theorem's epsilon stands beside it, in every round."""
    strategy = linear_fedmd(**NFDP, with_replacement=replacement)
    result = Federation().run(strategy, 3)

    for server_round in (1, 2, 3):
        metrics = result.train_metrics_clientapp[server_round]
        tight = nfdp_tight(40, 10, replacement=replacement)
        assert metrics[keys.EPSILON_EXAMPLE] == 0
        assert metrics[keys.DELTA_EXAMPLE] == pytest.approx(tight.delta, rel=1e-12)
        theorem = nfdp_theorem(40, 10, replacement=replacement)
        assert metrics["epsilon-theorem"] == theorem.epsilon
        assert metrics[keys.EPSILON_PARTY] == math.inf
        assert metrics[keys.NUM_EXAMPLES] == 4 * 10
        assert metrics[keys.NUM_RELEASES] == 4
    assert strategy.ledger_.get_epsilon() == 0
    assert "delta 0.2" in strategy.ledger_.statement()
    assert "is not below 1 / 40" in strategy.ledger_.statement()


def test_the_largest_sample_promises_nothing() -> None:
    """All records without replacement: delta is 1, so epsilon is infinite."""
    strategy = linear_fedmd(release="nfdp", num_samples=40, with_replacement=False)
    result = Federation().run(strategy)

    metrics = result.train_metrics_clientapp[1]
    assert (metrics[keys.EPSILON_EXAMPLE], metrics[keys.DELTA_EXAMPLE]) == (math.inf, 1.0)
    assert strategy.ledger_.get_epsilon() == math.inf


@pytest.mark.parametrize("rule", ["class-weighted", "evidence"])
@pytest.mark.parametrize("make_party", MAKERS)
def test_no_other_record_is_looked_at(make_party: Callable[..., Party], rule: str) -> None:
    """Changing every record that was not drawn changes no bit of what leaves."""
    strategy = linear_fedmd(**NFDP, payload="softmax", consensus=rule, seeded_noise=True)
    party, state = make_party(0), PartyState()
    reply, metrics = train(party, strategy, state)
    others = np.setdiff1d(np.arange(40), sample_of(state))
    x, y = party.x.copy(), party.y.copy()
    x[others], y[others] = 77.0, (y[others] + 1) % 3
    reply_after, metrics_after = train(replace(party, x=x, y=y), strategy)

    assert len(others) > 20
    for name, array in reply.arrays.items():
        assert array.tobytes() == reply_after.arrays[name].tobytes()
    np.testing.assert_array_equal(
        reply.arrays["class-counts"], np.bincount(party.y[sample_of(state)], minlength=3)
    )
    assert reply.meta == reply_after.meta
    assert metrics == metrics_after
    assert metrics[keys.NUM_EXAMPLES] == 10


def test_the_sample_is_secret_unless_seeded() -> None:
    """Two runs of one seed draw differently; seeded ones do not, and promise nothing."""
    drawn = []
    for seeded in (False, False, True, True):
        state = PartyState()
        _, metrics = train(linear_party(0), linear_fedmd(**NFDP, seeded_noise=seeded), state)
        drawn.append(sample_of(state))
        assert math.isinf(metrics[keys.EPSILON_EXAMPLE]) == seeded
        assert math.isinf(metrics["epsilon-theorem"]) == seeded

    assert drawn[0] != drawn[1]
    assert drawn[2] == drawn[3]


def test_the_sample_is_drawn_once_also_if_training_fails() -> None:
    """It is kept before it is used; what answers in place of the model costs no second one."""
    fails = [True]

    class Fragile(SoftmaxRegression):
        def partial_fit(self, x: Any, y: Any, *, rng: Any, epochs: int) -> Any:
            if fails.pop() if fails else False:
                raise RuntimeError("out of memory")
            return super().partial_fit(x, y, rng=rng, epochs=epochs)

    party, state = linear_party(0, learner_fn=Fragile), PartyState()
    train(party, linear_fedmd(**NFDP), state)
    assert not fails
    first = sample_of(state)
    _, metrics = train(party, linear_fedmd(**NFDP), state)
    train(party, linear_fedmd(**NFDP), state, 2)

    assert sample_of(state) == first
    assert metrics[keys.NUM_RELEASES] == 1


def test_a_large_delta_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Above 1 / n there is a warning, at 1 / n (one record) there is none."""
    with caplog.at_level("WARNING", logger="flwr.fl_strategies"):
        train(linear_party(0), linear_fedmd(release="nfdp", num_samples=1))
        assert not caplog.records
        train(linear_party(0), linear_fedmd(**NFDP))

    assert "Party 0: delta 0.2237 of its sample is above 1 / 40" in caplog.text


def test_samples_that_cannot_be_drawn_are_refused() -> None:
    """More than there are without replacement, none at all, and none where some are due."""
    strategy = linear_fedmd(release="nfdp", num_samples=41, with_replacement=False)
    with pytest.raises(KnowledgeMismatch, match="Party 0: num-samples must be at most 40"):
        train(linear_party(0), strategy)
    train(linear_party(0), linear_fedmd(release="nfdp", num_samples=41))
    for changes in ({"num_samples": 0}, {"num_samples": None}):
        with pytest.raises(InvalidParameter, match="num_samples must be from 1 to"):
            linear_fedmd(**{**NFDP, **changes})
    with pytest.raises(InvalidParameter, match="num-samples must be omitted with these"):
        linear_fedmd(num_samples=10)


def test_a_server_cannot_make_a_party_draw_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """With replacement four times the records is the most; nothing is drawn for more."""
    few = {"release": "nfdp", "epochs_initial": 1}
    train(linear_party(0), linear_fedmd(**few, num_samples=160))
    drawn: list[object] = []
    monkeypatch.setattr(SubsampleOnce, "release", lambda *_: drawn.append(1))
    for samples in (161, 2**31 - 1):
        state = PartyState()
        sentence = f"must be at most 160, 4 times its records, with replacement, got {samples}"
        with pytest.raises(KnowledgeMismatch, match=f"Party 0: num-samples {sentence}"):
            train(linear_party(0), linear_fedmd(**few, num_samples=samples), state)
        assert not state.records

    assert not drawn


def test_without_a_journal_there_is_no_second_sample() -> None:
    """Nothing would compose the two, so the party refuses."""
    party, state = linear_party(0), PartyState()
    train(party, linear_fedmd(**NFDP), state)

    for changes in ({"num_samples": 11}, {"with_replacement": False}, {"seeded_noise": True}):
        with pytest.raises(InvalidData, match="Party 0: a second sample must be composed"):
            train(party, linear_fedmd(**{**NFDP, **changes}), state)


def kept_sample(file: Path) -> dict[str, Any]:
    """Return what a party has noted about its sample."""
    return dict(json.loads(unsealed(file.name, file.read_bytes())))


def test_a_sample_survives_a_run_beside_the_journal(tmp_path: Path) -> None:
    """A new run uses the sample that was paid for, and the journal has one line."""
    first, second = PartyState(), PartyState()
    party = with_journal(linear_party(0), tmp_path)
    train(party, linear_fedmd(**NFDP), first)
    train(party, linear_fedmd(**NFDP), first, 2)
    _, metrics = train(party, linear_fedmd(**NFDP, seed=9), second)

    (file,) = tmp_path.glob("*.json")
    assert sample_of(first) == sample_of(second) == kept_sample(file)["rows"]
    assert file.stat().st_mode & 0o077 == 0
    (entry,) = party.journal.entries()
    assert entry.charges[0][0] == SubsampleEvent(records=40, samples=10, replacement=True)
    assert metrics[keys.DELTA_EXAMPLE] == pytest.approx(nfdp_tight(40, 10).delta)


@pytest.mark.parametrize("damage", ["lost", "torn", "other-data", "outside", "too-few"])
def test_a_lost_sample_is_drawn_and_charged_again(tmp_path: Path, damage: str) -> None:
    """Two samples of the same data: the chance to be in one of them is what is stated."""
    party = with_journal(linear_party(0), tmp_path)
    train(party, linear_fedmd(**NFDP))
    (file,) = tmp_path.glob("*.json")
    content = kept_sample(file)
    if damage == "lost":
        file.unlink()
    elif damage == "torn":
        file.write_text(file.read_text()[:-9])
    else:
        content |= {
            "other-data": {"fingerprint": "0" * 64},
            "outside": {"rows": [40] * 10},
            "too-few": {"rows": [1, 2]},
        }[damage]
        # With a checksum that fits, so that the content is looked at.
        file.write_bytes(sealed(file.name, json.dumps(content).encode()))
    _, metrics = train(party, linear_fedmd(**NFDP))

    assert metrics[keys.NUM_RELEASES] == 2
    assert metrics[keys.EPSILON_EXAMPLE] == 0
    expected = nfdp_tight(40, 10, runs=2).delta
    assert metrics[keys.DELTA_EXAMPLE] == pytest.approx(expected, rel=1e-12)


def test_a_sample_that_nobody_paid_for_is_not_used(tmp_path: Path) -> None:
    """A file without its line in the journal is charged like a new sample."""
    party = with_journal(linear_party(0), tmp_path / "old")
    train(party, linear_fedmd(**NFDP))
    (file,) = (tmp_path / "old").glob("*.json")
    (tmp_path / "new").mkdir()
    file.rename(tmp_path / "new" / file.name)
    moved = with_journal(linear_party(0), tmp_path / "new")
    train(moved, linear_fedmd(**NFDP))

    assert len(moved.journal.entries()) == 1


def test_a_journals_budget_stops_a_second_sample(tmp_path: Path) -> None:
    """One sample fits into delta 0.3, another one does not; nothing is drawn then."""
    party = with_journal(linear_party(0), tmp_path, delta=0.3, max_epsilon=0.5)
    state = PartyState()
    train(party, linear_fedmd(**NFDP), state)
    first = sample_of(state)
    with pytest.raises(PrivacyBudgetExceeded):
        train(party, linear_fedmd(release="nfdp", num_samples=9), state)

    assert sample_of(state) == first
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_the_server_states_the_party_with_fewest_records() -> None:
    """Its chance to be drawn is the largest, also if it was there only once."""

    def sized(partition_id: int) -> Party:
        return linear_party(partition_id, 20 + 20 * partition_id)

    strategy = linear_fedmd(**NFDP)
    result = Federation(sized).run(strategy, 2)
    ((event, count),) = strategy.ledger_.entries

    assert (event, count) == (SubsampleEvent(records=20, samples=10, replacement=True), 1)
    assert strategy.ledger_.delta == nfdp_tight(20, 10).delta
    assert result.train_metrics_clientapp[2]["num-records"] == 20
    largest = nfdp_theorem(20, 10).epsilon
    assert result.train_metrics_clientapp[2]["epsilon-theorem"] == largest


def run_twice(federation: Federation, strategy: FedMD, num_forgetful: int) -> Result:
    """Let some parties lose their memory between two runs of one round."""
    federation.run(strategy)
    forget(federation.grid, *[*federation.grid._nodes][:num_forgetful])
    return federation.run(strategy)


@pytest.mark.parametrize("replacement", [True, False])
def test_a_party_that_forgets_its_sample_is_charged_for_two(
    caplog: pytest.LogCaptureFixture, replacement: bool
) -> None:
    """The server composes both, states the worst party, and says what would help."""
    strategy = linear_fedmd(**NFDP, with_replacement=replacement)
    with caplog.at_level("WARNING", logger="flwr.fl_strategies"):
        result = run_twice(Federation(), strategy, 1)

    sample = SubsampleEvent(records=40, samples=10, replacement=replacement)
    both = nfdp_tight(40, 10, replacement=replacement, runs=2).delta
    metrics = result.train_metrics_clientapp[1]
    assert strategy.ledger_.entries == ((sample, 2),)
    assert strategy.ledger_.delta == metrics[keys.DELTA_EXAMPLE] == pytest.approx(both)
    assert strategy.ledger_.get_epsilon() == metrics[keys.EPSILON_EXAMPLE] == 0
    theorem = nfdp_theorem(40, 10, replacement=replacement).epsilon
    assert metrics["epsilon-theorem"] == pytest.approx(2 * theorem)
    (line,) = [text for text in caplog.messages if "with a journal" in text]
    assert "party 0 has drawn sample 2 of its records" in line


def test_a_journal_and_a_seed_give_the_same_sample_again(tmp_path: Path) -> None:
    """Then a party that forgets everything else is charged for one sample, as it should."""

    def kept(partition_id: int) -> Party:
        return with_journal(linear_party(partition_id), tmp_path / str(partition_id))

    for make_party, seeded in ((kept, False), (linear_party, True)):
        strategy = linear_fedmd(**NFDP, seeded_noise=seeded)
        run_twice(Federation(make_party), strategy, 4)
        ((event, count),) = strategy.ledger_.entries

        assert count == 1
        assert event.seeded == seeded
        assert math.isinf(strategy.ledger_.get_epsilon()) == seeded


def test_the_name_of_a_sample_says_nothing_about_it() -> None:
    """The same party with the same seed names each new sample differently."""
    names = [train(linear_party(0), linear_fedmd(**NFDP))[0].meta["sample-id"] for _ in "ab"]

    assert names[0] != names[1]
    assert train(linear_party(0), linear_fedmd(consensus="mean"))[0].meta == {}


def test_a_sample_counts_also_in_a_round_that_fails() -> None:
    """An answer that came was seen, whether or not others came as well."""
    strategy = linear_fedmd(**NFDP)
    Federation().run(strategy)
    reply, _ = train(linear_party(0), strategy)
    hear(strategy, reply)

    assert strategy.state.samples.worst().charges[0][1] == 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sample-id": "mine"}, "sample-id must be 32 hexadecimal digits, got 'mine'"),
        ({"sample-id": 7}, "sample-id must be 32 hexadecimal digits, got '7'"),
        ({"sample-id": "a" * 10**6}, "sample-id must be 32 hexadecimal digits, got 'a{40}'"),
        ({"num-records": 0}, "num-records must be a whole number from 1 to"),
        ({"num-records": 2**54}, "num-records must be a whole number from 1 to"),
        ({"num-records": 40.0}, "num-records must be a whole number from 1 to"),
    ],
)
def test_an_answer_must_name_its_sample(changes: dict[str, Any], sentence: str) -> None:
    """What cannot be counted is refused."""
    strategy = linear_fedmd(**NFDP)
    reply, _ = train(linear_party(0), strategy)
    meta = {keys.PARTITION_ID: 0, **reply.meta}
    strategy.check(replace(reply, meta=meta))

    with pytest.raises(KnowledgeMismatch, match=f"FedMD: {sentence}"):
        strategy.check(replace(reply, meta={**meta, **changes}))


def test_noise_and_a_sample_add_up() -> None:
    """With both in one ledger, delta is that of the sample and a little more."""
    ledger = PrivacyLedger("example", delta=1e-5)
    ledger.compose(SubsampleEvent(records=100, samples=5, replacement=False))
    ledger.compose(
        GaussianEvent(unit="example", relation="replace-one", scale=10.0, l2_sensitivity=1.0)
    )
    metrics = spent_metrics(ledger)

    assert metrics[keys.DELTA_EXAMPLE] == pytest.approx(0.05 + 0.95e-5)
    alone = PrivacyLedger("example")
    alone.compose(ledger.entries[1][0])
    assert metrics[keys.EPSILON_EXAMPLE] == pytest.approx(alone.get_epsilon(1e-5), rel=1e-6)


# Noise on what leaves.


def test_the_reference_values_of_gaussian_noise_on_probabilities() -> None:
    """10**5 softmax rows: epsilon 0.141685 at sigma 10**4; sigma 268.43 for epsilon 8."""
    noise = AnswerNoise(payload="softmax", noise="gaussian", scale=1e4, num_classes=6)
    ledger = PrivacyLedger("example")
    ledger.charge_all(noise.charges(100_000, seeded=False))
    scale = calibrate_scale(
        lambda scale: replace(noise, scale=scale).charges(5000, seeded=False),
        8.0,
        1e-5,
        num_batches=20,
        least=least_scale(noise),
    )

    # Rounding to the grid of the noise is part of the sensitivity: 0.2 % at this scale.
    assert 0.141685 < ledger.get_epsilon() < 0.141685 * 1.003
    # Sampling a million numbers takes a quarter of delta at this epsilon.
    assert 268.430602 < scale < 268.430602 * 1.01


@pytest.mark.parametrize("make_party", MAKERS)
def test_every_round_is_charged_and_composed(make_party: Callable[..., Party]) -> None:
    """Without a journal the run's rounds are remembered, and server and parties agree."""
    strategy = linear_fedmd(**LDP)
    result = Federation(make_party).run(strategy, 3)

    epsilons = [result.train_metrics_clientapp[r][keys.EPSILON_EXAMPLE] for r in (1, 2, 3)]
    assert epsilons == sorted(set(epsilons))
    assert epsilons[2] == strategy.ledger_.get_epsilon()
    ((event, count),) = strategy.ledger_.entries
    assert count == 3 * 30
    assert event.scale == 50.0
    assert event.l2_sensitivity == pytest.approx(math.sqrt(2), rel=1e-4)
    assert result.train_metrics_clientapp[3][keys.NUM_RELEASES] == 4 * 90
    assert result.train_metrics_clientapp[3]["noise-scale"] == 50.0


@pytest.mark.parametrize(
    "changes",
    [
        {"payload": "softmax", "noise": "gaussian"},
        {"payload": "softmax", "noise": "laplace"},
        {"payload": "logits", "noise": "gaussian", "clipping_norm": 3.0},
        {"payload": "logits", "noise": "laplace", "clipping_norm": 500.0},
        {"payload": "argmax", "noise": "gumbel"},
        {"payload": "argmax", "noise": "laplace"},
        {"payload": "argmax", "noise": "gaussian"},
    ],
)
def test_a_target_is_met_after_the_planned_rounds(changes: dict[str, Any]) -> None:
    """Not exceeded and hardly undercut after three rounds; a fourth is honestly dearer."""
    strategy = linear_fedmd(release="ldp", target_epsilon=2.0, num_rounds_planned=3, **changes)
    result = Federation().run(strategy, 4)

    epsilons = [result.train_metrics_clientapp[r][keys.EPSILON_EXAMPLE] for r in (1, 2, 3, 4)]
    assert not strategy.rejected_
    assert 1.99 < epsilons[2] <= 2.0 < epsilons[3] < math.inf


def test_weak_noise_is_useful_and_strong_noise_is_chance() -> None:
    """Noise that promises nothing leaves the consensus right, a strict promise destroys it.

    A random model may be good by chance (one in sixty is), so the middle of several counts.
    """
    weak, strong = {"sigma": 0.05}, {"target_epsilon": 0.5, "num_rounds_planned": 2}
    middles = []
    for strength in (weak, strong):
        found = []
        for _ in range(5):
            strategy = linear_fedmd(release="ldp", payload="softmax", num_public=60, **strength)
            Federation().run(strategy, 2)
            found.append(accuracy(strategy.model_.predict(TEST[0])))
        middles.append(np.median(found))

    assert middles[0] > 0.85
    assert middles[1] < 0.75


def test_the_servers_budget_ends_the_run_before_it_is_exceeded() -> None:
    """The third round would cost too much: nothing is sent, and the reason is kept."""
    strategy = linear_fedmd(**LDP)
    strategy.ledger_.charge_all(strategy.settings.noise.charges(60, seeded=False))
    budget = strategy.ledger_.get_epsilon() * 1.01
    limited = linear_fedmd(**LDP, max_epsilon=budget)
    result = Federation().run(limited, 4)

    assert list(result.train_metrics_clientapp) == [1, 2]
    assert limited.ledger_.get_epsilon() <= budget
    assert limited.round_ == 2
    assert "epsilon must be at most" in limited.failure_
    assert limited.model_ is not None


def test_a_party_whose_budget_is_spent_learns_on_and_sends_nothing(tmp_path: Path) -> None:
    """Its journal refuses the second round; its model still digests the others' consensus."""
    ledger = PrivacyLedger("example")
    ledger.charge_all(linear_fedmd(**LDP).settings.noise.charges(30, seeded=False))
    budget = ledger.get_epsilon() * 1.01

    def guarded(partition_id: int) -> Party:
        party = linear_party(partition_id)
        return party if partition_id else with_journal(party, tmp_path, max_epsilon=budget)

    federation, strategy = Federation(guarded), linear_fedmd(**LDP)
    federation.run(strategy, 1)
    before = federation.bits()[0]
    result = federation.run(strategy, 1)

    assert result.train_metrics_clientapp[1][keys.NUM_PARTIES] == 3
    ((_, reason),) = strategy.rejected_.items()
    assert reason == NO_BUDGET
    assert federation.bits()[0] != before
    (entry,) = guarded(0).journal.entries()
    assert entry.purpose == "fedmd ldp, round 1"
    assert entry.charges[0][1] == 30


def test_a_charge_that_fails_keeps_the_answer_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No noise is drawn before the journal has its line."""
    drawn: list[object] = []
    monkeypatch.setattr(AnswerNoise, "release", lambda *_: drawn.append(1))
    party = with_journal(linear_party(0), tmp_path, max_epsilon=1e-6)

    with pytest.raises(PrivacyBudgetExceeded):
        train(party, linear_fedmd(**LDP))
    assert not drawn


def test_noise_is_what_it_says_it_is() -> None:
    """Deviation of Gaussian and Laplace noise, and how often randomised response is true."""
    zeros = np.full((4000, 2), 0.5)
    for noise, deviation in (("gaussian", 3.0), ("laplace", 3.0 * math.sqrt(2))):
        kind = AnswerNoise(payload="softmax", noise=noise, scale=3.0, num_classes=2)
        released = kind.release(zeros, None)
        assert released.std() == pytest.approx(deviation, rel=0.06)
        assert released.mean() == pytest.approx(0.5, abs=0.3)
        assert np.abs(released).max() <= kind.limit
    response = AnswerNoise(payload="argmax", noise="gumbel", scale=0.5, num_classes=3)
    truth = np.arange(6000) % 3
    kept = (response.release(truth, None) == truth).mean()

    assert kept == pytest.approx(math.exp(2) / (math.exp(2) + 2), abs=0.03)


def test_logits_are_clipped_before_noise() -> None:
    """Rows of any length leave with at most the norm that was paid for."""
    noise = AnswerNoise(
        payload="logits", noise="gaussian", scale=1e-3, num_classes=2, clipping_norm=2.0
    )
    released = noise.release(np.array([[30.0, -40.0], [0.3, -0.4]]), None)

    np.testing.assert_allclose(released, [[1.2, -1.6], [0.3, -0.4]], atol=0.01)


def test_the_smaller_sensitivity_is_for_probabilities_only() -> None:
    """Rows that are none are refused, because two of them could be further apart."""
    mechanism = GaussianProbabilities(bound=1.0, scale=1.0, num_values=2, unit="example")

    for row in ([0.9, 0.0], [1.5, -0.5], [0.8, 0.8]):
        with pytest.raises(InvalidData, match="scores must be probabilities"):
            mechanism.release(np.array([row]))


def test_noise_does_not_come_from_the_seed_unless_it_is_told_to() -> None:
    """Two runs of one seed differ, and accuracy stays at home, as it is no noisy release.

    Two with seeded noise do not; it protects nobody, so accuracy is told.
    """
    found = []
    for seeded in (False, False, True, True):
        strategy = linear_fedmd(**LDP, seeded_noise=seeded)
        result = Federation().run(strategy)
        found.append(strategy.consensus_.tobytes())
        assert (keys.ACCURACY in result.evaluate_metrics_clientapp[1]) == seeded
        told = result.train_metrics_clientapp[1][keys.EPSILON_EXAMPLE]
        assert math.isinf(told) == math.isinf(strategy.ledger_.get_epsilon()) == seeded

    assert result.evaluate_metrics_clientapp[1][keys.ACCURACY] > 0.5
    assert found[0] != found[1]
    assert found[2] == found[3]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sigma": None}, "sigma or target_epsilon must be given, one of the two"),
        ({"target_epsilon": 1.0}, "sigma or target_epsilon must be given, one of the two"),
        ({"gamma": 1.0}, "gamma must be omitted for auto noise"),
        ({"noise": "laplace"}, "sigma must be omitted for laplace noise"),
        ({**GUMBEL, "sigma": None}, "noise must be one of gaussian, laplace for softmax"),
        ({"noise": "pink", "payload": "argmax"}, "noise must be one of auto, gaussian"),
        ({"sigma": -1.0}, "sigma must be greater than 0, got -1.0"),
        ({"sigma": 1e-9}, "scale must be at least"),
        ({"sigma": 1e31}, r"FedMD: scale of noise must be at most 1e\+30, got 1e\+31"),
        ({"num_rounds_planned": 3}, "num_rounds_planned must be omitted without"),
        ({"payload": "logits"}, "clipping_norm must be given for noisy logits, got None"),
        ({"clipping_norm": 1.0}, "clipping_norm must be omitted unless logits"),
        ({"consensus": "class-weighted"}, "consensus must be another one for release='ldp'"),
        ({"consensus": "evidence"}, "consensus must be another one for release='ldp'"),
        ({"release": "none"}, "FedMD: sigma must be omitted with these settings"),
    ],
)
def test_wrong_noise_is_refused_in_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    """Each mistake names its parameter, rule and value."""
    with pytest.raises(InvalidParameter, match=sentence):
        linear_fedmd(**{**LDP, **changes})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sigma": 1e-12}, "GaussianProbabilities: scale must be"),
        ({"sigma": 1e31}, "FedMD: scale of noise must be at most"),
        ({"noise": "gumbel", "sigma": 0.0, "gamma": 1.0}, "FedMD: noise must be one of gauss"),
    ],
)
def test_a_party_checks_the_noise_it_is_told(changes: dict[str, Any], sentence: str) -> None:
    """Noise of another payload, or too little to hide rounding, is the server's mistake."""
    config = request(linear_fedmd(**LDP), **changes)
    with pytest.raises(KnowledgeMismatch, match=f"Server: {sentence}"):
        FedMDParty().train(linear_party(0), None, config, PartyState())


# Neither.


@pytest.mark.parametrize("make_party", MAKERS)
def test_without_protection_epsilon_is_infinite(
    make_party: Callable[..., Party], tmp_path: Path
) -> None:
    """Reported by everybody, and a party with a budget refuses to take part."""
    strategy = linear_fedmd()
    result = Federation(make_party).run(strategy, 2)

    assert result.train_metrics_clientapp[2][keys.EPSILON_EXAMPLE] == math.inf
    assert "none, because predictions on public rows" in strategy.ledger_.statement()
    with pytest.raises(PrivacyBudgetExceeded, match="without noise"):
        train(with_journal(make_party(0), tmp_path, max_epsilon=50.0), strategy)


EVENT = DPSGDEvent(noise_multiplier=4.0, records=40, batch_size=2, steps=3)


class Private(Planned):
    """Mixin of learners that say what each of their private trainings cost."""

    planned = ((EVENT, 1),)
    privacy_events: tuple[Any, ...] = ()


class PrivatelyContinued(Private, SoftmaxRegression):
    """It pays for every training."""

    def partial_fit(self, x: Any, y: Any, *, rng: Any, epochs: int) -> Any:
        self.privacy_events = (*self.privacy_events, (EVENT, 1))
        return super().partial_fit(x, y, rng=rng, epochs=epochs)


class PrivatelyRefitted(Private, Refitted):
    """It starts anew."""

    def fit(self, x: Any, y: Any, *, rng: Any) -> Any:
        self.privacy_events = ((EVENT, 1),)
        return super().fit(x, y, rng=rng)


@pytest.mark.parametrize("learner_fn", [PrivatelyContinued, PrivatelyRefitted])
def test_private_training_is_composed_over_rounds(learner_fn: Callable[[], Any]) -> None:
    """Each round's training on records counts once; digesting public rows does not."""
    pytest.importorskip("dp_accounting")
    strategy = linear_fedmd()
    federation = Federation(lambda i: replace(linear_party(i), learner_fn=learner_fn))
    result = federation.run(strategy, 3)

    expected = PrivacyLedger("example")
    expected.compose(EVENT, 3)
    metrics = result.train_metrics_clientapp[3]
    assert metrics[keys.EPSILON_EXAMPLE] == expected.get_epsilon() < math.inf
    assert keys.ACCURACY not in result.evaluate_metrics_clientapp[3]


def test_class_counts_cost_also_beside_private_training(tmp_path: Path) -> None:
    """They are exact, so nothing is promised, and a party with a budget refuses."""
    pytest.importorskip("dp_accounting")
    party = linear_party(0, learner_fn=PrivatelyContinued)
    strategy = linear_fedmd(consensus="class-weighted")
    reply, metrics = train(party, strategy)

    np.testing.assert_array_equal(reply.arrays["class-counts"], np.bincount(party.y))
    assert metrics[keys.EPSILON_EXAMPLE] == math.inf
    with pytest.raises(PrivacyBudgetExceeded, match="exact class counts left the party"):
        train(with_journal(party, tmp_path, max_epsilon=50.0), strategy)
    Federation().run(strategy)
    assert "exact class counts left the party" in strategy.ledger_.statement()


def test_evidence_beside_private_training_costs_the_training_alone() -> None:
    """Such a party states equal counts: what it sends does not depend on its labels' number."""
    pytest.importorskip("dp_accounting")
    party = linear_party(0, learner_fn=PrivatelyContinued)
    reply, metrics = train(party, linear_fedmd(consensus="evidence"))
    plain, paid = train(party, linear_fedmd(consensus="mean"))

    np.testing.assert_array_equal(reply.arrays["class-counts"], [13, 13, 13])
    np.testing.assert_array_equal(reply.arrays["labels"], plain.arrays["labels"])
    assert metrics[keys.EPSILON_EXAMPLE] == paid[keys.EPSILON_EXAMPLE] < math.inf


def test_a_party_that_comes_late_pays_for_both_trainings() -> None:
    """Initial training and revisit are two, in one message."""
    pytest.importorskip("dp_accounting")
    party = linear_party(0, learner_fn=PrivatelyContinued)
    _, metrics = train(party, linear_fedmd(), None, 4)

    assert metrics[keys.NUM_RELEASES] == 2


def test_memory_is_small_and_plain() -> None:
    """What a party keeps are its arrays, a round and its ledger; for refits only labels."""
    labels = pack_labels(np.zeros(30, int), 3)
    consensus = Knowledge("consensus", {"labels": labels}, {"consensus-round": 1})
    for make_party, kept in zip(MAKERS, ("fedmd-model", "fedmd-consensus"), strict=True):
        state = PartyState()
        train(make_party(0), linear_fedmd(), state)
        FedMDParty().evaluate(make_party(0), consensus, request(linear_fedmd()), state)

        assert set(state.records) == {"fedmd", kept, "privacy-spent"}
        assert FedMDPartyState(state.records).digested_round == 1
        assert isinstance(state.records[kept], ArrayRecord)
        assert sum(record.count_bytes() for record in state.records.values()) < 1500


# A server that changes its mind.

SOFT = {"payload": "softmax", "consensus": "mean"}
SOFT_NFDP = {**NFDP, **SOFT}
SEEDED_LDP = {**LDP, "seeded_noise": True}


def starts_of_round_two(first: dict[str, Any], second: dict[str, Any], **changes: Any) -> Any:
    """Return a party's model before its first training in round 2, and rows of each."""
    starts: list[tuple[int, np.ndarray, int]] = []
    party, state = watching(starts)(0), PartyState()
    train(party, linear_fedmd(**first), state)
    starts.clear()
    train(replace(party, **changes), linear_fedmd(**second), state, 2)
    return starts[0][1], [rows for _, _, rows in starts]


@pytest.mark.parametrize(
    ("first", "second", "rows"),
    [
        (LDP, SOFT_NFDP, [10, 10]),
        (SOFT, SOFT_NFDP, [10, 10]),
        (LDP, SOFT, [40, 40]),
        (SOFT_NFDP, SOFT, [40, 40]),
        (SEEDED_LDP, LDP, [40, 40]),
    ],
)
def test_a_model_of_another_release_is_not_gone_on_with(
    first: dict[str, Any], second: dict[str, Any], rows: list[int]
) -> None:
    """What was learned under cheap noise does not leave in place of a sample's model."""
    start, seen = starts_of_round_two(first, second)

    assert not start.any()
    assert seen == rows


@pytest.mark.parametrize("terms", [LDP, SOFT, SOFT_NFDP, {**SOFT_NFDP, "seeded_noise": True}])
def test_a_model_of_the_same_release_is_gone_on_with(terms: dict[str, Any]) -> None:
    """The next round finds it; another run does not."""
    start, seen = starts_of_round_two(terms, terms)
    other, _ = starts_of_round_two(terms, terms, run="another")

    assert start.any()
    assert len(seen) == 1
    assert not other.any()


def test_a_model_of_another_sample_is_not_gone_on_with(tmp_path: Path) -> None:
    """With a journal there may be two samples; a model belongs to one of them."""
    starts: list[tuple[int, np.ndarray, int]] = []
    party, state = watching(starts)(0), PartyState()
    kept = with_journal(party, tmp_path)
    for server_round, samples in enumerate((10, 11, 11), start=1):
        strategy = linear_fedmd(release="nfdp", num_samples=samples)
        train(kept, strategy, state, server_round)

    # Round 2 begins again and revisits; round 3 only revisits.
    assert [bool(start.any()) for _, start, _ in starts] == [False, False, True, True]


def test_private_training_under_noise_is_paid_when_the_noise_is_gone() -> None:
    """The first training was hidden by noise; without noise two trainings are charged."""
    pytest.importorskip("dp_accounting")
    party, state = linear_party(0, learner_fn=PrivatelyContinued), PartyState()
    train(party, linear_fedmd(**LDP), state)
    train(party, linear_fedmd(**SOFT), state, 2)

    entries = dict(state.ledger(1e-5).entries)
    assert entries[EVENT] == 2


def uniform_consensus(strategy: FedMD) -> Knowledge:
    settings = strategy.settings
    soft = np.full((settings.num_public, 3), 1 / 3)
    labels = np.zeros(settings.num_public, dtype=np.int64)
    arrays = settings.consensus.encode(labels if settings.options.payload == "argmax" else soft)
    return Knowledge("consensus", arrays, {"consensus-round": 1})


def evaluate(party: Party, strategy: FedMD, state: PartyState) -> dict[str, float]:
    received = uniform_consensus(strategy)
    _, metrics = FedMDParty().evaluate(party, received, request(strategy), state)
    return metrics


@pytest.mark.parametrize("make_party", MAKERS)
@pytest.mark.parametrize(
    ("trained", "asked"),
    [
        (LDP, SOFT),
        (LDP, SEEDED_LDP),
        (LDP, SOFT_NFDP),
        (SOFT_NFDP, SOFT),
        (SOFT_NFDP, {**SOFT_NFDP, "num_samples": 11}),
        (SOFT_NFDP, {**SOFT_NFDP, "with_replacement": False}),
        (SOFT_NFDP, {**SOFT_NFDP, "seeded_noise": True}),
    ],
)
def test_a_party_is_measured_as_it_was_trained(
    make_party: Callable[..., Party], trained: dict[str, Any], asked: dict[str, Any]
) -> None:
    """An evaluate message under other terms is refused; nothing is fitted or told."""
    party, state = make_party(0), PartyState()
    train(party, linear_fedmd(**trained), state)
    before = {name: str(record) for name, record in state.records.items()}

    with pytest.raises(KnowledgeMismatch, match="Server: release and sample of an evaluate"):
        evaluate(party, linear_fedmd(**asked), state)
    assert {name: str(record) for name, record in state.records.items()} == before
    metrics = evaluate(party, linear_fedmd(**trained), state)
    assert math.isnan(metrics[keys.ACCURACY])


def test_only_training_that_was_paid_for_sets_the_terms() -> None:
    """Neither a training that failed nor none at all lets a party fit and tell."""
    fails = [False, True]

    class Fragile(Refitted):
        def fit(self, x: Any, y: Any, *, rng: Any) -> Any:
            if fails.pop(0) if fails else False:
                raise RuntimeError("out of memory")
            return super().fit(x, y, rng=rng)

    party, state = refitted_party(0, learner_fn=Fragile), PartyState()
    with pytest.raises(NotFitted, match="Party 0: a consensus must find a model"):
        evaluate(party, linear_fedmd(), state)
    train(party, linear_fedmd(**LDP), state)
    with pytest.raises(RuntimeError):
        train(party, linear_fedmd(**SOFT), state, 2)

    with pytest.raises(KnowledgeMismatch, match="Server: release and sample"):
        evaluate(party, linear_fedmd(**SOFT), state)


def test_seeded_noise_is_charged_before_a_record_is_looked_at() -> None:
    """A party whose training failed has written down that nothing is promised any more."""

    class Broken(SoftmaxRegression):
        def partial_fit(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("out of memory")

    party, state = linear_party(0, learner_fn=Broken), PartyState()
    with pytest.raises(RuntimeError):
        train(party, linear_fedmd(**SEEDED_LDP), state)

    assert state.ledger(1e-5).get_epsilon(1e-5) == math.inf
