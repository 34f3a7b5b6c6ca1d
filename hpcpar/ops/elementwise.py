"""Arithmetic and other functions of single elements, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcpar.ops.broadcast import elementwise_rule, unbroadcast
from hpcpar.ops.core import Op, Rule, as_tensor
from hpcpar.signature import Signature
from hpcpar.tensors import Tensor

Number = int | float


class Add(Op):
    """Sum or difference; keeps partial values: an operand that is not partial counts on index 0 only."""

    linear = "sum"

    def __init__(self, name: str, function: Callable, negate: bool) -> None:
        super().__init__()
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
    gradient : callable
        ``gradient(a, b, out) -> (da, db)`` as two functions of g.
    """

    def __init__(self, name: str, function: Callable, left: Callable, right: Callable, linear: str | None = None) -> None:
        super().__init__()
        self.name, self.function, self.left, self.right, self.linear = name, function, left, right, linear

    def rule(self, sigs: tuple[Signature, ...]) -> Rule:
        return elementwise_rule(self.name, sigs)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        a, b = arrays
        out = self.function(a, b)
        return out, (a, b, out)

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
        super().__init__()
        self.name, self.function, self.derivative, self.saves = name, function, derivative, saves
        self.keeps_partial = keeps_partial
        self.linear = "each" if keeps_partial else None

    def rule(self, sigs: tuple[Signature, ...]) -> Rule:
        needed = sigs[0] if self.keeps_partial else sigs[0].resolved
        return Rule(needed, [needed], [sigs[0].resolved], sigs)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        a = arrays[0]
        out = self.function(a) if extra is None else self.function(a, extra)
        kept = {"in": (a, None), "out": (None, out), "both": (a, out), "none": (None, None)}[self.saves]
        return out, (*kept, extra)

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        a, out, extra = saved
        return (self.derivative(g, a, out, extra),)


class AddNumber(Op):
    """Tensor plus a Python number, which counts on index 0 of partial axes only."""

    name = "add"

    def rule(self, sigs: tuple[Signature, ...]) -> Rule:
        sig = sigs[0]
        return Rule(sig, [sig], [sig.resolved], sigs, all(sig.mesh.index(a) == 0 for a in sig.partial))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return (arrays[0] + extra if rule.plan else arrays[0]), None

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
        super().__init__()
        self.name, self.function = name, function

    def rule(self, sigs: tuple[Signature, ...]) -> Rule:
        return elementwise_rule(self.name, sigs)

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return self.function(arrays[0], arrays[1]), None


class Cast(Op):
    """Change of dtype; partial values survive a cast to a wider type only."""

    name = "to"

    def rule(self, sigs: tuple[Signature, ...], source: str, target: str) -> Rule:
        widens = np.can_cast(source, target, "safe")
        needed = sigs[0] if widens else sigs[0].resolved
        return Rule(needed, [needed], [sigs[0].resolved], sigs, (np.dtype(source), np.dtype(target)))

    def forward(self, rule: Rule, arrays: Sequence[Any], extra: Any) -> tuple[Any, Any]:
        return arrays[0].astype(rule.plan[1]), None

    def backward(self, rule: Rule, saved: Any, g: Any, needs: tuple[bool, ...]) -> tuple:
        return (g.astype(rule.plan[0]),)


def _ties(g: Any, a: Any, b: Any, wins: Callable) -> Any:
    """Gradient of maximum and minimum: torch halves it between equal operands."""
    half = g.dtype.type(0.5)
    return g * (wins(a, b) + half * (a == b))


_add = Add("add", np.add, negate=False)
_sub = Add("sub", np.subtract, negate=True)
_add_number = AddNumber()
_mul = Binary("mul", np.multiply, lambda g, a, b, out: g * b, lambda g, a, b, out: g * a, linear="each")
_div = Binary("div", np.divide, lambda g, a, b, out: g / b, lambda g, a, b, out: -g * out / b)
_power = Binary(
    "pow",
    np.power,
    lambda g, a, b, out: g * b * np.power(a, b - 1),
    lambda g, a, b, out: g * out * np.log(np.where(a > 0, a, 1).astype(a.dtype)),
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
_clamp = Unary(
    "clamp", lambda a, k: np.clip(a, *k), lambda g, a, out, k: g * ((a >= k[0]) & (a <= k[1])).astype(g.dtype), "in"
)
_where = Where()
_cast = Cast()
_comparisons = {
    f: Compare(f, getattr(np, f)) for f in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
}


def _number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def add(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """Return a + b with broadcasting. Partial operands stay partial."""
    if _number(b):
        return _add_number((a,), (), _plain(b))
    if _number(a):
        return _add_number((b,), (), _plain(a))
    return _add((a, as_tensor(b, a))) if isinstance(a, Tensor) else _add((as_tensor(a, b), b))


def sub(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """Return a - b with broadcasting. Partial operands stay partial."""
    if _number(b):
        return _add_number((a,), (), -_plain(b))
    if _number(a):
        return _add_number((_neg((b,)),), (), _plain(a))
    return _sub((a, as_tensor(b, a))) if isinstance(a, Tensor) else _sub((as_tensor(a, b), b))


def mul(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """Return a * b with broadcasting. Scaling by a number keeps partial values."""
    if _number(b):
        return _scale((a,), (), _plain(b))
    if _number(a):
        return _scale((b,), (), _plain(a))
    return _mul((a, as_tensor(b, a))) if isinstance(a, Tensor) else _mul((as_tensor(a, b), b))


def div(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """Return a / b with broadcasting. Division by a number keeps partial values."""
    if _number(b):
        return _scale((a,), (), 1.0 / _plain(b))
    if _number(a):
        return _reciprocal((b,), (), _plain(a))
    return _div((a, as_tensor(b, a))) if isinstance(a, Tensor) else _div((as_tensor(a, b), b))


def pow(a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """Return a ** b with broadcasting."""
    if _number(b):
        return _pow_number((a,), (), _plain(b))
    if _number(a):
        return exp(mul(b, float(np.log(a))))
    return _power((a, b))


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
    return _clamp((x,), (), (-np.inf if min is None else min, np.inf if max is None else max))


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """Return the larger of each pair; equal operands share the gradient."""
    return _maximum((a, as_tensor(b, a)))


def minimum(a: Tensor, b: Tensor) -> Tensor:
    """Return the smaller of each pair; equal operands share the gradient."""
    return _minimum((a, as_tensor(b, a)))


def where(condition: Tensor, a: Tensor | Number, b: Tensor | Number) -> Tensor:
    """Return elements of `a` where `condition` holds and of `b` elsewhere, with broadcasting."""
    like = a if isinstance(a, Tensor) else b
    if not isinstance(like, Tensor):
        raise TypeError("where needs a tensor among its choices")
    return _where((condition, as_tensor(a, like), as_tensor(b, like)))


def compare(name: str, a: Tensor, b: Tensor | Number) -> Tensor:
    """Return the elementwise comparison `name` (``less``, ``equal``, ...) as a tensor of booleans."""
    from hpcpar.autograd import no_grad

    with no_grad():
        return _comparisons[name]((a, as_tensor(b, a)))


def to(x: Tensor, dtype: Any) -> Tensor:
    """Return x in another dtype; x itself when it has it."""
    target = np.dtype(dtype)
    return x if x.dtype == target else _cast((x,), (x.dtype.str, target.str))
