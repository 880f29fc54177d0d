"""The vendor path under test: FlashInfer's renorm, sampling and paged attention kernels behind the contract.

One pipeline, softmax then top-k then top-p renormalisation, serves plain sampling and verification alike. Acceptance is
`chain_speculative_sampling`, which wants a dense law for every draft: a sure draft's point mass is built here and
nowhere else, in a buffer from which only what was written is cleared again.

FlashInfer's kernels draw from a Philox stream named by (seed, row of the batch, offset). They are always handed seed
and offset tensors, and the offset moves on by more than a call can draw, for a generator that is left to advance by
itself hands out coins twice in versions before 0.7.4 (tests/gpu/test_generator_offset.py). The seeds are the requests'
stream keys; versions before 0.7.2.post1 read the first row's for the whole batch, and rows then differ by their place.
So what a request draws depends on its batch-mates, and a request with a seed of its own is refused.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from equivtest.errors import InvalidKernelInput, KernelUnavailable
from equivtest.kernels.checks import (
    check_attention_batch,
    check_logits,
    check_paged_attention,
    check_sample,
    check_spec_accept,
    check_verify_probs,
)
from equivtest.kernels.contract import (
    PADDING,
    AttentionBatch,
    AttentionPlan,
    AttentionShape,
    Capabilities,
    LayerOps,
    RowParams,
    SpecAccept,
    SpecScratch,
    Streams,
)
from equivtest.kernels.cuda_layers import CudaLayers
from equivtest.kernels.flashinfer_attention import FlashInferAttention
from equivtest.rng import Purpose

_MAX_INDEX = 2**32
"""FlashInfer indexes probabilities with 32 bits."""
_JUST_BELOW_ONE = 1 - 2.0**-22
"""Times a draft's probability. FlashInfer keeps a draft where u q < p, with u up to 1, so it can reject one of which
max(p - q, 0) leaves nothing anywhere: a sure token by the coin 1, or where p and q are both 1 in float32 for another
token. Then 0.7.4 puts out no token. With this q something is left; the law moves by 2.4e-7 of itself at the most."""

_log = logging.getLogger("equivtest")


def load() -> FlashInferBackend:
    """The backend on the current CUDA device.

    Raises KernelUnavailable where there is no CUDA device or FlashInfer cannot be imported. FlashInfer compiles its
    kernels at the first call of each, which takes minutes; it keeps them in its own cache.
    """
    if not torch.cuda.is_available():
        raise KernelUnavailable("flashinfer", f"torch {torch.__version__} finds no usable CUDA device")
    try:
        import flashinfer
        import flashinfer.sampling
    except Exception as error:  # it imports compilers and drivers, which fail in their own ways
        remedy = "pip install 'equivtest[cuda]'"
        raise KernelUnavailable(
            "flashinfer", f"FlashInfer cannot be imported: {type(error).__name__}: {error}; {remedy}"
        ) from error
    _log.info("flashinfer %s compiles each of its kernels at first use, some minutes in all", flashinfer.__version__)
    return FlashInferBackend(flashinfer)


class FlashInferBackend:
    """See `equivtest.kernels.contract.KernelBackend`. Two objects with the same calls draw the same tokens."""

    name = "flashinfer"
    capabilities = Capabilities(
        min_p=False,
        per_request_seed=False,
        ragged_draft=True,
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        attention_dtypes=frozenset({torch.bfloat16}),
        graphs=True,
    )

    def __init__(self, flashinfer: Any) -> None:
        """flashinfer: the imported package."""
        self.version: str = flashinfer.__version__
        self._sampling = flashinfer.sampling
        self._top_k_renorm = _deterministic(self._sampling.top_k_renorm_probs)
        self._top_p_renorm = _deterministic(self._sampling.top_p_renorm_probs)
        self._attention = FlashInferAttention(flashinfer)
        self._offset: Tensor | None = None
        self._point_masses = _PointMasses()

    def verify_probs(self, logits: Tensor, params: RowParams, *, out: Tensor, out_rows: Tensor | None = None) -> Tensor:
        check_verify_probs(self, logits, params, out, out_rows)
        _check_size(*logits.shape)
        if logits.shape[0] == 0:
            return out
        check_logits("verify_probs", logits, params.temperature)
        probs = self._law(logits, params)
        return out.copy_(probs) if out_rows is None else out.index_copy_(0, out_rows, probs)

    def _law(self, logits: Tensor, params: RowParams) -> Tensor:
        """The one pipeline: every law of this backend, for plain sampling and for verification, is made here."""
        greedy = params.temperature == 0
        temperature = torch.where(greedy, 1.0, params.temperature)
        # Launched early, softmax of 0.6.13 reads the temperatures before the kernel that writes them is waited for.
        probs: Tensor = self._sampling.softmax(logits.float(), temperature, enable_pdl=False)
        vocab_size = logits.shape[1]
        counts = torch.where(params.top_k == 0, vocab_size, params.top_k.clamp(max=vocab_size))
        if bool((counts < vocab_size).any()):
            filtered = self._top_k_renorm(probs, counts.int())
            probs = torch.where((counts < vocab_size)[:, None], filtered, probs)
        if bool((params.top_p < 1).any()):
            filtered = self._top_p_renorm(probs, params.top_p)
            probs = torch.where((params.top_p < 1)[:, None], filtered, probs)
        if bool(greedy.any()):
            best = (logits == logits.amax(dim=1, keepdim=True)).int().argmax(dim=1, keepdim=True)
            probs = torch.where(greedy[:, None], torch.zeros_like(probs).scatter_(1, best, 1.0), probs)
        return probs

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
        batch, num_rows, vocab_size = target_probs.shape
        _check_size(batch * num_rows, vocab_size)
        result = scratch.accepted(batch, num_rows - 1)
        # The kernel wants as many drafts in every row: rows with equally many go together.
        for count in torch.unique(num_draft).tolist():
            rows = (num_draft == count).nonzero()[:, 0]
            part = slice(None) if len(rows) == batch and count == num_rows - 1 else rows
            laws = target_probs[part, : count + 1].contiguous()
            keys = streams.keys[part]
            if count == 0:
                tokens, counters = self._draw(laws[:, 0].contiguous(), keys)[:, None], torch.zeros_like(rows).int()
                emitted = telemetry = counters
            else:
                ids = draft_token_ids[part, :count].contiguous()
                q = None if draft_probs is None else draft_probs[part, :count] * _JUST_BELOW_ONE
                tokens, telemetry, emitted = self._chain(ids, q, laws, keys, scratch)
            padded = torch.full((len(rows), num_rows), PADDING, dtype=torch.int64, device=tokens.device)
            padded[:, : count + 1] = tokens
            result.output_token_ids[part] = padded
            result.emitted[part] = emitted
            result.acceptance_telemetry[part] = telemetry
        return result

    def _chain(
        self,
        draft_token_ids: Tensor,
        draft_probs: Tensor | None,
        target_probs: Tensor,
        keys: Tensor,
        scratch: SpecScratch,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, K+1], telemetry and emitted [B] of rows that all have K drafts.

        draft_probs: times _JUST_BELOW_ONE.
        """
        batch, max_draft = draft_token_ids.shape
        sure = draft_probs is None
        if draft_probs is None:
            draft_probs = self._point_masses.put(draft_token_ids, scratch)
        # The kernel adds to its counters: they start at 0 in every call.
        telemetry, emitted = torch.zeros(2, batch, dtype=torch.int32, device=keys.device)
        seed, offset = self._coins(keys, max_draft + 2)
        try:
            tokens, *_ = self._sampling.chain_speculative_sampling(
                draft_probs, draft_token_ids.int(), target_probs, telemetry, emitted, seed=seed, offset=offset
            )
        finally:
            if sure:
                self._point_masses.clear(draft_token_ids)
        return tokens.long(), telemetry, emitted

    def sample(
        self, target_probs: Tensor, streams: Streams, *, out: Tensor, purpose: Purpose = Purpose.PLAIN
    ) -> Tensor:
        """`purpose` makes no difference: FlashInfer has one stream, and no coin of it is drawn twice."""
        check_sample(self, target_probs, streams, out)
        _check_size(*target_probs.shape)
        return out if target_probs.shape[0] == 0 else out.copy_(self._draw(target_probs.contiguous(), streams.keys))

    def _draw(self, probs: Tensor, keys: Tensor) -> Tensor:
        seed, offset = self._coins(keys, 2)
        tokens: Tensor = self._sampling.sampling_from_probs(probs, seed=seed, offset=offset)
        return tokens.long()

    def _coins(self, keys: Tensor, num_draws: int) -> tuple[Tensor, Tensor]:
        """Seed and offset of each row for a call that draws at most `num_draws` times, int64 [B]; both move on."""
        if self._offset is None:
            self._offset = torch.zeros(1, dtype=torch.int64, device=keys.device)
        offset = self._offset.expand(len(keys)).contiguous()
        self._offset += num_draws
        return keys.contiguous(), offset

    def plan_attention(
        self,
        batch: AttentionBatch,
        shape: AttentionShape,
        *,
        for_graph: bool = False,
        reuse: AttentionPlan | None = None,
    ) -> AttentionPlan:
        check_attention_batch(self, batch, shape)
        return self._attention.plan(batch, shape, for_graph=for_graph, reuse=reuse)

    def paged_attention(self, query: Tensor, kv_pages: Tensor, plan: AttentionPlan) -> Tensor:
        if not plan.in_graph:
            check_paged_attention(self, query, kv_pages, plan.batch, plan.shape)
        return self._attention.run(query, kv_pages, plan)

    @functools.cached_property
    def layers(self) -> LayerOps:
        """Our own: FlashInfer's part is attention and sampling."""
        return CudaLayers()


class _PointMasses:
    """Dense point masses at drafts, of _JUST_BELOW_ONE, in memory that is all zeros between calls."""

    def __init__(self) -> None:
        self._flat: Tensor | None = None

    def put(self, draft_token_ids: Tensor, scratch: SpecScratch) -> Tensor:
        """float32 [B, K, vocab_size] for draft_token_ids [B, K]. `clear` must follow."""
        size = scratch.max_batch * scratch.max_draft * scratch.vocab_size
        if self._flat is None or len(self._flat) < size:
            self._flat = torch.zeros(size, device=draft_token_ids.device)
        shape = (*draft_token_ids.shape, scratch.vocab_size)
        self._view = self._flat[: draft_token_ids.numel() * scratch.vocab_size].view(shape)
        return self._view.scatter_(2, draft_token_ids[:, :, None], _JUST_BELOW_ONE)

    def clear(self, draft_token_ids: Tensor) -> None:
        """Take back what `put` wrote, and nothing else."""
        self._view.scatter_(2, draft_token_ids[:, :, None], 0.0)


def _deterministic(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, told to sum in a fixed order where it can be told."""
    if "is_deterministic" not in inspect.signature(function).parameters:
        return function
    return lambda probs, limit: function(probs, limit, is_deterministic=True)


def _check_size(num_rows: int, vocab_size: int) -> None:
    if num_rows * vocab_size >= _MAX_INDEX:
        problem = "rows times vocab_size must be below 2**32, FlashInfer's index"
        raise InvalidKernelInput("flashinfer", problem, value=(num_rows, vocab_size))
