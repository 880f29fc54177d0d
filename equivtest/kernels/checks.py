"""The checks that every backend makes before any work: shapes, dtypes, devices and values, named in the message."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equivtest.errors import InvalidKernelInput, UnsupportedSampling
from equivtest.kernels.contract import (
    MAX_HEAD_DIM,
    REFUSALS,
    AttentionBatch,
    AttentionShape,
    HostBatch,
    KernelBackend,
    RowParams,
    SpecScratch,
    Streams,
)
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


def check_logits(op: str, logits: Tensor, temperature: Tensor) -> None:
    """The values of logits [num_rows, vocab_size], float: one wait for the device where all is well."""
    no_number = ~(logits < torch.inf)
    largest = logits.amax(dim=1)
    scaled = torch.where(temperature == 0, 0.0, largest / temperature)
    nothing, overflow = largest == -torch.inf, ~scaled.isfinite()
    if not bool((no_number.any(dim=1) | nothing | overflow).any()):
        return
    raise_at(op, "logits must not hold NaN or +inf", logits, no_number)
    raise_at(op, "logits must hold at least one finite value", largest, nothing)
    raise_at(op, "the largest logit divided by temperature overflows float32", scaled, overflow)


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


def check_attention_batch(backend: KernelBackend, batch: AttentionBatch, shape: AttentionShape) -> None:
    """Shapes, dtypes, lengths and page ids of a plan_attention call; row means sequence.

    Looks at the host's copy of the values, so that nothing waits for the device.
    """
    op = "plan_attention"
    if shape.dtype not in backend.capabilities.attention_dtypes:
        raise InvalidKernelInput(op, f"{backend.name} has no attention in this dtype", value=shape.dtype)
    if not 1 <= shape.head_dim <= MAX_HEAD_DIM:
        raise InvalidKernelInput(op, f"head_dim must be in 1..{MAX_HEAD_DIM}", value=shape.head_dim)
    heads = shape.num_heads, shape.num_kv_heads
    if 0 in heads or shape.page_size == 0:
        problem = "num_heads, num_kv_heads and page_size must be above 0"
        raise InvalidKernelInput(op, problem, value=(*heads, shape.page_size))
    if heads[0] % heads[1]:
        raise InvalidKernelInput(op, "num_heads must be a multiple of num_kv_heads", value=heads)
    page_table, kv_lens, query_start = batch.host
    if page_table.ndim != 2:
        raise InvalidKernelInput(op, "page_table must be [B, max_pages]", value=page_table.shape)
    num_sequences, max_pages = page_table.shape
    for name, column, length in (("kv_lens", kv_lens, num_sequences), ("query_start", query_start, num_sequences + 1)):
        if column.shape != (length,):
            raise InvalidKernelInput(op, f"{name} must have shape [{length}]", value=column.shape)
    for name in HostBatch._fields:
        on_host, on_device = getattr(batch.host, name), getattr(batch, name)
        _check_shape(op, name, on_device, on_host.shape)
        _check_dtype(op, name, on_device, torch.int32)
        if on_host.dtype != np.int32:
            raise InvalidKernelInput(op, f"{name} must be int32 on the host too", value=on_host.dtype)
    _check_device(op, backend, **batch._asdict() | {"host": batch.page_table})
    rows_each = np.diff(query_start)
    if query_start[0] != 0:
        raise InvalidKernelInput(op, "query_start must start at 0", row=0, value=int(query_start[0]))
    used = np.arange(0, max_pages * shape.page_size, shape.page_size) < kv_lens[:, None]
    wrong_page = used & ((page_table < 0) | (page_table >= shape.num_pages))
    for problem, values, wrong in (
        ("query_start must not decrease", rows_each, rows_each < 0),
        (
            "kv_lens must count at least the sequence's own rows and fit its pages",
            kv_lens,
            (kv_lens < rows_each) | (kv_lens > max_pages * shape.page_size),
        ),
    ):
        if wrong.any():
            worst = int(wrong.argmax())
            raise InvalidKernelInput(op, problem, row=worst, value=int(values[worst]))
    if wrong_page.any():
        sequence, page = (int(index[0]) for index in wrong_page.nonzero())
        raise InvalidKernelInput(
            op, "page id must be one of kv_pages", row=sequence, value=int(page_table[sequence, page])
        )


def check_paged_attention(
    backend: KernelBackend, query: Tensor, kv_pages: Tensor, batch: AttentionBatch, shape: AttentionShape
) -> None:
    """Query and pages of a paged_attention call against what was planned."""
    op = "paged_attention"
    _check_rank(op, "query", query, ("num_rows", "num_heads", "head_dim"))
    _check_shape(op, "query", query, (query.shape[0], shape.num_heads, shape.head_dim))
    pages = (shape.num_pages, 2, shape.page_size, shape.num_kv_heads, shape.head_dim)
    _check_shape(op, "kv_pages", kv_pages, pages)
    _check_dtype(op, "query", query, shape.dtype)
    _check_dtype(op, "kv_pages", kv_pages, shape.dtype)
    _check_device(op, backend, query=query, kv_pages=kv_pages, page_table=batch.page_table)
    num_rows = int(batch.host.query_start[-1])
    if query.shape[0] < num_rows or (query.shape[0] > num_rows and not backend.capabilities.graphs):
        raise InvalidKernelInput(op, f"query must have {num_rows} rows", value=query.shape[0])


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


def raise_refusal(op: str, refusal: npt.NDArray[np.float64]) -> None:
    """Raise InvalidKernelInput for what a kernel left in `SpecAccept.refusal` (float64 [3], read by the host)."""
    problem, row, value = refusal.tolist()
    if problem:
        raise InvalidKernelInput(op, REFUSALS[int(problem)], row=int(row), value=value)


def check_accept_logits(
    backend: KernelBackend,
    logits: Tensor,
    row_start: Tensor,
    params: RowParams,
    draft_token_ids: Tensor,
    num_draft: Tensor,
    draft_probs: Tensor | None,
    streams: Streams,
    scratch: SpecScratch,
) -> None:
    """Shapes, dtypes and devices of an accept_logits call. Values are the kernel's to check: nothing here waits."""
    op = "accept_logits"
    _check_rank(op, "logits", logits, ("num_rows", "vocab_size"))
    _check_rank(op, "draft_token_ids", draft_token_ids, ("B", "K"))
    batch, max_draft = draft_token_ids.shape
    vocab_size = logits.shape[1]
    if vocab_size == 0:
        raise InvalidKernelInput(op, "vocab_size must be above 0", value=0)
    if logits.dtype not in backend.capabilities.dtypes:
        raise InvalidKernelInput(op, f"logits dtype not supported by {backend.name}", value=logits.dtype)
    columns = {
        "row_start": (row_start, torch.int32),
        "num_draft": (num_draft, torch.int32),
        "temperature": (params.temperature, torch.float32),
        "top_k": (params.top_k, torch.int32),
        "top_p": (params.top_p, torch.float32),
        "min_p": (params.min_p, torch.float32),
        "streams.keys": (streams.keys, torch.int64),
        "streams.positions": (streams.positions, torch.int64),
    }
    for name, (column, dtype) in columns.items():
        _check_shape(op, name, column, (batch,))
        _check_dtype(op, name, column, dtype)
        if not column.is_contiguous():
            raise InvalidKernelInput(op, f"{name} must be contiguous")
    _check_dtype(op, "draft_token_ids", draft_token_ids, torch.int64)
    devices = {"logits": logits, "draft_token_ids": draft_token_ids, "scratch": scratch.target_probs}
    if draft_probs is not None:
        _check_shape(op, "draft_probs", draft_probs, (batch, max_draft, vocab_size))
        _check_dtype(op, "draft_probs", draft_probs, torch.float32)
        devices["draft_probs"] = draft_probs
    for name, tensor in (("logits", logits), ("draft_probs", draft_probs)):
        if tensor is not None and not tensor.is_contiguous():
            raise InvalidKernelInput(op, f"{name} must be contiguous")
    _check_device(op, backend, **devices, **{name: column for name, (column, _) in columns.items()})
    scratch.require(op, batch=batch, draft=max_draft)


def raise_at(op: str, problem: str, values: Tensor, wrong: Tensor) -> None:
    """Raise for the first wrong entry, naming its row (the first dimension)."""
    if bool(wrong.any()):
        where = tuple(wrong.nonzero()[0].tolist())
        raise InvalidKernelInput(op, problem, row=where[0], value=values[where].item())
