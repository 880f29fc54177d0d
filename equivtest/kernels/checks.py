"""The checks that every backend makes before any work: shapes, dtypes, devices and values, named in the message."""

from __future__ import annotations

import torch
from torch import Tensor

from equivtest.errors import InvalidKernelInput, UnsupportedSampling
from equivtest.kernels.contract import MAX_HEAD_DIM, KernelBackend, RowParams, SpecScratch, Streams
from equivtest.records import SamplingParams


def check_params_supported(backend: KernelBackend, params: SamplingParams, *, seeded: bool) -> None:
    """Raise UnsupportedSampling when the backend cannot represent the request."""
    if params.min_p > 0 and not backend.capabilities.min_p:
        raise UnsupportedSampling(backend.name, "min_p")
    if seeded and not backend.capabilities.per_request_seed:
        raise UnsupportedSampling(backend.name, "a per-request seed")


def check_verify_probs(
    backend: KernelBackend, logits: Tensor, params: RowParams, out: Tensor, out_rows: Tensor | None
) -> None:
    """Shapes, dtypes, devices and parameter ranges of a verify_probs call; the backend checks the logits' values."""
    op = "verify_probs"
    _check_rank(op, "logits", logits, ("num_rows", "vocab_size"))
    num_rows, vocab_size = logits.shape
    if vocab_size == 0:
        raise InvalidKernelInput(op, "vocab_size must be above 0", value=0)
    if logits.dtype not in backend.capabilities.dtypes:
        raise InvalidKernelInput(op, f"logits dtype not supported by {backend.name}", value=logits.dtype)
    on_device = {"logits": logits, "out": out, **params._asdict()}
    _check_device(op, backend, **on_device if out_rows is None else {**on_device, "out_rows": out_rows})
    for name, column in params._asdict().items():
        _check_shape(op, name, column, (num_rows,))
    _check_rank(op, "out", out, ("num_out_rows", "vocab_size"))
    for name, dtype in zip(RowParams._fields, (torch.float32, torch.int32, torch.float32, torch.float32), strict=True):
        _check_dtype(op, name, getattr(params, name), dtype)
    _check_dtype(op, "out", out, backend.capabilities.probs_dtype)
    if out.shape[1] != vocab_size or (out_rows is None and out.shape[0] != num_rows):
        raise InvalidKernelInput(op, f"out must be [{num_rows}, {vocab_size}]", value=tuple(out.shape))
    if not out.is_contiguous():
        raise InvalidKernelInput(op, "out must be contiguous")
    if out_rows is not None:
        _check_shape(op, "out_rows", out_rows, (num_rows,))
        _check_dtype(op, "out_rows", out_rows, torch.int64)
        _check_values(op, "out_rows out of range", out_rows, (out_rows < 0) | (out_rows >= out.shape[0]))
        if int(out_rows.bincount().max() if num_rows else 0) > 1:
            raise InvalidKernelInput(op, "out_rows must name each row once")
    _check_values(
        op,
        "temperature must be finite and at least 0",
        params.temperature,
        ~(params.temperature.isfinite() & (params.temperature >= 0)),
    )
    _check_values(op, "top_k must be at least 0", params.top_k, params.top_k < 0)
    _check_values(op, "top_p must be above 0 and at most 1", params.top_p, ~((params.top_p > 0) & (params.top_p <= 1)))
    _check_values(op, "min_p must be between 0 and 1", params.min_p, ~((params.min_p >= 0) & (params.min_p <= 1)))
    if not backend.capabilities.min_p and bool((params.min_p > 0).any()):
        raise UnsupportedSampling(backend.name, "min_p")


def check_spec_accept(
    backend: KernelBackend,
    draft_token_ids: Tensor,
    num_draft: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor | None,
    streams: Streams,
    scratch: SpecScratch,
) -> None:
    """Shapes, dtypes, devices, draft counts and draft ids of a spec_accept call."""
    op = "spec_accept"
    _check_rank(op, "target_probs", target_probs, ("B", "K+1", "vocab_size"))
    batch, num_target_rows, vocab_size = target_probs.shape
    max_draft = num_target_rows - 1
    if vocab_size == 0 or max_draft < 0:
        raise InvalidKernelInput(op, "vocab_size and K+1 must be above 0", value=tuple(target_probs.shape))
    _check_shape(op, "draft_token_ids", draft_token_ids, (batch, max_draft))
    _check_shape(op, "num_draft", num_draft, (batch,))
    _check_dtype(op, "draft_token_ids", draft_token_ids, torch.int64)
    _check_dtype(op, "num_draft", num_draft, torch.int32)
    _check_dtype(op, "target_probs", target_probs, backend.capabilities.probs_dtype)
    _check_dtype(op, "scratch", scratch.target_probs, backend.capabilities.probs_dtype)
    devices = {
        "scratch": scratch.target_probs,
        "target_probs": target_probs,
        "draft_token_ids": draft_token_ids,
        "num_draft": num_draft,
        "streams.keys": streams.keys,
        "streams.positions": streams.positions,
    }
    if draft_probs is not None:
        _check_shape(op, "draft_probs", draft_probs, (batch, max_draft, vocab_size))
        _check_dtype(op, "draft_probs", draft_probs, target_probs.dtype)
        devices["draft_probs"] = draft_probs
    _check_device(op, backend, **devices)
    _check_streams(op, streams, batch, max_draft)
    scratch.require(op, batch=batch, draft=max_draft)
    _check_values(op, f"num_draft must be in 0..{max_draft}", num_draft, (num_draft < 0) | (num_draft > max_draft))
    if not backend.capabilities.ragged_draft and batch and bool((num_draft != num_draft[0]).any()):
        raise UnsupportedSampling(backend.name, "rows with different num_draft")
    if max_draft:
        offered = torch.arange(max_draft, device=num_draft.device) < num_draft[:, None]
        wrong = offered & ((draft_token_ids < 0) | (draft_token_ids >= vocab_size))
        if bool(wrong.any()):
            row, slot = (int(i) for i in wrong.nonzero()[0])
            raise InvalidKernelInput(
                op,
                f"draft id out of range 0..{vocab_size - 1} at slot {slot}",
                row=row,
                value=int(draft_token_ids[row, slot]),
            )


def check_sample(backend: KernelBackend, target_probs: Tensor, streams: Streams, out: Tensor) -> None:
    """Shapes, dtypes and devices of a sample call."""
    op = "sample"
    _check_rank(op, "target_probs", target_probs, ("B", "vocab_size"))
    batch = target_probs.shape[0]
    if target_probs.shape[1] == 0:
        raise InvalidKernelInput(op, "vocab_size must be above 0", value=0)
    _check_dtype(op, "target_probs", target_probs, backend.capabilities.probs_dtype)
    _check_shape(op, "out", out, (batch,))
    _check_dtype(op, "out", out, torch.int64)
    _check_device(op, backend, target_probs=target_probs, keys=streams.keys, positions=streams.positions, out=out)
    _check_streams(op, streams, batch, 0)
    if not out.is_contiguous():
        raise InvalidKernelInput(op, "out must be contiguous")


def check_paged_attention(
    backend: KernelBackend, query: Tensor, kv_pages: Tensor, page_table: Tensor, kv_lens: Tensor, query_start: Tensor
) -> None:
    """Shapes, dtypes and devices of a paged_attention call."""
    op = "paged_attention"
    _check_rank(op, "query", query, ("num_rows", "num_heads", "head_dim"))
    _check_rank(op, "kv_pages", kv_pages, ("num_pages", "2", "page_size", "num_kv_heads", "head_dim"))
    _check_rank(op, "page_table", page_table, ("B", "max_pages"))
    _, num_heads, head_dim = query.shape
    num_pages, _, page_size, num_kv_heads, _ = kv_pages.shape
    batch = page_table.shape[0]
    if query.dtype not in (torch.float32, torch.bfloat16):
        raise InvalidKernelInput(op, "query must be torch.float32 or torch.bfloat16", value=query.dtype)
    _check_dtype(op, "kv_pages", kv_pages, query.dtype)
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise InvalidKernelInput(op, f"head_dim must be in 1..{MAX_HEAD_DIM}", value=head_dim)
    if num_heads == 0 or num_kv_heads == 0 or page_size == 0:
        problem = "num_heads, num_kv_heads and page_size must be above 0"
        raise InvalidKernelInput(op, problem, value=(num_heads, num_kv_heads, page_size))
    if num_heads % num_kv_heads:
        raise InvalidKernelInput(op, "num_heads must be a multiple of num_kv_heads", value=(num_heads, num_kv_heads))
    _check_shape(op, "kv_pages", kv_pages, (num_pages, 2, page_size, num_kv_heads, head_dim))
    _check_shape(op, "kv_lens", kv_lens, (batch,))
    _check_shape(op, "query_start", query_start, (batch + 1,))
    for name, tensor in (("page_table", page_table), ("kv_lens", kv_lens), ("query_start", query_start)):
        _check_dtype(op, name, tensor, torch.int32)
    _check_device(
        op, backend, query=query, kv_pages=kv_pages, page_table=page_table, kv_lens=kv_lens, query_start=query_start
    )


def check_paged_attention_values(
    query: Tensor, kv_pages: Tensor, page_table: Tensor, kv_lens: Tensor, query_start: Tensor
) -> None:
    """Lengths and page ids of a paged_attention call that `check_paged_attention` passed; row means sequence.

    Apart from the shapes because a backend may do this in its kernel, where it costs nothing.
    """
    op = "paged_attention"
    num_rows, num_pages = query.shape[0], kv_pages.shape[0]
    page_size, max_pages = kv_pages.shape[2], page_table.shape[1]
    rows_each = query_start.diff()
    _check_values(op, "query_start must not decrease", rows_each, rows_each < 0)
    ends = query_start[[0, -1]]
    _check_values(
        op,
        "query_start must run from 0 to the number of query rows",
        ends,
        ends != torch.tensor([0, num_rows], device=ends.device),
    )
    _check_values(
        op,
        "kv_lens must count at least the sequence's own rows and fit its pages",
        kv_lens,
        (kv_lens < rows_each) | (kv_lens > max_pages * page_size),
    )
    used = torch.arange(0, max_pages * page_size, page_size, device=kv_lens.device) < kv_lens[:, None]
    wrong = used & ((page_table < 0) | (page_table >= num_pages))
    wrong_rows = wrong.any(dim=1)
    first_wrong = page_table.gather(1, wrong.int().argmax(dim=1, keepdim=True)).squeeze(1) if max_pages else kv_lens
    _check_values(op, "page id must be one of kv_pages", first_wrong, wrong_rows)


def _check_streams(op: str, streams: Streams, batch: int, max_draft: int) -> None:
    for name, column in streams._asdict().items():
        _check_shape(op, f"streams.{name}", column, (batch,))
        _check_dtype(op, f"streams.{name}", column, torch.int64)
    _check_values(
        op,
        "streams.positions must be a 32-bit count",
        streams.positions,
        # Not positions + max_draft, which wraps around near 2**63.
        (streams.positions < 0) | (streams.positions >= 2**32 - max_draft),
    )


def _check_rank(op: str, name: str, tensor: Tensor, dims: tuple[str, ...]) -> None:
    if tensor.dim() != len(dims):
        raise InvalidKernelInput(op, f"{name} must be [{', '.join(dims)}]", value=tuple(tensor.shape))


def _check_shape(op: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise InvalidKernelInput(op, f"{name} must have shape {list(shape)}", value=tuple(tensor.shape))


def _check_dtype(op: str, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise InvalidKernelInput(op, f"{name} must be {dtype}", value=tensor.dtype)


def _check_device(op: str, backend: KernelBackend, **tensors: Tensor) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        raise InvalidKernelInput(op, "all tensors must be on one device", value={n: str(d) for n, d in devices.items()})
    for name, device in devices.items():
        if device.type not in backend.capabilities.devices:
            raise InvalidKernelInput(op, f"{name} is on a device {backend.name} does not serve", value=str(device))


def _check_values(op: str, problem: str, values: Tensor, wrong: Tensor) -> None:
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise InvalidKernelInput(op, problem, row=row, value=values[row].item())
