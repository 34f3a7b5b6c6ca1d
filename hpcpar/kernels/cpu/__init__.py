"""Fast kernels for the CPU: oneDNN through ctypes, and fused loops compiled by numba. Imported when first needed.

Functions bear the names and arguments of the reference in `hpcpar.kernels.generic`, which documents them. A call that
one does not serve (a dtype, a geometry, an empty array) it declines by returning NotImplemented.
"""
