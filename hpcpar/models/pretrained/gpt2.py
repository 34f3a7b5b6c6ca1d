"""GPT-2 in the format of the Hugging Face libraries: its configuration, and where its tensors are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcpar.models.decoder_config import DecoderConfig
from hpcpar.models.pretrained.fields import Fields
from hpcpar.models.pretrained.views import View, transposed, whole

MODEL_TYPES = ("gpt2",)
ARCHITECTURE = "GPT2LMHeadModel"
PREFIX = "transformer."
"""Before every name but the head's; files made from the model without its head lack it."""
BUFFERS = (".attn.bias", ".attn.masked_bias")
"""Ends of the names of what is stored and is no weight."""
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}


def read_config(table: Mapping[str, Any], dropout: float | None) -> DecoderConfig:
    """Return the configuration that ``config.json`` describes."""
    fields = Fields(table)
    fields.must_be("scale_attn_weights", True)
    fields.must_be("scale_attn_by_inverse_layer_idx", False)
    fields.must_be("add_cross_attention", False)
    width, heads = fields.number("n_embd", 768), fields.number("n_head", 12)
    return fields.config(
        vocab_size=fields.number("vocab_size", 50257),
        width=width,
        layers=fields.number("n_layer", 12),
        heads=heads,
        hidden=fields.get("n_inner") or 4 * width,
        norm_eps=fields.get("layer_norm_epsilon", 1e-5),
        max_positions=fields.number("n_positions", 1024),
        activation=fields.choice("activation_function", ACTIVATIONS, "gelu_new"),
        tied=fields.get("tie_word_embeddings", True),
        dropout=fields.dropout(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.1) if dropout is None else dropout,
        init_std=fields.get("initializer_range", 0.02),
    )


def unlike(config: DecoderConfig) -> list[str]:
    """Return what this family does not have, in words; empty where it can express the configuration."""
    c, plain = config, DecoderConfig(1, 1, 1, 1)
    names = ("norm", "positions", "attention_bias", "out_bias", "mlp_bias", "norm_bias", "window", "rope_scaling")
    faults = [f"{n}={getattr(c, n)!r}" for n in names if getattr(c, n) != getattr(plain, n)]
    faults += [f"activation={c.activation!r}"] * (c.activation not in ACTIVATIONS.values())
    faults += [f"kv_heads={c.kv_heads}"] * (c.kv_heads != c.heads)
    faults += [f"head_dim={c.head_dim}"] * (c.head_dim * c.heads != c.width)
    return faults


def write_config(config: DecoderConfig) -> dict[str, Any]:
    """Return what ``config.json`` holds."""
    c = config
    return {
        "model_type": "gpt2",
        "architectures": [ARCHITECTURE],
        "vocab_size": c.vocab_size,
        "n_positions": c.max_positions,
        "n_embd": c.width,
        "n_layer": c.layers,
        "n_head": c.heads,
        "n_inner": c.hidden,
        "activation_function": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == c.activation),
        "layer_norm_epsilon": c.norm_eps,
        "tie_word_embeddings": c.tied,
        "embd_pdrop": c.dropout,
        "attn_pdrop": c.dropout,
        "resid_pdrop": c.dropout,
        "initializer_range": c.init_std,
    }


def views(config: DecoderConfig, prefix: str = PREFIX) -> dict[str, View]:
    """Return for each parameter of the decoder where it is stored."""
    c = config
    found = {
        "embedding.weight": whole(f"{prefix}wte.weight", (c.vocab_size, c.width)),
        "position_embedding.weight": whole(f"{prefix}wpe.weight", (c.max_positions, c.width)),
    }
    for i in range(c.layers):
        ours, theirs = f"blocks.{i}", f"{prefix}h.{i}"
        for part, name in enumerate("qkv"):
            found.update(_fused(c, f"{ours}.attention.{name}", f"{theirs}.attn.c_attn", part))
        found[f"{ours}.attention.o.weight"] = transposed(
            f"{theirs}.attn.c_proj.weight", (c.width, c.heads, c.head_dim), 1
        )
        found[f"{ours}.attention.o.bias"] = whole(f"{theirs}.attn.c_proj.bias", (c.width,))
        found[f"{ours}.mlp.up.weight"] = transposed(f"{theirs}.mlp.c_fc.weight", (c.hidden, c.width), 1)
        found[f"{ours}.mlp.up.bias"] = whole(f"{theirs}.mlp.c_fc.bias", (c.hidden,))
        found[f"{ours}.mlp.down.weight"] = transposed(f"{theirs}.mlp.c_proj.weight", (c.width, c.hidden), 1)
        found[f"{ours}.mlp.down.bias"] = whole(f"{theirs}.mlp.c_proj.bias", (c.width,))
        found.update(_norm(c, f"{ours}.norm1", f"{theirs}.ln_1"))
        found.update(_norm(c, f"{ours}.norm2", f"{theirs}.ln_2"))
    found.update(_norm(c, "norm", f"{prefix}ln_f"))
    if not c.tied:
        found["head.weight"] = whole("lm_head.weight", (c.vocab_size, c.width))
    return found


def find_prefix(names: Mapping[str, Any]) -> str:
    """Return what stands before the names in a file."""
    return "" if "wte.weight" in names else PREFIX


def _fused(c: DecoderConfig, ours: str, theirs: str, part: int) -> dict[str, View]:
    """Queries, keys or values in the one matrix of all three."""
    size = c.heads * c.head_dim
    bias = View(f"{theirs}.bias", (3 * size,), (c.heads, c.head_dim), (c.head_dim, 1), part * size)
    return {
        f"{ours}.weight": transposed(f"{theirs}.weight", (c.heads, c.head_dim, c.width), 2, (part, 3)),
        f"{ours}.bias": bias,
    }


def _norm(c: DecoderConfig, ours: str, theirs: str) -> dict[str, View]:
    return {f"{ours}.{kind}": whole(f"{theirs}.{kind}", (c.width,)) for kind in ("weight", "bias")}
