"""Tracing a training run: which steps are recorded, and how the ranks' parts become one file."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from time import perf_counter_ns as now
from typing import Any

from hpcpar.mesh import Mesh
from hpcpar.together import on_root
from hpcpar.trace import timeline
from hpcpar.trace.instruments import instruments
from hpcpar.trace.recorder import Recorder, span
from hpcpar.train.config import Run
from hpcpar.train.ranks import rank_facts
from hpcpar.train.signals import Interrupted
from hpcpar.transport.clock import Offset, measure_offset


class Tracer:
    """Records the steps that the configuration asks for, on every rank. Collective over the mesh.

    Used as a context round the whole run: at its end, also after a request to stop, rank 0 leaves ``trace.json``; where
    a rank fails, each rank leaves its part without a message, for ``hpcpar report`` to join.

    Parameters
    ----------
    run : Run
        The keys ``trace``, ``trace_steps``, ``trace_events`` and ``dir``.
    """

    def __init__(self, run: Run, mesh: Mesh) -> None:
        self.run, self.mesh = run, mesh
        first, last = run.trace_steps or (1, sys.maxsize)
        self.steps = range(first, last + 1) if run.trace else range(0)
        self.recorder = Recorder(run.trace_events)
        self._instruments = ExitStack()
        self._recording = False
        self._offset, self._measured, self._zero = Offset(0, 0), 0, 0

    def __enter__(self) -> Tracer:
        if self.steps:
            on_root(self.mesh.world, lambda: timeline.clear(self.run.dir))
            _ = self.mesh.node  # collective, and not when a rank has failed
            self._offset, self._measured = measure_offset(self.mesh.world), now()
            self._zero = self.mesh.world.broadcast_object(now())
        return self

    def step(self, number: int) -> Any:
        """Return the context of a step; recording starts or ends with it if it is the first one or behind the last."""
        if number in self.steps and not self._recording:
            self._recording = True
            self._instruments.enter_context(instruments(self.recorder))
        elif self._recording and number not in self.steps:
            self.stop()
        return span(f"step {number}", "step")

    def stop(self) -> None:
        """Record nothing any more."""
        self._recording = False
        self._instruments.close()

    def __exit__(self, kind: type | None, error: BaseException | None, where: object) -> None:
        self.stop()
        if not self.steps:
            return
        if error is None or isinstance(error, Interrupted):
            self._write(measure_offset(self.mesh.world))
            self.mesh.world.barrier()
            on_root(self.mesh.world, lambda: timeline.join(self.run.dir))
        else:
            self._write(self._offset)

    def _write(self, later: Offset) -> None:
        """Write this rank's part. Clocks that drifted apart are met in the middle of the run."""
        offset = (self._offset.nanoseconds + later.nanoseconds) // 2
        facts = {
            **rank_facts(self.mesh),
            "mesh": dict(self.mesh.shape),
            "clock_offset_ns": offset,
            "clock_error_ns": max(self._offset.error, later.error),
            "clock_drift_ns": later.nanoseconds - self._offset.nanoseconds,
        }
        path = timeline.part_path(self.run.dir, self.mesh.rank)
        timeline.write_part(path, self.recorder, facts, offset - self._zero)
