"""Fused CuPy kernels. Imported when a CuPy array arrives; what is not here is served by the generic code."""
