"""Measurements behind the figures of the pages; `make bench` runs those of the suite."""
