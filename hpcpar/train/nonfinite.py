"""Where a NaN or an infinity comes from: the first module whose result is not finite, on any rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from hpcpar.autograd import no_grad
from hpcpar.nn import Module
from hpcpar.tensors import Tensor


class NotFinite(FloatingPointError):
    """A loss or a gradient is NaN or infinite; raised on all ranks."""


def is_finite(x: Tensor) -> bool:
    """Whether every element on every rank is finite; the same answer everywhere. Collective."""
    return x.mesh.world.agree(bool(np.isfinite(x.shard).all()), "all")


def first_nonfinite(model: Module, operands: Iterable[Tensor], forward: Callable[[], object]) -> str:
    """Run the model once more and say which module first returns something that is not finite. Collective.

    Weights come first: a broken one explains what follows.

    Parameters
    ----------
    model : Module
    operands : iterable of Tensor
        What the model is given.
    forward : callable
        Runs the model on them.
    """
    if not all(is_finite(x) for x in operands):
        return "the input is not finite: look at the data"
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            return f"the weight {name} is not finite: the step before was too large"
    found: list[str] = []
    hooks = []

    def check(module: Module, _args: tuple, result: object) -> None:
        if not found and isinstance(result, Tensor) and not is_finite(result):
            found.append(module.full_name or type(module).__name__)

    for module in model.modules():
        if not any(True for _ in module.children()):
            hooks.append(module.register_forward_hook(check))
    try:
        with no_grad():
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    return (
        f"the first result that is not finite is that of {found[0]}"
        if found
        else "the network's output is finite, the loss is not"
    )
