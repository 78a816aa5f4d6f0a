"""party_loader: a function that deals rows out, as Flower's quickstarts have one, is enough."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Context, RecordDict
from torch.utils.data import DataLoader, Dataset, TensorDataset

from clients import client_app, party_loader
from fl_strategies import Party
from fl_strategies.errors import InvalidData, InvalidParameter
from simulations.runtime.local import run_local
from tests.toys import (
    NUM_CLASSES,
    PUBLIC,
    CentroidLearner,
    load_toy_party,
    toy_fedkt,
    toy_party,
)

X, Y = np.arange(16.0).reshape(8, 2), np.array([0, 1, 2, 0, 1, 2, 0, 1])
FOUR = (X[:6], X[6:], Y[:6], Y[6:])


class Words(Dataset[Any]):
    """Items as Hugging Face's data sets have them: columns by name."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"img": torch.tensor(self.x[row]), "label": int(self.y[row])}


def tensors(x: np.ndarray, y: np.ndarray) -> TensorDataset:
    return TensorDataset(torch.tensor(x), torch.tensor(y))


def load(loaded: Any, node: dict[str, Any] | None = None, **party: Any) -> Party:
    settings = {"num_classes": NUM_CLASSES, "learner_fn": CentroidLearner, **party}
    given = {"partition-id": 1, "num-partitions": 4} if node is None else node
    context = Context(1, 1, given, RecordDict(), {})
    return party_loader(lambda *_: loaded, **settings)(context)


@pytest.mark.parametrize(
    "loaded",
    [
        FOUR,
        ((X[:6], Y[:6]), (X[6:], Y[6:])),
        (tensors(X[:6], Y[:6]), tensors(X[6:], Y[6:])),
        (
            DataLoader(tensors(X[:6], Y[:6]), 2, shuffle=True),
            DataLoader(tensors(X[6:], Y[6:]), 2),
        ),
        (DataLoader(Words(X[:6], Y[:6]), 4, drop_last=True), Words(X[6:], Y[6:])),
    ],
    ids=["four", "pairs", "tensors", "loaders", "words"],
)
def test_rows_arrive_in_every_form(loaded: Any) -> None:
    """All rows are there, in order, whatever a loader would shuffle or drop."""
    party = load(loaded)

    assert party.partition_id == 1
    for name, expected in zip(("x", "x_test", "y", "y_test"), FOUR, strict=True):
        assert np.array_equal(getattr(party, name), expected), name


def test_a_misspelt_argument_is_refused_at_once() -> None:
    """Not only when the first party is made."""
    with pytest.raises(
        InvalidParameter, match=r"got 'learner_fun'\. Did you mean 'learner_fn'"
    ):
        party_loader(lambda *_: FOUR, learner_fun=CentroidLearner)


@pytest.mark.parametrize(
    ("x", "y", "party"),
    [
        (X, np.array([0, np.nan, 2, 0, 1, 2, np.nan, 1]), {}),
        (X.tolist(), [0, None, 2, 0, 1, 2, None, 1], {}),
        (pd.DataFrame(X), pd.Series([*"a-cabc-b"]), {"classes": [*"abc"]}),
        (torch.tensor(X), [*"a", "", *"cabc", " ", "b"], {"classes": [*"abc"]}),
    ],
    ids=["array", "list", "frame", "tensor"],
)
def test_rows_without_a_label_are_dropped(
    x: Any, y: Any, party: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The others stay in their order; the number of those dropped is in the log alone."""
    if isinstance(y, pd.Series):
        y = y.replace("-", None).astype("category")

    made = load((x, x, y, y), num_classes=0 if party else NUM_CLASSES, **party)

    kept = [0, 2, 3, 4, 5, 7]
    assert np.array_equal(made.x, X[kept])
    assert np.array_equal(made.y, Y[kept])
    assert np.array_equal(made.y_test, Y[kept])
    assert "2 rows without a label in y_train are dropped." in caplog.text


def test_the_function_gets_flowers_numbers() -> None:
    """First the partition id, then how many there are."""
    seen = []

    def load_data(*numbers: int) -> Any:
        seen.append(numbers)
        return FOUR

    node: Any = {"partition-id": 2, "num-partitions": 5}
    context = Context(1, 1, node, RecordDict(), {})
    party_loader(load_data, num_classes=NUM_CLASSES, learner_fn=CentroidLearner)(context)

    assert seen == [(2, 5)]


def test_another_order_of_arrays_is_refused() -> None:
    """Labels in the place of rows have another shape, and the sentence says what to do."""
    with pytest.raises(InvalidData, match="in this order, got labels as the second"):
        load((X[:6], Y[:6], X[6:], Y[6:]))


def test_three_values_are_refused() -> None:
    """Nobody could know which is which."""
    with pytest.raises(InvalidData, match="a set to train on and one to test on, got 3 values"):
        load((X, X, Y))


def test_a_node_without_a_number_is_told_so() -> None:
    """A SuperNode that was started without a node-config has none."""
    with pytest.raises(InvalidParameter, match="node_config must be with 'partition-id'"):
        load(FOUR, node={})


def test_labels_may_be_names() -> None:
    """What a `Party` takes, this takes as well."""
    named = (X[:6], X[6:], np.array(["a", "b", "c"])[Y[:6]], np.array(["a", "b", "c"])[Y[6:]])

    assert np.array_equal(load(named, num_classes=0, classes="abc").y, Y[:6])


def test_a_federation_runs_with_it() -> None:
    """The result is that of parties which are written out."""

    def load_data(number: int, _: int) -> Any:
        party = toy_party(number)
        return (party.x, party.y), (party.x_test, party.y_test)

    loader = party_loader(
        load_data,
        public=PUBLIC,
        num_classes=NUM_CLASSES,
        learner_fn=CentroidLearner,
        learner_name="centroid",
    )
    written, dealt = (toy_fedkt(num_parties=3) for _ in range(2))
    expected = run_local(written, client_app(load_toy_party), num_nodes=3)
    result = run_local(dealt, client_app(loader), num_nodes=3)

    assert np.array_equal(dealt.model_.logits(PUBLIC), written.model_.logits(PUBLIC))
    assert result.evaluate_metrics_clientapp == expected.evaluate_metrics_clientapp
