"""Stopwatches round every kernel, operation and message, there only while a trace is made.

A method of the package is replaced by a timed one and put back afterwards, so that a program without a trace runs the
very code it would run if there were no tracing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter_ns as now
from typing import Any

from hpcpar import autograd, scope
from hpcpar.kernels import registry
from hpcpar.ops import core
from hpcpar.ops.contraction import Contraction
from hpcpar.primitives.channel import Channel, Pending
from hpcpar.trace import recorder as recorder_module
from hpcpar.trace.recorder import Recorder
from hpcpar.transport import Comm, counter
from hpcpar.transport.nonblocking import Reduction

COLLECTIVES = {
    "all_reduce": "reduction",
    "reduce_scatter": "reduction",
    "all_gather": "message",
    "broadcast": "message",
    "gather_objects": "message",
    "broadcast_object": "message",
    "agree": "message",
    "barrier": "wait",
}
"""Methods of a communicator that all its ranks call together, and what they are."""

GRADIENTS = "(gradients)"
"""Under which name, in place of a module's, the sums of gradients are entered: a bucket holds those of several."""

_SUM = "gradient sum"
_NAMES_KEPT = 100_000


@contextmanager
def instruments(recorder: Recorder) -> Iterator[None]:
    """Let `recorder` take the spans of everything that runs in the block. One block at a time in a process."""
    work = _Instruments(recorder)
    with ExitStack() as stack:
        recorder_module.activate(recorder)
        stack.callback(recorder_module.activate, None)
        stack.enter_context(registry.wrapped(work.kernel))
        for owner, name, wrap in work.replacements():
            held = getattr(owner, name)
            stack.callback(setattr, owner, name, held)
            setattr(owner, name, functools.wraps(held)(wrap(held)))
        core.observers.append(work)
        stack.callback(core.observers.remove, work)
        yield


class _Instruments:
    """The timed methods, and what they have to remember between calls."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.opened: list[int] = []  # when the operations that run began
        self.names: dict[int, tuple[str, int]] = {}  # module and work of operations to be walked, by order on the tape
        self.work: dict[core.Rule, int] = {}
        self.flights: dict[int, tuple[int, str, str]] = {}  # begin, category, axes of what is under way
        self.numbers: dict[str, int] = {}  # collectives so far along the axes
        self.sent, self.inside = 0.0, False

    def replacements(self) -> Iterator[tuple[Any, str, Callable[[Callable], Callable]]]:
        """Yield whose attribute of which name is replaced by which function of it."""
        yield Contraction, "__call__", functools.partial(self.kernel, "matrix product")
        yield autograd, "_visit", self.visit
        yield counter, "record", self.count
        yield Comm, "exchange", self.exchange
        for name, category in COLLECTIVES.items():
            yield Comm, name, functools.partial(self.collective, name, category)
        yield Channel, "start", self.halo_start
        yield Pending, "__init__", self.halo_made
        yield Reduction, "__init__", self.sum_start
        for kind in (Pending, Reduction):
            yield kind, "test", self.test
            yield kind, "wait", self.wait

    # ---- local work

    def kernel(self, name: str, function: Callable) -> Callable:
        """Time a kernel; one that declines a call leaves no span."""
        add = self.recorder.add

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = now()
            result = function(*args, **kwargs)
            if result is not NotImplemented:
                add(begin, "compute", name)
            return result

        return call

    def before(self, op: core.Op, rule: core.Rule, tensors: tuple) -> None:
        """Observe an operation that begins."""
        self.opened.append(now())

    def after(self, op: core.Op, rule: core.Rule, tensors: tuple, arrays: list, out: Any, extra: Any) -> None:
        """Observe one that ends."""
        work = self.work.get(rule)
        if work is None:
            work = self.work[rule] = op.flops(rule)
        if out.node is not None:
            if len(self.names) >= _NAMES_KEPT:  # of graphs that nobody walked
                self.names.clear()
            self.names[out.node.order] = scope.current(), work
        if self.opened:
            self.recorder.add(self.opened.pop(), "operation", op.name, (work,))

    def visit(self, function: Callable) -> Callable:
        """Time the gradient rule of an operation, with the moves and sums before it, under its module's name."""

        def call(node: autograd.Node, retain_graph: bool) -> None:
            look = self.names.get if retain_graph else self.names.pop
            module, work = look(node.order, ("", 0))
            name, needed = node.op.name, sum(node.needs[:2])  # a product for each operand that needs a gradient
            scope.enter(module)
            begin = now()
            try:
                function(node, retain_graph)
            finally:
                self.recorder.add(begin, "operation", f"{name} backward", (work * needed,))
                scope.leave()

        return call

    # ---- messages

    def count(self, function: Callable) -> Callable:
        """Learn from the byte counter what is sent."""

        def call(operation: str, comm_name: str, messages: int, bytes_sent: float) -> None:
            function(operation, comm_name, messages, bytes_sent)
            self.sent += bytes_sent

        return call

    def _timed(
        self, category: str, name: str, axes: str, number: int, function: Callable, *args: Any, **kw: Any
    ) -> Any:
        """Time one call that sends; what it calls in turn leaves no span of its own."""
        if self.inside:
            return function(*args, **kw)
        self.inside, sent, begin = True, self.sent, now()
        try:
            return function(*args, **kw)
        finally:
            self.inside = False
            module = GRADIENTS if name.startswith(_SUM) else None
            self.recorder.add(begin, category, name, (axes, self.sent - sent, number), module)

    def collective(self, name: str, category: str, function: Callable) -> Callable:
        """Time what all ranks of a communicator do together, and number it, to find the same call on other ranks."""

        def call(comm: Comm, *args: Any, **kwargs: Any) -> Any:
            if comm.size == 1:
                return function(comm, *args, **kwargs)
            number = self.numbers[comm.name] = self.numbers.get(comm.name, -1) + 1
            return self._timed(category, name, comm.name, number, function, comm, *args, **kwargs)

        return call

    def exchange(self, function: Callable) -> Callable:
        """Time blocks that change owner."""

        def call(comm: Comm, *args: Any, **kwargs: Any) -> Any:
            return self._timed("message", "exchange", comm.name, -1, function, comm, *args, **kwargs)

        return call

    def halo_start(self, function: Callable) -> Callable:
        """Time packing and sending."""

        def call(channel: Channel, *args: Any) -> Any:
            return self._timed("halo", "halo start", channel.comm.name, -1, function, channel, *args)

        return call

    def halo_made(self, function: Callable) -> Callable:
        """Note a halo exchange that is under way."""

        def call(pending: Pending, *args: Any, **kwargs: Any) -> None:
            function(pending, *args, **kwargs)
            if pending._requests or pending._staging is not None:
                self.flights[id(pending)] = now(), "halo", pending._channel.comm.name
            else:
                self.flights.pop(id(pending), None)  # one that nobody waited for lay there before

        return call

    def sum_start(self, function: Callable) -> Callable:
        """Time the start of a sum, and note that it is under way."""

        def call(reduction: Reduction, comm: Comm, buffer: Any) -> None:
            if comm.size == 1:
                return function(reduction, comm, buffer)
            begin = now()
            self._timed("reduction", _SUM, comm.name, -1, function, reduction, comm, buffer)
            self.flights[id(reduction)] = begin, _SUM, comm.name
            return None

        return call

    def test(self, function: Callable) -> Callable:
        """Time a look at what is under way: MPI moves bytes in it."""

        def call(under_way: Pending | Reduction) -> bool:
            flight = self.flights.get(id(under_way))
            if flight is None:
                return function(under_way)
            _, name, axes = flight
            return self._timed("halo" if name == "halo" else "reduction", f"{name} test", axes, -1, function, under_way)

        return call

    def wait(self, function: Callable) -> Callable:
        """Time waiting, and enter the flight that ends with it."""

        def call(under_way: Pending | Reduction) -> Any:
            flight = self.flights.pop(id(under_way), None)
            if flight is None:
                return function(under_way)
            begin, name, axes = flight
            try:
                return self._timed("wait", f"{name} wait", axes, -1, function, under_way)
            finally:
                self.recorder.add(begin, "flight", name, (axes, 0, -1))

        return call
