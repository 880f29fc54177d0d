"""Reported log-probabilities are those of the model or of the law, with and without speculation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch

from equivtest.decoder.model import Model
from equivtest.decoder.scorer import Scorer
from equivtest.decoder.stages import Drafts, Float32Array, Scored, Stages, StepInput
from equivtest.decoder.standard_stages import ReportLogprobs
from equivtest.kernels.contract import SpecAccept
from equivtest.kernels.registry import get_backend
from equivtest.records import Generation, LogprobKind, Request, SamplingParams
from tests.decoder.finished import PROMPT, finished
from tests.decoder.scenarios import (
    CONFIGS,
    GREEDY,
    RULES,
    build,
    fresh_logits,
    random_prompts,
    requests_for,
    slowly_processed,
    texts,
)
from tests.decoder.test_scorer import EOS, EVERYTHING, STOPS, float64_law
from tests.decoder.tiny_models import tiny_model

KINDS: tuple[LogprobKind | None, ...] = ("raw", "processed", None)
TOLERANCE = 2e-4
"""Most by which a float32 forward may move a log-probability, nats."""


def mixed_requests(max_tokens: int = 16) -> list[Request]:
    """Every kind under every law, some with stops."""
    laws = [CONFIGS["topp95"], EVERYTHING, GREEDY, STOPS]
    requests = requests_for(random_prompts(24), GREEDY, max_tokens=max_tokens)
    return [
        dataclasses.replace(request, params=laws[index % 4], logprobs=KINDS[index % 3])
        for index, request in enumerate(requests)
    ]


def expected_logprobs(model: Model, request: Request, generation: Generation) -> np.ndarray:
    """In float64, each position's logits computed with the whole text."""
    tokens, prompt, params = generation.token_ids.tolist(), request.prompt_token_ids, request.params
    logits = fresh_logits(model, [*prompt, *tokens[:-1]])[len(prompt) - 1 :].double()
    values = []
    for t, (row, token) in enumerate(zip(logits, tokens, strict=True)):
        if request.logprobs == "raw":
            values.append(float(torch.log_softmax(row, dim=0)[token]))
        else:
            processed = slowly_processed(row.tolist(), params, prompt, tokens[:t], eos_token_ids=(EOS,))
            values.append(float(np.log(float64_law(processed, params)[token])))
    return np.array(values)


def worst_error(generations: list[Generation], requests: list[Request], model: Model) -> float:
    return max(
        float(np.abs(cast("np.ndarray", g.logprobs) - expected_logprobs(model, r, g)).max())
        for g, r in zip(generations, requests, strict=True)
        if r.logprobs is not None
    )


@pytest.mark.parametrize(("drafter", "acceptance"), [*RULES, (None, "chain"), (None, "match")])
def test_logprobs_are_those_of_a_float64_computation(drafter: str | None, acceptance: str) -> None:
    """None: plain decoding, which asks no drafter."""
    executor = build(get_backend("cpp"), drafter or "ngram", acceptance=acceptance, max_batch=9, eos_token_ids=(EOS,))
    requests = mixed_requests()
    generations = executor.generate(requests, speculative=drafter is not None)
    for request, generation in zip(requests, generations, strict=True):
        assert (generation.logprobs is None) == (request.logprobs is None)
        if generation.logprobs is not None:
            assert generation.logprobs.dtype == np.float32
            assert len(generation.logprobs) == len(generation.token_ids)
    assert worst_error(generations, requests, executor.model) < TOLERANCE


def reporting(change: Callable[[Float32Array, StepInput], Float32Array]) -> Callable[[Stages], Stages]:
    def wrap(stages: Stages) -> Stages:
        def report(
            step: StepInput, drafts: Drafts, scored: Scored, target_probs: torch.Tensor, accepted: SpecAccept
        ) -> Float32Array | None:
            logprobs = stages.report(step, drafts, scored, target_probs, accepted)
            return None if logprobs is None else change(logprobs, step)

        return dataclasses.replace(stages, report=report)

    return wrap


@pytest.mark.parametrize(
    "change",
    [lambda logprobs, step: np.zeros_like(logprobs), lambda logprobs, step: np.roll(logprobs, 1, axis=1)],
    ids=["zero", "of the slot before"],
)
def test_wrong_logprobs_are_seen(change: Callable[[Float32Array, StepInput], Float32Array]) -> None:
    """The twin: nothing but the report is wrong."""
    executor = build(get_backend("cpp"), eos_token_ids=(EOS,))
    requests = mixed_requests()
    faulty = executor.generate(requests, speculative=True, fault=reporting(change))
    assert texts(faulty) == texts(executor.generate(requests, speculative=True))
    assert worst_error(faulty, requests, executor.model) > 100 * TOLERANCE


def test_raw_logprobs_are_not_processed_and_greedy_ones_are_0() -> None:
    executor = build(get_backend("cpp"))
    raw, processed = (
        executor.generate(
            [dataclasses.replace(r, logprobs=kind) for r in requests_for(random_prompts(4), GREEDY)], speculative=True
        )
        for kind in ("raw", "processed")
    )
    assert texts(raw) == texts(processed)
    assert all((cast("np.ndarray", g.logprobs) == 0).all() for g in processed)
    assert all((cast("np.ndarray", g.logprobs) < 0).all() for g in raw)


@pytest.mark.parametrize("params", [CONFIGS["topk20p90"], EVERYTHING], ids=["topk20p90", "everything"])
@pytest.mark.parametrize("backend", ["cpp", "reference"])
@pytest.mark.parametrize("speculative", [True, False])
def test_processed_logprobs_are_those_of_the_scorer(backend: str, params: SamplingParams, speculative: bool) -> None:
    kernels = get_backend(backend)
    executor = build(kernels, eos_token_ids=(EOS,))
    requests = [
        dataclasses.replace(r, logprobs="processed") for r in requests_for([PROMPT] * 12, params, max_tokens=16)
    ]
    generations = executor.generate(requests, speculative=speculative)
    law = Scorer(executor.model, kernels, eos_token_ids=(EOS,)).score(finished(requests, generations))
    for row, generation in zip(law.p_token, generations, strict=True):
        logprobs = cast("np.ndarray", generation.logprobs)
        np.testing.assert_allclose(logprobs, np.log(row[: len(logprobs)]), atol=TOLERANCE)


def test_asking_for_logprobs_changes_no_token() -> None:
    executor = build(get_backend("cpp"), "model", eos_token_ids=(EOS,))
    requests = mixed_requests()
    silent = [dataclasses.replace(r, logprobs=None) for r in requests]
    asked, unasked = (executor.generate(some, speculative=True) for some in (requests, silent))
    assert texts(asked) == texts(unasked)
    assert all(g.logprobs is None for g in unasked)


def test_nothing_is_computed_where_no_request_of_the_call_asks() -> None:
    returned: list[Float32Array | None] = []

    def wrap(stages: Stages) -> Stages:
        def report(
            step: StepInput, drafts: Drafts, scored: Scored, target_probs: torch.Tensor, accepted: SpecAccept
        ) -> Float32Array | None:
            nothing = cast("torch.Tensor", None)
            returned.append(ReportLogprobs()(step, drafts, Scored(nothing, *scored[1:]), nothing, accepted))
            return None

        return dataclasses.replace(stages, report=report)

    build(get_backend("cpp")).generate(requests_for(random_prompts(3), EVERYTHING), speculative=True, fault=wrap)
    assert returned
    assert set(returned) == {None}


def test_logprobs_of_a_bfloat16_model_are_computed_in_float32() -> None:
    """Raw: the log-softmax of the model's own bfloat16 logits, collected on the way, to float32 rounding."""
    backend = get_backend("cpp")
    model = tiny_model(backend=backend, dtype=torch.bfloat16)
    executor = build(backend, model=model, draft_model=model)
    expected: list[float] = []

    def wrap(stages: Stages) -> Stages:
        def report(
            step: StepInput, drafts: Drafts, scored: Scored, target_probs: torch.Tensor, accepted: SpecAccept
        ) -> Float32Array | None:
            assert scored.logits.dtype == torch.bfloat16
            tokens = accepted.output_token_ids[0, : int(accepted.emitted[0]) + 1]
            every = torch.log_softmax(scored.logits[: len(tokens)].double(), dim=1)
            expected.extend(every.gather(1, tokens[:, None])[:, 0].tolist())
            return stages.report(step, drafts, scored, target_probs, accepted)

        return dataclasses.replace(stages, report=report)

    params = dataclasses.replace(EVERYTHING, stop_token_ids=())
    requests = [dataclasses.replace(r, logprobs="raw") for r in requests_for([PROMPT], params)]
    generation = executor.generate(requests, speculative=True, fault=wrap)[0]
    np.testing.assert_allclose(cast("np.ndarray", generation.logprobs), expected, atol=1e-5)
