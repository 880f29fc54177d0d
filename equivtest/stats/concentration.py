"""p-values for levels as small as 1e-9, where normal tails and sparse chi-squared tables cannot be trusted."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy import special

from equivtest.errors import InsufficientSamples, InvalidSetting

Ints = npt.NDArray[np.int64]

MIN_PER_BIN = 50
"""Counts that a bin must expect: down to 1e-9 the tail of `equal_bins` is then within a few percent of chi-squared."""


def freedman(total: float, variance: float, largest: float) -> float:
    """Two-sided p-value of a sum of martingale differences: 2 exp(-total^2 / (2 (variance + largest |total| / 3))).

    H0: every term has mean 0 given those before it. variance: the sum of the terms' variances given those before;
    largest: a bound of every |term|. A bound at every number of terms, which needs about a seventh more of them than a
    normal tail would. The theorem is of the event that the variance stays below a fixed number; it is used at the
    variance that came out, which differs from its mean by one part in the root of the number of terms.
    Source: Freedman 1975, theorem 1.6. Raises InvalidSetting.
    """
    if not (variance >= 0 and largest >= 0 and math.isfinite(total)):
        raise InvalidSetting("variance, largest, total", (variance, largest, total), "must be finite and at least 0")
    if total == 0:
        return 1.0
    if variance + largest == 0:  # a sum of terms that cannot move has moved
        return 0.0
    return min(1.0, 2 * math.exp(-(total**2) / (2 * (variance + largest * abs(total) / 3))))


def freedman_critical(p_value: float, variance: float, largest: float) -> float:
    """The |total| at which `freedman` gives `p_value`: a root of x^2 - 2 l (largest / 3) x - 2 l variance."""
    exponent = math.log(2 / p_value)
    half = exponent * largest / 3
    return half + math.sqrt(half**2 + 2 * exponent * variance)


def equal_bins(counts: Ints) -> tuple[float, float]:
    """Likelihood-ratio chi-squared of counts [k] against k equally likely bins: (statistic, p-value).

    H0: n independent draws, each bin as likely as the others. G = 2 sum n_i ln(k n_i / n), divided by Williams'
    correction 1 + (k + 1) / (6 n), against chi-squared with k - 1 degrees of freedom. Where every bin expects
    MIN_PER_BIN counts this holds far into the tail, which Pearson's statistic does not: at 50 expected and a level of
    1e-9 that one rejects twice as often as it should. Source: Williams 1976. Raises InsufficientSamples.
    """
    num_bins, total = len(counts), int(counts.sum())
    if num_bins < 2 or total < MIN_PER_BIN * num_bins:
        raise InsufficientSamples("equal_bins (counts)", total, MIN_PER_BIN * max(num_bins, 2))
    filled = counts[counts > 0].astype(np.float64)
    g = max(0.0, 2 * float((filled * np.log(filled * num_bins / total)).sum()))
    statistic = g / (1 + (num_bins + 1) / (6 * total))
    return statistic, float(special.chdtrc(num_bins - 1, statistic))
