"""FENS: local models, sent once, and a small aggregator of their scores; both sides of it."""

from fl_strategies.strategies.fens.options import FENSOptions
from fl_strategies.strategies.fens.party import FENSParty
from fl_strategies.strategies.fens.server import FENS

__all__ = ["FENS", "FENSOptions", "FENSParty"]
