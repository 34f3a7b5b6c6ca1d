"""What distinguishes one decoder of the GPT-2 and Llama families from another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

NORMS = ("layer", "rms")
POSITIONS = ("learned", "rotary")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "geglu", "swiglu")
"""Of the hidden layer; the last two multiply gelu or silu of a second projection, the gate."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and variants of a decoder.

    Attributes
    ----------
    vocab_size, width, layers, heads : int
        Tokens, width of the residual stream, blocks, heads of the queries.
    kv_heads : int, optional
        Heads of keys and values, a divisor of `heads`, each shared by a group of query heads (Ainslie et al. 2023);
        `heads` by default.
    head_dim : int, optional
        Depth of a head; ``width // heads`` by default.
    hidden : int, optional
        Width of the hidden layer; ``4 * width`` by default.
    norm : {"layer", "rms"}
        Before each half of a block, and before the head.
    norm_eps : float
    positions : {"learned", "rotary"}
        An embedding that is added to that of the tokens, or rotations of queries and keys (Su et al. 2021).
    max_positions : int
        Rows of the learned embedding; the context that rotary positions were trained for.
    rope_theta : float
    rope_scaling : mapping, optional
        ``{"rope_type": "llama3", ...}``; see `hpcpar.ops.rotary.frequencies`.
    activation : str
        One of `ACTIVATIONS`.
    attention_bias, out_bias, mlp_bias, norm_bias : bool
        Biases of queries, keys and values; of what the heads are joined by; of the hidden layer; of layer norms.
    tied : bool
        The head is the embedding of the tokens.
    dropout : float
        Probability of zero: of embeddings, attention weights, and what each half of a block adds.
    window : int, optional
        How many tokens a query sees, itself included; all before it by default.
    init_std : float
        Standard deviation of initial weights; of the two projections onto the residual stream in each block it is
        divided by ``sqrt(2 * layers)`` (Radford et al. 2019).
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    norm: str = "layer"
    norm_eps: float = 1e-5
    positions: str = "learned"
    max_positions: int = 1024
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    activation: str = "gelu_tanh"
    attention_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    tied: bool = True
    dropout: float = 0.0
    window: int | None = None
    init_std: float = 0.02

    def __post_init__(self) -> None:
        uneven = self.head_dim is None and self.heads > 0 and self.width % self.heads
        derived = {"kv_heads": self.heads, "head_dim": self.width // max(self.heads, 1), "hidden": 4 * self.width}
        for name, value in derived.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        faults = [*self._wrong_choices(), *self._wrong_sizes()]
        if uneven:
            faults.append(f"width {self.width} does not divide into {self.heads} heads; give head_dim")
        if faults:
            raise ValueError(f"DecoderConfig: {'; '.join(faults)}")

    def _wrong_choices(self) -> list[str]:
        choices = {"norm": NORMS, "positions": POSITIONS, "activation": ACTIVATIONS}
        return [
            f"{name} is one of {', '.join(known)}, got {getattr(self, name)!r}"
            for name, known in choices.items()
            if getattr(self, name) not in known
        ]

    def _wrong_sizes(self) -> list[str]:
        names = ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "hidden", "max_positions")
        faults = [f"{n} is at least 1, got {getattr(self, n)!r}" for n in names if getattr(self, n) < 1]
        if not faults and self.heads % self.kv_heads:
            faults.append(f"{self.heads} heads cannot share {self.kv_heads} heads of keys and values evenly")
        if self.positions == "rotary" and self.head_dim % 2:
            faults.append(f"rotary positions turn pairs of numbers, head_dim is {self.head_dim}")
        if not 0 <= self.dropout < 1:
            faults.append(f"dropout is a probability below 1, got {self.dropout}")
        if self.window is not None and self.window < 1:
            faults.append(f"window is at least 1, got {self.window}")
        return faults

    @property
    def gated(self) -> bool:
        """Whether the hidden layer has a gate."""
        return self.activation in ("geglu", "swiglu")

    def differences(self, other: DecoderConfig) -> list[str]:
        """Return the names of what differs."""
        return [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]
