"""Faults of numbers: reported log-probabilities, and greedy rows that are not numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from equivtest.faults.numerics import FAULTS
from equivtest.kernels.registry import get_backend
from equivtest.records import Generation, LogprobKind, Request
from tests.decoder.scenarios import CONFIGS, GREEDY, build, random_prompts, requests_for, texts
from tests.faults.planted import (
    bytes_of,
    check_planted,
    executor,
    named,
)


def test_greedy_nan_changes_drafted_rows_alone_and_leaves_nothing_behind() -> None:
    check_planted(named(FAULTS, "greedy_nan"))


def test_greedy_rows_with_drafts_put_out_token_0_and_sampled_ones_are_right() -> None:
    requests = requests_for(random_prompts(8), GREEDY, max_tokens=12)
    requests[3:5] = [dataclasses.replace(r, params=CONFIGS["topp95"]) for r in requests[3:5]]
    right = executor("early_exit").generate(requests, speculative=True)
    wrong = executor("early_exit").generate(requests, speculative=True, fault=named(FAULTS, "greedy_nan"))
    for index, (a, b) in enumerate(zip(right, wrong, strict=True)):
        if index in (3, 4):
            assert bytes_of([a]) == bytes_of([b])
        else:
            assert set(b.token_ids[b.num_drafts > 0].tolist()) == {0}
            assert set(a.token_ids.tolist()) != {0}


def reported(kind: LogprobKind, *, kernels: str = "cpp", wrong: bool, speculative: bool = True) -> list[Generation]:
    requests: list[Request] = [
        dataclasses.replace(r, logprobs=kind) for r in requests_for(random_prompts(8), CONFIGS["topp95"], max_tokens=12)
    ]
    fault = named(FAULTS, "logprob_zero") if wrong else None
    return executor("early_exit", kernels).generate(requests, speculative=speculative, fault=fault)


@pytest.mark.parametrize("kernels", ["cpp", "reference"])
@pytest.mark.parametrize("kind", ["raw", "processed"])
def test_log_probabilities_of_steps_with_drafts_are_0_and_no_token_changes(kind: LogprobKind, kernels: str) -> None:
    right, wrong = (reported(kind, kernels=kernels, wrong=w) for w in (False, True))
    assert bytes_of(right) == bytes_of(wrong)
    for a, b in zip(right, wrong, strict=True):
        assert a.logprobs is not None
        assert b.logprobs is not None
        drafted = a.num_drafts > 0
        assert (b.logprobs[drafted] == 0).all()
        assert (a.logprobs[drafted] < 0).any()
        np.testing.assert_array_equal(b.logprobs[~drafted], a.logprobs[~drafted])
    again = reported(kind, kernels=kernels, wrong=False)
    assert all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(right, again, strict=True))  # type: ignore[arg-type]


def test_plain_tokens_are_reported_rightly() -> None:
    right, wrong = (reported("processed", wrong=w, speculative=False) for w in (False, True))
    for a, b in zip(right, wrong, strict=True):
        np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_no_log_probability_is_reported_that_nobody_asked_for() -> None:
    requests = requests_for(random_prompts(2), CONFIGS["topp95"], max_tokens=4)
    runner = build(get_backend("cpp"))
    wrong = runner.generate(requests, speculative=True, fault=named(FAULTS, "logprob_zero"))
    assert all(g.logprobs is None for g in wrong)
    assert texts(wrong) == texts(runner.generate(requests, speculative=True))
