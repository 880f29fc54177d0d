"""Speculative rounds that the device lays out for itself: draft, verify, accept and commit without the host.

A step that the host lays out waits for the tokens of the step before. Here lengths, positions and the newest tokens
live on the device, every round has one shape, and the host reads what was committed a few rounds late. On a GPU a round
is one CUDA graph.

Rows are a grid: every request has `width + 1` rows whatever it may be offered, and as many block rows as the drafter's
block. Rows past a request's last draft are written behind its text, where the next round overwrites them. A request
that is finished stands still until the host has seen it; what only fills up the batch stands still on the cache's spare
page from the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equivtest.decoder.drafters.base import BlockDrafter, Drafter
from equivtest.decoder.graphs import MAX_GRAPH_ROWS, rounded_up
from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.decoder.model import Model
from equivtest.decoder.request_table import RequestTable
from equivtest.decoder.stages import Int64Array
from equivtest.kernels.checks import raise_refusal
from equivtest.kernels.contract import (
    AcceptanceRule,
    AttentionBatch,
    AttentionPlan,
    FusedBackend,
    HostBatch,
    RowParams,
    SpecScratch,
    Streams,
)

BoolArray = npt.NDArray[np.bool_]

ROUNDS_AHEAD = 2
"""Rounds that the device is given before the host reads the first of them."""
_MAX_SHAPES = 16
_REFUSAL = 3
"""Numbers in `SpecAccept.refusal`."""


class DeviceRounds:
    """Runs rounds of one model, backend and block drafter."""

    def __init__(self, model: Model, backend: FusedBackend, drafter: BlockDrafter, rule: AcceptanceRule) -> None:
        self.model, self.backend, self.drafter, self.rule = model, backend, drafter, rule
        self._rounds: dict[tuple[int, int, int], _Round] = {}
        self._memory: tuple[PagedKVCache, SpecScratch] | None = None
        self._pool: Any = None

    @classmethod
    def of(cls, model: Model, backend: Any, drafter: Drafter | None, rule: str) -> DeviceRounds | None:
        """None where the backend or the drafter needs the host."""
        network = None if drafter is None else drafter.on_device
        capabilities = backend.capabilities
        if network is None or not (capabilities.fused and capabilities.late_lengths):
            return None
        return cls(model, backend, network, cast("AcceptanceRule", rule))

    def can_run(self, table: RequestTable, rows: Int64Array, *, width: int, need_plain: BoolArray) -> bool:
        """Whether rounds of these table rows need nothing of the host and fit a graph. need_plain: [B], rows that the
        backend cannot represent."""
        needs_host = table.rules.reads_tokens or table.reports_logprobs or need_plain.any()
        grid = rounded_up(len(rows)) * max(self.drafter.block_size, width + 1)
        return width > 0 and not needs_host and bool(table.speculative[rows].all()) and grid <= MAX_GRAPH_ROWS

    def run(
        self,
        table: RequestTable,
        rows: Int64Array,  # [B], table rows, none of them finished
        sequences: Int64Array,  # [B], each holds every committed token but the last
        kv: PagedKVCache,
        scratch: SpecScratch,
        params: RowParams,  # [B], on the device
        keys: Tensor,  # int64 [B], of their streams, on the device
        *,
        width: int,  # most drafts a round
        index: int,  # of the first round's step
        told: Callable[[int], None],
    ) -> int:
        """Rounds until a request is finished, committed to the table; the number of the step after the last.

        told: hears the tokens of every round. Raises InvalidKernelInput where a kernel refuses a row.
        """
        width = min(width, self.drafter.num_drafts)
        lengths, remaining = table.lengths[rows], table.remaining[rows]
        past_the_end = max(self.drafter.block_size, width + 1)
        batch = kv.extend(sequences, remaining + past_the_end)
        made = self._round_for(len(rows), batch.page_table.shape[1], width, kv, scratch)
        newest = table.token_ids[rows, lengths - 1]
        made.load(batch.page_table, lengths, table.generated[rows], remaining, newest, params, keys)
        read: deque[_Record] = deque()
        goes_on = True
        while goes_on or read:
            goes_on = bool((table.remaining[rows] > len(read)).all())  # a round puts out a token a row at the least
            if goes_on:
                read.append(made.launch())
            if read and (not goes_on or len(read) > ROUNDS_AHEAD):
                told(read.popleft().commit(table, rows, index))
                index += 1
        kv.truncate(sequences, table.lengths[rows] - 1)
        return index

    def _round_for(self, batch: int, columns: int, width: int, kv: PagedKVCache, scratch: SpecScratch) -> _Round:
        """Rounds hold the memory of a cache and a scratch: with others they are made anew."""
        if self._memory is None or self._memory[0] is not kv or self._memory[1] is not scratch:
            self._rounds.clear()
            self._memory = kv, scratch
            self._pool = torch.cuda.graph_pool_handle() if self.model.device.type == "cuda" else None
        shape = min(rounded_up(batch), scratch.max_batch), 1 << (columns - 1).bit_length(), width
        made = self._rounds.pop(shape, None)
        if made is None:
            if len(self._rounds) == _MAX_SHAPES:
                del self._rounds[next(iter(self._rounds))]  # nothing of it is running: every run reads all it launched
            made = _Round(self, *shape, kv, scratch, self._pool)
        self._rounds[shape] = made  # the last used comes last
        return made


class _Record(NamedTuple):
    """A round on its way to the host."""

    held: Tensor  # int64, see `_Round._step`
    width: int
    arrived: Any

    def commit(self, table: RequestTable, rows: Int64Array, step: int) -> int:
        """Wait for the round and commit it. Returns the number of its tokens."""
        if self.arrived is not None:
            self.arrived.synchronize()
        flat, drafts_from = self.held.numpy(), self.width + 1
        raise_refusal("accept_logits", flat[-_REFUSAL:].view(np.float64))
        held = flat[:-_REFUSAL].reshape(-1, 2 * self.width + 4)[: len(rows)]
        counts_from = drafts_from + self.width
        output_token_ids, draft_token_ids = held[:, :drafts_from], held[:, drafts_from:counts_from]
        emitted, num_draft, counts = held[:, counts_from:].T
        return table.append(
            rows, step, output_token_ids, emitted, draft_token_ids, num_draft.astype(np.int32), counts=counts
        )


class _Round:
    """The memory of rounds of one shape: N requests, `columns` pages each, `width` drafts."""

    def __init__(
        self, of: DeviceRounds, batch: int, columns: int, width: int, kv: PagedKVCache, scratch: SpecScratch, pool: Any
    ) -> None:
        self._of, self._kv, self._scratch, self._width = of, kv, scratch, width
        device, block = of.model.device, of.drafter.block_size

        def int64(value: int) -> Tensor:
            return torch.full((batch,), value, dtype=torch.int64, device=device)

        # Nobody's rows: one token on the spare page, nothing to generate.
        self._lengths, self._generated, self._remaining, self._newest = int64(1), int64(0), int64(0), int64(0)
        self._keys = int64(0)
        self._params = RowParams(*(torch.full((batch,), value, dtype=dtype, device=device) for value, dtype in _GREEDY))
        self._table = torch.full((batch, columns), kv.spare_page, dtype=torch.int32, device=device)
        self._row_start = torch.arange(batch, dtype=torch.int32, device=device) * (width + 1)
        self._offsets = torch.arange(max(block, width + 1), device=device)
        self._text = self._attention(self._table, width + 1, 1)
        self._blocks = self._attention(self._table.repeat_interleave(block, dim=0), 1, block)
        self._idle = tuple(tensor.clone() for tensor in self._state())
        self._graph: Any = None
        if device.type == "cuda":
            self._capture(pool)

    def _state(self) -> tuple[Tensor, ...]:
        return (self._table, self._lengths, self._generated, self._remaining, self._newest, *self._params, self._keys)

    def _attention(self, page_table: Tensor, rows_each: int, group: int) -> AttentionBatch:
        """A batch whose lengths `_step` writes. Each sequence has `rows_each` rows; `group` in turn have one length."""
        num_sequences, device = len(page_table), page_table.device
        kv_lens = torch.full((num_sequences,), max(rows_each, group), dtype=torch.int32, device=device)
        query_start = torch.arange(num_sequences + 1, dtype=torch.int32, device=device) * rows_each
        columns = page_table, kv_lens, query_start
        # On a CPU the host's copies are the same memory; a graph is planned once, for nobody's rows.
        return AttentionBatch(*columns, HostBatch(*(column.cpu().numpy() for column in columns)))

    def load(
        self,
        page_table: np.ndarray[Any, Any],  # int32 [B, at most columns]
        lengths: Int64Array,  # [B], committed tokens
        generated: Int64Array,  # [B]
        remaining: Int64Array,  # [B]
        newest: Int64Array,  # [B], token ids
        params: RowParams,  # [B], on the device
        keys: Tensor,  # [B], on the device
    ) -> None:
        """Take the requests that stand in the first rows; the others are nobody's."""
        batch, columns = page_table.shape
        counts = torch.from_numpy(np.stack([lengths, generated, remaining, newest])).to(self._keys.device)
        for own, idle, value in zip(
            self._state(), self._idle, (torch.from_numpy(page_table), *counts, *params, keys), strict=True
        ):
            own.copy_(idle)
            (own[:batch, :columns] if own is self._table else own[:batch]).copy_(value)
        block = self._of.drafter.block_size
        self._blocks.page_table.view(len(self._table), block, -1).copy_(self._table[:, None])

    def launch(self) -> _Record:
        """One round; the record of it arrives on the host later."""
        if self._graph is None:
            return _Record(self._step(*self._plans(for_graph=False)), self._width, None)
        self._graph.replay()
        held = self._output.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return _Record(held, self._width, arrived)

    def _capture(self, pool: Any) -> None:
        """On nobody's rows, which stand still. Once without a graph: libraries allocate at their first call."""
        plans = self._plans(for_graph=True)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(*plans)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._output = self._step(*plans)

    def _plans(self, *, for_graph: bool) -> tuple[AttentionPlan, AttentionPlan]:
        backend, kv = self._of.backend, self._kv
        self._set_lengths()
        return (
            backend.plan_attention(self._blocks, self._of.drafter.attention_shape(kv), for_graph=for_graph),
            backend.plan_attention(self._text, self._of.model.attention_shape(kv), for_graph=for_graph),
        )

    def _set_lengths(self) -> None:
        """What this round's rows see: the text, and the rows themselves."""
        block, before = self._of.drafter.block_size, self._lengths - 1
        self._text.kv_lens.copy_(before + (self._width + 1))
        self._blocks.kv_lens.view(-1, block).copy_((before + block)[:, None])

    def _step(self, block_plan: AttentionPlan, text_plan: AttentionPlan) -> Tensor:
        """Device work alone. Returns int64: [N, 2 * width + 4] (outputs, drafts, emitted, num_draft, tokens put out)
        and the refusal's bits."""
        of, kv, width = self._of, self._kv, self._width
        model, drafter, block = of.model, of.drafter, of.drafter.block_size
        self._set_lengths()
        positions = (self._lengths - 1)[:, None] + self._offsets
        pages = self._table.gather(1, positions // kv.page_size)
        slots = pages * kv.page_size + positions % kv.page_size
        fed = drafter.block_token_ids(self._newest).view(-1)
        drafts = drafter.draft_rows(
            fed, slots[:, :block].reshape(-1), positions[:, :block].reshape(-1), block_plan, kv, width
        )
        num_draft = (self._remaining - 1).clamp(0, width).int()
        # Rows past a request's last draft may stand past the model's longest text.
        text_positions = positions[:, : width + 1].clamp(max=model.config.max_position - 1).reshape(-1)
        token_ids = torch.cat([self._newest[:, None], drafts], dim=1).view(-1)
        text_slots = slots[:, : width + 1].reshape(-1)
        hidden = model.layers_forward(token_ids, text_slots, text_positions, text_plan, kv, follower=drafter)
        accepted = of.backend.accept_logits(
            model.head(hidden),
            self._row_start,
            self._params,
            drafts,
            num_draft,
            None,
            Streams(self._keys, self._generated),
            rule=of.rule,
            scratch=self._scratch,
        )
        emitted = accepted.emitted.long()
        counts = (emitted + 1) * (self._remaining > 0)
        last = accepted.output_token_ids.gather(1, emitted[:, None])[:, 0]
        self._newest.copy_(torch.where(counts > 0, last, self._newest))
        self._lengths.add_(counts)
        self._generated.add_(counts)
        self._remaining.sub_(counts)
        told = torch.stack([emitted, num_draft.long(), counts], dim=1)
        assert accepted.refusal is not None  # of a fused backend
        rows = torch.cat([accepted.output_token_ids, drafts, told], dim=1)
        return torch.cat([rows.view(-1), accepted.refusal.view(torch.int64)])


_GREEDY = ((0.0, torch.float32), (0, torch.int32), (1.0, torch.float32), (0.0, torch.float32))
"""Parameters of nobody's rows, in the order of RowParams."""
