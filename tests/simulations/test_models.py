import pickle
import re
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement

from clients.encoders import named
from clients.encoders.named import import_torchvision
from fl_strategies.errors import InvalidParameter, MissingExtra
from fl_strategies.learners import Learner, LearnerFactory, quality
from simulations import models
from simulations.config import Settings
from simulations.data.sets import Dataset, Request, load_dataset
from simulations.models import LEARNERS, learner_factory

ROOT = Path(__file__).parents[2]
QUICK = Settings.of(num_trees=20, boosting_rounds=10, epochs=30)
FORESTS = ("random-forest", "extra-trees")
IMAGE_NETWORKS = ("mnist-net", "convolutional", "vgg9", "resnet8", "resnet34")
OTHERS = (*IMAGE_NETWORKS, "embedding-bag", "dp-mlp")
FOR_VECTORS = [name for name in LEARNERS if name not in OTHERS]
CLASSIFIERS = FOR_VECTORS[: FOR_VECTORS.index("xgboost") + 1]


@pytest.fixture(scope="module")
def digits() -> Dataset:
    """Return the data that all models here learn."""
    return load_dataset("digits", Request(rng=np.random.RandomState(0)))


def factory(name: str, settings: Settings = QUICK) -> LearnerFactory:
    return learner_factory(name, row_shape=(64,), num_classes=10, settings=settings)


def wrapped(name: str, settings: Settings) -> Any:
    """Return the estimator that the wrapper would get."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clients.SklearnLearner", lambda inner, **_: inner)
        return factory(name, settings)()


def options(name: str, wrapper: str, settings: Settings) -> Any:
    """Return the keyword arguments that the wrapper would get."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"clients.{wrapper}", lambda *_, **given: given)
        return factory(name, settings)()


@pytest.mark.parametrize("name", FOR_VECTORS)
def test_every_name_makes_a_model_that_learns(name: str, digits: Dataset) -> None:
    """Each model labels unseen digits far better than chance after 200 examples."""
    learner = factory(name)()
    assert isinstance(learner, Learner)
    learner.fit(digits.x_train[:200], digits.y_train[:200], rng=np.random.default_rng(0))
    assert (learner.predict(digits.x_test) == digits.y_test).mean() > 0.5
    assert learner.logits(digits.x_test[:7]).shape == (7, 10)


@pytest.mark.parametrize("name", FOR_VECTORS)
@pytest.mark.parametrize("labels", [(4, 4), (4, 9), (7,)])
def test_every_model_takes_the_smallest_training_sets(
    name: str, labels: tuple[int, ...], digits: Dataset
) -> None:
    """One or two records of one or two classes, as a teacher may get, are enough."""
    y = np.array(labels)
    learner = factory(name)().fit(digits.x_train[: len(y)], y, rng=np.random.default_rng(0))
    assert set(learner.predict(digits.x_test[:30])) <= set(labels)


def test_the_private_perceptron_learns_and_says_what_it_spends(digits: Dataset) -> None:
    """Its noise is secret, and the event tells what it has cost."""
    learner: Any = factory("dp-mlp", Settings(epochs=8))()
    learner.fit(digits.x_train[:200], digits.y_train[:200], rng=np.random.default_rng(0))

    ((event, count),) = learner.privacy_events
    assert (event.noise_multiplier, event.seeded, count) == (1.0, False, 1)
    assert (learner.predict(digits.x_test) == digits.y_test).mean() > 0.3


@pytest.mark.parametrize("name", [*LEARNERS, "cnn-2-8-16"])
def test_a_factory_can_be_sent_to_another_process(name: str) -> None:
    """Worker processes get the factory, not the model."""
    copy = pickle.loads(pickle.dumps(factory(name)))  # noqa: S301 - made in this very line
    assert copy.args == factory(name).args


@pytest.mark.parametrize("name", FORESTS)
def test_a_forest_takes_number_and_depth_of_its_trees(name: str) -> None:
    """Depth 0 stands for unlimited, and one thread is used."""
    limited = wrapped(name, Settings.of(num_trees=7, max_depth=3))
    assert (limited.n_estimators, limited.max_depth, limited.n_jobs) == (7, 3, 1)
    assert wrapped(name, Settings.of(max_depth=0)).max_depth is None


def test_single_and_boosted_trees_take_their_depth() -> None:
    """Depth 0 is none, and six levels in boosting, whose trees are meant to be weak."""
    assert wrapped("decision-tree", Settings.of(max_depth=4)).max_depth == 4
    assert wrapped("decision-tree", Settings()).max_depth is None
    rounds = Settings.of(boosting_rounds=9, boosting_learning_rate=0.2)
    boosting = wrapped("gradient-boosting", rounds)
    assert (boosting.n_estimators, boosting.learning_rate, boosting.max_depth) == (9, 0.2, 6)
    assert wrapped("gradient-boosting", Settings.of(max_depth=2)).max_depth == 2


def test_the_forest_of_bits_takes_trees_and_depth() -> None:
    """A depth of 0 is none, and one beyond what travels is cut."""
    for depth, expected in ((4, 4), (0, None), (1000, 60)):
        settings = Settings.of(num_trees=7, max_depth=depth)
        assert options("forest", "ForestLearner", settings) == {
            "num_classes": 10,
            "num_trees": 7,
            "max_depth": expected,
        }


@pytest.mark.parametrize(
    ("name", "kind", "threads"),
    [
        ("xgboost", "XGBoostLearner", {"num_threads": 1}),
        ("lightgbm", "LightGBMLearner", {}),
        ("boosted-trees", "BoostedTreesLearner", {}),
    ],
)
def test_boosted_trees_take_the_settings_of_the_paper(
    name: str, kind: str, threads: dict[str, int]
) -> None:
    """Rounds, depth, rate and gamma reach the learner, and one thread is used."""
    settings = Settings.of(
        boosting_rounds=11, max_depth=4, boosting_learning_rate=0.05, boosting_gamma=1.0
    )
    assert options(name, kind, settings) == {
        "num_classes": 10,
        "num_rounds": 11,
        "max_depth": 4,
        "learning_rate": 0.05,
        "gamma": 1.0,
        "reg_lambda": 1.0,
        **threads,
    }
    assert options(name, kind, Settings.of(max_depth=0))["max_depth"] == 6


def test_the_perceptron_takes_the_settings_of_training() -> None:
    """Epochs, batch size, step size, penalty and early stopping reach the learner."""
    given = {"epochs": 3, "batch_size": 8, "learning_rate": 0.01, "weight_decay": 0.5}
    given |= {"validation_share": 0.1, "patience": 3}
    usual = {"optimizer": "adam", "momentum": 0.9, "schedule": "constant"}
    assert options("mlp", "TorchLearner", Settings.of(**given)) == {
        "num_classes": 10,
        "task": "single-label",
        "final_learning_rate": None,
        "augment": None,
        "channels_last": False,
        **given,
        **usual,
    }


def network_options(name: str, row_shape: tuple[int, ...], **changes: Any) -> Any:
    """Return the keyword arguments that TorchLearner would get, with settings to come."""
    settings = Settings.of(**changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clients.TorchLearner", lambda *_, **given: given)
        return learner_factory(name, row_shape=row_shape, num_classes=2, settings=settings)()


def test_a_network_takes_the_settings_of_its_optimizer() -> None:
    """Names of optimizer and schedule, momentum and the last rate reach the learner."""
    changes = {"optimizer": "sgd", "schedule": "cosine", "momentum": 0.5}
    given = network_options("resnet8", (3, 8, 8), **changes, end_learning_rate=0.001)
    assert {name: given[name] for name in changes} == changes
    assert given["final_learning_rate"] == 0.001
    assert given["channels_last"]


@pytest.mark.parametrize(("channels", "may_flip"), [(3, True), (1, False)])
def test_images_are_cropped_and_only_photographs_mirrored(
    channels: int, may_flip: bool
) -> None:
    """A mirrored letter is another letter; rows that are no images stay as they are."""
    augment = network_options("resnet8", (channels, 8, 8), augment=True)["augment"]
    assert augment.keywords == {"padding": 4, "flip": may_flip}
    assert network_options("mlp", (64,), augment=True)["augment"] is None


def test_score_learners_take_the_settings_of_trees_and_kernels() -> None:
    """Rounds and depth, the number of trees, kernel and ridge reach the learners."""
    kernels = {"kernel": "laplace", "ridge": 0.5, "reveal_rows": True, "num_features": 30}
    settings = Settings.of(boosting_rounds=9, num_trees=7, max_depth=3, **kernels)
    boosting = options("xgboost-scores", "XGBoostScores", settings)
    assert (boosting["num_rounds"], boosting["max_depth"]) == (9, 3)
    assert boosting["task"] == "single-label"
    kind = "KernelRidgeLearner"
    outputs = {"num_classes": 10, "task": "single-label"}
    kernel = {"kernel": "laplace", "ridge": 0.5, "reveal_rows": True}
    assert options("kernel-ridge", kind, settings) == {**outputs, **kernel}
    assert not options("kernel-ridge", kind, Settings())["reveal_rows"]
    assert options("ridge", "RidgeLearner", settings)["ridge"] == 0.5
    waves = options("random-features", "RandomFeaturesLearner", settings)
    assert waves["num_features"] == 30
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clients.ForestScores", lambda estimator, **_: estimator)
        forest: Any = factory("forest-scores", settings)()
    assert (forest.n_estimators, forest.max_depth, forest.n_jobs) == (7, 3, 1)


# Other tasks


def several_labels(digits: Dataset) -> tuple[Any, Any]:
    """Return whether a digit is even, and whether it is above 4; some are unknown."""
    y = np.stack([digits.y_train % 2 == 0, digits.y_train > 4], axis=1).astype(np.int64)
    y[::7, 0] = -1
    return digits.x_train[:200], y[:200]


@pytest.mark.parametrize("name", FOR_VECTORS)
def test_every_name_learns_several_labels(name: str, digits: Dataset) -> None:
    """Each model ranks unseen rows far better than chance for both labels."""
    x, y = several_labels(digits)
    make = learner_factory(
        name, row_shape=(64,), num_classes=2, settings=QUICK, task="multi-label"
    )
    learner = make().fit(x, y, rng=np.random.default_rng(0))
    truth = np.stack([digits.y_test % 2 == 0, digits.y_test > 4], axis=1).astype(np.int64)
    assert learner.num_classes == 2
    assert quality(learner, digits.x_test, truth, "multi-label") > 0.7


@pytest.mark.parametrize("name", [name for name in FOR_VECTORS if name not in CLASSIFIERS])
def test_score_learners_and_networks_regress(name: str) -> None:
    """A line is learned far better than by its mean."""
    x = np.linspace(-1, 1, 200, dtype=np.float32).reshape(-1, 1)
    y = 2 * x.astype(np.float64)
    make = learner_factory(
        name, row_shape=(1,), num_classes=1, settings=QUICK, task="regression"
    )
    learner = make().fit(x, y, rng=np.random.default_rng(0))
    assert quality(learner, x, y, "regression") < 0.2 * y.var()


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifier_cannot_regress(name: str) -> None:
    """The sentence names the task and what would fit."""
    make = learner_factory(
        name, row_shape=(4,), num_classes=1, settings=QUICK, task="regression"
    )
    with pytest.raises(InvalidParameter, match="task must be single-label or multi-label for"):
        make()


def test_the_perceptron_has_two_hidden_layers_of_a_hundred_units() -> None:
    """The parameters are those of the paper's network."""
    network = models.multilayer_perceptron(784, 10)
    shapes = [tuple(weights.shape) for weights in network.parameters()]
    assert shapes == [(100, 784), (100,), (100, 100), (100,), (10, 100), (10,)]


def test_an_unknown_name_lists_the_known() -> None:
    """The answer names every model."""
    message = r"one of random-forest, .*, mlp, .*, cnn-2-A-B or cnn-3-A-B-C .*, got '{}'"
    for name in ("catboost", "cnn-2-8", "cnn-3-8-8", "cnn-2-8-8-8", "cnn-2-0-8", "cnn-4-1-1-1"):
        with pytest.raises(InvalidParameter, match=message.format(name)):
            factory(name)


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("random-forest", "sklearn.ensemble", "sklearn"),
        ("svm", "sklearn.svm", "sklearn"),
        ("boosted-trees", "numba", "fast"),
        ("lightgbm", "lightgbm", "lightgbm"),
        ("xgboost", "xgboost", "xgboost"),
        ("mlp", "torch", "torch"),
        ("resnet8", "torch", "torch"),
        ("xgboost-scores", "xgboost", "xgboost"),
        ("forest-scores", "sklearn.ensemble", "sklearn"),
    ],
)
def test_a_missing_library_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, extra: str
) -> None:
    """Only making the model needs the library, and the error says what to install."""
    monkeypatch.setitem(sys.modules, module, None)
    make = factory(name)
    with pytest.raises(MissingExtra, match=rf"{name}: .*fl-strategies\[{extra}\]"):
        make()


def test_importing_the_models_loads_no_library() -> None:
    """Settings and names can be read where no model library is installed."""
    code = (
        "import sys, simulations.config, simulations.models;"
        "heavy = {'torch', 'sklearn', 'xgboost', 'lightgbm', 'numba', 'pandas', 'torchvision'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_torchvision_that_is_missing_names_its_extra_and_other_failures_are_not_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the one known failure is worked around; any other is shown, with what may help."""

    def broken(_owner: str, _module: str, _extra: str) -> types.ModuleType:
        raise RuntimeError("something else")

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torchvision", None)
        with pytest.raises(MissingExtra, match=r"'torchvision' .*fl-strategies\[simulation\]"):
            import_torchvision("mnist")
    monkeypatch.setattr(named, "import_library", broken)
    with pytest.raises(RuntimeError, match="something else") as caught:
        import_torchvision("mnist")
    assert "must be of one build" in caught.value.__notes__[0]


def test_the_pinned_torch_is_of_torchvisions_release() -> None:
    """Both are pinned, and the installed torchvision asks for that torch."""
    pins = dict(
        re.findall(
            r"^(torch|torchvision)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M
        )
    )
    wanted = [Requirement(each) for each in metadata.requires("torchvision") or ()]
    (torch,) = [each for each in wanted if each.name == "torch"]

    assert metadata.version("torchvision") == pins["torchvision"]
    assert pins["torch"] in torch.specifier
    assert metadata.version("torch").partition("+")[0] == pins["torch"]


@pytest.mark.parametrize("given", [{"patience": 5}, {"validation_share": 0.1}])
def test_private_networks_refuse_early_stopping(given: dict[str, Any]) -> None:
    """When to stop would not be private."""
    settings = Settings.of(**given)
    factory = learner_factory("dp-mlp", row_shape=(4,), num_classes=10, settings=settings)
    with pytest.raises(InvalidParameter, match=r"(patience|validation-share) must be 0 for dp"):
        factory()
