"""Adjusted p-values for many tests at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

from equivtest.errors import InsufficientSamples, InvalidSetting

Floats = npt.NDArray[np.float64]
Correction = Literal["bh", "by", "holm", "bonferroni"]


def benjamini_hochberg(p_values: Floats) -> Floats:
    """Bounds the false discovery rate under independence or positive dependence (Benjamini & Hochberg 1995).

    p_values: float64 [m]. Returns float64 [m]: reject where at most q. With every null true, the probability of any
    rejection is at most q as well.
    """
    return _step_up(p_values, 1.0)


def benjamini_yekutieli(p_values: Floats) -> Floats:
    """Bounds the false discovery rate under any dependence (Benjamini & Yekutieli 2001, theorem 1.3).

    p_values: float64 [m]. Returns float64 [m]: reject where at most q. Costs the factor `harmonic(m)`.
    """
    return _step_up(p_values, harmonic(len(p_values)))


def holm(p_values: Floats) -> Floats:
    """Bounds the probability of any false rejection under any dependence (Holm 1979).

    p_values: float64 [m]. Returns float64 [m]: reject where at most alpha.
    """
    values = _checked(p_values)
    order = np.argsort(values)
    stepped = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1))
    return _in_place(stepped, order)


def bonferroni(p_values: Floats) -> Floats:
    """Bounds the probability of any false rejection under any dependence, each test judged apart from the others.

    p_values: float64 [m]. Returns float64 [m]: reject where at most alpha.
    """
    values = _checked(p_values)
    return np.minimum(values * len(values), 1.0)


ADJUST: Mapping[Correction, Callable[[Floats], Floats]] = {
    "bh": benjamini_hochberg,
    "by": benjamini_yekutieli,
    "holm": holm,
    "bonferroni": bonferroni,
}
"""Correction by name."""


def harmonic(num_tests: int) -> float:
    """1 + 1/2 + ... + 1/m: what Benjamini-Yekutieli costs over Benjamini-Hochberg."""
    return float(np.sum(1.0 / np.arange(1, num_tests + 1)))


def _step_up(p_values: Floats, cost: float) -> Floats:
    values = _checked(p_values)
    order = np.argsort(values)
    stepped = values[order] * cost / (np.arange(1, len(values) + 1) / len(values))
    return _in_place(np.minimum.accumulate(stepped[::-1])[::-1], order)


def _in_place(stepped: Floats, order: npt.NDArray[np.intp]) -> Floats:
    """Adjusted values in rising order back to where their p-values stood."""
    adjusted = np.empty_like(stepped)
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted


def _checked(p_values: Floats) -> Floats:
    values = np.asarray(p_values, np.float64)
    if not values.size:
        raise InsufficientSamples("multiplicity", 0, 1)
    if not np.all((values >= 0) & (values <= 1)):  # also catches NaN
        raise InvalidSetting("p_values", values[~((values >= 0) & (values <= 1))][0], "must be in [0, 1]")
    return values
