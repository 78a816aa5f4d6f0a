"""Data sets: files, splits, partitions."""
