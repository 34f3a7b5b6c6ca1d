"""What a checkpoint of a training holds: model, optimizer and random state as named arrays and numbers.

Names: ``model/NAME`` with torch's names, ``optimizer/KIND/NAME`` for the optimizer's arrays (``exp_avg``, ...).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcpar import random
from hpcpar.checkpoint.manifest import CheckpointError
from hpcpar.checkpoint.reading import Checkpoint
from hpcpar.nn import Module
from hpcpar.nn.state import entries
from hpcpar.optim import Optimizer
from hpcpar.tensors import Tensor

MODEL, OPTIMIZER = "model", "optimizer"


def model_tensors(model: Module) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
    """Return parameters and persistent buffers by name in the checkpoint, and torch's shapes of them.

    A tensor that has several names, as tied weights have, is there once, under its first name.
    """
    all_names, first_names = entries(model), first_name_of(model)
    found = {f"{MODEL}/{name}": entry for name, entry in all_names.items() if first_names[name] == name}
    return {name: e.tensor for name, e in found.items()}, {name: e.shape for name, e in found.items()}


def first_name_of(model: Module) -> dict[str, str]:
    """Return for each name of the state the first name under which the same tensor is known."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(entry.tensor), name) for name, entry in entries(model).items()}


def optimizer_tensors(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the optimizer's arrays by name in the checkpoint, and its numbers.

    A state that is an array although its parameter has changed its layout since is saved as it lies.
    """
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for name, entry in state["state"].items():
        for kind, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"{OPTIMIZER}/{kind}/{name}"] = value
            else:
                numbers.setdefault(name, {})[kind] = value
    return tensors, {"kind": type(optimizer).__name__, "steps": state["steps"], "numbers": numbers}


def collect(
    model: Module, optimizer: Optimizer
) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]], dict[str, Any]]:
    """Return tensors, torch's shapes, and the part of the state that is not arrays: for `Saver.save`."""
    tensors, shown = model_tensors(model)
    arrays, numbers = optimizer_tensors(optimizer)
    return {**tensors, **arrays}, shown, {"optimizer": numbers, "random": random.get_state()}


def restore_model(checkpoint: Checkpoint, model: Module) -> None:
    """Load parameters and buffers, every rank its blocks, under whatever mesh and layout the model has now.

    Raises
    ------
    CheckpointError
        Names or shapes do not fit; nothing has been changed then.
    """
    stored = checkpoint.group(MODEL)
    if not stored:
        raise CheckpointError(f"{checkpoint.path} holds no model")
    again = {name: stored[first] for name, first in first_name_of(model).items() if first in stored}
    try:
        model.load_state_dict({**again, **stored})
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path} does not fit the model: {error}") from error


def restore_optimizer(checkpoint: Checkpoint, optimizer: Optimizer) -> None:
    """Load the optimizer's arrays and numbers; its options (weight decay, ...) stay as they are configured now.

    Raises
    ------
    CheckpointError
        The checkpoint is of another kind of optimizer.
    """
    saved: Mapping[str, Any] | None = checkpoint.state.get("optimizer")
    if saved is None:
        raise CheckpointError(f"{checkpoint.path} holds no optimizer")
    if saved["kind"] != type(optimizer).__name__:
        raise CheckpointError(
            f"{checkpoint.path} holds the state of {saved['kind']}, the optimizer is {type(optimizer).__name__}; use "
            f"that, or start from its weights alone"
        )
    state: dict[str, dict[str, Any]] = {name: dict(numbers) for name, numbers in saved["numbers"].items()}
    for path, array in checkpoint.group(OPTIMIZER).items():
        kind, _, name = path.partition("/")
        state.setdefault(name, {})[kind] = array
    groups = [{"names": group["names"]} for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict({"state": state, "param_groups": groups, "steps": saved["steps"]})
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path} does not fit the optimizer: {error}") from error
