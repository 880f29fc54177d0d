"""Attention and the layers of a transformer on a GPU, by our own kernels (kernels_ext/cuda) and torch's products.

Nothing here waits for the device or looks at its values, so a CUDA graph can hold any of it. A layer is six launches
for few rows of bfloat16 (four products with what surrounds them, rotation, attention) and nine otherwise: two norms,
four products by cuBLAS with the residual added inside, rotation, attention, gate. Few rows are bound by latency, and in
models above some hundred million weights by their reading; see the sources for each kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from equivtest.errors import InvalidKernelInput
from equivtest.kernels.checks import check_attention_batch, check_paged_attention
from equivtest.kernels.contract import MAX_HEAD_DIM, AttentionBatch, AttentionShape, KernelBackend
from equivtest.kernels.cuda_library import load_library

MAX_FEW_ROWS = 8
"""Up to so many rows of bfloat16 a product is our own; cuBLAS does more of them better."""
_MAX_STAGED = 24_576
"""Entries of those rows that fit a block's shared memory."""


class CudaLayers:
    """See `equivtest.kernels.contract.LayerOps`; float32 and bfloat16 on the current CUDA device.

    Rounds where `TorchLayers` does, but for `add_linear` of more than few rows, which rounds the sum alone.
    Raises KernelUnavailable where the kernels cannot be built.
    """

    def __init__(self) -> None:
        self._library = load_library()

    def linear(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def head(self, x: Tensor, weight: Tensor) -> Tensor:
        """float32 for bfloat16 too: a product's own sums, which another rounding would only spoil."""
        return x @ weight.T if x.dtype == torch.float32 else torch.mm(x, weight.T, out_dtype=torch.float32)

    def rms_norm(self, hidden: Tensor, norm: Tensor, eps: float) -> Tensor:
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        size = hidden.shape[-1]
        _require("rms_norm", hidden, norm.shape == (size,), f"norm must have shape [{size}]", norm.shape)
        rows = hidden.numel() // size if size else 0
        self._library.call("rms_norm", hidden, norm.contiguous(), out, rows, size, _is_bfloat16(hidden), float(eps))
        return out

    def normed_linear(self, hidden: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        if _is_few(hidden, weight):
            return self._few_rows(hidden, weight, norm=norm, eps=eps)
        return self.rms_norm(hidden, norm, eps) @ weight.T

    def normed_gate(self, hidden: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        if _is_few(hidden, weight):
            return self._few_rows(hidden, weight, norm=norm, eps=eps, is_gate=True)
        both = self.rms_norm(hidden, norm, eps) @ weight.T
        rows, size = both.shape[0], both.shape[1] // 2
        out = both.new_empty(rows, size)
        self._library.call("silu_mul", both, out, rows, size, _is_bfloat16(both))
        return out

    def add_linear(self, hidden: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Writes into `hidden`."""
        if _is_few(x, weight) and hidden.is_contiguous():
            return self._few_rows(x, weight, residual=hidden)
        return hidden.addmm_(x, weight.T)

    def rotate_and_store(
        self,
        heads: Tensor,
        rotary: tuple[Tensor, Tensor],
        positions: Tensor,
        query_key_norm: Tensor | None,
        eps: float,
        kv_pages: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """One launch. Raises InvalidKernelInput for an odd head_dim or one above MAX_HEAD_DIM, and for a cache that
        is not contiguous."""
        op = "rotate_and_store"
        num_rows, num_all, head_dim = heads.shape
        _, _, page_size, num_kv_heads, _ = kv_pages.shape
        num_heads = num_all - 2 * num_kv_heads
        is_even = head_dim % 2 == 0 and head_dim <= MAX_HEAD_DIM
        _require(op, heads, is_even, f"head_dim must be even and at most {MAX_HEAD_DIM}", head_dim)
        same = kv_pages.dtype == heads.dtype and kv_pages.shape[-1] == head_dim
        _require(op, kv_pages, same, "kv_pages must have the dtype and head_dim of heads", kv_pages.shape)
        _require(op, kv_pages, kv_pages.is_contiguous(), "kv_pages must be contiguous", kv_pages.stride())
        query = heads.new_empty(num_rows, num_heads, head_dim)
        cosines, sines = (table.contiguous() for table in rotary)
        self._library.call(
            op, heads.contiguous(), cosines, sines, positions.contiguous(),
            None if query_key_norm is None else query_key_norm.contiguous(),
            kv_pages, slots.contiguous(), query,
            num_rows, num_heads, num_kv_heads, head_dim, page_size, _is_bfloat16(heads), float(eps),
        )  # fmt: skip
        return query

    def _few_rows(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        residual: Tensor | None = None,
        is_gate: bool = False,
    ) -> Tensor:
        op = "few_rows"
        num_rows, in_features = x.shape
        out_features = weight.shape[0] // 2 if is_gate else weight.shape[0]
        _require(op, x, weight.shape[1] == in_features, f"weight must be [..., {in_features}]", weight.shape)
        fits = norm is None or norm.shape == (in_features,)
        _require(op, x, fits, f"norm must have shape [{in_features}]", None if norm is None else norm.shape)
        fits = residual is None or residual.shape == (num_rows, out_features)
        _require(op, x, fits, f"hidden must be [{num_rows}, {out_features}]", num_rows)
        out = x.new_empty(num_rows, out_features) if residual is None else residual
        self._library.call(
            op, x.contiguous(), norm, weight, residual, out, num_rows, in_features, out_features, is_gate, float(eps)
        )
        return out


class CudaAttentionPlan(NamedTuple):
    """What `CudaAttention.plan_attention` makes of a batch: its tensors, read by every call of the forward."""

    batch: AttentionBatch
    shape: AttentionShape


class CudaAttention:
    """`plan_attention` and `paged_attention` of `equivtest.kernels.contract.KernelBackend`, on behalf of a backend.

    float32, and bfloat16 with a head_dim that is not a multiple of 8, take a slower kernel without tensor cores.
    A row's result does not depend on what else is in the batch, to the last bit, but for how many blocks there are: a
    large batch splits the tokens of a row among fewer warps. Where a query's bfloat16 neighbours
    in a sequence see a NaN among the values, so may the query.
    """

    def __init__(self, backend: KernelBackend) -> None:
        """backend: whose name and capabilities the checks are made for. Raises KernelUnavailable."""
        self._backend = backend
        self._library = load_library()

    def plan_attention(
        self,
        batch: AttentionBatch,
        shape: AttentionShape,
        *,
        for_graph: bool = False,
        reuse: CudaAttentionPlan | None = None,
    ) -> CudaAttentionPlan:
        """All plans may go into a graph."""
        if reuse is not None and all(old is new for old, new in zip(reuse.batch[:3], batch[:3], strict=True)):
            # The very tensors that were planned, filled anew by the one who owns them and checks what goes in.
            return CudaAttentionPlan(batch, shape)
        check_attention_batch(self._backend, batch, shape)
        table, kv_lens, query_start = batch.page_table, batch.kv_lens, batch.query_start
        if reuse is None:
            columns = (table.contiguous(), kv_lens.contiguous(), query_start.contiguous())
            return CudaAttentionPlan(AttentionBatch(*columns, batch.host), shape)
        op = "plan_attention"
        planned = reuse.batch
        _require(op, table, reuse.shape == shape, "a reused plan must be for the same model", shape)
        same = planned.page_table.shape == table.shape
        _require(op, table, same, "a reused plan must be for a batch of the same shape", tuple(table.shape))
        pairs = ((planned.page_table, table), (planned.kv_lens, kv_lens), (planned.query_start, query_start))
        for old, new in pairs:
            if old.data_ptr() != new.data_ptr():
                old.copy_(new, non_blocking=True)
        return CudaAttentionPlan(planned._replace(host=batch.host), shape)

    def paged_attention(self, query: Tensor, kv_pages: Tensor, plan: CudaAttentionPlan) -> Tensor:
        batch, shape = plan
        check_paged_attention(self._backend, query, kv_pages, batch, shape)
        op = "paged_attention"
        _require(op, kv_pages, kv_pages.is_contiguous(), "kv_pages must be contiguous", kv_pages.stride())
        query = query.contiguous()
        out = torch.empty_like(query)
        num_sequences, max_pages = batch.page_table.shape
        self._library.call(
            op, query, kv_pages, batch.page_table, batch.kv_lens, batch.query_start, out,
            query.shape[0], shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.page_size, max_pages,
            num_sequences, _is_bfloat16(query), shape.head_dim**-0.5,
        )  # fmt: skip
        return out


def _is_few(x: Tensor, weight: Tensor) -> bool:
    rows, size = x.shape
    return (
        weight.dtype == x.dtype == torch.bfloat16
        and rows <= MAX_FEW_ROWS
        and size % 8 == 0
        and rows * size <= _MAX_STAGED
    )


def _is_bfloat16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def _require(op: str, tensor: Tensor, holds: bool, problem: str, value: object) -> None:
    """Raise InvalidKernelInput unless it holds and the tensor is where a kernel can read it."""
    if not tensor.is_cuda:
        raise InvalidKernelInput(op, "tensors must be on a CUDA device", value=str(tensor.device))
    if not holds:
        raise InvalidKernelInput(op, problem, value=value)
