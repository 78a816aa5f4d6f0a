"""Learners that are networks of PyTorch."""
