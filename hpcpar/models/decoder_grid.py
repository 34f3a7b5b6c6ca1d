"""How a decoder lies on the process grids of the literature: `hpcpar.parallel.grids`."""

from __future__ import annotations

from collections.abc import Collection

from hpcpar.layout.layout import Layout
from hpcpar.models.decoder_config import DecoderConfig
from hpcpar.parallel.plan import Entry, Placement
from hpcpar.parallel.products import Grid


def grid_placements(
    config: DecoderConfig, grid: Grid, *, keep: str | None = None, overlap: Collection[str] | None = None
) -> dict[str, Entry]:
    """Return the plan of a decoder on a grid, for `hpcpar.parallelize`.

    Parameters
    ----------
    config : DecoderConfig
        The model's.
    keep, overlap
        As of `Grid.plan`.

    Raises
    ------
    ValueError
        When heads of keys and values are fewer than those of queries and cannot be split as these are.

    Notes
    -----
    Tokens are split by texts alone, over the axes of the stream's rows. A table that is also the head is split by its
    columns; its logits then cost the words of their re-layout more than those of a head of its own.

    Examples
    --------
    >>> grid = hp.grids.Cube(2)
    >>> with grid.mesh():
    ...     model = hp.models.llama(vocab_size=512, width=64, layers=2, heads=4, kv_heads=4)
    >>> hp.parallelize(model, grid_placements(model.config, grid))
    """
    parts = grid.parts(grid.product().bias)
    if config.kv_heads != config.heads and config.kv_heads % parts:
        raise ValueError(
            f"{grid} splits heads into {parts} parts: {config.kv_heads} heads of keys for {config.heads} of queries "
            f"do not divide; take a multiple of {parts}, or as many as of queries"
        )
    layers: dict[bool, dict[str, str]] = {True: {}, False: {"embedding": "embedding"}}
    layers[config.norm == "layer" and config.norm_bias].update(
        {"blocks.*.norm1": "norm", "blocks.*.norm2": "norm", "norm": "norm"}
    )
    layers[config.attention_bias]["blocks.*.attention.[qkv]"] = "heads"
    layers[config.out_bias]["blocks.*.attention.o"] = "merge"
    layers[config.mlp_bias].update({"blocks.*.mlp.up": "first", "blocks.*.mlp.down": "second"})
    if config.gated:
        layers[config.mlp_bias]["blocks.*.mlp.gate"] = "first"
    if not config.tied:
        layers[False]["head"] = "first"
    plan: dict[str, Entry] = {"": Placement(input=grid.samples, options={"logits": grid.operands(3).out})}
    for bias, roles in layers.items():
        plan.update(grid.plan(roles, 3, bias=bias, keep=keep, overlap=overlap))
    if config.positions == "learned":
        plan["position_embedding"] = Placement(weight=Layout(None, grid.product().inputs))
    return plan
