"""Rounds on Flower: fetching and waiting, checkpoints, files, and Flower's own versions."""
