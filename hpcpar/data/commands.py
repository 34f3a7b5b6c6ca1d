"""What ``hpcpar data NAME`` runs: a built-in data set is a function (out, ..., sharing) -> paths.

The command says how its ranks share the work and, after the call, waits for all of them: only then is the set complete.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hpcpar.data.brain import make_brain
from hpcpar.data.cosmology import make_cosmology
from hpcpar.data.text import make_text

__all__ = ["DATA_SETS", "make_brain", "make_cosmology", "make_text"]

DATA_SETS: dict[str, Callable[..., list[Path]]] = {"brain": make_brain, "cosmology": make_cosmology, "text": make_text}
