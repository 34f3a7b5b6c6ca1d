"""Random meshes, layouts and cases, the same on every rank: all choices come from a generator with a common seed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.mesh import Mesh

_meshes: dict[tuple[tuple[str, int], ...], Mesh] = {}


def draw_mesh_shape(rng: np.random.Generator, ranks: int, axes: Sequence[str]) -> dict[str, int]:
    """Return random lengths for `axes` whose product is `ranks`; every way to share out the prime factors occurs."""
    shape = dict.fromkeys(axes, 1)
    for prime in _prime_factors(ranks):
        shape[axes[int(rng.integers(len(axes)))]] *= prime
    return shape


def draw_mesh(rng: np.random.Generator, axes: Sequence[str] = ("a", "b"), ranks: int | None = None) -> Mesh:
    """Return a mesh over all ranks with a random shape; equal shapes share one mesh. Collective when it is new.

    Parameters
    ----------
    ranks : int, optional
        The size of the world by default, which it must equal.
    """
    from mpi4py import MPI

    shape = draw_mesh_shape(rng, ranks or MPI.COMM_WORLD.Get_size(), axes)
    return shared_mesh(**shape)


def shared_mesh(**axes: int) -> Mesh:
    """Return the one mesh of this shape for all tests: hundreds of cases then need few communicators. Collective."""
    key = tuple(axes.items())
    if key not in _meshes:
        _meshes[key] = Mesh(**axes)
    return _meshes[key]


def draw_layout(
    rng: np.random.Generator,
    shape: Sequence[int],
    mesh: Mesh | Mapping[str, int],
    partial: bool = False,
    forbid: Sequence[int] = (),
) -> Layout:
    """Return a random layout: each axis of the mesh splits a dim, is partial, or is left out.

    Several axes on one dim form a stack in any order.

    Parameters
    ----------
    rng : Generator
        With the same seed on every rank.
    shape : sequence of int
        Of the array.
    mesh : Mesh or mapping of str to int
    partial : bool
        Whether axes may be partial.
    forbid : sequence of int
        Dims that are not split.
    """
    axes = list(mesh.shape if isinstance(mesh, Mesh) else mesh)
    dims: list[list[str]] = [[] for _ in shape]
    free = [d for d in range(len(shape)) if d not in {f % len(shape) for f in forbid}]
    summed = []
    for i in rng.permutation(len(axes)):
        choice = int(rng.integers(len(free) + 1 + partial))
        if choice < len(free):
            dims[free[choice]].append(axes[i])
        elif choice > len(free):
            summed.append(axes[i])
    return Layout(*[tuple(entry) for entry in dims], partial=tuple(summed))


@dataclass
class CaseCount:
    """How many random cases an operation served, and how many it refused with a LayoutError."""

    accepted: int = 0
    refused: int = 0


def run_cases(case: Callable[[np.random.Generator], Any], count: int, seed: int = 0) -> CaseCount:
    """Call ``case(rng)`` for `count` cases, each with a generator of its own, the same on every rank.

    A LayoutError counts as refused. Any other failure is raised again with a line that runs this one case alone: the
    environment variable ``HPCPAR_CASE`` selects it.

    Parameters
    ----------
    case : callable
        Draws a case and checks it.
    count, seed : int

    Returns
    -------
    CaseCount
        To be asserted upon: a rule that refuses everything would otherwise pass.
    """
    chosen = os.environ.get("HPCPAR_CASE")
    result = CaseCount()
    for number in range(count) if chosen is None else [int(chosen)]:
        try:
            case(np.random.default_rng([seed, number]))
            result.accepted += 1
        except LayoutError:
            result.refused += 1
        except Exception as error:
            raise AssertionError(f"{_reproduction(number)}\n{type(error).__name__}: {error}") from error
    return result


def _reproduction(number: int) -> str:
    from mpi4py import MPI

    ranks = MPI.COMM_WORLD.Get_size()
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0] or "TEST"
    start = "python -m" if ranks == 1 else f"mpiexec -n {ranks} python -m mpi4py -m"
    return f"case {number} fails; alone: HPCPAR_CASE={number} {start} pytest '{test}'"


def _prime_factors(n: int) -> list[int]:
    factors, prime = [], 2
    while n > 1:
        while n % prime == 0:
            factors.append(prime)
            n //= prime
        prime += 1
    return factors
