"""Frozen encoders: raw records, such as images and texts, as rows of numbers."""
