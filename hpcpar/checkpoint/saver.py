"""Saving: a copy, a thread on each rank that writes it, and agreement on the main thread that all have written.

No thread sends a message. Every rank asks, between two steps, how far its thread is; when all are done, rank 0 writes
index and manifest and publishes the checkpoint. A blocking save is the same with waiting.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcpar.checkpoint.folder import Folder
from hpcpar.checkpoint.index import seal
from hpcpar.checkpoint.manifest import ArrayInfo, StoredFile
from hpcpar.checkpoint.onefile import NAME, merged, require_parallel_hdf5, write_together
from hpcpar.checkpoint.shard import Part, write_shard
from hpcpar.checkpoint.snapshot import Copy, Snapshot, describe_arrays
from hpcpar.tensors import Tensor
from hpcpar.trace import span
from hpcpar.transport import Comm

DONE, BUSY, FAILED = 0, 1, 2


@dataclass
class Report:
    """What one rank wrote: its file, the arrays it knows, values of 0-dim arrays."""

    file: StoredFile | None
    arrays: dict[str, ArrayInfo]
    scalars: dict[str, np.ndarray]


class SaveError(OSError):
    """A checkpoint could not be written; those before it are as they were."""


class _Work(threading.Thread):
    """A call in a thread, with its result or its error."""

    def __init__(self, call: Callable[[], Any]) -> None:
        # a daemon: a rank that fails elsewhere must be able to end
        super().__init__(name="hpcpar-checkpoint", daemon=True)
        self.call, self.result, self.error = call, None, None

    def run(self) -> None:
        try:
            self.result = self.call()
        except Exception as error:  # noqa: BLE001 (raised on the main thread, on all ranks)
            self.error = error

    def value(self) -> Any:
        """Return the result of a call that has ended, or raise its error."""
        if self.error is not None:
            raise self.error
        return self.result


class Saver:
    """Writes checkpoints of a run, one at a time. Collective.

    Parameters
    ----------
    folder : Folder
    comm : Comm
        All ranks of the run.
    keep : int
        How many checkpoints stay.
    one_file : bool
        Write arrays into one file, all ranks together and blocking; needs an h5py built with MPI.
    guarded : str
        Arrays whose names start so must be finite; a checkpoint in which they are not is not published.

    Examples
    --------
    Blocking, and while work goes on:

    >>> saver.save(step, tensors, state)
    >>> saver.start(step, tensors, state)
    >>> while saver.active:
    ...     work()
    ...     saver.advance(comm.all_reduce(np.array([saver.status()]), "max")[0])
    """

    def __init__(
        self, folder: Folder, comm: Comm, keep: int = 3, one_file: bool = False, guarded: str = "model/"
    ) -> None:
        if one_file:
            require_parallel_hdf5()
        self.folder, self.comm, self.keep, self.one_file, self.guarded = folder, comm, keep, one_file, guarded
        self.published: int | None = None  # the step of the newest checkpoint that this saver has published
        self._snapshot = Snapshot()
        self._copied = threading.Event()
        self._copied.set()
        self._work: _Work | None = None
        self._step = 0
        self._state: dict[str, Any] = {}
        self._reports: list[Report] | None = None  # there once all shards are written

    @property
    def active(self) -> bool:
        """Whether a checkpoint is being written: the same on all ranks."""
        return self._work is not None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        shown: Mapping[str, tuple[int, ...]] | None = None,
    ) -> Path:
        """Write a checkpoint and return its path when it is published. Collective.

        Raises
        ------
        SaveError
            On all ranks: what went wrong on which rank.
        FloatingPointError
            On all ranks: a guarded array is not finite.
        """
        self.start(step, tensors, state, shown)
        self.finish()
        return self.folder.at(step)

    def start(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        shown: Mapping[str, tuple[int, ...]] | None = None,
        steady: Collection[str] = (),
    ) -> None:
        """Copy the tensors and begin to write. Collective; a checkpoint that is still being written is finished first.

        Parameters
        ----------
        tensors : mapping of str to Tensor
            Not partial.
        state : mapping
            What JSON can hold; the same on all ranks.
        shown : mapping, optional
            Shapes under which torch knows arrays, where they differ.
        steady : collection of str
            Tensors that the caller will not change before it has called `settle`: weights and optimizer state, until
            the next optimizer step. They are copied in the background.

        Raises
        ------
        SaveError, FloatingPointError
            As `save`, about the checkpoint before; SaveError also where this one cannot begin.
        """
        self.finish()
        self._step, self._state, self._reports = step, copy.deepcopy(dict(state)), None
        aside, error = None, None
        if self.comm.rank == 0:
            try:
                aside = self.folder.prepare(step)
            except OSError as failure:
                error = _said(failure)
        aside, error = self.comm.broadcast_object((aside, error))
        if error:
            raise SaveError(f"the checkpoint of step {step} cannot be written: {error}")
        arrays = describe_arrays(tensors, shown or {})
        parts, later = self._snapshot.take(tensors, () if self.one_file else steady)
        if self.one_file:
            work = _Work(lambda: _write_together(aside / NAME, self.comm, parts, arrays, self.guarded))
            work.run()  # here, not in its thread: it sends messages
            self._begin(work.value)
        else:
            path = aside / f"shard-{self.comm.rank:05d}.h5"
            self._copied.clear()
            self._begin(lambda: _write(path, parts, arrays, self.guarded, later, self._copied))

    def settle(self) -> None:
        """Wait until everything is copied: now tensors may change. No message."""
        self._copied.wait()

    def status(self) -> int:
        """Return DONE, BUSY or FAILED: how far this rank's own part is. No message."""
        if self._work is None:
            return DONE
        if self._work.is_alive():
            return BUSY
        return FAILED if self._work.error else DONE

    def advance(self, status: int) -> None:
        """Go on to what comes next, `status` being the largest of all ranks' `status()`. Collective.

        Raises
        ------
        SaveError, FloatingPointError
            As `save`.
        """
        if self._work is None or status == BUSY:
            return
        self._work.join()
        if status == FAILED:
            self._fail()
        if self._reports is None:
            self._reports = self.comm.gather_objects(self._work.result)
            self._begin(self._publish if self.comm.rank == 0 else lambda: None)
        else:
            self.published, self._work = self._step, None

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is published. Collective."""
        while self.active:
            self._work.join()
            self.advance(int(self.comm.all_reduce(np.array([self.status()]), "max")[0]))

    def _begin(self, call: Callable[[], Any]) -> None:
        self._work = _Work(call)
        self._work.start()

    def _fail(self) -> None:
        """Raise what went wrong, with the rank, on all ranks."""
        error, self._work = self._work.error, None
        told = {rank: t for rank, t in enumerate(self.comm.gather_objects(_told(error))) if t is not None}
        if self.comm.rank == 0:
            self.folder.discard(self._step)
        text = "; ".join(f"rank {rank}: {said}" for rank, (_, said) in told.items())
        if any(nonfinite for nonfinite, _ in told.values()):
            raise FloatingPointError(f"the checkpoint of step {self._step} is not kept: {text}")
        raise SaveError(f"the checkpoint of step {self._step} could not be written: {text}")

    def _publish(self) -> None:
        """Rank 0, in its thread: index, manifest, rename."""
        reports = self._reports
        arrays: dict[str, ArrayInfo] = {}
        scalars: dict[str, np.ndarray] = {}
        for report in reports:
            arrays.update(report.arrays)
            scalars.update(report.scalars)
        files = merged(report.file for report in reports if report.file is not None)
        seal(self.folder, self._step, arrays, files, scalars, self._state, self.keep)


def _write(
    path: Path,
    parts: list[Part],
    arrays: dict[str, ArrayInfo],
    guarded: str,
    copies: list[Copy],
    copied: threading.Event,
) -> Report:
    """Every rank, in its thread: copy what is left, write the shard, looking for NaN and infinity on the way."""
    try:
        for copy_ in copies:
            copy_.make()
    finally:
        copied.set()
    with span("write checkpoint", "io"):
        file = write_shard(path, parts, lambda part: _guard(part, guarded)) if parts else None
    return Report(file, arrays, _scalars(parts))


def _write_together(path: Path, comm: Comm, parts: list[Part], arrays: dict[str, ArrayInfo], guarded: str) -> Report:
    """Every rank, on the main thread: its parts of one file."""
    report = Report(write_together(path, comm, arrays, parts), arrays, _scalars(parts))
    for part in parts:  # after the collective, which a rank alone must not leave
        _guard(part, guarded)
    return report


def _guard(part: Part, guarded: str) -> None:
    if part.array.startswith(guarded) and part.data.dtype.kind == "f" and not _finite(part.data):
        raise FloatingPointError(f"{part.array} is not finite")


def _scalars(parts: list[Part]) -> dict[str, np.ndarray]:
    return {part.array: part.data for part in parts if not part.data.ndim}


def _finite(data: np.ndarray) -> bool:
    # NaN wins both; no temporary array as isfinite would make
    return bool(np.isfinite(data.max()) and np.isfinite(data.min()))


def _said(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    return str(error) or type(error).__name__


def _told(error: BaseException | None) -> tuple[bool, str] | None:
    if error is None:
        return None
    said = _said(error) if isinstance(error, (OSError, FloatingPointError)) else f"{type(error).__name__}: {error}"
    return isinstance(error, FloatingPointError), said
