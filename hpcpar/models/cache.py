"""Keys and values of the tokens so far, so that a further token costs one row of attention and no more."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcpar import functional as F
from hpcpar.creation import from_shard
from hpcpar.kernels import array_module
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.tensors import Tensor


class LayerCache:
    """Keys and values of one block: (N, G, capacity, E), of which this rank holds its samples and heads.

    The key of the token at position i of a text lies in slot i. Slots beyond the last token may hold anything: no query
    sees a slot after its own position.

    Parameters
    ----------
    capacity : int
        Tokens for which there is room.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: Any = None  # (n, capacity, g, E): a token's heads lie together
        self.values: Any = None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        window: tuple[int, int] | None,
        compute_dtype: str = "float32",
    ) -> Tensor:
        """Put new keys and values in, and return attention of the new queries over all that they may see.

        Parameters
        ----------
        query, key, value : Tensor
            (N, H, S, E), (N, G, S, E) and (N, G, S, E): of S new tokens of each text, not split along S.
        positions : Tensor
            Replicated (S,) or (N, S).
        window : (int, int), optional
        compute_dtype : {"float32", "bfloat16", "float16"}
            As of `functional.scaled_dot_product_attention`.

        Raises
        ------
        LayoutError
            The tokens are split.
        ValueError
            There is no room.
        """
        if key.sig.dims[2]:
            raise LayoutError(
                f"a cache holds whole sequences, and keys lie as {key.layout!r}: place the model with no axis for the "
                "sequence"
            )
        n, length = key.shape[0], key.shape[2]
        where = np.broadcast_to(_whole(positions), (n, length))
        first, top = int(where.min(initial=0)), int(where.max(initial=-1)) + 1
        if top > self.capacity or first < 0:
            raise ValueError(f"the cache has {self.capacity} slots, positions go from {first} to {top - 1}")
        self._put(key.shard, value.shard, where[slice(*key.sig.box[0])])
        keys, values = (self._seen(buffer, top, key) for buffer in (self.keys, self.values))
        mask = _mask(key, where, top, window)
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, enable_gqa=grouped, compute_dtype=compute_dtype
        )

    def _put(self, key: Any, value: Any, where: np.ndarray) -> None:
        if self.keys is None:
            n, heads, _, _ = key.shape
            make = array_module(key).zeros
            self.keys = make((n, self.capacity, heads, key.shape[3]), key.dtype)
            self.values = make((n, self.capacity, heads, value.shape[3]), value.dtype)
        rows = np.arange(where.shape[0])[:, None]
        self.keys[rows, where] = key.transpose(0, 2, 1, 3)
        self.values[rows, where] = value.transpose(0, 2, 1, 3)

    @staticmethod
    def _seen(buffer: Any, top: int, like: Tensor) -> Tensor:
        part = buffer[:, :top].transpose(0, 2, 1, 3)
        return from_shard(part, (*like.shape[:2], top, part.shape[3]), like.mesh, like.layout)


def _mask(key: Tensor, where: np.ndarray, top: int, window: tuple[int, int] | None) -> Tensor:
    """Which of `top` slots queries at the positions `where` see: bool (N, 1, S, top), split like the texts."""
    n, length = where.shape
    batch = key.sig.dims[0] if n != 1 else ()  # a dim of length 1 is one that is broadcast, and carries no axis
    mine = (where[slice(*key.sig.box[0])] if batch else where)[:, None, :, None]
    slots = np.arange(top)
    visible = slots <= mine
    if window is not None:
        visible &= slots >= mine - window[0]
    return from_shard(array_module(key.shard).asarray(visible), (n, 1, length, top), key.mesh, Layout(batch))


class Cache:
    """One `LayerCache` for each block of a decoder; given to its forward pass, call after call.

    Parameters
    ----------
    layers : int
        Blocks of the decoder.
    capacity : int
        Tokens of a text for which there is room.

    Examples
    --------
    >>> cache = Cache(model.config.layers, capacity=64)
    >>> logits = model(prompt, cache=cache)                       # positions 0 to 9
    >>> logits = model(token, positions=np.array([10]), cache=cache)
    """

    def __init__(self, layers: int, capacity: int) -> None:
        self.layers = [LayerCache(capacity) for _ in range(layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's share."""
        return sum(a.nbytes for layer in self.layers for a in (layer.keys, layer.values) if a is not None)


def _whole(positions: Tensor) -> np.ndarray:
    from hpcpar.transport.device import to_host

    if positions.sig.split_axes:
        raise LayoutError(f"with a cache positions are replicated, got {positions.layout!r}")
    return to_host(positions.shard)
