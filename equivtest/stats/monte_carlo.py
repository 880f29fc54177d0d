"""Monte-Carlo power: how often a family finds a bias, and the smallest bias that it finds often enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.stats import binomtest

from equivtest.errors import InsufficientSamples, InvalidSetting
from equivtest.stats.joint import DEFAULT_PERMUTATIONS, joint_family
from equivtest.stats.joint_statistics import STATISTICS, StatisticName
from equivtest.stats.marginal import Statistic, marginal_family

Tokens = npt.NDArray[np.integer]
Samples = Sequence[Tokens]
"""One integer array [n, T] a stratum, one sample a row."""
Simulator = Callable[[float, np.random.Generator], tuple[Samples, Samples]]
"""Bias to the samples of both arms, off and on."""
Detector = Callable[[Samples, Samples, np.random.Generator], bool]
"""Both arms to whether the bias is found."""
FamilyName = Literal["marginal", "max_z", "mmd", "joint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerPoint:
    """How often one detector found one bias."""

    bias: float
    num_found: int
    num_replications: int
    ci_low: float
    ci_high: float
    """Exact 95 % interval of the power (Clopper & Pearson 1934)."""

    @property
    def power(self) -> float:
        return self.num_found / self.num_replications


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasSearch:
    """The smallest bias found with the power asked for, by bisection."""

    missed: float
    """Largest bias tried below it: found too seldom."""
    found: float
    """Smallest bias tried that was found often enough."""
    points: tuple[PowerPoint, ...]
    """Every bias tried, in rising order."""


def detector(
    family: FamilyName, *, level: float = 0.01, marginal_level: float = 0.05, num_permutations: int | None = None
) -> Detector:
    """The rule by which a family flags a run.

    marginal, max_z: any rejection at q = marginal_level after Benjamini-Hochberg over all cells; mmd: its p-value at
    most `level`; joint: the smallest Holm-adjusted p-value of the family at most `level`.
    num_permutations: by default what the family itself takes.
    """
    if family == "marginal":
        return partial(_found_by_marginal, "chi2", marginal_level, None)
    if family == "max_z":
        return partial(_found_by_marginal, "max_z", marginal_level, num_permutations)
    statistics: tuple[StatisticName, ...] = ("mmd",) if family == "mmd" else tuple(STATISTICS)
    return partial(_found_by_joint, statistics, level, num_permutations or DEFAULT_PERMUTATIONS)


def monte_carlo_power(
    simulate: Simulator,
    detectors: Mapping[str, Detector],
    bias: float,
    *,
    num_replications: int,
    rng: np.random.Generator,
) -> dict[str, PowerPoint]:
    """How often each detector finds `bias`, all on the same samples. Raises InvalidSetting."""
    if num_replications < 1:
        raise InvalidSetting("num_replications", num_replications, "must be at least 1")
    found = dict.fromkeys(detectors, 0)
    for _ in range(num_replications):
        off, on = simulate(bias, rng)
        for name, finds in detectors.items():
            found[name] += bool(finds(off, on, rng))
    return {name: power_point(bias, count, num_replications) for name, count in found.items()}


def power_curve(
    simulate: Simulator,
    detectors: Mapping[str, Detector],
    biases: Sequence[float],
    *,
    num_replications: int,
    rng: np.random.Generator,
) -> dict[str, tuple[PowerPoint, ...]]:
    """`monte_carlo_power` at each bias, by detector."""
    points = [
        monte_carlo_power(simulate, detectors, bias, num_replications=num_replications, rng=rng) for bias in biases
    ]
    return {name: tuple(point[name] for point in points) for name in detectors}


def search_smallest_bias(
    simulate: Simulator,
    finds: Detector,
    *,
    low: float = 0.0,
    high: float = 0.5,
    power: float = 0.9,
    tolerance: float = 0.005,
    num_replications: int,
    rng: np.random.Generator,
) -> BiasSearch:
    """Bisect between `low` (taken as missed) and `high` until they are at most `tolerance` apart.

    A bias counts as found where at least the share `power` of replications found it, so `found` is where the power
    curve crosses `power` to within the interval of its points. Raises InsufficientSamples if `high` is not found,
    InvalidSetting.
    """
    if not (0 <= low < high and tolerance > 0 and 0 < power < 1):
        raise InvalidSetting(
            "(low, high, tolerance, power)",
            (low, high, tolerance, power),
            "must satisfy 0 <= low < high, 0 < tolerance, 0 < power < 1",
        )

    def at(bias: float) -> PowerPoint:
        return monte_carlo_power(simulate, {"": finds}, bias, num_replications=num_replications, rng=rng)[""]

    points = [at(high)]
    if points[0].power < power:
        raise InsufficientSamples(
            f"power: replications in which a bias of {high:g} is found", points[0].num_found, num_replications
        )
    while high - low > tolerance:
        middle = at((low + high) / 2)
        points.append(middle)
        low, high = (low, middle.bias) if middle.power >= power else (middle.bias, high)
    return BiasSearch(missed=low, found=high, points=tuple(sorted(points, key=lambda point: point.bias)))


def power_point(bias: float, num_found: int, num_replications: int) -> PowerPoint:
    """The share of replications that found a bias, with its exact interval."""
    interval = binomtest(num_found, num_replications).proportion_ci(0.95)
    return PowerPoint(
        bias=bias,
        num_found=num_found,
        num_replications=num_replications,
        ci_low=float(interval.low),
        ci_high=float(interval.high),
    )


def _found_by_marginal(
    statistic: Statistic, q: float, num_permutations: int | None, off: Samples, on: Samples, rng: np.random.Generator
) -> bool:
    cells_off, cells_on = ([cell for samples in arm for cell in samples.T] for arm in (off, on))
    result = marginal_family(
        cells_off,
        cells_on,
        statistic=statistic,
        q=q,
        num_permutations=num_permutations,
        num_tv_permutations=1,
        rng=rng,
    )
    return result.num_rejected > 0


def _found_by_joint(
    statistics: Sequence[StatisticName],
    level: float,
    num_permutations: int,
    off: Samples,
    on: Samples,
    rng: np.random.Generator,
) -> bool:
    result = joint_family(off, on, statistics=statistics, num_permutations=num_permutations, level=level, rng=rng)
    return result.p_value <= level
