"""Each operation equals its serial twin: output and every gradient, under every layout that it accepts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np

from hpcpar.creation import from_shard
from hpcpar.layout.layout import Layout, LayoutError
from hpcpar.mesh import Mesh
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Parameter, Tensor
from hpcpar.testing.compare import assert_close_everywhere, collective_assert


def compare_with_serial(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    arrays: Sequence[np.ndarray],
    mesh: Mesh,
    layouts: Sequence[Layout | None],
    *,
    parameters: Sequence[int] = (),
    tolerance: float | None = None,
    out: Layout | None = None,
    differentiable: Sequence[int] | None = None,
) -> Any:
    """Compare ``function(*tensors)`` with ``reference(*torch tensors)``: results and gradients. Collective.

    Parameters
    ----------
    function : callable
        From tensors to a tensor or a tuple of tensors.
    reference : callable
        The same from global torch tensors to one or several torch tensors (arrays will do where nothing is
        differentiable).
    arrays : sequence of array
        The global operands, equal on every rank.
    mesh : Mesh
    layouts : sequence of Layout or None
        One for each operand. A partial operand is given as random shares with the right sum.
    parameters : sequence of int
        Which operands are a `Parameter`; their gradients may then stay partial where the parameter is replicated.
    tolerance : float, optional
        As in `assert_close_everywhere`.
    out : Layout, optional
        The layout that the (first) result must have.
    differentiable : sequence of int, optional
        Which operands require a gradient; all of a floating dtype by default.

    Returns
    -------
    Tensor or tuple of Tensor
        What `function` returned, unresolved.

    Raises
    ------
    LayoutError
        When the function does, with the same message on every rank.
    AssertionError
        On all ranks: a difference, a LayoutError on some ranks only, an operand that was changed in place, or a
        gradient in a layout that the rules do not allow.
    """
    import torch

    arrays = [np.asarray(a) for a in arrays]
    if differentiable is None:
        differentiable = [i for i, a in enumerate(arrays) if a.dtype.kind == "f"]
    tensors = [
        operand(a, mesh, layout, i in differentiable, i in parameters, stream=i)
        for i, (a, layout) in enumerate(zip(arrays, layouts, strict=True))
    ]
    before = [np.array(t.shard) for t in tensors]
    results = all_or_none(mesh, lambda: function(*tensors))

    twins = [torch.tensor(a, requires_grad=i in differentiable) for i, a in enumerate(arrays)]
    expected = _tuple(reference(*twins))
    _compare_results(mesh, _tuple(results), expected, tolerance, out)
    if differentiable:
        _walk_back(mesh, _tuple(results), expected)
        _compare_gradients(mesh, tensors, twins, tolerance)
    for i, (t, held) in enumerate(zip(tensors, before, strict=True)):
        same = np.array_equal(t.shard, held, equal_nan=held.dtype.kind == "f")
        collective_assert(mesh.world, same, f"operand {i} was changed in place")
    return results


def operand(
    array: np.ndarray,
    mesh: Mesh,
    layout: Layout | None = None,
    requires_grad: bool = False,
    parameter: bool = False,
    stream: int = 0,
) -> Tensor:
    """Return `array` as a tensor, or parameter; over partial axes as random shares that add up to it.

    Shares are dyadic numbers, so that adding them is exact for operands of few bits; those of integers are integers.

    Parameters
    ----------
    array : array
        The whole value, the same on every rank.
    mesh : Mesh
    layout : Layout, optional
        Replicated by default.
    requires_grad, parameter : bool
    stream : int
        Tells the shares of operands apart.
    """
    sig = signature(mesh, tuple(array.shape), layout or Layout())
    share = _share(array, sig, np.random.default_rng([20_240_229, stream])) if sig.partial else array
    shard = np.array(share[tuple(slice(a, b) for a, b in sig.box)], order="C")
    if parameter:
        return Parameter(shard, sig, requires_grad)
    return from_shard(shard, sig.shape, mesh, sig.layout, requires_grad)


def _share(array: np.ndarray, sig: Signature, rng: np.random.Generator) -> np.ndarray:
    places = list(product(*[range(sig.mesh.shape[a]) for a in sig.partial]))
    if array.dtype.kind not in "fiu":
        shares = [array, *[np.zeros_like(array) for _ in places[1:]]]
    else:
        whole = rng.integers(-8, 9, (len(places) - 1, *array.shape))
        parts = [(w / 4 if array.dtype.kind == "f" else w).astype(array.dtype) for w in whole]
        shares = [array - sum(parts, np.zeros_like(array)), *parts]
    return shares[places.index(tuple(sig.mesh.index(a) for a in sig.partial))]


def all_or_none(mesh: Mesh, call: Callable[[], Any]) -> Any:
    """Return ``call()``; a LayoutError must come on all ranks with one text, else all ranks fail. Collective.

    Raises
    ------
    LayoutError
        The call's.
    AssertionError
        The ranks disagree about it.
    """
    result, text = None, None
    try:
        result = call()
    except LayoutError as error:
        text = str(error)
    texts = mesh.world.gather_objects(text)
    agreed = len(set(texts)) == 1
    collective_assert(mesh.world, agreed, f"the ranks disagree about a LayoutError: {texts}")
    if text is not None:
        raise LayoutError(text)
    return result


def _tuple(results: Any) -> tuple:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _plain(value: Any) -> np.ndarray:
    return value.detach().numpy() if hasattr(value, "detach") else np.asarray(value)


def block(array: Any, sig: Signature) -> np.ndarray:
    """Return this rank's block of a global array."""
    return np.asarray(array)[tuple(slice(a, b) for a, b in sig.box)]


def _compare_results(mesh: Mesh, results: tuple, expected: tuple, tolerance: float | None, out: Layout | None) -> None:
    collective_assert(mesh.world, len(results) == len(expected), f"{len(results)} results, {len(expected)} expected")
    if out is not None:
        wanted = out.on(results[0].shape, mesh.shape)
        collective_assert(mesh.world, results[0].layout == wanted, f"result lies as {results[0].layout}, not {wanted}")
    for i, (y, twin) in enumerate(zip(results, expected, strict=True)):
        whole = _plain(twin)
        collective_assert(mesh.world, y.shape == whole.shape, f"result {i} has shape {y.shape}, expected {whole.shape}")
        fits = y.shard.shape == y.sig.local_shape
        collective_assert(mesh.world, fits, f"result {i}: shard {y.shard.shape} of {y.sig!r}, not {y.sig.local_shape}")
        y = y.resolve()
        assert_close_everywhere(mesh.world, y.shard, block(whole, y.sig), tolerance, f"result {i} as {y.layout}")


def _walk_back(mesh: Mesh, results: tuple, expected: tuple) -> None:
    """Backward of all results with random gradients, here and in torch."""
    import torch

    rng = np.random.default_rng(577)
    pairs = [(y, t) for y, t in zip(results, expected, strict=True) if hasattr(t, "requires_grad") and t.requires_grad]
    seeds = [rng.standard_normal(t.shape).astype(_plain(t).dtype) for _, t in pairs]
    for (y, _), seed in zip(pairs, seeds, strict=True):
        y.backward(operand(seed, mesh, y.layout.resolved()), retain_graph=True)
    torch.autograd.backward([t for _, t in pairs], [torch.tensor(s) for s in seeds])


def _compare_gradients(mesh: Mesh, tensors: list[Tensor], twins: list[Any], tolerance: float | None) -> None:
    for i, (t, twin) in enumerate(zip(tensors, twins, strict=True)):
        if not t.requires_grad:
            collective_assert(mesh.world, t.grad is None, f"operand {i} got a gradient that it did not ask for")
            continue
        if twin.grad is None:
            collective_assert(mesh.world, t.grad is None or not t.grad.numpy().any(), f"operand {i} has a gradient")
            continue
        collective_assert(mesh.world, t.grad is not None, f"operand {i} as {t.layout} has no gradient")
        may_be_partial = t.is_parameter and not set(t.grad.sig.partial) & set(t.sig.split_axes)
        allowed = t.grad.sig.dims == t.sig.dims and (may_be_partial or not t.grad.sig.partial)
        collective_assert(mesh.world, allowed, f"gradient of operand {i}, {t!r}, lies as {t.grad.layout}")
        grad = t.grad.resolve()
        twin_block = block(_plain(twin.grad), grad.sig)
        what = f"gradient of operand {i} as {t.layout}"
        assert_close_everywhere(mesh.world, grad.shard, twin_block, tolerance, what)
