"""How well another law explains tokens that do not follow their own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import stats

from equivtest.errors import InsufficientSamples
from equivtest.records import Evidence

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

MIN_ROWS = 50
"""Tokens of a kind of row below which nothing is said about it."""

_MIXED = 0.01
"""Share of a uniform law that is mixed into both laws, so that a token that one of them excludes counts, and not for
ever: at most ln(1 / _MIXED) or so."""

_TOLERATED = 0.002
"""Share of tokens outside an alternative's support that does not speak against it: two forwards differ at the cut."""


def likelihood_gain(
    name: str,
    rows: str,
    *,
    p_law: Floats,
    p_token: Floats,
    entropy: Floats,
    var_surprisal: Floats,
    off_support: Bools,
    vocab_size: int,
) -> Evidence:
    """The gain in log-likelihood when the tokens are said to come from an alternative law, and whether that law fits.

    All arrays are [num_tokens]: p_law the probability of the token under its own law; the others are the alternative's.
    The statistic is the gain in nats, sum of ln of the ratio of both probabilities, each mixed with the uniform law;
    the estimate is its mean. p_value is of the fit: H0 is that the alternative is the law of the tokens; the sum of
    their surprisals, centred by the entropies and scaled by the root of the summed variances, is standard normal then
    (two-sided), and it is 0 where more tokens than rounding explains lie outside the alternative's support. Raises
    InsufficientSamples for fewer than MIN_ROWS tokens.
    """
    count = len(p_law)
    if count < MIN_ROWS:
        raise InsufficientSamples(f"alternative/{name} ({rows})", count, MIN_ROWS)
    mixed = [(1 - _MIXED) * p + _MIXED / vocab_size for p in (p_token, p_law)]
    gains = np.log(mixed[0] / mixed[1])
    inside = ~off_support & (p_token > 0)
    variance = float(var_surprisal[inside].sum())
    excess = float((-np.log(p_token[inside]) - entropy[inside]).sum())
    fit = float(2 * stats.norm.sf(abs(excess) / variance**0.5)) if variance > 0 else 1.0
    return Evidence(
        family="alternative",
        name=name,
        stratum=rows,
        statistic=float(gains.sum()),
        p_value=0.0 if off_support.mean() > _TOLERATED else fit,
        estimate=float(gains.mean()),
        num_tokens=count,
        method="log-likelihood gained over the law, nats; p: of the alternative's own fit; estimate: nats a token",
    )
