"""Models as folders: what is read is what was written, and nothing else is believed."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xgboost
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier
from torch import nn

from clients import ModelCard, SklearnLearner, TorchLearner, load_model, save_model
from clients.saved_model import member_folder, read_arrays, save_committee, write_arrays
from fl_strategies._util import Array
from fl_strategies.aggregation.ensembles import MeanEnsemble
from fl_strategies.errors import InvalidData, StrategyError, UnsupportedLearner
from simulations.models import ModelOptions, learner_factory

SMALL = ModelOptions(num_trees=3, boosting_rounds=3, epochs=1, reveal_rows=True)
X = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)
Y = np.arange(24) % 3
NAMES = (
    "decision-tree",
    "extra-trees",
    "logistic-regression",
    "boosted-trees",
    "lightgbm",
    "xgboost",
    "xgboost-scores",
    "forest-scores",
    "kernel-ridge",
    "ridge",
    "moments",
    "mlp",
)


def card(name: str = "decision-tree", **changes: Any) -> ModelCard:
    told = {"row_shape": (6,), "classes": ("a", "b", "c"), "settings": SMALL.to_config()}
    return ModelCard(learner=name, **{**told, **changes})


def saved(folder: Path, name: str = "decision-tree") -> Any:
    """Write a fitted model and return it."""
    make = learner_factory(name, row_shape=(6,), num_classes=3, settings=SMALL)
    model = make().fit(X, Y, rng=np.random.default_rng(1))
    save_model(model, folder, card(name))
    return model


def describe(folder: Path, **changes: Any) -> None:
    """Change what a model's description says."""
    path = folder / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_read_by_one_call(name: str, tmp_path: Path) -> None:
    """Scores are the same to the bit, whatever the learner, in the run's folder too."""
    model = saved(tmp_path / "model", name)

    assert np.array_equal(load_model(tmp_path).logits(X), model.logits(X))
    assert np.array_equal(load_model(tmp_path / "model").predict(X), model.predict(X))


def test_several_labels_are_read_too(tmp_path: Path) -> None:
    """The task is part of what a model is."""
    labels = np.random.default_rng(1).integers(0, 2, size=(24, 3))
    make = learner_factory(
        "decision-tree", row_shape=(6,), num_classes=3, settings=SMALL, task="multi-label"
    )
    model = make().fit(X, labels, rng=np.random.default_rng(1))
    save_model(model, tmp_path, card(task="multi-label"))

    assert np.array_equal(load_model(tmp_path).predict(X), model.predict(X))


def test_xgboost_reads_its_own_file(tmp_path: Path) -> None:
    """Whoever has XGBoost alone can use the model."""
    model = saved(tmp_path, "xgboost")
    booster = xgboost.Booster()
    booster.load_model(tmp_path / "xgboost.json")

    found = booster.inplace_predict(X)

    assert np.array_equal(found.argmax(axis=1), model.predict(X))


def test_torch_reads_its_own_file_without_unpickling(tmp_path: Path) -> None:
    """The state dict fits the module, and `weights_only` is enough."""
    model = saved(tmp_path, "mlp")

    state = torch.load(tmp_path / "state_dict.pt", weights_only=True)

    for name, array in model.to_arrays().items():
        assert np.array_equal(np.asarray(state[name]), array)


@pytest.mark.parametrize("name", ["extra-trees", "logistic-regression"])
def test_skops_reads_its_own_file(name: str, tmp_path: Path) -> None:
    """Whoever has scikit-learn and skops can use the model; trees are trusted by name."""
    skops = pytest.importorskip("skops.io", reason="The extra skops is not installed.")
    model = saved(tmp_path, name)
    untrusted = skops.get_untrusted_types(file=tmp_path / "model.skops")

    estimator = skops.load(tmp_path / "model.skops", trusted=untrusted)

    assert untrusted == ["sklearn.tree._tree.Tree"] * (name == "extra-trees")
    assert np.array_equal(estimator.predict(X), model.predict(X))


def test_without_skops_there_is_no_such_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model itself is written all the same."""
    monkeypatch.setattr("clients.saved_model.find_spec", lambda _: None)
    model = saved(tmp_path)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["arrays.npz", "model.json"]
    assert np.array_equal(load_model(tmp_path).predict(X), model.predict(X))


def test_what_skops_would_read_decides_nothing(tmp_path: Path) -> None:
    """A hostile file beside the arrays is not opened."""
    model = saved(tmp_path)
    (tmp_path / "model.skops").write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))

    assert np.array_equal(load_model(tmp_path).predict(X), model.predict(X))
    assert not (tmp_path / "mark").exists()


def test_only_a_model_that_was_trained_here_is_scikit_learns() -> None:
    """One that arrived as arrays, or knows a single class, has no native form."""
    learner = SklearnLearner(DecisionTreeClassifier(), num_classes=3)
    assert learner.fitted_estimator is None
    learner.fit(X, Y, rng=np.random.default_rng(0))
    assert isinstance(learner.fitted_estimator, DecisionTreeClassifier)

    received = SklearnLearner(DecisionTreeClassifier(), num_classes=3)
    assert received.from_arrays(learner.to_arrays()).fitted_estimator is None
    learner.fit(X, np.zeros_like(Y), rng=np.random.default_rng(0))
    assert learner.fitted_estimator is None


def own_network() -> TorchLearner:
    return TorchLearner(lambda: nn.Linear(6, 3), num_classes=3, epochs=1)


def own_pipeline() -> SklearnLearner:
    steps = make_pipeline(StandardScaler(), DecisionTreeClassifier())
    return SklearnLearner(steps, num_classes=3)


@pytest.mark.parametrize("make", [own_network, own_pipeline])
def test_a_model_of_ones_own_needs_its_factory(make: Callable[[], Any], tmp_path: Path) -> None:
    """A name that the catalogue does not have is refused, unless the factory is given."""
    model = make().fit(X, Y, rng=np.random.default_rng(0))
    save_model(model, tmp_path, card("mine"))

    assert np.array_equal(load_model(tmp_path, make).logits(X), model.logits(X))
    with pytest.raises(InvalidData, match=r"model\.json must name a learner\. .* got 'mine'"):
        load_model(tmp_path)


def test_a_model_without_an_array_form_is_not_written(tmp_path: Path) -> None:
    """Nothing is left of the attempt."""
    model = SklearnLearner(SVC(), num_classes=3).fit(X, Y, rng=np.random.default_rng(0))

    with pytest.raises(UnsupportedLearner):
        save_model(model, tmp_path / "model", card("svm"))

    assert not (tmp_path / "model").exists()


def test_equal_models_are_equal_files(tmp_path: Path) -> None:
    """No date and no order of writing is in them."""
    for name in ("a", "b"):
        saved(tmp_path / name)

    first, second = ((tmp_path / n / "arrays.npz").read_bytes() for n in ("a", "b"))
    assert first == second


def test_numpy_reads_the_arrays(tmp_path: Path) -> None:
    """The archive is an ordinary one, numbers without sides included."""
    arrays = {
        "step-0/mean": np.arange(3.0),
        "count": np.array(7),
        "file": np.eye(2, dtype=bool),
    }
    write_arrays(arrays, tmp_path / "a.npz")

    with np.load(tmp_path / "a.npz", allow_pickle=False) as found:
        assert {name: found[name].tolist() for name in found} == {
            name: array.tolist() for name, array in arrays.items()
        }
    assert read_arrays("test", tmp_path / "a.npz")["count"].shape == ()


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"format": NaN}', "[" * 100_000])
def test_a_description_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    """Broken, endless and foreign JSON end in a sentence too."""
    saved(tmp_path)
    (tmp_path / "model.json").write_text(text)

    with pytest.raises(InvalidData, match=r"load_model: model\.json must be"):
        load_model(tmp_path)


def test_a_folder_without_a_model_says_so(tmp_path: Path) -> None:
    """The sentence names what was looked for."""
    with pytest.raises(InvalidData, match=r"path must be a folder with model\.json"):
        load_model(tmp_path)


def archive(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as written:
        for name, content in members.items():
            written.writestr(f"{name}.npy", content)
    return file.getvalue()


def array_bytes(array: Array) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def compressed(_: Path) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, x=np.zeros(10**6))
    return file.getvalue()


def claimed(_: Path) -> bytes:
    header = array_bytes(np.zeros(4)).replace(b"(4,)", b"(9,)")
    return archive(x=header)


HOSTILE: dict[str, Callable[[Path], bytes]] = {
    "nothing": lambda _: b"",
    "no archive": lambda _: b"PK\x03\x04 and so on",
    "a pickle": lambda path: pickle.dumps(Bomb(path)),
    "objects": lambda path: archive(x=array_bytes(np.array([Bomb(path)], dtype=object))),
    "compressed": compressed,
    "more than there is": claimed,
    "words": lambda _: archive(x=array_bytes(np.array(["a", "b"]))),
    "another array": lambda _: archive(x=array_bytes(np.zeros(4))),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_arrays_are_refused(kind: str, tmp_path: Path) -> None:
    """One sentence, no memory, and nothing is executed."""
    saved(tmp_path)
    (tmp_path / "arrays.npz").write_bytes(HOSTILE[kind](tmp_path / "mark"))

    with pytest.raises(StrategyError) as error:
        load_model(tmp_path)

    assert "must be" in str(error.value)
    assert not (tmp_path / "mark").exists()


def test_a_network_larger_than_its_arrays_is_not_built(tmp_path: Path) -> None:
    """A million inputs would take 400 MB before a learner compares shapes."""
    saved(tmp_path, "mlp")
    describe(tmp_path, **{"row-shape": [2**20]})

    with pytest.raises(InvalidData, match=r"the arrays must be 104\d+ numbers"):
        load_model(tmp_path)


def committee(folder: Path) -> None:
    """Write a mean of two trees."""
    members = [saved(member_folder(folder, number)) for number in range(2)]
    save_committee(MeanEnsemble(members, num_classes=3, task="single-label"), folder, card())


def test_a_mean_is_read_with_all_its_members(tmp_path: Path) -> None:
    """Two equal members say what each of them says."""
    committee(tmp_path)

    assert np.array_equal(
        load_model(tmp_path).predict(X), load_model(tmp_path / "member-0").predict(X)
    )


COMMITTEE = "signed-sum-of-members"


@pytest.mark.parametrize(
    ("write", "change", "sentence"),
    [
        (saved, {"format": 2}, "format must be 1, got 2"),
        (saved, {"learner": "../models"}, "must name a learner"),
        (saved, {"learner": "x" * 10**6}, "must name a learner"),
        (saved, {"learner": 3}, "learner must be of type str, got 3"),
        (saved, {"settings": {"num-trees": "many"}}, "must name a learner"),
        (saved, {"row-shape": []}, "row-shape must be whole numbers"),
        (saved, {"row-shape": [2**21]}, "row-shape must be whole numbers"),
        (saved, {"row-shape": [True]}, "row-shape must be whole numbers"),
        (saved, {"classes": ["a", 2, "c"]}, "classes must be names"),
        (saved, {"classes": ["a", "b"]}, "SklearnLearner"),
        (saved, {"task": "anything"}, "task must be one of single-label"),
        (saved, {"code": "import os"}, "model.json must be an object with format"),
        (committee, {"settings": {}}, "members must be from 1 to"),
        (committee, {"settings": {"members": 10**9}}, "members must be from 1 to"),
        (committee, {"settings": {"members": 3}}, "path must be a folder with model.json"),
        (committee, {"classes": ["a", "b"]}, "members must be of 2 classes"),
        *(
            (
                committee,
                {"learner": COMMITTEE, "settings": {"members": 2, "signs": signs}},
                "signs must be 1 and -1",
            )
            for signs in ("++", [1, 5])
        ),
    ],
)
def test_a_description_that_is_not_one_is_refused(
    write: Callable[[Path], Any], change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    """One sentence says what is wrong with it, however long that is."""
    write(tmp_path)
    describe(tmp_path, **change)

    with pytest.raises(StrategyError) as error:
        load_model(tmp_path)

    assert sentence in str(error.value)
    assert len(str(error.value)) < 1000


def test_a_member_is_no_committee(tmp_path: Path) -> None:
    """A folder that contains itself by a link would never be read to its end."""
    committee(tmp_path)
    member = tmp_path / "member-1"
    (member / "model.json").write_text((tmp_path / "model.json").read_text())

    with pytest.raises(InvalidData, match="must name a learner"):
        load_model(tmp_path)
