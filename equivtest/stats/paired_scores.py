"""Scores of two arms on the same items, a few seeds each: the interval of their difference, and the usual reading."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from equivtest.errors import InsufficientSamples, InvalidSetting, NoSpread

Scores = npt.NDArray[np.float64]

LEVEL = 0.05
"""Two-sided level of every interval here: 95 %."""
POWER = 0.9
"""Power at which a visible difference and the items that would settle a margin are stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedInterval:
    """One arm's mean score and the interval that its seeds give it."""

    mean: float
    ci_low: float
    ci_high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """Mean score of one arm minus that of the other."""

    estimate: float
    standard_error: float
    ci_low: float
    ci_high: float
    p_value: float
    num_items: int

    @property
    def visible(self) -> float:
        """The difference that is told from 0 with a power of 90 %: (z_0.975 + z_0.9) standard errors."""
        return float(stats.norm.ppf(1 - LEVEL / 2) + stats.norm.ppf(POWER)) * self.standard_error

    def items_for_margin(self, margin: float) -> int:
        """Items with which the interval of a true difference of 0 lies within +-margin with a power of 90 %: those at
        which (z_0.975 + z_0.95) standard errors are the margin."""
        reach = float(stats.norm.ppf(1 - LEVEL / 2) + stats.norm.ppf((1 + POWER) / 2)) * self.standard_error
        return math.ceil(self.num_items * (reach / margin) ** 2)


def seed_interval(scores: Scores) -> SeedInterval:
    """The usual reading of a few seeds: mean m of the seeds' mean scores x_s, with m +- t_(S-1, 0.975) sd(x) / sqrt(S).

    scores: [num_items, num_seeds]. Assumes seeds that are independent; says how far other seeds on these very items
    would fall. Source: Student 1908. Raises InsufficientSamples for fewer than 2 seeds.
    """
    num_seeds = scores.shape[1]
    if num_seeds < 2:
        raise InsufficientSamples("interval over seeds", num_seeds, 2)
    means = scores.mean(axis=0)
    mean = float(means.mean())
    half = float(stats.t.ppf(1 - LEVEL / 2, num_seeds - 1) * means.std(ddof=1) / math.sqrt(num_seeds))
    return SeedInterval(mean=mean, ci_low=mean - half, ci_high=mean + half)


def overlap(one: SeedInterval, other: SeedInterval) -> bool:
    """Whether two intervals have a point in common. No test of stated level: for few seeds it hardly ever says no."""
    return one.ci_low <= other.ci_high and other.ci_low <= one.ci_high


def paired_difference(off: Scores, on: Scores) -> PairedDifference:
    """H0: both arms score alike. The interval of the mean difference, paired by item and clustered by item.

    off, on: [num_items, num_seeds] each, rows of one item side by side. With d_i the difference of the arms' mean
    scores over the seeds of item i, d their mean and n items: SE = sqrt(sum (d_i - d)^2 / (n (n - 1))), the interval
    d +- t_(n-1, 0.975) SE and the p-value of d / SE. Items are the clusters: however the seeds of one item hang
    together, their mean enters once. Assumes items independent of each other, and enough of them (a hundred) for d to
    be normal. Scores need not be 0 or 1.

    Source: Student 1908; for evaluations with repeated samples Miller 2024 (arXiv 2411.00640), paired differences.
    Raises InvalidSetting for shapes that do not pair; InsufficientSamples for fewer than 2 items; NoSpread where every
    item has the same difference.
    """
    if off.ndim != 2 or off.shape[0] != on.shape[0] or on.ndim != 2 or not off.shape[1] or not on.shape[1]:
        raise InvalidSetting("scores", (off.shape, on.shape), "must be [num_items, num_seeds] over the same items")
    num_items = len(off)
    differences = on.mean(axis=1) - off.mean(axis=1)
    if num_items < 2:
        raise InsufficientSamples("paired difference (items)", num_items, 2)
    estimate, spread = float(differences.mean()), float(differences.std(ddof=1))
    if spread <= 1e-12:
        raise NoSpread("difference between the arms", num_items)
    error = spread / math.sqrt(num_items)
    half = float(stats.t.ppf(1 - LEVEL / 2, num_items - 1)) * error
    return PairedDifference(
        estimate=estimate,
        standard_error=error,
        ci_low=estimate - half,
        ci_high=estimate + half,
        p_value=float(2 * stats.t.sf(abs(estimate) / error, num_items - 1)),
        num_items=num_items,
    )
