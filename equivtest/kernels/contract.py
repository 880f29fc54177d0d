"""The kernel contract: what every backend computes, and the checks that all of them share.

The one law of the house, in this order (`LAW_ORDER`):

    z = logits / temperature            float32
    top-k      keep z >= the k-th largest z
    softmax    over what is kept
    top-p      keep z >= the z at which the mass of the larger ones first reaches top_p
    min-p      keep p >= min_p * max p
    renormalise; filtered tokens are exact 0.0 (and a kept one may be 0 where float32 only has subnormals, below 1e-37)

Every filter is a threshold on z, so tokens that tie at a cut are all kept, whatever their id. `temperature == 0`
is greedy: a point mass on the largest logit, the lowest id on a tie.

A draw from a row of probabilities is by inverse distribution function in vocabulary order: the first id whose
cumulative probability exceeds u * (row sum), sums in float64. So backends agree token for token on the same streams,
but for inputs within rounding of a boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from equivtest.errors import InvalidKernelInput, ScratchTooSmall, UnsupportedSampling
from equivtest.records import SamplingParams

LAW_ORDER = ("temperature", "top_k", "softmax", "top_p", "min_p", "renormalise")
PADDING = -1
"""Fills output_token_ids past the tokens that were put out."""
MAX_HEAD_DIM = 128
"""Largest head_dim that `paged_attention` takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can represent. What it cannot, it refuses; it never approximates."""

    min_p: bool
    per_request_seed: bool
    """A request's streams depend on its own key alone, so a request with a seed can be replayed."""
    ragged_draft: bool
    """Rows of one call may have different num_draft."""
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    """Dtypes of the logits that `verify_probs` takes."""
    probs_dtype: torch.dtype = torch.float32
    """Dtype of probabilities, in and out."""


class RowParams(NamedTuple):
    """Sampling parameters, one entry per logits row, all on the device of the logits."""

    temperature: Tensor  # float32 [num_rows]; 0 is greedy
    top_k: Tensor  # int32 [num_rows]; 0 keeps all
    top_p: Tensor  # float32 [num_rows]; in (0, 1]
    min_p: Tensor  # float32 [num_rows]; in [0, 1]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> RowParams:
        """One row per entry of `params`."""
        return cls(
            torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
            torch.tensor([p.top_k for p in params], dtype=torch.int32, device=device),
            torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
            torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
        )

    def take(self, rows: Tensor) -> RowParams:
        """The parameters of `rows` (int64 [n]), repeats allowed."""
        return RowParams(*(column.index_select(0, rows) for column in self))


class Streams(NamedTuple):
    """Where each row's coins come from (see equivtest.rng)."""

    keys: Tensor  # int64 [B], stream keys
    positions: Tensor  # int64 [B], generated position of the row's first output token


class SpecAccept(NamedTuple):
    """Result of `spec_accept`: views into the scratch, valid until its next use."""

    output_token_ids: Tensor  # int64 [B, K+1]: the accepted drafts, then one recovered or bonus token, then PADDING
    emitted: Tensor  # int32 [B]: length of the accepted prefix; the row puts out emitted + 1 tokens. Commit on this.
    acceptance_telemetry: (
        Tensor  # int32 [B]: drafts whose own coin accepts, also past the first rejection. Never commit.
    )


class SpecScratch:
    """Every buffer that a step needs, allocated once per executor and never inside a step."""

    def __init__(
        self,
        max_batch: int,
        max_draft: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.max_batch, self.max_draft, self.vocab_size = max_batch, max_draft, vocab_size
        self.target_probs = torch.empty(max_batch, max_draft + 1, vocab_size, dtype=dtype, device=device)
        self.output_token_ids = torch.empty(max_batch, max_draft + 1, dtype=torch.int64, device=device)
        self.emitted = torch.empty(max_batch, dtype=torch.int32, device=device)
        self.acceptance_telemetry = torch.empty(max_batch, dtype=torch.int32, device=device)
        self.token_ids = torch.empty(max_batch * (max_draft + 1), dtype=torch.int64, device=device)

    def probs(self, batch: int, num_draft: int) -> Tensor:
        """A contiguous view of target_probs: [batch, num_draft + 1, vocab_size]. Contents are the last call's."""
        self.require("probs", batch=batch, draft=num_draft)
        rows = batch * (num_draft + 1)
        return self.target_probs.view(-1, self.vocab_size)[:rows].view(batch, num_draft + 1, self.vocab_size)

    def accepted(self, batch: int, num_draft: int) -> SpecAccept:
        """Contiguous views of the three outputs of spec_accept, output_token_ids as [batch, num_draft + 1]."""
        self.require("spec_accept", batch=batch, draft=num_draft)
        tokens = self.output_token_ids.view(-1)[: batch * (num_draft + 1)].view(batch, num_draft + 1)
        return SpecAccept(tokens, self.emitted[:batch], self.acceptance_telemetry[:batch])

    def require(self, op: str, *, batch: int, draft: int) -> None:
        """Raise ScratchTooSmall unless `batch` rows of `draft` drafts fit."""
        if batch > self.max_batch or draft > self.max_draft:
            raise ScratchTooSmall(
                op, f"batch {batch}, draft {draft}", f"batch {self.max_batch}, draft {self.max_draft}"
            )


class KernelBackend(Protocol):
    """One implementation of the contract. Every method is deterministic in its arguments."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def verify_probs(
        self,
        logits: Tensor,  # [num_rows, vocab_size], a dtype of capabilities.dtypes
        params: RowParams,
        *,
        out: Tensor,  # [num_out_rows, vocab_size] float32 (float64 on the float64 reference), written in place
        out_rows: Tensor | None = None,  # int64 [num_rows], the row of `out` for each row of `logits`; None: the same
    ) -> Tensor:
        """The law of each row, written to `out`, which is returned. Rows of `out` not named keep what they held.

        A ragged verification batch passes its rows' places in [B, K+1] as `out_rows`.
        Raises InvalidKernelInput naming the row for NaN, +inf, no finite logit, or a largest logit that overflows when
        divided by the temperature, before anything is written.
        """
        ...

    def spec_accept(
        self,
        draft_token_ids: Tensor,  # int64 [B, K]; entries at or past num_draft are ignored
        num_draft: Tensor,  # int32 [B], 0..K
        target_probs: Tensor,  # [B, K+1, vocab_size]; rows past num_draft are ignored
        draft_probs: Tensor | None,  # [B, K, vocab_size], the drafter's law q; None: point mass at each draft
        streams: Streams,
        *,
        scratch: SpecScratch,
    ) -> SpecAccept:
        """Chain rejection sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2).

        Draft i of row b, at position streams.positions[b] + i, is accepted when u * q(d) < p(d), u the ACCEPT coin of
        that position. The first rejection draws from relu(p - q), renormalised, with the RECOVER coin of its position
        (from p itself in the one case where rounding leaves that residual empty); full acceptance draws from row
        num_draft with the BONUS coin of position + num_draft; num_draft 0 draws from row 0 with the PLAIN coin.

        p and q must be normalised to rounding, which is not checked: acceptance and the residual take them as they
        are. Draws are relative to the row's sum, so that this rounding does not matter to them. Raises
        InvalidKernelInput naming the row, before anything is written, for a negative or non-finite entry among those
        it looks at (every draft's own entries, and all of the rows it draws from) and for a row without mass.
        """
        ...

    def sample(self, target_probs: Tensor, streams: Streams, *, out: Tensor) -> Tensor:
        """One draw per row with the PLAIN coin of its position.

        target_probs: [B, vocab_size]; out: int64 [B], written in place and returned. Refuses what `spec_accept` does.
        """
        ...

    def paged_attention(
        self,
        query: Tensor,  # [num_rows, num_heads, head_dim], float32 or bfloat16
        kv_pages: Tensor,  # [num_pages, 2, page_size, num_kv_heads, head_dim], the query's dtype; [:, 0] keys
        page_table: Tensor,  # int32 [B, max_pages]; entries past a sequence's length are ignored
        kv_lens: Tensor,  # int32 [B], length of each sequence including this call's rows
        query_start: Tensor,  # int32 [B + 1], rows query_start[b]:query_start[b+1] are the last ones of sequence b
    ) -> Tensor:
        """Causal grouped-query attention over paged keys and values, scale 1/sqrt(head_dim), float32 accumulation.

        Row j of the n rows of sequence b sees positions 0 .. kv_lens[b] - n + j. Returns the shape of `query`.
        """
        ...


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
