"""Numbers that belong to logical arrays: inner product and fingerprint, the same under every layout.

What is split is summed over the ranks, what is partial as well, and what is replicated counts on index 0 only. Each
function sends one small message for all arrays it is given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from math import sqrt
from typing import Any

import numpy as np

from hpcpar import kernels
from hpcpar.checks.values import CheckError, Value
from hpcpar.primitives.repartition import plan
from hpcpar.signature import Signature
from hpcpar.transport.device import to_host

_SEED = 0x5EED


def counts_here(sig: Signature, *others: Signature) -> bool:
    """Whether this rank counts in a sum: it has index 0 on all axes over which none of the arrays differs."""
    differing = {a for s in (sig, *others) for a in (*s.split_axes, *s.partial)}
    return all(sig.mesh.index(a) == 0 for a in sig.mesh.axes if a not in differing)


def inner_products(pairs: Sequence[tuple[Any, Signature, Any, Signature]]) -> list[Value]:
    """Return the logical inner product of each (array, signature, array, signature). Collective over the mesh."""
    mesh = pairs[0][1].mesh
    local = []
    for a, a_sig, b, b_sig in pairs:
        if a_sig.dims != b_sig.dims or set(a_sig.partial) & set(b_sig.partial):
            # a product of shares is no share of the product
            b, b_sig = plan(b_sig, a_sig.resolved)(b), a_sig.resolved
        terms = _numbers(a) * _numbers(b) if counts_here(a_sig, b_sig) else np.zeros(0)
        local.append((float(terms.sum()), float(np.square(terms).sum())))
    return _sum_over_ranks(mesh, local)


def fingerprint(array: Any, sig: Signature) -> Value:
    """Return ``<x, r>``, r random numbers that are a function of the global index. Collective over the mesh."""
    return _sum_over_ranks(sig.mesh, [_local_fingerprint(array, sig)])[0]


def same_logical_array(a: Any, a_sig: Signature, b: Any, b_sig: Signature) -> tuple[Value, Value]:
    """Return both fingerprints, with one message."""
    first, second = _sum_over_ranks(a_sig.mesh, [_local_fingerprint(a, a_sig), _local_fingerprint(b, b_sig)])
    return first, second


def inspect(what: str, array: Any, sig: Signature) -> Value:
    """Return the fingerprint; raise CheckError on all ranks where what is replicated differs along an axis.

    The bytes are compared, so NaN equals NaN and a difference of one bit is found.
    """
    mesh = sig.mesh
    host = to_host(array)
    if tuple(host.shape) != sig.local_shape:
        verdict = f"has the shape {tuple(host.shape)}, {sig!r} owns {sig.local_shape}"
    else:
        verdict = ""
    digest = hashlib.blake2b(host.tobytes(), digest_size=8).digest()
    local = (verdict, digest, str(host.dtype), _local_fingerprint(array, sig) if not verdict else (0.0, 0.0))
    everyone = mesh.world.gather_objects(local)
    for rank, (text, *_) in enumerate(everyone):
        if text:
            raise CheckError(f"{what}: the shard of rank {rank} {text}")
    if len({dtype for _, _, dtype, _ in everyone}) > 1:
        raise CheckError(f"{what}: dtypes differ between ranks: {[dtype for _, _, dtype, _ in everyone]}")
    _compare_replicas(what, sig, [digest for _, digest, *_ in everyone])
    return _total([sums for *_, sums in everyone])


def _compare_replicas(what: str, sig: Signature, digests: list[bytes]) -> None:
    mesh = sig.mesh
    differing = {*sig.split_axes, *sig.partial}
    first: dict[tuple[int, ...], tuple[int, tuple[int, ...]]] = {}
    for rank, coords in enumerate(np.ndindex(*mesh.shape.values())):
        key = tuple(c for a, c in zip(mesh.axes, coords, strict=True) if a in differing)
        reference, there = first.setdefault(key, (rank, coords))
        if digests[rank] != digests[reference]:
            axes = [a for a, c, d in zip(mesh.axes, coords, there, strict=True) if c != d]
            raise CheckError(
                f"{what}: {sig!r} is replicated over {', '.join(axes)}, "
                f"but rank {rank} holds other bits than rank {reference}"
            )


def _local_fingerprint(array: Any, sig: Signature) -> tuple[float, float]:
    if not counts_here(sig):
        return 0.0, 0.0
    terms = _numbers(array) * _noise(sig.shape, sig.box)
    return float(terms.sum()), float(np.square(terms).sum())


@lru_cache(maxsize=64)
def _noise(shape: tuple[int, ...], box: tuple[tuple[int, int], ...]) -> np.ndarray:
    return kernels.random_uniform(_SEED, 0, shape, box) + 0.5


def _numbers(array: Any) -> np.ndarray:
    return to_host(array).astype(np.float64)


def _sum_over_ranks(mesh: Any, local: list[tuple[float, float]]) -> list[Value]:
    everyone = mesh.world.gather_objects(local)
    return [_total(column) for column in zip(*everyone, strict=True)]


def _total(sums: Sequence[tuple[float, float]]) -> Value:
    return Value(sum(value for value, _ in sums), sqrt(sum(square for _, square in sums)))
