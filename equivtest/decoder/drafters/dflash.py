"""The block drafter: one pass over masks proposes a block, from hidden states of the target's layers.

See dflash_network.py for the network. Here its arithmetic runs on a kernel backend, as the target's does. Keys and
values of the context lie beside the target's in the same cache and are written in the same forward, for every token
that the target is fed: prompts share them, and what a rejection cuts off is cut off for both. Between steps the drafter
keeps nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from equivtest.decoder.drafters.base import StatelessDrafter
from equivtest.decoder.drafters.dflash_layers import MarkovHead
from equivtest.decoder.drafters.dflash_network import DFlashConfig
from equivtest.decoder.graphs import MAX_GRAPH_ROWS, GraphCache, GraphInputs, GraphShape
from equivtest.decoder.kv_cache import PagedKVCache, RaggedBatch
from equivtest.decoder.layers import LayerStack, WeightTaker
from equivtest.decoder.model import Model
from equivtest.decoder.request_table import RequestTable
from equivtest.decoder.stages import Drafts, Int64Array, StepInput
from equivtest.decoder.weights import load_weights, weights_sha256
from equivtest.errors import InvalidSetting, UnsupportedModel
from equivtest.kernels.contract import AttentionPlan, AttentionShape, BlockDrafts, RowParams, Streams
from equivtest.kernels.markov import markov_law


class DFlashCheckpoint(NamedTuple):
    """A drafter at rest."""

    config: DFlashConfig
    weights: Mapping[str, Tensor]
    """Names of a DFlashNetwork's state to tensors of any dtype."""
    label: str
    """How the record of a run names it."""
    sha256: str
    """Of the names and hashes of its files."""

    @classmethod
    def load(cls, folder: Path, label: str = "") -> DFlashCheckpoint:
        """Read a folder; label: default its name. Raises ModelUnavailable or UnsupportedModel."""
        config = DFlashConfig.from_json(folder)
        return cls(config, load_weights(folder), label or folder.name, weights_sha256(folder))


class DFlashDrafter(StatelessDrafter):
    """Fills a block behind each row's newest token and offers its first drafts.

    Without a Markov head a draft is the likeliest token of its place; with one, of its place behind the draft before.
    Or it is drawn there from the request's law over some candidates, which is handed on as q.

    The whole block is run however few drafts are asked for: the network knows no other.
    """

    name = "dflash"

    def __init__(self, checkpoint: DFlashCheckpoint, target: Model, *, draws: bool = False) -> None:
        """draws: draw drafts, which takes a Markov head. The chain rule keeps drawn drafts oftener, the match rule the
        likeliest.

        Raises UnsupportedModel for a drafter of another target, and for a missing, misshapen or left-over weight.
        """
        self.network = BlockNetwork(checkpoint, target, draws=draws)
        self.follower = self.on_device = self.network
        self._checkpoint = checkpoint
        self._width = self.network.block.num_drafts

    def start(self, table: RequestTable, *, max_batch: int, max_draft: int) -> None:
        self._width = min(max_draft, self.network.block.num_drafts)

    def describe(self) -> Mapping[str, object]:
        config = self.network.block
        return {
            "draft_model": self._checkpoint.label,
            "draft_model_sha256": self._checkpoint.sha256,
            "num_layers": config.num_layers,
            "block_size": config.block_size,
            "target_layer_ids": list(config.target_layer_ids),
            "anchor_first": config.anchor_first,
            "markov_head": config.markov_head,
            "drafts": "drawn" if self.network.draws else "likeliest",
        }

    def propose(self, step: StepInput) -> Drafts:
        num_draft = np.minimum(step.limits, self._width)
        rows = np.flatnonzero(num_draft)
        sequences = step.sequences[rows]
        batch = step.kv.extend(sequences, np.full(len(rows), self.network.block.block_size))
        on_device = torch.from_numpy(rows).to(step.params.temperature.device, non_blocking=True)
        streams = Streams(*(column.index_select(0, on_device) for column in step.streams))
        law = step.params.take(on_device)
        # As wide at every step, so that one graph serves them all; the propose stage cuts what no row may be offered.
        proposed = self.network.propose(step.last_token_ids[rows], batch, step.kv, self._width, law, streams)
        step.kv.truncate(sequences, step.lengths[rows] - 1)
        if len(rows) < step.batch:
            proposed = proposed.spread(on_device, step.batch)
        probs = None
        if proposed.probs is not None:
            like = step.scratch.target_probs
            probs = proposed.dense(like.new_zeros(step.batch, self._width, like.shape[-1]))
        return Drafts(proposed.token_ids, num_draft.astype(np.int32), probs)


class BlockNetwork:
    """A DFlashNetwork on a kernel backend, over the companion pages of the target's cache. A `Follower`.

    In float32 it computes what `DFlashNetwork` does up to rounding.
    """

    def __init__(self, checkpoint: DFlashCheckpoint, target: Model, *, draws: bool = False) -> None:
        """draws: see DFlashDrafter."""
        block = checkpoint.config
        _require_target(block, target, checkpoint.label)
        if draws and not block.markov_head:
            raise InvalidSetting("drafts", "drawn", f"{checkpoint.label} has no Markov head, and only such draw")
        self.block, self._target = block, target
        self.draws = draws
        self.backend, self.device = target.backend, target.device
        # A block may stand past the longest text by its own length.
        longest = target.config.max_position + block.block_size
        self.config = dataclasses.replace(block.as_model(), max_position=longest)
        taker = WeightTaker(checkpoint.label, checkpoint.weights, target.dtype, target.device)
        ops, size, dim = self.backend.layers, block.hidden_size, block.head_dim
        kv_heads = block.num_kv_heads
        self._combine = ops.linear(taker.take("fc.weight", (size, block.feature_size)))
        context_norm = taker.take("hidden_norm.weight", (size,))
        self._norm = taker.take("norm.weight", (size,))
        self._layers = LayerStack(self.config, taker, self.backend, prefix="layers")
        # Context makes no queries: each layer's keys and values are a matrix of their own.
        self._context_layers = []
        for prefix in (f"layers.{index}.self_attn" for index in range(block.num_layers)):
            key, value = (taker.take(f"{prefix}.{name}_proj.weight", (kv_heads * dim, size)) for name in "kv")
            key_norm = taker.take(f"{prefix}.k_norm.weight", (dim,)).repeat(kv_heads, 1)
            self._context_layers.append((ops.linear(torch.cat((key, value)), context_norm), key_norm))
        self._markov = _MarkovTable.of(block, taker, target) if block.markov_head else None
        taker.finish()
        graphs = self.device.type == "cuda" and self.backend.capabilities.graphs
        self._graphs = GraphCache(self) if graphs else None

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return self.block.target_layer_ids

    @property
    def block_size(self) -> int:
        return self.block.block_size

    @property
    def num_drafts(self) -> int:
        return self.block.num_drafts

    @property
    def lookahead(self) -> int:
        return max(self.block_size, self.num_drafts + 1)  # a block, or the target's rows for all its drafts

    def attention_shape(self, kv: PagedKVCache) -> AttentionShape:
        config = self.config
        return AttentionShape(
            config.num_heads, config.num_kv_heads, config.head_dim, kv.page_size, kv.pages.shape[1], self._target.dtype
        )

    def follow(self, features: Tensor, slots: Tensor, positions: Tensor, pages: Tensor) -> None:
        """Write the rows' keys and values as context."""
        ops, eps = self.backend.layers, self.config.rms_norm_eps
        context = ops.residual(ops.head(features, self._combine).to(features.dtype))
        for (weight, key_norm), layer_pages in zip(self._context_layers, pages, strict=True):
            heads = ops.normed_linear(context, eps, weight).view(len(slots), -1, self.config.head_dim)
            ops.rotate_and_store(heads, self._layers.rotary, positions, key_norm, eps, layer_pages, slots)

    @torch.inference_mode()
    def propose(
        self,
        anchors: Int64Array,  # [B]
        batch: RaggedBatch,  # the blocks' rows, block_size behind each context
        kv: PagedKVCache,
        width: int,
        law: RowParams,  # [B], on the device
        streams: Streams,  # [B], on the device
    ) -> BlockDrafts:
        """The first `width` drafts of each block, on the device."""
        num_blocks, size = len(anchors), self.block.block_size
        on_host = torch.from_numpy(anchors)
        fed, rows = self.block_token_ids(on_host).view(-1), each_row_by_itself(batch)
        if self._graphs is None or len(fed) > MAX_GRAPH_ROWS:
            on_device = rows.on(self.device)
            plan = self.backend.plan_attention(on_device.attention, self.attention_shape(kv))
            return self.draft_rows(
                fed.to(self.device), on_device.slots, on_device.positions, plan, kv, width, law, streams
            )

        def captured(inputs: GraphInputs, plans: Sequence[AttentionPlan]) -> Tensor:
            return self._states(inputs.token_ids, inputs.slots[0], inputs.positions[0], plans[0], kv, width)

        shape = GraphShape.of([rows], len(fed), group=size)
        states = self._graphs.replay((width,), shape, fed, [rows], kv, captured)[: num_blocks * width]
        return self._fill(states, on_host.to(self.device, non_blocking=True), law, streams)

    @torch.inference_mode()
    def place_states(self, anchors: Int64Array, batch: RaggedBatch, kv: PagedKVCache, width: int) -> Tensor:
        """Normed hidden states of the first `width` places of each block, [B, width, hidden_size]. See `propose`."""
        on_device = each_row_by_itself(batch).on(self.device)
        plan = self.backend.plan_attention(on_device.attention, self.attention_shape(kv))
        fed = self.block_token_ids(torch.from_numpy(anchors)).view(-1).to(self.device)
        states = self._states(fed, on_device.slots, on_device.positions, plan, kv, width)
        return states.view(len(anchors), width, -1)

    @torch.inference_mode()
    def place_laws(self, states: Tensor, previous: Tensor, opens: Tensor, law: RowParams, out: Tensor) -> Tensor:
        """The law that drafts are drawn from, over the vocabulary, written to `out` [N, vocab_size] and returned.

        states: [N, hidden_size] of `place_states`. previous: int64 [N], the token before each place. opens: bool [N],
        whether it is the first of its block. law: of N rows. For a drafter that draws.
        """
        assert self._markov is not None
        successors, opens = self._markov.successors, opens[:, None]
        gates = self.backend.layers.head(states, self._markov.gate).sigmoid_()
        fed = torch.where(opens, states + gates.to(states.dtype) * successors[previous], states)
        head, logits = self._target.head_weight, self._target.logits(fed)
        return markov_law(logits, gates.masked_fill(opens, 0), successors, head, law, previous, out)

    def block_token_ids(self, newest: Tensor) -> Tensor:
        masks = torch.full_like(newest, self.block.mask_token_id)[:, None]
        return torch.cat([newest[:, None], masks.expand(-1, self.block.block_size - 1)], dim=1)

    def draft_rows(
        self,
        token_ids: Tensor,
        slots: Tensor,
        positions: Tensor,
        plan: AttentionPlan,
        kv: PagedKVCache,
        width: int,
        law: RowParams,
        streams: Streams,
    ) -> BlockDrafts:
        """Device work alone, on whole blocks."""
        states = self._states(token_ids, slots, positions, plan, kv, width)
        return self._fill(states, token_ids.view(-1, self.block.block_size)[:, 0], law, streams)

    def _states(
        self, token_ids: Tensor, slots: Tensor, positions: Tensor, plan: AttentionPlan, kv: PagedKVCache, width: int
    ) -> Tensor:
        """Normed hidden states of the places to fill, [B * width, hidden_size]."""
        assert kv.companion_pages is not None  # the executor makes room for whatever follows
        ops = self.backend.layers
        hidden = ops.residual(self._target.embed(token_ids))
        for index, pages in enumerate(kv.companion_pages):
            hidden = self._layers.run(index, hidden, slots, positions, plan, pages)
        blocks = ops.rows(hidden).view(-1, self.block.block_size, self.block.hidden_size)
        predicting = blocks.narrow(1, self.block.first_draft_row, width).flatten(0, 1)
        return ops.rms_norm(ops.residual(predicting), self._norm, self.config.rms_norm_eps)

    def _fill(self, states: Tensor, anchors: Tensor, law: RowParams, streams: Streams) -> BlockDrafts:
        """Drafts of the places with these states, which may be written to. anchors: int64 [B]."""
        num_blocks = len(anchors)
        if self._markov is None:
            return BlockDrafts(self._target.logits(states).argmax(dim=-1).view(num_blocks, -1), None, None)
        ops, successors = self.backend.layers, self._markov.successors
        gates = ops.head(states, self._markov.gate).sigmoid_().view(num_blocks, -1, self.block.hidden_size)
        states.view(gates.shape)[:, 0] += gates[:, 0].to(states.dtype) * successors[anchors]
        logits = self._target.logits(states).view(*gates.shape[:2], self.block.vocab_size)
        drawn = (law, streams) if self.draws else (None, None)
        return ops.markov_drafts(logits, gates, successors, self._target.head_weight, *drawn)


class _MarkovTable(NamedTuple):
    """A `MarkovHead` laid out for decoding."""

    gate: Any
    """As `LayerOps.linear` made it."""
    successors: Tensor
    """[vocab_size, hidden_size], of every token."""

    @classmethod
    @torch.inference_mode()
    def of(cls, block: DFlashConfig, taker: WeightTaker, target: Model) -> _MarkovTable:
        head, size, device = MarkovHead(block.hidden_size, block.rms_norm_eps), block.hidden_size, target.device
        names = [name for name, _ in head.named_parameters()]
        weights = {name: taker.take(f"markov_head.{name}", tuple(head.state_dict()[name].shape)) for name in names}
        head.load_state_dict(weights)
        head.to(device, target.dtype)
        tokens = torch.arange(block.vocab_size, device=device)
        rows = [head.successors(target.embed(part)) for part in torch.split(tokens, _TABLE_ROWS)]
        return cls(target.backend.layers.linear(weights["gate_proj.weight"]), torch.cat(rows).view(-1, size))


_TABLE_ROWS = 8192
"""Tokens of the table made at a time: bounds the memory, not the result."""


def each_row_by_itself(batch: RaggedBatch) -> RaggedBatch:
    """The same rows, each as a sequence of its own that is as long as the whole: attention is causal in a sequence, and
    so every row sees all rows of its block."""
    counts = np.diff(batch.query_start)
    return dataclasses.replace(
        batch,
        page_table=np.repeat(batch.page_table, counts, axis=0),
        kv_lens=np.repeat(batch.kv_lens, counts),
        query_start=np.arange(len(batch.slots) + 1, dtype=np.int32),
    )


def _require_target(block: DFlashConfig, target: Model, label: str) -> None:
    config = target.config
    for name, own, needed in (
        ("hidden_size", block.hidden_size, config.hidden_size),
        ("vocab_size", block.vocab_size, config.vocab_size),
        ("num_target_layers", block.num_target_layers, config.num_layers),
    ):
        if own != needed:
            raise UnsupportedModel(label, f"{name} = {own}: it was trained for another target, whose is not {needed}")
