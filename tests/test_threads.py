"""Products of matrices use one thread where threads would wait, and as many as before after."""

from collections.abc import Iterator

import numpy as np
import pytest
import threadpoolctl

from clients.tabular.kernel import RandomFeaturesLearner
from fl_strategies import _util
from fl_strategies._util import one_blas_thread
from fl_strategies.strategies.sums.histogram import Cells
from fl_strategies.strategies.sums.regression import Components

MANY = 2


def counts() -> set[int]:
    """Return how many threads the libraries of numpy and scipy use."""
    found = threadpoolctl.threadpool_info()
    return {library["num_threads"] for library in found if library["user_api"] == "blas"}


@pytest.fixture(autouse=True)
def _many_threads() -> Iterator[None]:
    with threadpoolctl.threadpool_limits(limits=MANY, user_api="blas"):
        yield


def test_a_block_uses_one_thread_and_restores_the_number() -> None:
    """Also blocks inside of others, and after an error."""
    with one_blas_thread():
        with one_blas_thread():
            assert counts() == {1}
        assert counts() == {1}
    assert counts() == {MANY}

    with pytest.raises(ZeroDivisionError), one_blas_thread():
        raise ZeroDivisionError
    assert counts() == {MANY}


def test_without_the_package_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes with scikit-learn, which nobody needs to have."""
    monkeypatch.setattr(_util, "_controller", lambda: None)

    with one_blas_thread():
        assert counts() == {MANY}


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    """Cells, components and random features are the same to the bit."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 120)) * np.exp(rng.normal(size=120))
    y = rng.integers(3, size=len(x))

    def results() -> list[bytes]:
        learner = RandomFeaturesLearner(num_classes=3, num_features=200)
        fitted = learner.fit(x, y, rng=np.random.default_rng(1))
        cells = Cells.of_rows(x, 4, 30, np.random.default_rng(2))
        arrays = [cells.centres, Components.of_rows(x, 20).turn, fitted.logits(x)]
        return [array.tobytes() for array in arrays]

    several = results()
    with one_blas_thread():
        assert results() == several
