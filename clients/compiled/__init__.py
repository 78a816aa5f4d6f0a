"""Kernels that Numba compiles; they know arrays alone."""
