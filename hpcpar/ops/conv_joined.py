"""Convolution of what a concatenation of channels would give, without making it.

The result is the sum of the convolutions of the parts, each with its channels of the weight, added up where it lies.
Neither the concatenation nor its gradient is ever in memory, and each gradient comes out dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np

from hpcpar import kernels
from hpcpar.layout.layout import Layout
from hpcpar.ops.conv_arguments import Geometry, conv_sizes
from hpcpar.ops.conv_plan import ConvPlan, channel_layouts
from hpcpar.ops.core import Op, Rule
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor


class JoinedConv(Op):
    """Convolution with (O, C, *kernel) of parts (N, C_i, *spatial) whose C_i add up to C; the weight comes first."""

    name = "conv"
    linear = "joined"

    def rule(self, sigs: tuple[Signature, ...], geometry: Geometry, out: Layout | None, parameter: bool) -> Rule:
        w, *parts = (sig.resolved for sig in sigs)
        mesh, first = w.mesh, parts[0]
        edges = list(pairwise(accumulate((x.shape[1] for x in parts), initial=0)))
        sizes = conv_sizes((first.shape[0], edges[-1][1], *first.shape[2:]), w.shape, geometry)
        shape = (first.shape[0], w.shape[0], *sizes)
        target = signature(mesh, shape, out).layout if out is not None else None
        lays = []
        for x in parts:
            own = signature(mesh, (w.shape[0], x.shape[1], *w.shape[2:]), w.layout)
            lays.append(channel_layouts(self.name, x, own, 1, target, parameter))
        out_dims = lays[0].out_dims
        result = signature(mesh, shape, Layout(*out_dims))
        weight = w.with_layout(lays[0].w.layout)
        lost = mesh.sort([a for d, stack in enumerate(out_dims) if d != 1 for a in stack])
        dx = [lay.x.with_partial(mesh.sort(set(out_dims[1]) - set(lay.x.split_axes))) for lay in lays]
        plans = [ConvPlan(lay, result, geometry) for lay in lays]
        moves = [weight, *(lay.x for lay in lays)]
        return Rule(result, moves, [weight.with_partial(lost), *dx], sigs, list(zip(plans, edges, strict=True)))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        w, *parts = arrays
        y = None
        for x, (plan, (a, b)) in zip(parts, rule.plan, strict=True):
            y, _ = plan.ahead.finish(plan.ahead.halo.start(x), w[:, a:b], into=y)
        return y, tuple(arrays)

    def rounding(self, rule: Rule) -> float:
        return rule.plan[0][0].rounding

    def flops(self, rule: Rule) -> int:
        return 2 * rule.out.size * prod(rule.grads[0].shape[1:])

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> Sequence[Any]:
        w, *parts = saved
        grads: list[Any] = [None] * len(needs)
        pending = rule.plan[0][0].back.halo.start(kernels.to_channels_last(g))  # what it brings serves all parts
        dy = None
        for i, (plan, (a, b)) in enumerate(rule.plan, 1):
            if not needs[i]:
                continue
            if dy is None:
                grads[i], dy = plan.back.finish(pending, w[:, a:b])
            else:
                back = plan.back
                grads[i] = kernels.conv_backward_data(dy, w[:, a:b], back.shape, *back.arguments, **back.compute)
        if needs[0]:
            dy = pending.wait() if dy is None else dy
            shares = [
                plan.back.weight_gradient(dy, x, w[:, a:b].shape)
                for x, (plan, (a, b)) in zip(parts, rule.plan, strict=True)
            ]
            grads[0] = np.concatenate(shares, axis=1)
        return grads


def joinable(parts: Sequence[Tensor], weight: Tensor, geometry: Geometry) -> bool:
    """Whether a convolution takes the parts as they are: channels whole, everything else split alike."""
    first, w = parts[0].sig.resolved, weight.sig.resolved
    return (
        geometry.groups == 1
        and geometry.mode == "zeros"
        and not w.dims[1]
        and not first.dims[1]
        and all(x.sig.resolved.dims == first.dims and x.dtype == parts[0].dtype for x in parts)
        and all(x.shape[:1] + x.shape[2:] == first.shape[:1] + first.shape[2:] for x in parts)
    )


joined_conv = JoinedConv()
