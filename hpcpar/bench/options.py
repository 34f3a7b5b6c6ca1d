"""What a run of the benchmark is asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Size of a run.

    Attributes
    ----------
    quick : bool
        Small networks and few repeats: to see that everything runs. Its figures mean nothing.
    repeats : int or None
        Of everything; by default each measurement knows how many it needs.
    ranks : int
        Of what is split.
    """

    quick: bool = False
    repeats: int | None = None
    ranks: int = 2

    def rounds(self, usual: int) -> int:
        """Return how often something is repeated that usually is `usual` times."""
        return self.repeats or (2 if self.quick else usual)

    @property
    def least(self) -> float:
        """Seconds that one timing of something short should fill."""
        return 0.0 if self.quick else 0.02
