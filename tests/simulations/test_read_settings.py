"""Parties of one process read their run's settings once."""

import pytest

from fl_strategies.errors import InvalidParameter
from simulations.config import Settings
from simulations.runtime.client_app import read_settings


def test_equal_configurations_are_read_once() -> None:
    """What is read is what `from_run_config` gives, and the same object the next time."""
    config = {"strategy": "fedkt", "num-parties": 7}

    assert read_settings(config) == Settings.from_run_config(config)
    assert read_settings(dict(config)) is read_settings(config)
    assert read_settings({**config, "num-parties": 8}).num_parties == 8


def test_equal_numbers_of_other_types_are_other_settings() -> None:
    """True equals 1, but is no number of parties."""
    read_settings({"num-parties": 1})

    with pytest.raises(InvalidParameter, match="num-parties"):
        read_settings({"num-parties": True})
