"""The forward pass of the Llama and Qwen3 architectures over a paged KV cache.

One ragged forward serves prefill, decode and verification: any number of new rows for each sequence. The arithmetic and
its order follow Hugging Face transformers (half-rotation RoPE, RMSNorm in float32 and cast back before the weight), so
that logits agree on the same weights.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from equivtest.decoder.config import ModelConfig
from equivtest.decoder.follower import Follower
from equivtest.decoder.graphs import MAX_GRAPH_ROWS, StepGraphs
from equivtest.decoder.kv_cache import IntArray, PagedKVCache, RaggedBatch
from equivtest.decoder.layers import LayerStack, WeightTaker
from equivtest.errors import InvalidSetting
from equivtest.kernels.contract import AttentionPlan, AttentionShape, KernelBackend, Residual


class Model:
    """A decoder-only transformer with its weights on one device in one dtype.

    weights: Hugging Face names to tensors of any dtype. Raises UnsupportedModel for a missing, left-over or
    misshapen weight.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        backend: KernelBackend,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.backend, self.dtype, self.device = config, backend, dtype, torch.device(device)
        taker = WeightTaker(config.architecture, weights, dtype, self.device)
        self._embedding = taker.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        ops = backend.layers
        self._layers = LayerStack(config, taker, backend, prefix="model.layers")
        self._norm = taker.take("model.norm.weight", (config.hidden_size,))
        if config.tied_embeddings:
            taker.ignore("lm_head.weight")
            self.head_weight = self._embedding
        else:
            self.head_weight = taker.take("lm_head.weight", (config.vocab_size, config.hidden_size))
        self._head = ops.linear(self.head_weight)
        taker.finish()
        self._graphs = self._new_graphs()

    def first_layers(self, num_layers: int) -> Model:
        """The model that ends after so many layers, with this one's embedding, norm and head; weights are shared.

        Raises InvalidSetting unless 1 <= num_layers <= the model's.
        """
        self._require_depth(num_layers)
        part = copy.copy(self)
        part.config = dataclasses.replace(self.config, num_layers=num_layers)
        part._graphs = part._new_graphs()
        return part

    def _new_graphs(self) -> StepGraphs | None:
        return StepGraphs(self) if self.device.type == "cuda" and self.backend.capabilities.graphs else None

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,  # int64 [num_rows], on the device
        batch: RaggedBatch,
        kv: PagedKVCache,
        *,
        num_layers: int | None = None,
        follower: Follower | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [num_rows, hidden_size] in the model's dtype.

        Writes the rows' keys and values into `kv.pages`. With `num_layers` only the first layers run (early exit) and
        only their keys and values are written. follower: what reads along.
        """
        rows = batch.on(self.device)
        plan = self.backend.plan_attention(rows.attention, self.attention_shape(kv))
        if token_ids.shape != rows.slots.shape:
            raise InvalidSetting("token_ids", tuple(token_ids.shape), f"must have shape {list(rows.slots.shape)}")
        hidden = self.layers_forward(
            token_ids, rows.slots, rows.positions, plan, kv, num_layers=num_layers, follower=follower
        )
        return self.backend.layers.rms_norm(hidden, self._norm, self.config.rms_norm_eps)

    @torch.inference_mode()
    def step_logits(
        self,
        token_ids: Tensor,  # int64 [num_rows], on the host or the device
        batch: RaggedBatch,
        kv: PagedKVCache,
        *,
        only: IntArray | None = None,
        follower: Follower | None = None,
    ) -> Tensor:
        """Logits [num_rows, vocab_size] of a forward: one step of decoding, of a shape that will come again.

        only: the rows whose logits are wanted. follower: what reads along. On a CUDA device it is a graph, and the
        logits are in its memory: the next step of the same shape overwrites them.
        """
        rows = None if only is None else torch.from_numpy(only).to(self.device)
        if self._graphs is not None and len(token_ids) <= MAX_GRAPH_ROWS:
            logits = self._graphs.logits(token_ids, batch, kv, follower=follower)
            return logits if rows is None else logits.index_select(0, rows)
        hidden = self.forward(token_ids.to(self.device), batch, kv, follower=follower)
        return self.logits(hidden if rows is None else hidden.index_select(0, rows))

    @torch.inference_mode()
    def greedy(
        self,
        token_ids: Tensor,  # int64 [B]
        batches: Sequence[RaggedBatch],  # K of B rows each
        kv: PagedKVCache,
        *,
        num_layers: int | None = None,
    ) -> Tensor:
        """The greedy continuation by K tokens: int64 [B, K] on the device; every batch feeds what the last one gave."""
        if self._graphs is not None and len(token_ids) <= MAX_GRAPH_ROWS:
            return self._graphs.greedy(token_ids, batches, kv, num_layers=num_layers)
        fed, columns = token_ids.to(self.device), []
        for batch in batches:
            fed = self.logits(self.forward(fed, batch, kv, num_layers=num_layers)).argmax(dim=-1)
            columns.append(fed)
        return torch.stack(columns, dim=1)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states [num_rows, hidden_size] of `forward`: [num_rows, vocab_size], in the model's dtype or
        in float32, as the backend has it."""
        return self.backend.layers.head(hidden, self._head)

    def attention_shape(self, kv: PagedKVCache) -> AttentionShape:
        """What the backend needs to know to plan attention over `kv`."""
        config = self.config
        return AttentionShape(
            config.num_heads, config.num_kv_heads, config.head_dim, kv.page_size, kv.pages.shape[1], self.dtype
        )

    def layers_forward(
        self,
        token_ids: Tensor,  # int64 [num_rows]
        slots: Tensor,  # int64 [num_rows], see RaggedBatch
        positions: Tensor,  # int64 [num_rows]
        plan: AttentionPlan,
        kv: PagedKVCache,
        *,
        num_layers: int | None = None,
        follower: Follower | None = None,
    ) -> Residual:
        """Hidden states before the final norm, [num_rows, hidden_size].

        Device work alone, so that a graph can hold it.
        """
        depth = self.config.num_layers if num_layers is None else num_layers
        self._require_depth(depth)
        rows, ops = self.embed(token_ids), self.backend.layers
        features = None if follower is None else _Features(follower, rows)
        hidden = ops.residual(rows)
        for index, pages in enumerate(kv.pages[:depth]):
            hidden = self._layers.run(index, hidden, slots, positions, plan, pages)
            if features is not None:
                features.take(index, ops.rows(hidden))
        if features is not None:
            features.hand_over(slots, positions, kv)
        return hidden

    def embed(self, token_ids: Tensor) -> Tensor:
        """The embedding of tokens (int64 [num_rows], on the device): [num_rows, hidden_size]."""
        return self._embedding.index_select(0, token_ids)

    def head(self, hidden: Residual) -> Tensor:
        """Logits [num_rows, vocab_size] of what `layers_forward` returns."""
        ops = self.backend.layers
        return ops.head(ops.rms_norm(hidden, self._norm, self.config.rms_norm_eps), self._head)

    def _require_depth(self, num_layers: int) -> None:
        if not 0 < num_layers <= self.config.num_layers:
            raise InvalidSetting("num_layers", num_layers, f"must be in 1..{self.config.num_layers}")


class _Features:
    """The outputs of a follower's layers, collected on the way: [num_rows, len(layer_ids) * hidden_size]."""

    def __init__(self, follower: Follower, like: Tensor) -> None:
        """like: [num_rows, hidden_size] of the forward's rows."""
        self._follower, self._size = follower, like.shape[1]
        self._columns = {layer: column for column, layer in enumerate(follower.layer_ids)}
        self._features = like.new_empty(len(like), len(self._columns) * self._size)

    def take(self, layer: int, rows: Tensor) -> None:
        """Copied: the next layer may write to `rows`."""
        if layer in self._columns:
            self._features.narrow(1, self._columns[layer] * self._size, self._size).copy_(rows)

    def hand_over(self, slots: Tensor, positions: Tensor, kv: PagedKVCache) -> None:
        if kv.companion_pages is None:
            message = "a follower needs a cache that has pages for it"
            raise RuntimeError(message)
        self._follower.follow(self._features, slots, positions, kv.companion_pages)
