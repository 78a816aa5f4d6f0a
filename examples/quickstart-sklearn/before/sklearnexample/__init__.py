"""A Flower app with scikit-learn."""
