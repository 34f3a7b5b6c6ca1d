"""Base of the optimizers: groups of parameters with options, and a state by name under the parameters' layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from hpcpar.nn.module import Parameters, parameters_of
from hpcpar.nn.state import assign, empty_like
from hpcpar.tensors import Parameter, Tensor

Schedule = Callable[[int], float]


class Optimizer:
    """Changes parameters in place by their gradients; a subclass gives `update`.

    Parameters
    ----------
    params : Module, iterable of Parameter, of (name, Parameter), or of dict
        A dictionary is a group: such an iterable under ``"params"``, and options that differ from the defaults.
    defaults : dict
        Options; ``lr`` is a number or a schedule, a function of the step (`hpcpar.optim.schedules`).

    Attributes
    ----------
    param_groups : list of dict
        Each with ``"params"``, ``"names"`` and its options.
    state : dict of str to dict
        For each parameter name tensors with the parameter's layout, and numbers.
    steps : int
        Steps taken: the argument of the next step's schedule.
    """

    def __init__(self, params: Parameters | Iterable[Mapping[str, Any]], defaults: Mapping[str, Any]) -> None:
        self.defaults = dict(defaults)
        self.param_groups: list[dict[str, Any]] = []
        self.state: dict[str, dict[str, Any]] = {}
        self.steps = 0
        given = params if hasattr(params, "named_parameters") else list(params)
        groups = given if isinstance(given, list) and given and isinstance(given[0], Mapping) else [{"params": given}]
        for group in groups:
            self.add_param_group(group)

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        """Add parameters with options of their own."""
        unknown = set(group) - {"params"} - set(self.defaults)
        if unknown:
            raise ValueError(f"{type(self).__name__} has no option {min(unknown)!r}; it has {', '.join(self.defaults)}")
        pairs = parameters_of(group["params"])
        known = {name for other in self.param_groups for name in other["names"]}
        twice = known.intersection(name for name, _ in pairs)
        if twice:
            raise ValueError(f"the parameter {min(twice)!r} is in two groups")
        options = {**self.defaults, **{k: v for k, v in group.items() if k != "params"}}
        self.check(options)
        self.param_groups.append({"params": [p for _, p in pairs], "names": [n for n, _ in pairs], **options})

    def check(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError for options out of range."""
        if not callable(options["lr"]) and not options["lr"] >= 0:
            raise ValueError(f"{type(self).__name__}: lr is a schedule or a number of at least 0, got {options['lr']}")
        if options.get("weight_decay", 0) < 0:
            raise ValueError(f"{type(self).__name__}: weight_decay is at least 0, got {options['weight_decay']}")

    def lr(self, group: int = 0) -> float:
        """Return the learning rate that the next step will use for a group."""
        return learning_rate(self.param_groups[group]["lr"], self.steps)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or set them to zero."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.zero_grad(set_to_none)

    def step(self, grad_scale: float = 1.0) -> None:
        """Take one step. No message: every rank changes its own shards.

        Parameters
        ----------
        grad_scale : float
            Gradients are multiplied by it on the fly.

        Raises
        ------
        RuntimeError
            When a gradient is still partial: `hpcpar.parallel.GradientSync` has not been finished.
        """
        for group in self.param_groups:
            lr = learning_rate(group["lr"], self.steps)
            for name, parameter in zip(group["names"], group["params"], strict=True):
                if parameter.grad is None:
                    continue
                if parameter.grad.sig is not parameter.sig:
                    raise RuntimeError(
                        f"the gradient of {name} lies as {parameter.grad.layout!r}, the parameter as "
                        f"{parameter.layout!r}; reduce gradients before the step (hpcpar.parallel.GradientSync)"
                    )
                self.update(parameter, self._state_of(name, parameter), group, lr, grad_scale)
                parameter.changed()
        self.steps += 1

    def update(
        self, parameter: Parameter, state: dict[str, Any], group: Mapping[str, Any], lr: float, grad_scale: float
    ) -> None:
        """Change one parameter, and its state, in place."""
        raise NotImplementedError(f"{type(self).__name__} has no update")

    def _state_of(self, name: str, parameter: Parameter) -> dict[str, Any]:
        """The state of a parameter, brought to the parameter's layout where that has changed meanwhile."""
        state = self.state.setdefault(name, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.sig is not parameter.sig:
                state[key] = like_parameter(parameter, value.moved(parameter.sig))
        return state

    # ---- what a checkpoint stores

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name (tensors share memory), the options of the groups, and the steps taken."""
        groups = []
        for group in self.param_groups:
            options = {k: v for k, v in group.items() if k not in ("params", "names")}
            options["lr"] = learning_rate(options["lr"], self.steps)
            groups.append({"names": list(group["names"]), **options})
        return {"state": {n: dict(s) for n, s in self.state.items()}, "param_groups": groups, "steps": self.steps}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a state; arrays may be tensors, NumPy arrays or HDF5 datasets, and each rank takes its block.

        A learning rate that is a schedule stays; other options are taken over.
        """
        parameters = {n: p for g in self.param_groups for n, p in zip(g["names"], g["params"], strict=True)}
        unknown = [name for name in saved["state"] if name not in parameters]
        names = [group["names"] for group in saved["param_groups"]]
        if unknown or names != [group["names"] for group in self.param_groups]:
            what = f"nobody is called {unknown[0]!r}" if unknown else "the groups hold other parameters"
            raise ValueError(f"{type(self).__name__}.load_state_dict: {what}")
        for name, entries in saved["state"].items():
            parameter = parameters[name]
            self.state[name] = {key: _restored(parameter, value) for key, value in entries.items()}
        for group, options in zip(self.param_groups, saved["param_groups"], strict=True):
            kept = {k: v for k, v in options.items() if k != "names" and not (k == "lr" and callable(group["lr"]))}
            group.update(kept)
        self.steps = int(saved["steps"])

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__}("]
        for group in self.param_groups:
            options = ", ".join(f"{k}={v}" for k, v in group.items() if k not in ("params", "names"))
            lines.append(f"  {len(group['params'])} parameters: {options}")
        return "\n".join([*lines, ")"])


def learning_rate(lr: float | Schedule, step: int) -> float:
    """Return the number that `lr` is, or says for this step."""
    return float(lr(step)) if callable(lr) else float(lr)


def zeros_like(parameter: Parameter) -> Tensor:
    """Return zeros with the layout, dtype and memory order of a parameter."""
    made = empty_like(parameter)
    made[...] = 0
    return Tensor(made, parameter.sig)


def like_parameter(parameter: Parameter, shard: Any) -> Tensor:
    """Return a tensor with the parameter's layout and memory order that holds a copy of `shard`."""
    made = empty_like(parameter)
    made[...] = shard
    return Tensor(made, parameter.sig)


def _restored(parameter: Parameter, value: Any) -> Any:
    if np.ndim(value) == 0 and not isinstance(value, Tensor):
        return value.item() if hasattr(value, "item") else value
    made = zeros_like(parameter)
    assign(made, value)
    return made
