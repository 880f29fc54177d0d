"""A model's steps as CUDA graphs: one launch where a forward has hundreds.

A graph is captured once for every shape that occurs, with rows, sequences and page columns rounded up, and replayed
with new inputs in the same memory. What only fills it up belongs to nobody: rows past the last sequence's are written
to the cache's spare page, and sequences past the last are empty.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from equivtest.decoder.follower import Follower
from equivtest.decoder.kv_cache import PagedKVCache, RaggedBatch
from equivtest.kernels.contract import AttentionBatch, AttentionPlan, AttentionShape, HostBatch, KernelBackend

if TYPE_CHECKING:
    from equivtest.decoder.model import Model

MAX_GRAPH_ROWS = 8192
"""Forwards of more rows keep the device busy without a graph."""
MAX_GRAPHS = 128
"""Of one owner. The one that was not used for longest makes room: each holds its logits, up to a gigabyte."""
_ALIGNMENT = 16


class GraphOwner(Protocol):
    """Whose forwards the graphs hold."""

    backend: KernelBackend
    device: torch.device

    def attention_shape(self, kv: PagedKVCache) -> AttentionShape: ...


Captured = Callable[["GraphInputs", Sequence[AttentionPlan]], Tensor]
"""Device work on a graph's inputs, with a plan for each batch."""


class GraphCache:
    """The graphs of one owner by what they do and for which shape. They hold a cache's memory: with another cache they
    are captured anew."""

    def __init__(self, owner: GraphOwner) -> None:
        self._owner = owner
        self._graphs: dict[tuple[object, ...], _Graph] = {}
        self._kv: PagedKVCache | None = None
        self._pool: Any = None

    def replay(
        self,
        what: tuple[object, ...],
        shape: GraphShape,
        token_ids: Tensor,  # int64 [num_rows], on the host or the device
        batches: Sequence[RaggedBatch],
        kv: PagedKVCache,
        captured: Captured,
    ) -> Tensor:
        """What `captured` returns for these inputs, in memory that the next replay overwrites.

        what: names `captured` among those of the owner.
        """
        if self._kv is not kv:
            self._graphs.clear()
            self._kv, self._pool = kv, torch.cuda.graph_pool_handle()
        key = (shape, *what)
        graph = self._graphs.pop(key, None)
        if graph is None:
            if len(self._graphs) == MAX_GRAPHS:
                torch.cuda.synchronize()  # it may still be running
                del self._graphs[next(iter(self._graphs))]
            graph = _Graph(self._owner, kv, shape, captured, self._pool)
        self._graphs[key] = graph  # the last used comes last
        return graph.replay(token_ids, batches)


class StepGraphs:
    """The graphs of one model."""

    def __init__(self, model: Model) -> None:
        self._model, self._graphs = model, GraphCache(model)

    def logits(
        self, token_ids: Tensor, batch: RaggedBatch, kv: PagedKVCache, *, follower: Follower | None = None
    ) -> Tensor:
        """Logits [num_rows, vocab_size] of a forward of these rows, in memory that the next replay overwrites.

        token_ids: int64 [num_rows], on the host or the device.
        """
        model, num_rows = self._model, len(batch.slots)

        def captured(inputs: GraphInputs, plans: Sequence[AttentionPlan]) -> Tensor:
            slots, positions = inputs.slots[0], inputs.positions[0]
            hidden = model.layers_forward(inputs.token_ids, slots, positions, plans[0], kv, follower=follower)
            return model.head(hidden)

        shape = GraphShape.of([batch], num_rows)
        return self._graphs.replay(("logits", follower), shape, token_ids, [batch], kv, captured)[:num_rows]

    def greedy(
        self, token_ids: Tensor, batches: Sequence[RaggedBatch], kv: PagedKVCache, *, num_layers: int | None = None
    ) -> Tensor:
        """The model's own greedy continuation, one token a row and batch: int64 [num_rows, len(batches)].

        token_ids: int64 [num_rows], the last token of each row; the i-th batch feeds what the one before it gave.
        """
        model, num_rows = self._model, len(batches[0].slots)

        def captured(inputs: GraphInputs, plans: Sequence[AttentionPlan]) -> Tensor:
            fed, columns = inputs.token_ids, []
            for index, plan in enumerate(plans):
                hidden = model.layers_forward(
                    fed, inputs.slots[index], inputs.positions[index], plan, kv, num_layers=num_layers
                )
                fed = model.head(hidden).argmax(dim=-1)
                columns.append(fed)
            return torch.stack(columns, dim=1)

        shape = GraphShape.of(batches, num_rows)
        # A copy: graphs share their memory, and the drafts are still needed when the next one runs.
        return self._graphs.replay(("greedy", num_layers), shape, token_ids, batches, kv, captured)[:num_rows].clone()


class GraphShape(NamedTuple):
    """What a graph is captured for, each rounded up."""

    num_sequences: int
    num_rows: int
    num_columns: int
    num_batches: int

    @classmethod
    def of(cls, batches: Sequence[RaggedBatch], num_rows: int, *, group: int = 1) -> GraphShape:
        """group: sequences that only come together."""
        num_sequences, num_columns = batches[0].page_table.shape
        sequences = rounded_up(num_sequences // group) * group
        rows_each = -(-num_rows // max(1, num_sequences))
        return cls(sequences, max(sequences * rows_each, num_rows), 1 << (num_columns - 1).bit_length(), len(batches))


def rounded_up(count: int) -> int:
    """The batch size of the graph that serves `count` sequences: at most a third of it is idle, from 4 on."""
    power = 1 << max(0, count - 1).bit_length()
    return 3 * power // 4 if power >= 8 and count <= 3 * power // 4 else power


class GraphInputs:
    """The inputs of a graph: one block of pinned memory, its twin on the device, and views of both by name."""

    def __init__(self, shape: GraphShape, device: torch.device) -> None:
        sequences, rows, columns, batches = shape
        fields = {
            "token_ids": (np.int64, (rows,)),
            "slots": (np.int64, (batches, rows)),
            "positions": (np.int64, (batches, rows)),
            "kv_lens": (np.int32, (batches, sequences)),
            "query_start": (np.int32, (batches, sequences + 1)),
            "page_table": (np.int32, (sequences, columns)),
        }
        offsets, size = {}, 0
        for name, (dtype, extent) in fields.items():
            offsets[name] = size
            size += -(-int(np.prod(extent)) * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
        self._pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self.host: dict[str, npt.NDArray[np.generic]] = {}
        on_device: dict[str, Tensor] = {}
        for name, (dtype, extent) in fields.items():
            stop = offsets[name] + int(np.prod(extent)) * np.dtype(dtype).itemsize
            kind = torch.int64 if dtype is np.int64 else torch.int32
            part = slice(offsets[name], stop)
            self.host[name] = self._pinned[part].view(kind).view(extent).numpy()
            on_device[name] = self._device[part].view(kind).view(extent)
        self.token_ids, self.slots, self.positions = (on_device[n] for n in ("token_ids", "slots", "positions"))
        self._attention = (on_device["page_table"], on_device["kv_lens"], on_device["query_start"])
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._batches = [self._batch(index) for index in range(batches)]

    def attention(self, index: int) -> AttentionBatch:
        """What the index-th batch attends to: the same object at every call, with other values."""
        return self._batches[index]

    def _batch(self, index: int) -> AttentionBatch:
        table, kv_lens, query_start = self._attention
        host = HostBatch(self.host["page_table"], self.host["kv_lens"][index], self.host["query_start"][index])  # type: ignore[arg-type]
        return AttentionBatch(table, kv_lens[index], query_start[index], host)

    def fill(self, token_ids: Tensor, batches: Sequence[RaggedBatch], spare_slot: int) -> None:
        """Take new inputs; what is left over belongs to nobody."""
        self._copied.synchronize()  # the block may still be on its way from the last time
        host = self.host
        host["page_table"].fill(0)
        num_sequences, num_columns = batches[0].page_table.shape
        host["page_table"][:num_sequences, :num_columns] = batches[0].page_table
        for index, batch in enumerate(batches):
            num_rows = len(batch.slots)
            host["slots"][index, :num_rows], host["slots"][index, num_rows:] = batch.slots, spare_slot
            host["positions"][index, :num_rows], host["positions"][index, num_rows:] = batch.positions, 0
            host["kv_lens"][index, :num_sequences], host["kv_lens"][index, num_sequences:] = batch.kv_lens, 0
            host["query_start"][index, : num_sequences + 1] = batch.query_start
            host["query_start"][index, num_sequences + 1 :] = batch.query_start[-1]
        on_host = token_ids.device.type == "cpu"
        if on_host:
            host["token_ids"][: len(token_ids)] = token_ids.numpy()
        self._device.copy_(self._pinned, non_blocking=True)
        self._copied.record()
        if not on_host:
            self.token_ids[: len(token_ids)].copy_(token_ids)


@contextmanager
def captured_into(graph: Any, pool: Any = None) -> Iterator[None]:
    """Work in here becomes the graph, a torch.cuda.CUDAGraph.

    Garbage is not collected meanwhile: another graph among it would be destroyed, which ends a capture with an error.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    finally:
        if collects:
            gc.enable()


def _fullest(shape: GraphShape, kv: PagedKVCache) -> RaggedBatch:
    """A batch that fills the shape, all of it in the spare page: backends plan for it what no later batch outgrows."""
    rows_each = np.full(shape.num_sequences, shape.num_rows // shape.num_sequences)
    rows_each[: shape.num_rows % shape.num_sequences] += 1
    longest = shape.num_columns * kv.page_size
    return RaggedBatch(
        page_table=np.full((shape.num_sequences, shape.num_columns), kv.spare_page, np.int32),
        kv_lens=np.full(shape.num_sequences, max(longest, int(rows_each.max())), np.int32),
        query_start=np.concatenate([[0], np.cumsum(rows_each)]).astype(np.int32),
        slots=np.full(shape.num_rows, kv.spare_page * kv.page_size),
        positions=np.zeros(shape.num_rows, np.int64),
    )


class _Graph:
    """One captured graph."""

    def __init__(
        self,
        owner: GraphOwner,
        kv: PagedKVCache,
        shape: GraphShape,
        captured: Captured,
        pool: Any,
    ) -> None:
        self._backend, self._shape = owner.backend, owner.attention_shape(kv)
        self._spare_slot = kv.spare_page * kv.page_size
        self._inputs = GraphInputs(shape, owner.device)
        fullest = [_fullest(shape, kv)] * shape.num_batches
        self._inputs.fill(torch.zeros(shape.num_rows, dtype=torch.int64), fullest, self._spare_slot)
        self._plans = [
            self._backend.plan_attention(self._inputs.attention(index), self._shape, for_graph=True)
            for index in range(shape.num_batches)
        ]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # once without a graph: libraries allocate what they need at their first call
            captured(self._inputs, self._plans)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with captured_into(self._graph, pool):
            self._output = captured(self._inputs, self._plans)

    def replay(self, token_ids: Tensor, batches: Sequence[RaggedBatch]) -> Tensor:
        self._inputs.fill(token_ids, batches, self._spare_slot)
        for index, plan in enumerate(self._plans):
            self._plans[index] = self._backend.plan_attention(self._inputs.attention(index), self._shape, reuse=plan)
        self._graph.replay()
        return self._output
