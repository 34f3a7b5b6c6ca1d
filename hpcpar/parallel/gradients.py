"""Gradient synchronisation: partial gradients of parameters are summed while backward goes on.

Which gradients must be summed, and over which axes, is written in their layouts and nowhere else. A large gradient is
summed in its own memory. Small ones that are partial over the same axes, of one dtype and mesh, are packed into
buckets, in the order in which backward completes them: the tape's, the same on every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import numpy as np

from hpcpar.kernels import array_module
from hpcpar.mesh import Mesh
from hpcpar.nn.module import Parameters, parameters_of
from hpcpar.nn.state import empty_like
from hpcpar.signature import Signature
from hpcpar.tensors import Parameter, Tensor
from hpcpar.transport.nonblocking import Reduction

IN_PLACE_BYTES = 1 << 20
"""From how many bytes on a gradient is summed where it lies: packing it would cost more than a message of its own."""


class Key(NamedTuple):
    """What the gradients of one bucket share."""

    mesh: Mesh
    partial: tuple[str, ...]
    dtype: np.dtype


class Bucket:
    """Gradients that are summed by one message, each packed in the memory order of its parameter."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.parameters: list[Parameter] = []
        self.size = 0
        self.reduction: Reduction | None = None

    def add(self, parameter: Parameter) -> None:
        """Take a parameter whose gradient is complete."""
        self.parameters.append(parameter)
        self.size += parameter.grad.sig.local_size  # of a gradient that is still on its way, too

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients."""
        return self.size * self.key.dtype.itemsize

    def launch(self) -> None:
        """Pack, unless there is one gradient that lies as its parameter does, and start the sum."""
        first = self.parameters[0].shard
        # sums of half precision run in float32
        dtype = np.dtype(np.float32) if self.key.dtype == np.float16 else self.key.dtype
        buffer = _in_order(self.parameters[0]) if len(self.parameters) == 1 and dtype == self.key.dtype else None
        if buffer is None:
            buffer = array_module(first).empty(self.size, dtype)
            for parameter, piece in self._pieces(buffer):
                piece[...] = parameter.grad.shard
        self.reduction = Reduction(self.key.mesh.comm(*self.key.partial), buffer)

    def deliver(self) -> None:
        """Wait for the sum; the gradients become views of it."""
        buffer = self.reduction.wait().astype(self.key.dtype, copy=False)
        for parameter, piece in self._pieces(buffer):
            parameter.grad = Tensor(piece, parameter.grad.sig.resolved)

    def _pieces(self, buffer: Any) -> Iterator[tuple[Parameter, Any]]:
        """The part of the buffer that belongs to each parameter, as an array of its shape."""
        at = 0
        for parameter in self.parameters:
            shape, order = parameter.sig.local_shape, parameter.order
            begin, at = at, at + prod(shape)
            if order is None:
                yield parameter, buffer[begin:at].reshape(shape)
            else:
                walked = buffer[begin:at].reshape([shape[d] for d in order])
                yield parameter, walked.transpose([order.index(d) for d in range(len(shape))])


def _in_order(parameter: Parameter) -> Any:
    """The gradient as one dim, in the memory order of its parameter; None where it lies in another order."""
    grad = parameter.grad.shard
    walked = grad if parameter.order is None else grad.transpose(parameter.order)
    return walked.reshape(walked.size) if walked.flags.c_contiguous else None


class _Hook:
    """Tells a `GradientSync` of each gradient, for as long as somebody holds it."""

    def __init__(self, sync: GradientSync) -> None:
        self.sync = weakref.ref(sync)

    def __call__(self, parameter: Parameter) -> None:
        sync = self.sync()
        if sync is not None:
            sync._ready(parameter)


class GradientSync:
    """Reduces the gradients of parameters during backward, so that afterwards each has its parameter's layout.

    Parameters
    ----------
    parameters : Module, iterable of Parameter, or of (name, Parameter)
        In the same order on every rank.
    bucket_bytes : int
        A bucket is sent when it holds this much; larger ones amortise latency, smaller ones start earlier.
    overlap : bool
        Let sums run while backward goes on, and wait in `finish`. Without it every bucket is waited for at once; the
        bits are the same.
    unused : {"zero", "skip"}
        Parameters that no loss reached get zeros, or keep no gradient (optimizers then pass them over).

    Raises
    ------
    RuntimeError
        Another one that is still in use sums gradients of the same parameters.

    Examples
    --------
    One batch, and a batch in parts, whose means are weighted by their counts:

    >>> sync = GradientSync(model)
    >>> sync.backward(loss)
    >>> with sync.accumulate():
    ...     sync.backward(first_loss, weight=first_count)
    >>> sync.backward(last_loss, weight=last_count)

    Notes
    -----
    In accumulation partial gradients are added without messages, and the last backward sends them. Where a parameter is
    split over an axis of the batch its gradient is reduce-scattered in each backward: no rank has room for the whole.
    """

    def __init__(
        self, parameters: Parameters, *, bucket_bytes: int = 4 << 20, overlap: bool = True, unused: str = "zero"
    ) -> None:
        if unused not in ("zero", "skip"):
            raise ValueError(f"GradientSync: unused is 'zero' or 'skip', got {unused!r}")
        if bucket_bytes < 1:
            raise ValueError(f"GradientSync: a bucket holds at least one byte, got {bucket_bytes}")
        self.bucket_bytes, self.overlap, self.unused = bucket_bytes, overlap, unused
        self._named = parameters_of(parameters)
        self._names = {parameter: name for name, parameter in self._named}
        self._accumulating = False
        self._given_up = False
        self._reset()
        for name, parameter in self._named:
            if any(isinstance(hook, _Hook) and hook.sync() is not None for hook in parameter.hooks or ()):
                raise RuntimeError(
                    f"GradientSync: another one sums the gradients of {name}; use that one, or close() it first"
                )
        self._hook = _Hook(self)
        for _, parameter in self._named:
            dead = [hook for hook in parameter.hooks or () if isinstance(hook, _Hook)]
            parameter.hooks = [hook for hook in parameter.hooks or () if hook not in dead]
            parameter.on_gradient(self._hook)

    def _reset(self) -> None:
        self._open: dict[Key, Bucket] = {}
        self._sent: list[Bucket] = []
        self._done: set[Parameter] = set()
        self._first_weight = 0.0
        self._total_weight = 0.0

    # ---- during backward

    def backward(self, loss: Tensor, weight: float | None = None) -> None:
        """Run backward and, outside of `accumulate`, `finish`. Collective.

        Parameters
        ----------
        loss : Tensor
            A scalar; the mean over a (micro-)batch, if `weight` is given.
        weight : float, optional
            Over how many samples, voxels or tokens of all ranks the loss is a mean. The gradients then are those of the
            mean over everything since the last `finish`: micro-batches of unequal sizes count as they should.

        Raises
        ------
        ValueError
            A weight that is not positive, or one given for some micro-batches only.
        RuntimeError
            Gradients of the step before are still there.

        Notes
        -----
        After an error in backward that the program survives, call ``zero_grad()``: the next call begins a new step.
        """
        if self._given_up:
            self._abandon()
        if weight is not None:
            if not weight > 0:
                raise ValueError(f"GradientSync: a mean is over something, got the weight {weight}")
            if not self._total_weight and any(p.grad is not None for _, p in self._named):
                raise RuntimeError("GradientSync: gradients of the step before are still there; call zero_grad() first")
            # relative to the first: a single batch is not scaled at all
            self._first_weight = self._first_weight or float(weight)
            self._total_weight += float(weight)
            if weight != self._first_weight:
                loss = loss * (weight / self._first_weight)
        elif self._total_weight:
            raise ValueError("GradientSync: a backward without a weight after one with a weight")
        self._given_up = True
        loss.backward()
        self._given_up = False
        if not self._accumulating:
            self.finish()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Keep gradients partial inside the block: no message where none is needed."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def _ready(self, parameter: Parameter) -> None:
        """Hook: the gradient of a parameter is complete."""
        for bucket in self._sent:
            bucket.reduction.test()
        if self._accumulating:
            return
        if parameter in self._done:
            raise RuntimeError(
                f"a second gradient of {self._names[parameter]} arrived before finish(); run every backward but the "
                f"last inside accumulate()"
            )
        self._enqueue(parameter)

    def _enqueue(self, parameter: Parameter) -> None:
        self._done.add(parameter)
        grad = parameter.grad
        if not grad.sig.partial:
            return
        key = Key(grad.mesh, grad.sig.partial, grad.dtype)
        if grad.sig.local_size * grad.dtype.itemsize >= min(IN_PLACE_BYTES, self.bucket_bytes):
            bucket = Bucket(key)
            bucket.add(parameter)
            self._send(bucket)
            return
        bucket = self._open.get(key)
        if bucket is None:
            bucket = self._open[key] = Bucket(key)
        bucket.add(parameter)
        if bucket.nbytes >= self.bucket_bytes:
            self._send(self._open.pop(key))

    def _send(self, bucket: Bucket) -> None:
        bucket.launch()
        self._sent.append(bucket)
        if not self.overlap:
            bucket.reduction.wait()

    # ---- after backward

    def finish(self) -> None:
        """Complete all gradients: afterwards ``grad.layout == parameter.layout``. Collective."""
        for _, parameter in self._named:  # not reached by the last backward
            if not parameter.requires_grad or parameter in self._done:
                continue
            if parameter.grad is not None:
                self._enqueue(parameter)
            elif self.unused == "zero":
                zeros = empty_like(parameter)
                zeros[...] = 0
                parameter.grad = Tensor(zeros, parameter.sig)
        for key in list(self._open):
            self._send(self._open.pop(key))
        for bucket in self._sent:
            bucket.deliver()
        scale = self._first_weight / self._total_weight if self._total_weight else 1.0
        for name, parameter in self._named:
            grad = parameter.grad
            if grad is None:
                continue
            _assert_layout(name, grad.sig, parameter.sig)
            if scale != 1.0:
                data = grad.shard
                data *= data.dtype.type(scale)
        self._reset()

    def discard(self) -> None:
        """Give up a backward that is not to be finished, and drop all gradients. Collective."""
        self._abandon()
        for _, parameter in self._named:
            parameter.grad = None

    def _abandon(self) -> None:
        """Forget a backward, after what it has sent."""
        for bucket in self._sent:
            bucket.reduction.wait()
        self._given_up = False
        self._reset()

    def close(self) -> None:
        """Take the hooks from the parameters."""
        for _, parameter in self._named:
            parameter.hooks = [hook for hook in parameter.hooks or () if hook is not self._hook] or None


def _assert_layout(name: str, grad: Signature, parameter: Signature) -> None:
    assert grad is parameter, f"the gradient of {name} lies as {grad!r}, the parameter as {parameter!r}"
