"""Chains: the final model of one strategy starts another, in one run with one ledger."""

from fl_strategies.strategies.chain.server import Chain, chain

__all__ = ["Chain", "chain"]
