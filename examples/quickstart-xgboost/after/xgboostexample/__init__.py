"""A Flower app with XGBoost."""
