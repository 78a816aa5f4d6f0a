"""What comes in at a party's door, and what a log shows of it."""

import logging
import pprint
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from flwr.app import Context
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from xgboost import XGBClassifier

import fl_strategies
from clients.app import FAILED, client_app
from clients.networks.learner import TorchLearner
from clients.tabular.kernel import RidgeLearner
from clients.tabular.sklearn import SklearnLearner
from fl_strategies import REGISTRY, AvgKD, Party
from fl_strategies.errors import InvalidData, InvalidParameter, KnowledgeMismatch, RunFailed
from fl_strategies.party.party import public_bound
from fl_strategies.party.role import public_model, receive_model
from fl_strategies.wire import keys
from fl_strategies.wire.knowledge import Knowledge
from simulations.runtime.local import run_local
from tests.toys import (
    CentroidLearner,
    accuracy,
    common_options,
    load_toy_party,
    load_with,
    toy_party,
)

PARTY = toy_party(3)
SECRET = 4.321987654
ARRAYS = ("x", "y", "public", "public_y", "x_test", "y_test")
NO_TEST: dict[str, Any] = {"x_test": None, "y_test": None, "public_y": None}


def test_a_log_shows_no_record(caplog: pytest.LogCaptureFixture) -> None:
    x = PARTY.x.copy()
    x[0, 0] = SECRET
    party = replace(PARTY, x=x, x_test=x, y_test=PARTY.y, public_y=np.zeros(60, np.int64))
    with caplog.at_level(logging.INFO):
        logging.getLogger("flwr.fl_strategies").warning("%s %r", party, [party])
        logging.getLogger(__name__).warning("%s", party)

    for text in (caplog.text, repr(party), str(party), pprint.pformat(party)):
        assert "4.32" not in text
        assert "array" not in text
        assert "x=(40, 2) float64" in text
        assert "learner_name='centroid'" in text


def frame(array: np.ndarray) -> Any:
    return pd.DataFrame(array) if array.ndim == 2 else pd.Series(array)


CONVERSIONS: dict[str, Callable[[np.ndarray], Any]] = {
    "lists": lambda array: array.tolist(),
    "tuples": lambda array: tuple(map(tuple, array)) if array.ndim == 2 else tuple(array),
    "pandas": frame,
    "objects of pandas": lambda array: frame(array).astype(object),
    "nullable pandas": lambda array: frame(array).convert_dtypes(),
    "torch": torch.tensor,
    "torch with gradients": lambda array: torch.tensor(
        array, requires_grad=array.dtype.kind == "f"
    ),
}


@pytest.mark.parametrize("kind", CONVERSIONS)
def test_lists_frames_and_tensors_become_arrays(kind: str) -> None:
    labelled = replace(PARTY, public_y=np.zeros(60, dtype=np.int64))
    converted = replace(
        labelled, **{name: CONVERSIONS[kind](getattr(labelled, name)) for name in ARRAYS}
    )

    for name in ARRAYS:
        found, expected = getattr(converted, name), getattr(labelled, name)
        assert type(found) is np.ndarray
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_arrays_are_not_copied() -> None:
    assert replace(PARTY).x is PARTY.x


def test_frames_of_several_types_become_numbers() -> None:
    mixed = pd.DataFrame({"age": [1.5, 2.5], "smokes": [True, False]})
    party = replace(PARTY, x=mixed, y=[0, 1])

    np.testing.assert_array_equal(party.x, [[1.5, 1.0], [2.5, 0.0]])
    marks = replace(PARTY, x=pd.DataFrame([[True, False]]), y=[0])
    assert marks.x.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("x", "read"),
    [
        (pd.DataFrame({"a": ["1", "x"], "b": [1.0, 2.0]}), [[1, 1], [None, 2]]),
        (pd.DataFrame({"a": [1, None], "b": [1, 2]}, dtype="Int64"), [[1, 1], [None, 2]]),
        (pd.DataFrame({"a": [1.0, np.nan], "b": [1, 2]}), [[1, 1], [None, 2]]),
        ([[1.0, 2.0], [3.0]], [[1, 2], [None, None]]),
        (torch.ones(2, 2, dtype=torch.bfloat16), [[1, 1], [1, 1]]),
        (np.ma.masked_equal([[1.0, 2.0], [1.0, 7.0]], 7.0), [[1, 2], [1, None]]),
        (scipy.sparse.csr_array([[0.0, 2.0], [1.0, 0.0]]), [[0, 2], [1, 0]]),
    ],
)
def test_what_is_no_number_becomes_the_public_median(x: Any, read: list[list[Any]]) -> None:
    """Whether a party answers must not depend on a record."""
    medians = np.median(PARTY.public, axis=0)
    expected = [[m if c is None else c for c, m in zip(row, medians)] for row in read]  # noqa: B905

    assert replace(PARTY, x=x, y=[0, 1]).x.tolist() == expected


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        ([[1.0], [3.0]], r"x must be rows of shape \(2,\), got a list without any"),
        (np.ones((2, 3)), r"x must be rows of shape \(2,\) like the public data"),
        (object(), r"x must be an array of rows \(n, ...\)"),
    ],
)
def test_what_fits_nowhere_is_a_sentence(x: Any, sentence: str) -> None:
    """The shape of all records is a mistake of the program, not one of a record."""
    with pytest.raises(InvalidData, match=f"Party 3: {sentence}"):
        replace(PARTY, x=x, y=[0, 1])


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (["ill", "fit", "odd"], ["fit", "ill", "odd"]),
        (np.array(["ill", "fit", "odd"]), ("fit", "ill", "odd")),
        (np.array([b"ill", b"fit", b"odd"]), ["fit", "ill", "odd"]),
        (pd.Series(["ill", "fit", "odd"], dtype="category"), ["fit", "ill", "odd"]),
        (pd.DataFrame({"label": ["ill", "fit", "odd"]}), ["fit", "ill", "odd"]),
        ([1, 0, 2], ["fit", "ill", "odd"]),
        ([7, 3, 9], ["3", "7", "9"]),
        (torch.tensor([7.0, 3.0, 9.0]), [3, 7, 9]),
        (np.array([1.0, 0.0, 2.0]), None),
    ],
)
def test_labels_of_any_type_become_class_indices(y: Any, classes: Any) -> None:
    """By the class list, which alone decides whether a number is a name or an index."""
    party = replace(PARTY, x=PARTY.x[:3], y=y, classes=classes, num_classes=3, **NO_TEST)

    assert party.y.tolist() == [1, 0, 2]
    assert replace(party, run="again").y.tolist() == [1, 0, 2]


def test_truth_values_are_labels() -> None:
    """False comes first, with or without a class list."""
    for classes in (None, ["healthy", "ill"], ["False", "True"]):
        party = replace(PARTY, y=PARTY.y[:40] > 0, num_classes=2, classes=classes, **NO_TEST)
        assert party.y.tolist() == (PARTY.y > 0).astype(int).tolist()


def test_the_class_list_counts_the_classes() -> None:
    options: dict[str, Any] = {"x": [[1.0]], "y": ["b"], "learner_fn": CentroidLearner}

    assert Party(**options, classes=["a", "b"]).num_classes == 2
    with pytest.raises(InvalidParameter, match="num_classes must be omitted, or 2 like cl"):
        Party(**options, classes=["a", "b"], num_classes=3)
    with pytest.raises(InvalidParameter, match="classes must be different names"):
        Party(**options, classes=["a", "a"])


def test_labels_that_are_not_in_the_list_are_counted_and_not_quoted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If none is a class, the sentence shows the list; without one it says what to write."""
    options: dict[str, Any] = {"classes": ["a", "b"], "num_classes": 2, **NO_TEST}
    party = replace(PARTY, x=PARTY.x[:3], y=["b", "secret", "?"], **options)
    assert party.y.tolist() == [1, 0, 0]
    assert "2 labels of y are no class" in caplog.text
    assert "secret" not in caplog.text
    with pytest.raises(InvalidData, match="among the classes a, b, got 2 others") as caught:
        replace(PARTY, x=PARTY.x[:2], y=["secret", "?"], **options)
    assert "secret" not in str(caught.value)
    with pytest.raises(InvalidData, match=r"got none of these. Write classes=\["):
        replace(PARTY, x=PARTY.x[:1], y=["secret"])


def test_columns_of_frames_are_found_by_the_public_names() -> None:
    public = pd.DataFrame(PARTY.public, columns=["age", "weight"])
    x = pd.DataFrame(PARTY.x, columns=["age", "weight"])

    party = replace(PARTY, public=public, x=x[["weight", "age"]])

    np.testing.assert_array_equal(party.x, PARTY.x)
    with pytest.raises(InvalidData, match=r"columns of x must be those of public, .*'height'"):
        replace(PARTY, public=public, x=x.rename(columns={"weight": "height"}))


def test_a_frame_of_texts_names_its_columns(caplog: pytest.LogCaptureFixture) -> None:
    """Of public rows in a sentence that says what to read, of records in the own log."""
    x = pd.DataFrame({"age": [1, 2], "town": ["Ulm", "Bonn"]})
    with pytest.raises(InvalidData, match=r"in the columns 'town'\. .* docs/own_data.md"):
        replace(PARTY, public=x, public_y=None)

    replace(PARTY, x=x, y=[0, 1])
    assert "2 values of x in the columns 'town' are no numbers" in caplog.text
    assert "Ulm" not in caplog.text


def test_a_misspelt_argument_suggests_the_right_one() -> None:
    with pytest.raises(InvalidParameter, match=r"'num_clases'. Did you mean 'num_classes'\?"):
        Party(x=[[1.0]], y=[0], num_clases=2, learner_fn=CentroidLearner)  # type: ignore[call-arg]


def test_conversion_needs_neither_library() -> None:
    code = (
        "import sys, fl_strategies as f\n"
        "f.Party(x=[[1.0]], y=[0], num_classes=2, learner_fn=lambda: None)\n"
        "print(*[name for name in ('pandas', 'torch') if name in sys.modules])"
    )
    root = Path(fl_strategies.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True
    )

    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def without_public(party: Party) -> Party:
    return Party(
        x=party.x,
        y=party.y,
        num_classes=party.num_classes,
        learner_fn=party.learner_fn,
        learner_name=party.learner_name,
        partition_id=party.partition_id,
    )


def test_public_rows_are_optional() -> None:
    """There are then none, in the shape of the records, and no scale to cut values to."""
    party = without_public(replace(PARTY, x=PARTY.x * 1e6, value_bound=1e9))

    assert party.public.shape == (0, 2)
    assert replace(party, public=None).public.shape == (0, 2)
    np.testing.assert_array_equal(party.x, PARTY.x * 1e6)
    assert public_bound(party.public) == 1e30
    with pytest.raises(InvalidData, match=r"x_test must be rows of shape \(2,\) like x"):
        replace(party, x_test=np.zeros((1, 3)), y_test=[0])


def test_a_model_that_stands_in_needs_no_public_rows() -> None:
    """Where privacy is promised a party answers in any case, from a row of zeros."""
    model = public_model(without_public(PARTY), CentroidLearner)

    assert model.predict(np.zeros((2, 2))).tolist() == [0, 0]


def test_codistillation_runs_without_public_rows() -> None:
    """Models travel, and what they predict on their receivers' records."""
    options = {**common_options(), "public": None, "row_shape": (2,)}
    strategy = AvgKD(**options)  # type: ignore[arg-type]

    def load(context: Context) -> Party:
        return without_public(load_toy_party(context))

    run_local(strategy, client_app(load), num_nodes=4, num_rounds=2)

    assert len(strategy.parties_) == 4
    assert accuracy(strategy.model_.predict(toy_party(0).x_test)) > 0.8  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [n for n in REGISTRY if n in ("fedkd", "fedkt", "fedmd")])
def test_a_strategy_that_needs_public_rows_says_so(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy: Any = REGISTRY[name].strategy(**common_options())  # type: ignore[arg-type]

    run_local(strategy, client_app(load_with(without_public, only=2)), num_nodes=4)

    sentence = f"Party 2: public must be given for '{name}', which works on public rows"
    assert sentence in caplog.text
    assert sorted(strategy.parties_) == [0, 1, 3]


class Net(torch.nn.Linear):
    """A module as users write them."""

    def __init__(self) -> None:
        super().__init__(2, 3)


@pytest.mark.parametrize("place", ["learner_fn", "teacher_fn", "catalogue"])
@pytest.mark.parametrize(
    ("given", "got", "write"),
    [
        (
            RandomForestClassifier,
            "RandomForestClassifier",
            "SklearnLearner(RandomForestClassifier(...), num_classes=3)",
        ),
        (
            LogisticRegression(),
            "LogisticRegression",
            "SklearnLearner(LogisticRegression(...), num_classes=3)",
        ),
        (XGBClassifier(), "XGBClassifier", "XGBoostLearner(num_classes=3)"),
        (Net(), "Net", "TorchLearner(lambda: Net(...), num_classes=3)"),
        (Net, "Net", "TorchLearner(lambda: Net(...), num_classes=3)"),
        (TorchLearner(Net, num_classes=3), "TorchLearner", "TorchLearner(...)"),
        (CentroidLearner(), "CentroidLearner", "CentroidLearner(...)"),
        (7, "int", None),
    ],
)
def test_a_model_in_place_of_a_factory_is_a_sentence(
    given: Any, got: str, write: str | None, place: str
) -> None:
    got = f"{'the class' if isinstance(given, type) else 'an object of the class'} {got}"
    change = {place: {"other": given} if place == "catalogue" else given}
    name = "catalogue['other']" if place == "catalogue" else place
    rule = "a function without arguments that makes a new learner"
    hint = "" if write is None else f" Write: lambda: {write}"
    sentence = re.escape(f"Party 3: {name} must be {rule}, got {got}.{hint}")
    with pytest.raises(InvalidParameter, match=f"^{sentence}$"):
        replace(PARTY, **change)


@pytest.mark.parametrize("place", ["learner_fn", "teacher_fn"])
@pytest.mark.parametrize(
    ("factory", "made", "write"),
    [
        (
            lambda: RandomForestClassifier(),
            "RandomForestClassifier",
            "SklearnLearner(RandomForestClassifier(...), num_classes=3)",
        ),
        (lambda: Net(), "Net", "TorchLearner(lambda: Net(...), num_classes=3)"),
        (lambda: 7, "int", None),
    ],
)
def test_a_factory_of_something_else_is_a_sentence(
    factory: Any, made: str, write: str | None, place: str
) -> None:
    party = replace(PARTY, **{place: factory})
    hint = "" if write is None else f" Write: lambda: {write}"
    got = f"one that makes objects of the class {made}.{hint}"
    rule = "a function without arguments that makes a new learner"
    sentence = re.escape(f"Party 3: {place} must be {rule}, got {got}")
    with pytest.raises(InvalidParameter, match=f"^{sentence}$"):
        party.check_learners()
    PARTY.check_learners()


@pytest.mark.parametrize("name", REGISTRY)
def test_a_party_whose_factory_makes_no_learner_says_so(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One sentence in its own log, in every strategy; the others continue."""

    def raw(party: Party) -> Party:
        return replace(party, learner_fn=lambda: RandomForestClassifier())  # type: ignore[arg-type, return-value]

    strategy: Any = REGISTRY[name].strategy(**common_options())  # type: ignore[arg-type]
    run_local(strategy, client_app(load_with(raw, only=2)), num_nodes=4)

    assert "Write: lambda: SklearnLearner(RandomForestClassifier(...), num" in caplog.text
    assert set(strategy.rejected_.values()) <= {FAILED}
    assert 2 not in strategy.parties_


@pytest.mark.parametrize("place", ["learner_fn", "teacher_fn"])
@pytest.mark.parametrize("num_classes", [2, 5])
def test_a_learner_of_other_classes_is_a_sentence(num_classes: int, place: str) -> None:
    """It says what to write, whatever classes the party's own records have."""
    party = replace(PARTY, **{place: lambda: RidgeLearner(num_classes=num_classes)})
    sentence = (
        f"Party 3: {place} must make learners of 3 classes, labels or targets, as all of the "
        f"federation have, got {num_classes}. Write: num_classes=3"
    )
    with pytest.raises(InvalidParameter, match=f"^{re.escape(sentence)}$"):
        party.check_learners()


@pytest.mark.parametrize("num_classes", [2, 5])
@pytest.mark.parametrize("name", REGISTRY)
def test_a_party_whose_learner_has_other_classes_says_so(
    name: str, num_classes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One sentence in its own log and none of NumPy's; the server learns that it failed."""

    def other(party: Party) -> Party:
        def make() -> SklearnLearner:
            return SklearnLearner(LogisticRegression(), num_classes=num_classes)

        first = np.zeros_like(party.y)  # of a class that every learner has
        return replace(party, y=first, learner_fn=make, teacher_fn=None)

    strategy: Any = REGISTRY[name].strategy(**common_options())  # type: ignore[arg-type]
    run_local(strategy, client_app(load_with(other, only=2)), num_nodes=4)

    assert "learners of 3 classes, labels or targets, as all of the" in caplog.text
    assert "Traceback" not in caplog.text
    assert set(strategy.rejected_.values()) <= {FAILED}
    assert 2 not in strategy.parties_


def test_a_received_model_of_other_classes_is_a_sentence() -> None:
    """A catalogue may hold learners of other problems; their models are not for this one."""
    other = {"wide": lambda: SklearnLearner(LogisticRegression(), num_classes=5)}
    sent = Knowledge("model", {}, {keys.LEARNER: "wide"})
    rule = "the learner 'wide' must have 3 classes or outputs to receive a model, got 5"
    with pytest.raises(KnowledgeMismatch, match=rule):
        receive_model(replace(PARTY, catalogue=other), sent)


def test_a_server_of_other_classes_is_told_what_to_do() -> None:
    """No range that holds one number."""
    options = common_options() | {"learner_fn": lambda: RidgeLearner(num_classes=4)}
    strategy: Any = REGISTRY["fedkd"].strategy(**{**options, "num_classes": 4})
    with pytest.raises(RunFailed) as caught:
        run_local(strategy, client_app(load_toy_party), num_nodes=4)

    sentence = str(caught.value)
    assert "num-classes must be 3, as this party has classes, labels or targets" in sentence
    assert "got 4. Give server and parties the same class list" in sentence


def test_factories_of_every_kind_are_taken() -> None:
    for factory in (
        CentroidLearner,
        lambda: TorchLearner(Net, num_classes=3),
        lambda: SklearnLearner(LogisticRegression(), num_classes=3),
    ):
        assert replace(PARTY, learner_fn=factory).learner_fn is factory
