"""Llama, Mistral and Qwen 2 in the format of the Hugging Face libraries: one set of tensors, three configurations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcpar.models.decoder_config import DecoderConfig
from hpcpar.models.pretrained.fields import Fields
from hpcpar.models.pretrained.views import View, whole
from hpcpar.ops.rotary import SCALINGS

MODEL_TYPES = ("llama", "mistral", "qwen2")
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
PREFIX = "model."
BUFFERS = (".rotary_emb.inv_freq",)
"""Ends of the names of what is stored and is no weight."""


def read_config(table: Mapping[str, Any], dropout: float | None) -> DecoderConfig:
    """Return the configuration that ``config.json`` describes."""
    fields = Fields(table)
    kind = table["model_type"]
    fields.choice("hidden_act", {"silu": "swiglu"}, "silu")
    theta, scaling = _rotations(fields)
    width, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    bias = kind == "qwen2" or bool(fields.get("attention_bias", False))
    if dropout is None:
        dropout = float(fields.get("attention_dropout", 0.0))
        if dropout:
            fields.faults.append("attention_dropout is not 0, and a Decoder has one dropout for all: give dropout=")
    return fields.config(
        vocab_size=fields.number("vocab_size"),
        width=width,
        layers=fields.number("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.number("num_key_value_heads", 8 if kind == "mistral" else heads),
        head_dim=fields.number("head_dim", max(width // heads, 1)),
        hidden=fields.number("intermediate_size"),
        norm="rms",
        norm_eps=fields.get("rms_norm_eps", 1e-6),
        positions="rotary",
        max_positions=fields.number("max_position_embeddings", 2048),
        rope_theta=theta,
        rope_scaling=scaling,
        activation="swiglu",
        attention_bias=bias,
        out_bias=bias and kind != "qwen2",
        mlp_bias=bool(fields.get("mlp_bias", False)),
        norm_bias=False,
        tied=bool(fields.get("tie_word_embeddings", False)),
        dropout=dropout,
        window=_window(fields, kind),
        init_std=fields.get("initializer_range", 0.02),
    )


def _rotations(fields: Fields) -> tuple[float, dict[str, Any] | None]:
    """Base and scaling of the rotations: two fields in older files, one with both in newer ones."""
    given = {"rope_theta": fields.get("rope_theta", 10000.0), **fields.get("rope_scaling", {})}
    given.update(fields.get("rope_parameters", {}))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return float(given["rope_theta"]), None
    missing = [name for name in SCALINGS.get(kind, ()) if name not in given]
    if kind not in SCALINGS or missing:
        lacks = f" without {', '.join(missing)}" if missing else ""
        fields.faults.append(f"rotations of type {kind!r}{lacks}; known are default, {', '.join(SCALINGS)}")
        return 10000.0, None
    return float(given["rope_theta"]), {"rope_type": kind, **{name: given[name] for name in SCALINGS[kind]}}


def _window(fields: Fields, kind: str) -> int | None:
    """Sliding attention in all layers, or in none."""
    kinds = set(fields.get("layer_types", ()))
    if len(kinds) > 1:
        fields.faults.append("layer_types mixes sliding and full attention, a Decoder has one kind")
    if kind == "llama" or (kind == "qwen2" and not fields.get("use_sliding_window", False)):
        return None
    return None if kinds == {"full_attention"} else fields.get("sliding_window")


def unlike(config: DecoderConfig) -> list[str]:
    """Return what this family does not have, in words; empty where it can express the configuration."""
    c = config
    wanted = {"norm": "rms", "positions": "rotary", "activation": "swiglu", "norm_bias": False}
    faults = [f"{name}={getattr(c, name)!r}" for name, value in wanted.items() if getattr(c, name) != value]
    biased = (c.attention_bias, c.out_bias, c.mlp_bias)
    if c.window is not None and any(biased):
        faults.append(f"window={c.window} with biases")
    if biased not in ((False, False, False), (True, True, False), (True, False, False), *_MLP_BIASED):
        faults.append(f"attention_bias={c.attention_bias} with out_bias={c.out_bias} and mlp_bias={c.mlp_bias}")
    return faults


_MLP_BIASED = ((False, False, True), (True, True, True))


def kind_of(config: DecoderConfig) -> str:
    """Return the model_type that expresses a configuration."""
    if config.window is not None:
        return "mistral"
    return "qwen2" if config.attention_bias and not config.out_bias else "llama"


def write_config(config: DecoderConfig) -> dict[str, Any]:
    """Return what ``config.json`` holds: the fields of older and newer releases of the libraries."""
    c, kind = config, kind_of(config)
    scaling = None if c.rope_scaling is None else dict(c.rope_scaling)
    table = {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "intermediate_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_theta": c.rope_theta, **(scaling or {"rope_type": "default"})},
        "tie_word_embeddings": c.tied,
        "initializer_range": c.init_std,
    }
    if kind == "llama":
        table.update(attention_bias=c.attention_bias, mlp_bias=c.mlp_bias)
    if kind == "mistral":
        table["sliding_window"] = c.window
    return table


def views(config: DecoderConfig, prefix: str = PREFIX) -> dict[str, View]:
    """Return for each parameter of the decoder where it is stored."""
    c = config
    found = {"embedding.weight": whole(f"{prefix}embed_tokens.weight", (c.vocab_size, c.width))}
    for i in range(c.layers):
        ours, theirs = f"blocks.{i}", f"{prefix}layers.{i}"
        for name, heads in (("q", c.heads), ("k", c.kv_heads), ("v", c.kv_heads)):
            source, size = f"{theirs}.self_attn.{name}_proj", heads * c.head_dim
            found[f"{ours}.attention.{name}.weight"] = whole(
                f"{source}.weight", (heads, c.head_dim, c.width), (size, c.width)
            )
            if c.attention_bias:
                found[f"{ours}.attention.{name}.bias"] = whole(f"{source}.bias", (heads, c.head_dim), (size,))
        joined = (c.width, c.heads * c.head_dim)
        source = f"{theirs}.self_attn.o_proj"
        found[f"{ours}.attention.o.weight"] = whole(f"{source}.weight", (c.width, c.heads, c.head_dim), joined)
        if c.out_bias:
            found[f"{ours}.attention.o.bias"] = whole(f"{source}.bias", (c.width,))
        for name, shape in (("gate", (c.hidden, c.width)), ("up", (c.hidden, c.width)), ("down", (c.width, c.hidden))):
            found[f"{ours}.mlp.{name}.weight"] = whole(f"{theirs}.mlp.{name}_proj.weight", shape)
            if c.mlp_bias:
                found[f"{ours}.mlp.{name}.bias"] = whole(f"{theirs}.mlp.{name}_proj.bias", shape[:1])
        found[f"{ours}.norm1.weight"] = whole(f"{theirs}.input_layernorm.weight", (c.width,))
        found[f"{ours}.norm2.weight"] = whole(f"{theirs}.post_attention_layernorm.weight", (c.width,))
    found["norm.weight"] = whole(f"{prefix}norm.weight", (c.width,))
    if not c.tied:
        found["head.weight"] = whole("lm_head.weight", (c.vocab_size, c.width))
    return found


def find_prefix(names: Mapping[str, Any]) -> str:
    """Return what stands before the names in a file."""
    return "" if "embed_tokens.weight" in names else PREFIX
