"""The executor as a whole: the exact law of whole texts, and what admission and retirement must not change."""

from __future__ import annotations

import functools

import pytest

from equivtest.decoder.executor import Executor
from equivtest.decoder.model import Model
from equivtest.errors import InvalidSetting
from equivtest.faults import get_fault
from equivtest.kernels.registry import get_backend
from equivtest.records import Origin, Request, SamplingParams
from tests.decoder.scenarios import (
    CONFIGS,
    DRAFTERS,
    GREEDY,
    RULES,
    build,
    garbage,
    law_p_value,
    random_prompts,
    requests_for,
    sequence_law,
    texts,
)
from tests.decoder.tiny_models import tiny_model

VOCAB_SIZE = 13
PROMPT = (9, 10, 10, 5, 5, 3, 2, 9, 10)
LENGTH = 3
NUM_SAMPLES = 4_000
PARAMS = SamplingParams(temperature=1.2, top_k=6, top_p=0.97)
ALPHA = 1e-4
"""False-alarm rate of one law test; with fixed seeds its outcome is fixed."""

LAW_CASES = [*RULES, ("garbage", "chain")]


@functools.cache
def small_model(layers: int = 3) -> Model:
    return tiny_model(vocab_size=VOCAB_SIZE, hidden=16, layers=layers, intermediate=24, backend=get_backend("cpp"))


@functools.cache
def exact_law() -> dict[tuple[int, ...], float]:
    return sequence_law(small_model(), get_backend("reference"), PROMPT, PARAMS, LENGTH)


def small_executor(drafter: str, acceptance: str, *, max_draft: int = 2) -> Executor:
    return build(
        get_backend("cpp"),
        "ngram" if drafter == "garbage" else drafter,
        acceptance=acceptance,
        model=small_model(),
        draft_model=small_model(layers=1),
        max_batch=2048,
        max_draft=max_draft,
        replace_drafter=garbage(VOCAB_SIZE) if drafter == "garbage" else None,
    )


@pytest.mark.parametrize(("drafter", "acceptance"), LAW_CASES)
def test_speculation_reproduces_the_exact_law_of_whole_texts(drafter: str, acceptance: str) -> None:
    """Chi-squared of 4,000 texts of 3 tokens against the enumerated law; false-alarm rate 1e-4 a case."""
    requests = requests_for([PROMPT] * NUM_SAMPLES, PARAMS, max_tokens=LENGTH, run=("law", drafter))
    generations = small_executor(drafter, acceptance).generate(requests, speculative=True)
    assert law_p_value(exact_law(), texts(generations)) > ALPHA
    seen = {origin for g in generations for origin in g.origins}
    assert Origin.RECOVERED in seen
    assert {Origin.ACCEPTED, Origin.BONUS} <= seen or drafter == "garbage"


def test_plain_decoding_reproduces_the_exact_law_of_whole_texts() -> None:
    """False-alarm rate 1e-4."""
    requests = requests_for([PROMPT] * NUM_SAMPLES, PARAMS, max_tokens=LENGTH, run="plain law")
    generations = small_executor("self", "chain").generate(requests, speculative=False)
    assert law_p_value(exact_law(), texts(generations)) > ALPHA


@pytest.mark.parametrize(("drafter", "acceptance"), LAW_CASES)
def test_inflated_acceptance_is_rejected_by_the_law_test(drafter: str, acceptance: str) -> None:
    """The twin of the law test: a bias of .1 moves hundreds of the 4,000 texts. Under the match rule it is found in 39
    of 40 draws of the coins (measured); under chain p is below 1e-90."""
    requests = requests_for([PROMPT] * NUM_SAMPLES, PARAMS, max_tokens=LENGTH, run=("law", drafter))
    fault = get_fault("inflated_acceptance", epsilon=0.1)
    generations = small_executor(drafter, acceptance).generate(requests, speculative=True, fault=fault)
    assert law_p_value(exact_law(), texts(generations)) < 1e-6


@pytest.mark.parametrize(("drafter", "acceptance"), RULES)
def test_waiting_for_a_free_row_changes_no_token(drafter: str, acceptance: str) -> None:
    backend = get_backend("cpp")
    prompts = random_prompts(10)
    requests = [
        Request(prompt_token_ids=prompt, params=CONFIGS["topp95"], stream_key=index, max_tokens=1 + 7 * index % 23)
        for index, prompt in enumerate(prompts * 2)
    ]
    together = build(backend, drafter, acceptance=acceptance, max_batch=64).generate(requests, speculative=True)
    queued = build(backend, drafter, acceptance=acceptance, max_batch=6).generate(requests, speculative=True)
    assert texts(queued) == texts(together)
    assert max(int(g.batch_rows.max()) for g in queued) == 5
    assert [g.origins for g in queued] == [g.origins for g in together]


def test_a_second_call_on_the_same_executor_gives_the_same_tokens() -> None:
    executor = build(get_backend("cpp"), "model", max_batch=8)
    requests = requests_for(random_prompts(12), CONFIGS["topk50"])
    first = texts(executor.generate(requests, speculative=True))
    executor.generate(requests_for(random_prompts(3, seed=5), GREEDY, max_tokens=3), speculative=False)
    assert texts(executor.generate(requests, speculative=True)) == first


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_call_that_failed_leaves_the_executor_usable(drafter: str) -> None:
    executor = build(get_backend("cpp"), drafter, max_batch=8)
    requests = requests_for(random_prompts(12), CONFIGS["topk50"])
    expected = texts(executor.generate(requests, speculative=True))

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        executor.generate(requests, speculative=True, on_tokens=interrupt)
    assert texts(executor.generate(requests, speculative=True)) == expected


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_never_run_past_the_last_token(drafter: str) -> None:
    requests = [
        Request(prompt_token_ids=(5, 6, 5, 6, 5), params=GREEDY, stream_key=0, max_tokens=max_tokens)
        for max_tokens in range(1, 14)
    ]
    heard: list[int] = []
    generations = build(get_backend("cpp"), drafter).generate(requests, speculative=True, on_tokens=heard.append)
    for request, generation in zip(requests, generations, strict=True):
        assert len(generation.token_ids) == len(generation.origins) == request.max_tokens
        for position, num_draft in enumerate(generation.num_drafts):
            first = position - max(int(generation.slots[position]), 0)
            assert first + num_draft < request.max_tokens
    assert sum(heard) == sum(request.max_tokens for request in requests)


def test_no_request_is_no_work() -> None:
    assert build(get_backend("cpp")).generate([], speculative=True) == []


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "setting"),
    [((), 4, "prompt_token_ids"), ((1, 97), 4, "prompt_token_ids"), ((1, -1), 4, "prompt_token_ids"),
     ((1,), 0, "max_tokens"), ((1,) * 500, 20, "prompt and max_tokens")],
)  # fmt: skip
def test_a_malformed_request_is_refused_before_any_work(prompt: tuple[int, ...], max_tokens: int, setting: str) -> None:
    request = Request(prompt_token_ids=prompt, params=GREEDY, stream_key=0, max_tokens=max_tokens)
    with pytest.raises(InvalidSetting, match=setting):
        build(get_backend("reference")).generate([request], speculative=True)


def test_an_executor_without_a_row_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="max_batch"):
        Executor(small_model(), get_backend("reference"), None, max_batch=0)
