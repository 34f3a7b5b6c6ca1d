"""One operation, its arguments, operands and layouts as a value: checked against an oracle, shrunk, shown in one line.

A `Case` is pure data, so that a failure found by chance can be repeated from the line that it prints::

    mpiexec -n 3 python -c "from hpcpar.testing.cases import *; Case('flip', [Array((2, 1, 5))], ...).check()"

The oracle is torch on one process; without torch, this package itself on one rank with the generic kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.signature import signature
from hpcpar.tensors import Tensor
from hpcpar.testing.compare import assert_close_everywhere, collective_assert
from hpcpar.testing.layouts import shared_mesh
from hpcpar.testing.serial import all_or_none, block, operand

L = Layout
__all__ = ["Array", "Case", "L", "Layout", "Rejected"]


class Rejected(ValueError):
    """The oracle does not take the arguments, or is known to be wrong about them."""


@dataclass(frozen=True)
class Array:
    """One operand: global shape, layout, and what its values are like.

    Parameters
    ----------
    values : str
        "normal", "ties" (few distinct values), "positive", "shifted" (mean 1000 times the spread), "mask" (0 or 1), or
        "classes N" (int64 below N, one in five -100).
    parameter : bool
        Whether it is a `Parameter`, whose gradient may stay partial.
    """

    shape: tuple[int, ...]
    layout: Layout = field(default_factory=Layout)
    values: str = "normal"
    parameter: bool = False

    def __repr__(self) -> str:
        text = repr(self.shape)
        text += f", {_short(self.layout)}" if self.layout != Layout() else ""
        text += f", values={self.values!r}" if self.values != "normal" else ""
        return f"Array({text}{', parameter=True' if self.parameter else ''})"

    def draw(self, rng: np.random.Generator, dtype: str) -> np.ndarray:
        """Return the global array."""
        kind, _, number = self.values.partition(" ")
        if kind == "classes":
            labels = rng.integers(0, int(number), self.shape)
            return np.where(rng.random(self.shape) < 0.2, -100, labels)
        if kind == "mask":
            return rng.integers(0, 2, self.shape).astype(dtype)
        made = rng.standard_normal(self.shape)
        if kind == "ties":
            made = np.round(made)
        elif kind == "positive":
            made = np.abs(made) + 0.1
        elif kind == "shifted":
            made += 1000.0
        return made.astype(dtype)


def _short(layout: Layout) -> str:
    return repr(layout).replace("Layout(", "L(", 1)


@dataclass(frozen=True)
class Case:
    """One call of an operation on drawn operands, on a mesh of all ranks.

    Parameters
    ----------
    op : str
        Name of a function of `hpcpar.functional`, or of an adapter in `hpcpar.testing.twins`.
    arrays : sequence of Array
        The operands, in order.
    arguments : dict
        Keyword arguments.
    mesh : dict
        Length of each axis; their product is the number of ranks.
    """

    op: str
    arrays: Sequence[Array]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "float64"
    seed: int = 0

    def __repr__(self) -> str:
        text = f"{self.op!r}, {list(self.arrays)!r}, {dict(self.arguments)!r}, {dict(self.mesh)!r}"
        text += f", {self.dtype!r}" if self.dtype != "float64" else ""
        return f"Case({text}{f', seed={self.seed}' if self.seed else ''})"

    @property
    def command(self) -> str:
        """The shell line that runs this case alone."""
        ranks = int(np.prod(list(self.mesh.values()), dtype=int))
        start = "python" if ranks == 1 else f"mpiexec -n {ranks} python -m mpi4py"
        return f'{start} -c "from hpcpar.testing.cases import *; {self!r}.check()"'

    def check(self, oracle: str | None = None) -> float:
        """Compare results and every gradient with the oracle. Collective over all ranks.

        Parameters
        ----------
        oracle : {"torch", "serial"}, optional
            Torch where it can be imported, by default.

        Returns
        -------
        float
            The worst relative error.

        Raises
        ------
        Rejected
            When the oracle does not take the arguments.
        LayoutError
            When the operation refuses the layout, on all ranks.
        AssertionError
            On all ranks: a difference.
        """
        from hpcpar.testing import twins

        oracle = oracle or twins.default_oracle()
        rng = np.random.default_rng([self.seed, 1_983])
        values = [a.draw(rng, self.dtype) for a in self.arrays]
        wanted = twins.ORACLES[oracle](self, values)
        mesh = shared_mesh(**self.mesh)
        tensors = [
            operand(v, mesh, a.layout, v.dtype.kind == "f" and a.values != "mask", a.parameter, stream=i)
            for i, (v, a) in enumerate(zip(values, self.arrays, strict=True))
        ]
        before = [np.array(t.shard) for t in tensors]
        results = as_tuple(all_or_none(mesh, lambda: self._result(mesh, tensors)))
        errors = [0.0]
        world = mesh.world
        collective_assert(world, len(results) == len(wanted.results), f"{len(results)} results")
        for i, (y, expected) in enumerate(zip(results, wanted.results, strict=True)):
            collective_assert(world, y.shape == expected.shape, f"result {i}: {y.shape}, expected {expected.shape}")
            fits = y.shard.shape == y.sig.local_shape
            collective_assert(world, fits, f"result {i}: shard {y.shard.shape}, {y.sig.local_shape} expected")
            y = y.resolve()
            what = f"result {i} as {y.layout}"
            errors.append(assert_close_everywhere(world, y.shard, block(expected, y.sig), None, what))
        for y, seed in zip(results, wanted.seeds, strict=True):
            if seed is not None:
                y.backward(operand(seed, mesh, y.layout.resolved()), retain_graph=True)
        for i, (t, grad) in enumerate(zip(tensors, wanted.gradients, strict=True)):
            errors.append(_compare_gradient(i, t, grad))
        for i, (t, held) in enumerate(zip(tensors, before, strict=True)):
            collective_assert(world, np.array_equal(t.shard, held), f"operand {i} was changed in place")
        return max(errors)

    def _result(self, mesh: Any, tensors: list[Tensor]) -> Any:
        from hpcpar.testing import twins

        try:
            return twins.ours(self, tensors)
        except LayoutError:
            raise
        except (ValueError, IndexError, TypeError) as error:  # arguments are judged before any message, so by all
            raise AssertionError(f"{type(error).__name__}: {error}") from error

    def verdict(self, oracle: str | None = None) -> tuple[str, str, float]:
        """Return ("pass" | "refused" | "rejected" | "FAIL", text, worst error). Collective."""
        try:
            return "pass", "", self.check(oracle)
        except Rejected as error:
            return "rejected", str(error), 0.0
        except LayoutError as error:
            return "refused", str(error), 0.0
        except AssertionError as error:
            return "FAIL", str(error), float("inf")

    def shrunk(self, budget: int = 200) -> Case:
        """Return the smallest case found that still fails. Collective.

        Greedy: of the simpler neighbours the first that fails takes the place of the case, until none does.
        """
        case = self
        while budget > 0:
            for candidate in case._simpler():
                budget -= 1
                if candidate.verdict()[0] == "FAIL":
                    case = candidate
                    break
                if budget <= 0:
                    break
            else:
                break
        return case

    def _simpler(self) -> Iterator[Case]:
        """Cases with one thing less: an argument, an axis in a layout, a bit of a length (in all operands alike)."""
        for name in self.arguments:
            yield replace(self, arguments={k: v for k, v in self.arguments.items() if k != name})
        for i, a in enumerate(self.arrays):
            if a.values in ("ties", "positive", "shifted"):
                yield self._with_array(i, replace(a, values="normal"))
            for axis in a.layout.axes:
                dims = [tuple(x for x in entry if x != axis) for entry in a.layout.dims]
                partial = tuple(x for x in a.layout.partial if x != axis)
                yield self._with_array(i, replace(a, layout=Layout(*dims, partial=partial)))
        for d in range(max(len(a.shape) for a in self.arrays)):
            for shorter in (lambda n: n // 2, lambda n: n - 1):
                yield from self._shorter(d, shorter)
        for name, value in self.arguments.items():
            for less in _less(value):
                yield replace(self, arguments={**self.arguments, name: less})

    def _shorter(self, d: int, shorter: Callable[[int], int]) -> Iterator[Case]:
        for which in [range(len(self.arrays)), *[[i] for i in range(len(self.arrays)) if len(self.arrays) > 1]]:
            arrays = list(self.arrays)
            for i in which:
                shape = arrays[i].shape
                if d < len(shape) and shorter(shape[d]) >= 1:
                    arrays[i] = replace(arrays[i], shape=(*shape[:d], shorter(shape[d]), *shape[d + 1 :]))
            if arrays != list(self.arrays):
                yield replace(self, arrays=arrays)

    def _with_array(self, i: int, array: Array) -> Case:
        return replace(self, arrays=[*self.arrays[:i], array, *self.arrays[i + 1 :]])


def as_tuple(results: Any) -> tuple:
    """Return one or several results as a tuple."""
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _less(value: Any) -> Iterator[Any]:
    """Smaller values of an argument."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int) and abs(value) > 1:
        yield value - 1 if value > 0 else value + 1
    if isinstance(value, (tuple, list)):
        for i, v in enumerate(value):
            for less in _less(v):
                yield type(value)([*value[:i], less, *value[i + 1 :]])


def _compare_gradient(i: int, t: Tensor, expected: np.ndarray | None) -> float:
    """Compare the gradient of operand i; it must lie as the rules of the core allow."""
    world = t.mesh.world
    if expected is None:
        collective_assert(world, t.grad is None or not t.grad.numpy().any(), f"operand {i} has a gradient")
        return 0.0
    collective_assert(world, t.grad is not None, f"operand {i} as {t.layout} has no gradient")
    summed = t.is_parameter and not set(t.grad.sig.partial) & set(t.sig.split_axes)
    allowed = t.grad.sig.dims == t.sig.dims and (summed or not t.grad.sig.partial)
    collective_assert(world, allowed, f"gradient of operand {i}, {t!r}, lies as {t.grad.layout}")
    grad = t.grad.resolve()
    return assert_close_everywhere(
        world, grad.shard, block(expected, signature(t.mesh, t.shape, grad.layout)), None, f"gradient of operand {i}"
    )
