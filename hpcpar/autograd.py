"""The tape: nodes, and the walk back over them.

Gradients are logical arrays with layouts of their own. The contributions to one tensor are first added per equal layout,
without messages, and only then brought to the tensor's layout, once. A repartition passes its contributions on as they
are, so that a partial gradient becomes split by one reduce-scatter.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcpar.layout.layout import Layout
from hpcpar.primitives.repartition import move
from hpcpar.signature import Signature, signature

if TYPE_CHECKING:
    from hpcpar.ops.core import Op, Rule
    from hpcpar.tensors import Tensor

Contributions = dict[Signature, Any]

_enabled = True
_sequence = 0
_observers: list[Callable[..., None]] = []


class Node:
    """One recorded operation, or a leaf: what backward needs, and nothing that it does not.

    Nodes refer to nodes, not to tensors, so that an activation lives only where an operation saved it.
    """

    __slots__ = ("contributions", "extra", "inputs", "leaf", "needs", "op", "order", "owned", "rule", "saved", "sig", "waiting")

    def __init__(self, sig: Signature, op: Op | None, rule: Rule | None, inputs: tuple, needs: tuple, saved: Any) -> None:
        global _sequence
        _sequence += 1
        self.order = _sequence
        self.sig = sig
        self.op = op
        self.rule = rule
        self.inputs = inputs
        self.needs = needs
        self.saved = saved
        self.leaf: Tensor | None = None
        self.contributions: Contributions | None = None
        self.owned: set[Signature] | None = None
        self.waiting = 0

    def add(self, sig: Signature, array: Any) -> None:
        """Add one contribution to the gradient of this node's tensor."""
        if self.contributions is None:
            self.contributions = {sig: array}
            self.owned = set()
        elif sig not in self.contributions:
            self.contributions[sig] = array
        elif sig in self.owned:
            self.contributions[sig] += array
        else:
            # the first array may be shared with another node: the sum is ours, the terms are not
            self.contributions[sig] = self.contributions[sig] + array
            self.owned.add(sig)


def grad_enabled() -> bool:
    """Whether operations are recorded."""
    return _enabled


@contextmanager
def no_grad() -> Iterator[None]:
    """Record nothing inside the block (also usable as a decorator)."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


@contextmanager
def enable_grad() -> Iterator[None]:
    """Record inside the block, also within `no_grad`."""
    global _enabled
    before, _enabled = _enabled, True
    try:
        yield
    finally:
        _enabled = before


def observe(observer: Callable[..., None]) -> None:
    """Call ``observer(node, gradient, gradients)`` after the gradient rule of every node (the checked mode does)."""
    _observers.append(observer)


def backward(root: Tensor, gradient: Any = None, retain_graph: bool = False) -> None:
    """Accumulate the gradient of `root` into the leaves it came from. Collective over the mesh.

    Parameters
    ----------
    gradient : array, optional
        This rank's shard of the gradient, under the resolved layout of `root`; a logical 1 for a scalar by default.
    retain_graph : bool
        Keep what the nodes saved, so that the same graph can be walked again.
    """
    node = root.node
    if node is None:
        raise RuntimeError("backward of a tensor that does not require a gradient")
    if gradient is None:
        if root.sig.shape != ():
            raise RuntimeError(f"backward without a gradient needs a scalar; this tensor has shape {root.sig.shape}")
        gradient = np.ones_like(root._data)
    _count_consumers(node)
    node.add(root.sig.resolved, gradient)
    ready = [(-node.order, node)]
    while ready:
        _, node = heapq.heappop(ready)
        _visit(node, retain_graph)
        for child in node.inputs:
            if child is None:
                continue
            child.waiting -= 1
            if child.waiting == 0:
                heapq.heappush(ready, (-child.order, child))


def _count_consumers(root: Node) -> None:
    root.waiting = 0
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        if node.op is not None and node.rule is None:
            raise RuntimeError("this graph was already walked and freed; pass retain_graph=True the first time")
        for child in node.inputs:
            if child is None:
                continue
            if child not in seen:
                seen.add(child)
                child.waiting = 0
                stack.append(child)
            child.waiting += 1


def _visit(node: Node, retain_graph: bool) -> None:
    contributions, node.contributions, node.owned = node.contributions, None, None
    if contributions is None:  # nothing flowed here; its inputs are counted down all the same
        return
    if node.op is None:
        if node.leaf is not None:
            node.leaf._accumulate(contributions)
        return
    if node.op.passes_gradient:
        for sig, array in contributions.items():
            node.inputs[0].add(sig, array)
    else:
        gradient = settle(contributions, node.sig.resolved)
        grads = node.op.backward(node.rule, node.saved, gradient, node.needs)
        if _observers:
            for observer in _observers:
                observer(node, gradient, grads)
        for child, sig, grad in zip(node.inputs, node.rule.grads, grads, strict=True):
            if child is not None and grad is not None:
                child.add(sig, grad)
    if not retain_graph:
        node.saved = node.rule = None


def settle(contributions: Contributions, target: Signature) -> Any:
    """Bring contributions, each under its own layout, to one target and add them."""
    total = None
    own = False
    for group in _merge_partial(contributions, target):
        for sig, array in group.items():
            moved = move(array, sig, target)
            if total is None:
                total, own = moved, moved is not array
            elif own:
                total += moved
            else:
                total, own = total + moved, True
    return total


def _merge_partial(contributions: Contributions, target: Signature) -> list[Contributions]:
    """Add contributions without messages where a later message is then shared.

    Contributions that are partial over the same axes are reduced together, whatever else their layouts say: those that
    are not split by other axes than the target's are added before the message.
    """
    if len(contributions) == 1:
        return [contributions]
    merged: Contributions = {}
    for sig, array in contributions.items():
        if sig.partial:
            common = signature(target.mesh, target.shape, Layout(*target.dims, partial=sig.partial))
            clash = set(sig.partial) & set(target.split_axes)
            if not clash and all(t[: len(s)] == s for s, t in zip(sig.dims, target.dims, strict=True)):
                array, sig = move(array, sig, common), common  # a slice at most
        merged[sig] = merged[sig] + array if sig in merged else array
    return [merged]


def parameter_target(contributions: Contributions, parameter: Signature, held: Signature | None) -> Signature:
    """Return the layout of a parameter's gradient before synchronisation.

    It has the parameter's dims and is partial only over axes on which the parameter is replicated: where a contribution
    is partial, or split (it then is a block among zeros).
    """
    partial: set[str] = set(held.partial if held is not None else ())
    for sig in contributions:
        partial.update(sig.partial)
        partial.update(sig.split_axes)
    partial -= set(parameter.split_axes)
    return parameter.resolved.with_partial(parameter.mesh.sort(partial))
