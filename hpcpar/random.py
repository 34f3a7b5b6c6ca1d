"""The random state: a seed, and a counter of streams that all ranks advance alike.

Element i of a stream is a function of (seed, stream, i) alone, i being the element's global row-major index. Weights,
dropout masks and noise are therefore the same under every layout and on every number of ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcpar import kernels
from hpcpar.creation import check_dtype, global_shape
from hpcpar.layout.layout import Layout
from hpcpar.mesh import Mesh, current_mesh
from hpcpar.signature import signature
from hpcpar.tensors import Tensor

_state = {"seed": 0, "stream": 0}


def manual_seed(seed: int) -> None:
    """Set the seed (0 to 2**64 - 1) and start again at stream 0. Every rank must give the same one.

    Raises
    ------
    ValueError
        Another number.
    """
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"a seed is an integer from 0 to 2**64 - 1, got {seed}")
    _state.update(seed=int(seed), stream=0)


def seed() -> int:
    """Return the seed."""
    return _state["seed"]


def next_stream() -> int:
    """Return the number of a stream that nobody has used since the seed was set."""
    _state["stream"] += 1
    return _state["stream"]


def get_state() -> dict[str, int]:
    """Return the seed and the number of streams used; what a checkpoint stores."""
    return dict(_state)


def set_state(state: dict[str, int]) -> None:
    """Continue from a state that `get_state` returned."""
    _state.update(seed=int(state["seed"]), stream=int(state["stream"]))


def rand(*shape: int, **options: Any) -> Tensor:
    """Return uniform numbers in [0, 1): the same global array under every layout.

    Parameters
    ----------
    shape : int
        Global lengths, as numbers or as one tuple.
    mesh : Mesh, optional
        The current mesh by default.
    layout : Layout, optional
        Replicated by default.
    dtype : dtype
        float32 by default.
    requires_grad : bool
    """
    return _draw(kernels.random_uniform, shape, **options)


def randn(*shape: int, **options: Any) -> Tensor:
    """Return standard normal numbers: the same global array under every layout. Parameters as in `rand`."""
    return _draw(kernels.random_normal, shape, **options)


def _draw(
    kernel: Any,
    shape: tuple,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    dtype: Any = np.float32,
    requires_grad: bool = False,
) -> Tensor:
    check_dtype(np.dtype(dtype), requires_grad)
    shape = global_shape(shape)
    sig = signature(mesh or current_mesh(), shape, layout or Layout()).resolved
    return Tensor(kernel(seed(), next_stream(), shape, sig.box, np.dtype(dtype)), sig, requires_grad)
