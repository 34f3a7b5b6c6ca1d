"""The values of a module by name: taken out, put in, converted. Names are torch's, and so are the shapes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcpar.kernels import array_module
from hpcpar.layout.layout import Layout
from hpcpar.ops.shape import reshape_groups
from hpcpar.signature import signature
from hpcpar.tensors import Tensor
from hpcpar.transport.device import is_device, like, to_host

if TYPE_CHECKING:
    from hpcpar.nn.module import Module


class Keys(NamedTuple):
    """What `load_state_dict` found: names that got no value, and values that nobody took."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Entry(NamedTuple):
    """One name of the state: the tensor behind it and the shape under which torch knows it."""

    tensor: Tensor
    shape: tuple[int, ...]


def entries(module: Module, prefix: str = "") -> dict[str, Entry]:
    """Return parameters and persistent buffers by name, in torch's order; a shared one under each of its names."""
    found: dict[str, Entry] = {}
    start = prefix and prefix + "."
    for name, parameter in module._parameters.items():
        if parameter is not None:
            found[start + name] = Entry(parameter, module.shown_shape(name) or parameter.shape)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._transient:
            found[start + name] = Entry(buffer, buffer.shape)
    for name, child in module.named_children():
        found.update(entries(child, start + name))
    return found


def state_dict(module: Module, prefix: str = "", numpy: bool = False) -> dict[str, Any]:
    """Return parameters and persistent buffers by name.

    Parameters
    ----------
    prefix : str
        Put before each name, as it is (torch's convention: it ends in a dot, or is empty).
    numpy : bool
        Whole NumPy arrays in torch's shapes, on every rank. Collective. Otherwise tensors that share this module's
        memory, without messages; there a weight that is kept unflattened (`Linear` with `in_dims`) has its own shape.
    """
    found = {prefix + name: entry for name, entry in entries(module).items()}
    if numpy:
        return {name: entry.tensor.numpy().reshape(entry.shape) for name, entry in found.items()}
    return {name: entry.tensor.detach() for name, entry in found.items()}


def load_state_dict(module: Module, state: Mapping[str, Any], strict: bool = True) -> Keys:
    """Take values by name; each rank takes its own block.

    Parameters
    ----------
    state : mapping
        Tensors, NumPy arrays, torch tensors, numbers, or anything with a shape that can be sliced (an HDF5 dataset is
        read by hyperslab, only the block that this rank owns).
    strict : bool
        Names must agree exactly.

    Raises
    ------
    ValueError
        When names or shapes do not fit; nothing has been changed then.
    """
    wanted = entries(module)
    state = {name: value if hasattr(value, "shape") else np.asarray(value) for name, value in state.items()}
    missing = [name for name in wanted if name not in state]
    unexpected = [name for name in state if name not in wanted]
    faults = []
    if strict and missing:
        faults.append(f"no value for {', '.join(missing)}")
    if strict and unexpected:
        faults.append(f"nobody takes {', '.join(unexpected)}")
    for name, entry in wanted.items():
        if name in state and tuple(state[name].shape) not in (entry.shape, entry.tensor.shape):
            faults.append(f"{name} has shape {entry.shape}, the value {tuple(state[name].shape)}")
    if faults:
        raise ValueError(f"load_state_dict of {type(module).__name__}: {'; '.join(faults)}")
    for name, entry in wanted.items():
        if name in state:
            assign(entry.tensor, state[name])
    return Keys(missing, unexpected)


def assign(target: Tensor, value: Any) -> None:
    """Copy a value (see `load_state_dict`) into the memory of `target`, each rank its block."""
    block = like(_block(target, value), target.shard)
    # a 0-dim array from HDF5 is a scalar
    target.shard[...] = array_module(target.shard).asarray(block, dtype=target.dtype)
    target.changed()


def _block(target: Tensor, value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.shape != target.shape:  # torch's shape for a weight that is kept unflattened
            return value.numpy().reshape(target.shape)[_box(target)]
        if value.mesh is target.mesh:
            return value.moved(target.sig)
        return value.numpy()[_box(target)]
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if tuple(value.shape) == target.shape:
        return value[_box(target)]
    return _flat_block(target, value)


def _flat_block(target: Tensor, value: Any) -> Any:
    """Block of a value in which dims of the target are merged: of a merged dim only the rows that are needed are read.

    A dim of the value stands for one or several of the target (heads and their depth; channels and a window).
    """
    box, wanted, shape, inner = _box(target), [], [], []
    if not prod(target.shape):
        return np.zeros(target.shard.shape, target.dtype)
    for old, (new,) in reshape_groups(target.shape, tuple(value.shape)):
        first = next((d for d in old if target.shape[d] != 1), old[0])
        row = prod(target.shape[d] for d in old if d > first)
        wanted.append(slice(box[first].start * row, box[first].stop * row))
        shape += [box[d].stop - box[d].start if d == first else target.shape[d] for d in old]
        inner += [slice(None) if d == first else box[d] for d in old]
        assert prod(target.shape[d] for d in old) == value.shape[new], f"{value.shape} for {target.shape}"
    return np.asarray(value[tuple(wanted)]).reshape(shape)[tuple(inner)]


def _box(target: Tensor) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in target.sig.box)


def convert(tensor: Tensor, dtype: Any = None, device: str | None = None) -> None:
    """Bring a floating tensor to a dtype, any tensor to a device ("cpu" or "gpu"), in place; gradients are dropped.

    Raises
    ------
    ValueError
        Another device.
    ModuleNotFoundError
        For "gpu", without CuPy.
    """
    if device not in (None, "cpu", "gpu"):
        raise ValueError(f"a device is 'cpu' or 'gpu', got {device!r}")
    data = tensor.shard
    if dtype is not None and tensor.dtype.kind == "f":
        data = data.astype(dtype, copy=False)
    if device == "cpu" and is_device(data):
        data = _keep_order(data, to_host)
    if device == "gpu" and not is_device(data):
        import cupy

        data = _keep_order(data, cupy.asarray)
    if data is not tensor.shard:
        tensor.set_data(data)
        tensor.grad = None


def _keep_order(data: Any, copy: Any) -> Any:
    """Copy an array to another device with the memory order that it has."""
    order = sorted(range(data.ndim), key=lambda d: -data.strides[d])
    return copy(data.transpose(order)).transpose(np.argsort(order).tolist())


def empty_like(tensor: Tensor) -> Any:
    """Return an uninitialised array like the shard, also in its memory order (even of dims of length 1)."""
    shard, order = tensor.shard, getattr(tensor, "order", None)
    if order is None:
        return array_module(shard).empty_like(shard)
    memory = array_module(shard).empty([shard.shape[d] for d in order], shard.dtype)
    return memory.transpose(np.argsort(order).tolist())


def relayout_(tensor: Tensor, layout: Layout) -> None:
    """Change the layout of a leaf in place: the same value, the same object. Collective; its gradient is dropped.

    Raises
    ------
    ValueError
        The layout is partial.
    LayoutError
        It does not fit.

    Notes
    -----
    Optimizers and synchronisers that know the tensor go on working: their state follows at the next step.
    """
    from hpcpar.nn.init import waits_for_values

    target = signature(tensor.mesh, tensor.shape, layout)
    if target.partial:
        raise ValueError(f"{tensor.name or 'a leaf'} cannot be kept partial: {layout!r}")
    if target is tensor.sig:
        return
    order = getattr(tensor, "order", None) or tuple(range(tensor.ndim))
    back = np.argsort(order).tolist()
    if waits_for_values(tensor):  # there is nothing to move, and what the memory holds differs between ranks
        memory = array_module(tensor.shard).empty([target.local_shape[d] for d in order], tensor.dtype)
    else:
        memory = tensor.moved(target).transpose(order).copy()
    data = memory.transpose(back)
    tensor.sig = target
    tensor.set_data(data)
    tensor.grad = None
    if tensor.requires_grad:
        tensor.requires_grad_(False).requires_grad_()  # a new leaf of the tape, under the new layout
