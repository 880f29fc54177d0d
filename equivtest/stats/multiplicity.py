"""Adjusted p-values for many tests at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt
from statsmodels.stats.multitest import multipletests

from equivtest.errors import InsufficientSamples, InvalidSetting

Floats = npt.NDArray[np.float64]
Correction = Literal["bh", "by", "holm", "bonferroni"]


def benjamini_hochberg(p_values: Floats) -> Floats:
    """Bounds the false discovery rate under independence or positive dependence (Benjamini & Hochberg 1995).

    p_values: float64 [m]. Returns float64 [m]: reject where at most q. With every null true, the probability of any
    rejection is at most q as well.
    """
    return _adjusted(p_values, "fdr_bh")


def benjamini_yekutieli(p_values: Floats) -> Floats:
    """Bounds the false discovery rate under any dependence (Benjamini & Yekutieli 2001, theorem 1.3).

    p_values: float64 [m]. Returns float64 [m]: reject where at most q. Costs the factor `harmonic(m)`.
    """
    return _adjusted(p_values, "fdr_by")


def holm(p_values: Floats) -> Floats:
    """Bounds the probability of any false rejection under any dependence (Holm 1979).

    p_values: float64 [m]. Returns float64 [m]: reject where at most alpha.
    """
    return _adjusted(p_values, "holm")


def bonferroni(p_values: Floats) -> Floats:
    """Bounds the probability of any false rejection under any dependence, each test judged apart from the others.

    p_values: float64 [m]. Returns float64 [m]: reject where at most alpha.
    """
    return _adjusted(p_values, "bonferroni")


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


def _adjusted(p_values: Floats, method: str) -> Floats:
    values = np.asarray(p_values, np.float64)
    if not values.size:
        raise InsufficientSamples("multiplicity", 0, 1)
    if not np.all((values >= 0) & (values <= 1)):  # also catches NaN
        raise InvalidSetting("p_values", values[~((values >= 0) & (values <= 1))][0], "must be in [0, 1]")
    adjusted: Floats = multipletests(values, method=method)[1]
    return adjusted
