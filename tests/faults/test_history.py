"""Faults of logit processing: each row's logits against a loop over tokens that makes the same mistake."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from equivtest.decoder.stages import Drafts, Scored, Stages, StepInput
from equivtest.faults import Fault
from equivtest.faults.end import min_tokens_off_by_one
from equivtest.faults.history import FAULTS
from equivtest.records import SamplingParams
from tests.decoder.scenarios import CONFIGS, random_prompts, requests_for, slowly_processed
from tests.faults.planted import (
    check_planted,
    executor,
    named,
)

PENALTIES = SamplingParams(
    temperature=0.8, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.6, presence_penalty=0.4
)
EVERYTHING = dataclasses.replace(
    PENALTIES,
    logit_bias=tuple((i, -100.0 if i % 4 == 1 else 1.0) for i in range(97) if i % 4 in (1, 2)),
    stop_token_ids=tuple(range(0, 97, 8)),
    min_tokens=5,
)


@pytest.mark.parametrize("name", [make().name for make in FAULTS])
def test_it_changes_drafted_rows_alone_and_leaves_nothing_behind(name: str) -> None:
    check_planted(named(FAULTS, name))


class Row(NamedTuple):
    """One row of logits, before and after, and what it stands behind."""

    raw: list[float]
    processed: list[float]
    prompt: list[int]
    text: list[int]
    """Committed."""
    drafts: list[int]
    """Those of the block before the row."""
    judges: bool
    """Whether it judges a draft; False: a bonus or a plain row."""
    drafted: bool


def rows_of(fault: Fault | None) -> list[Row]:
    """Rows of a short run; the last request of the batch asks for no processing."""
    rows: list[Row] = []

    def watch(stages: Stages) -> Stages:
        faulty = fault(stages) if fault else stages

        def process(step: StepInput, drafts: Drafts, scored: Scored) -> Scored:
            raw = scored.logits.clone()
            processed = faulty.process(step, drafts, scored)
            assert scored.logits.equal(raw), "the raw logits are reported, and must stay"
            for i, (row, slot) in enumerate(zip(scored.batch_rows, scored.slots, strict=True)):
                request, num_draft = step.requests[row], int(drafts.num_draft[row])
                if step.table.requests[request].params != EVERYTHING:
                    assert processed.logits[i].equal(raw[i])
                    continue
                start, length = step.table.prompt_lengths[request], step.lengths[row]
                tokens = step.table.token_ids[request]
                rows.append(
                    Row(
                        raw[i].tolist(), processed.logits[i].tolist(), tokens[:start].tolist(),
                        tokens[start:length].tolist(), drafts.token_ids[row, :slot].tolist(), slot < num_draft,
                        num_draft > 0,
                    )
                )  # fmt: skip
            return processed

        return dataclasses.replace(faulty, process=process)

    requests = requests_for(random_prompts(6), EVERYTHING, max_tokens=9)
    other = requests_for([(4, 5, 6)], CONFIGS["topp95"], max_tokens=9)
    executor("early_exit").generate([*requests, *other], speculative=True, fault=watch)
    return rows


_UNPENALISED: dict[str, Any] = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


def everything(row: Row) -> list[float]:
    return slowly_processed(row.raw, EVERYTHING, row.prompt, row.text + row.drafts)


def with_params(where: Callable[[Row], bool], **params: Any) -> Callable[[Row], list[float]]:
    def expected(row: Row) -> list[float]:
        asked = dataclasses.replace(EVERYTHING, **params) if where(row) else EVERYTHING
        return slowly_processed(row.raw, asked, row.prompt, row.text + row.drafts)

    return expected


def without_drafts(row: Row) -> list[float]:
    return slowly_processed(row.raw, EVERYTHING, row.prompt, row.text)


WRONG: dict[str, tuple[Fault, Callable[[Row], list[float]]]] = {
    "processing_skipped": (
        named(FAULTS, "processing_skipped"),
        lambda row: row.raw if row.drafted else everything(row),
    ),
    "penalties_skipped": (named(FAULTS, "penalties_skipped"), with_params(lambda row: row.drafted, **_UNPENALISED)),
    "frequency_skips_drafts": (
        named(FAULTS, "frequency_skips_drafts"),
        with_params(lambda row: row.judges, frequency_penalty=0.0),
    ),
    "stale_history": (named(FAULTS, "stale_history"), without_drafts),
    "min_tokens_off_by_one": (min_tokens_off_by_one(), with_params(lambda row: row.drafted, min_tokens=6)),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_logits_are_those_of_a_loop_that_makes_the_same_mistake(name: str) -> None:
    """And the fault is seen: on some rows the loop without the mistake says something else."""
    fault, expected = WRONG[name]
    differ = 0
    for row in rows_of(fault):
        np.testing.assert_allclose(row.processed, expected(row), rtol=1e-5, atol=1e-5)
        differ += not np.allclose(row.processed, everything(row), rtol=1e-5, atol=1e-5)
    assert differ > 3


def test_without_a_fault_the_loop_agrees() -> None:
    rows = rows_of(None)
    assert {row.drafted for row in rows} == {True, False}
    for row in rows:
        np.testing.assert_allclose(row.processed, everything(row), rtol=1e-5, atol=1e-5)
