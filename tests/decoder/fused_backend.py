"""A fused backend on a CPU: the reference's verification and acceptance behind one call, as the GPU's kernels are."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from equivtest.kernels.contract import (
    PADDING,
    AcceptanceRule,
    Capabilities,
    KernelBackend,
    RowParams,
    SpecAccept,
    SpecScratch,
    Streams,
)


class FusedOnCpu:
    """Wraps a backend."""

    name = "fused_on_cpu"

    def __init__(self, inner: KernelBackend) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(self.inner.capabilities, fused=True, late_lengths=True)

    def accept_logits(
        self,
        logits: Tensor,
        row_start: Tensor,
        params: RowParams,
        draft_token_ids: Tensor,
        num_draft: Tensor,
        draft_probs: Tensor | None,
        streams: Streams,
        *,
        rule: AcceptanceRule,
        scratch: SpecScratch,
    ) -> SpecAccept:
        batch, width = draft_token_ids.shape
        probs = scratch.probs(batch, width)
        for row in range(batch):
            count = int(num_draft[row]) + 1
            start = int(row_start[row])
            own = RowParams(*(column[row : row + 1].expand(count) for column in params))
            self.inner.verify_probs(logits[start : start + count], own, out=probs[row, :count])
        result = scratch.accepted(batch, width)
        if width == 0:  # the same memory at every call, as the GPU's kernels have it
            self.inner.sample(probs[:, 0].contiguous(), streams, out=result.output_token_ids[:, 0])
            result.emitted.zero_()
            result.acceptance_telemetry.zero_()
        elif rule == "match":
            slots, counts = torch.arange(width + 1), num_draft[:, None]
            keys, positions = streams.keys.repeat_interleave(width + 1), (streams.positions[:, None] + slots).view(-1)
            drawn = torch.empty(batch * (width + 1), dtype=torch.int64)
            self.inner.sample(probs.view(len(drawn), -1), Streams(keys, positions), out=drawn)
            drawn = drawn.view(batch, -1)
            matches = (drawn[:, :-1] == draft_token_ids) & (slots[:-1] < counts)
            result.emitted.copy_(matches.cumprod(dim=1).sum(dim=1))
            result.acceptance_telemetry.copy_(matches.sum(dim=1))
            result.output_token_ids.copy_(drawn.masked_fill(slots > result.emitted[:, None], PADDING))
        else:
            self.inner.spec_accept(draft_token_ids, num_draft, probs, draft_probs, streams, scratch=scratch)
        return result._replace(refusal=torch.zeros(3, dtype=torch.float64))
