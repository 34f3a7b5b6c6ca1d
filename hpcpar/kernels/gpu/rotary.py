"""Rotation of pairs of features on a device: one thread an element."""

from __future__ import annotations

from ..arrays import Array, array_module
from .launch import launch, served

SOURCE = r"""
extern "C" {

/* x lies (samples, outer, inner, width) in memory; positions are the outer dim, or the inner one */
__global__ void rotate_pairs(const T* x, const T* cosine, const T* sine, index_t outer, index_t inner, index_t width,
                             index_t pairs, index_t outer_positions, index_t tables, index_t interleaved, T* y,
                             index_t n) {
    EACH(i, n) {
        index_t e = i % width, row = i / width;
        if (e >= 2 * pairs) { y[i] = x[i]; continue; }
        index_t in = row % inner, out = row / inner % outer, sample = row / (inner * outer);
        index_t length = outer_positions ? outer : inner, s = outer_positions ? out : in;
        index_t k = interleaved ? e / 2 : e % pairs;
        bool first = interleaved ? e % 2 == 0 : e < pairs;
        index_t step = interleaved ? 1 : pairs;
        index_t at = ((tables > 1 ? sample : 0) * length + s) * pairs + k;
        y[i] = first ? x[i] * cosine[at] - x[i + step] * sine[at] : x[i - step] * sine[at] + x[i] * cosine[at];
    }
}

}
"""


def rotate_pairs(x: Array, cosine: Array, sine: Array, interleaved: bool = False) -> Array:
    if not served(x, cosine, sine):
        return NotImplemented
    xp = array_module(x)
    positions_first = x.strides[2] >= x.strides[1]
    memory = xp.ascontiguousarray(x.transpose(0, 2, 1, 3) if positions_first else x)
    y = xp.empty_like(memory)
    tables = cosine.shape[0] if cosine.ndim == 3 else 1
    launch(SOURCE, "rotate_pairs", x.dtype, y.size, memory, xp.ascontiguousarray(cosine), xp.ascontiguousarray(sine),
           *memory.shape[1:], cosine.shape[-1], int(positions_first), tables, int(interleaved), y)
    return y.transpose(0, 2, 1, 3) if positions_first else y
