"""Learners whose library is missing."""

from collections.abc import Callable

import pytest

import clients
from fl_strategies.errors import MissingExtra


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("TorchLearner", "torch", "torch"),
        ("crop_and_flip", "torch", "torch"),
        ("DPTorchLearner", "torch", "torch"),
        ("DPTorchLearner", "opacus.grad_sample", "opacus"),
        ("SklearnLearner", "sklearn", "sklearn"),
        ("SklearnLearner", "sklearn.decomposition", "sklearn"),
        ("XGBoostLearner", "xgboost", "xgboost"),
        ("LightGBMLearner", "lightgbm", "lightgbm"),
        ("BoostedTreesLearner", "numba", "fast"),
    ],
)
def test_a_missing_library_names_its_extra(
    without: Callable[..., None], name: str, package: str, extra: str
) -> None:
    """The first use of the learner's name says what to install."""
    module = clients._MODULES[name]
    above = {"torch": "clients.networks", "numba": "clients.compiled"}.get(package, module)
    without(package, module, above)

    with pytest.raises(MissingExtra, match=rf'pip install "fl-strategies\[{extra}\]"'):
        getattr(clients, name)
