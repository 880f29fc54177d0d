"""Which draft length pays here: measured before a run, then kept, so that nothing drawn in the run can reach it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from equivtest.decoder.draft_length import DraftLength, StepCost, acceptance_by_slot, best_draft_length
from equivtest.decoder.executor import Executor
from equivtest.errors import InvalidSetting
from equivtest.protocol.prompts import load_prompt_set
from equivtest.records import Request, SamplingParams
from equivtest.rng import stream_key

LONGEST = 7
"""Drafts of a row that are tried at the most."""

_TIMED = (0, 1, 2, 3, 5, LONGEST)
_MIN_TEXTS = 32
_MAX_TOKENS = 48
_PARAMS = SamplingParams(temperature=0.8, top_p=0.95)


def measuring_requests(prompts: Sequence[tuple[int, ...]], max_batch: int) -> list[Request]:
    """What is decoded to measure: the prompts (token ids) in turn, on coins of their own, sampled at T .8 top_p .95."""
    return [
        Request(
            prompt_token_ids=prompts[index % len(prompts)],
            params=_PARAMS,
            stream_key=stream_key("draft length", index),
            max_tokens=_MAX_TOKENS,
        )
        for index in range(max(_MIN_TEXTS, max_batch))
    ]


def default_conversations() -> list[list[dict[str, str]]]:
    """The built-in prompts as messages."""
    return [prompt.conversation for prompt in load_prompt_set("default").prompts]


def keep_to_best_length(executor: Executor, requests: Sequence[Request]) -> DraftLength:
    """Measure how often the draft of each slot is accepted and what a step of `executor.max_batch` requests costs by
    draft length; let the executor offer so many from now on as give the least time a token, at least one.

    Raises InvalidSetting for an executor without a drafter.
    """
    if executor.drafter is None:
        raise InvalidSetting("draft_len", "auto", "there is no drafter to measure")
    executor.offer_at_most(LONGEST)
    acceptance = acceptance_by_slot(executor.generate(requests, speculative=True), LONGEST)
    batch = executor.max_batch
    verify_s = []
    for num_draft in _TIMED:
        executor.offer_at_most(max(1, num_draft))
        verify_s.append((batch * (num_draft + 1), _step_s(executor, requests[:batch], speculative=num_draft > 0)))
    # Drafting is in the seconds of every length but 0, between which and 1 nothing is interpolated.
    best = best_draft_length(acceptance.tolist(), StepCost(verify_s=tuple(verify_s)), batch)
    executor.offer_at_most(max(1, best.num_draft))
    return best


def _step_s(executor: Executor, requests: Sequence[Request], *, speculative: bool) -> float:
    """Median seconds of the steps in which all requests run; the first of two calls has met every shape."""
    executor.generate(requests, speculative=speculative)
    ends: list[float] = []
    generations = executor.generate(
        requests, speculative=speculative, on_tokens=lambda _: ends.append(time.perf_counter())
    )
    together = min(int(generation.steps[-1]) for generation in generations)
    return float(np.median(np.diff(ends[: max(2, together + 1)])))
