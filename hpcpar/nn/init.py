"""Initial values, drawn by global index: the same weights under every layout and on every number of ranks.

Every function fills a tensor in place and returns it, and raises a ValueError for a partial one. Each draw takes the
next stream of `hpcpar.random`, so all ranks must initialise the same tensors in the same order; a rank computes its own
block alone. Fans are those of the global shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from math import prod, sqrt
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from hpcpar import kernels, random
from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh, current_mesh
from hpcpar.nn.defaults import get_default_dtype
from hpcpar.signature import signature
from hpcpar.tensors import Parameter, Tensor

Initializer = Callable[[Tensor], Any]

Step = Callable[[Tensor], Any]

# of each tensor the steps to its values, with whether the step fills it all
_waiting: MutableMapping[Tensor, list[tuple[bool, Step]]] | None = None


@contextmanager
def deferred() -> Iterator[None]:
    """Draw initial values at the end of the block, when parameters lie where they are to lie.

    Memory that nobody writes to is not there, so a rank needs and draws only the blocks that a plan gives it inside the
    block. The values are those that it would have had. Nothing is drawn where the block raises.

    Examples
    --------
    >>> with mesh, nn.init.deferred():
    ...     model = models.llama()
    ...     models.place(model, mesh, spread)
    """
    with _postponed() as waiting:
        yield
    for tensor, steps in list(waiting.items()):
        for _, step in steps:
            step(tensor)


@contextmanager
def skipped() -> Iterator[None]:
    """Leave new parameters as the memory has them, inside the block: they will be loaded."""
    with _postponed():
        yield


@contextmanager
def _postponed() -> Iterator[MutableMapping[Tensor, list[tuple[bool, Step]]]]:
    global _waiting
    before, _waiting = _waiting, WeakKeyDictionary()
    try:
        yield _waiting
    finally:
        _waiting = before


def _now_or_later(tensor: Tensor, step: Step, whole: bool = True) -> Tensor:
    """Take a step towards the initial values; one that fills the `whole` tensor makes those before it needless."""
    if tensor.sig.partial:
        raise ValueError(f"a partial tensor cannot be initialised: {tensor!r}")
    if _waiting is None:
        step(tensor)
    elif whole:
        _waiting[tensor] = [(True, step)]
    else:
        _waiting.setdefault(tensor, []).append((False, step))
    return tensor


def waits_for_values(tensor: Tensor) -> bool:
    """Whether the end of the block will fill all of a tensor, so that what its memory holds now means nothing."""
    return _waiting is not None and tensor in _waiting and _waiting[tensor][0][0]


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

    Raises
    ------
    ValueError
        The layout is partial.
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
    draw = _drawing(kernels.random_uniform)
    return _now_or_later(tensor, lambda t: _set(t, draw(t) * (b - a) + a))


def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Fill with normal numbers."""
    draw = _drawing(kernels.random_normal)
    return _now_or_later(tensor, lambda t: _set(t, draw(t) * std + mean))


def trunc_normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0) -> Tensor:
    """Fill with normal numbers, given that they lie in [a, b]: by inversion, as one uniform number makes one element.

    The inverse of the normal distribution function is found by bisection, to about 1e-12 of a standard deviation.

    Raises
    ------
    ValueError
        The interval is empty.
    """
    if not a < b:
        raise ValueError(f"trunc_normal_: the interval [{a}, {b}] is empty")
    # beyond 9 standard deviations the distribution function is 0 or 1 in float64
    lo, hi = (min(max((end - mean) / std, -9.0), 9.0) for end in (a, b))
    draw = _drawing(kernels.random_uniform)
    return _now_or_later(tensor, lambda t: _set(t, _truncated(draw(t), lo, hi) * std + mean))


def _truncated(u: Any, lo: float, hi: float) -> Any:
    """Standard normal numbers in [lo, hi] from uniform ones."""
    below = kernels.erf(np.array([lo, hi]) / sqrt(2.0))
    wanted = below[0] + u * (below[1] - below[0])
    left, right = np.full_like(u, lo), np.full_like(u, hi)
    for _ in range(44):
        middle = 0.5 * (left + right)
        high = kernels.erf(middle / sqrt(2.0)) >= wanted
        right, left = np.where(high, middle, right), np.where(high, left, middle)
    return 0.5 * (left + right)


def constant_(tensor: Tensor, value: float) -> Tensor:
    """Fill with one number."""
    return _now_or_later(tensor, lambda t: _set(t, value))


def zero_row_(tensor: Tensor, row: int) -> Tensor:
    """Set one row, of all ranks' rows, to zeros, and leave the others as they are."""

    def step(t: Tensor) -> None:
        first, end = t.sig.box[0]
        if first <= row < end:
            t.shard[row - first] = 0
            t.changed()

    return _now_or_later(tensor, step, whole=False)


def zeros_(tensor: Tensor) -> Tensor:
    """Fill with 0."""
    return constant_(tensor, 0)


def ones_(tensor: Tensor) -> Tensor:
    """Fill with 1."""
    return constant_(tensor, 1)


def fans(tensor: Tensor) -> tuple[int, int]:
    """Return (fan in, fan out) of a weight (out, in, *kernel), from the global shape.

    Raises
    ------
    ValueError
        It has fewer than 2 dims.
    """
    if tensor.ndim < 2:
        raise ValueError(f"fans are those of a weight with 2 or more dims, got shape {tensor.shape}")
    field = prod(tensor.shape[2:])
    return tensor.shape[1] * field, tensor.shape[0] * field


_GAINS = {
    "linear": 1.0, "conv1d": 1.0, "conv2d": 1.0, "conv3d": 1.0, "conv_transpose1d": 1.0, "conv_transpose2d": 1.0,
    "conv_transpose3d": 1.0, "sigmoid": 1.0, "tanh": 5.0 / 3.0, "relu": sqrt(2.0), "selu": 0.75,
}  # fmt: skip


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """Return the factor that keeps variances behind a nonlinearity; `param` is the slope of ``"leaky_relu"`` (0.01).

    Raises
    ------
    ValueError
        A nonlinearity that is not known.
    """
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


def kaiming_uniform_(tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Tensor:
    """Fill uniformly with the variance gain^2 / fan (He et al. 2015); `a` is the slope of the leaky ReLU behind."""
    bound = sqrt(3.0) * calculate_gain(nonlinearity, a) / sqrt(_fan(tensor, mode))
    return uniform_(tensor, -bound, bound)


def kaiming_normal_(tensor: Tensor, a: float = 0.0, mode: str = "fan_in", nonlinearity: str = "leaky_relu") -> Tensor:
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


def _drawing(kernel: Callable[..., Any]) -> Callable[[Tensor], Any]:
    """Take the next stream, and return the function that draws this rank's block of a tensor from it, in float64."""
    seed, stream = random.seed(), random.next_stream()
    return lambda t: kernel(seed, stream, t.shape, t.sig.box, dtype=np.float64, like=t.shard)


def _set(tensor: Tensor, value: Any) -> None:
    tensor.shard[...] = value
    tensor.changed()
