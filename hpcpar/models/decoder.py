"""Decoder: one transformer for texts, of the GPT-2 (Radford et al. 2019) and Llama (Touvron et al. 2023) families."""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

from hpcpar import functional as F
from hpcpar import nn
from hpcpar.creation import tensor
from hpcpar.layout.layout import Layout
from hpcpar.layout.sequence import zigzag
from hpcpar.mesh import Mesh
from hpcpar.models.attention import Attention, Initializer
from hpcpar.models.cache import Cache, LayerCache
from hpcpar.models.decoder_config import DecoderConfig
from hpcpar.models.decoder_plan import decoder_placements
from hpcpar.models.placement import Spread
from hpcpar.nn import init
from hpcpar.ops.attention import ORDERS
from hpcpar.parallel.plan import Entry
from hpcpar.tensors import Tensor


class MLP(nn.Module):
    """The hidden layer of a block: up, activation (times a gate in the gated variants), and down again."""

    def __init__(self, config: DecoderConfig, weights: Initializer, residual_weights: Initializer) -> None:
        super().__init__()
        c = config
        self.activation = c.activation
        self.gate = _linear(c.width, c.hidden, c.mlp_bias, weights) if c.gated else None
        self.up = _linear(c.width, c.hidden, c.mlp_bias, weights)
        self.down = _linear(c.hidden, c.width, c.mlp_bias, residual_weights)

    def forward(self, x: Tensor) -> Tensor:
        kind = self.activation
        if kind == "swiglu":
            return self.down(F.swiglu(self.gate(x), self.up(x)))
        if kind == "geglu":
            return self.down(F.gelu(self.gate(x), "tanh") * self.up(x))
        y = self.up(x)
        if kind in ("gelu", "gelu_tanh"):
            return self.down(F.gelu(y, "tanh" if kind == "gelu_tanh" else "none"))
        return self.down(F.relu(y) if kind == "relu" else F.silu(y))

    def extra_repr(self) -> str:
        return self.activation


class Block(nn.Module):
    """Norm and attention, norm and hidden layer, each added to the stream."""

    def __init__(self, config: DecoderConfig, weights: Initializer, residual_weights: Initializer) -> None:
        super().__init__()
        self.norm1 = _norm(config)
        self.attention = Attention(config, weights, residual_weights)
        self.norm2 = _norm(config)
        self.mlp = MLP(config, weights, residual_weights)
        self.drop = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, positions: Tensor, documents: Tensor | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x), positions, documents, cache))
        return x + self.drop(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    """A causal transformer: logits of the next token at each token.

    Parameters
    ----------
    config : DecoderConfig

    Attributes
    ----------
    order : {"natural", "zigzag"}
        The order in which the model takes tokens, set by the plan (`Spread.order`). The model never reorders: whoever
        makes the batches brings tokens, documents and targets into `token_order`; positions follow by themselves.
    layout : Layout or None
        Of the tokens (N, S), set by the plan.
    logits : Layout or None
        Of the logits (N, S, V), set by the plan.

    Notes
    -----
    With `gpt` and `llama` as in the families. Weights of the projections onto heads are kept as (heads, head_dim,
    width), so that heads may be split by any number of ranks. `placements` is the plan; docs/transformers.md says what
    each of its options moves.
    """

    option_choices = {"order": ORDERS}

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.order, self.logits = "natural", None
        weights = _normal(config.init_std)
        residual_weights = _normal(config.init_std / sqrt(2 * config.layers))
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        weights(self.embedding.weight)
        if config.tied:
            self.embedding.compute_dtype = "float32"  # of the product with its table, which makes the logits
        learned = config.positions == "learned"
        self.position_embedding = nn.Embedding(config.max_positions, config.width) if learned else None
        if learned:
            weights(self.position_embedding.weight)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, weights, residual_weights) for _ in range(config.layers))
        self.norm = _norm(config)
        self.head = None if config.tied else _linear(config.width, config.vocab_size, False, weights)

    def forward(
        self, tokens: Tensor, positions: Any = None, documents: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Return logits (N, S, vocab_size); their vocabulary is split where the head's is.

        Parameters
        ----------
        tokens : Tensor
            (N, S) integers in the model's `order`; brought to its `layout`.
        positions : Tensor or array, optional
            (S,) or (N, S) positions in the text; 0, 1, 2, ... by default, in the model's order.
        documents : Tensor, optional
            (N, S) integers: tokens see those of their own document alone.
        cache : Cache, optional
            Of earlier calls: their tokens are seen too, and these are added. For generating, without gradients.
        """
        return self.logits_of(self.features(tokens, positions, documents, cache))

    def features(
        self, tokens: Tensor, positions: Any = None, documents: Tensor | None = None, cache: Cache | None = None
    ) -> Tensor:
        """Return the stream (N, S, width) behind the last norm; arguments as of `forward`.

        Raises
        ------
        ValueError
            The tokens are not integers (N, S).
        """
        if tokens.ndim != 2 or tokens.dtype.kind not in "iu":
            raise ValueError(f"a Decoder takes integers (N, S), got {tokens.dtype} of shape {tokens.shape}")
        x = self.embedding(tokens)
        places = self._positions(x if self.position_embedding is not None else tokens, positions, cache)
        if self.position_embedding is not None:
            x = x + self.position_embedding(places)
        x = self.drop(x)
        for i, block in enumerate(self.blocks):
            x = block(x, places, documents, None if cache is None else cache.layers[i])
        return self.norm(x)

    def logits_of(self, x: Tensor) -> Tensor:
        """Return the logits (N, S, vocab_size) of `features`, or of some of their tokens."""
        if self.head is not None:
            return self.head(x)
        dtype = self.embedding.compute_dtype
        return F.linear(x, self.embedding.weight, out=self.logits, compute_dtype=dtype)

    def _positions(self, like: Tensor, positions: Any, cache: Cache | None) -> Tensor:
        """Positions as a tensor, split as the texts and tokens of `like` (N, S, ...) are; replicated for a cache."""
        n, length = like.shape[:2]
        if positions is None:
            self._check_length(length)
            positions = self.token_order(length)
        positions = positions if isinstance(positions, Tensor) else np.asarray(positions)
        if tuple(positions.shape) not in ((length,), (n, length)) or positions.dtype.kind not in "iu":
            raise ValueError(
                f"positions of {n} texts of {length} tokens are integers ({length},) or ({n}, {length}), got "
                f"{positions.dtype} of shape {tuple(positions.shape)}"
            )
        layout = Layout() if cache is not None else Layout(*like.sig.dims[2 - positions.ndim : 2])
        if isinstance(positions, Tensor):
            return positions.repartition(layout)
        return tensor(positions.astype(np.int64), mesh=like.mesh, layout=layout)

    def _check_length(self, length: int) -> None:
        if self.position_embedding is not None and length > self.config.max_positions:
            raise ValueError(f"the model has learned {self.config.max_positions} positions, a text has {length} tokens")

    def token_order(self, length: int) -> np.ndarray:
        """Return which of the `length` tokens of a text lies at each place.

        Batches for the model hold ``tokens[:, order]`` and ``targets[:, order]``; the mean loss is the same.
        """
        if self.order == "natural":
            return np.arange(length)
        return zigzag(length, self.embedding.weight.mesh.length(*self.layout.entry(1)))

    def placements(self, mesh: Mesh, spread: Spread) -> dict[str, Entry]:
        """Return the plan; see `hpcpar.models.decoder_plan`."""
        return decoder_placements(self.config, mesh, spread)

    def extra_repr(self) -> str:
        return f"{self.config.layers} layers, order={self.order!r}"


def gpt(vocab_size: int = 50257, width: int = 768, layers: int = 12, heads: int = 12, **options: Any) -> Decoder:
    """Return a decoder of the GPT-2 family; the defaults are its smallest member.

    Parameters
    ----------
    **options
        Further fields of `DecoderConfig`.
    """
    return Decoder(DecoderConfig(vocab_size, width, layers, heads, **options))


def llama(
    vocab_size: int = 128256, width: int = 4096, layers: int = 32, heads: int = 32, kv_heads: int = 8, **options: Any
) -> Decoder:
    """Return a decoder of the Llama family; the defaults are those of Llama 3 with 8 billion parameters.

    Parameters
    ----------
    **options
        Further fields of `DecoderConfig`.
    """
    family = {
        "hidden": 7 * width // 2, "norm": "rms", "positions": "rotary", "max_positions": 8192, "rope_theta": 500000.0,
        "activation": "swiglu", "attention_bias": False, "out_bias": False, "mlp_bias": False, "norm_bias": False,
        "tied": False,
    }  # fmt: skip
    return Decoder(DecoderConfig(vocab_size, width, layers, heads, kv_heads, **{**family, **options}))


def _normal(std: float) -> Initializer:
    return lambda weight: init.normal_(weight, 0.0, std)


def _linear(inputs: int, outputs: int, bias: bool, weights: Initializer) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias)
    weights(layer.weight)
    if bias:
        init.zeros_(layer.bias)
    return layer


def _norm(config: DecoderConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.width, config.norm_eps)
    return nn.LayerNorm(config.width, config.norm_eps, bias=config.norm_bias)
