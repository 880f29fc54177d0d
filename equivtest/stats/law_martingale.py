"""Tests of the law family that are sums with a known conditional mean and variance.

H0: each token is drawn from the target's law p_t at its prefix. For a weight w_t known before y_t is drawn and a
function f, the sum S of w_t (f(y_t) - E f) is a martingale with quadratic variation V, the sum of w_t^2 Var f, mean and
variance over p_t; z = S / sqrt(V) is standard normal by the martingale central limit theorem (Hall & Heyde 1980,
corollary 3.1). H1: any law under which S drifts. p-values are two-sided. Intervals are 95 % with the variance that was
observed, which stays right under H1.

Strata are of what is known before the draw: slot, slot kind, origin of the token before. The origin of the token itself
is not: among recovered tokens no token equals its draft.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from scipy import special

from equivtest.errors import InsufficientSamples
from equivtest.records import Evidence, Origin
from equivtest.stats.scored import ORIGIN_CODES, Bools, Floats, ScoredTokens

SlotKind = Literal["draft", "bonus", "plain"]
SLOT_KINDS: tuple[SlotKind, ...] = ("draft", "bonus", "plain")
"""Kinds of slots: where a draft is on offer, after full acceptance, and where no draft is offered."""

MAX_WEIGHT = 100.0
"""Cap of the bias test's weight 1 / Var f: a draft that is nearly never or nearly always right counts no more.

Without a cap the weights are the best ones against a small bias and S has heavy tails. On drafts of a small language
model a cap of 20 needs 1.76 times the samples of the Neyman-Pearson limit, 100 needs 1.27 times."""

SMALL_RUN_WEIGHT = 20.0
"""The cap where a run is too small for the tails of S under MAX_WEIGHT."""

MIN_TOKENS = 100
"""Fewest tokens whose outcome is open that a test takes."""

NO_ACCEPTANCE = "q's mass at the token, which is no acceptance probability"
"""What the bias test estimates where drafts were sampled; the end of its `method`."""

_MAX_SKEWNESS = 0.3
"""Largest bound on the skewness of S at which its normal tails are trusted."""

_MAX_KURTOSIS = 0.25
"""The same for the excess kurtosis of a sum that is symmetric."""

_Z_95 = 1.959963984540054


def bias(tokens: ScoredTokens, stratum: str, *, margin: float | None = None, slot: int | None = None) -> Evidence:
    """Are drafts kept too often, or too seldom? f = q_t(y), w = min(1 / Var f, cap), on draft slots (or on one).

    The cap is 100, or 20 where few tokens make the tails of S under 100 too heavy: that is decided by variances alone.

    The estimate is the weighted mean of f - E f: for a greedy drafter, where f = 1[y = draft], the excess of the
    acceptance probability. For a sampled drafter it is the excess of q's mass at the token; 1[y = draft] must not be
    used there, for given the draft it is right to put it out with min(1, p/q), not p. Slots whose outcome is certain
    (Var f = 0) have no weight: nothing can be accepted in excess there, and `support` sees what is put out off the law.
    """
    name = "bias" if slot is None else f"bias_slot_{slot}"
    chosen = tokens.has_draft & (tokens.q_variance > 0)
    if slot is not None:
        chosen &= tokens.slot == slot
    variance = tokens.q_variance[chosen]
    _require_tokens(name, len(variance))
    for cap in (MAX_WEIGHT, SMALL_RUN_WEIGHT):
        weight = 1.0 / np.maximum(variance, 1.0 / cap)
        # |f - E f| is at most 1, so w^3 Var f bounds the third moment of a term.
        skewness = float((weight**3 * variance).sum()) / float((weight**2 * variance).sum()) ** 1.5
        if skewness <= _MAX_SKEWNESS:
            break
    else:
        # At the same mix of tokens the skewness falls with the root of their number.
        need = math.ceil(len(variance) * (skewness / _MAX_SKEWNESS) ** 2)
        raise InsufficientSamples(f"law/{name} (tokens with an open outcome)", len(variance), need)
    certain = has_certain_drafts(tokens)
    unit = "the probability of the draft" if certain else NO_ACCEPTANCE
    return _z_test(
        name,
        stratum,
        deviation=tokens.q_token[chosen] - tokens.q_mean[chosen],
        variance=variance,
        weight=weight,
        unit=weight,
        margin=margin if certain else None,
        method=f"martingale z of q(y) on draft slots, weights min(1/Var, {cap:g}); estimate: weighted mean excess of "
        f"{unit}",
    )


def has_certain_drafts(tokens: ScoredTokens) -> bool:
    """Whether every q is a point mass, as of a greedy drafter: f = q(y) is then 0 or 1."""
    drafted = tokens.has_draft
    mean = tokens.q_mean[drafted]
    return bool(np.allclose(tokens.q_variance[drafted], mean * (1 - mean), atol=1e-6))


def surprisal(tokens: ScoredTokens, stratum: str, *, kind: SlotKind) -> Evidence:
    """Is -ln p_t(y) as large as its entropy says? f = -ln p_t(y), w = 1, on slots of one kind: draft, bonus or plain.

    The estimate is the mean excess in nats: positive when tokens are less likely than they should be (too hot, filters
    too weak, another prefix's law). Tokens with p(y) = 0 have no surprisal; `support` counts them.
    """
    name = f"surprisal_{kind}"
    chosen = slots_of_kind(tokens, kind) & (tokens.p_token > 0) & (tokens.var_surprisal > 0)
    _require_tokens(name, int(chosen.sum()))
    ones = np.ones(int(chosen.sum()))
    return _z_test(
        name,
        stratum,
        deviation=-np.log(tokens.p_token[chosen]) - tokens.entropy[chosen],
        variance=tokens.var_surprisal[chosen],
        weight=ones,
        unit=ones,
        margin=None,
        method=f"martingale z of -ln p(y) on {kind} slots; estimate: mean excess in nats",
    )


def lag(tokens: ScoredTokens, stratum: str, *, previous: Origin) -> Evidence:
    """Does the draw of the token before decide whether this draft is kept? f = q_t(y), w = PIT of y_{t-1}, centred.

    The PIT is in vocabulary order, the order in which draws invert the distribution function, so it carries the coin of
    the token before; on draft slots after a token of one origin. Given that origin it is not uniform, so it is centred
    at its mean over these slots, which keeps a plain bias out of the sum; the mean is not known before the draws, but
    its own error adds a term that is bounded while the sum grows as the root of the number of tokens. The estimate is
    the slope: by how much the probability of the draft changes from the lowest to the highest coin.
    """
    name = f"lag_{previous}"
    chosen = tokens.has_draft & tokens.continues & (tokens.q_variance > 0)
    chosen[1:] &= tokens.origin[:-1] == ORIGIN_CODES[previous]
    here = np.flatnonzero(chosen)
    _require_tokens(name, len(here))
    weight = tokens.pit_vocab[here - 1]
    weight = weight - weight.mean()
    variance = tokens.q_variance[here]
    # The weights are positive about as often as negative, so what is left of the shape of S is its kurtosis.
    _require_light_tails(name, weight**2 * variance, weight**4 * variance)
    return _z_test(
        name,
        stratum,
        deviation=tokens.q_token[here] - tokens.q_mean[here],
        variance=variance,
        weight=weight,
        unit=weight**2,
        margin=None,
        method=f"martingale z of q(y) times the centred vocabulary PIT of the {previous} token before; estimate: slope",
    )


def slots_of_kind(tokens: ScoredTokens, kind: SlotKind) -> Bools:
    """The tokens on slots of that kind, which is known before they are drawn."""
    draft, bonus = tokens.has_draft, tokens.is_bonus_slot
    return {"draft": draft, "bonus": bonus, "plain": ~draft & ~bonus}[kind]


def _z_test(
    name: str,
    stratum: str,
    *,
    deviation: Floats,
    variance: Floats,
    weight: Floats,
    unit: Floats,
    margin: float | None,
    method: str,
) -> Evidence:
    """S = sum of weight * deviation against its variance under H0; estimate S / sum of unit."""
    terms = weight * deviation
    total, scale = float(terms.sum()), float(unit.sum())
    z = total / math.sqrt(float((weight**2 * variance).sum()))
    estimate = total / scale
    half_width = _Z_95 * math.sqrt(float(((terms - estimate * unit) ** 2).sum())) / scale
    return Evidence(
        family="law",
        name=name,
        stratum=stratum,
        statistic=z,
        p_value=float(2 * special.ndtr(-abs(z))),
        estimate=estimate,
        ci_low=estimate - half_width,
        ci_high=estimate + half_width,
        margin=margin,
        num_tokens=len(terms),
        method=method,
    )


def _require_tokens(name: str, have: int) -> None:
    if have < MIN_TOKENS:
        raise InsufficientSamples(f"law/{name} (tokens with an open outcome)", have, MIN_TOKENS)


def _require_light_tails(name: str, variances: Floats, fourth_moments: Floats) -> None:
    """Raise InsufficientSamples where a few terms carry a symmetric S, whose tails are then not normal."""
    have = len(variances)
    _require_tokens(name, have)
    total = float(variances.sum())
    if total == 0:  # every token before has the same transform: there is no contrast yet
        raise InsufficientSamples(f"law/{name} (tokens with an open outcome)", have, have + 1)
    kurtosis = float(fourth_moments.sum()) / total**2
    if kurtosis > _MAX_KURTOSIS:
        need = math.ceil(have * kurtosis / _MAX_KURTOSIS)
        raise InsufficientSamples(f"law/{name} (tokens with an open outcome)", have, need)
