"""FedKD's ledger: what each setting promises, to whom, and what is refused."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord
from flwr.serverapp.strategy import Result

from clients.app import NO_BUDGET, client_app
from fl_strategies import FedKD, Party
from fl_strategies.errors import RunFailed
from fl_strategies.privacy.accountant import claim
from fl_strategies.privacy.bounds.theorems import gaussian_epsilon
from fl_strategies.privacy.events import GaussianEvent, LaplaceEvent
from fl_strategies.wire import keys
from simulations.runtime.local import InMemoryGrid, run_local
from tests.kept import with_journal
from tests.toys import Careful, CentroidLearner, load_toy_party, loading, toy_fedkd, toy_party

NUM_PARTIES = 4
APP = client_app(load_toy_party)


def run(strategy: FedKD, app: Any = APP, num_rounds: int = 1) -> Result:
    return run_local(strategy, app, NUM_PARTIES, num_rounds=num_rounds)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"weights": "uniform"}, "logits left the party without noise"),
        ({"weights": "counts", "gamma": 1.0}, "exact class counts left the party"),
        (
            {"weights": "uniform", "gamma": 1.0, "scale": "max"},
            "the quantization scale is the largest logit of all private models",
        ),
    ],
)
def test_no_guarantee_is_said_with_its_reason(settings: dict[str, Any], reason: str) -> None:
    """Epsilon is infinite, and the statement tells why."""
    strategy = toy_fedkd(**settings)
    result = run(strategy, num_rounds=2)

    assert strategy.ledger_.get_epsilon() == math.inf
    assert reason in strategy.ledger_.statement()
    assert result.train_metrics_clientapp[1][keys.EPSILON_EXAMPLE] == math.inf


def test_uniform_weights_and_a_public_bound_protect_parties() -> None:
    """Gaussian noise: mu = 2 B sqrt(rows) / (K sigma), for a party and so for an example."""
    strategy = toy_fedkd(weights="uniform", noise="gaussian", sigma=30.0, clip=5.0)
    metrics = run(strategy).train_metrics_clientapp[1]

    expected = gaussian_epsilon(2 * 5.0 * math.sqrt(60) / (NUM_PARTIES * 30.0), 1e-5)
    assert strategy.ledger_.unit == "party"
    assert metrics[keys.EPSILON_PARTY] == pytest.approx(expected, rel=1e-4)
    assert metrics[keys.EPSILON_EXAMPLE] == metrics[keys.EPSILON_PARTY]
    ((event, count),) = strategy.ledger_.entries
    assert isinstance(event, GaussianEvent)
    assert (event.relation, count) == ("replace-one", 60)


def test_laplace_noise_is_entered_entry_by_entry() -> None:
    """180 entries, each moved by at most 2 B / K."""
    strategy = toy_fedkd(weights="uniform", gamma=0.001)
    run(strategy)

    ((event, count),) = strategy.ledger_.entries
    assert isinstance(event, LaplaceEvent)
    assert count == 180
    assert event.l1_sensitivity == pytest.approx(2 * 10.0 / NUM_PARTIES, rel=1e-3)
    assert event.scale == 1000.0


def test_noisy_counts_protect_examples_and_are_paid_for() -> None:
    """Counts decide weights, so a logit may move by 2 B; both releases are in the ledger."""
    strategy = toy_fedkd(weights="noisy-counts", gamma=0.0005, count_epsilon=0.5)
    metrics = run(strategy).train_metrics_clientapp[1]

    events = [event for event, _ in strategy.ledger_.entries]
    assert strategy.ledger_.unit == "example"
    assert [round(e.l1_sensitivity) for e in events if isinstance(e, LaplaceEvent)] == [1, 20]
    epsilon = metrics[keys.EPSILON_EXAMPLE]
    assert 0.5 < epsilon < 180 * 20 * 0.0005 + 0.5
    assert metrics[keys.EPSILON_PARTY] == math.inf


COUNTED = {"weights": "noisy-counts", "count_epsilon": 0.5}


@pytest.mark.parametrize(
    ("settings", "least"),
    [
        ({"weights": "uniform"}, 1.95),
        ({**COUNTED, "max_epsilon": 2.0}, 1.9),
        ({**COUNTED, "seeded_noise": True}, math.inf),
    ],
)
def test_a_target_is_met(settings: dict[str, Any], least: float) -> None:
    """By noise that is just strong enough, with the counts; a seed takes the promise away."""
    strategy = toy_fedkd(noise="gaussian", target_epsilon=2.0, **settings)
    run(strategy)

    assert strategy.model_
    epsilon = strategy.ledger_.get_epsilon()
    assert epsilon == math.inf if least == math.inf else least < epsilon <= 2.0


def test_the_scale_is_in_the_ledger_at_once() -> None:
    """Also if no scores ever follow; a scale without a price is within no budget."""
    strategy = toy_fedkd(scale="max", weights="uniform", gamma=1.0)
    with pytest.raises(RunFailed, match="run a second round"):
        run(strategy, num_rounds=1)

    assert strategy.ledger_.get_epsilon() == math.inf
    assert "largest logit" in strategy.ledger_.statement()
    limited = toy_fedkd(scale="max", weights="uniform", gamma=1.0, max_epsilon=5.0)
    with pytest.raises(RunFailed, match="epsilon must be at most 5"):
        run(limited, num_rounds=2)


def test_the_budget_is_checked_before_the_noise_is_drawn() -> None:
    """Beyond max_epsilon there is neither a model nor an entry."""
    strategy = toy_fedkd(weights="uniform", gamma=1.0, max_epsilon=5.0)
    with pytest.raises(RunFailed, match=r"epsilon must be at most 5.* all the same: none\."):
        run(strategy)

    assert not strategy.ledger_.entries


def guarded(folder: Path, max_epsilon: float | None, learner: type[CentroidLearner]) -> Any:
    """Return an app whose parties keep journals."""

    def load(number: int) -> Party:
        party = replace(toy_party(number), run="one", learner_fn=learner)
        return with_journal(party, folder / str(number), max_epsilon=max_epsilon)

    return client_app(loading(load))


@pytest.mark.parametrize(
    ("settings", "learner", "reason"),
    [
        (
            {"weights": "uniform", "noise": "gaussian", "target_epsilon": 1.0},
            CentroidLearner,
            "protected, by its budget",
        ),
        ({"weights": "counts"}, Careful, NO_BUDGET),
    ],
)
def test_a_party_with_a_budget_sends_no_bare_logits_and_no_exact_counts(
    settings: dict[str, Any], learner: type[CentroidLearner], reason: str, tmp_path: Path
) -> None:
    """The server's noise comes after the logits have left: the party refuses by itself.

    Even a private model's party keeps its class counts to itself.
    """
    strategy = toy_fedkd(**settings)
    with pytest.raises(RunFailed, match=r"all the same: none\."):
        run(strategy, guarded(tmp_path, 3.0, learner))

    assert len(strategy.rejected_) == NUM_PARTIES
    assert all(reason in why for why in strategy.rejected_.values())


def test_privately_trained_parties_send_logits_for_free(tmp_path: Path) -> None:
    """Logits of a DP-SGD model are post-processing: only the training is charged."""
    strategy = toy_fedkd(weights="uniform")
    metrics = run(strategy, guarded(tmp_path, 50.0, Careful)).train_metrics_clientapp[1]

    assert not strategy.rejected_
    expected = claim(Careful.privacy_events, 1e-5).epsilon
    assert metrics[keys.EPSILON_EXAMPLE] == pytest.approx(expected)
    assert metrics[keys.EPSILON_PARTY] == math.inf


def test_asking_again_costs_again_also_without_a_journal() -> None:
    """A second start in the same run trains again, and the state remembers the first."""
    app = client_app(lambda context: replace(load_toy_party(context), learner_fn=Careful))
    grid = InMemoryGrid(app, NUM_PARTIES)
    told = []
    for seed in (0, 1):
        strategy = toy_fedkd(weights="uniform", seed=seed)
        result = strategy.start(grid, ArrayRecord(), num_rounds=1)
        told.append(result.train_metrics_clientapp[1][keys.EPSILON_EXAMPLE])

    twice = [(event, 2 * count) for event, count in Careful.privacy_events]
    assert told == [
        pytest.approx(claim(events, 1e-5).epsilon) for events in (Careful.privacy_events, twice)
    ]
