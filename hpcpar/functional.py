"""All operations under one name, as torch.nn.functional and torch have them."""

from hpcpar.ops.elementwise import abs, add, clamp, cos, div, exp, log, maximum, minimum, mul, neg, pow, sin, sqrt, sub, tanh, to, where
from hpcpar.ops.linear import einsum, linear, matmul
from hpcpar.ops.reduction import amax, amin, argmax, argmin, logsumexp, mean, std, sum, var
from hpcpar.ops.repartition import explain, repartition, resolve
from hpcpar.ops.shape import cat, chunk, expand, flatten, narrow, permute, reshape, split, squeeze, stack, transpose, unsqueeze

__all__ = [
    "abs", "add", "amax", "amin", "argmax", "argmin", "cat", "chunk", "clamp", "cos", "div", "einsum", "exp", "expand",
    "explain", "flatten", "linear", "log", "logsumexp", "matmul", "maximum", "mean", "minimum", "mul", "narrow", "neg",
    "permute", "pow", "repartition", "reshape", "resolve", "sin", "split", "sqrt", "squeeze", "stack", "std", "sub", "sum",
    "tanh", "to", "transpose", "unsqueeze", "var", "where",
]  # fmt: skip
