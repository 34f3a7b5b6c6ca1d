"""The choice of a next token from its logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcpar import kernels


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes
    ----------
    temperature : float
        Logits are divided by it; 0 takes the most probable token, of equal ones the first.
    top_k : int, optional
        Only the k most probable tokens (Fan et al. 2018), and those as probable as the last of them.
    top_p : float, optional
        Only the most probable tokens that together have at least this probability (Holtzman et al. 2020).
    seed : int
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature is at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k is at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is above 0 and at most 1, got {self.top_p}")

    def choose(self, logits: np.ndarray, step: int) -> np.ndarray:
        """Return one token for each row of logits (N, V).

        Draws are a function of (seed, step, row), so they are the same on every rank and under every mesh.
        """
        if self.temperature == 0:
            return logits.argmax(axis=1)
        rows = len(logits)
        draws = kernels.random_uniform(self.seed, step, (rows,), ((0, rows),), np.float64)
        chances = np.cumsum(self.probabilities(logits), axis=1)
        # the sum may fall short of 1 by rounding, and a token without probability is never chosen
        below = chances <= (draws * chances[:, -1])[:, None]
        return below.sum(axis=1)

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return the probability (N, V) of each token, in float64."""
        scaled = logits.astype(np.float64) / self.temperature
        if self.top_k is not None and self.top_k < scaled.shape[1]:
            least = np.partition(scaled, -self.top_k, axis=1)[:, -self.top_k, None]
            scaled = np.where(scaled >= least, scaled, -np.inf)
        weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        if self.top_p is None:
            return weights
        order = np.argsort(-weights, axis=1, kind="stable")
        ranked = np.take_along_axis(weights, order, axis=1)
        kept = np.cumsum(ranked, axis=1) - ranked < self.top_p
        np.put_along_axis(weights, order, np.where(kept, ranked, 0.0), axis=1)
        return weights / weights.sum(axis=1, keepdims=True)
