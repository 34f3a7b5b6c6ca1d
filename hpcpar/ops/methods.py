"""The operations as methods and operators of Tensor."""

from __future__ import annotations

from typing import Any

from hpcpar.ops import elementwise, gather, linear, reduction, repartition, shape
from hpcpar.tensors import Tensor

_NAMED = {
    elementwise: "exp log sqrt abs tanh sin cos clamp maximum minimum to pow",
    reduction: "sum mean var std amax amin argmax argmin logsumexp",
    shape: "reshape permute transpose flatten squeeze unsqueeze expand narrow split chunk",
    gather: "flip roll",
    linear: "matmul",
    repartition: "repartition resolve",
}


def _reversed(function: Any) -> Any:
    return lambda self, other: function(other, self)


def _comparison(name: str) -> Any:
    return lambda self, other: elementwise.compare(name, self, other)


def bind() -> None:
    """Give Tensor its methods; called once, when hpcpar.ops is imported."""
    for module, names in _NAMED.items():
        for name in names.split():
            setattr(Tensor, name, getattr(module, name))
    Tensor.view = shape.reshape
    operators = {
        "add": elementwise.add,
        "sub": elementwise.sub,
        "mul": elementwise.mul,
        "truediv": elementwise.div,
        "pow": elementwise.pow,
        "matmul": linear.matmul,
    }
    for name, function in operators.items():
        setattr(Tensor, f"__{name}__", function)
        setattr(Tensor, f"__r{name}__", _reversed(function))
    Tensor.__neg__ = elementwise.neg
    Tensor.__getitem__ = shape.index
    for name, full in (("lt", "less"), ("le", "less_equal"), ("gt", "greater"), ("ge", "greater_equal")):
        setattr(Tensor, f"__{name}__", _comparison(full))
    Tensor.eq, Tensor.ne = _comparison("equal"), _comparison("not_equal")
    Tensor.T = property(lambda self: shape.permute(self, tuple(reversed(range(self.ndim)))))
