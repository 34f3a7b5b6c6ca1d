"""Elementwise operations against torch under random layouts, broadcasting included."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import hpcpar as hp
from hpcpar.testing import compare_with_serial, draw_layout, draw_mesh, run_cases

torch = pytest.importorskip("torch", reason="torch is the oracle")
F = hp.functional

SHAPES = [
    ((4, 5), (4, 5)),
    ((4, 5), (5,)),
    ((4, 1), (1, 5)),
    ((1, 7, 3), (2, 1, 3)),
    ((3,), ()),
    ((0, 4), (4,)),
    ((1, 2), (6, 2)),
]
BINARY: dict[str, tuple[Callable, Callable]] = {
    "add": (F.add, torch.add),
    "sub": (F.sub, torch.sub),
    "mul": (F.mul, torch.mul),
    "div": (F.div, torch.div),
    "maximum": (F.maximum, torch.maximum),
    "minimum": (F.minimum, torch.minimum),
    "pow": (lambda a, b: F.pow(F.abs(a), b), lambda a, b: torch.pow(torch.abs(a), b)),
}


def binary_case(name: str) -> Callable[[np.random.Generator], None]:
    ours, theirs = BINARY[name]

    def case(rng: np.random.Generator) -> None:
        mesh = draw_mesh(rng, ("a", "b"))
        shapes = SHAPES[rng.integers(len(SHAPES))]
        arrays = [rng.standard_normal(s) + 3 * (name == "div") for s in shapes]
        layouts = [draw_layout(rng, s, mesh, partial=True) for s in shapes]
        compare_with_serial(ours, theirs, arrays, mesh, layouts, parameters=[1] if rng.integers(2) else [])

    return case


@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_operands_equal_torch_under_every_layout(name: str) -> None:
    count = run_cases(binary_case(name), 40, seed=1)
    assert count.accepted > 15
