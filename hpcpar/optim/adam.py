"""Adam and AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hpcpar import kernels
from hpcpar.nn.module import Parameters
from hpcpar.optim.optimizer import Optimizer, Schedule, zeros_like
from hpcpar.tensors import Parameter


class Adam(Optimizer):
    """Adam (Kingma and Ba 2015); formulas, names and defaults as in torch.

    Parameters
    ----------
    params : Module, iterable of Parameter, of (name, Parameter), or of dict
    lr : float or schedule
    betas : (float, float)
        Decay of the first and of the second moment.
    eps : float
        Added to the root of the second moment, after its correction.
    weight_decay : float
        Times the parameter, added to the gradient.
    amsgrad : bool
        Divide by the largest second moment so far (Reddi et al. 2018).
    maximize : bool
        Go uphill.
    """

    kernel: Callable[..., None] = staticmethod(kernels.adam_step)

    def __init__(
        self,
        params: Parameters | Iterable[Mapping[str, Any]],
        lr: float | Schedule = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "amsgrad": amsgrad, "maximize": maximize})

    def check(self, options: Mapping[str, Any]) -> None:
        super().check(options)
        if not all(0 <= beta < 1 for beta in options["betas"]) or options["eps"] < 0:
            given = f"{options['betas']} and {options['eps']}"
            raise ValueError(f"{type(self).__name__}: betas lie in [0, 1) and eps is at least 0, got {given}")

    def update(
        self, parameter: Parameter, state: dict[str, Any], group: Mapping[str, Any], lr: float, grad_scale: float
    ) -> None:
        if not state:
            state.update(step=0, exp_avg=zeros_like(parameter), exp_avg_sq=zeros_like(parameter))
            if group["amsgrad"]:
                state["max_exp_avg_sq"] = zeros_like(parameter)
        state["step"] += 1
        self.kernel(
            parameter.shard, parameter.grad.shard, state["exp_avg"].shard, state["exp_avg_sq"].shard, state["step"], lr,
            *group["betas"], group["eps"], group["weight_decay"],
            state["max_exp_avg_sq"].shard if group["amsgrad"] else None,
            -grad_scale if group["maximize"] else grad_scale,
        )  # fmt: skip


class AdamW(Adam):
    """`Adam` whose weights decay on their own, by ``lr * weight_decay`` (Loshchilov and Hutter 2019)."""

    kernel = staticmethod(kernels.adamw_step)

    def __init__(
        self,
        params: Parameters | Iterable[Mapping[str, Any]],
        lr: float | Schedule = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize)
