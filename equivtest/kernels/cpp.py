"""The C++ backend: custom ops on the CPU, parallel over rows, compiled on first use (see `extension`)."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import torch
from torch import Tensor

from equivtest.errors import InvalidKernelInput
from equivtest.kernels.checks import (
    check_paged_attention,
    check_sample,
    check_spec_accept,
    check_verify_probs,
)
from equivtest.kernels.contract import (
    AttentionPlan,
    Capabilities,
    RowParams,
    SpecAccept,
    SpecScratch,
    Streams,
)
from equivtest.kernels.extension import cache_dir, load_extension
from equivtest.kernels.unplanned import Unplanned
from equivtest.rng import Purpose

_FAULT = re.compile(r"row=(?P<row>\d+) value=(?P<value>\S+) problem=(?P<problem>[^\n]*)")
"""How kernels_ext/bindings.cpp words a row whose values it refuses."""


@functools.cache
def load() -> CppBackend:
    """The backend, its extension built if need be. Raises KernelUnavailable with the compiler's first error."""
    load_extension(cache_dir())
    for op in ("verify_probs", "spec_accept", "sample", "paged_attention"):
        torch.library.register_fake(f"equivtest::{op}", _writes_in_place)
    return CppBackend()


class CppBackend(Unplanned):
    """The contract on the CPU; see `equivtest.kernels.contract.KernelBackend`. Made by `load`."""

    name = "cpp"
    capabilities = Capabilities(
        min_p=True,
        per_request_seed=True,
        ragged_draft=True,
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
    )

    def verify_probs(self, logits: Tensor, params: RowParams, *, out: Tensor, out_rows: Tensor | None = None) -> Tensor:
        check_verify_probs(self, logits, params, out, out_rows)
        columns = (column.contiguous() for column in params)
        rows = None if out_rows is None else out_rows.contiguous()
        _call("verify_probs", torch.ops.equivtest.verify_probs, logits.contiguous(), *columns, rows, out)
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
        result = scratch.accepted(*draft_token_ids.shape)
        _call(
            "spec_accept",
            torch.ops.equivtest.spec_accept,
            draft_token_ids.contiguous(),
            num_draft.contiguous(),
            target_probs.contiguous(),
            None if draft_probs is None else draft_probs.contiguous(),
            streams.keys.contiguous(),
            streams.positions.contiguous(),
            *result[:3],
        )
        return result

    def sample(
        self, target_probs: Tensor, streams: Streams, *, out: Tensor, purpose: Purpose = Purpose.PLAIN
    ) -> Tensor:
        check_sample(self, target_probs, streams, out)
        keys, positions = (column.contiguous() for column in streams)
        _call("sample", torch.ops.equivtest.sample, target_probs.contiguous(), keys, positions, int(purpose), out)
        return out

    def paged_attention(self, query: Tensor, kv_pages: Tensor, plan: AttentionPlan) -> Tensor:
        batch, shape = plan
        check_paged_attention(self, query, kv_pages, batch, shape)
        if not kv_pages.is_contiguous():
            problem = "kv_pages must be contiguous: a copy of the cache at every call is never meant"
            raise InvalidKernelInput("paged_attention", problem, value=kv_pages.stride())
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        columns = (column.contiguous() for column in (batch.page_table, batch.kv_lens, batch.query_start))
        _call("paged_attention", torch.ops.equivtest.paged_attention, query.contiguous(), kv_pages, *columns, out)
        return out


def _call(op: str, kernel: Callable[..., None], *args: Tensor | int | None) -> None:
    """Run a kernel; a row it refuses becomes InvalidKernelInput."""
    try:
        kernel(*args)
    except ValueError as error:
        fault = _FAULT.search(str(error))
        if fault is None:
            raise
        raise InvalidKernelInput(op, fault["problem"], row=int(fault["row"]), value=float(fault["value"])) from None


def _writes_in_place(*args: Tensor | int | None) -> None:
    """The fake of every op: they return nothing and change only what their schema marks."""
