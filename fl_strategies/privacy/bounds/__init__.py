"""Bounds on privacy loss, each by one theory; the accountant decides which of them apply."""
