"""Pointwise bands that a plot is read against."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import special, stats

Floats = npt.NDArray[np.float64]

_TAIL = 0.025


def uniform_quantile_band(num_values: int) -> tuple[Floats, Floats, Floats]:
    """Of `num_values` sorted independent uniforms: expectations, and 2.5 % and 97.5 % quantiles, [num_values] each.

    The k-th of n is Beta(k, n + 1 - k) (David & Nagaraja 2003, section 2.3).
    """
    rank = np.arange(1, num_values + 1)
    ends = [special.betaincinv(rank, num_values + 1 - rank, tail) for tail in (_TAIL, 1 - _TAIL)]
    return rank / (num_values + 1), ends[0], ends[1]


def binomial_band(num_trials: int, probability: float) -> tuple[float, float]:
    """2.5 % and 97.5 % quantiles of a count."""
    counts = stats.binom.ppf([_TAIL, 1 - _TAIL], num_trials, probability)
    return float(counts[0]), float(counts[1])
