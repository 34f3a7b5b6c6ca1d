"""Rotary position embedding: pairs of features are turned by angles that grow with the position of the token.

Angles are computed in float64, so that far positions keep their accuracy, and positions follow the split of the
sequence. The gradient is the rotation by the negative angle.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import pi
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from hpcpar import kernels
from hpcpar.kernels.arrays import is_outline
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.mesh import Mesh
from hpcpar.ops.core import Op, Rule
from hpcpar.signature import Signature
from hpcpar.tensors import Tensor
from hpcpar.transport.device import like, to_host

TABLES_KEPT = 4
"""How many pairs of tables are remembered for a mesh: all layers of a model share one."""

_tables: WeakKeyDictionary[Mesh, OrderedDict[tuple, tuple[Any, Any]]] = WeakKeyDictionary()

SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Kinds of scaling, and the numbers that each needs."""


def frequencies(dims: int, theta: float = 10000.0, scaling: Mapping[str, Any] | None = None) -> np.ndarray:
    """Return the angle per position of each of dims / 2 pairs: ``theta ** (-2 k / dims)``, scaled.

    Parameters
    ----------
    scaling : mapping, optional
        As in the configuration files of Hugging Face: ``{"rope_type": "linear", "factor": 2.0}`` divides all by the
        factor. ``"llama3"`` (Grattafiori et al. 2024) divides only those whose wavelength is longer than
        ``original_max_position_embeddings / low_freq_factor``, leaves those shorter than
        ``original_max_position_embeddings / high_freq_factor``, and blends between.

    Returns
    -------
    float64 array (dims / 2,)
    """
    plain = theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    kind, numbers = _scaling(scaling)
    if kind == "linear":
        return plain / numbers["factor"]
    if kind == "llama3":
        low, high = numbers["low_freq_factor"], numbers["high_freq_factor"]
        turns = numbers["original_max_position_embeddings"] * plain / (2 * pi)  # within the original context
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return kept * plain + (1 - kept) * plain / numbers["factor"]
    return plain


def _scaling(given: Mapping[str, Any] | None) -> tuple[str, dict[str, float]]:
    """The kind of a scaling and its numbers, all of them needed and no other."""
    numbers = dict(given or {})
    kind = numbers.pop("rope_type", numbers.pop("type", "default"))
    numbers.pop("rope_theta", None)  # newer files keep it there; it is the argument theta here
    if kind == "default":
        return kind, {}
    if kind not in SCALINGS:
        raise ValueError(f"rotary: a scaling is of the rope_type {', '.join(SCALINGS)}, got {kind!r}")
    if set(numbers) != set(SCALINGS[kind]):
        raise ValueError(f"rotary: a scaling {kind!r} has {', '.join(SCALINGS[kind])}, got {', '.join(numbers)}")
    return kind, {name: float(value) for name, value in numbers.items()}


class Rotary(Op):
    """Turn pairs of features; linear, with an orthogonal matrix for each token."""

    name = "rotary"
    saves_little = True
    linear = "each"

    def rule(self, sigs: tuple[Signature, ...], dims: int, theta: float, interleaved: bool, scaling: tuple) -> Rule:
        x = sigs[0].resolved
        if x.dims[3]:
            wanted = Layout(*x.dims[:3])
            raise LayoutError(f"rotary: features cannot be split, x lies as {x!r}; repartition it to {wanted!r}")
        moves = [x]
        if len(sigs) > 1:
            along = (x.dims[2],) if len(sigs[1].shape) == 1 else (x.dims[0], x.dims[2])
            moves.append(sigs[1].with_layout(Layout(*along)))
        turns = frequencies(dims, theta, dict(scaling))
        return Rule(x, moves, moves, sigs, (turns, (dims, theta, scaling), interleaved))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        x = arrays[0]
        if len(arrays) > 1:
            positions = arrays[1]
        else:
            samples, tokens = rule.out.box[0], rule.out.box[2]
            positions = extra[..., tokens[0] : tokens[1]]
            positions = positions[samples[0] : samples[1]] if positions.ndim == 2 else positions
        cosine, sine = _angles(rule, positions, x)
        return kernels.rotate_pairs(x, cosine, sine, rule.plan[2]), (cosine, sine)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        cosine, sine = saved
        return (kernels.rotate_pairs(g, cosine, -sine, rule.plan[2]), *[None] * (len(needs) - 1))


def _angles(rule: Rule, positions: Any, x: Any) -> tuple[Any, Any]:
    """Cosines and sines of all angles, in the dtype and place of x; remembered."""
    turns, arguments, _ = rule.plan
    dtype = np.dtype(np.float32) if x.dtype == np.float16 else x.dtype
    outlines = is_outline(x)
    host = None if outlines else np.ascontiguousarray(to_host(positions))
    which = () if outlines else (host.dtype.char, host.tobytes())
    key = (arguments, dtype, type(x), positions.shape, *which)
    kept = _tables.setdefault(rule.out.mesh, OrderedDict())
    if key in kept:
        kept.move_to_end(key)
        return kept[key]
    if outlines:
        made = tuple(kernels.outline.empty((*positions.shape, turns.size), dtype) for _ in range(2))
    else:
        angles = host.astype(np.float64)[..., None] * turns
        made = like(np.cos(angles).astype(dtype), x), like(np.sin(angles).astype(dtype), x)
    kept[key] = made
    if len(kept) > TABLES_KEPT:
        kept.popitem(last=False)
    return made


_rotary = Rotary()


def rotary(
    x: Tensor,
    positions: Any = None,
    theta: float = 10000.0,
    *,
    dims: int | None = None,
    interleaved: bool = False,
    scaling: Mapping[str, Any] | None = None,
) -> Tensor:
    """Turn pairs of features of queries or keys by angles proportional to the position (Su et al. 2021).

    Parameters
    ----------
    x : Tensor
        (N, H, S, E); samples, heads and tokens split by any axes, features not.
    positions : Tensor or array, optional
        Integers (S,), or (N, S) where samples differ: the position of each token, in any order. A tensor is brought to
        the split of x, an array is the whole one on every rank; 0 to S - 1 by default.
    theta : float
        The base of the frequencies.
    dims : int, optional
        Turn the first features only, an even number of them; all by default.
    interleaved : bool
        Pairs are neighbours (GPT-J), not the features k and k + dims / 2 (GPT-NeoX, and Llama as Hugging Face keeps
        it).
    scaling : mapping, optional
        See `hpcpar.ops.rotary.frequencies`.

    Returns
    -------
    Tensor
        As x, with its layout.

    Raises
    ------
    LayoutError
        Where features are split.
    """
    if x.ndim != 4:
        raise ValueError(f"rotary takes (N, H, S, E), got shape {x.shape}")
    n, _, tokens, features = x.shape
    dims = features if dims is None else dims
    if dims % 2 or not 0 <= dims <= features:
        raise ValueError(f"rotary: pairs are made of an even number of the {features} features, got dims={dims}")
    if positions is None:
        positions = np.arange(tokens)
    if not isinstance(positions, Tensor):
        positions = np.asarray(positions)
    if tuple(positions.shape) not in ((tokens,), (n, tokens)) or positions.dtype.kind not in "iu":
        raise ValueError(
            f"rotary: x of shape {x.shape} takes integer positions ({tokens},) or {(n, tokens)}, "
            f"got {positions.dtype} of shape {tuple(positions.shape)}"
        )
    kind, numbers = _scaling(scaling)
    static = dims, float(theta), interleaved, (("rope_type", kind), *sorted(numbers.items()))
    if isinstance(positions, Tensor):
        return _rotary((x, positions), static)
    return _rotary((x,), static, positions)
