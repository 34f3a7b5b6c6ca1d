"""The reference kernels: one code for NumPy and CuPy, always there, and what every faster kernel is tested against."""
