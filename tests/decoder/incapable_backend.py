"""A kernel backend without min_p and without per-request seeds: it refuses both, as a vendor's kernels do."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from equivtest.errors import UnsupportedSampling
from equivtest.kernels.checks import check_verify_probs
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


class IncapableBackend:
    """Wraps a backend. `seeded_keys`: stream keys of seeded requests, which it must never be asked to draw for."""

    name = "incapable"

    def __init__(self, inner: KernelBackend, *, seeded_keys: frozenset[int] = frozenset()) -> None:
        self.inner, self.seeded_keys = inner, seeded_keys

    @property
    def capabilities(self) -> Capabilities:
        narrow = frozenset({torch.bfloat16})
        return dataclasses.replace(
            self.inner.capabilities, min_p=False, per_request_seed=False, attention_dtypes=narrow
        )

    def verify_probs(self, logits: Tensor, params: RowParams, *, out: Tensor, out_rows: Tensor | None = None) -> Tensor:
        check_verify_probs(self, logits, params, out, out_rows)
        return self.inner.verify_probs(logits, params, out=out, out_rows=out_rows)

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
        self._refuse_seeded(streams)
        return self.inner.spec_accept(draft_token_ids, num_draft, target_probs, draft_probs, streams, scratch=scratch)

    def sample(
        self, target_probs: Tensor, streams: Streams, *, out: Tensor, purpose: Purpose = Purpose.PLAIN
    ) -> Tensor:
        self._refuse_seeded(streams)
        return self.inner.sample(target_probs, streams, out=out, purpose=purpose)

    def plan_attention(
        self,
        batch: AttentionBatch,
        shape: AttentionShape,
        *,
        for_graph: bool = False,
        reuse: AttentionPlan | None = None,
    ) -> AttentionPlan:
        return self.inner.plan_attention(batch, shape, for_graph=for_graph, reuse=reuse)

    def paged_attention(self, query: Tensor, kv_pages: Tensor, plan: AttentionPlan) -> Tensor:
        return self.inner.paged_attention(query, kv_pages, plan)

    @property
    def layers(self) -> LayerOps:
        return self.inner.layers

    def _refuse_seeded(self, streams: Streams) -> None:
        if bool(torch.isin(streams.keys, torch.tensor(sorted(self.seeded_keys), dtype=torch.int64)).any()):
            raise UnsupportedSampling(self.name, "a per-request seed")
