"""FedStatistics: what pooled records say, to the bit, its sensitivity, and what it refuses."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Context
from scipy.optimize import minimize
from sklearn.datasets import load_wine

from clients import MomentsLearner, client_app
from fl_strategies import Column, FedStatistics, FedStatisticsOptions, Party, SumPrivacy
from fl_strategies._util import Array
from fl_strategies.aggregation.statistics import Statistics, kaplan_meier
from fl_strategies.errors import InvalidParameter, KnowledgeMismatch
from fl_strategies.learners import Task
from fl_strategies.strategies.sums.statistics import GAP, MOST_LEVELS, NUMBER, Tally
from simulations.runtime.local import run_local

WINE = load_wine()
X, Y = WINE.data[:, :4], WINE.target
LOW, HIGH = [11.0, 1.0, 1.5, 10.0], [14.5, 5.0, 3.0, 30.0]
COLUMNS = [
    Column(name=name, low=low, high=high)
    for name, low, high in zip(WINE.feature_names[:4], LOW, HIGH, strict=True)
]


def federate(
    deal: Sequence[Array],
    x: Array = X,
    y: Array = Y,
    *,
    columns: Sequence[Column] | None = COLUMNS,
    task: Task = "single-label",
    num_classes: int = 3,
    public: Array | None = None,
    **given: Any,
) -> FedStatistics:
    """Return the strategy after a round in which parties hold these rows."""

    def make() -> MomentsLearner:
        return MomentsLearner(num_classes=num_classes, task=task)

    def load_party(context: Context) -> Party:
        number = int(context.node_config["partition-id"])
        return Party(
            x=x[deal[number]],
            y=y[deal[number]],
            public=public,
            num_classes=num_classes,
            task=task,
            learner_fn=make,
            partition_id=number,
        )

    strategy = FedStatistics(
        public=public,
        num_classes=num_classes,
        learner_fn=make,
        task=task,
        columns=columns,
        num_parties=len(deal),
        options=FedStatisticsOptions(num_records=sum(map(len, deal)), **given),
    )
    run_local(strategy, client_app(load_party), len(deal))
    return strategy


EVERYBODY = np.arange(len(Y))


def deals() -> dict[str, list[Array]]:
    """Return the same records as one party, alike, by label, and in parties of a few."""
    mixed = np.random.default_rng(0).permutation(len(Y))
    return {
        "one": [EVERYBODY],
        "five alike": np.array_split(mixed, 5),
        "by label": np.array_split(EVERYBODY, 5),
        "fifty of a few": np.array_split(EVERYBODY, 50),
        "of all sizes": np.split(mixed, [1, 3, 10, 40]),
    }


def rounded(x: Array, low: Sequence[float] = LOW, high: Sequence[float] = HIGH) -> Array:
    """Return records as they are summed, in their own units."""
    below, width = np.array(low), np.array(high) - np.array(low)
    steps = np.rint((2 * ((np.clip(x, low, high) - below) / width) - 1) * MOST_LEVELS)
    return below + (steps / MOST_LEVELS + 1) / 2 * width


def groups_of(x: Array, y: Array) -> list[Array]:
    return [x, *(x[y == label] for label in range(3))]


def test_without_noise_they_are_those_of_pooled_records() -> None:
    found = federate(deals()["by label"]).statistics_

    parts = groups_of(rounded(X), Y)
    assert found.groups == ("all", "class 0", "class 1", "class 2")
    assert found.counts.tolist() == [len(part) for part in parts]
    assert not found.missing.any()
    assert found.correlations is not None
    for group, part in enumerate(parts):
        assert found.means[group] == pytest.approx(part.mean(axis=0), rel=1e-12)
        assert found.variances[group] == pytest.approx(part.var(axis=0, ddof=1), rel=1e-9)
        assert found.correlations[group] == pytest.approx(np.corrcoef(part.T), abs=1e-9)
    for group, part in enumerate(groups_of(np.clip(X, LOW, HIGH), Y)):
        for number, edges in enumerate(found.edges):
            counts, _ = np.histogram(part[:, number], edges)
            assert found.histograms[group, number].tolist() == counts.tolist()
    assert found.epsilon == math.inf


@pytest.mark.parametrize("settings", [{}, {"correlations": False}, {"by_class": False}])
def test_every_division_of_the_records_gives_the_same_bits(settings: dict[str, Any]) -> None:
    found = {name: federate(deal, **settings) for name, deal in deals().items()}

    texts = {name: json.dumps(one.statistics_.to_json()) for name, one in found.items()}
    assert {*texts.values()} == {texts["one"]}


def test_quantiles_are_within_a_bin_of_those_of_records() -> None:
    found = federate(deals()["five alike"], num_bins=50).statistics_

    exact = np.quantile(np.clip(X, LOW, HIGH), [0.1, 0.5, 0.9], axis=0).T
    widths = np.diff(found.edges, axis=1)[:, :1]
    assert (np.abs(found.quantiles([0.1, 0.5, 0.9])[0] - exact) <= widths).all()


# Gaps, categories, numeric targets


def with_gaps() -> tuple[Array, Array, list[Column]]:
    """Return rows with a category of two, and gaps of two columns; and the rows with NaN."""
    rng = np.random.default_rng(3)
    shown = X[:, :2].copy()
    shown[rng.random(shown.shape) < 0.2] = np.nan
    marks, kinds = np.isnan(shown), rng.integers(0, 3, len(X))
    rows = np.hstack([np.where(marks, 99.0, shown), marks, kinds[:, None] == [0, 1]])
    columns = [
        *COLUMNS[:2],
        *(Column(name=f"{one.name} missing", kind="gap", of=one.name) for one in COLUMNS[:2]),
        *(Column(name=f"colour: {word}", kind="category", of="colour") for word in ("a", "b")),
    ]
    return rows, shown, columns


def test_gaps_are_missing_from_everything_and_counted() -> None:
    rows, shown, columns = with_gaps()

    found = federate(deals()["five alike"], rows, columns=columns).statistics_

    known = rounded(shown, LOW[:2], HIGH[:2])
    assert found.columns == (*(c.name for c in COLUMNS[:2]), "colour: a", "colour: b")
    assert found.missing[0] == pytest.approx([*np.isnan(shown).mean(axis=0), 0, 0])
    assert found.means[0, :2] == pytest.approx(np.nanmean(known, axis=0))
    assert found.variances[0, :2] == pytest.approx(np.nanvar(known, axis=0, ddof=1))
    assert found.means[0, 2:] == pytest.approx(rows[:, 4:].mean(axis=0))
    assert found.histograms[0].sum(axis=1).tolist() == (~np.isnan(shown)).sum(axis=0).tolist()
    assert found.correlations is not None
    both = ~np.isnan(known).any(axis=1)
    common = np.cov(known[both].T)[0, 1]
    scale = np.sqrt(found.variances[0, 0] * found.variances[0, 1])
    assert found.correlations[0, 0, 1] == pytest.approx(common / scale)
    beside = ~np.isnan(known[:, 0])
    covariance = np.cov(known[beside, 0], rows[beside, 4])[0, 1]
    scale = np.sqrt(found.variances[0, 0] * found.variances[0, 2])
    assert found.correlations[0, 0, 2] == pytest.approx(covariance / scale)


def test_numeric_targets_are_columns_after_those_of_rows() -> None:
    columns = [*COLUMNS[:3], Column(name="alkalinity", low=LOW[3], high=HIGH[3])]
    given: dict[str, Any] = {"task": "regression", "num_classes": 1, "columns": columns}

    found = federate(deals()["by label"], X[:, :3], X[:, 3:], **given).statistics_

    assert found.groups == ("all",)
    assert found.means[0] == pytest.approx(rounded(X).mean(axis=0), rel=1e-12)


def test_with_public_rows_the_model_is_naive_bayes_and_travels() -> None:
    public = X[::4]

    found = federate(deals()["by label"], public=public, columns=None)

    assert (found.model_.predict(X) == Y).mean() > 0.8
    shares = found.statistics_.class_shares(public)
    assert shares.sum(axis=1) == pytest.approx(1)
    assert (shares.argmax(axis=1) == Y[::4]).mean() > 0.8
    assert found.state.delivery is not None


# Survival


def survivors() -> tuple[Array, Array]:
    """Return whole days, events and a class that dies later."""
    rng = np.random.default_rng(5)
    y = rng.integers(0, 2, 300)
    died, left = rng.exponential(20 + 20 * y), rng.exponential(40, 300)
    days = np.minimum(np.floor(np.minimum(died, left)), 59)
    return np.stack([days, died <= left], axis=1), y


def product_limit(rows: Array, last: int) -> list[float]:
    """Return the estimate after each day, by its definition and record by record."""
    share, found = 1.0, [1.0]
    for day in range(last):
        at_risk = sum(own >= day for own in rows[:, 0])
        events = sum(own == day and event for own, event in rows)
        share *= 1 - events / at_risk if at_risk else 1.0
        found.append(share)
    return found


def test_curves_of_survival_are_those_of_pooled_records_by_group() -> None:
    rows, y = survivors()
    columns = [Column(name="days", high=60.0), Column(name="died")]
    deal = np.array_split(np.arange(300), 7)
    given: dict[str, Any] = {"columns": columns, "num_classes": 2, "num_times": 60}

    found = federate(deal, rows, y, **given, time="days", event="died").statistics_

    assert found.survival is not None
    assert found.at_risk is not None
    for group, own in enumerate([rows, rows[y == 0], rows[y == 1]]):
        assert found.survival[group] == pytest.approx(product_limit(own, 60))
        assert found.at_risk[group, 0] == len(own)
    assert found.survival[2, 30] > found.survival[1, 30] + 0.1


def test_a_two_column_target_gives_the_same_curve() -> None:
    rows, y = survivors()
    columns = [Column(name="class"), Column(name="days", high=60.0), Column(name="died")]
    deal = np.array_split(np.arange(300), 7)
    given: dict[str, Any] = {"task": "regression", "num_classes": 2, "num_times": 60}
    given |= {"columns": columns, "time": "days", "event": "died"}

    found = federate(deal, y[:, None].astype(float), rows, **given).statistics_

    assert found.survival is not None
    assert found.survival[0] == pytest.approx(product_limit(rows, 60))


def test_noise_leaves_curves_that_fall() -> None:
    noisy = np.random.default_rng(0).normal(0, 20, (5, 30, 2)) + 5

    curves, at_risk = kaplan_meier(noisy)

    assert (np.diff(curves, axis=1) <= 0).all()
    assert (curves >= 0).all()
    assert (at_risk >= 0).all()


# Sensitivity


def layout(*kinds: int, gaps: Sequence[int] = (), **given: Any) -> Tally:
    """Return the layout of values of these kinds, of bounds -1 and 1 or 0 and 1."""
    places = np.array(kinds)
    low = np.where(places == NUMBER, -1.0, 0.0)
    marks = np.array([*gaps, *[-1] * (len(kinds) - len(gaps))])
    sizes: dict[str, Any] = {"levels": 8, "digits": 1, "num_bins": 4, "num_times": 4}
    made = Tally(
        num_values=len(kinds),
        low=low,
        high=np.ones(len(kinds)),
        kinds=places,
        gaps=marks,
        **{**sizes, **given},
    )
    return Tally.from_arrays(made.to_arrays(), len(kinds))


LAYOUTS = {
    "one number": layout(NUMBER),
    "two numbers": layout(NUMBER, NUMBER),
    "a number with gaps, categories": layout(NUMBER, GAP, 0, 0, 0, gaps=[1]),
    "two numbers with the same gap": layout(NUMBER, NUMBER, GAP, gaps=[2, 2]),
    "survival": layout(NUMBER, NUMBER, NUMBER, time=0, event=1),
}
CASES = {
    f"{name}, {words}": replace(made, correlations=both)
    for name, made in LAYOUTS.items()
    for words, both in (("products", True), ("squares", False))
}


@pytest.mark.parametrize("name", CASES)
def test_no_replaced_record_moves_sums_more_than_is_accounted(name: str) -> None:
    """By brute force over rows at and between bounds, of the same class and of another."""
    made, rng = CASES[name], np.random.default_rng(0)
    width = len(made.kinds)
    multiples = made.multiples(2, "single-label")

    def moved(rows: Array, classes: Array) -> float:
        a, b = (
            made.of_records(row[None], one[None], 2, "single-label") * multiples
            for row, one in zip(rows.reshape(2, width), classes, strict=True)
        )
        return float(np.linalg.norm((a - b).astype(float)))

    tried = []
    for _ in range(800):
        corners = rng.choice([-9.0, -1.0, 0.0, 1.0], 2 * width)
        inside = rng.uniform(-1, 1, 2 * width)
        rows = np.where(rng.random(2 * width) < 0.3, inside, corners)
        classes = rng.integers(0, 2, 2)
        tried.append((moved(rows, classes), rows, classes))
    worst = []
    for _, rows, classes in sorted(tried, key=lambda case: -case[0])[:3]:
        found = minimize(lambda r, c=classes: -moved(r, c), rows, method="Nelder-Mead")
        worst.append(-found.fun)

    bound = made.moved(2, "single-label")
    assert max(worst) <= bound
    assert max(worst) > 0.85 * bound


def test_each_part_takes_a_like_share_of_the_noise() -> None:
    made = LAYOUTS["survival"]
    of_values, bins = made._moved_values, 2 * 3 * made._weights_of_bins[0] ** 2

    assert 0.9 * of_values < bins <= of_values
    assert 0.9 * of_values < 2 * made._weights_of_bins[1] ** 2 <= of_values


# Noise


PRIVATE: dict[str, Any] = {"target_epsilon": 5.0, "seeded_noise": True, "accept_noise": True}


@pytest.mark.parametrize("level", ["L2", "central"])
@pytest.mark.parametrize("correlations", [True, False])
def test_under_noise_statistics_are_possible_ones(level: Any, correlations: bool) -> None:
    rows, y = survivors()
    columns = [Column(name="days", high=60.0), Column(name="died")]
    given: dict[str, Any] = {"columns": columns, "num_classes": 2, "correlations": correlations}
    privacy = SumPrivacy(privacy_level=level, **{**PRIVATE, "target_epsilon": 0.5})

    strategy = federate(
        np.array_split(np.arange(300), 3), rows, y, **given,
        time="days", event="died", privacy=privacy,
    )  # fmt: skip

    found = strategy.statistics_
    assert (found.counts >= 0).all()
    assert (found.variances[np.isfinite(found.variances)] >= 0).all()
    assert (found.histograms >= 0).all()
    assert found.correlations is None or (np.abs(np.nan_to_num(found.correlations)) <= 1).all()
    assert found.survival is not None
    assert (np.diff(found.survival, axis=1) <= 0).all()
    assert ((found.means >= [0, 0]) & (found.means <= [60, 1]) | np.isnan(found.means)).all()


def test_weak_noise_leaves_statistics_as_they_are_and_is_accounted_for() -> None:
    many = np.tile(EVERYBODY, 300)
    rng = np.random.default_rng(1)
    x = X[many] + rng.normal(0, 0.01, (len(many), 4))
    deal = np.array_split(rng.permutation(len(many)), 4)
    privacy = SumPrivacy(privacy_level="L2", target_epsilon=3.0)

    strategy = federate(deal, x, Y[many], privacy=privacy)

    found = strategy.statistics_
    assert found.counts[0] == pytest.approx(len(many), abs=6 * found.noise * math.sqrt(3))
    assert found.means[0] == pytest.approx(np.clip(x, LOW, HIGH).mean(axis=0), rel=0.01)
    assert found.deviations[0] == pytest.approx(np.clip(x, LOW, HIGH).std(axis=0), rel=0.05)
    assert found.correlations is not None
    exact = np.corrcoef(np.clip(x, LOW, HIGH).T)
    assert found.correlations[0] == pytest.approx(exact, abs=0.05)
    assert 2.9 < found.epsilon <= 3.0
    assert strategy.ledger_.get_epsilon() == found.epsilon


def test_fewer_products_are_less_noise_on_variances() -> None:
    def noise(correlations: bool) -> float:
        made = layout(*[NUMBER] * 20, levels=16, correlations=correlations)
        return made.moved(2, "single-label") / made._weights[2]

    assert noise(False) < noise(True) / 3


# The result


def test_the_table_and_json_say_the_same() -> None:
    rows, _, columns = with_gaps()
    found = federate(deals()["one"], rows, columns=columns).statistics_

    text = found.describe().splitlines()
    told = json.loads(json.dumps(found.to_json()))

    assert text[0].split()[:3] == ["column", "group", "count"]
    assert len(text) == 1 + len(found.columns) * len(found.groups)
    assert text[1].split()[:2] == ["alcohol", "all"]
    assert f"{found.means[0, 0]:.5g}" in text[1]
    assert told["means"][0][0] == found.means[0, 0]
    assert told["survival"] is None
    assert (told["epsilon"], told["epsilon-unbounded"]) == (None, True)
    assert told["quartiles"][0][0][1] == pytest.approx(found.quantiles()[0, 0, 1])


def test_a_class_without_records_has_no_figures() -> None:
    found = federate([np.flatnonzero(Y == 1)]).statistics_

    assert isinstance(found, Statistics)
    assert np.isnan(found.means[1]).all()
    assert "-" in found.describe()
    assert found.class_shares(X[:3])[:, 1].min() > 0.99


# What is refused

NAMES = ["low", "high", "kinds", "gaps", "sizes"]


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("low", 0, math.nan),
        ("high", 0, -5.0),
        ("kinds", 0, 9),
        ("kinds", 1, NUMBER),
        ("kinds", 2, GAP),
        ("gaps", 0, 0),
        ("gaps", 0, 5),
        ("gaps", 2, 1),
        ("gaps", 0, -1),
        ("sizes", 0, 2**20),
        ("sizes", 1, 3),
        ("sizes", 2, 0),
        ("sizes", 3, 2**30),
        ("sizes", 4, 2),
        ("sizes", 6, 7),
    ],
)
def test_a_hostile_layout_is_refused(name: str, place: int, value: float) -> None:
    arrays = LAYOUTS["a number with gaps, categories"].to_arrays()
    assert [*arrays] == NAMES
    arrays[name] = arrays[name].copy()
    arrays[name][place] = value

    with pytest.raises(KnowledgeMismatch, match="Server: columns must be"):
        Tally.from_arrays(arrays, 5)


def test_sums_in_two_digits_get_no_noise() -> None:
    with pytest.raises(KnowledgeMismatch, match="must have one digit"):
        layout(NUMBER, digits=2).moved(2, "single-label")


def test_values_that_are_no_targets_are_refused() -> None:
    made = layout(NUMBER, NUMBER, NUMBER)

    with pytest.raises(KnowledgeMismatch, match="columns must be 4, of rows and numeric"):
        made.check_task(1, "regression")


ALTERED = {
    "one more record": (0, 1),
    "a negative count": (0, -1000),
    "a value beyond its bound": (1, 10**9),
    "a square beyond its bound": (5, 2**60),
    "a bin too many": (15, 1),
}


@pytest.mark.parametrize(("place", "more"), ALTERED.values(), ids=ALTERED)
def test_sums_that_no_records_have_are_impossible(place: int, more: int) -> None:
    made = layout(NUMBER, NUMBER, NUMBER, NUMBER)
    sums = made.of_records(X / 50, Y, 3, "single-label")
    assert made.possible(sums, len(Y), "single-label")

    sums[0, 0, place] += more

    assert not made.possible(sums, len(Y), "single-label")


def test_products_without_any_records_that_have_them_are_impossible() -> None:
    made = layout(NUMBER, NUMBER, digits=2, levels=MOST_LEVELS)
    sums = made.of_records(X[:, :2] / 50, Y, 3, "single-label")
    assert made.possible(sums, len(Y), "single-label")

    sums[0, :, 4] = 2**8

    assert not made.possible(sums, len(Y), "single-label")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "bounds": ({"columns": [*COLUMNS[:3], Column(name="a", low=2)]}, "bounds in order"),
    "number": ({"columns": COLUMNS[:3]}, "columns must be 4, one for each value"),
    "names": ({"columns": [COLUMNS[0]] * 4}, "different names"),
    "gaps": ({"columns": [*COLUMNS[:3], Column(name="g", kind="gap")]}, "gaps of numbers"),
    "time": ({"time": "x", "event": "y"}, "time and event must be one of the columns alcohol"),
    "event": ({"time": "alcohol"}, "event must be given with time"),
    "level": ({"privacy": SumPrivacy(privacy_level="L1", target_epsilon=1.0)}, "L2 or central"),
    "outliers": ({"exclude_outliers": True}, "False without public rows and classes"),
    "nothing": ({"columns": None}, "columns must be given where there are no public rows"),
    "size": ({"num_bins": 2**12, "columns": COLUMNS, "num_times": 2}, ""),
}


@pytest.mark.parametrize(("given", "words"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_one_sentence(given: dict[str, Any], words: str) -> None:
    if not words:
        assert federate([EVERYBODY], **given).statistics_.histograms.shape[2] == 2**12
        return
    public = X[:5] if given.get("columns", 1) and len(given.get("columns", [])) == 3 else None
    with pytest.raises(InvalidParameter, match=words):
        federate([EVERYBODY], public=public, **given)


def test_a_party_that_leaves_is_in_no_figure() -> None:
    deal = deals()["five alike"]
    whole, others = federate(deal), federate(deal[:4])

    whole.without(4)

    told = whole.statistics_.to_json()
    assert json.dumps(told) == json.dumps(others.statistics_.to_json())
