"""Attention in tiles that stay in the cache: products by oneDNN or OpenBLAS, the running softmax in one pass each.

A tile is a block of queries of all heads that share their keys, times a block of keys. Where positions and documents
ascend, what a query sees of a block is an interval: only that is exponentiated, and a tile is cut to the keys that
some of its queries see. Scores in tiles are logarithms to base 2, a factor that the product carries. Small problems
(windows of a picture) take several samples and all heads in one tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from ...arrays import Array
from ...generic.attention import check, heads_in_memory
from ...precision import check_compute
from ...visible import ALL, NONE, AttentionDropout, Sight, Visible
from ..gemm import multiply
from .functions import exp2_row, exponential2, largest, row_dot
from .jit import inner, kernel
from .random import kept_weights

ROWS, KEYS = 256, 512  # of a tile
SMALL = 1 << 15        # scores of one head up to which samples and heads share a tile
TOGETHER = 1 << 18     # scores of such a tile
GRAIN = 16             # tiles are cut to multiples of so many keys

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453


@inner
def _hidden(row):
    """Whether all scores of a row are minus infinity."""
    hidden = True
    for i in range(row.size):
        hidden &= row[i] == -np.inf
    return hidden


@kernel
def _running(scores, low, high, top, total, summed, fresh):
    """One more block of keys: scores become weights relative to the maximum so far, what was summed is rescaled."""
    period = low.size
    for r in range(scores.shape[0]):
        a, b = low[r % period], high[r % period]
        row = scores[r]
        before = -np.inf if fresh else top[r]
        best = max(before, largest(row[a:b])) if b > a else before
        row[:a] = 0
        row[b:] = 0
        if best == -np.inf and not _hidden(row[a:b]):
            best = 0.0  # not a number, which no comparison finds: it will be the sum
        if best == -np.inf:
            row[a:b] = 0
            top[r] = best
            if fresh:
                total[r] = 0
            continue
        top[r] = best
        part = exp2_row(row[a:b], top[r])
        if fresh:
            total[r] = part
        else:
            shrink = 2.0 ** (before - best)
            total[r] = total[r] * shrink + part
            if shrink != 1:
                for c in range(summed.shape[1]):
                    summed[r, c] *= shrink


@kernel
def _finish(summed, top, total, lse):
    """Divide by the sum of weights; the logarithm of the sum of exponentials."""
    for r in range(summed.shape[0]):
        seen = total[r] != 0
        scale = 1 / total[r] if seen else 0.0
        for c in range(summed.shape[1]):
            summed[r, c] *= scale
        lse[r] = (top[r] + np.log2(total[r])) * LN2 if seen else -np.inf


@kernel
def _drop(values, kept, factor):
    """Multiply what is kept, clear the rest."""
    for r in range(values.shape[0]):
        v, k, f = values[r], kept[r], values.dtype.type(factor)
        for c in range(v.size):
            v[c] = v[c] * f if k[c] else 0


@kernel
def _slopes(scores, slope, low, high, lse, delta):
    """Scores become weights, and the gradients of weights become those of scores."""
    period = low.size
    for r in range(scores.shape[0]):
        a, b = low[r % period], high[r % period]
        if lse[r] == -np.inf:
            b = a
        scores[r, :a] = 0
        scores[r, b:] = 0
        slope[r, :a] = 0
        slope[r, b:] = 0
        p, s = scores[r, a:b], slope[r, a:b]
        shift, mean = p.dtype.type(lse[r] * LOG2E), delta[r]
        for c in range(p.size):
            e = exponential2(p[c] - shift)
            p[c] = e
            s[c] = e * (s[c] - mean)


@kernel
def _deltas(g, out, delta):
    """Sums of g * out over the last dim of (N, L, H, V), as (N, H, L)."""
    for n in range(g.shape[0]):
        for i in range(g.shape[1]):
            for h in range(g.shape[2]):
                delta[n, h, i] = row_dot(g[n, i, h], out[n, i, h])


@kernel
def _merge(out_a, lse_a, out_b, lse_b):
    """All rows (N, L, H, V) and (N, H, L)."""
    for n in range(out_a.shape[0]):
        for i in range(out_a.shape[1]):
            for h in range(out_a.shape[2]):
                a, b = lse_a[n, h, i], lse_b[n, h, i]
                if b == -np.inf:
                    continue
                best = max(a, b)
                wa, wb = np.exp(a - best), np.exp(b - best)
                total = wa + wb
                lse_a[n, h, i] = best + np.log(total)
                wa, wb = wa / total, wb / total
                for c in range(out_a.shape[3]):
                    out_a[n, i, h, c] = out_a[n, i, h, c] * wa + out_b[n, i, h, c] * wb


def attention_forward(query: Array, key: Array, value: Array, scale: float, visible: Visible,
                      dropout: AttentionDropout | None = None, compute_dtype: str = "float32",
                      ) -> tuple[Array, Array]:
    shape = check(query, key, value)
    check_compute(compute_dtype, query, key)
    if not _served(query, key, value):
        return NotImplemented
    n, h, length, _ = shape
    width = value.shape[3]
    out = heads_in_memory(query, h, length, width, query.dtype)
    lse = np.empty((n, h, length), query.dtype)
    room, product = _Room(query.dtype), partial(multiply, compute_dtype=compute_dtype)
    for part in _parts(visible, shape, key.shape[1]):
        k, v = (room.copy(name, part.of_keys(a)) for name, a in (("k", key), ("v", value)))
        for tile in part.tiles:
            lead, flat = (*part.lead, tile.lines), math.prod(part.lead) * tile.lines
            q = tile.lines_of(query, room, "q")
            summed = room("summed", (*lead, width))
            top, total, sums = room("top", (flat,)), room("total", (flat,)), room("lse", (flat,))
            for i, block in enumerate(tile.blocks):
                scores = room("scores", (*lead, block.size))
                product(q, k[:, :, block.keys].swapaxes(2, 3), scores, scale * LOG2E)
                low, high = tile.restrict(scores, block)
                weights = scores.reshape(flat, block.size)
                _running(weights, low, high, top, total, summed.reshape(flat, width), i == 0)
                if dropout is not None:
                    _drop(weights, tile.kept(dropout, block), dropout.factor)
                product(scores, v[:, :, block.keys], summed, add=i > 0)
            if not tile.blocks:
                summed[...], top[...], total[...] = 0, -np.inf, 0
            _finish(summed.reshape(flat, width), top, total, sums)
            put(tile.of(out), summed)
            put(tile.of(lse), sums)
    return out, lse


def attention_merge(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    if out_a.dtype not in (np.float32, np.float64) or len({a.dtype for a in (out_a, lse_a, out_b, lse_b)}) > 1:
        return NotImplemented
    _merge(out_a.transpose(0, 2, 1, 3), lse_a, out_b.transpose(0, 2, 1, 3), lse_b)
    return out_a, lse_a


def attention_backward(g: Array, query: Array, key: Array, value: Array, out: Array, lse: Array, scale: float,
                       visible: Visible, dropout: AttentionDropout | None = None, mask_gradient: bool = False,
                       compute_dtype: str = "float32") -> tuple[Array, ...]:
    shape = check(query, key, value)
    check_compute(compute_dtype, query, key)
    if not _served(query, key, value, g, out, lse) or mask_gradient:
        return NotImplemented
    e, dtype = query.shape[3], query.dtype
    dq, dk, dv = (heads_in_memory(a, *a.shape[1:], dtype) for a in (query, key, value))
    room, product = _Room(dtype), partial(multiply, compute_dtype=compute_dtype)
    delta = np.empty(lse.shape, dtype)
    _deltas(*(np.ascontiguousarray(a.transpose(0, 2, 1, 3)) for a in (g, out)), delta)
    for part in _parts(visible, shape, key.shape[1]):
        k, v = (room.copy(name, part.of_keys(a)) for name, a in (("k", key), ("v", value)))
        part_k, part_v = room.zeros("dk", k.shape), room.zeros("dv", v.shape)
        for tile in part.tiles:
            lead, flat = (*part.lead, tile.lines), math.prod(part.lead) * tile.lines
            q, up = tile.lines_of(query, room, "q"), tile.lines_of(g, room, "g")
            sums, means = (room.copy(name, tile.of(a), (flat,)) for name, a in (("lse", lse), ("delta", delta)))
            part_q = room("dq", (*lead, e))
            for i, block in enumerate(tile.blocks):
                scores, slope = (room(name, (*lead, block.size)) for name in ("scores", "slope"))
                keys = slice(None), slice(None), block.keys
                product(q, k[keys].swapaxes(2, 3), scores, scale * LOG2E)
                product(up, v[keys].swapaxes(2, 3), slope)
                low, high = tile.restrict(scores, block)
                weights, slopes = (a.reshape(flat, block.size) for a in (scores, slope))
                kept = None if dropout is None else tile.kept(dropout, block)
                if kept is not None:
                    _drop(slopes, kept, dropout.factor)
                _slopes(weights, slopes, low, high, sums, means)
                if kept is not None:
                    _drop(weights, kept, dropout.factor)
                product(scores.swapaxes(2, 3), up, part_v[keys], add=True)
                product(slope.swapaxes(2, 3), q, part_k[keys], scale, add=True)
                product(slope, k[keys], part_q, scale, add=i > 0)
            if not tile.blocks:
                part_q[...] = 0
            put(tile.of(dq), part_q)
        put(part.of_keys(dk), part_k)
        put(part.of_keys(dv), part_v)
    return dq, dk, dv


def _served(*arrays: Array) -> bool:
    first = arrays[0].dtype
    return first in (np.float32, np.float64) and all(a.dtype == first and a.size for a in arrays)


class _Room:
    """Scratch memory by name, which grows to the largest array asked for."""

    def __init__(self, dtype: np.dtype) -> None:
        self._dtype = dtype
        self._held: dict[str, Array] = {}

    def __call__(self, name: str, shape: tuple[int, ...]) -> Array:
        size = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.size < size:
            held = self._held[name] = np.empty(size, self._dtype)
        return held[:size].reshape(shape)

    def zeros(self, name: str, shape: tuple[int, ...]) -> Array:
        """The array with that name, filled with zeros."""
        made = self(name, shape)
        made[...] = 0
        return made

    def copy(self, name: str, a: Array, shape: tuple[int, ...] | None = None) -> Array:
        """A dense copy of an array, in another shape."""
        made = self(name, a.shape if shape is None else shape)
        made.reshape(a.shape)[...] = a
        return made


def put(place: Array, values: Array) -> None:
    """Write values, in whatever shape, to a view."""
    place[...] = values.reshape(place.shape)


@dataclass(frozen=True)
class _Block:
    """Keys of a tile, and the interval of them that each row sees; None: a mask decides."""

    keys: slice
    low: Array | None
    high: Array | None

    @property
    def size(self) -> int:
        return self.keys.stop - self.keys.start


class _Part:
    """Some samples and groups of heads, whose tiles share keys."""

    def __init__(self, sight: Sight, samples: slice, groups: slice, per_group: int, plan: list[list[_Block]]) -> None:
        self.sight, self.samples, self.groups, self.per_group = sight, samples, groups, per_group
        self.heads = slice(groups.start * per_group, groups.stop * per_group)
        self.lead = (samples.stop - samples.start, groups.stop - groups.start)
        self.tiles = [_Tile(self, rows, blocks) for rows, blocks in zip(sight.rows, plan, strict=True)]

    def of_keys(self, a: Array) -> Array:
        """This part of an array (N, G, S, width)."""
        return a[self.samples, self.groups]


class _Tile:
    """Queries of a part, and the blocks of keys that they see; ``lines`` is their number in each group."""

    def __init__(self, part: _Part, rows: slice, blocks: list[_Block]) -> None:
        self.part, self.rows, self.blocks = part, rows, blocks
        self.lines = part.per_group * (rows.stop - rows.start)

    def of(self, a: Array) -> Array:
        """The rows of this tile of an array (N, H, L) or (N, H, L, width)."""
        return a[self.part.samples, self.part.heads, self.rows]

    def lines_of(self, a: Array, room: _Room, name: str) -> Array:
        """The rows of an array (N, H, L, width), those of one group below each other: a view where that is one."""
        part, view = self.part, self.of(a)
        if part.per_group == 1 and part.lead == (1, 1):
            return view
        return room.copy(name, view, (*part.lead, self.lines, a.shape[3]))

    def restrict(self, scores: Array, block: _Block) -> tuple[Array, Array]:
        """Apply masks to scores; the interval of each row, which repeats from head to head."""
        if block.low is not None:
            return block.low, block.high
        part = self.part
        allowed, added = part.sight.seen(part.samples, self.rows, block.keys, scores)
        heads = part.heads.stop - part.heads.start
        view = scores.reshape(part.lead[0], heads, self.rows.stop - self.rows.start, block.size)
        if added is not None:
            view += self._own(added) * view.dtype.type(LOG2E)
        if allowed is not None:
            np.copyto(view, -np.inf, where=~self._own(allowed))
        return np.zeros(1, np.int64), np.full(1, block.size)

    def _own(self, a: Array) -> Array:
        """The heads of this part of an array that broadcasts to (n, H, rows, keys)."""
        return a[:, self.part.heads] if a.ndim == 4 and a.shape[1] > 1 else a

    def kept(self, dropout: AttentionDropout, block: _Block) -> Array:
        """What dropout keeps of the weights of a block: bool (rows of all heads, keys)."""
        part = self.part
        positions = part.sight.q_positions[self.rows], part.sight.k_positions[block.keys]
        return kept_weights(dropout, part.samples, part.heads, *positions)


def _parts(visible: Visible, shape: tuple[int, ...], groups: int) -> Iterator[_Part]:
    """All parts: few samples and heads with many queries are taken one by one, many with few together."""
    n, h, length, keys = shape
    per_group = h // groups
    together = length * keys * per_group <= SMALL
    rows = max(GRAIN, ROWS // per_group)
    sight = Sight(visible, shape, (length, keys) if together else (rows, KEYS))
    step = max(1, TOGETHER // (length * keys * h)) if together else 1
    plan: list[list[_Block]] = []
    for first in range(0, n, step):
        samples = slice(first, min(n, first + step))
        if first == 0 or visible.q_documents is not None:
            plan = [list(_blocks(sight, samples, row)) for row in range(len(sight.rows))]
        for some in [slice(0, groups)] if together else [slice(g, g + 1) for g in range(groups)]:
            yield _Part(sight, samples, some, per_group, plan)


def _blocks(sight: Sight, samples: slice, row: int) -> Iterator[_Block]:
    """The blocks of keys that some query of a block sees, cut where that is an interval."""
    single = samples.stop - samples.start == 1 or sight.q_documents is None
    for j, keys in enumerate(sight.keys):
        state, size = sight.state(samples, row, j), keys.stop - keys.start
        if state == NONE:
            continue
        if state == ALL:
            yield _Block(keys, np.zeros(1, np.int64), np.full(1, size))
            continue
        found = sight.intervals(samples.start, row, j) if single and sight.mask is None else None
        if found is None:
            yield _Block(keys, None, None)
            continue
        low, high = found
        some = high > low
        if not some.any():
            continue
        start = int(low[some].min()) // GRAIN * GRAIN
        stop = min(size, -(-int(high[some].max()) // GRAIN) * GRAIN)
        low, high = (np.clip(end - start, 0, stop - start) for end in found)
        yield _Block(slice(keys.start + start, keys.start + stop), low, high)
