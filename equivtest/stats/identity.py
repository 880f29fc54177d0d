"""Things that must be the same and are counted where they are not: texts under one seed, drafts under one law."""

from __future__ import annotations

from scipy import stats

from equivtest.errors import InsufficientSamples
from equivtest.records import Evidence

TEXT_RATE = 1e-3
"""Share of float32 texts that rounding may turn: a batch of another shape moves probabilities by some 1e-7, so a coin
or a greedy choice falls on the other side once in about 1e5 tokens."""

DRAFT_RATE = 1e-4
"""Share of drafts that rounding may turn: a draft redrawn from the very law it was drawn from differs in sums only."""


def same(
    name: str,
    stratum: str,
    *,
    num_changed: int,
    num_compared: int,
    num_tokens: int,
    rate: float,
    method: str,
) -> Evidence:
    """Are there more changes than rounding makes?

    H0: each of n comparisons differs independently with probability at most `rate`. p is the exact probability that a
    Binomial(n, rate) variable is at least the number of changes. The statistic is that number, the estimate its share.
    Raises InsufficientSamples for n = 0.
    """
    if num_compared < 1:
        raise InsufficientSamples(f"identity/{name} (comparisons)", num_compared, 1)
    return Evidence(
        family="identity",
        name=name,
        stratum=stratum,
        statistic=float(num_changed),
        p_value=float(stats.binom.sf(num_changed - 1, num_compared, rate)) if num_changed else 1.0,
        estimate=num_changed / num_compared,
        num_tokens=num_tokens,
        method=f"{method}: {num_changed} of {num_compared} differ; exact binomial tail at {rate:g}; estimate: share",
    )
