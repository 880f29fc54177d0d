"""Tests of the law family that count: equal samples, and tokens that no right rule puts out."""

from __future__ import annotations

import re

import numpy as np
from scipy import special

from equivtest.errors import InsufficientSamples
from equivtest.records import Evidence, Origin
from equivtest.stats.scored import ORIGIN_CODES, Floats, Ints, ScoredTokens

RARE = 0.01
"""Expected copies of a text among its group's samples up to which the text is rare."""


def duplicates(tokens: ScoredTokens, stratum: str) -> Evidence:
    """Are there more equal samples than chance gives? One-sided: seeds that collide, or are ignored, only add pairs.

    H0: the n samples of a group are independent draws from one law P over texts. The number C of pairs of equal rare
    texts (n P(x) at most 0.01) has the expectation (n - 1) / 2 times the sum of P over the rare samples, without bias,
    P(x) being the product of p_t(y_t). Rare texts seldom come three times, so C is Poisson to within 2 % of its
    variance; frequent texts are left out because their pairs are not, and because the other tests see their
    frequencies. The statistic is C, the estimate its excess in pairs. Raises InsufficientSamples where no group has two
    samples.
    """
    starts = np.flatnonzero(~tokens.continues)
    group = tokens.group[starts]
    _, code, sizes = np.unique(group, return_inverse=True, return_counts=True)
    num_samples = sizes[code]
    if sizes.max() < 2:
        raise InsufficientSamples("law/duplicates (samples of one group)", int(sizes.max()), 2)
    probability = _path_probabilities(tokens, starts)
    rare = num_samples * probability <= RARE
    expected = float(((num_samples - 1) / 2 * probability)[rare].sum())
    text = _texts(tokens, starts, code)
    copies = np.bincount(text[rare])
    pairs = int((copies * (copies - 1) // 2).sum())
    return Evidence(
        family="law",
        name="duplicates",
        stratum=stratum,
        statistic=float(pairs),
        p_value=_poisson_at_least(pairs, expected),
        estimate=pairs - expected,
        num_tokens=tokens.num_tokens,
        method=f"pairs of equal samples among the {int(rare.sum())} of {len(starts)} whose text is rare, one-sided "
        "Poisson; estimate: pairs in excess",
    )


def duplicates_per_sample(evidence: Evidence) -> float:
    """The excess of equal pairs that `duplicates` found, a sample; the number of samples is read from its method."""
    counted = re.search(r"of (\d+) whose", evidence.method)
    return (evidence.estimate or 0.0) / int(counted[1]) if counted else 0.0


def support(tokens: ScoredTokens, stratum: str) -> Evidence:
    """Was a token put out that the filters remove? One is enough: p = 0 then, and 1 without any.

    The statistic is the number of such tokens beyond the scorer's tolerance at the cut, the estimate their share. The
    method says how many were of which origin, and at how many the law held a single token.
    """
    by_origin = np.bincount(tokens.origin[tokens.support_violation], minlength=len(Origin)).tolist()
    count = sum(by_origin)
    split = ", ".join(f"{number} {origin}" for origin, number in zip(Origin, by_origin, strict=True) if number)
    certain = int((tokens.support_violation & (tokens.entropy == 0)).sum())
    split += f"; {certain} where the law is certain" if certain else ""
    return Evidence(
        family="law",
        name="support",
        stratum=stratum,
        statistic=float(count),
        p_value=0.0 if count else 1.0,
        estimate=count / tokens.num_tokens,
        num_tokens=tokens.num_tokens,
        method="tokens with p(y) = 0 beyond the tolerance at the cut"
        + (f" ({split})" if split else "")
        + "; any is a failure; estimate: their share",
    )


def support_by_origin(evidence: Evidence) -> dict[Origin, int]:
    """How many tokens of which origin `support` counted, read back from its method; origins without any are absent."""
    counted = re.findall(rf"(\d+) ({'|'.join(Origin)})", evidence.method)
    return {Origin(origin): int(number) for number, origin in counted}


def certain_off_support(evidence: Evidence) -> int:
    """How many of the tokens that `support` counted another one was certain for, read back from its method."""
    counted = re.search(r"(\d+) where the law is certain", evidence.method)
    return int(counted[1]) if counted else 0


def residual(tokens: ScoredTokens, stratum: str) -> Evidence:
    """Was a draft put out that had just been rejected? One is enough: p = 0 then, and 1 without any.

    No right rule does it: the residual of a draft that is a point mass lacks it, that of a sampled draft d is
    max(p - q, 0), which is 0 where d can be rejected, and the rule that draws the target's own token recovers with one
    that differs. The statistic is the number of recovered tokens that equal their own draft, the estimate their share.
    Raises InsufficientSamples where nothing was recovered.
    """
    recovered = tokens.origin == ORIGIN_CODES[Origin.RECOVERED]
    num_recovered, count = int(recovered.sum()), int((recovered & tokens.is_draft).sum())
    if not num_recovered:
        raise InsufficientSamples("law/residual (recovered tokens)", 0, 1)
    return Evidence(
        family="law",
        name="residual",
        stratum=stratum,
        statistic=float(count),
        p_value=0.0 if count else 1.0,
        estimate=count / num_recovered,
        num_tokens=num_recovered,
        method="recovered tokens that equal the draft they replace; any is a failure; estimate: their share",
    )


def _path_probabilities(tokens: ScoredTokens, starts: Ints) -> Floats:
    """[num_samples] the product of p_t(y_t); 0 below 1e-300, where it does not matter."""
    logs = np.log(np.maximum(tokens.p_token, 1e-300))
    return np.exp(np.add.reduceat(logs, starts))


def _texts(tokens: ScoredTokens, starts: Ints, group: Ints) -> Ints:
    """[num_samples] equal numbers for equal texts of one group."""
    lengths = np.diff(starts, append=tokens.num_tokens)
    texts = np.full((len(starts), int(lengths.max()) + 1), -1, np.int64)
    texts[:, 0] = group
    row = np.repeat(np.arange(len(starts)), lengths)
    texts[row, 1 + np.arange(tokens.num_tokens) - starts[row]] = tokens.token_id
    return np.unique(texts, axis=0, return_inverse=True)[1].ravel()


def _poisson_at_least(count: int, mean: float) -> float:
    """P(N >= count) of a Poisson variable."""
    return 1.0 if count == 0 else float(special.gammainc(count, mean))
