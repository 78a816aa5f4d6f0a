"""Models as a hostile sender would make them, at most 1 MB each unless their name says more."""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.ensemble import ExtraTreesClassifier, RandomForestRegressor
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier

from clients import (
    BoostedTreesLearner,
    ForestScores,
    KernelRidgeLearner,
    LightGBMLearner,
    MomentsLearner,
    MultiLabelLearner,
    RidgeLearner,
    SklearnLearner,
    TorchLearner,
    XGBoostLearner,
    XGBoostScores,
    load_model,
)
from clients.saved_model import (
    ARRAYS,
    DESCRIPTION,
    MEAN,
    ModelCard,
    member_folder,
    write_arrays,
)
from fl_strategies.aggregation.ensembles import SignedEnsemble
from simulations import networks

MEGABYTE = 10**6
WIDTH = 4
NUM_ROWS = 50
Arrays = dict[str, np.ndarray]
Attack = Callable[[], tuple[Any, Arrays]]


def ROWS(model: Any) -> np.ndarray:  # noqa: N802 - constant but for its width
    """Return rows that fit a model, as wide as it says it is."""
    width = getattr(model, "_width", WIDTH)
    return np.random.default_rng(0).normal(size=(NUM_ROWS if width < 10**5 else 1, width))


def frame(num_classes: int, width: int = WIDTH) -> Arrays:
    return {"classes": np.arange(num_classes), "width": np.array([width])}


def fitted(learner: Any, num_classes: int = 3, *, labels: bool = False) -> Arrays:
    """Return an honest model of this learner, to be changed."""
    x = np.random.default_rng(1).normal(size=(60, WIDTH))
    y: np.ndarray = np.arange(60) % num_classes
    if labels:
        y = np.eye(num_classes, dtype=np.int64)[y]
    return dict(learner.fit(x, y, rng=np.random.default_rng(2)).to_arrays())


# Trees of scikit-learn.


def chain(num_levels: int) -> np.ndarray:
    """Return the leaf flags of a tree in level order that is one long path."""
    return np.array([0] + [0, 1] * (num_levels - 1) + [1, 1], dtype=np.uint8)


def bushy(num_splits: int) -> np.ndarray:
    """Return the leaf flags of a tree of equal depth everywhere."""
    return (np.arange(2 * num_splits + 1) >= num_splits).astype(np.uint8)


def forest(trees: list[np.ndarray], num_classes: int) -> Arrays:
    flags = np.concatenate(trees)
    num_leaves = int(flags.sum())
    return {
        "tree-sizes": np.array([len(tree) for tree in trees]),
        "leaf-bits": np.packbits(flags),
        "features": np.zeros(len(flags) - num_leaves, dtype=np.uint8),
        "thresholds": np.zeros(len(flags) - num_leaves, dtype=np.float32),
        "values": np.eye(num_classes)[:1],
        "leaf-values": np.zeros((num_leaves, 1), dtype=np.uint8),
    }


def sklearn(estimator: Any, num_classes: int = 3) -> SklearnLearner:
    return SklearnLearner(estimator, num_classes=num_classes)


def one_tree(flags: np.ndarray, num_classes: int = 3) -> tuple[Any, Arrays]:
    learner = sklearn(DecisionTreeClassifier(), num_classes)
    return learner, {**frame(num_classes), **forest([flags], num_classes)}


def many_trees(flags: np.ndarray, count: int, num_classes: int = 3) -> tuple[Any, Arrays]:
    learner = sklearn(ExtraTreesClassifier(), num_classes)
    return learner, {**frame(num_classes), **forest([flags] * count, num_classes)}


def label_forests(flags: np.ndarray, count: int, num_labels: int) -> tuple[Any, Arrays]:
    make = partial(SklearnLearner, ExtraTreesClassifier(), num_classes=2)
    part = {**frame(2), **forest([flags] * count, 2)}
    arrays = {**label_frame(num_labels), **repeated(part, num_labels)}
    return MultiLabelLearner(make, num_classes=num_labels), arrays


def label_frame(num_labels: int) -> Arrays:
    return {
        "row-shape": np.array([WIDTH]),
        "log-odds": np.zeros(num_labels),
        "is-constant": np.zeros(num_labels, dtype=bool),
    }


def repeated(part: Arrays, count: int) -> Arrays:
    """Return one model in the place of many."""
    return {f"{i}/{name}": array for i in range(count) for name, array in part.items()}


def chain_among_leaves() -> tuple[Any, Arrays]:
    learner, _ = many_trees(bushy(0), 1)
    return learner, {**frame(3), **forest([chain(250)] + [bushy(0)] * 9_999, 3)}


def wide_forest() -> tuple[Any, Arrays]:
    learner, arrays = many_trees(bushy(3), 2)
    features = arrays["features"].astype(np.uint32)
    return learner, {**arrays, **frame(3, 2**24), "features": features}


# Regression trees in level order.


def score_trees(flags: np.ndarray, count: int) -> tuple[Any, Arrays]:
    learner = ForestScores(RandomForestRegressor(n_estimators=3), num_classes=3)
    honest = fitted(learner)
    trees = np.tile(flags, count)
    num_leaves = int(trees.sum())
    return learner, {
        **{name: honest[name] for name in ("width", "link", "temperature")},
        "tree-sizes": np.full(count, len(flags)),
        "leaf-bits": np.packbits(trees),
        "features": np.zeros(len(trees) - num_leaves, dtype=np.uint8),
        "thresholds": np.zeros(len(trees) - num_leaves, dtype=np.float32),
        "values": np.zeros((num_leaves, 3), dtype=np.float32),
    }


# XGBoost.


def compiled(flags: np.ndarray, num_rounds: int = 1) -> tuple[Any, Arrays]:
    return BoostedTreesLearner(num_classes=2), boosted(flags, num_rounds)[1]


def lightgbm(flags: np.ndarray, num_rounds: int = 1) -> tuple[Any, Arrays]:
    arrays = boosted(flags, num_rounds)[1]
    wide = {name: arrays[name].astype(np.float64) for name in ("offsets", "values")}
    return LightGBMLearner(num_classes=2), {**arrays, **wide}


def boosted(flags: np.ndarray, num_rounds: int = 1, width: int = WIDTH) -> tuple[Any, Arrays]:
    learner = XGBoostLearner(num_classes=2, num_rounds=num_rounds)
    trees = np.tile(flags, num_rounds)
    num_leaves = int(trees.sum())
    num_splits = len(trees) - num_leaves
    return learner, {
        **frame(2, width),
        "offsets": np.zeros(1, dtype=np.float32),
        "tree-sizes": np.full(num_rounds, len(flags)),
        "leaf-bits": np.packbits(trees),
        "features": np.zeros(num_splits, dtype=np.min_scalar_type(width - 1)),
        "thresholds": np.zeros(num_splits, dtype=np.float32),
        "values": np.full((num_leaves, 1), np.finfo(np.float32).max, dtype=np.float32),
    }


def label_boosters(num_labels: int) -> tuple[Any, Arrays]:
    make = partial(XGBoostLearner, num_classes=2, num_rounds=1, gamma=1e9)
    learner = MultiLabelLearner(make, num_classes=num_labels)
    honest = fitted(MultiLabelLearner(make, num_classes=2), 2, labels=True)
    part = {name[2:]: array for name, array in honest.items() if name.startswith("0/")}
    return learner, {**label_frame(num_labels), **repeated(part, num_labels)}


# The rest.


def many_support_rows() -> tuple[Any, Arrays]:
    learner = KernelRidgeLearner(num_classes=2, reveal_rows=True)
    arrays = fitted(learner, 2)
    count = 900_000 // (8 * (WIDTH + 2))
    rows = {"support-rows": (count, WIDTH), "dual-coefficients": (count, 2)}
    return learner, {**arrays, **{name: np.zeros(size) for name, size in rows.items()}}


def broadcast_rows() -> tuple[Any, Arrays]:
    """Return eight bytes that look like 400 MB; only a caller in the process can."""
    learner, arrays = many_support_rows()
    sizes = {"support-rows": (10**7, WIDTH), "dual-coefficients": (10**7, 2)}
    one = {name: np.broadcast_to(np.zeros(()), size) for name, size in sizes.items()}
    return learner, {**arrays, **one}


def wide_bayes() -> tuple[Any, Arrays]:
    learner = sklearn(make_pipeline(StandardScaler(), GaussianNB()))
    return learner, {**fitted(learner), "width": np.array([2**24])}


def constant_labels() -> tuple[Any, Arrays]:
    count = 100_000
    learner, _ = label_forests(bushy(0), 1, count)
    return learner, {**label_frame(count), "is-constant": np.ones(count, dtype=bool)}


def network() -> TorchLearner:
    return TorchLearner(lambda: torch.nn.Linear(WIDTH, 3), num_classes=3, epochs=1)


def large_network() -> tuple[Any, Arrays]:
    state = fitted(network())
    return network(), {name: np.zeros((60_000, 2), np.float32) for name in state}


def tiny_weights() -> tuple[Any, Arrays]:
    """Return weights so small that a processor takes its slow path for each product."""

    def module() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 400), torch.nn.Linear(400, 400), torch.nn.Linear(400, 3)
        )

    learner = TorchLearner(module, num_classes=3, epochs=1)
    state = fitted(learner)
    return learner, {name: np.full_like(array, 1e-41) for name, array in state.items()}


def many_members() -> tuple[Any, Arrays]:
    one = fitted(RidgeLearner(num_classes=3))
    count = MEGABYTE // sum(150 + array.nbytes for array in one.values())
    names = np.frombuffer(json.dumps(["ridge"] * count).encode(), np.uint8)
    arrays = {"signs": np.ones(count, np.int8), "names": names}
    arrays |= repeated(one, count)
    factory = partial(RidgeLearner, num_classes=3)
    return SignedEnsemble(
        num_classes=3, task="single-label", model_fns={"ridge": factory}
    ), arrays


def chained_members() -> tuple[Any, Arrays]:
    learner, one = score_trees(chain(250), 1)
    count = MEGABYTE // sum(150 + array.nbytes for array in one.values())
    names = np.frombuffer(json.dumps(["forest"] * count).encode(), np.uint8)
    arrays = {"signs": np.ones(count, np.int8), "names": names, **repeated(one, count)}
    factories = {"forest": lambda: learner}
    return SignedEnsemble(num_classes=3, task="single-label", model_fns=factories), arrays


def named_members(text: bytes) -> tuple[Any, Arrays]:
    learner, arrays = many_members()
    kept = {name: array for name, array in arrays.items() if "/" not in name}
    return learner, {**kept, "names": np.frombuffer(text, np.uint8)}


def wide_scores() -> tuple[Any, Arrays]:
    learner = XGBoostScores(num_classes=3, num_rounds=2)
    return learner, {**fitted(learner), "width": np.array([2**24])}


def wide_logistic() -> tuple[Any, Arrays]:
    learner = sklearn(LogisticRegression())
    return learner, {**fitted(learner), "width": np.array([2**24])}


def moments(**changes: np.ndarray) -> tuple[Any, Arrays]:
    """Return a linear model of features, of which some arrays are others."""
    learner = MomentsLearner(num_classes=3, num_cosines=6)
    return learner, {**fitted(learner), **changes}


def many_cosines(num_cosines: int = 4083) -> tuple[Any, Arrays]:
    weights = np.ones((WIDTH + num_cosines + 1, 3))
    waves = np.ones((WIDTH, num_cosines), np.float32)
    return moments(waves=waves, phases=waves[0], weights=weights)


def many_products(number: int = 4080) -> tuple[Any, Arrays]:
    pairs, weights = np.zeros((number, 2), np.int32), np.ones((WIDTH + number + 7, 3))
    return moments(pairs=pairs, products=np.ones(number, np.float32), weights=weights)


# Folders of saved models, whose description names sizes as well.


class Folder:
    """Writes a description and arrays, and reads them back as a model."""

    def __init__(self, learner: str, *, num_links: int = 0, **told: Any) -> None:
        shape = {"row_shape": (WIDTH,), "classes": ("a", "b"), **told}
        self.card, self.num_links = ModelCard(learner=learner, **shape), num_links

    def from_arrays(self, arrays: Arrays) -> "Folder":
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            self._write(folder, self.card, arrays)
            if self.num_links:
                self._write(member_folder(folder, 0), self.card, arrays)
                members = {"members": self.num_links}
                self._write(folder, replace(self.card, learner=MEAN, settings=members), {})
            for number in range(1, self.num_links):
                member_folder(folder, number).symlink_to(member_folder(folder, 0))
            load_model(folder)
        return self

    def predict(self, x: np.ndarray) -> None:
        """Leave it at that: what is read is not asked."""

    def _write(self, folder: Path, card: ModelCard, arrays: Arrays) -> None:
        folder.mkdir(exist_ok=True)
        (folder / DESCRIPTION).write_text(json.dumps(card.to_json()))
        write_arrays(arrays, folder / ARRAYS)


def perceptron(inputs: int, units: int, layers: tuple[int, int, int] = (1, 4, 7)) -> Arrays:
    """Return the arrays of `mnist-mlp`, or of another network with two hidden layers."""
    sizes = zip((inputs, units, units), (units, units, 2), strict=True)
    arrays = {}
    for layer, (before, after) in zip(layers, sizes, strict=True):
        arrays[f"{layer}.weight"] = np.zeros((after, before), dtype=np.float32)
        arrays[f"{layer}.bias"] = np.zeros(after, dtype=np.float32)
    return arrays


def one_hidden_unit() -> tuple[Any, Arrays]:
    """Return arrays that fit, where the usual network of such rows has 512 times as many."""
    num_inputs = 200_000
    return Folder("mnist-mlp", row_shape=(num_inputs,)), perceptron(num_inputs, 1)


def wide_activations() -> tuple[Any, Arrays]:
    """Return a small network that makes 50 million numbers of one image."""
    shape, filters = (1, 500, 500), 200
    module = networks.fedmd_convolutional((filters, 1), shape, 2)
    return Folder(f"cnn-2-{filters}-1", row_shape=shape), {
        name: value.numpy() for name, value in module.state_dict().items()
    }


ATTACKS: Mapping[str, Attack] = {
    "booster: a chain of 262500 levels in 3 MB": lambda: boosted(chain(262_500)),
    "booster: a chain": lambda: boosted(chain(100_000)),
    "booster: a full tree": lambda: boosted(bushy(100_000)),
    "booster: chains": lambda: boosted(chain(250), 400),
    "booster: 10000 leaves": lambda: boosted(bushy(0), 10_000),
    "booster: 10000 small trees": lambda: boosted(bushy(3), 10_000),
    "booster: a million columns": lambda: boosted(bushy(3), 2, 2**20),
    "booster: 16 million columns": lambda: boosted(bushy(3), 2, 2**24),
    "lightgbm: 10000 leaves": lambda: lightgbm(bushy(0), 10_000),
    "lightgbm: chains": lambda: lightgbm(chain(250), 250),
    "lightgbm: a full tree": lambda: lightgbm(bushy(70_000)),
    "boosted trees: 10000 leaves": lambda: compiled(bushy(0), 10_000),
    "boosted trees: chains": lambda: compiled(chain(250), 400),
    "boosted trees: a full one": lambda: compiled(bushy(100_000)),
    "labels: boosters": partial(label_boosters, 200),
    "booster of scores: 16 million columns": wide_scores,
    "tree: a chain": lambda: one_tree(chain(150_000)),
    "tree: a full one": lambda: one_tree(bushy(159_000)),
    "tree: a full one of 100 classes": lambda: one_tree(bushy(159_000), 100),
    "tree: a full one of 1000 classes": lambda: one_tree(bushy(155_000), 1000),
    "forest: full trees of 1000 classes": lambda: many_trees(bushy(1_500), 103, 1000),
    "forest: 10000 leaves": lambda: many_trees(bushy(0), 10_000),
    "forest: 10000 small trees": lambda: many_trees(bushy(12), 10_000),
    "forest: chains": lambda: many_trees(chain(1_000), 155),
    "forest: a chain among leaves": chain_among_leaves,
    "forest: short chains": lambda: many_trees(chain(250), 255),
    "forest: a chain": lambda: many_trees(chain(150_000), 1),
    "forest: 16 million columns": wide_forest,
    "labels: leaves": lambda: label_forests(bushy(0), 10_000, 10),
    "labels: stumps": lambda: label_forests(bushy(1), 6_000, 10),
    "labels: a few leaves each": lambda: label_forests(bushy(0), 100, 350),
    "labels: chains": lambda: label_forests(chain(250), 10, 50),
    "labels: constants": constant_labels,
    "forest of scores: 10000 small trees": lambda: score_trees(chain(3), 10_000),
    "forest of scores: chains": lambda: score_trees(chain(1_000), 55),
    "forest of scores: a full tree": lambda: score_trees(chain(20_000), 1),
    "pipeline: 16 million columns": wide_bayes,
    "logistic: 16 million columns": wide_logistic,
    "kernel: many rows": many_support_rows,
    "moments: many cosines": many_cosines,
    "moments: many products": many_products,
    "moments: bands without cosines": lambda: moments(height=np.ones(2 * 10**5, np.float32)),
    "moments: 16 million columns": lambda: moments(width=np.array([2**24])),
    "kernel: rows that are not there": broadcast_rows,
    "network: of another size": large_network,
    "network: tiny weights": tiny_weights,
    "folder: a million inputs": lambda: (
        Folder("mlp", row_shape=(2**20,)),
        perceptron(WIDTH, 100, (1, 3, 5)),
    ),
    "folder: 250000 classes": lambda: (
        Folder("mnist-mlp", classes=("",) * 250_000),
        perceptron(WIDTH, 100),
    ),
    "folder: ten thousand filters": lambda: (
        Folder("cnn-3-9999-9999-9999", row_shape=(1, 32, 32)),
        perceptron(WIDTH, 100),
    ),
    "folder: one hidden unit": one_hidden_unit,
    "folder: wide activations": wide_activations,
    "folder: links to one member": lambda: (
        Folder("mlp", num_links=300, row_shape=(200_000,)),
        perceptron(200_000, 1, (1, 3, 5)),
    ),
    "ensemble: many members": many_members,
    "ensemble: chains": chained_members,
    "ensemble: nested names": lambda: named_members(b"[" * 900_000),
    "ensemble: objects as names": lambda: named_members(b"[" + b"{}," * 330_000 + b"{}]"),
}


def warm_up() -> None:
    """Use every library once: what it loads for its first call is no model's doing."""
    for learner in (
        sklearn(make_pipeline(StandardScaler(), MLPClassifier((3,), max_iter=5, tol=1e9))),
        sklearn(ExtraTreesClassifier(3)),
        XGBoostLearner(num_classes=3, num_rounds=1),
        LightGBMLearner(num_classes=3, num_rounds=1),
        BoostedTreesLearner(num_classes=3, num_rounds=1),
        XGBoostScores(num_classes=3, num_rounds=1),
        network(),
        KernelRidgeLearner(num_classes=3, reveal_rows=True),
    ):
        learner.from_arrays(fitted(learner)).predict(np.zeros((NUM_ROWS, WIDTH)))
    networks.fedmd_convolutional((1, 1), (1, 32, 32), 2)  # PyTorch's arithmetic of shapes alone
