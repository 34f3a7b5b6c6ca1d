"""Fused CuPy kernels. Imported when a CuPy array arrives; what is not here is served by the generic code.

Functions bear the names and arguments of the reference in `hpcpar.kernels.generic`, which documents them. A call that
one does not serve it declines by returning NotImplemented.
"""
