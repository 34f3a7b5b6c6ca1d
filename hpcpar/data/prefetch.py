"""Run an iterator ahead of its consumer, in one background thread."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

__all__ = ["Prefetch"]

T = TypeVar("T")
POLL = 0.05  # seconds between two looks at the stop flag while waiting for the queue


class Prefetch(Generic[T]):
    """Iterator over `items`, of which up to `depth` are made ahead by a background thread.

    Parameters
    ----------
    items : iterable
        Consumed by the background thread only.
    depth : int
        Items that may wait; 0 makes each one when it is asked for, without a thread.

    Notes
    -----
    An exception in the thread is raised by ``next`` where its item would have come, with the thread's traceback.
    `close` stops the thread and waits for it; leaving a ``with`` block, exhaustion, or losing the last reference do
    so too (the last without waiting), and the thread never keeps the interpreter alive. No process is forked, since
    MPI libraries and thread pools do not survive that.
    """

    def __init__(self, items: Iterable[T], depth: int = 2):
        if depth < 0:
            raise ValueError(f"prefetch depth is {depth}: it is 0 (no thread) or the number of items made ahead")
        self._iterator = iter(items) if depth == 0 else None
        self._done = False
        self._thread = None
        if depth:
            self._queue: queue.Queue = queue.Queue(depth)
            self._stop = threading.Event()
            self._thread = threading.Thread(
                target=_fill, args=(iter(items), self._queue, self._stop), name="hpcpar-prefetch", daemon=True
            )
            self._finalizer = weakref.finalize(self, self._stop.set)
            self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._done:
            raise StopIteration
        if self._thread is None:
            return next(self._iterator)
        kind, value = self._take()
        if kind == "item":
            return value
        self.close()
        if kind == "error":
            raise value
        raise StopIteration

    def _take(self) -> tuple:
        while not self._stop.is_set():
            try:
                return self._queue.get(timeout=POLL)
            except queue.Empty:
                continue
        return "end", None

    def close(self) -> None:
        """Stop the thread and wait until it has ended. Further items are not delivered."""
        self._done = True
        if self._thread is not None:
            self._stop.set()
            self._thread.join()

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _fill(iterator: Iterator, out: queue.Queue, stop: threading.Event) -> None:
    """The thread: move items to the queue until they end, one raises, or `stop` is set."""
    try:
        for item in iterator:
            if not _put(out, ("item", item), stop):
                break
        else:
            _put(out, ("end", None), stop)
    except BaseException as error:  # noqa: BLE001 (raised again by the consumer, whatever it is)
        _put(out, ("error", error), stop)
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


def _put(out: queue.Queue, item: tuple, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            out.put(item, timeout=POLL)
            return True
        except queue.Full:
            continue
    return False
