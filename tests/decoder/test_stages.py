"""The stages of a step: what each hands on, and what is recorded of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from equivtest.decoder.acceptance import acceptance_rule, known_rules
from equivtest.decoder.executor import Executor
from equivtest.decoder.request_table import RequestTable
from equivtest.decoder.stages import Drafts, Float32Array, Scored, Stages, StepInput
from equivtest.errors import InvalidKernelInput, UnknownName
from equivtest.kernels.contract import SpecAccept
from equivtest.kernels.registry import get_backend
from equivtest.records import SPEC, Origin, Request
from tests.decoder.scenarios import CONFIGS, GREEDY, StubDrafter, build, fresh_logits, random_prompts, requests_for
from tests.decoder.tiny_models import tiny_model


def table_of(*max_tokens: int) -> RequestTable:
    requests = [Request(prompt_token_ids=(1, 2), params=GREEDY, stream_key=0, max_tokens=n) for n in max_tokens]
    return RequestTable(requests, [SPEC] * len(requests), vocab_size=97, device=torch.device("cpu"))


def test_the_table_records_how_each_token_came_about() -> None:
    table = table_of(4, 4, 3)
    num_tokens = table.append(
        np.array([2, 0, 1]),
        0,
        np.array([[50, -1, -1, -1], [10, 11, 12, -1], [20, 21, -1, -1]]),
        np.array([0, 2, 1]),
        np.array([[-7, -7, -7], [10, 11, -7], [20, 99, 98]]),
        np.array([0, 2, 3], np.int32),
    )
    assert num_tokens == 6
    table.append(
        np.array([0, 1, 2]),
        1,
        np.array([[13, -1], [22, 23], [51, 52]]),
        np.array([0, 1, 1]),
        np.array([[-7], [22], [51]]),
        np.array([0, 1, 1], np.int32),
    )
    full, partial, plain = (table.generation(row) for row in range(3))
    assert full.token_ids.tolist() == [10, 11, 12, 13]
    assert full.origins == (Origin.ACCEPTED, Origin.ACCEPTED, Origin.BONUS, Origin.PLAIN)
    assert full.slots.tolist() == [0, 1, 2, -1]
    assert full.draft_token_ids.tolist() == [10, 11, -1, -1]
    assert full.num_drafts.tolist() == [2, 2, 2, 0]
    assert full.steps.tolist() == [0, 0, 0, 1]
    assert full.batch_rows.tolist() == [1, 1, 1, 0]
    assert partial.origins == (Origin.ACCEPTED, Origin.RECOVERED, Origin.ACCEPTED, Origin.BONUS)
    assert partial.slots.tolist() == [0, 1, 0, 1]
    assert partial.draft_token_ids.tolist() == [20, 99, 22, -1]
    assert plain.origins == (Origin.PLAIN, Origin.ACCEPTED, Origin.BONUS)
    assert table.remaining.tolist() == [0, 0, 0]
    assert table.token_ids[1].tolist() == [1, 2, 20, 21, 22, 23]


@pytest.mark.parametrize("drafter", ["ngram", "early_exit", "self", "model"])
@pytest.mark.parametrize("acceptance", ["chain", "match"])
def test_the_record_of_a_real_run_is_consistent(drafter: str, acceptance: str) -> None:
    executor = build(get_backend("cpp"), drafter, acceptance=acceptance)
    for generation in executor.generate(requests_for(random_prompts(12), CONFIGS["topp95"]), speculative=True):
        for position, origin in enumerate(generation.origins):
            token, draft = int(generation.token_ids[position]), int(generation.draft_token_ids[position])
            slot, num_draft = int(generation.slots[position]), int(generation.num_drafts[position])
            assert (origin is Origin.PLAIN) == (slot == -1) == (num_draft == 0)
            assert (origin is Origin.BONUS) == (num_draft > 0 and slot == num_draft)
            assert (draft == -1) == (origin in (Origin.PLAIN, Origin.BONUS))
            assert (origin is Origin.ACCEPTED) == (draft == token and draft >= 0)
            ends_round = origin is not Origin.ACCEPTED
            if position + 1 < len(generation.origins):
                assert (generation.steps[position + 1] > generation.steps[position]) == ends_round


class LogitsProbe:
    """Collects the logits of slot 0 beside the committed text they follow."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], torch.Tensor]] = []

    def wrap(self, stages: Stages) -> Stages:
        def forward(step: StepInput, drafts: Drafts) -> Scored:
            scored = stages.forward(step, drafts)
            for row, request in enumerate(step.requests):
                text = step.table.token_ids[request, : step.lengths[row]].tolist()
                place = np.flatnonzero((scored.batch_rows == row) & (scored.slots == 0))[0]
                self.seen.append((text, scored.logits[place].clone()))
            return scored

        return dataclasses.replace(stages, forward=forward)


def worst_error(executor: Executor, wraps: Sequence[object] = ()) -> float:
    """Largest relative error of the logits after any round, against a prefill of the whole text from nothing."""
    probe = LogitsProbe()

    def fault(stages: Stages) -> Stages:
        for wrap in (*wraps, probe.wrap):
            stages = wrap(stages)  # type: ignore[operator]
        return stages

    executor.generate(requests_for(random_prompts(5), CONFIGS["topp95"], max_tokens=16), speculative=True, fault=fault)
    errors = []
    for text, logits in probe.seen:
        expected = fresh_logits(executor.model, text)[-1]
        errors.append(float((logits - expected).norm() / expected.norm()))
    return max(errors)


@pytest.mark.parametrize("drafter", ["ngram", "early_exit", "model"])
def test_the_cache_after_a_rejection_equals_a_fresh_prefill(drafter: str) -> None:
    assert worst_error(build(get_backend("cpp"), drafter)) < 1e-5


def test_a_cache_that_keeps_a_rejected_draft_is_seen() -> None:
    """The twin: the first rejection leaves one row too many in the cache."""

    def keep_a_row(stages: Stages) -> Stages:
        def commit(step: StepInput, drafts: Drafts, accepted: SpecAccept, logprobs: Float32Array | None) -> int:
            num_tokens = stages.commit(step, drafts, accepted, logprobs)
            rejected = step.sequences[accepted.emitted.numpy() < drafts.num_draft]
            if step.index == 0:
                step.kv.extend(rejected, np.ones_like(rejected))  # the row still holds the rejected draft
            return num_tokens

        return dataclasses.replace(stages, commit=commit)

    assert worst_error(build(get_backend("cpp"), "ngram"), [keep_a_row]) > 1e-2


def test_more_drafts_than_the_limit_are_refused() -> None:
    def choose(step: StepInput) -> Drafts:
        return Drafts(np.zeros((step.batch, 6), np.int64), np.full(step.batch, 6, np.int32), None)

    executor = build(get_backend("cpp"), replace_drafter=StubDrafter(choose))
    with pytest.raises(InvalidKernelInput, match="drafter stub: more drafts than the row's limit of 4 in row 0"):
        executor.generate(requests_for([(1, 2)], GREEDY), speculative=True)


def test_a_draft_outside_the_vocabulary_is_refused() -> None:
    def choose(step: StepInput) -> Drafts:
        return Drafts(np.full((step.batch, 1), 97), np.ones(step.batch, np.int32), None)

    executor = build(get_backend("cpp"), replace_drafter=StubDrafter(choose))
    with pytest.raises((InvalidKernelInput, IndexError)):
        executor.generate(requests_for([(1, 2)], GREEDY), speculative=True)


def test_acceptance_rules_are_known_by_name() -> None:
    assert known_rules() == ("chain", "match")
    with pytest.raises(UnknownName, match="chain, match"):
        acceptance_rule("typical", get_backend("reference"))


def test_an_executor_runs_the_stages_it_is_given() -> None:
    backend = get_backend("cpp")
    standard = build(backend)
    calls: list[str] = []

    def accept(step: StepInput, drafts: Drafts, target_probs: torch.Tensor) -> SpecAccept:
        calls.append("accept")
        return standard.stages.accept(step, drafts, target_probs)

    stages = dataclasses.replace(standard.stages, accept=accept)
    executor = Executor(tiny_model(backend=backend), backend, standard.drafter, stages=stages)
    generation = executor.generate(requests_for([(1, 2)], GREEDY), speculative=True)[0]
    assert len(calls) == int(generation.steps[-1]) + 1
