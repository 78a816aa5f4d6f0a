"""Learners of tables."""
