"""Federations to run: data, partitions, models, the Flower app and an in-process runner."""
