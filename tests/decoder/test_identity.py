"""Speculation leaves greedy text alone, and under the match rule sampled text too, token for token."""

from __future__ import annotations

import numpy as np
import pytest

from equivtest.faults import get_fault
from equivtest.kernels.registry import get_backend
from equivtest.records import Origin, SamplingParams
from tests.decoder.scenarios import (
    CONFIGS,
    DRAFTERS,
    GREEDY,
    RULES,
    build,
    garbage,
    random_prompts,
    requests_for,
    requests_under_each,
    texts,
)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize(("drafter", "acceptance"), RULES)
def test_greedy_text_is_the_same_with_and_without_speculation(drafter: str, architecture: str, acceptance: str) -> None:
    executor = build(get_backend("cpp"), drafter, architecture=architecture, acceptance=acceptance)
    requests = requests_for(random_prompts(24), GREEDY, max_tokens=30)
    off = executor.generate(requests, speculative=False)
    on = executor.generate(requests, speculative=True)
    assert texts(on) == texts(off)
    assert all(set(g.origins) == {Origin.PLAIN} for g in off)
    assert any(Origin.ACCEPTED in g.origins for g in on)


@pytest.mark.parametrize("acceptance", ["chain", "match"])
def test_greedy_text_differs_when_acceptance_is_inflated(acceptance: str) -> None:
    executor = build(get_backend("reference"), "early_exit", acceptance=acceptance)
    requests = requests_for(random_prompts(24), GREEDY, max_tokens=30)
    off = executor.generate(requests, speculative=False)
    assert texts(executor.generate(requests, speculative=True, fault=get_fault("inflated_acceptance"))) != texts(off)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_match_gives_the_tokens_of_plain_sampling_under_the_same_keys(drafter: str) -> None:
    executor = build(get_backend("cpp"), drafter, acceptance="match", max_batch=96)
    requests = requests_under_each(CONFIGS, random_prompts(24))
    off = executor.generate(requests, speculative=False)
    on = executor.generate(requests, speculative=True)
    assert texts(on) == texts(off)
    assert {r.params for r, g in zip(requests, on, strict=True) if Origin.ACCEPTED in g.origins} == {*CONFIGS.values()}


@pytest.mark.parametrize("params", [GREEDY, *CONFIGS.values()])
@pytest.mark.parametrize("acceptance", ["chain", "match"])
def test_both_backends_decode_the_same_text(acceptance: str, params: SamplingParams) -> None:
    requests = requests_for(random_prompts(12), params, max_tokens=16)
    by_cpp, by_reference = (
        build(get_backend(backend), "model", acceptance=acceptance).generate(requests, speculative=True)
        for backend in ("cpp", "reference")
    )
    assert texts(by_cpp) == texts(by_reference)
    assert [g.origins for g in by_cpp] == [g.origins for g in by_reference]


def test_match_gives_other_tokens_when_acceptance_is_inflated() -> None:
    executor = build(get_backend("reference"), "early_exit", acceptance="match")
    requests = requests_for(random_prompts(24), CONFIGS["topp95"])
    off = executor.generate(requests, speculative=False)
    assert texts(executor.generate(requests, speculative=True, fault=get_fault("inflated_acceptance"))) != texts(off)


@pytest.mark.parametrize("acceptance", ["chain", "match"])
def test_greedy_text_survives_a_drafter_that_proposes_garbage(acceptance: str) -> None:
    executor = build(get_backend("reference"), acceptance=acceptance)
    requests = requests_for(random_prompts(24), GREEDY)
    off = executor.generate(requests, speculative=False)
    hindered = build(get_backend("reference"), acceptance=acceptance, model=executor.model, replace_drafter=garbage(97))
    on = hindered.generate(requests, speculative=True)
    assert texts(on) == texts(off)
    assert max(int(np.max(g.num_drafts)) for g in on) == 4


def test_chain_sampling_is_another_draw_of_the_same_law_not_the_same_tokens() -> None:
    """Chain and plain decoding use coins of different purposes: equal texts would mean that a coin was shared."""
    executor = build(get_backend("reference"), "early_exit", acceptance="chain")
    requests = requests_for(random_prompts(24), CONFIGS["topp95"])
    assert texts(executor.generate(requests, speculative=True)) != texts(executor.generate(requests, speculative=False))
