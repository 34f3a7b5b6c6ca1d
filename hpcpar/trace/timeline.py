"""One timeline of all ranks, in the Trace Event Format that Perfetto and ``chrome://tracing`` open.

Each rank writes its own part, with its times brought to the clock of rank 0, as one event a line; rank 0 joins the
parts. Neither holds more than its own spans in memory. Parts that nobody joined, since a rank failed, can be joined
later.

The format: "Trace Event Format", Google, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcpar.trace.recorder import MESSAGES, Event, Recorder

FILE, PARTS = "trace.json", ".trace"


def part_path(run_dir: str | Path, rank: int) -> Path:
    """Return where a rank leaves its part."""
    return Path(run_dir, PARTS, f"rank-{rank:05d}.jsonl")


def write_part(path: Path, recorder: Recorder, facts: Mapping[str, Any], shift: int) -> None:
    """Write the spans of one rank. No message.

    Parameters
    ----------
    path : Path
        As `part_path` names it.
    facts : mapping
        Of this rank, found again by `hpcpar.trace.spans`: ``rank``, ``coords``, ``host``.
    shift : int
        Nanoseconds to add to this rank's clock, so that 0 is the start of the trace on rank 0.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    events = list(recorder.events.copy())  # a thread that reads ahead may still add
    rank = facts["rank"]
    with open(path, "w", encoding="utf-8") as file:
        for line in (*_headers({**facts, "dropped": recorder.dropped}), *_threads(rank, recorder, events)):
            file.write(json.dumps(line) + "\n")
        for number, event in enumerate(events):
            for line in _lines(rank, recorder, event, shift, number):
                file.write(json.dumps(line, separators=(",", ":")) + "\n")


def _headers(facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    rank, coords = facts["rank"], facts.get("coords", {})
    place = " ".join(f"{axis}={index}" for axis, index in coords.items())
    common = {"ph": "M", "pid": rank, "tid": 0}
    yield {**common, "name": "process_name", "args": {"name": f"rank {rank}: {place} on {facts.get('host', '?')}"}}
    yield {**common, "name": "process_sort_index", "args": {"sort_index": rank}}
    yield {**common, "name": "rank_facts", "args": dict(facts)}


def _threads(rank: int, recorder: Recorder, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    threads = {event.thread: event.category for event in events if event.category != "flight"}
    for number, (thread, category) in enumerate(threads.items()):
        main = thread == recorder.main
        name = "training" if main else f"background {category} {number}"
        yield {"ph": "M", "pid": rank, "tid": _tid(recorder, thread), "name": "thread_name", "args": {"name": name}}


def _tid(recorder: Recorder, thread: int) -> int:
    return 0 if thread == recorder.main else thread % 2**31


def _lines(rank: int, recorder: Recorder, event: Event, shift: int, number: int) -> Iterator[dict[str, Any]]:
    """A span as a complete event, what is under way as a begin and an end on a row of its own."""
    args: dict[str, Any] = {}
    if event.module:
        args["module"] = event.module
    if event.phase:
        args["phase"] = event.phase
    if event.category in (*MESSAGES, "flight") and event.facts:
        axes, sent, place = event.facts
        args["axes"], args["bytes"] = axes, sent
        if place >= 0:
            args["call"] = place
    elif event.facts and event.facts[0]:
        args["flop"] = event.facts[0]
    begin, length = (event.begin + shift) / 1000, (event.end - event.begin) / 1000  # microseconds
    common = {"name": event.name, "cat": event.category, "pid": rank, "tid": _tid(recorder, event.thread)}
    if event.category == "flight":
        yield {**common, "ph": "b", "id": number, "ts": begin, "args": args}
        yield {**common, "ph": "e", "id": number, "ts": begin + length}
    else:
        yield {**common, "ph": "X", "ts": begin, "dur": length, "args": args}


def join(run_dir: str | Path) -> Path | None:
    """Join the parts of a run directory to ``trace.json`` and remove them; None where there are none.

    One rank calls it.
    """
    folder, target = Path(run_dir, PARTS), Path(run_dir, FILE)
    parts = sorted(folder.glob("rank-*.jsonl"))
    if not parts:
        return None
    aside = folder / FILE
    with open(aside, "w", encoding="utf-8") as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [')
        separator = "\n"
        for part in parts:
            with open(part, encoding="utf-8") as lines:
                for line in lines:
                    if not line.endswith("\n"):  # the rank was killed while it wrote
                        break
                    out.write(separator + line[:-1])
                    separator = ",\n"
        out.write("\n]}\n")
    aside.replace(target)
    shutil.rmtree(folder, ignore_errors=True)
    return target


def clear(run_dir: str | Path) -> None:
    """Remove the trace of an earlier run, and parts of it. One rank calls it."""
    shutil.rmtree(Path(run_dir, PARTS), ignore_errors=True)
    Path(run_dir, FILE).unlink(missing_ok=True)
