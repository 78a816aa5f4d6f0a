"""Models by name, so that a word in a run configuration is enough to choose one.

Every library is imported when its model is first made: a federation of random forests
needs no torch, and one of neural networks no XGBoost.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import clients
from fl_strategies._util import import_library
from fl_strategies.errors import InvalidParameter, require
from fl_strategies.learners import Learner, LearnerFactory, Task
from fl_strategies.options import Options, option


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """Hyper-parameters of all models; each takes those that it has."""

    num_trees: int = option(100, "trees of a forest", least=1)
    max_depth: int = option(0, "depth of trees; 0: unlimited, and 6 in boosting", least=0)
    boosting_rounds: int = option(100, "rounds of gradient boosting", least=1)
    boosting_learning_rate: float = option(0.3, "shrinkage of a boosting round", above=0)
    boosting_gamma: float = option(0.0, "least gain of a split in XGBoost", least=0)
    kernel: Literal["linear", "rbf", "polynomial", "laplace"] = option("rbf", "of kernel-ridge")
    ridge: float = option(0.001, "penalty of kernel-ridge and ridge, per row", least=0)
    num_features: int = option(2000, "cosines of random-features", least=1)
    reveal_rows: bool = option(False, "kernel-ridge models may travel with their training rows")
    epochs: int = option(30, "passes of a network over its data", least=1)
    batch_size: int = option(32, "rows in a step of a network", least=1)
    optimizer: Literal["adam", "sgd"] = option("adam", "of networks")
    momentum: float = option(0.9, "of sgd", least=0)
    learning_rate: float = option(0.001, "step size of the optimizer", above=0)
    end_learning_rate: float = option(0.0, "last of a cosine; 0: a hundredth", least=0)
    schedule: Literal["constant", "cosine"] = option("constant", "of the step size")
    weight_decay: float = option(0.00001, "L2 penalty of the optimizer", least=0)
    augment: bool = option(False, "networks see images shifted and mirrored")
    patience: int = option(
        0, "epochs without fewer mistakes after which a network stops; 0: never", least=0
    )
    validation_share: float = option(
        0.0, "rows that it stops by and does not learn; 0: those it learns", least=0, below=1
    )


if TYPE_CHECKING:
    import torch


class Problem(NamedTuple):
    """A learning problem: shape of rows, number of outputs, and task."""

    row_shape: tuple[int, ...]
    num_classes: int
    task: Task

    @property
    def outputs(self) -> dict[str, Any]:
        """The parameters of learners."""
        return {"num_classes": self.num_classes, "task": self.task}


Builder: TypeAlias = Callable[[ModelOptions, Problem], Learner]
ClassifierBuilder: TypeAlias = Callable[..., Learner]

HIDDEN_UNITS: Final = 100
BOOSTING_DEPTH: Final = 6
SOLVER_STEPS: Final = 2000
AUGMENT_PADDING: Final = 4
DP_NOISE: Final = 1.0  # of `dp-mlp`, in clipped gradients of one record
FEDMD_NAME: Final = re.compile(r"cnn-2(-[1-9]\d{0,3}){2}|cnn-3(-[1-9]\d{0,3}){3}")
TRAINING: Final = (
    *("epochs", "batch_size", "learning_rate", "optimizer", "momentum", "schedule"),
    *("weight_decay", "patience", "validation_share"),
)
"""Settings that networks have under the same names."""
FLAT_NETWORKS: Final = ("mlp", "mnist-mlp", "embedding-bag")
"""Networks without convolutions, for which the layout of images does not matter."""


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


# Classifiers: one model per label where records have several


def _classifier(build: ClassifierBuilder, settings: ModelOptions, problem: Problem) -> Learner:
    if problem.task == "single-label":
        return build(settings, num_classes=problem.num_classes)
    has_labels, rule = problem.task == "multi-label", "single-label or multi-label"
    require(has_labels, "learner_factory", "task", f"{rule} for a classifier", problem.task)
    return clients.MultiLabelLearner(
        functools.partial(build, settings, num_classes=2), num_classes=problem.num_classes
    )


def _forest_options(settings: ModelOptions) -> dict[str, Any]:
    depth = settings.max_depth or None
    return {"n_estimators": settings.num_trees, "max_depth": depth, "n_jobs": 1}


def _stage_options(settings: ModelOptions) -> dict[str, Any]:
    return {
        "n_estimators": settings.boosting_rounds,
        "learning_rate": settings.boosting_learning_rate,
        "max_depth": settings.max_depth or BOOSTING_DEPTH,
    }


ESTIMATORS: Final[Mapping[str, tuple[str, Callable[[ModelOptions], dict[str, Any]]]]] = {
    "random-forest": ("ensemble.RandomForestClassifier", _forest_options),
    "extra-trees": ("ensemble.ExtraTreesClassifier", _forest_options),
    "decision-tree": (
        "tree.DecisionTreeClassifier",
        lambda settings: {"max_depth": settings.max_depth or None},
    ),
    "logistic-regression": (
        "linear_model.LogisticRegression",
        lambda _: {"max_iter": SOLVER_STEPS},
    ),
    "svm": ("svm.SVC", lambda _: {}),
    # One neighbour: a teacher may be given two records, and five cannot be found there.
    "k-nearest-neighbours": (
        "neighbors.KNeighborsClassifier",
        lambda _: {"n_neighbors": 1, "n_jobs": 1},
    ),
    "gradient-boosting": ("ensemble.GradientBoostingClassifier", _stage_options),
}
"""Classifiers of scikit-learn: class and parameters."""


def _estimator(name: str, settings: ModelOptions, *, num_classes: int) -> Learner:
    path, parameters = ESTIMATORS[name]
    module, _, estimator = path.partition(".")
    library = import_library(name, f"sklearn.{module}", "sklearn")
    model = getattr(library, estimator)(**parameters(settings))
    return clients.SklearnLearner(model, num_classes=num_classes)


def _forest_levels(settings: ModelOptions) -> dict[str, Any]:
    from clients.tabular.forest import MOST_LEVELS

    depth = min(settings.max_depth, MOST_LEVELS) or None
    return {"num_trees": settings.num_trees, "max_depth": depth}


def _boosting_options(settings: ModelOptions) -> dict[str, Any]:
    return {
        "num_rounds": settings.boosting_rounds,
        "max_depth": settings.max_depth or BOOSTING_DEPTH,
        "learning_rate": settings.boosting_learning_rate,
        "gamma": settings.boosting_gamma,
        "reg_lambda": 1.0,
    }


def _xgboost_options(settings: ModelOptions) -> dict[str, Any]:
    return {**_boosting_options(settings), "num_threads": 1}


def _forest_regressor(settings: ModelOptions) -> dict[str, Any]:
    library = import_library("forest-scores", "sklearn.ensemble", "sklearn")
    # A third of the columns at every split, as is usual for forests of numbers: with all of
    # them the trees would hardly differ.
    return {
        "estimator": library.RandomForestRegressor(
            max_features=1 / 3, **_forest_options(settings)
        )
    }


class Wrapper(NamedTuple):
    """A learner of `clients`, its parameters, and the library that it wraps with its extra."""

    learner: str
    parameters: Callable[[ModelOptions], dict[str, Any]]
    library: str = ""
    extra: str = ""

    def make(self, name: str, settings: ModelOptions, **outputs: Any) -> Learner:
        """Return an unfitted learner; import its library first, to say by name what lacks."""
        if self.library:
            import_library(name, self.library, self.extra)
        learner: Learner = getattr(clients, self.learner)(
            **outputs, **self.parameters(settings)
        )
        return learner


LABEL_LEARNERS: Final[Mapping[str, Wrapper]] = {
    "forest": Wrapper("ForestLearner", _forest_levels),
    "boosted-trees": Wrapper("BoostedTreesLearner", _boosting_options, "numba", "fast"),
    "lightgbm": Wrapper("LightGBMLearner", _boosting_options, "lightgbm", "lightgbm"),
    "xgboost": Wrapper("XGBoostLearner", _xgboost_options, "xgboost", "xgboost"),
}
SCORE_LEARNERS: Final[Mapping[str, Wrapper]] = {
    "xgboost-scores": Wrapper("XGBoostScores", _xgboost_options, "xgboost", "xgboost"),
    "forest-scores": Wrapper("ForestScores", _forest_regressor),
    "kernel-ridge": Wrapper(
        "KernelRidgeLearner",
        lambda settings: {
            "kernel": settings.kernel,
            "ridge": settings.ridge,
            "reveal_rows": settings.reveal_rows,
        },
    ),
    "ridge": Wrapper("RidgeLearner", lambda settings: {"ridge": settings.ridge}),
    "moments": Wrapper("MomentsLearner", lambda _: {}),
    "random-features": Wrapper(
        "RandomFeaturesLearner", lambda settings: {"num_features": settings.num_features}
    ),
}


def _scores(name: str, settings: ModelOptions, problem: Problem) -> Learner:
    return SCORE_LEARNERS[name].make(name, settings, **problem.outputs)


# Networks


def _network(name: str, settings: ModelOptions, problem: Problem) -> Learner:
    import_library(name, "torch", "torch")
    is_image = len(problem.row_shape) == 3
    training: dict[str, Any] = {key: getattr(settings, key) for key in TRAINING}
    return clients.TorchLearner(
        _module_factory(name, problem),
        final_learning_rate=settings.end_learning_rate or None,
        augment=_augment(problem) if is_image and settings.augment else None,
        channels_last=is_image and name not in FLAT_NETWORKS,
        **problem.outputs,
        **training,
    )


def _private_network(settings: ModelOptions, problem: Problem) -> Learner:
    """Return the network `mlp` trained by DP-SGD, else with the learner's own defaults."""
    rule = "0 for dp-mlp: when to stop would not be private"
    for name in ("patience", "validation_share"):
        value = getattr(settings, name)
        require(value == 0, "learner_factory", name.replace("_", "-"), rule, value)
    return clients.DPTorchLearner(
        _module_factory("mlp", problem),
        **problem.outputs,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        noise_multiplier=DP_NOISE,
    )


def _module_factory(name: str, problem: Problem) -> "Callable[[], torch.nn.Module]":
    row_shape, num_classes, _ = problem
    if name == "mlp":
        return functools.partial(multilayer_perceptron, math.prod(row_shape), num_classes)
    from simulations import networks

    if FEDMD_NAME.fullmatch(name):
        widths = tuple(int(width) for width in name.split("-")[2:])
        return functools.partial(networks.fedmd_convolutional, widths, row_shape, num_classes)
    network: networks.Network = getattr(networks, name.replace("-", "_"))
    return functools.partial(network, row_shape, num_classes)


def _augment(problem: Problem) -> "Callable[[torch.Tensor], torch.Tensor]":
    """Return random crops, and mirror images of photographs but not of grey digits."""
    return clients.crop_and_flip(padding=AUGMENT_PADDING, flip=problem.row_shape[0] == 3)


NETWORKS: Final = (
    *("mlp", "mnist-mlp", "mnist-net", "convolutional"),
    *("vgg9", "resnet8", "resnet34", "embedding-bag"),
)
CLASSIFIERS: Final[Mapping[str, ClassifierBuilder]] = {
    **{name: functools.partial(_estimator, name) for name in ESTIMATORS},
    **{name: functools.partial(one.make, name) for name, one in LABEL_LEARNERS.items()},
}
LEARNERS: Final[Mapping[str, Builder]] = MappingProxyType(
    {
        **{name: functools.partial(_classifier, build) for name, build in CLASSIFIERS.items()},
        **{name: functools.partial(_scores, name) for name in SCORE_LEARNERS},
        **{name: functools.partial(_network, name) for name in NETWORKS},
        "dp-mlp": _private_network,
    }
)


def check_learner_name(owner: str, parameter: str, name: str) -> None:
    """Raise `InvalidParameter` with the known names unless `name` is one of them."""
    if name not in LEARNERS and not FEDMD_NAME.fullmatch(name):
        raise InvalidParameter(
            f"{owner}: {parameter} must be one of {', '.join(LEARNERS)}, cnn-2-A-B or "
            f"cnn-3-A-B-C with numbers of filters, got {name!r}."
        )


def named_learner(
    name: str,
    *,
    settings: Mapping[str, object],
    row_shape: tuple[int, ...],
    num_classes: int,
    task: Task,
) -> LearnerFactory:
    """Return the factory of a learner as a saved model describes it."""
    options = ModelOptions.from_config(settings)
    return learner_factory(
        name, row_shape=row_shape, num_classes=num_classes, settings=options, task=task
    )


def learner_factory(
    name: str,
    *,
    row_shape: tuple[int, ...],
    num_classes: int,
    settings: ModelOptions,
    task: Task = "single-label",
) -> LearnerFactory:
    """Return a factory of unfitted learners.

    Parameters
    ----------
    name : str
        One of `LEARNERS`, or a network of FedMD by its numbers of filters, such as
        `cnn-2-128-256` or `cnn-3-64-128-256`.
    row_shape : tuple of int
        Shape of a row; only networks need it.
    num_classes : int
        Length of the federation's class list, or number of labels or targets.
    settings : ModelOptions
        Source of the hyper-parameters. A depth of 0 means unlimited trees in forests and
        six levels in boosting, whose trees are meant to be weak.
    task : "single-label", "multi-label" or "regression"
        What is to be learned. Classifiers learn several labels by one model for each.

    Returns
    -------
    LearnerFactory
        A zero-argument callable that can be sent to another process.

    Examples
    --------
    >>> from simulations.models import ModelOptions
    >>> learner_factory(
    ...     "trees", row_shape=(4,), num_classes=2, settings=ModelOptions()
    ... )  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fl_strategies.errors.InvalidParameter: learner_factory: name must be one of \
random-forest, ..., cnn-2-A-B or cnn-3-A-B-C with numbers of filters, got 'trees'.
    """
    check_learner_name("learner_factory", "name", name)
    return functools.partial(_build, name, settings, Problem(row_shape, num_classes, task))


def _build(name: str, settings: ModelOptions, problem: Problem) -> Learner:
    build = LEARNERS.get(name) or functools.partial(_network, name)
    return build(settings, problem)
