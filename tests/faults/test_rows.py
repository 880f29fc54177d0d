"""Faults of row and batch indices: whose law, logits, q or count each row is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from equivtest.decoder.stages import Drafts, Scored, StepInput
from equivtest.errors import InvalidSetting
from equivtest.faults import Fault
from equivtest.faults.rows import FAULTS, StaleQ
from equivtest.kernels.registry import get_backend
from tests.decoder.scenarios import build
from tests.faults.planted import (
    Round,
    Step,
    check_planted,
    executor,
    named,
    sampled_drafts,
    stages_of,
)

NUM_DRAFT = np.array([2, 0, 1, 3, 1], np.int32)
DRAFTS = Drafts(np.zeros((5, 3), np.int64), NUM_DRAFT, None)
ROWS, SLOTS = np.nonzero(np.arange(4) <= NUM_DRAFT[:, None])


@pytest.mark.parametrize("fault", [make() for make in FAULTS], ids=lambda fault: fault.name)
def test_it_changes_drafted_rows_alone_and_leaves_nothing_behind(fault: Fault) -> None:
    check_planted(fault)


def read(name: str) -> list[list[int]]:
    """Which place the verify stage takes each law [B, K+1] from, as 10 * row + slot; the stale ones are -1."""

    def verify(step: StepInput, drafts: Drafts, scored: Scored) -> Tensor:
        target_probs = torch.full((5, 4, 1), -1.0)
        target_probs[ROWS, SLOTS] = scored.logits
        return target_probs

    scored = Scored(torch.from_numpy(10.0 * ROWS + SLOTS).float()[:, None], ROWS, SLOTS)
    step = cast("StepInput", Step(batch=5, num_main=5, scratch=cast("Any", None)))
    places = named(FAULTS, name)(stages_of(verify=verify)).verify(step, DRAFTS, scored)[:, :, 0]
    return [[int(x) for x in row[: n + 1]] for row, n in zip(places.tolist(), NUM_DRAFT, strict=True)]


def test_each_slot_is_judged_by_the_row_before_it() -> None:
    assert read("shifted_rows") == [[0, 0, 1], [10], [20, 20], [30, 30, 31, 32], [40, 40]]


def test_logits_are_read_one_row_too_far() -> None:
    """The bonus row of a request gets the first row of the next; the last row of all has no next."""
    assert read("slice_offset") == [[1, 2, 10], [10], [21, 30], [31, 32, 33, 40], [41, 41]]


def test_rows_with_few_and_many_drafts_exchange_the_laws_that_both_have() -> None:
    """In the order of num_draft the rows are 2, 4, 0, 3: 2 is exchanged with 3 and 4 with 0."""
    assert read("permuted_rows") == [[40, 41, 2], [10], [30, 31], [20, 21, 32, 33], [0, 1]]


def declared(steps: Sequence[tuple[int, Sequence[int]]]) -> list[list[list[int]]]:
    """What q each draft is declared to have: step s draws slot j of row b from a law marked 100 s + 10 b + j."""
    marks: list[list[list[int]]] = []
    buffer = torch.zeros(5, 3, 1)  # the drafter's own, written anew every step

    def propose(step: StepInput) -> Drafts:
        batch, width = len(num_draft), max(num_draft)
        probs = buffer[:batch, :width]
        probs[:, :, 0] = 100 * step.index + 10 * torch.arange(batch)[:, None] + torch.arange(width)
        return Drafts(np.zeros((batch, width), np.int64), np.array(num_draft, np.int32), probs)

    stale = StaleQ(propose)
    for index, num_draft in steps:
        step = Step(batch=len(num_draft), num_main=0, scratch=cast("Any", None), index=index)
        probs = stale(cast("StepInput", step)).probs
        assert probs is not None
        marks.append([[int(x) for x in row[:n]] for row, n in zip(probs[:, :, 0].tolist(), num_draft, strict=True)])
    return marks


def test_rows_from_the_third_on_declare_the_laws_of_the_step_before() -> None:
    """Where that step had a draft at the same row and slot; the first step of a call has nothing stale."""
    first, second, third, new_call = declared([(0, [1, 2, 3, 1]), (1, [2, 2, 2, 2]), (2, [1, 1, 1]), (0, [1, 1, 1])])
    assert first == [[0], [10, 11], [20, 21, 22], [30]]
    assert second == [[100, 101], [110, 111], [20, 21], [30, 131]]
    assert third == [[200], [210], [120]]
    assert new_call == [[0], [10], [20]]


def test_stale_q_needs_a_q_that_is_read() -> None:
    with pytest.raises(InvalidSetting, match="a drafter that samples"):
        named(FAULTS, "stale_q")(executor("early_exit").stages)
    with pytest.raises(InvalidSetting, match="chain acceptance rule"):
        named(FAULTS, "stale_q")(build(get_backend("cpp"), "sampled_exit", acceptance="match").stages)


def test_one_draft_too_many_is_put_out_after_a_rejection_and_only_then() -> None:
    law = torch.tensor([0.2, 0.5, 0.3])
    played = Round(law.expand(4, 3), sampled_drafts(torch.tensor([0.6, 0.2, 0.2]).expand(3, 3), 3_000))
    right, kept = played.play()
    wrong, counted = played.play(named(FAULTS, "one_too_many"))
    rejected = kept < played.drafts.num_draft
    np.testing.assert_array_equal(counted, kept + rejected)
    np.testing.assert_array_equal(wrong[~rejected], right[~rejected])
    rows, at = np.flatnonzero(rejected), kept[rejected]
    np.testing.assert_array_equal(wrong[rows, at], played.drafts.token_ids[rows, at])
    np.testing.assert_array_equal(wrong[rows, at + 1], right[rows, at])
    assert ((wrong >= 0).sum(axis=1) == counted + 1).all()
    assert len(rows) > 1_000
