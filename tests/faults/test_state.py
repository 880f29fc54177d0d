"""Faults of the state that a round leaves behind: what the cache holds, what attention reads, what is committed."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import pytest
import torch

from equivtest.decoder.kv_cache import PagedKVCache, RaggedBatch
from equivtest.decoder.stages import Drafts, Float32Array, Scored, Stages, StepInput
from equivtest.faults import Fault
from equivtest.faults.state import FAULTS
from equivtest.kernels.contract import SpecAccept
from equivtest.kernels.registry import get_backend
from equivtest.records import Request
from tests.decoder.scenarios import CONFIGS, build, random_prompts, requests_for, texts
from tests.decoder.tiny_models import tiny_config
from tests.faults.planted import (
    check_planted,
    executor,
    named,
    stages_of,
)


@pytest.mark.parametrize("name", ["rejected_kv_kept", "counts_permuted", "short_mask"])
def test_it_changes_drafted_rows_alone_and_leaves_nothing_behind(name: str) -> None:
    check_planted(named(FAULTS, name))


class CacheProbe:
    """After every forward: what a recovered token's place holds, what the rejected draft wrote, and what it did."""

    def __init__(self) -> None:
        self.held: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._drafts: dict[int, tuple[int, torch.Tensor]] = {}

    def around(self, fault: Fault | None) -> Any:
        def wrap(stages: Stages) -> Stages:
            def right(step: StepInput, drafts: Drafts) -> Scored:
                scored = stages.forward(step, drafts)
                self._wrote = [self._at(step, row, step.lengths[[row]] - 1)[0] for row in range(step.batch)]
                return scored

            inner = dataclasses.replace(stages, forward=right)
            forward = (fault(inner) if fault else inner).forward

            def probed(step: StepInput, drafts: Drafts) -> Scored:
                scored = forward(step, drafts)
                for row, request in enumerate(step.requests.tolist()):
                    before, old = self._drafts.pop(request, (0, torch.empty(0)))
                    slot = int(step.lengths[row]) - before - 1
                    if slot < len(old):
                        now = self._at(step, row, step.lengths[[row]] - 1)[0]
                        self.held.append((now, old[slot], self._wrote[row]))
                    positions = step.lengths[row] + np.arange(drafts.num_draft[row])
                    self._drafts[request] = int(step.lengths[row]), self._at(step, row, positions)
                return scored

            return dataclasses.replace(stages, forward=probed)

        return wrap

    @staticmethod
    def _at(step: StepInput, row: int, positions: np.ndarray) -> torch.Tensor:
        """[n, num_layers, 2, num_kv_heads, head_dim]"""
        slots = step.kv.slots(np.full(len(positions), step.sequences[row]), positions)
        pages, offsets = torch.from_numpy(slots // step.kv.page_size), torch.from_numpy(slots % step.kv.page_size)
        return step.kv.pages[:, pages, :, offsets].clone()


def held(fault: Fault | None) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    probe = CacheProbe()
    requests = requests_for(random_prompts(6), CONFIGS["topp95"], max_tokens=12)
    executor("early_exit").generate(requests, speculative=True, fault=probe.around(fault))
    return probe.held


def test_a_rejected_drafts_keys_and_values_stay_in_the_recovered_tokens_place() -> None:
    """The twin: without the fault the place holds what the recovered token wrote."""
    kept = held(named(FAULTS, "rejected_kv_kept"))
    assert len(kept) > 10
    for now, draft, recovered in kept:
        torch.testing.assert_close(now, draft, atol=0, rtol=0)
        assert not torch.equal(draft, recovered)
    replaced = held(None)
    assert len(replaced) > 10
    for now, draft, recovered in replaced:
        torch.testing.assert_close(now, recovered, atol=0, rtol=0)
        assert not torch.equal(now, draft)


class Recording(PagedKVCache):
    """Remembers what it said."""

    batches: tuple[RaggedBatch, ...] = ()

    def extend(self, sequences: np.ndarray, num_new: np.ndarray) -> RaggedBatch:
        self.batches = (*self.batches, super().extend(sequences, num_new))
        return self.batches[-1]


def handed_on(name: str, *, lengths: list[int], new: list[int], fork_at: int) -> tuple[RaggedBatch, RaggedBatch]:
    """The page table and lengths of one forward, right and as the fault hands them on.

    A root of fork_at tokens is forked once a row and each fork extended to its length; pages have 4 tokens.
    """
    config = tiny_config(layers=1, heads=1, kv_heads=1, head_dim=2, max_position=64)
    kv = Recording(config, num_pages=40, max_sequences=8, page_size=4, dtype=torch.float32)
    root = kv.new_sequence()
    if fork_at:
        kv.extend(np.array([root]), np.array([fork_at]))
    sequences = np.array([kv.fork(root) for _ in lengths])
    kv.extend(sequences, np.array(lengths) - fork_at)
    seen: list[RaggedBatch] = []

    def forward(step: StepInput, drafts: Drafts) -> Scored:
        assert step.kv.page_size == 4  # everything but `extend` is the cache's own
        seen.append(step.kv.extend(sequences, drafts.num_draft.astype(np.int64) + 1))
        return cast("Scored", None)

    @dataclasses.dataclass(frozen=True)
    class Step:
        kv: PagedKVCache

    drafts = Drafts(np.zeros((len(new), max(new)), np.int64), np.array(new, np.int32), None)
    named(FAULTS, name)(stages_of(forward=forward)).forward(cast("StepInput", Step(kv)), drafts)
    right, wrong = kv.batches[-1], seen[0]
    torch.testing.assert_close(right.slots, wrong.slots)
    torch.testing.assert_close(right.positions, wrong.positions)
    return right, wrong


def test_a_shared_prompt_is_read_on_in_the_first_rows_pages() -> None:
    """Row 1 has a page that row 0 has filled too; row 2 has none; row 3 is longer than row 0; row 4 is plain."""
    right, wrong = handed_on("contiguous_slots", lengths=[11, 10, 5, 14, 11], new=[1, 2, 1, 1, 0], fork_at=4)
    own, read = right.page_table, wrong.page_table
    np.testing.assert_array_equal(read[0], own[0])
    np.testing.assert_array_equal(read[1, :3], own[0, :3])
    assert (own[1, 1:3] != own[0, 1:3]).all()
    np.testing.assert_array_equal(read[2, :2], own[0, :2])
    np.testing.assert_array_equal(read[3, :4], [*own[0, :3], own[3, 3]])
    np.testing.assert_array_equal(read[4], own[4])
    np.testing.assert_array_equal(wrong.kv_lens, right.kv_lens)


def test_prompts_that_share_no_page_have_contiguous_slots() -> None:
    right, wrong = handed_on("contiguous_slots", lengths=[11, 10, 5], new=[1, 2, 1], fork_at=0)
    torch.testing.assert_close(wrong.page_table, right.page_table)


def test_the_drafts_are_left_out_of_the_masks_length() -> None:
    """But never below the rows themselves: the last row has 4 rows over 5 tokens."""
    right, wrong = handed_on("short_mask", lengths=[9, 7, 3, 1], new=[3, 0, 1, 3], fork_at=0)
    assert right.kv_lens.tolist() == [13, 8, 5, 5]
    assert wrong.kv_lens.tolist() == [10, 8, 4, 4]


SHARED = [tuple(range(20)), tuple(range(20)), (5, 4, 3), tuple(range(40, 60))]


def shared_requests() -> list[Request]:
    return requests_for(SHARED, CONFIGS["topp95"], max_tokens=24)


def test_contiguous_slots_change_the_later_users_of_a_prompt_alone() -> None:
    fault = named(FAULTS, "contiguous_slots")
    for kernels in ("cpp", "reference"):
        runner = executor("early_exit", kernels)
        right = texts(runner.generate(shared_requests(), speculative=True))
        wrong = texts(runner.generate(shared_requests(), speculative=True, fault=fault))
        assert [a == b for a, b in zip(right, wrong, strict=True)] == [True, False, True, True]
        assert texts(runner.generate(shared_requests(), speculative=True, fault=fault)) == wrong
        assert texts(runner.generate(shared_requests(), speculative=True)) == right
    plain = texts(runner.generate(shared_requests(), speculative=False))
    assert texts(runner.generate(shared_requests(), speculative=False, fault=fault)) == plain


def test_a_count_goes_to_the_row_before_and_is_never_more_than_its_drafts() -> None:
    seen: list[SpecAccept] = []

    def commit(step: StepInput, drafts: Drafts, accepted: SpecAccept, logprobs: Float32Array | None) -> int:
        seen.append(accepted)
        return 0

    drafts = Drafts(np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]), np.array([3, 0, 2, 1], np.int32), None)
    output = torch.tensor([[1, 60, -1, -1], [61, -1, -1, -1], [7, 8, 62, -1], [63, -1, -1, -1]])
    accepted = SpecAccept(output, torch.tensor([1, 0, 2, 0], dtype=torch.int32), torch.zeros(4, dtype=torch.int32))
    stages = named(FAULTS, "counts_permuted")(stages_of(commit=commit))
    stages.commit(cast("StepInput", None), drafts, accepted, None)
    assert seen[0].emitted.tolist() == [2, 0, 0, 1]
    assert seen[0].output_token_ids.tolist() == [[1, 2, 60, -1], [61, -1, -1, -1], [62, -1, -1, -1], [10, 63, -1, -1]]
    assert accepted.emitted.tolist() == [1, 0, 2, 0]


def test_a_request_alone_has_no_neighbour() -> None:
    runner = build(get_backend("cpp"), max_batch=1)
    requests = requests_for(random_prompts(3), CONFIGS["topp95"], max_tokens=12)
    for name in ("counts_permuted", "contiguous_slots"):
        wrong = runner.generate(requests, speculative=True, fault=named(FAULTS, name))
        assert texts(wrong) == texts(runner.generate(requests, speculative=True))
