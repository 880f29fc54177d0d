"""On minus off: what is left of the law family when both arms are measured with the same slightly wrong law.

In bfloat16 the scorer's law differs from the decoder's by rounding, the same way in both arms. H0: tokens of both arms
deviate from the scored law alike. H1: they do not. What needs a draft (bias, lag) has no counterpart in a plain arm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from scipy import special

from equivtest.errors import InsufficientSamples
from equivtest.records import Evidence
from equivtest.stats.law_martingale import MIN_TOKENS, SLOT_KINDS, slots_of_kind
from equivtest.stats.law_uniform import NUM_BINS, Order, dkw_half_width, pit_histogram
from equivtest.stats.scored import Bools, Floats, ScoredTokens

_Z_95 = 1.959963984540054


def on_minus_off(on: ScoredTokens, off: ScoredTokens, stratum: str) -> tuple[Evidence, ...]:
    """surprisal by slot kind of arm on against all of arm off, then rank and vocab; p-values are raw.

    surprisal: difference of the mean excesses in nats over its standard error, variances as observed. rank, vocab:
    Pearson's chi-squared of two samples over 20 bins; the estimate is the supremum distance of the two distribution
    functions, its interval the sum of their Dvoretzky-Kiefer-Wolfowitz bands at 97.5 % each. Kinds of slot with fewer
    than 100 tokens in arm on are left out. Raises InsufficientSamples when an arm has fewer than 100 tokens.
    """
    for arm, tokens in (("on", on), ("off", off)):
        if tokens.num_tokens < MIN_TOKENS:
            raise InsufficientSamples(f"law on minus off, arm {arm}", tokens.num_tokens, MIN_TOKENS)
    return (*_surprisals(on, off, stratum), _pit(on, off, stratum, "rank"), _pit(on, off, stratum, "vocab"))


def _surprisals(on: ScoredTokens, off: ScoredTokens, stratum: str) -> Iterator[Evidence]:
    plain = _excess(off, np.ones(off.num_tokens, np.bool_))
    for kind in SLOT_KINDS:
        here = _excess(on, slots_of_kind(on, kind))
        if min(len(here), len(plain)) < MIN_TOKENS:
            continue
        difference = float(here.mean() - plain.mean())
        error = math.sqrt(float(here.var()) / len(here) + float(plain.var()) / len(plain))
        if error == 0:
            continue
        yield Evidence(
            family="law",
            name=f"surprisal_{kind}",
            stratum=stratum,
            statistic=difference / error,
            p_value=float(2 * special.ndtr(-abs(difference / error))),
            estimate=difference,
            ci_low=difference - _Z_95 * error,
            ci_high=difference + _Z_95 * error,
            num_tokens=len(here) + len(plain),
            method=f"z of the mean excess of -ln p(y) on {kind} slots minus that of arm off; estimate: nats",
        )


def _excess(tokens: ScoredTokens, chosen: Bools) -> Floats:
    """-ln p(y) - entropy of the chosen tokens whose outcome was open."""
    chosen = chosen & (tokens.p_token > 0) & (tokens.var_surprisal > 0)
    excess: Floats = -np.log(tokens.p_token[chosen]) - tokens.entropy[chosen]
    return excess


def _pit(on: ScoredTokens, off: ScoredTokens, stratum: str, order: Order) -> Evidence:
    values = [tokens.pit_rank if order == "rank" else tokens.pit_vocab for tokens in (on, off)]
    counts = np.array([pit_histogram(arm) for arm in values], np.float64)
    total = counts.sum(axis=0)
    expected = counts.sum(axis=1, keepdims=True) * total / total.sum()
    held = total > 0
    statistic = float(((counts - expected)[:, held] ** 2 / expected[:, held]).sum())
    df = max(int(held.sum()) - 1, 1)
    ordered = [np.sort(arm) for arm in values]
    points = np.concatenate(ordered)
    heights = [np.searchsorted(arm, points, side="right") / len(arm) for arm in ordered]
    distance = float(np.abs(heights[0] - heights[1]).max())
    band = sum(dkw_half_width(len(arm), 0.025) for arm in values)
    return Evidence(
        family="law",
        name=order,
        stratum=stratum,
        statistic=statistic,
        df=float(df),
        p_value=float(special.chdtrc(df, statistic)),
        estimate=distance,
        ci_low=max(0.0, distance - band),
        ci_high=min(1.0, distance + band),
        num_tokens=on.num_tokens + off.num_tokens,
        method=f"two-sample chi-squared of {NUM_BINS} bins of the {order} transform; estimate: supremum distance",
    )
