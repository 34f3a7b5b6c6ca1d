"""Fast kernels for the CPU: oneDNN through ctypes, and fused loops compiled by numba. Imported when first needed."""
