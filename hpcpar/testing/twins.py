"""What a `Case` is compared with: torch on one process, or this package on one rank with the generic kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcpar import functional, kernels
from hpcpar.creation import tensor
from hpcpar.layout.layout import Layout
from hpcpar.testing import transformer_twins
from hpcpar.testing.serial import operand

if TYPE_CHECKING:
    from hpcpar.testing.cases import Case


class Expected(NamedTuple):
    """Results, the gradients of results that were walked back from, and the gradients of operands."""

    results: list[np.ndarray]
    seeds: list[np.ndarray | None]
    gradients: list[np.ndarray | None]


def default_oracle() -> str:
    """Return "torch" where torch is installed, else "serial"."""
    return "torch" if find_spec("torch") is not None else "serial"


def ours(case: Case, tensors: Sequence[Any]) -> Any:
    """Return the results of the case's operation on tensors."""
    adapter = ADAPTERS.get(case.op)
    return adapter(*tensors, **case.arguments) if adapter else getattr(functional, case.op)(*tensors, **case.arguments)


def torch_oracle(case: Case, values: Sequence[np.ndarray]) -> Expected:
    """Results and gradients of torch, computed in float64 whatever the case's dtype and rounded to it.

    Raises
    ------
    Rejected
        It does not take the case's arguments.
    """
    import torch

    from hpcpar.testing.cases import Rejected, as_tuple
    from hpcpar.testing.torch_twins import TORCH, reject

    reject(case)
    wide = [torch.tensor(v.astype(np.float64) if v.dtype.kind == "f" else v) for v in values]
    for t, a in zip(wide, case.arrays, strict=True):
        t.requires_grad_(t.is_floating_point() and a.values != "mask")
    function = TORCH.get(case.op) or getattr(torch.nn.functional, case.op, None) or getattr(torch, case.op)
    try:
        results = as_tuple(function(*wide, **case.arguments))
        pairs = [(t, _seed(tuple(t.shape), case)) for t in results if t.requires_grad]
        torch.autograd.backward([t for t, _ in pairs], [torch.tensor(s) for _, s in pairs])
    except (RuntimeError, ValueError, IndexError, NotImplementedError, TypeError) as error:
        raise Rejected(str(error)) from error

    def host(t: Any) -> np.ndarray:
        array = t.detach().numpy()
        return array.astype(case.dtype) if array.dtype.kind == "f" else array

    seeds = [_seed(tuple(t.shape), case).astype(case.dtype) if t.requires_grad else None for t in results]
    return Expected([host(t) for t in results], seeds, [None if t.grad is None else host(t.grad) for t in wide])


def serial_oracle(case: Case, values: Sequence[np.ndarray]) -> Expected:
    """Results and gradients of this package on one rank, in float64 with the generic kernels.

    Raises
    ------
    Rejected
        It does not take the case's arguments.
    """
    from hpcpar.testing.cases import Rejected, as_tuple

    mesh = _lone_mesh()
    wide = [v.astype(np.float64) if v.dtype.kind == "f" else v for v in values]
    tensors = [
        operand(v, mesh, Layout(), v.dtype.kind == "f" and a.values != "mask")
        for v, a in zip(wide, case.arrays, strict=True)
    ]
    with kernels.use(all="numpy"):
        try:
            results = as_tuple(ours(case, tensors))
        except (ValueError, IndexError, TypeError) as error:
            raise Rejected(str(error)) from error
        seeds = [_seed(y.shape, case) if y.requires_grad else None for y in results]
        for y, seed in zip(results, seeds, strict=True):
            if seed is not None:
                y.backward(operand(seed, mesh, Layout()), retain_graph=True)

    def host(array: np.ndarray) -> np.ndarray:
        return array.astype(case.dtype) if array.dtype.kind == "f" else array

    return Expected(
        [host(y.shard) for y in results],
        [None if s is None else s.astype(case.dtype) for s in seeds],
        [None if t.grad is None else host(t.grad.shard) for t in tensors],
    )


def least_scales(case: Case, expected: Expected) -> tuple[float, float]:
    """Return the least scales that errors of results and of gradients are relative to; 0 but for normalisations.

    A normalised value, and its gradient, is a difference of terms; of groups with few elements little but rounding may
    be left of it, enlarged by up to ``1 / sqrt(eps)``.
    """
    shape, given = case.arrays[0].shape, case.arguments
    size = int(np.prod(shape))
    counts = {
        "batch_norm_and_statistics": lambda: size // max(shape[1], 1),
        "group_norm": lambda: size // max(shape[0] * given.get("num_groups", 1), 1),
        "instance_norm": lambda: size // max(shape[0] * shape[1], 1),
        "layer_norm": lambda: int(np.prod(given.get("normalized_shape", shape))),
        "rms_norm": lambda: int(np.prod(given.get("normalized_shape", shape))),
        "var": lambda: size,
        "std": lambda: size,
    }
    if case.op in ("attention", "softmax", "log_softmax"):  # of few elements the gradient is the rounding of a zero
        return 0.0, max((float(np.abs(s).max(initial=0.0)) for s in expected.seeds if s is not None), default=0.0)
    if case.op not in counts:
        return 0.0, 0.0
    few = counts[case.op]() < 6
    largest = max((float(np.abs(s).max(initial=0.0)) for s in expected.seeds if s is not None), default=0.0)
    return float(few), largest * (1e-5**-0.5 if few else 1.0)


def _seed(shape: tuple[int, ...], case: Case) -> np.ndarray:
    """The gradient of a result: of float32 precision, so that both dtypes start from the same numbers."""
    return np.random.default_rng([case.seed, 577]).standard_normal(shape).astype(np.float32).astype(np.float64)


@cache
def _lone_mesh() -> Any:
    from mpi4py import MPI

    from hpcpar.mesh import Mesh

    return Mesh(comm=MPI.COMM_SELF, alone=1)


ORACLES: dict[str, Callable[..., Expected]] = {"torch": torch_oracle, "serial": serial_oracle}


def pool_and_unpool(library: Any, ndim: int) -> Callable[..., Any]:
    """Max pooling and its unpooling by one library's functions."""

    def call(x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0) -> Any:
        pool, unpool = getattr(library, f"max_pool{ndim}d"), getattr(library, f"max_unpool{ndim}d")
        y, index = pool(x, kernel_size, stride, padding, return_indices=True)
        return unpool(y, index, kernel_size, stride, padding, output_size=tuple(x.shape))

    return call


def batch_norm_and_statistics(
    x: Any, weight: Any = None, bias: Any = None, training: bool = True, momentum: float = 0.1
) -> tuple[Any, ...]:
    """Batch norm, and the running statistics that it leaves behind."""
    mean, var = (tensor(f((x.shape[1],), x.dtype), x.mesh) for f in (np.zeros, np.ones))
    y = functional.batch_norm(x, mean, var, weight, bias, training, momentum)
    return y, mean, var


def _norm(name: str, argument: str) -> Callable[..., Any]:
    """A norm whose second parameter is no operand."""

    def call(x: Any, *affine: Any, **rest: Any) -> Any:
        return getattr(functional, name)(x, rest.pop(argument), *affine, **rest)

    return call


def _masked(name: str) -> Callable[..., Any]:
    """A loss whose third operand is a mask."""
    return lambda x, target, mask=None, **rest: getattr(functional, name)(x, target, mask=mask, **rest)


#: Operations whose arguments are not "operands, then keywords" of a function of that name.
ADAPTERS: dict[str, Callable[..., Any]] = {
    "cat": lambda *parts, dim=0: functional.cat(parts, dim),
    "stack": lambda *parts, dim=0: functional.stack(parts, dim),
    "index": lambda x, item: x[item],
    "batch_norm_and_statistics": batch_norm_and_statistics,
    "group_norm": _norm("group_norm", "num_groups"),
    "layer_norm": _norm("layer_norm", "normalized_shape"),
    "rms_norm": _norm("rms_norm", "normalized_shape"),
    "masked_cross_entropy": _masked("cross_entropy"),
    "masked_mse_loss": _masked("mse_loss"),
    "masked_l1_loss": _masked("l1_loss"),
    "dice_loss": _masked("dice_loss"),
    **{f"pool_and_unpool{n}d": pool_and_unpool(functional, n) for n in (1, 2, 3)},
    **transformer_twins.OURS,
}
