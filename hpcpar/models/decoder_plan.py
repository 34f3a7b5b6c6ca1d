"""How a decoder lies on a mesh: the layouts of its weights and of what flows between them.

Tensor parallel (Shoeybi et al. 2019, arXiv 1909.08053): heads, hidden layer and vocabulary are split; each half of a
block ends in one sum over the ranks, and begins with one in backward. Sequence parallel (Korthikanti et al. 2022, arXiv
2205.05198): what lies between is split by tokens over the same ranks. Sharded weights (Zhao et al. 2023, arXiv
2304.11277): weights are split as well over the ranks that share batch and tokens, and gathered for each use.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh
from hpcpar.models.decoder_config import DecoderConfig
from hpcpar.models.placement import Axes, Spread
from hpcpar.parallel import Placement
from hpcpar.parallel.plan import Entry


@dataclass(frozen=True)
class Streams:
    """Layouts of what flows through a decoder.

    Attributes
    ----------
    residual : Layout
        Of the residual stream (N, S, C), and of what is added to it.
    inner : Layout
        Of the hidden layer (N, S, hidden) and of the logits (N, S, V).
    heads, kv_heads : Layout
        Of queries (N, H, S, E), and of keys and values.
    """

    residual: Layout
    inner: Layout
    heads: Layout
    kv_heads: Layout


def decoder_placements(config: DecoderConfig, mesh: Mesh, spread: Spread) -> dict[str, Entry]:
    """Return the plan of a decoder.

    Parameters
    ----------
    spread : Spread
        ``channels`` splits heads, hidden layer and vocabulary, ``sequence`` the tokens, ``batch`` the texts; with
        ``shard_weights`` the latter two also split weights.

    Notes
    -----
    Keys and values are split like the queries where every rank then has the queries of its own keys: when the number of
    ranks divides that of their heads, or each query head has its own. Else they are whole on every rank. Norms, learned
    positions and the biases of the stream, a small part of the whole, are on every rank too.
    """
    if mesh.size == 1:
        return {}
    split = tuple(a for a in spread.channels if mesh.shape[a] > 1)
    others = mesh.sort([a for a in (*spread.batch, *spread.sequence) if mesh.shape[a] > 1])
    rows = others if spread.shard_weights else ()
    kv_split = split if _heads_match(config, mesh, split) else ()
    flow = _streams(spread, split, kv_split)
    keep = "source" if rows else None
    options = {"order": spread.order}
    plan: dict[str, Entry] = {
        "": Placement(input=spread.tokens, options={**options, "logits": flow.inner}),
        "embedding": Placement(out=flow.residual, weight=Layout(split, rows), keep=keep),
        "blocks.*.attention": Placement(options={**options, "context": spread.context}),
        "blocks.*.attention.q": _to_heads(split, rows, flow.heads, config.attention_bias, keep),
        "blocks.*.attention.[kv]": _to_heads(kv_split, rows, flow.kv_heads, config.attention_bias, keep),
        "blocks.*.attention.o": Placement(out=flow.residual, weight=Layout(rows, split), keep=keep),
        "blocks.*.mlp.up": _widening(split, rows, flow.inner, config.mlp_bias, keep),
        "blocks.*.mlp.down": Placement(out=flow.residual, weight=Layout(rows, split), keep=keep),
    }
    if config.gated:
        plan["blocks.*.mlp.gate"] = plan["blocks.*.mlp.up"]
    if not config.tied:
        plan["head"] = _widening(split, rows, flow.inner, False, keep)
    return plan


def _streams(spread: Spread, split: Axes, kv_split: Axes) -> Streams:
    tokens = (*spread.sequence, *split) if spread.sequence_parallel else spread.sequence
    return Streams(
        residual=Layout(spread.batch, tokens),
        inner=Layout(spread.batch, spread.sequence, split),
        heads=Layout(spread.batch, split, spread.sequence),
        kv_heads=Layout(spread.batch, kv_split, spread.sequence),
    )


def _heads_match(config: DecoderConfig, mesh: Mesh, split: Axes) -> bool:
    """Whether every rank's block of query heads uses exactly its own block of key heads."""
    return config.kv_heads == config.heads or config.kv_heads % mesh.length(*split) == 0


def _to_heads(split: Axes, rows: Axes, out: Layout, bias: bool, keep: str | None) -> Placement:
    biases = {"bias": Layout(split)} if bias else {}
    return Placement(out=out, weight=Layout(split, rows), keep=keep, **biases)


def _widening(split: Axes, rows: Axes, out: Layout, bias: bool, keep: str | None) -> Placement:
    biases = {"bias": Layout(split)} if bias else {}
    return Placement(out=out, weight=Layout((*split, *rows)), keep=keep, **biases)
