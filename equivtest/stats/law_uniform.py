"""Tests of the law family on probability integral transforms (PIT).

H0: each token is drawn from the target's law at its prefix. Its randomised PIT is then uniform on [0, 1] given
everything before it, in any order of the vocabulary (Rosenblatt 1952), so the PITs of a run are independent uniforms.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from scipy import special

from equivtest.errors import InsufficientSamples
from equivtest.records import Evidence
from equivtest.stats.law_martingale import MIN_TOKENS
from equivtest.stats.scored import Floats, Ints, ScoredTokens

NUM_BINS = 20
"""Equal bins of the chi-squared test."""

Order = Literal["rank", "vocab"]
_ORDER_WORDS: dict[Order, str] = {"rank": "descending probability", "vocab": "vocabulary order"}

_PRODUCT_VARIANCE = 1 / 144
"""Variance of the product of two independent centred uniforms."""

_Z_95 = 1.959963984540054


def pit(tokens: ScoredTokens, stratum: str, *, order: Order, margin: float | None = None) -> Evidence:
    """Are the PITs uniform? Pearson's chi-squared over 20 equal bins against the uniform law, 19 degrees of freedom.

    The estimate is the supremum distance between their distribution function and the uniform one, and its interval is
    the Dvoretzky-Kiefer-Wolfowitz band with Massart's constant, 95 %. order "rank" sees any change of the law's shape,
    "vocab" faults of a draw that inverts the distribution function in vocabulary order.
    """
    values = tokens.pit_rank if order == "rank" else tokens.pit_vocab
    num_tokens = _require_tokens(order, len(values))
    counts = pit_histogram(values)
    expected = num_tokens / NUM_BINS
    statistic = float(((counts - expected) ** 2).sum() / expected)
    distance, band = sup_distance(values), dkw_half_width(num_tokens)
    return Evidence(
        family="law",
        name=order,
        stratum=stratum,
        statistic=statistic,
        df=float(NUM_BINS - 1),
        p_value=float(special.chdtrc(NUM_BINS - 1, statistic)),
        estimate=distance,
        ci_low=max(0.0, distance - band),
        ci_high=min(1.0, distance + band),
        margin=margin,
        num_tokens=num_tokens,
        method=f"chi-squared of {NUM_BINS} bins of the PIT in {_ORDER_WORDS[order]}; estimate: supremum distance, "
        "Dvoretzky-Kiefer-Wolfowitz band",
    )


def pit_histogram(values: Floats) -> Ints:
    """[NUM_BINS] counts of PITs in equal bins; 1.0 belongs to the last."""
    return np.bincount(np.minimum((values * NUM_BINS).astype(np.int64), NUM_BINS - 1), minlength=NUM_BINS)


def sup_distance(values: Floats) -> float:
    """Kolmogorov's distance of the empirical distribution function from the uniform one."""
    ordered = np.sort(values)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    return float(max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()))


def dkw_half_width(num_tokens: int, level: float = 0.05) -> float:
    """Half-width of the band that holds the whole distribution function with probability 1 - level (Massart 1990)."""
    return math.sqrt(math.log(2 / level) / (2 * num_tokens))


def rows(tokens: ScoredTokens, stratum: str) -> Evidence:
    """Do neighbouring rows of one step draw independently? The sum of the products of their centred rank PITs.

    Pairs tokens of batch rows b and b + 1 that one step put out at the same place of the block. Under H0 a product has
    mean 0 and variance 1/144 and products are uncorrelated, those that share a row included. The estimate is the
    correlation. H1: rows share coins.
    """
    left, right = neighbours(tokens)
    num_pairs = _require_tokens("rows", len(left))
    products = (tokens.pit_rank[left] - 0.5) * (tokens.pit_rank[right] - 0.5)
    total = float(products.sum())
    z = total / math.sqrt(num_pairs * _PRODUCT_VARIANCE)
    estimate = 12 * total / num_pairs
    half_width = 12 * _Z_95 * math.sqrt(float(((products - total / num_pairs) ** 2).sum())) / num_pairs
    return Evidence(
        family="law",
        name="rows",
        stratum=stratum,
        statistic=z,
        p_value=float(2 * special.ndtr(-abs(z))),
        estimate=estimate,
        ci_low=estimate - half_width,
        ci_high=estimate + half_width,
        num_tokens=num_pairs,
        method="z of products of the centred rank PITs of neighbouring rows of a step; estimate: correlation",
    )


def neighbours(tokens: ScoredTokens) -> tuple[Ints, Ints]:
    """Indices of the two tokens of each pair of neighbouring rows, arrays [num_pairs]."""
    place = np.maximum(tokens.slot, 0)
    order = np.lexsort((tokens.batch_row, place, tokens.step, tokens.batch))
    left, right = order[:-1], order[1:]
    paired = tokens.batch_row[right] - tokens.batch_row[left] == 1
    for column in (tokens.batch, tokens.step, place):
        paired &= column[left] == column[right]
    return left[paired], right[paired]


def _require_tokens(name: str, have: int) -> int:
    if have < MIN_TOKENS:
        raise InsufficientSamples(f"law/{name}", have, MIN_TOKENS)
    return have
