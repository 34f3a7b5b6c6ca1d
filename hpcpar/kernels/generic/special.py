"""The error function for NumPy and CuPy arrays: NumPy has none, and SciPy is no dependency of the package."""

from __future__ import annotations

import numpy as np

from ..arrays import Array, is_device

# Rational minimax approximations, W. J. Cody, "Rational Chebyshev approximations for the error function",
# Mathematics of Computation 23 (1969) 631-637: relative error below 6e-19 in exact arithmetic. Highest power first.
_CORE = ((1.85777706184603153e-1, 3.16112374387056560, 1.13864154151050156e2, 3.77485237685302021e2,
          3.20937758913846947e3),
         (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3))
_MIDDLE = ((2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594, 6.61191906371416295e1,
            2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3,
            1.23033935479799725e3),
           (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
            3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3))


def erf(x: Array) -> Array:
    """Error function, to about one unit in the last place of float64 (below: of the dtype), odd, NaN for NaN."""
    if is_device(x):
        from cupyx.scipy import special

        return special.erf(x)
    a = np.abs(x.astype(np.float64, copy=False))
    inner = np.minimum(a, 0.46875)
    small = inner * _ratio(_CORE, inner * inner)
    outer = np.clip(a, 0.46875, 6.0)  # beyond 5.93 erf is 1 in float64
    large = 1 - np.exp(-outer * outer) * _ratio(_MIDDLE, outer)
    return np.copysign(np.where(a <= 0.46875, small, large), x).astype(x.dtype, copy=False)


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], z: Array) -> Array:
    top, bottom = (np.full_like(z, c[0]) for c in coefficients)
    for t, b in zip(coefficients[0][1:], coefficients[1][1:], strict=True):
        top *= z
        top += t
        bottom *= z
        bottom += b
    top /= bottom
    return top
