"""The CUDA backend: our own kernels (kernels_ext/cuda), compiled on first use (see `cuda_library`).

`accept_logits` is what decoding uses: one block a row of logits finds the law's threshold, judges the draft and draws,
and no probability is written; few rows are read by several blocks each. The plain contract beside it (`verify_probs`,
`spec_accept`, `sample`) runs the same device code and waits for the device to see whether a row was refused.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from equivtest.kernels.checks import (
    check_accept_logits,
    check_sample,
    check_spec_accept,
    check_verify_probs,
    raise_refusal,
)
from equivtest.kernels.contract import (
    AcceptanceRule,
    AttentionBatch,
    AttentionPlan,
    AttentionShape,
    Capabilities,
    LayerOps,
    RowParams,
    SpecAccept,
    SpecScratch,
    Streams,
)
from equivtest.kernels.cuda_layers import CudaAttention, CudaLayers
from equivtest.kernels.cuda_library import load_library
from equivtest.rng import Purpose

_CHECK, _WRITE = 0, 1
_NOTHING_REFUSED = -1
"""All bits set: the kernels keep the smallest of (row, problem, value), packed."""


@functools.cache
def load() -> CudaBackend:
    """The backend on the current device. Raises KernelUnavailable with the reason."""
    return CudaBackend()


class CudaBackend:
    """The contract on a GPU; see `equivtest.kernels.contract.FusedBackend`. Made by `load`."""

    name = "cuda"
    capabilities = Capabilities(
        min_p=True,
        per_request_seed=True,
        ragged_draft=True,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        fused=True,
        graphs=True,
        late_lengths=True,
    )

    def __init__(self) -> None:
        self._library = load_library()
        self._layers = CudaLayers()
        self._attention = CudaAttention(self)
        self._refused = torch.full((1,), _NOTHING_REFUSED, dtype=torch.int64, device="cuda")
        """What the kernels of a call note the lowest row's refusal in; it says so of none between calls."""

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
        check_accept_logits(self, logits, row_start, params, draft_token_ids, num_draft, draft_probs, streams, scratch)
        batch, max_draft = draft_token_ids.shape
        result = scratch.accepted(batch, max_draft)
        if batch:
            self._library.call(
                "accept_logits", logits, logits.dtype == torch.bfloat16, logits.shape[0], row_start, *params,
                draft_token_ids.contiguous(), num_draft, draft_probs, streams.keys, streams.positions,
                batch, max_draft, logits.shape[1], rule == "match",
                scratch.row_tokens, scratch.row_accepts, self._refused, *result[:3], scratch.refusal,
            )  # fmt: skip
        return result._replace(refusal=scratch.refusal)

    def verify_probs(self, logits: Tensor, params: RowParams, *, out: Tensor, out_rows: Tensor | None = None) -> Tensor:
        check_verify_probs(self, logits, params, out, out_rows)
        num_rows, vocab_size = logits.shape
        if num_rows == 0:
            return out
        columns = [column.contiguous() for column in params]
        rows = None if out_rows is None else out_rows.contiguous()
        logits = logits.contiguous()
        for task in (_CHECK, _WRITE):
            self._library.call(
                "law_of_logits", logits, logits.dtype == torch.bfloat16, *columns, num_rows, vocab_size, rows, out,
                task, self._refused,
            )  # fmt: skip
            if task == _CHECK:
                self._raise_refusal("verify_probs")
        return out

    def spec_accept(
        self,
        draft_token_ids: Tensor,
        num_draft: Tensor,
        target_probs: Tensor,
        draft_probs: Tensor | None,
        streams: Streams,
        *,
        scratch: SpecScratch,
    ) -> SpecAccept:
        check_spec_accept(self, draft_token_ids, num_draft, target_probs, draft_probs, streams, scratch)
        batch, max_draft = draft_token_ids.shape
        result = scratch.accepted(batch, max_draft)
        if batch == 0:
            return result
        draft_token_ids, num_draft = draft_token_ids.contiguous(), num_draft.contiguous()
        q = None if draft_probs is None else draft_probs.contiguous()
        keys, positions = (column.contiguous() for column in streams)
        rows = (scratch.row_tokens, scratch.row_accepts, self._refused)
        self._library.call(
            "judge_probs", target_probs.contiguous(), draft_token_ids, num_draft, q, keys, positions,
            batch, max_draft, target_probs.shape[2], 0, *rows,
        )  # fmt: skip
        self._raise_refusal("spec_accept")
        self._library.call("put_out", draft_token_ids, num_draft, batch, max_draft, *rows, *result[:3])
        return result

    def sample(
        self, target_probs: Tensor, streams: Streams, *, out: Tensor, purpose: Purpose = Purpose.PLAIN
    ) -> Tensor:
        check_sample(self, target_probs, streams, out)
        batch, vocab_size = target_probs.shape
        if batch == 0:
            return out
        keys, positions = (column.contiguous() for column in streams)
        tokens, accepts = torch.empty_like(out), torch.empty(batch, dtype=torch.int32, device=out.device)
        self._library.call(
            "judge_probs", target_probs.contiguous(), None, None, None, keys, positions,
            batch, 0, vocab_size, int(purpose), tokens, accepts, self._refused,
        )  # fmt: skip
        self._raise_refusal("sample")
        return out.copy_(tokens)

    def plan_attention(
        self,
        batch: AttentionBatch,
        shape: AttentionShape,
        *,
        for_graph: bool = False,
        reuse: AttentionPlan | None = None,
    ) -> AttentionPlan:
        return self._attention.plan_attention(batch, shape, for_graph=for_graph, reuse=reuse)

    def paged_attention(self, query: Tensor, kv_pages: Tensor, plan: AttentionPlan) -> Tensor:
        return self._attention.paged_attention(query, kv_pages, plan)

    @property
    def layers(self) -> LayerOps:
        return self._layers

    def _raise_refusal(self, op: str) -> None:
        bits = int(self._refused)
        if bits != _NOTHING_REFUSED:
            self._refused.fill_(_NOTHING_REFUSED)
            value = np.array([bits & 0xFFFFFFFF], np.uint32).view(np.float32)[0]
            raise_refusal(op, np.array([bits >> 32 & 0xFF, bits >> 40, value], np.float64))
