"""Random arguments of attention and of what stands beside it: rotary positions, activations, losses of tokens."""

from __future__ import annotations

from typing import Any

from hpcpar.layout.layout import Layout
from hpcpar.testing.cases import Array
from hpcpar.testing.contraction_draws import Mesh
from hpcpar.testing.drawing import Drawn, Family, Rng, lengths, some
from hpcpar.testing.layouts import draw_layout


def draw_attention(rng: Rng) -> Drawn:
    """Attention: causal, windows, documents, masks of both kinds, shared heads, other lengths of keys."""
    n = 0 if rng.random() < 0.02 else int(rng.integers(1, 4))
    tokens, width, value_width = int(rng.integers(1, 12)), int(rng.integers(1, 6)), int(rng.integers(1, 6))
    groups = int(rng.integers(1, 4))
    heads = groups * int(rng.choice([1, 1, 2, 3]))
    keys = tokens if rng.random() < 0.7 else int(rng.integers(1, 12))
    arrays = [Array((n, heads, tokens, width)), Array((n, groups, keys, width)), Array((n, groups, keys, value_width))]
    arguments: dict[str, Any] = some(rng, {"scale": 0.7, "is_causal": True}, 0.4)
    arguments["enable_gqa"] = heads != groups
    if rng.random() < 0.3:
        arguments["window"] = lengths(rng, 2, 0, 6)
    if keys == tokens and rng.random() < 0.3:
        arguments["documents"] = True
        arrays.append(Array((n, keys), values="indices 3"))
    if "is_causal" not in arguments and rng.random() < 0.35:
        arguments["mask"] = True
        shape = [1 if rng.random() < 0.3 else m for m in (n, heads, tokens, keys)][int(rng.integers(0, 3)) :]
        arrays.append(Array(tuple(shape), values=str(rng.choice(["bool", "normal"]))))
    return "attention", arrays, arguments


def place_attention(rng: Rng, arrays: list[Array], arguments: dict[str, Any], mesh: Mesh) -> None:
    """Split samples, heads and tokens; heads of keys where they have enough; each way to serve split tokens."""
    dims: list[list[str]] = [[], [], []]
    keys_whole = rng.random() < 0.15
    for axis in [str(a) for a in rng.permutation(list(mesh))]:
        where = int(rng.choice(4, p=[0.2, 0.2, 0.45, 0.15]))
        if where < 3:
            dims[where].append(axis)
    heads, groups = arrays[0].shape[1], arrays[1].shape[1]
    parts = 1
    for axis in dims[1]:
        parts *= mesh[axis]
    head_split = dims[1] if groups % parts == 0 or heads == groups else []
    tokens = tuple(dims[2])
    layouts = [Layout(tuple(dims[0]), tuple(dims[1]), tokens)]
    layouts += [Layout(tuple(dims[0]), tuple(head_split), () if keys_whole else tokens)] * 2
    for i, layout in enumerate(layouts):
        if i and rng.random() < 0.1:
            layout = layout.replace(0, None)
        if rng.random() < 0.06:
            free = [a for a in mesh if a not in layout.axes and not any(a in other.axes for other in layouts)]
            layout = Layout(*layout.dims, partial=tuple(free[:1]))
        arrays[i] = Array(arrays[i].shape, layout)
    for i in range(3, len(arrays)):
        shape = arrays[i].shape
        layout = Layout()
        if rng.random() < 0.5:
            full = (dims[0], dims[2]) if arrays[i].values.startswith("indices") else (dims[0], dims[1], dims[2], [])
            entries = full[len(full) - len(shape) :]
            layout = Layout(*[tuple(e) if m > 1 else () for e, m in zip(entries, shape, strict=True)])
        arrays[i] = Array(shape, layout, arrays[i].values)
    if dims[2]:
        arguments["context"] = str(rng.choice(["auto", "ring", "all_to_all", "gather"]))
        square = arrays[0].shape[2] == arrays[1].shape[2] and not keys_whole
        if square and rng.random() < 0.3:
            arguments["order"] = "zigzag"
            arguments["parts"] = 1
            for axis in dims[2]:
                arguments["parts"] *= mesh[axis]


def draw_rotary(rng: Rng) -> Drawn:
    """Rotary positions of all or some features, in order or given, in both conventions of pairs."""
    n, heads, tokens = lengths(rng, 3, 1, 6)
    features = 2 * int(rng.integers(1, 5))
    arrays = [Array((n, heads, tokens, features))]
    if rng.random() < 0.6:
        arrays.append(Array((tokens,) if rng.random() < 0.5 else (n, tokens), values="indices 50"))
    dims = 2 * int(rng.integers(1, features // 2 + 1))
    return "rotary", arrays, some(rng, {"theta": 100.0, "dims": dims, "interleaved": True}, 0.5)


def place_rotary(rng: Rng, arrays: list[Array], arguments: dict[str, Any], mesh: Mesh) -> None:
    """Split anything but features; positions anyhow."""
    x = arrays[0]
    arrays[0] = Array(x.shape, draw_layout(rng, x.shape, mesh, rng.random() < 0.2, forbid=[3]), x.values)
    for i in range(1, len(arrays)):
        arrays[i] = Array(arrays[i].shape, draw_layout(rng, arrays[i].shape, mesh), arrays[i].values)


def draw_activation(rng: Rng) -> Drawn:
    """Activations of one operand, softmax along any dim, and the gated one."""
    shape = lengths(rng, int(rng.integers(1, 5)), 1, 7)
    op = str(rng.choice(["gelu", "gelu", "silu", "sigmoid", "relu", "leaky_relu", "softmax", "log_softmax", "swiglu"]))
    arguments: dict[str, Any] = {}
    if op == "gelu" and rng.random() < 0.5:
        arguments["approximate"] = "tanh"
    if op.endswith("softmax"):
        arguments["dim"] = int(rng.integers(-len(shape), len(shape)))
    return op, [Array(shape)] * (2 if op == "swiglu" else 1), arguments


def draw_token_loss(rng: Rng) -> Drawn:
    """Cross entropy of (samples, tokens, vocabulary) against tokens, as language models have it."""
    n, tokens, vocabulary = int(rng.integers(1, 4)), int(rng.integers(1, 8)), int(rng.integers(1, 12))
    arrays = [Array((n, tokens, vocabulary)), Array((n, tokens), values=f"classes {vocabulary}")]
    rest = {"label_smoothing": 0.1, "reduction": str(rng.choice(["mean", "sum", "none"]))}
    return "token_cross_entropy", arrays, some(rng, rest, 0.5)


def place_token_loss(rng: Rng, arrays: list[Array], arguments: dict[str, Any], mesh: Mesh) -> None:
    """Split samples, tokens and the vocabulary; labels as the tokens, or not at all."""
    layout = draw_layout(rng, arrays[0].shape, mesh, partial=bool(rng.random() < 0.1))
    arrays[0] = Array(arrays[0].shape, layout)
    labels = Layout(layout.entry(0), layout.entry(1)) if rng.random() < 0.7 else Layout()
    arrays[1] = Array(arrays[1].shape, labels, arrays[1].values)


ATTENTION: dict[str, Family] = {
    "attention": Family(draw_attention, 3, place_attention),
    "rotary": Family(draw_rotary, 1, place_rotary),
    "activation": Family(draw_activation, 1, "same"),
    "token_loss": Family(draw_token_loss, 1, place_token_loss),
}
