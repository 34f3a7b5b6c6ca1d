"""Where the time of a step goes: a stopwatch round every kernel and every message."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from hpcpar.kernels import registry
from hpcpar.ops.contraction import Contraction
from hpcpar.primitives.channel import Channel, Pending
from hpcpar.transport import Comm
from hpcpar.transport.nonblocking import Reduction

MESSAGES = {
    Comm: ("all_reduce", "reduce_scatter", "all_gather", "exchange", "broadcast", "agree", "barrier"),
    Reduction: ("__init__", "test", "wait"),
    Channel: ("start",),
    Pending: ("test", "wait"),
}
"""Methods that send, or wait for, messages; packing included."""


@contextmanager
def running() -> Iterator[dict[str, float]]:
    """Yield seconds in ``kernels`` (those of the registry, and matrix products) and ``messages`` of the block so far.

    What runs inside of something that is timed already counts there alone.
    """
    parts = {"kernels": 0.0, "messages": 0.0}
    inside = False

    def timed(part: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:
                return function(*args, **kwargs)
            inside, begin = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                parts[part] += time.perf_counter() - begin
                inside = False

        return call

    with ExitStack() as stack:
        stack.enter_context(registry.wrapped(lambda name, kernel: timed("kernels", kernel)))
        stack.enter_context(_replaced(Contraction, "__call__", functools.partial(timed, "kernels")))
        for kind, names in MESSAGES.items():
            for name in names:
                stack.enter_context(_replaced(kind, name, functools.partial(timed, "messages")))
        yield parts


@contextmanager
def _replaced(kind: type, name: str, wrap: Callable[[Callable], Callable]) -> Iterator[None]:
    held = kind.__dict__[name]
    setattr(kind, name, wrap(held))
    try:
        yield
    finally:
        setattr(kind, name, held)
