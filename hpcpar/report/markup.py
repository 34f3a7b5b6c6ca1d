"""Pieces of HTML: tables, stacked bars, curves. Everything that comes from a run is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import ceil, floor, isfinite, log10
from typing import Any, NamedTuple

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 220, 52, 450, 10, 196
"""Of a panel of curves, in the units of its drawing."""


class Cell(NamedTuple):
    """A cell of a table that is markup, or that is sorted by another value than the one it shows."""

    markup: str
    value: float | str = ""
    kind: str = ""


def table(name: str, head: Sequence[str], rows: Iterable[Sequence[str | Cell]], sortable: bool = False) -> str:
    """Return a table; the first column is aligned to the left, the others to the right."""
    heads = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    kind = ' class="sortable"' if sortable else ""
    return (
        f'<div class="scroll"><table id="{name}"{kind}><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return f"<td>{escape(cell)}</td>"
    kind = f' class="{cell.kind}"' if cell.kind else ""
    return f'<td{kind} data-value="{escape(str(cell.value))}">{cell.markup}</td>'


def bar(parts: Mapping[str, float], whole: float, titles: Mapping[str, str]) -> str:
    """Return a stacked bar: of each part its share of `whole`, in the colour that the style sheet has for its name."""
    pieces = "".join(
        f'<i style="width:{100 * value / whole:.3f}%;background:var(--{name})" title="{escape(titles[name])}"></i>'
        for name, value in parts.items()
        if whole and value > 0
    )
    return f'<div class="bar">{pieces}</div>'


def legend(names: Mapping[str, str]) -> str:
    """Return a legend: colour and what it means."""
    entries = "".join(
        f'<span><i style="background:var(--{colour})"></i>{escape(shown)}</span>' for colour, shown in names.items()
    )
    return f'<div class="legend">{entries}</div>'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    unit = 10.0 ** floor(log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [step * i for i in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1)]


def curves(number: int, series: Mapping[str, Sequence[tuple[float, float]]]) -> tuple[str, dict[str, Any]]:
    """Draw points (step, value) of several names as one panel; its facts are what the page's script needs.

    Values that are not finite leave a gap. Positive ones that span more than a decade are drawn on a logarithmic scale.
    """
    points = [p for line in series.values() for p in line if isfinite(p[1])]
    first, last = min((p[0] for p in points), default=0), max((p[0] for p in points), default=1)
    low, high = min((p[1] for p in points), default=0.0), max((p[1] for p in points), default=1.0)
    scale = log10 if low > 0 and high / low > 10 else float
    if high == low:
        low, high = low - abs(low) / 10 - 1e-12, high + abs(high) / 10 + 1e-12
    bottom, top = scale(low), scale(high)

    def at(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (RIGHT - LEFT) * ((step - first) / (last - first) if last > first else 0)
        return x, BOTTOM - (BOTTOM - TOP) * (scale(value) - bottom) / (top - bottom)

    marks = [10.0**e for e in range(ceil(bottom), floor(top) + 1)] if scale is log10 else ticks(low, high)
    parts = [_level(at(first, value)[1], value) for value in marks]
    parts += [
        f'<text x="{at(step, high)[0]:.1f}" y="{HEIGHT - 6}" text-anchor="middle">{step:g}</text>'
        for step in ticks(first, last)
    ]
    parts.append(f'<line class="grid mark" y1="{TOP}" y2="{BOTTOM}" x1="0" x2="0" style="display:none"/>')
    for colour, line in enumerate(series.values()):
        parts += _line([at(*p) if isfinite(p[1]) else None for p in line], colour % 8)
    drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" data-panel="{number}" role="img">{"".join(parts)}</svg>'
    finite = {name: [list(p) for p in line if isfinite(p[1])] for name, line in series.items()}
    steps = sorted({p[0] for p in points}) or [0]
    facts = {"width": WIDTH, "left": LEFT, "right": RIGHT, "steps": steps, "span": last - first, "series": finite}
    return drawing + legend({f"series{i % 8}": name for i, name in enumerate(series)}), facts


def _level(y: float, value: float) -> str:
    return (
        f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    )


def _line(points: Sequence[tuple[float, float] | None], colour: int) -> list[str]:
    """Return the strokes between gaps, and a dot where a point stands alone."""
    strokes: list[list[str]] = [[]]
    for point in points:
        if point is None:
            strokes.append([])
        else:
            strokes[-1].append(f"{point[0]:.1f},{point[1]:.1f}")
    return [
        f'<polyline class="curve" points="{" ".join(stroke)}" style="stroke:var(--series{colour})"/>'
        if len(stroke) > 1
        else '<circle r="3" cx="{}" cy="{}" style="fill:var(--series{})"/>'.format(*stroke[0].split(","), colour)
        for stroke in strokes
        if stroke
    ]
