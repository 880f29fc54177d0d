"""Tests of a rejection sampler whose laws are known exactly, at levels as small as 1e-9.

H0: a draft with target probability p and draft probability q is accepted with probability min(1, p/q) given everything
before it; the token that ends the row is a draw from its law. No p-value is smaller than a uniform one, up to the few
percent that `concentration` states.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from equivtest.records import Evidence
from equivtest.stats.concentration import MIN_PER_BIN, equal_bins, freedman, freedman_critical
from equivtest.stats.law_martingale import MAX_WEIGHT
from equivtest.stats.law_uniform import dkw_half_width, sup_distance

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

MOST_BINS = 20
"""Of a chi-squared test."""

_Z_95 = 1.959963984540054


def open_decisions(accept_prob: Floats) -> Bools:
    """Which decisions are open: neither sure to accept nor sure to reject."""
    return (accept_prob > 0) & (accept_prob < 1)


def acceptance(accepted: Bools, accept_prob: Floats, *, name: str, stratum: str) -> Evidence | None:
    """Are drafts accepted with min(1, p/q)? Arrays [n], a decision each. None where no decision is open.

    S = sum of w (accepted - a), w = min(1 / (a (1 - a)), 100); the estimate is S / sum of w, the excess of the
    acceptance probability, with its 95 % interval.
    """
    chosen = open_decisions(accept_prob)
    a, kept = accept_prob[chosen], accepted[chosen]
    if not len(a):
        return None
    variance = a * (1 - a)
    weight = np.minimum(1 / variance, MAX_WEIGHT)
    total, scale = float((weight * (kept - a)).sum()), float(weight.sum())
    spread = float((weight**2 * variance).sum())
    estimate, half = total / scale, _Z_95 * math.sqrt(float((weight**2 * (kept - a) ** 2).sum())) / scale
    return Evidence(
        family="kernel",
        name=name,
        stratum=stratum,
        statistic=total / math.sqrt(spread),
        p_value=freedman(total, spread, float((weight * np.maximum(a, 1 - a)).max())),
        estimate=estimate,
        ci_low=estimate - half,
        ci_high=estimate + half,
        num_tokens=len(a),
        method=f"Freedman bound of accepted - min(1, p/q), weights min(1/Var, {MAX_WEIGHT:g}); estimate: excess of the "
        "acceptance probability",
    )


def smallest_bias(accept_prob: Floats, *, level: float, power: float = 0.9) -> float:
    """The excess of the acceptance probability that `acceptance` finds with `power` at p-value `level`.

    Under a small excess b, S has mean b sum(w) and the variance V of H0, so b = (critical value + z V^(1/2)) / sum(w).
    accept_prob: [n] of the decisions that will be made. inf where none of them is open.
    """
    a = accept_prob[open_decisions(accept_prob)]
    if not len(a):
        return math.inf
    variance = a * (1 - a)
    weight = np.minimum(1 / variance, MAX_WEIGHT)
    spread = float((weight**2 * variance).sum())
    critical = freedman_critical(level, spread, float((weight * np.maximum(a, 1 - a)).max()))
    return (critical + float(ndtri(power)) * math.sqrt(spread)) / float(weight.sum())


def draws(transforms: Floats, *, name: str, stratum: str) -> Evidence | None:
    """Are probability integral transforms [n] uniform? Likelihood-ratio chi-squared over at most 20 equal bins.

    There are as many bins as expect 50 transforms each. The estimate is the supremum distance from the uniform
    distribution function, with the 95 % Dvoretzky-Kiefer-Wolfowitz band. None for n below 100.
    """
    num_bins = min(MOST_BINS, len(transforms) // MIN_PER_BIN)
    if num_bins < 2:
        return None
    counts = np.bincount(np.minimum((transforms * num_bins).astype(np.int64), num_bins - 1), minlength=num_bins)
    statistic, p_value = equal_bins(counts)
    distance, band = sup_distance(transforms), dkw_half_width(len(transforms))
    return Evidence(
        family="kernel",
        name=name,
        stratum=stratum,
        statistic=statistic,
        df=float(num_bins - 1),
        p_value=p_value,
        estimate=distance,
        ci_low=max(0.0, distance - band),
        ci_high=min(1.0, distance + band),
        num_tokens=len(transforms),
        method=f"likelihood-ratio chi-squared of {num_bins} equal bins; estimate: supremum distance",
    )


def shared(first: Floats, second: Floats, variance: Floats, *, name: str, stratum: str) -> Evidence | None:
    """Does what came first tell about what came second? Arrays [n]: S = sum of first * second.

    H0: given all of `first`, second has mean 0 and the given variance, and |second| is at most 1. The estimate is the
    correlation. None where S cannot move.
    """
    spread = float((first**2 * variance).sum())
    if not spread:
        return None
    products = first * second
    total = float(products.sum())
    scale = math.sqrt(float((first**2).sum()) * float(variance.sum()))
    estimate, half = total / scale, _Z_95 * math.sqrt(float((products**2).sum())) / scale
    return Evidence(
        family="kernel",
        name=name,
        stratum=stratum,
        statistic=total / math.sqrt(spread),
        p_value=freedman(total, spread, float(np.abs(first).max())),
        estimate=estimate,
        ci_low=estimate - half,
        ci_high=estimate + half,
        num_tokens=len(first),
        method="Freedman bound of products of centred draws; estimate: correlation",
    )
