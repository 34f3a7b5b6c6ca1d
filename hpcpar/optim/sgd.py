"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hpcpar import kernels
from hpcpar.nn.module import Parameters
from hpcpar.optim.optimizer import Optimizer, Schedule, like_parameter
from hpcpar.tensors import Parameter


class SGD(Optimizer):
    """Stochastic gradient descent with momentum; formulas, names and defaults as in torch.

    Parameters
    ----------
    params : Module, iterable of Parameter, of (name, Parameter), or of dict
    lr : float or schedule
    momentum, dampening : float
        ``buf = momentum * buf + (1 - dampening) * grad``; the first step takes the gradient undampened.
    weight_decay : float
        Times the parameter, added to the gradient.
    nesterov : bool
        Look ahead (Nesterov 1983, as Sutskever et al. 2013 have it).
    maximize : bool
        Go uphill.
    """

    def __init__(
        self,
        params: Parameters | Iterable[Mapping[str, Any]],
        lr: float | Schedule = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**options, "nesterov": nesterov, "maximize": maximize})

    def check(self, options: Mapping[str, Any]) -> None:
        super().check(options)
        if options["momentum"] < 0:
            raise ValueError(f"SGD: momentum is at least 0, got {options['momentum']}")
        if options["nesterov"] and (options["momentum"] <= 0 or options["dampening"] != 0):
            raise ValueError("SGD: nesterov needs a momentum, and no dampening")

    def update(
        self, parameter: Parameter, state: dict[str, Any], group: Mapping[str, Any], lr: float, grad_scale: float
    ) -> None:
        buffer, first = None, False
        if group["momentum"]:
            first = "momentum_buffer" not in state
            if first:
                state["momentum_buffer"] = like_parameter(parameter, parameter.shard)
            buffer = state["momentum_buffer"].shard
        kernels.sgd_step(
            parameter.shard, parameter.grad.shard, buffer, lr, group["momentum"], group["dampening"],
            group["weight_decay"], group["nesterov"], first, -grad_scale if group["maximize"] else grad_scale,
        )  # fmt: skip
