"""The law family: were the tokens drawn from the target's law at their own prefixes?

H0: given all that was put out before, y_t is drawn from p_t. H1: it is not, in any of the ways that the tests look at.
Every test has its own file and docstring; here they are put together and corrected for their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from equivtest.errors import InsufficientSamples, InvalidSetting
from equivtest.records import Evidence, Origin
from equivtest.stats.law_counts import duplicates, residual, support
from equivtest.stats.law_martingale import SLOT_KINDS, bias, lag, slots_of_kind, surprisal
from equivtest.stats.law_uniform import neighbours, pit, rows
from equivtest.stats.logprobs import FLOAT32, LogprobTolerance, logprobs
from equivtest.stats.multiplicity import holm
from equivtest.stats.scored import ORIGIN_CODES, Floats, ScoredTokens

Test = Callable[[ScoredTokens, str], Evidence]


@dataclass(frozen=True, slots=True, kw_only=True)
class LawMargins:
    """How far a correct decoder may be off and still be called equivalent."""

    bias: float = 0.01
    """Of the probability with which drafts are put out."""
    pit: float = 0.02
    """Of the distribution function of the PIT, in rank order and in vocabulary order."""

    def __post_init__(self) -> None:
        for name in ("bias", "pit"):
            if not 0 < getattr(self, name) < 1:
                raise InvalidSetting(f"LawMargins.{name}", getattr(self, name), "must be between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LawResult:
    """Every test of the family on one stratum."""

    evidence: tuple[Evidence, ...]
    """In the order bias, bias_slot_*, surprisal_*, rank, vocab, lag_*, rows, duplicates, support, residual,
    logprobs; p-values are raw."""
    adjusted: Floats
    """[len(evidence)] p-values adjusted for the family (Holm 1979)."""
    left_out: tuple[InsufficientSamples, ...]
    """Tests that have something to look at here, but too little of it."""

    def flagged(self, alpha: float = 0.01) -> tuple[Evidence, ...]:
        """The evidence whose adjusted p-value is below alpha, the smallest first."""
        order = np.argsort(self.adjusted, kind="stable")
        return tuple(self.evidence[index] for index in order if self.adjusted[index] < alpha)

    def named(self, name: str) -> Evidence:
        """The evidence of one test. Raises InvalidSetting when it is not there."""
        for evidence in self.evidence:
            if evidence.name == name:
                return evidence
        there = ", ".join(evidence.name for evidence in self.evidence)
        raise InvalidSetting("law test", name, f"was not computed; there are {there}")


def law_family(
    tokens: ScoredTokens,
    stratum: str,
    *,
    margins: LawMargins | None = None,
    tolerance: LogprobTolerance = FLOAT32,
) -> LawResult:
    """Every test that the tokens allow, and Holm over those that were computed.

    stratum: what the tokens are, for the evidence. tolerance: of reported log-probabilities, by the precision of the
    model. Which tests apply depends on slots and on the origins of earlier
    tokens alone. A test with too few tokens is listed in `left_out`, never dropped in silence; a test with none (bias
    without drafts, rows without a batch) does not apply and is not listed. The result does not depend on the order of
    the samples, up to rounding. Raises InsufficientSamples when no PIT test can be computed.
    """
    evidence: list[Evidence] = []
    left_out: list[InsufficientSamples] = []
    for test in _tests(tokens, margins or LawMargins(), tolerance):
        try:
            evidence.append(test(tokens, stratum))
        except InsufficientSamples as insufficient:
            left_out.append(insufficient)
    if not any(item.name == "rank" for item in evidence):
        raise next(error for error in left_out if error.test == "law/rank")
    return LawResult(
        evidence=tuple(evidence),
        adjusted=holm(np.array([item.p_value for item in evidence])),
        left_out=tuple(left_out),
    )


def _tests(tokens: ScoredTokens, margins: LawMargins, tolerance: LogprobTolerance) -> Iterator[Test]:
    has_draft = tokens.has_draft
    if has_draft.any():
        yield partial(bias, margin=margins.bias)
    for slot in np.unique(tokens.slot[has_draft]).tolist():
        yield partial(bias, slot=slot)
    for kind in SLOT_KINDS:
        if slots_of_kind(tokens, kind).any():
            yield partial(surprisal, kind=kind)
    yield partial(pit, order="rank", margin=margins.pit)
    yield partial(pit, order="vocab", margin=margins.pit)
    previous = np.flatnonzero(has_draft & tokens.continues) - 1
    for origin in Origin:
        if (tokens.origin[previous] == ORIGIN_CODES[origin]).any():
            yield partial(lag, previous=origin)
    if len(neighbours(tokens)[0]):
        yield rows
    yield duplicates
    yield support
    if (tokens.origin == ORIGIN_CODES[Origin.RECOVERED]).any():
        yield residual
    if tokens.logprob is not None:
        yield partial(logprobs, tolerance=tolerance)
