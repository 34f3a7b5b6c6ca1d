"""All families of operations that cases are drawn from."""

from __future__ import annotations

from hpcpar.testing.attention_draws import ATTENTION
from hpcpar.testing.contraction_draws import PRODUCTS
from hpcpar.testing.drawing import Family
from hpcpar.testing.grid_draws import GRIDS
from hpcpar.testing.move_draws import MOVES
from hpcpar.testing.resample_draws import RESAMPLING
from hpcpar.testing.statistics_draws import STATISTICS
from hpcpar.testing.window_draws import WINDOWS

TRANSFORMERS: dict[str, Family] = {**PRODUCTS, **ATTENTION, **GRIDS}
"""Those of transformers."""

FAMILIES: dict[str, Family] = {**WINDOWS, **RESAMPLING, **MOVES, **STATISTICS, **TRANSFORMERS}
