"""The party side of every strategy: records, policy, state, training."""
