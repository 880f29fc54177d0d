"""A smaller model as the drafter, sampled from the request's own law."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.decoder.model import Model
from equivtest.decoder.prefill import PromptPool, cache_for
from equivtest.decoder.request_table import RequestTable
from equivtest.decoder.stages import Drafts, Int64Array, StepInput
from equivtest.errors import UnsupportedModel
from equivtest.kernels.contract import KernelBackend
from equivtest.rng import Purpose, uniforms


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What one `generate` call needs."""

    kv: PagedKVCache
    num_free: int
    """Free sequences of the cache before the call."""
    pool: PromptPool
    sequences: Int64Array
    """[num_requests], the draft model's sequence of each table row; -1 where it has none."""
    max_rows: int
    """Most draft laws of a step."""


class ModelDrafter:
    """Draws each draft from the small model's law under the request's parameters, and hands that law on as q.

    It has its own KV cache. After a round it cuts back to the committed tokens it has seen and feeds the others
    together with the next round's first token.
    """

    follower = None
    on_device = None

    def __init__(
        self, model: Model, backend: KernelBackend, *, target: Model, label: str = "", name: str = "model"
    ) -> None:
        """label: how the record of a run names the small model. Raises UnsupportedModel for another vocabulary."""
        if model.config.vocab_size != target.config.vocab_size:
            raise UnsupportedModel(
                label or "draft model",
                f"its vocabulary has {model.config.vocab_size} tokens, the target's {target.config.vocab_size}; "
                "a draft model must share the target's vocabulary",
            )
        self.model, self.backend, self.label, self.name = model, backend, label, name
        self._call: _Call | None = None
        self._kv: PagedKVCache | None = None
        self._probs: Tensor | None = None

    def describe(self) -> Mapping[str, object]:
        config = self.model.config
        return {"draft_model": self.label, "architecture": config.architecture, "num_layers": config.num_layers}

    def start(self, table: RequestTable, *, max_batch: int, max_draft: int) -> None:
        kv, self._kv = cache_for(self.model, table, max_batch=max_batch, reuse=self._kv), None
        self._call = _Call(
            kv=kv,
            num_free=kv.num_free_sequences,
            pool=PromptPool(self.model, kv, table, np.flatnonzero(table.speculative)),
            sequences=np.full(len(table), -1, np.int64),
            max_rows=min(max_batch, len(table)) * max_draft,
        )

    def admit(self, requests: Int64Array) -> None:
        call = self._running
        call.sequences[requests] = call.pool.admit(requests)

    def release(self, requests: Int64Array) -> None:
        call = self._running
        call.kv.free(call.sequences[requests])

    def stop(self) -> None:
        call, self._call = self._running, None
        if call.kv.num_free_sequences == call.num_free:
            self._kv = call.kv  # kept only when every sequence was returned to it

    def propose(self, step: StepInput) -> Drafts:
        width = int(step.limits.max(initial=0))
        token_ids = np.zeros((step.batch, width), np.int64)
        probs = self._probs_for(step, width)
        for slot in range(width):
            rows = np.flatnonzero(step.limits > slot)
            logits = self._catch_up(step, rows) if slot == 0 else self._feed(step, rows, token_ids[rows, slot - 1])
            on_device = torch.from_numpy(rows).to(self.model.device)
            self.backend.verify_probs(
                logits,
                step.params.take(on_device),
                out=probs.view(-1, probs.shape[-1]),
                out_rows=on_device * width + slot,
            )
            keys, positions = (
                step.streams.keys[on_device].cpu().numpy(),
                step.streams.positions[on_device].cpu().numpy(),
            )
            coins = uniforms(keys, positions + slot, Purpose.DRAFT)
            token_ids[rows, slot] = draw(probs[on_device, slot], coins)
        return Drafts(token_ids, step.limits.astype(np.int32), probs)

    @property
    def _running(self) -> _Call:
        if self._call is None:
            message = "start() comes before every other call of a drafter"
            raise RuntimeError(message)
        return self._call

    def _catch_up(self, step: StepInput, rows: Int64Array) -> Tensor:
        """Feed the committed tokens the small model has not seen; logits of each row's last one."""
        call = self._running
        sequences, lengths = call.sequences[step.requests[rows]], step.lengths[rows]
        # Everything the cache holds below the last committed token was either committed when it was fed or is a draft
        # that has been accepted since; the last committed token itself has never been fed.
        seen = np.minimum(call.kv.lengths(sequences), lengths - 1)
        call.kv.truncate(sequences, seen)
        batch = call.kv.extend(sequences, lengths - seen)
        columns = np.arange(step.table.token_ids.shape[1])
        unseen = (columns >= seen[:, None]) & (columns < lengths[:, None])
        token_ids = step.table.token_ids[step.requests[rows]][unseen]
        last = batch.query_start[1:].astype(np.int64) - 1
        return self.model.step_logits(torch.from_numpy(token_ids), batch, call.kv, only=last)

    def _feed(self, step: StepInput, rows: Int64Array, token_ids: Int64Array) -> Tensor:
        call = self._running
        batch = call.kv.extend(call.sequences[step.requests[rows]], np.ones(len(rows), np.int64))
        return self.model.step_logits(torch.from_numpy(token_ids), batch, call.kv)

    def _probs_for(self, step: StepInput, width: int) -> Tensor:
        """A contiguous view [B, width, vocab_size] of a buffer that is allocated once and grows when it must."""
        num_rows, vocab_size = self._running.max_rows, self.model.config.vocab_size
        if self._probs is None or self._probs.shape[0] < num_rows:
            like = step.scratch.target_probs
            self._probs = torch.zeros(num_rows, vocab_size, dtype=like.dtype, device=like.device)
        return self._probs[: step.batch * width].view(step.batch, width, vocab_size)


def draw(probs: Tensor, coins: npt.NDArray[np.float64]) -> Int64Array:
    """One token per row by inverse distribution function in vocabulary order, sums in float64.

    probs: [n, vocab_size], any float dtype. coins: float64 [n] in [0, 1). Returns int64 [n] on the host.
    """
    cumulative = probs.to(torch.float64).cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    thresholds = torch.from_numpy(coins).to(probs.device)[:, None] * total
    token_ids = torch.searchsorted(cumulative, thresholds, right=True)
    # u * total may round up to total itself: then the last token with any mass is meant.
    last = torch.searchsorted(cumulative, total)
    result: Int64Array = torch.minimum(token_ids, last)[:, 0].cpu().numpy()
    return result
