"""A GPU backend for tests on CPU tensors: arguments go to the device, and whatever is written there comes back."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from equivtest.kernels.contract import (
    AttentionBatch,
    AttentionPlan,
    AttentionShape,
    Capabilities,
    KernelBackend,
    LayerOps,
    RowParams,
    SpecAccept,
    SpecScratch,
    Streams,
)
from equivtest.rng import Purpose

_WRITTEN = ("output_token_ids", "emitted", "acceptance_telemetry")
"""The buffers of a scratch that a caller can see."""


class OnDevice:
    """The contract with every tensor on the CPU, computed by `inner` on "cuda".

    What a call may write is copied back after a refusal too, so that a test sees whether a refused call wrote.
    """

    def __init__(self, inner: KernelBackend) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(self.inner.capabilities, devices=frozenset({"cpu"}))

    @property
    def layers(self) -> LayerOps:
        return self.inner.layers

    def verify_probs(self, logits: Tensor, params: RowParams, *, out: Tensor, out_rows: Tensor | None = None) -> Tensor:
        target = _twin(out)
        try:
            self.inner.verify_probs(
                _there(logits),
                RowParams(*map(_there, params)),
                out=target,
                out_rows=None if out_rows is None else _there(out_rows),
            )
        finally:
            out.copy_(target)
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
        dtype = scratch.target_probs.dtype
        there = SpecScratch(scratch.max_batch, scratch.max_draft, scratch.vocab_size, "cuda", dtype)
        pairs = [(getattr(scratch, name), getattr(there, name)) for name in _WRITTEN]
        for here, buffer in pairs:
            buffer.copy_(here)
        try:
            result = self.inner.spec_accept(
                _there(draft_token_ids),
                _there(num_draft),
                _there(target_probs),
                None if draft_probs is None else _there(draft_probs),
                Streams(*map(_there, streams)),
                scratch=there,
            )
        finally:
            for here, buffer in pairs:
                here.copy_(buffer)
        return scratch.accepted(result.output_token_ids.shape[0], result.output_token_ids.shape[1] - 1)

    def sample(
        self, target_probs: Tensor, streams: Streams, *, out: Tensor, purpose: Purpose = Purpose.PLAIN
    ) -> Tensor:
        target = _twin(out)
        try:
            self.inner.sample(_there(target_probs), Streams(*map(_there, streams)), out=target, purpose=purpose)
        finally:
            out.copy_(target)
        return out

    def plan_attention(self, batch: AttentionBatch, shape: AttentionShape, **how: Any) -> AttentionPlan:
        return self.inner.plan_attention(AttentionBatch(*map(_there, batch[:3]), batch.host), shape, **how)

    def paged_attention(self, query: Tensor, kv_pages: Tensor, plan: AttentionPlan) -> Tensor:
        return self.inner.paged_attention(_there(query), _there(kv_pages), plan).cpu()


def _there(tensor: Tensor) -> Tensor:
    """A CPU tensor on the device; any other as it is, for the backend to refuse."""
    return tensor.cuda() if tensor.device.type == "cpu" else tensor


def _twin(out: Tensor) -> Tensor:
    """`out` on the device with the same strides, which a plain copy of a strided view would lose."""
    return torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="cuda").copy_(out)
