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


def binomial_intervals(num_trials: int, confidence: float = 0.95) -> tuple[Floats, Floats]:
    """Lower and upper ends of the interval of a probability, for each count 0..num_trials: [num_trials + 1] each.

    Equal tails, never shorter than it should be (Clopper & Pearson 1934).
    """
    count, tail = np.arange(num_trials + 1), (1 - confidence) / 2
    low, high = np.zeros(num_trials + 1), np.ones(num_trials + 1)
    low[1:] = special.betaincinv(count[1:], num_trials + 1 - count[1:], tail)
    high[:-1] = special.betaincinv(count[:-1] + 1, num_trials - count[:-1], 1 - tail)
    return low, high


def sum_band(probabilities: Floats) -> tuple[float, float]:
    """2.5 % and 97.5 % quantiles of the mean of independent events of these probabilities, by the central limit
    theorem, within 0 and 1."""
    mean, variance = probabilities.mean(), (probabilities * (1 - probabilities)).sum()
    half = stats.norm.ppf(1 - _TAIL) * np.sqrt(variance) / len(probabilities)
    return float(max(0.0, mean - half)), float(min(1.0, mean + half))
