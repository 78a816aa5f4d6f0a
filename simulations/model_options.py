"""Settings of the models that a word in a run configuration names."""

from dataclasses import dataclass
from typing import Literal

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
