import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fl_strategies._util.randomness import derive_rng

PATHS = st.lists(st.one_of(st.integers(0, 5), st.sampled_from(["a", "b", "1"])), max_size=4)


@given(seed=st.integers(0, 2**63 - 1), path=PATHS)
def test_same_name_same_stream(seed: int, path: list[str | int]) -> None:
    """A stream depends on its name and on nothing else."""
    np.random.default_rng(0).random(3)

    assert derive_rng(seed, *path).integers(2**60) == derive_rng(seed, *path).integers(2**60)


@given(first=PATHS, second=PATHS)
def test_other_name_other_stream(first: list[str | int], second: list[str | int]) -> None:
    """Different paths, also the number 1 and the text "1", give different streams."""
    same = first == second and [type(p) for p in first] == [type(p) for p in second]
    drawn = [derive_rng(0, *path).integers(2**60) for path in (first, second)]

    assert (drawn[0] == drawn[1]) == same


def test_seeds_give_different_streams() -> None:
    """Two experiments share nothing."""
    assert derive_rng(0, "x").integers(2**60) != derive_rng(1, "x").integers(2**60)
