"""The layout rule of attention: under which layouts operands are needed, from their layouts alone."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.signature import Signature, signature

NAME = "scaled_dot_product_attention"
Stack = tuple[str, ...]

ACCEPTED = (
    "it takes samples and heads split by any axes, alike in query, key and value, and the tokens of the query and "
    "those of key and value split by the same axes"
)


class KeyHeads:
    """Which of the key heads at hand the query heads at hand use, where keys are less split than queries.

    Attributes
    ----------
    index : tuple of int or None
        The key head of each group of query heads (each head a group of its own where groups are cut); None: all of
        them, as they are.
    """

    __slots__ = ("_shape", "index")

    def __init__(self, query: Signature, key: Signature) -> None:
        per_key = max(query.shape[-3] // max(key.shape[-3], 1), 1)
        first, last = key.box[-3]
        heads = [h // per_key - first for h in range(*query.box[-3])]
        groups = sorted(set(heads))
        even = len({heads.count(g) for g in groups}) <= 1
        index = tuple(groups if even else heads)
        self.index = None if index == tuple(range(last - first)) else index

    def take(self, array: Any) -> Any:
        """Return the heads (N, G', S, E) in use of (N, G, S, E): a view where they follow each other."""
        if self.index is None:
            return array
        if _consecutive(self.index):
            first = self.index[0] if self.index else 0
            return array[:, first : first + len(self.index)]
        return np.concatenate([array[:, g : g + 1] for g in self.index], axis=1)

    def give_back(self, gradient: Any, heads: int) -> Any:
        """Adjoint of `take`: (N, heads, S, E) with zeros where heads are not in use."""
        if self.index is None:
            return gradient
        n, _, length, width = gradient.shape
        whole = np.zeros_like(gradient, shape=(n, length, heads, width), order="C").transpose(0, 2, 1, 3)
        for i, g in enumerate(self.index):
            whole[:, g] += gradient[:, i]
        return whole


def _consecutive(index: Sequence[int]) -> bool:
    return all(b == a + 1 for a, b in zip(index, index[1:], strict=False))


class AttentionLayouts(NamedTuple):
    """Signatures under which the operands are needed, that of the result, and those of the gradients."""

    moves: tuple[Signature, ...]
    grads: tuple[Signature, ...]
    out: Signature
    heads: KeyHeads

    @property
    def lead(self) -> tuple[Stack, ...]:
        """The axes that split the dims before the heads."""
        return self.out.dims[:-3]

    @property
    def split_heads(self) -> Stack:
        """The axes that split the heads of the query."""
        return self.out.dims[-3]

    @property
    def tokens(self) -> Stack:
        """The axes that split the tokens of the query."""
        return self.out.dims[-2]

    @property
    def parts(self) -> int:
        """Into how many blocks the tokens of the query are split."""
        return self.out.parts(len(self.out.shape) - 2)

    @property
    def keys_split(self) -> bool:
        """Whether the tokens of key and value are split, by the same axes."""
        return bool(self.moves[1].dims[-2])


def attention_layouts(sigs: Sequence[Signature], documents: bool, mask: bool) -> AttentionLayouts:
    """Return the layouts of attention of (query, key, value, [documents], [mask]), with any dims before the heads.

    An operand that is replicated where another is split is sliced. Documents are needed whole along the sequence, as
    is a mask of one row; a move to there is made once while nobody changes them.

    Raises
    ------
    LayoutError
        From layouts alone, hence on all ranks and before any message.
    """
    query, key, value = (sig.resolved for sig in sigs[:3])
    at = len(query.shape) - 3  # the dim of the heads; the tokens are next to it
    for what, sig in (("query", query), ("key", key), ("value", value)):
        if sig.dims[-1]:
            cure = sig.layout.replace(at + 2, None)
            raise _error(sigs, f"the last dim of the {what} is split; call .repartition({cure!r}) on it")
    lead = [_agreed(sigs, d, "samples", [query, key, value]) for d in range(at)]
    heads, kept = _heads(sigs, query, key, value)
    tokens = _tokens(sigs, query, key, value)
    samples = [a for stack in lead for a in stack]
    used = [*samples, *heads, *tokens]
    twice = {a for a in used if used.count(a) > 1}
    if twice:
        raise _error(sigs, f"axis {min(twice)!r} splits two dims; repartition one of them")
    keys = tokens if key.dims[-2] or value.dims[-2] else ()
    needed = [query.with_layout(Layout(*lead, heads, tokens))]
    needed += [sig.with_layout(Layout(*lead, kept, keys)) for sig in (key, value)]
    lost = query.mesh.sort([*heads[len(kept) :], *(() if keys else tokens)])
    grads = [needed[0], *[sig.with_partial(lost) for sig in needed[1:]]]
    out = signature(query.mesh, (*query.shape[:-1], value.shape[-1]), Layout(*lead, heads, tokens))
    rest = list(sigs[3:])
    if documents:
        needed.append(_documents(sigs, rest.pop(0).resolved, lead[0], tokens))
        grads.append(needed[-1])
    if mask:
        stacks = (lead[0] if at == 1 else tuple(samples), heads, tokens)
        needed.append(_mask(sigs, rest.pop(0).resolved, stacks))
        gone = [a for stack, split in zip(stacks, needed[-1].dims, strict=False) if not split for a in stack]
        grads.append(needed[-1].with_partial(query.mesh.sort(gone)))
    return AttentionLayouts(tuple(needed), tuple(grads), out, KeyHeads(needed[0], needed[1]))


def _heads(sigs: Sequence[Signature], query: Signature, key: Signature, value: Signature) -> tuple[Stack, Stack]:
    """The axes that split the query's heads, and those of them that split the key's: as long as groups stay whole."""
    own, theirs = query.dims[-3], _agreed(sigs, -3, "heads", [key, value])
    heads = max(own, theirs, key=len)
    if heads[: len(own)] != own or heads[: len(theirs)] != theirs:
        raise _error(sigs, "the heads are split differently; repartition one of the operands")
    h, g, mesh = query.shape[-3], key.shape[-3], query.mesh
    kept = heads
    while kept and h != g and g % prod(mesh.shape[a] for a in kept):
        kept = kept[:-1]
    if len(kept) < len(theirs):
        cure = f"key.repartition({_with(key, -3, kept)!r}) and value.repartition({_with(value, -3, kept)!r})"
        raise _error(
            sigs,
            f"blocks of the {g} heads of the key would not have whole groups of the {h} heads of the query; leave the "
            f"few heads of the key together, where they are sliced as they are needed: {cure}",
        )
    return heads, kept


def _tokens(sigs: Sequence[Signature], query: Signature, key: Signature, value: Signature) -> Stack:
    """The axes that split the query's tokens; the tokens of key and value are split alike, or not at all."""
    own, theirs = query.dims[-2], _agreed(sigs, -2, "tokens", [key, value])
    if theirs and own and own != theirs:
        cure = f"query.repartition({_with(query, -2, theirs)!r}), or let all follow the query"
        raise _error(sigs, f"the tokens are split differently in query and key; call {cure}")
    return own or theirs


def _agreed(sigs: Sequence[Signature], dim: int, what: str, among: Sequence[Signature]) -> Stack:
    """The longest stack of a dim, of which the others must be the beginning."""
    longest = max((sig.dims[dim] for sig in among), key=len)
    for sig in among:
        if sig.dims[dim] != longest[: len(sig.dims[dim])]:
            raise _error(sigs, f"the {what} are split differently; repartition one of the operands")
    return longest


def _documents(sigs: Sequence[Signature], sig: Signature, batch: Stack, sequence: Stack) -> Signature:
    if sig.dims[0] != batch[: len(sig.dims[0])] or sig.dims[1] not in ((), sequence):
        raise _error(sigs, f"documents {sig!r} are split differently; repartition them to {Layout(batch, sequence)!r}")
    return sig.with_layout(Layout(batch))


def _mask(sigs: Sequence[Signature], sig: Signature, stacks: tuple[Stack, Stack, Stack]) -> Signature:
    wanted = [stack if n > 1 else () for stack, n in zip(stacks, sig.shape, strict=False)]
    row = sig.shape[2] == 1 and sig.dims[3] == stacks[2]  # of a mask of one row the parts are few numbers
    fits = all(have == want[: len(have)] for have, want in zip(sig.dims, wanted, strict=False))
    if not fits or (sig.dims[3] and not row):
        raise _error(sigs, f"attn_mask {sig!r} is split differently; repartition it to {Layout(*wanted)!r}")
    return sig.with_layout(Layout(*wanted))


def _with(sig: Signature, dim: int, stack: Stack) -> Layout:
    return sig.layout.replace(dim % len(sig.shape), stack)


def _error(sigs: Sequence[Signature], why: str) -> LayoutError:
    shown = ", ".join(f"{what} {sig!r}" for what, sig in zip(("query", "key", "value"), sigs, strict=False))
    return LayoutError(f"{NAME} of {shown}: {why} ({ACCEPTED})")
