"""The reference backend: the contract in plain torch, on any device. Every other backend is compared with it.

Written to be read: it sorts, gathers and masks whole tensors. The float64 option computes and returns float64.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from equivtest.kernels.checks import (
    check_logits,
    check_paged_attention,
    check_sample,
    check_spec_accept,
    check_verify_probs,
    raise_at,
)
from equivtest.kernels.contract import (
    PADDING,
    AttentionPlan,
    Capabilities,
    RowParams,
    SpecAccept,
    SpecScratch,
    Streams,
)
from equivtest.kernels.unplanned import Unplanned
from equivtest.rng import Purpose, uniforms

_MAX_ATTENTION_ENTRIES = 1 << 27
"""Most float32 entries that one temporary of `paged_attention` holds."""


def load() -> ReferenceBackend:
    """The float32 reference."""
    return ReferenceBackend()


class ReferenceBackend(Unplanned):
    """The definition of the contract; see `equivtest.kernels.contract.KernelBackend`."""

    name = "reference"

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        """dtype: float32, or float64 for a reference that is exact to rounding far below float32's."""
        self.capabilities = Capabilities(
            min_p=True,
            per_request_seed=True,
            ragged_draft=True,
            devices=frozenset({"cpu", "cuda"}),
            dtypes=frozenset({torch.float32, torch.bfloat16, dtype}),
            probs_dtype=dtype,
        )

    def verify_probs(self, logits: Tensor, params: RowParams, *, out: Tensor, out_rows: Tensor | None = None) -> Tensor:
        check_verify_probs(self, logits, params, out, out_rows)
        if logits.shape[0] == 0:
            return out
        logits = logits.to(self.capabilities.probs_dtype)
        check_logits("verify_probs", logits, params.temperature)
        probs = torch.where((params.temperature == 0)[:, None], _greedy(logits), _law(logits, params))
        if out_rows is None:
            return out.copy_(probs)
        return out.index_copy_(0, out_rows, probs)

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
        op = "spec_accept"
        batch, max_draft = draft_token_ids.shape
        result = scratch.accepted(batch, max_draft)
        if batch == 0:
            return result
        slots = torch.arange(max_draft, device=num_draft.device)
        offered = slots < num_draft[:, None]
        drafts = torch.where(offered, draft_token_ids, 0)

        p_draft = _entries(target_probs[:, :max_draft], drafts)
        q_draft = torch.ones_like(p_draft) if draft_probs is None else _entries(draft_probs, drafts)
        _check_entries(op, "probabilities must be finite and at least 0", p_draft, offered)
        _check_entries(op, "draft probabilities must be finite and at least 0", q_draft, offered)
        u_accept = _coins(streams.keys[:, None], streams.positions[:, None] + slots, Purpose.ACCEPT)
        accepted = offered & (u_accept * q_draft < p_draft)
        emitted = accepted.long().cumprod(dim=1).sum(dim=1)
        telemetry = accepted.sum(dim=1)

        rows = torch.arange(batch, device=num_draft.device)
        p = target_probs[rows, emitted].double()
        _check_probs(op, "probabilities must be finite and at least 0", p)
        weights = p
        recovering = emitted < num_draft
        if bool(recovering.any()):
            slot = emitted.clamp(max=max_draft - 1)  # rows that do not recover have no draft there: any slot will do
            if draft_probs is None:
                residual = p.scatter(1, drafts[rows, slot, None], 0.0)
            else:
                q = torch.where(recovering[:, None], draft_probs[rows, slot].double(), 0.0)
                _check_probs(op, "draft probabilities must be finite and at least 0", q)
                residual = (p - q).clamp(min=0)
            # Rounding alone can leave the residual empty: p <= q everywhere, and yet the coin rejected.
            weights = torch.where((recovering & (residual.sum(dim=1) > 0))[:, None], residual, p)
        _check_mass(op, weights)
        purposes = (
            (recovering, Purpose.RECOVER),
            (~recovering & (num_draft > 0), Purpose.BONUS),
            (num_draft == 0, Purpose.PLAIN),
        )
        u = torch.zeros(batch, dtype=torch.float64, device=num_draft.device)
        for rows_of, purpose in purposes:
            u = torch.where(rows_of, _coins(streams.keys, streams.positions + emitted, purpose), u)

        tokens = torch.full_like(result.output_token_ids, PADDING)
        tokens[:, :max_draft] = torch.where(slots < emitted[:, None], drafts, PADDING)
        tokens[rows, emitted] = _draw(weights, u)
        result.output_token_ids.copy_(tokens)
        result.emitted.copy_(emitted)
        result.acceptance_telemetry.copy_(telemetry)
        return result

    def sample(
        self, target_probs: Tensor, streams: Streams, *, out: Tensor, purpose: Purpose = Purpose.PLAIN
    ) -> Tensor:
        check_sample(self, target_probs, streams, out)
        if target_probs.shape[0] == 0:
            return out
        weights = target_probs.double()
        _check_probs("sample", "probabilities must be finite and at least 0", weights)
        _check_mass("sample", weights)
        return out.copy_(_draw(weights, _coins(streams.keys, streams.positions, purpose)))

    def paged_attention(self, query: Tensor, kv_pages: Tensor, plan: AttentionPlan) -> Tensor:
        batch, shape = plan
        check_paged_attention(self, query, kv_pages, batch, shape)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        num_sequences = len(batch.host.kv_lens)
        longest = [int(counts.max(initial=0)) for counts in (np.diff(batch.host.query_start), batch.host.kv_lens)]
        if 0 in longest:
            return out
        # As many sequences at a time as keep the temporaries small: a loop over single ones would leave a GPU idle.
        entries = longest[1] * (2 * shape.num_kv_heads * shape.head_dim + longest[0] * shape.num_heads)
        block = max(1, _MAX_ATTENTION_ENTRIES // entries)
        for first in range(0, num_sequences, block):
            part = slice(first, first + block)
            starts = batch.query_start[first : first + block + 1]
            _attend(query, kv_pages, batch.page_table[part], batch.kv_lens[part], starts, out)
        return out


def _attend(
    query: Tensor, kv_pages: Tensor, page_table: Tensor, kv_lens: Tensor, query_start: Tensor, out: Tensor
) -> None:
    """Attention of a few sequences, padded to the longest and to the most rows; writes their rows of `out`."""
    num_heads, head_dim = query.shape[1:]
    page_size, num_kv_heads = kv_pages.shape[2:4]
    rows_each = query_start.diff()
    offsets = torch.arange(int(rows_each.max()), device=query.device)
    columns = torch.arange(int(kv_lens.max()), device=query.device)
    is_row = offsets < rows_each[:, None]  # [B, n]
    is_token = columns < kv_lens[:, None]  # [B, T]
    used = page_table[:, : -(-len(columns) // page_size)]
    used = used.masked_fill(~is_token[:, ::page_size], 0).long()  # the entries past a length are arbitrary
    pages = kv_pages[used].float()  # [B, pages, 2, page_size, num_kv_heads, head_dim]
    keys, values = (pages[:, :, i].flatten(1, 2)[:, : len(columns)] for i in (0, 1))
    values = values.masked_fill(~is_token[:, :, None, None], 0.0)  # a weight of 0 does not silence a NaN
    places = (query_start[:-1, None] + offsets)[is_row]
    padded = query.new_zeros(*is_row.shape, num_heads, head_dim, dtype=torch.float32)
    padded[is_row] = query[places].float() * head_dim**-0.5
    grouped = padded.view(
        *is_row.shape, num_kv_heads, num_heads // num_kv_heads, head_dim
    )  # [B, n, num_kv_heads, group, head_dim]
    scores = torch.einsum("bnkgd,btkd->bkgnt", grouped, keys)
    last_seen = (kv_lens - rows_each)[:, None] + offsets
    future = columns > last_seen[:, :, None]  # [B, n, T]; a padded row sees what its sequence holds, and is not read
    weights = scores.masked_fill(future[:, None, None], -torch.inf).softmax(dim=-1)
    attended = torch.einsum("bkgnt,btkd->bnkgd", weights, values).flatten(2, 3)
    out[places] = attended[is_row].to(query.dtype)


def _law(logits: Tensor, params: RowParams) -> Tensor:
    """The one law, in the order of `contract.LAW_ORDER`. Greedy rows are computed with temperature 1 and not used."""
    vocab_size = logits.shape[1]
    temperature = torch.where(params.temperature == 0, 1.0, params.temperature).to(logits.dtype)
    z = logits / temperature[:, None]
    descending = z.sort(dim=1, descending=True).values

    k = torch.where(params.top_k == 0, vocab_size, params.top_k.clamp(max=vocab_size)).long()
    cut = descending.gather(1, k[:, None] - 1)

    e = (z - descending[:, :1]).exp()
    e_descending = (descending - descending[:, :1]).exp().double().masked_fill(descending < cut, 0.0)
    mass = e_descending.cumsum(dim=1)
    reached = mass >= params.top_p.double()[:, None] * mass[:, -1:]
    top_p_cut = descending.gather(1, reached.int().argmax(dim=1, keepdim=True))
    cut = torch.where((params.top_p < 1)[:, None], torch.maximum(cut, top_p_cut), cut)

    min_p_cut = z.masked_fill(e < params.min_p.to(e.dtype)[:, None], torch.inf).amin(dim=1, keepdim=True)
    cut = torch.where((params.min_p > 0)[:, None], torch.maximum(cut, min_p_cut), cut)

    kept = torch.where(z >= cut, e, 0.0)
    return (kept / kept.double().sum(dim=1, keepdim=True)).to(logits.dtype)


def _greedy(logits: Tensor) -> Tensor:
    """A point mass on the largest logit, the lowest id on a tie."""
    best = (logits == logits.amax(dim=1, keepdim=True)).int().argmax(dim=1, keepdim=True)
    return torch.zeros_like(logits).scatter_(1, best, 1.0)


def _draw(weights: Tensor, u: Tensor) -> Tensor:
    """First id whose cumulative weight exceeds u * total: weights float64 [B, vocab_size], u float64 [B]."""
    cumulative = weights.cumsum(dim=1)
    first = torch.searchsorted(cumulative, u[:, None] * cumulative[:, -1:], right=True).squeeze(1)
    ids = torch.arange(weights.shape[1], device=weights.device)
    last_with_weight = torch.where(weights > 0, ids, 0).amax(dim=1)
    return torch.minimum(first, last_with_weight)


def _coins(keys: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """Uniforms of the broadcast (keys, positions), float64."""
    return torch.from_numpy(uniforms(keys.cpu().numpy(), positions.cpu().numpy(), purpose)).to(keys.device)


def _entries(probs: Tensor, ids: Tensor) -> Tensor:
    """probs[b, i, ids[b, i]] in float64: [B, K]."""
    return probs.gather(2, ids[:, :, None]).squeeze(2).double()


def _check_entries(op: str, problem: str, entries: Tensor, offered: Tensor) -> None:
    raise_at(op, problem, entries, offered & ~((entries >= 0) & entries.isfinite()))


def _check_probs(op: str, problem: str, probs: Tensor) -> None:
    raise_at(op, problem, probs, ~((probs >= 0) & probs.isfinite()))


def _check_mass(op: str, weights: Tensor) -> None:
    total = weights.sum(dim=1)
    raise_at(op, "probabilities must not all be 0", total, ~(total > 0))
