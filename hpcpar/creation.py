"""Tensors from arrays that every rank holds, from blocks, from a number or a range; no message."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np

from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh, current_mesh
from hpcpar.primitives.repartition import move
from hpcpar.signature import signature
from hpcpar.tensors import Tensor


def tensor(
    array: Any,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    requires_grad: bool = False,
    dtype: Any = None,
) -> Tensor:
    """Make a tensor from a global array that every rank holds; each rank keeps its block. No message.

    Parameters
    ----------
    array : array_like
        The same value on every rank.
    mesh : Mesh, optional
        The current mesh by default.
    layout : Layout, optional
        Replicated by default. Over partial axes, index 0 keeps the value and the others hold zeros.
    requires_grad : bool
    dtype : dtype, optional
        The array's own by default.

    Raises
    ------
    TypeError
        When the array holds no numbers.
    RuntimeError
        When integers or booleans are to require gradients, as in torch.
    """
    array = array if hasattr(array, "__array_function__") else np.asarray(array)
    if dtype is not None:
        array = array.astype(dtype, copy=False)
    check_dtype(array.dtype, requires_grad)
    mesh = mesh or current_mesh()
    sig = signature(mesh, tuple(array.shape), layout or Layout())
    whole = signature(mesh, sig.shape, Layout())
    shard = move(array, whole, sig)
    if shard.base is not None or shard is array:
        shard = shard.copy(order="K")  # a view would keep the whole array alive
    return Tensor(shard, sig, requires_grad)


def from_shard(
    shard: Any,
    shape: tuple[int, ...],
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    requires_grad: bool = False,
) -> Tensor:
    """Make a tensor of global `shape` from this rank's block, which is not copied. No message.

    Parameters
    ----------
    shard : array
        This rank's block; over partial axes its share of the value.
    shape : tuple of int
        Global shape.
    mesh : Mesh, optional
        The current mesh by default.
    layout : Layout, optional
        Replicated by default.
    requires_grad : bool

    Raises
    ------
    ValueError
        When the block has another shape than the block rule gives this rank.
    TypeError, RuntimeError
        As `tensor`.
    """
    check_dtype(shard.dtype, requires_grad)
    sig = signature(mesh or current_mesh(), tuple(shape), layout or Layout())
    if tuple(shard.shape) != sig.local_shape:
        raise ValueError(
            f"the shard has shape {tuple(shard.shape)}; rank {sig.mesh.rank} owns {sig.local_shape} of {sig!r}"
        )
    return Tensor(shard, sig, requires_grad)


def full(
    shape: tuple[int, ...],
    fill_value: float,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    dtype: Any = np.float32,
    requires_grad: bool = False,
) -> Tensor:
    """Return a tensor of global `shape` filled with one number; each rank makes its own block.

    Parameters
    ----------
    shape : tuple of int
    fill_value : float
    mesh : Mesh, optional
        The current mesh by default.
    layout : Layout, optional
        Replicated by default.
    dtype : dtype
        float32 by default.
    requires_grad : bool

    Raises
    ------
    ValueError
        A length that is not a whole number of at least 0.
    TypeError, RuntimeError
        As `tensor`.
    """
    check_dtype(np.dtype(dtype), requires_grad)
    sig = signature(mesh or current_mesh(), global_shape((shape,)), layout or Layout()).resolved
    return Tensor(np.full(sig.local_shape, fill_value, dtype), sig, requires_grad)


def zeros(*shape: int, **options: Any) -> Tensor:
    """Return zeros of global `shape`, given as one tuple or as numbers; options as in `full`."""
    return full(global_shape(shape), 0, **options)


def ones(*shape: int, **options: Any) -> Tensor:
    """Return ones of global `shape`, given as one tuple or as numbers; options as in `full`."""
    return full(global_shape(shape), 1, **options)


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    dtype: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return the numbers from `start` on, below `end`, in steps of `step`; each rank makes its own block.

    Parameters
    ----------
    start, end, step : float
        With one number it is the end, and the start is 0.
    mesh : Mesh, optional
        The current mesh by default.
    layout : Layout, optional
        Replicated by default.
    dtype : dtype, optional
        int64 by default where all three are whole numbers, else float32.
    requires_grad : bool

    Raises
    ------
    ValueError
        No steps lead from start to end.
    RuntimeError
        As `tensor`.
    """
    start, end = (0, start) if end is None else (start, end)
    if step == 0 or (end - start) / step < 0:
        raise ValueError(f"arange: no steps of {step} lead from {start} to {end}")
    whole = all(isinstance(number, int | np.integer) for number in (start, end, step))
    dtype = np.dtype(dtype or (np.int64 if whole else np.float32))
    check_dtype(dtype, requires_grad)
    length = -(-(end - start) // step) if whole else ceil((end - start) / step)
    sig = signature(mesh or current_mesh(), (int(length),), layout or Layout()).resolved
    return Tensor((start + np.arange(*sig.box[0]) * step).astype(dtype), sig, requires_grad)


def global_shape(given: tuple) -> tuple[int, ...]:
    """Return a shape that was given as numbers, as one tuple or as one number.

    Raises
    ------
    ValueError
        A length that is not a whole number of at least 0.
    """
    shape = given[0] if len(given) == 1 and isinstance(given[0], Sequence) else given
    if not all(isinstance(n, int | np.integer) and n >= 0 for n in shape):
        raise ValueError(f"a shape consists of whole numbers >= 0, got {tuple(shape)}")
    return tuple(int(n) for n in shape)


def check_dtype(dtype: Any, requires_grad: bool) -> None:
    """Refuse what a tensor cannot hold, and gradients of what is no floating point number.

    Raises
    ------
    TypeError, RuntimeError
        As `tensor`.
    """
    if dtype.kind in "OUSMm":
        raise TypeError(f"a tensor holds numbers; got an array of dtype {dtype}")
    if requires_grad and dtype.kind in "biu":
        raise RuntimeError(f"only floating point tensors can require gradients; got dtype {dtype}")
