"""Arrays without storage: what they say of themselves is what NumPy's arrays say after the same operations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hpcpar import kernels
from hpcpar.kernels import outline
from hpcpar.kernels.outline import arrays, rules
from hpcpar.kernels.registry import OPERATIONS

pytestmark = pytest.mark.serial


def twin(a: np.ndarray) -> outline.Outline:
    """An outline with the shape, dtype and memory order of an array."""
    return outline.empty_as(a)


def assert_alike(mine: Any, theirs: Any) -> None:
    assert mine.shape == theirs.shape
    assert mine.dtype == theirs.dtype
    for n, s, t in zip(theirs.shape, mine.strides, theirs.strides, strict=True):
        assert n <= 1 or theirs.size == 0 or s == t, f"strides {mine.strides}, NumPy has {theirs.strides}"


def channels_last(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    a = np.moveaxis(np.empty((shape[0], *shape[2:], shape[1]), dtype), -1, 1)
    a[...] = rng.standard_normal(shape)
    return a


def test_reshape_is_a_view_exactly_where_numpy_makes_one() -> None:
    rng = np.random.default_rng(0)
    views = copies = 0
    for _ in range(2000):
        shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 5)))
        a = np.zeros(shape).transpose(rng.permutation(len(shape)))
        a = a[tuple(slice(None, None, int(s)) for s in rng.integers(1, 3, a.ndim))]
        factors, rest = [1] * int(rng.integers(0, 2)), a.size
        for q in (2, 3, 2, 4, 3):
            if rest % q == 0 and rng.random() < 0.6:
                factors.append(q)
                rest //= q
        factors.append(rest)
        rng.shuffle(factors)
        theirs, mine = a.reshape(factors), arrays.viewed(a, factors)
        assert (mine is not None) == np.shares_memory(theirs, a)
        if mine is None:
            copies += 1
        else:
            views += 1
            assert_alike(mine, theirs)
    assert views > 500 and copies > 50


CALLS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda a: a[1:, :, ::2],
    "number": lambda a: a[0, :, 1],
    "new dim": lambda a: a[None, :, 0],
    "ellipsis": lambda a: a[..., 1:],
    "one element": lambda a: a[0, 0, 0, 0],
    "transpose": lambda a: a.transpose(1, 0, 3, 2),
    "moveaxis": lambda a: np.moveaxis(a, 1, -1),
    "expand_dims": lambda a: np.expand_dims(a, 1),
    "broadcast_to": lambda a: np.broadcast_to(a[:, :1], a.shape),
    "reshape copy": lambda a: a.reshape(a.shape[0], -1),
    "reshape view": lambda a: np.moveaxis(a, 1, -1).reshape(-1, a.shape[1]),
    "astype": lambda a: a.astype(np.float64),
    "copy": lambda a: a.copy(),
    "copy in order": lambda a: a.copy(order="K"),
    "add": lambda a: a + a[:, :1],
    "scale": lambda a: 2 * a - 1.0,
    "compare": lambda a: a > 0,
    "and": lambda a: (a > 0) & (a < 1),
    "where": lambda a: np.where(a > 0, a, np.float32(0)),
    "exp": lambda a: np.exp(a),
    "in place": lambda a: a.__imul__(np.float32(2)),
    "sum": lambda a: a.sum(axis=(0, 2), keepdims=True),
    "sum of all": lambda a: a.sum(dtype=np.float64),
    "mean": lambda a: a.mean(axis=1),
    "max": lambda a: a.max(axis=-1),
    "any": lambda a: (a > 0).any(axis=0),
    "argmax": lambda a: a.argmax(axis=1),
    "concatenate": lambda a: np.concatenate([a, a[:, :1]], axis=1),
    "stack": lambda a: np.stack([a, a]),
    "matmul": lambda a: np.matmul(a.reshape(a.shape[0], -1), np.ones((a[0].size, 5), a.dtype)),
    "dot": lambda a: a.reshape(a.shape[0], -1).dot(np.ones((a[0].size, 5), a.dtype)),
    "einsum": lambda a: np.einsum("nc...,c->n...", a, np.ones(a.shape[1], a.dtype)),
    "zeros_like": lambda a: np.zeros_like(a),
    "ones_like in another dtype": lambda a: np.ones_like(a, dtype=np.int64),
    "take": lambda a: np.take(np.ones(7), (a > 0).astype(np.int64)),
    "repeat": lambda a: np.repeat(a, 3, axis=1),
}


@pytest.mark.parametrize("name", CALLS)
def test_operations_give_the_shape_dtype_and_memory_order_that_numpy_gives(name: str) -> None:
    rng = np.random.default_rng(1)
    for shape in ((2, 3, 4, 5), (3, 4, 2, 3)):
        a = channels_last(rng, *shape)
        assert_alike(CALLS[name](twin(a)), CALLS[name](a))


def test_a_ledger_counts_what_is_held_and_the_most_there_was() -> None:
    with outline.keeping() as ledger:
        a = outline.empty((1000, 1000), np.float32)
        part, turned = a[10:20], a.T
        assert ledger.live == 4_000_000
        b = a * 2
        b += 1
        assert ledger.live == ledger.peak == 8_000_000
        del a, b
        assert ledger.live == 4_000_000, "views keep the storage"
        del part, turned
        assert (ledger.live, ledger.peak) == (0, 8_000_000)


def test_values_are_zero_and_asking_for_many_is_an_error() -> None:
    a = outline.empty((100, 100))
    assert float(a.sum()) == 0 and not a.any() and a[a > 0].shape == (0,)
    with pytest.raises(arrays.NotKnown, match="has no values"):
        np.asarray(a)
    with pytest.raises(arrays.NotKnown, match="np.linalg.norm|np.norm"):
        np.linalg.norm(a)
    with pytest.raises(ValueError, match="broadcast"):
        a[:, :3] = outline.empty((100, 4))


@pytest.mark.parametrize("name", [n for n in OPERATIONS if hasattr(rules, n) and rules.__dict__[n] is not rules._alike])
def test_rules_take_the_arguments_of_the_reference(name: str) -> None:
    rule, reference = rules.__dict__[name], OPERATIONS[name][1]
    if rule is rules._nothing:
        assert inspect.signature(reference).return_annotation in ("None", None)
        return
    mine, theirs = (list(inspect.signature(f).parameters.values()) for f in (rule, reference))
    assert [(p.name, p.default) for p in mine] == [(p.name, p.default) for p in theirs]


def cases() -> dict[str, tuple]:
    rng = np.random.default_rng(2)
    x, w = channels_last(rng, 2, 4, 6, 5, 7), rng.standard_normal((3, 3, 3, 4, 8)).astype(np.float32)
    w = w.transpose(4, 3, 0, 1, 2)
    geometry = ((2, 1, 1), ((1, 1),) * 3, (1, 1, 1))
    y = kernels.conv_forward(x, w, None, *geometry)
    target = rng.integers(0, 4, (2, 6, 5, 7))
    line = np.zeros((2, 6, 5, 7), np.float32)
    pooled = kernels.max_pool_forward(x, (2, 2, 2), (2, 2, 2), (1, 1, 1))
    mean, inv = np.zeros(4), np.ones(4)
    divisors = [np.full(n, 2.0) for n in (3, 2, 3)]
    windows = ((2, 2, 2), (2, 2, 2), (0, 0, 0), divisors)
    heads, bias, regions = rng.standard_normal((6, 2, 4, 3)), rng.standard_normal((2, 4, 4)), np.zeros((3, 4), np.int8)
    return {
        "conv_forward": (x, w, None, *geometry),
        "conv_backward_data": (y, w, x.shape, *geometry),
        "conv_backward_weight": (x, y, w.shape, *geometry),
        "max_pool_forward": (x, (2, 2, 2), (2, 2, 2), (1, 1, 1)),
        "max_pool_backward": (pooled[0], pooled[1], x.shape),
        "avg_pool_forward": (x, *windows),
        "avg_pool_backward": (pooled[0], x.shape, *windows),
        "sum_pool_forward": (x, (2, 2, 2), (2, 2, 2)),
        "sum_pool_backward": (pooled[0], x.shape, (2, 2, 2), (2, 2, 2)),
        "sample_moments": (x,),
        "channel_moments": (x,),
        "group_moments": (x, 2),
        "channel_sums": (x,),
        "channel_normalize": (x, mean, inv, None, None, 0.1),
        "channel_grad_sums": (x, x, mean, inv),
        "channel_grad_input": (x, x, mean, inv, None, mean, mean),
        "leaky_relu": (x, 0.1),
        "leaky_relu_backward": (x, x, 0.1),
        "gelu": (x,),
        "apply_mask": (x, x > 0, 2.0),
        "softmax": (x, 1),
        "log_softmax_backward": (x, x, 1),
        "cross_entropy_forward": (x, target),
        "cross_entropy_backward": (x, target, line, line, line),
        "take_rows": (rng.standard_normal((7, 3)), target),
        "add_rows": (rng.standard_normal((*target.shape, 3)), target, 7),
        "window_attention_forward": (*[heads] * 3, 0.5, bias, regions),
        "window_attention_backward": (*[heads] * 5, heads[..., 0], 0.5, bias, regions),
    }


@pytest.mark.parametrize("name", cases())
def test_rules_return_what_the_reference_returns(name: str) -> None:
    args = cases()[name]
    with kernels.use(all="numpy"):
        theirs = getattr(kernels, name)(*args)
    mine = getattr(kernels, name)(*[twin(a) if isinstance(a, np.ndarray) and a.ndim > 1 else a for a in args])
    pairs = zip(mine, theirs, strict=True) if isinstance(theirs, tuple) else [(mine, theirs)]
    for m, t in pairs:
        assert m.shape == t.shape and m.dtype == t.dtype
        if isinstance(m, outline.Outline) and t.ndim == 5 and kernels.is_channels_last(t):
            assert kernels.is_channels_last(m)


def test_random_numbers_are_drawn_without_storage() -> None:
    like = outline.empty((1,))
    with outline.keeping() as ledger:
        u = kernels.random_uniform(0, 1, (64, 64, 64, 64), ((0, 64), (0, 64), (0, 64), (0, 32)), like=like)
        assert u.shape == (64, 64, 64, 32) and ledger.live == u.nbytes == 64**3 * 32 * 8
        mask = kernels.dropout_mask(0, 1, (8, 9), None, 0.5, like=like)
        assert mask.dtype == bool and mask.shape == (8, 9)
