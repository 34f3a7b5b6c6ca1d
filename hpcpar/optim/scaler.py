"""Loss scaling for gradients that pass through float16: one decision of all ranks about every step."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np

from hpcpar.mesh import Mesh
from hpcpar.optim.optimizer import Optimizer
from hpcpar.tensors import Tensor


class GradScaler:
    """Multiplies the loss so that small gradients survive float16, and skips steps in which large ones did not.

    After a step with an infinity or NaN in any gradient on any rank, no rank changes its parameters and the scale is
    multiplied by `backoff_factor`; after `growth_interval` steps without one, by `growth_factor`. The scale is the same
    on every rank (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2). Names, defaults and rules as of
    ``torch.amp.GradScaler``; `step` says whether it was taken.

    Parameters
    ----------
    init_scale, growth_factor, backoff_factor : float
    growth_interval : int
    enabled : bool
        False: losses stay as they are and every step is taken.
    mesh : Mesh, optional
        Its ranks decide together. By default those of the parameters' meshes; needed where different ranks train
        different parameters (the stages of a pipeline).

    Examples
    --------
    >>> sync.backward(scaler.scale(loss))
    >>> scaler.unscale_(optimizer)  # only for what looks at gradients, such as clipping
    >>> clip_grad_norm_(model, 1.0)
    >>> scaler.step(optimizer)
    >>> scaler.update()
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        mesh: Mesh | None = None,
    ) -> None:
        if not (growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval >= 1 and init_scale > 0):
            raise ValueError(
                f"GradScaler: init_scale is above 0, growth_factor above 1, backoff_factor between 0 and 1 and "
                f"growth_interval at least 1, got {init_scale}, {growth_factor}, {backoff_factor}, {growth_interval}"
            )
        self.growth_factor, self.backoff_factor = float(growth_factor), float(backoff_factor)
        self.growth_interval = int(growth_interval)
        self._scale, self._good_steps, self._enabled, self._mesh = float(init_scale), 0, enabled, mesh
        self._found: dict[int, bool] = {}  # by optimizer, whether a gradient is not finite
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()

    def is_enabled(self) -> bool:
        """Return whether losses are scaled."""
        return self._enabled

    def get_scale(self) -> float:
        """Return the factor of losses, 1 where scaling is off."""
        return self._scale if self._enabled else 1.0

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, to call backward on."""
        return loss * self._scale if self._enabled else loss

    def unscale_(self, optimizer: Optimizer) -> bool:
        """Divide all gradients of an optimizer by the scale, in place; once before its `step`. Collective.

        Returns
        -------
        bool
            Whether all gradients are finite on all ranks; where not, `step` will pass this step over.

        Raises
        ------
        RuntimeError
            On all ranks: already divided, after `step`, a gradient that is still partial, or no gradient at all.
        """
        if not self._enabled:
            return True
        key = id(optimizer)
        if key in self._unscaled or key in self._stepped:
            what = "step has been called" if key in self._stepped else "unscale_ has been called"
            raise RuntimeError(f"GradScaler.unscale_: {what} for this optimizer since the last update")
        finite = self._inspect(optimizer)
        factor = 1.0 / self._scale
        for gradient in _gradients(optimizer):
            data = gradient.shard
            with np.errstate(invalid="ignore"):
                data *= data.dtype.type(factor)
            gradient.changed()
        self._unscaled.add(key)
        return finite

    def step(self, optimizer: Optimizer) -> bool:
        """Take the optimizer's step if all gradients are finite on all ranks. Collective unless `unscale_` was called.

        Gradients that were not divided by the scale are, on the fly.

        Returns
        -------
        bool
            Whether the step was taken: the same on all ranks.

        Raises
        ------
        RuntimeError
            As `unscale_`, and for a second step without `update`.
        """
        if not self._enabled:
            optimizer.step()
            return True
        key = id(optimizer)
        if key in self._stepped:
            raise RuntimeError("GradScaler.step: called twice for one optimizer without update between")
        finite = not self._found[key] if key in self._unscaled else self._inspect(optimizer)
        self._stepped.add(key)
        if finite:
            optimizer.step(grad_scale=1.0 if key in self._unscaled else 1.0 / self._scale)
        return finite

    def update(self, new_scale: float | None = None) -> None:
        """Change the scale by what the steps since the last call found, or to a new one.

        Raises
        ------
        RuntimeError
            Where no gradient was looked at since the last call.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = float(new_scale)
        elif not self._found:
            raise RuntimeError("GradScaler.update: neither step nor unscale_ was called since the last update")
        elif any(self._found.values()):
            self._scale *= self.backoff_factor
            self._good_steps = 0
        else:
            self._good_steps += 1
            if self._good_steps == self.growth_interval:
                grown = self._scale * self.growth_factor
                self._scale = grown if grown <= float(np.finfo(np.float32).max) else self._scale
                self._good_steps = 0
        self._found.clear()
        self._unscaled.clear()
        self._stepped.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes, under torch's names; empty where scaling is off."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale, "growth_factor": self.growth_factor, "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval, "_growth_tracker": self._good_steps,
        }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state."""
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError("GradScaler.load_state_dict: the state is empty, that of a scaler that was off")
        self._scale = float(state_dict["scale"])
        self.growth_factor, self.backoff_factor = (float(state_dict[k]) for k in ("growth_factor", "backoff_factor"))
        self.growth_interval, self._good_steps = (int(state_dict[k]) for k in ("growth_interval", "_growth_tracker"))

    def _inspect(self, optimizer: Optimizer) -> bool:
        """Whether all gradients are finite, as all ranks decide together."""
        partial = _partial(optimizer)
        if partial:
            raise RuntimeError(f"GradScaler: {partial}; reduce it first (hpcpar.parallel.GradientSync)")
        gradients = _gradients(optimizer)
        if not gradients:
            raise RuntimeError("GradScaler: no parameter of the optimizer has a gradient; call backward first")
        found = np.array([not all(_finite(g.shard) for g in gradients)], np.float64)
        meshes = [self._mesh] if self._mesh is not None else list(dict.fromkeys(g.mesh for g in gradients))
        for mesh in meshes:
            found = mesh.world.all_reduce(found, op="max")
        self._found[id(optimizer)] = bool(found[0])
        return not self._found[id(optimizer)]


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _partial(optimizer: Optimizer) -> str:
    """What to say of a gradient that is still partial, if there is one."""
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            if parameter.grad is not None and parameter.grad.sig.partial:
                return f"the gradient of {name} is still partial: {parameter.grad.layout!r}"
    return ""


def _finite(data: Any) -> bool:
    """Whether all elements are finite: smallest and largest are, and NaN is either."""
    return data.size == 0 or (isfinite(float(data.min())) and isfinite(float(data.max())))
