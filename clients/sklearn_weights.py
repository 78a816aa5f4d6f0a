"""Weighted labels for any scikit-learn estimator."""

from typing import Any, Final

from clients.soft_labels import WeightedLabels
from fl_strategies.arrays import Array

# isort: split
from sklearn.pipeline import Pipeline
from sklearn.svm import SVC, LinearSVC, NuSVC
from sklearn.utils.validation import has_fit_parameter

# The hinge loss asks which class is likelier and not by how much, so rows of several classes
# would teach them nothing, at a hundred times the cost.
HINGED: Final = (SVC, NuSVC, LinearSVC)


def takes_weights(estimator: Any) -> bool:
    """Tell whether an estimator, and all that it is made of, gains from weighted rows."""
    if isinstance(estimator, Pipeline):
        return takes_weights(estimator.steps[-1][1])
    nested = [part for part in estimator.get_params().values() if hasattr(part, "fit")]
    return all(
        has_fit_parameter(each, "sample_weight") and not isinstance(each, HINGED)
        for each in (estimator, *nested)
    )


def fit_weighted(model: Any, x: Array, labels: WeightedLabels) -> Any:
    """Fit an estimator that takes weights to rows (n, d), and return it.

    The steps of a pipeline before the last see every row once, as they do without weights.
    """
    if not isinstance(model, Pipeline):
        return model.fit(x[labels.rows], labels.classes, sample_weight=labels.weights)
    if len(model.steps) > 1:
        before = model[:-1]
        x = before.fit_transform(x, labels.likeliest)
        model.steps[:-1] = before.steps
    fit_weighted(model.steps[-1][1], x, labels)
    return model
