"""Bounds on privacy loss, each by one theory."""
