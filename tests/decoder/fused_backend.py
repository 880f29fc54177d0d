"""A fused backend on a CPU: the reference's verification and acceptance behind one call, as the GPU's kernels are."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from equivtest.kernels.contract import (
    AcceptanceRule,
    Capabilities,
    KernelBackend,
    RowParams,
    SpecAccept,
    SpecScratch,
    Streams,
)


class FusedOnCpu:
    """Wraps a backend; the match rule for plain rows only, of which it draws what the chain does."""

    name = "fused_on_cpu"

    def __init__(self, inner: KernelBackend) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(self.inner.capabilities, fused=True)

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
        assert rule == "chain" or width == 0
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
        else:
            self.inner.spec_accept(draft_token_ids, num_draft, probs, draft_probs, streams, scratch=scratch)
        return result._replace(refusal=torch.zeros(3, dtype=torch.float64))
