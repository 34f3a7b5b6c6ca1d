"""Tensor: one logical array, held as a shard on each rank under a layout."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcpar import autograd
from hpcpar.autograd import Contributions, Node
from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh
from hpcpar.primitives.repartition import move, plan
from hpcpar.primitives.under_way import Move
from hpcpar.signature import Signature, signature

if TYPE_CHECKING:
    from hpcpar.ahead import Ahead
    from hpcpar.remaking import Recipe


class Tensor:
    """One logical array under a layout; made by `tensor`, `from_shard` or an operation.

    Attributes
    ----------
    shape : tuple of int
        Global shape.
    shard : array
        This rank's piece; of a tensor with partial axes a share of the value, not the value.
    layout : Layout
        Without axes of length 1.
    mesh : Mesh
    dtype : numpy.dtype
    grad : Tensor or None
    requires_grad : bool
    keep : {"moved", "source"}
        What an operation saves of a moved operand for backward: the result of the move, or what it was made from, to be
        moved again (see `hpcpar.sources`).
    overlap : frozenset of str
        Of a weight: which messages of its layer go on under computation, of "reduce" (the gradient of the input under
        the product for that of the weight), "scatter" (the gradient of the weight under the rest of backward) and
        "gather" (the weight under the layer before, by `ahead`). Set by plans (`hpcpar.Placement`).

    Notes
    -----
    The layout says how the value is represented and never changes it: every operation, and every gradient, is a
    function of logical arrays.
    """

    __array_ufunc__ = None  # NumPy operands leave the operation to us
    is_parameter = False
    # of most tensors these stay as they are: as class attributes they cost nothing when an operation makes a tensor
    grad: Tensor | None = None
    node: Node | None = None
    hooks: list[Callable[[Tensor], None]] | None = None
    name = ""
    keep = "moved"
    overlap: frozenset[str] = frozenset()
    ahead: Ahead | None = None
    recipe: Recipe | None = None
    _moved: list | None = None

    def __init__(self, data: Any, sig: Signature, requires_grad: bool = False) -> None:
        self._data = data
        self.sig = sig
        self.requires_grad = requires_grad
        if requires_grad:
            self.node = autograd.make_leaf(self)

    # ---- what it is

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.sig.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.sig.shape)

    @property
    def layout(self) -> Layout:
        """How the value lies on the mesh, without axes of length 1."""
        return self.sig.layout

    @property
    def mesh(self) -> Mesh:
        """The mesh that it lies on."""
        return self.sig.mesh

    @property
    def shard(self) -> Any:
        """This rank's piece; over partial axes its share of the value, not the value."""
        return self._data

    @property
    def dtype(self) -> np.dtype:
        """Of the elements."""
        return self._data.dtype

    @property
    def is_leaf(self) -> bool:
        """Whether no operation made it, so that its gradient is kept."""
        return self.node is None or self.node.op is None

    def size(self, dim: int | None = None) -> Any:
        """Return the global shape, or the global length of one dim."""
        return self.sig.shape if dim is None else self.sig.shape[dim]

    def numel(self) -> int:
        """Return the number of elements of the global array."""
        return self.sig.size

    def __len__(self) -> int:
        if not self.sig.shape:
            raise TypeError("len() of a 0-dim tensor")
        return self.sig.shape[0]

    def __repr__(self) -> str:
        kind = "Parameter" if self.is_parameter else "Tensor"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"{kind}(shape={self.shape}, {self.layout!r}, dtype={self.dtype}, shard {self._data.shape}{grad})"

    # ---- values

    def numpy(self) -> np.ndarray:
        """Return the whole array on every rank, on the host. Collective."""
        from hpcpar.transport.device import to_host

        whole = self.moved(signature(self.mesh, self.shape, Layout()))
        return np.array(to_host(whole))

    def item(self) -> Any:
        """Return the value of a tensor with one element: ValueError for more.

        It must be replicated, so that no rank waits for another: RuntimeError for what lies on several.
        """
        if self.sig.size != 1:
            raise ValueError(f"item() of a tensor of shape {self.shape}; only one element can be a number")
        self._require_whole(".resolve() (collective) before item() or float()")
        return self._data.item()

    def _require_whole(self, call: str) -> None:
        if self.sig.partial or self.sig.split_axes:
            raise RuntimeError(f"the value lies on several ranks as {self.layout!r}: call {call}")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return what NumPy makes of a replicated tensor; others say what to call, as that would send messages."""
        from hpcpar.transport.device import to_host

        self._require_whole(".numpy() (collective) for an array")
        array = np.asarray(to_host(self._data), dtype)
        return array.copy() if copy else array

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec and not self.sig.shape else super().__format__(spec)

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def detach(self) -> Tensor:
        """Return the same value without its history."""
        return Tensor(self._data, self.sig)

    def moved(self, target: Signature) -> Any:
        """Return this rank's shard under another signature; a move that sends is made once for all uses until backward.

        Whether a result is found again must be the same on all ranks. So only moves with messages are remembered (the
        result of others may be this very array, on some ranks), and only until the next backward: after it what lives
        depends on when each rank's garbage is collected.
        """
        if target is self.sig:
            return self._data
        for sig, held, epoch in self._moved or ():
            if sig is target and epoch == autograd.epoch():
                array = held()
                if array is not None:
                    return array
        sends = plan(self.sig, target).sends
        if sends and self.ahead is not None:
            array = self.ahead.fetch(self, self._data, self.sig, target)
        else:
            array = move(self._data, self.sig, target)
        if sends:
            kept = [entry for entry in self._moved or () if entry[0] is not target and entry[1]() is not None]
            self._moved = [*kept, (target, self._hold(array), autograd.epoch())]
        return array

    def _hold(self, array: Any) -> Callable[[], Any]:
        """Return how a moved array is found again: as long as this tensor lives.

        Weights live long, and theirs must not: they are found while the tape keeps them. For others that would not do:
        an operation may save the array itself on one rank and a part of it on another, and who has still got it must
        not decide who sends.
        """
        weak = (self.is_parameter or self.keep == "source") and self.recipe is None
        return weakref.ref(array) if weak else lambda: array

    def set_data(self, data: Any) -> None:
        """Replace the shard (an optimizer step, a load); ValueError for another shape. Remembered moves are dropped."""
        if data.shape != self.sig.local_shape:
            raise ValueError(f"the shard of {self!r} has shape {self.sig.local_shape}, got {data.shape}")
        self._data = data
        self.changed()

    def changed(self) -> None:
        """Say that the shard was changed in place: remembered moves are dropped."""
        self._moved = None
        if self.ahead is not None:
            self.ahead.forget(self)

    # ---- gradients

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Ask for a gradient (of a leaf), and return the tensor.

        Raises
        ------
        RuntimeError
            An operation made it.
        """
        if not self.is_leaf:
            raise RuntimeError("only a leaf can change whether it requires a gradient; use detach()")
        self.requires_grad = requires_grad
        if requires_grad and self.node is None:
            self.node = autograd.make_leaf(self)
        if not requires_grad:
            self.node = None
        return self

    def backward(self, gradient: Tensor | None = None, retain_graph: bool = False) -> None:
        """Accumulate gradients into the leaves. Collective.

        Parameters
        ----------
        gradient : Tensor, optional
            Of this tensor, in its shape and any layout; 1 by default, for a scalar.
        retain_graph : bool
            Keep what backward needs, to run it again.

        Raises
        ------
        ValueError
            The gradient has another shape.
        RuntimeError
            There is nothing to go back through (any more), or no gradient for what is not a scalar.
        """
        shard = None
        if gradient is not None:
            if gradient.shape != self.shape:
                raise ValueError(f"the gradient has shape {gradient.shape}, the tensor {self.shape}")
            shard = gradient.moved(self.sig.resolved)
        autograd.backward(self, shard, retain_graph)

    def _receive(self, sig: Signature, grad: Any, own: bool) -> None:
        """Take the gradient of a leaf that comes in one piece."""
        if sig is self.sig and self.grad is None and sig.shape and not sig.partial:
            self._take(grad if own else grad.copy(order="K"), sig)
        else:
            self._accumulate({sig: grad}, (sig,) if own else ())

    def _accumulate(self, contributions: Contributions, owned: Collection[Signature]) -> None:
        """Take the complete gradient of a leaf: a memory of its own, whatever the contributions share with others."""
        held = self.grad
        if self.is_parameter:
            target = autograd.parameter_target(contributions, self.sig, None if held is None else held.sig)
        else:
            target = self.sig.resolved
        if "scatter" in self.overlap and len(contributions) == 1 and self._accumulate_late(contributions, target):
            return
        total = autograd.settle(contributions, target)
        if not target.shape and isinstance(total, np.generic):  # what NumPy makes of arithmetic on 0-dim arrays
            total = np.asarray(total)
        if held is not None:
            total = move(held._data, held.sig, target) + total
        elif any(np.may_share_memory(total, a) for sig, a in contributions.items() if sig not in owned):
            total = total.copy(order="K")
        self._take(total, target)

    def _take(self, grad: Any, sig: Signature) -> None:
        """Make an array that nobody else sees the gradient, and tell the hooks."""
        if grad.dtype != self._data.dtype:
            grad = grad.astype(self._data.dtype)
        self.grad = Tensor(grad, sig)
        for hook in self.hooks or ():
            hook(self)

    def _accumulate_late(self, contributions: Contributions, target: Signature) -> bool:
        """Take a gradient whose message goes on during the rest of backward; False where there is none to send."""
        ((sig, array),) = contributions.items()
        if not plan(sig, target).sends:
            return False
        held = None if self.grad is None else move(self.grad._data, self.grad.sig, target)
        self.grad = PendingTensor(Move(array, sig, target), target, self.dtype, held)
        for hook in self.hooks or ():
            hook(self)
        return True

    def on_gradient(self, hook: Callable[[Tensor], None]) -> None:
        """Call ``hook(self)`` in backward, when the gradient of this leaf is complete."""
        self.hooks = [*(self.hooks or ()), hook]

    # ---- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return a tensor of its own memory on the same mesh, as `copy.deepcopy` of a module does with its parameters.

        The gradient is copied too; hooks (those of a `GradientSync`, say) stay with the original.

        Raises
        ------
        RuntimeError
            When an operation made the tensor, as in torch.
        """
        if not self.is_leaf:
            raise RuntimeError("only leaves can be copied deeply; an operation made this tensor: detach() it first")
        if id(self) in memo:
            return memo[id(self)]
        data, grad = self._data, self.grad  # what is still on its way has now come
        copied = memo[id(self)] = object.__new__(type(self))
        for name, value in self.__dict__.items():
            if name == "ahead":
                copied.ahead = deepcopy(value, memo)
            elif name not in ("_data", "grad", "node", "hooks", "recipe", "_moved"):
                setattr(copied, name, value)
        copied._data = data.copy(order="K")
        if self.requires_grad:
            copied.node = autograd.make_leaf(copied)
        if grad is not None:
            copied.grad = deepcopy(grad, memo)
        return copied


class PendingTensor(Tensor):
    """A tensor whose shard is still on its way: reading it waits, once, and leaves a plain tensor.

    Parameters
    ----------
    move : Move
    sig : Signature
        That of the move's target.
    dtype : dtype
        To which what arrives is brought.
    held : array, optional
        Added to what arrives.
    """

    def __init__(self, move: Move, sig: Signature, dtype: Any, held: Any = None) -> None:
        self.sig, self.requires_grad = sig, False
        self._pending = move, np.dtype(dtype), held

    @property
    def dtype(self) -> np.dtype:
        return self._pending[1]

    @property
    def _data(self) -> Any:
        move, dtype, held = self._pending
        arrived = move.wait()
        total = arrived if held is None else held + arrived
        self._data = total.astype(dtype, copy=False)
        return self._data

    @_data.setter
    def _data(self, data: Any) -> None:
        self.__class__ = Tensor
        del self._pending
        self._data = data


class Parameter(Tensor):
    """A tensor that a module trains. Its gradient may stay partial over axes on which it is replicated.

    Attributes
    ----------
    order : tuple of int or None
        The permutation of dims by which its memory is walked (convolution weights are stored kernel first), where that
        is not the logical order.
    """

    is_parameter = True

    def __init__(
        self, data: Any, sig: Signature, requires_grad: bool = True, order: tuple[int, ...] | None = None
    ) -> None:
        super().__init__(data, sig, requires_grad)
        self.order = order

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradient, or set it to zero."""
        grad = None if set_to_none else self.grad
        self.grad = None if grad is None else Tensor(grad.shard * 0, grad.sig)
