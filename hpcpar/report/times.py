"""Where the time of a step went: by kind, by layer, by axis, by rank. From the traces of all ranks.

All seconds are those of one step: sums over the steps of the trace, divided by their number. Where ranks are not told
apart, they are means over the ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hpcpar.trace.recorder import MESSAGES
from hpcpar.trace.spans import RankTrace, Span

KINDS = ("compute", "operation", "halo", "reduction", "message", "wait", "io", "rest")
"""Of what a step is made: kernels; the rest of operations; messages of four kinds; reading; all else."""

OUTSIDE = "(outside of modules)"


def summarize_times(ranks: Sequence[RankTrace]) -> dict[str, Any]:
    """Return everything that is to be said of traces, as plain values.

    Returns
    -------
    dict
        ``steps``: how many; ``step``: seconds of one, the slowest rank's in each; ``ranks``: one row a rank, with
        ``kinds``, ``busy`` (computing), ``exposed`` (in messages) and ``hidden`` (messages under way while something
        was computed); ``imbalance``: of ``busy``, the largest over the mean; ``kinds``, ``layers``, ``axes``;
        ``gflop`` of a step and ``gflops`` a second, of all ranks; ``late``: seconds that a rank waited in collectives
        for the last one to come.
    """
    names = list(ranks[0].steps)
    rows = [_rank_row(rank, len(names)) for rank in ranks]
    busy = [row["busy"] for row in rows]
    step = sum(max(rank.steps[name].seconds for rank in ranks) for name in names) / len(names)
    layers = _layers(ranks, len(names))
    gflop = sum(row["gflop"] for row in layers)
    late = _late(ranks, len(names))
    for row, seconds in zip(rows, late, strict=True):
        row["late"] = seconds
    kinds = {kind: _mean([row["kinds"][kind] for row in rows]) for kind in KINDS}
    return {
        "steps": len(names),
        "first": names[0],
        "last": names[-1],
        "step": step,
        "ranks": rows,
        "imbalance": max(busy) / _mean(busy) if _mean(busy) else 1.0,
        "kinds": kinds,
        "exposed": _mean([row["exposed"] for row in rows]),
        "hidden": _mean([row["hidden"] for row in rows]),
        "late": _mean(late),
        "layers": layers,
        "axes": _axes(ranks, len(names)),
        "gflop": gflop,
        "gflops": gflop / step if step else 0.0,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _kind(span: Span) -> str:
    return span.category if span.category in KINDS else "rest"


def _rank_row(rank: RankTrace, steps: int) -> dict[str, Any]:
    kinds = dict.fromkeys(KINDS, 0.0)
    for span in rank.spans:
        kinds[_kind(span)] += span.own / steps
    in_flight = _covered(rank.flights)
    return {
        "rank": rank.facts["rank"],
        "step": sum(s.seconds for s in rank.steps.values()) / steps,
        "kinds": kinds,
        "busy": kinds["compute"] + kinds["operation"] + kinds["rest"],
        "exposed": sum(kinds[kind] for kind in MESSAGES),
        "hidden": max(0.0, in_flight - _in_messages(rank)) / steps,
    }


def _covered(spans: Sequence[Span]) -> float:
    """Seconds that at least one of the spans, in order of their beginning, covers."""
    total, until = 0.0, float("-inf")
    for span in spans:
        if span.end > until:
            total += span.end - max(span.begin, until)
            until = span.end
    return total


def _in_messages(rank: RankTrace) -> float:
    """Seconds in which something is under way while the training thread is inside of a message itself."""
    total, flights, at = 0.0, _merged(rank.flights), 0
    for span in (s for s in rank.spans if s.category in MESSAGES):
        while at < len(flights) and flights[at][1] <= span.begin:
            at += 1
        for begin, end in flights[at:]:
            if begin >= span.end:
                break
            total += min(end, span.end) - max(begin, span.begin)
    return total


def _merged(spans: Sequence[Span]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for span in spans:
        if merged and span.begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], span.end)
        else:
            merged.append((span.begin, span.end))
    return merged


def _layers(ranks: Sequence[RankTrace], steps: int) -> list[dict[str, Any]]:
    """One row a module, in the order in which they first ran."""
    rows: dict[str, dict[str, Any]] = {}
    share = 1 / (steps * len(ranks))
    for rank in ranks:
        for span in rank.spans:
            if span.category not in ("operation", "compute", *MESSAGES):
                continue
            row = rows.setdefault(span.module or OUTSIDE, defaultdict(float))
            part = "messages" if span.category in MESSAGES else _direction(span)
            row[part] += span.own * share
            row["kernels"] += span.own * share * (span.category == "compute")
            # the work is that of all ranks, and every rank enters it
            row["gflop"] += span.args.get("flop", 0) * share / 1e9
            row["bytes"] += span.args.get("bytes", 0) * share
    keys = ("forward", "backward", "other", "kernels", "messages", "gflop", "bytes")
    return [_rated({"module": name, **{key: row[key] for key in keys}}) for name, row in rows.items()]


def _direction(span: Span) -> str:
    phase = span.args.get("phase", "")
    return phase if phase in ("forward", "backward") else "other"


def _rated(row: dict[str, Any]) -> dict[str, Any]:
    row["seconds"] = row["forward"] + row["backward"] + row["other"] + row["messages"]
    computing = row["seconds"] - row["messages"]
    row["gflops"] = row["gflop"] / computing if computing else 0.0
    return row


def _axes(ranks: Sequence[RankTrace], steps: int) -> list[dict[str, Any]]:
    """One row for each set of axes and kind of message."""
    rows: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    share = 1 / (steps * len(ranks))
    for rank in ranks:
        for span in rank.spans:
            if span.category in MESSAGES:
                row = rows[span.args.get("axes", ""), _purpose(span)]
                row["calls"] += share * (not span.name.endswith((" wait", " test")))
                row["seconds"] += span.own * share
                row["bytes"] += span.args.get("bytes", 0) * share
    return [
        {
            "axes": axes,
            "kind": kind,
            **{key: row[key] for key in ("calls", "seconds", "bytes")},
            "gb_per_s": row["bytes"] / row["seconds"] / 1e9 if row["seconds"] else 0.0,
        }
        for (axes, kind), row in sorted(rows.items())
    ]


def _purpose(span: Span) -> str:
    """Halos, gradients, or the collective itself: waiting belongs to what is waited for."""
    for word in ("halo", "gradient sum"):
        if span.name.startswith(word):
            return word
    return span.name


def _late(ranks: Sequence[RankTrace], steps: int) -> list[float]:
    """Seconds that each rank spent in collectives before the last rank came, as far as the clocks can tell."""
    arrivals: dict[tuple, list[tuple[int, Span]]] = defaultdict(list)
    for index, rank in enumerate(ranks):
        coords = rank.facts.get("coords", {})
        for span in rank.spans:
            if "call" in span.args:
                along = span.args["axes"].split("+")
                group = tuple((axis, at) for axis, at in coords.items() if axis not in along)
                arrivals[span.args["axes"], group, span.args["call"]].append((index, span))
    waited = [0.0] * len(ranks)
    for met in arrivals.values():
        last = max(span.begin for _, span in met)
        for index, span in met:
            waited[index] += max(0.0, min(last, span.end) - span.begin) / steps
    return waited
