"""All families of operations that cases are drawn from."""

from __future__ import annotations

from hpcpar.testing.drawing import Family
from hpcpar.testing.move_draws import MOVES
from hpcpar.testing.resample_draws import RESAMPLING
from hpcpar.testing.statistics_draws import STATISTICS
from hpcpar.testing.window_draws import WINDOWS

FAMILIES: dict[str, Family] = {**WINDOWS, **RESAMPLING, **MOVES, **STATISTICS}
