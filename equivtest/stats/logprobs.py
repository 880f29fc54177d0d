"""The test of the law family on what an engine reports: are its log-probabilities those of the law?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from equivtest.errors import InsufficientSamples, InvalidSetting
from equivtest.records import Evidence
from equivtest.stats.law_martingale import MIN_TOKENS
from equivtest.stats.scored import ScoredTokens

MAX_SHARE = 0.01
"""Share of tokens that may be off: at a filter's cut, and in half precision anywhere, two right forwards differ."""

_NO_NUMBER = -1000.0
"""What counts where an engine reports infinity or NaN, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobTolerance:
    """How far a right log-probability may be from the scorer's."""

    absolute: float
    """Nats."""
    relative: float
    """Of |ln p(y)|."""

    def __post_init__(self) -> None:
        if not (self.absolute >= 0 and self.relative >= 0 and self.absolute + self.relative > 0):
            raise InvalidSetting("LogprobTolerance", (self.absolute, self.relative), "must be above 0")

    @property
    def words(self) -> str:
        return f"{self.absolute:g}" + (f" + {self.relative:g} |ln p|" if self.relative else "")


FLOAT32 = LogprobTolerance(absolute=1e-3, relative=1e-3)
"""Ample for sums that are taken in another order."""

BFLOAT16 = LogprobTolerance(absolute=0.5, relative=0.0)
"""Two forwards of other shapes differ by several hundredths of a nat, and by more at a filter's cut."""


def logprobs(tokens: ScoredTokens, stratum: str, *, tolerance: LogprobTolerance = FLOAT32) -> Evidence:
    """Are more than 1 % of the reported log-probabilities off by more than the tolerance? p = 0 then, and 1 otherwise.

    H0: each is ln p_t(y_t), but for rounding; there is no chance in it. Tokens without a reported value are left out,
    and those with p(y) = 0, which `support` counts. The statistic is the number of tokens that are off, the estimate
    the median absolute difference in nats. Raises InsufficientSamples below 100 tokens.
    """
    reported = np.zeros(0) if tokens.logprob is None else tokens.logprob
    chosen = ~np.isnan(reported)
    chosen &= tokens.p_token[: len(chosen)] > 0
    num_tokens = int(chosen.sum())
    if num_tokens < MIN_TOKENS:
        raise InsufficientSamples("law/logprobs (tokens with a reported log-probability)", num_tokens, MIN_TOKENS)
    expected = np.log(tokens.p_token[chosen])
    difference = np.abs(np.maximum(reported[chosen], _NO_NUMBER) - expected)
    off = int((difference > tolerance.absolute + tolerance.relative * np.abs(expected)).sum())
    return Evidence(
        family="law",
        name="logprobs",
        stratum=stratum,
        statistic=float(off),
        p_value=0.0 if off > MAX_SHARE * num_tokens else 1.0,
        estimate=float(np.median(difference)),
        num_tokens=num_tokens,
        method=f"reported log-probabilities off by more than {tolerance.words} nat ({off / num_tokens:.2%}; largest "
        f"difference is {difference.max():.3g}); more than {MAX_SHARE:.0%} is a failure; estimate: median difference",
    )
