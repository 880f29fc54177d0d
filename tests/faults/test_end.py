"""Faults of where a text ends: past an accepted stop token, and one token too late."""

from __future__ import annotations

import dataclasses

import pytest

from equivtest.decoder.stages import Stages
from equivtest.decoder.standard_stages import CommitEmitted
from equivtest.errors import InvalidSetting
from equivtest.faults.end import FAULTS
from equivtest.kernels.registry import get_backend
from equivtest.records import Generation, Origin, SamplingParams
from tests.decoder.scenarios import build, random_prompts, requests_for
from tests.faults.planted import (
    check_planted,
    executor,
    named,
)

STOPS = SamplingParams(temperature=0.8, top_p=0.95, stop_token_ids=tuple(range(5, 97, 16)), min_tokens=4)


@pytest.mark.parametrize("name", [make().name for make in FAULTS])
def test_it_changes_drafted_rows_alone_and_leaves_nothing_behind(name: str) -> None:
    check_planted(named(FAULTS, name), count=24)


def generated(name: str | None, params: SamplingParams, count: int = 150) -> list[Generation]:
    fault = named(FAULTS, name) if name else None
    requests = requests_for(random_prompts(count), params, max_tokens=12)
    return executor("early_exit").generate(requests, speculative=True, fault=fault)


def test_a_text_runs_past_a_stop_token_that_was_accepted_and_ends_at_any_other() -> None:
    """Up to its first stop token each text is the right one; the twin ends there."""
    right, wrong = (generated(name, STOPS) for name in (None, "runs_past_end"))
    longer = 0
    for short, long in zip(right, wrong, strict=True):
        assert long.token_ids.tolist()[: len(short.token_ids)] == short.token_ids.tolist()
        assert not set(short.token_ids.tolist()[:-1]) & set(STOPS.stop_token_ids)
        ends = [t for t, token in enumerate(long.token_ids.tolist()[:-1]) if token in STOPS.stop_token_ids]
        assert all(long.origins[t] is Origin.ACCEPTED for t in ends)
        assert all(long.steps[t] == long.steps[t + 1] for t in ends), "the block is committed whole"
        longer += bool(ends)
    assert longer >= 3


def test_a_stop_token_comes_one_token_later_where_drafts_are_verified() -> None:
    """Position 4 is the first at which one may come; the twin has some there."""
    right, wrong = (generated(name, STOPS) for name in (None, "min_tokens_off_by_one"))
    assert sum(len(g.token_ids) == 5 for g in right) >= 3
    assert min(len(g.token_ids) for g in right) == 5
    at_once = [g for g in wrong if len(g.token_ids) == 5]
    assert all(g.origins[-1] is Origin.PLAIN for g in at_once)
    assert any(len(g.token_ids) == 6 for g in wrong)


def test_without_min_tokens_there_is_nothing_to_mask_too_far() -> None:
    free = dataclasses.replace(STOPS, min_tokens=0)
    right, wrong = (generated(name, free, 20) for name in (None, "min_tokens_off_by_one"))
    assert [g.token_ids.tolist() for g in wrong] == [g.token_ids.tolist() for g in right]


def test_another_commit_stage_is_not_replaced() -> None:
    class Commit(CommitEmitted):
        pass

    stages: Stages = dataclasses.replace(build(get_backend("cpp")).stages, commit=Commit())
    with pytest.raises(InvalidSetting, match="standard commit stage"):
        named(FAULTS, "runs_past_end")(stages)
