"""Tests with real processes must leave none behind."""

from tests.leftovers import nothing_is_left_behind

__all__ = ["nothing_is_left_behind"]
