"""Scored samples before the law family: a correct decoder follows the law, a planted fault does not."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy import stats

from equivtest.decoder.draft_laws import draft_laws
from equivtest.decoder.executor import FaultWrap
from equivtest.decoder.scorer import Scorer
from equivtest.decoder.stages import Drafts, Stages, StepInput
from equivtest.faults import get_fault
from equivtest.kernels.registry import get_backend
from equivtest.records import SamplingParams
from equivtest.rng import Purpose, uniforms
from equivtest.stats.law import LawResult, law_family
from tests.decoder.finished import DRAWN_BLOCKS, PROCESSED, PROMPT, finished, scored
from tests.decoder.scenarios import (
    CONFIGS,
    build,
    requests_for,
)


def judged(drafter: str, params: SamplingParams, *faults: FaultWrap | None) -> list[LawResult]:
    """What the law family says of 600 samples of 12 tokens, decoded with each fault."""
    backend = get_backend("cpp")
    executor = build(backend, drafter, max_draft=3, max_batch=600)
    scorer = Scorer(executor.model, backend, drafts=draft_laws(executor.drafter, backend))
    requests = requests_for([PROMPT] * 600, params, max_tokens=12, run="law")
    results = []
    for fault in faults:
        generations = executor.generate(requests, speculative=True, fault=fault)
        results.append(law_family(scored(scorer.score(finished(requests, generations)), generations), drafter))
    return results


@pytest.mark.parametrize("params", [CONFIGS["topp95"], PROCESSED], ids=["topp95", "processed"])
@pytest.mark.parametrize("drafter", ["early_exit", "model", DRAWN_BLOCKS])
def test_a_correct_decoder_follows_the_law_and_an_inflated_one_does_not(drafter: str, params: SamplingParams) -> None:
    """No test of the family below 1e-3 after Holm's correction (once in 1,000 runs; the seed is fixed). The twin
    accepts drafts with .2 too much."""
    correct, inflated = judged(drafter, params, None, get_fault("inflated_acceptance", epsilon=0.2))
    assert correct.flagged(1e-3) == ()
    assert correct.named("support").statistic == 0
    assert "bias" in {e.name for e in inflated.flagged(1e-3)}


@pytest.mark.parametrize("drafter", ["model", DRAWN_BLOCKS])
def test_drafts_that_are_judged_by_the_law_of_another_slot_are_found(drafter: str) -> None:
    """Another twin of the test above: drafts are handed on with the law of the slot before their own."""

    def misjudged(stages: Stages) -> Stages:
        def propose(step: StepInput) -> Drafts:
            drafts = stages.propose(step)
            return drafts if drafts.probs is None else drafts.with_probs(drafts.probs.roll(1, dims=1))

        return dataclasses.replace(stages, propose=propose)

    (result,) = judged(drafter, CONFIGS["topp95"], misjudged)
    assert "bias" in {e.name for e in result.flagged(1e-3)}


def test_the_transforms_are_uniform_and_share_no_coin_with_the_sample() -> None:
    """Kolmogorov-Smirnov on 9,600 transforms of plain samples, and their correlation with the coins the tokens were
    drawn with beyond what the token itself says; each claim fails once in 10,000 seeds."""
    backend = get_backend("cpp")
    executor = build(backend, "early_exit", max_batch=800)
    requests = requests_for([PROMPT] * 800, SamplingParams(temperature=1.0), max_tokens=12, run="pit")
    samples = finished(requests, executor.generate(requests, speculative=False))
    law = Scorer(executor.model, backend).score(samples)
    for values in (law.pit_rank, law.pit_vocab):
        assert stats.kstest(values.ravel(), "uniform").pvalue > 1e-4
    drawn_with = uniforms(samples.stream_keys[:, None], np.arange(12), Purpose.PLAIN)
    score = uniforms(samples.stream_keys[:, None], np.arange(12), Purpose.SCORE)
    assert abs(np.corrcoef(drawn_with.ravel(), score.ravel())[0, 1]) < 3.9 / np.sqrt(score.size)
