"""Plain steps that start before the host has read the step before: the same texts, told in the same order."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from equivtest.decoder import executor as executor_module
from equivtest.decoder.executor import Executor
from equivtest.decoder.stages import Stages
from equivtest.decoder.standard_stages import UnreadStep
from equivtest.kernels.registry import get_backend
from equivtest.records import Generation, Request, SamplingParams
from tests.decoder.fused_backend import FusedOnCpu
from tests.decoder.scenarios import CONFIGS, build, random_prompts, requests_for, texts


class Counted(UnreadStep):
    made = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        Counted.made += 1


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    Counted.made = 0
    monkeypatch.setattr(executor_module, "UnreadStep", Counted)
    return Counted


def fused(**settings: Any) -> Executor:
    return build(FusedOnCpu(get_backend("reference")), max_batch=8, **settings)  # type: ignore[arg-type]


def requests(params: SamplingParams = CONFIGS["topp95"]) -> list[Request]:
    """More than fit at once, of different lengths: some leave while others wait to come in."""
    made = requests_for(random_prompts(20), params)
    return [dataclasses.replace(request, max_tokens=3 + 5 * (index % 4)) for index, request in enumerate(made)]


def one_by_one(**settings: Any) -> Executor:
    return build(get_backend("reference"), max_batch=8, **settings)


def rows(generations: list[Generation]) -> list[tuple[Any, ...]]:
    return [(g.token_ids.tolist(), g.steps.tolist(), g.batch_rows.tolist(), g.origins) for g in generations]


@pytest.mark.parametrize("acceptance", ["chain", "match"])
def test_texts_and_their_steps_are_those_of_one_step_at_a_time(acceptance: str, counted: type[Counted]) -> None:
    told: list[int] = []
    ahead = fused(acceptance=acceptance).generate(requests(), speculative=False, on_tokens=told.append)
    assert counted.made > 10
    assert rows(ahead) == rows(one_by_one(acceptance=acceptance).generate(requests(), speculative=False))
    assert sum(told) == sum(len(g.token_ids) for g in ahead)


def test_a_step_that_is_fed_another_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: the next step is fed the neighbour's token."""

    class Crossed(UnreadStep):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.token_ids = self.token_ids.roll(1)

    expected = texts(fused().generate(requests(), speculative=False))
    monkeypatch.setattr(executor_module, "UnreadStep", Crossed)
    assert texts(fused().generate(requests(), speculative=False)) != expected


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.8, repetition_penalty=1.2),
        SamplingParams(temperature=0.8, stop_token_ids=(5,)),
    ],
    ids=["a penalty reads the text", "a stop token ends it"],
)
def test_no_step_runs_ahead_of_tokens_that_it_needs(params: SamplingParams, counted: type[Counted]) -> None:
    ahead = fused().generate(requests(params), speculative=False)
    assert counted.made == 0
    assert texts(ahead) == texts(
        build(get_backend("reference"), max_batch=8).generate(requests(params), speculative=False)
    )


def test_drafts_are_made_from_tokens_that_were_read(counted: type[Counted]) -> None:
    speculative = fused(drafter="early_exit").generate(requests(), speculative=True)
    assert counted.made == 0
    assert texts(speculative) == texts(
        build(get_backend("reference"), max_batch=8).generate(requests(), speculative=True)
    )


def test_a_fault_sees_every_step_by_itself(counted: type[Counted]) -> None:
    """A wrapped stage may look at any token of the table."""
    seen: list[np.ndarray[Any, Any]] = []

    def watch(stages: Stages) -> Stages:
        def propose(step: Any) -> Any:
            seen.append(step.last_token_ids)
            return stages.propose(step)

        return dataclasses.replace(stages, propose=propose)

    generations = fused().generate(requests()[:1], speculative=False, fault=watch)
    assert counted.made == 0
    assert [int(ids[0]) for ids in seen[1:]] == generations[0].token_ids[:-1].tolist()


def test_stages_of_somebody_elses_see_every_step_by_itself(counted: type[Counted]) -> None:
    """Given at construction, they are no fault, and still may look at any token."""
    own = fused()
    seen: list[np.ndarray[Any, Any]] = []

    def propose(step: Any) -> Any:
        seen.append(step.last_token_ids)
        return own.stages.propose(step)

    stages = dataclasses.replace(own.stages, propose=propose)
    watched = Executor(own.model, own.backend, None, max_batch=8, stages=stages)
    generations = watched.generate(requests()[:1], speculative=False)
    assert counted.made == 0
    assert [int(ids[0]) for ids in seen[1:]] == generations[0].token_ids[:-1].tolist()
