"""Reading a trace back: what each rank did during the steps that are whole, and how long each span took by itself."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcpar.trace import timeline


@dataclass
class Span:
    """One span of the training thread, or of the background.

    Attributes
    ----------
    begin, seconds : float
        Seconds of the common clock.
    own : float
        Seconds that no span inside it accounts for.
    """

    name: str
    category: str
    begin: float
    seconds: float
    main: bool
    args: dict[str, Any]
    own: float = 0.0

    @property
    def end(self) -> float:
        """When it ended."""
        return self.begin + self.seconds

    @property
    def module(self) -> str:
        """For which module it ran; "" for none."""
        return self.args.get("module", "")


@dataclass
class RankTrace:
    """What one rank did.

    Attributes
    ----------
    facts : dict
        ``rank``, ``coords``, ``mesh``, ``host``, ``peak_bytes``, ``clock_error_ns``, ``dropped``, ...
    steps : dict of str to Span
        The steps that were recorded from start to end.
    spans : list of Span
        Of the training thread inside these steps, in order of their beginning.
    flights : list of Span
        Messages under way inside them.
    background : list of Span
        Of other threads, whenever.
    """

    facts: dict[str, Any]
    steps: dict[str, Span] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    flights: list[Span] = field(default_factory=list)
    background: list[Span] = field(default_factory=list)


def read_trace(run_dir: str | Path) -> list[RankTrace]:
    """Return the traces of all ranks of a run, cut to the steps that all of them recorded; [] without a trace.

    Of several steps the first is left out: plans and compiled kernels are made in it.

    Raises
    ------
    ValueError
        The file is no trace of hpcpar.
    """
    path = Path(run_dir, timeline.FILE)
    if not path.exists() and timeline.join(run_dir) is None:
        return []
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{path} is not a trace of this program; remove it to see the other figures") from None
    by_rank: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        by_rank[event["pid"]].append(event)
    ranks = [_read_rank(by_rank[rank]) for rank in sorted(by_rank)]
    common = set.intersection(*(set(rank.steps) for rank in ranks)) if ranks else set()
    if len(common) > 1:
        common.discard(next(name for name in ranks[0].steps if name in common))
    return [_cut(rank, common) for rank in ranks]


def _read_rank(events: Iterable[dict[str, Any]]) -> RankTrace:
    trace, starts = RankTrace({}), {}
    for event in events:
        kind = event["ph"]
        if kind == "M" and event["name"] == "rank_facts":
            trace.facts = event["args"]
        elif kind == "b":
            starts[event["id"]] = event
        elif kind == "e" and event["id"] in starts:
            trace.flights.append(_span({**starts.pop(event["id"]), "end": event["ts"]}))
        elif kind == "X":
            span = _span({**event, "end": event["ts"] + event["dur"]})
            (trace.spans if span.main else trace.background).append(span)
    trace.spans.sort(key=lambda s: (s.begin, -s.seconds))
    oldest = min((s.end for s in trace.spans), default=0.0)
    whole = not trace.facts.get("dropped")  # else what came first in the oldest step is missing
    trace.steps = {s.name: s for s in trace.spans if s.category == "step" and (whole or s.begin >= oldest)}
    return trace


def _span(event: dict[str, Any]) -> Span:
    begin = event["ts"] / 1e6
    return Span(
        event["name"], event["cat"], begin, event["end"] / 1e6 - begin, event["tid"] == 0, event.get("args", {})
    )


def _cut(trace: RankTrace, names: set[str]) -> RankTrace:
    """Keep what lies inside the steps named, and find out what each span took by itself."""
    trace.steps = {name: span for name, span in trace.steps.items() if name in names}
    kept = [(s.begin, s.end) for s in trace.steps.values()]
    trace.spans = _inside(trace.spans, kept)
    trace.flights = _inside(sorted(trace.flights, key=lambda s: s.begin), kept)
    opened: list[Span] = []
    for span in trace.spans:
        while opened and opened[-1].end <= span.begin:
            opened.pop()
        span.own = span.seconds
        if opened:
            opened[-1].own -= span.seconds
        opened.append(span)
    return trace


def _inside(spans: list[Span], intervals: list[tuple[float, float]]) -> list[Span]:
    """Of spans in order, those that begin in one of the intervals, which are in order too."""
    kept, at = [], 0
    for span in spans:
        while at < len(intervals) and intervals[at][1] <= span.begin:
            at += 1
        if at < len(intervals) and intervals[at][0] <= span.begin:
            kept.append(span)
    return kept
