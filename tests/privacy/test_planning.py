"""The planner: chances against draws, costs against ledgers, defaults against strategies."""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from scipy.special import ndtr

from fl_strategies import FedHistogram, FedKT, FedMD, FedRegression
from fl_strategies._util import FloatArray
from fl_strategies.errors import InvalidParameter
from fl_strategies.privacy import DEFAULT_MARGINS, Plan, Plans, plan
from fl_strategies.privacy.events import Noise
from fl_strategies.privacy.ledger import PrivacyLedger
from fl_strategies.privacy.mechanisms import NoisyMax
from fl_strategies.privacy.noise import chance_kept, chance_of_plurality
from fl_strategies.privacy.planning import (
    Facts,
    fewest_queries,
    queries_for,
    remedies,
    spread_gaps,
    with_knob,
)
from fl_strategies.registry import PLANNERS
from fl_strategies.strategies.fedkd.options import Scores
from fl_strategies.strategies.fedkt.options import Votes
from fl_strategies.strategies.fedmd.options import Answers
from fl_strategies.strategies.sums.histogram import Histogram
from fl_strategies.strategies.sums.regression import Regression
from tests.toys import common_options

DRAWS = 100_000
FACTS: dict[str, Any] = {
    "target_epsilon": 3.0,
    "num_parties": 12,
    "num_records": 500,
    "num_classes": 4,
    "num_public": 1000,
    "unit": "example",
}


def plans(**changes: Any) -> Plans:
    return _plans(tuple({**FACTS, **changes}.items()))


@cache
def _plans(facts: tuple[tuple[str, Any], ...]) -> Plans:
    return plan(**dict(facts))


def shares_of(margin: float, num_classes: int) -> FloatArray:
    """Return shares of classes with such a lead, each the same fraction of the one before."""
    gaps, _ = spread_gaps(np.array([margin]), num_classes)
    first = (1 + gaps.sum()) / num_classes
    return np.concatenate([[first], first - gaps[0]])


@pytest.mark.parametrize("noise", ["gumbel", "laplace", "gaussian"])
def test_chances_of_labels_are_those_of_the_mechanism(noise: Noise) -> None:
    """A hundred thousand labels of the real mechanism keep the leader as often as foretold."""
    counts = np.array([12, 9, 9, 4, 0])
    mechanism = NoisyMax(noise=noise, scale=4.0, sensitivity=1, unit="example", num_classes=5)
    labels = mechanism.release(np.tile(counts, (DRAWS, 1)), np.random.default_rng(0)).values

    foretold = chance_kept(noise, (counts[0] - counts[1:])[None], 4.0)[0]
    grouped = chance_kept(noise, np.array([[3, 8, 12]]), 4.0, np.array([2, 1, 1]))[0]

    assert (labels == 0).mean() == pytest.approx(foretold, abs=0.006)
    assert grouped == pytest.approx(foretold, abs=1e-9)


def test_the_chance_of_two_gaussian_counts_is_the_closed_form() -> None:
    """The quadrature has the normal distribution of a difference to four digits."""
    gaps = np.array([0.0, 0.5, 3.0, 9.0])

    found = chance_kept("gaussian", gaps[:, None], 2.0)

    assert found == pytest.approx(ndtr(gaps / (2 * math.sqrt(2))), abs=1e-4)


@pytest.mark.parametrize(
    ("votes", "kept", "num_classes", "error"),
    [
        ([6, 2], 0.6, 2, 0.006),
        ([3, 3], 0.7, 2, 0.006),
        ([6, 2, 1, 1], 0.3, 10, 0.012),
        ([19, 1], 0.5, 4, 0.012),
        ([39, 9, 2], 0.4, 3, 0.012),
    ],
)
def test_chances_of_randomised_voters(
    votes: list[int], kept: float, num_classes: int, error: float
) -> None:
    """Pluralities of voters that answer at random are those of a simulation."""
    rng = np.random.default_rng(1)
    own = np.repeat(np.arange(len(votes)), votes)
    size = DRAWS, len(own)
    other = (own + rng.integers(1, num_classes, size)) % num_classes
    answers = np.where(rng.random(size) < kept, own, other)
    counts = np.stack([(answers == label).sum(axis=1) for label in range(num_classes)], axis=1)
    won = (counts + rng.random(counts.shape) / 2).argmax(axis=1) == 0

    assert won.mean() == pytest.approx(chance_of_plurality(votes, kept, num_classes), abs=error)


@pytest.mark.parametrize("num_classes", [2, 3, 10])
def test_votes_are_spread_as_the_output_says(num_classes: int) -> None:
    """Shares sum to one, have the margin asked for and fall by one factor."""
    for margin in (0.05, 0.3, 0.9):
        shares = shares_of(margin, num_classes)

        assert shares.sum() == pytest.approx(1)
        assert shares[0] - shares[1] == pytest.approx(margin)
        assert np.ptp(shares[1:] / shares[:-1]) < 1e-6


def test_many_classes_are_not_laid_out_one_by_one() -> None:
    """A hundred thousand classes take a few columns that stand for all of them."""
    gaps, times = spread_gaps(np.array([0.1, 1.0]), 100_000)

    assert gaps.shape[1] < 100
    assert times.sum() == 99_999


@pytest.mark.parametrize("name", ["fedhistogram L2", "fedhistogram central", "fedkt L2"])
def test_expected_shares_are_those_of_synthetic_counts(name: str) -> None:
    """Counts with the stated margins, noised as planned, keep as many labels as expected."""
    found = plans(margins=(0.1, 0.4, 0.8))[name]
    rng, right = np.random.default_rng(2), []
    for margin in (0.1, 0.4, 0.8):
        shares = shares_of(margin, FACTS["num_classes"])
        size = DRAWS, len(shares)
        if name == "fedkt L2":
            teachers = int(found.voters.split()[0])
            noisy = teachers * shares + found.scale * rng.gumbel(size=size)
        else:
            # Sums of normal variables are normal, one for each party's noise.
            parties = FACTS["num_parties"] if name.endswith("L2") else 1
            records = FACTS["num_parties"] * FACTS["num_records"] / found.num_asked
            noise = found.scale * math.sqrt(parties)
            noisy = records * shares + noise * rng.normal(size=size)
        right.append((noisy.argmax(axis=1) == 0).mean())

    assert found.works
    assert 0.3 < found.right < 0.999
    assert np.mean(right) == pytest.approx(found.right, abs=0.005)


@pytest.mark.parametrize("unit", ["example", "party"])
def test_costs_are_the_ledgers(unit: str) -> None:
    """A plan costs its target at most, nearly all of it, and ten runs what a ledger says."""
    facts = Facts(**{**FACTS, "unit": unit})
    for planner in (planner for planner in PLANNERS if planner.unit == unit):
        found, draft = plans(unit=unit)[planner.name], planner.draft(facts)
        ledger = PrivacyLedger(planner.unit)
        for batch in [*draft.batches] * 10:
            ledger.charge_all(batch)

        assert 0.98 * facts.target_epsilon < found.epsilon <= facts.target_epsilon
        assert found.epsilon_ten_runs == pytest.approx(ledger.get_epsilon())
        assert found.epsilon_ten_runs > 2 * found.epsilon


def test_more_epsilon_gives_better_labels_or_more_of_them() -> None:
    """For each strategy the worth of all labels grows with what may be spent."""
    small, large = plans(), plans(target_epsilon=5.0)

    for one, other in zip(small.plans, large.plans, strict=True):
        assert one.worth < other.worth, one.strategy


def test_queries_are_the_most_that_leave_votes_their_share() -> None:
    """One step more than the search's coarseness decides too little."""
    number = queries_for(lambda asked: 2 / math.sqrt(asked), 0.1, 3, 100_000)

    assert 0.95 * 400 <= number <= 400
    assert queries_for(lambda _: 0.0, 0.1, 3, 100_000) == 15
    assert queries_for(lambda _: 1.0, 0.1, 3, 700) == 700
    assert fewest_queries(3, 7) == 7


@pytest.mark.parametrize(
    ("planner", "facts"),
    [
        (Histogram(level="L2"), {"num_records": 1}),
        (Histogram(level="L1"), {"target_epsilon": 0.3}),
        (Regression(level="L2"), {"num_records": 1}),
        (Regression(level="L1"), {"target_epsilon": 0.3}),
        (Votes(unit="example"), {"target_epsilon": 0.3}),
        (Votes(unit="party"), {"target_epsilon": 1.0}),
        (Answers(), {}),
        (Scores(unit="party"), {"num_parties": 50, "num_public": 4000}),
    ],
)
def test_remedies_are_the_nearest_values_that_work(planner: Any, facts: Any) -> None:
    """Each remedy works, and a little less of it does not."""
    base = Facts(**{**FACTS, **facts})
    found = remedies(planner, base)

    assert planner.problem(base)
    assert found
    for remedy in found:
        changed, other = with_knob(planner, base, remedy.knob, remedy.value)
        assert not changed.problem(other), remedy
        step = 0.02 * remedy.value if remedy.knob == "target_epsilon" else 1
        down = remedy.knob in ("num_classes", "num_public")
        less, other = with_knob(
            planner, base, remedy.knob, remedy.value + step if down else remedy.value - step
        )
        assert less.problem(other), remedy


def test_leads_over_every_class_may_be_stated() -> None:
    """Then nothing is assumed: noisy counts keep their leader as often as foretold."""
    rng = np.random.default_rng(0)
    counts = np.array([[50.0, 40.0, 5.0, 0.0], [30.0, 29.0, 28.0, 0.0]])
    ordered = -np.sort(-counts, axis=1)
    facts = Facts(**{**FACTS, "margins": (ordered[:, :1] - ordered[:, 1:]).tolist()})

    drawn = counts[:, None] + rng.normal(size=(2, DRAWS, 4)) * 10.0
    kept = (drawn.argmax(axis=2) == 0).mean()

    assert facts.right_labels("gaussian", 10.0, 1.0) == pytest.approx(kept, abs=0.005)
    assert with_knob(Answers(), facts, "num_classes", 2)[1].margins == ((10.0,), (1.0,))
    with pytest.raises(InvalidParameter, match="one number for every class but the first"):
        Facts(**{**FACTS, "margins": [[0.1, 0.2]]})


def test_the_best_plan_trusts_the_server_only_if_it_must() -> None:
    """A trusted server's plan has more worth and is taken only where no other works."""
    found = plans()
    few = plans(num_parties=400, num_records=1, target_epsilon=0.2)

    assert found["fedhistogram central"].worth > found["fedhistogram L2"].worth
    assert found.best == found["fedhistogram L2"]
    assert few.best == few["fedhistogram central"]
    assert plans(unit="party", num_parties=2).best is None


def test_the_output_states_its_assumptions_and_what_would_work() -> None:
    """Margins, their meaning, whose records, and the remedies are in the text."""
    text = "\n".join(plans(unit="party", num_parties=2, target_epsilon=0.1).lines())

    assert "2 parties of 500 records each" in text
    assert ", ".join(f"{margin:g}" for margin in DEFAULT_MARGINS) in text
    assert "the same fraction of the votes of the one before it" in text
    assert "take: nothing" in text
    assert "fedkt L1 cannot work" in text
    assert "What would: at least" in text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"target_epsilon": 0.0}, "plan: target_epsilon must be"),
        ({"num_classes": 1}, "plan: num_classes must be"),
        ({"margins": ()}, "plan: margins must be from 1 to a million, got 0"),
        ({"margins": (0.5, -0.1)}, "plan: margins must be from 0 to 1000"),
        ({"margins": (math.nan,)}, "plan: margins must be from 0 to 1000"),
        ({"unit": "village"}, "plan: unit must be party or example"),
    ],
)
def test_wrong_facts_are_refused_in_one_sentence(
    changes: dict[str, Any], sentence: str
) -> None:
    """Each mistake names its parameter and rule."""
    with pytest.raises(InvalidParameter, match=sentence):
        plans(**changes)


def toy_plan(strategy: str, **changes: Any) -> Plan:
    """Plan for the toy federation: 60 public rows of 3 classes."""
    facts = {"num_records": 500, "num_classes": 3, "num_public": 60, **changes}
    return plan(**facts)[strategy]  # type: ignore[arg-type]


@pytest.mark.parametrize("epsilon", [2.0, 5.0])
def test_fedkt_l2_takes_what_the_planner_says(epsilon: float) -> None:
    """A target alone gives queries, teachers, noise and price of the plan."""
    strategy = FedKT.from_settings(
        **common_options(), privacy_level="L2", target_epsilon=epsilon
    )
    found = toy_plan("fedkt L2", target_epsilon=epsilon, num_parties=4)

    privacy = strategy.options.privacy
    assert privacy is not None
    assert strategy.num_queries == found.num_asked
    assert found.voters == f"{strategy.options.num_teachers} teachers of a party"
    noise = strategy.options.mechanism(privacy, 3, strategy.num_queries)
    assert noise.scale == found.scale


def test_fedkt_l1_takes_what_the_planner_says_and_settings_win() -> None:
    """Queries follow the target unless they are given."""
    given = {**common_options(num_parties=30), "privacy_level": "L1", "target_epsilon": 2.0}
    found = toy_plan("fedkt L1", target_epsilon=2.0, num_parties=30, unit="party")

    assert FedKT.from_settings(**given).num_queries == found.num_asked < 60
    assert FedKT.from_settings(**given, num_queries=17).num_queries == 17


def test_fedmd_takes_what_the_planner_says_and_settings_win() -> None:
    """A target alone means Gumbel noise on labels, the plan's rows and one round."""
    given = {**common_options(num_parties=40), "release": "ldp", "target_epsilon": 5.0}
    found = toy_plan("fedmd ldp", target_epsilon=5.0, num_parties=40)
    strategy, told = FedMD.from_settings(**given), FedMD.from_settings(**given, num_public=9)

    noise, release = strategy.settings.noise, strategy.options.release
    assert noise is not None
    assert (noise.noise, noise.scale) == (found.noise, pytest.approx(found.scale))
    assert strategy.settings.num_public == found.num_asked
    assert getattr(release, "max_epsilon") == 5.0  # noqa: B009
    assert told.settings.num_public == 9


def test_fedhistogram_takes_what_the_planner_says() -> None:
    """Cells and noise of strategy and plan are one."""
    strategy = FedHistogram.from_settings(
        **common_options(), target_epsilon=5.0, num_records=2000
    )
    found = toy_plan("fedhistogram L2", target_epsilon=5.0, num_parties=4)

    assert strategy._summary.num_cells == found.num_asked
    noise = strategy._of_one_division(strategy._summed(strategy._mechanism))
    assert noise == pytest.approx(2 * found.scale, rel=2e-3)


@pytest.mark.parametrize("level", ["L1", "L2", "central"])
def test_fedregression_takes_what_the_planner_says(level: str) -> None:
    """Components and noise of strategy and plan are one, but for rounded features."""
    common = {**common_options(40), "public": np.random.default_rng(0).normal(size=(200, 30))}
    strategy = FedRegression.from_settings(
        **common, privacy_level=level, target_epsilon=5.0, num_records=20_000
    )
    found = plan(
        target_epsilon=5.0,
        num_parties=40,
        num_records=500,
        num_classes=3,
        num_public=200,
        num_columns=30,
        unit="party" if level == "L1" else "example",
    )[f"fedregression {level}"]

    mechanism = strategy._mechanism
    assert mechanism is not None
    assert strategy._summary.num_features == found.num_asked + 1
    length = 4096 if level == "L1" else 256
    assert mechanism.drawn_scale == pytest.approx(length * found.scale, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "settings", "advice"),
    [
        (FedKT, {"privacy_level": "L1", "target_epsilon": 0.5}, "at least \\d+ parties; or"),
        (FedKT, {"privacy_level": "L2", "target_epsilon": 0.1}, "or epsilon of at least"),
        (
            FedKT,
            {
                "privacy_level": "L2",
                "target_epsilon": 3.0,
                "num_queries": 60,
                "num_teachers": 2,
            },
            "Leave num_queries and num_teachers open, which gives \\d+ queries",
        ),
        (FedMD, {"release": "ldp", "target_epsilon": 0.5}, "at least \\d+ parties; or"),
        (FedHistogram, {"target_epsilon": 0.01, "num_records": 50}, "records of a party; or"),
        (FedHistogram, {"target_epsilon": 5.0, "num_cells": 60}, "Leave num_cells open"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_with_what_would(
    kind: Any, settings: dict[str, Any], advice: str
) -> None:
    """The refusal comes from the constructor, before any party is asked or anything paid."""
    with pytest.raises(InvalidParameter, match=advice):
        kind.from_settings(**common_options(), **settings)
