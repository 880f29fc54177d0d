"""Reported log-probabilities: rounding passes in the precision it belongs to, and a wrong report never does.

There is no chance in this test: its false-alarm rate is 0 where fewer than one token in a hundred is off.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest

from equivtest.errors import InsufficientSamples, InvalidSetting
from equivtest.stats.law import law_family
from equivtest.stats.logprobs import BFLOAT16, FLOAT32, LogprobTolerance, logprobs
from equivtest.stats.scored import ScoredTokens
from tests.stats.law_sampler import make_world, simulate


@cache
def tokens() -> ScoredTokens:
    """1,920 tokens."""
    return simulate(make_world(5), 1, samples_per_group=40, max_draft=2, seed=31).replication(0)


def reporting(error: np.ndarray | float) -> ScoredTokens:
    return dataclasses.replace(tokens(), logprob=np.log(tokens().p_token) + error)


def noise(scale: float) -> np.ndarray:
    return np.random.default_rng(71).normal(0, scale, tokens().num_tokens)


def some_off(share: float) -> np.ndarray:
    """That share of tokens off by a nat."""
    return (np.arange(tokens().num_tokens) < share * tokens().num_tokens).astype(float)


@pytest.mark.parametrize(
    ("error", "tolerance", "p_value"),
    [
        (0.0, FLOAT32, 1.0),
        (noise(2e-4), FLOAT32, 1.0),
        (noise(0.01), FLOAT32, 0.0),
        (noise(0.05), BFLOAT16, 1.0),
        (noise(0.5), BFLOAT16, 0.0),
        (some_off(0.009), FLOAT32, 1.0),
        (some_off(0.02), FLOAT32, 0.0),
        (some_off(0.009), BFLOAT16, 1.0),
        (some_off(0.02), BFLOAT16, 0.0),
    ],
    ids=[
        *("exact", "float32 rounding", "too much for float32", "bfloat16 rounding", "too much for bfloat16"),
        *("cuts that moved", "one in fifty", "bfloat16, cuts that moved", "bfloat16, one in fifty"),
    ],
)
def test_rounding_passes_and_more_than_rounding_fails(
    error: np.ndarray | float, tolerance: LogprobTolerance, p_value: float
) -> None:
    assert logprobs(reporting(error), "on", tolerance=tolerance).p_value == p_value


def test_the_evidence_says_how_many_how_far_and_in_the_middle() -> None:
    evidence = logprobs(reporting(0.3 + 0.4 * some_off(0.25)), "on / test")
    assert (evidence.name, evidence.num_tokens, evidence.statistic) == ("logprobs", 1_920, 1_920)
    assert evidence.estimate == pytest.approx(0.3)
    assert "off by more than 0.001 + 0.001 |ln p| nat (100.00%; largest difference is 0.7)" in evidence.method


def test_what_was_not_reported_or_has_no_probability_is_left_out_and_no_number_is_wrong() -> None:
    reported = np.log(tokens().p_token)
    reported[:900] = np.nan
    p_token = tokens().p_token.copy()
    p_token[900:910], reported[900:910] = 0.0, -np.inf
    right = dataclasses.replace(tokens(), p_token=p_token, logprob=reported)
    evidence = logprobs(right, "on")
    assert (evidence.num_tokens, evidence.statistic, evidence.p_value) == (1_010, 0, 1.0)
    reported[910:1_900] = -np.inf
    evidence = logprobs(dataclasses.replace(right, logprob=reported), "on")
    assert (evidence.statistic, evidence.p_value) == (990, 0.0)
    assert evidence.estimate is not None
    assert 900 < evidence.estimate <= 1_000


def test_the_family_has_the_line_where_something_was_reported_and_corrects_for_it() -> None:
    without, within = law_family(tokens(), "on"), law_family(reporting(noise(2e-4)), "on")
    assert [line.name for line in within.evidence] == [*(line.name for line in without.evidence), "logprobs"]
    assert not within.flagged()
    assert [line.name for line in law_family(reporting(0.1), "on").flagged()] == ["logprobs"]
    assert not law_family(reporting(0.1), "on", tolerance=BFLOAT16).flagged()


def test_too_few_reports_are_listed_and_parts_keep_them() -> None:
    few = np.full(tokens().num_tokens, np.nan)
    few[:99] = np.log(tokens().p_token[:99])
    scored = dataclasses.replace(tokens(), logprob=few)
    with pytest.raises(InsufficientSamples, match="logprobs"):
        logprobs(scored, "on")
    with pytest.raises(InsufficientSamples, match="logprobs"):
        logprobs(tokens(), "on")
    assert "law/logprobs" in law_family(scored, "on").left_out[-1].test
    half = scored.take(scored.group == 0)
    assert half.logprob is not None
    assert int((~np.isnan(half.logprob)).sum()) == 99
    assert tokens().take(tokens().group == 0).logprob is None
    with pytest.raises(InvalidSetting, match="flat arrays"):
        dataclasses.replace(tokens(), logprob=few[1:])
    with pytest.raises(InvalidSetting, match="LogprobTolerance"):
        LogprobTolerance(absolute=0.0, relative=0.0)
