"""The tape: nodes, and the walk back over them.

Gradients are logical arrays with layouts of their own. The contributions to one tensor are first added per equal
layout, without messages, and only then brought to the tensor's layout, once. A repartition passes its contributions on
as they are, so that a partial gradient becomes split by one reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcpar.primitives import under_way
from hpcpar.primitives.repartition import move, plan
from hpcpar.signature import Signature
from hpcpar.sources import whole

if TYPE_CHECKING:
    from hpcpar.ops.core import Op, Rule
    from hpcpar.tensors import Tensor

Contributions = dict[Signature, Any]

_enabled = True
_epoch = 0
_walks = 0
_first_runs = 0
_second_runs = 0
_next = count().__next__
observers: list[Callable[..., None]] = []
"""Called as ``observer(node, gradient, gradients)`` after the gradient rule of each node (the checked mode does)."""

at_end: list[Callable[[], None]] = []
"""Called when a backward has ended, or was given up; not by one inside another."""

_order = attrgetter("order")


class Node:
    """One recorded operation, or a leaf: what backward needs, and nothing that it does not.

    Nodes refer to nodes, not to tensors, so that an activation lives only where an operation saved it.

    Attributes
    ----------
    order : int
        Later nodes have larger numbers, so that the numbers, backwards, are an order for the walk.
    contributions : dict or None
        The gradient so far: one array for each layout in which a share of it came.
    owned : tuple of Signature
        Under which signatures the array belongs to this node alone and may be added to in place.
    waiting : int
        During the walk: how many of its consumers have still to be visited.
    note : object
        What an observer of the operation wants to find again in backward; not set otherwise.
    """

    __slots__ = (
        "contributions", "inputs", "leaf", "needs", "note", "op", "order", "owned", "rule", "saved", "sig", "waiting"
    )  # fmt: skip

    def __init__(
        self, sig: Signature, op: Op | None, rule: Rule | None, inputs: tuple, needs: tuple, saved: Any
    ) -> None:
        self.order = _next()
        self.sig = sig
        self.op = op
        self.rule = rule
        self.inputs = inputs
        self.needs = needs
        self.saved = saved
        self.contributions: Contributions | None = None

    def add(self, sig: Signature, array: Any, own: bool = False) -> None:
        """Add one contribution to the gradient of this node's tensor; `own`: nobody else sees the array's memory."""
        held = self.contributions
        if held is None:
            self.contributions = {sig: array}
            self.owned = (sig,) if own else ()
            return
        if sig not in held:
            held[sig] = array
        elif sig in self.owned:
            held[sig] += array
            return
        else:
            # the first array may be shared with another node: the sum is ours, the terms are not
            held[sig] = held[sig] + array
            own = True
        if own:
            self.owned = (*self.owned, sig)


def make_leaf(tensor: Tensor) -> Node:
    """Return the node that takes the gradient of a tensor which no recorded operation made."""
    node = Node(tensor.sig, None, None, (), (), None)
    node.leaf = tensor
    return node


def grad_enabled() -> bool:
    """Whether operations are recorded."""
    return _enabled


def taped() -> bool:
    """Whether backward will come here: operations are recorded, or will be when they are run again for it."""
    return _enabled or _first_runs > 0


def recomputing() -> bool:
    """Whether a forward pass is run a second time, for backward: what it changed once it must not change again."""
    return _second_runs > 0


def epoch() -> int:
    """Return how often backward has been called: a date in the program that is the same on all ranks."""
    return _epoch


def walking() -> bool:
    """Whether a backward is going on."""
    return _walks > 0


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


@contextmanager
def first_run() -> Iterator[None]:
    """Record nothing inside the block, as it will be run again for backward."""
    global _first_runs
    _first_runs += 1
    try:
        with no_grad():
            yield
    finally:
        _first_runs -= 1


@contextmanager
def second_run() -> Iterator[None]:
    """Run again what has run before, for backward."""
    global _second_runs, _epoch
    _second_runs += 1
    _epoch += 1  # moves of the tensors that are used are made anew: what lives of others may differ between ranks
    try:
        yield
    finally:
        _second_runs -= 1
        _epoch += 1


def backward(root: Tensor, gradient: Any = None, retain_graph: bool = False) -> None:
    """Accumulate the gradient of `root` into the leaves it came from. Collective over the mesh.

    A leaf gets its gradient as soon as its last consumer has been visited, so that a hook on it can send the gradient
    while the walk goes on. The walk follows the tape, hence is the same on all ranks.

    Parameters
    ----------
    gradient : array, optional
        This rank's shard of the gradient, under the resolved layout of `root`; a logical 1 for a single element by
        default.
    retain_graph : bool
        Keep what the nodes saved, so that the same graph can be walked again.
    """
    global _epoch, _walks
    _epoch += 1
    if root.node is None:
        raise RuntimeError("backward of a tensor that does not require a gradient")
    if gradient is None:
        if root.sig.size != 1:
            raise RuntimeError(f"backward without a gradient needs one element; this tensor has shape {root.sig.shape}")
        gradient = np.ones_like(root._data)
    nodes = _collect([root.node])
    root.node.add(root.sig.resolved, gradient)
    _walks += 1
    try:
        if root.node.op is None:
            root.node.waiting = 0
            _finish_leaf(root.node)
        for node in nodes:
            _visit(node, retain_graph)
        if under_way.flying:
            under_way.finish()
    except BaseException:
        for node in nodes:
            node.contributions = None
        under_way.abandon()
        raise
    finally:
        _walks -= 1
        if not _walks:
            for end in at_end:
                end()


def _collect(roots: Sequence[Node], since: int = -1, known: Collection[Node] = ()) -> list[Node]:
    """Return the operations that `roots` came from, latest first, and count for each input how many use it.

    Nodes made before the order `since` are not followed, but their uses are counted; they must be among `known`.
    """
    nodes = [node for node in dict.fromkeys(roots) if node.op is not None]
    seen = set(nodes)
    for node in nodes:
        node.waiting = 0
    for node in nodes:  # grows while it is walked
        if node.rule is None:
            raise RuntimeError("this graph was already walked and freed; pass retain_graph=True the first time")
        for child in node.inputs:
            if child is None:
                continue
            if child.order < since:
                if child not in known:
                    raise RuntimeError(
                        f"{node.op.name}: run again for backward it uses a tensor of shape {child.sig.shape} that it "
                        f"did not use the first time; a recomputed function must do the same each time"
                    )
            elif child not in seen:
                seen.add(child)
                child.waiting = 0
                if child.op is not None:
                    nodes.append(child)
            child.waiting += 1
    nodes.sort(key=_order, reverse=True)
    return nodes


def _visit(node: Node, retain_graph: bool) -> None:
    if node.op.expands:
        _expand(node, retain_graph)
        return
    contributions, rule = node.contributions, node.rule
    grads: Any = None
    given = -1  # up to which input the gradient was handed on early
    if contributions is not None:  # else nothing flowed here; its inputs are counted down all the same
        node.contributions = None
        if node.op.passes_gradient:
            _pass_on(node, contributions)
        else:
            gradient = settle(contributions, rule.out.resolved)
            if gradient.__class__ is under_way.Move:
                gradient = gradient.wait()
            saved = node.saved
            if saved.__class__ is not tuple:
                saved = whole(saved)
            if node.op.gives_early and _reduces_early(node):
                given = 0
                grads = node.op.backward_early(rule, saved, gradient, node.needs, partial(_give_early, node))
            else:
                grads = node.op.backward(rule, saved, gradient, node.needs)
            if observers:
                for observer in observers:
                    observer(node, gradient, grads)
    if not retain_graph:
        node.saved = node.rule = None
    for i, child in enumerate(node.inputs):
        if child is None or i == given:
            continue
        child.waiting -= 1
        grad = None if grads is None else grads[i]
        if child.op is not None:
            if grad is not None:
                child.add(rule.grads[i], grad)
        elif child.waiting or child.contributions is not None or grad is None:
            if grad is not None:
                child.add(rule.grads[i], grad, _is_own(grad, gradient))
            if not child.waiting:
                _finish_leaf(child)
        else:  # the usual leaf: all of its gradient is here
            child.leaf._receive(rule.grads[i], grad, _is_own(grad, gradient))


def _expand(node: Node, retain_graph: bool) -> None:
    """Walk the operations that stand for this one: they are made now, and take its place in the walk."""
    contributions, node.contributions = node.contributions, None
    since = _next()
    roots = node.op.expand(node.saved, contributions, node.owned if contributions is not None else None)
    nodes = _collect(roots, since, set(node.inputs))
    if not retain_graph:
        node.saved = node.rule = None
    for child in node.inputs:  # those who use it in this one's place have been counted
        child.waiting -= 1
        if child.op is None and child.waiting == 0:
            _finish_leaf(child)
    for inner in nodes:
        _visit(inner, False)


def _reduces_early(node: Node) -> bool:
    """Whether the gradient of operand 0 is wanted, and operand 1 is a weight whose plan overlaps its reduction."""
    weight = node.inputs[1]
    return node.needs[0] and weight is not None and weight.op is None and "reduce" in weight.leaf.overlap


def _give_early(node: Node, gradient: Any) -> None:
    """Hand on the gradient of operand 0; where it was the last that its tensor waited for, start what completes it."""
    child = node.inputs[0]
    child.add(node.rule.grads[0], gradient)
    child.waiting -= 1
    if child.waiting:
        return
    if child.op is None:
        _finish_leaf(child)
    elif not child.op.passes_gradient and len(child.contributions) == 1:
        ((sig, array),) = child.contributions.items()
        target = child.rule.out.resolved
        if sig is not target and plan(sig, target).sends:
            child.contributions = {target: under_way.Move(array, sig, target)}


def _pass_on(node: Node, contributions: Contributions) -> None:
    for sig, array in contributions.items():
        node.inputs[0].add(sig, array, sig in node.owned)


def _is_own(array: Any, gradient: Any) -> bool:
    """Whether nobody else sees the memory of `array`: it is neither (part of) `gradient` nor repeated by strides."""
    if array is gradient:
        return False
    return array.base is None or (0 not in array.strides and not np.may_share_memory(array, gradient))


def _finish_leaf(node: Node) -> None:
    contributions, node.contributions = node.contributions, None
    if contributions is not None:
        node.leaf._accumulate(contributions, node.owned)


def settle(contributions: Contributions, target: Signature) -> Any:
    """Bring contributions, each under its own layout, to one target and add them."""
    if len(contributions) == 1:
        for sig, array in contributions.items():
            return array if sig is target else move(array, sig, target)
    total = None
    for sig, array in _merge_partial(contributions, target).items():
        moved = move(array, sig, target)
        total = moved if total is None else total + moved
    return total


def _merge_partial(contributions: Contributions, target: Signature) -> Contributions:
    """Add contributions without messages where a later message is then shared.

    Contributions that are partial over the same axes are reduced together, whatever else their layouts say: those that
    are not split by other axes than the target's are added before the message.
    """
    merged: Contributions = {}
    for sig, array in contributions.items():
        if sig.partial and not set(sig.partial) & set(target.split_axes):
            common = target.with_partial(sig.partial)
            if all(t[: len(s)] == s for s, t in zip(sig.dims, target.dims, strict=True)):
                array, sig = move(array, sig, common), common  # a slice at most
        merged[sig] = merged[sig] + array if sig in merged else array
    return merged


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
