"""A transformer of space and time: attention along the places of each frame, then along the frames of each place.

Two dims carry a sequence here, and each stage attends along one of them alone. Dynamic sequence parallelism (Zhao et
al. 2024, arXiv:2403.10266) splits the other one: no stage needs a message inside, and one all-to-all between two stages
moves the split. `placements` has this as ``context="switch"``; the other schemes keep the split of the places and serve
the attention along them as `hpcpar.ops.context` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

from hpcpar import functional as F
from hpcpar import nn
from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh
from hpcpar.models.attention import FromHeads, Initializer, ToHeads
from hpcpar.models.placement import SCHEMES, Axes, Spread
from hpcpar.nn import init
from hpcpar.ops.context import CONTEXTS
from hpcpar.parallel import Column, Placement, Row
from hpcpar.parallel.plan import Entry
from hpcpar.tensors import Tensor

SPACE, TIME = ((0, 1, 3, 2, 4), "nthse,che->ntsc"), ((0, 2, 3, 1, 4), "nshte,che->ntsc")
"""From (N, T, S, H, E) to where the dim along which is attended stands before the last, and from there back."""


@dataclass(frozen=True)
class SpaceTimeConfig:
    """Sizes of a transformer of space and time.

    Attributes
    ----------
    channels, outputs : int
        Features of a token that go in and that come out.
    frames, places : int
        Tokens along time and along space.
    width, layers, heads : int
        Of the stream, of the network, of each attention; heads divide the width.
    hidden : int, optional
        Width of the hidden layer; ``4 * width`` by default.
    causal : bool
        A frame sees itself and those before.
    dropout : float
        Of the weights of attention, and of what each part adds to the stream.
    init_std : float
        Standard deviation of initial weights; of those onto the stream it is divided by ``sqrt(3 * layers)``.
    """

    channels: int
    outputs: int
    frames: int
    places: int
    width: int = 256
    layers: int = 6
    heads: int = 8
    hidden: int | None = None
    causal: bool = False
    dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"SpaceTimeConfig: {self.heads} heads do not divide the width {self.width}")
        if self.hidden is None:
            object.__setattr__(self, "hidden", 4 * self.width)


class Attention(nn.Module):
    """Self-attention of (N, T, S, C) along one of its two dims of tokens.

    Attributes
    ----------
    context : str
        How a split of the dim is served; see `functional.scaled_dot_product_attention`.
    compute_dtype : {"float32", "bfloat16", "float16"}
        In which queries, keys, weights and values are multiplied; see `nn.set_compute_dtype`.
    """

    compute_dtype = "float32"
    option_choices = {"context": CONTEXTS}

    def __init__(self, config: SpaceTimeConfig, along: tuple[tuple[int, ...], str], causal: bool) -> None:
        super().__init__()
        heads, depth, width = config.heads, config.width // config.heads, config.width
        std, onto_std = _stds(config)
        for name in "qkv":
            self.add_module(name, _Onto(along[0], heads, depth, width, True, _normal(std)))
        self.o = _Back(along[1], heads, depth, width, True, _normal(onto_std))
        self.dropout, self.causal, self.context = config.dropout, causal, "auto"

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(
            self.q(x), self.k(x), self.v(x),
            dropout_p=self.dropout if self.training else 0.0, is_causal=self.causal, context=self.context,
            compute_dtype=self.compute_dtype,
        )  # fmt: skip
        return self.o(mixed)

    def extra_repr(self) -> str:
        return f"causal={self.causal}, context={self.context!r}"


class _Onto(ToHeads):
    """Onto heads, which then stand in an order of their own."""

    def __init__(self, order: tuple[int, ...], *args: Any) -> None:
        super().__init__(*args)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        y = F.einsum("ntsc,hec->ntshe", x, self.weight, compute_dtype=self.compute_dtype)
        return F.permute(y + self.bias, self.order)


class _Back(FromHeads):
    """From heads onto the stream, by an equation."""

    def __init__(self, equation: str, *args: Any) -> None:
        super().__init__(*args)
        self.equation = equation

    def forward(self, x: Tensor) -> Tensor:
        return F.einsum(self.equation, x, self.weight, out=self.out, compute_dtype=self.compute_dtype) + self.bias


class SpaceStage(nn.Module):
    """Attention along the places of each frame, added to the stream (N, C, T, S).

    The stream is named channels first and lies channels last, as volumes do, so that moves between layouts keep it so.
    """

    def __init__(self, config: SpaceTimeConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.attention = Attention(config, SPACE, causal=False)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = _last(x)
        return _first(x + self.drop(self.attention(self.norm(x))))


class TimeStage(nn.Module):
    """Attention along the frames of each place, and a hidden layer, added to the stream (N, C, T, S)."""

    def __init__(self, config: SpaceTimeConfig) -> None:
        super().__init__()
        std, onto_std = _stds(config)
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config, TIME, config.causal)
        self.up = _linear(config.width, config.hidden, std)
        self.down = _linear(config.hidden, config.width, onto_std)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = _last(x)
        x = x + self.drop(self.attention(self.norm1(x)))
        return _first(x + self.drop(self.down(F.gelu(self.up(self.norm2(x))))))


class Block(nn.Module):
    """A stage along space and one along time."""

    def __init__(self, config: SpaceTimeConfig) -> None:
        super().__init__()
        self.space, self.time = SpaceStage(config), TimeStage(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.time(self.space(x))


class Head(nn.Module):
    """From the stream (N, C, T, S) to (N, T, S, outputs)."""

    def __init__(self, config: SpaceTimeConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.linear = _linear(config.width, config.outputs, config.init_std)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(_last(x)))


class SpaceTime(nn.Module):
    """A transformer of space and time (the encoder of Bertasius et al. 2021, divided attention).

    Parameters
    ----------
    config : SpaceTimeConfig

    Notes
    -----
    Input (N, T, S, channels), of at most `frames` frames T and `places` places S; output (N, T, S, outputs). Learned
    positions in time and space are added to the tokens.
    """

    contexts = SCHEMES

    def __init__(self, config: SpaceTimeConfig) -> None:
        super().__init__()
        self.config = config
        positions = _normal(config.init_std)
        self.embedding = _linear(config.channels, config.width, config.init_std)
        self.time_positions = init.parameter((config.frames, 1, config.width), positions)
        self.space_positions = init.parameter((config.places, config.width), positions)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, T, S, outputs) from tokens (N, T, S, channels).

        Raises
        ------
        ValueError
            x has another shape than the network takes.
        """
        c = self.config
        if x.ndim != 4 or x.shape[3] != c.channels or x.shape[1] > c.frames or x.shape[2] > c.places:
            raise ValueError(f"SpaceTime takes (N, <= {c.frames}, <= {c.places}, {c.channels}), got {x.shape}")
        x = _first(self.embedding(x) + self.time_positions[: x.shape[1]] + self.space_positions[: x.shape[2]])
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def placements(self, mesh: Mesh, spread: Spread) -> dict[str, Entry]:
        """Return the plan; ``spread.sequence`` splits tokens as ``spread.context`` says.

        ``"switch"`` (and ``"auto"``): frames are split while places attend, and places while frames attend. With M the
        elements of the stream and N parts a rank sends M/N (N-1)/N twice a block, forward and again backward, in one
        all-to-all each; heads need not divide and no lengths need be padded. ``"ring"``, ``"all_to_all"``,
        ``"gather"``: places stay split, and attention along them is served so.

        Input and output are split by frames for the first, by places for the others. ``spread.channels`` splits heads
        and hidden layers.
        """
        scheme = "switch" if spread.context == "auto" else spread.context
        switched = scheme == "switch"
        frames, places = (spread.sequence, ()) if switched else ((), spread.sequence)
        plan: dict[str, Entry] = {"": Placement(input=Layout(spread.batch, frames, places))}
        if switched:
            by_frames, by_places = Layout(spread.batch, None, frames), Layout(spread.batch, None, None, frames)
            plan["blocks.*.space"] = plan["head"] = Placement(input=by_frames)
            plan["blocks.*.time"] = Placement(input=by_places)
        else:
            plan["blocks.*.space.attention"] = Placement(options={"context": scheme})
        split = tuple(a for a in spread.channels if mesh.shape[a] > 1)
        if split:
            in_time = Layout(spread.batch, None, spread.sequence)
            in_space = Layout(spread.batch, frames, places)
            plan |= _split_heads("space", split, in_space) | _split_heads("time", split, in_time)
            plan["blocks.*.time.up"], plan["blocks.*.time.down"] = Column(split), Row(split, out=in_time)
        return plan


def _split_heads(stage: str, split: Axes, stream: Layout) -> dict[str, Entry]:
    path = f"blocks.*.{stage}.attention."
    return {f"{path}[qkv]": Column(split), f"{path}o": Row(split, out=stream)}


def _first(x: Tensor) -> Tensor:
    """(N, T, S, C) as (N, C, T, S): a view."""
    return F.permute(x, (0, 3, 1, 2))


def _last(x: Tensor) -> Tensor:
    """(N, C, T, S) as (N, T, S, C): a view."""
    return F.permute(x, (0, 2, 3, 1))


def _stds(config: SpaceTimeConfig) -> tuple[float, float]:
    return config.init_std, config.init_std / sqrt(3 * config.layers)


def _normal(std: float) -> Initializer:
    return lambda weight: init.normal_(weight, 0.0, std)


def _linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    init.normal_(layer.weight, 0.0, std)
    init.zeros_(layer.bias)
    return layer
