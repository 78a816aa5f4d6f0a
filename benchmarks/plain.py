"""A FedKT party as scripts usually train it: the baseline, without optimisations.

One model after the other; images decoded one by one by a `Dataset` under a `DataLoader`;
the optimizer as PyTorch makes it; classifiers of scikit-learn and XGBoost by `fit` and
`predict` with one thread. It does the same work as `benchmarks.parties` asks of the
package: as many models of the same kind, on as many rows, for as many epochs or trees.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from benchmarks.workloads import NUM_SPLITS, NUM_TEACHERS, SEED, Workload
from fl_strategies._util import Array, IntArray
from simulations.models import _module_factory


class Images(Dataset[tuple[Tensor, int]]):
    """Images that are decoded when they are asked for, as torchvision's data sets do."""

    def __init__(self, images: Array, labels: Array) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self.images[index])
        pixels = torch.from_numpy(np.array(image, dtype=np.uint8, copy=True))
        return pixels[None].to(torch.float32).div(255), int(self.labels[index])


def answers(work: Workload) -> IntArray:
    """Return the labels that a party's students give to the public rows, (s, num_public)."""
    torch.manual_seed(SEED)
    fit, predict = (_fit_network, _predict_network) if work.images else (_fit, _predict)
    rng = np.random.default_rng(SEED)
    labels = []
    for _ in range(NUM_SPLITS):
        votes = np.zeros((len(work.public), work.num_classes), dtype=np.int64)
        for rows in np.array_split(rng.permutation(len(work.y)), NUM_TEACHERS):
            teacher = fit(work, work.x, work.y, rows)
            for row, label in enumerate(predict(work, teacher)):
                votes[row, label] += 1
        everywhere = np.arange(len(work.public))
        student = fit(work, work.public, votes.argmax(axis=1), everywhere)
        labels.append(predict(work, student))
    return np.stack(labels)


def _fit_network(work: Workload, x: Array, y: Array, rows: IntArray) -> nn.Module:
    module = _module_factory(work.learner, work.problem)()
    options = work.options
    subset: Any = Subset(Images(x, y), rows.tolist())
    loader = DataLoader(subset, batch_size=options.batch_size, shuffle=True)
    optimizer = torch.optim.Adam(
        module.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay
    )
    criterion = nn.CrossEntropyLoss()
    module.train()
    for _ in range(options.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(module(images), labels)
            loss.backward()
            optimizer.step()
    return module


def _predict_network(work: Workload, module: nn.Module) -> IntArray:
    unknown = np.zeros(len(work.public), dtype=np.int64)
    loader = DataLoader(Images(work.public, unknown), batch_size=work.options.batch_size)
    module.eval()
    found = []
    with torch.no_grad():
        for images, _ in loader:
            found += module(images).argmax(dim=1).tolist()
    return np.array(found)


def _fit(work: Workload, x: Array, y: Array, rows: IntArray) -> Any:
    labels = y[rows]
    if len(np.unique(labels)) == 1:  # neither library learns from one class
        return int(labels[0])
    return CLASSIFIERS[work.name](work).fit(x[rows], labels)


def _predict(work: Workload, model: Any) -> Sequence[int]:
    if isinstance(model, int):
        return [model] * len(work.public)
    found: Sequence[int] = model.predict(work.public)
    return found


def _xgboost(work: Workload) -> Any:
    from xgboost import XGBClassifier

    return XGBClassifier(
        n_estimators=work.options.boosting_rounds,
        max_depth=work.options.max_depth,
        learning_rate=work.options.boosting_learning_rate,
        gamma=work.options.boosting_gamma,
        n_jobs=1,
    )


def _forest(work: Workload) -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(
        n_estimators=work.options.num_trees, max_depth=work.options.max_depth, random_state=SEED
    )


CLASSIFIERS: dict[str, Callable[[Workload], Any]] = {"xgboost": _xgboost, "forest": _forest}
