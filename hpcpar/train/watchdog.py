"""The watchdog: when nothing moves any more, each rank says what it is in, one prints it, and the job ends.

A collective call that one rank does not enter makes all others wait for ever. A thread on each rank, which sends no
message, looks at its main thread; without progress for too long it leaves a report in a folder that all ranks share,
and the reports together tell who waits, in what, and for whom.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from hpcpar import scope
from hpcpar.data.files import replaced

EXIT_STALLED = 70
"""Exit status of a job that the watchdog has ended (EX_SOFTWARE of sysexits.h)."""

GRACE_SECONDS = 3.0
"""How long the others have to leave their reports after the first."""

SHOWN_CALLERS = 3

_HOME = str(Path(__file__).resolve().parents[1])
_TRANSPORT = str(Path(_HOME, "transport"))


class Watchdog:
    """Ends a job that has stopped moving, with one message that names the ranks that did not arrive.

    Parameters
    ----------
    folder : Path
        Shared by all ranks; made when something is wrong.
    rank, size : int
    seconds : float
        Without a `beat`, and with the main thread at the same place all the time. 0: no watch.
    grace : float
        Seconds to wait for the reports of others.

    Examples
    --------
    >>> with Watchdog(folder, comm.rank, comm.size, 600) as watchdog:
    ...     for batch in batches:
    ...         step(batch)
    ...         watchdog.beat()
    """

    def __init__(self, folder: Path, rank: int, size: int, seconds: float, grace: float = GRACE_SECONDS) -> None:
        self.folder, self.rank, self.size = folder, rank, size
        self.seconds, self.grace = seconds, grace
        self._beats = 0
        self._main = threading.get_ident()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self) -> None:
        """Say that the main thread goes on."""
        self._beats += 1

    def __enter__(self) -> Watchdog:
        self._main = threading.get_ident()
        if self.seconds > 0 and self._thread is None:
            if self.rank == 0:
                shutil.rmtree(self.folder, ignore_errors=True)
            self._stop.clear()
            self._thread = threading.Thread(target=self._watch, name="hpcpar-watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread = None

    # ---- the thread

    def _watch(self) -> None:
        beats, place, moved, beaten = -1, None, time.monotonic(), time.monotonic()
        while not self._stop.wait(min(5.0, self.seconds / 10)):
            now, here = time.monotonic(), self._place()
            if self._beats != beats:
                beats, beaten = self._beats, now
                moved = now
            elif here != place:
                moved = now
            place = here
            # a rank that waits in a loop never stands still: it reports as soon as anybody else does
            stalled = now - moved > self.seconds
            if stalled or (now - beaten > self.seconds / 2 and self._anybody()):
                self._end(now - beaten)

    def _place(self) -> tuple:
        frame, place = sys._current_frames().get(self._main), []
        while frame is not None:
            place.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        return tuple(place)

    def _anybody(self) -> bool:
        return any(self.folder.glob("rank-*.json"))

    def _end(self, idle: float) -> None:
        """Report, wait for the reports of others, let the lowest rank print them, end this rank."""
        frame = sys._current_frames().get(self._main)
        mine = {"idle": idle, **describe(frame)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with replaced(self.folder / f"rank-{self.rank:05d}.json") as path:
                path.write_text(json.dumps(mine), encoding="utf-8")
            deadline = time.monotonic() + self.grace + min(5.0, self.seconds / 10)
            while time.monotonic() < deadline and len(list(self.folder.glob("rank-*.json"))) < self.size:
                time.sleep(0.05)
            reports = read_reports(self.folder)
        except OSError as error:
            reports = {self.rank: {**mine, "note": f"no reports of others: {error}"}}
        if self.rank == min(reports, default=self.rank):
            sys.stderr.write(explain(reports, self.size))
            sys.stderr.flush()
        # others may still be reading; then the launcher ends who cannot end by itself
        time.sleep(0.5)
        os._exit(EXIT_STALLED)


def read_reports(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the reports that ranks have left."""
    found = {}
    for path in sorted(folder.glob("rank-*.json")):
        found[int(path.stem.partition("-")[2])] = json.loads(path.read_text(encoding="utf-8"))
    return found


def describe(frame: FrameType | None) -> dict[str, Any]:
    """Return what a stack is in: the operation of the transport, if it waits in one, callers, module, stack as text.

    The operation is the outermost call into `hpcpar.transport`, with the name of its communicator (its mesh axes); the
    callers are those in hpcpar, the innermost first.
    """
    stack = list(traceback.walk_stack(frame))
    operation, callers = None, []
    for inner, line in stack:
        path, name = inner.f_code.co_filename, inner.f_code.co_name
        if path.startswith(_TRANSPORT):
            owner = inner.f_locals.get("self")
            along, kind = _communicator(owner), getattr(owner, "operation", "")
            operation = f"{Path(path).stem}.{name}" + f" of {kind}" * bool(kind) + f" along {along}" * bool(along)
        elif path.startswith(_HOME):
            callers.append(f"{name} ({path[len(_HOME) + 1 :]}:{line})")
    if not callers and stack:
        inner, line = stack[0]
        callers = [f"{inner.f_code.co_name} ({inner.f_code.co_filename}:{line})"]
    text = "".join(traceback.StackSummary.extract(iter(stack)).format()[::-1])
    place = " < ".join(callers[:SHOWN_CALLERS])
    return {"operation": operation, "place": place, "module": scope.current(), "stack": text}


def _communicator(owner: object) -> str:
    """Name of the communicator that a transport object is, or has."""
    for candidate in (owner, getattr(owner, "comm", None), getattr(owner, "_comm", None)):
        name = getattr(candidate, "name", None)
        if isinstance(name, str):
            return name
    return ""


def explain(reports: Mapping[int, Mapping[str, Any]], size: int) -> str:
    """Return the message: who waits in which operation, who is elsewhere, who said nothing."""
    idle = max((report["idle"] for report in reports.values()), default=0.0)
    lines = [f"hpcpar: no progress for {idle:.0f} s; the job is ended"]
    together: dict[tuple[str | None, str, str], list[int]] = {}
    for rank, report in reports.items():
        together.setdefault((report["operation"], report["place"], report["module"]), []).append(rank)
    for (operation, place, module), ranks in sorted(together.items(), key=lambda item: -len(item[1])):
        within = f", module {module}" if module else ""
        if operation:
            wait = "wait" if len(ranks) > 1 else "waits"
            lines.append(f"  {_ranks(ranks)} {wait} in {operation}{within}: {place}")
        else:
            lines.append(f"  {_ranks(ranks)} did not arrive{within}: {place}")
    silent = [rank for rank in range(size) if rank not in reports]
    if silent:
        lines.append(f"  {_ranks(silent)} did not arrive and left no report: stopped, or the node is lost")
    absent = [rank for rank, report in reports.items() if not report["operation"]]
    for rank in absent[:2]:
        lines.append(f"stack of rank {rank}:\n{reports[rank]['stack'].rstrip()}")
    return "\n".join(lines) + "\n"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
