"""All that a run directory says, as one tree of plain values; what is not there is named under ``missing``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpcpar.report.times import summarize_times
from hpcpar.trace.spans import read_trace
from hpcpar.train.plot import read_metrics


def gather(run_dir: str | Path) -> dict[str, Any]:
    """Return what is known of a run.

    Returns
    -------
    dict
        ``run`` (its directory), ``records`` (of metrics.jsonl), ``times`` (`hpcpar.report.times`; None without a
        trace), ``ranks`` (place, peak memory, and messages where they are known, of each rank), ``mesh``, ``result``,
        and ``missing``: a sentence for each figure that cannot be given.

    Raises
    ------
    FileNotFoundError
        There is no such directory, or it is not of a run.
    ValueError
        A file is not what it should be.
    """
    folder = Path(run_dir)
    facts: dict[str, Any] = {"run": str(folder), "records": read_metrics(folder / "metrics.jsonl"), "missing": []}
    traces = read_trace(folder)
    facts["times"] = summarize_times(traces) if traces and traces[0].steps else None
    ranks = _load(folder / "ranks.json")
    facts["ranks"] = ranks["ranks"] if ranks else [trace.facts for trace in traces]
    facts["mesh"] = ranks["mesh"] if ranks else traces[0].facts["mesh"] if traces else {}
    facts["steps"] = ranks["steps"] if ranks else None
    facts["result"] = _load(folder / "result.json") or {}
    facts["clock_error"] = max((trace.facts.get("clock_error_ns", 0) for trace in traces), default=0) / 1e9
    facts["dropped"] = sum(trace.facts.get("dropped", 0) for trace in traces)
    if not traces:
        facts["missing"].append(
            "times by layer and axis, imbalance, GFLOP/s, exposed communication: there is no trace.json; train with "
            "--trace, or --set run.trace=true --set run.trace_steps=[10,20]"
        )
    elif not facts["times"]:
        facts["missing"].append(
            "times by layer and axis: the trace has no whole step that all ranks recorded; raise run.trace_events"
        )
    if not ranks:
        facts["missing"].append("messages of the whole run: there is no ranks.json, which a run writes at its end")
        if not traces:
            facts["missing"].append("peak memory and places of ranks: neither ranks.json nor trace.json is there")
    return facts


def _load(path: Path) -> Any:
    """Return a JSON file's content, None where there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None


def axis_bytes(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of all ranks together by axes and operation, most bytes first."""
    sums: dict[tuple[str, str], list[float]] = {}
    for rank in ranks:
        for row in rank.get("messages", ()):
            total = sums.setdefault((row["axes"], row["operation"]), [0, 0.0])
            total[0] += row["messages"]
            total[1] += row["bytes"]
    rows = [
        {"axes": axes, "operation": operation, "messages": messages, "bytes": sent}
        for (axes, operation), (messages, sent) in sums.items()
    ]
    return sorted(rows, key=lambda row: -row["bytes"])
