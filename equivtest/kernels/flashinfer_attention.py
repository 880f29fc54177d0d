"""Paged attention by FlashInfer's batch prefill kernel, for prefill, decoding and verification alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equivtest.kernels.contract import AttentionBatch, AttentionShape, HostBatch

_WORKSPACE_BYTES = 512 << 20
"""FlashInfer refuses what does not fit: 0.6.13 a graph of more than some 200 requests with 3 drafts of Qwen3-4B."""


@dataclass(slots=True, kw_only=True)
class FlashInferPlan:
    """What FlashInfer has been told about one forward."""

    wrapper: Any
    batch: AttentionBatch
    shape: AttentionShape
    in_graph: bool


class FlashInferAttention:
    """Plans on the host from the host's copy of a batch, once a forward; every layer then runs the same plan.

    A plan whose calls a graph holds has a wrapper of its own, for that is where its memory is; all others share one.
    FlashInfer's own workspace is shared by all: plans run one after the other.
    """

    def __init__(self, flashinfer: Any) -> None:
        self._flashinfer = flashinfer
        self._workspace: Tensor | None = None
        self._eager: Any = None
        self._told: torch.cuda.Event | None = None

    def plan(
        self, batch: AttentionBatch, shape: AttentionShape, *, for_graph: bool, reuse: FlashInferPlan | None
    ) -> FlashInferPlan:
        if reuse is not None:
            reuse.batch = batch
            self._tell(reuse.wrapper, batch.host, shape)
            return reuse
        if not for_graph and self._eager is None:
            self._eager = self._wrapper()
        wrapper = self._wrapper_of_graph(batch) if for_graph else self._eager
        self._tell(wrapper, batch.host, shape)
        return FlashInferPlan(wrapper=wrapper, batch=batch, shape=shape, in_graph=for_graph)

    def run(self, query: Tensor, kv_pages: Tensor, plan: FlashInferPlan) -> Tensor:
        # Rows that belong to nobody are refused, or left as they are in a graph, whose plan may come to have some.
        rows = len(query) if plan.in_graph else int(plan.batch.host.query_start[-1])
        is_whole = not plan.in_graph and len(query) == rows
        out = torch.empty_like(query) if is_whole else torch.zeros_like(query)
        plan.wrapper.run(query[:rows], kv_pages, out=out[:rows])
        return out

    def _wrapper(self, **buffers: Any) -> Any:
        if self._workspace is None:
            self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2", **buffers)

    def _wrapper_of_graph(self, batch: AttentionBatch) -> Any:
        num_sequences, max_pages = batch.page_table.shape

        def buffer(length: int) -> Tensor:
            return torch.zeros(length, dtype=torch.int32, device=batch.page_table.device)

        return self._wrapper(
            use_cuda_graph=True,
            qo_indptr_buf=buffer(num_sequences + 1),
            paged_kv_indptr_buf=buffer(num_sequences + 1),
            paged_kv_indices_buf=buffer(num_sequences * max_pages),
            paged_kv_last_page_len_buf=buffer(num_sequences),
        )

    def _tell(self, wrapper: Any, host: HostBatch, shape: AttentionShape) -> None:
        """Give a wrapper the batch. FlashInfer counts pages by running sums, and tokens of the last page from 1."""
        # A plan leaves pinned memory on its own time: one that is still on its way must not be written over.
        if self._told is None:
            self._told = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._told.synchronize()
        pages_each = -(-host.kv_lens // shape.page_size)
        held = np.arange(host.page_table.shape[1]) < pages_each[:, None]
        last_page_len = np.where(host.kv_lens > 0, (host.kv_lens - 1) % shape.page_size + 1, 1)
        wrapper.plan(
            torch.from_numpy(host.query_start.copy()),
            _int32(np.concatenate([[0], np.cumsum(pages_each)])),
            _int32(host.page_table[held]),
            _int32(last_page_len),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.page_size,
            causal=True,
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
        )
        self._told.record()


def _int32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))
