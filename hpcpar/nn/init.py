"""Initial values, drawn by global index: the same weights under every layout and on every number of ranks.

Every function fills a tensor in place and returns it. Each draw takes the next stream of `hpcpar.random`, so all ranks
must initialise the same tensors in the same order; a rank computes its own block alone. Fans are those of the global
shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod, sqrt
from typing import Any

import numpy as np

from hpcpar import kernels, random
from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh, current_mesh
from hpcpar.nn.defaults import get_default_dtype
from hpcpar.signature import signature
from hpcpar.tensors import Parameter, Tensor

Initializer = Callable[[Tensor], Any]

_skipping = False


@contextmanager
def skipped() -> Iterator[None]:
    """Leave new parameters as the memory has them, inside the block: they will be loaded.

    Memory that nobody writes to is not there: a rank then needs only the blocks that it is given later.
    """
    global _skipping
    before, _skipping = _skipping, True
    try:
        yield
    finally:
        _skipping = before


def parameter(
    shape: Sequence[int],
    initializer: Initializer,
    *,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    dtype: Any = None,
    order: tuple[int, ...] | None = None,
) -> Parameter:
    """Return a new parameter; this rank makes its own block alone. No message.

    Parameters
    ----------
    shape : sequence of int
        Global shape.
    initializer : callable
        Fills it in place, a function of this module for instance.
    mesh, layout
        The current mesh, replicated, by default.
    order : tuple of int, optional
        The permutation of dims by which memory is walked, where it is not the logical order.
    """
    sig = signature(mesh or current_mesh(), tuple(int(n) for n in shape), layout or Layout())
    if sig.partial:
        raise ValueError(f"a parameter cannot be partial, got {layout!r}")
    dims = range(len(sig.shape)) if order is None else order
    make = kernels.outline.empty if sig.mesh.virtual else np.empty
    memory = make([sig.local_shape[d] for d in dims], dtype or get_default_dtype())
    made = Parameter(memory if order is None else memory.transpose(np.argsort(order).tolist()), sig, order=order)
    initializer(made)
    return made


def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0) -> Tensor:
    """Fill with uniform numbers in [a, b)."""
    if _skipping:
        return tensor
    u = kernels.random_uniform(*_draw(tensor), dtype=np.float64, like=tensor.shard)
    return _set(tensor, u * (b - a) + a)


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Fill with normal numbers."""
    if _skipping:
        return tensor
    z = kernels.random_normal(*_draw(tensor), dtype=np.float64, like=tensor.shard)
    return _set(tensor, z * std + mean)


def trunc_normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> Tensor:
    """Fill with normal numbers, given that they lie in [a, b]: by inversion, as one uniform number makes one element.

    The inverse of the normal distribution function is found by bisection, to about 1e-12 of a standard deviation.
    """
    if not a < b:
        raise ValueError(f"trunc_normal_: the interval [{a}, {b}] is empty")
    if _skipping:
        return tensor
    # beyond 9 standard deviations the distribution function is 0 or 1 in float64
    lo, hi = (min(max((end - mean) / std, -9.0), 9.0) for end in (a, b))
    u = kernels.random_uniform(*_draw(tensor), dtype=np.float64, like=tensor.shard)
    below = kernels.erf(np.array([lo, hi]) / sqrt(2.0))
    wanted = below[0] + u * (below[1] - below[0])
    left, right = np.full_like(u, lo), np.full_like(u, hi)
    for _ in range(44):
        middle = 0.5 * (left + right)
        high = kernels.erf(middle / sqrt(2.0)) >= wanted
        right, left = np.where(high, middle, right), np.where(high, left, middle)
    return _set(tensor, 0.5 * (left + right) * std + mean)


def constant_(tensor: Tensor, value: float) -> Tensor:
    """Fill with one number."""
    return _set(tensor, value)


def zeros_(tensor: Tensor) -> Tensor:
    """Fill with 0."""
    return _set(tensor, 0)


def ones_(tensor: Tensor) -> Tensor:
    """Fill with 1."""
    return _set(tensor, 1)


def fans(tensor: Tensor) -> tuple[int, int]:
    """Return (fan in, fan out) of a weight (out, in, *kernel), from the global shape."""
    if tensor.ndim < 2:
        raise ValueError(f"fans are those of a weight with 2 or more dims, got shape {tensor.shape}")
    field = prod(tensor.shape[2:])
    return tensor.shape[1] * field, tensor.shape[0] * field


_GAINS = {
    "linear": 1.0, "conv1d": 1.0, "conv2d": 1.0, "conv3d": 1.0, "conv_transpose1d": 1.0, "conv_transpose2d": 1.0,
    "conv_transpose3d": 1.0, "sigmoid": 1.0, "tanh": 5.0 / 3.0, "relu": sqrt(2.0), "selu": 0.75,
}  # fmt: skip


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """Return the factor that keeps variances behind a nonlinearity; `param` is the slope of ``"leaky_relu"`` (0.01)."""
    if nonlinearity == "leaky_relu":
        slope = 0.01 if param is None else param
        return sqrt(2.0 / (1.0 + slope * slope))
    if nonlinearity not in _GAINS:
        raise ValueError(f"no gain for {nonlinearity!r}; there are {', '.join([*_GAINS, 'leaky_relu'])}")
    return _GAINS[nonlinearity]


def xavier_uniform_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Fill uniformly with the variance 2 / (fan in + fan out) (Glorot and Bengio 2010)."""
    bound = gain * sqrt(6.0 / _positive(sum(fans(tensor))))
    return uniform_(tensor, -bound, bound)


def xavier_normal_(tensor: Tensor, gain: float = 1.0) -> Tensor:
    """Fill normally with the variance 2 / (fan in + fan out) (Glorot and Bengio 2010)."""
    return normal_(tensor, 0.0, gain * sqrt(2.0 / _positive(sum(fans(tensor)))))


def kaiming_uniform_(
    tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Tensor:
    """Fill uniformly with the variance gain^2 / fan (He et al. 2015); `a` is the slope of the leaky ReLU behind."""
    bound = sqrt(3.0) * calculate_gain(nonlinearity, a) / sqrt(_fan(tensor, mode))
    return uniform_(tensor, -bound, bound)


def kaiming_normal_(
    tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu"
) -> Tensor:
    """Fill normally with the variance gain^2 / fan (He et al. 2015); `a` is the slope of the leaky ReLU behind."""
    return normal_(tensor, 0.0, calculate_gain(nonlinearity, a) / sqrt(_fan(tensor, mode)))


def default_weight_(tensor: Tensor) -> Tensor:
    """Fill a weight as torch's linear and convolution layers do."""
    return kaiming_uniform_(tensor, a=sqrt(5.0))


def default_bias(fan_in: int) -> Initializer:
    """Return the initializer of the bias that goes with a weight of `fan_in`, as torch's layers have it."""
    bound = 1.0 / sqrt(fan_in) if fan_in else 0.0
    return lambda tensor: uniform_(tensor, -bound, bound)


def _fan(tensor: Tensor, mode: str) -> int:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"mode is 'fan_in' or 'fan_out', got {mode!r}")
    return _positive(fans(tensor)[mode == "fan_out"])


def _positive(fan: int) -> int:
    return max(fan, 1)  # an empty weight has nothing to fill


def _draw(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.sig.partial:
        raise ValueError(f"a partial tensor cannot be initialised: {tensor!r}")
    return random.seed(), random.next_stream(), tensor.shape, tensor.sig.box


def _set(tensor: Tensor, value: Any) -> Tensor:
    if not _skipping:
        tensor.shard[...] = value
        tensor.changed()
    return tensor
