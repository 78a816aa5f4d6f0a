"""What many answers come to: votes, consensus, weights, ensembles and metrics."""
