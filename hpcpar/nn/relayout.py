"""Changes of layout that a module makes at its borders, and the record of them."""

from __future__ import annotations

from typing import Any

from hpcpar.layout.layout import Layout
from hpcpar.ops.repartition import repartition
from hpcpar.primitives.repartition import plan
from hpcpar.signature import Signature, signature
from hpcpar.tensors import Tensor


class Moves:
    """The moves of one module, each once, however often it is repeated."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Signature, Signature], str] = {}

    def bring(self, name: str, value: Any, layout: Layout) -> Tensor:
        """Return the tensor `value` under `layout`, and record the move where there is one.

        Raises
        ------
        ValueError
            It is no tensor.
        LayoutError
            The layout does not fit.
        """
        if not isinstance(value, Tensor):
            raise ValueError(f"a module with a layout takes and returns a tensor, got a {type(value).__name__}")
        target = signature(value.mesh, value.shape, layout)
        if target is value.sig:
            return value
        key = (value.sig, target)
        if key not in self._seen:
            steps = plan(*key)
            self._seen[key] = f"{name}: {value.layout!r} -> {target.layout!r}: {steps}, {steps.words:g} elements"
        return repartition(value, layout)

    def lines(self) -> list[str]:
        """Return one line for each move."""
        return list(self._seen.values())
