"""Rounds that the device lays out for itself: draft, verify, accept and commit without the host.

A plain step is a round of no drafts.

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
from equivtest.decoder.graphs import MAX_GRAPH_ROWS, captured_into, rounded_up
from equivtest.decoder.kv_cache import PagedKVCache
from equivtest.decoder.model import Model
from equivtest.decoder.request_table import RequestTable
from equivtest.decoder.stages import Int64Array
from equivtest.errors import InvalidSetting
from equivtest.kernels.checks import raise_refusal
from equivtest.kernels.contract import (
    AcceptanceRule,
    AttentionBatch,
    AttentionPlan,
    BlockDrafts,
    FusedBackend,
    HostBatch,
    KernelBackend,
    RowParams,
    SpecAccept,
    SpecScratch,
    Streams,
)

BoolArray = npt.NDArray[np.bool_]

ROUNDS_AHEAD = 2
"""Rounds that the device is given before the host reads the first of them."""
_MAX_SHAPES = 64
_REFUSAL = 3
"""Numbers in `SpecAccept.refusal`."""


class DeviceRounds:
    """Runs rounds of one model and backend, with a block drafter or plain."""

    def __init__(self, model: Model, backend: FusedBackend, drafter: BlockDrafter | None, rule: AcceptanceRule) -> None:
        self.model, self.backend, self.drafter, self.rule = model, backend, drafter, rule
        self._rounds: dict[tuple[int, int, int], Round] = {}
        self._memory: tuple[PagedKVCache, SpecScratch] | None = None
        self._pool: Any = None
        self._draft_probs: Tensor | None = None

    @classmethod
    def of(cls, model: Model, backend: Any, drafter: Drafter | None, rule: str) -> DeviceRounds | None:
        """None where the backend needs the host; where only the drafter does, rounds are plain."""
        if not cls.served_by(backend):
            return None
        return cls(model, backend, None if drafter is None else drafter.on_device, cast("AcceptanceRule", rule))

    def drafter_of(self, width: int) -> BlockDrafter | None:
        """What drafts in rounds of `width` drafts. Raises InvalidSetting where there is none that could."""
        if not width:
            return None
        if self.drafter is None:
            raise InvalidSetting("width", width, "must be 0: nothing drafts without the host")
        return self.drafter

    def draft_probs(self, batch: int, width: int, scratch: SpecScratch) -> Tensor | None:
        """[batch, width, vocab_size] of zeros, which all rounds share and leave as they found it. None: drafts are
        sure."""
        drafter = self.drafter_of(width)
        if drafter is None or not drafter.draws:
            return None
        if self._draft_probs is None:
            size = scratch.max_batch * scratch.max_draft * scratch.vocab_size
            self._draft_probs = torch.zeros(size, dtype=scratch.target_probs.dtype, device=self.model.device)
        return self._draft_probs[: batch * width * scratch.vocab_size].view(batch, width, -1)

    @staticmethod
    def served_by(backend: KernelBackend) -> bool:
        """Whether the backend can do without the host."""
        return backend.capabilities.fused and backend.capabilities.late_lengths

    def can_run(self, table: RequestTable, rows: Int64Array, *, width: int, need_plain: BoolArray) -> bool:
        """Whether rounds of these table rows need nothing of the host and fit a graph. need_plain: [B], rows that the
        backend cannot represent."""
        if width and (self.drafter is None or not table.speculative[rows].all()):
            return False
        needs_host = table.rules.reads_tokens or table.reports_logprobs or need_plain.any()
        return not needs_host and rounded_up(len(rows)) * self.rows_each(width) <= MAX_GRAPH_ROWS

    def rows_each(self, width: int) -> int:
        """Rows of a request in a round, of its text or its block."""
        drafter = self.drafter_of(width)
        return width + 1 if drafter is None else max(drafter.block_size, width + 1)

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
        made = self.loaded(table, rows, sequences, kv, scratch, params, keys, width=width)
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

    def loaded(
        self,
        table: RequestTable,
        rows: Int64Array,
        sequences: Int64Array,
        kv: PagedKVCache,
        scratch: SpecScratch,
        params: RowParams,
        keys: Tensor,
        *,
        width: int,
    ) -> Round:
        """The round that holds these requests (see `run`), to be launched again and again.

        Their sequences have room for all that they may still be written: whoever is done cuts them back.
        """
        drafter = self.drafter_of(width)
        width = width if drafter is None else min(width, drafter.num_drafts)
        lengths, remaining = table.lengths[rows], table.remaining[rows]
        # With drafts, a request may be done while rounds of it are still launched, and stands at its last token then.
        # It takes as many plain rounds as tokens, and no more of them are launched.
        past_the_end = self.rows_each(width) if width else 0
        batch = kv.extend(sequences, remaining + past_the_end)
        made = self._round_for(len(rows), batch.page_table.shape[1], width, kv, scratch)
        newest = table.token_ids[rows, lengths - 1]
        made.load(batch.page_table, lengths, table.generated[rows], remaining, newest, params, keys)
        return made

    def _round_for(self, batch: int, columns: int, width: int, kv: PagedKVCache, scratch: SpecScratch) -> Round:
        """Rounds hold the memory of a cache and a scratch: with others they are made anew."""
        if self._memory is None or self._memory[0] is not kv or self._memory[1] is not scratch:
            self._rounds.clear()
            self._memory, self._draft_probs = (kv, scratch), None
            self._pool = torch.cuda.graph_pool_handle() if self.model.device.type == "cuda" else None
        shape = min(rounded_up(batch), scratch.max_batch), 1 << (columns - 1).bit_length(), width
        made = self._rounds.pop(shape, None)
        if made is None:
            if len(self._rounds) == _MAX_SHAPES:
                del self._rounds[next(iter(self._rounds))]  # nothing of it is running: every run reads all it launched
            made = Round(self, *shape, kv, scratch, self._pool)
        self._rounds[shape] = made  # the last used comes last
        return made


class _Record(NamedTuple):
    """A round on its way to the host."""

    held: Tensor  # int64, see `Round._step`
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


class Places(NamedTuple):
    """Where the rows of a round stand. Each is [N, the most rows that a request has], int64."""

    slots: Tensor
    positions: Tensor


class Round:
    """A round of one shape and its memory: N requests, `columns` pages each, `width` drafts.

    All but the commit of a round may be done over and over: it changes nothing that they read.
    """

    def __init__(
        self, of: DeviceRounds, batch: int, columns: int, width: int, kv: PagedKVCache, scratch: SpecScratch, pool: Any
    ) -> None:
        self._of, self._kv, self._scratch, self._width = of, kv, scratch, width
        self._drafter, device = of.drafter_of(width), of.model.device

        def int64(value: int) -> Tensor:
            return torch.full((batch,), value, dtype=torch.int64, device=device)

        # Nobody's rows: one token on the spare page, nothing to generate.
        self._lengths, self._generated, self._remaining, self._newest = int64(1), int64(0), int64(0), int64(0)
        self._keys = int64(0)
        self._streams = Streams(self._keys, self._generated)
        self._draft_probs = of.draft_probs(batch, width, scratch)
        self._params = RowParams(*(torch.full((batch,), value, dtype=dtype, device=device) for value, dtype in _GREEDY))
        self._table = torch.full((batch, columns), kv.spare_page, dtype=torch.int32, device=device)
        self._row_start = torch.arange(batch, dtype=torch.int32, device=device) * (width + 1)
        self._offsets = torch.arange(of.rows_each(width), device=device)
        self._text = self._attention(self._table, width + 1, 1)
        self._blocks: AttentionBatch | None = None
        if self._drafter is not None:
            block = self._drafter.block_size
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
        if self._blocks is not None:
            batch = len(self._table)
            self._blocks.page_table.view(batch, -1, self._table.shape[1]).copy_(self._table[:, None])

    def launch(self) -> _Record:
        """One round; the record of it arrives on the host later."""
        output = self.run()
        if self._graph is None:
            return _Record(output, self._width, None)
        held = output.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return _Record(held, self._width, arrived)

    def run(self) -> Tensor:
        """One round that nobody waits for; see `_step`. On a GPU the next one overwrites what is returned."""
        if self._graph is None:
            return self._step(*self.plans(for_graph=False))
        self._graph.replay()
        return self._output

    def _capture(self, pool: Any) -> None:
        """On nobody's rows, which stand still. Once without a graph: libraries allocate at their first call."""
        plans = self.plans(for_graph=True)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(*plans)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with captured_into(self._graph, pool):
            self._output = self._step(*plans)

    def plans(self, *, for_graph: bool) -> tuple[AttentionPlan | None, AttentionPlan]:
        """Of the blocks, where something drafts, and of the text, for the next round."""
        backend, kv = self._of.backend, self._kv
        self._set_lengths()
        block_plan = None
        if self._drafter is not None and self._blocks is not None:
            block_plan = backend.plan_attention(self._blocks, self._drafter.attention_shape(kv), for_graph=for_graph)
        return block_plan, backend.plan_attention(self._text, self._of.model.attention_shape(kv), for_graph=for_graph)

    def _set_lengths(self) -> None:
        """What this round's rows see: the text, and the rows themselves."""
        before = self._lengths - 1
        self._text.kv_lens.copy_(before + (self._width + 1))
        if self._drafter is not None and self._blocks is not None:
            block = self._drafter.block_size
            self._blocks.kv_lens.view(-1, block).copy_((before + block)[:, None])

    def _step(self, block_plan: AttentionPlan | None, text_plan: AttentionPlan) -> Tensor:
        """Device work alone. Returns int64: [N, 2 * width + 4] (outputs, drafts, emitted, num_draft, tokens put out)
        and the refusal's bits."""
        places = self.lay_out()
        drafts = self.draft(places, block_plan)
        num_draft, accepted = self.accept(drafts, self.verify(places, drafts, text_plan))
        counts = self._commit(accepted)
        told = torch.stack([accepted.emitted.long(), num_draft.long(), counts], dim=1)
        assert accepted.refusal is not None  # of a fused backend
        rows = torch.cat([accepted.output_token_ids, drafts.token_ids, told], dim=1)
        return torch.cat([rows.view(-1), accepted.refusal.view(torch.int64)])

    def lay_out(self) -> Places:
        """Where this round's rows stand and what they see."""
        self._set_lengths()
        kv, positions = self._kv, (self._lengths - 1)[:, None] + self._offsets
        pages = self._table.gather(1, positions // kv.page_size)
        return Places(pages * kv.page_size + positions % kv.page_size, positions)

    def draft(self, places: Places, plan: AttentionPlan | None) -> BlockDrafts:
        """`width` drafts for each of the N requests."""
        drafter = self._drafter
        if drafter is None:
            return BlockDrafts(self._newest.new_empty(len(self._newest), 0), None, None)
        assert plan is not None  # of the blocks
        slots, positions = (column[:, : drafter.block_size].reshape(-1) for column in places)
        fed = drafter.block_token_ids(self._newest).view(-1)
        return drafter.draft_rows(fed, slots, positions, plan, self._kv, self._width, self._params, self._streams)

    def verify(self, places: Places, drafts: BlockDrafts, plan: AttentionPlan) -> Tensor:
        """Logits [N * (width + 1), vocab_size]."""
        model = self._of.model
        slots, positions = (column[:, : self._width + 1] for column in places)
        # Rows past a request's last draft may stand past the model's longest text.
        positions = positions.clamp(max=model.config.max_position - 1).reshape(-1)
        token_ids = torch.cat([self._newest[:, None], drafts.token_ids], dim=1).view(-1)
        hidden = model.layers_forward(token_ids, slots.reshape(-1), positions, plan, self._kv, follower=self._drafter)
        return model.head(hidden)

    def accept(self, drafts: BlockDrafts, logits: Tensor) -> tuple[Tensor, SpecAccept]:
        """How many drafts each request is offered, int32 [N], and what becomes of them."""
        num_draft = (self._remaining - 1).clamp(0, self._width).int()
        accepted = self._of.backend.accept_logits(
            logits,
            self._row_start,
            self._params,
            drafts.token_ids,
            num_draft,
            None if self._draft_probs is None else drafts.dense(self._draft_probs),
            self._streams,
            rule=self._of.rule,
            scratch=self._scratch,
        )
        if self._draft_probs is not None and drafts.candidates is not None:
            self._draft_probs.scatter_(2, drafts.candidates, 0.0)  # zeros again for the next round
        return num_draft, accepted

    def _commit(self, accepted: SpecAccept) -> Tensor:
        """Move on to the next round. Returns the tokens put out of each request, int64 [N]."""
        emitted = accepted.emitted.long()
        counts = (emitted + 1) * (self._remaining > 0)
        last = accepted.output_token_ids.gather(1, emitted[:, None])[:, 0]
        self._newest.copy_(torch.where(counts > 0, last, self._newest))
        self._lengths.add_(counts)
        self._generated.add_(counts)
        self._remaining.sub_(counts)
        return counts


_GREEDY = ((0.0, torch.float32), (0, torch.int32), (1.0, torch.float32), (0.0, torch.float32))
"""Parameters of nobody's rows, in the order of RowParams."""
