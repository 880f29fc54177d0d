"""Short calls of the contract, for tests that are about values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from equivtest.kernels.contract import KernelBackend, RowParams, SpecAccept, SpecScratch, Streams
from equivtest.records import SamplingParams


def streams(batch: int, *, first_key: int = 1000, position: int = 0) -> Streams:
    """One key a row, all at the same position."""
    return Streams(torch.arange(first_key, first_key + batch), torch.full((batch,), position, dtype=torch.int64))


def law(backend: KernelBackend, logits: Tensor | Sequence[Sequence[float]], *params: SamplingParams) -> Tensor:
    """verify_probs into a new tensor; one params for all rows, or one a row."""
    logits = torch.as_tensor(logits)
    each = list(params * logits.shape[0] if len(params) == 1 else params)
    out = torch.full(logits.shape, torch.nan, dtype=backend.capabilities.probs_dtype)
    return backend.verify_probs(logits, RowParams.of(each), out=out)


def accept(
    backend: KernelBackend,
    draft_token_ids: Tensor | Sequence[Sequence[int]],
    target_probs: Tensor,
    draft_probs: Tensor | None = None,
    *,
    num_draft: Tensor | Sequence[int] | None = None,
    rows: Streams | None = None,
) -> SpecAccept:
    """spec_accept with a scratch of its own; every row drafts K tokens unless num_draft says otherwise."""
    draft_token_ids = torch.as_tensor(draft_token_ids, dtype=torch.int64)
    batch, max_draft = draft_token_ids.shape
    if num_draft is None:
        num_draft = torch.full((batch,), max_draft)
    scratch = SpecScratch(batch, max_draft, target_probs.shape[-1], dtype=backend.capabilities.probs_dtype)
    return backend.spec_accept(
        draft_token_ids,
        torch.as_tensor(num_draft, dtype=torch.int32),
        target_probs,
        draft_probs,
        streams(batch) if rows is None else rows,
        scratch=scratch,
    )
