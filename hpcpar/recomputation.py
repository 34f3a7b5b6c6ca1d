"""Activation recomputation: less memory for more work.

A recomputed function runs once without the tape, so that nothing inside is kept, and a second time in backward, with
the same random numbers and with the tape; what it records then takes its place in the walk (Chen et al. 2016).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hpcpar import autograd, random, remaking, scope
from hpcpar.autograd import Contributions, Node
from hpcpar.ops import core
from hpcpar.ops.core import Op, Rule
from hpcpar.primitives.under_way import Move
from hpcpar.signature import Signature
from hpcpar.tensors import Tensor

recomputing = autograd.recomputing


class _Block:
    """One call of a recomputed function: what the second run needs, and the gradients of its results."""

    def __init__(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.state, self.module = random.get_state(), scope.current()
        self.gradients: dict[int, tuple[Contributions, Any]] = {}

    def run(self) -> list[Any]:
        """Run the function again, with its random numbers, and record it."""
        now = random.get_state()
        random.set_state(self.state)
        scope.enter(self.module)
        try:
            with autograd.second_run(), autograd.enable_grad():
                return _listed(self.function(*self.args, **self.kwargs))
        finally:
            scope.leave()
            random.set_state(now)


class Recomputed(Op):
    """Stands on the tape for everything that a function does."""

    name = "recompute"
    expands = True

    def expand(self, saved: _Block, contributions: Contributions | None, owned: Any) -> list[Node]:
        """Run the function again, and return where the walk goes on: at its results that have a gradient."""
        given, saved.gradients = saved.gradients, {}
        if not given:
            return []
        results, roots = saved.run(), []
        for i in sorted(given):
            root = results[i].node
            if root is None:
                continue
            gradient, owned = given[i]
            for sig, array in gradient.items():
                root.add(sig, array.wait() if isinstance(array, Move) else array, sig in (owned or ()))
            roots.append(root)
        return roots


class RecomputedResult(Op):
    """One result of a recomputed function: it hands its gradient to the function as it came, in any layouts."""

    name = "recompute result"
    expands = True

    def expand(self, saved: tuple[_Block, int], contributions: Contributions | None, owned: Any) -> list[Node]:
        """Enter the gradient with the function."""
        if contributions is not None:
            block, number = saved
            block.gradients[number] = contributions, owned
        return []


class _Uses:
    """Observes a run without the tape: which tensors of outside with a gradient it uses, parameters and others."""

    def __init__(self) -> None:
        self.nodes: dict[Node, None] = {}

    def before(self, op: Op, rule: Rule, tensors: tuple[Tensor, ...]) -> None:
        for tensor in tensors:
            if tensor.requires_grad:
                self.nodes[tensor.node] = None

    def after(self, op: Op, rule: Rule, tensors: tuple, arrays: list, out: Tensor, extra: Any) -> None:
        pass


_recomputed, _result = Recomputed(), RecomputedResult()


def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)`` without keeping what it computes inside; backward runs it again.

    Gradients are those of the plain call, bit for bit, also of parameters and of other tensors that the function uses
    without being given them; each parameter gets its gradient, and its hooks are called, when the last of its uses has
    been walked, wherever that is. Recomputed functions may contain others. Messages are repeated in the second run, on
    all ranks alike; but weights that are kept by their source, as those of sharded state are, are gathered once for
    second run and gradient together, and live as long as these.

    Parameters
    ----------
    function : callable
        From anything to a tensor, or a tuple or list with tensors. It must do the same when it is called again with the
        same arguments and random numbers (`hpcpar.random` is set back for it). What it changes besides, as a counter,
        it must leave alone while `recomputing` is true; batch normalisation does so.

    Returns
    -------
    Tensor, tuple or list
        As the function returned it.

    Raises
    ------
    RuntimeError
        In backward, on all ranks: the second run uses other tensors than the first.

    Notes
    -----
    Backward is not itself differentiable, here as elsewhere. Known in torch as ``torch.utils.checkpoint``.
    """
    if not autograd.grad_enabled():
        return function(*args, **kwargs)
    block, uses = _Block(function, args, kwargs), _Uses()
    core.observers.append(uses)
    try:
        with autograd.first_run():
            results = function(*args, **kwargs)
    finally:
        core.observers.remove(uses)
    if not uses.nodes:
        return results
    listed = _listed(results)
    sig = next((y.sig for y in listed if isinstance(y, Tensor)), None)
    if sig is None:
        raise TypeError(f"recompute: the function returns a {type(results).__name__}, not a tensor or several")
    inputs = tuple(uses.nodes)
    node = Node(sig, _recomputed, _rule(sig), inputs, (True,) * len(inputs), block)
    made = [_with_node(y, i, node, block) for i, y in enumerate(listed)]
    return made[0] if isinstance(results, Tensor) else type(results)(made)


def _listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _with_node(y: Any, number: int, node: Node, block: _Block) -> Any:
    """A result with its place on the tape; what is no tensor, no floating one, or one of outside stays as it is."""
    if not isinstance(y, Tensor) or y.requires_grad or y.dtype.kind != "f":
        return y
    out = Tensor(y._data, y.sig)
    out.requires_grad = True
    out.node = Node(y.sig, _result, _rule(y.sig), (node,), (True,), (block, number))
    return out


def _rule(sig: Signature) -> Rule:
    return Rule(sig, (), (), ())


def recompute_results(*operations: str) -> AbstractContextManager[None]:
    """Within the block, do not keep results of some cheap operations for backward; it makes them again, alone.

    What an operation behind it would save of such a result is made again from what the cheap operation was given, which
    is often kept in any case: with ``recompute_results("swiglu", "rms_norm")`` a block of a transformer keeps what its
    matrix products made, and neither the products of gates nor the normalised rows. Gradients are the same, bit for
    bit.

    Parameters
    ----------
    *operations : str
        Names among `hpcpar.remaking.OPERATIONS`.

    Notes
    -----
    Operations that save another array than their operand itself, such as a copy, keep that. An operation on a result of
    which nothing else is kept gains nothing.
    """
    return remaking.choosing(operations)
