"""Misspelt names in Python get the answer that the command line gives."""

from collections.abc import Callable
from typing import Any

import pytest

from fl_strategies import FedKT, FedKTOptions, FedMDOptions
from fl_strategies.errors import InvalidParameter
from tests.toys import common_options


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: FedKT(**_common(), num_techers=3),
            r"mean 'num_teachers'\? Write options=.*, or FedKT.from_settings\(num_teachers=",
        ),
        (
            lambda: FedKT(**_common(), num_teachers=3),
            r"got 'num_teachers'. Write options=FedKTOptions",
        ),
        (
            lambda: FedKT(**_common(), num_partys=3),
            r"FedKT: .* got 'num_partys'. Did you mean 'num_parties'\?",
        ),
        (
            lambda: FedKTOptions(num_techers=3),  # type: ignore[call-arg]
            r"FedKT: .* got 'num_techers'. Did you mean 'num_teachers'\?",
        ),
        (
            lambda: FedKTOptions(gamma=0.1),  # type: ignore[call-arg]
            r"got 'gamma'. Write privacy=VotePrivacy\(gamma=...\).",
        ),
        (
            lambda: FedMDOptions(num_samples=3),  # type: ignore[call-arg]
            r"got 'num_samples'. Write release=SampleOnce\(num_samples=...\).",
        ),
        (
            lambda: FedKT.from_settings(**_common(), num_techers=3),
            r"FedKT: .* got 'num_techers'. Did you mean 'num_teachers'\?",
        ),
        (
            lambda: FedKT.from_settings(**_common(), num_partys=3),
            r"FedKT: .* got 'num_partys'. Did you mean 'num_parties'\?",
        ),
    ],
)
def test_a_misspelt_name_suggests_the_right_one(
    make: Callable[[], object], sentence: str
) -> None:
    """In constructors, in options and in flat settings."""
    with pytest.raises(InvalidParameter, match=sentence):
        make()


def _common() -> dict[str, Any]:
    return dict(common_options())
