"""Faults of the state that a round leaves behind: keys and values, page tables, counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import Tensor

from equivtest.decoder.kv_cache import PagedKVCache, RaggedBatch
from equivtest.decoder.stages import CommitStage, Drafts, Float32Array, ForwardStage, Int64Array, Scored, StepInput
from equivtest.faults.base import Family, Fault
from equivtest.faults.wrappers import drafted, on_device, recounted
from equivtest.kernels.contract import SpecAccept


class RejectedKvKept:
    """Leaves the keys and values of a rejected draft where those of the token that replaced it belong.

    That token is fed in the next round, whose rows see it; what it wrote is then overwritten by what the rejected
    draft had written there, and every later round attends to a token that is not in the text.
    """

    def __init__(self, inner: ForwardStage) -> None:
        self.inner = inner
        self._lengths: Int64Array = np.zeros(0, np.int64)
        """[num_requests], committed tokens before each request's last round with drafts; -1 before the first."""
        self._num_draft: Int64Array = np.zeros(0, np.int64)
        self._kv: dict[int, Tensor] = {}
        """Keys and values of each request's last drafts: [num_layers, num_draft, 2, num_kv_heads, head_dim]."""

    def __call__(self, step: StepInput, drafts: Drafts) -> Scored:
        if step.index == 0:
            self._lengths, self._num_draft = np.full(len(step.table), -1), np.zeros(len(step.table), np.int64)
            self._kv.clear()
        scored = self.inner(step, drafts)
        before = self._lengths[step.requests]
        # The round put out the drafts it kept and one token more, which is the newest one.
        kept = step.lengths - before - 1
        for row in np.flatnonzero((before >= 0) & (kept < self._num_draft[step.requests])):
            stale = self._kv[int(step.requests[row])][:, kept[row]]
            page, offset = self._place(step, step.sequences[[row]], step.lengths[[row]] - 1)
            step.kv.pages[:, page[0], :, offset[0]] = stale
        self._lengths[step.requests], self._num_draft[step.requests] = -1, 0
        for row in drafted(drafts):
            request, num_draft = int(step.requests[row]), int(drafts.num_draft[row])
            positions = step.lengths[row] + np.arange(num_draft)
            page, offset = self._place(step, np.full(num_draft, step.sequences[row]), positions)
            self._kv[request] = step.kv.pages[:, page, :, offset].movedim(0, 1).clone()
            self._lengths[request], self._num_draft[request] = step.lengths[row], num_draft
        return scored

    @staticmethod
    def _place(step: StepInput, sequences: Int64Array, positions: Int64Array) -> tuple[Tensor, Tensor]:
        """Page and offset of each position."""
        slots = on_device(step.kv.slots(sequences, positions), step.kv.pages)
        return slots // step.kv.page_size, slots % step.kv.page_size


class _OtherBatch:
    """A cache that hands out an altered `extend`; everything else is the inner cache's."""

    def __init__(self, inner: PagedKVCache, change: Callable[[RaggedBatch], RaggedBatch]) -> None:
        self._inner, self._change = inner, change

    def extend(self, sequences: Int64Array, num_new: Int64Array) -> RaggedBatch:
        return self._change(self._inner.extend(sequences, num_new))

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def _with_batch(step: StepInput, change: Callable[[RaggedBatch], RaggedBatch]) -> StepInput:
    return dataclasses.replace(step, kv=cast("PagedKVCache", _OtherBatch(step.kv, change)))


class ContiguousSlots:
    """Takes the pages of a request to follow its first one in the cache, as those of the prompt's first user do.

    A row whose first page is shared attends on into the pages of the first row of the batch that shares it, wherever
    that one has as many tokens; it writes to its own. A row that shares nothing is right by chance.
    """

    def __init__(self, inner: ForwardStage) -> None:
        self.inner = inner

    def __call__(self, step: StepInput, drafts: Drafts) -> Scored:
        def guess(batch: RaggedBatch) -> RaggedBatch:
            pages, lengths = batch.page_table.copy(), batch.kv_lens
            _, first, group = np.unique(pages[:, 0], return_index=True, return_inverse=True)
            rows = drafted(drafts)
            owners = first[group[rows]]
            ends = (np.arange(pages.shape[1]) + 1) * step.kv.page_size
            written = np.minimum(lengths[rows, None], ends) <= lengths[owners, None]
            pages[rows] = np.where(written, pages[owners], pages[rows])
            return dataclasses.replace(batch, page_table=pages)

        return self.inner(_with_batch(step, guess), drafts)


class ShortMask:
    """Leaves the drafts out of the length that attention masks by."""

    def __init__(self, inner: ForwardStage) -> None:
        self.inner = inner

    def __call__(self, step: StepInput, drafts: Drafts) -> Scored:
        def shorten(batch: RaggedBatch) -> RaggedBatch:
            short = batch.kv_lens - drafts.num_draft
            # A kernel refuses fewer tokens than rows, so the shortest prompts are masked less.
            return dataclasses.replace(batch, kv_lens=np.maximum(short, np.diff(batch.query_start)))

        return self.inner(_with_batch(step, shorten), drafts)


class CountsPermuted:
    """Commits as many drafts of each row as the next row with drafts has kept."""

    def __init__(self, inner: CommitStage) -> None:
        self.inner = inner

    def __call__(self, step: StepInput, drafts: Drafts, accepted: SpecAccept, logprobs: Float32Array | None) -> int:
        rows = on_device(drafted(drafts), accepted.emitted)
        counts = accepted.emitted.clone()
        counts[rows] = counts[rows.roll(-1)]
        counts = torch.minimum(counts, on_device(drafts.num_draft, counts))
        return self.inner(step, drafts, recounted(accepted, drafts, counts), logprobs)


def rejected_kv_kept() -> Fault:
    return Fault(
        name="rejected_kv_kept",
        stage="forward",
        kind="state",
        ids=(40,),
        reports=("mlx-lm#1423", "mlx-lm#1427"),
        description="keys and values of a rejected draft stay in the cache in place of the recovered token's",
        wrap=lambda stages: dataclasses.replace(stages, forward=RejectedKvKept(stages.forward)),
        expected=frozenset(
            {Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.IDENTITY, Family.LOGPROBS}
        ),
    )


def counts_permuted() -> Fault:
    """It needs a batch of at least two."""
    return Fault(
        name="counts_permuted",
        stage="commit",
        kind="state",
        ids=(43,),
        reports=("vllm#53919",),
        description="each request commits as many drafts as its neighbour in the batch has kept",
        wrap=lambda stages: dataclasses.replace(stages, commit=CountsPermuted(stages.commit)),
        expected=frozenset(
            {Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.REPLAY, Family.IDENTITY, Family.LOGPROBS}
        ),
    )


def contiguous_slots() -> Fault:
    """It needs two requests whose prompts share their first page of keys and values."""
    return Fault(
        name="contiguous_slots",
        stage="forward",
        kind="state",
        ids=(44,),
        reports=("TGI#2711",),
        description="a request with a shared prompt reads on in the pages of the first request that shares it",
        wrap=lambda stages: dataclasses.replace(stages, forward=ContiguousSlots(stages.forward)),
        expected=frozenset({Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.REPLAY, Family.LOGPROBS}),
    )


def short_mask() -> Fault:
    return Fault(
        name="short_mask",
        stage="forward",
        kind="state",
        ids=(45,),
        reports=("sglang#40214",),
        description="the verification forward masks without the drafts, so that rows miss their newest tokens",
        wrap=lambda stages: dataclasses.replace(stages, forward=ShortMask(stages.forward)),
        expected=frozenset(
            {Family.MARGINAL, Family.JOINT, Family.LAW, Family.SUPPORT, Family.IDENTITY, Family.LOGPROBS}
        ),
    )


FAULTS: tuple[Callable[[], Fault], ...] = (rejected_kv_kept, counts_permuted, contiguous_slots, short_mask)
