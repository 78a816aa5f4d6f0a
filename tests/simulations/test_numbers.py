"""Numeric targets: how a label column is understood, bounded, learned, measured and shown."""

import logging
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fl_strategies import REGISTRY
from fl_strategies._util import Array
from fl_strategies.errors import InvalidData, InvalidParameter
from simulations.config import Settings
from simulations.data.sets import Request, load_dataset
from simulations.data.splits import Dataset, Deal, partition
from simulations.data.targets import Targets
from simulations.federation import load_federation
from simulations.results.page import page
from simulations.results.report import render
from simulations.runtime.local import run_once

TOWNS = ("Aarau", "Bern", "Chur", "Davos")


def houses(number: int = 800, *, bent: bool = True, seed: int = 0) -> pd.DataFrame:
    """Return houses whose price depends on sizes in curves, or on towns and sizes in lines."""
    rng = np.random.default_rng(seed)
    size, age = rng.uniform(40, 200, number), rng.uniform(0, 80, number)
    town = rng.integers(len(TOWNS), size=number)
    price = 300 + 60 * np.sin(size / 25) + 0.02 * (age - 40) ** 2 if bent else 2 * size - age
    price = price + rng.normal(scale=10, size=number) + (0 if bent else 40 * town)
    return pd.DataFrame(
        {"size": size, "age": age, "town": np.array(TOWNS)[town], "price": price.round(2)}
    )


def load(frame: pd.DataFrame, tmp_path: Path, **options: Any) -> Dataset:
    path = tmp_path / "houses.csv"
    frame.to_csv(path, index=False)
    given = {"label": "price", **options}
    return load_dataset(str(path), Request(rng=np.random.RandomState(0), **given))


def settings_of(frame: pd.DataFrame, tmp_path: Path, **given: Any) -> Settings:
    path = tmp_path / "houses.csv"
    frame.to_csv(path, index=False)
    usual = {"strategy": "fedmoments", "data": str(path), "label": "price", "num_workers": 1}
    return Settings.of(**{**usual, "num_parties": 3, "output_dir": str(tmp_path), **given})


def with_cells(frame: pd.DataFrame, cells: dict[int, str]) -> pd.DataFrame:
    """Return a table whose label has other texts in some rows."""
    labels = frame["price"].astype(str)
    for row, text in cells.items():
        labels.iloc[row] = text
    return frame.assign(price=labels)


def dealt_rows(data: Dataset, frame: pd.DataFrame) -> Array:
    """Return the rows of the file that are private, by their targets."""
    places = {price: row for row, price in enumerate(frame["price"])}
    return np.array([places[price] for price in data.y_train[:, 0].tolist()])


# How a label column is understood


def test_a_column_of_many_numbers_is_understood(tmp_path: Path) -> None:
    frame = houses()
    data = load(frame, tmp_path)

    assert (data.task, data.classes, data.num_classes) == ("regression", ("price",), 1)
    assert data.y_train.dtype == np.float64
    assert data.y_train.shape == (600, 1)
    public = data.y_public
    assert public is not None
    assert sorted(np.concatenate([data.y_train, public, data.y_test])[:, 0]) == pytest.approx(
        sorted(frame["price"])
    )
    assert data.target_range == (public.min(), public.max())
    assert data.understood[-1] == (
        f"label 'price' is a number to predict: 100 different ones in 100 public rows, from "
        f"{public.min():.6g} to {public.max():.6g} (if they are classes: --set task=classes)"
    )


@pytest.mark.parametrize(
    ("labels", "task"),
    [
        ([1, 2, 3] * 50, "single-label"),
        ([3.5, 4.0, 4.5] * 50, "regression"),
        (["1,5", "2,5", "7"] * 50, "regression"),
        ([row % 90 for row in range(150)], "single-label"),
        ([7 * (row % 90) for row in range(900)], "regression"),
        (["$ 1,200", "$ 950", "$ 8.50"] * 50, "regression"),
        (["low", "high", "1.5"] * 50, "single-label"),
    ],
)
def test_public_labels_decide(labels: list[Any], task: str, tmp_path: Path) -> None:
    """A few whole numbers are classes; decimals or very many are numbers."""
    columns = {"x": [row % 7 for row in range(len(labels))], "price": labels}
    assert load(pd.DataFrame(columns), tmp_path).task == task


def test_the_user_may_decide(tmp_path: Path) -> None:
    frame = houses()
    grades = frame.assign(price=np.arange(len(frame)) % 5)

    assert load(grades, tmp_path).task == "single-label"
    assert load(grades, tmp_path, task="numbers").task == "regression"
    with pytest.raises(
        InvalidData, match=r"'price' with .* To predict numbers, .*task=numbers"
    ):
        load(frame, tmp_path, task="classes")
    digits = Request(rng=np.random.RandomState(0), task="numbers")
    with pytest.raises(InvalidParameter, match="task must be auto or classes for digits"):
        load_dataset("digits", digits)
    diabetes = Request(rng=np.random.RandomState(0), task="classes")
    with pytest.raises(InvalidParameter, match="task must be auto or numbers for diabetes"):
        load_dataset("diabetes", diabetes)
    words = frame.assign(price="high")
    with pytest.raises(InvalidData, match="numbers in public rows, got 'price' without a"):
        load(words, tmp_path, task="numbers")


def test_a_label_that_is_no_number_is_the_public_median(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It changes nothing about other records, and ends no run."""
    frame = houses()
    plain = load(frame, tmp_path)
    private = dealt_rows(plain, frame)
    strange = {int(private[0]): "about 40", int(private[1]): "1e300"}

    with caplog.at_level(logging.WARNING, logger="flwr.fl_strategies"):
        data = load(with_cells(frame, strange), tmp_path)

    public = plain.y_public
    assert public is not None
    assert data.y_train[0, 0] == np.median(public)
    assert data.y_train[1, 0] == 10 * np.abs(public).max()
    assert np.array_equal(data.y_train[2:], plain.y_train[2:])
    assert np.array_equal(data.x_train, plain.x_train)
    assert data.understood == plain.understood
    assert "1 labels are no numbers; the public median" in caplog.text


def test_rows_without_a_label_are_public_rows(tmp_path: Path) -> None:
    frame = houses()
    cells = dict.fromkeys(range(50), "") | {50: "NA", 51: "?"}
    data = load(with_cells(frame, cells), tmp_path)

    assert data.y_public is None
    assert data.target_range is not None
    assert len(data.x_public) == 52 + (800 - 52) // 8
    assert data.understood[-1] == "without a label (52): 52 are public rows, 0 are dropped"
    assert np.isfinite(data.y_train).all()
    assert np.isfinite(data.y_test).all()


def test_nothing_is_measured_on_a_label_that_nobody_can_read(tmp_path: Path) -> None:
    frame = houses()
    plain = load(frame, tmp_path)
    row = int(np.flatnonzero(frame["price"] == plain.y_test[0, 0])[0])
    data = load(with_cells(frame, {row: "unknown"}), tmp_path)
    assert len(data.y_test) == len(plain.y_test) - 1


def test_targets_without_public_ones_are_read_as_they_are() -> None:
    read = Targets(label="price").read("t.csv", np.array(["1e6", "cheap", ""]))
    assert read[:2, 0].tolist() == [1e6, 0.0]
    assert np.isnan(read[2, 0])


def test_parties_may_hold_different_ranges() -> None:
    """Numbers are dealt as ten classes, each a tenth of them."""
    y = np.random.default_rng(0).normal(size=(200, 1))
    deal = Deal(
        y=y, num_parties=5, scheme="by-label", num_classes=1, rng=np.random.RandomState(0)
    )

    parts = partition(deal)

    assert [len(part) for part in parts] == [40] * 5
    assert all(y[one].max() < y[next_].min() for one, next_ in pairwise(parts))


# Strategies and bounds


def test_strategies_that_learn_no_numbers_say_so(tmp_path: Path) -> None:
    able = r"one of akd, avgkd, ekd, .*fedmoments.* for numeric targets, got "
    for name in {*REGISTRY} - {"fedstatistics"}:  # which describes columns and learns nothing
        federation = load_federation(settings_of(houses(100), tmp_path, strategy=name))
        if name in ("akd", "avgkd", "ekd", "pkd", "fedavg", "feddf", "scaffold", "fedmoments"):
            assert federation.strategy().name == name
        else:
            with pytest.raises(InvalidParameter, match=f"strategy must be {able}'{name}'"):
                federation.strategy()


def bounds_of(tmp_path: Path, **given: Any) -> tuple[float, float]:
    strategy: Any = load_federation(settings_of(houses(), tmp_path, **given)).strategy()
    low, high = strategy.target_bounds
    return float(low[0]), float(high[0])


def test_bounds_are_public_or_declared(tmp_path: Path) -> None:
    public = load(houses(), tmp_path).y_public
    assert public is not None
    low, high = public.min(), public.max()
    reach = high - low

    assert bounds_of(tmp_path) == pytest.approx((low - reach, high + reach))
    noisy = bounds_of(tmp_path, target_epsilon=3.0, num_records=600)
    assert noisy == pytest.approx((low - reach / 10, high + reach / 10))
    assert bounds_of(tmp_path, target_high=900) == (0, 900)
    assert bounds_of(tmp_path, target_low=-5, target_high=10) == (-5, 10)
    assert bounds_of(tmp_path, target_low=-5) == (-5, 0)
    with pytest.raises(InvalidParameter, match="target_high must be above target_low=7, got 3"):
        bounds_of(tmp_path, target_low=7, target_high=3)


# Accuracy, report and page


@pytest.mark.parametrize("data", ["diabetes", "bent", "lines"])
def test_the_federation_is_as_good_as_pooled_data(data: str, tmp_path: Path) -> None:
    """Within one hundredth of R2, in the mean over seeds; its features are drawn anew."""
    shared: dict[str, Any] = {"solo": False}
    if data == "diabetes":
        shared |= {"data": "diabetes", "label": None}
    frame = houses(bent=data == "bent")

    runs = [run_once(settings_of(frame, tmp_path, seed=s, **shared)) for s in range(3)]

    federation, pooled = (np.mean([one[k] for one in runs]) for k in ("r2", "central-r2"))
    assert federation > pooled - 0.01
    assert federation > {"diabetes": 0.4, "bent": 0.85, "lines": 0.98}[data]


def test_reports_show_numbers(tmp_path: Path) -> None:
    report = run_once(settings_of(houses(240), tmp_path, num_parties=2, min_records=5))

    text = render(report)
    assert re.search(r"mean-squared-error +r2 +rmse +mae", text)
    assert re.search(r"federation +\d[\d.e+]* +0\.\d{3} +\d", text)
    assert "mean of the targets" in text
    assert re.search(r"verdict: (above|level with|below)", text)
    assert "points" not in report["verdict"]
    assert " %" not in text
    html = page(report)
    assert "R2 against what needs no federation" in html
    assert report["parties"][0]["class-counts"] is None
    assert report["settings"]["learner"] == "xgboost-scores,forest-scores,ridge"


def test_data_are_described(tmp_path: Path) -> None:
    frame = houses()
    lines = load_federation(settings_of(frame, tmp_path)).describe_data().splitlines()

    low, middle, high = frame["price"].quantile([0, 0.5, 1])
    assert lines[-2] == (
        f"  numbers to predict: price from {low:.6g} to {high:.6g}, median {middle:.6g}"
    )


def test_models_answer_in_the_unit_of_the_targets(tmp_path: Path) -> None:
    federation = load_federation(settings_of(houses(), tmp_path, learner="forest-scores,ridge"))
    data, party = federation.dataset, federation.party(1)
    model = party.learner_fn().fit(party.x, party.y, rng=np.random.default_rng(0))

    answers = model.predict(data.x_test)

    assert answers.shape == data.y_test.shape
    assert abs(answers.mean() - data.y_test.mean()) < data.y_test.std()
