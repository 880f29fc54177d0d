"""Calls of fused acceptance, ragged and with every kind of draft."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from equivtest.kernels.contract import (
    AcceptanceRule,
    FusedBackend,
    RowParams,
    SpecAccept,
    SpecScratch,
    Streams,
)
from equivtest.kernels.reference import ReferenceBackend
from equivtest.records import SamplingParams

LAWS = (
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=50),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
    SamplingParams(temperature=0.8, min_p=0.05),
    SamplingParams(temperature=3.0, top_p=0.5),
    SamplingParams(temperature=1.3, top_k=5000, top_p=0.999, min_p=1e-4),
    SamplingParams(top_p=0.9, min_p=0.01),
    SamplingParams(top_k=1),
)


@dataclasses.dataclass
class Call:
    """The arguments of one accept_logits call, on the device; row b of the batch has its law from `laws`, in turn."""

    logits: Tensor
    row_start: Tensor
    params: RowParams
    drafts: Tensor
    num_draft: Tensor
    q: Tensor | None
    streams: Streams
    scratch: SpecScratch

    def fused(self, backend: FusedBackend, rule: AcceptanceRule = "chain") -> SpecAccept:
        """The call's result, with its outputs copied."""
        for buffer in (self.scratch.output_token_ids, self.scratch.emitted, self.scratch.acceptance_telemetry):
            buffer.fill_(-99)
        result = backend.accept_logits(
            self.logits, self.row_start, self.params, self.drafts, self.num_draft, self.q, self.streams,
            rule=rule, scratch=self.scratch,
        )  # fmt: skip
        return SpecAccept(*(column.clone() for column in result if column is not None))

    def rows(self) -> tuple[Tensor, Tensor]:
        """The batch row and the slot of every row of logits."""
        width = self.drafts.shape[1] + 1
        offered = torch.arange(width, device="cuda") <= self.num_draft[:, None]
        batch_rows, slots = offered.nonzero(as_tuple=True)
        return batch_rows, slots

    def target_probs(self) -> Tensor:
        """[B, K+1, vocab_size] by the reference; zeros where there is no row."""
        batch_rows, slots = self.rows()
        batch, width = self.drafts.shape[0], self.drafts.shape[1] + 1
        out = torch.zeros(batch * width, self.logits.shape[1], device="cuda")
        places = batch_rows * width + slots
        ReferenceBackend().verify_probs(self.logits, self.params.take(batch_rows), out=out, out_rows=places)
        return out.view(batch, width, -1)


def make_call(
    vocab_size: int,
    batch: int,
    max_draft: int,
    *,
    laws: tuple[SamplingParams, ...] = LAWS,
    dtype: torch.dtype = torch.float32,
    with_q: bool = False,
    scale: float = 3.0,
    seed: int = 0,
) -> Call:
    """Ragged drafts (0 to max_draft), three in four the largest logit; a heavy tail, and every second row a peak."""
    generator = torch.Generator().manual_seed(seed + vocab_size)
    num_draft = torch.arange(batch, dtype=torch.int32) % (max_draft + 1)
    row_start = (torch.cumsum(num_draft + 1, 0) - num_draft - 1).int()
    num_rows = int((num_draft + 1).sum())
    logits = torch.randn(num_rows, vocab_size, generator=generator) * scale
    logits[:, ::97] += torch.randn(logits[:, ::97].shape, generator=generator).abs() * scale
    logits[::2, vocab_size // 3] += 5 * scale
    logits = logits.to(dtype)
    drafts = torch.randint(0, vocab_size, (batch, max_draft), generator=generator)
    for b in range(batch):
        for slot in range(int(num_draft[b])):
            if (b + slot) % 4:
                drafts[b, slot] = logits[row_start[b] + slot].float().argmax()
    q = None
    if with_q:
        q = torch.rand(batch, max_draft, vocab_size, generator=generator)
        q = (q / q.sum(dim=-1, keepdim=True)).cuda()
    params = RowParams.of([laws[b % len(laws)] for b in range(batch)], "cuda")
    streams = Streams(torch.arange(1000, 1000 + batch).cuda(), torch.arange(batch).cuda() * 7)
    scratch = SpecScratch(batch, max_draft, vocab_size, "cuda")
    return Call(
        logits.cuda(), row_start.cuda(), params, drafts.cuda(), num_draft.cuda(), q, streams, scratch
    )  # fmt: skip
