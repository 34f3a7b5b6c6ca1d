"""Arithmetic and other functions of single elements, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from hpcpar.autograd import no_grad
from hpcpar.ops.broadcast import elementwise_rule, unbroadcast
from hpcpar.ops.core import Op, Rule, as_tensor
from hpcpar.signature import Signature
from hpcpar.tensors import Tensor

Number = int | float


class Add(Op):
    """Sum or difference; keeps partial values: an operand that is not partial counts on index 0 only."""

    linear = "sum"

    def __init__(self, name: str, function: Callable, negate: bool) -> None:
        self.name, self.function, self.negate = name, function, negate

    def rule(self, sigs: tuple[Signature, ...]) -> Rule:
        return elementwise_rule(self.name, sigs, keeps_partial=True)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return self.function(arrays[0], arrays[1]), None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        first, second = rule.plan
        other = unbroadcast(-g if self.negate else g, second) if needs[1] else None
        return (unbroadcast(g, first) if needs[0] else None), other


class Binary(Op):
    """A function of two operands, with its two partial derivatives.

    Parameters
    ----------
    left, right : callable
        ``left(g, a, b, out)`` is the gradient of the first operand, before it is summed over what was broadcast.
    needs_out : bool
        Whether they look at the result; else it is not kept.
    """

    def __init__(
        self,
        name: str,
        function: Callable,
        left: Callable,
        right: Callable,
        needs_out: bool = False,
        linear: str | None = None,
    ) -> None:
        self.name, self.function, self.left, self.right = name, function, left, right
        self.needs_out, self.linear = needs_out, linear
        self.saves_little = not needs_out

    def rule(self, sigs: tuple[Signature, ...]) -> Rule:
        return elementwise_rule(self.name, sigs)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        a, b = arrays
        out = self.function(a, b)
        return out, (a, b, out if self.needs_out else None)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        a, b, out = saved
        first, second = rule.plan
        da = unbroadcast(self.left(g, a, b, out), first) if needs[0] else None
        db = unbroadcast(self.right(g, a, b, out), second) if needs[1] else None
        return da, db


class Unary(Op):
    """A function of one operand; the derivative is ``derivative(g, a, out, extra)``.

    Parameters
    ----------
    saves : {"in", "out", "both", "none"}
        What the derivative needs; the rest is not kept.
    keeps_partial : bool
        The function is linear.
    """

    def __init__(
        self, name: str, function: Callable, derivative: Callable, saves: str = "in", keeps_partial: bool = False
    ) -> None:
        self.name, self.function, self.derivative = name, function, derivative
        self.saves_in, self.saves_out = saves in ("in", "both"), saves in ("out", "both")
        self.keeps_partial = keeps_partial
        self.saves_little = not self.saves_out
        self.linear = "each" if keeps_partial else None

    def rule(self, sigs: tuple[Signature, ...]) -> Rule:
        needed = sigs[0] if self.keeps_partial else sigs[0].resolved
        return Rule(needed, [needed], [sigs[0].resolved], sigs)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        a = arrays[0]
        out = self.function(a) if extra is None else self.function(a, extra)
        return out, (a if self.saves_in else None, out if self.saves_out else None, extra)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        a, out, extra = saved
        return (self.derivative(g, a, out, extra),)


class AddNumber(Op):
    """Tensor plus a Python number, which counts on index 0 of partial axes only."""

    name = "add"
    linear = "shift"

    def rule(self, sigs: tuple[Signature, ...]) -> Rule:
        sig = sigs[0]
        return Rule(sig, [sig], [sig.resolved], sigs, all(sig.mesh.index(a) == 0 for a in sig.partial))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        # adding 0 elsewhere keeps the dtypes of all ranks equal
        return arrays[0] + (extra if rule.plan else type(extra)(0)), None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        return (g,)


class Where(Op):
    """Elements of the second operand where the first is true, of the third elsewhere."""

    name = "where"

    def rule(self, sigs: tuple[Signature, ...]) -> Rule:
        return elementwise_rule(self.name, sigs)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        condition, a, b = arrays
        return np.where(condition, a, b), condition

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        zero = g.dtype.type(0)
        da = unbroadcast(np.where(saved, g, zero), rule.plan[1]) if needs[1] else None
        db = unbroadcast(np.where(saved, zero, g), rule.plan[2]) if needs[2] else None
        return None, da, db


class Compare(Op):
    """A comparison: a tensor of booleans, without gradient."""

    def __init__(self, name: str, function: Callable) -> None:
        self.name, self.function = name, function

    def rule(self, sigs: tuple[Signature, ...]) -> Rule:
        return elementwise_rule(self.name, sigs)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return self.function(arrays[0], arrays[1]), None


class Cast(Op):
    """Change of dtype; partial values survive a cast to a wider type only."""

    name = "to"

    def rule(self, sigs: tuple[Signature, ...], source: np.dtype, target: np.dtype) -> Rule:
        widens = np.can_cast(source, target, "safe")
        needed = sigs[0] if widens else sigs[0].resolved
        return Rule(needed, [needed], [sigs[0].resolved], sigs, (source, target))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return arrays[0].astype(rule.plan[1]), None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        return (g.astype(rule.plan[0]),)


def _ties(g: Any, a: Any, b: Any, wins: Callable) -> Any:
    """Gradient of maximum and minimum: torch halves it between equal operands."""
    return np.where(a == b, g * g.dtype.type(0.5), g * wins(a, b))


def _within(a: Any, low: Number | None, high: Number | None) -> Any:
    inside = a == a  # as torch: nothing flows to NaN
    if low is not None:
        inside &= a >= low
    if high is not None:
        inside &= a <= high
    return inside


_add = Add("add", np.add, negate=False)
_sub = Add("sub", np.subtract, negate=True)
_add_number = AddNumber()
_mul = Binary("mul", np.multiply, lambda g, a, b, out: g * b, lambda g, a, b, out: g * a, linear="each")
_div = Binary("div", np.divide, lambda g, a, b, out: g / b, lambda g, a, b, out: -g * out / b, needs_out=True)
_power = Binary(
    "pow",
    np.power,
    lambda g, a, b, out: g * np.where(b == 0, 0, b * np.power(a, np.where(b == 0, 1, b - 1))).astype(g.dtype),
    lambda g, a, b, out: g * out * np.log(np.where((a == 0) & (b >= 0), 1, a)).astype(g.dtype),
    needs_out=True,
)
_maximum = Binary(
    "maximum",
    np.maximum,
    lambda g, a, b, out: _ties(g, a, b, np.greater),
    lambda g, a, b, out: _ties(g, b, a, np.greater),
)
_minimum = Binary(
    "minimum", np.minimum, lambda g, a, b, out: _ties(g, a, b, np.less), lambda g, a, b, out: _ties(g, b, a, np.less)
)
_scale = Unary("mul", lambda a, k: a * k, lambda g, a, out, k: g * k, "none", keeps_partial=True)
_divide = Unary("div", lambda a, k: a / k, lambda g, a, out, k: g / k, "none", keeps_partial=True)
_neg = Unary("neg", np.negative, lambda g, a, out, _: -g, "none", keeps_partial=True)
_reciprocal = Unary("reciprocal", lambda a, k: k / a, lambda g, a, out, k: -g * out / a, "both")
_pow_number = Unary("pow", lambda a, k: a**k, lambda g, a, out, k: g * (k * a ** (k - 1) if k != 0 else a * 0), "in")
_exp = Unary("exp", np.exp, lambda g, a, out, _: g * out, "out")
_log = Unary("log", np.log, lambda g, a, out, _: g / a, "in")
_sqrt = Unary("sqrt", np.sqrt, lambda g, a, out, _: g / (2 * out), "out")
_abs = Unary("abs", np.abs, lambda g, a, out, _: g * np.sign(a), "in")
_tanh = Unary("tanh", np.tanh, lambda g, a, out, _: g * (1 - out * out), "out")
_sin = Unary("sin", np.sin, lambda g, a, out, _: g * np.cos(a), "in")
_cos = Unary("cos", np.cos, lambda g, a, out, _: -g * np.sin(a), "in")
_clamp = Unary("clamp", lambda a, k: np.clip(a, *k), lambda g, a, out, k: g * _within(a, *k), "in")
_where = Where()
_cast = Cast()
_comparisons = {
    f: Compare(f, getattr(np, f)) for f in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
}


def _number(value: Any) -> bool:
    if isinstance(value, Tensor):  # nearly always
        return False
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def _pair(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Return both operands as tensors of one dtype: the common one, a floating one before an integer one."""
    if not isinstance(a, Tensor):
        a = as_tensor(a, b)
    elif not isinstance(b, Tensor):
        b = as_tensor(b, a)
    first, second = a._data.dtype, b._data.dtype
    if first is second or first == second:
        return a, b
    floats = [t for t in (first, second) if t.kind in "fV"]
    common = floats[0] if len(floats) == 1 else np.result_type(first, second)
    return to(a, common), to(b, common)


def add(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """Return a + b with broadcasting. Partial operands stay partial."""
    if _number(b):
        return _add_number((a,), (), _plain(b))
    if _number(a):
        return _add_number((b,), (), _plain(a))
    return _add(_pair(a, b))


def sub(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """Return a - b with broadcasting. Partial operands stay partial."""
    if _number(b):
        return _add_number((a,), (), -_plain(b))
    if _number(a):
        return _add_number((_neg((b,)),), (), _plain(a))
    return _sub(_pair(a, b))


def mul(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """Return a * b with broadcasting. Scaling by a number keeps partial values."""
    if _number(b):
        return _scale((a,), (), _plain(b))
    if _number(a):
        return _scale((b,), (), _plain(a))
    return _mul(_pair(a, b))


def div(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """Return a / b with broadcasting. Division by a number keeps partial values."""
    if _number(b):
        return _divide((a,), (), _plain(b))
    if _number(a):
        return _reciprocal((b,), (), _plain(a))
    return _div(_pair(a, b))


def pow(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """Return a ** b with broadcasting."""
    if _number(b):
        return _pow_number((a,), (), _plain(b))
    if _number(a):
        return exp(mul(b, float(np.log(a))))
    return _power(_pair(a, b))


def _plain(value: Any) -> Number:
    """A Python number: NumPy scalars would widen float32 arrays."""
    return value.item() if isinstance(value, np.generic) else value


def neg(x: Tensor) -> Tensor:
    """Return -x; partial values stay partial."""
    return _neg((x,))


def exp(x: Tensor) -> Tensor:
    """Return e to the power of each element."""
    return _exp((x,))


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm of each element."""
    return _log((x,))


def sqrt(x: Tensor) -> Tensor:
    """Return the square root of each element."""
    return _sqrt((x,))


def abs(x: Tensor) -> Tensor:
    """Return the absolute value of each element; the derivative at 0 is 0."""
    return _abs((x,))


def tanh(x: Tensor) -> Tensor:
    """Return the hyperbolic tangent of each element."""
    return _tanh((x,))


def sin(x: Tensor) -> Tensor:
    """Return the sine of each element."""
    return _sin((x,))


def cos(x: Tensor) -> Tensor:
    """Return the cosine of each element."""
    return _cos((x,))


def clamp(x: Tensor, min: Number | None = None, max: Number | None = None) -> Tensor:
    """Return x limited to [min, max]; the derivative is 1 at the limits, as torch has it."""
    if min is None and max is None:
        raise ValueError("clamp needs min, max or both")
    return _clamp((x,), (), (min, max))


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """Return the larger of each pair; equal operands share the gradient."""
    return _maximum(_pair(a, b))


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """Return the smaller of each pair; equal operands share the gradient."""
    return _minimum(_pair(a, b))


def where(condition: Tensor, a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """Return elements of `a` where `condition` holds and of `b` elsewhere, with broadcasting."""
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        raise TypeError("where needs a tensor among its choices")
    a, b = _pair(a, b)
    return _where((as_tensor(condition, a, np.dtype(bool)), a, b))


def compare(name: str, a: Tensor, b: Tensor | Number) -> Tensor:
    """Return the elementwise comparison `name` (``less``, ``equal``, ...) as a tensor of booleans."""
    with no_grad():
        return _comparisons[name](_pair(a, b))


def to(x: Tensor, dtype: Any) -> Tensor:
    """Return x in another dtype; x itself when it has it."""
    target = np.dtype(dtype)
    if x.dtype == target:
        return x
    with nullcontext() if target.kind in "fV" else no_grad():  # integers and booleans have no gradient
        return _cast((x,), (x.dtype, target))
