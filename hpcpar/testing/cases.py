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
from hpcpar.tensors import Tensor
from hpcpar.testing.compare import TOLERANCE, difference
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
        "normal", "ties" (few distinct values), "positive", "shifted" (mean far larger than spread), "mask" (0 or 1),
        "bool", "indices N" (int64 below N), or "classes N" (the same, one in five -100).
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
        if kind == "indices":
            return rng.integers(0, int(number), self.shape)
        if kind == "bool":
            return rng.random(self.shape) < 0.7
        if kind == "mask":
            return rng.integers(0, 2, self.shape).astype(dtype)
        made = rng.standard_normal(self.shape)
        if kind == "ties":
            made = np.round(made)
        elif kind == "positive":
            made = np.abs(made) + 0.1
        elif kind == "shifted":
            made += 1000.0 if dtype == "float32" else 100.0
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
        assert len(results) == len(wanted.results), f"{len(results)} results, expected {len(wanted.results)}"
        pairs = zip(results, wanted.results, strict=True)
        least, least_gradient = twins.least_scales(self, wanted)
        findings = [_compare(f"result {i} as {y.layout}", y, expected, least) for i, (y, expected) in enumerate(pairs)]
        _judge(mesh.world, findings)
        for y, seed in zip(results, wanted.seeds, strict=True):
            if seed is not None:
                y.backward(operand(seed, mesh, y.layout.resolved()), retain_graph=True)
        pairs = zip(tensors, wanted.gradients, strict=True)
        findings += [_compare_gradient(i, t, grad, least_gradient) for i, (t, grad) in enumerate(pairs)]
        for i, (t, held) in enumerate(zip(tensors, before, strict=True)):
            findings.append(("" if np.array_equal(t.shard, held) else f"operand {i} was changed in place", 0.0, 1.0))
        return _judge(mesh.world, findings)

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

    def shrunk(self, budget: int = 100) -> Case:
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


Finding = tuple[str, float, float]
"""What is wrong apart from values ("" if nothing), the largest difference, the largest value expected."""


def _compare(what: str, got: Tensor, expected: np.ndarray, least: float = 0.0) -> Finding:
    """Compare this rank's block with the global array, relative to its largest value, or `least`.

    Collective where `got` is partial.
    """
    if got.shape != expected.shape:
        return f"{what}: shape {got.shape}, expected {expected.shape}", 0.0, 1.0
    if got.shard.shape != got.sig.local_shape:
        return f"{what}: shard of {got.shard.shape}, expected {got.sig.local_shape}", 0.0, 1.0
    got = got.resolve()
    if got.dtype != expected.dtype:
        return f"{what}: {got.dtype}, expected {expected.dtype}", 0.0, 1.0
    worst = float(difference(got.shard, block(expected, got.sig)).max(initial=0.0))
    finite = np.abs(expected[np.isfinite(expected)].astype(np.float64))
    scale = max(float(finite.max(initial=0.0)), least) or 1.0
    tolerance = TOLERANCE.get(expected.dtype, 0.0)
    text = f"{what}: relative error {worst / scale:.3g} > {tolerance:.3g}" if worst / scale > tolerance else ""
    return text, worst, scale


def _compare_gradient(i: int, t: Tensor, expected: np.ndarray | None, least: float) -> Finding:
    """Compare the gradient of operand i; it must lie as the rules of the core allow. Collective."""
    what = f"gradient of operand {i} as {t.layout}"
    if expected is None:
        return (f"{what}: there is one", 0.0, 1.0) if t.grad is not None and t.grad.numpy().any() else ("", 0.0, 1.0)
    if t.grad is None:
        return f"{what}: there is none", 0.0, 1.0
    summed = t.is_parameter and not set(t.grad.sig.partial) & set(t.sig.split_axes)
    if t.grad.sig.dims != t.sig.dims or (t.grad.sig.partial and not summed):
        return f"{what}: lies as {t.grad.layout}", 0.0, 1.0
    return _compare(what, t.grad, expected, least)


def _judge(world: Any, findings: list[Finding]) -> float:
    """Return the worst relative error; raise AssertionError on all ranks if anything is wrong on any. Collective."""
    faults = "; ".join(text for text, _, _ in findings if text)
    worst = max(w / scale for _, w, scale in findings)
    gathered = world.gather_objects((faults, worst))
    failed = {rank: text for rank, (text, _) in enumerate(gathered) if text}
    if failed:
        raise AssertionError("\n".join(f"rank {r} of {len(gathered)}: {text}" for r, text in failed.items()))
    return max(w for _, w in gathered)
