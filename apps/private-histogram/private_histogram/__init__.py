"""A classifier from one noisy histogram of each party, with differential privacy."""
