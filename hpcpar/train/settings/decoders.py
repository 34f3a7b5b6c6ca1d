"""[model]: decoders, for [data] with format = "tokens"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from hpcpar.train.settings.layout import TEXTS, TRANSFORMER
from hpcpar.train.typed import number


@dataclass(frozen=True)
class _Decoder:
    layout_keys: ClassVar[tuple[str, ...]] = (*TEXTS, *TRANSFORMER)

    vocabulary: int | None = number(None, least=1)  # at least as many tokens as the data have, which is the default
    width: int = number(256, least=1)  # of the residual stream
    layers: int = number(4, least=1)
    heads: int = number(4, least=1)
    kv_heads: int | None = number(None, least=1)  # heads of keys and values, shared by groups of queries; heads
    hidden: int | None = number(None, least=1)
    window: int | None = number(None, least=1)  # tokens that one sees, itself included; all before it
    dropout: float = number(0.0, least=0.0, most=0.999)


@dataclass(frozen=True)
class GPT(_Decoder):
    """[model] name = "gpt": layer norm, learned positions, GELU, biases; the head is the embedding."""

    name: Literal["gpt"] = "gpt"
    positions: Literal["learned", "rotary"] = "learned"
    max_positions: int | None = number(None, least=1)  # that are learned; data.sequence
    tied: bool = True


@dataclass(frozen=True)
class Llama(_Decoder):
    """[model] name = "llama": RMS norm, rotary positions, SwiGLU, no biases."""

    name: Literal["llama"] = "llama"
    rope_theta: float = number(500000.0, least=1.0)
    tied: bool = False
