"""Fused memory-bound kernels compiled by numba: one pass over memory where NumPy needs several."""
