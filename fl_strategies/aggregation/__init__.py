"""Combine the answers of many parties: votes, consensus, weights, ensembles and metrics."""
