"""Clipping of gradients by their global norm, right for split and replicated parameters together."""

from __future__ import annotations

from math import inf, isfinite

import numpy as np

from hpcpar.mesh import Mesh
from hpcpar.nn.module import Parameters, parameters_of
from hpcpar.signature import Signature
from hpcpar.tensors import Tensor


def clip_grad_norm_(
    parameters: Parameters, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> float:
    """Scale all gradients, in place, such that their norm together is at most `max_norm`. Collective.

    Parameters
    ----------
    parameters : Module, iterable of Parameter, or of (name, Parameter)
        Those without a gradient are passed over.
    norm_type : float
        2, any other power, or ``inf`` for the largest absolute value.
    error_if_nonfinite : bool
        Raise where the norm is infinite or NaN; otherwise an infinite norm makes finite
        elements 0 and others NaN, and NaN makes all of them NaN, as in torch.

    Returns
    -------
    float
        The norm before clipping; the same bits on every rank.

    Notes
    -----
    A gradient element that is split counts on its owner, a replicated one on index 0 of the axis: each logical element
    counts once. Sums run in float64, with one message of one number for all parameters of a mesh; every rank adds the
    parts itself, in rank order, so that no two can come to different decisions.

    Raises
    ------
    RuntimeError
        On all ranks: a gradient is still partial, or the norm is not finite and should be.
    """
    grads = []
    for name, parameter in parameters_of(parameters):
        if parameter.grad is None:
            continue
        if parameter.grad.sig.partial:
            raise RuntimeError(f"the gradient of {name} is still partial: {parameter.grad.layout!r}; reduce it first")
        grads.append(parameter.grad)
    norm = total_norm(grads, norm_type)
    if error_if_nonfinite and not isfinite(norm):
        raise RuntimeError(f"the norm of the gradients is {norm}")
    factor = max_norm / (norm + 1e-6)
    if not factor >= 1.0:  # also NaN
        for grad in grads:
            data = grad.shard
            with np.errstate(invalid="ignore"):  # infinity times 0
                data *= data.dtype.type(factor)
            grad.changed()
    return norm


def total_norm(tensors: list[Tensor], norm_type: float = 2.0) -> float:
    """Return the norm of all elements of `tensors` together, each logical element once. Collective."""
    if not norm_type > 0:
        raise ValueError(f"the norm is of a power above 0 or inf, got {norm_type}")
    meshes: dict[Mesh, list[Tensor]] = {}
    for tensor in tensors:
        meshes.setdefault(tensor.mesh, []).append(tensor)
    parts = [_combined(mesh, held, norm_type) for mesh, held in meshes.items()]
    if norm_type == inf:
        return float(np.max([0.0, *parts]))
    return float(np.sum(np.array(parts)) ** (1.0 / norm_type))


def _combined(mesh: Mesh, tensors: list[Tensor], norm_type: float) -> float:
    own = [_power_sum(t.shard, norm_type) for t in tensors if counts_here(t.sig)]
    number = np.array([np.max([0.0, *own]) if norm_type == inf else np.sum(np.array(own))], np.float64)
    gathered = np.array(mesh.world.all_gather(number, [(1,)] * mesh.size))
    return float(gathered.max() if norm_type == inf else gathered.sum())


def counts_here(sig: Signature) -> bool:
    """Whether this rank's shard counts in a logical sum: it has index 0 of every axis along which it is replicated."""
    mesh = sig.mesh
    return all(mesh.index(a) == 0 for a in mesh.axes if a not in sig.split_axes)


def _power_sum(data: object, norm_type: float) -> float:
    if not data.size:
        return 0.0
    if norm_type == inf:
        return float(np.abs(data).max())
    if norm_type == 2.0:
        # in pieces along the slowest memory dim, so that the float64 copy stays small
        flat = data.transpose(sorted(range(data.ndim), key=lambda d: -data.strides[d]))
        rows = flat if flat.ndim else flat.reshape(1)
        size = max(1, (1 << 18) * rows.shape[0] // max(rows.size, 1))
        total = 0.0
        for start in range(0, rows.shape[0], size):
            wide = rows[start : start + size].astype(np.float64).ravel()
            total += float(wide @ wide)
        return total
    return float((np.abs(data.astype(np.float64)) ** norm_type).sum())
