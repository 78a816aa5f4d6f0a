"""Measurements behind the numbers in docs; `make bench` runs those of the suite."""
