"""Models by name, so that a word in a run configuration is enough to choose one.

Every library is imported when its model is first made: a federation of random forests
needs no torch, and one of neural networks no XGBoost.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from fl_strategies.exceptions import InvalidParameter, MissingExtra
from fl_strategies.protocols import Learner, LearnerFactory

if TYPE_CHECKING:
    import torch

    from simulations.config import Settings

Builder: TypeAlias = "Callable[[Settings, int, int], Learner]"

HIDDEN_UNITS: Final = 100
BOOSTING_DEPTH: Final = 6
SOLVER_STEPS: Final = 2000


def import_library(owner: str, module: str, extra: str) -> ModuleType:
    """Import an optional library, or name the extra that would bring it.

    Examples
    --------
    >>> import_library("adult", "no_such_library", "sklearn")
    Traceback (most recent call last):
    fl_strategies.exceptions.MissingExtra: adult: the package 'no_such_library' must be \
installed, got none. Run: pip install "fl-strategies[sklearn]"
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(owner, module.partition(".")[0], extra) from error


def import_torchvision(owner: str) -> ModuleType:
    """Import torchvision, also where its wheel was built for another torch than ours.

    A torchvision built for CUDA cannot load its compiled operators next to a CPU build of
    torch, and then fails while it registers them. Declaring the two names it asks for is
    enough: data sets, transforms and models use none of these operators.
    """
    try:
        return import_library(owner, "torchvision", "simulation")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    _declare_torchvision_operators()
    for name in [name for name in sys.modules if name.startswith("torchvision.")]:
        del sys.modules[name]  # left behind by the import that failed half-way
    return import_library(owner, "torchvision", "simulation")


@functools.cache  # the declaration lives as long as the object that made it
def _declare_torchvision_operators() -> object:
    library = importlib.import_module("torch").library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def multilayer_perceptron(num_features: int, num_classes: int) -> "torch.nn.Module":
    """Return the network of FedKT's MNIST experiment: two hidden layers of 100 ReLU units."""
    nn = import_library("mlp", "torch", "torch").nn
    network: torch.nn.Module = nn.Sequential(
        nn.Flatten(),
        nn.Linear(num_features, HIDDEN_UNITS),
        nn.ReLU(),
        nn.Linear(HIDDEN_UNITS, HIDDEN_UNITS),
        nn.ReLU(),
        nn.Linear(HIDDEN_UNITS, num_classes),
    )
    return network


def _sklearn_learner(
    name: str, module: str, estimator: str, num_classes: int, **parameters: Any
) -> Learner:
    library = import_library(name, f"sklearn.{module}", "sklearn")
    from clients.sklearn_learner import SklearnLearner

    return SklearnLearner(getattr(library, estimator)(**parameters), num_classes=num_classes)


def _random_forest(settings: "Settings", _num_features: int, num_classes: int) -> Learner:
    return _sklearn_learner(
        "random-forest", "ensemble", "RandomForestClassifier", num_classes,
        n_estimators=settings.num_trees, max_depth=settings.max_depth or None, n_jobs=1,
    )  # fmt: skip


def _extra_trees(settings: "Settings", _num_features: int, num_classes: int) -> Learner:
    return _sklearn_learner(
        "extra-trees", "ensemble", "ExtraTreesClassifier", num_classes,
        n_estimators=settings.num_trees, max_depth=settings.max_depth or None, n_jobs=1,
    )  # fmt: skip


def _decision_tree(settings: "Settings", _num_features: int, num_classes: int) -> Learner:
    return _sklearn_learner(
        "decision-tree", "tree", "DecisionTreeClassifier", num_classes,
        max_depth=settings.max_depth or None,
    )  # fmt: skip


def _logistic_regression(
    _settings: "Settings", _num_features: int, num_classes: int
) -> Learner:
    return _sklearn_learner(
        "logistic-regression", "linear_model", "LogisticRegression", num_classes,
        max_iter=SOLVER_STEPS,
    )  # fmt: skip


def _svm(_settings: "Settings", _num_features: int, num_classes: int) -> Learner:
    return _sklearn_learner("svm", "svm", "SVC", num_classes)


def _nearest_neighbours(_settings: "Settings", _num_features: int, num_classes: int) -> Learner:
    # One neighbour: a teacher may be given two records, and five cannot be found there.
    return _sklearn_learner(
        "k-nearest-neighbours", "neighbors", "KNeighborsClassifier", num_classes,
        n_neighbors=1, n_jobs=1,
    )  # fmt: skip


def _gradient_boosting(settings: "Settings", _num_features: int, num_classes: int) -> Learner:
    return _sklearn_learner(
        "gradient-boosting", "ensemble", "GradientBoostingClassifier", num_classes,
        n_estimators=settings.boosting_rounds, learning_rate=settings.boosting_learning_rate,
        max_depth=settings.max_depth or BOOSTING_DEPTH,
    )  # fmt: skip


def _xgboost(settings: "Settings", _num_features: int, num_classes: int) -> Learner:
    import_library("xgboost", "xgboost", "xgboost")
    from clients.xgboost_learner import XGBoostLearner

    return XGBoostLearner(
        num_classes=num_classes,
        num_rounds=settings.boosting_rounds,
        max_depth=settings.max_depth or BOOSTING_DEPTH,
        learning_rate=settings.boosting_learning_rate,
        gamma=settings.boosting_gamma,
        reg_lambda=1.0,
        num_threads=1,
    )


def _mlp(settings: "Settings", num_features: int, num_classes: int) -> Learner:
    import_library("mlp", "torch", "torch")
    from clients.torch_learner import TorchLearner

    return TorchLearner(
        functools.partial(multilayer_perceptron, num_features, num_classes),
        num_classes=num_classes,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
    )


LEARNERS: Final[Mapping[str, Builder]] = MappingProxyType(
    {
        "random-forest": _random_forest,
        "decision-tree": _decision_tree,
        "extra-trees": _extra_trees,
        "logistic-regression": _logistic_regression,
        "svm": _svm,
        "k-nearest-neighbours": _nearest_neighbours,
        "gradient-boosting": _gradient_boosting,
        "xgboost": _xgboost,
        "mlp": _mlp,
    }
)


def check_learner_name(owner: str, parameter: str, name: str) -> None:
    """Raise `InvalidParameter` with the known names unless `name` is one of them."""
    if name not in LEARNERS:
        raise InvalidParameter(
            f"{owner}: {parameter} must be one of {', '.join(LEARNERS)}, got {name!r}."
        )


def learner_factory(
    name: str, *, num_features: int, num_classes: int, settings: "Settings"
) -> LearnerFactory:
    """Return a factory of unfitted learners.

    Parameters
    ----------
    name : str
        One of `LEARNERS`.
    num_features : int
        Length of a flat row; only networks need it.
    num_classes : int
        Length of the federation's class list.
    settings : Settings
        Source of the hyper-parameters. A depth of 0 means unlimited trees in forests and
        six levels in boosting, whose trees are meant to be weak.

    Returns
    -------
    LearnerFactory
        A zero-argument callable that can be sent to another process.

    Examples
    --------
    >>> from simulations.config import Settings
    >>> learner_factory("forest", num_features=4, num_classes=2, settings=Settings())
    Traceback (most recent call last):
    fl_strategies.exceptions.InvalidParameter: learner_factory: name must be one of \
random-forest, decision-tree, extra-trees, logistic-regression, svm, k-nearest-neighbours, \
gradient-boosting, xgboost, mlp, got 'forest'.
    """
    check_learner_name("learner_factory", "name", name)
    return functools.partial(LEARNERS[name], settings, num_features, num_classes)
