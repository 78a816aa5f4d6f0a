"""Numeric targets: how a label column is understood, bounded, learned, measured and shown."""

import logging
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context

from clients.app import client_app
from fl_strategies import REGISTRY
from fl_strategies._util import Array
from fl_strategies.errors import InvalidData, InvalidParameter, KnowledgeMismatch
from fl_strategies.strategies.fedkd.server import (
    PartyScores,
    precise_mean,
    read_predictions,
)
from fl_strategies.wire.knowledge import Knowledge
from simulations.__main__ import main as simulations_main
from simulations.config import Settings, Value
from simulations.data.schema import NumberColumn, Schema, SchemaLabel
from simulations.data.sets import Request, load_dataset
from simulations.data.splits import Dataset, Deal, partition
from simulations.data.targets import Targets
from simulations.deploy import server_app
from simulations.deploy.__main__ import main
from simulations.deploy.client_app import build_party, understood
from simulations.deploy.data import read_labelled, read_public
from simulations.deploy.federation import write_split
from simulations.federation import load_federation
from simulations.results.page import page
from simulations.results.report import render
from simulations.runtime.local import run_local, run_once

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


ABLE = {"akd", "avgkd", "ekd", "pkd", "fedavg", "feddf", "fedkd", "fedmoments", "scaffold"}


def test_strategies_that_learn_no_numbers_say_so(tmp_path: Path) -> None:
    able = r"one of akd, avgkd, ekd, .*fedmoments.* for numeric targets, got "
    for name in {*REGISTRY} - {"fedstatistics"}:  # which describes columns and learns nothing
        federation = load_federation(settings_of(houses(100), tmp_path, strategy=name))
        if name in (
            "akd",
            "avgkd",
            "ekd",
            "pkd",
            "fedavg",
            "feddf",
            "fedkd",
            "scaffold",
            "fedmoments",
        ):
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


@pytest.mark.parametrize("data", ["diabetes", "bent", "lines"])
def test_the_model_is_the_same_whoever_holds_which_range(data: str, tmp_path: Path) -> None:
    """No honest party is taken for a liar, because its targets are low or its curve falls."""
    given: dict[str, Any] = {"solo": False, "pooled": False, "num_parties": 5, "min_records": 1}
    if data == "diabetes":
        given |= {"data": "diabetes", "label": None}
    frame, found = houses(1500, bent=data == "bent"), set()
    for partition_, beta in (("iid", 0.5), ("by-label", 0.5), ("dirichlet", 0.1)):
        settings = settings_of(frame, tmp_path, partition=partition_, beta=beta, **given)
        report = run_once(settings)
        assert report["metrics"]["train"]["num-outliers"] == 0
        found.add(report["r2"])
    assert len(found) == 1


def test_a_party_that_turns_numbers_around_is_not_counted(tmp_path: Path) -> None:
    settings = settings_of(houses(bent=False), tmp_path, num_parties=5, partition="iid")
    federation = load_federation(settings)
    strategy: Any = federation.strategy()
    middle = float(np.mean(strategy.target_bounds))

    def load_party(context: Context) -> Any:
        party = federation.party(int(context.node_config["partition-id"]))
        return replace(party, y=2 * middle - party.y) if party.partition_id == 3 else party

    run_local(strategy, client_app(load_party), 5)

    assert strategy.outliers_ == (3,)
    assert federation.quality(strategy.model_) > 0.98


def test_fedkd_weights_predictions_by_their_error(tmp_path: Path) -> None:
    """It is above the mean party, and claims to be exact are believed within limits."""
    runs = [
        run_once(
            settings_of(
                houses(), tmp_path, strategy="fedkd", seed=seed, data="diabetes", label=None
            )
        )
        for seed in range(2)
    ]
    assert all(one["r2"] > one["solo-r2"] + 0.1 for one in runs)

    rows = np.ones((2, 1))
    sent = [PartyScores(n * rows, np.array([e])) for n, e in ((1, 4.0), (2, 4.0), (9, 0.0))]
    assert precise_mean(sent).ravel() == pytest.approx([(1 + 2 + 4 * 9) / 6] * 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"weights": "noisy-counts"}, "noise must be none for numeric targets, for which"),
        ({"weights": "uniform", "consensus": "median"}, "consensus must be 'mean' for numeric"),
        ({"weights": "counts", "scale": "max"}, "scale must be 'clip' for numeric targets"),
    ],
)
def test_fedkd_says_what_numbers_do_not_have(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    federation = load_federation(settings_of(houses(100), tmp_path, strategy="fedkd", **given))
    with pytest.raises(InvalidParameter, match=message):
        federation.strategy()


@pytest.mark.parametrize(
    "arrays",
    [
        {"scores": np.ones((2, 1)), "error": np.array([-1.0])},
        {"scores": np.ones((2, 1)), "error": np.array([np.inf])},
        {"scores": np.full((2, 1), np.nan), "error": np.ones(1)},
        {"scores": np.ones((3, 1)), "error": np.ones(1)},
        {"scores": np.ones((2, 1))},
    ],
)
def test_fedkd_refuses_impossible_predictions(arrays: dict[str, Array]) -> None:
    with pytest.raises(KnowledgeMismatch, match="must be"):
        read_predictions(Knowledge("scores", arrays), (2, 1))


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
    assert report["settings"]["learner"] == "forest-scores,xgboost-scores,ridge"


def test_a_comparison_of_numbers_has_no_percent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["compare", "--data", "diabetes", "--seeds", "0", "--strategy", "fedmoments,fedkt"]
    kept = ["--json", str(tmp_path / "kept.json"), "--set", "num-workers=1"]
    assert simulations_main([*asked, *kept]) == 0

    shown = capsys.readouterr().out
    assert re.search(r"^ +r2 +rmse +mae +up +down", shown, re.MULTILINE)
    assert re.search(r"fedmoments +0\.\d{3} +\d+\.\d{3} +\d+\.\d{3} ", shown)
    assert re.search(r"mean of the targets +-?0\.\d{3} ", shown)
    assert re.search(r"Take fedmoments: 0\.\d{3} with .* a party in one round", shown)
    assert "not compared: fedkt: fedkt: task must be single-label, got 'regression'." in shown
    assert "%" not in shown
    assert "points" not in shown


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


# Deployments


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Write what two parties and a server have, with a text and a gap among the targets."""
    houses(120, seed=9).to_csv(tmp_path / "public.csv", index=False)
    houses(200, seed=8).to_csv(tmp_path / "test.csv", index=False)
    for number in range(2):
        frame = with_cells(houses(300, seed=number), {0: "about 40", 1: "", 2: "1e300"})
        frame.to_csv(tmp_path / f"party-{number}.csv", index=False)
    return tmp_path


def node(files: Path, number: int = 0, **more: Value) -> dict[str, Value]:
    return {
        "partition-id": number,
        "data-file": str(files / f"party-{number}.csv"),
        "public-file": str(files / "public.csv"),
        "task": "numbers",
        "label": "price",
        "learner": "forest-scores",
        "allow-unprotected": True,
        "state-dir": str(files / f"state-{number}"),
        **more,
    }


def server(files: Path, **more: Value) -> dict[str, Value]:
    return {
        "strategy": "fedmoments",
        "public-file": str(files / "public.csv"),
        "test-file": str(files / "test.csv"),
        "task": "numbers",
        "label": "price",
        "num-parties": 2,
        "max-wait": 0.1,
        **more,
    }


def run_deployed(
    nodes: list[dict[str, Value]], settings: dict[str, Value]
) -> tuple[Any, Any, dict[str, Any]]:
    federation = server_app.load(settings)
    strategy = federation.strategy()

    def load_party(context: Context) -> Any:
        return build_party(nodes[int(context.node_config["partition-id"])], run="1")

    result = run_local(strategy, client_app(load_party), len(nodes))
    return federation, strategy, server_app.make_report(federation, strategy, result, seconds=1)


def test_a_deployed_federation_learns_numbers(
    files: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One label that is no number ends nothing, and rows without a label are no records."""
    nodes = [node(files, number) for number in range(2)]
    _, strategy, report = run_deployed(nodes, server(files))

    assert not strategy.rejected_
    assert report["metric"] == "r2"
    assert report["r2"] > 0.8
    party = build_party(nodes[0], run="1")
    assert party.task == "regression"
    assert party.y.shape == (299, 1)
    public = pd.read_csv(files / "public.csv")["price"]
    assert party.y[0, 0] == public.median()
    assert party.y[1, 0] == 10 * public.max()
    assert "1 labels are no numbers; the public median" in caplog.text
    assert "1 rows without a label are dropped" in caplog.text
    assert "logistic-regression" not in party.catalogue
    low, high = strategy.target_bounds
    reach = public.max() - public.min()
    assert (low[0], high[0]) == pytest.approx((public.min() - reach, public.max() + reach))


def test_a_deployed_private_federation_takes_declared_bounds(files: Path) -> None:
    """Even where the public file has no targets at all."""
    houses(120, bent=False).drop(columns="price").to_csv(files / "public.csv", index=False)
    for number, name in enumerate(("test", "party-0", "party-1")):
        frame = houses(1000, bent=False, seed=number + 1)
        frame.to_csv(files / f"{name}.csv", index=False)
    nodes = [node(files, number, **{"allow-unprotected": False}) for number in range(2)]
    private = {"fedmoments.target-epsilon": 8.0, "fedmoments.num-records": 2000}
    missing = r"target_bounds must be given for numeric targets \(settings target-low and"
    with pytest.raises(InvalidParameter, match=missing):
        run_deployed(nodes, server(files, **private))

    declared = {"fedmoments.target-low": -50.0, "fedmoments.target-high": 550.0}
    _, strategy, report = run_deployed(nodes, server(files, **private, **declared))

    assert not strategy.rejected_
    assert report["r2"] > 0.1
    assert 0 < report["rounds"][-1]["train"]["epsilon-example"] <= 8.0 + 1e-9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "auto"}, 'classes must be given, unless task is "numbers"'),
        ({"classes": "a,b"}, 'classes must be omitted where task is "numbers"'),
        ({"task": "figures"}, "task must be one of auto, classes, numbers, got 'figures'"),
    ],
)
def test_labels_are_classes_or_numbers(
    files: Path, change: dict[str, Value], message: str
) -> None:
    with pytest.raises(InvalidParameter, match=message):
        build_party(node(files, **change), run="1")
    with pytest.raises(InvalidParameter, match=message):
        server_app.load(server(files, **change))


def test_files_without_a_single_number_are_refused(files: Path) -> None:
    frame = houses(30).assign(price="high")
    frame.to_csv(files / "party-0.csv", index=False)
    with pytest.raises(InvalidData, match="labels must be numbers, got 30 others"):
        build_party(node(files), run="1")
    frame = with_cells(houses(30), {3: "about 40"})
    frame.to_csv(files / "test.csv", index=False)
    with pytest.raises(InvalidData, match="labels must be numbers, got 1 others"):
        server_app.load(server(files))


def test_a_check_shows_what_a_party_would_do(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = files / "node.toml"
    lines = [
        f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}"
        for key, value in node(files).items()
    ]
    path.write_text("\n".join(lines).replace("'", '"'))

    asked = ["--set", "strategy=fedmoments", "--set", "task=numbers"]
    assert main(["check", str(path), *asked]) == 0

    shown = capsys.readouterr().out
    assert "public rows: 120, number: price" in shown
    assert "Party 0: 299 records of shape (6,)" in shown
    assert "this run: the party takes part" in shown
    assert "LOOK AT THIS: party-0.csv: 1 labels are no numbers" in shown
    assert understood(node(files))[0].startswith("3 columns beside the label become 6 numbers")


@pytest.mark.parametrize("ending", ["npz", "csv"])
def test_dealt_files_hold_the_same_numbers(ending: str, tmp_path: Path) -> None:
    settings = Settings.of(strategy="fedmoments", data="diabetes", num_parties=3)
    federation = load_federation(settings)

    split = write_split(settings, tmp_path / "split", (ending,))

    assert split.labels == {"task": "numbers"}
    public = read_public(split.public, (), numbers=True)
    assert public.y is not None
    assert federation.dataset.y_public is not None
    assert np.array_equal(public.y, federation.dataset.y_public)
    if ending == "npz":
        _, y = read_labelled(split.parties[0], public)
        assert np.array_equal(y, federation.dataset.y_train[federation.rows[0]])


def test_a_schema_declares_the_bounds_of_numbers(tmp_path: Path) -> None:
    """No public row is needed, in a simulation or a deployment."""
    schema = Schema(
        columns=(
            NumberColumn(name="size", least=40, most=200),
            NumberColumn(name="age", least=0, most=80),
        ),
        label=SchemaLabel(name="price", least=0, most=600),
    )
    schema.save(tmp_path / "schema.json")
    frame = with_cells(houses(600), {5: "about 40", 6: ""})
    settings = settings_of(
        frame,
        tmp_path,
        schema=str(tmp_path / "schema.json"),
        solo=False,
        pooled=False,
    )
    federation = load_federation(settings)

    strategy: Any = federation.strategy()
    assert federation.dataset.task == "regression"
    assert [float(bound[0]) for bound in strategy.target_bounds] == [0, 600]
    assert run_once(settings)["r2"] > 0.8
