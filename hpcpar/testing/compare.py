"""Assertions that hold or fail on all ranks together, and the two comparisons every parallel operation must pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

TOLERANCE = {np.dtype(np.float64): 1e-12, np.dtype(np.float32): 1e-5}


def collective_assert(comm: Any, condition: Any, message: str = "") -> None:
    """Raise AssertionError on every rank of `comm` if `condition` is false on any of them. Collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, hpcpar Comm or None
        The ranks that must agree; None for a serial test.
    condition : bool
        May differ between ranks.
    message : str
        May differ between ranks; the error lists the messages of the ranks where the condition is false.
    """
    verdicts = _gather(comm, None if condition else message or "condition is false")
    failed = {rank: text for rank, text in enumerate(verdicts) if text is not None}
    if failed:
        raise AssertionError("\n".join(f"rank {r} of {len(verdicts)}: {text}" for r, text in failed.items()))


def assert_close_everywhere(
    comm: Any, got: Any, expected: Any, tolerance: float | None = None, what: str = "array"
) -> float:
    """Compare each rank's array with its own expectation; all ranks fail together. Collective.

    The measure is max|got - expected| / max|expected|, both maxima over all ranks, so that a block of small values is
    held to the scale of the whole array. Where everything expected is zero, max|got| itself must be within `tolerance`.
    NaN equals NaN and an infinity equals itself; anything else that is not finite is a difference.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, hpcpar Comm or None
        The ranks that hold the blocks; None for a serial test.
    got, expected : array
        NumPy or CuPy, of equal shape and dtype; shapes may differ between ranks, and be empty.
    tolerance : float, optional
        1e-12 for float64, 1e-5 for float32, exact equality for other dtypes.
    what : str
        Named in the error.

    Returns
    -------
    float
        The measured error.
    """
    got, expected = _host(got), _host(expected)
    fault = None
    if got.shape != expected.shape or got.dtype != expected.dtype:
        fault = f"{what}: got {got.dtype} {got.shape}, expected {expected.dtype} {expected.shape}"
    collective_assert(comm, fault is None, fault or "")
    if tolerance is None:
        tolerance = TOLERANCE.get(got.dtype, 0.0)

    apart = difference(got, expected)
    worst = float(apart.max(initial=0.0))
    finite = np.abs(expected[np.isfinite(expected)], dtype=np.result_type(expected.dtype, np.float64))
    pairs = _gather(comm, (worst, float(finite.max(initial=0.0))))
    scale = max(pair[1] for pair in pairs) or 1.0
    error = max(pair[0] for pair in pairs) / scale
    text = ""
    if worst / scale > tolerance:
        where = tuple(int(i) for i in np.unravel_index(int(apart.argmax()), apart.shape))
        text = (
            f"{what}: relative error {worst / scale:.3g} > {tolerance:.3g}; worst at {where} of {got.shape}: "
            f"got {got[where]!r}, expected {expected[where]!r}"
        )
    collective_assert(comm, not text, text)
    return error


def dot_test(
    forward: Callable[[Any], Any],
    adjoint: Callable[[Any], Any],
    x: Any,
    y: Any,
    comm: Any = None,
    tolerance: float | None = None,
) -> float:
    """Check <forward(x), y> = <x, adjoint(y)>, the definition of an adjoint. Collective.

    The vectors are all ranks' arrays one after the other, and the inner products are sums over all ranks. A replicated
    array therefore counts once a rank: the operator is what it does to the memory of all ranks, not to logical arrays.

    Parameters
    ----------
    forward, adjoint : function of one array
        Linear; called once each on every rank.
    x, y : array
        This rank's part of the domain and of the range: NumPy or CuPy, real or complex, may be empty.
    comm : mpi4py.MPI.Comm, hpcpar Comm or None
        The ranks the operator is spread over; None if on one.
    tolerance : float, optional
        1e-12 for double precision, 1e-5 otherwise; relative to max(|forward(x)||y|, |x||adjoint(y)|).

    Returns
    -------
    float
        The relative difference of the two inner products.

    Raises
    ------
    AssertionError
        On all ranks: the products differ, a result has not the shape of y or x, or both results are zero everywhere.

    References
    ----------
    J. F. Claerbout, Earth Soundings Analysis (1992), chapter 5: the dot-product test.
    """
    ahead, back = forward(x), adjoint(y)
    fault = ""
    for name, result, like in (("forward(x)", ahead, y), ("adjoint(y)", back, x)):
        if result.shape != like.shape:
            fault = f"{name} has shape {result.shape}, expected {like.shape}"
    collective_assert(comm, not fault, fault)
    if tolerance is None:
        tolerance = 1e-12 if min(np.finfo(_host(a).dtype).precision for a in (x, y, ahead, back)) >= 15 else 1e-5
    ahead, back, x, y = (_wide(a) for a in (ahead, back, x, y))
    local = (_dot(ahead, y), _dot(x, back), *(_dot(a, a).real for a in (ahead, y, x, back)))
    left, right, *squares = (sum(column) for column in zip(*_gather(comm, local), strict=True))
    norms = [float(s) ** 0.5 for s in squares]
    scale = max(norms[0] * norms[1], norms[2] * norms[3])
    collective_assert(comm, scale > 0 or not (norms[1] and norms[2]), "forward and adjoint are zero everywhere")
    error = abs(left - right) / scale if scale else 0.0
    collective_assert(
        comm, error <= tolerance, f"<Ax, y> = {left!r}, <x, A*y> = {right!r}: relative difference {error:.3g}"
    )
    return error


def _gather(comm: Any, value: Any) -> list[Any]:
    """Every rank's `value`, in rank order; of this process alone without a communicator."""
    if comm is None:
        return [value]
    return (comm if hasattr(comm, "allgather") else comm.handle).allgather(value)


def _host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else np.asarray(array)


def _wide(array: Any) -> np.ndarray:
    """A host copy in double precision, so that the test's own sums add no error."""
    host = _host(array)
    return host.astype(np.complex128 if host.dtype.kind == "c" else np.float64)


def _dot(a: np.ndarray, b: np.ndarray) -> Any:
    return np.vdot(a, b).item()


def difference(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return |got - expected| in double precision; 0 where both are the same non-finite value, inf where one is."""
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    a, b = got.astype(wide), expected.astype(wide)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore"):
        away = np.abs(a - b)
    return np.where(same, 0.0, np.where(np.isnan(away), np.inf, away))
