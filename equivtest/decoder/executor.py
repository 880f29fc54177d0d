"""Runs requests through the stages: admits, steps, retires."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from equivtest.decoder.drafters.base import Drafter
from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.decoder.model import Model
from equivtest.decoder.prefill import PromptPool, cache_for
from equivtest.decoder.request_table import RequestTable
from equivtest.decoder.rounds import DeviceRounds
from equivtest.decoder.routing import route, unsupported_feature
from equivtest.decoder.stages import Int64Array, Stages, StepInput
from equivtest.decoder.standard_stages import standard_stages
from equivtest.errors import InvalidSetting
from equivtest.kernels.contract import KernelBackend, RowParams, SpecScratch, Streams
from equivtest.kernels.registry import get_backend
from equivtest.records import Generation, Request

FaultWrap = Callable[[Stages], Stages]
"""Replaces stages by faulty ones."""


class Executor:
    """Generates for many requests at once with one ragged forward a step.

    A request's tokens depend on nothing but itself: in fp32 its batch-mates change its logits by rounding only.
    Not for use from two threads: one scratch and one KV cache serve every call.
    """

    def __init__(
        self,
        model: Model,
        backend: KernelBackend,
        drafter: Drafter | None,
        *,
        max_batch: int = 256,
        max_draft: int = 4,
        acceptance: str = "chain",
        plain_backend: KernelBackend | None = None,
        stages: Stages | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        """drafter: None makes every row plain. stages: default `standard_stages`, to which `acceptance` belongs.

        eos_token_ids: the model's end-of-text tokens, which stop the requests that do not ignore them.

        plain_backend: draws for requests that `backend` cannot represent; default the reference backend.
        """
        if max_batch < 1:
            raise InvalidSetting("max_batch", max_batch, "must be at least 1")
        vocab_size = model.config.vocab_size
        if not all(0 <= token_id < vocab_size for token_id in eos_token_ids):
            raise InvalidSetting("eos_token_ids", tuple(eos_token_ids), f"ids must be in 0..{vocab_size - 1}")
        self.eos_token_ids = tuple(eos_token_ids)
        capable = backend.capabilities.min_p and backend.capabilities.per_request_seed
        self.plain_backend = plain_backend or (backend if capable else get_backend("reference"))
        self.model, self.backend, self.drafter = model, backend, drafter
        self.max_batch = max_batch
        self.offer_at_most(max_draft)
        self.stages = stages or standard_stages(
            model, backend, drafter, acceptance=acceptance, plain_backend=self.plain_backend
        )
        self._own_stages = None if stages is not None else self.stages
        self._rounds = DeviceRounds.of(model, backend, drafter, acceptance)
        self._kv: PagedKVCache | None = None

    def offer_at_most(self, max_draft: int) -> None:
        """Change the most drafts a row is offered, from the next call on. Raises InvalidSetting."""
        if not 0 <= max_draft <= 127:
            raise InvalidSetting("max_draft", max_draft, "must be in 0..127")
        self.max_draft = max_draft
        self._scratch: SpecScratch | None = None

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        *,
        speculative: bool,
        fault: FaultWrap | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> list[Generation]:
        """One generation per request, in their order. `on_tokens` hears the number of tokens of every step.

        fault: wraps the stages of this call. Raises InvalidSetting for a malformed request, before any work.
        """
        vocab_size, device = self.model.config.vocab_size, self.model.device
        routes = [
            route(
                r.params,
                r.seed,
                self.backend.capabilities,
                speculative=speculative,
                backend=self.backend.name,
                plain_backend=self.plain_backend.name,
            )
            for r in requests
        ]
        table = RequestTable(requests, routes, vocab_size=vocab_size, device=device, eos_token_ids=self.eos_token_ids)
        longest = int((table.prompt_lengths + table.max_tokens).max(initial=0))
        if longest > self.model.config.max_position:
            limit = self.model.config.max_position
            raise InvalidSetting(
                "prompt and max_tokens", longest, f"must be at most {limit} tokens, the model's context"
            )
        stages = self.stages if fault is None else fault(self.stages)
        # With room for a follower also where none reads along, so that one cache serves both kinds of call.
        follower = None if self.drafter is None else self.drafter.follower
        kv = cache_for(self.model, table, max_batch=self.max_batch, reuse=self._kv, follower=follower)
        self._kv = None
        drafter = self.drafter if speculative else None
        if drafter is not None:
            drafter.start(table, max_batch=self.max_batch, max_draft=self.max_draft)
        try:
            self._run(table, kv, stages, drafter, on_tokens)
        finally:
            if drafter is not None:
                drafter.stop()
        self._kv = kv  # kept only when every sequence was returned to it
        return [table.generation(row) for row in range(len(table))]

    def _run(
        self,
        table: RequestTable,
        kv: PagedKVCache,
        stages: Stages,
        drafter: Drafter | None,
        on_tokens: Callable[[int], None] | None,
    ) -> None:
        told = on_tokens or (lambda num_tokens: None)
        scratch = self._scratch_for(table)
        max_draft = 0 if drafter is None else self.max_draft
        # Rows that the main backend cannot represent stand last, so that each backend gets one contiguous block.
        needs_plain_backend = np.array(
            [unsupported_feature(r.params, r.seed, self.backend.capabilities) is not None for r in table.requests], bool
        )
        follower = None if drafter is None else drafter.follower
        pool = PromptPool(self.model, kv, table, np.arange(len(table)), follower=follower)
        rows, sequences = np.empty(0, np.int64), np.empty(0, np.int64)
        on_device = _OnDevice.of(table, rows)
        rounds = self._rounds if stages is self._own_stages else None
        num_admitted = index = 0
        while num_admitted < len(table) or len(rows):
            num_new = min(self.max_batch - len(rows), len(table) - num_admitted)
            if num_new:
                new = np.arange(num_admitted, num_admitted + num_new)
                num_admitted += num_new
                rows, sequences = np.concatenate([rows, new]), np.concatenate([sequences, pool.admit(new)])
                order = np.argsort(needs_plain_backend[rows], kind="stable")
                rows, sequences = rows[order], sequences[order]
                if drafter is not None:
                    drafter.admit(new[table.speculative[new]])
            if not np.array_equal(on_device.rows, rows):
                on_device = _OnDevice.of(table, rows)
            if rounds is not None and rounds.can_run(
                table, rows, width=max_draft, need_plain=needs_plain_backend[rows]
            ):
                index = rounds.run(
                    table,
                    rows,
                    sequences,
                    kv,
                    scratch,
                    on_device.params,
                    on_device.keys,
                    width=max_draft,
                    index=index,
                    told=told,
                )
            else:
                # A round puts out at most num_draft + 1 tokens: this limit makes the last one fit exactly.
                limits = np.minimum(max_draft, table.remaining[rows] - 1) * table.speculative[rows]
                step = StepInput(
                    index=index,
                    table=table,
                    requests=rows,
                    num_main=int(len(rows) - needs_plain_backend[rows].sum()),
                    sequences=sequences,
                    lengths=table.lengths[rows],
                    limits=limits,
                    params=on_device.params,
                    streams=on_device.streams(table.generated[rows]),
                    kv=kv,
                    scratch=scratch,
                    follower=follower,
                )
                told(stages.run(step))
                index += 1
            finished = table.remaining[rows] <= 0
            if finished.any():
                kv.free(sequences[finished])
                if drafter is not None:
                    done = rows[finished]
                    drafter.release(done[table.speculative[done]])
                rows, sequences = rows[~finished], sequences[~finished]

    def _scratch_for(self, table: RequestTable) -> SpecScratch:
        """The scratch, allocated at the first call that needs its size and kept."""
        batch = min(self.max_batch, max(1, len(table)))
        if self._scratch is None or self._scratch.max_batch < batch:
            max_draft = 0 if self.drafter is None else self.max_draft
            scratch = SpecScratch(
                batch, max_draft, self.model.config.vocab_size, self.model.device, self.backend.capabilities.probs_dtype
            )
            # A law in every row from the start: the match rule draws from rows past num_draft too and ignores them.
            scratch.target_probs.zero_()[..., 0] = 1
            self._scratch = scratch
        return self._scratch


class _OnDevice(NamedTuple):
    """What the device holds of the running rows; made anew when they change."""

    rows: Int64Array
    params: RowParams
    keys: Tensor

    @classmethod
    def of(cls, table: RequestTable, rows: Int64Array) -> _OnDevice:
        index = torch.from_numpy(rows).to(table.stream_keys.device)
        return cls(rows, table.params.take(index), table.stream_keys.index_select(0, index))

    def streams(self, positions: Int64Array) -> Streams:
        return Streams(self.keys, torch.from_numpy(positions).to(self.keys.device, non_blocking=True))
