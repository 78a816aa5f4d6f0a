"""Learners that are networks of PyTorch."""

from fl_strategies.errors import MissingExtra

try:
    import torch as torch
except ImportError as error:
    raise MissingExtra("TorchLearner", "torch", "torch") from error
