"""Attention and the layers of a transformer on a GPU, by our own kernels (kernels_ext/cuda) and torch's products.

Nothing here waits for the device or looks at its values, so a CUDA graph can hold any of it. A layer of bfloat16 with
small matrices or few rows is six launches: four products with what surrounds them, rotation, attention. Otherwise
products are cuBLAS's and what surrounds them is launches of its own. See the sources for what bounds each kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from equivtest.errors import InvalidKernelInput
from equivtest.kernels.checks import check_attention_batch, check_paged_attention
from equivtest.kernels.contract import (
    MAX_HEAD_DIM,
    AttentionBatch,
    AttentionShape,
    BlockDrafts,
    KernelBackend,
    RowParams,
    Streams,
)
from equivtest.kernels.cuda_library import load_library
from equivtest.kernels.markov import STRIPES

MAX_FEW_ROWS = 8
"""Up to so many rows of bfloat16 a product of any size is our own."""
MAX_STRIP_ROWS = 64
"""Up to so many rows one of a small matrix is."""
MAX_STRIP_WEIGHTS = 1 << 22
"""Entries of a small matrix: of larger ones cuBLAS makes better use for many rows."""
MAX_MARKOV_HIDDEN = 8192
"""Entries of a hidden state that fit the shared memory of a kernel which asks for none beyond the usual."""


class WideResidual(NamedTuple):
    """The residual stream in float32, so that a bfloat16 model's many additions round once each in float32."""

    wide: Tensor
    """float32 [num_rows, hidden_size]."""
    rounded: Tensor | None
    """The same in the model's dtype, where somebody has made it; of a float32 model the same tensor."""
    dtype: torch.dtype
    """The model's."""

    @property
    def narrow(self) -> Tensor:
        """[num_rows, hidden_size] in the model's dtype."""
        return self.wide.to(self.dtype) if self.rounded is None else self.rounded


class CudaLayers:
    """See `equivtest.kernels.contract.LayerOps`; float32 and bfloat16 on the current CUDA device.

    More exact than `TorchLayers` in bfloat16: the residual stream is float32, and a norm's weight is multiplied into
    the matrix after it, so that its output is rounded once less.
    Raises KernelUnavailable where the kernels cannot be built.
    """

    def __init__(self) -> None:
        self._library = load_library()

    def linear(self, weight: Tensor, norm: Tensor | None = None) -> Tensor:
        if norm is not None:
            weight = (weight.float() * norm.float()).to(weight.dtype)
        return weight.contiguous()

    def head(self, x: Tensor, weight: Tensor) -> Tensor:
        """float32 for bfloat16 too: a product's own sums, which another rounding would only spoil."""
        return x @ weight.T if x.dtype == torch.float32 else torch.mm(x, weight.T, out_dtype=torch.float32)

    def residual(self, rows: Tensor) -> WideResidual:
        rows = rows.contiguous()
        return WideResidual(rows.float(), rows, rows.dtype)

    def rows(self, hidden: WideResidual) -> Tensor:
        return hidden.narrow

    def rms_norm(self, hidden: WideResidual, norm: Tensor, eps: float) -> Tensor:
        size = hidden.wide.shape[-1]
        _require("rms_norm", norm, norm.shape == (size,), f"norm must have shape [{size}]", tuple(norm.shape))
        return self._normed(hidden, eps, norm.contiguous())

    def normed_linear(self, hidden: WideResidual, eps: float, weight: Tensor) -> Tensor:
        if _is_own(hidden.wide, weight):
            return self._product(hidden.narrow, weight, eps=eps)
        return self._normed(hidden, eps) @ weight.T

    def normed_gate(self, hidden: WideResidual, eps: float, weight: Tensor) -> Tensor:
        if _is_own(hidden.wide, weight):
            return self._product(hidden.narrow, weight, eps=eps, is_gate=True)
        both = self._normed(hidden, eps) @ weight.T
        rows, size = both.shape[0], both.shape[1] // 2
        out = both.new_empty(rows, size)
        self._library.call("silu_mul", both, out, rows, size, _is_bfloat16(both))
        return out

    def add_linear(self, hidden: WideResidual, x: Tensor, weight: Tensor) -> WideResidual:
        """Writes into `hidden`."""
        if _is_own(x, weight):
            narrow = hidden.narrow
            self._product(x, weight, out=narrow, residual=hidden.wide)
            return hidden._replace(rounded=narrow)
        if hidden.dtype == torch.float32:
            hidden.wide.addmm_(x, weight.T)
            return hidden
        torch.addmm(hidden.wide, x, weight.T, out_dtype=torch.float32, out=hidden.wide)
        return hidden._replace(rounded=None)

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

    def markov_drafts(
        self,
        logits: Tensor,
        gates: Tensor,
        successors: Tensor,
        head: Tensor,
        law: RowParams | None = None,
        streams: Streams | None = None,
    ) -> BlockDrafts:
        """Two launches. Raises InvalidKernelInput unless hidden_size is a multiple of 8, at most MAX_MARKOV_HIDDEN."""
        op = "markov_drafts"
        batch, places, vocab_size = logits.shape
        size = gates.shape[-1]
        fits = size % 8 == 0 and size <= MAX_MARKOV_HIDDEN
        _require(op, gates, fits, f"hidden_size must be a multiple of 8, at most {MAX_MARKOV_HIDDEN}", size)
        for table in (successors, head):
            same = table.shape == (vocab_size, size) and table.dtype == head.dtype and table.is_contiguous()
            _require(op, table, same, f"tables must be [{vocab_size}, {size}], alike and contiguous", table.shape)
        values = torch.empty(batch, places, STRIPES, dtype=torch.float32, device=logits.device)
        tokens = torch.empty_like(values, dtype=torch.int64)
        drafts = torch.empty(batch, places, dtype=torch.int64, device=logits.device)
        probs: Tensor | None = None
        draw: list[Tensor | None] = [None] * 6
        if law is not None and streams is not None:
            probs, draw = torch.empty_like(values), [column.contiguous() for column in (*law, *streams)]
        self._library.call(
            op, logits.contiguous(), _is_bfloat16(logits), gates.float().contiguous(),
            successors, head, _is_bfloat16(head), *draw,
            values, tokens, drafts, probs, batch, places, vocab_size, size,
        )  # fmt: skip
        return BlockDrafts(drafts, None if probs is None else tokens, probs)

    def _normed(self, hidden: WideResidual, eps: float, norm: Tensor | None = None) -> Tensor:
        """hidden / rms(hidden), times norm if there is one, in the model's dtype."""
        wide = hidden.wide
        out = torch.empty_like(wide, dtype=hidden.dtype)
        rows, size = wide.shape
        _require("rms_norm", wide, wide.is_contiguous(), "hidden must be contiguous", wide.stride())
        self._library.call("rms_norm", wide, norm, out, rows, size, _is_bfloat16(out), float(eps))
        return out

    def _product(
        self,
        x: Tensor,
        weight: Tensor,
        *,
        eps: float | None = None,
        out: Tensor | None = None,
        residual: Tensor | None = None,
        is_gate: bool = False,
    ) -> Tensor:
        """eps: of the RMSNorm that the rows of x have still to go through. residual: float32, added to in place."""
        op = "product"
        num_rows, in_features = x.shape
        out_features = weight.shape[0] // 2 if is_gate else weight.shape[0]
        _require(op, x, weight.shape[1] == in_features, f"weight must be [..., {in_features}]", tuple(weight.shape))
        out = x.new_empty(num_rows, out_features) if out is None else out
        fits = out.shape == (num_rows, out_features) and out.is_contiguous()
        _require(op, out, fits, f"hidden must be [{num_rows}, {out_features}], contiguous", tuple(out.shape))
        self._library.call(
            op, x.contiguous(), weight, residual, out,
            num_rows, in_features, out_features, eps is not None, is_gate, float(eps or 0),
        )  # fmt: skip
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


def _is_own(x: Tensor, weight: Tensor) -> bool:
    """Whether `product` of kernels_ext/cuda multiplies these."""
    rows, size = x.shape
    if weight.dtype != torch.bfloat16 or size % 8:
        return False
    return rows <= (MAX_STRIP_ROWS if weight.numel() <= MAX_STRIP_WEIGHTS else MAX_FEW_ROWS)


def _is_bfloat16(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16


def _require(op: str, tensor: Tensor, holds: bool, problem: str, value: object) -> None:
    """Raise InvalidKernelInput unless it holds and the tensor is where a kernel can read it."""
    if not tensor.is_cuda:
        raise InvalidKernelInput(op, "tensors must be on a CUDA device", value=str(tensor.device))
    if not holds:
        raise InvalidKernelInput(op, problem, value=value)
